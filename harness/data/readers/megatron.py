"""Megatron's indexed files, also NeMo's: NAME.bin has the tokens of all sequences, NAME.idx where each begins.

The layout is that of `megatron.core.datasets.indexed_dataset`, all little-endian: the magic, the version (8 bytes), a
code of the type of a token (1), the numbers of sequences and of entries of the document index (8 each); then the
sequences' lengths (int32), their places in the .bin in bytes (int64), and for each document the sequence that it begins
with (int64), with the number of sequences as the last entry. Where sequences have modes (int8) these follow.
"""

import functools
import pathlib
import struct
from typing import NamedTuple

import numpy as np

from harness.data.mapped import Mapping, TokenFile, damaged
from harness.data.records import Field

SUFFIXES = (".bin",)
BESIDE = ".idx"
COMPANIONS = {".idx": ".bin"}
HAS_FIELDS = False

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
INTEGERS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FLOATS = (6, 7)
CHUNK = 2**18  # entries of an index that are read at once


class Index(NamedTuple):
    """What an index file says of its tokens."""

    file: pathlib.Path
    dtype: type
    sequences: int
    documents: int  # entries of the document index

    def lengths(self) -> np.ndarray:
        """Of each sequence, in tokens."""
        return self._entries("<i4", HEADER.size, self.sequences)

    def places(self) -> np.ndarray:
        """Where each sequence begins in the .bin, in bytes."""
        return self._entries("<i8", HEADER.size + 4 * self.sequences, self.sequences)

    def first_sequences(self) -> np.ndarray:
        """The sequence that each document begins with, and at the end how many sequences there are."""
        return self._entries("<i8", HEADER.size + 12 * self.sequences, self.documents)

    def read(self, dtype: str, offset: int, count: int, first: int) -> np.ndarray:
        """A copy of CHUNK entries of an array of so many that begins at a byte, from the entry `first` on."""
        offset += first * np.dtype(dtype).itemsize
        return np.fromfile(self.file, dtype, min(CHUNK, count - first), offset=offset)

    def _entries(self, dtype: str, offset: int, count: int) -> np.ndarray:
        if not count:
            return np.empty(0, dtype)
        return np.memmap(self.file, dtype, mode="r", offset=offset, shape=(count,))


def open_tokens(file: pathlib.Path, text_field: Field, vocab_size: int) -> TokenFile:
    index = read_header(file.with_suffix(BESIDE))
    mapping = Mapping(file)
    tokens = mapping.numbers(np.dtype(index.dtype).newbyteorder("<"))
    check_documents(index)
    pieces = [tokens]
    if not check_sequences(index, file, tokens):
        pieces = cut_sequences(index, tokens)
    kind = f"Megatron's .bin with .idx, {tokens.dtype.name}"
    return TokenFile(kind, mapping, pieces, functools.partial(document_ends, index))


def read_header(file: pathlib.Path) -> Index:
    """The index of a file; an error where it is damaged, or of a kind that cannot be trained on."""
    with file.open("rb") as raw:
        header = raw.read(HEADER.size)
    if not header.startswith(MAGIC):
        raise damaged(file, f"it begins with {header[:9]!r}, not with {MAGIC!r}: it is no index of Megatron's")
    if len(header) < HEADER.size:
        raise damaged(file, f"it ends within its header, after {len(header)} bytes")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != 1:
        raise damaged(file, f"version {version}, where only 1 is known")
    if code in FLOATS:
        raise damaged(file, f"its numbers are floats (type {code}), no tokens", "name the corpus' token file")
    if code not in INTEGERS:
        raise damaged(file, f"type {code} of tokens, where only {', '.join(map(str, INTEGERS))} are known")
    size, wanted = file.stat().st_size, HEADER.size + 12 * sequences + 8 * documents
    if sequences and size == wanted + sequences:
        fault = "its sequences have modes: it is multimodal, and not all in it is text"
        raise damaged(file, fault, "only an index without mode bytes can be trained on")
    if size != wanted:
        fault = f"{size:,} bytes, where its {sequences:,} sequences and {documents:,} document entries take {wanted:,}"
        raise damaged(file, fault)
    return Index(file, INTEGERS[code], sequences, documents)


def check_sequences(index: Index, file: pathlib.Path, tokens: np.ndarray) -> bool:
    """Whether the sequences lie end to end from the file's beginning on, as Megatron writes them; an error where one
    lies outside the file, or where the file has more tokens than the index."""
    position, is_flat = 0, True
    for first in range(0, index.sequences, CHUNK):
        # copies: pages of a mapped index would stay in memory
        lengths = index.read("<i4", HEADER.size, index.sequences, first)
        places = index.read("<i8", HEADER.size + 4 * index.sequences, index.sequences, first)
        ends = np.cumsum(lengths, dtype=np.int64)
        ends *= tokens.itemsize
        ends += position
        position = int(ends[-1])
        in_order = places[0] == ends[0] - lengths[0] * tokens.itemsize and np.array_equal(places[1:], ends[:-1])
        if not in_order or lengths.min() < 0 or position > tokens.nbytes:
            is_flat = False
            check_places(index, file, tokens, first, lengths, places)
    if position != tokens.nbytes:
        in_index = position // tokens.itemsize
        raise damaged(file, f"it has {len(tokens):,} tokens, its index {index.file.name} has {in_index:,}")
    return is_flat


def check_places(
    index: Index, file: pathlib.Path, tokens: np.ndarray, first: int, lengths: np.ndarray, places: np.ndarray
) -> None:
    """An error where one of the sequences from `first` on does not lie within its file."""
    ends = places + lengths.astype(np.int64) * tokens.itemsize
    bad = (lengths < 0) | (places < 0) | (places % tokens.itemsize != 0) | (ends > tokens.nbytes)
    if not bad.any():
        return
    number = int(bad.argmax())
    sequence, length, place = first + number, int(lengths[number]), int(places[number])
    document = int(np.searchsorted(index.first_sequences(), sequence, "right"))
    where = f"{index.file}, document {document:,}, sequence {sequence:,}"
    if length < 0:
        raise damaged(where, f"its length is {length:,} tokens")
    raise damaged(where, f"{length:,} tokens from byte {place:,} on are not in {file.name} of {tokens.nbytes:,} bytes")


def check_documents(index: Index) -> None:
    """An error where the document index does not divide all sequences."""
    entries, before = index.first_sequences(), 0
    if len(entries) and (entries[0] != 0 or entries[-1] != index.sequences):
        fault = f"its documents take the sequences {entries[0]:,} to {entries[-1]:,} of {index.sequences:,}"
        raise damaged(index.file, fault)
    for first in range(0, index.documents, CHUNK):
        part = index.read("<i8", HEADER.size + 12 * index.sequences, index.documents, first)
        if part[0] < before or (part[1:] < part[:-1]).any():
            document = first + int((np.diff(part, prepend=before) < 0).argmax())
            raise damaged(f"{index.file}, document {document:,}", "it ends before it begins")
        before = part[-1]


def cut_sequences(index: Index, tokens: np.ndarray) -> list[np.ndarray]:
    """The tokens of each sequence, where they lie in another order than that of the index."""
    firsts = index.places() // tokens.itemsize
    return [tokens[first : first + length] for first, length in zip(firsts, index.lengths(), strict=True)]


def document_ends(index: Index) -> np.ndarray:
    """Where each document ends; where the index has no documents, where each sequence does."""
    ends = np.zeros(index.sequences + 1, np.int64)
    np.cumsum(index.lengths(), dtype=np.int64, out=ends[1:])
    if index.documents < 2:
        return ends[1:]
    return ends[index.first_sequences()[1:]]
