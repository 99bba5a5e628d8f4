"""Optimization: the optimizer of a sharded model by its name, with weight decay on matrices only and its states made;
the schedule of its learning rate; the clipping of gradients. Each optimizer is a file of harness/model/optimizers/."""

import dataclasses
import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import base, flags


def is_matrix(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True for a parameter of two or more dimensions that is no bias, no norm's and no A_log of a state space model.
    `name` is its name in `module`, whose own it is."""
    is_norm = "Norm" in type(module).__name__ and not isinstance(module, nn.Embedding)  # Inkling's embedding has one
    return parameter.dim() >= 2 and not is_norm and not name.endswith(("bias", "A_log"))


def decay_matrices(model: nn.Module, settings: flags.Settings) -> list[dict]:
    """Groups of a model's trained parameters, with weight decay only on matrices."""
    decays: dict[nn.Parameter, bool] = {}  # in the order of `model.parameters()`
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                decays.setdefault(parameter, is_matrix(module, name, parameter))
    matrices = [parameter for parameter, is_decayed in decays.items() if is_decayed]
    others = [parameter for parameter, is_decayed in decays.items() if not is_decayed]
    return [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as the rest of the program sees it: the value `OPTIMIZER` of its file.

    `build` takes groups of parameters, each with its weight decay, and the settings. The optimizer it returns has made
    its states already: a checkpoint is loaded into them. It may have two attributes for its next step, None or a scalar
    on the device, which that step sets to None: it divides the gradients by `grad_scale`; if `skip` is 1 it changes no
    weight, no state and no step count, whatever the gradients are. Without `skip` the host waits for the device.
    """

    build: Callable[[list[dict], flags.Settings], torch.optim.Optimizer]
    package: str | None = None  # the package that pip installs for it
    stands_in_for: tuple[str, ...] = ()  # optimizers that a plan may replace with it to save memory
    before_plan: Callable[[], None] | None = None  # computes from real tensors, which a plan's step lacks
    groups: Callable[[nn.Module, flags.Settings], list[dict]] = decay_matrices  # makes the groups for `build`
    describe: Callable[[nn.Module], str] | None = None  # the header's text: the update of each kind of parameter

    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


def find_optimizer(name: str) -> OptimizerKind:
    """The registered optimizer of that name, or the `OPTIMIZER` of its file, which is imported."""
    if kind := flags.OPTIMIZERS[name].kind:
        return kind
    return import_module(f"harness.model.optimizers.{name.replace('-', '_')}").OPTIMIZER


def memory_saving_optimizers(name: str) -> list[str]:
    """The installed optimizers that take less memory and may stand in for the named one."""
    kinds = {other: find_optimizer(other) for other in flags.OPTIMIZERS}
    return [other for other, kind in kinds.items() if name in kind.stands_in_for and kind.is_installed()]


def weight_dtype(settings: flags.Settings) -> torch.dtype:
    """The dtype of the master weights, and of the gradients that the optimizer gets."""
    return torch.bfloat16 if settings.precision == "bf16-pure" else torch.float32


def build_optimizer(settings: flags.Settings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the sharded parameters, with its states.

    Raises:
        UserError: its package is missing, or a registered one is no optimizer.
    """
    kind = find_optimizer(settings.optimizer)
    if not kind.is_installed():
        needs = f"needs the package {kind.package} (pip install {kind.package})"
        raise base.UserError(f"--optimizer {settings.optimizer}: {needs}")
    groups = [group for group in kind.groups(model, settings) if group["params"]]
    optimizer = kind.build(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"its build gave {type(optimizer).__name__} instead of an optimizer of torch"
        raise base.UserError(f"--optimizer {settings.optimizer}: {problem}")
    return optimizer


def build_scheduler(settings: flags.Settings, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate's schedule, from transformers or registered."""
    schedule = flags.SCHEDULES[settings.lr_scheduler]
    if make_factor := schedule.factor:

        def checked(step: int) -> float:
            factor = float(make_factor(step, settings.num_steps, settings.warmup_steps))
            if not 0 <= factor < math.inf:
                problem = f"its factor after {step} steps is {factor}, not a finite number of at least 0"
                raise base.UserError(f"--lr-scheduler {settings.lr_scheduler}: {problem}")
            return factor

        return torch.optim.lr_scheduler.LambdaLR(optimizer, checked)
    return transformers.get_scheduler(
        schedule.transformers_name,
        optimizer,
        num_warmup_steps=settings.warmup_steps,
        num_training_steps=settings.num_steps,
        scheduler_specific_kwargs=schedule.options(settings),
    )


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a DTensor, which torch types as a parameter or a tensor; the master weight inside a float8
    weight. Call it without gradients."""
    shard = tensor.to_local()
    return getattr(shard, "_tensor", shard)  # private: torchao's public way to the weight is a cast, which copies


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh over which a model's parameters are sharded."""
    parameter: Any = next(model.parameters())
    return parameter.device_mesh


@torch.no_grad()
def clip_grad_norm(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """The norm of all gradients on all ranks: a scalar on the device, the same on every rank. If `max_norm` is not 0,
    the next `step` updates with gradients scaled down to it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    mesh = parameters[0].device_mesh
    # private: one kernel, in fp32; `nn.utils.get_total_norm` would compute in the gradients' own dtype
    norms = torch._foreach_norm([local(parameter.grad) for parameter in parameters], dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    shards = mesh.get_group("shard")
    if shards.size() > 1:
        norm.square_()
        dist.all_reduce(norm, group=shards)
        norm.sqrt_()
    norm = max_over_replicas(norm, mesh)
    if max_norm and hasattr(optimizer, "grad_scale"):
        optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1)
    elif max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def max_over_replicas(norm: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The largest norm of all replicas. NaN counts as infinite: a maximum of NaN is not defined everywhere.

    Replicas have the same gradients, unless something broke on one after they were reduced. That one alone would then
    skip its step and train other weights from there on.
    """
    if "replicate" not in mesh.mesh_dim_names:
        return norm
    largest = norm.nan_to_num(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group("replicate"))
    return torch.where(norm.isnan(), norm, largest)
