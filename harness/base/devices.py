"""Devices: the unit of memory, and waiting for the GPU."""

import torch

GIB = 2**30


def wait_for_device() -> None:
    """Returns when this process's GPU has done all that it was given; at once without a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
