"""Settings: the flags.

Called by the script before torch is imported, so that --help and a wrong flag answer at once. It imports nothing heavy.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import re
import sys

import torch

from utils import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
PRESETS = {path.stem: path for path in sorted((ASSETS / "presets").glob("*.json"))}
PRESETS["demo"] = ASSETS / "demo" / "config.json"
SCHEDULERS = (
    "constant constant_with_warmup linear cosine cosine_with_min_lr polynomial inverse_sqrt warmup_stable_decay"
)
PROFILED_STEPS = 3


def usage_error(message: str):
    raise UserError(message)


def number(kind: type, least: float | None = None, below: float = math.inf):
    """An argparse type: a number in [least, below), by default a positive one."""

    def parse(text: str):
        value = kind(text)
        if not (value > 0 if least is None else value >= least) or value >= below:
            wanted = "a positive number" if least is None else f"at least {least}"
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}" + f" and below {below}" * (below < math.inf))
        return value

    parse.__name__ = kind.__name__
    return parse


def gpu_counts(text: str) -> list[int]:
    """An argparse type: world sizes, comma-separated."""
    return [number(int)(part) for part in text.split(",")]


def batch_size(text: str) -> int | str:
    """An argparse type: a positive number, or auto."""
    return text if text == "auto" else number(int)(text)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_fsdp.py",
        usage="%(prog)s [flags]",
        description="Train a causal language model with FSDP2: python, torchrun or accelerate launch, then this file.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34, width=118),
        allow_abbrev=False,
    )
    parser.error = usage_error  # one line, where argparse would print its usage first
    on_off = argparse.BooleanOptionalAction

    # fmt: off
    add = parser.add_argument_group("model").add_argument
    add("--model", default="smollm3-3b", help=f"preset ({', '.join(PRESETS)}), local folder with a config.json, or hub id [smollm3-3b]")
    add("--init", choices=["random", "pretrained"], default="random", help="random weights from the config, or the safetensors of the folder or hub id [random]")
    add("--tokenizer", help="hub id or folder [the model's]")

    add = parser.add_argument_group("data").add_argument
    add("--dataset", default="roneneldan/TinyStories", help="hub id; .jsonl, .txt or .parquet file or a folder of them; synthetic (random tokens, for throughput runs); demo [roneneldan/TinyStories]")
    add("--dataset-split", help="training split, with an optional slice [train[:5%%]; of local data and with --streaming: train]")
    add("--eval-split", default="validation", help="held-out split [validation]")
    add("--sequence-length", type=number(int), default=8192, help="tokens per sample [8192]")
    add("--batch-size", type=batch_size, default=1, help="sequences per rank and microbatch; auto takes the largest that fits by --plan [1]")
    add("--gradient-accumulation-steps", type=number(int), default=1, help="microbatches per optimizer step [1]")
    add("--document-mask", action="store_true", help="attention stays inside each document, up to the tokenizer's end-of-text token [off]")
    add("--streaming", action="store_true", help="read and tokenize while training: no full download, no cache; whole splits only, at most one data loading process per rank [off]")
    add("--num-workers", type=number(int, 0), default=1, help="data loading processes per rank [1]")
    add("--cache-dir", help="where tokenized data is kept [~/.cache/train_fsdp]")

    add = parser.add_argument_group("sharding").add_argument
    add("--zero-stage", type=int, choices=[0, 1, 2, 3], default=3, help="0 replicated, the DDP reference; 1 gradients reduced once per optimizer step, optimizer sharded (with one microbatch the same as 2); 2 parameters kept after forward; 3 parameters resharded after forward [3]")
    add("--dp-replicate-size", type=number(int), default=1, help="HSDP: this many replicas of the shard group [1]")
    add("--defer-grad-sync", action="store_true", help="reduce-scatter only on the last microbatch (stage 1 implies it)")
    add("--cpu-offload", action="store_true", help="parameters, gradients and optimizer on the host")

    add = parser.add_argument_group("precision and techniques").add_argument
    add("--precision", choices=["bf16", "fp8", "fp32", "bf16-pure"], default="bf16", help="bf16: fp32 master weights, bf16 compute and all-gather, fp32 gradient reduction; fp8: bf16 plus torchao float8 linears; bf16-pure: everything bf16 [bf16]")
    add("--fp8-recipe", choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"], help="float8 scaling; tensorwise all-gathers in float8 too [tensorwise]")
    add("--fp8-emulate", action="store_true", help="float8 numbers without float8 hardware, and without its speed")
    add("--activation-checkpointing", choices=["none", "selective", "full"], default="none", help="selective keeps matmul and attention outputs and recomputes the rest; full keeps layer inputs only [none]")
    add("--activation-memory-budget", type=number(float, 0, 1), help="the compiler keeps about this share of each layer's activations and recomputes what is cheapest of the rest [all are kept]")
    add("--attention", choices=["auto", "sdpa", "cudnn", "flash_attention_2", "flex_attention", "eager"], default="auto", help="attention kernel [auto]")
    add("--compile", action=on_off, help="torch.compile each decoder layer [on with CUDA]")
    add("--fused-loss", action=on_off, help="LM head and cross entropy in chunks, never all logits at once [on]")

    add = parser.add_argument_group("optimization").add_argument
    add("--num-steps", type=number(int, 0), default=1000, help="optimizer steps; 0 only exports [1000]")
    add("--optimizer", choices=["adamw", "adamw8bit"], default="adamw", help="torch's fused AdamW, or torchao's with 8-bit states [adamw]")
    add("--lr", type=number(float), default=3e-4, help="peak learning rate [3e-4]")
    add("--lr-scheduler", choices=SCHEDULERS.split(), default="cosine", help="shape of the learning rate [cosine]")
    add("--warmup-steps", type=number(int, 0), help="learning rate warmup [5 %% of the steps; 0 with constant]")
    add("--weight-decay", type=number(float, 0), default=0.1, help="on matrices, not on norms and biases [0.1]")
    add("--betas", type=number(float, 0, 1), nargs=2, default=(0.9, 0.95), metavar=("B1", "B2"), help="of AdamW [0.9 0.95]")
    add("--max-grad-norm", type=number(float, 0), default=1.0, help="clip the global gradient norm; 0 never clips [1.0]")
    add("--seed", type=number(int, 0), default=42, help="of weights and data order [42]")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-interval", type=number(int, 0), default=0, help="steps between evaluations on the held-out split; 0 never [0]")
    add("--eval-steps", type=number(int, 0), default=0, help="batches per rank and evaluation; 0 takes the whole split [0]")
    add("--sample-prompt", help="text that the model continues at evaluations and at the end")
    add("--sample-tokens", type=number(int), default=128, help="length of the continuation [128]")

    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-interval", type=number(int, 0), default=0, help="steps between checkpoints, one more at the end; 0 saves only on SIGTERM and SIGUSR1 [0]")
    add("--keep-checkpoints", type=number(int), default=2, help="newest complete ones to keep [2]")
    add("--async-checkpoint", action=on_off, default=True, help="write in the background, the loop waits only for the copy [on]")
    add("--resume", default="none", metavar="{none,auto,PATH}", help="auto: the run's newest complete checkpoint, or a fresh start; PATH: this checkpoint [none]")
    add("--export", metavar="DIR", help="at the end, a folder that from_pretrained loads")

    add = parser.add_argument_group("output").add_argument
    add("--output-dir", default="outputs", help="a run writes under OUTPUT_DIR/RUN_NAME/ [outputs]")
    add("--run-name", help="[model and start time; with --resume auto the model; with --resume PATH that run's]")
    add("--log-with", choices=["none", "wandb", "tensorboard", "all"], default="none", help="trackers beside metrics.jsonl [none]")
    add("--project-name", default="train_fsdp", help="project in wandb and tensorboard [train_fsdp]")
    add("--log-interval", type=number(int), default=10, help="steps between log lines [10]")
    add("--perf-warmup-steps", type=number(int, 0), default=10, help="steps that the speed figures leave out [10]")
    add("--peak-tflops", type=number(float), help="dense bf16 peak of one GPU, for one that is not in the table")
    add("--min-mfu", type=number(float), help="acceptance gate: exit 3 at the end when the MFU after warmup is below this percentage [none]")
    add("--max-memory-gib", type=number(float), help="acceptance gate: exit 3 at the end when the fullest GPU's reserved memory was above this [none]")
    add("--profile", action="store_true", help=f"trace of {PROFILED_STEPS} steps after the warmup, and a table of where their time went; they are in no speed figure [off]")
    add("--memory-snapshot", action="store_true", help="history of every allocation on the GPU, for pytorch.org/memory_viz, also when it runs out of memory [off]")
    add("--metrics-port", type=number(int, 1, 65536), help="Prometheus endpoint of rank 0 [none]")
    add("--metrics-host", default="127.0.0.1", help="address that the endpoint listens on [127.0.0.1]")

    add = parser.add_argument_group("planning").add_argument
    add("--plan", action="store_true", help="no training: what this configuration will need and give, from one step on fake tensors")
    add("--plan-gpus", type=gpu_counts, metavar="N[,N...]", help="world size to plan for; of several the first in full and all in a table [--gpus-per-node]")
    add("--plan-gpu", metavar="NAME", help="kind of GPU to plan for, such as 'H100 SXM' or B200; training prints that plan beside its own figures [this machine's, else H100 SXM]")
    add("--plan-rates", metavar="FILE", help="JSON with measured rates that replace the table's: matmul_tflops, attention_tflops, memory_gb_per_s, ...")
    add("--gpus-per-node", type=number(int), default=8, help="[8]")
    add("--gpu-hour-usd", type=number(float), help="price of one GPU for an hour")
    add("--json", action="store_true", help="the plan as one JSON object on stdout")

    add = parser.add_argument_group("all at once").add_argument
    add("--demo", action="store_true", help="the embedded model on the embedded stories; any flag given beside it wins")
    # fmt: on

    argv = sys.argv[1:] if argv is None else argv
    if "--demo" in argv:
        parser.set_defaults(**json.loads((ASSETS / "demo" / "recipe.json").read_text()))
    args = parser.parse_args(argv)
    if args.num_steps == 0 and args.resume not in ("none", "auto"):  # what the model was stands in its checkpoint
        parser.set_defaults(**flags_of_checkpoint(args.resume), compile=False)
        args = parser.parse_args(argv)
    if args.demo and args.dataset != "demo" and not any(flag.startswith("--eval-interval") for flag in argv):
        args.eval_interval = 0  # the demo's evaluations are for its own held-out stories
    if args.precision != "fp8" and (args.fp8_recipe or args.fp8_emulate):
        parser.error("argument --fp8-recipe/--fp8-emulate: only with --precision fp8")
    if args.lr_scheduler == "constant" and args.warmup_steps:
        parser.error("argument --warmup-steps: the constant scheduler has no warmup; use constant_with_warmup")
    if args.document_mask and args.dataset == "synthetic":
        parser.error("argument --document-mask: synthetic tokens are no documents; use another --dataset")
    if args.streaming and args.dataset == "synthetic":
        parser.error("argument --streaming: synthetic tokens are read from nowhere; use another --dataset")
    if args.streaming and args.num_workers > 1:
        parser.error("argument --num-workers: with --streaming one process reads the documents in order; give 1 or 0")
    for flag, split in (("--dataset-split", args.dataset_split), ("--eval-split", args.eval_split)):
        if args.streaming and "[" in (split or ""):
            parser.error(f"argument {flag}: {split} is a slice, which --streaming cannot take; name a whole split")
    if args.document_mask and args.attention == "flash_attention_2":
        parser.error("argument --document-mask: not with flash_attention_2; use flex_attention or sdpa")
    if args.zero_stage == 0 and args.dp_replicate_size > 1:
        parser.error("argument --dp-replicate-size: stage 0 replicates on every rank already")
    measured = args.num_steps - args.perf_warmup_steps - args.profile * PROFILED_STEPS
    for flag in ("--profile",) * args.profile + ("--min-mfu",) * bool(args.min_mfu):
        if measured < 1:
            parser.error(
                f"argument {flag}: no step is left to measure; give --num-steps at least {args.num_steps - measured + 1}"
            )
    for flag, name in (("--run-name", args.run_name), ("--project-name", args.project_name)):
        if name is not None and (name.strip(". ") == "" or re.search(r"[/\\#?%:]", name)):
            parser.error(f"argument {flag}: {name!r} is not a plain folder name")
    if args.num_steps == 0 and not args.export:
        parser.error("argument --num-steps: 0 trains nothing; it goes with --export DIR")
    if args.num_steps == 0 and args.resume == "auto":
        parser.error("argument --resume: --num-steps 0 exports one checkpoint, give its PATH")
    if args.export and pathlib.Path(args.export).expanduser().exists():
        parser.error(f"argument --export: {args.export} exists already; choose another folder or remove it")
    local = args.dataset == "demo" or os.path.exists(os.path.expanduser(args.dataset))
    args.dataset_split = args.dataset_split or ("train" if local or args.streaming else "train[:5%]")
    args.given_accumulation = args.gradient_accumulation_steps  # a resume on other ranks may change it
    args.fp8_recipe = args.fp8_recipe or ("tensorwise" if args.precision == "fp8" else None)
    if args.warmup_steps is None:
        args.warmup_steps = 0 if args.lr_scheduler == "constant" else args.num_steps // 20
    if args.compile is None:
        args.compile = torch.cuda.is_available() or args.plan
    if args.activation_memory_budget is not None and not (args.compile and args.activation_checkpointing == "none"):
        parser.error("argument --activation-memory-budget: needs --compile, without --activation-checkpointing")
    args.argv = argv
    return args


def flags_of_checkpoint(resume: str) -> dict:
    """The flags that say what model a checkpoint holds; none if it cannot be read, which is reported later."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        flags = json.loads((checkpoint_folder(resume) / MANIFEST).read_text())["flags"]
        names = "model tokenizer dataset sequence_length precision fp8_recipe fp8_emulate optimizer"
        return {name: flags[name] for name in names.split()}
    return {}


MANIFEST = "manifest.json"


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint that --resume PATH means: itself, or the newest of a run's folder."""
    path = pathlib.Path(resume).expanduser()
    return path if (path / MANIFEST).exists() else max((path / "checkpoints").glob("step-*"), default=path)
