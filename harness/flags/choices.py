"""Choices: values of flags that name files of other packages, for --help. They are repeated here because flags are
parsed before torch is loaded; tests/flags/test_flags.py compares the suffixes of files with the formats.
harness/register.py adds those of --import."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Optimizer(NamedTuple):
    """A value of --optimizer."""

    help: str  # the first sentence of its file
    max_beta: float = 1.0  # of --betas
    kind: Any = None  # an `OptimizerKind` of --import; None: the `OPTIMIZER` of its file


class Dataset(NamedTuple):
    """A data set of --import."""

    records: Callable[[], Iterable[Any]]  # each a text, a list of token ids, or the fields of a record
    version: str
    limit: int | None  # records that are read; None: all


OPTIMIZERS = {
    "adamw": Optimizer("AdamW"),
    "adamw-bf16": Optimizer("AdamW with moments in bf16", max_beta=0.98),
    "adamw8bit": Optimizer("torchao's AdamW with 8-bit states"),
    "muon": Optimizer("Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else"),
}
DATASETS: dict[str, Dataset] = {}
TRACKERS = {
    "wandb": "Weights & Biases, by its own client: `wandb login`, or WANDB_MODE=offline",
    "tensorboard": "TensorBoard event files in the run's folder",
}
# Suffixes of data files; of those with fields for --text-field; of those with token ids that are read in place
SUFFIXES: tuple[str, ...] = (".arrow", ".bin", ".ds", ".json", ".jsonl", ".npy", ".parquet", ".txt", ".md")
FIELD_SUFFIXES: tuple[str, ...] = (".arrow", ".json", ".jsonl", ".parquet")
PLAIN_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix not in FIELD_SUFFIXES)
TOKEN_SUFFIXES = (".bin", ".ds", ".npy")
COMPRESSIONS = (".gz", ".bz2", ".zst")
