"""Fusion: what a compiled region allocates and moves: which tensors are materialized and what is alive at once,
on any GPU."""

import operator
import re
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from harness.plan.operators import allocated_bytes, attention_workspace, tensors_in

# Operators with kernels of their own, which the compiler does not fuse with what stands beside them.
UNFUSED_OPERATORS = re.compile(
    r"mm\b|_mm|attention|convolution|embedding_dense|(?<!slice_)(?<!select_)scatter|index_put|sort|topk|cumsum"
)
# private: torch makes this view in a matmul over more than two dimensions. Neither schema says that it is one.
UNDECLARED_VIEWS = (operator.getitem, torch.ops.aten._unsafe_view.default)


# A byte written in another order than its kernel reads, as float8's operands of a weight's gradient are, costs as much
# as so many others. Fitted to one run, SmolLM3-3B in fp8 on an H200 (kernels of a step in
# benchmarks/results/plan_measured.json); with 4 microbatches of twice the size the step is then planned within 6 %.
TRANSPOSED_WRITE = 5.0


class RegionMemory(NamedTuple):
    """What a compiled region takes: the peak bytes of what it allocates, the bytes that its fused kernels move, and how
    many kernels it starts."""

    peak: int
    moved: int
    kernels: int


def is_view(node: Node) -> bool:
    return node.target in UNDECLARED_VIEWS or getattr(node.target, "is_view", False)


def is_one_hot(node: Node) -> bool:
    """Whether the node writes a number into a constant, as the gradient of a cross entropy does at one place of each
    row. Inductor makes a comparison of it, which it fuses: `scatter_upon_const_tensor` in its joint_graph.py."""
    constant: Any = node.args[0] if node.target is torch.ops.aten.scatter.value else None
    return constant is not None and constant.target is torch.ops.aten.full.default


def has_own_kernel(node: Node) -> bool:
    """Whether the node is a matmul, an attention or another operator that is not fused."""
    if node.op != "call_function" or is_view(node) or is_one_hot(node):
        return False
    return bool(UNFUSED_OPERATORS.search(str(node.target)))


def is_scale_of_tensor(node: Node) -> bool:
    """Whether the node makes one number of a whole tensor, or one of each of its columns, as the largest magnitudes
    that float8 scales by. That of a row is none: a kernel has the whole row."""
    if node.op != "call_function" or is_view(node):
        return False
    given: Any
    dims: Any
    if node.target is torch.ops.aten.amax.default and len(node.args) > 1:  # otherwise of all dimensions
        given, dims = node.args[:2]
        if any(given.meta["val"].stride(dim) != 1 for dim in dims):
            return True
    if [t.numel() for t in tensors_in(node.meta.get("val"))] != [1]:
        return False
    return any(t.numel() > 1 for given in node.all_input_nodes for t in tensors_in(given.meta.get("val")))


def is_transposed(node: Node) -> bool:
    """Whether the node writes a tensor in another order than it reads it."""
    if node.target is not torch.ops.aten.clone.default:
        return False
    given: Any = node.args[0]
    before, after = given.meta["val"], node.meta["val"]
    return after.dim() > 1 and after.stride(-1) == 1 and before.stride(-1) != 1


def fused_memory(graph: GraphModule) -> RegionMemory:
    """What the graph takes when it is compiled.

    Its fused kernels write each materialized tensor once and read each once, however many of them use it. One number of
    a whole tensor or of each column, such as float8's scale, takes a further pass over what it is made of, which it
    shares with other numbers of the same: nothing can be scaled before all is read.
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
    """The kernels of its own operators, and of what is fused between two of them one for each size of tensor that it
    writes: 39 for the layer of a SmolLM3 forward and backward, where inductor makes 35."""
    own = 0
    fused: set[tuple[int, int]] = set()
    for node in nodes:
        own += has_own_kernel(node)
        if node in fused_outputs:
            largest = max((tensor.numel() for tensor in tensors_in(node.meta.get("val"))), default=0)
            if largest > 1:  # one number is made by the kernel that reads it
                fused.add((own, largest))
    return own + len(fused)


def find_materialized(nodes: list[Node]) -> tuple[set[Node], dict[Node, frozenset[Node]]]:
    """Which tensors of a graph exist in memory, and of every node which of them it reads, directly or through nodes
    that are fused into it.

    Materialized is an argument, what a kernel of its own makes or reads, what the graph returns, what is copied into an
    argument, and what `is_scale_of_tensor` finds. What lies between is fused, and exists in registers only::

        x -> [mm] -> a -> silu -> s -> mul -> c -> [mm] -> d -> returned
                                        ^
        b ------------------------------+

        materialized: x, b, a, c, d        not materialized: s        c reads a and b

    A view is the tensor that it is a view of.
    """
    materialized = {node for node in nodes if node.op == "placeholder" or has_own_kernel(node)}
    base: dict[Node, Node] = {}  # what a node is a view of; itself if it is none
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
    """The most bytes that a graph holds at once, beyond what exists when it begins.

    A materialized tensor is alive from the node that makes it to the last that reads it, and what the graph returns to
    the end. Arguments are there already. The caller keeps those called primals; others (saved activations, gradients)
    are released after their last use, which lowers what is alive.
    """
    last_reader = {tensor: node for node in nodes for tensor in reads[node]}
    alive = peak = 0
    for node in nodes:
        if node in materialized and node.op == "call_function":
            alive += sizes[node]
            inputs = [argument.meta.get("val") for argument in node.all_input_nodes]
            peak = max(peak, alive + attention_workspace(node.target, inputs))
        for tensor in reads[node]:
            if last_reader[tensor] is node and "primals" not in tensor.name:
                alive -= sizes[tensor]
    return peak
