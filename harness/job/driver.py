"""Driver: what NVIDIA's driver reports of this process's GPU, by its library NVML: NVLink, which other processes hold
memory, why the clocks are low. Called by `preflight` and `figures`. Without the driver, without the package
nvidia-ml-py, and for questions that the driver does not answer, the report is empty. Independent of what is made of
it."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

# NVML's bits of nvmlClocksEventReasons that slow a GPU down; its power cap is no such reason: it is how GPUs are built
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
ANY_SLOWDOWN = 0x08 | 0x20 | 0x40 | 0x80


def ask(question: Callable[[], Any], otherwise: Any = None) -> Any:
    """What the driver answers, or `otherwise`. Drivers, their library and its package come in any combination of
    versions: a name may be missing, the library may not load, a question may not be supported. A diagnosis never ends a
    run."""
    try:
        return question()
    except Exception:
        return otherwise


@functools.cache
def find():
    """(pynvml, the handle of this process's GPU), or None: ROCm, WSL, a part of a GPU (MIG), no package, a CPU."""

    def connect():
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")

    return ask(connect) if torch.cuda.is_available() else None


def describe() -> dict:
    """The GPU as the driver knows it; `{}` without a driver. A key is absent where the driver does not answer.

    driver: its version.
    index: the GPU's number in the node.
    links: the numbers of the GPUs that it has NVLink to.
    holders: (pid, bytes) of the other processes that hold memory on it, empty where the container hides them.
    """
    connection = find()
    if connection is None:
        return {}
    nvml, gpu = connection

    def linked() -> list[int]:
        own = nvml.nvmlDeviceGetIndex(gpu)
        numbers = []
        for number in range(nvml.nvmlDeviceGetCount()):
            if number == own:
                continue
            other = nvml.nvmlDeviceGetHandleByIndex(number)
            status = nvml.nvmlDeviceGetP2PStatus(gpu, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if status == nvml.NVML_P2P_STATUS_OK:
                numbers.append(number)
        return numbers

    def holders() -> list[tuple[int, int]]:
        processes = {
            process.pid: process.usedGpuMemory or 0 for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        }
        if os.getpid() not in processes:  # a container: these are pids of the host
            return []
        del processes[os.getpid()]
        return list(processes.items())

    questions = {
        "driver": lambda: nvml.nvmlSystemGetDriverVersion(),  # looked up within `ask`: a version may lack the name
        "index": lambda: nvml.nvmlDeviceGetIndex(gpu),
        "links": linked,
        "holders": holders,
    }
    answers = {name: ask(question) for name, question in questions.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def slowdown() -> int:
    """Why this GPU's clocks are low now, as bits of SLOWDOWNS; 0 where they are not low or the driver does not say."""
    connection = find()
    if connection is None:
        return 0
    nvml, gpu = connection
    return ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & ANY_SLOWDOWN, 0)


def name_slowdown(bits: int) -> str:
    """Bits of SLOWDOWNS in words."""
    return ", ".join(name for bit, name in SLOWDOWNS.items() if bits & bit)
