"""Writes the same documents in every form that docs/DATA.md names, by the published layouts."""

import pathlib
import struct

import numpy as np
from conftest import story_texts
from corpora import demo_tokenizer, write_records

MARK = "<|endoftext|>"

# Each writes into an empty folder; `documents` are token ids that end with MARK's, of `texts`.


def text_in(name: str, **options):
    return lambda folder, documents, texts: write_records(folder / name, texts, **options)


def ids_in(name: str, **options):
    return lambda folder, documents, texts: write_records(
        folder / name, [{"input_ids": document.tolist()} for document in documents], **options
    )


def write_text_marked(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    (folder / "a.txt").write_text(MARK.join(texts))


def write_nanogpt(folder: pathlib.Path, documents: list[np.ndarray], texts=()) -> None:
    np.concatenate(documents).astype("<u2").tofile(folder / "train.bin")


def write_llmc(folder: pathlib.Path, documents: list[np.ndarray], texts=(), dtype: str = "uint32") -> None:
    tokens, header = np.concatenate(documents).astype(dtype), np.zeros(256, "<i4")
    header[:3] = {"uint16": 20240520, "uint32": 20240801}[dtype], 7, len(tokens)
    (folder / "stories.bin").write_bytes(header.tobytes() + tokens.tobytes())


def write_npy(folder: pathlib.Path, documents: list[np.ndarray], texts=()) -> None:
    np.save(folder / "a.npy", np.concatenate(documents))


def write_megatron(folder: pathlib.Path, documents: list[np.ndarray], texts=(), dtype: str = "uint16") -> None:
    tokens, lengths = np.concatenate(documents).astype(dtype), [len(document) for document in documents]
    tokens.tofile(folder / "a.bin")
    positions = (np.cumsum(lengths) - lengths) * tokens.itemsize
    write_index(folder / "a.idx", lengths, positions, range(len(documents) + 1), dtype)


def write_index(file: pathlib.Path, lengths, positions, documents, dtype: str = "uint16", version: int = 1) -> None:
    """Megatron's .idx: the length and the position in bytes of each sequence; the sequences that begin documents."""
    code = {"int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(documents))
    arrays = np.array(lengths, "<i4"), np.array(positions, "<i8"), np.array(documents, "<i8")
    file.write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_datatrove(folder: pathlib.Path, documents: list[np.ndarray], texts=(), dtype: str = "uint16") -> None:
    np.concatenate(documents).astype(dtype).tofile(folder / "a.ds")
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(folder / "a.ds.index")


LAYOUTS = {
    "text in .jsonl": text_in("a.jsonl"),
    "text in .jsonl.gz": text_in("a.jsonl.gz"),
    "text in .txt": write_text_marked,
    "text in .parquet": text_in("a.parquet", row_group_size=20),
    "ids in .jsonl": ids_in("a.jsonl"),
    "ids in .parquet": ids_in("a.parquet", row_group_size=20),
    "nanoGPT": write_nanogpt,
    "llm.c, uint32": write_llmc,
    "NumPy .npy": write_npy,
    "Megatron": write_megatron,
    "datatrove": write_datatrove,
}


def read_stories(count: int) -> tuple[list[np.ndarray], list[str]]:
    """(the tokens of each of the demo's first stories with an end-of-text token, uint16; its text)."""
    tokenizer = demo_tokenizer()
    texts = [text.strip("\n") for text in story_texts(0, count)]
    return [np.array([*ids, tokenizer.eos_token_id], np.uint16) for ids in tokenizer(texts)["input_ids"]], texts
