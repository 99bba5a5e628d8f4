"""Host: the cores and the memory that this machine, or the container on it, has for its ranks. Called by the script
before torch is imported and before anything large is allocated. Independent of what is computed."""

import contextlib
import dataclasses
import multiprocessing.util
import os
import pathlib
import resource
import tempfile
import time

import psutil

from harness.flags import Settings

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
CGROUPS = "/sys/fs/cgroup"
SOCKET_PATH = 107  # bytes of the path of a socket (unix(7): 108 with the zero at its end)
SOCKET_NAME = len("/pymp-01234567/listener-01234567")  # that multiprocessing appends


def ranks_here() -> int:
    """The number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def limits(name: str, path: str | None = None) -> list[list[str]]:
    """The words in the file `name` of this process's cgroup (version 2), and of each cgroup that contains it. `path` is
    that of the cgroup, by default this process's."""
    if path is None:
        own = pathlib.Path("/proc/self/cgroup")
        lines = own.read_text().splitlines() if own.exists() else []
        path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folders = [path, *map(str, pathlib.PurePosixPath(path).parents)]
    files = [pathlib.Path(CGROUPS, folder.strip("/"), name) for folder in dict.fromkeys(folders)]
    return [file.read_text().split() for file in files if file.is_file()]


def cores() -> int:
    """The cores that this process may use, by its affinity and by the quotas of its cgroups; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [int(quota) / int(period) for quota, period in limits("cpu.max") if quota != "max"]
    return max(1, int(min([count, *quotas])))


def memory() -> int:
    """Bytes that the processes of this host can hold: RAM and swap, or what the cgroups allow where that is less."""
    allowed = [int(words[0]) for words in limits("memory.max") if words[0] != "max"]
    return min([psutil.virtual_memory().total + psutil.swap_memory().total, *allowed])


SPIN_COUNT = 1_000_000  # about 10 ms; libgomp's own default is 300,000 (libgomp/env.c)
SECONDS_OF_LOAD = 0.1  # over which the use of the cores is read: 20 clock ticks on two cores


def busy_cores(seconds: float = SECONDS_OF_LOAD) -> float:
    """How many cores of this process's affinity mask are in use during the next `seconds`, while it sleeps."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    before = psutil.cpu_times(percpu=True)
    time.sleep(seconds)
    after = psutil.cpu_times(percpu=True)
    busy = 0.0
    for core in allowed:
        passed = sum(after[core]) - sum(before[core])
        if passed > 0:
            busy += 1 - (idle_time(after[core]) - idle_time(before[core])) / passed
    return busy


def idle_time(times) -> float:
    """Seconds that a core was idle; Linux counts the time that it waits for a disk apart."""
    return times.idle + getattr(times, "iowait", 0.0)


def may_spin(threads: int, streaming: bool) -> bool:
    """Whether the threads of all ranks here may keep their cores while they wait for each other: there is a core for
    each thread, and for each process that reads a stream, and other processes leave those cores free."""
    ranks, available = ranks_here(), cores()
    processes_a_rank = threads + 1 if streaming else threads
    needed = ranks * processes_a_rank
    if threads == 1 or needed > available:
        return False
    starting = ranks - 1  # the other ranks load Python now, and use a core each at most
    return needed + busy_cores() - starting < available + 0.5


def set_threads(settings: Settings) -> None:
    """Sets the number of threads, and how they wait, where the CPU computes. Called before torch is imported.

    One thread a core, the cores divided among the ranks of this host. Threads that wait for each other keep their cores
    for a while where those are free (`may_spin`). Otherwise they sleep at once: beside a busy process a waiting thread
    takes the core of the thread that it waits for. docs/PERFORMANCE.md has the figures.

    What the user has set stays. torchrun and accelerate set OMP_NUM_THREADS=1 where it was unset: their own environment
    tells which.
    """
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all") and any(map(os.path.exists, GPU_DRIVERS))
    if on_gpu and not settings.cpu_offload:
        return
    is_given = "OMP_NUM_THREADS" in os.environ
    launcher_environment = pathlib.Path(f"/proc/{os.getppid()}/environ")
    if is_given and "TORCHELASTIC_RUN_ID" in os.environ and launcher_environment.exists():
        with contextlib.suppress(OSError):  # the launcher has died since
            is_given = b"OMP_NUM_THREADS=" in launcher_environment.read_bytes()
    if not is_given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // ranks_here()))
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    threads = os.environ["OMP_NUM_THREADS"]
    if threads.isdigit() and may_spin(int(threads), settings.streaming):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    else:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def raise_file_limit() -> int:
    """Raises this process's limit of open files to its hard limit, for data workers too; returns the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS calls the hard limit infinite and allows less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shorten_sockets() -> None:
    """Puts the sockets of data workers into /tmp where TMPDIR is longer than a socket's address can be; other temporary
    files stay in TMPDIR.

    Raises:
        UserError: /tmp cannot be written.
    """
    from harness.base import UserError

    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + SOCKET_NAME <= SOCKET_PATH:
        return
    try:
        tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()  # keeps its first answer, which the processes that it starts get too
    except OSError as error:
        problem = f"its path of {len(os.fsencode(folder))} bytes is too long for the sockets of data workers"
        advice = "give a TMPDIR of 70 bytes at most, or --num-workers 0"
        raise UserError(f"TMPDIR: {problem}, and /tmp cannot take them ({error.strerror}); {advice}") from None
    finally:
        tempfile.tempdir = folder


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Bytes that one parameter of a model takes, by what is kept of it."""

    weight: int
    states: float  # of the optimizer, in memory; an average where parameters differ
    saved_states: float  # of the optimizer, in a checkpoint
    average: int = 0  # with --ema, in memory and in a checkpoint

    @property
    def at_rest(self) -> float:
        """In memory: the parameter, its gradient, its optimizer states and its average."""
        return 2 * self.weight + self.states + self.average

    @property
    def in_checkpoint(self) -> float:
        return self.weight + self.saved_states + self.average


def check_memory(settings: Settings, parameters: int, each: ParameterBytes, shards: int) -> None:
    """Raises a UserError where the parameters, gradients, optimizer states and averages of the ranks here are more than
    this host can hold: a lower bound of what training takes. `shards` is the number of ranks that share one replica."""
    from harness.base import GIB, UserError

    need, available = parameters * each.at_rest * ranks_here() / shards, memory()
    if need > available:
        beside = "gradients, optimizer states and average" if each.average else "gradients and optimizer states"
        what = f"{parameters:,} parameters x {each.at_rest:.4g} bytes with their {beside}"
        advice = "try --demo, or look for GPUs that hold it by --plan"
        have = f"training on the host takes {need / GIB:,.1f} GiB and more ({what}), it has {available / GIB:,.1f}"
        raise UserError(f"--model {settings.model}: {have}; {advice}")
