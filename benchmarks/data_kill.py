"""Kills training runs with SIGKILL again and again, resumes each on another number of ranks, and checks that every step
trained on the samples that it should.

    python benchmarks/data_kill.py --json benchmarks/results/data_kill.json

Each kind of data (see KINDS) is trained once undisturbed on one rank. Then runs of it are killed: in their preparation,
at a step, during a save, right after a checkpoint; on 1, 2 and 4 ranks, and go on each time on another number of them,
with other batch sizes and numbers of data workers. Every rank writes down a checksum of each sample that it hands to
the training step. All samples of all starts must be those of the undisturbed run; in the history that the checkpoints
kept, each step has each of its samples once, and its loss. Exits with 1 if not.

All ranks are forked from this process, which has the imports.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import pathlib
import platform
import random
import signal
import socket
import sys
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import psutil
import torch
import transformers
from forked_rank import become_rank
from transformers.models.llama import modeling_llama  # noqa: F401 - before the fork

import train_fsdp
from harness.base import versions
from harness.flags.parser import parse_args

STEPS = 60  # of a run
GLOBAL_BATCH = 8  # sequences of a step, however many ranks and microbatches share them
SEQ_LEN = 32
CHECKPOINT_INTERVAL = 4
KILLS_OF_A_RUN = 15  # at most; after them it goes on to its end
LOSS_TOLERANCE = 1e-6  # relative, between numbers of ranks
PATIENCE = 120  # seconds within which a start must come to its next event
MODEL = {
    "model_type": "llama", "vocab_size": 1536, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
FLAGS = f"--sequence-length {SEQ_LEN} --num-steps {STEPS} --precision fp32 --log-interval 1 --lr 1e-3 --no-compile \
    --lr-scheduler constant --perf-warmup-steps 0 --resume auto --run-name r"
MIXED = "web=web:0.5 code=code.jsonl:0.3 books=books.npy:0.2"
KINDS = {
    "plain": "--dataset code.jsonl",
    "mixture": f"--dataset {MIXED}",
    "stages": f"--dataset {MIXED} --mixture-stage 0.3:code=1,books=3 --mixture-stage 0.7:web=1,code=1",
    "stream": "--dataset web --streaming",
    "streamed-mixture": "--dataset web=web:0.5 code=code.jsonl:0.5 --streaming",
}
MOMENTS = ("preparation", "a step", "a save", "after a checkpoint")

# ----------------------------------------------------------------------------------------------------------------------
# What is trained on


def write_corpora(folder: pathlib.Path) -> None:
    """A model and three small corpora, which a run reads more than once: a folder of files, a file, and tokens."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    lines = (ROOT / "assets" / "demo" / "stories" / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "web").mkdir()
    for number in range(3):
        (folder / "web" / f"{number}.jsonl").write_text("".join(lines[12 * number : 12 * number + 12 - number]))
    (folder / "code.jsonl").write_text("".join(lines[100:110]))
    np.save(folder / "books.npy", np.random.default_rng(7).integers(1, MODEL["vocab_size"], 5000, dtype=np.uint16))


# ----------------------------------------------------------------------------------------------------------------------
# One start of the program


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks share the global batch."""

    ranks: int
    batch_size: int
    workers: int

    def flags(self) -> str:
        accumulation = GLOBAL_BATCH // self.ranks // self.batch_size
        batch = f"--batch-size {self.batch_size} --gradient-accumulation-steps {accumulation}"
        return f"{batch} --num-workers {self.workers}"


def choose_layout(choose: random.Random, ranks: int) -> Layout:
    sizes = [size for size in (1, 2, 4, 8) if GLOBAL_BATCH // ranks % size == 0]
    return Layout(ranks, choose.choice(sizes), choose.choice((0, 0, 1, 2)))


def record_batches(record: int, layout: Layout) -> None:
    """Lets this rank append a line to the file `record` for each microbatch that the training step takes: the optimizer
    step, its samples by their numbers in the run, and a checksum of each one's inputs and labels."""
    training_batches, rank = train_fsdp.training_batches, int(os.environ.get("RANK", 0))

    def recorded(settings, data, state, device):
        for number, batch in enumerate(training_batches(settings, data, state, device)):
            step, samples = state.step + 1, state.samples
            microbatch = number % settings.gradient_accumulation_steps
            first = samples + (microbatch * layout.ranks + rank) * layout.batch_size
            checksums = []
            for inputs, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
                checksums.append(hashlib.sha256(inputs.tobytes() + labels.tobytes()).hexdigest()[:16])
            os.write(record, (json.dumps([step, first, checksums]) + "\n").encode())
            yield batch

    train_fsdp.training_batches = recorded


