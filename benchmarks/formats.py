"""The same documents in every form that docs/DATA.md names: the same losses from all of them, or exit code 1.

    python benchmarks/formats.py --json benchmarks/results/formats.json

Each row trains the demo model on its own folder through the command line. The files are written by the published
layouts, and, where the packages are installed, by the tools themselves:

    pip install --no-deps megatron-core==0.16.1 datatrove==0.10.1 loguru humanize
"""

import argparse
import gzip
import importlib.metadata
import itertools
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "assets" / "demo"
END = "<|endoftext|>"

# ----------------------------------------------------------------------------------------------------------------------
# By the published layouts. Each writes into an empty folder; `documents` are token ids that end with END's, of `texts`


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


# ----------------------------------------------------------------------------------------------------------------------
# By the tools themselves


def write_by_megatron(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "stories_text_document.bin"), dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document.astype(np.int64)), [len(document)])
    builder.finalize(str(folder / "stories_text_document.idx"))


def write_by_datatrove(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(str(folder), str(DEMO / "tokenizer.json"), eos_token=END, shuffle_documents=False)
    step.run((Document(text=text, id=str(number)) for number, text in enumerate(texts)), 0, 1)


def write_by_datatrove_megatron(folder: pathlib.Path, documents: list[np.ndarray], texts: list[str]) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    tokenizer = str(DEMO / "tokenizer.json")
    step = MegatronDocumentTokenizer(output_folder=str(folder), tokenizer_name_or_path=tokenizer, eos_token=END)
    step.run((Document(text=text, id=str(number)) for number, text in enumerate(texts)), 0, 1)


TOOLS = {
    "megatron-core's IndexedDatasetBuilder": ("megatron", write_by_megatron),
    "datatrove's DocumentTokenizer": ("datatrove", write_by_datatrove),
    "datatrove's MegatronDocumentTokenizer": ("datatrove", write_by_datatrove_megatron),
}


# ----------------------------------------------------------------------------------------------------------------------
# Training on them


def read_stories(count: int) -> tuple[list[np.ndarray], list[str]]:
    """(the tokens of each of the demo's first stories with an end-of-text token, uint16; its text)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    with (DEMO / "stories" / "train.jsonl").open() as lines:
        texts = [json.loads(line)["text"].strip("\n") for line in itertools.islice(lines, count)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array([*one.ids, tokenizer.token_to_id(END)], np.uint16) for one in encoded], texts


def train(folder: pathlib.Path, source: pathlib.Path, steps: int) -> list[float]:
    """The losses of a run on a folder, and its held-out loss."""
    flags = f"--demo --sequence-length 128 --batch-size 4 --num-steps {steps} --log-interval 1 --precision fp32"
    flags += f" --eval-interval {steps} --sample-tokens 2 --no-final-checkpoint --perf-warmup-steps 1 --no-compile"
    where = ["--output-dir", folder, "--run-name", f"run-of-{source.name}", "--cache-dir", folder / "cache"]
    command = [sys.executable, ROOT / "train_fsdp.py", *flags.split(), "--dataset", source, *where]
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{source.name}: {ended.stderr[-2000:]}")
    lines = map(json.loads, (folder / f"run-of-{source.name}" / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if not line.get("final") for key in ("loss", "eval_loss") if key in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000, help="stories of each folder [2000]")
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    args = parser.parse_args()
    documents, texts = read_stories(args.documents)
    rows, expected = {}, None
    writers = LAYOUTS | {name: write for name, (package, write) in TOOLS.items() if find_spec(package)}
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, write) in enumerate(writers.items()):
            source = pathlib.Path(temporary) / f"corpus-{number}"
            source.mkdir()
            write(source, documents, texts)
            losses = train(pathlib.Path(temporary), source, args.num_steps)
            expected = expected or losses
            rows[name] = {"same": losses == expected, "last_loss": losses[-2], "held_out_loss": losses[-1]}
            print(f"{name:40} {'the same' if losses == expected else 'DIFFERS'}  {losses[-2]!r}", flush=True)
    for name in TOOLS.keys() - writers.keys():
        print(f"{name:40} not installed")
    if args.json:
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pyarrow", "tokenizers")}
        result = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "versions": versions, "formats": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(row["same"] for row in rows.values()) else 1)


if __name__ == "__main__":
    main()
