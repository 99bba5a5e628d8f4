"""Heartbeats: every rank writes into the job's store every two seconds where it is. When the job stalls, or a rank is
gone, one line names that rank, its host, pid and phase, and every rank ends; before the ranks have met, too."""

import concurrent.futures
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
from typing import NoReturn

import psutil

from harness import base
from harness.job import endings, terminal

BEAT = 2.0  # seconds between two beats
SILENT_BEATS = 3  # missing beats after which a rank is silent
STORE_PATIENCE = 10.0  # seconds until the store must have answered
GONE_PATIENCE = 4.0  # seconds that a rank has to notice by itself that another one is gone
EXIT_PATIENCE = 9.0  # seconds after which a rank that ends a stalled job is gone, whatever blocks it
GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

NOWHERE = ("", 0)
# (host, pid) of each rank, NOWHERE of one that has not come yet; before the first beat of this rank alone
RANKS: list[tuple[str, int]] = [(socket.gethostname(), os.getpid())]


@dataclasses.dataclass
class Progress:
    """Where this process is. Every rank enters the same phases in the same order: `moves` counts them."""

    phase: str = "start"
    step: int = 0
    moves: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)
    parts: int = 0  # of checkpoints that a thread has done, and for each of which the other ranks wait
    folder: pathlib.Path | None = None  # of the run, where a stall leaves its traces


PROGRESS = Progress()


def enter_phase(phase: str, step: int | None = None) -> None:
    """Records that this rank enters a phase; every rank calls this."""
    endings.block_if_ending()
    PROGRESS.phase = phase
    if step is not None:
        PROGRESS.step = step
    PROGRESS.since = time.monotonic()
    PROGRESS.moves += 1


def end_part() -> None:
    """Records that a thread of this rank has done its part of a checkpoint; every rank calls this."""
    PROGRESS.parts += 1


def rank_name(rank: int) -> str:
    """`rank 3 (node-b, pid 411)`."""
    host, pid = RANKS[rank]
    return f"rank {rank} ({host}, pid {pid})" if pid else f"rank {rank}"


