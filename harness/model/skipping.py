"""Skipping: leaves out an optimizer step whose gradient norm is NaN or infinite, decided on the device."""

from typing import Any

import torch


def is_non_finite(norm: torch.Tensor) -> torch.Tensor:
    """1 if the norm is NaN or infinite, so that its step is skipped, else 0: a scalar in fp32 on the norm's device. The
    host does not wait for it."""
    return norm.float().isfinite().logical_not().float()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer skips by a tensor; otherwise the host reads it."""
    return hasattr(optimizer, "skip")


def step_or_skip(optimizer: Any, skip: torch.Tensor) -> None:
    """Take the optimizer's step, unless `skip` is 1: then no weight, no state and no step count changes."""
    if skips_on_device(optimizer):
        optimizer.skip = skip
        optimizer.step()
    elif not on_host(skip):
        optimizer.step()


def on_host(skip: torch.Tensor) -> bool:
    """Read `skip`, waiting for the device. A plan replaces this: its tensors have no data."""
    return bool(skip.item())
