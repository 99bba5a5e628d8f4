"""Devices: what all code that computes needs of one."""

import torch

GIB = 2**30


def wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
