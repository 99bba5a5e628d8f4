"""launch/datatrove.py on a large corpus: planned, killed twice, taken up, and compared with the tokenizer's own output.

    python benchmarks/tokenize_proof.py --tokens 100e6 --plan-tokens 1e9 --stories STORIES.jsonl --out FILE

The corpus is made of the sentences of the demo's stories, and of those of --stories, in new orders: .jsonl, .jsonl.gz
and .parquet. One start is killed as a whole (SIGKILL), the next loses the process of a task, the third finishes. Then
every document of the corpus is read and tokenized once more, without launch/datatrove.py, harness or datatrove.
"""

import argparse
import gzip
import hashlib
import json
import os
import pathlib
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "assets" / "demo"
FILES = ("a.jsonl", "b.parquet", "c.jsonl.gz", "d.jsonl", "e.jsonl")  # d is as large as all the others together
CHARACTERS_PER_TOKEN = 4.1  # of the demo's tokenizer on stories, to make about as many tokens as asked


def make_stories(sources: list[pathlib.Path], characters: float, seed: int) -> Iterator[str]:
    """Stories of sentences of other stories, until they have so many characters."""
    texts = [json.loads(line)["text"] for source in sources for line in source.open()]
    sentences = [part for text in texts for part in re.split(r"(?<=[.!?])\s+", text) if part]
    rng = random.Random(seed)
    while characters > 0:
        length = min(200, max(1, round(rng.lognormvariate(2.5, 0.8))))  # long documents too, as corpora have
        story = " ".join(rng.choices(sentences, k=length))
        characters -= len(story)
        yield story


def open_text(file: pathlib.Path, mode: str):
    return gzip.open(file, mode, compresslevel=1) if file.suffix == ".gz" else file.open(mode)


def write_file(file: pathlib.Path, stories: Iterator[str]) -> None:
    if file.suffix == ".parquet":
        pq.write_table(pa.table({"text": list(stories)}), file)
        return
    with open_text(file, "wt") as out:
        for story in stories:
            out.write(json.dumps({"text": story}) + "\n")


