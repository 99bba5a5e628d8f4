"""Optimizers: what updates the weights, with which groups and states, and how gradients are clipped. Called by the
script once a model is sharded, by plans too. It does not know the loop, the schedule or how states are saved."""

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from harness.base.errors import UserError
from harness.flags.settings import Settings


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's part; of a float8 weight the master weight that it wraps. Called without gradients."""
    part = tensor.to_local()
    return getattr(part, "_tensor", part)


def update(param, grad, exp_avg, exp_avg_sq, step, scale, rate, weight_decay, eps, beta1, beta2) -> None:
    """AdamW of one tensor, in fp32 whatever the moments are kept in; they are rounded when the update has used them.

    `rate` is a tensor, as another number in each step would be compiled anew.
    """
    grad = grad.float() if scale is None else grad / scale
    first = exp_avg.float() * beta1 + grad * (1 - beta1)
    second = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
    denominator = (second / (1 - beta2**step)).sqrt() + eps
    param.mul_(1 - rate * weight_decay).sub_(rate / (1 - beta1**step) * first / denominator)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW of DTensors, whose kernel is given local tensors; the states are DTensors.

    Going through DTensor costs the host time for each parameter, and in torch 2.11 it leaks. `grad_scale` is what the
    kernel divides the gradients by in the next step; it writes them back, which costs less than a pass of its own.
    Moments of another dtype than the parameters', which torch's kernel does not take, are updated by `update`.
    """

    @torch.no_grad()
    def __init__(self, groups: list[dict], moments: torch.dtype | None = None, compiled: bool = False, **options):
        super().__init__(groups, **options, fused=True)
        self.grad_scale: torch.Tensor | None = None
        self.update = moments and (torch.compile(update) if compiled else update)
        for group in self.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter, dtype=moments) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | zeros

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in with_grad]
            tensors = (
                [local(parameter) for parameter in with_grad],
                [local(parameter.grad) for parameter in with_grad],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [state["step"] for state in states],
            )
            options = {name: group[name] for name in ("weight_decay", "eps")}
            options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
            if self.update:
                rate = torch.tensor(group["lr"])
                torch._foreach_add_(tensors[4], 1)
                for *parts, step in zip(*tensors, strict=True):
                    self.update(*(part.view(-1) for part in parts), step, self.grad_scale, rate, **options)
            else:
                options |= {name: group[name] for name in ("lr", "amsgrad", "maximize", "fused")}
                adamw(*tensors[:4], [], tensors[4], grad_scale=self.grad_scale, **options)
        self.grad_scale = None


@torch.no_grad()
def clip_grad_norm(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """The norm of all gradients on all ranks, a scalar that is still on the device; where `max_norm` is not 0, the next
    `step` updates with gradients scaled down to it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not isinstance(optimizer, AdamW):
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]).full_tensor()
        if max_norm:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    norms = torch._foreach_norm([local(parameter.grad) for parameter in parameters], dtype=torch.float32)
    norm, shards = torch.linalg.vector_norm(torch.stack(norms)), parameters[0].device_mesh.get_group("shard")
    if shards.size() > 1:  # replicas have the same gradients
        norm.square_()
        dist.all_reduce(norm, group=shards)
        norm.sqrt_()
    if max_norm:
        optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1)
    return norm


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over the sharded parameters, weight decay on matrices only, its states made already."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options = {"lr": settings.lr, "betas": settings.betas}
    if settings.optimizer == "adamw":
        return AdamW(groups, **options)
    if settings.optimizer == "adamw-bf16":
        return AdamW(groups, torch.bfloat16, settings.compile, **options)
    optimizer = adamw8bit()(groups, **options)
    make_states(optimizer, settings.lr)
    return optimizer


def adamw8bit() -> type[torch.optim.Optimizer]:
    """torchao's AdamW8bit with an update that is given local tensors: compiled over DTensors it ends with SIGSEGV on
    float8 weights, and on weights in bf16 with an error of the compiler."""
    if not find_spec("torchao"):
        raise UserError("--optimizer adamw8bit: needs the package torchao (pip install torchao)")
    from torchao.optim import AdamW8bit as Torchaos
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    class AdamW8bit(Torchaos):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

        @staticmethod
        def _subclass_zeros(tensor: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
            # of fp32 as the update computes it, also for weights in bf16: torch cannot compile a view of another dtype
            return OptimState8bit.zeros(tensor.shape, signed, block_size, tensor.device, dtype=torch.float32)

        @torch.no_grad()
        def step(self) -> None:
            with torch._dynamo.utils.disable_cache_limit():  # it is compiled for each shape
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self.update_one(parameter, self.state[parameter], group)

        def update_one(self, parameter: DTensor, state: dict, group: dict) -> None:
            if not state:
                moments = {
                    "exp_avg": self._new_buffer(parameter, True),
                    "exp_avg_sq": self._new_buffer(parameter, False),
                }
                state |= {"step": torch.tensor(0.0)} | moments
            state["step"] += 1
            tensors = local(parameter), local(parameter.grad), state["step"]
            moments = local(state["exp_avg"]), local(state["exp_avg_sq"]), None
            options = group["lr"], *group["betas"], group["weight_decay"], group["eps"]
            self.update(*tensors, *moments, *options, self.is_adamw, self.bf16_stochastic_round)

    return AdamW8bit


def make_states(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Makes the states of an optimizer that has none before its first step, so that they can be checked, counted in
    memory and loaded into: by a step with zero gradients and learning rate 0, which changes no parameter."""

    def set_rate(rate: float) -> None:
        for group in optimizer.param_groups:  # torchao keeps it as a tensor
            group["lr"] = group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else rate

    set_rate(0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    set_rate(rate)
