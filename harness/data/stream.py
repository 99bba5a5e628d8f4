"""Streams: a corpus that is read and tokenized while training. It is cut into chunks, which are dealt to shards; a rank
opens the shards of its own samples.

A chunk is a part of files that can be cut, a row group of Parquet, or any other file. Each epoch a shard takes its
chunks in an order of its own and reads each in portions, whose documents it shuffles. Its sequences are cut from their
tokens end to end. A position from which a sequence can be read again is (its number in the shard, the chunk counted
over epochs, the portion of the chunk, the tokens of the portion before the sequence). To resume there, the portions of
the chunk before it are read again but not tokenized.
"""

import bisect
import collections
import copy
import functools
import hashlib
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from harness import base
from harness.data.eval_split import is_eval_document
from harness.data.files import DataFile
from harness.data.formats import find_format, read_records
from harness.data.mixture import SourceSpec
from harness.data.packing import PackedSequence, StreamEvalSequences, mask_boundaries, sequence_tokens
from harness.data.schema import read_documents
from harness.data.tokenize import Encoded, TextEncoder, next_batch
from harness.data.tokens import BEGINNING_TOKENS, checksum_of_beginning

MIN_CHUNK = 2**12  # bytes; limits the number of shards, as each needs a chunk
MAX_CHUNK = 2**18  # bytes, and characters of a portion: about what an open shard holds in memory
MAX_OPEN_BYTES = 2**26  # of one open chunk per shard, in total
BATCH = 16  # documents per call of the tokenizer; few, as training waits for the first call of each shard


class Position(NamedTuple):
    """A position in a shard, from which a sequence and those after it can be read again."""

    sequence: int  # its number in the shard
    chunk: int  # its number in the shard, counted over epochs
    portion: int  # its number in the chunk
    offset: int  # tokens of the portion before the sequence


SHARD_START = Position(0, 0, 0, 0)


class Part(NamedTuple):
    """The records of a file that begin within these bytes; of a whole file `end` is None."""

    file: DataFile
    start: int = 0
    end: int | None = None


Selection = Literal["all", "training", "eval"]  # all documents, all but the eval documents, or these


