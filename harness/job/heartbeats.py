"""Heartbeats: every two seconds each rank writes to the job's store: its phase, the number of phases it has entered,
and the seconds without progress. When the job stalls, also before the ranks have met, one line names the rank that the
others wait for, with host, pid and phase, and every rank exits. A job of one rank is never ended."""

import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from harness import base
from harness.job import endings, terminal

if TYPE_CHECKING:
    import torch.distributed as dist

    from harness.job.signals import StopRequest

T = TypeVar("T")

BEAT = 2.0  # seconds between two beats
MISSED_BEATS = 3  # after a broken collective, a rank that missed so many beats is gone
READING_INTERVAL = 0.75  # share of the timeout between two readings; a call into C may hold the GIL and block beats
STORE_TIMEOUT = 10.0  # seconds
EXIT_TIMEOUT = 9.0  # seconds after which a rank of a stalled job exits, whatever blocks it


@dataclasses.dataclass
class Progress:
    """Phase and step of this process. Every rank enters the same phases in the same order."""

    phase: str = "start"
    step: int = 0
    phase_count: int = 0  # phases entered
    began: float = dataclasses.field(default_factory=time.monotonic)  # when `phase` replaced another one
    first_count: int = 0  # `phase_count` at that time
    since: float = dataclasses.field(default_factory=time.monotonic)  # when a phase was last entered
    save_stages: int = 0  # stages of saves that a thread has finished; all ranks finish each together
    folder: pathlib.Path | None = None  # the run's folder, for traces of a stall

    def counts(self) -> tuple[int, int]:
        """Return (phases entered, stages of saves): a change is progress."""
        return self.phase_count, self.save_stages


PROGRESS = Progress()
UNITS = {"evaluation": "batches", "sampling": "tokens"}  # units of phases that are entered once per unit


def enter_phase(phase: str, step: int | None = None) -> None:
    """Record that this rank enters a phase. Every rank calls this."""
    endings.block_if_ending()
    PROGRESS.since = time.monotonic()
    PROGRESS.phase_count += 1
    if phase != PROGRESS.phase:
        PROGRESS.phase, PROGRESS.began, PROGRESS.first_count = phase, PROGRESS.since, PROGRESS.phase_count
    if step is not None:
        PROGRESS.step = step


def end_save_stage() -> None:
    """Record that a thread of this rank has finished a stage of a save. Every rank calls this."""
    PROGRESS.save_stages += 1


def describe_progress() -> str:
    """Describe how far this rank is in its phase; "" if that is not known."""
    with contextlib.suppress(IndexError, OSError):  # the work has ended, or its files were renamed
        return base.WORK[-1]()
    unit = UNITS.get(PROGRESS.phase)
    return f"{PROGRESS.phase_count - PROGRESS.first_count:,} {unit}" if unit else ""


def ranks_without_beat(before: list[dict | None], now: list[dict | None]) -> list[int]:
    """Return the ranks without a new beat between two readings."""
    ranks = []
    for rank, (earlier, later) in enumerate(zip(before, now, strict=True)):
        if later is None or (earlier and earlier["beat"] == later["beat"]):
            ranks.append(rank)
    return ranks


def find_stalled_ranks(before: list[dict | None], now: list[dict | None], seconds: float) -> tuple[list[int], str]:
    """Find the ranks that all others wait for, from two readings of all beats, READING_INTERVAL of `seconds` apart.
    Returns them and a description of their state; ([], "") if a rank has made progress within `seconds`.

    The first of these that exist: ranks without any beat; a rank that reads data and has entered the fewest phases of
    those that beat, as reading waits for no other rank; ranks that stopped beating; the ranks that have entered the
    fewest phases.
    """
    if absent := [rank for rank, beat in enumerate(now) if beat is None]:
        return absent, "never seen"
    beats: list[dict] = [beat for beat in now if beat]
    missing = ranks_without_beat(before, now)
    # The last beat of a missing rank may be many phases old, so it is not compared.
    compared = [rank for rank in range(len(beats)) if rank not in missing]
    if any(beats[rank]["waited"] < seconds for rank in compared):
        return [], ""
    least = min(beats[rank]["phase_count"] for rank in compared)
    behind = [rank for rank in compared if beats[rank]["phase_count"] == least]
    slowest = beats[behind[0]]
    if missing and slowest["phase"] != "data":
        last = beats[missing[0]]
        where = f"last seen in {last['phase']} of step {last['step']}"
        return missing, f"no heartbeat for over {READING_INTERVAL * seconds:.0f} s, {where}"
    where = f"in {slowest['phase']} of step {slowest['step']} for {slowest['waited']:.0f} s"
    if len(behind) == len(beats) > 1 and slowest["phase"] != "data":
        where += ": all ranks wait for each other; check the network and the driver"
    return behind, where


