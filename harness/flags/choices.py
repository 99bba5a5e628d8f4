"""Choices: values of flags that are files of other wings, as --help shows them. They stand here too, as flags are read
before torch is loaded; tests/flags/test_choices.py compares them with the files."""

from typing import NamedTuple


class Optimizer(NamedTuple):
    """A value of --optimizer."""

    help: str  # the first sentence of its file
    max_beta: float = 1.0  # of --betas
    same_as_adamw_in: tuple[str, ...] = ()  # values of --precision


OPTIMIZERS = {
    "adamw": Optimizer("torch's fused AdamW"),
    "adamw-bf16": Optimizer("AdamW with moments in bf16", max_beta=0.98, same_as_adamw_in=("bf16-pure",)),
    "adamw8bit": Optimizer("torchao's AdamW with 8-bit states"),
    "muon": Optimizer("Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else"),
}
TRACKERS = {
    "wandb": "Weights & Biases, by its own client: `wandb login`, or WANDB_MODE=offline",
    "tensorboard": "TensorBoard event files in the run's folder",
}
SUFFIXES = (".arrow", ".bin", ".ds", ".json", ".jsonl", ".npy", ".parquet", ".txt", ".md")  # of data files
FIELD_SUFFIXES = (".arrow", ".json", ".jsonl", ".parquet")  # of those with fields that --text-field can name
PLAIN_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix not in FIELD_SUFFIXES)
COMPRESSIONS = (".gz", ".bz2", ".zst")
