"""The order of samples: which rank trains on which of them and when, and random samples that need no corpus. Called by
the script for its data loader. Independent of what is in a sample and of how samples become a batch."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset, Sampler


@dataclass(eq=False)
class GlobalOrderSampler(Sampler[list[int]]):
    """Endless batches of data-set indices for one rank: microbatch m of rank r takes the global samples
    `first_sample + (m * world_size + r) * batch_size ...`, so ranks are disjoint and a step's samples do not depend on
    how many ranks or microbatches share them.

    The order is a pure function of (seed, global sample index): each epoch is one permutation of the data set, so
    nothing repeats before all is seen.
    """

    num_samples: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    first_sample: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        for microbatch in itertools.count():
            first = self.first_sample + (microbatch * self.world_size + self.rank) * self.batch_size
            yield [self.index_of(sample) for sample in range(first, first + self.batch_size)]

    def index_of(self, sample: int) -> int:
        """Data-set index of the global sample number `sample` (0 is the first sample of the first step)."""
        epoch, offset = divmod(sample, self.num_samples)
        return int(_permutation(self.num_samples, self.seed, epoch)[offset])


@functools.lru_cache(maxsize=2)
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_samples)


class SyntheticDataset(Dataset):
    """Random tokens for throughput runs: window i is a pure function of (seed, i) and is stored nowhere."""

    end_of_text = None  # there are no documents

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0, windows: int = 2**20):
        self.vocab_size, self.seq_len, self.seed, self.windows = vocab_size, seq_len, seed, windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=(self.seed << 32) + index))
        return generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.uint32)

    def fingerprint(self) -> str:
        return f"synthetic, {self.vocab_size:,} ids"
