"""Planned memory, traffic and kernels of compiled regions, on graphs of a few operators."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from harness.plan.fusion import TRANSPOSED_WRITE, fused_memory

UNIT = 64 * 64 * 4  # bytes of each tensor below


def gated(x, b, weight):
    """Two matmuls and one fused kernel between them, which reads a and b and writes c."""
    a = x @ weight
    c = torch.nn.functional.silu(a) * b
    return c @ weight


def after(a, b):
    c = a * b
    return c, (c @ b) + a


def scaled(a, b):
    """As a tensorwise float8 cast: one pass for the scale, another for the cast."""
    c = a * b
    return c / c.abs().max()


def scaled_by_column(a, b):
    """As the casts of rowwise float8 of what a weight's gradient is made of."""
    c = a * b
    return c / c.abs().amax(0, keepdim=True)


def scaled_by_row(a, b):
    c = a * b
    return c / c.abs().amax(1, keepdim=True)


def one_hot(a):
    """As the gradient of a cross entropy: neither the constant nor the result of the scatter exists."""
    places = a[:, :1].long()
    return torch.full((64, 64), 0.0).scatter(1, places, -1.0) * 2


def transposed(a, b):
    """As the casts of float8's operands of a weight's gradient."""
    return (a * b).t().contiguous()


def updated(a, b):
    """As an optimizer's update: the kernel writes to the argument."""
    a.copy_(a * b)


PRIMALS = ("primals_1", "primals_2", "primals_3")  # as the compiler calls what the caller keeps


@pytest.mark.parametrize(
    "function, names, peak, moved, kernels",
    [
        (gated, PRIMALS, 2, 3, 3),  # a and c, then c and the result; a, b and c; one kernel between two matmuls
        (gated, ("tangents_1", *PRIMALS[1:]), 1, 3, 3),  # what is not kept is released
        (after, PRIMALS[:2], 3, 5, 3),  # a, b and the product read, c and the sum written
        (scaled, PRIMALS[:2], 1, 5, 1),  # a and b twice, the result; the scale is one number
        (scaled_by_column, PRIMALS[:2], 1, 5, 2),
        (scaled_by_row, PRIMALS[:2], 1, 3, 1),  # a kernel has a full row
        (one_hot, PRIMALS[:1], 1, 2, 1),
        (updated, ("arg0_1", "arg1_1"), 0, 3, 1),  # reads both, writes the first
        (transposed, PRIMALS[:2], 1, 2 + TRANSPOSED_WRITE, 1),  # a byte in another order costs that of several
    ],
)
def test_each_materialized_tensor_is_written_once_read_once_and_held_to_its_last_use(
    function, names, peak, moved, kernels
):
    """On 64 x 64 tensors with the compiler's names of arguments, in units of one of them."""
    traced = make_fx(function, tracing_mode="fake")(*(torch.randn(64, 64) for _ in names))
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        node.name = name
    memory = fused_memory(traced)
    assert (memory.peak // UNIT, memory.moved / UNIT) == (peak, pytest.approx(moved, rel=0.1))
    assert memory.kernels == kernels
