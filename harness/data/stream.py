"""Streams: a corpus that is read and tokenized while training. It is cut into chunks, which are dealt to lanes; a rank
opens the lanes of its own samples.

A chunk is a part of files that can be cut, or a packed file. Each epoch a lane takes its chunks in an order of its own
and reads each in pieces, whose documents it shuffles. Its windows are cut from their tokens end to end. A position from
which a window can be read again is (its number in the lane, the chunk counted over epochs, the piece of the chunk, the
tokens of the piece before the window): of a chunk what is before it is read again but not tokenized.
"""

import bisect
import collections
import functools
import hashlib
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from harness import base
from harness.data.files import DataFile
from harness.data.formats import find_format, read_records
from harness.data.schema import Field, read_documents
from harness.data.tokenize import Encoded, TextFormat, take
from harness.data.windows import EVERY, Window, end_labels

LEAST_CHUNK = 2**12  # bytes: a corpus has no more lanes than chunks
MOST_CHUNK = 2**18  # bytes, and characters of a piece: about what an open lane holds in memory
ALL_LANES = 2**26  # bytes that the chunks of all lanes together are to have at most
BATCH = 16  # documents per call of the tokenizer: training waits for the first of each lane

Position = tuple[int, int, int, int]
BEGINNING: Position = (0, 0, 0, 0)


class Part(NamedTuple):
    """The records of a file that begin within these bytes; of a whole file `end` is None."""

    file: DataFile
    start: int = 0
    end: int | None = None


