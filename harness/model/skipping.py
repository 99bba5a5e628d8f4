"""Skipping: decides on the device whether an optimizer step is left out, because its gradient norm is NaN or infinite,
and leaves it out."""

from typing import Any

import torch


def decide_skip(norm: torch.Tensor) -> torch.Tensor:
    """Whether the step with this gradient norm is skipped, a scalar in fp32 on the norm's device: 1 where the norm is
    NaN or infinite, else 0. The host does not wait for it."""
    return norm.float().isfinite().logical_not().float()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer leaves out a step by a tensor; the host reads it otherwise."""
    return hasattr(optimizer, "skip")


def step_or_skip(optimizer: Any, skip: torch.Tensor) -> None:
    """Takes the optimizer's step, unless `skip` is 1: then no weight, no state and no step count changes."""
    if skips_on_device(optimizer):
        optimizer.skip = skip
        optimizer.step()
    elif not on_host(skip):
        optimizer.step()


def on_host(skip: torch.Tensor) -> bool:
    """Waits for the device. A plan replaces this: its tensors have no data."""
    return bool(skip.item())
