"""The parser: from a command line and a file of flags to `Args`. Imports nothing heavy, so that --help and errors are
printed at once."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Callable

from harness import base
from harness.flags.adapters import adapter_flags
from harness.flags.checkpoints import checkpoint_flags, resumed_flags
from harness.flags.files import flags_as_words, read_flags
from harness.flags.flag_types import choice, number, text
from harness.flags.imports import REGISTERED, run_files
from harness.flags.names import DASHES, no_such_flag
from harness.flags.rules import contradiction, flags_without_effect
from harness.flags.settings import ASSETS, FLAGS, LENGTHS, Args, Flags, as_flag, default_split, default_warmup
from harness.flags.sources import lacks_sources

MAX_STEPS = 2**31 - 1  # of --num-steps
EXAMPLES = """examples:
  train_fsdp.py --demo                                                                # model and data are included
  train_fsdp.py --demo --dataset corpus.txt --eval-interval 100                       # the same on your own text
  train_fsdp.py --plan --plan-gpus 8 --plan-gpu B200 --model llama3.1-8b              # memory and speed, without a GPU
  torchrun --nproc_per_node=8 train_fsdp.py --model llama3.1-8b --log-with wandb      # all GPUs of a node
  torchrun --nproc_per_node=8 train_fsdp.py --checkpoint-interval 500 --resume auto   # resumes after a kill
  train_fsdp.py --config outputs/tales/config.json --lr 1e-4                          # that run with another flag
"""


class Parser(argparse.ArgumentParser):
    """Parses explicit flags only: defaults are those of `Args`."""

    origin = ""  # prefix of errors: the file whose flags are parsed; empty for the command line
    as_json = False  # print errors on stdout too, as JSON objects

    def error(self, message: str) -> typing.NoReturn:
        """Exit with code 2 and one line of rank 0, without argparse's usage text."""
        message = message.removeprefix("argument ")
        if message.endswith("one argument"):  # "expected one argument"
            message += f"; write one that begins with - as {message.partition(':')[0]}=VALUE"
        line = base.one_line(f"{self.prog}: error: {self.origin}{message}")
        base.exit_with_error(line, self.as_json)

    def parse_explicit(self, words: list[str]) -> dict[str, typing.Any]:
        """{field of `Args`: value} for the flags of a command line. The last one counts."""
        for flag, has_value, value in (word.partition("=") for word in words):
            if has_value and self.is_switch(flag):
                self.error(self.describe_value_of_switch(flag, value))
        namespace, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self.describe_unknown(unknown[0], words))
        return vars(namespace)

    def describe_unknown(self, word: str, words: list[str]) -> str:
        """The error for a word that is neither a flag nor a value of one."""
        name = word.partition("=")[0]
        if name.startswith(DASHES):
            return f"{name}: {no_such_flag(name, self.flags())}"
        if os.path.exists(word):
            return f"{word}: unexpected argument; for data give --dataset {word}"
        before = words[: words.index(word)]
        flag = next((one.partition("=")[0] for one in reversed(before) if one.startswith("--")), "")
        if self.is_switch(flag):
            return self.describe_value_of_switch(flag, word)
        if flag:
            return f"{flag}: {word} is one value too many; put a value with spaces in quotes"
        return f"{word}: unexpected argument; --help lists the flags"

    def is_switch(self, flag: str) -> bool:
        return flag in self.flags() and self.flags()[flag].nargs == 0

    def describe_value_of_switch(self, flag: str, value: str) -> str:
        advice = f"leave out {value!r}"
        if value.lower() in ("false", "no", "off", "0"):
            advice = f"give --{flag[5:]}" if flag.startswith("--no-") else f"give --no-{flag[2:]}"
        return f"{flag}: takes no value; {advice}"

    def flags(self) -> dict[str, argparse.Action]:
        return self._option_string_actions  # private: argparse has no public list of a parser's flags


class Help(argparse.Action):
    """The action of --help, which lists what the --import files before it add."""

    def __call__(self, parser: typing.Any, namespace: argparse.Namespace, *_: object) -> None:
        try:
            run_files(getattr(namespace, "import_", ()))
        except base.UserError as error:
            parser.error(str(error))
        make_parser().print_help()
        parser.exit()


