"""Verification: whether everything that was to be sharded is. Called by the script before the first step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def verify_sharding(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, keeps_states: bool = True
) -> str:
    """One line about what is sharded and how; a RuntimeError where a parameter or an optimizer state is not the DTensor
    that the stage asks for, where a parameter lacks the states that its optimizer keeps, or where a state is not of the
    dtype that the optimizer's `state_dtypes` has for it."""
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    parameters = dict(model.named_parameters())
    states = {
        f"{name}.{key}": state
        for name, parameter in parameters.items()
        for key, state in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(state) and state.dim() > 0
    }
    for name, tensor in (parameters | states).items():
        if not isinstance(tensor, DTensor) or tuple(tensor.placements) != placements or tensor.device_mesh != mesh:
            raise RuntimeError(f"{name} is not sharded as {placements} over {mesh}: {type(tensor).__name__}")
    state_dtypes = getattr(optimizer, "state_dtypes", {})
    for name, state in states.items():
        wanted = state_dtypes.get(name.rpartition(".")[2], state.dtype)
        if state.dtype != wanted:
            raise RuntimeError(f"{name} is held in {state.dtype}, not in {wanted}")
    for name, parameter in parameters.items():
        has_states = any(state.startswith(f"{name}.") for state in states)
        if keeps_states and parameter.requires_grad and not has_states:
            raise RuntimeError(f"{name} has no optimizer state")
    local = sum(parameter.to_local().numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in parameters.values())
    counts = f"{len(parameters)} parameters and {len(states)} optimizer states are DTensors"
    share = f"rank {dist.get_rank()} holds {100 * local / total:.1f} % of the elements"
    for key, dtype in state_dtypes.items():
        counts += f", {key.replace('_', ' ')} in {str(dtype).removeprefix('torch.')}"
    return f"{counts}, {' x '.join(map(repr, placements))}; {share}"
