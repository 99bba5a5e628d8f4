"""The parser: from a command line and a file of flags to the settings. Imports nothing heavy, so that --help and a
wrong flag answer at once."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import types
import typing

from harness import base
from harness.flags.checkpoints import flags_of_adapters, flags_of_checkpoint
from harness.flags.files import read_flags
from harness.flags.flag_types import choice, number, text
from harness.flags.names import no_such_flag
from harness.flags.rules import contradiction
from harness.flags.settings import ASSETS, FLAGS, LENGTHS, Args, Flags, as_flag, default_split, default_warmup

MAX_STEPS = 2**31 - 1  # that --num-steps takes
EXAMPLES = """examples:
  train_fsdp.py --demo                                                                # all embedded, a minute
  train_fsdp.py --demo --dataset corpus.txt --eval-interval 100                       # the same on a text of yours
  train_fsdp.py --plan --plan-gpus 8 --plan-gpu B200 --model llama3.1-8b              # will it fit, how fast; no GPU
  torchrun --nproc_per_node=8 train_fsdp.py --model llama3.1-8b --log-with wandb      # all GPUs of a node
  torchrun --nproc_per_node=8 train_fsdp.py --checkpoint-interval 500 --resume auto   # goes on after a kill
  train_fsdp.py --config outputs/tales/config.json --lr 1e-4                          # that run, but for one flag
