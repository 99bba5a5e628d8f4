"""Devices: the unit of memory, waiting for the GPU, how much of its memory was taken, what the host's memory keeps, and
the mark of what no clock counts."""

from __future__ import annotations  # older interpreters read this far, to be told so

import ctypes

GIB = 2**30
CLOCK_STOPPED = "clock stopped"  # in a profile, what utils.PerformanceTracker leaves out


def wait_for_device() -> None:
    """Returns when this process's GPU has done all that it was given; at once without a GPU."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def memory_metrics() -> dict[str, float]:
    """The peaks of this process on its GPU since the last reset in GiB, by torch's caching allocator; `{}` without one.

    `peak_memory_active` counts blocks in use or still awaited by a stream, `peak_memory_alloc` what tensors were given,
    `peak_memory_reserved` what the process held of the card.
    """
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    stats = torch.cuda.memory_stats()
    names = {"active": "active_bytes", "alloc": "allocated_bytes", "reserved": "reserved_bytes"}
    return {f"peak_memory_{name}": stats[f"{key}.all.peak"] / GIB for name, key in names.items()}


def give_back_freed_memory() -> None:
    """Has the C library return to the system what was freed: glibc keeps it, as blocks of up to 32 MiB come from its
    heap. Others, which have no malloc_trim, are left alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
