"""Muon with a second moment for each neuron, which evens out their updates (NorMuon, arXiv 2510.05491). The second
moment is in fp32 and lies with its neuron's rows: they are evened out after they came back from their matrix's owner,
and one all-reduce gives the norms of whole matrices."""

import torch
import torch.distributed as dist
from torch import nn

from harness import base, flags
from harness.model.matrices import matrix_weights
from harness.model.optimization import OptimizerKind, local
from harness.model.optimizers import muon
from harness.model.whole_matrices import copy_each

# `harness.flags.rules` reads this, before torch is loaded
OWN_FLAGS = ("adamw_lr", "momentum_dtype", "muon_iteration", "muon_scale")
BETA2 = 0.95
EPS = 1e-10


class NorMuon(muon.Muon):
    def add_states(self, group: dict) -> None:
        super().add_states(group)
        for weight in group.get("matrices", []):
            # sharded as the parameter is: (..., neurons, 1)
            of_neurons = torch.zeros_like(weight.parameter, dtype=torch.float32)
            of_neurons = (of_neurons.mT if weight.is_transposed else of_neurons).sum(-1, keepdim=True)
            self.state[weight.parameter]["second_moment"] = of_neurons

    def receive(self, group: dict, places: list[tuple], updates: list[torch.Tensor], first_row: int = 0) -> None:
        """Divides each neuron by the root of its second moment, which moves. What comes of a weight of two dimensions
        then waits, in the place of its gradient, until the norms of its matrices are known."""
        weight, _ = places[0]
        moments = [local(self.state[one.parameter]["second_moment"])[expert] for one, expert in places]
        evened = torch.stack(updates).to(moments[0].device, torch.float32)
        before = squared_norms(weight.split(evened, first_row))
        neurons = evened.mT if weight.is_transposed else evened
        moment = torch.stack(moments).lerp_(neurons.square().mean(-1, keepdim=True), 1 - BETA2)
        neurons.div_(moment.sqrt() + EPS)
        if self.skip is not None:
            moment = torch.where(self.skip > 0, torch.stack(moments), moment)
        copy_each(moments, list(moment))
        norms = torch.cat([before, squared_norms(weight.split(evened, first_row))], dim=1)
        if weight.is_of_experts:
            self.add_evened(group, places, list(evened), norms, first_row)
        else:
            copy_each([local(one.parameter.grad) for one, _ in places], list(evened))
            self.waiting.append((places, norms, first_row))

    def update_group(self, group: dict) -> None:
        self.waiting: list[tuple] = []  # weights with squared norms of their matrices over this rank's rows
        super().update_group(group)
        if not self.waiting:
            return
        norms = torch.cat([norms.flatten() for _, norms, _ in self.waiting]).to(self.ranks.device)
        if self.ranks.shards > 1:
            dist.all_reduce(norms, group=self.ranks.shard_group)
        of_each = norms.split([norms.numel() for _, norms, _ in self.waiting])
        for (places, own, first_row), whole in zip(self.waiting, of_each, strict=True):
            evened = [local(weight.parameter.grad) for weight, _ in places]
            self.add_evened(group, places, evened, whole.view(own.shape), first_row)

    def add_evened(self, group: dict, places: list[tuple], evened: list, norms: torch.Tensor, first_row: int) -> None:
        """Scales each matrix, with match_rms_adamw to a root mean square of 1, as the paper does, otherwise to the norm
        that it had, as the authors' code does, and adds it. `norms` are squared, (weights, matrices of updates and then
        of evened ones)."""
        weight, _ = places[0]
        had, has = norms.to(evened[0].device).sqrt().chunk(2, dim=1)
        wanted = had
        if self.scale_by == "match_rms_adamw":
            wanted = had.new_tensor([(outputs * inputs) ** 0.5 for outputs, inputs in weight.sizes])
        factors = wanted / (has + EPS)
        for parts, of_weight in zip((weight.split(update, first_row) for update in evened), factors, strict=True):
            torch._foreach_mul_(parts, list(of_weight))  # private: torch documents few operators on many tensors
        super().receive(group, places, evened, first_row)

    def scale(self, size: tuple[int, int]) -> float:
        return 0.2 if self.scale_by == "match_rms_adamw" else super().scale(size)


def squared_norms(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Of each of several (count, rows, columns), as (count, how many)."""
    return torch.stack([part.square().sum((-2, -1)) for part in matrices], dim=1)


def groups(model: nn.Module, settings: flags.Settings) -> list[dict]:
    """As Muon's; a UserError where no rank has a whole neuron."""
    result = muon.groups(model, settings)
    if any(weight.is_transposed and not weight.is_of_experts for weight in result[0]["matrices"]):
        family = type(model).__name__.removeprefix("FSDP")
        raise base.UserError(f"--optimizer normuon: {family} stores its linears input by output; use muon")
    return result


def model_state_bytes(model: nn.Module, settings: flags.Settings) -> int:
    """As Muon's, and 4 bytes for each neuron."""
    total = muon.model_state_bytes(model, settings)
    for weight in matrix_weights(model).values():
        _, inputs = weight.sizes[0]
        total += 4 * weight.parameter.numel() // inputs
    return total


OPTIMIZER = OptimizerKind(
    NorMuon,
    state_bytes=lambda weight: 4,  # of a matrix, but for its second moments
    groups=groups,
    model_state_bytes=model_state_bytes,
    describe=muon.describe,
)