"""


class Parser(argparse.ArgumentParser):
    """Gives the flags that stand in the words of a command line, and no default: `Args` has those."""

    origin = ""  # the file whose flags are parsed, as the beginning of an error; empty for the command line
    as_json = False  # whether an error goes to stdout too, as a JSON object

    def error(self, message: str) -> typing.NoReturn:
        """Ends the process with 2 and one line, by rank 0; argparse would print its usage first."""
        message = message.removeprefix("argument ")
        message = message.replace("ignored explicit argument", "a switch, which takes no value; leave out")
        line = base.one_line(f"{self.prog}: error: {self.origin}{message}")
        base.exit_with_error(line, self.as_json)

    def given(self, words: list[str]) -> dict[str, typing.Any]:
        """The fields of the settings whose flags stand in a command line, with their values. The last one counts."""
        args, unknown = self.parse_known_args(words)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"{name}: unexpected argument, no flag takes it (switches have no value); --help lists them")
            self.error(f"{name}: {no_such_flag(name, self.flags())}")
        return vars(args)

    def flags(self) -> dict[str, argparse.Action]:
        return self._option_string_actions  # private: argparse has no public list of a parser's flags


def argument(field: dataclasses.Field, hint: typing.Any) -> dict:
    """The options of argparse for a flag, from its field of the settings and the type of that field."""
    options = field.metadata["options"]
    metavar = {"metavar": field.name.split("_")[-1].upper()}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # the other one is None
        hint = typing.get_args(hint)[0]
    if "type" in options:
        return metavar | options
    if hint is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        return options | {"action": action}
    if choices := typing.get_args(hint):
        return options | {"choices": choices, "type": choice(choices)}
    if hint in (int, float):
        return metavar | options | {"type": number(hint, field.metadata["min"], field.metadata["max_exclusive"])}
    return metavar | options | {"type": text}


def make_parser() -> Parser:
    """The parser of the command line: each flag of `Flags`, in the groups of --help."""
    parser = Parser(
        prog="train_fsdp.py",
        usage="%(prog)s [flags]",
        description="Train a causal language model with FSDP2: python, torchrun or accelerate launch, then this file.",
        epilog=EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action=base.ShowVersion, nargs=0, help="of this program and of what it stands on")
    group: typing.Any = parser  # or a group of it
    hints = typing.get_type_hints(Flags)
    for name, field in FLAGS.items():
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        group.add_argument(as_flag(name), **argument(field, hints[name]))
    return parser


def parse_args(argv: list[str] | None = None) -> Args:
    """The settings of a command line, by default this process's. A wrong one ends the process with a line that names
    the flag."""
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    parser.as_json = "--json" in words
    given = parser.given(words)
    file = given.pop("config", None)
    if file:
        parser.origin = f"--config {file}: "
        try:
            from_file = parser.given(read_flags(file, parser.flags()))
        except OSError as error:
            parser.error(error.strerror)
        except ValueError as error:
            parser.error(str(error))
        parser.origin = ""
        if given.keys() & {*LENGTHS}:  # one of them replaces the other
            from_file = {name: value for name, value in from_file.items() if name not in LENGTHS}
        given = from_file | given
    try:
        settings = complete(given, file)
    except base.UserError as error:
        parser.error(str(error))
    if problem := contradiction(settings):
        in_file = f" (with the flags of {file})" if file else ""
        parser.error(problem + in_file)
    if argv is None:
        leave_out_accelerate()
    return settings


def complete(given: dict[str, typing.Any], file: str | None = None) -> Args:
    """The settings with these flags given, by a file of flags too: --demo, a checkpoint of which nothing is trained,
    and other flags decide the defaults."""
    defaults: dict[str, typing.Any] = {"config": file, "explicit": given}
    if given.get("demo"):
        recipe = json.loads((ASSETS / "demo" / "recipe.json").read_text(encoding="utf-8"))
        if given.get("dataset", "demo") != "demo":
            del recipe["sample_prompt"]  # it is that of the demo's stories; a text of the user's own has its own
        if given.get("model", "demo") != "demo":
            del recipe["compile"]  # the demo's four layers compile for longer than all its steps take
        if given.get("init") == "pretrained":
            del recipe["lr"]  # it is one of random weights
        defaults |= recipe
    settings = Args(**defaults | given)
    if adapters := flags_of_adapters(settings.model):
        defaults |= adapters
        settings = Args(**defaults | given)
    if (settings.num_steps == 0 or settings.show_samples) and settings.resume not in ("none", "auto"):
        defaults |= flags_of_checkpoint(settings) | {"compile": False}
        settings = Args(**defaults | given)
    changes: dict[str, typing.Any] = {}
    if settings.num_tokens or settings.num_epochs:  # an upper bound, until `resolve` knows a step's tokens and the data
        changes["num_steps"] = settings.num_tokens or MAX_STEPS
    if settings.dataset_split is None and isinstance(settings.dataset, str):  # each of several has its own default
        changes["dataset_split"] = default_split(settings.dataset, settings.streaming)
    if settings.fp8_recipe is None and settings.precision == "fp8":
        changes["fp8_recipe"] = "tensorwise"
    if flags_of_adapters(settings.model) and settings.init == "pretrained" and not settings.lora_rank:
        raise base.UserError(
            f"--lora-rank 0: {settings.model} is a folder of adapters; leave it out to go on from them"
        )
    if settings.lora_rank and settings.lora_alpha is None:
        changes["lora_alpha"] = 2 * settings.lora_rank
    if settings.warmup_steps is None:
        steps = changes.get("num_steps", settings.num_steps)
        changes["warmup_steps"] = default_warmup(settings.lr_scheduler, steps)
    for name in ("betas", "sample_prompt", "lora_targets"):  # argparse and JSON have lists
        value = getattr(settings, name)
        changes[name] = value and tuple(value)
    return dataclasses.replace(settings, **changes)


def leave_out_accelerate() -> None:
    """Takes the settings of accelerate launch out of the environment, with a warning of rank 0 for each that differs
    from the flags: sharding and compilation go by the flags alone. Precision is `models.choose_precision`'s."""
    decided_by = {
        "ACCELERATE_USE_FSDP": "--zero-stage",
        "ACCELERATE_USE_DEEPSPEED": "--zero-stage",
        "ACCELERATE_USE_MEGATRON_LM": "--zero-stage",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "--zero-stage and --dp-replicate-size",
        "ACCELERATE_DYNAMO_BACKEND": "--compile",
    }
    warnings = []
    for name, flags in decided_by.items():
        value = os.environ.pop(name, "").lower()
        if value not in ("", "no", "false"):
            followed = f"{name}={value} (of accelerate launch or its config) is not followed"
            warnings.append(f"{followed}: this program goes by {flags}")
    # accelerate sets the address for several processes, but starts one with --cpu or without a GPU
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        advice = "for CPU ranks give --multi_gpu --num_processes N, without --cpu"
        warnings.append(f"accelerate launch: one rank was started, although --num_processes is larger; {advice}")
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"train_fsdp.py: warning: {warning}", file=sys.stderr, flush=True)
