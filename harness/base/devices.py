"""Devices: synchronization and memory of the GPU, and memory of the host."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import ctypes

GIB = 2**30
CLOCK_STOPPED = "clock stopped"  # the mark in a profile while utils.PerformanceTracker is paused


def wait_for_device() -> None:
    """Synchronize this process's GPU, if it uses one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def gpu_name() -> str | None:
    """Name of this process's GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process on its GPU since the last reset, in GiB, from torch's caching allocator: `active` for
    blocks in use or awaited by a stream, `alloc` allocated to tensors, `reserved` held by the allocator. Empty without
    a GPU."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    stats = torch.cuda.memory_stats()
    names = {"active": "active_bytes", "alloc": "allocated_bytes", "reserved": "reserved_bytes"}
    return {f"peak_memory_{name}": stats[f"{key}.all.peak"] / GIB for name, key in names.items()}


def trim_host_memory() -> None:
    """Return freed host memory to the system: glibc keeps blocks of up to 32 MiB in its heap. No effect with other C
    libraries, which lack malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
