"""NumPy's .npz: a zip of arrays, of which one holds the token ids. It is packed, and goes through the token cache."""

import math
import pathlib
import zipfile
from collections import Counter
from collections.abc import Iterator

import numpy as np

from harness.data.readers.npy import check_array, read_header
from harness.data.records import MAX_TOKEN_ID, BadRecord, Document, Field, choose_field

SUFFIXES = (".npz",)
PLACE = "array"
RECORDS = "arrays"
CHUNK_BYTES = 2**24  # that are unpacked at once


def read(
    file: pathlib.Path, text_field: Field, counts: Counter, batched: bool = False
) -> Iterator[Document | BadRecord]:
    """The array of --text-field, or the only one there is, in parts; each part stands for a document."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            name = names[0] if len(names) == 1 else choose_field(file, names, text_field)
            with archive.open(f"{name}.npy") as raw:
                yield from read_array(raw, f"{file}, array {name!r}", file.stat().st_size, counts)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ValueError(str(error) or "it ends too early") from error


def read_array(raw, place: str, packed_bytes: int, counts: Counter) -> Iterator[Document | BadRecord]:
    """The tokens of an array that is being unpacked. `counts["read"]` gets its share of the file."""
    shape, fortran_order, dtype = read_header(raw)
    check_array(place, dtype, len(shape))
    if fortran_order and len(shape) == 2:
        raise ValueError("the array's columns are end to end; save it with np.ascontiguousarray")
    count, done = math.prod(shape), 0
    while done < count:
        wanted = min(count - done, CHUNK_BYTES // dtype.itemsize)
        content = raw.read(wanted * dtype.itemsize)
        if len(content) < wanted * dtype.itemsize:
            raise ValueError(f"the array ends before token {count:,}")
        tokens = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="), copy=False)
        if tokens.min() < 0 or tokens.max() > MAX_TOKEN_ID:
            position = int(((tokens < 0) | (tokens > MAX_TOKEN_ID)).argmax())
            yield BadRecord(f"token {done + position:,} is {tokens[position]}, no token id", 1)
        else:
            yield tokens
        done += wanted
        counts["read"] += packed_bytes * wanted // count
