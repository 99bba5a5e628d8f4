"""Settings: every flag with its default, type and help, files of flags, what does not go together or has no effect, and
the frozen object of them all. The script reads the command line before it imports torch, so that --help and a wrong
flag answer at once: nothing heavy is imported here. What a flag leaves open until model, machine and checkpoint are
known, `resolve` in the script decides."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import glob
import json
import math
import os
import pathlib
import re
import sys
import time
import types
import typing
from collections.abc import Iterator
from typing import Literal

from harness.base import gpu_names, saved, versions
from harness.base.text import counted, one_line
from harness.commands import given, without
from harness.flagfile import Collect, read_flags, suggest

ROOT = versions.ROOT
ASSETS = ROOT / "assets"
PRESETS = {path.stem: path for path in sorted((ASSETS / "presets").glob("*.json"))}
PRESETS["demo"] = ASSETS / "demo" / "config.json"
PROFILED_STEPS = 3
MAX_WORLD = 2**20  # ranks that are planned for
MAX_SEQUENCES = 1_000_000  # of a microbatch
POLYNOMIAL_END = 1e-7  # learning rate at which transformers lets that schedule end
EXAMPLES = """examples:
  train_fsdp.py --demo                                                                # all embedded, a minute
  train_fsdp.py --demo --dataset corpus.txt --eval-interval 100                       # the same on a text of yours
  train_fsdp.py --plan --plan-gpus 8 --plan-gpu B200 --model llama3.1-8b              # will it fit, how fast; no GPU
  torchrun --nproc_per_node=8 train_fsdp.py --model llama3.1-8b --log-with wandb      # all GPUs of a node
  torchrun --nproc_per_node=8 train_fsdp.py --checkpoint-interval 500 --resume auto   # goes on after a kill
  train_fsdp.py --config outputs/tales/config.json --lr 1e-4                          # that run, but for one flag
"""
# of accelerate's settings those that this program decides by a flag of its own
OF_ACCELERATE = {
    "ACCELERATE_USE_FSDP": "zero_stage",
    "ACCELERATE_USE_DEEPSPEED": "zero_stage",
    "ACCELERATE_MIXED_PRECISION": "precision",
    "ACCELERATE_DYNAMO_BACKEND": "compile",
}


def number(kind: type, least: float | None = None, below: float = math.inf):
    """An argparse type: a number in [least, below), by default a positive one; a whole one fits 32 bits."""
    below = min(below, 2**31) if kind is int and below == math.inf else below

    def parse(text: str):
        value = kind(text)
        if not (value > 0 if least is None else value >= least) or value >= below:
            wanted = "a positive number" if least is None else f"at least {least}"
            limit = f" and below {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}{limit}")
        return value

    parse.__name__ = kind.__name__
    return parse


def text(value: str) -> str:
    """An argparse type: a text that says something, and that files and other programs take."""
    if not value.strip():
        raise argparse.ArgumentTypeError("its value is empty; give one, or leave the flag out")
    if "\0" in value:
        raise argparse.ArgumentTypeError("its value holds a NUL byte; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        problem = f"{value!a} holds bytes that are not {encoding}; rename it, or set PYTHONUTF8=1 where it is UTF-8"
        raise argparse.ArgumentTypeError(problem) from None
    return value


def path(value: str) -> str:
    """An argparse type: what can be the name of a file or folder, though a hub id may stand there too."""
    value, whole = text(value), os.path.expanduser(value)
    if whole.startswith("~") and not os.path.lexists(whole):
        raise argparse.ArgumentTypeError(f"{value}: no such user; for a file of that name give ./{value}")
    if len(os.fsencode(whole)) > 4000 or any(len(os.fsencode(part)) > 255 for part in whole.split("/")):
        raise argparse.ArgumentTypeError(f"{value[:40]}... is too long for a path; give a shorter one")
    return value


def gpu_counts(text: str) -> tuple[int, ...]:
    """An argparse type: world sizes, comma-separated, each once."""
    return tuple(dict.fromkeys(number(int, 1, MAX_WORLD + 1)(part) for part in text.split(",")))


def batch_size(text: str) -> int | str:
    """An argparse type: a positive number, or auto."""
    return text if text == "auto" else number(int, 1, MAX_SEQUENCES + 1)(text)


def flag(default, help: str, **options):
    """A field that is a flag. `group` opens a group of --help, `least` and `below` bound a number, which is positive
    otherwise; all else is argparse's own."""
    return dataclasses.field(default=default, metadata={"help": help} | options)


