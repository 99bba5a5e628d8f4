"""Makes operations of a run on its files fail, and kills the run before and after them, one at a time.

An undisturbed run is watched: every open, write, truncate, fsync, close, mkdir, rename, unlink and rmdir below its
output folder is a point. Then for each point the run is started again with one fault there (see FAULTS), and once more
without any, by the same command: `wrong_of_the_first` and `wrong_of_the_next` say what must not be.

All ranks are forked from this process, which has the imports. Points are Python's own file operations; an audit hook
finds those that went past the watch.
"""

import builtins
import collections
import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from transformers.models.llama import modeling_llama  # noqa: F401 - before the fork

import train_fsdp
from harness import base, job
from harness.flags import parse_args
from harness.state import TrainState

STEPS = 4
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
MODEL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FLAGS = "--dataset synthetic --sequence-length 16 --num-workers 0 --precision fp32 --log-interval 1 --lr 1e-2 \
    --lr-scheduler constant --no-compile --perf-warmup-steps 0 --resume auto --run-name r"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
WRITING = ("open w", "write", "truncate", "fsync", "mkdir")  # what a full disk refuses
FAULTS = {
    "kill before": "SIGKILL before the operation",
    "kill after": "SIGKILL after it",
    "torn": "half of what is written, then SIGKILL",
    "power cut": "SIGKILL after it; what was not synced is gone from the files, names stay",
    "power cut, names": "SIGKILL after it; what was not synced is gone, and so are renames",
    "error": "EIO, once",
    "full disk": "ENOSPC from here on for whatever writes",
    "disk gone": "EIO from here on for everything",
}

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

    def __init__(self, folder: pathlib.Path, log: int, rank: int, fault: str, point: "Point | int | None"):
        self.folder, self.log, self.rank, self.fault, self.point = str(folder), log, rank, fault, point
        self.counts: collections.Counter = collections.Counter()
        self.local = threading.local()  # .seen: this thread's operation is written down already
        self.happened = False
        self.durable: dict[str, int] = {}  # size on the disk of files whose last writes are not synced
        self.renames: dict[str, tuple[str, bytes | None]] = {}  # unsynced: new name -> old name, what it replaced
        self.install()

    def inside(self, path, folder: int | None = None) -> str | None:
        """The absolute path, if it is below the watched folder."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
        path = os.path.abspath(os.fspath(path))
        return path if isinstance(path, str) and (path + "/").startswith(self.folder + "/") else None

    def perform(self, operation: str, path: str, work, torn=lambda: None):
        """Does `work`, with what goes wrong before, instead or after. `torn` does half of it."""
        name = os.path.relpath(path, self.folder)
        self.counts[operation, name] += 1
        point = Point(self.rank, operation, name, self.counts[operation, name])
        here = self.point in (point, self.counts.total())
        os.write(self.log, (json.dumps(dataclasses.astuple(point)) + "\n").encode())
        self.happened |= here
        if here and self.fault == "kill before":
            self.kill()
        if here and self.fault == "torn":
            torn()
            self.kill()
        if self.fault == "slow disk" and operation in WRITING:
            time.sleep(0.01)
        if self.happened and self.fault == "full disk" and operation in WRITING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if (here and self.fault == "error") or (self.happened and self.fault == "disk gone"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        try:
            return self.unseen(work)
        finally:
            if here and self.fault.startswith("power cut"):
                self.cut_power()
            if here and self.fault in ("kill after", "power cut", "power cut, names"):
                self.kill()

    def unseen(self, work):
        """Does `work`, which the audit hook need not report."""
        before, self.local.seen = getattr(self.local, "seen", False), True
        try:
            return work()
        finally:
            self.local.seen = before

    def audit(self, event: str, arguments: tuple) -> None:
        """Writes down, as rank -1, what changes a file below the folder and was not seen."""
        names = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
        if event in names or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
            path = arguments[0]
            if not getattr(self.local, "seen", False) and isinstance(path, str | os.PathLike) and self.inside(path):
                os.write(self.log, (json.dumps([-1, event, str(path), 1]) + "\n").encode())

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def cut_power(self) -> None:
        """What a disk may have forgotten that was not synced."""
        for path, size in self.durable.items():
            with contextlib.suppress(FileNotFoundError):
                self.truncate(path, size)
        for new, (old, replaced) in reversed(self.renames.items()) if self.fault == "power cut, names" else ():
            with contextlib.suppress(FileNotFoundError):  # it has gone since
                self.rename(new, old)
                if replaced is not None:
                    pathlib.Path(new).write_bytes(replaced)

    def install(self) -> None:
        watch = self
        self.truncate, self.rename, open_, fsync = os.truncate, os.rename, io.open, os.fsync

        class Raw(io.FileIO):
            def write(self, data):
                path = watch.inside(self.fileno())

                def work():
                    watch.durable.setdefault(path, os.fstat(self.fileno()).st_size)
                    return io.FileIO.write(self, data)

                half = len(memoryview(data).cast("B")) // 2
                return watch.perform("write", path, work, lambda: io.FileIO.write(self, memoryview(data)[:half]))

            def close(self):
                if not self.closed:
                    path = watch.inside(self.fileno())
                    io.FileIO.close(self)
                    watch.perform("close", path, lambda: None)

        def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *more, **options):
            plain = lambda: open_(file, mode, buffering, encoding, errors, newline, *more, **options)  # noqa: E731
            path = None if isinstance(file, int) else watch.inside(file)
            if path is None:
                return plain()
            if options.get("opener"):  # which calls os.open
                return watch.unseen(plain)
            kind = mode.replace("b", "").replace("t", "")
            if kind == "r":
                return watch.perform("open r", path, plain)
            if kind not in "wxa" or more or options:
                raise NotImplementedError(f"open({file}, {mode})")

            def work():
                if kind == "w":
                    watch.durable[path] = 0
                return io.BufferedWriter(Raw(path, kind)) if buffering else Raw(path, kind)

            buffer = watch.perform("open w", path, work)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        def sync(descriptor):
            path = watch.inside(descriptor)
            if path is None:
                return fsync(descriptor)

            def work():
                fsync(descriptor)
                watch.durable.pop(path, None)
                for new in [new for new in watch.renames if os.path.dirname(new) == path]:
                    del watch.renames[new]

            return watch.perform("fsync", path, work)

        def renaming(original):
            def move(source, target, **options):
                old, new = watch.inside(source), watch.inside(target)
                if old is None:
                    return original(source, target, **options)

                def work():
                    replaced = pathlib.Path(new)
                    before = replaced.read_bytes() if replaced.is_file() else None
                    original(source, target, **options)
                    watch.renames[new] = (old, before)
                    for name in [name for name in watch.durable if (name + "/").startswith(old + "/")]:
                        watch.durable[new + name.removeprefix(old)] = watch.durable.pop(name)

                return watch.perform("rename", new, work)

            return move

        def around(original, operation):
            def call(path, *args, dir_fd=None, **options):
                where = watch.inside(path, dir_fd)
                options |= {} if dir_fd is None else {"dir_fd": dir_fd}
                plain = lambda: original(path, *args, **options)  # noqa: E731
                name = operation if isinstance(operation, str) else operation(*args)
                return plain() if where is None else watch.perform(name, where, plain)

            return call

        builtins.open = io.open = open_file
        os.fsync, os.rename, os.replace = sync, renaming(os.rename), renaming(os.replace)
        os.open = around(os.open, lambda flags, *_: "open w" if flags & WRITES else "open r")
        os.pwrite, os.ftruncate = around(os.pwrite, "write"), around(os.ftruncate, "truncate")
        for name in ("mkdir", "unlink", "remove", "rmdir"):
            setattr(os, name, around(getattr(os, name), name.replace("remove", "unlink")))
        sys.addaudithook(self.audit)


# ----------------------------------------------------------------------------------------------------------------------
# One start of the program


@dataclasses.dataclass
class Start:
    """How the program is started: its flags, on how many ranks, and what happens to it."""

    flags: str = ""
    ranks: int = 1
    stop: tuple[int, str] | None = None  # (step, signal's name) of rank 0
    fault: str = ""
    point: Point | int | None = None  # a number counts the operations of each rank


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


def become_rank(rank: int, ranks: int, port: int, output: int) -> None:
    """Makes a forked process a rank: one thread, what is printed into the descriptor `output`, and of several ranks
    the environment of torchrun."""
    torch.set_num_threads(1)  # a fork's first call makes a new thread pool: two threads at once can abort (2.11)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    warnings.filterwarnings("ignore")
    if ranks > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}


def as_rank(rank: int, start: Start, port: int, folder: pathlib.Path, log: int, output: int) -> None:
    """The forked process: the program, watched."""
    become_rank(rank, start.ranks, port, output)
    Watch(folder, log, rank, start.fault, start.point)
    if start.stop and rank == 0:
        step, name = start.stop
        advance = TrainState.advance

        def counted(state, *args):
            tokens = advance(state, *args)
            if state.step == step:
                os.kill(os.getpid(), getattr(signal, name))
                while not job.LISTENING[0].name:  # until the thread that listens has it
                    time.sleep(0.01)
            return tokens

        TrainState.advance = counted
    base.commit = lambda: None  # it asks git, the slowest part of a start here
    argv = f"{FLAGS} --model {folder.parent / 'model'} --output-dir {folder} {start.flags}"
    train_fsdp.main(parse_args(argv.split()))


def run(start: Start, folder: pathlib.Path, timeout: float = 60) -> Ending:
    """Starts the program with output folder `folder` and waits for its end. As a launcher does, it kills the other
    ranks some time after one was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as output:
        for file in (log, output):
            os.set_inheritable(file.fileno(), True)
        append = [os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_APPEND) for file in (log, output)]
        sys.stdout.flush()
        sys.stderr.flush()
        pids, codes, deadline = [], {}, time.monotonic() + timeout
        for rank in range(start.ranks):
            if pid := os.fork():
                pids.append(pid)
                continue
            code = 70
            try:
                as_rank(rank, start, port, folder, *append)
                code = 0
            except SystemExit as left:
                code = left.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        while len(codes) < len(pids):
            for rank, pid in enumerate(pids):
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
                    if codes[rank] not in (0, 143):
                        deadline = min(deadline, time.monotonic() + (2 if codes[rank] < 0 else 15))
            if time.monotonic() > deadline:
                for rank, pid in enumerate(pids):
                    if rank not in codes:
                        os.kill(pid, signal.SIGKILL)
                deadline += timeout
            time.sleep(0.005)
        for descriptor in append:
            os.close(descriptor)
        log.seek(0)
        output.seek(0)
        points = [Point(*json.loads(line)) for line in log.read().splitlines()]
        return Ending([codes[rank] for rank in range(len(pids))], output.read().decode(), points)