class Stream:
    """The documents of files in lanes."""

    has_mask = False

    def __init__(
        self,
        files: list[DataFile],
        encoder: TextFormat,
        text_field: Field,
        seq_len: int,
        seed: int,
        skip_bad: bool = False,
        lanes: int = 1,
        document_mask: bool = False,
    ):
        self.files, self.encoder, self.text_field = files, encoder, text_field
        self.seq_len, self.seed, self.skip_bad, self.document_mask = seq_len, seed, skip_bad, document_mask
        self.is_uniform = not document_mask  # whether all labels of each window count
        self.held_out: bool | None = None  # whether it reads the held-out documents, or all but these; None: all
        self.lanes = lanes
        self.chunks = cut_into_chunks(files, lanes)

    def documents(self, chunk: list[Part], counts: Counter | None = None) -> Iterator:
        """The documents of a chunk; `counts` gets how many are left out."""
        counts = Counter() if counts is None else counts
        for part in chunk:
            records = read_records(part.file, self.text_field, part.start, part.end)
            # texts and token ids only: a stream of conversations is refused
            documents: Iterator[Any] = read_documents(records, self.encoder.vocab_size, self.skip_bad, counts)
            for document in documents:
                if self.held_out is None or is_held_out(document) == self.held_out:
                    yield document

    def chunks_of(self, lane: int) -> list[list[Part]]:
        """The chunks that are dealt to a lane; where these hold no document, those of the next lane that has some."""
        for owner in range(lane, lane + self.lanes):
            chunks = self.chunks[owner % self.lanes :: self.lanes]
            if any(True for chunk in chunks for _ in self.documents(chunk)):
                return chunks
        raise base.UserError(f"--dataset {self.files[0]}: it holds no text")

    def pieces(self, lane: int, chunk: int, piece: int, counts: Counter) -> Iterator[tuple[int, int, list]]:
        """Endless (chunk, piece, its documents) of a lane, from a piece of a chunk on; `counts` gets how many documents
        of the first epoch are left out."""
        chunks = self.chunks_of(lane)
        while True:
            epoch, place = divmod(chunk, len(chunks))
            order = np.random.default_rng([self.seed, lane, epoch]).permutation(len(chunks))
            documents = self.documents(chunks[order[place]], counts if epoch == 0 else None)
            for number in itertools.count():
                of_piece = list(take(documents, MOST_CHUNK, MOST_CHUNK))
                if not of_piece:
                    break
                if number >= piece:
                    generator = np.random.default_rng([self.seed, lane, chunk, number])
                    yield chunk, number, [of_piece[index] for index in generator.permutation(len(of_piece))]
            chunk, piece = chunk + 1, 0

    def head(self, tokens: int, chunks: list[list[Part]] | None = None) -> Encoded:
        """The first documents in the order of the chunks, at least so many tokens where there are; those of `chunks`
        alone."""
        found = [Encoded(np.empty(0, self.encoder.dtype), np.empty(0, np.int64))]
        documents = itertools.chain.from_iterable(map(self.documents, self.chunks if chunks is None else chunks))
        length = 0
        while length < tokens and (batch := list(take(documents, BATCH))):
            found.append(self.encoder.encode(batch, Counter()))
            length += len(found[-1].tokens)
        return joined(found)

    def fingerprint(self) -> dict[str, str]:
        """What tells it from other corpora, wherever they are stored: the names and sizes of its files, and its first
        document's tokens. A UserError where it holds no text."""
        names = [[file.name, file.size] for file in self.files]
        beginning = self.head(1).tokens
        if not len(beginning):
            raise base.UserError(f"--dataset {self.files[0]}: it holds no text")
        return {
            "corpus": hashlib.sha256(json.dumps(names).encode()).hexdigest()[:20],
            "dataset": f"{hashlib.sha256(beginning.tobytes()).hexdigest()[:20]}, then streamed",
        }

    def held_out_windows(self, count: int, batch_size: int) -> "HeldOutWindows":
        """The first windows in the order of the chunks, which is that of the files but that those which cannot be cut
        come last; all windows for 0. No more chunks are read than it takes. Ranks read them in turn; each sees the
        tokens of all and keeps the windows that it evaluates. A UserError where there is not one; every rank calls
        this."""
        rank, world = dist.get_rank(), dist.get_world_size()
        most = count or sys.maxsize
        found = HeldOutWindows(self.seq_len)
        tokens, ends = np.empty(0, self.encoder.dtype), np.empty(0, np.int64)  # what is in no window yet
        for first in range(0, len(self.chunks), world):
            chunk = self.chunks[first + rank : first + rank + 1]
            wanted = (most - len(found)) * self.seq_len + 1 - len(tokens)
            mine = base.call_on_all_ranks(functools.partial(self.head, wanted, chunk))
            for encoded in base.all_gather_objects(mine):
                ends = np.concatenate([ends, len(tokens) + np.cumsum(encoded.lengths)])
                tokens = np.concatenate([tokens, encoded.tokens])
                while len(tokens) > self.seq_len and len(found) < most:
                    is_mine = len(found) // batch_size % world == rank
                    found.add(self.first_window(tokens, ends), is_mine)
                    tokens, ends = tokens[self.seq_len :], ends - self.seq_len
            if len(found) == most:
                break
        if not len(found):
            problem = (
                f"{base.counted(len(tokens), 'token')}, too few for one window of --sequence-length {self.seq_len}"
            )
            raise base.UserError(
                f"--dataset {self.files[0]}: {problem}; use a shorter sequence, more text or an --eval-split"
            )
        return found

    def first_window(self, tokens: np.ndarray, ends: np.ndarray) -> np.ndarray | Window:
        """The window that tokens begin with, whose documents end at `ends`, counted from its first token."""
        window = tokens[: self.seq_len + 1].copy()  # without what comes after it
        if not self.document_mask:
            return window
        inside = ends[(ends > 0) & (ends <= self.seq_len)]
        return Window(window, *end_labels(np.concatenate([[0], inside]), self.seq_len))


class HeldOutWindows:
    """Windows of a stream that are evaluated, of which a rank holds its own, see `batches.eval_batches`."""

    has_mask, left_out = False, 0

    def __init__(self, seq_len: int):
        self.seq_len, self.count = seq_len, 0
        self.held: dict[int, np.ndarray | Window] = {}

    def add(self, window: np.ndarray | Window, is_mine: bool) -> None:
        if is_mine or self.count == 0:  # every rank has the first one, to fill its last batch with
            self.held[self.count] = window
        self.count += 1

    def __len__(self) -> int:
        """How many all ranks hold."""
        return self.count

    def __getitem__(self, index: int) -> np.ndarray | Window:
        return self.held[index]

    def total_tokens(self) -> int:
        return self.count * self.seq_len


def joined(parts: list[Encoded]) -> Encoded:
    """Documents end to end, of which none has a mask."""
    return Encoded(np.concatenate([part.tokens for part in parts]), np.concatenate([part.lengths for part in parts]))


