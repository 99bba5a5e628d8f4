"""Heartbeats: where every rank of the job is, told through the job's store every few seconds, and the one line that
names the rank for which the others wait, from before they have met. Started by the script; whoever does something long
says so by `at`. Independent of what is trained."""

import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

import psutil
import torch.distributed as dist

from harness.base import console, torch_internals
from harness.job import endings, terminal

BEAT = 2.0  # seconds between two beats
SILENT = 3  # beats that did not come: stopped, killed or cut off
STORE_PATIENCE = 10.0  # seconds

# (host, pid) of each rank; until all have met of this one alone, and ("", 0) of one that nobody has seen
RANKS: list[tuple[str, int]] = [(socket.gethostname(), os.getpid())]
ABSENT: dict = {"beat": 0}


@dataclasses.dataclass
class Here:
    """Where this process is. Every rank comes through the same phases in the same order: `moves` counts them."""

    phase: str = "start"
    step: int = 0
    moves: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)
    writing: str = ""  # the part of a checkpoint that its thread is at, while others may wait for it
    folder: pathlib.Path | None = None  # of the run, for what is written when it stalls
    store: dist.Store | None = None  # of the job


HERE = Here()


def at(phase: str, step: int | None = None) -> None:
    """Says that this rank enters a phase; every rank calls this."""
    endings.hold()
    HERE.phase, HERE.step, HERE.since = phase, HERE.step if step is None else step, time.monotonic()
    HERE.moves += 1