# fmt: off
@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked for; `--sequence-length` is the field `sequence_length`."""

    demo: bool = flag(False, "the embedded model on the embedded stories; any flag given beside it wins", group="all at once")
    config: str | None = flag(None, "TOML, or the config.json of a run, of which all is taken but --run-name, --resume and --export; what stands on the command line wins", metavar="FILE", type=path)

    model: str = flag("smollm3-3b", f"preset ({', '.join(PRESETS)}), local folder with a config.json, or hub id [smollm3-3b]", group="model", type=path)
    init: Literal["random", "pretrained"] = flag("random", "random weights from the config, or the safetensors of the folder or hub id [random]")
    tokenizer: str | None = flag(None, "hub id or folder [the model's]", type=path)

    dataset: str = flag("roneneldan/TinyStories", "hub id; .jsonl, .parquet, .txt or .md file, also .gz, .bz2 or .zst, a folder of them or a pattern in quotes; synthetic (random tokens, for throughput runs); demo [roneneldan/TinyStories]", group="data", type=path)
    dataset_config: str | None = flag(None, "subset of a hub data set that has several, such as wikitext's wikitext-103-raw-v1 [its default]")
    text_field: str = flag("text", "column of the text in .jsonl, .parquet and hub data [input_ids where there are token ids, else text]")
    dataset_split: str | None = flag(None, "training split, with an optional slice [train[:5%%]; of local data and with --streaming: train]")
    eval_split: str | None = flag(None, "held-out split, with an optional slice [validation; where there is none 5 %% of the training documents, one of every 20]")
    sequence_length: int | None = flag(None, "tokens per sample [8192, or as many positions as the model has]")
    batch_size: int | Literal["auto"] = flag(1, "sequences per rank and microbatch; auto takes the largest that fits by --plan [1]", type=batch_size)
    gradient_accumulation_steps: int = flag(1, "microbatches per optimizer step [1]")
    document_mask: bool = flag(False, "attention stays inside each document, up to the tokenizer's end-of-text token [off]")
    streaming: bool = flag(False, "read and tokenize while training: no full download, no cache; whole splits only, at most one data loading process per rank [off]")
    skip_bad_records: bool = flag(False, "count and leave out records that cannot be read: a text that is null or a number, broken JSON, bytes that are not UTF-8 [the first one is an error]")
    num_workers: int | None = flag(None, "data loading processes per rank [1; 0 where the CPU computes and the tokens are cached]", least=0, below=1025)
    cache_dir: str | None = flag(None, "where tokenized data is kept [~/.cache/train_fsdp]", type=path)

    zero_stage: Literal[0, 1, 2, 3] = flag(3, "0 replicated, the DDP reference; 1 gradients reduced once per optimizer step, optimizer sharded (with one microbatch the same as 2); 2 parameters kept after forward; 3 parameters resharded after forward [3]", group="sharding")
    dp_replicate_size: int = flag(1, "HSDP: this many replicas of the shard group [1]")
    defer_grad_sync: bool = flag(False, "reduce-scatter only on the last microbatch (stage 1 implies it)")
    cpu_offload: bool = flag(False, "parameters, gradients and optimizer on the host")

    precision: Literal["bf16", "fp8", "fp32", "bf16-pure"] = flag("bf16", "bf16: fp32 master weights, bf16 compute and all-gather, fp32 gradient reduction; fp8: bf16 plus torchao float8 linears; bf16-pure: everything bf16 [bf16]", group="precision and techniques")
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = flag(None, "float8 scaling; tensorwise all-gathers in float8 too [tensorwise]")
    fp8_emulate: bool = flag(False, "float8 numbers without float8 hardware, and without its speed")
    activation_checkpointing: Literal["none", "selective", "full"] = flag("none", "selective keeps matmul and attention outputs and recomputes the rest; full keeps layer inputs only [none]")
    activation_memory_budget: float | None = flag(None, "the compiler keeps about this share of each layer's activations and recomputes what is cheapest of the rest [all are kept]", least=0, below=1)
    attention: Literal["auto", "sdpa", "flash", "cudnn", "flash_attention_2", "flex_attention", "eager"] = flag("auto", "attention kernel; flash and cudnn are torch's own of that name and no other [auto]")
    compile: bool | None = flag(None, "torch.compile each decoder layer [on with CUDA]")
    liger: bool = flag(False, "Liger's kernels in eager layers: norms, SwiGLU, rotary positions; a plan is of the layers without them [off]")
    fused_loss: bool | None = flag(None, "LM head and cross entropy in chunks, never all logits at once [on]")

    num_steps: int = flag(1000, "optimizer steps of the whole run, those before a resume included; 0 trains nothing, it evaluates (--eval-interval 1), writes stories (--sample-prompt) and exports (--export) [1000]", least=0, group="optimization")
    optimizer: Literal["adamw", "adamw-bf16", "adamw8bit"] = flag("adamw", "torch's fused AdamW; the same with moments in bf16; torchao's with 8-bit states [adamw]")
    lr: float = flag(3e-4, "peak learning rate [3e-4]")
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay"] = flag("cosine", "shape of the learning rate [cosine]")
    warmup_steps: int | None = flag(None, "learning rate warmup [5 %% of the steps; 0 with constant]", least=0)
    weight_decay: float = flag(0.1, "on matrices, not on norms and biases [0.1]", least=0)
    betas: tuple[float, float] = flag((0.9, 0.95), "of AdamW [0.9 0.95]", type=number(float, 0, 1), nargs=2, metavar=("B1", "B2"))
    max_grad_norm: float = flag(1.0, "clip the global gradient norm; 0 never clips [1.0]", least=0)
    seed: int = flag(42, "of weights and data order [42]", least=0, below=2**63)

    eval_interval: int = flag(0, "steps between evaluations on the held-out split; 0 never [0]", least=0, group="evaluation")
    eval_steps: int = flag(0, "batches that each rank takes at an evaluation, not steps between two (--eval-interval); 0 takes the whole split [0]", least=0)
    sample_prompt: tuple[str, ...] | None = flag(None, "text that the model continues at evaluations and at the end; each further one is continued too", type=text, action=Collect)
    sample_prompts: str | None = flag(None, "more of them, one a line", metavar="FILE", type=path)
    sample_tokens: int = flag(128, "length of the continuation [128]")

    checkpoint_interval: int = flag(0, "steps between checkpoints; 0 saves at the end, and on SIGTERM and SIGUSR1 [0]", least=0, group="checkpoints")
    keep_checkpoints: int = flag(2, "how many complete ones to keep, the newest [2]")
    async_checkpoint: bool = flag(True, "write in the background, the loop waits only for the copy [on]")
    final_checkpoint: bool | None = flag(None, "keep the state after the last step [on; off for --dataset synthetic without --checkpoint-interval, and where the disk has no room for it]")
    resume: str = flag("none", "auto: the run's newest complete checkpoint, or a fresh start; PATH: this checkpoint [none]", metavar="{none,auto,PATH}", type=path)
    export: str | None = flag(None, "at the end, a folder that from_pretrained loads", metavar="DIR", type=path)

    timeout_minutes: float = flag(10.0, "how long ranks wait for each other; then the job ends with a line that names the rank that did not come, its host, pid and what it did [10]", least=0.001, below=1e7, group="failures")

    output_dir: str = flag("outputs", "a run writes under OUTPUT_DIR/RUN_NAME/ [outputs]", group="output", type=path)
    run_name: str | None = flag(None, "[model and start time; with --resume auto the model; with --resume PATH that run's]")
    log_with: Literal["none", "wandb", "tensorboard", "all"] = flag("none", "trackers beside metrics.jsonl [none]")
    project_name: str = flag("train_fsdp", "project in wandb and tensorboard [train_fsdp]")
    log_interval: int = flag(10, "steps between log lines [10]")
    metrics_port: int | None = flag(None, "Prometheus endpoint of rank 0 [none]", least=1, below=65536)
    metrics_host: str = flag("127.0.0.1", "address that the endpoint listens on [127.0.0.1]")

    perf_warmup_steps: int = flag(10, "steps at the start that the speed figures leave out; not --warmup-steps, the learning rate's [10]", least=0, group="figures and gates")
    peak_tflops: float | None = flag(None, "dense bf16 peak of one GPU, for one that is not in the table")
    min_mfu: float | None = flag(None, "acceptance gate: exit 3 at the end when the MFU after warmup is below this percentage [none]")
    max_memory_gib: float | None = flag(None, "acceptance gate: exit 3 at the end when the fullest GPU's reserved memory was above this [none]")
    profile: bool = flag(False, f"trace of {PROFILED_STEPS} steps after the warmup, and a table of where their time went; they are in no speed figure [off]")
    memory_snapshot: bool = flag(False, "history of every allocation on the GPU, for pytorch.org/memory_viz, also when it runs out of memory [off]")

    plan: bool = flag(False, "no training: what this configuration will need and give, from one step on fake tensors", group="planning")
    plan_gpus: tuple[int, ...] | None = flag(None, "world size to plan for; of several the first in full and all in a table [--gpus-per-node]", type=gpu_counts, metavar="N[,N...]")
    plan_gpu: str | None = flag(None, "kind of GPU to plan for, such as 'H100 SXM' or B200; training prints that plan beside its own figures [this machine's, else H100 SXM]", metavar="NAME")
    gpus_per_node: int = flag(8, "GPUs between which a plan has the fast links of one node [8]")
    plan_rates: str | None = flag(None, "what --measure wrote, or JSON with rates that replace the table's: matmul_tflops, attention_tflops, memory_gb_per_s, ...; none: nothing measured [what --measure wrote for this GPU, where it did]", metavar="FILE", type=path)
    plan_seconds: float = flag(30.0, "how long planning takes, from when torch is loaded, the search for the fastest configuration that fits included; a third of it more for each further world size; 0 plans only what is asked for [30]", least=0)
    gpu_hour_usd: float | None = flag(None, "price of one GPU for an hour; the plan says what a billion tokens cost, and with --num-steps the run", below=1_000_000)
    json: bool = flag(False, "the plan, or with --num-steps 0 the evaluation, as one JSON object on stdout")
    html: str | None = flag(None, "the plan as a page with charts too", metavar="FILE", type=path)
    measure: bool = flag(False, "no training: times this device, under torchrun its links too, with what a step of this configuration runs, for plans; names a slow rank or link")
    own_plan: bool = flag(True, "a run on a GPU is planned by a process beside it, and ends with that plan beside its own figures [on]")

    given_accumulation: int = 1  # no flag: the accumulation as given; a resume on other ranks may need another
    lacks_disk: bool = False  # no flag: there is no room for the last state, which no flag asked for
    lacks_memory: bool = False  # no flag: a host cannot hold copies of what its ranks save
    argv: tuple[str, ...] = ()  # no flag: the command line, for a plan of the run in a process of its own

    def keeps_last(self) -> bool:
        """Whether the state after the last step is to be saved."""
        if self.final_checkpoint is not None:
            return self.final_checkpoint
        return self.checkpoint_interval > 0 or (self.dataset != "synthetic" and not self.lacks_disk)

    def saves_beside(self) -> bool:
        """Whether checkpoints are written beside the training, from copies."""
        return self.checkpoint_interval > 0 and self.async_checkpoint and not self.lacks_memory

    def tokens_per_step(self, world: int) -> int:
        """Tokens of one optimizer step: every rank, every microbatch."""
        return world * self.gradient_accumulation_steps * self.batch_size * self.sequence_length

    def batch_step(self) -> int:
        """Of what the batch size has to be a multiple, for the sequence length: float8's product of the tokens of a
        microbatch, that of the weights' gradient, takes multiples of 16 tokens; rowwise_with_gw_hp computes it in bf16."""
        if self.fp8_recipe not in ("tensorwise", "rowwise"):
            return 1
        return 16 // math.gcd(16, self.sequence_length or 16)

    def describe_batch(self, world: int) -> str:
        counts = {"rank": world, "microbatch": self.gradient_accumulation_steps, "sequence": self.batch_size}
        sequences = " x ".join(counted(count, name) for name, count in counts.items())
        return f"{sequences} x {self.sequence_length:,} = {self.tokens_per_step(world):,} tokens a step"


