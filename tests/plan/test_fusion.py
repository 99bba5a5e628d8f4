"""Planned memory and traffic of compiled regions, on graphs of a few operators."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from harness.plan.fusion import TRANSPOSED_WRITE, fused_memory

UNIT = 64 * 64 * 4  # bytes of each tensor below


def planned(function, *names: str):
    """Return memory and traffic of a function on 64 x 64 tensors, with the compiler's argument names."""
    arguments = [torch.randn(64, 64) for _ in names]
    traced = make_fx(function, tracing_mode="fake")(*arguments)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        node.name = name
    return fused_memory(traced)


def gated(x, b, weight):
    """Two matmuls and one fused kernel between them, which reads a and b and writes c."""
    a = x @ weight
    c = torch.nn.functional.silu(a) * b
    return c @ weight


def beside(a, b):
    return a * b, a.neg()


def after(a, b):
    c = a * b
    return c, (c @ b) + a


def scaled(a, b):
    """As a tensorwise float8 cast: one pass for the scale, another for the cast."""
    c = a * b
    return c / c.abs().max()


def scaled_by_amax(a, b):
    c = a * b
    return c / c.abs().amax()


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
    "function, names, peak, moved",
    [
        (gated, PRIMALS, 2, 3),  # a and c, then c and the result; a, b and c
        (gated, ("tangents_1", *PRIMALS[1:]), 1, 3),  # what is not kept is released
        (beside, PRIMALS[:2], 2, 4),  # reads a and b, writes both
        (after, PRIMALS[:2], 3, 5),  # a, b and the product read, c and the sum written
        (scaled, PRIMALS[:2], 1, 5),  # a and b twice, the result
        (scaled_by_amax, PRIMALS[:2], 1, 5),
        (scaled_by_column, PRIMALS[:2], 1, 5),
        (scaled_by_row, PRIMALS[:2], 1, 3),  # a kernel has a row whole
        (one_hot, PRIMALS[:1], 1, 2),
        (updated, ("arg0_1", "arg1_1"), 0, 3),  # reads both, writes the first
        (transposed, PRIMALS[:2], 1, 2 + TRANSPOSED_WRITE),  # a byte in another order costs that of several
    ],
)
def test_each_materialized_tensor_is_written_once_read_once_and_held_to_its_last_use(function, names, peak, moved):
    memory = planned(function, *names)
    assert (memory.peak // UNIT, memory.moved / UNIT) == (peak, pytest.approx(moved, rel=0.1))


@pytest.mark.parametrize(
    "function, names, kernels",
    [
        (gated, PRIMALS, 3),  # two matmuls, one fused kernel between them
        (beside, PRIMALS[:2], 1),  # two tensors of one size
        (after, PRIMALS[:2], 3),  # before, the matmul, and after
        (scaled, PRIMALS[:2], 1),  # the scale is one number
    ],
)
def test_a_region_launches_its_own_kernels_and_one_for_each_size_of_tensor_between_them(function, names, kernels):
    assert planned(function, *names).kernels == kernels
