"""Verification: whether everything that was to be sharded is, and whether all of it is held in the dtype that the flags
ask for. Called by the script before the first step."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import flags
from harness.model.collectives import fsdp_group, sharded_modules
from harness.model.optimization import find_optimizer, local, weight_dtype


class Held(NamedTuple):
    """One kind of tensors that training keeps, and the dtype that they should have."""

    what: str
    dtypes: dict[str, torch.dtype]  # by the name of the tensor
    wanted: torch.dtype


@torch.no_grad()
def verify_sharding(
    settings: flags.Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    keeps_states: bool = True,
    averages: dict[str, torch.Tensor] | None = None,
) -> str:
    """One line about what is sharded and how, and which dtypes it has. Gradients, which are not there yet, are looked
    at when the optimizer takes its first step. `averages` are those of --ema, by the names of the parameters.

    Raises:
        RuntimeError: a parameter, an optimizer state or an average is not the DTensor that the stage asks for; a
            parameter lacks the states that its optimizer keeps; or something is not held in the dtype that it should
            be.
    """
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    parameters = dict(model.named_parameters())
    states = {
        f"{name}.{key}": state
        for name, parameter in parameters.items()
        for key, state in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(state) and state.dim() > 0
    }
    average_of = {f"the average of {name}": average for name, average in (averages or {}).items()}
    for name, tensor in (parameters | states | average_of).items():
        if not isinstance(tensor, DTensor) or tuple(tensor.placements) != placements or tensor.device_mesh != mesh:
            raise RuntimeError(f"{name} is not sharded as {placements} over {mesh}: {type(tensor).__name__}")
    for name, parameter in parameters.items():
        has_states = any(state.startswith(f"{name}.") for state in states)
        if keeps_states and parameter.requires_grad and not has_states:
            raise RuntimeError(f"{name} has no optimizer state")

    weights = weight_dtype(settings)
    held = [
        Held("weights", {name: local(parameter).dtype for name, parameter in parameters.items()}, weights),
        Held("sums of gradients over ranks", reduce_dtypes(model), weights),
        *held_states(settings, parameters, optimizer),
        Held("averages", {name: average.dtype for name, average in average_of.items()}, torch.float32),
    ]
    check_dtypes(held)
    check_first_gradients(optimizer, parameters, weights)

    of_rank = sum(local(parameter).numel() for parameter in parameters.values())
    total = sum(parameter.numel() for parameter in parameters.values())
    counts = f"{len(parameters)} parameters and {len(states)} optimizer states are DTensors"
    if averages:
        counts += f", as are {len(averages)} averages"
    share = f"rank {dist.get_rank()} holds {100 * of_rank / total:.1f} % of the elements"
    first_step = f"at the first step gradients {name_of(weights)}"
    return f"{counts}, {' x '.join(map(repr, placements))}; {share}; {describe_dtypes(held)}; {first_step}"


def reduce_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """In which dtype the gradients of each parameter are added up over the ranks."""
    names = {module: name or "the root" for name, module in model.named_modules()}
    dtypes = {}
    for module in sharded_modules(model):
        for index, parameter in enumerate(fsdp_group(module).fsdp_params):
            policy = parameter.mp_policy
            dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
            dtypes[f"{names[module]}, parameter {index}"] = dtype
    return dtypes


def held_states(settings: flags.Settings, parameters: dict[str, nn.Parameter], optimizer) -> list[Held]:
    """The states of one name and dtype, with the dtype that the optimizer's file has for them."""
    declared = find_optimizer(settings.optimizer).state_dtypes
    held: dict[tuple[str, torch.dtype], Held] = {}
    parameter: Any  # a DTensor
    for parameter_name, parameter in parameters.items():
        wanted = declared(settings, parameter) if declared else {}
        for key, state in optimizer.state.get(parameter, {}).items():
            if not torch.is_tensor(state) or not state.dim():
                continue
            for name, tensor in parts_of_state(key, local(state)).items():
                if declared and name not in wanted:
                    known = ", ".join(wanted)
                    raise RuntimeError(f"{parameter_name}.{name}: its optimizer's `state_dtypes` has {known} for it")
                dtype = wanted.get(name, weight_dtype(settings))
                kind = held.setdefault((name, dtype), Held(name.replace(".", " "), {}, dtype))
                kind.dtypes[f"{parameter_name}.{name}"] = tensor.dtype
    return list(held.values())


def parts_of_state(name: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a state is made of: of a quantized one `NAME.codes` and the like, else itself."""
    if not hasattr(state, "__tensor_flatten__"):
        return {name: state}
    parts, _ = state.__tensor_flatten__()
    return {f"{name}.{part}": getattr(state, part) for part in parts}


def check_dtypes(held: list[Held]) -> None:
    for what, dtypes, wanted in held:
        for name, dtype in dtypes.items():
            if dtype != wanted:
                raise RuntimeError(f"{name}: {what} are held in {dtype}, not in {wanted}")


def check_first_gradients(optimizer, parameters: dict[str, nn.Parameter], wanted: torch.dtype) -> None:
    """Lets the optimizer's first step begin with a look at the gradients."""

    def check(*_) -> None:
        handle.remove()
        found = {name: p.grad.dtype for name, p in parameters.items() if p.grad is not None}
        check_dtypes([Held("gradients", found, wanted)])

    handle = optimizer.register_step_pre_hook(check)


def describe_dtypes(held: list[Held]) -> str:
    """What is held in each dtype."""
    kinds: dict[torch.dtype, list[str]] = {}
    for what, dtypes, wanted in held:
        if dtypes:
            kinds.setdefault(wanted, []).append(what)
    return "; ".join(f"{', '.join(whats)} {name_of(dtype)}" for dtype, whats in kinds.items())


def name_of(dtype: torch.dtype) -> str:
    return f"in {str(dtype).removeprefix('torch.')}"
