"""Devices: the unit of memory, waiting for the GPU, and the mark of what no clock counts."""

import torch

GIB = 2**30
CLOCK_STOPPED = "clock stopped"  # in a profile, what utils.PerformanceTracker leaves out


def wait_for_device() -> None:
    """Returns when this process's GPU has done all that it was given; at once without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
