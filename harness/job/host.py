"""Host: the cores and the memory that this machine, or the container on it, has for its ranks. Called by the script
before torch is imported, and before anything large is made. It does not know what is computed."""

import contextlib
import dataclasses
import multiprocessing.util
import os
import pathlib
import resource
import tempfile
import time

import psutil

from harness.flags.settings import Settings

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
CGROUPS = "/sys/fs/cgroup"
SOCKET_PATH = 107  # bytes of the path of a socket (unix(7): 108 with the zero at its end)
SOCKET_NAME = len("/pymp-01234567/listener-01234567")  # that multiprocessing appends


def ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def limits(name: str, path: str | None = None) -> list[list[str]]:
    """The words in the file `name` of this process's cgroup (version 2) and of those around it; `path` names it."""
    if path is None:
        own = pathlib.Path("/proc/self/cgroup")
        lines = own.read_text().splitlines() if own.exists() else []
        path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folders = [path, *map(str, pathlib.PurePosixPath(path).parents)]
    files = [pathlib.Path(CGROUPS, folder.strip("/"), name) for folder in dict.fromkeys(folders)]
    return [file.read_text().split() for file in files if file.is_file()]


def cores() -> int:
    """The cores that this process may use: by its affinity and by the quotas of its cgroups."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(quota) / int(period) for quota, period in limits("cpu.max") if quota != "max"]
    return max(1, int(min([count, *quotas])))


def memory() -> int:
    """Bytes that the processes of this host can hold: of RAM and swap, or what its cgroups allow if that is less."""
    allowed = [int(words[0]) for words in limits("memory.max") if words[0] != "max"]
    return min([psutil.virtual_memory().total + psutil.swap_memory().total, *allowed])


SPIN_COUNT = 1_000_000  # about 10 ms; libgomp's own default is 300,000 (libgomp/env.c)
LOOK = 0.1  # seconds over which the use of the cores is read, 20 clock ticks on two cores


def busy_cores(seconds: float = LOOK) -> float:
    """How many of the cores of this process's affinity mask others used during the next `seconds`."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    before = psutil.cpu_times(percpu=True)
    time.sleep(seconds)
    after = psutil.cpu_times(percpu=True)
    busy = 0.0
    for core in mine:
        passed = sum(after[core]) - sum(before[core])
        if passed > 0:
            busy += 1 - (idle_time(after[core]) - idle_time(before[core])) / passed
    return busy


def idle_time(times) -> float:
    """Seconds; Linux counts those that wait for a disk apart."""
    return times.idle + getattr(times, "iowait", 0.0)


def may_spin(threads: int, streaming: bool) -> bool:
    """Whether the threads of all ranks here can wait for each other without taking a core from anybody: there is a
    core for each, and for the process of each rank that reads a stream, and others leave those cores free."""
    ranks, there = ranks_here(), cores()
    needed = ranks * (threads + streaming)
    if threads == 1 or needed > there:
        return False
    starting = ranks - 1  # the other ranks, which load Python at this moment, a core each at most
    return needed + busy_cores() - starting < there + 0.5


def set_threads(settings: Settings) -> None:
    """Where the CPU computes: one thread a core, the cores divided among the ranks here. Threads that wait for each
    other hold their cores for a while where those are free (`may_spin`), and sleep at once where they are not: beside
    a busy process a waiting thread takes the core of the one that it waits for. docs/PERFORMANCE.md has the figures.
    Called before torch is imported; what is set already stays.

    torchrun and accelerate set one thread a rank where nothing is set, which is known from what they started with."""
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all") and any(map(os.path.exists, GPU_DRIVERS))
    if on_gpu and not settings.cpu_offload:
        return
    given = "OMP_NUM_THREADS" in os.environ
    started_with = pathlib.Path(f"/proc/{os.getppid()}/environ")
    if given and "TORCHELASTIC_RUN_ID" in os.environ and started_with.exists():
        with contextlib.suppress(OSError):  # it has died since
            given = b"OMP_NUM_THREADS=" in started_with.read_bytes()
    if not given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // ranks_here()))
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    threads = os.environ["OMP_NUM_THREADS"]
    if threads.isdigit() and may_spin(int(threads), settings.streaming):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    else:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def raise_file_limit() -> int:
    """Lets this process and its data workers open as many files as the system allows it; returns how many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS calls its limit infinite and allows less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shorten_sockets() -> None:
    """Lets data workers reach their rank where TMPDIR is so long that no socket's address holds a path in it: their
    sockets lie in /tmp then, all other files stay where TMPDIR says.

    Raises:
        UserError: nobody may write in /tmp.
    """
    from harness.base.errors import UserError

    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + SOCKET_NAME <= SOCKET_PATH:
        return
    try:
        tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()  # it keeps the first answer, for the processes that it starts too
    except OSError as error:
        problem = f"its path of {len(os.fsencode(folder))} bytes is too long for the sockets of data workers"
        advice = "give a TMPDIR of 70 bytes at most, or --num-workers 0"
        raise UserError(f"TMPDIR: {problem}, and /tmp cannot take them ({error.strerror}); {advice}") from None
    finally:
        tempfile.tempdir = folder


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter of a model takes."""

    weight: int
    states: int  # of the optimizer, in memory
    saved_states: int  # of the optimizer, in a checkpoint

    @property
    def at_rest(self) -> int:
        """In memory, with its gradient and its optimizer states."""
        return 2 * self.weight + self.states

    @property
    def in_checkpoint(self) -> int:
        return self.weight + self.saved_states


def check_memory(settings: Settings, parameters: int, each: ParameterBytes, shards: int) -> None:
    """Raises a UserError where parameters, gradients and optimizer states alone, of the ranks here, are more than this
    host can hold: a lower bound of what training takes. `shards` is how many ranks share one replica."""
    from harness.base.devices import GIB
    from harness.base.errors import UserError

    need, there = parameters * each.at_rest * ranks_here() / shards, memory()
    if need > there:
        what = f"{parameters:,} parameters x {each.at_rest} bytes with their gradients and optimizer states"
        advice = "try --demo, or look for GPUs that hold it by --plan"
        have = f"training on the host takes {need / GIB:,.1f} GiB and more ({what}), it has {there / GIB:,.1f}"
        raise UserError(f"--model {settings.model}: {have}; {advice}")
