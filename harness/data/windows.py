"""Windows: a flat token array cut into samples, and samples made into batches."""

import functools
import hashlib
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from harness.base import UserError
from harness.data.held_out import Stretches
from harness.data.held_out import document_ends as find_document_ends

IGNORE_INDEX = -100  # label of a position that the loss leaves out; that of harness/model/loss.py
COUNTED_AT_ONCE = 2**24  # tokens whose mask is read at one time


@dataclass(frozen=True, eq=False)
class Window:
    """A sample that is more than tokens: labels that are not trained on, or documents whose ends no token marks."""

    tokens: np.ndarray  # unsigned integers, shape (seq_len + 1,); there may be padding at its end
    trained: np.ndarray | None = None  # bool, shape (seq_len,): which labels count; None for all
    # Input positions at which documents begin, 0 among them, and the padding; None: after each end-of-text token.
    starts: np.ndarray | None = None


def tokens_of(window: np.ndarray | Window) -> np.ndarray:
    """The tokens of a window, shape (seq_len + 1,)."""
    return window.tokens if isinstance(window, Window) else window


class PackedDataset(Dataset):
    """Windows of `seq_len + 1` tokens over one flat array; consecutive windows share one token.

    Window i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, so each token but the first is a label exactly once and
    nothing is lost but the last partial window. A window is a plain array, or a `Window` where `trained` is given, or
    where the tokens know the `document_ends` and there is a document mask.
    """

    end_of_text: int | None = None  # the id that ends a document, where attention is to stay inside documents
    document_mask = False  # whether attention is to stay inside documents by `document_ends` too
    text_end: int | None = None  # the id that ends a document, for the numbers of documents
    path: pathlib.Path | None = None  # the flat file of the tokens, of a corpus that was tokenized
    counts: dict | None = None  # what was counted when it was tokenized
    padding_share = 0.0  # of the inputs of all windows
    is_chat = False  # whether its documents are conversations
    mapped: Any = None  # the JoinedTokens of token files that are read in place

    def __init__(self, tokens: np.ndarray, seq_len: int, trained: np.ndarray | None = None):
        """`tokens` is sliced only; it may have `document_ends`, see `TokensOfDocuments`. `trained` is 1 for each token
        that is trained on as a label and else 0; None: all are."""
        self.tokens, self.seq_len, self.trained = tokens, seq_len, trained

    @functools.cached_property
    def document_ends(self) -> np.ndarray | None:
        """Where each document ends, ascending; None where only a token tells."""
        return getattr(self.tokens, "document_ends", None)

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> np.ndarray | Window:
        """Tokens of shape (seq_len + 1,), unsigned integers: a view of the array where that gives one."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = index * self.seq_len
        tokens = self.tokens[first : first + self.seq_len + 1]
        starts = trained = None
        if self.document_mask and self.document_ends is not None:
            starts = starts_between(self.document_ends, first, first + self.seq_len)
        if self.trained is not None:
            trained = self.trained[first + 1 : first + self.seq_len + 1].astype(bool)
        if starts is None and trained is None:
            return tokens
        return Window(tokens, trained, starts)

    @property
    def is_uniform(self) -> bool:
        """Whether each window has `seq_len` inputs and labels that count."""
        return self.trained is None

    def real_tokens(self, index: int) -> int:
        """Inputs of a window that are not padding."""
        return self.seq_len

    def trained_tokens(self, index: int) -> int:
        """Labels of a window that count."""
        return self.seq_len if self.trained is None else int(self._trained_counts[index])

    def total_trained(self) -> int:
        """Labels of all windows that count."""
        return len(self) * self.seq_len if self.trained is None else int(self._trained_counts.sum())

    @functools.cached_property
    def _trained_counts(self) -> np.ndarray:
        """Labels that count in each window, read from the mask once."""
        counts, per_chunk = [np.zeros(0, np.int32)], max(1, COUNTED_AT_ONCE // self.seq_len)
        for first in range(0, len(self), per_chunk):
            last = min(first + per_chunk, len(self))
            mask = self.trained[first * self.seq_len + 1 : last * self.seq_len + 1]
            counts.append(mask.reshape(-1, self.seq_len).sum(1, dtype=np.int32))
        return np.concatenate(counts)

    def total_tokens(self) -> int:
        """Inputs of all windows that are not padding."""
        return len(self) * self.seq_len

    def documents(self, index: int) -> list[tuple[int, str, int]]:
        """(where it begins in the window, its place in words, offset in it of the token there) of each document that
        has an input in a window."""
        first = index * self.seq_len
        starts = starts_between(self._places.ends, first, first + self.seq_len)
        return [(int(start), *self._places.of(first + int(start))) for start in starts]

    @functools.cached_property
    def _places(self) -> "DocumentPlaces":
        return DocumentPlaces(self.tokens, self.text_end)

    def part(self, select: Callable) -> "PackedDataset":
        """The windows of a part of the array, which `select` makes of an array of one item for each token."""
        trained = None if self.trained is None else select(self.trained)
        part = PackedDataset(select(self.tokens), self.seq_len, trained)
        part.end_of_text, part.document_mask, part.text_end = self.end_of_text, self.document_mask, self.text_end
        part.path, part.counts, part.mapped = self.path, self.counts, self.mapped
        part.is_chat = self.is_chat
        return part

    def fingerprint(self) -> str:
        """Tells data sets apart by their number of tokens and 256 samples of 4,096, wherever they are stored."""
        starts = np.linspace(0, max(0, len(self.tokens) - 4096), 256, dtype=np.int64)
        digest = hashlib.sha256(b"".join(self.tokens[start : start + 4096].tobytes() for start in starts))
        if self.trained is not None:
            for start in starts:
                digest.update(self.trained[start : start + 4096].tobytes())
        return f"{digest.hexdigest()[:20]}, {len(self.tokens):,} tokens"


class TokensOfDocuments:
    """A flat array of tokens that knows where each of its documents ends."""

    def __init__(self, tokens, document_ends: np.ndarray):
        self.tokens, self.document_ends = tokens, document_ends
        if hasattr(tokens, "document_of"):  # token files, which have names
            self.document_of = tokens.document_of

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, window: slice) -> np.ndarray:
        return self.tokens[window]


class DocumentPlaces:
    """Where the documents of a flat array are in their corpus, in words. Of a part of a corpus the numbers are those of
    the whole. Where the ends of documents are not known, the tokens are read once, to find them."""

    def __init__(self, tokens, text_end: int | None):
        self.tokens, self.ends = tokens, find_document_ends(tokens, text_end)
        self.whole = tokens
        while isinstance(self.whole, Stretches):
            self.whole = self.whole.tokens
        self.whole_ends = self.ends
        if self.whole is not tokens and not hasattr(self.whole, "document_of"):
            self.whole_ends = find_document_ends(self.whole, text_end)

    def of(self, position: int) -> tuple[str, int]:
        """(place of the document in words, offset in it) of a token of the flat array."""
        tokens = self.tokens
        while isinstance(tokens, Stretches):
            position = tokens.position(position)
            tokens = tokens.tokens
        if hasattr(tokens, "document_of"):  # token files, which have names
            return tokens.document_of(position)
        number = int(np.searchsorted(self.whole_ends, position, "right"))
        before = int(self.whole_ends[number - 1]) if number else 0
        return f"document {number + 1:,}", position - before


def starts_between(ends: np.ndarray, first: int, last: int) -> np.ndarray:
    """Where documents that end at `ends` begin among the tokens from `first` to before `last`, counted from `first`;
    0 always, also where a document goes on there."""
    inside = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, last, "left")]
    return np.unique(np.concatenate([[0], inside - first])).astype(np.int64)


def pack(
    tokens: np.ndarray, seq_len: int, dataset: str, split: str, trained: np.ndarray | None = None
) -> PackedDataset:
    """The tokens of a corpus as windows; too few for one window are a UserError."""
    packed = PackedDataset(tokens, seq_len, trained)
    check_has_windows(packed, dataset, split)
    return packed


def check_has_windows(windows, dataset: str, split: str) -> None:
    """Raises a UserError for a data set of windows that has none."""
    if not len(windows):
        short = f"{len(windows.tokens):,} tokens do not fill one window of --sequence-length {windows.seq_len}"
        raise UserError(f"--dataset {dataset}, split {split!r}: {short}; use a shorter sequence or more text")


def create_collate_fn(
    end_of_text: int | None = None, shift_labels: bool = True
) -> Callable[[list[np.ndarray | Window]], dict[str, torch.Tensor]]:
    """Makes a batch of windows: `input_ids`, `labels` and `shift_labels`, int64 of shape (batch, seq_len).

    The labels are shifted already: `labels[:, t]` is the token that follows `input_ids[:, t]`, or IGNORE_INDEX where
    the window does not train on it. A plain transformers model would shift `labels` once more; it takes `shift_labels`
    as they are, but for families that ignore them: prophetnet. With `end_of_text`, or where a window has `starts`,
    there are `position_ids` too, which begin again at 0 at the window's `starts`, or without them after each
    `end_of_text`.
    """

    def collate(windows: list[np.ndarray | Window]) -> dict[str, torch.Tensor]:
        tokens = np.stack([tokens_of(window) for window in windows]).astype(np.int64)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        richer = {row: window for row, window in enumerate(windows) if isinstance(window, Window)}
        masks = {row: window.trained for row, window in richer.items() if window.trained is not None}
        if masks:
            batch["labels"] = batch["labels"].copy()
        for row, trained in masks.items():
            batch["labels"][row, ~trained] = IGNORE_INDEX
        if shift_labels:
            batch["shift_labels"] = batch["labels"]
        starts_of = {row: window.starts for row, window in richer.items() if window.starts is not None}
        if end_of_text is not None or starts_of:
            positions = np.arange(tokens.shape[1] - 1)
            starts = np.zeros_like(batch["input_ids"])  # of the document that each token belongs to
            if end_of_text is not None:
                starts[:, 1:] = np.where(tokens[:, :-2] == end_of_text, positions[1:], 0)
            for row, begins in starts_of.items():
                starts[row] = 0
                starts[row, begins] = begins
            batch["position_ids"] = positions - np.maximum.accumulate(starts, axis=1)
        return {name: torch.from_numpy(array.copy()) for name, array in batch.items()}  # one row would share its memory

    return collate
