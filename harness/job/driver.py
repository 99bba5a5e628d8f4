"""Driver: what NVIDIA's driver says of this process's GPU, by its library NVML: NVLink, who else holds memory, why the
clocks are low. Called by `preflight` and `figures`. Where there is no such driver, or the package nvidia-ml-py is not
installed, or where it does not answer, it says nothing. Independent of what is made of it."""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

# NVML's bits of nvmlClocksEventReasons that slow a GPU down; a GPU at its power cap works as it was built to
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def ask(question: Callable[[], Any], otherwise: Any = None) -> Any:
    """What the driver answers, else `otherwise`. Drivers, their library and its package come in any versions together:
    a name may be missing, a library not load, a question not be supported. A diagnosis never ends a run."""
    try:
        return question()
    except Exception:
        return otherwise


@functools.cache
def find():
    """(pynvml, the handle of this process's GPU), or None: ROCm, WSL, a part of a GPU (MIG), no package."""

    def connect():
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")

    return ask(connect) if torch.cuda.is_available() else None


def describe() -> dict:
    """The driver's version, this GPU's number in the node (`index`), those of the GPUs that it has NVLink to (`links`),
    the NVLink domain of several nodes that it is in (`fabric`), and (pid, bytes) of the other processes that hold
    memory on it, empty where the container hides who that is; `{}` without a driver. Keys are absent where the driver
    does not answer."""
    if not (found := find()):
        return {}
    nvml, gpu = found

    def linked() -> list[int]:
        own = nvml.nvmlDeviceGetIndex(gpu)
        others = {n: nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount()) if n != own}
        status = {n: nvml.nvmlDeviceGetP2PStatus(gpu, o, nvml.NVML_P2P_CAPS_INDEX_NVLINK) for n, o in others.items()}
        return [n for n in others if status[n] == nvml.NVML_P2P_STATUS_OK]

    def fabric() -> str:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
        uuid = bytes(info.clusterUuid).hex()
        return f"{uuid}/{info.cliqueId}" if info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and int(uuid, 16) else ""

    def holders() -> list[tuple[int, int]]:
        processes = {
            process.pid: process.usedGpuMemory or 0 for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        }
        own = processes.pop(os.getpid(), None)
        return [*processes.items()] if own is not None else []

    questions = {
        "driver": lambda: nvml.nvmlSystemGetDriverVersion(),
        "index": lambda: nvml.nvmlDeviceGetIndex(gpu),
        "links": linked,
        "fabric": fabric,
        "holders": holders,
    }
    answers = {name: ask(question) for name, question in questions.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def slowdown() -> int:
    """Why this GPU's clocks are low now, as bits of SLOWDOWNS; 0 where they are not or nobody knows."""
    if not (found := find()):
        return 0
    nvml, gpu = found
    return ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & sum(SLOWDOWNS), 0)


def name_slowdown(bits: int) -> str:
    return ", ".join(name for bit, name in SLOWDOWNS.items() if bits & bit)
