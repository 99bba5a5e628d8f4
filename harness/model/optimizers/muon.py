"""Muon, orthogonal updates of the matrices in decoder layers, with AdamW for all else. Each matrix is computed whole,
once in the world, however it is sharded; docs/OPTIMIZERS.md has the formulas, its memory and its traffic.

Momentum, Nesterov and update are those of torch.optim.Muon (torch 2.13), step for step.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from harness import flags
from harness.model import newton_schulz, whole_matrices
from harness.model.matrices import MatrixWeight, matrix_weights
from harness.model.optimization import OptimizerKind, decay_matrices, local
from harness.model.optimizers.adamw import AdamW
from harness.model.whole_matrices import Batch, Ranks, interleave

# `harness.flags.rules` reads this, before torch is loaded
OWN_FLAGS = ("adamw_lr",)
MOMENTUM = 0.95


class Muon(AdamW):
    """A group with `matrices` is updated by Muon, any other by AdamW."""

    def __init__(self, groups: list[dict], settings: flags.Resolved):
        self.ranks: Any = None
        self.batches: list[Batch] = []  # of the last step
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
        # all ranks have the same gradients, so they deal alike
        weights = [weight for weight in group["matrices"] if weight.parameter.grad is not None]
        if not weights:
            return
        if self.ranks is None:
            self.ranks = Ranks(group["params"][0].device_mesh)
        self.move_momenta(group, [weight.parameter for weight in weights])
        divided = [weight for weight in weights if not weight.is_of_experts]
        self.batches = whole_matrices.deal(divided, self.ranks.replicas * self.ranks.shards)
        tasks = [self.update_batch(group, batch) for batch in self.batches]
        for weight in weights:
            if weight.is_of_experts:
                tasks += self.expert_tasks(group, weight)
        interleave(tasks)

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
            torch._foreach_div_(gradients, self.grad_scale)  # private: torch documents few operators on many tensors
        for parameter, gradient in zip(parameters, gradients, strict=True):
            momentum = local(self.state[parameter]["momentum"])
            exact = gradient.float()  # itself where it is in fp32
            if self.skip is not None:
                torch.where(self.skip > 0, momentum, exact, out=exact)
            momentum.lerp_(exact, 1 - MOMENTUM)
            gradient.copy_(exact.lerp_(momentum, MOMENTUM))
        torch._foreach_mul_([local(parameter) for parameter in parameters], shrinks_to)  # private: as above

    def update_batch(self, group: dict, batch: Batch) -> Iterator[None]:
        """Updates the weights of a batch; each yield is a place to wait, at which another batch may go on."""
        ranks = self.ranks
        coming = ranks.gather(batch, newton_schulz.DTYPE)
        yield
        whole = ranks.whole(batch, coming())
        self.orthogonalize(batch.weight, whole)
        coming = ranks.give_back(batch, whole)
        yield
        coming = ranks.share(coming())
        yield
        weights, updates = ranks.results(batch, self.unless_skipped(coming()))
        self.receive(group, [(weight, ...) for weight in weights], updates, ranks.rows(batch.weight).start)

    def expert_tasks(self, group: dict, weight: MatrixWeight) -> Iterator[Iterator[None]]:
        """The tasks that update the experts that this rank holds, some at a time, divided among replicas."""
        size = max(1, whole_matrices.MAX_BATCH_BYTES // (2 * weight.shape[1:].numel())) * self.ranks.replicas
        experts = range(len(local(weight.parameter)))
        for first in experts[::size]:
            yield self.update_experts(group, weight, experts[first : first + size])

    def update_experts(self, group: dict, weight: MatrixWeight, experts: range) -> Iterator[None]:
        ranks = self.ranks
        share = -(-len(experts) // ranks.replicas)
        own = local(weight.parameter.grad)[experts.start : experts.stop][ranks.replica * share :][:share]
        whole = torch.zeros(share, *weight.shape[1:], dtype=newton_schulz.DTYPE, device=ranks.device)
        whole[: len(own)] = own
        self.orthogonalize(weight, whole)
        coming = ranks.share(whole)
        yield
        updates = self.unless_skipped(coming()).flatten(0, 1)[: len(experts)]
        self.receive(group, [(weight, expert) for expert in experts], list(updates))

    def unless_skipped(self, updates: torch.Tensor) -> torch.Tensor:
        """The updates, or zeros in their place in a step that is skipped."""
        return updates if self.skip is None else updates.masked_fill_(self.skip > 0, 0)

    def orthogonalize(self, weight: MatrixWeight, whole: torch.Tensor) -> None:
        """Makes each matrix of weights (count, rows, columns) orthogonal, in place."""
        for matrices in weight.split(whole) if len(whole) else ():
            matrices.copy_(newton_schulz.orthogonalize(matrices))

    def receive(self, group: dict, places: list[tuple], updates: list[torch.Tensor], first_row: int = 0) -> None:
        """Adds updates to weights of one kind: of each this rank's rows, those from `first_row` on. `places` are a
        weight and which of its experts, or `...`."""
        weight, _ = places[0]
        targets = [weight.split(local(one.parameter)[expert], first_row) for one, expert in places]
        sources = [weight.split(update.to(targets[0][0].device), first_row) for update in updates]
        for number, size in enumerate(weight.sizes):
            of_weights, of_updates = ([parts[number] for parts in tensors] for tensors in (targets, sources))
            rate = -group["lr"] * scale_of_update(size)
            torch._foreach_add_(of_weights, of_updates, alpha=rate)  # private: as above


def scale_of_update(size: tuple[int, int]) -> float:
    """What the learning rate is multiplied by, for a matrix of (outputs, inputs): with 0.2 sqrt(max) an update's root
    mean square is about that of AdamW, whose rate and weight decay carry over (arXiv 2502.16982; `match_rms_adamw` of
    torch.optim.Muon)."""
    return 0.2 * max(size) ** 0.5


def groups(model: nn.Module, settings: flags.Resolved) -> list[dict]:
    """The parameters that are matrices in a first group, with `matrices`; the others as AdamW groups them."""
    weights = [weight for weight in matrix_weights(model).values() if weight.parameter.requires_grad]
    first = {"params": [weight.parameter for weight in weights], "matrices": weights}
    result = [first | {"lr": settings.lr, "weight_decay": settings.weight_decay}]
    of_muon = {id(weight.parameter) for weight in weights}
    for group in decay_matrices(model, settings):
        others = [parameter for parameter in group["params"] if id(parameter) not in of_muon]
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
    of_muon = f"{matrices.total():,} matrices ({', '.join(matrices)})"
    return f"{of_muon}; adamw on {others.total():,} other parameters ({', '.join(others)})"


OPTIMIZER = OptimizerKind(Muon, groups=groups, describe=describe)
