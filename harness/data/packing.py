"""Packing: tokens as sequences of `seq_len + 1` tokens, cut anywhere or of whole documents with padding at their end;
random ones; and batches of them."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from harness import base
from harness.base import IGNORE_INDEX
from harness.data.cache import make_once
from harness.data.tokens import MappedTokens, Tokens, map_numbers

VERSION = 2  # of a packing's files; another version is not read
MASK_PART = 2**20  # tokens whose mask is read at once


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """A sample that is more than tokens: labels that are not trained on, or documents that do not see each other."""

    tokens: np.ndarray  # integers, shape (seq_len + 1,); there may be padding at its end
    loss_mask: np.ndarray | None = None  # bool, shape (seq_len,): which labels count; None: all do
    doc_starts: np.ndarray | None = None  # inputs at which documents begin, 0 first, and at which padding begins
    unpadded_len: int | None = None  # inputs before the padding; None: there is none


def sequence_tokens(sequence: np.ndarray | PackedSequence) -> np.ndarray:
    """The tokens of a sequence, shape (seq_len + 1,)."""
    return sequence.tokens if isinstance(sequence, PackedSequence) else sequence


def document_lengths(sequence: np.ndarray | PackedSequence) -> np.ndarray:
    """The number of inputs of each document, or piece of one, in a sequence, without padding, int64; one number for all
    of them without a document mask."""
    if not isinstance(sequence, PackedSequence):
        return np.array([len(sequence) - 1])
    length = len(sequence.tokens) - 1 if sequence.unpadded_len is None else sequence.unpadded_len
    starts = np.array([0]) if sequence.doc_starts is None else sequence.doc_starts
    return np.diff(np.append(starts[starts < length], length))


class PackedDataset(Dataset):
    """Sequences of `seq_len + 1` tokens; consecutive sequences share one token.

    Sequence i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, so each token but the first is a label exactly once.
    The last partial sequence is left out, and so are those that a loss mask leaves without a label. A sequence is a
    plain array, or a `PackedSequence` if not all is trained on or documents are not to see each other: then the last
    token of one does not predict the first of the next either.
    """

    def __init__(
        self, tokens: Tokens | np.ndarray, seq_len: int, document_mask: bool = False, end_of_text: int | None = None
    ):
        """`end_of_text` ends a document of a plain array."""
        self.tokens = tokens if isinstance(tokens, Tokens) else Tokens([MappedTokens(tokens)], end_of_text=end_of_text)
        self.seq_len, self.document_mask = seq_len, document_mask
        self.has_loss_mask = self.tokens.has_loss_mask
        # True if each sequence has `seq_len` inputs and all its labels count
        self.is_uniform = not (self.has_loss_mask or document_mask)
        self.total_sequences = max(0, (len(self.tokens) - 1) // seq_len)  # also those that are left out

    @functools.cached_property
    def label_counts(self) -> np.ndarray:
        """Labels that count in each sequence, also of those left out. Only with a loss mask, all of which is read."""
        last = self.total_sequences * self.seq_len + 1
        mask = self.tokens.loss_mask(1, last)
        counts = mask.reshape(-1, self.seq_len).sum(1, dtype=np.int32)
        if self.document_mask:
            boundary_labels = self.tokens.doc_starts_between(0, last)[1:] - 1
            boundaries = np.bincount(boundary_labels // self.seq_len, mask[boundary_labels], self.total_sequences)
            counts -= boundaries.astype(np.int32)
        return counts

    @functools.cached_property
    def kept(self) -> np.ndarray | range:
        """The indices, among all sequences, of those of the data set. With a loss mask: those that have a label that
        counts. Without: all, even one of one-token documents, in which a document mask leaves no label."""
        return np.flatnonzero(self.label_counts) if self.has_loss_mask else range(self.total_sequences)

    @property
    def left_out(self) -> int:
        """The number of sequences that were left out because none of their labels counts."""
        return self.total_sequences - len(self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> np.ndarray | PackedSequence:
        """Tokens of shape (seq_len + 1,), integers."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = self.input_range(index)
        tokens, loss_mask, doc_starts = self.tokens[first : last + 1], None, None
        if self.has_loss_mask:
            loss_mask = self.tokens.loss_mask(first + 1, last + 1).astype(bool)
        if self.document_mask:
            doc_starts = self.tokens.doc_starts_between(first, last + 1)
            loss_mask, doc_starts = mask_boundaries(doc_starts, self.seq_len, loss_mask)
        return tokens if loss_mask is None else PackedSequence(tokens, loss_mask, doc_starts)

    def input_range(self, index: int) -> tuple[int, int]:
        """(the first input of a sequence, the one after its last) among the tokens."""
        first = int(self.kept[index]) * self.seq_len
        return first, first + self.seq_len

    def unpadded_len(self, index: int) -> int:
        """Inputs of a sequence that are not padding."""
        return self.seq_len

    def total_trained(self) -> int:
        """Labels of all sequences that count. Only with a loss mask."""
        return int(self.label_counts.sum())

    def total_tokens(self) -> int:
        """Inputs of all sequences that are not padding."""
        return len(self) * self.seq_len

    def fingerprint(self) -> str:
        """A checksum of its tokens."""
        return self.tokens.fingerprint()

    @property
    def depends_on_end_of_text(self) -> bool:
        """True if end-of-text tokens decide the sequences: files have no other boundaries, and the tokens were cut at
        document boundaries, or a document mask needs these."""
        return self.tokens.needs_end_of_text and (self.document_mask or self.tokens.stretches is not None)

    def num_documents(self) -> int:
        """Documents of all tokens."""
        return len(self.tokens.doc_ends)

    def doc_starts_in(self, index: int) -> list[int]:
        """The positions at which documents begin among the inputs of a sequence, 0 first."""
        return self.tokens.doc_starts_between(*self.input_range(index)).tolist()

    def describe(self) -> str:
        """The packing in words; "" if no document is known to be longer than a sequence."""
        if not self.tokens.knows_doc_ends:  # all tokens would be read
            return ""
        lengths = np.diff(self.tokens.doc_ends, prepend=0)
        cut = int((lengths > self.seq_len + 1).sum())
        if not cut:
            return ""
        documents, share = base.counted(len(lengths), "document"), 100 * cut / len(lengths)
        return f"concatenate, {cut:,} of {documents} ({share:.1f} %) longer than a sequence of {self.seq_len:,} tokens"