# ----------------------------------------------------------------------------------------------------------------------
# What must hold


def logged(folder: pathlib.Path) -> list[dict]:
    """The whole lines of the run's metrics.jsonl."""
    file, entries = folder / "r" / "metrics.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def steps_of(folder: pathlib.Path) -> list[list]:
    return [[line[key] for key in KEYS] for line in logged(folder) if "final" not in line]


def is_whole(path: pathlib.Path) -> bool:
    """Whether a checkpoint is what its manifest says."""
    try:
        manifest = base.read_manifest(path)
        data = {name: (path / name).read_bytes() for name in manifest["files"]}
    except (OSError, ValueError):
        return False
    found = {name: [len(content), hashlib.sha256(content).hexdigest()] for name, content in data.items()}
    return found == manifest["files"]


def whole(folder: pathlib.Path) -> list[str]:
    """The complete checkpoints by name, oldest first."""
    return sorted(path.name for path in (folder / "r" / "checkpoints").glob("step-*") if is_whole(path))


def wrong_of_the_first(fault: str, before: list[str], folder: pathlib.Path, first: Ending) -> list[str]:
    """What a start with a fault did that it must not."""
    wrong, errors, said = [], first.errors(), re.findall(r"^failed +\S+", first.output, re.MULTILINE)
    if "Traceback" in first.output or 70 in first.codes:
        wrong.append("a traceback")
    if len(errors) > 1:
        wrong.append(f"{len(errors)} error lines")
    if not whole(folder)[-1:] >= before[-1:]:
        wrong.append(f"the newest complete checkpoint {before[-1:]} is gone, there are {whole(folder)}")
    if -signal.SIGKILL in first.codes:
        if fault in ("error", "full disk", "disk gone"):
            wrong.append("hung")
    elif errors and first.code not in (1, 2):
        wrong.append(f"an error with exit code {first.code}")
    elif said and not errors and first.code != 1:
        wrong.append(f"a failure was said and the exit code is {first.code}")
    return wrong


