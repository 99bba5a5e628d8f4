"""NumPy's .npy: an array of token ids with one dimension, or with two, whose rows are joined."""

import pathlib

import numpy as np

from harness.data.tokens import MappedTokens, damaged_error

SUFFIXES = (".npy",)

MAGIC = b"\x93NUMPY"  # first bytes


def open_tokens(path: str, vocab_size: int) -> MappedTokens:
    with open(path, "rb") as opened:
        beginning = opened.read(len(MAGIC))
    if beginning != MAGIC:  # np.load takes it for a pickle
        name = pathlib.Path(path)
        fault = "it has no header of NumPy, as arrays that dolma and OLMo write"
        command = f"np.save('{name.stem}-ids.npy', np.memmap('{name.name}', np.uint32, 'r'))"
        advice = f"if its ids are uint16, name it {name.stem}.bin; if they are uint32, write {command}"
        raise damaged_error(path, fault, advice)
    array = np.load(path, mmap_mode="r")
    if array.dtype.kind not in "iu":
        raise damaged_error(path, f"its numbers are {array.dtype.name}; token ids are integers", "convert it")
    if array.ndim not in (1, 2) or not array.flags.c_contiguous:
        fault = f"it has {array.ndim} dimensions; token ids have 1, or 2 in C order"
        raise damaged_error(path, fault, "save it with np.ascontiguousarray")
    sizes = " x ".join(f"{length:,}" for length in array.shape)
    tokens = array.view(np.ndarray).reshape(-1)
    return MappedTokens(tokens, path, f"NumPy's .npy, {array.dtype.name}, {sizes}")
