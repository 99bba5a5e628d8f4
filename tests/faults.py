"""Makes operations of a run on its files fail, and kills the run before them, one at a time.

An undisturbed run is watched: every open for writing, fsync, mkdir, rename, unlink and rmdir below its output folder is
a point. Then the run is started again with one fault at one of the points (see FAULTS), and once more without any, by
the same command: `wrong_of_the_first` and `wrong_of_the_next` say what must not be.

All ranks are forked from this process, which has the imports.
"""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time

import multirank
import torch
from conftest import free_port
from transformers.models.llama import modeling_llama  # noqa: F401 - before the fork

import train_fsdp
from harness import base
from harness.flags import parse_args

STEPS = 4
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FLAGS = f"--dataset synthetic --sequence-length 16 --num-workers 0 --precision fp32 --log-interval 1 --lr 1e-2 \
    --lr-scheduler constant --no-compile --perf-warmup-steps 0 --resume auto --run-name r --num-steps {STEPS} \
    --checkpoint-interval 2 --no-async-checkpoint"
FAULTS = {
    "kill": "SIGKILL before the operation",
    "power cut": "SIGKILL before it; half of what was not synced is gone from the files, and so are renames",
    "error": "EIO, once",
    "full disk": "ENOSPC from here on for whatever writes",
}
WRITING = ("open", "fsync", "mkdir")  # what a full disk refuses
EVENTS = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "unlink", "os.rmdir": "rmdir"}  # of Python's audit

# ----------------------------------------------------------------------------------------------------------------------
# Faults, inside a rank


@dataclasses.dataclass(frozen=True)
class Point:
    """The `count`-th time that `rank` did `operation` on `path`, which is relative to the output folder."""

    rank: int
    operation: str
    path: str
    count: int


