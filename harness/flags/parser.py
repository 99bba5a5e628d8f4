"""The parser: from a command line and a file of flags to the settings. Nothing heavy is imported here, so that --help
and a wrong flag answer at once."""

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
from harness.flags.settings import ASSETS, Settings, is_local

EXAMPLES = """examples:
  train_fsdp.py --demo                                                                # all embedded, a minute
  train_fsdp.py --demo --dataset corpus.txt --eval-interval 100                       # the same on a text of yours
  train_fsdp.py --plan --plan-gpus 8 --plan-gpu B200 --model llama3.1-8b              # will it fit, how fast; no GPU
  torchrun --nproc_per_node=8 train_fsdp.py --model llama3.1-8b --log-with wandb      # all GPUs of a node
  torchrun --nproc_per_node=8 train_fsdp.py --checkpoint-interval 500 --resume auto   # goes on after a kill
  train_fsdp.py --config outputs/tales/config.json --lr 1e-4                          # that run, but for one flag
"""


class Parser(argparse.ArgumentParser):
    origin = ""  # what is being read, where it is not the command line
    as_json = False  # whether stdout is to have a JSON object, of an error too

    def error(self, message: str):
        """Ends the process with 2 and one line, where argparse would print its usage first. One rank says it."""
        if int(os.environ.get("RANK", 0)):
            time.sleep(3)  # the launcher ends the other ranks when the first one leaves
            sys.exit(2)
        said = one_line(f"{self.prog}: error: {self.origin}{message.removeprefix('argument ')}")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from harness.base.console import record_error

            record_error(said)
        if self.as_json:
            from harness.base.console import tell_json

            tell_json(said)
        self.exit(2, f"{said}\n")

    def parse_args(self, words: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(words)
        for word in unknown[:1]:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{word}: it stands behind no flag; --help lists them")
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
    """What argparse has to know of a flag."""
    options = {"default": field.default} | field.metadata
    bounds, metavar = (options.pop("least", None), options.pop("below", math.inf)), field.name.split("_")[-1].upper()
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # all but None
        hint = typing.get_args(hint)[0]
    if "type" in options:
        return {"metavar": metavar} | options
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction if field.default is not False else "store_true"}
    if choices := typing.get_args(hint):
        return options | {"choices": choices, "type": type(choices[0])}
    return {"metavar": metavar} | options | {"type": number(hint, *bounds) if hint in (int, float) else text}


def make_parser() -> Parser:
    parser = Parser(
        prog="train_fsdp.py",
        usage="%(prog)s [flags]",
        description="Train a causal language model with FSDP2: python, torchrun or accelerate launch, then this file.",
        epilog=EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=versions.Show, nargs=0, help="of this program and of what it stands on")
    group, hints = parser, typing.get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        if "help" in field.metadata:
            options = argument(field, hints[field.name])
            if title := options.pop("group", None):
                group = parser.add_argument_group(title)
            group.add_argument(f"--{field.name.replace('_', '-')}", **options)
    return parser


def parse_args(argv: list[str] | None = None) -> Settings:
    """The settings of a command line; a wrong one ends the process with a line that names the flag."""
    parser = make_parser()
    parser.as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    argv = [parser.hyphenated(word) for word in (sys.argv[1:] if argv is None else argv)]
    early = Parser(parser.prog, add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=path)
    named, argv = early.parse_known_args(argv)
    if named.config:
        parser.origin = f"--config {named.config}: "
        try:
            words = read_flags(named.config, parser.flags(), dataclasses.fields(Settings))
        except OSError as error:
            parser.error(error.strerror)
        except ValueError as error:
            parser.error(str(error))
        parser.parse_args(words)  # its errors name the file
        fields_given = {name for name in given(argv) if name != "demo"}
        parser.origin, argv = "", [*without(words, *fields_given), *argv]
    if "--demo" in argv:
        parser.set_defaults(**json.loads((ASSETS / "demo" / "recipe.json").read_text(encoding="utf-8")))
    args = parser.parse_args(argv)
    if args.num_steps == 0 and args.resume not in ("none", "auto"):  # what the model was stands in its checkpoint
        of_data = "--dataset" not in {word.partition("=")[0] for word in argv}
        parser.set_defaults(**flags_of_checkpoint(args.resume, args.eval_interval > 0, of_data), compile=False)
        args = parser.parse_args(argv)
    if args.dataset_split is None:
        args.dataset_split = "train" if is_local(args.dataset) or args.streaming else "train[:5%]"
    if args.fp8_recipe is None and args.precision == "fp8":
        args.fp8_recipe = "tensorwise"
    if args.warmup_steps is None:
        args.warmup_steps = 0 if args.lr_scheduler == "constant" else args.num_steps // 20
    if args.demo and args.dataset != "demo" and "sample_prompt" not in given(argv):
        args.sample_prompt = None  # the demo's prompt is that of its stories; a text of the user's own has its own
    args.sample_prompt = tuple(args.sample_prompt) if args.sample_prompt else None
    args.betas, args.config = tuple(args.betas), named.config
    del args.version
    settings = Settings(**vars(args), given_accumulation=args.gradient_accumulation_steps, argv=tuple(argv))
    if problem := contradiction(settings) or gpu_names.wrong_plan(settings):
        parser.error(problem + f" (with the flags of {named.config})" * bool(named.config))
    return settings


def given_twice(argv: list[str]) -> Iterator[str]:
    """A warning for each flag that stands in a command line with several values, of which the last counts."""
    parser, values, current = make_parser(), {}, None
    flags = parser.flags()
    for word in map(parser.hyphenated, argv):
        name, _, value = word.partition("=")
        if name in flags:
            current = [name if flags[name].nargs == 0 else value]
            values.setdefault(flags[name].dest, []).append(current)
        elif current is not None:
            current.append(word)
    for field, words in values.items():
        texts = [" ".join(filter(None, each)) for each in words]
        if len(set(texts)) > 1 and field != "sample_prompt":
            flag = f"--{field.replace('_', '-')}"
            yield f"{flag}: it stands there {len(texts)} times, {one_line(', '.join(texts))}; the last one counts"


def warn(settings: Settings) -> None:
    """Says, on rank 0, what was asked for and has no effect. `sys.argv` is the command line."""
    for warning in (*given_twice(sys.argv[1:]), *without_effect(settings), *not_followed(settings)):
        if not int(os.environ.get("RANK", 0)):
            print(f"train_fsdp.py: warning: {warning}", file=sys.stderr, flush=True)
