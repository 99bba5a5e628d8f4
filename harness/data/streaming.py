"""Streaming: a corpus that is read and tokenized while training, cut into the same windows as a token cache. Called by
the script where --streaming is given. A restart needs a position of the stream. Independent of the training loop."""

import collections
import contextlib
import copy
import hashlib
import itertools
import json
import logging
import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from harness.base.errors import UnreadableError, UserError
from harness.base.ranks import from_main_process
from harness.data import held_out as held
from harness.data.corpus_files import local_files
from harness.data.documents import in_vocabulary, read_documents, token_batches, token_dtype
from harness.data.faults import name_fault
from harness.data.formats import file_records
from harness.data.hub_rows import hub_records, load_documents
from harness.data.records import DEFAULT_FIELD, Field
from harness.data.splits import cut_documents, files_of_split, parse_split
from harness.data.windows import PackedDataset, create_collate_fn, pack
from harness.job.printing import say

STREAM_BATCH = 64  # documents per call of the tokenizer: training waits for the first of them
SHUFFLE_BUFFER = 10_000  # documents of a stream among which the next is drawn


class Part(NamedTuple):
    """Consecutive documents of a local file."""

    file: pathlib.Path
    first: int = 0
    end: int | None = None  # the first document after them; None: the file's end
    number: int = 0  # of the first one, counted over the parts of a stream


