"""Held-out documents: which part of a corpus that has no split for evaluation is left out of training, and a corpus
without that part. Called by `corpora` for a token cache and by `streaming`. Independent of how files are read.

One of every 20 documents in a row is held out, counted over all files in the order of their names, so every file of 39
documents has some. Which of the 20 is drawn by a checksum of their number: a corpus may repeat itself every few
documents. Ranks, steps and seeds have no part in it. Fewer than 20 documents are cut at a share of their tokens.
"""

import math
import zlib

import numpy as np

EVERY = 20
PERCENT = 100 // EVERY
RULE = f"one of every {EVERY}"  # as manifests name it
OLD_RULE = f"the last {PERCENT} %"  # of manifests that name none


def is_held_out(number: int) -> bool:
    """Whether the document of this number, from 0 on, is held out."""
    group, place = divmod(number, EVERY)
    return place == place_in_group(group)


def place_in_group(group: int) -> int:
    """Which document of a group of EVERY is held out."""
    return zlib.crc32(str(group).encode()) % EVERY


def held_out_numbers(documents: int) -> np.ndarray:
    """The numbers of the documents that are held out, among so many."""
    groups = range(math.ceil(documents / EVERY))
    drawn = np.array([EVERY * group + place_in_group(group) for group in groups], dtype=np.int64)
    return drawn[drawn < documents]


def document_ends(tokens: np.ndarray, end_of_text: int | None, chunk: int = 2**24) -> np.ndarray:
    """Where each document of a flat array of tokens ends; the last one where the array does."""
    ends_of_chunks = []
    for start in range(0, len(tokens), chunk):
        ends_of_chunks.append(np.flatnonzero(tokens[start : start + chunk] == end_of_text) + start + 1)
    ends = np.concatenate(ends_of_chunks)
    if len(ends) and ends[-1] == len(tokens):
        return ends
    return np.append(ends, len(tokens))


def divide(tokens: np.ndarray, end_of_text: int | None) -> tuple[tuple, tuple] | None:
    """(starts, ends) of the stretches of tokens to train on, and of those that are held out; None for too few documents
    to choose among."""
    ends = document_ends(tokens, end_of_text)
    if len(ends) < EVERY:
        return None
    starts = np.concatenate([[0], ends[:-1]])
    numbers = held_out_numbers(len(ends))
    held_starts, held_ends = starts[numbers], ends[numbers]
    kept_starts, kept_ends = np.concatenate([[0], held_ends]), np.concatenate([held_starts, [len(tokens)]])
    return (kept_starts, kept_ends), (held_starts, held_ends)


class Stretches:
    """Parts of a flat token array, end to end: what a slice of an array is, without a copy of the whole."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray):
        self.tokens, self.starts = tokens, starts
        self.before = np.concatenate([[0], np.cumsum(ends - starts)])  # tokens before each part, and all

    def __len__(self) -> int:
        return int(self.before[-1])

    def __getitem__(self, window: slice) -> np.ndarray:
        """A copy of these tokens."""
        position, stop, _ = window.indices(len(self))
        part = int(np.searchsorted(self.before, position, "right")) - 1
        pieces = [self.tokens[:0]]
        while position < stop:
            until = min(stop, int(self.before[part + 1]))
            offset = int(self.starts[part]) - int(self.before[part])
            pieces.append(self.tokens[position + offset : until + offset])
            position, part = until, part + 1
        return np.concatenate(pieces)
