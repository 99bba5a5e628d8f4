"""Private names of torch that this program needs, each with what it stands for and why no public name does the same.
tests/base/test_internals.py compares NAMES with the installed torch and says which of them a new version no longer has.
Independent of what they are used for."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention import SDPBackend
from torch.utils import _python_dispatch, _pytree

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
    "torch:ScriptObject": ("_type",),
    "torch:Tensor": ("_version",),
    "torch:ops.aten": ("_unsafe_view",),
    "torch:ops.mkldnn": ("_is_mkldnn_bf16_supported",),
    "torch._C": ("_cuda_attach_out_of_memory_observer", "_current_graph_task_id"),
    "torch._dynamo.backends.common": ("aot_autograd",),
    "torch._dynamo.config": (
        "automatic_dynamic_shapes",
        "recompile_limit",
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
    ),
    "torch._dynamo.utils": ("disable_cache_limit",),
    "torch._functorch.config": ("activation_memory_budget",),
    "torch._functorch.partitioners": ("has_recomputable_rng_ops", "min_cut_rematerialization_partition"),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._ops:OpOverload": ("_schema",),
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode",
    ),
    "torch.cpu": ("_default_cpu_stream",),
    "torch.cuda": ("_sleep",),
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history"),
    "torch.distributed.distributed_c10d": ("_resolve_process_group",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ("DefaultAllGather", "DefaultReduceScatter"),
    "torch.distributed.fsdp._fully_shard._fsdp_param": ("FSDPParam", "_chunk_with_empty"),
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
    "torch.distributed.tensor._sharding_prop:ShardingPropagator": ("_propagate_tensor_meta_non_cached",),
    "torch.testing._internal.distributed.fake_pg": ("FakeStore",),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes", "_get_current_dispatch_mode_stack"),
    "torch.utils._pytree": ("tree_leaves", "tree_map", "tree_map_only"),
}

# ---- Any code --------------------------------------------------------------------------------------------------------

# Sees every operator that runs, also those of a backward. torch's own profilers of FLOPs and memory are made of it; its
# module has no other name.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
# A context without any of these modes, and the list of the active ones; no public name gives either.
disable_dispatch_modes = _python_dispatch._disable_current_modes
active_dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
# Nested lists, tuples and dicts of tensors; the public optree is another package.
tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only


def backward_is_running() -> bool:
    """Whether autograd runs a backward in this thread now. In public only hooks learn it, operators do not."""
    return torch._C._current_graph_task_id() != -1


def schema_of(op) -> torch.FunctionSchema:
    """The schema of an operator: the names of its arguments, and which it writes. A dispatch mode is given the operator
    alone."""
    return op._schema


# A view of its input, which its schema does not say. torch makes it in a matmul over more than two dimensions.
unsafe_view = torch.ops.aten._unsafe_view.default


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


def occupy_gpu(cycles: int) -> None:
    """Lets the current CUDA stream do nothing for so many clock cycles; no public kernel takes a known time."""
    torch.cuda._sleep(cycles)


# ---- Process groups --------------------------------------------------------------------------------------------------


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group of a functional collective, whose operator gets the group's name."""
    return dist.distributed_c10d._resolve_process_group(name)


def group_of_collective(args) -> dist.ProcessGroup:
    """The process group among the arguments of a collective's operator. One of c10d gets an object of TorchScript, and
    its type is known by a private name only; a functional one gets the group's name after the operation's."""
    boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
    if boxed:
        return dist.ProcessGroup.unbox(boxed[0])
    names = [arg for arg in args if isinstance(arg, str)]
    return group_by_name(names[-1])


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


# ---- A step without data or devices, for plans -----------------------------------------------------------------------

# Tensors without data on a device that may be missing, and what they raise where a model reads its data. Tensors on the
# public device `meta` have no other device, and DTensor and torch.compile do not run on them.
FakeTensor, FakeTensorMode = fake_tensor.FakeTensor, fake_tensor.FakeTensorMode
ERRORS_WITHOUT_DATA = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def fake_store() -> dist.Store:
    """The store of the backend `fake`: any number of ranks in one process. It is made for torch's own tests, so it is
    imported only when a plan needs it; public backends wait for the other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def is_default_cpu_stream(stream) -> bool:
    """Whether a stream is the one that a CPU begins with; of CUDA only, torch gives the default stream in public."""
    return stream is torch.cpu._default_cpu_stream


def backend_like_inductor(compiler: Callable) -> Callable:
    """A backend of torch.compile that makes graphs of forward and backward as inductor does, and gives each graph and
    its inputs to `compiler`. A public backend gets the forward only, before autograd and decompositions."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # an argument that is updated is written by the kernel, not copied later
    )


@contextlib.contextmanager
def compiled_without_random_states() -> Iterator[None]:
    """Inside, compiled regions keep no state of the random numbers for a recomputation. A GPU's attention without
    dropout draws none, but the one of fake tensors on a CPU counts as random. There is no option for it."""
    with mock.patch("torch._functorch.partitioners.has_recomputable_rng_ops", lambda graph: False):
        yield


def compiled_for_each_shape():
    """A context in which torch.compile treats every size as fixed, and compiles up to 1,000 shapes. Its public argument
    `dynamic=False` does not raise the limit of recompiles, and would have to be in every call."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=1000)


@contextlib.contextmanager
def dtensor_shapes_unrecorded() -> Iterator[None]:
    """Inside, no dispatch mode sees the fake tensors by which DTensor learns the shape of a whole result. There is no
    option for it."""
    name = "_propagate_tensor_meta_non_cached"
    propagate = getattr(ShardingPropagator, name)

    def propagate_unrecorded(*args):
        with disable_dispatch_modes():
            return propagate(*args)

    with mock.patch.object(ShardingPropagator, name, propagate_unrecorded):
        yield


@contextlib.contextmanager
def fsdp_chunks_as(chunks: Callable) -> Iterator[None]:
    """Inside, FSDP2 cuts a parameter into shards by `chunks(tensor, count, dim)`. Its own function makes a list of all
    ranks' shards, and there is no option for another."""
    with mock.patch.object(_fsdp_param, "_chunk_with_empty", chunks, create=True):
        yield