def mask_boundaries(
    doc_starts: np.ndarray, seq_len: int, loss_mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mask the labels that cross a document boundary. Return (labels that count, inputs that begin a document): the
    labels in `loss_mask`, by default all, without those that begin a document. `doc_starts` are the positions of tokens
    that begin a document, 0 first, among the `seq_len + 1` of a sequence."""
    loss_mask = np.ones(seq_len, bool) if loss_mask is None else loss_mask
    loss_mask[doc_starts[1:] - 1] = False  # the label of a position is the next token
    return loss_mask, doc_starts[doc_starts < seq_len]


class WholeDocumentDataset(PackedDataset):
    """Sequences of `seq_len + 1` tokens that hold one whole document or several, and then padding.

    A document's labels end with it: its last token does not predict the first of the next. Padding is not trained on
    and counts as no token. A document longer than a sequence is cut into pieces, see `cut_long`. Sequences are found by
    their pieces: what the base class has of sequences end to end (`label_counts`, `kept`, `input_range`) is not used.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, folder: pathlib.Path, record: dict, padding: int, document_mask: bool
    ):
        """`folder` and `record` are from `pack_once`; `padding` is a token id; without `document_mask` the documents of
        a sequence see those before them."""
        super().__init__(tokens, seq_len, document_mask)
        self.is_uniform, self.folder, self.record, self.padding = False, folder, record, padding

    def __reduce__(self) -> Any:
        """Pickled without the pieces: a data worker that is not forked maps them too, and gets no copy."""
        arguments = (self.tokens, self.seq_len, self.folder, self.record, self.padding, self.document_mask)
        return WholeDocumentDataset, arguments

    @functools.cached_property
    def pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the first token and the number of tokens of each piece, sequence after sequence; the first piece of each
        sequence, and the number of pieces at the end, like cu_seqlens). Mapped."""
        dtypes = {"starts": np.int64, "lengths": np.int32, "first_pieces": np.int64}
        starts, lengths, first_pieces = (map_numbers(f"{self.folder}/{name}.bin", dtypes[name]) for name in dtypes)
        return starts, lengths, first_pieces

    def sequence_pieces(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(the first token, the number of tokens) of each piece of a sequence, the longest first."""
        starts, lengths, first_pieces = self.pieces
        first, last = first_pieces[index : index + 2].tolist()
        return starts[first:last], lengths[first:last]

    @property
    def left_out(self) -> int:
        return self.record["left out"]

    @property
    def depends_on_end_of_text(self) -> bool:
        return self.tokens.needs_end_of_text

    def __len__(self) -> int:
        return self.record["sequences"]

    def __getitem__(self, index: int) -> PackedSequence:
        """The documents of a sequence, and padding."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        tokens = np.full(self.seq_len + 1, self.padding, self.tokens.dtype)
        loss_mask, starts, filled = np.zeros(self.seq_len + 1, bool), [], 0
        for start, length in np.stack(self.sequence_pieces(index), axis=1).tolist():
            tokens[filled : filled + length] = self.tokens[start : start + length]
            loss_mask[filled + 1 : filled + length] = True
            if self.has_loss_mask:
                loss_mask[filled + 1 : filled + length] = self.tokens.loss_mask(start + 1, start + length)
            starts.append(filled)
            filled += length
        starts.append(filled)  # of the padding
        doc_starts = None
        if self.document_mask:
            doc_starts = np.array([start for start in starts if start < self.seq_len], np.int64)
        return PackedSequence(tokens, loss_mask[1:], doc_starts, min(filled, self.seq_len))

    def unpadded_len(self, index: int) -> int:
        return min(int(self.sequence_pieces(index)[1].sum()), self.seq_len)

    def total_trained(self) -> int:
        return self.record["trained"]

    def total_tokens(self) -> int:
        return self.record["tokens"]

    def num_documents(self) -> int:
        return self.record["documents"]

    def doc_starts_in(self, index: int) -> list[int]:
        _, lengths = self.sequence_pieces(index)
        return (np.cumsum(lengths) - lengths).tolist()

    def describe(self) -> str:
        """The packing in words."""
        documents, sequences = base.counted(self.num_documents(), "document"), base.counted(len(self), "sequence")
        cut = self.record["cut"]
        longer = f", {cut:,} longer than a sequence cut" if cut else ""
        padding = 1 - self.total_tokens() / (len(self) * self.seq_len)
        return f"{self.record['packing']}, {documents} in {sequences}{longer}, padding {100 * padding:.1f} %"


def pack_once(
    tokens: Tokens, seq_len: int, packing: str, seed: int, cache_dir: str | os.PathLike | None
) -> tuple[pathlib.Path, dict]:
    """Pack documents, unless the cache has that; return (its folder, its record). One process of a node calls this."""

    def make(folder: pathlib.Path) -> dict:
        arrays, record = pack_documents(tokens, seq_len, packing, seed)
        for name, array in arrays.items():
            array.tofile(folder / f"{name}.bin")
        return record

    # Lengths of documents decide a packing, and loss masks which sequences are left out. Only a token cache has a mask,
    # and its key stands for it; the key of a token file is empty.
    keys = [file.cache_key for file in tokens.files]
    digests = [hashlib.sha256(array.data).hexdigest() for array in (tokens.starts, tokens.stops, tokens.doc_ends)]
    return make_once("packing", [VERSION, keys, digests, seq_len, packing, seed], make, cache_dir)


def pack_documents(
    tokens: Tokens, seq_len: int, packing: str, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, int | str]]:
    """(arrays of a `WholeDocumentDataset` by name, its record). `packing` is best-fit, or none for one document, or a
    piece of one, in each sequence. Sequences without a label that is trained on are left out."""
    starts, lengths = cut_long(tokens.doc_ends, seq_len)
    # sequence i has the pieces order[first_pieces[i] : first_pieces[i + 1]]
    if packing == "best-fit":
        order, first_pieces = best_fit(lengths, seq_len + 1, seed)
    else:
        order, first_pieces = np.arange(len(lengths)), np.arange(len(lengths) + 1)

    def sums(piece_values: np.ndarray) -> np.ndarray:
        """Sum a value of each piece over each sequence."""
        if not len(order):
            return np.zeros(0, int)
        return np.add.reduceat(piece_values[order], first_pieces[:-1], dtype=np.int64)

    trained = sums(count_trained(tokens, starts, lengths))
    is_trained, num_pieces = trained > 0, np.diff(first_pieces)
    doc_lengths = np.diff(tokens.doc_ends, prepend=0)
    record: dict[str, int | str] = {
        "packing": packing,
        "documents": len(doc_lengths),
        "cut": int((doc_lengths > seq_len + 1).sum()),
        "sequences": int(is_trained.sum()),
        "left out": int((~is_trained).sum()),
        "trained": int(trained.sum()),
        "tokens": int(np.minimum(sums(lengths), seq_len)[is_trained].sum()),
    }
    order = order[np.repeat(is_trained, num_pieces)]
    first_pieces = np.concatenate([[0], np.cumsum(num_pieces[is_trained])])
    return {"starts": starts[order], "lengths": lengths[order], "first_pieces": first_pieces}, record


def count_trained(tokens: Tokens, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Labels that count in each piece. Pieces are in the order of the tokens. The mask is read in parts."""
    if not tokens.has_loss_mask:
        return lengths - 1
    trained, first = np.zeros(len(lengths), np.int64), 0
    part_ends = range(MASK_PART, len(tokens) + MASK_PART, MASK_PART)
    for last in np.searchsorted(starts, part_ends).tolist():  # the pieces from `first` to before `last` begin in a part
        if first < last:
            begin, end = int(starts[first]), int(starts[last - 1] + lengths[last - 1])
            # sums[i]: trained tokens before token i of the part; the first token of a piece is no label
            sums = np.concatenate([[0], np.cumsum(tokens.loss_mask(begin, end), dtype=np.int64)])
            starts_in_part = starts[first:last] - begin
            trained[first:last] = sums[starts_in_part + lengths[first:last]] - sums[starts_in_part + 1]
            first = last
    return trained


