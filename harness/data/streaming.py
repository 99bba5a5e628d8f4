"""Streaming: a corpus that is read and tokenized while training, in the same windows that `utils` packs. Called by the
script where --streaming is given. It does not know the loop; a position is all that a restart needs."""

import collections
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        self.counts: collections.Counter = collections.Counter()
        self.reading = (*reading, self.counts)  # text field, whether bad records are left out
        self.held_out: bool | None = None  # whether it is the held-out documents, or all but these; None for all
        # rows of hub data; of local files (file, its first and last document, the first one's number in the corpus)
        self.rows, self.parts = None, []
        with self._naming_faults():
            if files := local_files(source):
                name, bounds = parse_split(split)
                of_split = files_of_split(source, name, files)
                self.parts = [(file, 0, None, 0) for file in of_split]
                self.parts = self._cut(bounds)[0] if bounds else self.parts
                top = source if os.path.isdir(source) else os.path.dirname(source)
                content = [(os.path.relpath(file, top), file.stat().st_size) for file in of_split]
            elif "[" in split:
                slices = "is a slice, which --streaming of hub data cannot take; name a whole split"
                raise UserError(f"--dataset {source}, split {split!r}: {slices}")
            else:
                self.rows = load_documents(source, split, subset, streaming=True)
                sizes = [(name, part.num_examples) for name, part in (self.rows.info.splits or {}).items()]
                content = [source, subset, sizes]
        # what is read, beside the documents that are held out
        self.content = hashlib.sha256(json.dumps([content, split]).encode()).hexdigest()[:20]
        self.beginning = self.head(1).fingerprint()

    def fingerprint(self) -> str:
        """Tells corpora apart by the first window in the order of the files; the size is not known."""
        return f"{self.beginning}, then streamed"

    def head(self, windows: int) -> PackedDataset:
        """The first `windows` windows in the order of the files, all for 0."""
        read, source = [], self._uncounted()
        for tokens in source._tokens(source.documents()):
            read.append(tokens)
            if windows and sum(map(len, read)) > windows * self.seq_len:
                break
        if not sum(map(len, read)):
            raise UserError(f"--dataset {self.source}, split {self.split!r}: it holds no text")
        tokens = np.concatenate(read)[: windows * self.seq_len + 1 if windows else None]
        return pack(tokens, self.seq_len, self.source, self.split)

    def hold_out(self, rule: str) -> tuple["StreamedDataset", "StreamedDataset"]:
        """(the stream without the documents that are held out by a rule of `held_out`, these). Local files are read for
        it, to count their documents."""
        train, held_out = copy.copy(self), copy.copy(self)
        if rule == held.RULE:
            few = list(itertools.islice(self._uncounted().documents(), held.EVERY))
            if len(few) < held.EVERY:
                raise self._too_few(len(few))
            train.parts = held_out.parts = self._cut(["0%", "100%"])[0] if self.parts else []
            train.held_out, held_out.held_out = False, True
        elif self.rows is not None:
            split = (self.rows.info.splits or {}).get(self.split)
            if not (split and split.num_examples):
                problem = "how many documents it has is not known, so that none can be held out while streaming"
                raise UserError(f"--dataset {self.source}: {problem}; name an --eval-split")
            kept = split.num_examples * (100 - held.PERCENT) // 100
            train.rows, held_out.rows = self.rows.take(kept), self.rows.skip(kept)
        else:
            train.parts, held_out.parts = self._cut(["0%", f"{100 - held.PERCENT}%", "100%"])
        train.beginning = train.head(1).fingerprint()
        return train, held_out

    def _too_few(self, documents: int) -> UserError:
        few = f"{documents:,} documents are too few to be divided while streaming"
        return UserError(f"--dataset {self.source}: {few}; leave out --streaming")

    def _uncounted(self) -> "StreamedDataset":
        """The same with counts of its own, for what is read again later."""
        source = copy.copy(self)
        source.reading = (*self.reading[:2], collections.Counter())
        return source

    def _cut(self, bounds: list[str]) -> list[list[tuple]]:
        """For each two neighbours of these bounds of slices of the documents the parts of local files between them."""
        source = self._uncounted()
        lengths = [sum(1 for _ in source._file(*part)) for part in self.parts]
        cuts = cut_documents(bounds, sum(lengths))
        if None in cuts:
            raise self._too_few(sum(lengths))
        found = []
        for first, last in itertools.pairwise(cuts):
            parts, before = [], 0
            for (file, start, _, _), length in zip(self.parts, lengths, strict=True):
                here = max(first - before, 0), min(last - before, length)
                if here[0] < here[1]:
                    parts.append((file, start + here[0], start + here[1], before + here[0] - first))
                before += length
            found.append(parts)
        return found

    def documents(self, generator: np.random.Generator | None = None) -> Iterator:
        """Each document once, shuffled by `generator` if there is one."""
        if self.rows is not None:
            rows, by_number = self.rows, self.held_out is not None
            if (
                generator and not by_number
            ):  # one file at a time: after several `datasets` waits 10 s (apache/arrow#45214)
                rows = rows.shuffle(None, generator, SHUFFLE_BUFFER, max_buffer_input_shards=1)
            text_field, skip_bad, counts = self.reading
            records = hub_records(rows, self.source, text_field, counts)
            documents = self._chosen(read_documents(records, self.source, skip_bad, counts), 0)
            return shuffled(documents, generator) if generator and by_number else documents
        parts = self.parts if generator is None else [self.parts[i] for i in generator.permutation(len(self.parts))]
        documents = itertools.chain.from_iterable(itertools.starmap(self._file, parts))
        return shuffled(documents, generator) if generator else documents

    def _file(self, file, first: int, last: int | None, number: int) -> Iterator:
        text_field, skip_bad, counts = self.reading
        documents = read_documents(file_records(file, text_field, counts), file, skip_bad, counts)
        return self._chosen(itertools.islice(documents, first, last), number)

    def _chosen(self, documents: Iterator, number: int) -> Iterator:
        """Of documents, which are counted from `number` on, those of this side of what is held out."""
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
            if epoch:  # the first epoch reads everything, and alone counts what is left out
                self.reading = (*self.reading[:2], collections.Counter())
            documents = self.documents(np.random.default_rng([self.seed, epoch]))
            counts: collections.Counter = collections.Counter()
            chunk_position = (total, epoch, first_document)
            for tokens in self._tokens(itertools.islice(documents, first_document, None), counts):
                yield chunk_position, tokens
                total += len(tokens)
                chunk_position = (total, epoch, first_document + counts["documents"])
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
            raise name_fault(error, self.source, self.split, self.reading[0]) from error


def shuffled(documents: Iterator, generator: np.random.Generator, size: int = SHUFFLE_BUFFER) -> Iterator:
    """The documents, the next one always drawn among `size` that are read already."""
    held: list = []
    for document in documents:
        if len(held) < size:
            held.append(document)
            continue
        index = int(generator.integers(size))
        yield held[index]
        held[index] = document
    yield from (held[index] for index in generator.permutation(len(held)))


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
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what goes wrong is said once, by the UserError
        try:
            yield from self._batches()
        except UserError as error:
            yield UserError(str(error), exit_code=1)

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
    dataset, reading = os.path.expanduser(dataset), (text_field, skip_bad_records)
    corpus = (dataset, split, vocab_size or len(tokenizer), seed, reading, subset)
    prepare = functools.partial(StreamedDataset, tokenizer, seq_len, *corpus)
    return from_main_process(prepare, accelerator is None or accelerator.is_main_process)
