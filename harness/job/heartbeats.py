"""Heartbeats: every rank writes its phase into the job's store every few seconds; when the job stalls, one line names
the rank for which the others wait, even before the ranks have met. Started by the script; code calls `enter_phase`.
Independent of what is trained."""

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

from harness import base
from harness.base import torch_internals
from harness.job import endings, terminal

BEAT = 2.0  # seconds between two beats
SILENT = 3  # missing beats after which a rank is silent
STORE_PATIENCE = 10.0  # seconds until the store must have answered
EXIT_PATIENCE = 9.0  # seconds after which a rank that ends a stalled job is gone, whatever blocks it

# (host, pid) of each rank, ("", 0) of one that was never seen; of this rank alone until heartbeats have begun
RANKS: list[tuple[str, int]] = [(socket.gethostname(), os.getpid())]
ABSENT: dict = {"beat": 0}  # the beat of a rank that has not come to the store


@dataclasses.dataclass
class Here:
    """Where this process is. Every rank enters the same phases in the same order: `moves` counts them."""

    phase: str = "start"
    step: int = 0
    phase_changes: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)
    writing: str = ""  # the part of a checkpoint that a thread writes now, for which other ranks may wait
    folder: pathlib.Path | None = None  # of the run, where a stall leaves its traces
    store: dist.Store | None = None  # of the job


HERE = Here()


def enter_phase(phase: str, step: int | None = None) -> None:
    """Records that this rank enters a phase; every rank calls this."""
    endings.block_if_exiting()
    HERE.phase = phase
    if step is not None:
        HERE.step = step
    HERE.since = time.monotonic()
    HERE.phase_changes += 1


