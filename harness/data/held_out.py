"""Held-out documents: which part of a corpus that has no split for evaluation is left out of training, and a corpus
without that part. Called by `corpora` for a token cache and by `streaming`. Independent of how files are read.

One of every 20 documents in a row is held out, counted over all files in the order of their names, so every file of 39
documents has some. Which of the 20 is drawn by a checksum of their number: a corpus may repeat itself every few
documents. Ranks, steps and seeds have no part in it. Fewer than 20 documents are cut at a share of their tokens.
"""

import functools
import math
import zlib

import numpy as np

EVERY = 20
PERCENT = 100 // EVERY
RULE = f"one of every {EVERY}"  # as manifests name it
BY_CONTENT = f"one of every {EVERY} by content"  # of a stream that is divided: needs no number of a document
OLD_RULE = f"the last {PERCENT} %"  # of manifests that name none


def is_held_out(number: int) -> bool:
    """Whether the document of this number, from 0 on, is held out."""
    group, place = divmod(number, EVERY)
    return place == place_in_group(group)


def place_in_group(group: int) -> int:
    """Which document of a group of EVERY is held out."""
    return zlib.crc32(str(group).encode()) % EVERY


def is_held_out_by_content(document: str | list[int] | np.ndarray) -> bool:
    """Whether a document, text or token ids, is held out by BY_CONTENT: by the checksum of its UTF-8 or of its ids as
    little-endian uint32. The same document twice is held out twice."""
    content = document.encode() if isinstance(document, str) else np.asarray(document).astype("<u4").tobytes()
    return zlib.crc32(content) % EVERY == 0


def held_out_numbers(documents: int) -> np.ndarray:
    """The numbers of the documents that are held out, among so many."""
    groups = math.ceil(documents / EVERY)
    places = np.fromiter((place_in_group(group) for group in range(groups)), np.int64, groups)
    drawn = EVERY * np.arange(groups) + places
    return drawn[drawn < documents]


def document_ends(tokens: np.ndarray, end_of_text: int | None, chunk: int = 2**24) -> np.ndarray:
    """Where each document of a flat array of tokens ends; the last one where the array does. Token files may know it
    themselves; otherwise it is after each end-of-text token."""
    known = getattr(tokens, "document_ends", None)
    if known is not None:
        return known
    ends_of_chunks = [np.empty(0, np.int64)]
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


def part_of(tokens, first: int, last: int | None):
    """The tokens from a position on to before another: a view of an array, Stretches of any other."""
    if first == 0 and last is None:
        return tokens
    if isinstance(tokens, np.ndarray):
        return tokens[first:last]
    first, last, _ = slice(first, last).indices(len(tokens))
    return Stretches(tokens, np.array([first]), np.array([max(first, last)]))


class Stretches:
    """Parts of a flat token array, end to end: what a slice of an array is, without a copy of the whole."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, ends: np.ndarray):
        self.tokens, self.starts, self.ends = tokens, starts, ends
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

    @functools.cached_property
    def document_ends(self) -> np.ndarray | None:
        """Where each document of the parts ends, and each part; None where the array itself does not know."""
        known = getattr(self.tokens, "document_ends", None)
        if known is None:
            return None
        firsts = np.searchsorted(known, self.starts, "right")
        lasts = np.searchsorted(known, self.ends, "right")
        begun = np.bincount(firsts, minlength=len(known) + 1) - np.bincount(lasts, minlength=len(known) + 1)
        is_inside = np.cumsum(begun)[:-1] > 0
        ends = known[is_inside] + np.repeat(self.before[:-1] - self.starts, lasts - firsts)
        holds_tokens = self.ends > self.starts
        if np.array_equal(known[lasts[holds_tokens] - 1], self.ends[holds_tokens]):  # each part ends with a document
            return ends
        return np.union1d(ends, self.before[1:][holds_tokens])

    def position(self, index: int) -> int:
        """Where the token of this index is in the whole array."""
        part = int(np.searchsorted(self.before, index, "right")) - 1
        return index - int(self.before[part]) + int(self.starts[part])
