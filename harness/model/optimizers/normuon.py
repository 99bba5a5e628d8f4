"""Muon with a second moment for each neuron, which evens out their updates (NorMuon, arXiv 2510.05491). The second
moment is in fp32; it travels with its matrix to the rank that computes it."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.flags import Settings
from harness.model import newton_schulz
from harness.model.matrices import Matrix, neuron_shape
from harness.model.optimization import OptimizerKind, local
from harness.model.optimizers import muon
from harness.model.whole_matrices import Stack, rows_of_shard

# `harness.flags.rules` reads this, before torch is loaded
OWN_FLAGS = ("adamw_lr", "momentum_dtype", "muon_iteration", "muon_scale")
BETA2 = 0.95
EPS = 1e-10


class NorMuon(muon.Muon):
    def make_states(self, group: dict) -> None:
        super().make_states(group)
        transposed = {matrix.parameter: matrix.is_transposed for matrix in group.get("matrices", [])}
        for index, is_transposed in transposed.items():
            parameter = group["params"][index]
            self.state[parameter]["second_moment"] = zeros_of_neurons(parameter, is_transposed)

    def update_stack(self, group: dict, stack: Stack) -> Iterator[None]:
        ranks, dtype, neurons = self.ranks, newton_schulz.DTYPE, per_neuron(stack, group["params"])
        averages = [None if p.grad is None else local(p.grad) for p in group["params"]]
        moments = [local(self.state[parameter]["second_moment"]) for parameter in group["params"]]
        coming = ranks.gather(stack, averages, dtype)
        moments_coming = ranks.gather(neurons, moments, torch.float32)
        yield
        whole, moment = ranks.whole(stack, coming.take()), ranks.whole(neurons, moments_coming.take())
        if whole is not None:
            update = newton_schulz.orthogonalize(whole, self.iteration).float()
            whole = self.even_out(update, moment, first_transposed(stack)).to(dtype)
        coming = ranks.give_back(stack, whole, dtype)
        moments_coming = ranks.give_back(neurons, moment, torch.float32)
        yield
        coming, moments_coming = ranks.share(coming.take()), ranks.share(moments_coming.take())
        yield
        parts, results = ranks.results(neurons, moments_coming.take(), moments)
        for part, result in zip(parts, results, strict=True):
            part.copy_(result if self.skip is None else torch.where(self.skip > 0, part, result))
        self.add_updates(group, stack, coming.take())

    def even_out(self, update: torch.Tensor, moment: torch.Tensor, is_transposed: bool) -> torch.Tensor:
        """Updates (count, rows, columns) with each neuron divided by the root of its second moment (count, neurons, 1),
        which is moved in place, and then each matrix scaled: with match_rms_adamw to a root mean square of 1, as the
        paper does, otherwise to the norm that it had, as the authors' code does."""
        by_neuron = update.mT if is_transposed else update
        moment.lerp_(by_neuron.square().mean(-1, keepdim=True), 1 - BETA2)
        evened = by_neuron / (moment.sqrt() + EPS)
        norm = torch.linalg.vector_norm(evened, dim=(-2, -1), keepdim=True)
        wanted = (evened.shape[-2] * evened.shape[-1]) ** 0.5
        if self.scale_by == "original":
            wanted = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
        evened = evened * (wanted / (norm + EPS))
        return evened.mT if is_transposed else evened

    def scale(self, matrix: Matrix) -> float:
        return 0.2 if self.scale_by == "match_rms_adamw" else super().scale(matrix)


def zeros_of_neurons(parameter: DTensor, is_transposed: bool) -> DTensor:
    """Zeros in fp32 for each neuron of a parameter, sharded as it is."""
    shape = torch.Size(neuron_shape(parameter.shape, is_transposed))
    mesh = parameter.device_mesh
    rows = rows_of_shard(shape[0], mesh.get_local_rank("shard"), mesh["shard"].size())
    zeros = torch.zeros(len(rows), *shape[1:], dtype=torch.float32, device=parameter.to_local().device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def per_neuron(stack: Stack, parameters: list[nn.Parameter]) -> Stack:
    """The second moments of a stack's matrices, on the same ranks."""
    owned = []
    for replica in stack.owned:
        owned.append([[m.per_neuron(parameters[m.parameter].shape) for m in of_rank] for of_rank in replica])
    return Stack(owned, stack.crosses_ranks)


def first_transposed(stack: Stack) -> bool:
    return muon.first_matrix(stack).is_transposed


def state_dtypes(settings: Settings, parameter: DTensor) -> dict[str, torch.dtype]:
    return muon.state_dtypes(settings, parameter) | {"second_moment": torch.float32}


def matrix_state_bytes(parameter: nn.Parameter, matrices: list[Matrix], settings: Settings) -> int:
    """The momentum of one parameter, and 4 bytes for each neuron."""
    neurons = torch.Size(neuron_shape(parameter.shape, matrices[0].is_transposed)).numel()
    return muon.matrix_state_bytes(parameter, matrices, settings) + 4 * neurons


def model_state_bytes(model: nn.Module, settings: Settings) -> int:
    return muon.model_state_bytes(model, settings, matrix_state_bytes)


OPTIMIZER = OptimizerKind(
    NorMuon,
    state_bytes=lambda weight: 4,  # of a matrix, but for its second moments
    groups=muon.groups,
    state_dtypes=state_dtypes,
    model_state_bytes=model_state_bytes,
    describe=muon.describe,
)