def is_held_out(document: str | np.ndarray) -> bool:
    """Whether a document of a stream is held out: by the checksum of its UTF-8, or of its ids as little-endian uint32,
    so that the corpus need not be read before. The same document twice is held out twice."""
    content = document.encode() if isinstance(document, str) else np.asarray(document).astype("<u4").tobytes()
    return zlib.crc32(content) % EVERY == 0


def cut_into_chunks(files: list[DataFile], lanes: int) -> list[list[Part]]:
    """The chunks of a corpus, in the order of its files: a pure function of their sizes and of the number of lanes.

    Files that can be cut are cut, end to end, into so many parts of equal size that each lane has as many of them; a
    large file is in several chunks, and a chunk may have several small files. Another file is a chunk of its own.
    """
    whole = [[Part(file)] for file in files if not can_be_cut(file)]
    cut = [file for file in files if can_be_cut(file) and file.size]
    ends = list(itertools.accumulate(file.size for file in cut))
    if not cut:
        return whole or [[Part(file)] for file in files]
    most = max(min(MOST_CHUNK, ALL_LANES // lanes), LEAST_CHUNK)
    count = lanes * -(-ends[-1] // (lanes * most))
    chunks = []
    for number in range(count):
        first, last = ends[-1] * number // count, ends[-1] * (number + 1) // count
        parts, at = [], bisect.bisect_right(ends, first)
        while first < last:
            before = ends[at] - cut[at].size
            end = min(last, ends[at])
            parts.append(Part(cut[at], first - before, end - before))
            first, at = end, at + 1
        if parts:
            chunks.append(parts)
    return chunks + whole


def can_be_cut(file: DataFile) -> bool:
    return file.compression is None and getattr(find_format(file.name), "CAN_BE_CUT", False)


def most_lanes(files: list[DataFile]) -> int:
    """How many lanes a corpus may have: no more than chunks."""
    size = sum(file.size for file in files if can_be_cut(file))
    return max(1, size // LEAST_CHUNK + sum(not can_be_cut(file) for file in files))


class LaneReader:
    """The windows of one lane from a position on."""

    def __init__(self, stream: Stream, lane: int, position: Position, counts: Counter):
        windows, chunk, piece, offset = position
        self.stream, self.counts = stream, counts
        self.start = windows * stream.seq_len - offset  # number of the first token in the buffer, in the lane
        self.tokens, self.ends = np.empty(0, stream.encoder.dtype), np.empty(0, np.int64)  # the buffer, documents' ends
        self.marks: collections.deque[tuple[int, int, int]] = collections.deque()  # (first token, chunk, piece) in it
        self.batches = self._read(stream.pieces(lane, chunk, piece, counts))
        self.last_window = windows

    def _read(self, pieces: Iterator[tuple[int, int, list]]) -> Iterator[None]:
        """Appends to the buffer, batch by batch."""
        for chunk, piece, documents in pieces:
            self.marks.append((self.start + len(self.tokens), chunk, piece))
            for first in range(0, len(documents), BATCH):
                encoded = self.stream.encoder.encode(documents[first : first + BATCH], Counter())
                end = self.start + len(self.tokens)
                self.tokens = np.concatenate([self.tokens, encoded.tokens])
                self.ends = np.concatenate([self.ends, end + np.cumsum(encoded.lengths)])
                yield

    def window(self, number: int) -> np.ndarray | Window:
        """A window of the lane; those between this one and the last are passed over."""
        self.last_window = number
        first = number * self.stream.seq_len
        last = first + self.stream.seq_len
        while self.start + len(self.tokens) <= last:  # one token more: the last label
            next(self.batches)
            self._drop(first)
        self._drop(first)
        if first < self.start:
            raise ValueError(f"window {number:,} is wanted, the lane was read from token {self.start:,} on")
        return self.stream.first_window(self.tokens, self.ends - first)

    def _drop(self, first: int) -> None:
        """Drops what is before a token, which may lie beyond all that was read."""
        dropped = max(0, min(first - self.start, len(self.tokens)))
        self.tokens, self.start = self.tokens[dropped:], self.start + dropped
        self.ends = self.ends[self.ends > self.start]
        while len(self.marks) > 1 and self.marks[1][0] <= first:
            self.marks.popleft()

    def position(self) -> Position:
        """Where to begin again to get the window that was given last, and those after it."""
        begin, chunk, piece = self.marks[0]
        return self.last_window, chunk, piece, self.last_window * self.stream.seq_len - begin
