"""Settings: every flag with its default, type and help. `Args` are the flags as typed; in `Settings` the defaults that
depend on model, machine or checkpoint are decided."""

import dataclasses
import glob
import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeVar

from harness import base
from harness.flags.choices import COMPRESSIONS, DATASETS, FIELD_SUFFIXES, OPTIMIZERS, SUFFIXES, TRACKERS
from harness.flags.flag_types import (
    MAX_WORLD,
    Collect,
    DatasetWords,
    batch_size,
    evaluation_interval,
    gpu_counts,
    number,
    path,
    path_or_hub_id,
    path_or_url,
    percent,
    stage,
    text,
    token_count,
)
from harness.flags.schedules import SCHEDULES, has_warmup
from harness.flags.sources import Source, parse_sources

ASSETS = base.ROOT / "assets"
PRESETS = {path.stem: path for path in sorted((ASSETS / "presets").glob("*.json"))}
PRESETS["demo"] = ASSETS / "demo" / "config.json"
TRACKERS_HELP = "; ".join(f"{name}: {help}" for name, help in TRACKERS.items())
OPTIMIZERS_HELP = "; ".join(f"{name}: {optimizer.help}" for name, optimizer in OPTIMIZERS.items())
PROFILED_STEPS = 3
LENGTHS = ("num_steps", "num_tokens", "num_epochs")  # a run has one of them
Precision = Literal["bf16", "fp8", "fp32", "bf16-pure"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
Attention = Literal[
    "sdpa", "flash", "cudnn", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "eager"
]


def listed(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


Default = TypeVar("Default")


def flag(
    default: Default,
    help: str,
    *,
    group: str = "",
    min: float | None = None,
    max_exclusive: float = math.inf,
    only_with: str = "",
    on_resume: Literal["same", "reported", "free"] = "free",
    from_checkpoint: Literal["", "model", "data", "training"] = "",
    not_inherited: bool = False,
    table: Mapping[str, Any] | None = None,
    **options: Any,
) -> Default:
    """A field that is a flag.

    Args:
        group: opens a group of --help with this flag.
        min, max_exclusive: bounds of a number; without them it is positive.
        only_with: fields, one of which must be on, or with `field=value` have that value; else the flag has no effect.
        on_resume: a resumed run must keep it (`same`), reports a change (`reported`), or may change it (`free`).
        from_checkpoint: what the flag decides, if it is taken from the checkpoint of --resume PATH: by --num-steps 0
            and --show-samples, see `checkpoints.checkpoint_flags`, and by training, see `checkpoints.resumed_flags`;
            empty: never.
        not_inherited: True if a run's config.json as --config does not set it.
        table: its keys are the values, to which --import may add.
        options: for argparse.
    """
    options["help"] = help
    about = {"group": group, "min": min, "max_exclusive": max_exclusive, "only_with": only_with, "on_resume": on_resume}
    about |= {"from_checkpoint": from_checkpoint, "not_inherited": not_inherited, "table": table, "options": options}
    return dataclasses.field(default=default, metadata=about)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Every flag with its default; `--sequence-length` is the field `sequence_length`."""

    # fmt: off
    demo: bool = flag(
        False, "the included model on the included data; other flags override its values",
        group="presets",
    )
    config: str | None = flag(
        None,
        "TOML, or a run's config.json without its --run-name, --resume, --export; the command line overrides it; flags "
        "of the file that then have no effect are left out",
        metavar="FILE", type=path,
    )
    import_: tuple[str, ...] | None = flag(
        None,
        "Python file that is run first and registers a model type, data set, schedule, optimizer, metric or loss term "
        "(docs/OWN.md); only from the command line or TOML; repeat it for more files [none]",
        metavar="FILE.py", type=path, action=Collect, not_inherited=True,
    )

    model: str = flag(
        "smollm3-3b", f"preset ({', '.join(PRESETS)}), local folder with a config.json, or hub id [smollm3-3b]",
        group="model", type=path_or_hub_id, from_checkpoint="model",
    )
    init: Literal["random", "pretrained"] = flag(
        "random", "random weights from the config, or the safetensors of the folder or hub id [random]",
        from_checkpoint="model",
    )
    lora_rank: int = flag(
        0,
        "LoRA with peft: adapters of this rank are trained; the weights of the model are frozen, in bf16 unless with "
        "--precision fp32; 0 trains the full model [0; that of the adapters if --model is a folder of them]",
        min=0, on_resume="same", from_checkpoint="model",
    )
    lora_alpha: int | None = flag(
        None, "the output of adapters is scaled by this / --lora-rank [2 x rank]",
        only_with="lora_rank", on_resume="same", from_checkpoint="model",
    )
    lora_targets: tuple[str, ...] | None = flag(
        None,
        "linears of decoder layers that get adapters: names, or one pattern, as in peft's target_modules [all]",
        type=text, nargs="+", metavar="NAME", only_with="lora_rank", on_resume="same", from_checkpoint="model",
    )
    tokenizer: str | None = flag(None, "hub id or folder [the model's]", type=path_or_hub_id, from_checkpoint="model")

    dataset: str | tuple[str, ...] = flag(
        "roneneldan/TinyStories",
        f"hub id; {listed(SUFFIXES)} file, also {listed(COMPRESSIONS)}, a folder of them or a pattern in quotes; "
        "synthetic (random tokens, for throughput runs); demo. Several are mixed: web=a.jsonl:0.7 b.jsonl:0.3 with "
        "these shares of tokens, without numbers by size [roneneldan/TinyStories]",
        group="data", type=path_or_url, nargs="+", action=DatasetWords, metavar="DATASET", from_checkpoint="model",
    )
    mixture_stage: tuple[str, ...] | None = flag(
        None,
        "new weights of the sources from this fraction of the run on, 0 for those not named; repeat it for more stages "
        "[none]",
        metavar="SHARE:NAME=WEIGHT,...", type=stage, action=Collect, from_checkpoint="data",
    )
    max_epochs: float | None = flag(
        None, "refuse a run that would repeat a source more often than this [no limit]",
    )
    dataset_config: str | None = flag(
        None, "subset of a hub dataset, such as wikitext's wikitext-103-raw-v1 [its default]",
        from_checkpoint="data",
    )
    text_field: str = flag(
        "text",
        f"text column in {', '.join(FIELD_SUFFIXES)} and hub datasets [the first of conversations, input_ids and "
        "text]",
        from_checkpoint="data",
    )
    dataset_split: str | None = flag(
        None, "training split, with an optional slice [train[:5%%]; of local data and with --streaming: train]",
        from_checkpoint="data",
    )
    eval_split: str | None = flag(
        None,
        "eval split: a split of --dataset, with an optional slice, or another file, folder, pattern or hub id [the "
        "split validation; if there is none, one of every 20 documents]",
        type=path_or_url, only_with="eval_interval", from_checkpoint="data",
    )
    sequence_length: int | None = flag(
        None, "tokens per sequence [8192, or the model's number of positions if smaller]",
        on_resume="same", from_checkpoint="model",
    )
    rope_scaling: Literal["yarn"] | None = flag(
        None, "yarn: scale the RoPE of a model that has fewer positions than --sequence-length [none]",
        on_resume="same", from_checkpoint="model",
    )
    batch_size: int | Literal["auto"] = flag(
        1, "sequences per rank and microbatch; auto takes the largest that --plan says fits [1]",
        type=batch_size, on_resume="reported", from_checkpoint="data",
    )
    gradient_accumulation_steps: int = flag(
        1, "microbatches per optimizer step [1]",
        on_resume="reported", from_checkpoint="data",
    )
    document_mask: bool | None = flag(
        None,
        "attention and labels stay inside each document, which ends with the end-of-text token [off; on for "
        "conversations and data with labels, unless with --packing none]",
        on_resume="reported", from_checkpoint="model",
    )
    packing: Literal["concatenate", "best-fit", "none"] | None = flag(
        None,
        "concatenate cuts documents at the end of a sequence; best-fit packs full documents and pads; none pads each "
        "document to one sequence [concatenate; best-fit for conversations and data with labels]",
        on_resume="same", from_checkpoint="data",
    )
    chat_template: str | None = flag(
        None,
        f"Jinja file that renders conversations, or a name: {', '.join(base.chat_templates())} [the tokenizer's]",
        metavar="FILE", type=path, from_checkpoint="model",
    )
    chat_loss: Literal["assistant", "all"] = flag(
        "assistant",
        "tokens of a conversation with a loss: those of the assistant, of completions too, or all [assistant]",
        from_checkpoint="data",
    )
    streaming: bool = flag(
        False, "read and tokenize while training: no full download, no cache; full splits only [off]",
        on_resume="same", from_checkpoint="data",
    )
    streams: int | None = flag(
        None,
        "shards of a stream, divided among ranks and workers [the smallest multiple of a step's sequences that is at "
        "least the number of files]",
        max_exclusive=2**20, only_with="streaming",
    )
    skip_bad_records: bool = flag(
        False,
        "count and skip unreadable records: a text that is null or a number, broken JSON, a line of a text file with "
        "bytes that are not UTF-8 [the first one is an error]",
        from_checkpoint="data",
    )
    num_workers: int | None = flag(
        None, "data loading processes per rank [1; 0 on a CPU with cached tokens]",
        min=0, max_exclusive=1025,
    )
    cache_dir: str | None = flag(None, "folder for tokenized data [~/.cache/train_fsdp]", type=path)

    zero_stage: Literal[0, 1, 2, 3] = flag(
        3,
        "0 replicated, like DDP; 1 gradients reduced once per optimizer step, optimizer sharded (same as 2 with one "
        "microbatch); 2 parameters kept after forward; 3 parameters resharded after forward [3]",
        group="sharding", on_resume="reported",
    )
    dp_replicate_size: int = flag(1, "HSDP: this many replicas of the shard group [1]", on_resume="reported")
    context_parallel: int = flag(
        1,
        "this many ranks share each sequence: each has a part of the tokens and, in attention, of the heads (Ulysses) "
        "[1]",
        on_resume="reported", metavar="RANKS",
    )
    defer_grad_sync: bool = flag(False, "reduce-scatter only on the last microbatch (stages 0 and 1 imply it)")
    cpu_offload: bool = flag(False, "parameters, gradients and optimizer on the host")

    precision: Precision | None = flag(
        None,
        "bf16: fp32 master weights, bf16 compute and all-gather, fp32 gradient reduction; fp8: bf16 plus torchao "
        "float8 linears; bf16-pure: everything bf16 [bf16 on a GPU and in a plan for one, fp32 on a CPU; a "
        "checkpoint's on a resume]",
        group="precision and techniques", on_resume="reported", from_checkpoint="model",
    )
    fp8_recipe: Fp8Recipe | None = flag(
        None, "float8 scaling; tensorwise all-gathers in float8 too [tensorwise]",
        only_with="precision=fp8", on_resume="reported", from_checkpoint="model",
    )
    fp8_emulate: bool = flag(
        False, "emulate float8 on other hardware, without its speed",
        only_with="precision=fp8", from_checkpoint="model",
    )
    activation_checkpointing: Literal["none", "selective", "full", "offload"] = flag(
        "none",
        "selective keeps matmul and attention outputs and recomputes the rest; full keeps layer inputs only; offload "
        "keeps them in host memory [none]",
    )
    attention: Literal["auto", Attention] = flag(
        "auto", "attention kernel; flash and cudnn are torch's SDPA backends [auto]",
    )
    compile: bool | None = flag(None, "torch.compile each decoder layer [on with CUDA]")
    fused_loss: bool | None = flag(None, "LM head and cross entropy in chunks, without full logits [on]")

    num_steps: int = flag(
        1000,
        "optimizer steps of the run, including those before a resume; 0 does not train, but evaluates (--eval-interval "
        "1), generates samples (--sample-prompt) or exports (--export) [1000]",
        min=0, group="optimization", on_resume="reported", from_checkpoint="training",
    )
    num_tokens: int | None = flag(
        None,
        "instead of --num-steps: tokens of the run, with the padding of --packing best-fit, such as 20e9, 20B, 500M or "
        "1.5T [--num-steps]",
        type=token_count, from_checkpoint="training",
    )
    num_epochs: float | None = flag(
        None, "instead of --num-steps: passes over the data, such as 3 or 0.5 [--num-steps]",
        max_exclusive=1_000_000, from_checkpoint="training",
    )
    optimizer: str = flag(
        "adamw", f"{OPTIMIZERS_HELP} [adamw]",
        table=OPTIMIZERS, on_resume="same", from_checkpoint="model",
    )
    lr: float | None = flag(
        None, "peak learning rate [3e-4; --init pretrained: 2e-5; --lora-rank: 2e-4; a checkpoint's on a resume]",
        on_resume="reported",
    )
    adamw_lr: float | None = flag(
        None, "peak learning rate of muon's AdamW for embedding, head, norms and biases [--lr]",
        only_with="optimizer=muon", on_resume="reported", from_checkpoint="training",
    )
    lr_scheduler: str = flag(
        "cosine", "learning rate schedule [cosine]",
        table=SCHEDULES, on_resume="reported", from_checkpoint="training",
    )
    warmup_steps: int | None = flag(
        None, "steps of learning rate warmup [5 %% of the steps; 0 with constant]",
        min=0, on_resume="reported",
    )
    decay_steps: int | None = flag(
        None,
        "steps of the decay to 0 at the end of warmup_stable_decay; 0 ends in the stable phase, to be decayed later "
        "from a checkpoint [a fifth of --num-steps, at most what is left after warmup]",
        min=0, only_with="lr_scheduler=warmup_stable_decay", on_resume="reported", from_checkpoint="training",
    )
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = flag(
        "cosine", "shape of the decay of warmup_stable_decay [cosine]",
        only_with="lr_scheduler=warmup_stable_decay", on_resume="reported", from_checkpoint="training",
    )
    weight_decay: float = flag(
        0.1, "for matrices, not for norms and biases [0.1]",
        min=0, on_resume="reported", from_checkpoint="training",
    )
    betas: tuple[float, float] = flag(
        (0.9, 0.95), "betas of AdamW, also in muon, whose own momentum is 0.95 [0.9 0.95]",
        type=number(float, 0, 1), nargs=2, metavar=("B1", "B2"), on_resume="reported", from_checkpoint="training",
    )
    max_grad_norm: float = flag(
        1.0, "clip the global gradient norm; 0 never clips [1.0]",
        min=0, on_resume="reported", from_checkpoint="training",
    )
    seed: int = flag(
        42, "seed of weights and data order [42]",
        min=0, max_exclusive=2**63, on_resume="same", from_checkpoint="data",
    )

    eval_interval: int | Literal["epoch"] = flag(
        0, "steps between evaluations on the eval split, or epoch: at the end of each; 0: never [0]",
        type=evaluation_interval, group="evaluation", from_checkpoint="data",
    )
    eval_steps: int = flag(
        0,
        "batches per rank and evaluation (--eval-interval has the steps between evaluations); 0: the full split, or "
        "256 sequences of a stream without one [0]",
        min=0, only_with="eval_interval", from_checkpoint="data",
    )
    show_samples: int | None = flag(
        None, "no training: print the training documents of this optimizer step of a run [none]",
        metavar="STEP",
    )
    compare: tuple[str, ...] | None = flag(
        None,
        "no training: write OUTPUT_DIR/compare.html with the curves of these runs, their last metrics and the flags "
        "that differ",
        nargs="+", metavar="RUN", type=path,
    )
    average_checkpoints: int | None = flag(
        None,
        "with --num-steps 0 --resume RUN: evaluate, sample or export the mean of the run's newest K checkpoints, "
        "summed in fp32 [no average]",
        metavar="K",
    )
    sample_prompt: tuple[str, ...] | None = flag(
        None,
        "prompt for a sample at evaluations and at the end; for chat data a user's message; or a .json or .jsonl file "
        "of messages to answer; repeat it for more prompts",
        type=text, action=Collect,
    )
    sample_tokens: int = flag(128, "maximum number of tokens in a sample [128]", only_with="sample_prompt demo")

    checkpoint_interval: int = flag(
        0,
        "steps between checkpoints; 0 saves only at the end, on SIGTERM, SIGUSR1 or SIGHUP, and on Ctrl-C in a run of "
        "more than five minutes [0]",
        min=0, group="checkpoints",
    )
    keep_checkpoints: int = flag(
        2, "number of newest complete checkpoints to keep [2]",
        on_resume="reported", from_checkpoint="training",
    )
    keep_best: bool = flag(
        False,
        "save a checkpoint at each evaluation, and keep the one with the lowest eval loss [off]",
        only_with="eval_interval", on_resume="reported", from_checkpoint="training",
    )
    async_checkpoint: bool = flag(
        True, "write checkpoints in the background; training waits only for a copy [on]",
        only_with="checkpoint_interval keep_best",
    )
    final_checkpoint: bool | None = flag(
        None,
        "save a checkpoint after the last step [on; off for --dataset synthetic without --checkpoint-interval, and if "
        "the disk is too small]",
    )
    resume: str = flag(
        "none",
        "auto: the run's newest complete checkpoint, or a fresh start; PATH: this checkpoint, and where not given "
        "its run's flags of model, data and optimization, --keep-best and --keep-checkpoints [none]",
        metavar="{none,auto,PATH}", type=path, not_inherited=True,
    )
    export: str | None = flag(
        None, "at the end write a folder for from_pretrained, or for peft with --lora-rank",
        metavar="DIR", type=path, not_inherited=True,
    )
    export_weights: Literal["adapters", "merged"] | None = flag(
        None, "with --lora-rank: merged adds the adapters to the weights of the model [adapters]",
        only_with="export", not_inherited=True,
    )

    timeout_minutes: float = flag(
        10.0,
        "timeout of ranks that wait for each other while none works; the job then ends with a line that names the "
        "missing rank [10]",
        min=0.001, max_exclusive=1e7, group="failures",
    )

    max_skipped: int = flag(
        5, "steps with a NaN or infinite gradient norm are skipped; more than this in a row end the run [5]",
        min=0, metavar="STEPS",
    )

    output_dir: str = flag("outputs", "a run writes into OUTPUT_DIR/RUN_NAME/ [outputs]", group="output", type=path)
    run_name: str | None = flag(
        None, "name of the run [model and start time; with --resume auto the model; with --resume PATH that run's]",
        not_inherited=True,
    )
    log_with: Literal["none", *TRACKERS, "all"] = flag(  # type: ignore[valid-type]  # the rows of a table
        "none", f"trackers for the metrics. {TRACKERS_HELP} [none]",
    )
    project_name: str = flag(
        "train_fsdp", "project in wandb [train_fsdp]",
        only_with="log_with=wandb log_with=all",
    )
    log_interval: int = flag(10, "steps between log lines [10]")
    metrics_port: int | None = flag(None, "Prometheus endpoint of rank 0 [none]", min=1, max_exclusive=65536)
    metrics_host: str = flag("127.0.0.1", "address of the endpoint [127.0.0.1]", only_with="metrics_port")

    perf_warmup_steps: int = flag(
        10, "first steps that speed metrics leave out; unrelated to --warmup-steps [10]",
        min=0, group="metrics and gates",
    )
    peak_tflops: float | None = flag(
        None, "dense bf16 peak of a GPU, in TFLOPS, if it is not in assets/gpus.csv", max_exclusive=100_000,
    )
    min_mfu: float | None = flag(
        None, "acceptance gate: exit 3 at the end when the MFU after warmup is below this, in percent [none]",
        type=percent,
    )
    max_memory_gib: float | None = flag(
        None, "acceptance gate: exit 3 at the end when the fullest GPU's reserved memory was above this [none]",
        max_exclusive=100_000,
    )
    profile: bool = flag(
        False,
        f"trace {PROFILED_STEPS} steps after --perf-warmup-steps and print the shares of their time; speed metrics "
        "leave them out [off]",
    )
    memory_snapshot: bool = flag(
        False,
        "record GPU allocations for pytorch.org/memory_viz; written when memory runs out too [off]",
    )

    plan: bool = flag(
        False, "no training: predict memory and speed, from one step on fake tensors",
        group="planning",
    )
    plan_gpus: tuple[int, ...] | None = flag(
        None,
        "number of GPUs to plan for; several nodes are full ones. Of several numbers the first is planned in detail, "
        "all are in a table [--gpus-per-node]",
        type=gpu_counts, metavar="N[,N...]", only_with="plan",
    )
    plan_gpu: str | None = flag(
        None,
        "GPU to plan for, such as 'H100 SXM' or B200; training prints that plan with what it measured [this machine's, "
        "else H100 SXM]",
        metavar="NAME",
    )
    gpus_per_node: int = flag(8, "GPUs of a node in a plan [8]", max_exclusive=MAX_WORLD + 1, metavar="GPUS")
    plan_seconds: float = flag(
        30.0, "time limit for planning, in seconds; 0 plans only the given configuration [30]",
        min=0, only_with="plan",
    )
    gpu_hour_usd: float | None = flag(
        None, "price of a GPU for an hour; the plan has the cost of a billion tokens, and with --num-steps of the run",
        max_exclusive=1_000_000, only_with="plan",
    )
    json: bool = flag(False, "print the plan, or with --num-steps 0 the evaluation, as one JSON object on stdout")
    plan_details: bool = flag(
        False, "print memory, time and traffic of a step, and all assumptions",
        only_with="plan",
    )
    own_plan: bool = flag(
        True, "plan a run on a GPU in another process, and print the plan with the metrics at the end [on]",
    )

    # not flags:
    explicit: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # as typed
    inherited: tuple[str, ...] = ()  # fields of `explicit` that come from the checkpoint of --resume PATH
    eval_sequences: int = 0  # maximum sequences per source and evaluation, over all ranks; 0: all
    # fmt: on

    def sources(self) -> list[Source]:
        """The sources that --dataset names."""
        return parse_sources(self.dataset)

    def describe_dataset(self) -> str:
        """--dataset as it was typed."""
        return base.one_or_more(self.dataset)

    def trains(self) -> bool:
        """True if this process trains: it does not plan, print samples, compare runs or only evaluate."""
        return not (self.plan or self.show_samples or self.compare) and self.num_steps > 0

    def saves_final_checkpoint(self) -> bool:
        """True if the state after the last step is saved."""
        if self.final_checkpoint is not None:
            return self.final_checkpoint
        return self.saves_during_training() or self.dataset != "synthetic"

    def saves_during_training(self) -> bool:
        """True if checkpoints are due before the last step."""
        return self.checkpoint_interval > 0 or (self.keep_best and bool(self.eval_interval))

    def saves_async(self) -> bool:
        """True if checkpoints are written in the background, from copies, while training continues."""
        return self.saves_during_training() and self.async_checkpoint

    def groups(self, world: int) -> int:
        """Groups of ranks that read the same sequences: with --context-parallel 1 each rank is one. At least one, as
        --show-samples takes no more ranks."""
        return max(1, world // self.context_parallel)

    def shards(self, world: int) -> int:
        """Ranks of a shard group."""
        return 1 if self.zero_stage == 0 else world // self.dp_replicate_size

    def tokens_per_step(self, world: int) -> int:
        """Tokens of one optimizer step: every group of ranks, every microbatch."""
        return self.groups(world) * self.gradient_accumulation_steps * int(self.batch_size) * self.sequence_length

    def steps_for(self, tokens: int | Fraction, world: int) -> int:
        """The optimizer steps that train on at least so many tokens."""
        return math.ceil(Fraction(tokens, self.tokens_per_step(world)))

    def describe_epochs(self) -> str:
        """--num-epochs in words; empty without it."""
        if not self.num_epochs:
            return ""
        return f"{self.num_epochs:g} epoch{'' if self.num_epochs == 1 else 's'}"

    def part_length(self) -> int | None:
        """Tokens of a sequence that a rank computes."""
        return self.sequence_length and self.sequence_length // self.context_parallel

    def batch_size_multiple(self) -> int:
        return batch_size_multiple(self.fp8_recipe, self.part_length())

    def describe_batch(self, world: int) -> str:
        """The batch in words: `4 ranks x 2 microbatches x 1 sequence x 8,192 = 65,536 tokens a step`; with
        --context-parallel 2 it begins `4 ranks / 2 x`."""
        counts = {"rank": world, "microbatch": self.gradient_accumulation_steps, "sequence": int(self.batch_size)}
        ranks, *others = [base.counted(count, name) for name, count in counts.items()]
        if self.context_parallel > 1:
            ranks += f" / {self.context_parallel}"
        sequences = " x ".join([ranks, *others])
        return f"{sequences} x {self.sequence_length:,} = {self.tokens_per_step(world):,} tokens a step"


class Args(Flags):
    """The flags as typed: `resolving.resolve` decides the defaults that are None or `auto`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Flags):
    """The flags of a run or a plan with every default decided by `resolving.resolve`. It decides the fields below; None
    in another field means none, or each source's own."""

    sequence_length: int = dataclasses.field()
    batch_size: int = dataclasses.field()
    document_mask: bool = dataclasses.field()
    num_workers: int = dataclasses.field()
    precision: Precision = dataclasses.field()
    attention: Attention = dataclasses.field()
    compile: bool = dataclasses.field()
    fused_loss: bool = dataclasses.field()
    lr: float = dataclasses.field()
    warmup_steps: int = dataclasses.field()
    final_checkpoint: bool = dataclasses.field()


# Peak learning rates of AdamW. 2e-5 is what Llama 2 was fine-tuned with (arXiv 2307.09288, section 3.1), and the
# default of TRL's SFTConfig; 2e-4 is ten times that, as TRL's documentation advises for LoRA.
DEFAULT_LR, LORA_LR = {"random": 3e-4, "pretrained": 2e-5}, 2e-4


def choose_lr(settings: Flags, manifest: dict | None) -> tuple[float, str]:
    """(the peak learning rate, its origin in words): as typed, else that of the checkpoint of `manifest`, else that of
    --demo, else one that suits the weights. The same for `Args` and for the `Settings` that have it."""
    default, origin = DEFAULT_LR[settings.init], f"the default of --init {settings.init}"
    if settings.lora_rank:
        default, origin = LORA_LR, "the default of --lora-rank"
    if "lr" in settings.explicit:
        return settings.explicit["lr"], "by --lr"
    if manifest:
        return manifest["flags"]["lr"], "as in the checkpoint"
    if settings.lr not in (None, default):
        return settings.lr, "that of --demo"
    return default, origin


def batch_size_multiple(fp8_recipe: Fp8Recipe | None, sequence_length: int | None) -> int:
    """The number that divides every possible batch size. In float8 the matmul of the weights' gradient takes
    multiples of 16 tokens of a microbatch; rowwise_with_gw_hp computes it in bf16."""
    if fp8_recipe not in ("tensorwise", "rowwise"):
        return 1
    return 16 // math.gcd(16, sequence_length or 16)


def default_warmup(lr_scheduler: str, num_steps: int) -> int:
    """The default of --warmup-steps."""
    return num_steps // 20 if has_warmup(lr_scheduler) else 0


FLAGS = {field.name: field for field in dataclasses.fields(Flags) if field.metadata}
COLLECTED = [name for name, field in FLAGS.items() if field.metadata["options"].get("action") is Collect]


def flags_where(name: str, value: object) -> list[str]:
    """The flags whose metadata `name` is `value`, as in `flags_where("on_resume", "same")`."""
    return [flag for flag, field in FLAGS.items() if field.metadata[name] == value]


def record_flags(settings: Flags) -> dict[str, dict]:
    """The flags of a run for its config.json and its checkpoints: `given`, those of the command line and --config, as
    typed; `flags`, all of them as `settings` has them, with `eval_sequences`."""
    resolved = {name: getattr(settings, name) for name in (*FLAGS, "eval_sequences")}
    return {"given": dict(settings.explicit), "flags": resolved}


def default_split(dataset: str, streaming: bool) -> str:
    """The default of --dataset-split for a source."""
    return "train" if is_local(dataset) or streaming else "train[:5%]"


def as_flag(field: str) -> str:
    """`--num-steps` of the field `num_steps`, `--import` of `import_`."""
    return f"--{field.rstrip('_').replace('_', '-')}"


def is_pattern(target: str) -> bool:
    """True if one of --lora-targets is a pattern for full names, not a name."""
    return re.search(r"[^\w.]", target) is not None


def is_local(dataset: str) -> bool:
    """True if a source is files or registered, not a hub id: an existing path, a pattern, or a URL."""
    path = os.path.expanduser(dataset)
    return (
        dataset == "demo" or dataset in DATASETS or base.is_url(dataset) or os.path.exists(path) or glob.has_magic(path)
    )


def is_eval_dataset(split: str | None) -> bool:
    """True if an --eval-split has the form of a dataset of its own (a file, folder, pattern, URL or hub id) or is
    registered, and is not a split of --dataset."""
    if split is None:
        return False
    return split in DATASETS or "/" in split or split.startswith("~") or has_suffix(split, SUFFIXES)


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """True if a file name, without a suffix of compression, ends with one of these suffixes."""
    stem, last_suffix = os.path.splitext(name.lower())
    if last_suffix not in COMPRESSIONS:
        stem += last_suffix
    return stem.endswith(tuple(suffixes))
