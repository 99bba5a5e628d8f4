"""Collectives: what FSDP2 is given for all-gathers and reduce-scatters in place of its own. Called by the script while
it shards a model, and by the clock around them (waiting.py). It does not know when they are called."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


class Collective:
    """A collective as FSDPModule.set_custom_all_gather and set_custom_reduce_scatter want it."""

    def __init__(self, call: Callable):
        self.call = call

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group, **options):
        return self.call(output_tensor, input_tensor, group=group, **options)


class OneBuffer(Collective):
    """The reduce-scatter of one rank: input and output are one tensor.

    FSDP2 asks for the input, a layer's gradients, then for the output, and copies one into the other, which for one
    tensor is nothing. Its gradients then lie in the memory pool of the stream that computes, which can use it again.
    """

    given: torch.Tensor | None = None  # as input, not yet as output

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.given is None:
            self.given = super().allocate(size, dtype=dtype, device=device)
            return self.given
        tensor, self.given = self.given, None
        if tensor.is_cuda:  # FSDP2's own stream is current: where gradients add up, it is the last to read this one
            tensor.record_stream(torch.cuda.current_stream())
        return tensor


def all_gather() -> Collective:
    return Collective(getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)  # torch 2.13, older


def reduce_scatter(mesh: DeviceMesh) -> Collective:
    kind = OneBuffer if mesh.get_group("shard").size() == 1 else Collective
    return kind(getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)


def leave_out_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """Where each rank holds all of every parameter, gradients are not copied after the backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(reduce_scatter(mesh))
