"""Tokens per second of one way to prepare data, in a fresh process; prints one JSON object.

    python benchmarks/data_speed.py {pack,read} {ours,map_and_lists}
    python benchmarks/data_speed.py tokenize {ours,map,library}
    python benchmarks/data_speed.py stream {1,64,2x64,1p,64p}
    python benchmarks/data_speed.py batches {single,mixture}

pack: from a tokenized corpus of 8 M tokens to windows of 8,192. read: each window once, as tensors. tokenize: the
demo's stories, four times; `library` calls the tokenizers library and nothing else, 2,000 stories a call. stream: the
demo's stories, 7 times, in one .jsonl file that is read and tokenized on one core, one epoch in windows of 512, as one
stream (1) or divided into 64 (64), by two processes that have 32 streams each (2x64), of a Parquet file (1p, 64p). Its
time is the CPU time of reading, from the first window on; of two processes that of the longer one. batches: the batches
of a rank, 64 M tokens in windows of 2,048, of one source or of the same tokens as three in unequal shares; CPU time.
"""

import collections
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from fractions import Fraction

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import torch
from transformers import AutoTokenizer

from harness.data.batches import RankBatches
from harness.data.documents import TOKENIZE_BATCH, read_documents, token_batches, token_dtype
from harness.data.hub_rows import hub_records
from harness.data.records import DEFAULT_FIELD
from harness.data.streaming import StreamReader, stream_dataset
from harness.data.token_cache import pack_tokens
from harness.data.training_data import mix
from harness.data.windows import PackedDataset, create_collate_fn
from harness.flags import Source

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


def read_streams(dataset, streams: list[int], windows: int, begin, results) -> None:
    """Reads so many windows of all streams together, in their order."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    reader = StreamReader(dataset, {})
    begin.wait()
    start = time.process_time()
    for number in range(windows):
        reader.window(streams[number % len(streams)], number // len(streams))
    results.put(time.process_time() - start)


def time_streams(way: str, folder: str) -> tuple[float, int]:
    """(seconds, tokens) of one epoch."""
    processes = 2 if way.startswith("2x") else 1
    streams = int(way.removeprefix("2x").removesuffix("p"))
    stories = (ROOT / "assets/demo/stories/train.jsonl").read_text().splitlines() * 7
    file = pathlib.Path(folder, "stories.jsonl")
    file.write_text("\n".join(stories))
    if way.endswith("p"):
        table = datasets.load_dataset("json", data_files=str(file), split="train").select_columns("text")
        file = pathlib.Path(folder, "stories.parquet")
        table.to_parquet(str(file))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets/demo")
    dataset = stream_dataset(tokenizer, 512, dataset=str(file))
    windows = 2_000_000 // 512
    begin, results = multiprocessing.Barrier(processes), multiprocessing.Queue()
    divided = dataset.divide(streams)
    readers = []
    for process in range(processes):
        own = list(range(process, streams, processes))
        arguments = (divided, own, windows // processes, begin, results)
        readers.append(multiprocessing.Process(target=read_streams, args=arguments))
    for reader in readers:
        reader.start()
    seconds = max(results.get() for _ in readers)
    for reader in readers:
        reader.join()
    return seconds, windows * 512


def time_batches(way: str, folder: str) -> tuple[float, int]:
    """(seconds, tokens) of the batches of one rank."""
    seq_len, windows = 2048, 2**15
    path = pathlib.Path(folder, "tokens.bin")
    np.random.default_rng(0).integers(0, VOCABULARY, windows * seq_len + 1, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, mode="r")
    weights = {"web": Fraction(7, 10), "code": Fraction(2, 10), "math": Fraction(1, 10)}
    if way == "single":
        weights = {"web": Fraction(1)}
    sources = [Source(name, name, weight) for name, weight in weights.items()]
    parts = np.array_split(np.arange(windows), len(sources))
    packed = {}
    for source, part in zip(sources, parts, strict=True):
        packed[source.name] = PackedDataset(tokens[part[0] * seq_len : (part[-1] + 1) * seq_len + 1], seq_len)
    batches = iter(RankBatches(mix(packed, sources, seq_len, seed=0), batch_size=8))
    next(batches)  # the first permutations
    start = time.process_time()
    for _ in range(windows // 8):
        next(batches)
    return time.process_time() - start, windows * seq_len


def main() -> None:
    task, way = sys.argv[1:]
    if task == "batches":
        with tempfile.TemporaryDirectory() as folder:
            seconds, tokens = time_batches(way, folder)
        print(json.dumps({"tokens_per_sec": tokens / seconds, "tokens": tokens, "seconds": seconds}))
        return
    if task == "stream":
        with tempfile.TemporaryDirectory() as folder:
            seconds, tokens = time_streams(way, folder)
        print(json.dumps({"tokens_per_sec": tokens / seconds, "tokens": tokens, "seconds": seconds}))
        return
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
