"""Averages: an exponential moving average of the weights, in fp32 and sharded as they are. Called by the script after
each step and at evaluations, by exports and plans too. Independent of the optimizer and of how states are saved."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from harness import base
from harness.model.float8 import float8_weights
from harness.model.optimization import local


class WeightAverage:
    """An average of a sharded model's weights, which each optimizer step moves by 1 - decay of its way to them:

        average = decay * average + (1 - decay) * weights

    as `torch.optim.swa_utils.get_ema_multi_avg_fn` does. It begins as a copy of the weights, and no factor corrects for
    that beginning: after n steps they still have a share of decay^n in it.

    `tensors` has a DTensor for each parameter, by its name, laid out as the parameter.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.tensors: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            self.tensors[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        self.restart()

    @torch.no_grad()
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of each weight and of its average."""
        parameters = dict(self.model.named_parameters())
        return [(local(parameters[name]), local(average)) for name, average in self.tensors.items()]

    @torch.no_grad()
    def restart(self) -> None:
        """Begins again as a copy of the weights."""
        for weight, average in self.pairs():
            average.copy_(weight)

    @torch.no_grad()
    def update(self, skip: torch.Tensor | None = None) -> None:
        """Takes in the weights after an optimizer step. `skip` is a tensor of one number, 1 where that step was
        skipped: the average then stays as it is. Nothing is read back from a device that has both."""
        pairs = self.pairs()
        share: Any = 1 - self.decay  # a number, or a tensor of one
        if skip is not None:
            share = share * (1 - skip.to(pairs[0][1]))
        for weight, average in pairs:
            average.lerp_(weight.to(average.dtype), share)

    @contextlib.contextmanager
    def as_weights(self) -> Iterator[None]:
        """Inside, the model has the average as its weights, rounded to their dtype. No parameter may be gathered when
        it begins or ends. The copies of the weights take the memory of gradients, which there are none of."""
        scales = self.take_scales()
        with torch.no_grad():
            copies = []
            for weight, average in self.pairs():
                copies.append(weight.clone())
                weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (weight, _), copy in zip(self.pairs(), copies, strict=True):
                    weight.copy_(copy)
            for weight, scale in scales:
                weight._precomputed_scale = scale  # private: as below

    @torch.no_grad()
    def take_scales(self) -> list[tuple[Any, torch.Tensor | None]]:
        """Each float8 weight with its scale, which it loses: that of other values is computed at the next gather."""
        scales = []
        for weight in float8_weights(self.model):
            scales.append((weight, weight._precomputed_scale))  # private: torchao has no public name for it
            weight._precomputed_scale = None
        return scales

    def describe(self) -> str:
        """For the header: `ema 0.999, fp32, 1.43 GiB a rank`."""
        size = sum(average.nbytes for _, average in self.pairs())
        return f"ema {self.decay:g}, fp32, {size / base.GIB:.3g} GiB a rank"
