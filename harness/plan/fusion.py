"""Fusion: what a compiled region allocates and moves: which of its tensors exist, which kernels it consists of, and what
is alive at once. Called by `recorder`. Independent of the step that the region belongs to and of any GPU."""

import operator
import re
from typing import Any

import torch

from harness.plan.operators import attention_workspace, tensors_in

EXTERN = re.compile(
    r"mm\b|_mm|attention|convolution|embedding_dense|(?<!slice_)(?<!select_)scatter|index_put|sort|topk|cumsum"
)  # not fused
UNDECLARED_VIEWS = (operator.getitem, torch.ops.aten._unsafe_view.default)  # their schemas do not say that they are


def fused_memory(graph: torch.fx.GraphModule) -> tuple[int, int, int]:
    """(peak bytes of what the graph allocates, bytes that its memory-bound kernels move, how many of these there are)
    when it is compiled.

    A tensor is written when a matmul, an attention or another kernel that cannot be fused reads or makes it, or when
    the graph returns it; what lies between is fused. A fused kernel reads what was written before it, once; what reads
    the same, or part of it, is the same kernel, unless it has to wait for another's result. A row's sum stays inside.
    """

    def is_view(node) -> bool:
        return node.target in UNDECLARED_VIEWS or getattr(node.target, "is_view", False)

    def extern(node) -> bool:
        return node.op == "call_function" and not is_view(node) and bool(EXTERN.search(str(node.target)))

    nodes = list(graph.graph.nodes)
    size = {node: sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors_in(node.meta.get("val"))) for node in nodes}
    written = {node for node in nodes if node.op == "placeholder" or extern(node)}
    source: dict[Any, Any] = {}  # what a node is a view of, itself if it is none
    for node in nodes:
        source[node] = source[node.all_input_nodes[0]] if is_view(node) else node
        if extern(node) or node.op == "output" or node.target is torch.ops.aten.copy_.default:  # into an argument
            written.update(source[argument] for argument in node.all_input_nodes)
    reads: dict[Any, frozenset] = {}
    for node in nodes:
        origins = frozenset(source[argument] for argument in node.all_input_nodes)
        reads[node] = (origins & written).union(*(reads[origin] for origin in origins - written))
    made = {node for node in written if node.op == "call_function"}
    last_use = {origin: node for node in nodes for origin in reads[node]}
    live = peak = 0
    for node in nodes:
        if node in made:
            live += size[node]
            inputs = [argument.meta.get("val") for argument in node.all_input_nodes]
            peak = max(peak, live + attention_workspace(node.target, inputs))
        released = (origin for origin in reads[node] if last_use[origin] is node)
        live -= sum(size[origin] for origin in released if "primals" not in origin.name)  # the caller keeps primals
    fused = [node for node in nodes if node in made and not extern(node)]
    before: dict[Any, set] = {}  # the fused results that a node waits for
    for node in nodes:
        inputs = node.all_input_nodes
        before[node] = set().union(*(before[one] for one in inputs), (one for one in inputs if one in made))
    for node in nodes:
        rows = {
            origin for origin in reads[node] if origin in fused and 64 * size[origin] <= max(map(size.get, reads[node]))
        }
        reads[node] = (reads[node] - rows).union(*(reads[row] for row in rows))
    kernels: list[tuple[frozenset, list]] = []  # (what it reads, what it writes)
    for node in sorted(fused, key=lambda node: -len(reads[node])):
        for origins, results in kernels:
            waits = any(node in before[origin] for origin in origins) or before[node] & set(results) - reads[node]
            if reads[node] <= origins and not waits:
                results.append(node)
                break
        else:
            kernels.append((reads[node], [node]))
    moved = sum(size[node] for node in fused) + sum(size[origin] for origins, _ in kernels for origin in origins)
    return peak, moved, len(kernels)
