"""FLOP and MFU math and the clock of train_fsdp.py, as plain functions over causal language models of transformers;
and, for training loops of your own, `get_dataset` and `create_collate_fn`.

Importing this module starts nothing and needs no GPU, no network and no optional package.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness import base, data

if TYPE_CHECKING:
    import accelerate
    import transformers

create_collate_fn = data.create_collate_fn

__all__ = [
    "PerformanceTracker",
    "create_collate_fn",
    "estimate_mfu",
    "get_dataset",
    "get_flops_by_length",
    "get_gpu_peak_tflops",
    "get_model_flops_per_token",
]


def get_dataset(
    tokenizer: "transformers.PreTrainedTokenizerBase | None",
    seq_len: int,
    accelerator: "accelerate.Accelerator | None" = None,
    dataset: str | os.PathLike | Sequence[str | os.PathLike] = "roneneldan/TinyStories",
    split: str | None = None,
    vocab_size: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    skip_bad_records: bool = False,
    text_field: str | tuple[str, ...] = ("input_ids", "text"),
    subset: str | None = None,
    packing: str | None = None,
    chat_template: str | None = None,
    chat_loss: str = "assistant",
    document_mask: bool | None = None,
    shuffle: bool = True,
    seed: int = 42,
) -> data.PackedDataset | data.TrainingData:
    """The sequences of a corpus, shuffled: tokenized once, kept as one flat file, and mapped. Token files are mapped
    where they lie. The main process of each node tokenizes, on all cores; the others map the same file.

    Returns a `data.TrainingData`, the same in each process: its sample i is that of a run with this seed, and its
    length is one epoch, of a mixture the samples in which each source is read once. With `shuffle=False` a
    `data.PackedDataset`, in the order of the corpus.

    Args:
        tokenizer: of transformers; its `eos_token` goes after each document. None for token files.
        accelerator: the run's `Accelerator`, or None for one process.
        dataset: hub id, with its `subset` if it has several, a file, folder, pattern or URL, or demo. A list of
            several, each `[name=]dataset[:weight]`, is a mixture.
        split: with an optional slice; by default `train`, of hub data its first 5 %.
        vocab_size: embeddings of the model; by default the tokenizer's own size. Required without a tokenizer.
        cache_dir: where the flat files lie; by default `$XDG_CACHE_HOME/train_fsdp` or `~/.cache/train_fsdp`.
        text_field: column of the text, of messages, or, if it is `input_ids`, of token ids. One name: that column.
            Several names: a record's conversation if it has one, else the first of these columns that it has. With ids,
            `labels`, `attention_mask` and masks of the loss are read.
        skip_bad_records: leave out, and count, records that have no text; otherwise the first is a UserError.
        packing: "concatenate" cuts documents where sequences end, "best-fit" fills sequences with whole ones, "none"
            pads each to a sequence of its own; by default conversations and rows with labels are packed best-fit and
            all else concatenated.
        chat_template: file with the jinja template of conversations; by default the tokenizer's.
        chat_loss: which tokens of conversations are trained on: those of the "assistant", or "all".
        document_mask: True keeps attention and labels inside each document: batches have `position_ids` that begin
            again at 0 in each. By default for conversations and rows with labels; never with `packing="none"`.
        shuffle: False for the order of the corpus, which mixtures do not take.
        seed: of the order, and of best-fit packing.

    Raises:
        UserError: no such data, split, packing or chat_loss, no text in it, the hub is not reachable, less than one
            sequence, a token id without an embedding, a mixture that is not to be shuffled, a chat template without
            conversations.
    """
    if packing not in (None, "concatenate", "best-fit", "none"):
        raise base.UserError(f"packing={packing!r}: give concatenate, best-fit or none")
    if chat_loss not in ("assistant", "all"):
        raise base.UserError(f"chat_loss={chat_loss!r}: give assistant or all")
    if tokenizer is None and vocab_size is None:
        raise base.UserError("vocab_size: give the model's number of embeddings, as there is no tokenizer")
    reader = data.CorpusReader(
        tokenizer=tokenizer,
        seq_len=seq_len,
        vocab_size=vocab_size or len(tokenizer),
        cache_dir=cache_dir,
        skip_bad_records=skip_bad_records,
        packing=packing,
        chat_template=chat_template,
        chat_loss=chat_loss,
        document_mask=document_mask,
        seed=seed,
        is_main=accelerator is None or accelerator.is_local_main_process,
    )
    names = os.fspath(dataset) if isinstance(dataset, str | os.PathLike) else [os.fspath(name) for name in dataset]
    return data.open_sequences(reader, names, split, text_field, subset, shuffle)


def get_gpu_peak_tflops(name: str | None = None) -> float | None:
    """Dense bf16 peak in TFLOPS, from assets/gpus.csv, of the GPU with this name of its driver, by default the current
    GPU; None for a GPU that is not listed, and for a CPU."""
    if name is None:
        name = base.gpu_name()
    gpu = base.find_gpu(name) if name else None
    return gpu.peak_tflops if gpu else None


def get_model_flops_per_token(
    model: "transformers.PreTrainedModel | transformers.PretrainedConfig", seq_len: int, causal: bool = False
) -> int:
    """FLOPs of forward and backward per token, by the formula of PaLM (arXiv 2204.02311), appendix B:

        6 x (parameters of the matmuls that a token passes) + 12 x layers x heads x head_dim x seq_len

    Key and value have the real number of KV heads; of a mixture only the active experts count; the LM head counts once,
    tied or not, and the embedding not at all. Sliding windows and chunks bound the keys that a query meets, but not in
    eager attention, which computes every score. `causal` counts those keys only that come before the query.

    The formula is used if torch's own counter confirms it on four tokens of this very model. FLOPs of other models
    (linear attention, latent projections of keys) come from torch's counter, which has no causal count.

    For models with frozen weights, which have no gradient, FLOPs come from torch's counter: about 4 x N if all but
    adapters is frozen. The first layer takes less than the others, as nothing before it is trained.

    `model` is a causal language model of transformers, also sharded or with peft's adapters, or a config, all of whose
    weights count as trained.

    Raises:
        ValueError: the FLOPs are unknown, or those of causal attention.
    """
    return round(float(get_flops_by_length(model, np.array([seq_len]), causal)[0]))


def get_flops_by_length(
    model: "transformers.PreTrainedModel | transformers.PretrainedConfig", lengths: np.ndarray, causal: bool = False
) -> np.ndarray:
    """For each of the ascending `lengths`: FLOPs per token, as `get_model_flops_per_token` counts them, in a document
    of so many tokens, with attention inside it. Returns float64 of the same shape."""
    import transformers

    from harness import model as models  # it loads the models of transformers, which takes seconds

    config = model if isinstance(model, transformers.PretrainedConfig) else model.config
    meta_model = models.eager_on_meta(config)
    text_config = meta_model.config.get_text_config()
    matmuls = 6 * matmul_parameters(meta_model, text_config)
    skips_masked = not models.computes_every_score(config)
    by_formula = 4 * (matmuls + attention_flops(text_config, np.array([4])).sum())
    formula_holds = models.count_flops(meta_model, 4) == by_formula
    if causal and not formula_holds:
        problem = f"the FLOPs of {text_config.model_type} come from torch's counter, which knows no causal masks"
        raise ValueError(f"causal=True: {problem}")
    has_frozen = isinstance(model, torch.nn.Module) and models.has_frozen(model)
    if formula_holds and not has_frozen:
        return matmuls + attention_flops(text_config, lengths, skips_masked, causal).sum(0)
    if has_frozen:
        models.freeze_as_in(model, meta_model)
    # torch counts whole score matrices; what masks leave out of them is subtracted
    masked_out = attention_flops(text_config, lengths) - attention_flops(text_config, lengths, skips_masked, causal)
    if has_frozen and masked_out.any():
        # with frozen weights a layer may compute a part of attention's products only: the part that torch counts
        formula_per_key = attention_flops(text_config, np.array([1]))
        masked_out *= models.attention_flops_per_key(meta_model)[:, None] / np.maximum(formula_per_key, 1)
    return counted_by_length(meta_model, lengths) - masked_out.sum(0)


def counted_by_length(meta_model: torch.nn.Module, lengths: np.ndarray) -> np.ndarray:
    """FLOPs per token of sequences of these ascending lengths, as torch counts them. They are linear in the length, so
    two counts give all."""
    from harness import model as models

    longest = int(lengths[-1])
    at_longest = models.count_flops(meta_model, longest) / longest
    if len(lengths) == 1:
        return np.array([at_longest])
    half = max(longest // 2, 1)
    at_half = models.count_flops(meta_model, half) / half
    per_position = (at_longest - at_half) / max(longest - half, 1)
    return at_longest - per_position * (longest - lengths)


def matmul_parameters(model: torch.nn.Module, config: "transformers.PretrainedConfig") -> int:
    """Parameters of the matmuls that one token passes. Of a mixture's experts only those count that are active by the
    config. Experts are modules in a list named `experts`, or one weight (experts, outputs, inputs)."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "top_k")
    active = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    active = active[0] if isinstance(active, list) else active  # one for each layer
    total = 0
    for path, module in model.named_modules(remove_duplicate=False):
        experts = re.match(r"(.*\bexperts)\.\d+(\.|$)", path)
        for name, weight in module.named_parameters(recurse=False):
            if isinstance(module, torch.nn.Embedding) or weight.dim() < 2 or name.endswith("bias"):
                continue
            if experts:
                total += weight.numel() * active // len(list(model.get_submodule(experts[1]).children()))
            elif weight.dim() == 3 and len(weight) > 1:  # a stack of experts
                total += weight[0].numel() * active
            else:
                total += weight.numel()
    return total