def argument(field: dataclasses.Field, hint: typing.Any) -> dict:
    """argparse's options for a flag, from its field of `Args` and the type of that field."""
    options = field.metadata["options"]
    metavar = {"metavar": field.name.split("_")[-1].upper()}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # with None
        hint = typing.get_args(hint)[0]
    if "type" in options:
        return metavar | options
    if table := field.metadata["table"]:  # checked after --import
        return options | {"metavar": f"{{{','.join(table)}}}", "type": text}
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if choices := typing.get_args(hint):
        return options | {"choices": choices, "type": choice(choices)}
    if hint in (int, float):
        return metavar | options | {"type": number(hint, field.metadata["min"], field.metadata["max_exclusive"])}
    return metavar | options | {"type": text}


def make_parser() -> Parser:
    """The parser with each flag of `Flags`, in the groups of --help."""
    added = f"added by --import:\n  {', '.join(REGISTERED)}\n\n" if REGISTERED else ""
    parser = Parser(
        prog="train_fsdp.py",
        usage="%(prog)s [flags]",
        description="Train a causal language model with FSDP2: python, torchrun or accelerate launch, then this file.",
        epilog=added + EXAMPLES,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118),
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action=Help, nargs=0, help="show this help message and exit")
    parser.add_argument("--version", action=base.ShowVersion, nargs=0, help="versions of this program and its packages")
    group: typing.Any = parser  # or a group of it
    hints = typing.get_type_hints(Flags)
    for name, field in FLAGS.items():
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        group.add_argument(as_flag(name), dest=name, **argument(field, hints[name]))
    return parser


def parse_args(argv: list[str] | None = None, before_import: Callable[[Args], object] = lambda args: None) -> Args:
    """Parse a command line, by default this process's. Exits with code 2 and one line that names a wrong flag.

    If there are files of --import, it calls `before_import(args)`, whose names are not checked yet, and runs them.
    """
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    parser.as_json = "--json" in words
    typed, from_file = parser.parse_explicit(words), {}
    file = typed.pop("config", None)
    if file:
        parser.origin = f"--config {file}: "
        try:
            items = read_flags(file)
            parser.as_json |= ("json", True) in items
            from_file = parser.parse_explicit(flags_as_words(items, parser.flags()))
        except OSError as error:
            parser.error(f"{error.strerror}; give a TOML file or a run's config.json")
        except ValueError as error:
            parser.error(str(error))
        parser.origin = ""
    try:
        args = complete(typed, from_file, file)
        if args.import_:
            before_import(args)
            run_files(args.import_)
            args = complete(typed, from_file, file)  # defaults depend on registered names
    except base.UserError as error:
        parser.error(str(error))
    if problem := contradiction(args):
        others = [path for path in (file, args.inherited and args.resume) if path]
        parser.error(problem + (f" (with the flags of {' and '.join(others)})" if others else ""))
    if argv is None:
        drop_accelerate_settings()
    return args


