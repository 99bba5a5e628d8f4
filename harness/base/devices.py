"""Devices: the unit of memory, waiting for the GPU, and what the host's memory keeps."""

import ctypes

import torch

GIB = 2**30


def wait_for_device() -> None:
    """Returns when this process's GPU has done all that it was given; at once without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def give_back_freed_memory() -> None:
    """Has the C library return to the system what was freed: glibc keeps it, as blocks of up to 32 MiB come from its
    heap. Others, which have no malloc_trim, are left alone."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
