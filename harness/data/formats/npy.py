"""NumPy's .npy: an array of token ids with one dimension, or with two, whose rows are joined."""

import numpy as np

from harness.data.tokens import MappedTokens, damaged

SUFFIXES = (".npy",)


def open_tokens(file: str, vocab_size: int) -> MappedTokens:
    array = np.load(file, mmap_mode="r")
    if array.dtype.kind not in "iu":
        raise damaged(file, f"its numbers are {array.dtype.name}; token ids are integers", "convert it")
    if array.ndim not in (1, 2) or not array.flags.c_contiguous:
        fault = f"it has {array.ndim} dimensions; token ids have 1, or 2 in C order"
        raise damaged(file, fault, "save it with np.ascontiguousarray")
    sizes = " x ".join(f"{length:,}" for length in array.shape)
    tokens = array.view(np.ndarray).reshape(-1)
    return MappedTokens(tokens, file, f"NumPy's .npy, {array.dtype.name}, {sizes}")