def wrong_of_the_next(reference: list[list], folder: pathlib.Path, second: Ending) -> list[str]:
    """What of the next start without a fault must not be; it may refuse in one line."""
    if "Traceback" in second.output or 70 in second.codes:
        return ["a traceback of the next start"]
    if second.code in (1, 2) and len(second.errors()) == 1:
        return []
    wrong, lines = [], logged(folder)
    if second.code:
        wrong.append(f"the next start ended with {second.codes}")
    if steps_of(folder) != reference:
        wrong.append(f"steps {[step[0] for step in steps_of(folder)]} of metrics.jsonl, or other figures")
    if [bool(line.get("final")) for line in lines] != [False] * len(reference) + [True]:
        wrong.append("metrics.jsonl does not end with one final line")
    if (folder / "r" / "metrics.jsonl").read_text().count("\n") != len(lines):
        wrong.append("metrics.jsonl has a line that is none")
    if whole(folder)[-1:] != [f"step-{len(reference):08d}"]:
        wrong.append(f"no checkpoint of the last step, only {whole(folder)}")
    if left := [path.name for place in (folder / "r", folder / "r" / "checkpoints") for path in place.glob(".*.*ing")]:
        wrong.append(f"left behind: {sorted(left)}")
    return wrong


# ----------------------------------------------------------------------------------------------------------------------
# Enumeration

