"""AdamW. torch's fused kernel updates the parameters or, on a GPU with --compile, `update` the large ones: compiled, it
reads and writes 28 bytes for each element, the kernel 32, as it writes the scaled gradient back.

Both get local tensors: DTensors cost the host time for each parameter, and in torch 2.11 they leak. The states are
DTensors.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

from harness import flags
from harness.model.optimization import OptimizerKind, local

# Tensors of one size in a compiled call, which the compiler makes one kernel. Compiled for Hopper, that of four tensors
# takes 64 registers a thread; that of eight takes 124 to 255, and spills.
GROUP = 4
# Elements from which on a tensor is updated by the compiled update: a GPU takes longer for a group of them than the
# host for the call. torch's kernel updates all smaller ones in a few launches.
MIN_COMPILED = 2**20


class AdamW(torch.optim.AdamW):
    """`moments` is the dtype of the moments, by default that of the parameters. `update`, a function like the one of
    that name, updates the tensors of `min_numel` elements and more; torch's kernel, which takes no other dtype of
    moments, updates the others.

    The next step divides the gradients by `grad_scale`; torch's kernel writes them back, which costs less than a
    separate pass. If `skip` is 1 nothing changes, not even a step count.
    """

    @torch.no_grad()
    def __init__(
        self,
        groups: list[dict],
        moments: torch.dtype | None = None,
        update: Any = None,
        min_numel: int = 0,
        **options: Any,
    ):
        super().__init__(groups, **options, fused=True)
        self.moments, self.update, self.min_numel = moments, update, min_numel
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
        own: list[tuple] = []
        torchs: list[tuple] = []
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                tensors = *map(local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])), state["step"]
                is_own = self.update and tensors[0].numel() >= self.min_numel
                (own if is_own else torchs).append(tensors)
        options = {"eps": group["eps"], "beta1": group["betas"][0], "beta2": group["betas"][1]}
        if own:
            self.update_own(own, group["lr"], group["weight_decay"], options)
        if torchs:
            parameters, gradients, first, second, steps = map(list, zip(*torchs, strict=True))
            options |= {name: group[name] for name in ("lr", "weight_decay", "amsgrad", "maximize", "fused")}
            options |= {"grad_scale": self.grad_scale, "found_inf": self.skip}
            adamw(parameters, gradients, first, second, [], steps, **options)

    def update_own(self, tensors: list[tuple], lr: float, weight_decay: float, options: dict) -> None:
        """One step by `self.update` of (parameter, gradient, both moments, step)s."""
        # tensors, as numbers would be compiled again in each step
        rate, shrinks_to = torch.tensor(lr), torch.tensor(1 - lr * weight_decay)
        steps = [step for *_, step in tensors]
        # private: one kernel for all steps. A single tensor as the addend would be read on the host.
        torch._foreach_add_(steps, 1 if self.skip is None else [1 - self.skip] * len(steps))
        flat = ((*(tensor.view(-1) for tensor in moments), step) for *moments, step in tensors)
        for equal in groups_of_equal_size(flat):
            self.update(equal, self.grad_scale, self.skip, rate, shrinks_to, **options)


def groups_of_equal_size(tensors: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Tuples of tensors in lists for a compiled function: GROUP whose first have one shape, the rest one by one, so
    that no more than two lengths of list are compiled. Empty ones are left out."""
    waiting: dict[torch.Size, list[tuple]] = {}
    for row in tensors:
        shape = row[0].shape
        if shape.numel():
            waiting.setdefault(shape, []).append(row)
            if len(waiting[shape]) == GROUP:
                yield waiting.pop(shape)
    for rest in waiting.values():
        yield from ([row] for row in rest)


def update(
    tensors: list[tuple],
    scale: torch.Tensor | None,
    skip: torch.Tensor | None,
    rate: torch.Tensor,
    shrinks_to: torch.Tensor,
    eps: float,
    beta1: float,
    beta2: float,
) -> None:
    """AdamW of (parameter, gradient, both moments, step)s, in fp32 whatever their dtypes; they are rounded after the
    update has used them. Weight decay multiplies the parameters by `shrinks_to`. Nothing changes if `skip`, None or a
    scalar, is 1."""
    for param, grad, exp_avg, exp_avg_sq, step in tensors:
        grad = grad.float() if scale is None else grad.float() / scale
        first = exp_avg.float() * beta1 + grad * (1 - beta1)
        second = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt() + eps
        updated = param.float() * shrinks_to - rate / (1 - beta1**step) * first / denominator
        for tensor, new in ((param, updated), (exp_avg, first), (exp_avg_sq, second)):
            tensor.copy_(new if skip is None else torch.where(skip > 0, tensor.float(), new))


def compiles_updates(groups: list[dict], settings: flags.Settings) -> bool:
    """True if the parameters are on a GPU, or the GPU of a plan, and layers are compiled."""
    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return settings.compile and (on_gpu or (bool(settings.plan) and not settings.cpu_offload))


def compiled_update(groups: list[dict], settings: flags.Settings) -> dict[str, Any]:
    """The options of `AdamW` that compile the update of large tensors, if updates are compiled."""
    if not compiles_updates(groups, settings):
        return {}
    return {"update": torch.compile(update), "min_numel": MIN_COMPILED}


def build(groups: list[dict], settings: flags.Settings) -> AdamW:
    return AdamW(groups, lr=settings.lr, betas=settings.betas, **compiled_update(groups, settings))


def build_with_moments_in_bf16(groups: list[dict], settings: flags.Settings) -> AdamW:
    """torch's kernel takes no moments of another dtype than the parameters', so `update` updates all of them."""
    own = torch.compile(update) if settings.compile else update
    return AdamW(groups, torch.bfloat16, own, lr=settings.lr, betas=settings.betas)


OPTIMIZER = OptimizerKind(build)
