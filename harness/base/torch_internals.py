"""Private names of torch that this program needs, each with what it stands for and why no public name does the same.
tests/base/test_internals.py compares NAMES with the installed torch and says which of them a new version no longer has.
Independent of what they are used for."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.nn.attention import SDPBackend
from torch.utils import _python_dispatch

# Owner, a module or "module:class", and what is used of it.
NAMES = {
    "torch": (
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_div_",
        "_foreach_lerp_",
        "_foreach_mul_",
        "_foreach_norm",
        "_fused_sdp_choice",
    ),
    "torch:Tensor": ("_version",),
    "torch:ops.mkldnn": ("_is_mkldnn_bf16_supported",),
    "torch._C": ("_cuda_attach_out_of_memory_observer", "_current_graph_task_id"),
    "torch._dynamo.config": ("skip_fwd_side_effects_in_bwd_under_checkpoint",),
    "torch._dynamo.utils": ("disable_cache_limit",),
    "torch._functorch.config": ("activation_memory_budget",),
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history"),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ("DefaultAllGather", "DefaultReduceScatter"),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("FSDPParam",),
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": (
        "_sharded_local_tensor",
        "_sharded_param_data",
        "all_gather_inputs",
        "free_unsharded_param",
        "init_all_gather_outputs",
        "mp_policy",
        "offload_to_cpu",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": (
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "fsdp_params",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": ("_fsdp_param_group",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
}

# ---- Any code --------------------------------------------------------------------------------------------------------

# Sees every operator that runs, also those of a backward. torch's own profilers of FLOPs and memory are made of it; its
# module has no other name.
TorchDispatchMode = _python_dispatch.TorchDispatchMode


def backward_is_running() -> bool:
    """Whether autograd runs a backward in this thread now. In public only hooks learn it, operators do not."""
    return torch._C._current_graph_task_id() != -1


def was_written(tensor: torch.Tensor) -> bool:
    """Whether an operation in place has written into a tensor since it was made; autograd alone counts that."""
    return tensor._version > 0


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def add_to_each(tensors: list[torch.Tensor], number: float) -> None:
    """Adds a number to each tensor in place, in one kernel. torch documents other operators of this kind."""
    torch._foreach_add_(tensors, number)


def add_each(tensors: list[torch.Tensor], others: list[torch.Tensor], factor: float) -> None:
    """Adds a multiple of another tensor to each tensor in place."""
    torch._foreach_add_(tensors, others, alpha=factor)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, which may be of another dtype or device."""
    torch._foreach_copy_(targets, sources)


def divide_each(tensors: list[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divides each tensor in place by a number that is still on the device."""
    torch._foreach_div_(tensors, divisor)


def lerp_each(tensors: list[torch.Tensor], ends: list[torch.Tensor], weight: float | torch.Tensor) -> None:
    """Moves each tensor in place by `weight` of its way to another; a number in one kernel. A tensor of one number may
    still be on the device, and torch then takes a kernel for each."""
    torch._foreach_lerp_(tensors, ends, [weight] * len(tensors) if isinstance(weight, torch.Tensor) else weight)


def multiply_each(tensors: list[torch.Tensor], number: float | torch.Tensor) -> None:
    """Multiplies each tensor in place by a number, which may still be on the device."""
    torch._foreach_mul_(tensors, number)


def norm_of_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor, in fp32, in one kernel; `nn.utils.get_total_norm` would compute in their own dtype."""
    return list(torch._foreach_norm(tensors, dtype=torch.float32))


def chosen_attention_kernel(query, key, value, mask, is_causal: bool, enable_gqa: bool) -> SDPBackend:
    """The kernel that `scaled_dot_product_attention` takes for such tensors; ERROR where none does.
    `torch.backends.cuda.can_use_flash_attention` and its like say which ones could run, not which one torch prefers.
    """
    choice = torch._fused_sdp_choice(query, key, value, mask, is_causal=is_causal, enable_gqa=enable_gqa)
    return SDPBackend(choice)


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions that oneDNN takes for products of bf16. `torch.backends.cpu.get_cpu_capability`
    does not say, and torch.cpu's functions do not follow ONEDNN_MAX_CPU_ISA."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def unlimited_recompiles():
    """A context in which a compiled function may be compiled for any number of shapes; the limit has no public name."""
    return torch._dynamo.utils.disable_cache_limit()


def keep_attributes_of_forward_only() -> None:
    """Lets a compiled layer that is computed again in the backward pass set no attribute there; otherwise one that sets
    any cannot be compiled."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def set_activation_memory_budget(budget: float) -> None:
    """Sets which share of a compiled region's activations is kept, the rest is computed again: no public option."""
    torch._functorch.config.activation_memory_budget = budget


# ---- Memory ----------------------------------------------------------------------------------------------------------


def record_memory_history(max_entries: int) -> None:
    """Records the last allocations of the device. torch's guide to CUDA memory documents this name."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_snapshot(path: str) -> None:
    """Writes what `record_memory_history` recorded. torch's guide to CUDA memory documents this name."""
    torch.cuda.memory._dump_snapshot(path)


def call_when_out_of_memory(observer: Callable) -> None:
    """Calls `observer` before torch raises that the device has no memory left, while what fills it is still there."""
    torch._C._cuda_attach_out_of_memory_observer(observer)


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------

# The collectives that a group of parameters begins with, and a parameter between its shards and what computes. Public
# are the protocols only (`set_custom_all_gather`), which would have to be implemented anew.
DefaultAllGather, DefaultReduceScatter = _fsdp_collectives.DefaultAllGather, _fsdp_collectives.DefaultReduceScatter
FSDPParam = _fsdp_param.FSDPParam


def fsdp_group(module: nn.Module):
    """The parameters that `fully_shard` of a module gathers together; None where it has none of its own, or is not
    sharded. Public methods of the module set what a group does; none says which parameters it has."""
    if not isinstance(module, FSDPModule):
        return None
    return module._get_fsdp_state()._fsdp_param_group


def reduce_dtype(parameter: FSDPParam) -> torch.dtype:
    """In which dtype a parameter's gradients are added up over the ranks. In public a policy can only be given."""
    policy = parameter.mp_policy
    return policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype


def collectives_of(group) -> tuple:
    """(all-gather, reduce-scatter) of a group; in public they can only be set."""
    return group._all_gather_comm, group._reduce_scatter_comm


def sharded_data(parameter: FSDPParam) -> torch.Tensor:
    """This rank's part of a parameter, flat and padded."""
    return parameter._sharded_param_data


def sharded_tensor(parameter: FSDPParam) -> torch.Tensor:
    """This rank's part of a parameter, of its own class: a float8 weight is not the plain tensor that `to_local` and
    autograd give."""
    return parameter._sharded_local_tensor