@dataclass(eq=False, kw_only=True)
class Stream:
    """The documents of files in shards."""

    files: list[DataFile]
    encoder: TextEncoder
    fields: tuple[str, ...]
    seq_len: int
    seed: int
    kind: str = "text"  # of its records, "text" or "ids": a stream of conversations or labels is refused
    skip_bad: bool = False
    num_shards: int = 1
    document_mask: bool = False
    selection: Selection = "all"

    def __post_init__(self) -> None:
        self.is_uniform = not self.document_mask  # True if all labels of each sequence count
        self.chunks = cut_into_chunks(self.files, self.num_shards)

    def select(self, selection: Selection) -> "Stream":
        """A copy of the stream that reads these documents only."""
        stream = copy.copy(self)
        stream.selection = selection
        return stream

    def documents(self, chunk: list[Part], counts: Counter | None = None) -> Iterator:
        """The selected documents of a chunk; `counts` gets how many faulty and empty ones are left out."""
        counts = Counter() if counts is None else counts
        for part in chunk:
            records = read_records(part.file, self.fields, part.start, part.end)
            vocab_size = self.encoder.vocab_size
            documents: Iterator[Any] = read_documents(records, vocab_size, self.skip_bad, counts, self.kind)
            for document in documents:
                if self.selection == "all" or is_eval_document(document) == (self.selection == "eval"):
                    yield document

    def shard_chunks(self, shard: int) -> list[list[Part]]:
        """The chunks of a shard; if they have no document, those of the next shard that has one: every shard must give
        sequences. A text of 10 MB without a separator has 40 chunks, and all but the first have no document."""
        for owner in range(shard, shard + self.num_shards):
            chunks = self.chunks[owner % self.num_shards :: self.num_shards]
            documents = itertools.chain.from_iterable(map(self.documents, chunks))
            if next(documents, None) is not None:
                return chunks
        held = "nothing but eval documents" if self.selection == "training" else "no text"
        raise base.UserError(f"--dataset {self.files[0]}: it holds {held}; give it more documents")

    def shard_sizes(self) -> np.ndarray:
        """The bytes of each shard, as they are stored, float64."""
        sizes = [
            sum((part.file.size if part.end is None else part.end) - part.start for part in chunk)
            for chunk in self.chunks
        ]
        return np.bincount(np.arange(len(sizes)) % self.num_shards, sizes, self.num_shards)

    def portions(
        self, shard: int, first_chunk: int, first_portion: int, counts: Counter
    ) -> Iterator[tuple[int, int, list]]:
        """Endless (chunk, counted over epochs; portion; its documents) of a shard, from a portion of a chunk on;
        `counts` gets how many documents of the first epoch are left out."""
        chunks = self.shard_chunks(shard)
        for chunk in itertools.count(first_chunk):
            epoch, index_in_epoch = divmod(chunk, len(chunks))
            order = np.random.default_rng([self.seed, shard, epoch]).permutation(len(chunks))
            documents = self.documents(chunks[order[index_in_epoch]], counts if epoch == 0 else None)
            for portion in itertools.count():
                portion_documents = list(next_batch(documents, max_characters=MAX_CHUNK))
                if not portion_documents:
                    break
                if chunk > first_chunk or portion >= first_portion:
                    generator = np.random.default_rng([self.seed, shard, chunk, portion])
                    shuffled = [portion_documents[index] for index in generator.permutation(len(portion_documents))]
                    yield chunk, portion, shuffled

    def first_documents(self, chunks: list[list[Part]], num_tokens: int) -> Encoded:
        """The first documents of chunks, with at least this number of tokens if there are that many."""
        found = [Encoded(np.empty(0, self.encoder.dtype), np.empty(0, np.int64))]
        documents, length = itertools.chain.from_iterable(map(self.documents, chunks)), 0
        while length < num_tokens and (batch := list(next_batch(documents, BATCH))):
            found.append(self.encoder.encode(batch, Counter()))
            length += len(found[-1].tokens)
        return Encoded(
            np.concatenate([part.tokens for part in found]), np.concatenate([part.lengths for part in found])
        )

    def identify(self) -> SourceSpec:
        """What identifies the corpus, wherever it is stored: the names and sizes of its files, and its first tokens. A
        UserError if it holds no text."""
        tolerant = copy.copy(self)
        tolerant.skip_bad = True  # a bad record is an error when training reads it
        in_file_order = [[Part(file)] for file in self.files]  # as in a token cache; chunks may have another order
        beginning = tolerant.first_documents(in_file_order, BEGINNING_TOKENS).tokens
        if not len(beginning):
            raise base.UserError(f"--dataset {self.files[0]}: it holds no text")
        return {"dataset": f"{self.files_digest()}, streamed", "beginning": checksum_of_beginning(beginning)}

    def files_digest(self) -> str:
        """A checksum of the names and sizes of the files."""
        names = [[file.name, file.size] for file in self.files]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:20]

    def read_eval_sequences(self, count: int, ranks_of_sequence: Callable[[int], Iterable[int]]) -> StreamEvalSequences:
        """The first `count` sequences, or all if it is 0, in the order of the chunks. Ranks divide the reading, then
        send each other the tokens: a sequence is held by `ranks_of_sequence(number)`, the first one by all, as
        `eval_batches` fills the last batch with it. A UserError if there are none. Every rank calls this.

        Example: with 4 tokens to a sequence, rank 0 read the tokens 0..5 and rank 1 the tokens 6..9. Sequence 0 is the
        tokens 0..4, sequence 1 the tokens 4..8. So rank 0 sends the tokens 0..4 for sequence 0, at 0, and 4..5 for
        sequence 1, at 0; rank 1 sends 6..8 for sequence 1, at 2.
        """
        length = self.seq_len
        parts, total = self.read_first_chunks(count * length + 1 if count else sys.maxsize)
        num_sequences = min(count or sys.maxsize, max(0, total - 1) // length)
        if not num_sequences:
            found = f"{base.counted(total, 'token')} to evaluate"
            problem = f"{found}, too few for one sequence of --sequence-length {length}"
            advice = "use a shorter sequence, more text or an --eval-split"
            raise base.UserError(f"--dataset {self.files[0]}: {problem}; {advice}")
        sent: list[list[tuple]] = [[] for _ in range(dist.get_world_size())]
        for first, encoded in parts.items():
            last, doc_ends = first + len(encoded.tokens), first + np.cumsum(encoded.lengths)
            # from the first sequence that has the token `first`, if only as its last label
            for number in range(max(0, (first - 1) // length), min(num_sequences, -(-last // length))):
                sequence_start = number * length
                start, stop = max(sequence_start, first), min(sequence_start + length + 1, last)
                first_end, last_end = np.searchsorted(doc_ends, (start, stop), "right")
                doc_ends_inside = doc_ends[first_end:last_end] - sequence_start
                stretch = encoded.tokens[start - first : stop - first]
                for rank in ranks_of_sequence(number):
                    sent[rank].append((number, start - sequence_start, stretch, doc_ends_inside))
        tokens: dict[int, np.ndarray] = {}  # by number
        all_doc_ends: dict[int, list[np.ndarray]] = {}
        for number, start, stretch, doc_ends_inside in itertools.chain.from_iterable(base.all_to_all_lists(sent)):
            if number not in tokens:
                tokens[number] = np.zeros(length + 1, self.encoder.dtype)
            tokens[number][start : start + len(stretch)] = stretch
            all_doc_ends.setdefault(number, []).append(doc_ends_inside)
        held = {}
        for number, doc_ends_of_ranks in all_doc_ends.items():
            held[number] = self.make_sequence(tokens[number], np.sort(np.concatenate(doc_ends_of_ranks)))
        held[0] = base.broadcast_from_rank_0(lambda: held[0])
        content = [self.files_digest(), self.selection, hashlib.sha256(sequence_tokens(held[0]).tobytes()).hexdigest()]
        checksum = f"{content}, {base.counted(num_sequences, 'sequence')}"
        return StreamEvalSequences(held, num_sequences, length, checksum)

    def read_first_chunks(self, num_tokens: int) -> tuple[dict[int, Encoded], int]:
        """Read the first chunks until they have this number of tokens. Return (what this rank has read in each round,
        by the global position of its first token; how many tokens all ranks have read). Every rank calls this.

        Ranks divide the chunks of a round. Each round has twice as many chunks as the last, or fewer, if the missing
        tokens need fewer at the tokens per chunk so far.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        mine: dict[int, Encoded] = {}
        first, found, width = 0, 0, 1
        while first < len(self.chunks) and found < num_tokens:
            width = min(width, len(self.chunks) - first)
            # ceil(width * number / world) chunks of the round are before those of rank `number`
            begin, end = (first + -(-width * number // world) for number in (rank, rank + 1))
            chunks = self.chunks[begin:end]
            # a rank that stops within its chunks has all missing tokens: those of later ranks lie beyond what is wanted
            encoded = base.call_on_all_ranks(functools.partial(self.first_documents, chunks, num_tokens - found))
            sizes = base.all_gather_objects(len(encoded.tokens))
            mine[found + sum(sizes[:rank])] = encoded
            first, found = first + width, found + sum(sizes)
            width = min(2 * width, math.ceil((num_tokens - found) * first / max(found, 1)))
        return mine, found

    def make_sequence(self, tokens: np.ndarray, doc_ends: np.ndarray) -> np.ndarray | PackedSequence:
        """A sequence of the first `seq_len + 1` of `tokens`. `doc_ends` are counted from the first token."""
        sequence = tokens[: self.seq_len + 1].copy()  # a view would keep the whole buffer in memory
        if not self.document_mask:
            return sequence
        inside = doc_ends[(doc_ends > 0) & (doc_ends <= self.seq_len)]
        return PackedSequence(sequence, *mask_boundaries(np.concatenate([[0], inside]), self.seq_len))


def cut_into_chunks(files: list[DataFile], num_shards: int) -> list[list[Part]]:
    """The chunks of a corpus: those of files that can be cut anywhere, then row groups, then other files, each in the
    order of the files. A pure function of these and of the number of shards. Every rank calls this.

    Files that can be cut anywhere are laid end to end and cut into parts of equal size, the same number for each shard:
    a large file is in several chunks, and a chunk may have several small files. A row group is a chunk of its
    own, and so is any other file.
    """
    cut_files, parts = divide_files(tuple(files))
    cut_files = [file for file in cut_files if file.size]
    if not cut_files:
        # if there are no parts either, all files are empty, and reading them raises the error
        return [[part] for part in parts or map(Part, files)]
    file_ends = list(itertools.accumulate(file.size for file in cut_files))
    total, max_bytes = file_ends[-1], max(min(MAX_CHUNK, MAX_OPEN_BYTES // num_shards), MIN_CHUNK)
    num_chunks = num_shards * -(-total // (num_shards * max_bytes))
    chunks = []
    for number in range(num_chunks):
        # the bytes of this chunk, counted over all files, and the part of each file that lies in them
        first, last = total * number // num_chunks, total * (number + 1) // num_chunks
        chunk = []
        for index in range(bisect.bisect_right(file_ends, first), len(file_ends)):
            if first == last:
                break
            before, end = file_ends[index] - cut_files[index].size, min(last, file_ends[index])
            chunk.append(Part(cut_files[index], first - before, end - before))
            first = end
        if chunk:
            chunks.append(chunk)
    return chunks + [[part] for part in parts]


def max_shards(files: list[DataFile]) -> int:
    """The most shards that a corpus may have: no more than chunks. Every rank calls this."""
    cut_files, parts = divide_files(tuple(files))
    return max(1, sum(file.size for file in cut_files) // MIN_CHUNK + len(parts))


@functools.cache
def divide_files(files: tuple[DataFile, ...]) -> tuple[list[DataFile], list[Part]]:
    """(the files that can be cut anywhere, the parts that cannot: row groups, then other files). Rank 0 reads the
    footers that say where row groups begin. Every rank calls this."""
    cut_files, grouped, others = [], [], []
    for file in files:
        file_format = find_format(file.name)
        if file.compression or not getattr(file_format, "CAN_BE_CUT", False):
            others.append(Part(file))
        elif hasattr(file_format, "row_group_parts"):
            grouped.append(file)
        else:
            cut_files.append(file)

    def read_footers() -> list[list[tuple[int, int]]]:
        with ThreadPoolExecutor() as threads:  # one request for each file in a store
            return list(threads.map(lambda file: find_format(file.name).row_group_parts(file), grouped))

    found = base.broadcast_from_rank_0(read_footers) if grouped else []
    row_groups = [Part(file, *part) for file, parts in zip(grouped, found, strict=True) for part in parts]
    return cut_files, row_groups + others


class ShardReader:
    """The sequences of one shard from a position on."""

    def __init__(self, stream: Stream, shard: int, position: Position, counts: Counter):
        self.stream, self.counts = stream, counts
        # number of the first token in the buffer, in the shard
        self.start = position.sequence * stream.seq_len - position.offset
        # the buffer, and the ends of its documents, counted in the shard
        self.tokens, self.doc_ends = np.empty(0, stream.encoder.dtype), np.empty(0, np.int64)
        # of the portions in the buffer: (first token in the shard, chunk, portion)
        self.portion_starts: collections.deque[tuple[int, int, int]] = collections.deque()
        # each `next` appends a batch to the buffer
        self.appending = self._append_batches(stream.portions(shard, position.chunk, position.portion, counts))
        self.last_requested = position.sequence  # the number of a sequence

    def _append_batches(self, portions: Iterator[tuple[int, int, list]]) -> Iterator[None]:
        for chunk, portion, documents in portions:
            self.portion_starts.append((self.start + len(self.tokens), chunk, portion))
            for first in range(0, len(documents), BATCH):
                # its counts are of documents and tokens; `self.counts` are of what is left out
                encoded = self.stream.encoder.encode(documents[first : first + BATCH], Counter())
                end = self.start + len(self.tokens)
                self.tokens = np.concatenate([self.tokens, encoded.tokens])
                self.doc_ends = np.concatenate([self.doc_ends, end + np.cumsum(encoded.lengths)])
                yield

    def sequence(self, number: int) -> np.ndarray | PackedSequence:
        """A sequence of the shard; those between the last call's and this one are skipped."""
        self.last_requested = number
        first = number * self.stream.seq_len
        stop = first + self.stream.seq_len + 1
        while self.start + len(self.tokens) < stop:
            next(self.appending)
            self._drop(first)
        self._drop(first)
        if first < self.start:
            raise ValueError(f"sequence {number:,} is wanted, the shard was read from token {self.start:,} on")
        return self.stream.make_sequence(self.tokens, self.doc_ends - first)

    def _drop(self, first: int) -> None:
        """Drop the tokens before `first`, which may lie beyond all that was read."""
        dropped = max(0, min(first - self.start, len(self.tokens)))
        self.tokens, self.start = self.tokens[dropped:], self.start + dropped
        self.doc_ends = self.doc_ends[self.doc_ends > self.start]
        while len(self.portion_starts) > 1 and self.portion_starts[1][0] <= first:
            self.portion_starts.popleft()

    def position(self) -> Position:
        """The position from which the sequence that was asked for last, and those after it, are read again."""
        begin, chunk, portion = self.portion_starts[0]
        offset = self.last_requested * self.stream.seq_len - begin
        return Position(self.last_requested, chunk, portion, offset)
