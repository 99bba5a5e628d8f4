"""Collectives: what FSDP2 does with a group's parameters and gradients where that is not left to it: no copies on a
rank that shards with nobody, and replicas that begin equal. Built on parts of FSDP2 that are the same in torch 2.11 and
2.13."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

# private: public are the protocols only (`set_custom_all_gather`), which would have to be implemented anew
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # private: no protocol covers it
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # private: no public name of the type

from harness.model.optimization import local


def fsdp_group(module: nn.Module) -> FSDPParamGroup | None:
    """The parameters that `fully_shard` of a module gathers together; None where it has none of its own, or is not
    sharded."""
    if not isinstance(module, FSDPModule):
        return None
    return module._get_fsdp_state()._fsdp_param_group  # private: public methods set what it does, none gives it


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    """The modules that `fully_shard` was called for, but those without parameters of their own."""
    for module in model.modules():
        if fsdp_group(module):
            yield module


class OneBuffer(DefaultReduceScatter):
    """The reduce-scatter of one rank: input and output are one tensor.

    FSDP2 asks for the input, a layer's gradients, then for the output, and copies one into the other, which for one
    tensor is nothing. Its gradients then lie in the memory pool of the stream that computes, which can use it again.
    """

    given: torch.Tensor | None = None  # as input, not yet as output

    def __init__(self, accumulates: bool):
        self.accumulates = accumulates  # gradients of several microbatches are added up on FSDP2's own stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.given is None:
            self.given = super().allocate(size, dtype=dtype, device=device)
            return self.given
        tensor, self.given = self.given, None
        if self.accumulates and tensor.is_cuda:  # FSDP2's own stream is current, and the last to read this one
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


class WholeParameter(FSDPParam):
    """A parameter that its rank shares with nobody. FSDP2 would cast it into a new tensor and copy that into the one
    that computes. Here what computes is the parameter itself or, in another precision, its cast and nothing between."""

    @property
    def whole(self) -> torch.Tensor:
        """All of it, flat, as this rank holds it."""
        return self._sharded_param_data  # private: public are DTensors only, whose storage is padded

    @property
    def computes_itself(self) -> bool:
        parameter = self.whole
        return self.param_dtype is None and parameter.untyped_storage().nbytes() == parameter.nbytes

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        return [self.whole]  # not cast yet: FSDP2 copies it into the output, which casts

    def init_all_gather_outputs(
        self,
        all_gather_input_numels: list[int],
        all_gather_input_dtypes: list[torch.dtype],
        world_size: int,
        device: torch.device,
        **options: Any,
    ) -> None:
        if self.computes_itself:
            self.all_gather_outputs = [self.whole]  # and copying it onto itself is nothing
        else:
            super().init_all_gather_outputs(
                all_gather_input_numels, [self.param_dtype or self.orig_dtype], world_size, device, **options
            )

    def free_unsharded_param(self) -> None:
        if not self.computes_itself:
            super().free_unsharded_param()


def alias_unsharded_params(model: nn.Module, mesh: DeviceMesh, accumulates: bool) -> None:
    """Where each rank holds all of every parameter, neither parameters nor reduced gradients are copied. Everywhere
    else FSDP2 does as it does by itself, and so it does with parameters on the host and with float8 weights.
    `accumulates`: a step has several microbatches."""
    if mesh["shard"].size() > 1:
        return
    for module in sharded_modules(model):
        module.set_custom_reduce_scatter(OneBuffer(accumulates))
        for parameter in fsdp_group(module).fsdp_params:
            # private: FSDP2 asks the same of it, and has no public name for it
            casts_itself = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            if not (parameter.offload_to_cpu or casts_itself):
                parameter.__class__ = WholeParameter


@torch.no_grad()
def make_replicas_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all replicas the parameters of the first one. They drew the same random numbers only if their GPUs are of
    one kind: on a GPU with another number of multiprocessors the same seed draws others, and nothing later mends it."""
    if "replicate" not in mesh.mesh_dim_names:
        return
    group = mesh.get_group("replicate")
    for parameter in model.parameters():
        shard = local(parameter)
        if shard.numel():  # the same on all replicas
            sent = shard.to(mesh.device_type)  # from the host with --cpu-offload
            dist.broadcast(sent, group=group, group_src=0)
            shard.copy_(sent)