def process_status(pid: int) -> str:
    """As psutil has it: running, sleeping, stopped, zombie, ...; dead where there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def last_seen(beat: dict) -> str:
    return f"last seen {max(0.0, time.time() - beat['time']):.0f} s ago in {beat['phase']} of step {beat['step']}"


def silent_ranks(before: list[dict | None], now: list[dict | None]) -> list[int]:
    """The ranks that have written nothing between two readings of all beats."""
    ranks = []
    for rank, (earlier, later) in enumerate(zip(before, now, strict=True)):
        if later is None or (earlier and earlier["beat"] == later["beat"]):
            ranks.append(rank)
    return ranks


class Heartbeats(threading.Thread):
    """A thread that writes this rank's beats, and ends the job where it stalls: when this rank enters no new phase for
    `seconds`, or another rank is gone and this one does not notice, as it waits in a collective or works alone.

    A rank that beats no more may be healthy: a call into C can hold the interpreter's lock, such as a launch into a
    full queue of the GPU. It counts as stopped or gone only where the system says so, to a rank beside it.

    Time for which this process was itself stopped does not count as waiting. During the preparation ranks wait without
    limit for the one that reads and tokenizes; only a rank that is stopped, or whose whole node is silent, ends the
    job. `stop` is the run's `StopRequest`.
    """

    def __init__(self, seconds: float, store, stop):
        super().__init__(daemon=True)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        first = self.rank - int(os.environ.get("LOCAL_RANK", 0))
        self.neighbours = [*range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 0)))]  # of one launcher
        self.seconds, self.stop = seconds, stop
        self.interval = min(max(BEAT, self.world / 250), seconds / 6)  # at most 250 beats a second in the whole job
        self.silence = max(SILENT_BEATS * self.interval, min(30.0, seconds / 2))  # a call into C can last that long
        self.beats = 0
        own, RANKS[:] = RANKS[0], [NOWHERE] * self.world
        RANKS[self.rank] = own
        self.store = store.clone()  # a connection of its own, as a call on the other one may block
        self.store.set_timeout(timedelta(seconds=STORE_PATIENCE))
        self.calls = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        with contextlib.suppress(RuntimeError):  # no answer: the thread tries again
            self.beat()
        self.start()

    def ask(self, operation: Callable, *args):
        """What an operation of the store returns. A thread makes the call, as some operations have no timeout.

        Raises:
            RuntimeError: the store does not answer in time.
        """
        try:
            return self.calls.submit(operation, *args).result(timeout=STORE_PATIENCE + 1)
        except (RuntimeError, TimeoutError):
            address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', 0)}"
            cause = "rank 0, the launcher beside it, their node, or the way to it is gone"
            raise RuntimeError(f"there is no answer from the store at {address}: {cause}") from None

    def beat(self) -> None:
        """Writes where this rank is, and which ranks beside it the system says are stopped or gone."""
        self.beats += 1
        where = {"place": RANKS[self.rank], "beat": self.beats}
        where |= {"phase": PROGRESS.phase, "step": PROGRESS.step, "moves": [PROGRESS.moves, PROGRESS.parts]}
        where |= {"seconds": time.monotonic() - PROGRESS.since, "time": time.time()}
        where |= {"beside": self.neighbours, "down": self.beside(psutil.STATUS_STOPPED, *GONE)}
        self.ask(self.store.set, f"heartbeat/{self.rank}", json.dumps(where))

    def read(self) -> list[dict | None]:
        """The newest beat of each rank, None of one that has not come to the store; it fills RANKS."""

        def newest() -> list[dict | None]:
            keys = [f"heartbeat/{rank}" for rank in range(self.world)]
            present = [key for key in keys if self.store.check([key])]
            beats = dict(zip(present, map(json.loads, self.store.multi_get(present)), strict=True))
            return [beats.get(key) for key in keys]

        beats = self.ask(newest)
        RANKS[:] = [tuple(beat["place"]) if beat else NOWHERE for beat in beats]
        return beats

    def beside(self, *statuses: str) -> list[int]:
        """The ranks of this launcher whose process the system says is in one of these states."""
        others = [rank for rank in self.neighbours if rank != self.rank and RANKS[rank] != NOWHERE]
        return [rank for rank in others if process_status(RANKS[rank][1]) in statuses]

    def gone(self) -> list[int]:
        """The ranks beside this one that are gone, or else the one that another rank has reported."""
        ranks = self.beside(*GONE)
        if ranks:
            self.ask(self.store.set, "gone", str(ranks[0]))
        elif self.ask(self.store.check, ["gone"]):
            ranks = [int(self.ask(self.store.get, "gone"))]
        return ranks

    def run(self) -> None:
        moves, waited, gone_for, before, now = 0, 0.0, 0.0, None, time.monotonic()
        while True:
            time.sleep(self.interval)
            slept, now = min(time.monotonic() - now, 2 * self.interval), time.monotonic()
            if endings.ENDING or self.stop.leaving:  # what a rank still waits for has a timeout of its own
                return
            if PROGRESS.moves != moves:
                moves, waited, before = PROGRESS.moves, 0.0, None
            waited += slept
            try:
                self.beat()
                gone = self.gone()
                gone_for = gone_for + slept if gone else 0.0
                if gone_for > GONE_PATIENCE:
                    self.end(self.describe_gone(gone[0], self.read()))
                if waited < self.seconds:
                    continue
                if before is None:
                    before, until = self.read(), waited + self.silence
                elif waited >= until:
                    ranks, where = self.judge(before, self.read())
                    if ranks and PROGRESS.moves == moves:
                        self.end(f"--timeout-minutes: {self.describe(ranks)}: {where}", ranks)
                    waited, before = 0.0, None
            except RuntimeError as error:
                if waited > self.seconds:
                    place = f"{rank_name(self.rank)} waits in {PROGRESS.phase} of step {PROGRESS.step}"
                    self.end(f"--timeout-minutes: {place}, and {error}")

    def judge(self, before: list[dict | None], now: list[dict | None]) -> tuple[list[int], str]:
        """The ranks for which the others wait, and in words where they are, by two readings of all beats; ([], "")
        while it is too early to know."""
        if absent := [rank for rank in range(self.world) if now[rank] is None]:
            return absent, "never seen; stopped or killed before the ranks met, or not started"
        silent = silent_ranks(before, now)
        beating = [rank for rank in range(self.world) if rank not in silent]
        watched = {rank for watcher in beating for rank in now[watcher]["beside"]}
        cut_off = [rank for rank in silent if rank not in watched]  # nobody beside it knows its state
        if down := sorted({rank for watcher in beating for rank in now[watcher]["down"]}):
            return down, f"{last_seen(now[down[0]])}; stopped, killed or cut off"
        if all(beat["phase"] == "preparation" for beat in now) and not cut_off:
            return [], ""

        # What a silent rank wrote last may be many phases old, so first those that beat are compared.
        least = min(now[rank]["moves"] for rank in beating)
        behind = [rank for rank in beating if now[rank]["moves"] == least]
        place = now[behind[0]]
        where = f"in {place['phase']} of step {place['step']} for {place['seconds']:.0f} s"
        if place["phase"] == "data":  # where it waits for nobody
            return behind, where
        if cut_off:
            return cut_off, f"{last_seen(now[cut_off[0]])}; stopped, killed or cut off"
        if len(behind) < len(beating) or self.world == 1:
            return behind, where
        if silent:
            last = min(now[rank]["moves"] for rank in silent)
            silent = [rank for rank in silent if now[rank]["moves"] == last]
            return silent, f"{last_seen(now[silent[0]])}; its process runs, but a call holds the interpreter's lock"
        return behind, f"{where}: all wait for each other; the network between them, or a driver"

    def describe(self, ranks: list[int]) -> str:
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"{rank_name(ranks[0])}{others} did not come within {self.seconds / 60:g} minutes"

    def describe_gone(self, rank: int, beats: list[dict | None]) -> str:
        beat = beats[rank]
        place = f"last seen in {beat['phase']} of step {beat['step']}" if beat else "or was never started"
        return f"{rank_name(rank)} is gone, {place}"

    def explain(self, error: BaseException) -> str:
        """After a collective broke, the rank that is gone, in words; empty for any other error, or if no rank is."""
        import torch.distributed as dist

        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return ""
        try:
            before, until = self.read(), time.monotonic() + SILENT_BEATS * self.interval
            ranks = self.gone()
            while not ranks and time.monotonic() < until:
                time.sleep(0.1)
                ranks = self.gone()
            now = self.read()
        except RuntimeError as no_answer:
            return f"{rank_name(self.rank)} lost the others, and {no_answer}"
        ranks = ranks or silent_ranks(before, now)
        return self.describe_gone(ranks[0], now) if ranks else ""

    def speaks_first(self) -> bool:
        """Whether this rank is the first to ask, and so the one that prints why the job ends; without an answer from
        the store the first rank of each node is."""
        try:
            return self.ask(self.store.add, "failed", 1) == 1
        except RuntimeError:
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def end(self, problem: str, ranks: Collection[int] = ()) -> NoReturn:
        """Ends this rank after a line by one rank of the job and, in the run's folder, traces of where this one stood.
        Those of `ranks` that the system says are stopped here cannot end themselves, and are killed; a rank that is
        only silent is not."""
        PROGRESS.phase = "failure"  # from here on a SIGTERM is the launcher's, as another rank has ended: no line of it
        line = f"train_fsdp.py: error: {problem}"
        with open(os.devnull, "w") as nowhere:
            # a thread of C, which ends this process even where the record of NCCL holds the interpreter's lock
            faulthandler.dump_traceback_later(EXIT_PATIENCE, exit=True, file=nowhere)
            if self.speaks_first():
                base.record_error(line)
                # in a thread, as a pipe that nobody empties would block this one
                threading.Thread(target=terminal.print_error, args=(line,), daemon=True).start()
            if PROGRESS.folder:
                with contextlib.suppress(OSError):
                    leave_traces(PROGRESS.folder, self.rank, line)
            for rank in {*ranks} & {*self.beside(psutil.STATUS_STOPPED)}:
                with contextlib.suppress(OSError):
                    os.kill(RANKS[rank][1], signal.SIGKILL)
            time.sleep(0.5)  # for the line
            endings.end(1, patience=5)


def leave_traces(folder: pathlib.Path, rank: int, line: str) -> None:
    """Writes where the threads of this rank are and, with NCCL, its last collectives for torch's `torchfrtrace`."""
    import torch

    with open(folder / f"stalled-rank-{rank}.txt", "w") as file:
        file.write(f"{line}\n")
        faulthandler.dump_traceback(file)
    # private: in public torch writes NCCL's record only by itself, when a collective has timed out
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # None in a torch without NCCL
    if dump is not None:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())
