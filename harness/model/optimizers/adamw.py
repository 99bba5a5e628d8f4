"""torch's fused AdamW. Its kernel gets local tensors: going through DTensor costs the host time for each parameter, and
in torch 2.11 it leaks. The states are DTensors."""

import torch
from torch.optim.adamw import adamw

from harness import flags
from harness.model.optimization import OptimizerKind, local


class AdamW(torch.optim.AdamW):
    """`moments` is the dtype of the moments, by default that of the parameters, the only one that the kernel takes.

    `grad_scale` is what the kernel divides the gradients by in the next step; it writes them back, which costs less
    than a pass of its own. Where `skip` is 1 the kernel returns at once, and torch takes the step counts back.
    """

    @torch.no_grad()
    def __init__(self, groups: list[dict], moments: torch.dtype | None = None, **options):
        super().__init__(groups, **options, fused=True)
        self.moments = moments
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
        with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in with_grad]
        self.update_all(
            group,
            [local(parameter) for parameter in with_grad],
            [local(parameter.grad) for parameter in with_grad],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
        )

    def update_all(self, group: dict, parameters, gradients, exp_avgs, exp_avg_sqs, steps) -> None:
        """One step of a group's parameters, all of them this rank's local tensors."""
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "fused")}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        options |= {"grad_scale": self.grad_scale, "found_inf": self.skip}
        adamw(parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, **options)


def build(groups: list[dict], settings: flags.Settings) -> AdamW:
    return AdamW(groups, lr=settings.lr, betas=settings.betas)


OPTIMIZER = OptimizerKind(build, state_bytes=lambda weight: 2 * weight)