class StreamedDataset:
    """A corpus that is read and tokenized while training: nothing is downloaded, tokenized or cached before.

    Its documents, shuffled within a buffer in another order each epoch, are one endless sequence of tokens, and global
    sample i is window i of it, as PackedDataset cuts them. So the order is a pure function of (seed, global sample
    index), for hub data also of how the installed `datasets` shuffles.
    """

    end_of_text: int | None = None

    def __init__(
        self, tokenizer, seq_len: int, source: str, split: str, vocab_size: int, seed: int, reading: tuple, subset=None
    ):
        self.tokenizer, self.seq_len, self.source = tokenizer, seq_len, source
        self.split, self.vocab_size, self.seed = split, vocab_size, seed
        self.text_field, self.skip_bad = reading
        self.counts: collections.Counter = collections.Counter()  # what the first epoch leaves out
        self.held_out: bool | None = None  # whether it is the held-out documents, or all but these; None for all
        self.rows: Any = None  # of hub data
        self.parts: list[Part] = []  # of local files
        with self._naming_faults():
            files = local_files(source)
            if files:
                content = self._open_files(files)
            elif "[" in split:
                slices = "is a slice, which --streaming of hub data cannot take; name a whole split"
                raise UserError(f"--dataset {source}, split {split!r}: {slices}", entry="cannot-stream")
            else:
                content = self._open_rows(subset)
        # Tells one corpus from another, whatever is held out of it.
        self.content = hashlib.sha256(json.dumps([content, split]).encode()).hexdigest()[:20]
        self.beginning = self.head(1).fingerprint()

    def _open_files(self, files: list[pathlib.Path]) -> list:
        """Finds the documents of the split in local files; returns what tells these files from others."""
        name, bounds = parse_split(self.split)
        of_split = files_of_split(self.source, name, files)
        self.parts = [Part(file) for file in of_split]
        if bounds:
            self.parts = self._cut(bounds)[0]
        top = self.source if os.path.isdir(self.source) else os.path.dirname(self.source)
        return [(os.path.relpath(file, top), file.stat().st_size) for file in of_split]

    def _open_rows(self, subset: str | None) -> list:
        """Opens the split of a hub data set; returns what tells it from others."""
        self.rows = load_documents(self.source, self.split, subset, streaming=True)
        sizes = [(name, split.num_examples) for name, split in (self.rows.info.splits or {}).items()]
        return [self.source, subset, sizes]

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
            raise UserError(f"--dataset {self.source}, split {self.split!r}: it holds no text", entry="no-text-found")
        tokens = np.concatenate(chunks)
        if windows:
            tokens = tokens[:needed]
        return pack(tokens, self.seq_len, self.source, self.split)

    def hold_out(self, rule: str) -> tuple["StreamedDataset", "StreamedDataset"]:
        """(the stream without the documents that are held out by a rule of `held_out`, these). Local files are read for
        it, to count their documents."""
        train, held_out = copy.copy(self), copy.copy(self)
        if rule == held.RULE:
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
                raise UserError(f"--dataset {self.source}: {problem}; name an --eval-split", entry="cannot-stream")
            kept = split.num_examples * (100 - held.PERCENT) // 100
            train.rows, held_out.rows = self.rows.take(kept), self.rows.skip(kept)
        else:
            train.parts, held_out.parts = self._cut(["0%", f"{100 - held.PERCENT}%", "100%"])
        train.beginning = train.head(1).fingerprint()
        return train, held_out

    def _too_few(self, documents: int) -> UserError:
        problem = f"{documents:,} documents are too few to be divided while streaming"
        return UserError(f"--dataset {self.source}: {problem}; leave out --streaming", entry="cannot-stream")

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
        if self.held_out is not None:  # documents are chosen by their number, so rows keep their order
            return shuffled(self._documents_of_rows(self.rows, counts), generator)
        # one file at a time: after several `datasets` waits 10 s (apache/arrow#45214)
        rows = self.rows.shuffle(None, generator, SHUFFLE_BUFFER, max_buffer_input_shards=1)
        return self._documents_of_rows(rows, counts)

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
        return (document for n, document in enumerate(documents, number) if held.is_held_out(n) == self.held_out)

    def chunks(self, position: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
        """Endless (position, the tokens from there to the next position), from `position` on.

        A position is (tokens before it, epoch, documents of the epoch before it); (0, 0, 0) is the beginning. Documents
        before it are read again, but not tokenized.
        """
        total, epoch, first_document = position
        while True:
            left_out = self.counts if epoch == 0 else None  # the first epoch reads everything
            documents = self.documents(np.random.default_rng([self.seed, epoch]), left_out)
            tokenized: collections.Counter = collections.Counter()
            chunk_position = (total, epoch, first_document)
            for tokens in self._tokens(itertools.islice(documents, first_document, None), tokenized):
                yield chunk_position, tokens
                total += len(tokens)
                chunk_position = (total, epoch, first_document + tokenized["documents"])
            epoch, first_document = epoch + 1, 0

    def _tokens(self, documents: Iterator, counts: collections.Counter | None = None) -> Iterator[np.ndarray]:
        """Their token ids, a chunk of up to STREAM_BATCH documents at a time; `counts` gets how many documents."""
        with self._naming_faults():
            batches = token_batches(documents, self.tokenizer, STREAM_BATCH, counts)
            yield from in_vocabulary(batches, self.vocab_size)

    @contextlib.contextmanager
    def _naming_faults(self) -> Iterator[None]:
        """Errors of the data within are a UserError; they can be the network's or a file's, hours into a run too."""
        try:
            yield
        except (UnreadableError, OSError, ValueError) as error:
            raise name_fault(error, self.source, self.split, self.text_field) from error


def parts_between(parts: list[Part], lengths: list[int], first: int, end: int) -> list[Part]:
    """Documents `first` to `end` of parts that have so many documents, as parts that are numbered anew from 0 on."""
    chosen, before = [], 0  # documents of the parts before this one
    for part, length in zip(parts, lengths, strict=True):
        start, stop = max(first - before, 0), min(end - before, length)
        if start < stop:
            chosen.append(Part(part.file, part.first + start, part.first + stop, before + start - first))
        before += length
    return chosen


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


@dataclass(eq=False)
class StreamedBatches(IterableDataset):
    """Endless batches of one rank from a stream, as `create_collate_fn` makes them: the global samples that a
    GlobalOrderSampler gives this rank, and `position`, one of the stream at or before the first of them.

    Every rank reads and tokenizes the whole stream, on one core, and keeps its own windows: all ranks together train
    on as many tokens per second as one core tokenizes. A UserError comes as the last item, as a DataLoader would wrap
    it into a traceback.
    """

    stream: StreamedDataset
    batch_size: int
    rank: int = 0
    world_size: int = 1
    first_sample: int = 0
    position: tuple[int, int, int] | None = None  # None: the beginning

    def __iter__(self) -> Iterator[dict[str, Any] | UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive the fork of a worker
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # the UserError alone reports what goes wrong
        try:
            yield from self._batches()
        except UserError as error:
            yield UserError(str(error), exit_code=1, entry=error.entry)

    def _batches(self) -> Iterator[dict[str, Any]]:
        seq_len = self.stream.seq_len
        collate = create_collate_fn(self.stream.end_of_text, shift_labels=False)
        batch_tokens = self.batch_size * seq_len
        first = self.first_sample * seq_len + self.rank * batch_tokens  # token that this rank's next batch begins with
        buffer = TokenBuffer(token_dtype(self.stream.vocab_size))
        bad_reported = 0
        for position, tokens in self.stream.chunks(self.position or (0, 0, 0)):
            bad = self.stream.counts["bad records"]
            if self.rank == 0 and bad >= max(1, 10 * bad_reported):
                report_left_out(self.stream.counts)
                bad_reported = bad
            buffer.append(position, tokens)
            buffer.drop_before(first)
            while len(buffer.tokens) > batch_tokens:  # one token more: the last label
                windows = PackedDataset(buffer.tokens[: batch_tokens + 1], seq_len)
                batch = collate(list(windows))
                batch["position"] = buffer.positions[0]
                yield batch
                first += self.world_size * batch_tokens
                buffer.drop_before(first)


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
