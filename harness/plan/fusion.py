"""Fusion: memory, traffic and kernels of a compiled region, from its materialized tensors, on any GPU."""

import operator
import re
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from harness.plan.operators import allocated_bytes, attention_workspace, tensors_in

# Operators that the compiler does not fuse with their neighbours.
UNFUSED_OPERATORS = re.compile(
    r"mm\b|_mm|attention|convolution|embedding_dense|(?<!slice_)(?<!select_)scatter|index_put|sort|topk|cumsum"
)
# private: torch's view in a matmul over more than two dimensions. The schemas do not declare these as views.
UNDECLARED_VIEWS = (operator.getitem, torch.ops.aten._unsafe_view.default)


# Cost factor of a byte that a kernel writes in another order than it reads, as for float8's operands of a weight's
# gradient. Fitted to one run, SmolLM3-3B in fp8 on an H200 (its kernels are in benchmarks/results/plan_measured.json);
# the step with 4 microbatches of twice the size is then planned within 6 %.
TRANSPOSED_WRITE = 5.0


class RegionMemory(NamedTuple):
    """Memory and kernels of a compiled region."""

    peak: int  # bytes that it allocates at most
    moved: int  # bytes that its fused kernels read and write
    kernels: int


def is_view(node: Node) -> bool:
    return node.target in UNDECLARED_VIEWS or getattr(node.target, "is_view", False)


def is_one_hot(node: Node) -> bool:
    """Return True for a scatter of a number into a constant, as in the gradient of a cross entropy. Inductor replaces
    it by a comparison and fuses that (`scatter_upon_const_tensor` in its joint_graph.py)."""
    constant: Any = node.args[0] if node.target is torch.ops.aten.scatter.value else None
    return constant is not None and constant.target is torch.ops.aten.full.default


def has_own_kernel(node: Node) -> bool:
    """Return True for a matmul, an attention or another operator that is not fused."""
    if node.op != "call_function" or is_view(node) or is_one_hot(node):
        return False
    return bool(UNFUSED_OPERATORS.search(str(node.target)))


def is_scale_of_tensor(node: Node) -> bool:
    """Return True if the node reduces a full tensor or each column to one number, such as the maximum that float8
    scales by. A row's reduction is none, as one kernel has the full row."""
    if node.op != "call_function" or is_view(node):
        return False
    source: Any
    dims: Any
    if node.target is torch.ops.aten.amax.default and len(node.args) > 1:  # without dims it reduces all
        source, dims = node.args[:2]
        if any(source.meta["val"].stride(dim) != 1 for dim in dims):
            return True
    if [t.numel() for t in tensors_in(node.meta.get("val"))] != [1]:
        return False
    return any(t.numel() > 1 for argument in node.all_input_nodes for t in tensors_in(argument.meta.get("val")))


def is_transposed(node: Node) -> bool:
    """Return True if the node writes a tensor in another order than it reads it."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    source: Any = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    return after.dim() > 1 and after.stride(-1) == 1 and before.stride(-1) != 1


def fused_memory(graph: GraphModule) -> RegionMemory:
    """Return memory and kernels of the compiled graph.

    Fused kernels write each materialized tensor once and read each once, however many kernels use it. A reduction to
    one number per tensor or column, such as float8's scale, needs another pass over its input, shared by reductions of
    the same input: nothing can be scaled before everything is read.
    """
    nodes = list(graph.graph.nodes)
    sizes = {node: sum(allocated_bytes(t.nbytes) for t in tensors_in(node.meta.get("val"))) for node in nodes}
    materialized, reads = find_materialized(nodes)
    fused_outputs = [
        node for node in nodes if node in materialized and node.op == "call_function" and not has_own_kernel(node)
    ]
    passes = {reads[node] for node in fused_outputs if is_scale_of_tensor(node)}
    read = {tensor for node in fused_outputs if not is_scale_of_tensor(node) for tensor in reads[node]}
    moved = sum(sizes[tensor] for tensors in (fused_outputs, read, *passes) for tensor in tensors)
    moved += round((TRANSPOSED_WRITE - 1) * sum(sizes[node] for node in fused_outputs if is_transposed(node)))
    return RegionMemory(find_peak(nodes, sizes, materialized, reads), moved, count_kernels(nodes, set(fused_outputs)))


def count_kernels(nodes: list[Node], fused_outputs: set[Node]) -> int:
    """Count one kernel for each operator that is not fused, and between two of these one for each size of tensor
    written: 39 for a SmolLM3 layer, forward and backward, of which inductor makes 35."""
    own = 0
    fused: set[tuple[int, int]] = set()
    for node in nodes:
        own += has_own_kernel(node)
        if node in fused_outputs:
            largest = max((tensor.numel() for tensor in tensors_in(node.meta.get("val"))), default=0)
            if largest > 1:  # a single number is computed in the kernel that reads it
                fused.add((own, largest))
    return own + len(fused)


def find_materialized(nodes: list[Node]) -> tuple[set[Node], dict[Node, frozenset[Node]]]:
    """Return (tensors of a graph that exist in memory, {node: those that it reads, directly or through nodes fused into
    it}).

    Materialized are arguments, inputs and outputs of operators that are not fused, results of the graph, tensors copied
    into an argument, and the results of `is_scale_of_tensor`. The others exist only in registers::

        x -> [mm] -> a -> silu -> s -> mul -> c -> [mm] -> d -> returned
                                        ^
        b ------------------------------+

        materialized: x, b, a, c, d        not materialized: s        c reads a and b

    A view counts as its base.
    """
    materialized = {node for node in nodes if node.op == "placeholder" or has_own_kernel(node)}
    base: dict[Node, Node] = {}  # a view's base; any other node itself
    for node in nodes:
        base[node] = base[node.all_input_nodes[0]] if is_view(node) else node
        copies_into_argument = node.target is torch.ops.aten.copy_.default
        if has_own_kernel(node) or node.op == "output" or copies_into_argument:
            materialized.update(base[argument] for argument in node.all_input_nodes)
        if is_scale_of_tensor(node):
            materialized.add(node)

    reads: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        tensors: set[Node] = set()
        for argument in node.all_input_nodes:
            tensor = base[argument]
            if tensor in materialized:
                tensors.add(tensor)
            else:
                tensors.update(reads[tensor])
        reads[node] = frozenset(tensors)
    return materialized, reads


def find_peak(
    nodes: list[Node], sizes: dict[Node, int], materialized: set[Node], reads: dict[Node, frozenset[Node]]
) -> int:
    """Return the peak of the bytes that a graph allocates, less what it frees.

    A materialized tensor is alive from the node that writes it to the last that reads it, a result of the graph to the
    end. Arguments exist already: the caller keeps primals, and all of a graph without gradients (`arg0_1`); the others
    (saved activations, gradients) are freed after their last use. What a fused kernel copies into an argument is
    written there, not allocated.
    """
    copies = [node for node in nodes if node.target is torch.ops.aten.copy_.default]
    in_place = {tensor for node in copies for tensor in reads[node] if not has_own_kernel(tensor)}
    sizes = sizes | dict.fromkeys(in_place, 0)
    last_reader = {tensor: node for node in nodes for tensor in reads[node]}
    alive = peak = 0
    for node in nodes:
        if node in materialized and node.op == "call_function":
            alive += sizes[node]
            inputs = [argument.meta.get("val") for argument in node.all_input_nodes]
            peak = max(peak, alive + attention_workspace(node.target, inputs))
        for tensor in reads[node]:
            if last_reader[tensor] is node and not re.match(r"primals|arg\d", tensor.name):
                alive -= sizes[tensor]
    return peak
