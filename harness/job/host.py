"""Host: cores of this machine or container, and the number of threads per rank. Called before torch is imported."""

import contextlib
import os
import pathlib

import psutil

from harness import flags

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
CGROUPS = "/sys/fs/cgroup"
SPIN_COUNT = 1_000_000  # about 10 ms; libgomp's own default is 300,000 (libgomp/env.c)


def local_world_size() -> int:
    """Return the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cgroup_limits(name: str, path: str | None = None) -> list[list[str]]:
    """Return the words in the file `name` of a cgroup (version 2) and of each cgroup that contains it. `path` is the
    cgroup's, by default this process's."""
    if path is None:
        own = pathlib.Path("/proc/self/cgroup")
        lines = own.read_text().splitlines() if own.exists() else []
        path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folders = [path, *map(str, pathlib.PurePosixPath(path).parents)]
    files = [pathlib.Path(CGROUPS, folder.strip("/"), name) for folder in dict.fromkeys(folders)]
    return [file.read_text().split() for file in files if file.is_file()]


def allowed_cores() -> list[int]:
    """Return the numbers of the cores in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def cores() -> int:
    """Return the number of cores that affinity and cgroup quotas allow, at least 1."""
    quotas = [int(quota) / int(period) for quota, period in cgroup_limits("cpu.max") if quota != "max"]
    return max(1, int(min([len(allowed_cores()), *quotas])))


def busy_cores() -> float:
    """Sleep 0.1 s and return how many of this process's cores were in use."""
    percents = psutil.cpu_percent(0.1, percpu=True)
    return sum(percents[core] for core in allowed_cores()) / 100


def may_spin(threads: int, streaming: bool) -> bool:
    """Return True if the threads of all ranks on this host may spin while they wait for each other: each thread, and
    each process that reads a stream, has a core that no other process uses."""
    ranks, available = local_world_size(), cores()
    needed = ranks * (threads + 1 if streaming else threads)
    if threads == 1 or needed > available:
        return False
    starting = ranks - 1  # the other ranks are loading Python, on at most one core each
    return needed + busy_cores() - starting < available + 0.5


def set_threads(settings: flags.Args) -> None:
    """Set the number of OpenMP threads and how they wait, if the CPU computes. Called before torch is imported.

    One thread per core; the ranks of this host share the cores. Threads spin while they wait if their cores are free
    (`may_spin`). Otherwise they sleep at once, as a spinning thread takes the core of the thread that it waits for.

    Variables that the user has set stay. torchrun and accelerate set OMP_NUM_THREADS=1 if it is unset; their own
    environment shows if the user has set it.
    """
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all") and any(map(os.path.exists, GPU_DRIVERS))
    if on_gpu and not settings.cpu_offload:
        return
    is_given = "OMP_NUM_THREADS" in os.environ
    launcher_environment = pathlib.Path(f"/proc/{os.getppid()}/environ")
    if is_given and "TORCHELASTIC_RUN_ID" in os.environ and launcher_environment.exists():
        with contextlib.suppress(OSError):  # the launcher has died
            is_given = b"OMP_NUM_THREADS=" in launcher_environment.read_bytes()
    if not is_given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // local_world_size()))
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    threads = os.environ["OMP_NUM_THREADS"]
    if threads.isdigit() and may_spin(int(threads), settings.streaming):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    else:
        os.environ["OMP_WAIT_POLICY"] = "passive"
