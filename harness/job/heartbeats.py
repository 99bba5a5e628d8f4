"""Heartbeats: every rank writes into the job's store every two seconds in which phase it is, how many it has entered,
and for how long it has neither worked nor entered one. When the job stalls, one line names the rank for which the
others wait, its host, pid and phase, and every rank ends; before the ranks have met, too. One rank is never ended."""

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
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from harness import base
from harness.job import endings, terminal

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

BEAT = 2.0  # seconds between two beats
MISSED_BEATS = 3  # missing beats after which a rank is gone, where a collective broke
READING_INTERVAL = 0.75  # of the timeout, without a beat: a call into C that holds the interpreter's lock can last long
STORE_TIMEOUT = 10.0  # seconds until the store must have answered
EXIT_TIMEOUT = 9.0  # seconds after which a rank that ends a stalled job is gone, whatever blocks it

UNKNOWN = ("", 0)


def host_and_pid() -> tuple[str, int]:
    """(host, pid) of this process."""
    return socket.gethostname(), os.getpid()


# `host_and_pid` of each rank, UNKNOWN of one that has not come yet; before the first beat of this rank alone
RANKS: list[tuple[str, int]] = [host_and_pid()]


@dataclasses.dataclass
class Progress:
    """Where this process is. Every rank enters the same phases in the same order: `phase_count` counts them."""

    phase: str = "start"
    step: int = 0
    phase_count: int = 0
    began: float = dataclasses.field(default_factory=time.monotonic)  # when it came into `phase` from another one
    first_count: int = 0  # the count of moves then
    since: float = dataclasses.field(default_factory=time.monotonic)  # its last move
    save_stages: int = 0  # of checkpoints that a thread has done, and for each of which the other ranks wait
    folder: pathlib.Path | None = None  # of the run, where a stall leaves its traces


PROGRESS = Progress()
UNITS = {"evaluation": "batches", "sampling": "tokens"}  # phases that are entered for each


def enter_phase(phase: str, step: int | None = None) -> None:
    """Records that this rank enters a phase; every rank calls this."""
    endings.block_if_ending()
    PROGRESS.since = time.monotonic()
    PROGRESS.phase_count += 1
    if phase != PROGRESS.phase:
        PROGRESS.phase, PROGRESS.began, PROGRESS.first_count = phase, PROGRESS.since, PROGRESS.phase_count
    if step is not None:
        PROGRESS.step = step


def end_save_stage() -> None:
    """Records that a thread of this rank has done its part of a checkpoint; every rank calls this."""
    PROGRESS.save_stages += 1


def rank_name(rank: int) -> str:
    """`rank 3 (node-b, pid 411)`."""
    host, pid = RANKS[rank]
    return f"rank {rank} ({host}, pid {pid})" if pid else f"rank {rank}"


def describe_progress() -> str:
    """What this rank has done of its phase, in words; empty if that is not known."""
    with contextlib.suppress(IndexError, OSError):  # the work ended, or its files were renamed
        return base.WORK[-1]()
    unit = UNITS.get(PROGRESS.phase)
    return f"{PROGRESS.phase_count - PROGRESS.first_count:,} {unit}" if unit else ""


def ranks_without_beat(before: list[dict | None], now: list[dict | None]) -> list[int]:
    """The ranks that have written nothing between two readings of all beats."""
    ranks = []
    for rank, (earlier, later) in enumerate(zip(before, now, strict=True)):
        if later is None or (earlier and earlier["beat"] == later["beat"]):
            ranks.append(rank)
    return ranks


