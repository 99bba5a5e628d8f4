"""Scale: what rank 0 of many ranks does at a start, in a step, at a resume and in a save, on a CPU.

    python benchmarks/scale.py --out benchmarks/results/scale.json

It calls the program's own functions in a world whose collectives are stand-ins: every other rank gives what rank 0
gives, pickled. Token ids and masks are one number with a stride of 0, so 10^10 of them take no memory; the ends of
documents are a mapped file. Each row has median seconds; MiB, the peak of what Python and NumPy allocate, without
mapped files; collectives, or requests to the job's store; and the MiB that these bring to this rank.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import pathlib
import pickle
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import running

from harness import base, data, job

RANKS, TOKENS = (8, 256, 1024, 4096), (10**8, 10**9, 10**10)
RANKS_PER_NODE = 8
SEQ_LEN, BATCH, MICROBATCHES = 4096, 4, 4
TOKENS_PER_DOCUMENT = 400  # on average
EVAL_SEQUENCES = 64
LATE = 10**7  # samples that a resumed run has trained on
DEMO = ROOT / "assets" / "demo"
Call = Callable[[], object]


class World:
    """Stand-ins for the collectives of rank 0 of `size`; counts them and what they bring to this rank."""

    def __init__(self, size: int):
        self.size, self.collectives, self.bytes = size, 0, 0

    def count(self, received: int) -> None:
        self.collectives += 1
        self.bytes += received

    def all_gather_object(self, everyone: list, mine: object, group: object = None) -> None:
        pickled = pickle.dumps(mine)
        self.count(len(pickled) * self.size)
        everyone[:] = [pickle.loads(pickled) for _ in range(self.size)]
        if isinstance(mine, tuple) and mine[0] is True:  # `is_main` of broadcast_from_node_main
            everyone[:] = [(rank % RANKS_PER_NODE == 0, *mine[1:]) for rank in range(self.size)]

    def objects(self, objects: list, *args: object, **kwargs: object) -> None:
        self.count(len(pickle.dumps(objects)))

    def tensor(self, tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        self.count(tensor.nbytes)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, *sizes: list[int]) -> None:
        """Only rank 0 has something for itself."""
        own = sizes[1][0] if sizes else 1
        received.zero_()[:own] = sent[:own]
        self.count(received.nbytes)

    def patched(self) -> contextlib.ExitStack:
        names = {"is_initialized": lambda: True, "get_rank": lambda: 0, "get_world_size": lambda group=None: self.size}
        names |= {"all_gather_object": self.all_gather_object}
        names |= dict.fromkeys(("broadcast_object_list", "send_object_list"), self.objects)
        names |= dict.fromkeys(("all_reduce", "broadcast"), self.tensor) | {"all_to_all_single": self.all_to_all}
        stack = contextlib.ExitStack()
        for name, stand_in in names.items():
            stack.enter_context(mock.patch.object(dist, name, stand_in))
        return stack


class Store:
    """The job's store with a beat of each rank; counts its requests."""

    def __init__(self, world: World):
        beat = {"name": "rank 0 (node-0, pid 1)", "beat": 9, "waited": 700.0, "phase": "forward", "step": 100}
        self.world, self.beat = world, json.dumps(beat | {"phase_count": [1, 2], "lasts": 1.0, "progress": ""})

    def check(self, keys: list[str]) -> bool:
        self.world.count(1)
        return True

    def multi_get(self, keys: list[str]) -> list[str]:
        self.world.count(len(self.beat) * len(keys))
        return [self.beat] * len(keys)


