""".bin files of tokens: Megatron's and NeMo's where an .idx lies beside, llm.c's where it begins with a header of 256
int32 (a magic number, which tells uint16 from uint32, a version, the number of tokens), and nanoGPT's uint16 otherwise.

Megatron's .idx has the layout of `megatron.core.datasets.indexed_dataset`, all little-endian: the magic, the version (8
bytes), a code of the type of a token (1), the numbers of sequences and of entries of the document index (8 each); then
the sequences' lengths (int32), their offsets in the .bin in bytes (int64), and for each document the sequence that it
begins with (int64), with the number of sequences as the last entry.
"""

import functools
import os
import pathlib
import struct

import numpy as np

from harness.data.token_files import TokenFile, damaged, map_numbers

SUFFIXES = (".bin",)
COMPANIONS = (".idx",)
HAS_FIELDS = False

HEADER_BYTES = 256 * 4  # of llm.c
LLMC: dict[int, np.dtype] = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # by its magic number
SAMPLE = 4096  # tokens that are looked at
CHUNK = 2**18  # entries of an index that are read at once: pages of a mapped one would stay in memory

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
INTEGERS = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by the code of the type of a token


def open_tokens(file: str, vocab_size: int) -> TokenFile:
    index = pathlib.Path(file).with_suffix(".idx")
    if index.exists():
        return open_megatron(file, str(index))
    header = np.fromfile(file, "<i4", 3)
    magic = int(header[0]) if len(header) == 3 else 0
    if magic not in LLMC:
        return open_headless(file, vocab_size)
    tokens = map_numbers(file, LLMC[magic], HEADER_BYTES)
    if len(tokens) != header[2]:
        raise damaged(file, f"it has {len(tokens):,} tokens, its header says {header[2]:,}")
    return TokenFile(tokens, file, f"llm.c's .bin with a header, {tokens.dtype.name}")


def open_headless(file: str, vocab_size: int) -> TokenFile:
    """A file as nanoGPT writes it; an error where its tokens seem to have 4 bytes."""
    tokens = map_numbers(file, "<u2")
    start = tokens[:SAMPLE]
    largest_high_half = (vocab_size - 1) >> 16
    if len(start) >= 4 and start[::2].any() and (start[1::2] <= largest_high_half).all():
        name = pathlib.Path(file)
        advice = f"save them as .npy: np.save('{name.stem}.npy', np.memmap('{name.name}', np.uint32, 'r'))"
        raise damaged(file, "a .bin without header has 2 bytes a token, and these seem to have 4", advice)
    return TokenFile(tokens, file, "nanoGPT's flat .bin without header, uint16")


def open_megatron(file: str, index: str) -> TokenFile:
    """A file with its index; an error where the two do not fit, or hold what cannot be trained on."""
    with open(index, "rb") as opened:
        header = opened.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise damaged(index, f"it begins with {header[:9]!r}: it is no whole index of Megatron's")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != 1 or code not in INTEGERS:
        raise damaged(index, f"version {version} with type {code} of tokens, where integers of version 1 are known")
    size, wanted = os.path.getsize(index), HEADER.size + 12 * sequences + 8 * documents
    if size != wanted:  # that of a multimodal corpus has a byte more for each sequence
        fault = f"{size:,} bytes, where its {sequences:,} sequences and {documents:,} document entries take {wanted:,}"
        raise damaged(index, fault, "restore it; one of text and nothing else can be trained on")
    tokens = map_numbers(file, INTEGERS[code])
    check_sequences(index, sequences, file, tokens)
    find_ends = functools.partial(document_ends, index, sequences, documents)  # read when they are asked for
    return TokenFile(tokens, file, f"Megatron's .bin with .idx, {tokens.dtype.name}", find_ends)


def check_sequences(index: str, sequences: int, file: str, tokens: np.ndarray) -> None:
    """An error where the sequences do not lie end to end in the file, from its beginning to its end."""
    end = 0  # of the sequences so far, in bytes
    for first in range(0, sequences, CHUNK):
        count = min(CHUNK, sequences - first)
        lengths = np.fromfile(index, "<i4", count, offset=HEADER.size + 4 * first)
        offsets = np.fromfile(index, "<i8", count, offset=HEADER.size + 4 * sequences + 8 * first)
        ends = end + np.cumsum(lengths, dtype=np.int64) * tokens.itemsize
        if offsets[0] != end or (offsets[1:] != ends[:-1]).any():
            raise damaged(index, f"its sequences do not lie end to end in {file}", "write them in their order")
        end = int(ends[-1])
    if end != tokens.nbytes:
        raise damaged(file, f"it has {len(tokens):,} tokens, its index {index} has {end // tokens.itemsize:,}")


def document_ends(index: str, sequences: int, documents: int) -> np.ndarray:
    """Where each document ends; where the index has no documents, where each sequence does."""
    ends = np.zeros(sequences + 1, np.int64)
    np.cumsum(np.fromfile(index, "<i4", sequences, offset=HEADER.size), dtype=np.int64, out=ends[1:])
    if documents < 2:
        return ends[1:]
    first_sequences = np.fromfile(index, "<i8", documents, offset=HEADER.size + 12 * sequences)
    if first_sequences[0] != 0 or first_sequences[-1] != sequences:
        raise damaged(index, f"its documents do not take its {sequences:,} sequences")
    return ends[first_sequences[1:]]
