"""Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else. Each matrix is computed whole,
once in the world, however it is sharded; docs/OPTIMIZERS.md has the formulas, its memory and its traffic.

Momentum, Nesterov and update are those of torch.optim.Muon (torch 2.13), step for step.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.base.torch_internals import add_each, divide_each, lerp_each, multiply_each
from harness.flags import Settings
from harness.model import newton_schulz, whole_matrices
from harness.model.matrices import Matrix, matrices_of_model
from harness.model.optimization import OptimizerKind, decay_matrices, local, weight_dtype
from harness.model.optimizers.adamw import AdamW
from harness.model.whole_matrices import Ranks, Stack, interleave

# `harness.flags.rules` reads this, before torch is loaded
OWN_FLAGS = ("adamw_lr", "momentum_dtype", "muon_iteration", "muon_scale")
MOMENTUM = 0.95
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of --momentum-dtype


class Muon(AdamW):
    """A group with `matrices` is updated by Muon, any other by AdamW."""

    def __init__(self, groups: list[dict], settings: Settings):
        self.iteration, self.scale_by = settings.muon_iteration, settings.muon_scale
        self.momentum_dtype = DTYPES[settings.momentum_dtype]
        self.ranks: Ranks | None = None
        self.stacks: dict[tuple[bool, ...], list[Stack]] = {}  # by which parameters have gradients
        super().__init__(groups, lr=settings.lr, betas=settings.betas)

    def make_states(self, group: dict) -> None:
        if "matrices" not in group:
            super().make_states(group)
            return
        for parameter in group["params"]:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter, dtype=self.momentum_dtype)}

    def update_group(self, group: dict) -> None:
        if "matrices" not in group:
            super().update_group(group)
            return
        has_grad = tuple(parameter.grad is not None for parameter in group["params"])
        if not any(has_grad):
            return
        if self.ranks is None:
            self.ranks = Ranks(group["params"][0].device_mesh)
        if has_grad not in self.stacks:  # all ranks have the same gradients, so they divide alike
            matrices = [matrix for matrix in group["matrices"] if has_grad[matrix.parameter]]
            self.stacks[has_grad] = whole_matrices.divide(matrices, self.ranks.replicas, self.ranks.shards)
        self.update_matrices(group, self.stacks[has_grad])

    def update_matrices(self, group: dict, stacks: list[Stack]) -> None:
        with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [local(parameter.grad) for parameter in with_grad]
        if self.grad_scale is not None:
            divide_each(gradients, self.grad_scale)
        momenta = [local(self.state[parameter]["momentum"]) for parameter in with_grad]
        shrinks_to = 1 - group["lr"] * group["weight_decay"]
        if self.skip is not None:
            shrinks_to = torch.where(self.skip > 0, 1.0, shrinks_to)
        average_into(gradients, momenta, self.skip)
        multiply_each([local(parameter) for parameter in with_grad], shrinks_to)
        interleave(self.update_stack(group, stack) for stack in stacks)

    def update_stack(self, group: dict, stack: Stack) -> Iterator[None]:
        """Updates the matrices of a stack; each yield is a place to wait, at which another stack may go on."""
        ranks, dtype = self.ranks, newton_schulz.DTYPE
        averages = [None if p.grad is None else local(p.grad) for p in group["params"]]
        coming = ranks.gather(stack, averages, dtype)
        yield
        whole = ranks.whole(stack, coming.take())
        if whole is not None:
            whole = newton_schulz.orthogonalize(whole, self.iteration)
        coming = ranks.give_back(stack, whole, dtype)
        yield
        coming = ranks.share(coming.take())
        yield
        self.add_updates(group, stack, coming.take())

    def add_updates(self, group: dict, stack: Stack, of_all: torch.Tensor) -> None:
        weights = [local(parameter) for parameter in group["params"]]
        of_all = of_all.to(weights[0].device)
        if self.skip is not None:
            of_all.masked_fill_(self.skip > 0, 0)
        parts, updates = self.ranks.results(stack, of_all, weights)
        if parts:
            add_each(parts, updates, -group["lr"] * self.scale(first_matrix(stack)))

    def scale(self, matrix: Matrix) -> float:
        """What the learning rate is multiplied by (torch.optim.Muon's adjust_lr_fn; arXiv 2502.16982)."""
        if self.scale_by == "match_rms_adamw":
            return 0.2 * max(matrix.shape) ** 0.5
        outputs, inputs = matrix.outputs_by_inputs
        return max(1, outputs / inputs) ** 0.5


def average_into(gradients: list[torch.Tensor], momenta: list[torch.Tensor], skip: torch.Tensor | None = None) -> None:
    """Moves the momenta towards the gradients, and then puts into the gradients what Nesterov takes: they are not
    needed any more, and a step needs no further memory of their size. Where `skip` is 1 each momentum stands in for its
    gradient: towards itself it does not move, and what is computed of it is finite."""
    if all(tensor.dtype == torch.float32 for tensor in (*gradients, *momenta)):
        if skip is not None:
            for gradient, momentum in zip(gradients, momenta, strict=True):
                torch.where(skip > 0, momentum, gradient, out=gradient)
        lerp_each(momenta, gradients, 1 - MOMENTUM)
        lerp_each(gradients, momenta, MOMENTUM)
        return
    for gradient, momentum in zip(gradients, momenta, strict=True):
        exact, average = gradient.float(), momentum.float()
        if skip is not None:
            exact = torch.where(skip > 0, average, exact)
        average.lerp_(exact, 1 - MOMENTUM)
        momentum.copy_(average)
        gradient.copy_(exact.lerp(average, MOMENTUM))


def first_matrix(stack: Stack) -> Matrix:
    for of_replica in stack.owned:
        for of_rank in of_replica:
            for matrix in of_rank:
                return matrix
    raise ValueError("a stack without a matrix")


def groups(model: nn.Module, settings: Settings) -> list[dict]:
    """The parameters that are matrices in a first group, with `matrices`; the others as AdamW groups them."""
    found = matrices_of_model(model)
    parameters = dict(model.named_parameters())
    trained = [name for name in found if parameters[name].requires_grad]
    matrices = []
    for index, name in enumerate(trained):
        matrices += [matrix.of_parameter(index) for matrix in found[name]]
    first = {"params": [parameters[name] for name in trained], "matrices": matrices}
    first |= {"lr": settings.lr, "weight_decay": settings.weight_decay}
    of_muon = {id(parameter) for parameter in first["params"]}
    result = [first]
    for group in decay_matrices(model, settings):
        others = [parameter for parameter in group["params"] if id(parameter) not in of_muon]
        result.append(group | {"params": others, "lr": settings.adamw_lr or settings.lr})
    return result


def matrix_state_bytes(parameter: nn.Parameter, matrices: list[Matrix], settings: Settings) -> int:
    """The momentum of one parameter."""
    return parameter.numel() * DTYPES[settings.momentum_dtype].itemsize


def model_state_bytes(model: nn.Module, settings: Settings, of_matrices=matrix_state_bytes) -> int:
    """Bytes of all states: `of_matrices` of the parameters that are matrices, two moments of the others."""
    found, total = matrices_of_model(model), 0
    weight = weight_dtype(settings).itemsize
    for name, parameter in model.named_parameters():
        if name in found:
            total += of_matrices(parameter, found[name], settings)
        else:
            total += 2 * weight * parameter.numel()
    return total


def state_dtypes(settings: Settings, parameter: DTensor) -> dict[str, torch.dtype]:
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), weight_dtype(settings))  # of what is no matrix
    return moments | {"momentum": DTYPES[settings.momentum_dtype]}


def describe(model: nn.Module) -> str:
    """How many parameters each of the two updates, and which."""
    found = matrices_of_model(model)
    kinds: dict[bool, Counter] = {True: Counter(), False: Counter()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            short = "biases" if name.endswith("bias") else name.removesuffix(".weight").split(".")[-1]
            kinds[name in found][short] += len(found.get(name, [name]))
    of_muon, of_adamw = (
        f"{sum(kind.values()):,} {what} ({', '.join(kind)})"
        for kind, what in ((kinds[True], "matrices"), (kinds[False], "other parameters"))
    )
    return f"{of_muon}; adamw on {of_adamw}"


OPTIMIZER = OptimizerKind(
    Muon,
    state_bytes=lambda weight: 4,  # of a matrix
    groups=groups,
    state_dtypes=state_dtypes,
    model_state_bytes=model_state_bytes,
    describe=describe,
)
