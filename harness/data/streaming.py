"""Streaming: a corpus that is read and tokenized while training, cut into the same windows as a token cache. Called by
the script where --streaming is given. A restart needs a position of the stream. Independent of the training loop."""

import collections
import contextlib
import copy
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from harness.base.errors import UnreadableError, UserError
from harness.base.ranks import from_main_process
from harness.data import held_out as held
from harness.data.corpus_files import is_folder, local_files
from harness.data.documents import in_vocabulary, read_documents, token_batches, token_dtype
from harness.data.faults import name_fault
from harness.data.formats import file_records
from harness.data.hub_rows import hub_records, load_documents, shard_of
from harness.data.records import DEFAULT_FIELD, Field
from harness.data.splits import cut_documents, files_of_split, parse_split
from harness.data.storage import DataFile, for_parts
from harness.data.stream_parts import Division, Part, parts_between, read_piece, share, size_of
from harness.data.token_files import is_mapped
from harness.data.windows import PackedDataset, pack
from harness.job import say

STREAM_BATCH = 64  # documents per call of the tokenizer: training waits for the first of them
DIVIDED_BATCH = 16  # the same where there are several streams: it waits for the first of each
SHUFFLE_BUFFER = 10_000  # documents of all streams together among which the next is drawn
LEAST_BUFFER = 16  # documents of one stream
SHARD_PLACES = 2**32  # a hub data set's shard is cut into so many places; how many rows it has is not known


