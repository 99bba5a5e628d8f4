"""Token files: files of token ids that are mapped, not read. What their readers share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from harness import base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False)
class TokenFile:
    """Token ids in a file, or in an array."""

    tokens: np.ndarray  # flat, integers, mapped
    name: str = ""  # of the file, as messages have it; empty for the token cache and for an array
    kind: str = ""  # what the file was taken for, in words
    # The position after each document, int64, ascending, the last one at the end; None if only end-of-text tokens tell.
    find_ends: Callable[[], np.ndarray] | None = None
    tokenizer: str | None = None  # the name of the one that made it, if the format has it
    is_checked: bool = False  # whether each id is known to be below the vocabulary's size
    trained: np.ndarray | None = None  # the mask, if there is one, uint8: 1 for each token that is trained on
    cache_key: str = ""  # tells the content of a token cache from others; empty for a token file and for an array
    reopen: Callable[[], "TokenFile"] | None = None  # opens the same file again; None for an array

    def __reduce__(self) -> Any:
        """A file is pickled as the call that opens it: a process that is not forked maps it too, and gets no copy."""
        return (self.reopen, ()) if self.reopen else super().__reduce__()


def map_numbers(file: str, dtype: DTypeLike, offset: int = 0) -> np.ndarray:
    """The numbers in a file from a byte on, mapped: a page of it is read when its numbers are. A UserError if the
    file is empty, or its size no multiple of theirs."""
    if os.path.getsize(file) <= offset:
        raise damaged(file, "it is empty, or ends within its header")
    content = np.memmap(file, np.uint8, "r", offset=offset)
    if len(content) % np.dtype(dtype).itemsize:
        raise damaged(file, f"{len(content):,} bytes are no whole number of {np.dtype(dtype).itemsize}-byte numbers")
    return content.view(np.ndarray).view(dtype)


def damaged(place: Any, fault: str, advice: str = "restore the file, or write it again") -> base.UserError:
    """The error for a token file that breaks its format; `place` is the file, or a position in it."""
    return base.UserError(f"--dataset {place}: {fault}; {advice}")


def describe(files: list[TokenFile]) -> str:
    """The kinds of the files, in words."""
    kinds = list(dict.fromkeys(file.kind for file in files))
    return f"read in place, {base.counted(len(files), 'file')} ({base.shortened(kinds, 2)})"


def differing_tokenizer(files: list[TokenFile], tokenizer: "PreTrainedTokenizerBase | None") -> str:
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
