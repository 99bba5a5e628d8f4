"""datatrove's token files, also nanotron's: NAME.ds has the tokens, 2 or 4 bytes each; NAME.ds.index where each
document ends (uint64, counted in tokens); NAME.ds.metadata the tokenizer's name, the bytes of a token and the number
of tokens. All is little-endian, in shuffled files too. The layout is that of `datatrove.pipeline.tokens.tokenizer`."""

import functools
import os

from harness.data.token_files import TokenFile, damaged, map_numbers

SUFFIXES = (".ds",)
COMPANIONS = (".ds.index", ".ds.metadata")
HAS_FIELDS = False

UNKNOWN = "Unknown Tokenizer"  # what datatrove writes for a tokenizer without a name


def open_tokens(file: str, vocab_size: int) -> TokenFile:
    """A file without metadata has 2 or 4 bytes a token as its index says, or as datatrove chooses for a vocabulary."""
    index, metadata = f"{file}.index", f"{file}.metadata"
    count = None
    if os.path.exists(index):
        ends = map_numbers(index, "<i8")
        count = int(ends[-1])
    tokenizer, itemsize = None, 2 if vocab_size <= 2**16 else 4
    if os.path.exists(metadata):
        tokenizer, itemsize, stated = read_metadata(metadata)
        count = stated if count is None else count
    elif count:
        itemsize = os.path.getsize(file) // count
    if itemsize not in (2, 4):
        raise damaged(file, f"{itemsize} bytes a token, where 2 and 4 are known")
    tokens = map_numbers(file, f"<u{itemsize}")
    if count not in (None, len(tokens)):
        raise damaged(file, f"it has {len(tokens):,} tokens, its index or metadata says {count:,}")
    find_ends = functools.partial(map_numbers, index, "<i8") if os.path.exists(index) else None
    return TokenFile(tokens, file, f"datatrove's .ds, {tokens.dtype.name}", find_ends, tokenizer)


def read_metadata(file: str) -> tuple[str | None, int, int | None]:
    """(name of the tokenizer, bytes a token, number of tokens); None for a name or number that is not there."""
    with open(file, encoding="utf-8") as opened:
        name, _, itemsize = opened.readline().strip().partition("|")
        count = opened.readline().strip()
    return (None if name in ("", UNKNOWN) else name), int(itemsize.partition("|")[0]), int(count) if count else None