class Watch:
    """Sees every operation of this process on files below `folder`, writes each down as a line of the descriptor
    `log`, and lets `fault` happen at `point`. Installed once, before the run begins."""

    def __init__(self, folder: pathlib.Path, log: int, rank: int, fault: str, point: Point | None):
        self.folder, self.log, self.rank, self.fault, self.point = str(folder), log, rank, fault, point
        self.counts: collections.Counter = collections.Counter()
        self.happened = False
        self.power_is_cut = False
        self.durable: dict[str, int] = {}  # size on the disk of files that may have more, which is not synced
        self.renames: dict[str, tuple[str, bytes | None]] = {}  # unsynced: new name -> old name, what it replaced
        self.fsync, os.fsync = os.fsync, self.sync
        sys.addaudithook(self.audit)

    def inside(self, path, folder: int = -1) -> str | None:
        """The absolute path, if it is below the watched folder; of a path relative to a descriptor too."""
        if folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
        path = os.path.abspath(os.fspath(path))
        return path if isinstance(path, str) and (path + "/").startswith(self.folder + "/") else None

    def audit(self, event: str, arguments: tuple) -> None:
        """Python calls this before the operation."""
        if self.power_is_cut or not isinstance(arguments[0] if arguments else None, str | os.PathLike):
            return
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = self.inside(arguments[0])
            if path:
                self.meet("open", path)
                is_emptied = arguments[2] & os.O_TRUNC or not os.path.exists(path)
                self.durable.setdefault(path, 0 if is_emptied else os.path.getsize(path))
        elif event == "os.rename":
            old, new = self.inside(arguments[0]), self.inside(arguments[1])
            if old and new:
                self.meet("rename", new)
                replaced = pathlib.Path(new)
                self.renames[new] = (old, replaced.read_bytes() if replaced.is_file() else None)
                for name in [name for name in self.durable if (name + "/").startswith(old + "/")]:
                    self.durable[new + name.removeprefix(old)] = self.durable.pop(name)
        elif event in EVENTS:
            path = self.inside(arguments[0], arguments[-1])
            if path:
                self.meet(EVENTS[event], path)

    def sync(self, descriptor: int) -> None:
        """In the place of os.fsync, which has no event."""
        path = self.inside(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path:
            self.meet("fsync", path)
            self.durable.pop(path, None)
            if os.path.isfile(path):
                self.durable[path] = os.path.getsize(path)  # it may be written to again
            for new in [new for new in self.renames if os.path.dirname(new) == path]:
                del self.renames[new]
        self.fsync(descriptor)

    def meet(self, operation: str, path: str) -> None:
        """Writes down an operation that is about to happen, and lets go wrong what is to."""
        name = os.path.relpath(path, self.folder)
        self.counts[operation, name] += 1
        point = Point(self.rank, operation, name, self.counts[operation, name])
        os.write(self.log, (json.dumps(dataclasses.astuple(point)) + "\n").encode())
        is_here = point == self.point
        self.happened |= is_here
        if is_here and self.fault == "power cut":
            self.cut_power()
        if is_here and self.fault in ("kill", "power cut"):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        if is_here and self.fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if self.happened and self.fault == "full disk" and operation in WRITING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def cut_power(self) -> None:
        """What a disk may have forgotten that was not synced."""
        self.power_is_cut = True
        for path, size in self.durable.items():
            with contextlib.suppress(FileNotFoundError):
                os.truncate(path, (size + os.path.getsize(path)) // 2)
        for new, (old, replaced) in reversed(self.renames.items()):
            with contextlib.suppress(FileNotFoundError):  # it has gone since
                os.rename(new, old)
                if replaced is not None:
                    pathlib.Path(new).write_bytes(replaced)


# ----------------------------------------------------------------------------------------------------------------------
# One start of the program


@dataclasses.dataclass
class Start:
    """How the program is started: its flags, on how many ranks, and what happens to it."""

    flags: str = ""
    ranks: int = 1
    fault: str = ""
    point: Point | None = None


@dataclasses.dataclass
class Ending:
    codes: list[int]  # exit code of each rank, or minus the signal
    output: str
    points: list[Point]

    @property
    def code(self) -> int:
        return self.codes[0]

    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("train_fsdp.py: error: ")]


def watched(start: Start, folder: pathlib.Path, log: str) -> None:
    """The program in a forked rank; its points are appended to a file."""
    torch.set_num_threads(1)  # a fork's first call makes a new thread pool: two threads at once can abort (2.11)
    Watch(folder, os.open(log, os.O_WRONLY | os.O_APPEND), int(os.environ["RANK"]), start.fault, start.point)
    base.commit = lambda: None  # it asks git, the slowest part of a start here
    argv = f"{FLAGS} --model {folder.parent / 'model'} --output-dir {folder} {start.flags}"
    train_fsdp.main(parse_args(argv.split()))


def run(start: Start, folder: pathlib.Path, timeout: float = 60) -> Ending:
    """Starts the program with output folder `folder` and waits for its end. As a launcher does, it kills the other
    ranks some time after one has failed."""
    with tempfile.NamedTemporaryFile("r") as log, tempfile.NamedTemporaryFile("r") as output:
        arguments = (start.ranks, free_port(), output.name, watched, (start, folder, log.name))
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=multirank.as_rank, args=(rank, *arguments)) for rank in range(start.ranks)]
        for process in ranks:
            process.start()
        deadline, has_failed = time.monotonic() + timeout, False
        while running := [process for process in ranks if process.exitcode is None]:
            codes = [process.exitcode for process in ranks if process.exitcode]
            if codes and not has_failed:
                has_failed, deadline = True, time.monotonic() + (2 if min(codes) < 0 else 15)
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(0.005)
        points = [Point(*json.loads(line)) for line in log.read().splitlines()]
        return Ending([process.exitcode for process in ranks], output.read(), points)


# ----------------------------------------------------------------------------------------------------------------------
# What must hold


def logged(folder: pathlib.Path) -> list[dict]:
    """The complete lines of the run's metrics.jsonl."""
    file, entries = folder / "r" / "metrics.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def steps_of(folder: pathlib.Path) -> list[list]:
    return [[line[key] for key in KEYS] for line in logged(folder) if "final" not in line]


def is_complete(path: pathlib.Path) -> bool:
    """True if a checkpoint is what its manifest says."""
    try:
        manifest = base.read_manifest(path)
        data = {name: (path / name).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError):
        return False
    found = {name: [len(content), hashlib.sha256(content).hexdigest()] for name, content in data.items()}
    return found == manifest["files"]


