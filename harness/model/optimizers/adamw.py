"""torch's fused AdamW. Its kernel gets local tensors: DTensors cost the host time for each parameter, and in torch 2.11
they leak. The states are DTensors."""

from typing import Any

import torch
from torch.optim.adamw import adamw

from harness import flags
from harness.model.optimization import OptimizerKind, local


class AdamW(torch.optim.AdamW):
    """`moments` is the dtype of the moments, by default that of the parameters. `update` updates one tensor, with the
    arguments of the function of that name; by default torch's kernel updates all, which takes no other dtype.

    The next step divides the gradients by `grad_scale`; torch's kernel writes them back, which costs less than a
    separate pass. If `skip` is 1 nothing changes, not even a step count.
    """

    @torch.no_grad()
    def __init__(self, groups: list[dict], moments: torch.dtype | None = None, update: Any = None, **options: Any):
        super().__init__(groups, **options, fused=True)
        self.moments, self.update = moments, update
        self.grad_scale: torch.Tensor | None = None
        self.skip: torch.Tensor | None = None
        for group in self.param_groups:
            self.add_states(group)

    def add_states(self, group: dict) -> None:
        for parameter in group["params"]:
            zeros = {name: torch.zeros_like(parameter, dtype=self.moments) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | zeros

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # it takes no closure
        for group in self.param_groups:
            self.update_group(group)
        self.grad_scale = self.skip = None

    def update_group(self, group: dict) -> None:
        """One step of this rank's shards of a group's parameters."""
        with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in with_grad]
        parameters, gradients = [local(parameter) for parameter in with_grad], [local(p.grad) for p in with_grad]
        first, second = ([local(state[moment]) for state in states] for moment in ("exp_avg", "exp_avg_sq"))
        steps = [state["step"] for state in states]
        options = {name: group[name] for name in ("weight_decay", "eps")}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        if self.update:
            self.update_each([parameters, gradients, first, second], steps, group["lr"], options)
            return
        options |= {name: group[name] for name in ("lr", "amsgrad", "maximize", "fused")}
        options |= {"grad_scale": self.grad_scale, "found_inf": self.skip}
        adamw(parameters, gradients, first, second, [], steps, **options)

    def update_each(
        self, tensors: list[list[torch.Tensor]], steps: list[torch.Tensor], lr: float, options: dict
    ) -> None:
        """One step by `self.update`. `tensors` are the parameters, their gradients and both of their moments."""
        rate = torch.tensor(lr)
        # private: one kernel for all steps. A single tensor as the addend would be read on the host.
        torch._foreach_add_(steps, 1 if self.skip is None else [1 - self.skip] * len(steps))
        for *moments, step in zip(*tensors, steps, strict=True):
            flat = [tensor.view(-1) for tensor in moments]
            self.update(*flat, step, self.grad_scale, self.skip, rate, **options)


def update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    rate: torch.Tensor,
    weight_decay: float,
    eps: float,
    beta1: float,
    beta2: float,
) -> None:
    """AdamW of one tensor, in fp32 whatever the dtype of its tensors; they are rounded after the update has used them.
    Nothing changes if `skip`, None or a scalar, is 1. `rate` is a tensor, as a number would be compiled again in each
    step."""
    grad = grad.float() if scale is None else grad.float() / scale
    first = exp_avg.float() * beta1 + grad * (1 - beta1)
    second = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
    denominator = (second / (1 - beta2**step)).sqrt() + eps
    updated = param.float() * (1 - rate * weight_decay) - rate / (1 - beta1**step) * first / denominator
    for tensor, new in ((param, updated), (exp_avg, first), (exp_avg_sq, second)):
        tensor.copy_(new if skip is None else torch.where(skip > 0, tensor.float(), new))


def build(groups: list[dict], settings: flags.Settings) -> AdamW:
    return AdamW(groups, lr=settings.lr, betas=settings.betas)


OPTIMIZER = OptimizerKind(build)