def read_file(file: pathlib.Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        for batch in pq.ParquetFile(file).iter_batches():
            yield from batch["text"].to_pylist()
        return
    with open_text(file, "rt") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def expected(corpus: pathlib.Path) -> dict:
    """Counts and checksums of what the tokenizer gives for the corpus, in the order of its files."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    documents = tokens = 0
    content, ends = hashlib.sha256(), hashlib.sha256()
    for name in FILES:
        texts = list(read_file(corpus / name))
        for first in range(0, len(texts), 1000):
            for encoding in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False):
                ids = np.array([*encoding.ids, end_of_text], np.uint16)
                documents += 1
                tokens += len(ids)
                content.update(ids)
                ends.update(np.uint64(tokens))
    checksums = {"tokens_sha256": content.hexdigest(), "ends_sha256": ends.hexdigest()}
    return {"documents": documents, "tokens": tokens} | checksums


def found(output: pathlib.Path) -> dict:
    """The same of a folder of .ds files."""
    documents = tokens = 0
    content, ends = hashlib.sha256(), hashlib.sha256()
    for file in sorted(output.glob("*.ds")):
        content.update(file.read_bytes())
        of_file = np.fromfile(f"{file}.index", np.uint64)
        ends.update(of_file + np.uint64(tokens))
        documents += len(of_file)
        tokens += int(of_file[-1])
    checksums = {"tokens_sha256": content.hexdigest(), "ends_sha256": ends.hexdigest()}
    return {"documents": documents, "tokens": tokens} | checksums


def command(corpus: pathlib.Path, output: pathlib.Path, *flags: str) -> list[str]:
    words = [sys.executable, ROOT / "launch" / "datatrove.py", "--dataset", corpus, "--output", output]
    return [*map(str, words), "--tokenizer", "demo", *flags]


def figures(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.replace(",", ""))]


def plan_of(corpus: pathlib.Path, output: pathlib.Path, workers: int) -> dict:
    """What --plan says of a corpus, and how long that took."""
    start = time.monotonic()
    words = command(corpus, output, "--plan", "--workers", str(workers))
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in printed.splitlines()}
    return {
        "bytes": round(figures(lines["corpus"])[1]),
        "tokens": round(figures(lines["estimate"])[0]),
        "tokens_per_sec_per_core": round(figures(lines["rate"])[0]),
        "time": lines["time"].split()[0],
        "line": lines["time"],
        "seconds_to_plan": round(time.monotonic() - start, 1),
    }


class Run:
    """One start of launch/datatrove.py."""

    def __init__(self, corpus: pathlib.Path, output: pathlib.Path, workers: int):
        self.output, self.work = output, output.with_name(f"{output.name}.work")
        self.done_before = self.tasks_done()
        self.start = time.monotonic()
        words = command(corpus, output, "--workers", str(workers))
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def tasks_done(self) -> int:
        return len(list((self.work / "logs" / "completions").glob("*")))

    def wait_for_tasks(self, number: int) -> None:
        """Until so many tasks more are done, and another has written a part of its tokens."""
        while self.tasks_done() < self.done_before + number or not self.half_written():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)

    def half_written(self) -> list[str]:
        return [file.name for file in self.work.glob(".attempts/*/*.ds") if file.stat().st_size > 10**6]

    def end(self, how: str) -> dict:
        out, err = self.process.communicate()
        print(out + err, flush=True)
        return {
            "ended": how,
            "exit_code": self.process.returncode,
            "seconds": round(time.monotonic() - self.start, 1),
            "tasks_done": self.tasks_done() - self.done_before,
            "half_written_files": len(self.half_written()),
            "output_is_there": self.output.exists(),
            "stderr": err.strip(),
        }


def kill_all(run: Run) -> list[int]:
    """SIGKILL to the program alone; those of its processes that are still there a little later."""
    children = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=30)
    return [child.pid for child in alive]


def kill_a_worker(run: Run) -> None:
    """SIGKILL to the process of a task that is half-way."""
    task = min(int(name.split("_")[0]) for name in run.half_written())
    os.kill(int((run.work / "pids" / f"{task:05d}").read_text()), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=100e6, help="of the corpus that is tokenized [100e6]")
    parser.add_argument("--plan-tokens", type=float, default=1e9, help="of the corpus that is planned [1e9]")
    parser.add_argument("--stories", type=pathlib.Path, help="more stories, as .jsonl with `text`")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plan-only", action="store_true", help="the plans alone, into the results that are there")
    parser.add_argument("--folder", type=pathlib.Path, help="for the corpus and the tokens [a temporary one]")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "tokenize.json")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    sources = [DEMO / "stories" / "train.jsonl", *filter(None, [args.stories])]
    try:
        results = prove(args, folder, sources)
    finally:
        shutil.rmtree(folder)
    args.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    assert results["found"] == results["expected"]


def prove(args: argparse.Namespace, folder: pathlib.Path, sources: list[pathlib.Path]) -> dict:
    corpus, output = folder / "corpus", folder / "tokens"
    corpus.mkdir()
    shares = dict(zip(FILES, (0.15, 0.15, 0.1, 0.5, 0.1), strict=True))
    for number, (name, share) in enumerate(shares.items()):
        characters = args.tokens * CHARACTERS_PER_TOKEN * share
        write_file(corpus / name, make_stories(sources, characters, seed=number))
    results = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "note": "the cores are shared, and the processes have the lowest priority: the rates are what was left over",
        "versions": {name: version(name) for name in ("datatrove", "tokenizers", "transformers")},
        "tokenizer": "assets/demo, 1,536 entries",
        "workers": args.workers,
    }
    if args.plan_only:
        results = json.loads(args.out.read_text())
    results["date"] = time.strftime("%Y-%m-%d")
    results.pop("date_source", None)  # of the results before
    if args.plan_tokens:
        results["plan_of_large_corpus"] = plan_large(args, corpus, folder / "large")
    results["plan"] = plan_of(corpus, output, args.workers)
    if args.plan_only:
        results["estimate_over_found"] = round(results["plan"]["tokens"] / results["found"]["tokens"], 4)
        return results
    results["starts"] = []
    tasks = int(re.search(r"([\d,]+) task", results["plan"]["line"])[1].replace(",", ""))

    run = Run(corpus, output, args.workers)
    run.wait_for_tasks(tasks // 3)
    left = kill_all(run)
    results["starts"].append(run.end("SIGKILL to the program") | {"processes_left": len(left)})

    run = Run(corpus, output, args.workers)
    run.wait_for_tasks(tasks // 4)
    kill_a_worker(run)
    results["starts"].append(run.end("SIGKILL to the process of a task"))

    run = Run(corpus, output, args.workers)
    results["starts"].append(run.end("done"))
    seconds = sum(start["seconds"] for start in results["starts"])
    results["found"] = found(output)
    results["tokens_per_sec"] = round(results["found"]["tokens"] / seconds)
    results["estimate_over_found"] = round(results["plan"]["tokens"] / results["found"]["tokens"], 4)
    results["expected"] = expected(corpus)
    return results


def plan_large(args: argparse.Namespace, corpus: pathlib.Path, large: pathlib.Path) -> dict:
    """The plan of a corpus of copies, which is removed again."""
    copies = round(args.plan_tokens / args.tokens)
    for copy in range(copies):
        shutil.copytree(corpus, large / f"part{copy}")
    plan = plan_of(large, large.with_name("large-tokens"), args.workers)
    shutil.rmtree(large)
    return plan


if __name__ == "__main__":
    main()