def complete(
    typed: dict[str, typing.Any], from_file: dict[str, typing.Any] | None = None, file: str | None = None
) -> Args:
    """`Args` with the flags of the command line over those `from_file`, which --config names, over those of the run
    that it resumes. Defaults depend on --demo, on the checkpoint of an evaluation, export or plan, and on other flags.

    Raises:
        UserError: --model is a folder of adapters that does not fit the flags or cannot be read.
    """
    given = {**(from_file or {}), **typed}
    resumed = resumed_flags(Args(**given, explicit=given))
    explicit = replace_flags(replace_flags(resumed, from_file or {}), typed)
    inherited = tuple(name for name in resumed if name in explicit and name not in given)
    args = with_defaults(explicit)
    if adapters := adapter_flags(args.model):
        for name in ("lora_rank", "lora_alpha"):
            if args.init == "pretrained" and getattr(args, name) != adapters[name]:
                problem = f"the adapters of {args.model} have {adapters[name]}"
                raise base.UserError(f"{as_flag(name)} {getattr(args, name)}: {problem}; leave it out")
    defaults: dict[str, typing.Any] = {}
    if not args.trains() and args.resume not in ("none", "auto"):
        defaults, text_field = checkpoint_flags(args)
        defaults = {name: value for name, value in replace_flags(defaults, explicit).items() if name in defaults}
        explicit = text_field | explicit
        if not args.plan:
            defaults["compile"] = False
    args = dataclasses.replace(with_defaults(explicit, defaults), config=file, inherited=inherited)
    changes: dict[str, typing.Any] = {}
    if args.num_tokens or args.num_epochs:  # an upper bound until `resolve` computes the steps
        changes["num_steps"] = args.num_tokens or MAX_STEPS
    if args.batch_size == "auto" and args.num_steps == 0:  # without training the checkpoint's is used
        changes["batch_size"] = defaults.get("batch_size", 1)
    if args.dataset_split is None and isinstance(args.dataset, str):  # each of several datasets has its own default
        changes["dataset_split"] = default_split(args.dataset, args.streaming)
    if args.fp8_recipe is None and args.precision == "fp8":
        changes["fp8_recipe"] = "tensorwise"
    if args.lora_rank and args.lora_alpha is None:
        changes["lora_alpha"] = 2 * args.lora_rank
    if args.warmup_steps is None:
        steps = changes.get("num_steps", args.num_steps)
        changes["warmup_steps"] = default_warmup(args.lr_scheduler, steps)
    for name in ("betas", "sample_prompt", "lora_targets"):  # argparse and JSON have lists
        value = getattr(args, name)
        changes[name] = value and tuple(value)
    return dataclasses.replace(args, **changes)


def with_defaults(explicit: dict[str, typing.Any], defaults: dict[str, typing.Any] | None = None) -> Args:
    """`Args` with these explicit flags over `defaults` over those of --demo and of a folder of adapters."""
    recipe: dict[str, typing.Any] = {}
    if explicit.get("demo"):
        recipe = json.loads((ASSETS / "demo" / "recipe.json").read_text(encoding="utf-8"))
        if explicit.get("dataset", "demo") != "demo":
            del recipe["sample_prompt"]  # a prompt for the demo's data
        if explicit.get("model", "demo") != "demo":
            del recipe["compile"]  # off, as the demo model compiles for longer than it trains
        if explicit.get("init") == "pretrained":
            del recipe["lr"]  # for random weights
    model = (recipe | explicit).get("model", Args.model)
    return Args(**recipe | adapter_flags(model) | (defaults or {}) | explicit, explicit=explicit)


def replace_flags(lower: dict[str, typing.Any], higher: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """`lower` with the flags of `higher` in place of its own. Flags of `lower` that thereby lose their effect are left
    out; those that have none in `lower` either are kept, as the mistake that they are."""
    kept = dict(lower)
    if higher.keys() & {*LENGTHS}:  # one of them replaces the other
        kept = {name: value for name, value in kept.items() if name not in LENGTHS}
    if "dataset" in kept and lacks_sources(higher.get("dataset", kept["dataset"]), kept["dataset"]):
        kept.pop("mixture_stage", None)  # it names them
    mistakes = flags_without_effect(with_defaults(lower))
    while lost := (flags_without_effect(with_defaults(kept | higher)) & kept.keys()) - higher.keys() - mistakes:
        kept = {name: value for name, value in kept.items() if name not in lost}
    return kept | higher


def drop_accelerate_settings() -> None:
    """Remove the settings of accelerate launch from the environment, with a warning on rank 0 for each one that is set:
    only flags choose sharding and compilation. `models.choose_precision` handles precision."""
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
            warnings.append(f"{name}={value} (from accelerate launch or its config) is ignored: use {flags}")
    # accelerate sets the address for several processes, but starts one with --cpu or without a GPU
    if "ACCELERATE_USE_CPU" in os.environ and "MASTER_ADDR" in os.environ and "RANK" not in os.environ:
        advice = "for CPU ranks give --multi_gpu --num_processes N, without --cpu"
        warnings.append(f"accelerate launch: it started one rank, although --num_processes is larger; {advice}")
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"train_fsdp.py: warning: {warning}", file=sys.stderr, flush=True)