def open_tokens(count: int, work: pathlib.Path) -> data.tokens.Tokens:
    """Tokens with a loss mask, in documents of random lengths."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, count // TOKENS_PER_DOCUMENT)
    ends = np.cumsum(np.maximum(2, lengths / lengths.mean() * TOKENS_PER_DOCUMENT).astype(np.int64))
    ends[-1] = max(count, ends[-1])
    ends.tofile(work / f"{count}.ends")
    total, path = int(ends[-1]), str(work / f"{count}.ends")
    ids, mask = np.broadcast_to(np.uint16(5), total), np.broadcast_to(np.uint8(1), total)
    file = data.tokens.MappedTokens(
        ids, cache_key="scale", loss_mask=mask, read_doc_ends=lambda: data.tokens.map_numbers(path, np.int64)
    )
    return data.tokens.Tokens([file], 2**16)


def open_packed(tokens: data.tokens.Tokens, work: pathlib.Path) -> data.packing.WholeDocumentDataset:
    """As `CorpusReader.pack` opens it."""
    folder, record = data.packing.pack_once(tokens, SEQ_LEN, "best-fit", 0, work)
    return data.packing.WholeDocumentDataset(tokens, SEQ_LEN, folder, record, 0, True)


def costs_of_tokens(count: int, work: pathlib.Path) -> Iterator[tuple[str, Call]]:
    tokens = open_tokens(count, work)
    folders = (pathlib.Path(tempfile.mkdtemp(dir=work)) for _ in itertools.count())
    yield "best-fit packing, the first start of a node", lambda: open_packed(tokens, next(folders))
    packed = open_packed(tokens, work)
    yield (
        "best-fit packing, any other rank",
        lambda: data.packing.WholeDocumentDataset(tokens, SEQ_LEN, packed.folder, packed.record, 0, True)[0],
    )
    yield (
        "best-fit packing, a later start of a node",
        lambda: open_packed(data.tokens.Tokens(tokens.files, 2**16, 0), work),
    )
    yield (
        "eval split of a corpus",
        lambda: data.eval_split.take_out_eval_documents(data.tokens.Tokens(tokens.files, 2**16, 0)),
    )
    yield "identity of a corpus", tokens.fingerprint
    order = data.mixture.SequenceOrder(len(packed), 0)
    yield "order of 1,000 samples", lambda: [order.sequence_at(LATE + sample) for sample in range(1000)]


def costs_of_ranks(world: World, work: pathlib.Path) -> Iterator[tuple[str, Call]]:
    packed = open_packed(open_tokens(10**8, work), work)
    settings = SimpleNamespace(batch_size=BATCH, gradient_accumulation_steps=MICROBATCHES)

    def step() -> None:
        samples = data.mix({"a": packed}, {"a": None}, SEQ_LEN, 0)
        batches = data.loader.RankBatches(settings, samples, LATE, {}, 0, world.size).worker_batches(0, 1)
        batches = data.loader.add_loss_divisors(batches, MICROBATCHES)
        for _ in range(MICROBATCHES):
            next(batches)

    yield "a step's data and its count of labels", step
    shards = world.size * BATCH
    weights, tokens_per_sample = {"a": Fraction(7), "b": Fraction(3)}, dict.fromkeys("ab", Fraction(SEQ_LEN))
    segments = [data.mixture.Segment(0, weights, tokens_per_sample)]

    def resume() -> None:
        mixture = data.mixture.Mixture(segments, 0, shards)
        for row in range(BATCH):
            mixture.locate(LATE // shards * shards + row)

    yield "resume of a mixture of streams", resume
    yield (
        "a mixture of streams in a log line",
        lambda: data.mixture.Mixture(segments, 0, shards).counts(LATE, 0, world.size),
    )
    texts = data.files.find_files(str(work / "*.jsonl")).files_in_split("train")
    corpus = data.stream.Stream(
        files=texts,
        encoder=data.tokenize.TextEncoder(AutoTokenizer.from_pretrained(DEMO), 1536),
        fields=("text",),
        seq_len=SEQ_LEN,
        seed=0,
    )
    yield (
        "eval sequences of a stream",
        lambda: corpus.read_eval_sequences(EVAL_SEQUENCES, lambda number: [number // BATCH % world.size]),
    )
    ids = np.tile(np.append(np.full(TOKENS_PER_DOCUMENT - 1, 5, np.uint16), np.uint16(0)), 10**7 // TOKENS_PER_DOCUMENT)
    files = [data.tokens.MappedTokens(ids, identity=["ids", ids.nbytes, ""])]
    reader = data.CorpusReader(
        tokenizer=SimpleNamespace(eos_token_id=0), seq_len=SEQ_LEN, vocab_size=2**16, cache_dir=work
    )
    yield (
        "document boundaries of token files",
        lambda: reader.with_doc_ends(data.tokens.Tokens(files, 2**16, 0)).doc_ends,
    )
    yield "an answer of rank 0 to all", lambda: base.broadcast_from_rank_0(lambda: "x" * 1000)

    def save() -> None:
        gathered = base.all_gather_objects(({"__0_0.distcp": [10**9, "0" * 64]}, ""))
        files = {f"__{rank}_0.distcp": written["__0_0.distcp"] for rank, (written, _) in enumerate(gathered)}
        manifest = {"format": base.FORMAT, "step": 100, "files": files}
        (work / base.MANIFEST).write_text(base.dump_with_checksum(manifest))
        base.read_manifest(work)

    yield "manifest of a checkpoint", save
    watch = job.heartbeats.Heartbeats.__new__(job.heartbeats.Heartbeats)
    watch.world, watch.store, watch.calls = world.size, Store(world), concurrent.futures.ThreadPoolExecutor(1)
    watch.names = [""] * world.size
    yield "heartbeats of all ranks, read at a stall", watch.read


def measure(name: str, call: Call, world: World, repeats: int, **of: int) -> dict:
    """The row of a cost. Its memory is traced in a call of its own, as that takes time."""
    seconds = []
    for _ in range(repeats):
        world.collectives = world.bytes = 0
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    collectives, received = world.collectives, world.bytes / 2**20
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    row = {"cost": name, **of, "seconds": statistics.median(seconds), "mib": peak}
    return row | {"collectives": collectives, "received_mib": received}


def measure_all(ranks: tuple[int, ...], tokens: tuple[int, ...], repeats: int) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        (work / "a.jsonl").write_bytes((DEMO / "stories" / "train.jsonl").read_bytes() * 4)
        for count in tokens:
            for name, call in costs_of_tokens(count, work):
                yield measure(name, call, World(1), repeats, tokens=count)
        for size in ranks:
            world = World(size)
            with world.patched():
                for name, call in costs_of_ranks(world, work):
                    yield measure(name, call, world, repeats, ranks=size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="calls that are timed [3]")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file of results by commit")
    args = parser.parse_args()
    rows = []
    for row in measure_all(RANKS, TOKENS, args.repeats):
        rows.append(row)
        size = f"{row['tokens']:.0e} tokens" if "tokens" in row else f"{row['ranks']:,} ranks"
        figures = f"{row['seconds']:10.4f} s {row['mib']:10.2f} MiB {row['collectives']:6} collectives"
        print(f"{row['cost']:45} {size:15} {figures} {row['received_mib']:10.3f} MiB received", flush=True)
    if args.out:
        machine = running.describe_machine()
        results = json.loads(args.out.read_text()) if args.out.exists() else {}
        results[machine["commit"]] = {"date": running.now(), "machine": machine, "rows": rows}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
