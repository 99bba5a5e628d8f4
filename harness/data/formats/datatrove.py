"""datatrove's token files, also nanotron's: NAME.ds has the tokens, 2 or 4 bytes each; NAME.ds.index the end of each
document (uint64, in tokens); NAME.ds.metadata the tokenizer's name, the bytes per token and the number of tokens. All
are little-endian. The layout is that of `datatrove.pipeline.tokens.tokenizer`."""

import functools
import os

from harness.data.tokens import MappedTokens, damaged_error, id_dtype, map_numbers

SUFFIXES = (".ds",)
COMPANIONS = (".ds.index", ".ds.metadata", ".ds.loss")

UNKNOWN = "Unknown Tokenizer"  # datatrove's name of a tokenizer without one


def open_tokens(path: str, vocab_size: int) -> MappedTokens:
    """Map a file. Its number of tokens is in the index or in the metadata; the bytes per token are in the metadata, or
    follow from that number, or, without both, from the vocabulary's size."""
    index, metadata = f"{path}.index", f"{path}.metadata"
    if os.path.exists(f"{path}.loss"):
        advice = "remove it to train on all tokens, or give ids with a loss_mask in .parquet"
        raise damaged_error(path, "its .ds.loss says which tokens are trained on, which is not read", advice)
    has_index = os.path.exists(index)
    count = int(map_numbers(index, "<i8")[-1]) if has_index else None
    tokenizer = None
    if os.path.exists(metadata):
        tokenizer, itemsize, stated = read_metadata(metadata)
        count = count if has_index else stated
    elif count:
        itemsize = os.path.getsize(path) // count
    else:
        itemsize = id_dtype(vocab_size).itemsize
    if itemsize not in (2, 4):
        raise damaged_error(path, f"{itemsize} bytes per token instead of 2 or 4")
    tokens = map_numbers(path, f"<u{itemsize}")
    if count not in (None, len(tokens)):
        raise damaged_error(path, f"it has {len(tokens):,} tokens, its index or metadata says {count:,}")
    read_doc_ends = functools.partial(map_numbers, index, "<i8") if has_index else None
    return MappedTokens(tokens, path, f"datatrove's .ds, {tokens.dtype.name}", read_doc_ends, tokenizer)


def read_metadata(path: str) -> tuple[str | None, int, int | None]:
    """Return (name of the tokenizer, bytes per token, number of tokens); None for a missing name or number."""
    with open(path, encoding="utf-8") as opened:
        name, _, itemsize = opened.readline().strip().partition("|")
        count = opened.readline().strip()
    return (None if name in ("", UNKNOWN) else name), int(itemsize.partition("|")[0]), int(count) if count else None
