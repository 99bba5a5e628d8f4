"""What a compiled region is planned to allocate and to move, on graphs of a few operators."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from harness.plan.fusion import fused_memory

UNIT = 64 * 64 * 4  # bytes of each tensor below


def planned(function, *names: str):
    """What the graph of a function of 64 x 64 tensors takes; the compiler names its arguments so."""
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


def test_the_peak_is_the_most_that_is_alive_between_a_tensors_first_and_last_use():
    memory = planned(gated, "primals_1", "primals_2", "primals_3")
    assert memory.peak == 2 * UNIT  # a and c, then c and the result
    assert memory.moved == 3 * UNIT


@pytest.mark.parametrize("name, units", [("primals_1", 2), ("tangents_1", 1)])
def test_an_argument_that_the_caller_keeps_is_not_released(name, units):
    assert planned(gated, name, "primals_2", "primals_3").peak == units * UNIT


def test_each_materialized_tensor_is_written_once_and_read_once():
    def beside(a, b):
        return a * b, a.neg()

    def after(a, b):
        c = a * b
        return c, (c @ b) + a

    assert planned(beside, "primals_1", "primals_2").moved == 4 * UNIT  # reads a and b, writes both
    assert (
        planned(after, "primals_1", "primals_2").moved == 5 * UNIT
    )  # a, b and the product read, c and the sum written


def test_the_largest_of_a_whole_tensor_is_read_before_what_is_divided_by_it():
    """As a tensorwise float8 cast: one pass for the scale, another for the cast."""

    def scaled(a, b):
        c = a * b
        return c / c.abs().max()

    assert (
        planned(scaled, "primals_1", "primals_2").moved == 5 * UNIT + 2 * 512
    )  # a and b twice, the result, the number


def test_a_number_in_one_place_of_each_row_of_a_constant_is_a_comparison():
    """As the gradient of a cross entropy: neither the constant nor the result of the scatter exists."""

    def one_hot(a):
        places = a[:, :1].long()
        return torch.full((64, 64), 0.0).scatter(1, places, -1.0) * 2

    assert planned(one_hot, "primals_1").peak // UNIT == 1
