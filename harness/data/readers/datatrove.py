"""datatrove's token files, also nanotron's: NAME.ds has the tokens, 2 or 4 bytes each; NAME.ds.index where each
document ends (uint64, counted in tokens); NAME.ds.metadata the tokenizer's name, the bytes of a token and the number
of tokens. All is little-endian, in shuffled files too. The layout is that of `datatrove.pipeline.tokens.tokenizer`."""

import os
import pathlib
import re

import numpy as np

from harness.data.token_files import TokenFile, check_ascending, damaged, map_numbers

SUFFIXES = (".ds",)
COMPANIONS = (".ds.index", ".ds.metadata")
HAS_FIELDS = False

DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
UNKNOWN = "Unknown Tokenizer"  # what datatrove writes for a tokenizer without a name


def open_tokens(file: str, vocab_size: int) -> TokenFile:
    index = f"{file}.index"
    tokenizer, itemsize, count = read_metadata(pathlib.Path(f"{file}.metadata"))
    last_end = check_index(index) if os.path.exists(index) else None
    known_by = "as its metadata says"
    if itemsize is None:
        itemsize, known_by = guess_itemsize(file, last_end if count is None else count, vocab_size)
    tokens = map_numbers(file, DTYPES[itemsize])
    if count is not None and count != len(tokens):
        raise damaged(file, f"it has {len(tokens):,} tokens, its metadata says {count:,}")
    if last_end is not None and last_end != len(tokens):
        raise damaged(index, f"its documents end at token {last_end:,}, {file} has {len(tokens):,}")
    find_ends = None if last_end is None else lambda: map_numbers(index, "<i8")
    return TokenFile(tokens, file, f"datatrove's .ds, {tokens.dtype.name} {known_by}", find_ends, tokenizer)


def read_metadata(file: pathlib.Path) -> tuple[str | None, int | None, int | None]:
    """(name of the tokenizer, bytes a token, number of tokens); None for what is not known."""
    if not file.exists():
        return None, None, None
    lines = file.read_text(encoding="utf-8").split("\n")
    name, *sizes = lines[0].strip().split("|")
    count = lines[1].strip() if len(lines) > 1 else ""
    itemsize = int(sizes[0]) if sizes and sizes[0].isdigit() else None
    if itemsize not in (None, *DTYPES) or not re.fullmatch("[0-9]*", count):
        raise damaged(file, f"{lines[:2]} are no tokenizer with 2 or 4 bytes a token and number of tokens")
    return (None if name in ("", UNKNOWN) else name), itemsize, (int(count) if count else None)


def guess_itemsize(file: str, count: int | None, vocab_size: int) -> tuple[int, str]:
    """(bytes a token of a file without metadata, how that is known): by the number of its tokens or, where that is not
    known either, as datatrove chooses them for a vocabulary."""
    if not count:
        return (2 if vocab_size <= 2**16 else 4), "by the size of the vocabulary"
    size = os.path.getsize(file)
    for itemsize in DTYPES:
        if size == itemsize * count:
            return itemsize, "by its index"
    raise damaged(file, f"{size:,} bytes are not {count:,} tokens of 2 or 4 bytes, which its index has")


def check_index(file: str) -> int:
    """The last entry of an index; an error where an entry is less than the one before it."""
    size = os.path.getsize(file)
    if size % 8:
        raise damaged(file, f"{size:,} bytes are no whole number of 8-byte entries")

    def falls(number: int, end: int):
        return damaged(f"{file}, document {number + 1:,}", f"it ends at token {end:,}, the one before it later")

    return check_ascending(file, "<i8", 0, size // 8, falls)
