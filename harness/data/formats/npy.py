"""NumPy's .npy: an array of token ids with one dimension, or with two, whose rows are joined."""

import math

import numpy as np

from harness.data.token_files import TokenFile, damaged, map_numbers

SUFFIXES = (".npy",)
HAS_FIELDS = False


def open_tokens(file: str, vocab_size: int) -> TokenFile:
    with open(file, "rb") as opened:
        version = np.lib.format.read_magic(opened)
        read_header = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        shape, is_by_columns, dtype = read_header(opened)
        offset = opened.tell()
    if dtype.kind not in "iu":
        raise damaged(file, f"its numbers are {dtype.name}; token ids are integers", "convert it")
    if len(shape) not in (1, 2) or (is_by_columns and len(shape) == 2):
        fault = f"it has {len(shape)} dimensions; token ids have 1, or 2 in C order"
        raise damaged(file, fault, "save it with np.ascontiguousarray")
    tokens = map_numbers(file, dtype, offset)
    if len(tokens) != math.prod(shape):
        raise damaged(file, f"it has {len(tokens):,} tokens, its header says {math.prod(shape):,}")
    sizes = " x ".join(f"{length:,}" for length in shape)
    return TokenFile(tokens, file, f"NumPy's .npy, {dtype.name}, {sizes}")
