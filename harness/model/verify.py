"""Verification: checks that every parameter and optimizer state is sharded over the mesh, and that weights, gradients
and their sums over ranks have the dtypes of the flags."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import base, flags
from harness.model.collectives import fsdp_group, sharded_modules
from harness.model.optimization import local, weight_dtype


@torch.no_grad()
def verify_sharding(
    settings: flags.Settings, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
) -> str:
    """Check a model and its optimizer, and in the first step their gradients and that it changes nothing that a
    checkpoint lacks. Return the header's line: the numbers of parameters and states, their placements, the dtype of the
    weights.

    Raises:
        UserError: a trained parameter has no state, into which a checkpoint would be loaded, or one that is no tensor.
        RuntimeError: a parameter or state has another placement or dtype; it names the first one.
    """
    placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
    dtype, num_states = weight_dtype(settings), 0
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        kept = optimizer.state.get(parameter, {})
        for key, state in kept.items():
            if not torch.is_tensor(state):
                problem = f"its state {name}.{key} is no tensor; make it one, as a checkpoint has only tensors"
                raise base.UserError(f"--optimizer {settings.optimizer}: {problem}")
        states = {f"{name}.{key}": state for key, state in kept.items() if state.dim()}
        if parameter.requires_grad and not states:
            problem = f"it made no state for {name}, into which a checkpoint would be loaded"
            raise base.UserError(f"--optimizer {settings.optimizer}: {problem}")
        for tensor_name, tensor in ({name: parameter} | states).items():
            if not isinstance(tensor, DTensor) or tuple(tensor.placements) != placements or tensor.device_mesh != mesh:
                raise RuntimeError(f"{tensor_name} is not sharded as {placements} over {mesh}: {type(tensor).__name__}")
        if not parameter.requires_grad and states:
            raise RuntimeError(f"{name} is frozen and has an optimizer state")
        if parameter.requires_grad:
            check_dtype(name, local(parameter).dtype, dtype)
        num_states += len(states)
    for module in sharded_modules(model):
        for parameter in fsdp_group(module).fsdp_params:
            policy, own = parameter.mp_policy, parameter.sharded_param
            if not own.requires_grad:
                continue  # no gradient
            reduced_in = policy.reduce_dtype or policy.param_dtype or own.dtype
            check_dtype(f"the sum over ranks of the gradient of {names[own]}", reduced_in, dtype)

    before: dict[str, str] = {}  # during the first step

    def check_gradients(*_: object) -> None:
        before.update(unsaved_values(optimizer, names))
        for parameter, name in names.items():
            if parameter.grad is not None and not parameter.requires_grad:
                raise RuntimeError(f"{name} is frozen and has a gradient")
            if parameter.grad is not None:
                check_dtype(f"the gradient of {name}", parameter.grad.dtype, dtype)

    def check_unsaved(*_: object) -> None:
        first_step.remove()
        now = unsaved_values(optimizer, names) if before else {}
        for name, value in now.items():
            if before.get(name) != value:
                problem = f"its first step made or changed {name}, which no checkpoint has"
                advice = "keep it in a state tensor that is made with the optimizer"
                raise base.UserError(f"--optimizer {settings.optimizer}: {problem}; {advice}")
        before.clear()

    first_step = optimizer.register_step_pre_hook(check_gradients)
    optimizer.register_step_post_hook(check_unsaved)
    frozen = [str(local(parameter).dtype) for parameter in names if not parameter.requires_grad]
    counted = f"{len(names) - len(frozen)} parameters in {dtype}"
    if frozen:
        counted += f" and {len(frozen)} frozen ones in {' and '.join(sorted({*frozen}))}"
    counted = counted.replace("torch.", "")
    return f"{counted}, {num_states} states: {' x '.join(map(repr, placements))}"


def unsaved_values(optimizer: torch.optim.Optimizer, names: dict[Any, str]) -> dict[str, str]:
    """Return by name what a resume would not restore if a step changed it: the numbers in param_groups, and which
    states there are."""
    found = {
        f"state {name}.{key}": "" for parameter, name in names.items() for key in optimizer.state.get(parameter, ())
    }
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "lr" and isinstance(value, int | float | torch.Tensor):
                found[f"param_groups[{index}][{key!r}]"] = repr(value)
    return found


def check_dtype(name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    if found != wanted:
        raise RuntimeError(f"{name} is held in {found}, not in {wanted}")