class Parser(argparse.ArgumentParser):
    origin = ""  # what is being read, where it is not the command line
    as_json = False  # whether stdout is to have a JSON object, of an error too

    def error(self, message: str):
        """Ends the process with 2 and one line, where argparse would print its usage first. Of all ranks one says it."""
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
            self.error(f"{name}: no such flag{suggest(name, self.flags())}")
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


def is_local(dataset: str) -> bool:
    """Whether --dataset is read from this machine: what exists, or a pattern for it, which no hub id can be."""
    path = os.path.expanduser(dataset)
    return dataset == "demo" or os.path.exists(path) or glob.has_magic(path)


def is_plain_text(dataset: str) -> bool:
    """Whether --dataset is one file, or a pattern of files, that has no fields."""
    return bool(re.search(r"\.(txt|md)(\.(gz|bz2|zst))?$", dataset, re.IGNORECASE))


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


def without_effect(s: Settings) -> Iterator[str]:
    """What was given and changes nothing in this run: a warning each. A plan or a measurement takes a run's flags as
    they are, and an export those of its checkpoint."""
    if s.plan or s.measure or not s.num_steps:
        return
    writes = s.sample_prompt or s.sample_prompts or (s.demo and s.dataset != "synthetic")
    # fmt: off
    idle = [
        (not s.eval_interval, "eval_steps eval_split", "nothing is evaluated without --eval-interval"),
        (not s.checkpoint_interval, "async_checkpoint", "without --checkpoint-interval no save is written beside the training"),
        (not s.checkpoint_interval and not s.keeps_last(), "keep_checkpoints", "only SIGTERM and SIGUSR1 save without --checkpoint-interval and --final-checkpoint"),
        (s.warmup_steps >= s.num_steps, "warmup_steps", f"the run ends after {s.num_steps:,} steps, before the learning rate reaches --lr"),
        (s.metrics_port is None, "metrics_host", "nothing listens without --metrics-port"),
        (s.log_with == "none", "project_name", "no tracker writes without --log-with"),
        (not writes, "sample_tokens", "nothing is written without --sample-prompt"),
        (s.dataset == "synthetic", "dataset_split eval_split skip_bad_records text_field dataset_config", "synthetic tokens are read from nowhere"),
        (is_local(s.dataset), "dataset_config", "only a data set of the hub has subsets"),
        (is_plain_text(s.dataset), "text_field", "plain text has no fields"),
        (s.dataset == "synthetic" and not writes, "tokenizer", "nothing is tokenized with --dataset synthetic"),
        (s.dataset == "synthetic" and s.init == "random", "sample_prompt sample_prompts", "of synthetic tokens a model learns nothing that it could write"),
        (s.gradient_accumulation_steps == 1, "defer_grad_sync", "one microbatch a step leaves nothing to defer"),
        (s.zero_stage == 1 and s.gradient_accumulation_steps > 1, "defer_grad_sync", "--zero-stage 1 does so by itself"),
        (True, "plan_seconds", "only --plan looks for a configuration"),
        (not s.own_plan and s.batch_size != "auto", "plan_gpu plan_rates gpus_per_node", "nothing is planned with --no-own-plan"),
    ]
    # fmt: on
    for is_idle, names, why in idle:
        if flags := [f"--{name.replace('_', '-')}" for name in names.split() if is_idle and name in given(s.argv)]:
            yield f"{', '.join(flags)}: {why}"


