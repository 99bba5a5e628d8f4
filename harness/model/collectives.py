"""Collectives: changes of what FSDP2 does with a group's parameters and gradients. A rank that is alone in its shard
group copies neither, and replicas begin equal. The private parts of FSDP2 used here are the same in torch 2.11 and
2.13."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# private: only the protocols are public (`set_custom_all_gather`), without their default implementations
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # private: no protocol covers it
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # private: the type has no public name

from harness import flags
from harness.model.optimization import local


def fsdp_group(module: nn.Module) -> FSDPParamGroup | None:
    """The parameters that `fully_shard` of a module gathers together; None if it has none of its own, or is not
    sharded."""
    if not isinstance(module, FSDPModule):
        return None
    return module._get_fsdp_state()._fsdp_param_group  # private: public methods configure it, none returns it


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` was called for and that have parameters of their own."""
    for module in model.modules():
        if fsdp_group(module):
            yield module


class OneBuffer(DefaultReduceScatter):
    """The reduce-scatter of one rank: input and output are one tensor.

    FSDP2 allocates the input, a layer's gradients, then the output, and copies one into the other; copying a tensor
    into itself is free. The gradients then lie in the memory pool of the compute stream, which can use it again.
    """

    pending: torch.Tensor | None = None  # allocated as input, not yet as output

    def __init__(self, accumulates: bool):
        self.accumulates = accumulates  # FSDP2 adds up the gradients of several microbatches on its own stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.pending is None:
            self.pending = super().allocate(size, dtype=dtype, device=device)
            return self.pending
        tensor, self.pending = self.pending, None
        if self.accumulates and tensor.is_cuda:  # FSDP2's own stream is current, and the last to read this tensor
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class SingleRankParameter(FSDPParam):
    """A parameter of a shard group of one rank. FSDP2 would cast it into a new tensor and copy that into the unsharded
    parameter. Here the unsharded parameter is the parameter itself or, in another precision, its cast."""

    @property
    def flat(self) -> torch.Tensor:
        """The full parameter as a tensor of one dimension."""
        return self._sharded_param_data  # private: the public DTensor has padded storage

    @property
    def is_aliased(self) -> bool:
        parameter = self.flat
        return self.param_dtype is None and parameter.untyped_storage().nbytes() == parameter.nbytes

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        return [self.flat]  # not cast yet: FSDP2's copy into the output casts

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **options: Any,
    ) -> None:
        if self.is_aliased:
            self.all_gather_outputs = [self.flat]  # copying it onto itself is free
        else:
            super().init_all_gather_outputs(
                all_gather_input_numels, [self.param_dtype or self.orig_dtype], world_size, device, **options
            )

    def free_unsharded_param(self) -> None:
        if not self.is_aliased:
            super().free_unsharded_param()


def avoid_copies_on_one_rank(settings: flags.Settings, model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep FSDP2 from copying parameters and reduced gradients in shard groups of one rank, but for parameters on the
    host and float8 weights. Do nothing in larger groups."""
    if mesh["shard"].size() > 1:
        return
    accumulates = settings.gradient_accumulation_steps > 1  # FSDP2 adds gradients up on a stream of its own
    for module in sharded_modules(model):
        module.set_custom_reduce_scatter(OneBuffer(accumulates))
        for parameter in fsdp_group(module).fsdp_params:
            # private: the shard and the hook have no public name
            casts_itself = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            if not (parameter.offload_to_cpu or casts_itself):
                parameter.__class__ = SingleRankParameter


def discard_unreduced_gradients(model: nn.Module) -> None:
    """Discard what FSDP2 keeps of the microbatches of an unfinished step: gradients that are not reduced yet, or not
    among replicas. The next backward would add them."""
    for module in sharded_modules(model):
        group = fsdp_group(module)
        # private, all of it: `reset_iter_state`, new in torch 2.13, leaves the gradients of parameters there
        group._partial_reduce_output = None
        getattr(group, "_partial_reduce_output_layout", {}).clear()  # from 2.15 on
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # before 2.15; since then it is the next one
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # absent before the first forward
                parameter._unsharded_param.grad = None


def set_own_dtype(parameter: FSDPParam, _: MixedPrecisionPolicy) -> None:
    FSDPParam.init_dtype_attrs(parameter, MixedPrecisionPolicy())


def gather_frozen_in_own_dtype(model: nn.Module) -> None:
    """Keep FSDP2 from casting frozen parameters, which are in the dtype that their layer computes in: bf16, or fp32 for
    those that the family keeps in it."""
    for module in sharded_modules(model):
        for parameter in fsdp_group(module).fsdp_params:
            if not parameter.sharded_param.requires_grad:
                # private: FSDP2 has one dtype for all parameters of a group
                vars(parameter)["init_dtype_attrs"] = functools.partial(set_own_dtype, parameter)


@torch.no_grad()
def make_replicas_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all replicas the parameters of the first one. They drew the same random numbers only if their GPUs are of
    one kind: a GPU with another number of multiprocessors draws others from the same seed, and nothing later corrects
    them."""
    if "replicate" not in mesh.mesh_dim_names:
        return
    group = mesh.get_group("replicate")
    for parameter in model.parameters():
        shard = local(parameter)
        if shard.numel():  # the same number on all replicas
            sent = shard.to(mesh.device_type)  # from the host with --cpu-offload
            dist.broadcast(sent, group=group, group_src=0)
            shard.copy_(sent)
