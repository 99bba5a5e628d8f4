"""Operators: FLOPs, traffic and memory of one operator, from its schema and arguments, on any GPU."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload  # private: the type of what a dispatch mode is given has no public name
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry

tree_leaves = _pytree.tree_leaves  # private: the leaves of nested lists and dicts; the public optree is another package


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return an operator's schema: the names of its arguments, and which of them it writes."""
    return op._schema  # private: a dispatch mode only gets the operator


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def allocated_bytes(size: int) -> int:
    """Round bytes up to a multiple of 512, as the CUDA caching allocator does."""
    return -(-size // 512) * 512


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that reading a tensor moves; for an expanded tensor those of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def moved_bytes(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> int:
    """Return the bytes that an operator reads and writes in device memory; 0 for a view or an uninitialized tensor."""
    name = schema_of(op).name.split("::")[1]
    storages = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
    read = written = 0
    for position, argument in enumerate(schema_of(op).arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = sum(map(nbytes, tensors_in(value)))
        is_first_overwritten = position == 0 and name in ("copy_", "_foreach_copy_", "zero_", "fill_")
        if not argument.is_out and not is_first_overwritten:
            read += size
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += size
    written += sum(nbytes(tensor) for tensor in outputs if id(tensor.untyped_storage()) not in storages)
    copies_onto_itself = name == "copy_" and args[0] is args[1]
    leaves_uninitialized = name.startswith(("empty", "new_empty", "resize", "set_"))
    if not written or copies_onto_itself or leaves_uninitialized:
        return 0
    return read + written


def operator_flops(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of an operator; 0 if memory bounds it."""
    name = schema_of(op).name.split("::")[1]
    if "scaled_dot_product" in name:
        names = [argument.name for argument in schema_of(op).arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        batch, heads, length, head_dim = named["query"].shape
        keys, value_dim = named["key"].shape[2], named["value"].shape[3]
        flops = 2 * batch * heads * length * keys * (head_dim + value_dim)
        if "backward" in name:  # five matmuls instead of two: flash attention recomputes the scores
            flops = 2.5 * flops
        if named.get("is_causal"):
            flops = flops / 2
        return int(flops)
    if "grouped_mm" in name:  # torch's, or that of transformers for other dtypes than bf16
        products = 2 if "backward" in name else 1
        return 2 * products * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(op.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def find_unit(op: OpOverload, flops: int) -> str:
    """Return the name of the rate that bounds an operator: memory, chunk_cat (FSDP2's copy of gradients into the reduce
    buffer), matmul, fp8, grouped (matmuls of experts) or attention."""
    if not flops:
        return "chunk_cat" if "chunk_cat" in op.name() else "memory"
    for unit, pattern in (("attention", "scaled_dot_product"), ("fp8", "scaled_mm"), ("grouped", "grouped_mm")):
        if pattern in op.name():
            return unit
    return "matmul"


def attention_workspace(op: object, inputs: list[torch.Tensor]) -> int:
    """Return the bytes that FlashAttention-2's backward allocates besides its results: the query gradient in fp32, a
    row sum per query in fp32, and with grouped queries key and value gradients of every query head (mha_bwd in
    flash_api.cpp). 0 for any other operator."""
    if not re.search("attention.*backward", str(op)):
        return 0
    query, key = inputs[1:3]
    expanded = 2 * query.nbytes if key.shape[1] != query.shape[1] else 0
    return 4 * query.numel() + 4 * query.shape[:3].numel() + expanded
