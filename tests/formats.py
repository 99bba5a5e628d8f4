"""Writes the same documents in every form that docs/DATA.md names, by the published layouts."""

import gzip
import itertools
import json
import pathlib
import struct

import numpy as np
from conftest import ROOT

DEMO = ROOT / "assets" / "demo"
END = "<|endoftext|>"

# Each writes into an empty folder; `documents` are token ids that end with END's, of `texts`.


def write_text_jsonl(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_text_packed(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))


def write_text_marked(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    (folder / "a.txt").write_text(END.join(texts))


def write_text_parquet(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=20)


def write_ids_jsonl(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    lines = (json.dumps({"input_ids": document.tolist()}) + "\n" for document in documents)
    (folder / "a.jsonl").write_text("".join(lines))


def write_ids_parquet(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import pyarrow
    import pyarrow.parquet

    ids = pyarrow.array([document.tolist() for document in documents], pyarrow.list_(pyarrow.int32()))
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": ids}), folder / "a.parquet", row_group_size=20)


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
    places = (np.cumsum(lengths) - lengths) * tokens.itemsize
    write_index(folder / "a.idx", lengths, places, range(len(documents) + 1), dtype)


def write_index(file: pathlib.Path, lengths, places, documents, dtype: str = "uint16", version: int = 1) -> None:
    """Megatron's .idx: of sequences the tokens and the places in bytes; the sequences at which documents begin."""
    code = {"int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(documents))
    arrays = np.array(lengths, "<i4"), np.array(places, "<i8"), np.array(documents, "<i8")
    file.write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_datatrove(folder: pathlib.Path, documents: list[np.ndarray], texts=(), dtype: str = "uint16") -> None:
    np.concatenate(documents).astype(dtype).tofile(folder / "a.ds")
    np.cumsum([len(document) for document in documents]).astype("<u8").tofile(folder / "a.ds.index")


LAYOUTS = {
    "text in .jsonl": write_text_jsonl,
    "text in .jsonl.gz": write_text_packed,
    "text in .txt": write_text_marked,
    "text in .parquet": write_text_parquet,
    "ids in .jsonl": write_ids_jsonl,
    "ids in .parquet": write_ids_parquet,
    "nanoGPT": write_nanogpt,
    "llm.c, uint32": write_llmc,
    "NumPy .npy": write_npy,
    "Megatron": write_megatron,
    "datatrove": write_datatrove,
}


def read_stories(count: int) -> tuple[list[np.ndarray], list[str]]:
    """(the tokens of each of the demo's first stories with an end-of-text token, uint16; its text)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    with (DEMO / "stories" / "train.jsonl").open() as lines:
        texts = [json.loads(line)["text"].strip("\n") for line in itertools.islice(lines, count)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array([*one.ids, tokenizer.token_to_id(END)], np.uint16) for one in encoded], texts
