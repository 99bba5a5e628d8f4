"""Verification: whether everything that was to be sharded is, and whether weights, averages and gradients are held in
the dtype that the flags ask for. Called by the script before the first step."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import flags
from harness.model.collectives import fsdp_group, sharded_modules
from harness.model.optimization import local, weight_dtype


@torch.no_grad()
def verify_sharding(
    settings: flags.Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    keeps_states: bool = True,
) -> str:
    """One line about what is sharded and how, and which dtypes it has. Gradients, which are not there yet, are looked
    at when the optimizer takes its first step.

    Raises:
        RuntimeError: a parameter or an optimizer state is not the DTensor that the stage asks for; a
            parameter lacks the states that its optimizer keeps; or a parameter or the sum of a gradient over
            ranks is not held in the dtype that it should be.
    """
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    parameters: dict[str, Any] = dict(model.named_parameters())
    states: dict[str, Any] = {}
    for name, parameter in parameters.items():
        kept = optimizer.state.get(parameter, {})
        own = {f"{name}.{key}": state for key, state in kept.items() if torch.is_tensor(state) and state.dim()}
        if keeps_states and parameter.requires_grad and not own:
            raise RuntimeError(f"{name} has no optimizer state")
        states |= own
    for name, tensor in (parameters | states).items():
        if not isinstance(tensor, DTensor) or tuple(tensor.placements) != placements or tensor.device_mesh != mesh:
            raise RuntimeError(f"{name} is not sharded as {placements} over {mesh}: {type(tensor).__name__}")

    found = [("weights", name, local(parameter).dtype) for name, parameter in parameters.items()]
    found += [("sums of gradients over ranks", name, dtype) for name, dtype in reduce_dtypes(model)]
    for name, state in states.items():
        quantized = getattr(local(state), "codes", None)  # torchao's 8-bit states are made of codes and scales
        what = name.rpartition(".")[2]
        found.append((what, name, state.dtype) if quantized is None else (f"{what} codes", name, quantized.dtype))
    weights = weight_dtype(settings)
    check_dtypes(found, {"weights": weights, "sums of gradients over ranks": weights})

    def check_gradients(*_) -> None:
        handle.remove()
        gradients = [("gradients", name, p.grad.dtype) for name, p in parameters.items() if p.grad is not None]
        check_dtypes(gradients, {"gradients": weights})

    handle = optimizer.register_step_pre_hook(check_gradients)
    of_rank = sum(local(parameter).numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in parameters.values())
    counts = f"{len(parameters)} parameters and {len(states)} optimizer states are DTensors"
    share = f"rank {dist.get_rank()} holds {100 * of_rank / total:.1f} % of the elements"
    in_dtype: dict[torch.dtype, dict[str, None]] = {}  # what is held in each, in order
    for what, _, dtype in found:
        in_dtype.setdefault(dtype, {})[what] = None
    dtypes = "; ".join(f"{', '.join(kinds)} in {short(dtype)}" for dtype, kinds in in_dtype.items())
    first_step = f"at the first step gradients in {short(weights)}"
    return f"{counts}, {' x '.join(map(repr, placements))}; {share}; {dtypes}; {first_step}"


def reduce_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """(a parameter, in which dtype its gradients are added up over the ranks)."""
    names = {module: name or "the root" for name, module in model.named_modules()}
    for module in sharded_modules(model):
        for index, parameter in enumerate(fsdp_group(module).fsdp_params):
            policy = parameter.mp_policy
            dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
            yield f"{names[module]}, parameter {index}", dtype


def check_dtypes(found: list[tuple[str, str, torch.dtype]], wanted: dict[str, torch.dtype]) -> None:
    for what, name, dtype in found:
        if dtype != wanted.get(what, dtype):
            raise RuntimeError(f"{name}: {what} are held in {dtype}, not in {wanted[what]}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
