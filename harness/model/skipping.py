"""Skipping: decides on the device whether an optimizer step is left out, because its gradient norm is NaN or infinite
or far above those before it, and leaves it out. Called by the script's step. Independent of who counts such steps."""

from typing import Any

import torch

WINDOW = 128  # steps whose norms a spike is compared with
MAD_TO_DEVIATION = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation


class RecentNorms:
    """The gradient norms of the last WINDOW steps that were not skipped, on the device, by which a spike is found.

    A norm is a spike where its robust z-score is above `max_z_score`. There is none before WINDOW steps were taken. The
    norm of a skipped step is left out: one spike must not hide the next. A level that changes for good therefore goes
    on to be skipped, until --max-skipped ends the run.
    """

    def __init__(self, max_z_score: float, norms: list[float]):
        """`norms` are those of the steps before, at most WINDOW, the oldest first."""
        missing = [float("nan")] * (WINDOW - len(norms))
        self.max_z_score, self.norms = max_z_score, torch.tensor(missing + norms)

    def is_spike(self, norm: torch.Tensor) -> torch.Tensor:
        self.norms = self.norms.to(norm.device)
        return robust_z_score(norm, self.norms) > self.max_z_score

    def add(self, norm: torch.Tensor, skip: torch.Tensor) -> None:
        """Takes the norm of a step, unless `skip` is 1."""
        moved_on = torch.cat([self.norms[1:], norm[None]])
        self.norms = torch.where(skip > 0, self.norms, moved_on)


def robust_z_score(norm: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """(norm - median) / (1.4826 x MAD), with the median absolute deviation MAD of WINDOW norms: a scalar. NaN where
    one of them is missing, and where more than half are equal, so that there is no spread to compare with."""
    center = median(norms)
    mad = median((norms - center).abs())
    return torch.where(mad > 0, (norm - center) / (MAD_TO_DEVIATION * mad), torch.nan)


def median(values: torch.Tensor) -> torch.Tensor:
    """Of an even number the mean of the two in the middle; NaN where a value is NaN. `torch.median` gives the lower
    one, and for `quantile` the host waits (torch 2.11)."""
    middle = len(values) // 2
    result = values.sort().values[middle - 1 : middle + 1].mean()
    return torch.where(values.isnan().any(), torch.nan, result)


def decide_skip(norm: torch.Tensor, recent: RecentNorms | None) -> torch.Tensor:
    """Whether the step with this gradient norm is skipped, a scalar in fp32 on the norm's device: 1 where it is, else
    0. The host does not wait for it. `recent` takes the norm; None finds no spikes."""
    norm = norm.float()
    if recent is None:
        return norm.isfinite().logical_not().float()
    skip = (norm.isfinite().logical_not() | recent.is_spike(norm)).float()
    recent.add(norm, skip)
    return skip


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
