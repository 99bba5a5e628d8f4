"""Operators: what a single one computes, reads, writes and allocates, by its schema and its arguments. Called by
`recorder`, `fusion` and `measure`. Independent of the step that it belongs to and of any GPU."""

import re

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

PHASES = ("forward", "backward", "optimizer")  # of a step
KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")  # of what it holds in memory


def tensors_in(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def allocated_bytes(size: int) -> int:
    """The bytes that the CUDA caching allocator gives out for `size` of them: multiples of 512."""
    return -(-size // 512) * 512


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor moves: an expanded one is as small as what it was expanded from."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def moved_bytes(op, args, kwargs, outputs: list[torch.Tensor]) -> int:
    """Bytes that one operator reads and writes in device memory; 0 for a view or an uninitialized tensor."""
    name = op._schema.name.split("::")[1]
    held = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
    read = written = 0
    for position, argument in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = sum(map(nbytes, tensors_in(value)))
        overwritten = argument.is_out or (not position and name in ("copy_", "_foreach_copy_", "zero_", "fill_"))
        read += 0 if overwritten else size
        written += size if argument.alias_info is not None and argument.alias_info.is_write else 0
    written += sum(nbytes(tensor) for tensor in outputs if id(tensor.untyped_storage()) not in held)
    if name == "copy_" and args[0] is args[1]:  # a tensor onto itself
        return 0
    return 0 if not written or name.startswith(("empty", "new_empty", "resize", "set_")) else read + written


def kind_of(name: str, inputs: list[torch.Tensor]) -> str:
    """Operators of one kind take time in proportion to their size."""
    if "scaled_dot_product" in name:
        name = "attention " + ("backward" if "backward" in name else "forward")
    return " ".join([name, *dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in inputs)])


def shapes(tree) -> str:
    """The sizes of an operator's arguments; ' marks a tensor that is not laid out row by row."""
    tensors = tensors_in(tree)
    laid_out = ("x".join(map(str, t.shape)) + "'" * (not t.is_contiguous()) for t in tensors)
    numbers = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, int) and not isinstance(leaf, torch.SymInt))
    return " ".join([*laid_out, *map(str, numbers)])


def operator_flops(op, args, kwargs, result) -> int:
    """FLOPs that the operator executes, 0 for one that memory bounds."""
    name = op._schema.name.split("::")[1]
    if "scaled_dot_product" in name:
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
        batch, heads, length, head_dim = given["query"].shape
        flops = 2 * batch * heads * length * given["key"].shape[2] * (head_dim + given["value"].shape[3])
        return int(flops * (2.5 if "backward" in name else 1) / (2 if given.get("is_causal") else 1))
    if name == "_grouped_mm":
        return 2 * args[0].numel() * args[1].shape[-1]
    forward = torch._C._current_graph_task_id() < 0
    if name == "bmm" and forward and not torch.is_grad_enabled() and args[0].shape[-1] == 1:
        return 0  # rotary angles, as in flops.FlopCounter
    formula = flop_registry.get(op.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def attention_workspace(op, inputs: list[torch.Tensor]) -> int:
    """Bytes that FlashAttention-2's backward allocates beside its results: the query gradient in fp32, a row sum for
    each query in fp32, and key and value gradients of every query head where heads share them (mha_bwd in
    flash_api.cpp). Nothing for any other operator."""
    if not re.search("attention.*backward", str(op)):
        return 0
    query, key = inputs[1:3]
    expanded = 2 * query.nbytes if key.shape[1] != query.shape[1] else 0
    return 4 * query.numel() + 4 * query.shape[:3].numel() + expanded
