"""Best-fit packing: windows of whole documents, with padding at their ends, instead of one array that is cut anywhere.
Independent of where documents come from."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from harness.base import UserError, counted
from harness.data.held_out import document_ends as find_document_ends
from harness.data.windows import COUNTED_AT_ONCE, DocumentPlaces, PackedDataset, Window


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is packed: each document, or the parts of one that is longer than a window, in the order of the array."""

    documents: np.ndarray  # number of the document that a piece is of
    starts: np.ndarray  # of each piece in the flat array
    lengths: np.ndarray  # in tokens
    cut: int  # documents that are more than one piece


def cut_long(document_ends: np.ndarray, seq_len: int) -> Pieces:
    """Documents as pieces of at most `seq_len + 1` tokens, what a window has. Consecutive pieces of a document share
    one token, as consecutive windows of an array do: each token but a document's first is a label exactly once."""
    starts = np.concatenate([[0], document_ends[:-1]]).astype(np.int64)
    lengths = document_ends - starts
    labels = lengths - 1
    counts = np.where(lengths > seq_len + 1, -(-labels // seq_len), 1)
    counts[lengths == 0] = 0
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first_pieces = np.cumsum(counts) - counts
    offsets = (np.arange(len(documents)) - first_pieces[documents]) * seq_len
    pieces = np.minimum(lengths[documents] - offsets, seq_len + 1).astype(np.int32)
    return Pieces(documents, starts[documents] + offsets, pieces, int((counts > 1).sum()))


def best_fit(lengths: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items into bins of `size`, best-fit decreasing: the longest first, each into the bin with the least room
    that is enough, or a new one. A pure function of its arguments.

    `lengths` are from 1 to `size`. Returns the items, bin after bin, and where each bin begins among them, with their
    number at the end. Which items of a length meet, and the order of the bins, are drawn with `seed`.

    Items of one length are packed at once: a bin with the least room takes as many of them as it has room for, as it
    would be chosen for the next of them again.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    items = generator.permutation(len(lengths)).astype(np.int32)
    # A stable sort of 16 bits is a radix sort, which is several times as fast.
    sort_type = np.uint16 if size < 2**16 else np.int32
    items = items[np.argsort((size - lengths[items]).astype(sort_type), kind="stable")]
    sorted_lengths = lengths[items]
    group_ends = np.append(np.flatnonzero(np.diff(sorted_lengths)) + 1, len(items))

    bins_of_items = np.empty(len(items), np.int32)
    bins_with_room: list[list[np.ndarray]] = [[] for _ in range(size + 1)]
    has_bins = np.zeros(size + 1, bool)
    bins = first = 0
    for end in group_ends[group_ends > 0].tolist():
        length = int(sorted_lengths[first])
        while first < end:
            room = length + int(np.argmax(has_bins[length:]))
            if has_bins[room]:
                free = np.concatenate(bins_with_room[room])
                bins_with_room[room], has_bins[room] = [], False
                per_bin = room // length
            else:
                room, per_bin = size, size // length
                free = np.arange(bins, bins + -(-(end - first) // per_bin), dtype=np.int32)
                bins += len(free)
            packed = min(end - first, len(free) * per_bin)
            full, left_over = divmod(packed, per_bin)
            in_order = np.repeat(free[: full + 1], per_bin)
            bins_of_items[first : first + packed] = in_order[:packed]
            first += packed
            changes = [(free[:full], room - per_bin * length)]
            if left_over:
                changes.append((free[full : full + 1], room - left_over * length))
                full += 1
            changes.append((free[full:], room))
            for changed, room_left in changes:
                if len(changed):
                    bins_with_room[room_left].append(changed)
                    has_bins[room_left] = True
    numbers = generator.permutation(bins).astype(np.int32)
    bins_of_items = numbers[bins_of_items]
    begins = np.concatenate([[0], np.cumsum(np.bincount(bins_of_items, minlength=bins))])
    return items[np.argsort(bins_of_items, kind="stable")], begins


class BinnedDataset(Dataset):
    """Windows of `seq_len + 1` tokens that hold whole documents and then padding.

    A document's labels end with it: its last token does not predict the first of the next. Padding is not trained on
    and counts as no token. A document longer than a window is cut into pieces, see `cut_long`.
    """

    end_of_text: int | None = None  # the windows say themselves where documents begin
    is_uniform = False
    is_chat = False  # whether its documents are conversations
    path = counts = mapped = None  # as of a PackedDataset

    def __init__(
        self,
        tokens,
        seq_len: int,
        padding: int,
        seed: int = 0,
        trained: np.ndarray | None = None,
        document_mask: bool = True,
        text_end: int | None = None,
    ):
        """`tokens` and `trained` are those of a PackedDataset; the documents end where the tokens know it, or else with
        the token `text_end`. `padding` is a token id; without `document_mask` the documents of a window see those
        before them."""
        self.tokens, self.seq_len, self.padding, self.seed = tokens, seq_len, padding, seed
        self.trained, self.document_mask, self.text_end = trained, document_mask, text_end

    def part(self, select: Callable) -> "BinnedDataset":
        """The documents of a part of the array, packed anew; `select` makes it of an array of one item for each
        token."""
        trained = None if self.trained is None else select(self.trained)
        tokens, mask = select(self.tokens), self.document_mask
        part = BinnedDataset(tokens, self.seq_len, self.padding, self.seed, trained, mask, self.text_end)
        part.path, part.counts, part.mapped = self.path, self.counts, self.mapped
        part.is_chat = self.is_chat
        return part

    @functools.cached_property
    def document_ends(self) -> np.ndarray:
        return find_document_ends(self.tokens, self.text_end)

    # Packed when they are first asked for, so that a corpus that is divided is not packed as a whole before.

    @functools.cached_property
    def pieces(self) -> Pieces:
        return cut_long(self.document_ends, self.seq_len)

    @functools.cached_property
    def _bins(self) -> tuple[np.ndarray, np.ndarray]:
        return best_fit(self.pieces.lengths, self.seq_len + 1, self.seed)

    @functools.cached_property
    def _real(self) -> np.ndarray:
        return np.minimum(self._sums(self.pieces.lengths), self.seq_len)

    def pieces_of(self, index: int) -> np.ndarray:
        """The numbers of the pieces in a window."""
        items, begins = self._bins
        return items[begins[index] : begins[index + 1]]

    def __len__(self) -> int:
        return len(self._bins[1]) - 1

    def __getitem__(self, index: int) -> Window:
        """The documents of a bin, the longest first, as a Window with `trained`, and with `starts` where they are not
        to see each other."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        size = self.seq_len + 1
        parts, starts, filled, trained = [], [], 0, np.zeros(size, bool)
        for piece in self.pieces_of(index):
            start, length = int(self.pieces.starts[piece]), int(self.pieces.lengths[piece])
            parts.append(self.tokens[start : start + length])
            starts.append(filled)
            if self.trained is None:
                trained[filled + 1 : filled + length] = True
            else:
                trained[filled + 1 : filled + length] = self.trained[start + 1 : start + length]
            filled += length
        starts.append(filled)  # of the padding
        parts.append(np.full(size - filled, self.padding, parts[0].dtype))
        begins = None
        if self.document_mask:
            begins = np.array([start for start in starts if start < self.seq_len], np.int64)
        return Window(np.concatenate(parts), trained[1:], begins)

    def _sums(self, of_pieces: np.ndarray) -> np.ndarray:
        """The sum of a number of each piece over each window."""
        items, begins = self._bins
        if not len(items):
            return np.zeros(0, np.int64)
        return np.add.reduceat(of_pieces[items], begins[:-1], dtype=np.int64)

    def real_tokens(self, index: int) -> int:
        """Inputs of a window that are not padding."""
        return int(self._real[index])

    def trained_tokens(self, index: int) -> int:
        """Labels of a window that count."""
        return int(self._trained_counts[index])

    def total_trained(self) -> int:
        """Labels of all windows that count."""
        return int(self._trained_counts.sum())

    @functools.cached_property
    def _trained_counts(self) -> np.ndarray:
        """Labels that count in each window, read from the mask once."""
        if self.trained is None:
            return self._sums(self.pieces.lengths - 1)
        return self._sums(trained_of_pieces(self.pieces, self.trained))

    @property
    def padding_share(self) -> float:
        """Padding as a part of the inputs of all windows."""
        return 1 - float(self._real.sum()) / max(1, len(self) * self.seq_len)

    def describe(self) -> str:
        """The packing in words: how many documents in how many windows, what was cut, the share of padding."""
        documents = int((np.diff(self.document_ends, prepend=0) > 0).sum())
        line = f"best-fit, {counted(documents, 'document')} in {counted(len(self), 'window')}"
        if self.pieces.cut:
            whole = documents - self.pieces.cut
            line += f", {self.pieces.cut:,} longer than a window cut into {len(self.pieces.documents) - whole:,} pieces"
        return f"{line}, padding {100 * self.padding_share:.1f} %"

    def total_tokens(self) -> int:
        """Inputs of all windows that are not padding."""
        return int(self._real.sum())

    def documents(self, index: int) -> list[tuple[int, str, int]]:
        """(where it begins in the window, its place in words, offset in it of the token there) of each document."""
        found, filled = [], 0
        for piece in self.pieces_of(index):
            found.append((filled, *self._places.of(int(self.pieces.starts[piece]))))
            filled += int(self.pieces.lengths[piece])
        return found

    @functools.cached_property
    def _places(self) -> DocumentPlaces:
        return DocumentPlaces(self.tokens, self.text_end)

    def fingerprint(self) -> str:
        """Tells data sets apart by their number of tokens, samples of them, and the ends of their documents."""
        flat = PackedDataset(self.tokens, self.seq_len, self.trained).fingerprint()
        ends = hashlib.sha256(self.document_ends.astype(np.int64).tobytes()).hexdigest()
        return f"{flat}, best-fit, {ends[:20]}"


def trained_of_pieces(pieces: Pieces, trained: np.ndarray) -> np.ndarray:
    """Labels that count in each piece, by a mask of the flat array."""
    sums = np.zeros(len(pieces.starts), np.int32)
    first = 0
    while first < len(sums):
        beginning = int(pieces.starts[first])
        last = max(first + 1, int(np.searchsorted(pieces.starts, beginning + COUNTED_AT_ONCE)))
        end = int(pieces.starts[last - 1] + pieces.lengths[last - 1])
        before = np.concatenate([[0], np.cumsum(trained[beginning:end], dtype=np.int64)])
        starts = pieces.starts[first:last] - beginning
        sums[first:last] = before[starts + pieces.lengths[first:last]] - before[starts + 1]
        first = last
    return sums


def pack_best_fit(tokens, seq_len: int, dataset: str, split: str, **options) -> BinnedDataset:
    """The documents of a corpus as windows, with the options of BinnedDataset; none at all are a UserError."""
    if not len(tokens):
        raise UserError(f"--dataset {dataset}, split {split!r}: it holds no text")
    return BinnedDataset(tokens, seq_len, **options)