class Heartbeats(threading.Thread):
    """Beats, watches that this rank gets on, and ends it with a line when it does not for `seconds`.

    It starts before the ranks have met: one that never comes to the job's store is named too. A rank that was itself
    stopped for a while does not count that as waiting. In the preparation ranks wait for one that reads and tokenizes,
    however long it takes; only one that falls silent ends the job.
    """

    def __init__(self, seconds: float, store: dist.Store):
        super().__init__(daemon=True)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.seconds, self.met = seconds, False
        self.interval = min(max(BEAT, self.world / 250), seconds / 6)  # of a thousand ranks 250 a second
        self.silence = max(SILENT * self.interval, min(30.0, seconds / 2))  # a rank may be long in a call of C code
        self.beat, self.asking, self.lock, self.place = 0, None, threading.Lock(), RANKS[0]
        HERE.store, self.store = store, store.clone()  # a connection of its own: others may block
        self.store.set_timeout(timedelta(seconds=STORE_PATIENCE))
        with contextlib.suppress(RuntimeError):  # no answer: the thread asks again
            self.tell()
        self.start()

    def meet(self) -> None:
        """Every rank calls this when they have met: from then on each knows where the others are."""
        everyone = [self.place] * self.world
        dist.all_gather_object(everyone, self.place)
        RANKS[:] = everyone
        self.met = True

    def ask(self, operation: Callable, *args):
        """What an operation of the store returns; a RuntimeError when there is no answer, for which some of them would
        wait for ever."""
        answer: list = []

        def run():
            with contextlib.suppress(RuntimeError):
                answer.append(operation(*args))

        with self.lock:
            if self.asking is None or not self.asking.is_alive():
                self.asking = threading.Thread(target=run, daemon=True)
                self.asking.start()
                self.asking.join(STORE_PATIENCE + 1)
        if not answer:
            raise RuntimeError(f"no answer from the store at {store_address()}")
        return answer[0]

    def tell(self) -> None:
        self.beat += 1
        beat = {"beat": self.beat, "phase": HERE.phase, "step": HERE.step, "moves": HERE.moves, "time": time.time()}
        beat |= {"seconds": time.monotonic() - HERE.since, "writing": HERE.writing, "place": self.place}
        self.ask(self.store.set, f"heartbeat/{self.rank}", json.dumps(beat))

    def read(self) -> list[dict]:
        """The newest beat of each rank; of one that has not come to the store yet, `ABSENT`."""
        keys = [f"heartbeat/{rank}" for rank in range(self.world)]
        there = keys if self.met else [key for key in keys if self.ask(self.store.check, [key])]
        known = dict(zip(there, map(json.loads, self.ask(self.store.multi_get, there)), strict=True))
        beats = [known.get(key, ABSENT) for key in keys]
        if not self.met:
            beside = ranks_beside()
            RANKS[:] = [tuple(beat.get("place") or beside.get(rank, ("", 0))) for rank, beat in enumerate(beats)]
        return beats

    def run(self) -> None:
        moves, waited, before, now = 0, 0.0, None, time.monotonic()
        while True:
            time.sleep(self.interval)
            slept, now = time.monotonic() - now, time.monotonic()
            if endings.ENDING:  # what this rank still waits for, such as an upload, has its own patience
                return
            if HERE.moves != moves:
                moves, waited, before = HERE.moves, 0.0, None
            waited += min(slept, 2 * self.interval)
            try:
                self.tell()
                if waited < self.seconds:
                    continue
                if before is None:
                    before, until = self.read(), waited + self.silence
                elif waited >= until:
                    ranks, what = self.judge(before, self.read())
                    if what and HERE.moves == moves:
                        self.end(self.describe(ranks, what), ranks, "stopped" in what)
                    waited, before = 0.0, None
            except RuntimeError as error:
                if waited > self.seconds:
                    self.end(f"{self.name_of(self.rank)} waits in {HERE.phase} of step {HERE.step}, and {gone(error)}")

    def name_of(self, rank: int) -> str:
        host, pid = self.place if rank == self.rank else RANKS[rank]
        return f"rank {rank} ({host}, pid {pid})" if pid else f"rank {rank}"

    def neighbours(self) -> range:
        """The ranks that this rank's launcher started, this one too."""
        first = self.rank - int(os.environ.get("LOCAL_RANK", 0))
        return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 0)))

    def judge(self, before: list[dict], now: list[dict]) -> tuple[list[int], str]:
        """The ranks that do not come and where they are, in words; empty if it is too early to say."""
        if absent := [rank for rank in range(self.world) if now[rank] == ABSENT]:
            return absent, "never seen; stopped or killed before the ranks met, or not started"
        if silent := [rank for rank in range(self.world) if before[rank]["beat"] == now[rank]["beat"]]:
            last = now[silent[0]]
            ago = f"{max(0.0, time.time() - last['time']):.0f} s ago in {last['phase']} of step {last['step']}"
            return silent, f"last seen {ago}; stopped, killed or cut off"
        if all(beat["phase"] == "preparation" for beat in now):
            return [], ""
        least = min(beat["moves"] for beat in now)
        behind = [rank for rank in range(self.world) if now[rank]["moves"] == least]
        writing = [rank for rank in behind if now[rank]["writing"]]
        place = now[(writing or behind)[0]]
        where = f"in {place['phase']} of step {place['step']} for {place['seconds']:.0f} s"
        if self.world > 1 and len(behind) == self.world and place["phase"] != "data":
            if not writing:
                return behind, f"{where}: all wait for each other; the network between them, or a driver"
            where += f": at the {place['writing']} of a checkpoint"
        return writing or behind, where

    def describe(self, ranks: list[int], what: str) -> str:
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        who = f"all {self.world} ranks" if len(ranks) == self.world > 1 else self.name_of(ranks[0]) + others
        return f"{who} did not come within {self.seconds / 60:g} minutes: {what}"

    def end(self, problem: str, ranks: Collection[int] = (), stopped: bool = False) -> None:
        """Ends this rank, after `ranks`, for which it waited, so that a launcher names them as the first. One rank says
        why, and goes also where nobody reads what it prints; what may help goes into the run's folder."""
        try:
            says = self.ask(speaks_first, self.store)
        except RuntimeError:
            says = os.environ.get("LOCAL_RANK", "0") == "0"
        line = f"train_fsdp.py: error: --timeout-minutes: {problem}\n"
        if says:
            console.record_error(line.rstrip())
        if says:  # in a thread, as a pipe that nobody empties would hold this one up
            threading.Thread(target=lambda: terminal.tell(line.rstrip()), daemon=True).start()
        with contextlib.suppress(OSError):
            if HERE.folder:
                with open(HERE.folder / f"stalled-rank-{self.rank}.txt", "w") as file:
                    file.write(line)
                    faulthandler.dump_traceback(file)
                dump_flight_recorder(HERE.folder, self.rank)
        HERE.phase = "failure"  # from here on the launcher's SIGTERM, as another rank has ended, says nothing new
        if self.rank not in ranks:
            for rank in {*ranks} & {*self.neighbours()} if stopped else ():  # it cannot end itself
                with contextlib.suppress(OSError):
                    os.kill(RANKS[rank][1], signal.SIGKILL)
            time.sleep(2 * self.interval)
        time.sleep(0.5)
        endings.announce(1, patience=5)
        os._exit(1)

    def explain(self, error: BaseException) -> str:
        """Who is gone, after a collective broke; empty for any other error, or if all are there."""
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return ""
        try:
            before, until = self.read(), time.monotonic() + SILENT * self.interval
            missing: list[int] = []
            while not missing and time.monotonic() < until:
                time.sleep(0.1)
                missing = [rank for rank in self.neighbours() if not alive(RANKS[rank][1])]
            now = self.read()
            missing = missing or [rank for rank in range(self.world) if before[rank]["beat"] == now[rank]["beat"]]
        except RuntimeError as error:
            return f"{self.name_of(self.rank)} lost the others, and {gone(error)}"
        if not missing:
            return ""
        last = now[missing[0]]
        if last == ABSENT:
            return f"{self.name_of(missing[0])} is gone, or was never started"
        return f"{self.name_of(missing[0])} is gone, last seen in {last['phase']} of step {last['step']}"


def speaks_first(store: dist.Store | None) -> bool:
    """Whether this rank is the first of all that says why the job ends, and so the only one. Without a store it is."""
    return store is None or store.add("train_fsdp/failed", 1) == 1


def ranks_beside() -> dict[int, tuple[str, int]]:
    """(host, pid) of the ranks that this one's launcher started, by their environment: they may be loading torch."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error, KeyError):
                found[int(child.environ()["RANK"])] = socket.gethostname(), child.pid
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(error: RuntimeError) -> str:
    return f"there is {error}: rank 0, the launcher beside it, their node, or the way to it is gone"


def store_address() -> str:
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', 0)}"


def record_into(folder: pathlib.Path) -> None:
    """Where what helps to find the cause of a stall is written, NCCL's own record of its collectives too."""
    HERE.folder = folder
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # of this torch, and of older ones
        os.environ.setdefault(name, str(folder.resolve() / "nccl_trace_rank_"))


def dump_flight_recorder(folder: pathlib.Path, rank: int) -> None:
    """Writes NCCL's record of its last collectives, for torch's `torchfrtrace`."""
    trace = torch_internals.nccl_trace()
    if trace is not None:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
