"""The other half of the pair: token packing, FLOP and MFU math, and the clock. Plain functions over any model.

Importing this module starts nothing and needs no GPU, no network and no optional package.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.base import find_gpu, wait_for_device
from harness.flags import sources_of
from harness import data
from harness.model.flops import DocumentFlops, count_flops_per_token, document_flops, formula_holds

create_collate_fn = data.create_collate_fn

__all__ = [
    "PerformanceTracker",
    "create_collate_fn",
    "estimate_mfu",
    "flops_of_documents",
    "get_dataset",
    "get_gpu_peak_tflops",
    "get_model_flops_per_token",
]


def get_dataset(
    tokenizer,
    seq_len: int,
    accelerator=None,
    dataset: str | Sequence[str] = "roneneldan/TinyStories",
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
    seed: int = 0,
):
    """The windows of a corpus, a `data.PackedDataset`: tokenized once, kept as one flat file, and mapped. Token files
    are mapped where they lie. The main process of each node tokenizes, on all cores; the others map the same file.

    Args:
        tokenizer: of transformers; its `eos_token` goes after each document. None for token files.
        accelerator: the run's `Accelerator`, or None for one process.
        dataset: hub id, with its `subset` if it has several, a file, folder, pattern or URL, or demo. A list of
            several, each `[name=]dataset[:weight]`, is a mixture: sample i of it is that of a run with this seed.
        split: with an optional slice; by default `train`, of hub data its first 5 %.
        vocab_size: embeddings of the model; by default the tokenizer's own size.
        cache_dir: where the flat files lie; by default `$XDG_CACHE_HOME/train_fsdp` or `~/.cache/train_fsdp`.
        text_field: column of the text, or of token ids where it is `input_ids`; of several the first that is there.
        skip_bad_records: leave out, and count, records that have no text; otherwise the first is a UserError.
        packing: "concatenate" cuts documents where windows end, "best-fit" fills windows with whole ones; by default
            conversations, which are records with `messages`, are packed best-fit and all else concatenated.
        chat_template: file with the jinja template of conversations; by default the tokenizer's.
        chat_loss: which tokens of conversations are trained on: those of the "assistant", or "all".
        document_mask: whether windows say where their documents begin; by default those of conversations do.
        seed: of best-fit packing, and of a mixture's order.

    Raises:
        UserError: no such data or split, no text in it, the hub is not reachable, less than one window, a token id
            without an embedding.
    """
    reading = data.Reading(
        tokenizer,
        seq_len,
        vocab_size or len(tokenizer),
        cache_dir,
        skip_bad_records,
        packing,
        chat_template,
        chat_loss,
        document_mask,
        seed,
        is_main=accelerator is None or accelerator.is_local_main_process,
    )
    return data.open_windows(reading, dataset, split, text_field, subset)


def get_gpu_peak_tflops(name: str | None = None) -> float | None:
    """Dense bf16 peak of one GPU in TFLOPS, by `find_gpu` (default: the current device); None for a CPU too."""
    if name is None and not torch.cuda.is_available():
        return None
    gpu = find_gpu(torch.cuda.get_device_name() if name is None else name)
    return gpu.peak_tflops if gpu else None


def get_model_flops_per_token(model, seq_len: int, causal: bool = False) -> int:
    """FLOPs of forward and backward per token, by the formula of PaLM (arXiv 2204.02311), appendix B:

        6 x (parameters of the matmuls that a token passes) + 12 x layers x heads x head_dim x seq_len

    Key and value have the real number of KV heads; of a mixture only the active experts count; the LM head counts once,
    tied or not, and the embedding not at all. `causal` halves the attention term.

    The formula holds for the families that `harness/model/flops.py` lists. Other models (sliding windows, linear
    attention) have their operators counted by torch, which gives the same number where the formula holds.

    `model` is a causal language model of transformers, sharded too, or its config. A ValueError says why there is no
    figure to be trusted, or no causal one.
    """
    config = getattr(model, "config", model)
    if not formula_holds(config):
        return count_flops_per_token(config, seq_len, causal)

    hidden_size, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden_size // heads
    query_and_output = 2 * hidden_size * heads * head_dim
    key_and_value = 2 * hidden_size * config.num_key_value_heads * head_dim
    mlp = 3 * hidden_size * config.intermediate_size  # gate, up, down
    if getattr(config, "num_experts", 0):
        router = hidden_size * config.num_experts
        mlp = router + config.num_experts_per_tok * 3 * hidden_size * config.moe_intermediate_size
    lm_head = hidden_size * config.vocab_size
    matmul_parameters = layers * (query_and_output + key_and_value + mlp) + lm_head

    attention = 12 * layers * heads * head_dim * seq_len
    if causal:
        attention //= 2
    return 6 * matmul_parameters + attention


def flops_of_documents(model, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward of documents of these lengths, each of which attends to itself alone:

        6 x (parameters of the matmuls) x (sum of the lengths) + 12 x layers x heads x head_dim x (sum of their squares)

    for the models for which PaLM's formula holds. For others both factors come from `get_model_flops_per_token` at
    several lengths. A ValueError where it is no straight line over them, as with a sliding window that is shorter than
    the longest document.

    `lengths` are in tokens; `model` is a causal language model of transformers or its config.
    """
    lengths = list(lengths)
    flops = document_flops(model, max(lengths), get_model_flops_per_token)
    return int(flops.of(sum(lengths), sum(length * length for length in lengths)))  # of integers


