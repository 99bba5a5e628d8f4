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
from harness.model.matrices import matrix_weights
from harness.model.optimization import OptimizerKind, decay_matrices, local
from harness.model.optimizers.adamw import AdamW

MOMENTUM = 0.95


class Muon(AdamW):
    """A group with `matrices` is updated by Muon, any other by AdamW."""

    def __init__(self, groups: list[dict], settings: flags.Settings):
        self.ranks: Ranks | None = None  # set in the first step
        super().__init__(groups, lr=settings.lr, betas=settings.betas)

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
        self.move_momenta(group, [weight.parameter for weight in weights])

        def add(matrices: list[torch.Tensor], updates: list[torch.Tensor], size: tuple[int, int]) -> None:
            # private: one kernel for all
            torch._foreach_add_(matrices, updates, alpha=-group["lr"] * update_scale(size))

        FullUpdate(self.ranks, newton_schulz.DTYPE, self.orthogonalize, add).run(weights)

    def move_momenta(self, group: dict, parameters: list) -> None:
        """Move the momenta towards the gradients, overwrite the gradients with Nesterov's (which saves memory of their
        size), and decay the weights. If `skip` is 1 each momentum replaces its gradient: it does not move, and all that
        is computed from it is finite."""
        shrinks_to = 1 - group["lr"] * group["weight_decay"]
        if self.skip is not None:
            shrinks_to = torch.where(self.skip > 0, 1.0, shrinks_to)
        gradients = [local(parameter.grad) for parameter in parameters]
        if self.grad_scale is not None:
            # private: one kernel for all
            torch._foreach_div_(gradients, self.grad_scale)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            momentum = local(self.state[parameter]["momentum"])
            exact = gradient.float()  # the gradient itself if it is in fp32
            if self.skip is not None:
                torch.where(self.skip > 0, momentum, exact, out=exact)
            momentum.lerp_(exact, 1 - MOMENTUM)
            gradient.copy_(exact.lerp_(momentum, MOMENTUM))
        # private: one kernel for all
        torch._foreach_mul_([local(parameter) for parameter in parameters], shrinks_to)

    def orthogonalize(self, matrices: torch.Tensor) -> torch.Tensor:
        """The updates of matrices (count, rows, columns); zeros if the step is skipped."""
        updates = newton_schulz.orthogonalize(matrices)
        return updates if self.skip is None else updates.masked_fill_(self.skip > 0, 0)


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