def find_stalled_ranks(before: list[dict | None], now: list[dict | None], seconds: float) -> tuple[list[int], str]:
    """Find the ranks for which all others wait, from two readings of all beats, READING_INTERVAL of `seconds` apart.
    Return them and where they are, in words; ([], "") if a rank has worked or entered a phase within `seconds`.

    Those that never came; else a rank that reads data, where it waits for nobody, behind all that beat; else those that
    are silent; else those that have entered the fewest phases.
    """
    if absent := [rank for rank, beat in enumerate(now) if beat is None]:
        return absent, "never seen"
    beats: list[dict] = [beat for beat in now if beat]
    missing = ranks_without_beat(before, now)
    # What a silent rank wrote last may be many phases old, so it is not compared with those that beat.
    compared = [rank for rank in range(len(beats)) if rank not in missing]
    if any(beats[rank]["waited"] < seconds for rank in compared):
        return [], ""
    least = min(beats[rank]["phase_count"] for rank in compared)
    behind = [rank for rank in compared if beats[rank]["phase_count"] == least]
    place = beats[behind[0]]
    if missing and place["phase"] != "data":
        last = beats[missing[0]]
        where = f"last seen in {last['phase']} of step {last['step']}"
        return missing, f"no heartbeat for over {READING_INTERVAL * seconds:.0f} s, {where}"
    where = f"in {place['phase']} of step {place['step']} for {place['waited']:.0f} s"
    if len(behind) == len(beats) > 1 and place["phase"] != "data":
        where += ": all wait for each other; the network between them, or a driver"
    return behind, where


class HasFinished(Protocol):
    """What the thread reads of the run's `StopRequest`."""

    has_finished: bool  # whether the ranks have done all their work