class Heartbeats(threading.Thread):
    """A thread that writes this rank's beats, and ends a stalled job: when this rank enters no new phase for `seconds`,
    one line names the rank for which it waits.

    A rank that beats no more may be healthy: a call into C can hold the interpreter's lock, such as a launch into a
    full queue of the GPU. It counts as stopped only where the system says so, to a rank beside it.

    It starts before the ranks have met, so that a rank that never comes to the job's store is named too. Time for which
    this process was itself stopped does not count as waiting. During the preparation ranks wait without limit for the
    one that reads and tokenizes; only a rank that is stopped, or whose whole node is silent, ends the job.
    """

    def __init__(self, seconds: float, store: dist.Store):
        super().__init__(daemon=True)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.seconds, self.met = seconds, False
        self.interval = min(max(BEAT, self.world / 250), seconds / 6)  # at most 250 beats a second in the whole job
        self.silence = max(SILENT * self.interval, min(30.0, seconds / 2))  # a call into C can hold the GIL that long
        self.beat = 0  # number of the last one
        self.asking: threading.Thread | None = None  # waits for an answer of the store
        self.lock = threading.Lock()
        self.place = RANKS[0]
        HERE.store = store
        self.store = store.clone()  # a connection of its own, as a call on the other one may block
        self.store.set_timeout(timedelta(seconds=STORE_PATIENCE))
        with contextlib.suppress(RuntimeError):  # no answer: the thread tries again
            self.tell()
        self.start()

    def meet(self) -> None:
        """Gathers host and pid of all ranks; every rank calls this once all have joined the process group."""
        everyone = [self.place] * self.world
        dist.all_gather_object(everyone, self.place)
        RANKS[:] = everyone
        self.met = True

    def ask(self, operation: Callable, *args):
        """What an operation of the store returns; a RuntimeError when the store does not answer in time. A thread makes
        the call, as some operations have no timeout."""
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
        """Writes the next beat into the store; a RuntimeError when the store does not answer."""
        self.beat += 1
        beat = {
            "beat": self.beat,
            "phase": HERE.phase,
            "step": HERE.step,
            "moves": HERE.phase_changes,
            "time": time.time(),
            "seconds": time.monotonic() - HERE.since,
            "writing": HERE.writing,
            "place": self.place,
            "beside": [*self.neighbours()],
            "down": self.down(),
        }
        self.ask(self.store.set, f"heartbeat/{self.rank}", json.dumps(beat))

    def read(self) -> list[dict]:
        """The newest beat of each rank; `ABSENT` of a rank that has not come to the store."""
        keys = [f"heartbeat/{rank}" for rank in range(self.world)]
        present = keys
        if not self.met:
            present = [key for key in keys if self.ask(self.store.check, [key])]
        texts = self.ask(self.store.multi_get, present)
        beat_of = {key: json.loads(text) for key, text in zip(present, texts, strict=True)}
        beats = [beat_of.get(key, ABSENT) for key in keys]
        if not self.met:
            beside, places = ranks_beside(), []
            for rank, beat in enumerate(beats):
                place = beat.get("place") or beside.get(rank, ("", 0))
                places.append(tuple(place))
            RANKS[:] = places
        return beats

    def run(self) -> None:
        moves, waited, before, now = 0, 0.0, None, time.monotonic()
        while True:
            time.sleep(self.interval)
            slept, now = time.monotonic() - now, time.monotonic()
            if endings.ENDING:  # what this rank still waits for, such as an upload, has a timeout of its own
                return
            if HERE.phase_changes != moves:
                moves, waited, before = HERE.phase_changes, 0.0, None
            waited += min(slept, 2 * self.interval)
            try:
                self.tell()
                if waited < self.seconds:
                    continue
                if before is None:
                    before, until = self.read(), waited + self.silence
                elif waited >= until:
                    ranks, what = self.judge(before, self.read())
                    if what and HERE.phase_changes == moves:
                        self.end(self.describe(ranks, what), ranks)
                    waited, before = 0.0, None
            except RuntimeError as error:
                if waited > self.seconds:
                    self.end(f"{self.name_of(self.rank)} waits in {HERE.phase} of step {HERE.step}, and {gone(error)}")

    def name_of(self, rank: int) -> str:
        host, pid = self.place if rank == self.rank else RANKS[rank]
        return f"rank {rank} ({host}, pid {pid})" if pid else f"rank {rank}"

    def neighbours(self) -> range:
        """The ranks that this rank's launcher started, this one included; empty without a launcher."""
        first = self.rank - int(os.environ.get("LOCAL_RANK", 0))
        return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 0)))

    def down(self) -> list[int]:
        """The ranks beside this one that the system says are stopped, zombies or gone."""
        beside = [rank for rank in self.neighbours() if rank != self.rank and rank < len(RANKS)]
        return [rank for rank in beside if RANKS[rank][1] and not is_running(RANKS[rank][1])]

    def judge(self, before: list[dict], now: list[dict]) -> tuple[list[int], str]:
        """The ranks for which the others wait, and in words where they are, by two readings of all beats; ([], "")
        while it is too early to know."""
        if absent := [rank for rank in range(self.world) if now[rank] == ABSENT]:
            return absent, "never seen; stopped or killed before the ranks met, or not started"
        beating = [rank for rank in range(self.world) if before[rank]["beat"] != now[rank]["beat"]]
        silent = [rank for rank in range(self.world) if rank not in beating]
        seen = {rank for watcher in beating for rank in now[watcher]["beside"]}
        cut_off = [rank for rank in silent if rank not in seen]  # nobody beside it knows its state
        if down := sorted({rank for watcher in beating for rank in now[watcher]["down"]}):
            return down, f"{last_seen(now[down[0]])}; stopped, killed or cut off"
        if all(beat["phase"] == "preparation" for beat in now) and not cut_off:
            return [], ""
        least = min(now[rank]["moves"] for rank in beating)
        behind = [rank for rank in beating if now[rank]["moves"] == least]
        writing = [rank for rank in behind if now[rank]["writing"]]
        place = now[(writing or behind)[0]]
        where = f"in {place['phase']} of step {place['step']} for {place['seconds']:.0f} s"
        if writing and len(behind) == len(beating):
            return writing, f"{where}: at the {place['writing']} of a checkpoint"
        if place["phase"] == "data":  # where it waits for nobody, so that what a silent rank last said is too old
            return behind, where
        if cut_off:
            return cut_off, f"{last_seen(now[cut_off[0]])}; stopped, killed or cut off"
        if len(behind) < len(beating) or self.world == 1:
            return writing or behind, where
        if silent:
            silent = [rank for rank in silent if now[rank]["moves"] == min(now[rank]["moves"] for rank in silent)]
            return silent, f"{last_seen(now[silent[0]])}; its process runs, but a call holds the interpreter's lock"
        return behind, f"{where}: all wait for each other; the network between them, or a driver"

    def describe(self, ranks: list[int], what: str) -> str:
        names = self.name_of(ranks[0])
        if len(ranks) == self.world > 1:
            names = f"all {self.world} ranks"
        elif len(ranks) > 1:
            names += f" and {len(ranks) - 1} more"
        return f"{names} did not come within {self.seconds / 60:g} minutes: {what}"

    def end(self, problem: str, ranks: Collection[int] = ()) -> None:
        """Ends this rank after a line by one rank of the job and, in the run's folder, traces of where this one stood.

        It ends later than `ranks`, for which it waited, so that the launcher names those first. Those of this node that
        the system says are stopped cannot end themselves, and are killed; a rank that is only silent is not.
        """
        # a thread of C, which ends this process even where the record of NCCL holds the interpreter's lock
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(EXIT_PATIENCE, exit=True, file=nowhere)
            self.end_in_time(problem, ranks)

    def end_in_time(self, problem: str, ranks: Collection[int]) -> None:
        """`end`, by whatever may block."""
        try:
            speaks = self.ask(speaks_first, self.store)
        except RuntimeError:
            speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        line = f"train_fsdp.py: error: --timeout-minutes: {problem}"
        if speaks:
            base.record_error(line)
            # in a thread, as a pipe that nobody empties would block this one
            threading.Thread(target=terminal.print_error, args=(line,), daemon=True).start()
        if HERE.folder:
            with contextlib.suppress(OSError):
                with open(HERE.folder / f"stalled-rank-{self.rank}.txt", "w") as file:
                    file.write(f"{line}\n")
                    faulthandler.dump_traceback(file)
                dump_flight_recorder(HERE.folder, self.rank)
        HERE.phase = "failure"  # from here on a SIGTERM is the launcher's, as another rank has ended: no line about it
        if self.rank not in ranks:
            for rank in {*ranks} & {*self.down()}:
                with contextlib.suppress(OSError):
                    os.kill(RANKS[rank][1], signal.SIGKILL)
            time.sleep(2 * self.interval)
        time.sleep(0.5)
        endings.announce(1, patience=5)
        os._exit(1)

    def explain(self, error: BaseException) -> str:
        """After a collective broke, the rank that is gone, in words; empty for any other error, or if no rank is."""
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return ""
        try:
            before, until = self.read(), time.monotonic() + SILENT * self.interval
            missing: list[int] = []
            while not missing and time.monotonic() < until:
                time.sleep(0.1)
                missing = [rank for rank in self.neighbours() if not is_running(RANKS[rank][1])]
            now = self.read()
            if not missing:
                missing = [rank for rank in range(self.world) if before[rank]["beat"] == now[rank]["beat"]]
        except RuntimeError as error:
            return f"{self.name_of(self.rank)} lost the others, and {gone(error)}"
        if not missing:
            return ""
        last = now[missing[0]]
        if last == ABSENT:
            return f"{self.name_of(missing[0])} is gone, or was never started"
        return f"{self.name_of(missing[0])} is gone, last seen in {last['phase']} of step {last['step']}"


