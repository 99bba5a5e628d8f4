"""Streaming: a corpus that is read and tokenized while training, in the same windows that `utils` packs. Called by the
script where --streaming is given. It does not know the loop; a position is all that a restart needs."""

import collections
import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

import utils
from harness.faults import name_fault
from harness.processes import say

STREAM_BATCH = 64  # documents per call of the tokenizer: training waits for the first of them
SHUFFLE_BUFFER = 10_000  # documents of a stream among which the next is drawn


class StreamedDataset:
    """A corpus that is read and tokenized while training: nothing is downloaded, tokenized or cached before.

    Its documents, shuffled within a buffer in another order each epoch, are one endless sequence of tokens, and global
    sample i is window i of it, as PackedDataset cuts them. So the order is a pure function of (seed, global sample
    index) and of how the installed `datasets` shuffles.
    """

    end_of_text: int | None = None

    def __init__(self, tokenizer, seq_len: int, source: str, split: str, vocab_size: int, seed: int, skip_bad: bool):
        self.tokenizer, self.seq_len, self.source = tokenizer, seq_len, source
        self.split, self.vocab_size, self.seed, self.skip_bad = split, vocab_size, seed, skip_bad
        self.files, self.counts = utils.local_files(source), collections.Counter()
        with self._naming_faults(), tempfile.TemporaryDirectory() as folder:  # `datasets` has notes to write
            cache = folder if self.files else None
            self.documents = utils.load_documents(source, split, self.files, streaming=True, cache_dir=cache)
        self.beginning = self.head(1).fingerprint()

    def fingerprint(self) -> str:
        """Tells corpora apart by the first window in the order of the files; the size is not known."""
        return f"{self.beginning}, then streamed"

    def head(self, windows: int) -> utils.PackedDataset:
        """The first `windows` windows in the order of the files, all for 0."""
        read = []
        for tokens in self._read(self.documents):
            read.append(tokens)
            if windows and sum(map(len, read)) > windows * self.seq_len:
                break
        if not sum(map(len, read)):
            raise utils.UserError(f"--dataset {self.source}, split {self.split!r}: it holds no text")
        tokens = np.concatenate(read)[: windows * self.seq_len + 1 if windows else None]
        return utils.pack(tokens, self.seq_len, self.source, self.split)

    def chunks(self, position: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
        """Endless (position, the tokens from there to the next position), from `position` on.

        A position is (tokens before it, epoch, documents of the epoch before it); (0, 0, 0) is the beginning. Documents
        before it are read again, but not tokenized.
        """
        total, epoch, seen = position
        while True:
            generator = np.random.default_rng([self.seed, epoch])
            # one file at a time: after reading several at once `datasets` waits 10 s (apache/arrow#45214)
            shuffled = self.documents.shuffle(None, generator, SHUFFLE_BUFFER, max_buffer_input_shards=1)
            for tokens in self._read(shuffled.skip(seen)):
                yield (total, epoch, seen), tokens
                total, seen = total + len(tokens), seen + STREAM_BATCH
            epoch, seen = epoch + 1, 0

    def _read(self, documents) -> Iterator[np.ndarray]:
        with self._naming_faults():
            options = {"skip_bad": self.skip_bad, "counts": self.counts}
            batches = utils.token_batches(documents, self.tokenizer, self.source, STREAM_BATCH, **options)
            yield from utils.in_vocabulary(batches, self.vocab_size)

    @contextlib.contextmanager
    def _naming_faults(self) -> Iterator[None]:
        """Errors of the data within are a UserError; they can be the network's or a file's, hours into a run too."""
        try:
            yield
        except (utils.UnreadableError, OSError, ValueError) as error:
            raise name_fault(error, self.source, self.split, self.files) from error


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

    def __iter__(self) -> Iterator[dict[str, Any] | utils.UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive the fork of a worker
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what goes wrong is said once, by the UserError
        try:
            yield from self._batches()
        except utils.UserError as error:
            yield utils.UserError(str(error), exit_code=1)

    def _batches(self) -> Iterator[dict[str, Any]]:
        seq_len, collate = self.stream.seq_len, utils.create_collate_fn(self.stream.end_of_text)
        size = self.batch_size * seq_len
        first = self.first_sample * seq_len + self.rank * size  # token of this rank's next batch
        told = 0  # bad records that have been told of
        held, positions = np.empty(0, utils.token_dtype(self.stream.vocab_size)), collections.deque()
        for position, tokens in self.stream.chunks(self.position or (0, 0, 0)):
            bad = self.stream.counts["bad records"]
            if self.rank == 0 and bad >= max(1, 10 * told):
                told = bad
                say("data      ", f"left out so far: bad records {bad:,}")
            positions.append(position)
            held = np.concatenate([held, tokens])
            end = position[0] + len(tokens)
            while end > first + size:
                while len(positions) > 1 and positions[1][0] <= first:
                    positions.popleft()
                windows = utils.PackedDataset(held[first - end :][: size + 1], seq_len)
                yield collate(list(windows)) | {"position": positions[0]}
                first += self.world_size * size
            held = held[first - end :] if first < end else held[:0]


def stream_dataset(
    tokenizer,
    seq_len: int,
    dataset: str,
    split: str = "train",
    accelerator=None,
    vocab_size: int = 0,
    seed: int = 0,
    skip_bad_records: bool = False,
) -> StreamedDataset:
    """Opens a corpus for streaming; arguments and errors are those of `get_dataset`, but `split` is without a slice."""
    dataset = os.path.expanduser(dataset)
    corpus = (dataset, split, vocab_size or len(tokenizer), seed, skip_bad_records)
    prepare = functools.partial(StreamedDataset, tokenizer, seq_len, *corpus)
    return utils.from_main_process(prepare, accelerator is None or accelerator.is_main_process)
