"""Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else. Each matrix is computed whole,
once in the world, however it is sharded; docs/OPTIMIZERS.md has the formulas, its memory and its traffic.

Momentum, Nesterov and update are those of torch.optim.Muon (torch 2.13), step for step.
"""

from collections import Counter

import torch
from torch import nn

from harness import flags
from harness.model import newton_schulz
from harness.model.matrices import matrix_weights
from harness.model.optimization import OptimizerKind, decay_matrices, local
from harness.model.optimizers.adamw import AdamW
from harness.model.whole_matrices import Ranks, WholeUpdate

MOMENTUM = 0.95


class Muon(AdamW):
    """A group with `matrices` is updated by Muon, any other by AdamW."""

    def __init__(self, groups: list[dict], settings: flags.Settings):
        self.ranks: Ranks | None = None  # since the first step
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
            # private: torch documents few operators on many tensors
            torch._foreach_add_(matrices, updates, alpha=-group["lr"] * scale_of_update(size))

        WholeUpdate(self.ranks, newton_schulz.DTYPE, self.orthogonalize, add).run(weights)

    def move_momenta(self, group: dict, parameters: list) -> None:
        """Moves the momenta towards the gradients, then puts into the gradients what Nesterov takes, as they are not
        needed any more and a step then takes no further memory of their size; and decays the weights. Where `skip` is 1
        each momentum stands in for its gradient: towards itself it does not move, and what is computed of it is
        finite."""
        shrinks_to = 1 - group["lr"] * group["weight_decay"]
        if self.skip is not None:
            shrinks_to = torch.where(self.skip > 0, 1.0, shrinks_to)
        gradients = [local(parameter.grad) for parameter in parameters]
        if self.grad_scale is not None:
            # private: torch documents few operators on many tensors
            torch._foreach_div_(gradients, self.grad_scale)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            momentum = local(self.state[parameter]["momentum"])
            exact = gradient.float()  # itself where it is in fp32
            if self.skip is not None:
                torch.where(self.skip > 0, momentum, exact, out=exact)
            momentum.lerp_(exact, 1 - MOMENTUM)
            gradient.copy_(exact.lerp_(momentum, MOMENTUM))
        # private: one kernel for all, where a documented loop would launch one each
        torch._foreach_mul_([local(parameter) for parameter in parameters], shrinks_to)

    def orthogonalize(self, matrices: torch.Tensor) -> torch.Tensor:
        """The updates of matrices (count, rows, columns), zeros in a step that is skipped."""
        updates = newton_schulz.orthogonalize(matrices)
        return updates if self.skip is None else updates.masked_fill_(self.skip > 0, 0)


def scale_of_update(size: tuple[int, int]) -> float:
    """What the learning rate is multiplied by, for a matrix of (outputs, inputs): with 0.2 sqrt(max) an update's root
    mean square is about that of AdamW, whose rate and weight decay carry over (arXiv 2502.16982; `match_rms_adamw` of
    torch.optim.Muon)."""
    return 0.2 * max(size) ** 0.5


def groups(model: nn.Module, settings: flags.Settings) -> list[dict]:
    """The parameters that are matrices in a first group, with `matrices`; the others as AdamW groups them."""
    weights = [weight for weight in matrix_weights(model).values() if weight.parameter.requires_grad]
    first = {"params": [weight.parameter for weight in weights], "matrices": weights}
    result = [first | {"lr": settings.lr, "weight_decay": settings.weight_decay}]
    muon_ids = {id(weight.parameter) for weight in weights}
    for group in decay_matrices(model, settings):
        others = [parameter for parameter in group["params"] if id(parameter) not in muon_ids]
        result.append(group | {"params": others, "lr": settings.adamw_lr or settings.lr})
    return result


def describe(model: nn.Module) -> str:
    """How many parameters each of the two updates, and which."""
    found = matrix_weights(model)
    matrices: Counter[str] = Counter()  # by the last word of the parameters' names, as are the others
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
