"""Permutations that are computed number by number and stored nowhere: the order of a source's windows, and of the
chunks of a stream."""

import hashlib
import math

ROUNDS = 8  # with 4, pairs of neighbours in small permutations are measurably not random


def permuted(number: int, size: int, key: str) -> int:
    """Where a permutation of `range(size)`, another one for each key, takes a number below `size`.

    A Feistel network: a number is a pair, of which one half is moved by a keyed function of the other, in turn, modulo
    its size; what lands beyond `size` goes through it again. These are the generalized Feistel cipher and the cycle
    walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
    """
    left_size = math.isqrt(size - 1) + 1
    right_size = -(-size // left_size)
    while True:
        left, right = divmod(number, right_size)
        for round_number in range(0, ROUNDS, 2):
            left = (left + keyed(f"{key} {round_number} {right}")) % left_size
            right = (right + keyed(f"{key} {round_number + 1} {left}")) % right_size
        number = left * right_size + right
        if number < size:
            return number


def keyed(text: str) -> int:
    """64 bits that look random, a pure function of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
