"""Windows: a flat token array cut into samples, and samples made into batches."""

import hashlib
import pathlib
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import Dataset

from harness.base.errors import UserError


class PackedDataset(Dataset):
    """Windows of `seq_len + 1` tokens over one flat array; consecutive windows share one token.

    Window i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, so each token but the first is a label exactly once and
    nothing is lost but the last partial window.
    """

    end_of_text: int | None = None  # the id that ends a document, where attention is to stay inside documents
    path: pathlib.Path | None = None  # the flat file of the tokens, of a corpus that was tokenized
    counts: dict | None = None  # what was counted when it was tokenized

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> np.ndarray:
        """A view of shape (seq_len + 1,), unsigned integers."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]

    def fingerprint(self) -> str:
        """Tells data sets apart by their number of tokens and 256 samples of 4,096, wherever they are stored."""
        starts = np.linspace(0, max(0, len(self.tokens) - 4096), 256, dtype=np.int64)
        digest = hashlib.sha256(b"".join(self.tokens[start : start + 4096].tobytes() for start in starts))
        return f"{digest.hexdigest()[:20]}, {len(self.tokens):,} tokens"


def pack(tokens: np.ndarray, seq_len: int, dataset: str, split: str) -> PackedDataset:
    """The tokens of a corpus as windows; too few for one window are a UserError."""
    packed = PackedDataset(tokens, seq_len)
    if not len(packed):
        short = f"{len(tokens):,} tokens do not fill one window of --sequence-length {seq_len}"
        raise UserError(
            f"--dataset {dataset}, split {split!r}: {short}; use a shorter sequence or more text",
            entry="too-little-text",
        )
    return packed


def create_collate_fn(
    end_of_text: int | None = None, shift_labels: bool = True
) -> Callable[[list[np.ndarray]], dict[str, torch.Tensor]]:
    """Makes a batch of windows: `input_ids`, `labels` and `shift_labels`, int64 of shape (batch, seq_len).

    The labels are shifted already: `labels[:, t]` is the token that follows `input_ids[:, t]`. A plain transformers
    model would shift `labels` once more; it takes `shift_labels` as they are, but for families that ignore them:
    prophetnet. With `end_of_text` there are `position_ids` too, which begin again at 0 after each such token.
    """

    def collate(windows: list[np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = np.stack(windows).astype(np.int64)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if shift_labels:
            batch["shift_labels"] = batch["labels"]
        if end_of_text is not None:
            positions = np.arange(tokens.shape[1] - 1)
            starts = np.zeros_like(batch["input_ids"])  # of the document that each token belongs to
            starts[:, 1:] = np.where(tokens[:, :-2] == end_of_text, positions[1:], 0)
            batch["position_ids"] = positions - np.maximum.accumulate(starts, axis=1)
        return {name: torch.from_numpy(array.copy()) for name, array in batch.items()}  # one row would share its memory

    return collate