def not_followed(s: Settings) -> Iterator[str]:
    """Takes settings of accelerate out of the environment where they ask for something else; a warning each."""
    for name, field in OF_ACCELERATE.items():
        if (value := os.environ.pop(name, "").lower()) not in ("", "no", "false", "0", str(getattr(s, field))):
            flag = f"--{field.replace('_', '-')}"
            yield f"{name}={value} (of accelerate launch or its config) is not followed: this program goes by {flag}"


def warn(settings: Settings) -> None:
    """Says, on rank 0, what was asked for and has no effect. `sys.argv` is the command line."""
    for warning in (*given_twice(sys.argv[1:]), *without_effect(settings), *not_followed(settings)):
        if not int(os.environ.get("RANK", 0)):
            print(f"train_fsdp.py: warning: {warning}", file=sys.stderr, flush=True)


def contradiction(s: Settings) -> str | None:
    """What does not go together, the first of it; None where all is well."""
    measured = s.num_steps - s.perf_warmup_steps - s.profile * PROFILED_STEPS
    first_rank = not int(os.environ.get("RANK", 0))  # one that has a disk of its own gets to say so
    missing = no_checkpoint(s.resume) if s.resume not in ("none", "auto") and first_rank else ""
    trains = not (s.plan or s.measure) and s.num_steps > 0
    absent = missing_data(s.dataset) if trains and first_rank else ""
    unread = unreadable(s.sample_prompts) if s.sample_prompts and first_rank else ""
    misfit = misfits_float8(s) if s.num_steps else ""
    unmeasured = f"no step is left to measure; give --num-steps at least {s.num_steps - measured + 1}"
    # fmt: off
    wrong = [
        (s.precision != "fp8" and (s.fp8_recipe or s.fp8_emulate), "--fp8-recipe/--fp8-emulate: only with --precision fp8"),
        (misfit, misfit),
        (s.lr_scheduler == "constant" and s.warmup_steps, "--warmup-steps: the constant scheduler has no warmup; use constant_with_warmup"),
        (s.lr_scheduler == "polynomial" and s.lr <= POLYNOMIAL_END, f"--lr: the polynomial schedule ends at {POLYNOMIAL_END:g}, which {s.lr:g} is not above; give more, or linear"),
        (absent, f"--dataset {s.dataset}: {absent}"),
        (unread, f"--sample-prompts {s.sample_prompts}: cannot be read ({unread})"),
        (s.document_mask and s.dataset == "synthetic", "--document-mask: synthetic tokens are no documents; use another --dataset"),
        (s.document_mask and s.attention in ("flash", "flash_attention_2"), f"--document-mask: not with {s.attention}; use flex_attention or sdpa"),
        (s.precision == "fp32" and s.attention in ("flash", "cudnn", "flash_attention_2"), f"--attention {s.attention}: takes no fp32; use sdpa, or another --precision"),
        (s.streaming and s.dataset == "synthetic", "--streaming: synthetic tokens are read from nowhere; use another --dataset"),
        (s.streaming and s.num_workers is not None and s.num_workers > 1, "--num-workers: with --streaming one process reads the documents in order; give 1 or 0"),
        (s.zero_stage == 0 and s.dp_replicate_size > 1, "--dp-replicate-size: stage 0 replicates on every rank already"),
        (s.liger and s.compile, "--liger: its kernels are for eager layers, the compiler makes its own; leave out --liger or --compile"),
        (s.optimizer == "adamw-bf16" and max(s.betas) > 0.98, f"--betas: with adamw-bf16 at most 0.98; rounded to bf16, a moment that moves by {1 - max(s.betas):.2g} of a difference stays where it is"),
        (s.optimizer == "adamw-bf16" and s.precision == "bf16-pure", "--optimizer: with bf16-pure the moments of adamw are bf16 already; leave adamw-bf16 out"),
        (s.activation_memory_budget is not None and (s.compile is False or s.activation_checkpointing != "none"), "--activation-memory-budget: needs --compile, without --activation-checkpointing"),
        (s.profile and measured < 1, f"--profile: {unmeasured}"),
        (s.min_mfu and measured < 1, f"--min-mfu: {unmeasured}"),
        *((name is not None and not_a_folder_name(name), f"{of}: {name!r} is {not_a_folder_name(name or '')}")
          for of, name in (("--run-name", s.run_name), ("--project-name", s.project_name))),
        (s.html and not s.plan, "--html: it is a picture of a plan; give --plan with it"),
        (s.measure and s.plan, "--measure: it trains nothing and plans nothing; run --plan after it"),
        (s.measure and s.batch_size == "auto", "--batch-size: --measure times one size; give a number"),
        (s.num_steps == 0 and not (s.export or s.sample_prompt or s.sample_prompts or s.eval_interval), "--num-steps: 0 trains nothing; it goes with --eval-interval 1, --sample-prompt TEXT or --export DIR"),
        (s.num_steps == 0 and (s.eval_interval or not s.export) and s.resume == "none" and s.init == "random", "--num-steps: 0 trains nothing, and random weights have nothing to show; give --resume PATH, or --model DIR --init pretrained"),
        *((not s.plan and value, f"--{name}: only with --plan, without which this would train")
          for name, value in (("plan-gpus", s.plan_gpus), ("gpu-hour-usd", s.gpu_hour_usd))),
        (s.json and not s.plan and (s.num_steps or not s.eval_interval), "--json: only with --plan, or with --num-steps 0 and --eval-interval"),
        (problem := unknown_model(s.model), f"--model {s.model}: {problem}"),
        (s.num_steps == 0 and s.batch_size == "auto", "--batch-size: --num-steps 0 trains nothing; leave auto out"),
        (missing, f"--resume {s.resume}: {missing}"),
        (s.num_steps == 0 and s.resume == "auto", "--resume: --num-steps 0 takes one checkpoint, give its PATH"),
        (s.export and s.resume != "auto" and os.path.lexists(os.path.expanduser(s.export)), f"--export: {s.export} exists already; choose another folder or remove it"),
    ]
    # fmt: on
    return next((problem for is_wrong, problem in wrong if is_wrong), None)