def estimate_mfu(
    model_flops_per_token: float,
    num_tokens: float,
    time_elapsed: float,
    num_gpus: int,
    peak_tflops: float | None = None,
) -> dict[str, float]:
    """Speed of `num_gpus` devices that together processed `num_tokens` tokens in `time_elapsed` seconds.

    `num_tokens` is global, of all ranks and microbatches: this is the only place where `num_gpus` divides. Returns
    `tokens_per_sec` and `actual_tflops_per_sec`, both global, and where the dense peak of one device is known (by
    default the current GPU's) `theoretical_tflops_total` (peak x num_gpus) and `mfu_percent` (100 x actual / it). A
    ValueError where `time_elapsed` or `num_gpus` is not positive.
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

    A window opens when the warmup ends and closes at each `step` that reads the clock; the device is synchronized at
    these two ends only. Give every step its tokens; with `synchronize=False` a step is only counted and costs nothing.
    """

    warmup_steps: int = 10  # left out at the start: compilation, allocator, autotuning
    num_gpus: int = 1  # that share the tokens
    peak_tflops: float | None = None  # dense, of one device; by default that of the current GPU
    document_flops: DocumentFlops | None = None  # where attention stays inside documents: for MFU by their lengths

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the warmup begins again."""
        self.steps_seen, self.warmup_seconds = 0, 0.0
        self.total = dict.fromkeys(("steps", "tokens", "flops", "seconds", "data_wait"), 0.0)
        self.total |= {"document_tokens": 0.0, "document_flops": 0.0}  # of all ranks, see `count_documents`
        self.windows: list[tuple[float, float]] = []  # (steps, seconds)
        self._start: float | None = None  # when the clock of this window started; None while it is stopped
        self._open_window()

    def step(self, batch_tokens: int, model_flops_per_token: float, synchronize: bool = True) -> dict[str, Any]:
        """Counts one optimizer step of `batch_tokens` tokens (global: every rank, every microbatch).

        Returns `{}` in warmup and for a step that is only counted, `{"warmup_completed": True}` once, and afterwards
        the metrics of the window that this step closes: those of `estimate_mfu` and `tokens_per_sec_per_gpu`,
        `steps_per_sec`, `step_time_ms`, `data_wait_percent`. Where there is MFU by documents, `squared_lengths` is what
        `note_documents` added up in the window on this rank.
        """
        self.steps_seen += 1
        if self.steps_seen < self.warmup_steps:
            return {}
        if self.steps_seen == self.warmup_steps:
            self.warmup_seconds = self.window["seconds"] + time.perf_counter() - self._start
            self._open_window()
            return {"warmup_completed": True}
        self.window["steps"] += 1
        self.window["tokens"] += batch_tokens
        self.window["flops"] += batch_tokens * model_flops_per_token
        if not synchronize:
            return {}
        wait_for_device()
        self.window["seconds"] += time.perf_counter() - self._start
        for key, value in self.window.items():
            self.total[key] += value
        self.windows.append((self.window["steps"], self.window["seconds"]))
        metrics = self._metrics(self.window)
        if self.document_flops and "mfu_percent" in metrics:
            metrics["squared_lengths"] = self.squared_lengths
        self.closed = self.window
        self._open_window()
        return metrics

    def note_documents(self, squared_lengths: int) -> None:
        """Adds the documents of a microbatch of this rank: the sum of the squares of their lengths."""
        if self._start is not None:
            self.squared_lengths += squared_lengths

    def count_documents(self, squared_lengths: float) -> dict[str, float]:
        """`mfu_documents_percent` of the window that was closed last, by the `squared_lengths` of all ranks together.
        The averages of `summary` have it too if every window was counted."""
        tokens = self.closed["tokens"]
        counted = {"document_tokens": tokens, "document_flops": self.document_flops.of(tokens, squared_lengths)}
        for key, value in counted.items():
            self.total[key] += value
        metrics = self._metrics(self.closed | counted)
        return {"mfu_documents_percent": metrics["mfu_documents_percent"]}

    def summary(self) -> dict[str, float]:
        """Averages over every step after warmup; `{}` when there was none."""
        return self._metrics(self.total) if self.total["steps"] else {}

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """What runs inside (evaluation, a checkpoint, steps that are not given to `step`) is outside the window."""
        if self._start is None:  # inside another
            yield
            return
        wait_for_device()
        self.window["seconds"] += time.perf_counter() - self._start
        self._start = None
        try:
            yield
        finally:
            wait_for_device()
            self._start = time.perf_counter()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """What runs inside is time that the step waited for data."""
        start = time.perf_counter()
        yield
        if self._start is not None:
            self.window["data_wait"] += time.perf_counter() - start

    def get_print_message(self, metrics: dict[str, Any]) -> str:
        """The metrics on one line; empty in warmup."""
        device = "GPU" if torch.cuda.is_available() else "rank"
        if "tokens_per_sec" not in metrics:
            return ""
        parts = [f"{metrics['tokens_per_sec']:,.0f} tok/s"]
        if self.num_gpus > 1:
            parts.append(f"{metrics['tokens_per_sec_per_gpu']:,.0f} tok/s/{device}")
        if "mfu_percent" in metrics:
            parts.append(f"MFU {metrics['mfu_percent']:.1f} %")
        if "peak_memory_reserved" in metrics:
            parts.append(f"{metrics['peak_memory_reserved']:.1f} GiB")
        return "  ".join(parts)

    def _open_window(self) -> None:
        wait_for_device()
        self.window = dict.fromkeys(self.total, 0.0)
        self.squared_lengths = 0  # of this rank's documents in the window
        self._start = time.perf_counter()

    def _metrics(self, window: dict[str, float]) -> dict[str, float]:
        seconds, tokens, flops = max(window["seconds"], 1e-9), window["tokens"], window["flops"]
        peak_tflops = self.peak_tflops if flops else 0  # FLOPs of 0 are not known: no MFU
        speed = estimate_mfu(flops / max(tokens, 1), tokens, seconds, self.num_gpus, peak_tflops)
        if not flops:
            del speed["actual_tflops_per_sec"]
        if "mfu_percent" in speed and window["document_tokens"] == tokens:
            speed["mfu_documents_percent"] = speed["mfu_percent"] * window["document_flops"] / flops
        return speed | {
            "tokens_per_sec_per_gpu": speed["tokens_per_sec"] / self.num_gpus,
            "steps_per_sec": window["steps"] / seconds,
            "step_time_ms": 1000 * seconds / window["steps"],
            "data_wait_percent": 100 * window["data_wait"] / seconds,
        }
