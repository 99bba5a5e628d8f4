"""AdamW with moments in bf16. torch's kernel does not take moments of another dtype than the parameters', so these are
updated here; compiled layers come with a compiled update."""

from typing import Any

import torch

from harness import flags
from harness.model.optimization import OptimizerKind
from harness.model.optimizers.adamw import AdamW

# `harness.flags.rules` reads these, before torch is loaded
MAX_BETA = 0.98
SAME_AS_ADAMW_IN = ("bf16-pure",)  # values of --precision


def update(param, grad, exp_avg, exp_avg_sq, step, scale, skip, rate, weight_decay, eps, beta1, beta2) -> None:
    """AdamW of one tensor, in fp32 whatever the moments are kept in; they are rounded when the update has used them.
    Nothing changes where `skip`, a scalar if it is not None, is 1.

    `rate` is a tensor, as another number in each step would be compiled anew.
    """
    grad = grad.float() if scale is None else grad / scale
    first = exp_avg.float() * beta1 + grad * (1 - beta1)
    second = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
    denominator = (second / (1 - beta2**step)).sqrt() + eps
    updated = param * (1 - rate * weight_decay) - rate / (1 - beta1**step) * first / denominator
    for tensor, new in ((param, updated), (exp_avg, first), (exp_avg_sq, second)):
        tensor.copy_(new if skip is None else torch.where(skip > 0, tensor, new))


class AdamWBf16(AdamW):
    def __init__(self, groups: list[dict], compiled: bool, **options):
        super().__init__(groups, torch.bfloat16, **options)
        self.update: Any = torch.compile(update) if compiled else update

    def update_all(self, group: dict, parameters, gradients, exp_avgs, exp_avg_sqs, steps) -> None:
        options = {"weight_decay": group["weight_decay"], "eps": group["eps"]}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        rate = torch.tensor(group["lr"])
        if self.skip is None:
            torch._foreach_add_(steps, 1)  # private: torch documents few operators on many tensors
        else:
            # private: as above. One tensor for all would be read on the host.
            torch._foreach_add_(steps, [1 - self.skip] * len(steps))
        for *tensors, step in zip(parameters, gradients, exp_avgs, exp_avg_sqs, steps, strict=True):
            self.update(*(tensor.view(-1) for tensor in tensors), step, self.grad_scale, self.skip, rate, **options)


def build(groups: list[dict], settings: flags.Settings) -> AdamWBf16:
    return AdamWBf16(groups, settings.compile, lr=settings.lr, betas=settings.betas)


OPTIMIZER = OptimizerKind(build, state_bytes=lambda weight: 4)
