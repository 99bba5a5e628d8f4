"""Measures the harness: prints a table and writes one JSON file with machine, versions, commit, flags and every figure.

    python benchmarks/bench.py cpu                    all parts below, benchmarks/results/cpu.json
    python benchmarks/bench.py cpu --only harness     steps per second against the shortest loop (bare_loop.py)
    python benchmarks/bench.py cpu --only packing     packing and reading against `datasets.map` and Python lists

What is compared runs in turn, A B A B ..., in one go on one machine; the table gives medians and the ratios pair by
pair, since absolute times of a shared machine mean little.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import utils  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=["cpu"])
    parser.add_argument("--only", choices=["harness", "packing"], help="one part instead of all")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each side [7]")
    parser.add_argument("--output", type=pathlib.Path, help="[benchmarks/results/SUITE.json]")
    args = parser.parse_args()
    parts = {"harness": measure_harness, "packing": measure_packing}
    output = args.output or ROOT / "benchmarks" / "results" / f"{args.suite}.json"
    results = {"machine": describe_machine(), "command": " ".join(["python", *sys.argv]), "parts": {}}
    if args.only and output.exists():  # a part measured anew leaves the others as they were
        results["parts"] = json.loads(output.read_text())["parts"]
    for name, measure in parts.items():
        if args.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                results["parts"][name] = {"machine": describe_machine()} | measure(pathlib.Path(folder), args.repeats)
            print_table(name, results["parts"][name])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {output}")


def measure_harness(folder: pathlib.Path, repeats: int) -> dict:
    """Steps per second of `train_fsdp.py`, one process, and of the bare loop: same model, data, batch, precision."""
    sequence, warmup, cache = 256, 4, folder / "cache"
    harness = (
        f"{ROOT / 'train_fsdp.py'} --model demo --dataset demo --precision fp32 --sequence-length {sequence} "
        f"--perf-warmup-steps {warmup} --output-dir {folder} --cache-dir {cache}"
    )
    run([*harness.split(), "--num-steps", "1", "--run-name", "fill-the-cache"])
    tokens = next(cache.glob("tokens-*.bin"))
    bare = (
        f"{ROOT / 'benchmarks/bare_loop.py'} --model {ROOT / 'assets/demo'} --tokens {tokens} --warmup-steps {warmup}"
    )
    figures, ratios = {}, {}
    for batch, steps in ((32, 24), (8, 64)):
        size = ["--batch-size", str(batch), "--num-steps", str(steps)]
        ours, theirs = [], []
        for repeat in range(repeats):
            theirs.append(json.loads(run([*bare.split(), *size]))["steps_per_sec"])
            name = f"batch-{batch}-{repeat}"
            run([*harness.split(), *size, "--run-name", name])
            ours.append(json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])["steps_per_sec"])
        figures |= {f"train_fsdp.py, batch {batch}": ours, f"bare loop, batch {batch}": theirs}
        ratios[f"batch {batch}: ours / bare loop"] = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "what": f"optimizer steps per second, demo model, fp32, batch x {sequence} tokens, one process",
        "flags": harness.replace(str(folder), "DIR").replace(str(ROOT) + "/", ""),
        "unit": "steps/s",
        "figures": figures,
        "ratios": ratios,
        "goal": "at least 0.97",
    }


def measure_packing(folder: pathlib.Path, repeats: int) -> dict:
    """Seconds to pack a tokenized corpus into windows of 8,193 tokens and to read each of them as tensors once."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    sequence, vocabulary = 8192, 49152
    generator = np.random.default_rng(0)
    lengths = generator.integers(50, 400, 36_000)
    documents = datasets.Dataset.from_dict(
        {"input_ids": [generator.integers(0, vocabulary, n, dtype=np.int32) for n in lengths]}
    )
    seconds: dict[str, list[float]] = {"pack": [], "map and lists: pack": [], "read": [], "map and lists: read": []}
    kept = {}
    for repeat in range(repeats):
        path = folder / f"tokens-{repeat}.bin"
        start = time.perf_counter()
        utils.pack_tokens(utils.token_batches(documents, None, "benchmark"), path, vocabulary)
        packed = utils.PackedDataset(np.memmap(path, dtype=utils.token_dtype(vocabulary), mode="r"), sequence)
        seconds["pack"].append(time.perf_counter() - start)
        start = time.perf_counter()
        collate = utils.create_collate_fn()
        for index in range(len(packed)):
            collate([packed[index]])
        seconds["read"].append(time.perf_counter() - start)
        kept["train_fsdp.py"] = len(packed) * sequence

        start = time.perf_counter()
        grouped = documents.map(group_tokens, batched=True, fn_kwargs={"length": sequence}, remove_columns="input_ids")
        seconds["map and lists: pack"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for index in range(len(grouped)):
            row = grouped[index]
            {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([row["shift_labels"]])}
        seconds["map and lists: read"].append(time.perf_counter() - start)
        kept["map and lists"] = len(grouped) * sequence
    ratio = lambda part: [a / b for a, b in zip(seconds[f"map and lists: {part}"], seconds[part], strict=True)]  # noqa: E731
    return {
        "what": f"{lengths.sum():,} tokens in {len(lengths):,} documents, windows of {sequence}",
        "unit": "s",
        "figures": seconds,
        "ratios": {"pack: map and lists / ours": ratio("pack"), "read: map and lists / ours": ratio("read")},
        "tokens_kept": kept,
        "goal": "at least 50 and 20",
    }


def group_tokens(batch: dict, length: int) -> dict:
    """The packing of most training scripts: concatenate a map batch's lists, cut them, drop the tail."""
    tokens = [token for ids in batch["input_ids"] for token in ids]
    starts = range(0, (len(tokens) - 1) // length * length, length)
    return {
        "input_ids": [tokens[start : start + length] for start in starts],
        "shift_labels": [tokens[start + 1 : start + length + 1] for start in starts],
    }


def run(command: list[str]) -> str:
    """Standard output of a fresh process of this Python."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench.py: {' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def describe_machine() -> dict:
    cpu = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    processor = next((line for line in cpu if line.startswith("model name")), ":").partition(":")[2]
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "processor": processor.strip() or platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets", "numpy")},
        "commit": commit or None,
        "date": datetime.date.today().isoformat(),
    }


def print_table(name: str, part: dict) -> None:
    print(f"\n{name}: {part['what']}")
    for label, values in part["figures"].items():
        print(f"  {label:32} {spread(values)} {part['unit']}")
    for label, values in part["ratios"].items():
        print(f"  {label:32} {spread(values)}   ({part['goal']})")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):10.4g}  [{min(values):.4g} to {max(values):.4g}]"


if __name__ == "__main__":
    main()
