"""Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else. Each full matrix is computed on
one rank, however it is sharded; docs/OPTIMIZERS.md has the formulas, its memory and its traffic.

Momentum, Nesterov and update are those of torch.optim.Muon (torch 2.13), step for step.
"""

from collections import Counter

import torch
from torch import nn

from harness import flags
from harness.model import newton_schulz
from harness.model.full_matrices import FullUpdate, Ranks
from harness.model.matrices import MatrixWeight, matrix_weights
from harness.model.optimization import OptimizerKind, decay_matrices, local
from harness.model.optimizers.adamw import AdamW, compiled_update, compiles_updates, groups_of_equal_size

MOMENTUM = 0.95


class Muon(AdamW):
    """A group with `matrices` is updated by Muon, any other by AdamW."""

    def __init__(self, groups: list[dict], settings: flags.Settings):
        self.ranks: Ranks | None = None  # set in the first step
        self.move_momenta, self.add_updates = move_momenta, add_updates
        if compiles_updates(groups, settings):
            self.move_momenta, self.add_updates = torch.compile(move_momenta), torch.compile(add_updates)
        super().__init__(groups, lr=settings.lr, betas=settings.betas, **compiled_update(groups, settings))

    def add_states(self, group: dict) -> None:
        if "matrices" not in group:
            super().add_states(group)
            return
        for parameter in group["params"]:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter, dtype=torch.float32)}

    def update_group(self, group: dict) -> None:
        if "matrices" not in group:
            super().update_group(group)
            return
        weights = [weight for weight in group["matrices"] if weight.parameter.grad is not None]
        if not weights:
            return
        if self.ranks is None:
            self.ranks = Ranks(group["params"][0].device_mesh)
        rate = torch.tensor(group["lr"])  # a number would be compiled again in each step
        shrinks_to = torch.tensor(1 - group["lr"] * group["weight_decay"])

        def add(matrices: list[torch.Tensor], updates: list[torch.Tensor], size: tuple[int, int]) -> None:
            scaled = rate * update_scale(size)
            for equal in groups_of_equal_size(map(flat, matrices, updates)):
                self.add_updates(equal, scaled, shrinks_to, self.skip)

        FullUpdate(self.ranks, newton_schulz.DTYPE, self.load, newton_schulz.orthogonalize, add).run(weights)

    def load(self, rows: list[tuple[MatrixWeight, slice]], targets: list[torch.Tensor] | None) -> None:
        """Move the momenta of some rows of weights towards the gradients; write Nesterov's to `targets`."""
        gradients = [local(weight.parameter.grad)[index] for weight, index in rows]
        momenta = [local(self.state[weight.parameter]["momentum"])[index] for weight, index in rows]
        # without a target, or with one on another device, Nesterov's overwrites the gradient
        is_direct = bool(targets) and targets[0].device == gradients[0].device
        for equal in groups_of_equal_size(map(flat, gradients, momenta, targets if is_direct else gradients)):
            self.move_momenta(equal, self.grad_scale, self.skip)
        if targets and not is_direct:
            # private: no public name copies many tensors at once
            torch._foreach_copy_(targets, gradients)


def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of one dimension, for which fewer variants are compiled, unless one of them would be a copy."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.view(-1) for tensor in tensors)
    return tensors


def move_momenta(tensors: list[tuple], scale: torch.Tensor | None, skip: torch.Tensor | None) -> None:
    """Move the momenta of (gradient, momentum, target)s towards the gradients and write Nesterov's gradients to the
    targets. If `skip` is 1 each momentum replaces its gradient: it does not move, and all that is computed from it is
    finite. Compiled, this reads 8 bytes for each element and writes 4 and the target's."""
    for gradient, momentum, target in tensors:
        exact = gradient.float() if scale is None else gradient.float() / scale
        if skip is not None:
            exact = torch.where(skip > 0, momentum, exact)
        momentum.lerp_(exact, 1 - MOMENTUM)
        target.copy_(torch.lerp(exact, momentum, MOMENTUM))


def add_updates(tensors: list[tuple], rate: torch.Tensor, shrinks_to: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Decay the weights of (weight, orthogonal update)s and subtract the updates, unless `skip` is 1. Compiled, this
    reads and writes each weight once."""
    for weight, orthogonal in tensors:
        new = weight.float() * shrinks_to - rate * orthogonal.float()
        weight.copy_(new if skip is None else torch.where(skip > 0, weight.float(), new))


def update_scale(size: tuple[int, int]) -> float:
    """The factor of the learning rate for a matrix of (outputs, inputs): with 0.2 sqrt(max) the root mean square of an
    update is about AdamW's, whose rate and weight decay carry over (arXiv 2502.16982; `match_rms_adamw` of
    torch.optim.Muon)."""
    return 0.2 * max(size) ** 0.5


def groups(model: nn.Module, settings: flags.Settings) -> list[dict]:
    """Groups of parameters: first the matrices, with `matrices`, then the others as for AdamW."""
    weights = [weight for weight in matrix_weights(model).values() if weight.parameter.requires_grad]
    first = {"params": [weight.parameter for weight in weights], "matrices": weights}
    result = [first | {"lr": settings.lr, "weight_decay": settings.weight_decay}]
    muon_ids = {id(weight.parameter) for weight in weights}
    for group in decay_matrices(model, settings):
        others = [parameter for parameter in group["params"] if id(parameter) not in muon_ids]
        result.append(group | {"params": others, "lr": settings.adamw_lr or settings.lr})
    return result


def describe(model: nn.Module) -> str:
    """The header's text: the number and kinds of parameters of both updates."""
    found = matrix_weights(model)
    matrices: Counter[str] = Counter()  # keyed by the last word of the parameters' names
    others: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        short = "biases" if name.endswith("bias") else name.removesuffix(".weight").split(".")[-1]
        if parameter.requires_grad and name in found:
            matrices[short] += found[name].count()
        elif parameter.requires_grad:
            others[short] += 1
    muon_part = f"{matrices.total():,} matrices ({', '.join(matrices)})"
    return f"{muon_part}; adamw on {others.total():,} other parameters ({', '.join(others)})"


OPTIMIZER = OptimizerKind(Muon, groups=groups, describe=describe)
