"""Tokens per second of one way to prepare data, in a fresh process; prints one JSON object.

    python benchmarks/data_speed.py {pack,read} {ours,map_and_lists}
    python benchmarks/data_speed.py tokenize {ours,map,library}

pack: from a tokenized corpus of 8 M tokens to windows of 8,192. read: each window once, as tensors. tokenize: the
demo's stories, four times; `library` calls the tokenizers library and nothing else, 2,000 stories a call.
"""

import collections
import json
import os
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import torch
from transformers import AutoTokenizer

from harness.data.documents import TOKENIZE_BATCH, read_documents, token_batches, token_dtype
from harness.data.hub_rows import hub_records
from harness.data.records import DEFAULT_FIELD
from harness.data.token_cache import pack_tokens
from harness.data.windows import PackedDataset, create_collate_fn

SEQUENCE, VOCABULARY = 8192, 49152
os.environ["TOKENIZERS_PARALLELISM"] = "true"
datasets.disable_progress_bars()
datasets.disable_caching()


def read(documents):
    """The documents of a `datasets.Dataset` as the program reads those of the hub."""
    counts = collections.Counter()
    records = hub_records(documents, "benchmark", DEFAULT_FIELD, counts, batched=True)
    return read_documents(records, "benchmark", False, counts)


def pack_ours(documents, folder: str) -> PackedDataset:
    path = pathlib.Path(folder, "tokens.bin")
    pack_tokens(token_batches(read(documents), None), path, VOCABULARY)
    return PackedDataset(np.memmap(path, dtype=token_dtype(VOCABULARY), mode="r"), SEQUENCE)


def group_tokens(batch: dict) -> dict:
    """The packing of most training scripts: concatenate a map batch's lists, cut them, drop the tail."""
    tokens = [token for ids in batch["input_ids"] for token in ids]
    starts = range(0, (len(tokens) - 1) // SEQUENCE * SEQUENCE, SEQUENCE)
    return {
        "input_ids": [tokens[start : start + SEQUENCE] for start in starts],
        "shift_labels": [tokens[start + 1 : start + SEQUENCE + 1] for start in starts],
    }


def pack_map_and_lists(documents, folder: str):
    return documents.map(group_tokens, batched=True, remove_columns="input_ids")


def read_ours(packed: PackedDataset) -> None:
    collate = create_collate_fn()
    for index in range(len(packed)):
        collate([packed[index]])


def read_map_and_lists(grouped) -> None:
    for index in range(len(grouped)):
        row = grouped[index]
        {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([row["shift_labels"]])}


def tokenize_ours(stories, tokenizer) -> int:
    with tempfile.TemporaryDirectory() as folder:
        batches = token_batches(read(stories), tokenizer)
        return pack_tokens(batches, pathlib.Path(folder, "tokens.bin"), len(tokenizer))


def tokenize_map(stories, tokenizer) -> int:
    end = [tokenizer.eos_token_id]
    encode = lambda batch: {"input_ids": [ids + end for ids in tokenizer(batch["text"])["input_ids"]]}  # noqa: E731
    return sum(map(len, stories.map(encode, batched=True, remove_columns="text")["input_ids"]))


def tokenize_library(texts: list[str], tokenizer) -> int:
    encode, total = tokenizer.backend_tokenizer.encode_batch_fast, len(texts)
    for start in range(0, len(texts), TOKENIZE_BATCH):
        encodings = encode(texts[start : start + TOKENIZE_BATCH], add_special_tokens=False)
        total += sum(map(len, encodings))
    return total


def main() -> None:
    task, way = sys.argv[1:]
    call = globals()[f"{task}_{way}"]
    with tempfile.TemporaryDirectory() as folder:
        if task == "tokenize":
            file = str(ROOT / "assets/demo/stories/train.jsonl")
            stories = datasets.load_dataset("json", data_files=file, split="train").select_columns("text")
            stories = datasets.concatenate_datasets([stories] * 4)
            tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/demo")
            inputs = (stories["text"][:] if way == "library" else stories, tokenizer)
        else:
            generator = np.random.default_rng(0)
            lengths = generator.integers(50, 400, 36_000)
            ids = [generator.integers(0, VOCABULARY, n, dtype=np.int32) for n in lengths]
            inputs = (datasets.Dataset.from_dict({"input_ids": ids}), folder)
            if task == "read":
                inputs = (globals()[f"pack_{way}"](*inputs),)
        start = time.perf_counter()
        result = call(*inputs)
        seconds = time.perf_counter() - start
        made = inputs[0] if task == "read" else result
        tokens = made if isinstance(made, int) else len(made) * SEQUENCE
    print(json.dumps({"tokens_per_sec": tokens / seconds, "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
