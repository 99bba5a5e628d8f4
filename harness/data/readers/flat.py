"""Flat .bin files of tokens: nanoGPT's, uint16 from the first byte on, and llm.c's or modded-nanogpt's, with a header
of 256 int32 before them: a magic number, which tells uint16 from uint32, a version, the number of tokens. They have no
index; beside an .idx a .bin is Megatron's."""

import pathlib

import numpy as np

from harness.data.mapped import Mapping, TokenFile, damaged
from harness.data.records import Field

SUFFIXES = (".bin",)
HAS_FIELDS = False

HEADER_BYTES = 256 * 4
KINDS = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # by llm.c's magic number
EVALUATION = 20240522  # llm.c's files of questions with choices
SAMPLE = 4096  # tokens that are looked at


def open_tokens(file: pathlib.Path, text_field: Field, vocab_size: int) -> TokenFile:
    header = np.fromfile(file, "<i4", 3)
    magic = int(header[0]) if len(header) == 3 else 0
    if magic == EVALUATION:
        raise damaged(file, "it holds llm.c's questions for an evaluation", "name a file of tokens")
    if magic not in KINDS:
        return open_headless(file, vocab_size)
    if file.stat().st_size < HEADER_BYTES:
        raise damaged(file, f"it ends within llm.c's header of {HEADER_BYTES:,} bytes")
    mapping = Mapping(file)
    tokens = mapping.numbers(KINDS[magic], HEADER_BYTES)
    if len(tokens) != header[2]:
        raise damaged(file, f"it has {len(tokens):,} tokens, its header says {header[2]:,}")
    return TokenFile(f"llm.c's .bin with a header, {tokens.dtype.name}", mapping, [tokens])


def open_headless(file: pathlib.Path, vocab_size: int) -> TokenFile:
    """A file as nanoGPT writes it; an error where its tokens seem to have 4 bytes."""
    if not file.stat().st_size:
        raise damaged(file, "it is empty")
    mapping = Mapping(file)
    tokens = mapping.numbers("<u2")
    start = tokens[:SAMPLE]
    largest_high_half = (vocab_size - 1) >> 16
    if len(start) >= 4 and start[::2].any() and (start[1::2] <= largest_high_half).all():
        advice = f"save them as .npy: np.save('{file.stem}.npy', np.memmap('{file.name}', np.uint32, 'r'))"
        raise damaged(file, "a .bin without header has 2 bytes a token, and these seem to have 4", advice)
    return TokenFile("nanoGPT's flat .bin without header, uint16", mapping, [tokens])
