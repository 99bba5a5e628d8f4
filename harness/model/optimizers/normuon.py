"""Muon with a second moment for each neuron, which evens out their updates (NorMuon, arXiv 2510.05491). The second
moment is in fp32 and lies with its neuron's rows: they are evened out after they came back from their matrix's owner,
and one all-reduce gives the norms of whole matrices."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness import base, flags
from harness.model.matrices import MatrixWeight, matrix_weights
from harness.model.optimization import OptimizerKind
from harness.model.optimizers import muon
from harness.model.whole_matrices import copy_each, rows_of_shard

# `harness.flags.rules` reads this, before torch is loaded
OWN_FLAGS = ("adamw_lr", "momentum_dtype", "muon_iteration", "muon_scale")
BETA2 = 0.95
EPS = 1e-10


class NorMuon(muon.Muon):
    def add_states(self, group: dict) -> None:
        super().add_states(group)
        for weight in group.get("matrices", []):
            parameter = group["params"][weight.index]
            self.state[parameter]["second_moment"] = zeros_of_neurons(parameter, weight)

    def receive(
        self, group: dict, weight: MatrixWeight, places: list[tuple], updates: list[torch.Tensor], first_row: int = 0
    ) -> None:
        """Divides each neuron by the root of its second moment, which moves. What comes of a weight of two dimensions
        then waits, in the place of its gradient, until the norms of its matrices are known."""
        if not updates[0].numel():  # a rank without rows takes part in the sum of norms
            zeros = torch.zeros(len(updates), 2 * len(weight.outputs), device=self.ranks.device)
            self.waiting.append((weight, [], zeros, first_row))
            return
        moments = self.at(places, [self.state[parameter]["second_moment"] for parameter in group["params"]])
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
            self.add_evened(group, weight, places, list(evened), norms, first_row)
        else:
            gradients = self.at(places, [parameter.grad for parameter in group["params"]])
            copy_each(gradients, list(evened))
            self.waiting.append((weight, places, norms, first_row))

    def update_group(self, group: dict) -> None:
        self.waiting: list[tuple] = []  # weights with squared norms of their matrices over this rank's rows
        super().update_group(group)
        if not self.waiting:
            return
        norms = torch.cat([norms.flatten() for _, _, norms, _ in self.waiting]).to(self.ranks.device)
        if self.ranks.shards > 1:
            dist.all_reduce(norms, group=self.ranks.shard_group)
        of_each = norms.split([norms.numel() for _, _, norms, _ in self.waiting])
        for (weight, places, own, first_row), whole in zip(self.waiting, of_each, strict=True):
            gradients = self.at(places, [parameter.grad for parameter in group["params"]])
            self.add_evened(group, weight, places, gradients, whole.view(own.shape), first_row)
        self.waiting = []

    def add_evened(self, group, weight: MatrixWeight, places, evened: list, norms: torch.Tensor, first_row: int):
        """Scales each matrix, with match_rms_adamw to a root mean square of 1, as the paper does, otherwise to the norm
        that it had, as the authors' code does, and adds it. `norms` are squared, (weights, matrices of updates and then
        of evened ones)."""
        if not places:
            return
        had, has = norms.to(evened[0].device).sqrt().chunk(2, dim=1)
        wanted = had
        if self.scale_by == "match_rms_adamw":
            wanted = had.new_tensor([(outputs * inputs) ** 0.5 for outputs, inputs in weight.sizes])
        factors = wanted / (has + EPS)
        for parts, of_weight in zip((weight.split(update, first_row) for update in evened), factors, strict=True):
            torch._foreach_mul_(parts, list(of_weight))  # private: torch documents few operators on many tensors
        super().receive(group, weight, places, evened, first_row)

    def scale(self, size: tuple[int, int]) -> float:
        return 0.2 if self.scale_by == "match_rms_adamw" else super().scale(size)


def squared_norms(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Of each of several (count, rows, columns), as (count, how many)."""
    return torch.stack([part.square().sum((-2, -1)) for part in matrices], dim=1)


def zeros_of_neurons(parameter: DTensor, weight: MatrixWeight) -> DTensor:
    """Zeros in fp32 for each neuron of a parameter, sharded as it is."""
    mesh = parameter.device_mesh
    rows = rows_of_shard(weight.shape[0], mesh.get_local_rank("shard"), mesh["shard"].size())
    zeros = torch.zeros(len(rows), *weight.neurons[1:], dtype=torch.float32, device=parameter.to_local().device)
    stride = torch.empty(weight.neurons, device="meta").stride()
    return DTensor.from_local(zeros, mesh, parameter.placements, run_check=False, shape=weight.neurons, stride=stride)


def groups(model: nn.Module, settings: flags.Settings) -> list[dict]:
    """As Muon's; a UserError where no rank has a whole neuron."""
    result = muon.groups(model, settings)
    if any(weight.is_transposed and not weight.is_of_experts for weight in result[0]["matrices"]):
        family = type(model).__name__.removeprefix("FSDP")
        raise base.UserError(f"--optimizer normuon: {family} stores its linears input by output; use muon")
    return result


def model_state_bytes(model: nn.Module, settings: flags.Settings) -> int:
    """As Muon's, and 4 bytes for each neuron."""
    neurons = sum(weight.neurons.numel() for weight in matrix_weights(model).values())
    return muon.model_state_bytes(model, settings) + 4 * neurons


OPTIMIZER = OptimizerKind(
    NorMuon,
    state_bytes=lambda weight: 4,  # of a matrix, but for its second moments
    groups=groups,
    model_state_bytes=model_state_bytes,
    describe=muon.describe,
)