def as_rank(rank: int, layout: Layout, port: int, record: int, output: int, argv: list[str]) -> None:
    """The forked process: the program, with its samples written down."""
    become_rank(rank, layout.ranks, port, output)
    record_batches(record, layout)
    versions.commit = lambda: None  # it asks git, the slowest part of a start here
    train_fsdp.main(parse_args(argv))


class Start:
    """A start of the program; its ranks run until they end or `kill` is called."""

    def __init__(self, kind: str, layout: Layout, number: int, run: pathlib.Path, corpora: pathlib.Path, saves: bool):
        self.layout, self.run, self.number = layout, run, number
        self.records = [run / "records" / f"{number:03}-{rank}.jsonl" for rank in range(layout.ranks)]
        self.output = run / "output" / f"{number:03}.txt"
        for file in (*self.records, self.output):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        interval = CHECKPOINT_INTERVAL if saves else 0
        places = f"--model {corpora / 'model'} --tokenizer {ROOT / 'assets' / 'demo'} --output-dir {run} \
            --cache-dir {corpora / 'cache'} --checkpoint-interval {interval}"
        argv = f"{FLAGS} {KINDS[kind]} {places} {layout.flags()}".split()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sys.stdout.flush()
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.began = time.monotonic()
        os.chdir(corpora)
        for rank in range(layout.ranks):
            if pid := os.fork():
                self.pids[rank] = pid
                continue
            record, output = (os.open(file, os.O_WRONLY | os.O_APPEND) for file in (self.records[rank], self.output))
            leave(lambda rank=rank, record=record, output=output: as_rank(rank, layout, port, record, output, argv))

    def poll(self) -> bool:
        """Whether a rank still runs."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def wait_for(self, condition, seconds: float = PATIENCE) -> bool:
        """Whether a condition came true before a rank ended. A failure where neither happens in time."""
        deadline = time.monotonic() + seconds
        while self.poll() and not self.codes:
            if condition():
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no end within {seconds} s:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.002)
        return False

    def sleep(self, seconds: float) -> bool:
        """Whether all ranks still ran after so many seconds."""
        until = time.monotonic() + seconds
        return self.wait_for(lambda: time.monotonic() >= until)

    def steps(self) -> int:
        """How many steps rank 0 has begun."""
        return len({line[0] for line in read_lines(self.records[0])})

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.run / "r" / "checkpoints").glob("step-*")}

    def is_saving(self) -> bool:
        return any((self.run / "r" / "checkpoints").glob(".step-*.writing"))

    def kill(self, first: int | None = None, pause: float = 0) -> None:
        """Kills every process of this start; with `first` that rank alone, and the others after a pause."""
        everyone = {process.pid: process for pid in self.pids.values() for process in tree_of(pid)}
        if first is not None and first not in self.codes:
            os.kill(self.pids[first], signal.SIGKILL)
            time.sleep(pause)
            everyone |= {process.pid: process for pid in self.pids.values() for process in tree_of(pid)}
        for process in everyone.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while self.poll():
            time.sleep(0.002)
        psutil.wait_procs(everyone.values(), timeout=60)


def leave(program) -> None:
    """Calls the program in a forked process and ends that with the program's exit code."""
    code = 70
    try:
        program()
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tree_of(pid: int) -> list[psutil.Process]:
    """A process with all that it started; none where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def read_lines(file: pathlib.Path) -> list:
    """The whole lines of a file of JSON lines."""
    entries = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def kill_once(start: Start, moment: str, choose: random.Random, usual_preparation: float) -> bool:
    """Waits for a moment of a start and kills it; False where the run came to its end before."""
    if moment == "preparation":
        alive = start.sleep(choose.uniform(0, usual_preparation))
    elif moment == "a step":
        steps = choose.randint(1, 2 * CHECKPOINT_INTERVAL)
        alive = start.wait_for(lambda: start.steps() >= steps) and start.sleep(choose.uniform(0, 0.05))
    elif moment == "a save":
        alive = start.wait_for(lambda: start.steps() and start.is_saving()) and start.sleep(choose.uniform(0, 0.02))
    else:
        before = start.checkpoints()
        alive = start.wait_for(lambda: start.checkpoints() - before)
    if not alive:
        return False
    first = choose.choice([None, choose.randrange(start.layout.ranks)])
    start.kill(first, choose.uniform(0, 0.3))
    return True


def run_to_the_end(start: Start) -> None:
    while start.wait_for(lambda: False, seconds=10 * PATIENCE) or start.poll():
        time.sleep(0.01)
    if any(start.codes.values()):
        raise RuntimeError(f"ranks ended with {start.codes}:\n{start.output.read_text()[-3000:]}")


def samples_of(starts: list[Start]) -> list[dict[int, list[tuple[int, str]]]]:
    """Of each start, by step, the (number, checksum) of each sample that any rank trained on."""
    found = []
    for start in starts:
        steps = collections.defaultdict(list)
        for file in start.records:
            for step, first, checksums in read_lines(file):
                steps[step] += enumerate(checksums, first)
        found.append(steps)
    return found


def losses_of(run: pathlib.Path) -> list[tuple[int, float]]:
    lines = read_lines(run / "r" / "metrics.jsonl")
    return [(line["step"], line["loss"]) for line in lines if not line.get("final")]


def compare(reference: list[Start], starts: list[Start]) -> dict:
    """What a run that was killed trained on beside the undisturbed one: samples of the history that was kept that are
    lost or doubled, samples of any start that are other ones, losses that differ, and the largest difference."""
    (whole,), seen = samples_of(reference), samples_of(starts)
    expected = {number: checksum for samples in whole.values() for number, checksum in samples}
    found = dict.fromkeys(("lost", "doubled", "others"), 0)
    for step, samples in whole.items():
        kept = [steps[step] for steps in seen if step in steps][-1:]  # of the last start that took this step
        wanted, got = collections.Counter(samples), collections.Counter(kept[0] if kept else [])
        found["lost"] += (wanted - got).total()
        found["doubled"] += (got - wanted).total()
    for steps in seen:
        for samples in steps.values():
            found["others"] += sum(expected.get(number) != checksum for number, checksum in samples)
    losses, whole_losses = losses_of(starts[-1].run), losses_of(reference[0].run)
    found["steps_differ"] = [step for step, _ in losses] != [step for step, _ in whole_losses]
    found["loss"] = max((abs(a / b - 1) for (_, a), (_, b) in zip(losses, whole_losses, strict=False)), default=1.0)
    return found


def next_ranks(choose: random.Random, left: collections.Counter, now: int | None) -> int:
    """On how many ranks a run goes on: on others than now, where the most kills are left to do."""
    others = [ranks for ranks in left if ranks != now]
    most = max(left[ranks] for ranks in others)
    return choose.choice([ranks for ranks in others if left[ranks] == most])


@dataclasses.dataclass
class Kill:
    kind: str
    ranks: int
    moment: str
    step: int  # that rank 0 had begun
    saving: bool  # whether a checkpoint was left unfinished
    run: int


def kill_a_run(kind, seed, left, corpora, folder, reference, kills) -> dict:
    """Trains once with kills, until none are `left`, and compares; adds to `kills`."""
    choose, run, starts, ranks, preparation = random.Random(f"{kind} {seed}"), folder / f"{kind}-{seed}", [], None, 2.0
    moments = list(MOMENTS)
    of_this_run = 0
    while True:
        ranks = next_ranks(choose, left, ranks)
        layout = choose_layout(choose, ranks)
        start = Start(kind, layout, len(starts), run, corpora, saves=True)
        starts.append(start)
        if of_this_run == KILLS_OF_A_RUN or left[ranks] <= 0:
            run_to_the_end(start)
            break
        if not moments:
            moments = list(MOMENTS)
        moment = moments.pop(choose.randrange(len(moments)))
        if not kill_once(start, moment, choose, preparation):
            run_to_the_end(start)
            break
        of_this_run += 1
        left[ranks] -= 1
        step = max([0, *(line[0] for line in read_lines(start.records[0]))])
        kills.append(Kill(kind, ranks, moment, step, start.is_saving(), seed))
        done = sorted(start.checkpoints())[-1:] or ["none"]
        print(f"{kind} {seed}: {ranks} ranks, {layout.flags()}, {moment}: step {step}, saved {done[0]}", flush=True)
    return compare(reference, starts) | {"kind": kind, "kills": of_this_run, "starts": len(starts)}


def try_kind(kind: str, args: argparse.Namespace, folder: pathlib.Path) -> tuple[list[dict], list[Kill]]:
    """Runs of a kind with so many kills on each number of ranks; (what each run gave, the kills)."""
    corpora, runs, kills = folder / "corpora", [], []
    reference = Start(kind, Layout(1, GLOBAL_BATCH, 0), 0, folder / f"{kind}-whole", corpora, saves=False)
    run_to_the_end(reference)
    left = collections.Counter(dict.fromkeys(args.ranks, args.kills))
    while +left:
        found = kill_a_run(kind, len(runs), left, corpora, folder, [reference], kills)
        runs.append(found)
        print(f"{kind}: run {len(runs)}: {found}", flush=True)
    return runs, kills


# ----------------------------------------------------------------------------------------------------------------------


def is_wrong(run: dict) -> bool:
    broken = run["lost"] or run["doubled"] or run["others"] or run["steps_differ"]
    return bool(broken) or run["loss"] > LOSS_TOLERANCE


def table(result: dict) -> str:
    """A line for each kind of data."""
    lines = [f"{'':18}{'kills on':>18}{'runs':>6}{'lost':>6}{'doubled':>9}{'others':>8}{'loss differs by':>17}"]
    for kind, found in result["kinds"].items():
        ranks = " ".join(f"{count}x{ranks}" for ranks, count in found["kills_on_ranks"].items())
        counts = f"{found['runs']:6}{found['lost']:6}{found['doubled']:9}{found['others']:8}{found['loss']:17.1e}"
        lines.append(f"{kind:18}{ranks:>18}{counts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind on each number of ranks [20]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="at least two numbers that divide 8")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", help="the result; kinds that are in it already and not run again stay")
    args = parser.parse_args()
    file = pathlib.Path(args.json) if args.json else None
    result: dict = json.loads(file.read_text()) if file and file.exists() else {"kinds": {}}
    result |= {"steps": STEPS, "global_batch": GLOBAL_BATCH, "loss_tolerance": LOSS_TOLERANCE}
    result["date"] = time.strftime("%Y-%m-%d")
    result.pop("date_source", None)  # of the results before
    result["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    result["versions"] |= {"transformers": transformers.__version__}
    result["on"] = f"{os.cpu_count()}-core CPU, {platform.system()}"
    gc.collect()
    gc.freeze()  # what the forks share
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_corpora(folder / "corpora")
        for kind in args.kinds:
            began = time.monotonic()
            runs, kills = try_kind(kind, args, folder)
            moments = collections.Counter(kill.moment for kill in kills)
            result["kinds"][kind] = {
                "kills": len(kills),
                "kills_on_ranks": dict(sorted(collections.Counter(kill.ranks for kill in kills).items())),
                "moments": {moment: moments[moment] for moment in MOMENTS},
                "left_a_checkpoint_unfinished": sum(kill.saving for kill in kills),
                "runs": len(runs),
                "starts": sum(run["starts"] for run in runs),
                "lost": sum(run["lost"] for run in runs),
                "doubled": sum(run["doubled"] for run in runs),
                "others": sum(run["others"] for run in runs),
                "every_step_once": not any(run["steps_differ"] for run in runs),
                "loss": max(run["loss"] for run in runs),
                "wrong": any(map(is_wrong, runs)),
                "seconds": round(time.monotonic() - began),
            }
            result["kinds"] = {name: result["kinds"][name] for name in KINDS if name in result["kinds"]}
            if file:
                file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(table(result))
    sys.exit(any(found["wrong"] for found in result["kinds"].values()))


if __name__ == "__main__":
    main()
