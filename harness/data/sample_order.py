"""The order of samples: which window of a source its n-th sample is, which samples a rank takes, and random samples
that need no corpus. Independent of what is in a sample and of how samples become a batch."""

import zlib

import numpy as np
from torch.utils.data import Dataset


class WindowOrder:
    """Which window of a source each of its samples is: each epoch is one permutation of its windows, so nothing repeats
    before all is seen. A pure function of (seed, name, sample); with no name, of (seed, sample)."""

    def __init__(self, windows: int, seed: int, name: str | None = None):
        self.windows = windows
        self.salt = [seed]
        if name is not None:  # sources of the same length, such as translations, are not read side by side
            self.salt = [seed, zlib.crc32(name.encode())]
        self.permutations: dict[int, np.ndarray] = {}  # by epoch: the latest two

    def window_of(self, sample: int) -> int:
        """The window that the source's sample of this number is."""
        epoch, offset = divmod(sample, self.windows)
        if epoch not in self.permutations:
            generator = np.random.Generator(np.random.PCG64([*self.salt, epoch]))
            while len(self.permutations) > 1:
                del self.permutations[min(self.permutations)]
            self.permutations[epoch] = generator.permutation(self.windows)
        return int(self.permutations[epoch][offset])


def samples_of_microbatch(first_sample: int, microbatch: int, batch_size: int, rank: int, world_size: int) -> range:
    """The global samples of a rank's microbatch of this number, counted from the microbatch that begins with
    `first_sample`: ranks are disjoint, and a step's samples do not depend on how many ranks or microbatches share them.
    """
    first = first_sample + (microbatch * world_size + rank) * batch_size
    return range(first, first + batch_size)


class SyntheticDataset(Dataset):
    """Random tokens for throughput runs: window i is a pure function of (seed, i) and is stored nowhere."""

    end_of_text = None  # there are no documents
    is_uniform = True
    is_chat = False

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0, windows: int = 2**20):
        self.vocab_size, self.seq_len, self.seed, self.windows = vocab_size, seq_len, seed, windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=(self.seed << 32) + index))
        return generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.uint32)

    def fingerprint(self) -> str:
        return f"synthetic, {self.vocab_size:,} ids"

    def total_tokens(self) -> int:
        return self.windows * self.seq_len

    def documents(self, index: int) -> list[tuple[int, str, int]]:
        return [(0, "random tokens", 0)]