class Heartbeats(threading.Thread):
    """A thread that writes this rank's beats and, in a job of several ranks, ends this rank if no rank has made
    progress for `seconds`.

    Time during which this process was stopped does not count. No clocks of different hosts are compared.
    """

    def __init__(self, seconds: float, store: "dist.Store", stop: "StopRequest"):
        super().__init__(daemon=True)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.seconds, self.stop = seconds, stop
        self.interval = min(max(BEAT, self.world / 250), seconds / 6)  # at most 250 beats a second in the whole job
        self.waited = 0.0  # seconds without progress
        self.beats = 0
        self.reported: set[str] = set()  # phases reported as long
        self.names = [f"rank {rank}" for rank in range(self.world)]  # with host and pid, once a rank's beat was read
        self.names[self.rank] += f" ({socket.gethostname()}, pid {os.getpid()})"
        # another connection, as a call on the first one may block
        self.store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        self.calls = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        with contextlib.suppress(RuntimeError):  # without an answer the thread tries again
            self.beat()
        self.start()

    def call_store(self, operation: Callable[..., T], *args: Any) -> T:
        """Call an operation of the store in a thread, as some have no timeout.

        Raises:
            RuntimeError: the store did not answer within STORE_TIMEOUT.
        """
        try:
            return self.calls.submit(operation, *args).result(timeout=STORE_TIMEOUT + 1)
        except (RuntimeError, TimeoutError):
            address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', 0)}"
            cause = "rank 0, its launcher, their node or the network has failed"
            raise RuntimeError(f"the store at {address} does not answer: {cause}") from None

    def beat(self) -> None:
        """Write this rank's beat to the store."""
        self.beats += 1
        beat = {
            "name": self.names[self.rank],  # such as `rank 3 (node-b, pid 411)`
            "beat": self.beats,
            "waited": self.waited,  # seconds
            "phase": PROGRESS.phase,
            "step": PROGRESS.step,
            "phase_count": PROGRESS.counts(),
            "lasts": time.monotonic() - PROGRESS.began,  # seconds in this phase
            "progress": describe_progress(),
        }
        self.call_store(self.store.set, f"heartbeat/{self.rank}", json.dumps(beat))
        if self.world == 1 or (self.rank == 0 and self.waited < self.seconds):
            self.report_long_phase(0, beat)

    def report_long_phase(self, rank: int, beat: dict) -> None:
        """Print, once per phase, that a rank has been in it for longer than the timeout."""
        if beat["lasts"] < self.seconds or beat["phase"] in self.reported:
            return
        self.reported.add(beat["phase"])
        line = f"{self.names[rank]} has been in {beat['phase']} for {beat['lasts'] / 60:.3g} minutes"
        if beat["progress"]:
            line += f": {beat['progress']}"
        print_in_thread(f"train_fsdp.py: {line}")

    def read(self) -> list[dict | None]:
        """Return the newest beat of each rank, None for a rank without one, and update `names`."""

        def newest() -> list[dict | None]:
            keys = [f"heartbeat/{rank}" for rank in range(self.world)]
            present = keys if self.store.check(keys) else [key for key in keys if self.store.check([key])]
            beats = dict(zip(present, map(json.loads, self.store.multi_get(present)), strict=True))
            return [beats.get(key) for key in keys]

        beats = self.call_store(newest)
        for rank, beat in enumerate(beats):
            if beat:
                self.names[rank] = beat["name"]
        return beats

    def run(self) -> None:
        counts, before, read_at, now = None, None, 0.0, time.monotonic()
        while True:
            time.sleep(self.interval)
            slept, now = min(time.monotonic() - now, 2 * self.interval), time.monotonic()
            if endings.ENDING or self.stop.has_finished:
                return
            if base.WORK or counts != PROGRESS.counts():
                counts, self.waited = PROGRESS.counts(), 0.0
                before, read_at = None, (1 - READING_INTERVAL) * self.seconds
            self.waited += slept
            try:
                self.beat()
                if self.world == 1 or self.waited < read_at:
                    continue
                beats = self.read()
                if before:
                    ranks, where = find_stalled_ranks(before, beats, self.seconds)
                    if ranks and counts == PROGRESS.counts() and not base.WORK:
                        self.end(f"--timeout-minutes: {self.describe(ranks)}: {where}")
                    if self.rank == 0:
                        _, working = min((beat["waited"], rank) for rank, beat in enumerate(beats) if beat)
                        self.report_long_phase(working, beats[working])
                # two intervals later than the timeout: by then the other ranks' beats show that they wait too
                before, read_at = beats, self.waited + READING_INTERVAL * self.seconds + 2 * self.interval
            except RuntimeError as error:
                if self.waited > self.seconds and self.world > 1:
                    waiting = f"{self.names[self.rank]} waits in {PROGRESS.phase} of step {PROGRESS.step}"
                    self.end(f"--timeout-minutes: {waiting}, and {error}")

    def describe(self, ranks: list[int]) -> str:
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"{self.names[ranks[0]]}{others} timed out after {self.seconds / 60:g} minutes"

    def explain(self, error: BaseException) -> str:
        """Describe the rank that stopped beating after a collective broke; "" for any other error, or if all beat."""
        import torch.distributed as dist

        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return ""
        try:
            before = self.read()
            time.sleep(MISSED_BEATS * self.interval)
            now = self.read()
        except RuntimeError as no_answer:
            return f"{self.names[self.rank]} lost the other ranks, and {no_answer}"
        for rank in ranks_without_beat(before, now):
            beat = now[rank]
            state = f"last seen in {beat['phase']} of step {beat['step']}" if beat else "or was never started"
            return f"{self.names[rank]} is gone, {state}"
        return ""

    def is_first_to_print(self) -> bool:
        """Return True on the first rank to call this, which prints why the job ends; if the store does not answer, on
        the first rank of each node."""
        try:
            return self.call_store(self.store.add, "failed", 1) == 1
        except RuntimeError:
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def end(self, problem: str) -> NoReturn:
        """End this rank with 1. One rank of the job prints `problem`; each writes its traces to the run's folder."""
        PROGRESS.phase = "failure"  # a SIGTERM from now on is the launcher's, as another rank has ended: no line
        line = f"train_fsdp.py: error: {problem}"
        with open(os.devnull, "w") as nowhere:
            # a thread in C: it ends this process even if NCCL's record holds the GIL
            faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True, file=nowhere)
            if self.is_first_to_print():
                base.record_error(line)
                print_in_thread(line)
            if PROGRESS.folder:
                with contextlib.suppress(OSError):
                    leave_traces(PROGRESS.folder, self.rank, line)
            time.sleep(0.5)  # time to print
            endings.end(1, timeout=5)


def print_in_thread(line: str) -> None:
    """Print to stderr in another thread, as a full pipe would block this one."""
    threading.Thread(target=terminal.print_error, args=(line,), daemon=True).start()


def leave_traces(folder: pathlib.Path, rank: int, line: str) -> None:
    """Write the stacks of this rank's threads and, with NCCL, its last collectives for torch's `torchfrtrace`."""
    import torch

    with open(folder / f"stalled-rank-{rank}.txt", "w") as file:
        file.write(f"{line}\n")
        faulthandler.dump_traceback(file)
    # private: publicly torch writes NCCL's record only after a collective has timed out
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)  # None in a torch without NCCL
    if dump is not None:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())
