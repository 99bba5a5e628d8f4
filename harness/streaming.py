"""Streaming: a corpus that is read and tokenized while training, in the same windows that `utils` packs.

Called by the script where --streaming is given. It does not know the loop; a position is all that a restart needs.
"""

import collections
import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from utils import (
    PackedDataset,
    UserError,
    create_collate_fn,
    first_line,
    from_main_process,
    in_vocabulary,
    load_documents,
    local_files,
    pack,
    token_batches,
    token_dtype,
)

STREAM_BATCH = 64  # the same of a stream: training waits for the first of them
SHUFFLE_BUFFER = 10_000  # documents of a stream among which the next is drawn


class StreamedDataset:
    """A corpus that is read and tokenized while training: nothing is downloaded, tokenized or cached before.

    Its documents, shuffled within a buffer in another order each epoch, are one endless sequence of tokens, and global
    sample i is window i of it, as PackedDataset cuts them. So the order is a pure function of (seed, global sample
    index) and of how the installed `datasets` shuffles.
    """

    end_of_text: int | None = None

    def __init__(self, documents, tokenizer, seq_len: int, source: str, split: str, vocab_size: int, seed: int):
        self.documents, self.tokenizer, self.seq_len, self.source = documents, tokenizer, seq_len, source
        self.split, self.vocab_size, self.seed = split, vocab_size, seed
        self.beginning = self.head(1).fingerprint()

    def fingerprint(self) -> str:
        """Tells corpora apart by the first window in the order of the files; the size is not known."""
        return f"{self.beginning}, then streamed"

    def head(self, windows: int) -> PackedDataset:
        """The first `windows` windows in the order of the files, all for 0."""
        read, total = [], 0
        for tokens in self._read(self.documents):
            read.append(tokens)
            total += len(tokens)
            if windows and total > windows * self.seq_len:
                break
        if not total:
            raise UserError(f"--dataset {self.source}, split {self.split!r}: it holds no text")
        tokens = np.concatenate(read)[: windows * self.seq_len + 1 if windows else None]
        return pack(tokens, self.seq_len, self.source, self.split)

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
        try:
            batches = token_batches(documents, self.tokenizer, self.source, STREAM_BATCH)
            yield from in_vocabulary(batches, self.vocab_size)
        except (OSError, ValueError) as error:  # the network's or a file's, hours into a run too
            raise UserError(
                f"--dataset {self.source}, split {self.split!r}: cannot be read ({first_line(error)})"
            ) from error


class StreamedBatches(IterableDataset):
    """Endless batches of one rank from a stream, as `create_collate_fn` makes them: the global samples that a
    GlobalOrderSampler gives this rank, and `position`, one of the stream at or before the first of them.

    Every rank reads and tokenizes the whole stream, on one core, and keeps its own windows: all ranks together train
    on as many tokens per second as one core tokenizes. A UserError comes as the last item, as a DataLoader would wrap
    it into a traceback.
    """

    def __init__(
        self,
        stream: StreamedDataset,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        first_sample: int = 0,
        position: tuple[int, int, int] | None = None,
    ):
        self.stream, self.batch_size, self.rank, self.world_size = stream, batch_size, rank, world_size
        self.first_sample, self.position = first_sample, position or (0, 0, 0)

    def __iter__(self) -> Iterator[dict[str, Any] | UserError]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a tokenizer's threads do not survive the fork of a worker
        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what goes wrong is said once, by the UserError
        try:
            yield from self._batches()
        except UserError as error:
            yield UserError(str(error), exit_code=1)

    def _batches(self) -> Iterator[dict[str, Any]]:
        seq_len, collate = self.stream.seq_len, create_collate_fn(self.stream.end_of_text)
        first = (self.first_sample + self.rank * self.batch_size) * seq_len  # token of this rank's next batch
        held, positions = np.empty(0, token_dtype(self.stream.vocab_size)), collections.deque()
        for position, tokens in self.stream.chunks(self.position):
            positions.append(position)
            held = np.concatenate([held, tokens])
            end = position[0] + len(tokens)
            while end > first + self.batch_size * seq_len:
                while len(positions) > 1 and positions[1][0] <= first:
                    positions.popleft()
                start = len(held) - (end - first)
                windows = PackedDataset(held[start : start + self.batch_size * seq_len + 1], seq_len)
                yield collate([windows[index] for index in range(self.batch_size)]) | {"position": positions[0]}
                first += self.world_size * self.batch_size * seq_len
            held = held[max(0, len(held) - max(0, end - first)) :]


def stream_dataset(
    tokenizer,
    seq_len: int,
    accelerator=None,
    dataset: str = "roneneldan/TinyStories",
    split: str = "train",
    vocab_size: int | None = None,
    seed: int = 0,
) -> StreamedDataset:
    """Opens a corpus for streaming; arguments and errors are those of `get_dataset`, but `split` is without a slice."""
    dataset = os.path.expanduser(dataset)

    def prepare() -> StreamedDataset:
        documents = load_documents(dataset, split, local_files(dataset), streaming=True)
        return StreamedDataset(documents, tokenizer, seq_len, dataset, split, vocab_size or len(tokenizer), seed)

    return from_main_process(prepare, accelerator is None or accelerator.is_main_process)
