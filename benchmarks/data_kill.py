"""Kills training runs with SIGKILL again and again, goes on with each on another number of ranks, and checks that every
step had the samples that it should: its loss is that of a run that nobody killed, on one rank.

    python benchmarks/data_kill.py --json benchmarks/results/data_kill.json

Each kind of data (see KINDS) is killed in its preparation, at a step, during a save, and right after a checkpoint; on
1, 2 and 4 ranks with other batch sizes and numbers of data workers each time. Exits with 1 where a loss differs by more
than 2e-6 of it, or a step is not there once. The program is run as a user runs it, each rank in a new process.
"""

import argparse
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "assets" / "demo"
STEPS = 60
GLOBAL_BATCH = 8  # sequences of a step, however many ranks and microbatches share them
TOLERANCE = 2e-6  # relative, between numbers of ranks
PATIENCE = 300  # seconds within which a start must come to its next event
MODEL = {
    "model_type": "llama", "vocab_size": 1536, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FLAGS = f"""--sequence-length 32 --num-steps {STEPS} --precision fp32 --log-interval 1 --lr 1e-3 --no-compile
    --lr-scheduler constant --perf-warmup-steps 0 --checkpoint-interval 4 --no-own-plan --resume auto --run-name r"""
MIXED = "web=web:0.5 code=code.jsonl:0.3 books=books.npy:0.2"
KINDS = {
    "plain": "--dataset code.jsonl",
    "best-fit": "--dataset code.jsonl --packing best-fit",
    "mixture": f"--dataset {MIXED}",
    "stages": f"--dataset {MIXED} --mixture-stage 0.3:code=1,books=3 --mixture-stage 0.7:web=1,code=1",
    "stream": "--dataset web --streaming",
    "streamed-mixture": "--dataset web=web:0.5 code=code.jsonl:0.5 --streaming",
}
MOMENTS = ("preparation", "a step", "a save", "after a checkpoint")


def write_corpora(folder: pathlib.Path) -> None:
    """A model and three small corpora, which a run reads more than once: a folder of files, a file, and tokens."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    lines = (DEMO / "stories" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "web").mkdir()
    for number in range(3):
        (folder / "web" / f"{number}.jsonl").write_text("".join(lines[12 * number : 12 * number + 12 - number]))
    (folder / "code.jsonl").write_text("".join(lines[100:110]))
    np.save(folder / "books.npy", np.random.default_rng(7).integers(1, MODEL["vocab_size"], 5000, dtype=np.uint16))


class Start:
    """A start of the program; its ranks run until they end or `kill` is called."""

    def __init__(self, kind: str, ranks: int, batch_size: int, workers: int, corpora: pathlib.Path, run: pathlib.Path):
        self.run, self.output = run, (run / "output.txt").open("a+")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        layout = f"--batch-size {batch_size} --gradient-accumulation-steps {GLOBAL_BATCH // ranks // batch_size}"
        places = f"--model model --tokenizer {DEMO} --output-dir {run} --cache-dir {corpora}/cache"
        words = f"{FLAGS} {KINDS[kind]} {places} {layout} --num-workers {workers}".split()
        job = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        job |= {"OMP_NUM_THREADS": 1, "TOKENIZERS_PARALLELISM": "false"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "train_fsdp.py"), *words],
                env=os.environ | {key: str(value) for key, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
                cwd=corpora,
                stdout=self.output,
                stderr=self.output,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]

    def wait_for(self, condition) -> bool:
        """Whether a condition came true before the run ended."""
        deadline = time.monotonic() + PATIENCE
        while all(rank.poll() is None for rank in self.ranks):
            if condition():
                return True
            if time.monotonic() > deadline:
                self.kill()
                sys.exit(f"{self.run}: nothing happened for {PATIENCE} s")
            time.sleep(0.002)
        return False

    def wait_for_moment(self, moment: str, choose: random.Random) -> bool:
        """Whether a moment of the run came before its end."""
        pause = time.monotonic() + choose.uniform(0, 8)
        before, steps = self.checkpoints(), len(losses_of(self.run)) + choose.randint(1, 8)
        conditions = {
            "preparation": lambda: time.monotonic() > pause,
            "a step": lambda: len(losses_of(self.run)) >= steps,
            "a save": lambda: any((self.run / "r" / "checkpoints").glob(".step-*.writing")),
            "after a checkpoint": lambda: self.checkpoints() - before,
        }
        return self.wait_for(conditions[moment])

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.run / "r" / "checkpoints").glob("step-*")}

    def kill(self) -> None:
        """Kills every process of this start."""
        for rank in self.ranks:
            os.killpg(rank.pid, 9)
        self.wait()

    def wait(self) -> None:
        for rank in self.ranks:
            rank.wait()


def losses_of(run: pathlib.Path) -> list[tuple[int, float]]:
    """(step, loss) of each whole line of a run's metrics."""
    file = run / "r" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return [(entry["step"], entry["loss"]) for entry in entries if not entry.get("final")]


def try_kind(kind: str, kills: int, ranks: list[int], folder: pathlib.Path) -> dict:
    """A run of a kind that is killed so often, beside one that is not."""
    choose, corpora = random.Random(kind), folder / "corpora"
    whole, run = folder / f"{kind}-whole", folder / f"{kind}-killed"
    whole.mkdir()
    run.mkdir()
    Start(kind, 1, GLOBAL_BATCH, 0, corpora, whole).wait()
    done, starts, number = 0, 0, 0
    while True:
        starts += 1
        number = choose.choice([other for other in ranks if other != number] or ranks)
        sizes = [size for size in (1, 2, 4, 8) if GLOBAL_BATCH // number % size == 0]
        start = Start(kind, number, choose.choice(sizes), choose.choice((0, 0, 1, 2)), corpora, run)
        moment = MOMENTS[starts % len(MOMENTS)]
        if done == kills or not start.wait_for_moment(moment, choose):
            break
        start.kill()
        done += 1
        print(f"{kind}: kill {done} on {number} ranks, {moment}, {len(losses_of(run))} steps logged", flush=True)
    start.wait()
    if any(rank.returncode for rank in start.ranks):
        sys.exit(f"{kind}: {(run / 'output.txt').read_text()[-3000:]}")
    losses, expected = losses_of(run), losses_of(whole)
    once = [step for step, _ in losses] == [step for step, _ in expected] == [*range(1, STEPS + 1)]
    worst = max(abs(a / b - 1) for (_, a), (_, b) in zip(losses, expected, strict=False))
    wrong = not once or worst > TOLERANCE
    return {"kills": done, "starts": starts, "every_step_once": once, "loss_differs_by": worst, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind [20]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers that divide 8 [1 2 4]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=pathlib.Path, help="file for the result")
    args = parser.parse_args()
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result: dict = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "steps": STEPS, "kinds": {}}
    with tempfile.TemporaryDirectory() as name:
        write_corpora(pathlib.Path(name) / "corpora")
        for kind in args.kinds:
            result["kinds"][kind] = try_kind(kind, args.kills, args.ranks, pathlib.Path(name))
            print(f"{kind}: {result['kinds'][kind]}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(any(found["wrong"] for found in result["kinds"].values()))


if __name__ == "__main__":
    main()
