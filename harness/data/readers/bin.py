""".bin files of tokens: Megatron's and NeMo's where an .idx lies beside, llm.c's where it begins with a header of 256
int32 (a magic number, which tells uint16 from uint32, a version, the number of tokens), and nanoGPT's uint16 otherwise.

Megatron's .idx has the layout of `megatron.core.datasets.indexed_dataset`, all little-endian: the magic, the version (8
bytes), a code of the type of a token (1), the numbers of sequences and of entries of the document index (8 each); then
the sequences' lengths (int32), their places in the .bin in bytes (int64), and for each document the sequence that it
begins with (int64), with the number of sequences as the last entry.
"""

import os
import pathlib
import struct
from typing import NamedTuple

import numpy as np

from harness.data.token_files import CHUNK, TokenFile, check_ascending, damaged, map_numbers

SUFFIXES = (".bin",)
COMPANIONS = (".idx",)
HAS_FIELDS = False

HEADER_BYTES = 256 * 4  # of llm.c
LLMC = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # by its magic number
EVALUATION = 20240522  # llm.c's files of questions with choices
SAMPLE = 4096  # tokens that are looked at

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
INTEGERS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FLOATS = (6, 7)


def open_tokens(file: str, vocab_size: int) -> TokenFile:
    index = pathlib.Path(file).with_suffix(".idx")
    if index.exists():
        return open_megatron(file, str(index))
    header = np.fromfile(file, "<i4", 3)
    magic = int(header[0]) if len(header) == 3 else 0
    if magic == EVALUATION:
        raise damaged(file, "it holds llm.c's questions for an evaluation", "name a file of tokens")
    if magic not in LLMC:
        return open_headless(file, vocab_size)
    if os.path.getsize(file) < HEADER_BYTES:
        raise damaged(file, f"it ends within llm.c's header of {HEADER_BYTES:,} bytes")
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


class Index(NamedTuple):
    """What an index of Megatron's says of its tokens."""

    file: str
    dtype: np.dtype
    sequences: int
    documents: int  # entries of the document index


def open_megatron(file: str, index_file: str) -> TokenFile:
    index = read_header(index_file)
    tokens = map_numbers(file, index.dtype)
    check_sequences(index, file, tokens)
    starts = HEADER.size + 12 * index.sequences
    if index.documents:
        first, last = (np.fromfile(index_file, "<i8", 1, offset=starts + 8 * at)[0] for at in (0, index.documents - 1))
        if first != 0 or last != index.sequences:
            raise damaged(index_file, f"its documents take the sequences {first:,} to {last:,} of {index.sequences:,}")

    def falls(number: int, entry: int):
        return damaged(f"{index_file}, document {number:,}", "it ends before it begins")

    check_ascending(index_file, "<i8", starts, index.documents, falls)
    return TokenFile(tokens, file, f"Megatron's .bin with .idx, {tokens.dtype.name}", lambda: document_ends(index))


def read_header(file: str) -> Index:
    """The index in a file; an error where it is damaged, or of a kind that cannot be trained on."""
    with open(file, "rb") as opened:
        header = opened.read(HEADER.size)
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
    size, wanted = os.path.getsize(file), HEADER.size + 12 * sequences + 8 * documents
    if sequences and size == wanted + sequences:
        fault = "its sequences have modes: it is multimodal, and not all in it is text"
        raise damaged(file, fault, "only an index without mode bytes can be trained on")
    if size != wanted:
        fault = f"{size:,} bytes, where its {sequences:,} sequences and {documents:,} document entries take {wanted:,}"
        raise damaged(file, fault)
    return Index(file, np.dtype(INTEGERS[code]).newbyteorder("<"), sequences, documents)


def check_sequences(index: Index, file: str, tokens: np.ndarray) -> None:
    """An error where the sequences do not lie end to end in the file, from its beginning to its end."""
    place = 0  # in bytes
    for first in range(0, index.sequences, CHUNK):
        count = min(CHUNK, index.sequences - first)
        lengths = np.fromfile(index.file, "<i4", count, offset=HEADER.size + 4 * first).astype(np.int64)
        places = np.fromfile(index.file, "<i8", count, offset=HEADER.size + 4 * index.sequences + 8 * first)
        ends = place + np.cumsum(lengths) * tokens.itemsize
        expected = np.concatenate([[place], ends[:-1]])
        wrong = (lengths < 0) | (places != expected) | (ends > tokens.nbytes)
        if wrong.any():
            at = int(wrong.argmax())
            where = f"{index.file}, sequence {first + at:,}"
            if lengths[at] < 0:
                raise damaged(where, f"its length is {lengths[at]:,} tokens")
            if places[at] != expected[at]:
                problem = f"it begins at byte {places[at]:,}, where the one before ends at {expected[at]:,}"
                raise damaged(where, problem, "write the sequences in their order, end to end")
            fault = f"{lengths[at]:,} tokens from byte {places[at]:,} on are not in {file} of {tokens.nbytes:,} bytes"
            raise damaged(where, fault)
        place = int(ends[-1])
    if place != tokens.nbytes:
        in_index = place // tokens.itemsize
        raise damaged(file, f"it has {len(tokens):,} tokens, its index {index.file} has {in_index:,}")


def document_ends(index: Index) -> np.ndarray:
    """Where each document ends; where the index has no documents, where each sequence does."""
    ends = np.zeros(index.sequences + 1, np.int64)
    np.cumsum(np.fromfile(index.file, "<i4", index.sequences, offset=HEADER.size), dtype=np.int64, out=ends[1:])
    if index.documents < 2:
        return ends[1:]
    return ends[np.fromfile(index.file, "<i8", index.documents, offset=HEADER.size + 12 * index.sequences)[1:]]
