"""Tokens: the ids of a corpus end to end, from token files or the token cache, and its document boundaries."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from harness import base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 2**24  # tokens per read of a whole file
BEGINNING_TOKENS = 2**14  # first tokens, by which a corpus is recognized


# ----------------------------------------------------------------------------------------------------------------------
# Token files, which are mapped, not read


@dataclass(eq=False)
class MappedTokens:
    """Token ids of a token file or of the token cache, or in an array."""

    tokens: np.ndarray  # flat, integers, mapped
    name: str = ""  # of the file, as messages have it; empty for the token cache and for an array
    format_name: str = ""  # for the header
    # The position after each document, int64, ascending, the last one at the end; None if the file has no boundaries,
    # only end-of-text tokens.
    read_doc_ends: Callable[[], np.ndarray] | None = None
    tokenizer: str | None = None  # the name of the one that made it, if the format has it
    loss_mask: np.ndarray | None = None  # uint8: 1 for each token that is trained on; None: all are
    cache_key: str = ""  # the folder of a token cache, named by its content; empty for a token file and an array
    identity: list | None = None  # of a token file, see `DataFile.identity`; None for a token cache and for an array
    reopen: Callable[[], "MappedTokens"] | None = None  # opens the same file again, to pickle it; None for an array

    def __reduce__(self) -> Any:
        """A file is pickled as the call that opens it: a process that is not forked maps it too, and gets no copy."""
        return (self.reopen, ()) if self.reopen else super().__reduce__()


def id_dtype(vocab_size: int) -> np.dtype:
    """The dtype of token ids below `vocab_size`, in a token cache and in sequences."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def map_numbers(file: str, dtype: DTypeLike, offset: int = 0) -> np.ndarray:
    """The numbers in a file from a byte on, mapped: a page of it is read when its numbers are. A UserError if the
    file is empty, or its size is no multiple of a number's."""
    if os.path.getsize(file) <= offset:
        raise damaged_error(file, "it is empty, or ends within its header")
    content = np.memmap(file, np.uint8, "r", offset=offset)
    if len(content) % np.dtype(dtype).itemsize:
        number_bytes = np.dtype(dtype).itemsize
        raise damaged_error(file, f"{len(content):,} bytes are no whole number of {number_bytes}-byte numbers")
    return content.view(np.ndarray).view(dtype)


def damaged_error(file: Any, fault: str, advice: str = "restore the file, or write it again") -> base.UserError:
    """The error for a token file that breaks its format."""
    return base.UserError(f"--dataset {file}: {fault}; {advice}")


def describe_files(files: list[MappedTokens]) -> str:
    """The number of the files and their formats, in words."""
    format_names = list(dict.fromkeys(file.format_name for file in files))
    return f"read in place, {base.counted(len(files), 'file')} ({base.shortened(format_names, 2)})"


