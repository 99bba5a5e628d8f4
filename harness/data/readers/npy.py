"""NumPy's .npy: an array of token ids with one dimension, or with two, whose rows are then end to end."""

import math
import pathlib

import numpy as np

from harness.data.mapped import Mapping, TokenFile, damaged
from harness.data.records import Field

SUFFIXES = (".npy",)
HAS_FIELDS = False


def open_tokens(file: pathlib.Path, text_field: Field, vocab_size: int) -> TokenFile:
    if not file.stat().st_size:
        raise damaged(file, "it is empty")
    with file.open("rb") as raw:
        shape, fortran_order, dtype = read_header(raw)
        offset = raw.tell()
    check_array(file, dtype, len(shape))
    if fortran_order and len(shape) == 2:
        raise damaged(file, "its columns are end to end", "save it with np.ascontiguousarray")
    mapping, count = Mapping(file), math.prod(shape)
    tokens = mapping.numbers(dtype, offset)
    if len(tokens) != count:
        raise damaged(file, f"it has {len(tokens):,} tokens, its header says {count:,}")
    shape_in_words = " x ".join(f"{length:,}" for length in shape)
    return TokenFile(f"NumPy's .npy, {dtype.name}, {shape_in_words}", mapping, [tokens])


def read_header(raw) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether columns are end to end, type) of an array in NumPy's format, up to whose numbers `raw` is read; a
    ValueError where it is none."""
    version = np.lib.format.read_magic(raw)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(raw)
    return np.lib.format.read_array_header_2_0(raw)


def check_array(place, dtype: np.dtype, dimensions: int) -> None:
    """An error where an array cannot be token ids."""
    if dtype.kind not in "iu":
        raise damaged(place, f"its numbers are {dtype.name}, where token ids are integers", "convert it")
    if dimensions not in (1, 2):
        raise damaged(place, f"it has {dimensions} dimensions, where token ids have 1 or 2", "convert it")
