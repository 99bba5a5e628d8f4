"""The data wing of this tree beside another one's, on the same files: times and memory as ratios.

    git worktree add /tmp/before COMMIT
    python benchmarks/data_speed.py /tmp/before --json data.json

Every figure is of a fresh process, the trees in turn, and the median of --repeats. Only `utils.get_dataset` and the
command line are used, so the other tree may be of any commit that has them. A ratio is this tree's speed divided by the
other's, from seconds of the call alone (library) or of all CPU time of a run (program); memory is the peak in MiB.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "assets" / "demo"
VOCABULARY = 1536  # of the demo's tokenizer
MODEL = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
RUN = """--num-workers 0 --precision fp32 --no-compile --no-final-checkpoint --perf-warmup-steps 0 --log-interval 1000
    --no-own-plan --sequence-length 64 --batch-size 64 --num-steps 4"""


# ----------------------------------------------------------------------------------------------------------------------
# Files


def write_files(folder: pathlib.Path, scale: float) -> None:
    """All files that are read, at `scale` 1 some 6 GB."""
    import pyarrow
    import pyarrow.parquet

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    stories = (DEMO / "stories" / "train.jsonl").read_text()
    (folder / "stories.jsonl").write_text(stories * max(1, round(4 * scale)))
    (folder / "warm-stories.jsonl").write_text(stories[: stories.index("\n", 100_000)])
    for name, copies in (("stream-1", 16), ("stream-4", 64)):  # to 250 MB
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(max(1, round(copies * scale))):
                file.write(stories)
    generator = np.random.default_rng(0)

    def write_ids(name: str, tokens: int) -> None:
        ids = generator.integers(1, VOCABULARY, tokens // 500 * 500, dtype=np.int16)
        column = pyarrow.ListArray.from_arrays(np.arange(0, len(ids) + 1, 500, dtype=np.int32), ids)
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": column}), folder / f"{name}.parquet")

    write_ids("ids", round(20_000_000 * scale))
    write_ids("warm-ids", 20_000)
    for name in "abcd":  # token caches of a gigabyte each
        write_ids(name, round(500_000_000 * scale))
    for prefix, tokens, documents in (
        ("", round(64_000_000 * scale), round(1_000_000 * scale)),
        ("warm-", 20_000, 100),
    ):
        np.save(folder / f"{prefix}read.npy", generator.integers(1, VOCABULARY, tokens, dtype=np.uint16))
        corpus = folder / f"{prefix}documents"
        corpus.mkdir()
        lengths = generator.integers(1, 1000, documents)
        lengths.cumsum().astype("<u8").tofile(corpus / "a.ds.index")
        make_sparse(corpus / "a.ds", int(lengths.sum()))
    make_sparse(folder / "sparse.bin", round(10_000_000_000 * scale))
    make_sparse(folder / "warm-sparse.bin", 20_000)


def make_sparse(file: pathlib.Path, tokens: int) -> None:
    """A file of so many zeros of two bytes that takes no room."""
    with file.open("wb") as raw:
        raw.truncate(2 * tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Figures of the library: this file runs again in a process of its own, and imports the tree's utils

LIBRARY = {  # the dataset, its sequence length, and what else get_dataset takes
    "tokenizing": ("stories.jsonl", 2048, {}),
    "packing token ids": ("ids.parquet", 2048, {}),
    "reading samples": ("read.npy", 2048, {}),
    "opening ten billion tokens": ("sparse.bin", 8192, {}),
    "best-fit of a million documents": ("documents", 1024, {"packing": "best-fit"}),
}


def measure_in_library(name: str, tree: str, folder: pathlib.Path, cache: str) -> float:
    """Seconds of get_dataset and its first sample, or of reading all samples in a random order."""
    sys.path.insert(0, tree)
    from transformers import AutoTokenizer

    import utils

    dataset, seq_len, options = LIBRARY[name]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    collate = utils.create_collate_fn()

    def read(file: str):
        options_of_file = {"dataset": str(folder / file), "vocab_size": VOCABULARY, "cache_dir": cache}
        windows = utils.get_dataset(tokenizer, seq_len, **options_of_file, **options)
        collate([windows[0]])
        return windows

    read(f"warm-{dataset}")  # imports are no part of the figure
    start = time.perf_counter()
    windows = read(dataset)
    if name == "reading samples":
        order = np.random.default_rng(1).permutation(len(windows))
        start = time.perf_counter()
        for index in order:
            collate([windows[int(index)]])
    return time.perf_counter() - start


def library_seconds(name: str, tree: pathlib.Path, folder: pathlib.Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [sys.executable, __file__, "--measure", name, str(tree), "--folder", str(folder), "--cache", cache]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tree)
    if ended.returncode:
        sys.exit(f"{name}, {tree}: {ended.stderr[-2000:]}")
    return float(ended.stdout.split()[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Figures of the program

FOUR = "a=a.parquet:0.4 b=b.parquet:0.3 c=c.parquet:0.2 d=d.parquet:0.1"
PROGRAM = {  # flags of a run that is not measured and comes first, flags of the one that is
    "start of a mixture of four": (f"--dataset {FOUR}", f"--dataset {FOUR}"),
    "resume of a mixture of four": (
        f"--dataset {FOUR} --final-checkpoint --run-name before",
        f"--dataset {FOUR} --num-steps 5 --resume WORK/before",
    ),
    "a stream": ("", "--dataset stream-1.jsonl --streaming --streams 64 --num-steps 50"),
    "two streams in 1,024 lanes": (
        "",
        "--dataset a=stream-1.jsonl:0.6 b=stream-4.jsonl:0.4 --streaming --streams 1024 --batch-size 1024",
    ),
    "evaluation of a stream": ("", "--dataset stream-1.jsonl --streaming --num-steps 1 --eval-interval 1"),
}
MEMORY = {
    "memory of a stream": ("", "--dataset stream-1.jsonl --streaming --streams 64 --num-steps 20"),
    "memory of a stream of four times the size": (
        "",
        "--dataset stream-4.jsonl --streaming --streams 64 --num-steps 20",
    ),
}


def run_program(tree: pathlib.Path, folder: pathlib.Path, work: pathlib.Path, flags: str) -> tuple[float, float]:
    """(CPU seconds of a run, the peak memory of its largest process in MiB)."""
    where = f"--model model --tokenizer {DEMO} --output-dir {work} --cache-dir {work}/cache --run-name run"
    words = f"{where} {RUN} {flags}".replace("WORK", str(work)).split()
    shutil.rmtree(work / "run", ignore_errors=True)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(tree / "train_fsdp.py"), *words], cwd=folder, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{tree}, {flags}: {output.read()[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


# ----------------------------------------------------------------------------------------------------------------------


def measure(name: str, tree: pathlib.Path, folder: pathlib.Path, work: pathlib.Path) -> float:
    """One figure of a tree: seconds, or MiB."""
    if name in LIBRARY:
        return library_seconds(name, tree, folder)
    first, flags = (PROGRAM | MEMORY)[name]
    if first and not (work / name).exists():
        run_program(tree, folder, work, first)
        (work / name).touch()
    seconds, mebibytes = run_program(tree, folder, work, flags)
    return mebibytes if name in MEMORY else seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*LIBRARY, *PROGRAM, *MEMORY]
    parser.add_argument("other", type=pathlib.Path, help="the root of the other tree")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1, help="of all files; 1 is some 6 GB [1]")
    parser.add_argument("--folder", type=pathlib.Path, help="for the files [a temporary one]")
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    parser.add_argument("--measure", choices=LIBRARY, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure_in_library(args.measure, str(args.other), args.folder, args.cache))
        return
    trees = {"other": args.other.resolve(), "this": ROOT}
    found: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in args.only}
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = pathlib.Path(temporary)
        # by a process of its own: Linux hands the peak memory of this one to each that it starts
        writer = multiprocessing.get_context("spawn").Process(target=write_files, args=(folder, args.scale))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit("the files could not be written")
        for tree in trees:
            (folder / f"work-{tree}").mkdir()
        for name in args.only:
            for _ in range(args.repeats):  # in turn, so that other work on the machine meets both
                for tree, root in trees.items():
                    found[name][tree].append(measure(name, root, folder, folder / f"work-{tree}"))
            other, this = (statistics.median(found[name][tree]) for tree in trees)
            figures = f"{other:8.0f} MiB -> {this:8.0f} MiB" if name in MEMORY else f"{other:8.3f} s -> {this:8.3f} s"
            print(f"{name:45} {figures}   ratio {other / this:.2f}", flush=True)
    if args.json:
        commits = {
            tree: subprocess.run(
                ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
            for tree, root in trees.items()
        }
        machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "date": time.strftime("%Y-%m-%d")}
        result = machine | {"commits": commits, "scale": args.scale, "figures": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