def differing_tokenizer(files: list[MappedTokens], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """A warning if a file names another tokenizer than the run's; else "". A path and a hub id are the same if their
    last part is."""
    for file in files:
        if file.tokenizer and tokenizer and last_part(file.tokenizer) != last_part(tokenizer.name_or_path):
            problem = f"{file.name} was tokenized by {file.tokenizer}"
            return f"--tokenizer {tokenizer.name_or_path}: {problem}; samples are wrong unless both are the same"
    return ""


def last_part(name: str) -> str:
    """The last part of a tokenizer's name: SmolLM3-3B of /models/SmolLM3-3B/tokenizer.json, as of the hub id."""
    return name.removesuffix("/tokenizer.json").rstrip("/").rpartition("/")[2]


# ----------------------------------------------------------------------------------------------------------------------
# Tokens of several files


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of files, or of one array, end to end; or stretches of these, such as all eval documents.
    `tokens[a:b]` reads these tokens only, and checks their range.

    Document boundaries: `file_doc_ends` are those of the files, `doc_ends` those of the stretches. A file without
    boundaries is read completely to find its end-of-text tokens; `CorpusReader.with_doc_ends` caches these."""

    files: list[MappedTokens]
    vocab_size: int | None = None
    end_of_text: int | None = None  # id that ends a document in files without boundaries, as their end does
    stretches: tuple[np.ndarray, np.ndarray] | None = None  # (starts, stops) of each in the files' tokens; None: all
    known_doc_ends: np.ndarray | None = None  # `file_doc_ends`, if they were read before

    @functools.cached_property
    def file_offsets(self) -> np.ndarray:
        """Tokens before each file, then the total."""
        return np.concatenate([[0], np.cumsum([len(file.tokens) for file in self.files], dtype=np.int64)])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        return self.stretches[0] if self.stretches else np.array([0])

    @functools.cached_property
    def stops(self) -> np.ndarray:
        return self.stretches[1] if self.stretches else self.file_offsets[-1:]

    @functools.cached_property
    def stretch_offsets(self) -> np.ndarray:
        """Tokens before each stretch, then the total."""
        return np.concatenate([[0], np.cumsum(self.stops - self.starts)])

    @functools.cached_property
    def dtype(self) -> np.dtype:
        return id_dtype(self.vocab_size or 2**32)

    def cut(self, starts: np.ndarray, stops: np.ndarray) -> "Tokens":
        """Select stretches of these tokens, `starts[i]` to before `stops[i]` each. They must be one stretch so far."""
        assert len(self.starts) == 1
        first = self.starts[0]
        return dataclasses.replace(self, stretches=(starts + first, stops + first), known_doc_ends=self.file_doc_ends)

    def between(self, first: int, last: int) -> "Tokens":
        """Select the tokens from `first` to before `last`."""
        return self.cut(np.array([first]), np.array([last]))

    def __len__(self) -> int:
        return int(self.stretch_offsets[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """These tokens in `self.dtype`, a view if they are one stretch of one file that has it; without a vocabulary as
        they are. A UserError if a token has no embedding."""
        first, last, _ = span.indices(len(self))
        return self._read(first, max(first, last), self._read_file)  # the slice 5:3 is empty

    def loss_mask(self, first: int, last: int) -> np.ndarray:
        """The mask of the tokens from `first` to before `last`, uint8: 1 if trained on; only if there is a mask."""
        return self._read(first, last, lambda file, start, stop: file.loss_mask[start:stop])

    def _read(self, first: int, last: int, read: Callable[[MappedTokens, int, int], np.ndarray]) -> np.ndarray:
        if len(self.files) == len(self.starts) == 1:  # one stretch of one file
            start = int(self.starts[0])
            return read(self.files[0], start + first, start + last)
        parts = []
        while first < last:
            stretch = int(np.searchsorted(self.stretch_offsets, first, "right")) - 1
            start_in_files = first - int(self.stretch_offsets[stretch]) + int(self.starts[stretch])
            file_index = int(np.searchsorted(self.file_offsets, start_in_files, "right")) - 1
            end_of_file = int(self.file_offsets[file_index + 1])
            stop_in_files = min(start_in_files + last - first, int(self.stops[stretch]), end_of_file)
            length = stop_in_files - start_in_files
            start = start_in_files - int(self.file_offsets[file_index])
            parts.append(read(self.files[file_index], start, start + length))
            first += length
        if not parts:
            return np.empty(0, self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_file(self, file: MappedTokens, start: int, stop: int) -> np.ndarray:
        """Tokens of a file in `self.dtype`; those of a token cache, or without a vocabulary, as they are."""
        tokens = file.tokens[start:stop]
        if file.cache_key or self.vocab_size is None:  # tokens of the cache were checked when they were written
            return tokens
        if not tokens.dtype.isnative:
            tokens = tokens.astype(tokens.dtype.newbyteorder("="))
        # as unsigned integers a negative id is above all positive ones of its type, so one comparison finds both faults
        unsigned = tokens.view(f"u{tokens.itemsize}")
        limit = min(self.vocab_size, np.iinfo(tokens.dtype).max + 1)
        if np.iinfo(unsigned.dtype).max >= limit and unsigned.max(initial=0) >= limit:
            wrong = int((unsigned >= limit).argmax())
            fault = f"token id {tokens[wrong]}, the model has {self.vocab_size:,}"
            advice = "it was made with another tokenizer, or is damaged"
            raise base.UserError(f"--dataset {file.name}, token {start + wrong:,}: {fault}; {advice}")
        return unsigned.astype(self.dtype, copy=False)

    @property
    def has_loss_mask(self) -> bool:
        """True if there is a mask of the tokens to train on: for conversations, and for rows with labels."""
        return self.files[0].loss_mask is not None

    @property
    def needs_end_of_text(self) -> bool:
        """True if documents of some of the files end after the end-of-text token only."""
        return not all(file.read_doc_ends for file in self.files)

    @property
    def knows_doc_ends(self) -> bool:
        """True if no token need be read for the document boundaries: the files have them, or they were read before."""
        return self.known_doc_ends is not None or not self.needs_end_of_text

    @functools.cached_property
    def file_doc_ends(self) -> np.ndarray:
        """The position after each document of the files, int64, ascending, the last one at the end."""
        if self.known_doc_ends is not None:
            return self.known_doc_ends
        parts = [self._find_doc_ends(file) for file in self.files]
        ends = parts[0]  # of one file they stay mapped
        if len(parts) > 1:
            ends = np.concatenate([part + first for part, first in zip(parts, self.file_offsets[:-1], strict=True)])
        total = self.file_offsets[-1]
        if ends[0] < 0 or (ends[1:] < ends[:-1]).any() or ends[-1] != total:
            names = base.shortened([file.name for file in self.files], 2)
            raise damaged_error(names, f"the ends of its documents do not ascend to its {total:,} tokens")
        if ends[0] == 0 or (ends[1:] == ends[:-1]).any():  # empty documents; without any the ends stay mapped
            ends = ends[np.diff(ends, prepend=0) > 0]
        return ends

    def _find_doc_ends(self, file: MappedTokens) -> np.ndarray:
        """The position after each document of a file, counted in its tokens, empty ones too."""
        if file.read_doc_ends:
            return file.read_doc_ends()
        found = [
            np.flatnonzero(file.tokens[start : start + CHUNK] == self.end_of_text) + start + 1
            for start in range(0, len(file.tokens), CHUNK)
        ]
        return np.concatenate([*found, [len(file.tokens)]]).astype(np.int64)  # the last one may be empty

    @functools.cached_property
    def doc_ends(self) -> np.ndarray:
        """The position after each document of the stretches, counted in their tokens; each stretch ends one."""
        if self.stretches is None:
            return self.file_doc_ends
        return doc_ends_in(self.file_doc_ends, self.starts, self.stops)

    def doc_starts_between(self, first: int, last: int) -> np.ndarray:
        """The positions at which documents begin among the tokens from `first` to before `last`, counted from `first`;
        0 always, also if a document continues there. Without boundaries only these tokens are read for them."""
        if self.knows_doc_ends:
            ends = doc_ends_in(self.file_doc_ends, *self.stretches_between(first, last))[:-1]
        else:
            # tokens that were cut have known ends, so these are all of the files, and positions are those in the files
            ends = np.flatnonzero(self[first : last - 1] == self.end_of_text) + first + 1
            ends = np.union1d(ends, self.file_offsets)
            ends = ends[(ends > first) & (ends < last)] - first
        return np.concatenate([[0], ends]).astype(np.int64)

    def stretches_between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens from `first` to before `last`, at least one, are in the files: (starts, stops) of their
        stretches, of which the first and the last are cut to these tokens."""
        offsets = self.stretch_offsets
        number, end = np.searchsorted(offsets, first, "right") - 1, np.searchsorted(offsets, last, "left")
        starts, stops = self.starts[number:end].copy(), self.stops[number:end].copy()
        starts[0] += first - offsets[number]
        stops[-1] -= offsets[end] - last
        return starts, stops

    def fingerprint(self) -> str:
        """A checksum of 256 samples of 4,096 tokens, and the number of tokens: the same wherever a corpus is stored."""
        starts = np.linspace(0, max(0, len(self) - 4096), 256, dtype=np.int64).tolist()
        digest = hashlib.sha256()
        for start in starts:
            digest.update(self[start : start + 4096].tobytes())
            if self.has_loss_mask:
                digest.update(self.loss_mask(start, min(start + 4096, len(self))).tobytes())
        return f"{digest.hexdigest()[:20]}, {len(self):,} tokens"


def doc_ends_in(file_doc_ends: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """The position after each document of ascending stretches of files, counted in the tokens of the stretches; each
    stretch ends one. Of `file_doc_ends` only those from the first to the last stretch are read.

    Example: of files with the ends 3, 5, 9 the stretches 1..3 and 6..7, with the starts 1, 6 and the stops 4, 8, have
    the ends 2, 3, 5: the end 3, and the two stops.
    """
    first, last = np.searchsorted(file_doc_ends, (starts[0], stops[-1]), "right")
    ends = np.sort(np.concatenate([file_doc_ends[first:last], stops]), kind="stable")  # merges two sorted arrays
    ends = ends[np.diff(ends, prepend=-1) > 0]
    stretch = np.searchsorted(stops, ends)  # of each end: the first stretch that does not stop before it
    is_inside = ends > starts[stretch]
    ends, stretch = ends[is_inside], stretch[is_inside]
    before = np.cumsum(stops - starts) - (stops - starts)
    return ends - starts[stretch] + before[stretch]


def checksum_of_beginning(tokens: np.ndarray | Tokens) -> str:
    """A checksum of the first tokens of a corpus, by which it is recognized; equal if it is streamed."""
    return hashlib.sha256(tokens[:BEGINNING_TOKENS].astype("<u4").tobytes()).hexdigest()[:20]