def cut_long(doc_ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(where each piece begins, its tokens): documents as pieces of at most `seq_len + 1` tokens, what a sequence has.
    Consecutive pieces of a document share one token, as consecutive sequences do: each token but a document's first is
    a label exactly once. With `seq_len` 4 a document of 8 tokens is 2 pieces: its tokens 0..4 and 4..7."""
    starts = np.concatenate([[0], doc_ends[:-1]]).astype(np.int64)
    lengths = doc_ends - starts
    counts = np.where(lengths > seq_len + 1, -(-(lengths - 1) // seq_len), 1)  # pieces of each document
    documents = np.repeat(np.arange(len(lengths)), counts)  # the document of each piece
    # of each piece: its number in its document, times seq_len
    offsets = (np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]) * seq_len
    return starts[documents] + offsets, np.minimum(lengths[documents] - offsets, seq_len + 1).astype(np.int32)


def best_fit(lengths: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins of `size`, best-fit decreasing: the longest first, each into the bin with the least room
    that is enough, or a new one. A pure function of its arguments. Example: of the lengths 5, 4, 3, 3, 1 in bins of 8,
    5 opens bin 0, 4 opens bin 1, one 3 fills bin 0, the other 3 and the 1 fill bin 1.

    `lengths` are from 1 to `size`. Returns the items, bin after bin, and where each bin begins among them, with their
    number at the end. Which items of a length meet, and the order of the bins, are drawn with `seed`.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    items = generator.permutation(len(lengths)).astype(np.int32)
    items = items[np.argsort(-lengths[items].astype(np.int64), kind="stable")]
    items_by_length = np.bincount(lengths, minlength=size + 1)
    # by room: a stack of bins, of which the last are taken; new ones are put on it in descending order
    bins_with_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0  # bit r is set if a bin has room for r more: 0b1010 for bins with room for 1 and for 3
    chosen = np.empty(len(lengths), np.int32)  # the bin of each item
    bins = placed = 0
    for length in np.flatnonzero(items_by_length)[::-1].tolist():
        left = int(items_by_length[length])
        while left:  # items of one length fill bin after bin: a bin that took one has the least room
            if not rooms >> length:  # no bin has room: as many new ones as all items of this length need
                new = -(-left // (size // length))
                bins_with_room[size] = list(range(bins + new - 1, bins - 1, -1))
                rooms |= 1 << size
                bins += new
            enough = rooms >> length
            room = length + (enough & -enough).bit_length() - 1  # the lowest set bit is the least room that is enough
            with_room, per_bin = bins_with_room[room], room // length  # each bin takes per_bin items, the last the rest
            filled = min(len(with_room), -(-left // per_bin))
            taken = with_room[-filled:][::-1]
            del with_room[-filled:]
            if not with_room:
                rooms ^= 1 << room
            count = min(left, filled * per_bin)
            chosen[placed : placed + count] = np.repeat(taken, per_bin)[:count]
            placed, left = placed + count, left - count
            in_last = count - (filled - 1) * per_bin
            # put the bins back by the room that is left in them, which in the last may be more
            for some_bins, left_room in ((taken[:-1], room - per_bin * length), (taken[-1:], room - in_last * length)):
                if some_bins and left_room:
                    bins_with_room[left_room].extend(some_bins)
                    rooms |= 1 << left_room
    item_bins = generator.permutation(bins).astype(np.int32)[chosen]
    first_items = np.concatenate([[0], np.cumsum(np.bincount(item_bins, minlength=bins))])
    return items[np.argsort(item_bins, kind="stable")], first_items


class SyntheticDataset(Dataset):
    """Random tokens for throughput runs: sequence i is a pure function of (seed, i) and is stored nowhere."""

    is_uniform = True
    has_loss_mask = False
    left_out = 0

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0, num_sequences: int = 2**20):
        self.vocab_size, self.seq_len, self.seed, self.num_sequences = vocab_size, seq_len, seed, num_sequences

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=(self.seed << 32) + index))
        return generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.uint32)

    def total_tokens(self) -> int:
        return self.num_sequences * self.seq_len

    def fingerprint(self) -> str:
        return "synthetic"


@dataclass(frozen=True, eq=False)
class StreamEvalSequences:
    """Eval sequences of a stream. A rank holds those that it evaluates."""

    held: dict[int, np.ndarray | PackedSequence]  # by number
    count: int  # of all ranks
    seq_len: int
    checksum: str  # what `fingerprint` returns
    has_loss_mask = False
    left_out = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> np.ndarray | PackedSequence:
        """A KeyError if another rank holds it."""
        return self.held[number]

    def total_tokens(self) -> int:
        return self.count * self.seq_len

    def fingerprint(self) -> str:
        return self.checksum


EvalSequences = PackedDataset | SyntheticDataset | StreamEvalSequences


def create_collate_fn(
    with_shift_labels: bool = True,
) -> Callable[[list[np.ndarray | PackedSequence]], dict[str, torch.Tensor]]:
    """Return a function that makes a batch of sequences: `input_ids` and `labels`, int64 of shape (batch, seq_len).

    The labels are shifted already: `labels[:, t]` is the token that follows `input_ids[:, t]`, or IGNORE_INDEX where
    the sequence does not train on it. A plain transformers model would shift `labels` once more, but takes
    `shift_labels` as they are (prophetnet ignores them): `with_shift_labels` adds the labels under that name.
    Where a sequence has `doc_starts`, there are `position_ids` too, which begin again at 0 there.
    """
    return functools.partial(collate, with_shift_labels=with_shift_labels)


def collate(sequences: list[np.ndarray | PackedSequence], with_shift_labels: bool) -> dict[str, torch.Tensor]:
    """The function of `create_collate_fn`, which can be pickled for data workers that are not forked."""
    tokens = np.stack([sequence_tokens(sequence) for sequence in sequences])
    batch = {"input_ids": tokens[:, :-1].astype(np.int64), "labels": tokens[:, 1:].astype(np.int64)}
    packed_rows = [(row, packed) for row, packed in enumerate(sequences) if isinstance(packed, PackedSequence)]
    if any(sequence.doc_starts is not None for _, sequence in packed_rows):
        starts = np.zeros_like(batch["labels"])  # at each input that begins a document, its position; 0 elsewhere
        for row, sequence in packed_rows:
            if sequence.doc_starts is not None:
                starts[row, sequence.doc_starts] = sequence.doc_starts
        batch["position_ids"] = np.arange(starts.shape[1]) - np.maximum.accumulate(starts, axis=1)
    for row, sequence in packed_rows:
        if sequence.loss_mask is not None:
            batch["labels"][row, ~sequence.loss_mask] = IGNORE_INDEX
    if with_shift_labels:
        batch["shift_labels"] = batch["labels"].copy()
    return {name: torch.from_numpy(array) for name, array in batch.items()}
