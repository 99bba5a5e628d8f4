"""Driver: what NVIDIA's driver says of this process's GPU, by its library NVML: NVLink, who else holds memory, why the
clocks are low. Called by `preflight` and `health`. Where there is no such driver, or the package nvidia-ml-py is not
installed, it says nothing. It does not know what is made of it."""

import contextlib
import ctypes
import functools
import os

import torch

# NVML's bits of nvmlClocksEventReasons that slow a GPU down; a GPU at its power cap works as it was built to
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@functools.cache
def find():
    """(pynvml, the handle of this process's GPU), or None."""
    if not torch.cuda.is_available():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    except pynvml.NVMLError:  # ROCm, WSL, a part of a GPU (MIG)
        return None


def describe() -> dict:
    """The driver's version, this GPU's number in the node (`index`), those of the GPUs that it has NVLink to (`links`),
    the NVLink domain of several nodes that it is in (`fabric`), and (pid, bytes) of the other processes that hold
    memory on it, empty where the container hides who that is; `{}` without a driver. Keys are absent where the driver
    does not answer."""
    if not (found := find()):
        return {}
    nvml, gpu = found
    known = {}

    def ask(name: str, question):
        with contextlib.suppress(nvml.NVMLError):  # not supported here
            known[name] = question()

    def linked() -> list[int]:
        others = {
            n: nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount()) if n != known["index"]
        }
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

    ask("driver", nvml.nvmlSystemGetDriverVersion)
    ask("index", lambda: nvml.nvmlDeviceGetIndex(gpu))
    if "index" in known:
        ask("links", linked)
    ask("fabric", fabric)
    ask("holders", holders)
    return known


def slowdown() -> int:
    """Why this GPU's clocks are low now, as bits of SLOWDOWNS; 0 where they are not or nobody knows."""
    if not (found := find()):
        return 0
    nvml, gpu = found
    try:
        return nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & sum(SLOWDOWNS)
    except nvml.NVMLError:
        return 0


def name_slowdown(bits: int) -> str:
    return ", ".join(name for bit, name in SLOWDOWNS.items() if bits & bit)