def speaks_first(store: dist.Store | None) -> bool:
    """Whether this rank is the first to ask, and so the one that prints why the job ends; always without a store."""
    return store is None or store.add("train_fsdp/failed", 1) == 1


def ranks_beside() -> dict[int, tuple[str, int]]:
    """(host, pid) of the ranks that this one's launcher started, by their environment: they may still load torch."""
    places = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error, KeyError):
                places[int(child.environ()["RANK"])] = socket.gethostname(), child.pid
    return places


def is_running(pid: int) -> bool:
    """Whether a process runs, by the system: it is neither stopped nor a zombie nor gone."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def last_seen(beat: dict) -> str:
    return f"last seen {max(0.0, time.time() - beat['time']):.0f} s ago in {beat['phase']} of step {beat['step']}"


def gone(error: RuntimeError) -> str:
    """What a store that does not answer means, as the end of a line."""
    return f"there is {error}: rank 0, the launcher beside it, their node, or the way to it is gone"


def store_address() -> str:
    """Host and port of the job's store, as the launcher set them."""
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', 0)}"


def record_into(folder: pathlib.Path) -> None:
    """Sets the run's folder, where a stall leaves its traces, NCCL's own record of its collectives too."""
    HERE.folder = folder
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # of this torch, and of older ones
        os.environ.setdefault(name, str(folder.resolve() / "nccl_trace_rank_"))


def dump_flight_recorder(folder: pathlib.Path, rank: int) -> None:
    """Writes NCCL's record of its last collectives, for torch's `torchfrtrace`."""
    trace = torch_internals.nccl_trace()
    if trace is not None:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
