"""Mapped files: what readers of token files share. Nothing of a file is read before its tokens are asked for.
Independent of the formats."""

import mmap
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from harness.base import UserError


class Mapping:
    """A file that is mapped to be read at random places: the kernel reads what is asked for, and not the megabytes
    around it that it would read ahead otherwise."""

    def __init__(self, file: pathlib.Path):
        self.file, self.bytes = file, np.empty(0, np.uint8)
        with file.open("rb") as raw:
            if not os.fstat(raw.fileno()).st_size:  # which cannot be mapped
                return
            self.mmap = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self.mmap.madvise(mmap.MADV_RANDOM)
        self.bytes = np.frombuffer(self.mmap, np.uint8)

    def numbers(self, dtype, offset: int = 0) -> np.ndarray:
        """The file from a byte on as a flat array; an error where its size is no multiple of the numbers'."""
        content, itemsize = self.bytes[offset:], np.dtype(dtype).itemsize
        if len(content) % itemsize:
            raise damaged(self.file, f"{len(content):,} bytes are no whole number of {itemsize}-byte numbers")
        return content.view(dtype)

    def offset_of(self, array: np.ndarray) -> int:
        """The byte of the file at which an array that lies in it begins."""
        return array.ctypes.data - self.bytes.ctypes.data

    def read_ahead(self, first: int, size: int) -> None:
        """Lets the kernel read these bytes at once. It would read one page after the other."""
        if hasattr(mmap, "MADV_WILLNEED"):
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            self.mmap.madvise(mmap.MADV_WILLNEED, page, first + size - page)


class TokenFile(NamedTuple):
    """The tokens of a file that is mapped, not read: what a reader's `open_tokens` returns."""

    kind: str  # what it was taken for, in words
    mapping: Mapping
    pieces: list[np.ndarray]  # flat integer arrays in the mapping, end to end
    # Where each document ends, int64, counted in tokens of the file; None where only end-of-text tokens tell.
    document_ends: Callable[[], np.ndarray] | None = None
    tokenizer: str | None = None  # the name of the one that made it, where the format has it

    @property
    def file(self) -> pathlib.Path:
        return self.mapping.file


def damaged(place: Any, fault: str, advice: str = "restore the file, or make it anew") -> UserError:
    """What to say of a token file that is not as its format wants it; `place` is the file, or a place in it."""
    return UserError(f"--dataset {place}: {fault}; {advice}")
