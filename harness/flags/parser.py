"""The parser: from a command line and a file of flags to the settings. Imports nothing heavy, so that --help and a
wrong flag answer at once."""

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import time
import types
import typing
from collections.abc import Iterator

from harness.base import gpu_names, versions
from harness.base.text import one_line
from harness.flags.commands import given, without
from harness.flags.flag_files import describe_unknown, read_flags
from harness.flags.flag_types import number, path, text
from harness.flags.resume import flags_of_checkpoint
from harness.flags.rules import contradiction, not_followed, without_effect
from harness.flags.settings import ASSETS, Settings, default_warmup, is_local

LENGTHS = ("num_steps", "num_tokens")  # of which a run has one
EXAMPLES = """examples:
  train_fsdp.py --demo                                                                # all embedded, a minute
  train_fsdp.py --demo --dataset corpus.txt --eval-interval 100                       # the same on a text of yours
  train_fsdp.py --plan --plan-gpus 8 --plan-gpu B200 --model llama3.1-8b              # will it fit, how fast; no GPU
  torchrun --nproc_per_node=8 train_fsdp.py --model llama3.1-8b --log-with wandb      # all GPUs of a node
  torchrun --nproc_per_node=8 train_fsdp.py --checkpoint-interval 500 --resume auto   # goes on after a kill
  train_fsdp.py --config outputs/tales/config.json --lr 1e-4                          # that run, but for one flag
"""


class Parser(argparse.ArgumentParser):
    origin = ""  # the file whose flags are parsed, as the beginning of an error; empty for the command line
    as_json = False  # whether an error goes to stdout too, as a JSON object

    def error(self, message: str):
        """Ends the process with 2 and one line, by rank 0; argparse would print its usage first."""
        if int(os.environ.get("RANK", 0)):
            time.sleep(3)  # the launcher ends the other ranks when the first one leaves
            sys.exit(2)
        line = one_line(f"{self.prog}: error: {self.origin}{message.removeprefix('argument ')}")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from harness.base.console import record_error

            record_error(line)
        if self.as_json:
            from harness.base.console import tell_json

            tell_json(line)
        self.exit(2, f"{line}\n")

    def parse_args(self, words: list[str]) -> argparse.Namespace:  # type: ignore[override]  # one of its two forms
        args, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{unknown[0]}: it stands behind no flag; --help lists them")
            self.error(f"{name}: {describe_unknown(name, self.flags())}")
        return args

    def flags(self) -> dict[str, argparse.Action]:
        return self._option_string_actions

    def hyphenated(self, word: str) -> str:
        """A flag that was given with underscores as it is written here; any other word as it is."""
        name, equals, value = word.partition("=")
        hyphens = name.replace("_", "-")
        return hyphens + equals + value if hyphens in self.flags() else word


def argument(field: dataclasses.Field, hint) -> dict:
    """The options of argparse for a flag, from its field of the settings and the type of that field."""
    options: dict[str, typing.Any] = {"default": field.default} | field.metadata
    least, below = options.pop("least", None), options.pop("below", math.inf)
    metavar = {"metavar": field.name.split("_")[-1].upper()}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # the other one is None
        hint = typing.get_args(hint)[0]
    if "type" in options:
        return metavar | options
    if hint is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        return options | {"action": action}
    if choices := typing.get_args(hint):
        return options | {"choices": choices, "type": type(choices[0])}
    if hint in (int, float):
        return metavar | options | {"type": number(hint, least, below)}
    return metavar | options | {"type": text}


def make_parser() -> Parser:
    """The parser of the command line: a flag for each field of `Settings` that has a help text, in its groups."""
    parser = Parser(
        prog="train_fsdp.py",
        usage="%(prog)s [flags]",
        description="Train a causal language model with FSDP2: python, torchrun or accelerate launch, then this file.",
        epilog=EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=versions.Show, nargs=0, help="of this program and of what it stands on")
    group: typing.Any = parser  # or a group of it
    hints = typing.get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        if "help" in field.metadata:
            options = argument(field, hints[field.name])
            if title := options.pop("group", None):
                group = parser.add_argument_group(title)
            group.add_argument(f"--{field.name.replace('_', '-')}", **options)
    return parser


