""".bin files of tokens: Megatron's and NeMo's if there is an .idx, llm.c's if it begins with a header of 256 int32 (a
magic number, which tells uint16 from uint32, a version, the number of tokens), and nanoGPT's uint16 otherwise.

Megatron's .idx has the layout of `megatron.core.datasets.indexed_dataset`, little-endian: the magic, the version (8
bytes), a code of the tokens' dtype (1), the numbers of sequences and of entries of the document index (8 each); then
the sequences' lengths (int32), their offsets in the .bin in bytes (int64), and the first sequence of each document
(int64), with the number of sequences as the last entry.
"""

import functools
import os
import pathlib
import struct

import numpy as np

from harness.data.tokens import MappedTokens, damaged_error, map_numbers

SUFFIXES = (".bin",)
COMPANIONS = (".idx",)

LLMC_HEADER_BYTES = 256 * 4
LLMC_DTYPES: dict[int, np.dtype] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # by its magic number
PROBED_TOKENS = 4096  # first ones, from which the bytes per token are guessed

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MEGATRON_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by the code of the dtype


def open_tokens(path: str, vocab_size: int) -> MappedTokens:
    index = pathlib.Path(path).with_suffix(".idx")
    if index.exists():
        return open_megatron(path, str(index))
    header = np.fromfile(path, "<i4", 3)
    magic = int(header[0]) if len(header) == 3 else 0
    if magic not in LLMC_DTYPES:
        return open_headless(path, vocab_size)
    tokens = map_numbers(path, LLMC_DTYPES[magic], LLMC_HEADER_BYTES)
    if len(tokens) != header[2]:
        raise damaged_error(path, f"it has {len(tokens):,} tokens, its header says {header[2]:,}")
    return MappedTokens(tokens, path, f"llm.c's .bin with a header, {tokens.dtype.name}")


def open_headless(path: str, vocab_size: int) -> MappedTokens:
    """Map a file of nanoGPT; an error if its tokens seem to have 4 bytes."""
    tokens = map_numbers(path, "<u2")
    start = tokens[:PROBED_TOKENS]
    # of little-endian uint32, every second uint16 is the high half of an id, which the vocabulary limits
    largest_high_half = (vocab_size - 1) >> 16
    if len(start) >= 4 and start[::2].any() and (start[1::2] <= largest_high_half).all():
        name = pathlib.Path(path)
        advice = f"save them as .npy: np.save('{name.stem}.npy', np.memmap('{name.name}', np.uint32, 'r'))"
        raise damaged_error(path, "a .bin without header has 2 bytes a token, and these seem to have 4", advice)
    return MappedTokens(tokens, path, "nanoGPT's flat .bin without header, uint16")


def open_megatron(path: str, index: str) -> MappedTokens:
    """Map a file with an index; an error if the two do not match, or have more than text."""
    with open(index, "rb") as opened:
        header = opened.read(MEGATRON_HEADER.size)
    if len(header) < MEGATRON_HEADER.size or not header.startswith(MEGATRON_MAGIC):
        raise damaged_error(index, f"it begins with {header[:9]!r}: it is no complete index of Megatron's")
    _, version, code, sequences, doc_entries = MEGATRON_HEADER.unpack(header)
    if version != 1 or code not in MEGATRON_DTYPES:
        raise damaged_error(index, f"version {version} with dtype code {code} instead of integers of version 1")
    size, wanted = os.path.getsize(index), MEGATRON_HEADER.size + 12 * sequences + 8 * doc_entries
    if size != wanted:  # a multimodal corpus has a byte more per sequence
        fault = f"{size:,} bytes instead of {wanted:,} for {sequences:,} sequences and {doc_entries:,} document entries"
        raise damaged_error(index, fault, "restore it; only text can be trained on")
    tokens = map_numbers(path, MEGATRON_DTYPES[code])
    last = sequences - 1
    (length,) = np.fromfile(index, "<i4", 1, offset=MEGATRON_HEADER.size + 4 * last)
    (offset,) = np.fromfile(index, "<i8", 1, offset=MEGATRON_HEADER.size + 4 * sequences + 8 * last)
    count = int(offset) // tokens.itemsize + int(length)
    if count != len(tokens):
        raise damaged_error(path, f"it has {len(tokens):,} tokens, its index {index} has {count:,}")
    read_doc_ends = functools.partial(document_ends, index, sequences, doc_entries)  # read on demand
    return MappedTokens(tokens, path, f"Megatron's .bin with .idx, {tokens.dtype.name}", read_doc_ends)


def document_ends(index: str, sequences: int, doc_entries: int) -> np.ndarray:
    """Return the end of each document, in tokens; of each sequence if the index has no documents."""
    ends = np.zeros(sequences + 1, np.int64)
    np.cumsum(np.fromfile(index, "<i4", sequences, offset=MEGATRON_HEADER.size), dtype=np.int64, out=ends[1:])
    if doc_entries < 2:  # no documents
        return ends[1:]
    first_sequences = np.fromfile(index, "<i8", doc_entries, offset=MEGATRON_HEADER.size + 12 * sequences)
    if first_sequences[0] != 0 or first_sequences[-1] != sequences or (np.diff(first_sequences) < 0).any():
        raise damaged_error(index, f"its documents do not cover its {sequences:,} sequences")
    return ends[first_sequences[1:]]