SAVES = f"--batch-size 4 --num-steps {STEPS} --checkpoint-interval 2 --keep-checkpoints 1 --no-async-checkpoint"


def leave_debris(run: pathlib.Path) -> None:
    """Of a run that has ended, what a kill during its last save might have left, and a damaged checkpoint."""
    shutil.copytree(run / "checkpoints" / "step-00000004", run / "checkpoints" / ".step-00000004.writing")
    os.truncate(run / "checkpoints" / "step-00000004" / "__0_0.distcp", 100)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])


# name: (starts that come before, what is then done to the run's folder, the start that is disturbed)
SCENARIOS = {
    "a fresh run": ([], None, Start(SAVES)),
    "a resumed run": ([Start(SAVES + " --keep-checkpoints 2")], leave_debris, Start(SAVES)),
    "2 ranks": ([], None, Start(SAVES + " --batch-size 2", ranks=2)),
}


def make_template(name: str, folder: pathlib.Path) -> tuple[Start, list[list], list[Point]]:
    """Prepares a scenario in folder/template; returns its start, the reference's steps, and its points."""
    before, change, start = SCENARIOS[name]
    template, undisturbed = folder / "template", folder / "undisturbed"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    ending = run(Start(start.flags, start.ranks), undisturbed)
    if ending.code:
        sys.exit(f"the undisturbed run of {name} failed:\n{ending.output}")
    reference = steps_of(undisturbed)
    template.mkdir()
    for earlier in before:
        run(earlier, template)
    if change:
        change(template / "r")
    shutil.copytree(template, folder / "watched")
    return start, reference, run(start, folder / "watched").points


def disturb(folder: pathlib.Path, start: Start, reference: list[list], fault: str, point: Point) -> list[str]:
    """What was wrong in one start with a fault, and one without."""
    run_folder = folder / "disturbed"
    shutil.rmtree(run_folder, ignore_errors=True)
    shutil.copytree(folder / "template", run_folder)
    before = whole(run_folder)
    first = run(dataclasses.replace(start, fault=fault, point=point), run_folder)
    wrong = wrong_of_the_first(fault, before, run_folder, first)
    if point not in first.points:
        wrong.append("the point was not reached")
    second = run(Start(start.flags, start.ranks), run_folder)
    wrong += wrong_of_the_next(reference, run_folder, second)
    return [*wrong, first.output[-3000:], second.output[-3000:]] if wrong else []


def applies(fault: str, point: Point) -> bool:
    """Whether a fault makes a difference at a point: reading leaves nothing on the disk."""
    writes = point.operation != "open r"
    allowed = {"torn": point.operation == "write", "full disk": point.operation in WRITING, "error": True}
    return allowed.get(fault, writes if fault != "disk gone" else True)


def in_a_shard(point: Point) -> bool:
    """One of the many alike writes of a shard, neither the first two nor the 25th of its about 50."""
    return point.operation == "write" and point.path.endswith(".distcp") and point.count not in (1, 2, 25)


def enumerate_faults(name: str, folder: pathlib.Path, choose) -> tuple[int, list]:
    """(How many faults were injected, all that was wrong) at every point of a scenario with every fault that `choose`
    takes."""
    start, reference, points = make_template(name, folder)
    wrong: list = [dataclasses.astuple(point) for point in points if point.rank < 0]  # past the watch
    chosen = [(fault, point) for fault in FAULTS for point in points if choose(name, fault, point)]
    for fault, point in chosen:
        if found := disturb(folder, start, reference, fault, point):
            wrong.append([fault, dataclasses.astuple(point), *found])
    return len(chosen), wrong