class StreamedDataset:
    """A corpus that is read and tokenized while training: nothing is downloaded, tokenized or cached before.

    Its documents, shuffled within a buffer in another order each epoch, are one endless sequence of tokens, and global
    sample i is window i of it, as PackedDataset cuts them. So the order is a pure function of (seed, global sample
    index), for hub data also of how the installed `datasets` shuffles.

    Divided into N streams it is N such sequences, each of its own documents, in an order and with epochs of its own,
    and sample i is window i // N of stream i % N. `StreamReader` reads them. The documents of an epoch of all streams
    are those of the corpus, each once.
    """

    end_of_text: int | None = None
    is_uniform = True
    streams: int = 1
    division: Division | None = None  # of several streams

    def __init__(
        self, tokenizer, seq_len: int, source: str, split: str, vocab_size: int, seed: int, reading: tuple, subset=None
    ):
        self.tokenizer, self.seq_len, self.source = tokenizer, seq_len, source
        self.split, self.vocab_size, self.seed = split, vocab_size, seed
        self.text_field, self.skip_bad = reading
        self.counts: collections.Counter = collections.Counter()  # what the first epoch leaves out
        self.held_out: bool | None = None  # whether it is the held-out documents, or all but these; None for all
        self.rule = held.RULE  # by which these are chosen
        self.rows: Any = None  # of hub data
        self.parts: list[Part] = []  # of local files
        with self._naming_faults():
            files = local_files(source)
            if files:
                content = self._open_files(files)
            elif "[" in split:
                slices = "is a slice, which --streaming of hub data cannot take; name a whole split"
                raise UserError(f"--dataset {source}, split {split!r}: {slices}")
            else:
                content = self._open_rows(subset)
        # Tells one corpus from another, whatever is held out of it.
        self.content = hashlib.sha256(json.dumps([content, split]).encode()).hexdigest()[:20]
        self.beginning = self.head(1).fingerprint()

    def _open_files(self, files: list[DataFile]) -> list:
        """Finds the documents of the split in local files; returns what tells these files from others."""
        name, bounds = parse_split(self.split)
        of_split = files_of_split(self.source, name, files)
        if is_mapped(of_split, self.text_field):
            problem = "has token files, which are read in place"
            raise UserError(f"--dataset {self.source}: {problem}; leave out --streaming")
        self.parts = [Part(file) for file in of_split]
        if bounds:
            self.parts = self._cut(bounds)[0]
        top = self.source if is_folder(self.source) else os.path.dirname(self.source)
        return [(os.path.relpath(str(file), top), file.stat().st_size) for file in of_split]

    def _open_rows(self, subset: str | None) -> list:
        """Opens the split of a hub data set; returns what tells it from others."""
        self.rows = load_documents(self.source, self.split, subset, streaming=True)
        sizes = [(name, split.num_examples) for name, split in (self.rows.info.splits or {}).items()]
        return [self.source, subset, sizes]

    @property
    def files(self) -> int:
        """How many files it has, or shards of a hub data set."""
        return self.rows.num_shards if self.rows is not None else len({part.file for part in self.parts})

    def divide(self, streams: int) -> "StreamedDataset":
        """The same corpus cut into so many streams of equal size: a pure function of its files' names and sizes; 1 is
        the corpus as it is. Its held-out documents, if any, must be those of `held_out.BY_CONTENT`.

        Files are cut at bytes of equal distance, Parquet files at rows. A file that is packed, one whose reader cannot
        cut it, and a slice are read as a whole by each stream that has a part of it, and so is a hub data set's shard.
        A stream without a document takes those of the next stream that has some, in its own order.
        """
        if streams == 1:
            return self
        if self.held_out is not None and self.rule != held.BY_CONTENT:
            raise ValueError("documents that are held out by their number cannot be told in a divided stream")
        divided = copy.copy(self)
        divided.streams, divided.counts = streams, collections.Counter()
        divided.parts = [part._replace(file=for_parts(part.file)) for part in self.parts]
        with self._naming_faults():
            if self.rows is not None:
                sizes = [SHARD_PLACES] * self.rows.num_shards
            else:
                sizes = [size_of(part) for part in self.parts]
        divided.division = Division(sizes, streams)
        return divided

    def fingerprint(self) -> str:
        """Tells corpora apart by the first window in the order of the files; the size is not known."""
        return f"{self.beginning}, then streamed"

    def head(self, windows: int) -> PackedDataset:
        """The first `windows` windows in the order of the files, all for 0."""
        needed = windows * self.seq_len + 1
        chunks, length = [], 0
        for tokens in self._tokens(self.documents()):
            chunks.append(tokens)
            length += len(tokens)
            if windows and length >= needed:
                break
        if not length:
            raise self._no_text()
        tokens = np.concatenate(chunks)
        if windows:
            tokens = tokens[:needed]
        return pack(tokens, self.seq_len, self.source, self.split)

    def hold_out(self, rule: str) -> tuple["StreamedDataset", "StreamedDataset"]:
        """(the stream without the documents that are held out by a rule of `held_out`, these). Local files are read for
        it, to count their documents; not by the rule BY_CONTENT."""
        train, held_out = copy.copy(self), copy.copy(self)
        if rule == held.BY_CONTENT:
            train.rule = held_out.rule = rule
            train.held_out, held_out.held_out = False, True
            if not (any(True for _ in train.documents()) and any(True for _ in held_out.documents())):
                raise self._too_few(sum(1 for _ in self.documents()))
        elif self.streams > 1:
            raise ValueError(f"a divided stream cannot hold out {rule}")
        elif rule == held.RULE:
            documents = len(list(itertools.islice(self.documents(), held.EVERY)))
            if documents < held.EVERY:
                raise self._too_few(documents)
            if self.parts:
                train.parts = held_out.parts = self._cut(["0%", "100%"])[0]
            train.held_out, held_out.held_out = False, True
        elif self.rows is not None:
            split = (self.rows.info.splits or {}).get(self.split)
            if split is None or not split.num_examples:
                problem = "how many documents it has is not known, so that none can be held out while streaming"
                raise UserError(f"--dataset {self.source}: {problem}; name an --eval-split")
            kept = split.num_examples * (100 - held.PERCENT) // 100
            train.rows, held_out.rows = self.rows.take(kept), self.rows.skip(kept)
        else:
            train.parts, held_out.parts = self._cut(["0%", f"{100 - held.PERCENT}%", "100%"])
        train.beginning = train.head(1).fingerprint()
        return train, held_out

    def _no_text(self) -> UserError:
        return UserError(f"--dataset {self.source}, split {self.split!r}: it holds no text")

    def _too_few(self, documents: int) -> UserError:
        problem = f"{documents:,} documents are too few to be divided while streaming"
        return UserError(f"--dataset {self.source}: {problem}; leave out --streaming")

    def _cut(self, bounds: list[str]) -> list[list[Part]]:
        """For each two neighbours of these bounds of slices, the parts of local files between them."""
        lengths = [sum(1 for _ in self._documents_of(part, collections.Counter())) for part in self.parts]
        cuts = cut_documents(bounds, sum(lengths))
        if None in cuts:
            raise self._too_few(sum(lengths))
        return [parts_between(self.parts, lengths, first, end) for first, end in itertools.pairwise(cuts)]

    def documents(
        self, generator: np.random.Generator | None = None, counts: collections.Counter | None = None
    ) -> Iterator:
        """Each document once, shuffled by `generator` if there is one. `counts` gets how many are left out."""
        counts = collections.Counter() if counts is None else counts
        if self.rows is None:
            parts = self.parts
            if generator is not None:
                parts = [parts[index] for index in generator.permutation(len(parts))]
            documents = itertools.chain.from_iterable(self._documents_of(part, counts) for part in parts)
            return documents if generator is None else shuffled(documents, generator)
        if generator is None:
            return self._documents_of_rows(self.rows, counts)
        if self.held_out is not None and self.rule == held.RULE:  # by their number, so rows keep their order
            return shuffled(self._documents_of_rows(self.rows, counts), generator)
        # one file at a time: after several `datasets` waits 10 s (apache/arrow#45214)
        rows = self.rows.shuffle(None, generator, SHUFFLE_BUFFER, max_buffer_input_shards=1)
        return self._documents_of_rows(rows, counts)

    def stream_documents(self, stream: int, generator: np.random.Generator, counts: collections.Counter) -> Iterator:
        """Each document of a stream of a divided corpus once, shuffled; `counts` gets how many are left out."""
        pieces = self.division.pieces(stream)
        pieces = [pieces[index] for index in generator.permutation(len(pieces))]
        documents = itertools.chain.from_iterable(self._documents_of_piece(piece, counts) for piece in pieces)
        return shuffled(documents, generator, max(LEAST_BUFFER, SHUFFLE_BUFFER // self.streams))

    def _documents_of_piece(self, piece, counts: collections.Counter) -> Iterator:
        if self.rows is None:
            documents = read_piece(self.parts[piece.file], piece, self.text_field, self.skip_bad, counts)
        else:
            records = hub_records(shard_of(self.rows, piece.file), self.source, self.text_field, counts)
            documents = read_documents(share(records, piece), self.source, self.skip_bad, counts)
        return self._chosen(documents, 0)

    def _documents_of(self, part: Part, counts: collections.Counter) -> Iterator:
        records = file_records(part.file, self.text_field, counts)
        documents = read_documents(records, part.file, self.skip_bad, counts)
        return self._chosen(itertools.islice(documents, part.first, part.end), part.number)

    def _documents_of_rows(self, rows, counts: collections.Counter) -> Iterator:
        records = hub_records(rows, self.source, self.text_field, counts)
        return self._chosen(read_documents(records, self.source, self.skip_bad, counts), 0)

    def _chosen(self, documents: Iterator, number: int) -> Iterator:
        """Those of `documents` that this stream trains on or holds out; the first one's number is `number`."""
        if self.held_out is None:
            return documents
        if self.rule == held.BY_CONTENT:
            return (document for document in documents if held.is_held_out_by_content(document) == self.held_out)
        return (document for n, document in enumerate(documents, number) if held.is_held_out(n) == self.held_out)

    def chunks(
        self, position: tuple[int, int, int], stream: int = 0
    ) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
        """Endless (position, the tokens from there to the next position) of a stream, from `position` on.

        A position is (tokens before it, epoch, documents of the epoch before it); (0, 0, 0) is the beginning. Documents
        before it are read again, but not tokenized.
        """
        total, epoch, first_document = position
        source = stream  # the stream whose documents these are
        while True:
            left_out = collections.Counter()
            if epoch == 0 and source == stream:  # the first epoch reads everything
                left_out = self.counts
            if self.division is None:
                documents = self.documents(np.random.default_rng([self.seed, epoch]), left_out)
            else:
                generator = np.random.default_rng([self.seed, epoch, stream])
                documents = self.stream_documents(source, generator, left_out)
            tokenized: collections.Counter = collections.Counter()
            chunk_position = (total, epoch, first_document)
            for tokens in self._tokens(itertools.islice(documents, first_document, None), tokenized):
                yield chunk_position, tokens
                total += len(tokens)
                chunk_position = (total, epoch, first_document + tokenized["documents"])
            if tokenized["documents"]:
                epoch, first_document = epoch + 1, 0
                continue
            source = (source + 1) % self.streams
            if source == stream:
                raise self._no_text()

    def _tokens(self, documents: Iterator, counts: collections.Counter | None = None) -> Iterator[np.ndarray]:
        """Their token ids, a chunk of documents at a time; `counts` gets how many documents."""
        batch = STREAM_BATCH if self.streams == 1 else DIVIDED_BATCH
        with self._naming_faults():
            batches = token_batches(documents, self.tokenizer, batch, counts)
            yield from in_vocabulary(batches, self.vocab_size)

    @contextlib.contextmanager
    def _naming_faults(self) -> Iterator[None]:
        """Errors of the data within are a UserError; they can be the network's or a file's, hours into a run too."""
        try:
            yield
        except (UnreadableError, OSError, ValueError) as error:
            raise name_fault(error, self.source, self.split, self.text_field) from error


def shuffled(documents: Iterator, generator: np.random.Generator, size: int = SHUFFLE_BUFFER) -> Iterator:
    """The documents, the next one always drawn among `size` that are read already."""
    buffer: list = []
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        index = int(generator.integers(size))
        yield buffer[index]
        buffer[index] = document
    for index in generator.permutation(len(buffer)):
        yield buffer[index]


class StreamReader:
    """The windows of those streams of a corpus that it is asked for; each is opened when its first window is wanted.

    `positions` has for a stream where to begin, as `position` gave it; one that is not there begins at its beginning.
    `report`, if there is one, gets `dataset.counts` when the first bad record is left out, and each time they have
    become ten times as many.

    For each open stream it holds in memory the documents of its shuffle buffer, one chunk of tokens (DIVIDED_BATCH
    documents, or 2**21 characters and the document that passes them), a window, and up to 1 MiB of the file; of a
    Parquet file a page of the column more, of a packed one what its codec needs. The shuffle buffers of N streams hold
    max(10,000, 16 N) documents together. A local .jsonl, text or Parquet file, and any packed file, is open only while
    a block of it is read, so that no descriptor is held; a file of an object store holds up to 1 MiB that was read
    ahead instead. A file of another reader, and a slice of a Parquet file, stays open.
    """

    def __init__(
        self,
        dataset: StreamedDataset,
        positions: dict[int, tuple[int, int, int]] | None = None,
        report: Callable[[collections.Counter], None] | None = None,
    ):
        self.dataset, self.report, self.bad_reported = dataset, report, 0
        self.positions = dict(positions or {})  # of the streams that are not open
        self.opened: dict[int, tuple[Iterator, TokenBuffer]] = {}

    def window(self, stream: int, number: int) -> np.ndarray:
        """Window `number` of a stream, (seq_len + 1,) unsigned integers. Numbers of a stream come in ascending order;
        those between are read and tokenized too. A UserError names what is wrong with the data."""
        if stream not in self.opened:
            chunks = self.dataset.chunks(self.position(stream), stream)
            self.opened[stream] = chunks, TokenBuffer(token_dtype(self.dataset.vocab_size))
        chunks, buffer = self.opened[stream]
        seq_len = self.dataset.seq_len
        first = number * seq_len
        check_not_before(buffer, first)
        buffer.drop_before(first)
        while len(buffer.tokens) <= seq_len:  # one token more: the last label
            buffer.append(*next(chunks))
            self._report_bad()
            check_not_before(buffer, first)
            buffer.drop_before(first)
        return buffer.tokens[: seq_len + 1]

    def position(self, stream: int) -> tuple[int, int, int]:
        """Where to begin a stream again to get the window that it gave last, and those after it."""
        if stream in self.opened:
            return self.opened[stream][1].positions[0]
        return tuple(self.positions.get(stream, (0, 0, 0)))

    def _report_bad(self) -> None:
        bad = self.dataset.counts["bad records"]
        if self.report is not None and bad >= max(1, 10 * self.bad_reported):
            self.report(self.dataset.counts)
            self.bad_reported = bad


class TokenBuffer:
    """The tokens of a stream that were read and are still needed, and the positions of the chunks they came in.

    Tokens are numbered from the beginning of the stream. `positions[0]` is the last one at or before the first token
    that is needed: a restart from there reads it again.
    """

    def __init__(self, dtype: type):
        self.tokens = np.empty(0, dtype)
        self.start = 0  # number of the first of `tokens`
        self.positions: collections.deque[tuple[int, int, int]] = collections.deque()

    def append(self, position: tuple[int, int, int], tokens: np.ndarray) -> None:
        """Adds the chunk at a position, which follows the one before it."""
        if not len(self.tokens):
            self.start = position[0]
        self.tokens = np.concatenate([self.tokens, tokens])
        self.positions.append(position)

    def drop_before(self, number: int) -> None:
        """Drops the tokens before a number, which may lie beyond all that were read."""
        dropped = min(number - self.start, len(self.tokens))
        self.tokens = self.tokens[dropped:]
        self.start += dropped
        while len(self.positions) > 1 and self.positions[1][0] <= number:
            self.positions.popleft()


def check_not_before(buffer: TokenBuffer, first: int) -> None:
    """Raises a ValueError where a window's first token is no longer there."""
    if len(buffer.tokens) and first < buffer.start:
        raise ValueError(f"a window from token {first:,} on is wanted, the stream is read from {buffer.start:,} on")


def report_left_out(counts: collections.Counter) -> None:
    """Prints how many documents were left out so far."""
    empty, bad = counts["empty documents"], counts["bad records"]
    left_out = f"bad records {bad:,}"
    if empty:
        left_out = f"empty documents {empty:,}, {left_out}"
    say("data      ", f"left out so far: {left_out}")


def stream_dataset(
    tokenizer,
    seq_len: int,
    dataset: str,
    split: str = "train",
    accelerator=None,
    vocab_size: int = 0,
    seed: int = 0,
    skip_bad_records: bool = False,
    text_field: Field = DEFAULT_FIELD,
    subset: str | None = None,
) -> StreamedDataset:
    """Opens a corpus for streaming; arguments and errors are those of `get_dataset`, but hub data are not sliced."""
    source, reading = os.path.expanduser(dataset), (text_field, skip_bad_records)

    def open_stream() -> StreamedDataset:
        return StreamedDataset(
            tokenizer, seq_len, source, split, vocab_size or len(tokenizer), seed, reading, subset=subset
        )

    return from_main_process(open_stream, accelerator is None or accelerator.is_main_process)