def parse_args(argv: list[str] | None = None) -> Settings:
    """The settings of a command line, by default this process's. A wrong one ends the process with a line that names
    the flag."""
    if argv is None:
        argv = sys.argv[1:]
    parser = make_parser()
    parser.as_json = "--json" in argv
    argv = [parser.hyphenated(word) for word in argv]
    early = Parser(parser.prog, add_help=False, allow_abbrev=False)
    early.as_json = parser.as_json
    early.add_argument("--config", type=path)
    named, argv = early.parse_known_args(argv)
    if named.config:
        parser.origin = f"--config {named.config}: "
        try:
            words = read_flags(named.config, parser.flags())
        except OSError as error:
            parser.error(error.strerror)
        except ValueError as error:
            parser.error(str(error))
        parser.parse_args(words)  # its errors name the file
        fields_given = {name for name in given(argv) if name != "demo"}
        if fields_given & {*LENGTHS}:
            fields_given |= {*LENGTHS}
        parser.origin, argv = "", [*without(words, *fields_given), *argv]
    if "--demo" in argv:
        parser.set_defaults(**json.loads((ASSETS / "demo" / "recipe.json").read_text(encoding="utf-8")))
    args = parser.parse_args(argv)
    if given(argv) >= {*LENGTHS}:
        where = f" (with the flags of {named.config})" if named.config else ""
        parser.error(f"--num-tokens: --num-steps is given too; leave out one of them{where}")
    if (args.num_steps == 0 or args.show_samples) and args.resume not in ("none", "auto"):
        # the checkpoint has the flags of its model
        dataset = args.dataset if "dataset" in given(argv) else None
        evaluates = args.eval_interval > 0
        averages = evaluates or args.export_weights == "ema"
        flags = flags_of_checkpoint(args.resume, evaluates, dataset, bool(args.show_samples), averages)
        parser.set_defaults(**flags, compile=False)
        args = parser.parse_args(argv)
    if args.num_tokens:
        args.num_steps = args.num_tokens  # an upper bound, until `resolve` knows how many tokens a step has
    if args.dataset_split is None and isinstance(args.dataset, str):  # each of several has its own default
        args.dataset_split = "train" if is_local(args.dataset) or args.streaming else "train[:5%]"
    if args.fp8_recipe is None and args.precision == "fp8":
        args.fp8_recipe = "tensorwise"
    if args.warmup_steps is None:
        args.warmup_steps = default_warmup(args.lr_scheduler, args.num_steps)
    if args.demo and args.dataset != "demo" and "sample_prompt" not in given(argv):
        args.sample_prompt = None  # the demo's prompt is that of its stories; a text of the user's own has its own
    args.sample_prompt = tuple(args.sample_prompt) if args.sample_prompt else None
    args.mixture_stage = tuple(args.mixture_stage) if args.mixture_stage else None
    args.betas, args.config = tuple(args.betas), named.config
    del args.version
    settings = Settings(**vars(args), given_accumulation=args.gradient_accumulation_steps, argv=tuple(argv))
    problem = contradiction(settings) or gpu_names.wrong_plan(settings)
    if problem and named.config:
        parser.error(f"{problem} (with the flags of {named.config})")
    if problem:
        parser.error(problem)
    return settings


def record_flags(settings: Settings) -> dict[str, dict]:
    """The flags of a run for its config.json and its checkpoints: `given`, those that the command line and --config
    gave, with the values that they had there; `flags`, all of them as `settings` has them."""
    values = vars(make_parser().parse_args([*settings.argv]))
    names = given(settings.argv)
    flags = dataclasses.asdict(settings)
    del flags["argv"]
    return {"given": {name: value for name, value in values.items() if name in names}, "flags": flags}


def given_twice(argv: list[str]) -> Iterator[str]:
    """A warning for each flag that a command line gives several values, of which the last counts."""
    parser = make_parser()
    flags = parser.flags()
    values_of: dict[str, list[list[str]]] = {}  # by field, the words of each of its values
    current = None
    for word in map(parser.hyphenated, argv):
        name, _, value = word.partition("=")
        if name in flags:
            current = [name if flags[name].nargs == 0 else value]
            values_of.setdefault(flags[name].dest, []).append(current)
        elif current is not None:
            current.append(word)
    for field, values in values_of.items():
        texts = [" ".join(filter(None, value)) for value in values]
        if len(set(texts)) > 1 and field not in ("sample_prompt", "mixture_stage"):
            flag = f"--{field.replace('_', '-')}"
            yield f"{flag}: it stands there {len(texts)} times, {one_line(', '.join(texts))}; the last one counts"


def warn(settings: Settings) -> None:
    """Warns on rank 0 of flags in this process's command line that have no effect."""
    is_first_rank = int(os.environ.get("RANK", 0)) == 0
    for warning in (*given_twice(sys.argv[1:]), *without_effect(settings), *not_followed(settings)):
        if is_first_rank:
            print(f"train_fsdp.py: warning: {warning}", file=sys.stderr, flush=True)