def complete(folder: pathlib.Path) -> list[str]:
    """The complete checkpoints by name, oldest first."""
    return sorted(path.name for path in (folder / "r" / "checkpoints").glob("step-*") if is_complete(path))


def wrong_of_the_first(fault: str, before: list[str], folder: pathlib.Path, first: Ending) -> list[str]:
    """What a start with a fault did that it must not."""
    wrong, errors, printed = [], first.errors(), re.findall(r"^failed +\S+", first.output, re.MULTILINE)
    if "Traceback" in first.output:
        wrong.append("a traceback")
    if len(errors) > 1:
        wrong.append(f"{len(errors)} error lines")
    if not complete(folder)[-1:] >= before[-1:]:
        wrong.append(f"the newest complete checkpoint {before[-1:]} is gone, there are {complete(folder)}")
    if -signal.SIGKILL in first.codes:
        if fault in ("error", "full disk"):
            wrong.append("hung")
    elif errors and first.code not in (1, 2):
        wrong.append(f"an error with exit code {first.code}")
    elif printed and not errors and first.code != 1:
        wrong.append(f"a failure was printed and the exit code is {first.code}")
    return wrong


def wrong_of_the_next(reference: list[list], folder: pathlib.Path, second: Ending) -> list[str]:
    """What the next start, without a fault, did that it must not."""
    wrong, lines = [], logged(folder)
    if second.code or second.errors():
        wrong.append(f"the next start ended with {second.codes}")
    if steps_of(folder) != reference:
        wrong.append(f"steps {[step[0] for step in steps_of(folder)]} of metrics.jsonl, or other metrics")
    if [bool(line.get("final")) for line in lines] != [False] * len(reference) + [True]:
        wrong.append("metrics.jsonl does not end with one final line")
    if (folder / "r" / "metrics.jsonl").read_text().count("\n") != len(lines):
        wrong.append("metrics.jsonl has a broken line")
    if complete(folder)[-1:] != [f"step-{len(reference):08d}"]:
        wrong.append(f"no checkpoint of the last step, only {complete(folder)}")
    if left := [path.name for path in (folder / "r").rglob(".*.*ing")]:
        wrong.append(f"left behind: {sorted(left)}")
    return wrong


# ----------------------------------------------------------------------------------------------------------------------
# Enumeration


def leave_debris(run: pathlib.Path) -> None:
    """Of a run that has ended, what a kill during its last save might have left, and a damaged checkpoint."""
    shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / ".step-00000004.writing")
    os.truncate(run / "checkpoints" / "step-00000004" / "__0_0.distcp", 100)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])


def disturb_at_points(start: Start, resumed: bool, folder: pathlib.Path, choose) -> tuple[int, list]:
    """(how many faults were injected, all that was wrong) at the points of a start of a fresh or a resumed run, with
    the faults that `choose` takes of each."""
    template, disturbed = folder / "template", folder / "disturbed"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    undisturbed = run(start, folder / "undisturbed")
    assert not undisturbed.code, undisturbed.output
    reference = steps_of(folder / "undisturbed")
    template.mkdir()
    if resumed:
        run(Start(start.flags + " --keep-checkpoints 2"), template)
        leave_debris(template / "r")
    shutil.copytree(template, folder / "watched")
    points = run(start, folder / "watched").points
    injected, wrong = [(fault, point) for point in points for fault in choose(point)], []
    for fault, point in injected:
        shutil.rmtree(disturbed, ignore_errors=True)
        shutil.copytree(template, disturbed)
        before = complete(disturbed)
        first = run(dataclasses.replace(start, fault=fault, point=point), disturbed)
        found = wrong_of_the_first(fault, before, disturbed, first)
        if point not in first.points:
            found.append("the point was not reached")
        second = run(start, disturbed)
        found += wrong_of_the_next(reference, disturbed, second)
        if found:
            wrong.append([fault, dataclasses.astuple(point), *found, first.output[-3000:], second.output[-3000:]])
    return len(injected), wrong
