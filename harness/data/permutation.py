"""Orders that follow from a key: `permuted`, a permutation of a source's sequences that is stored nowhere; `spread`,
which interleaves the sources of a mixture."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

ROUNDS = 8  # with 4, pairs of neighbours in small permutations are measurably not random


def permuted(number: int, size: int, key: str) -> int:
    """The image of a number below `size` under a permutation of `range(size)`, another one for each key.

    A Feistel network: number = left * right_size + right. Each round adds a keyed hash of one half to the other half,
    modulo the size of that half. A result that is not below `size` goes through the network again (cycle walking).
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    while True:
        left, right = divmod(number, right_size)
        for round_number in range(0, ROUNDS, 2):
            left = (left + hash64(f"{key} {round_number} {right}")) % left_size
            right = (right + hash64(f"{key} {round_number + 1} {left}")) % right_size
        number = left * right_size + right
        if number < size:
            return number


def hash64(text: str) -> int:
    """64 bits that look random, a pure function of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def spread(counts: Sequence[int], key: str) -> np.ndarray:
    """An array in which each part p occurs `counts[p]` times, all parts interleaved evenly; another one for each key.

    The k-th item of a part with `count` items is at (k + a random fraction) / count. Items are sorted by this position,
    then rotated by a random number: without that, parts with few items would be rare at the beginning.
    """
    total = sum(counts)
    if total == max(counts):  # one part, as most runs have: nothing to sort
        return np.full(total, np.argmax(counts))
    bits = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * (total + 1)), "<u8")
    numbers = np.concatenate([np.arange(count) for count in counts])
    positions = (numbers + bits[:total] / 2**64) / np.repeat(counts, counts)
    order = np.repeat(np.arange(len(counts)), counts)[np.argsort(positions, kind="stable")]
    return np.roll(order, int(bits[total]) % total)