class Heartbeats(threading.Thread):
    """A thread that writes this rank's beats and, in a job of several ranks, ends this one if no rank has worked or
    entered a phase for `seconds`.

    Time for which this process was itself stopped does not count. No clock is compared with another host's. `stop` is
    the run's `StopRequest`.
    """

    def __init__(self, seconds: float, store: "dist.Store", stop: HasFinished):
        super().__init__(daemon=True)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.seconds, self.stop = seconds, stop
        self.interval = min(max(BEAT, self.world / 250), seconds / 6)  # at most 250 beats a second in the whole job
        self.waited = 0.0  # seconds without work or a new phase
        self.beats = 0
        self.reported: set[str] = set()  # phases that took long
        RANKS[:] = [UNKNOWN] * self.world
        RANKS[self.rank] = host_and_pid()
        # a connection of its own, as a call on the other one may block
        self.store = store.clone()  # type: ignore[attr-defined] # torch's stubs lack it
        self.store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        self.calls = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        with contextlib.suppress(RuntimeError):  # no answer: the thread tries again
            self.beat()
        self.start()

    def ask(self, operation: Callable[..., T], *args: Any) -> T:
        """What an operation of the store returns. A thread makes the call, as some operations have no timeout.

        Raises:
            RuntimeError: the store does not answer in time.
        """
        try:
            return self.calls.submit(operation, *args).result(timeout=STORE_TIMEOUT + 1)
        except (RuntimeError, TimeoutError):
            address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', 0)}"
            cause = "rank 0, the launcher beside it, their node, or the way to it is gone"
            raise RuntimeError(f"there is no answer from the store at {address}: {cause}") from None

    def beat(self) -> None:
        """Writes where this rank is."""
        self.beats += 1
        where = {"place": RANKS[self.rank], "beat": self.beats, "waited": self.waited}
        where |= {
            "phase": PROGRESS.phase,
            "step": PROGRESS.step,
            "phase_count": [PROGRESS.phase_count, PROGRESS.save_stages],
        }
        where |= {"lasts": time.monotonic() - PROGRESS.began, "progress": describe_progress()}
        self.ask(self.store.set, f"heartbeat/{self.rank}", json.dumps(where))
        if self.world == 1 or (self.rank == 0 and self.waited < self.seconds):
            self.report_long_phase(0, where)

    def report_long_phase(self, rank: int, beat: dict) -> None:
        """Prints once of each phase that a rank has been in it for longer than the timeout."""
        if beat["lasts"] < self.seconds or beat["phase"] in self.reported:
            return
        self.reported.add(beat["phase"])
        line = f"{rank_name(rank)} has been in {beat['phase']} for {beat['lasts'] / 60:.3g} minutes"
        if beat["progress"]:
            line += f": {beat['describe_progress']}"
        print_in_thread(f"train_fsdp.py: {line}")

    def read(self) -> list[dict | None]:
        """The newest beat of each rank, None of one that has not come to the store; it fills RANKS."""

        def newest() -> list[dict | None]:
            keys = [f"heartbeat/{rank}" for rank in range(self.world)]
            present = [key for key in keys if self.store.check([key])]
            beats = dict(zip(present, map(json.loads, self.store.multi_get(present)), strict=True))
            return [beats.get(key) for key in keys]

        beats = self.ask(newest)
        RANKS[:] = [tuple(beat["place"]) if beat else UNKNOWN for beat in beats]
        return beats

    def run(self) -> None:
        place, before, read_at, now = None, None, 0.0, time.monotonic()
        while True:
            time.sleep(self.interval)
            slept, now = min(time.monotonic() - now, 2 * self.interval), time.monotonic()
            if endings.ENDING or self.stop.has_finished:
                return
            if base.WORK or place != (PROGRESS.phase_count, PROGRESS.save_stages):
                place, self.waited = (PROGRESS.phase_count, PROGRESS.save_stages), 0.0
                before, read_at = None, (1 - READING_INTERVAL) * self.seconds
            self.waited += slept
            try:
                self.beat()
                if self.world == 1 or self.waited < read_at:
                    continue
                beats = self.read()
                if before:
                    ranks, where = find_stalled_ranks(before, beats, self.seconds)
                    if ranks and place == (PROGRESS.phase_count, PROGRESS.save_stages) and not base.WORK:
                        self.end(f"--timeout-minutes: {self.describe(ranks)}: {where}")
                    if self.rank == 0:
                        _, working = min((beat["waited"], rank) for rank, beat in enumerate(beats) if beat)
                        self.report_long_phase(working, beats[working])
                # two beats later than the timeout: by then those of the others say that they wait, too
                before, read_at = beats, self.waited + READING_INTERVAL * self.seconds + 2 * self.interval
            except RuntimeError as error:
                if self.waited > self.seconds and self.world > 1:
                    waiting = f"{rank_name(self.rank)} waits in {PROGRESS.phase} of step {PROGRESS.step}"
                    self.end(f"--timeout-minutes: {waiting}, and {error}")

    def describe(self, ranks: list[int]) -> str:
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"{rank_name(ranks[0])}{others} did not come within {self.seconds / 60:g} minutes"

    def explain(self, error: BaseException) -> str:
        """After a collective broke, the rank that is gone, as it beats no more, in words; empty for any other error, or
        if no rank is."""
        import torch.distributed as dist

        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return ""
        try:
            before = self.read()
            time.sleep(MISSED_BEATS * self.interval)
            now = self.read()
        except RuntimeError as no_answer:
            return f"{rank_name(self.rank)} lost the others, and {no_answer}"
        for rank in ranks_without_beat(before, now):
            beat = now[rank]
            place = f"last seen in {beat['phase']} of step {beat['step']}" if beat else "or was never started"
            return f"{rank_name(rank)} is gone, {place}"
        return ""

    def is_first_to_print(self) -> bool:
        """Whether this rank is the first to ask, and so the one that prints why the job ends; without an answer from
        the store the first rank of each node is."""
        try:
            return self.ask(self.store.add, "failed", 1) == 1
        except RuntimeError:
            return os.environ.get("LOCAL_RANK", "0") == "0"

    def end(self, problem: str) -> NoReturn:
        """Ends this rank after a line by one rank of the job and, in the run's folder, traces of where this one
        stood."""
        PROGRESS.phase = "failure"  # from here on a SIGTERM is the launcher's, as another rank has ended: no line
        line = f"train_fsdp.py: error: {problem}"
        with open(os.devnull, "w") as nowhere:
            # a thread of C, which ends this process even where the record of NCCL holds the interpreter's lock
            faulthandler.dump_traceback_later(EXIT_TIMEOUT, exit=True, file=nowhere)
            if self.is_first_to_print():
                base.record_error(line)
                print_in_thread(line)
            if PROGRESS.folder:
                with contextlib.suppress(OSError):
                    leave_traces(PROGRESS.folder, self.rank, line)
            time.sleep(0.5)  # for the line
            endings.end(1, timeout=5)


def print_in_thread(line: str) -> None:
    """Prints on stderr; a pipe that nobody empties would block this thread."""
    threading.Thread(target=terminal.print_error, args=(line,), daemon=True).start()


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
