"""Host: the cores and the memory that this machine, or the container on it, has for its ranks. Called by the script
before torch is imported, and before anything large is made. It does not know what is computed."""

import os
import pathlib

import psutil

from harness.settings import Settings

GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
CGROUPS = "/sys/fs/cgroup"


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


def set_threads(settings: Settings) -> None:
    """Where the CPU computes: one thread a core, the cores divided among the ranks here, and threads that wait for each
    other without holding a core that somebody else needs. Called before torch is imported; what is set already stays.

    torchrun and accelerate set one thread a rank where nothing is set, which is known from what they started with."""
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "all") and any(map(os.path.exists, GPU_DRIVERS))
    if on_gpu and not settings.cpu_offload:
        return
    given = "OMP_NUM_THREADS" in os.environ
    started_with = pathlib.Path(f"/proc/{os.getppid()}/environ")
    if given and "TORCHELASTIC_RUN_ID" in os.environ and started_with.exists():
        given = b"OMP_NUM_THREADS=" in started_with.read_bytes()
    if not given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // ranks_here()))
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"


def bytes_of_states(settings: Settings) -> tuple[int, int]:
    """Bytes of a parameter, and of its optimizer states."""
    weight = 2 if settings.precision == "bf16-pure" else 4
    return weight, {"adamw": 2 * weight, "adamw-bf16": 4, "adamw8bit": 2}[settings.optimizer]


def bytes_at_rest(settings: Settings) -> int:
    """Bytes of a parameter with its gradient and its optimizer states."""
    weight, states = bytes_of_states(settings)
    return 2 * weight + states


def check_memory(settings: Settings, parameters: int, shards: int) -> None:
    """Raises a UserError where parameters, gradients and optimizer states alone, of the ranks here, are more than this
    host can hold: a lower bound of what training takes. `shards` is how many ranks share one replica."""
    from utils import GIB, UserError

    each = bytes_at_rest(settings)
    need, there = parameters * each * ranks_here() / shards, memory()
    if need > there:
        what = f"{parameters:,} parameters x {each} bytes with their gradients and optimizer states"
        advice = "try --demo, or look for GPUs that hold it by --plan"
        have = f"training on the host takes {need / GIB:,.1f} GiB and more ({what}), it has {there / GIB:,.1f}"
        raise UserError(f"--model {settings.model}: {have}; {advice}")