def attention_flops(
    config: "transformers.PretrainedConfig", lengths: np.ndarray, skips_masked: bool = False, causal: bool = False
) -> np.ndarray:
    """FLOPs per token of softmax attention in sequences of each of `lengths`, float64 (layers, lengths): in each layer
    6 x heads x (head_dim of keys + that of values) x keys.

    A query meets all keys of its sequence, or with `skips_masked` those of its layer's window or chunk. If `causal`, it
    meets, on average over the sequence, those of them that come before it.
    """
    # Without types all layers are alike: sliding, which without a window is full attention. Moshi ignores its window.
    default = "full_attention" if config.model_type == "moshi" else "sliding_attention"
    layer_types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    flops, positive = np.zeros((len(layer_types), len(lengths))), np.maximum(lengths, 1)
    for index, layer_type in enumerate(layer_types):
        layer = config.per_layer_config[index]  # transformers' view: the config as this layer has it
        heads = getattr(layer, "num_attention_heads", 0)
        if not heads:
            continue
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        qk_dim, v_dim = (getattr(layer, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        keys = lengths
        if skips_masked and layer_type == "sliding_attention":
            keys = np.minimum(getattr(layer, "sliding_window", None) or lengths, lengths)
        if skips_masked and layer_type == "chunked_attention":
            chunk = np.minimum(getattr(layer, "attention_chunk_size", None) or positive, positive)
            last_chunk = lengths % chunk
            keys = (lengths // chunk * chunk**2 + last_chunk**2) / positive
        if causal and layer_type == "chunked_attention":  # a chunk has no keys before it
            keys = keys / 2
        elif causal:  # the first queries have no full window before them
            keys = keys * (1 - keys / (2 * positive))
        flops[index] = 6 * heads * (qk_dim + v_dim) * keys
    return flops


def estimate_mfu(
    model_flops_per_token: float,
    num_tokens: float,
    time_elapsed: float,
    num_gpus: int,
    peak_tflops: float | None = None,
) -> dict[str, float]:
    """Speed of `num_gpus` devices that together processed `num_tokens` tokens in `time_elapsed` seconds.

    `num_tokens` is global, of all ranks and microbatches; do not divide it by `num_gpus` before. Returns
    `tokens_per_sec` and `actual_tflops_per_sec`, both global, and if the dense peak of one device is known (by default
    the current GPU's) `theoretical_tflops_total` (peak x num_gpus) and `mfu_percent` (100 x actual / it). A ValueError
    if `time_elapsed` or `num_gpus` is not positive.
    """
    if time_elapsed <= 0 or num_gpus <= 0:
        raise ValueError(f"time_elapsed ({time_elapsed}) and num_gpus ({num_gpus}) must be positive")
    tokens_per_sec = num_tokens / time_elapsed
    metrics = {"tokens_per_sec": tokens_per_sec, "actual_tflops_per_sec": tokens_per_sec * model_flops_per_token / 1e12}
    if peak_tflops is None:
        peak_tflops = get_gpu_peak_tflops()
    if peak_tflops:
        metrics["theoretical_tflops_total"] = peak_tflops * num_gpus
        metrics["mfu_percent"] = 100 * metrics["actual_tflops_per_sec"] / metrics["theoretical_tflops_total"]
    return metrics


@dataclass(eq=False)
class PerformanceTracker:
    """Speed of the steps after warmup.

    An interval is the steps between two readings of the clock: at the end of the warmup (without one, at the start),
    and in each call of `step` with `synchronize`. The device is synchronized at both ends, and around a pause. Give
    every step its tokens; with `synchronize=False` a step is only counted and costs nothing.
    """

    warmup_steps: int = 10  # left out at the start: compilation, allocator, autotuning
    num_gpus: int = 1  # GPUs that share the tokens
    peak_tflops: float | None = None  # dense, of one device; None: that of the current GPU; 0: not known, no MFU

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; the warmup begins again."""
        self.steps_seen = 0
        self.warmup_seconds = 0.0  # this and `intervals` are read by `TrainState.productive_seconds`
        self.total = dict.fromkeys(("steps", "tokens", "flops", "seconds", "data_wait"), 0.0)
        self.intervals: list[tuple[float, float]] = []  # (steps, seconds)
        self._start: float | None = None  # when the clock was started; None while it is stopped
        self.start_interval()

    def start_interval(self) -> None:
        """Restart the clock: what came before, such as setting a run up, is in no interval."""
        base.wait_for_device()
        self.interval = dict.fromkeys(self.total, 0.0)
        self._start = time.perf_counter()

    def step(self, batch_tokens: int, model_flops_per_token: float, synchronize: bool = True) -> dict[str, Any]:
        """Count one optimizer step of `batch_tokens` tokens (global: every rank, every microbatch).

        Returns `{}` in warmup and for a step that is only counted, `{"warmup_completed": True}` once, and afterwards
        the metrics of the interval that this step ends: those of `estimate_mfu` and `flops_per_token`,
        `tokens_per_sec_per_gpu`, `steps_per_sec`, `step_time_ms`, `data_wait_percent`; on a GPU also this process's
        peaks so far in GiB, `peak_memory_active`, `peak_memory_alloc`, `peak_memory_reserved`.
        """
        self.steps_seen += 1
        if self.steps_seen < self.warmup_steps:
            return {}
        if self.steps_seen == self.warmup_steps:
            base.wait_for_device()
            self.warmup_seconds = self.interval["seconds"] + time.perf_counter() - self._start
            self.start_interval()
            return {"warmup_completed": True}
        self.interval["steps"] += 1
        self.interval["tokens"] += batch_tokens
        self.interval["flops"] += batch_tokens * model_flops_per_token
        if not synchronize:
            return {}
        base.wait_for_device()
        self.interval["seconds"] += time.perf_counter() - self._start
        for key, value in self.interval.items():
            self.total[key] += value
        self.intervals.append((self.interval["steps"], self.interval["seconds"]))
        metrics = self._metrics(self.interval)
        self.start_interval()
        return metrics | base.memory_metrics()

    def summary(self) -> dict[str, float]:
        """Averages over every step after warmup; `{}` when there was none."""
        return self._metrics(self.total) if self.total["steps"] else {}

    def unfinished_interval(self) -> tuple[float, float]:
        """(steps, seconds) since the clock was last read."""
        running = 0.0 if self._start is None else time.perf_counter() - self._start
        return self.interval["steps"], self.interval["seconds"] + running

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what runs inside (evaluation, a checkpoint, steps that are not given to `step`) from the interval,
        and mark it in a profile."""
        base.wait_for_device()
        is_outermost = self._start is not None
        if is_outermost:
            self.interval["seconds"] += time.perf_counter() - self._start
            self._start = None
        try:
            with torch.profiler.record_function(base.CLOCK_STOPPED):
                yield
                base.wait_for_device()
        finally:
            if is_outermost:  # else an outer pause has stopped the clock
                self._start = time.perf_counter()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count what runs inside as time that the step waited for data."""
        start = time.perf_counter()
        yield
        if self._start is not None:
            self.interval["data_wait"] += time.perf_counter() - start

    def get_print_message(self, metrics: dict[str, Any]) -> str:
        """The metrics on one line; empty without a speed, as in warmup."""
        device = "GPU" if torch.cuda.is_available() else "rank"
        if "tokens_per_sec" not in metrics:
            return ""
        parts = [f"{metrics['tokens_per_sec']:,.0f} tok/s"]
        if self.num_gpus > 1:
            parts.append(f"{metrics['tokens_per_sec_per_gpu']:,.0f} tok/s/{device}")
        if "mfu_percent" in metrics:
            parts.append(f"MFU {metrics['mfu_percent']:.1f} %")
        if "peak_memory_reserved" in metrics:
            active, allocated, reserved = (metrics[f"peak_memory_{kind}"] for kind in ("active", "alloc", "reserved"))
            parts.append(f"{active:.1f} GiB active, {allocated:.1f} allocated, {reserved:.1f} reserved")
        return "  ".join(parts)

    def _metrics(self, interval: dict[str, float]) -> dict[str, float]:
        seconds, tokens, flops = max(interval["seconds"], 1e-9), interval["tokens"], interval["flops"]
        peak_tflops = self.peak_tflops if flops else 0  # FLOPs of 0 are not known: no MFU
        speed = estimate_mfu(flops / max(tokens, 1), tokens, seconds, self.num_gpus, peak_tflops)
        if flops:
            speed["flops_per_token"] = flops / tokens
        else:
            del speed["actual_tflops_per_sec"]
        return speed | {
            "tokens_per_sec_per_gpu": speed["tokens_per_sec"] / self.num_gpus,
            "steps_per_sec": interval["steps"] / seconds,
            "step_time_ms": 1000 * seconds / interval["steps"],
            "data_wait_percent": 100 * interval["data_wait"] / seconds,
        }