def misfits_float8(s: Settings) -> str:
    """Why float8 does not take the tokens of a microbatch; empty if it does, or if their number is not known yet."""
    if s.sequence_length is None or s.batch_size == "auto" or s.batch_size % s.batch_step() == 0:
        return ""
    unit = 16 // math.gcd(16, s.batch_size)
    length = max(unit, round(s.sequence_length / unit) * unit)
    what = f"--precision fp8 ({s.fp8_recipe}) takes batch x sequence in multiples of 16, {s.batch_size} x {s.sequence_length} is none"
    batch = -(-s.batch_size // s.batch_step()) * s.batch_step()
    return f"--sequence-length {s.sequence_length}: {what}; give {length}, or --batch-size {batch}, or --fp8-recipe rowwise_with_gw_hp"


def missing_data(dataset: str) -> str:
    """Why --dataset can be no text; empty where it may be one, of this machine or of the hub."""
    path = os.path.expanduser(dataset)
    can_be_id = dataset.count("/") <= 1 and not path.startswith(("/", "."))
    return "" if is_local(dataset) or can_be_id else "no such file or folder"


def unreadable(file: str) -> str:
    """Why a file cannot be read; empty where it can."""
    try:
        with open(os.path.expanduser(file), "rb"):
            return ""
    except OSError as error:
        return error.strerror


def unknown_model(model: str) -> str:
    """Why a name can be no model's; empty if it is a preset's or a folder's, or may be one of the hub."""
    path = pathlib.Path(model).expanduser()
    if model in PRESETS or os.path.isdir(path):
        return ""
    if os.path.lexists(path) or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return "no such folder"
    near = "" if "/" in model else suggest(model, PRESETS)
    return near and f"no preset, folder or hub id{near}"


def not_a_folder_name(name: str) -> str:
    """Why a name that is given, or derived from a model's, cannot be that of one folder; empty if it can."""
    if name.strip(". ") == "" or re.search(r"[/\\#?%:]", name) or not name.isprintable():
        return "not a plain folder name"
    return "too long for a folder, more than 200 bytes" if len(os.fsencode(name)) > 200 else ""


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint that --resume PATH means: itself, or the newest of a run's folder."""
    path = pathlib.Path(resume).expanduser()
    return path if os.path.exists(path / saved.MANIFEST) else saved.newest(path) or path


def no_checkpoint(resume: str) -> str:
    """Why nothing can go on from --resume PATH, and what is there to go on from; empty where a checkpoint is, whole or
    not."""
    path, found = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    if found.is_dir() and (found != path or saved.step_of(path) is not None or (path / saved.MANIFEST).exists()):
        return ""
    others = {
        run.parent for runs in (path.parent, path) for run in runs.glob("*/checkpoints") if saved.newest(run.parent)
    }
    if path.parent.name == "checkpoints":
        others = set(saved.complete(path.parent.parent))
    near = sorted(others, key=lambda other: -difflib.SequenceMatcher(None, path.name, other.name).ratio())[:3]
    runs = sorted(str(metrics.parent) for metrics in path.parent.glob("*/metrics.jsonl"))[:3]
    there = f"{', '.join(runs)} saved none: --checkpoint-interval does" if runs else "no run is beside it"
    if near:
        there = f"what can be resumed is {', '.join(map(str, near))}"
    return f"{'it holds no checkpoint' if path.is_dir() else 'no such folder'}; {there}"


def flags_of_checkpoint(resume: str, evaluates: bool, of_data: bool) -> dict:
    """The flags that say what model a checkpoint holds, for an evaluation how it attends, and with `of_data` which text
    was held out; none if it cannot be read, which is reported later."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        flags = saved.read_manifest(checkpoint_folder(resume))["flags"]
        names = "model init tokenizer dataset sequence_length precision fp8_recipe fp8_emulate optimizer"
        if evaluates:
            names += " document_mask"
        if evaluates and of_data:
            names += " dataset_config dataset_split eval_split text_field skip_bad_records seed"
        return {name: flags[name] for name in names.split()}
    return {}
