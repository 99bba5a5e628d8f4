"""Rates of a plan: the assumptions about a kind of GPU, and the time of a step."""

import json
import sys

import pytest
from conftest import copy_with_gpu, parse, start

from harness.base import find_gpu
from harness.base import gpus as gpu_names
from harness.plan import rates
from harness.plan.rates import Rates

VALUES = {"matmul_tflops": 2.0, "attention_tflops": 1.0, "memory_gb_per_s": 100.0, "host_us": 1000.0}
VALUES |= {"layer_us": 0.0, "launch_us": 0.0, "kernel_us": 0.0}
LINKS = {"intra_node_gb_per_s": 100.0, "inter_node_gb_per_s": 5.0}


def known(**others: float) -> Rates:
    return Rates("a device", 1.0, 1.0, VALUES | others)


@pytest.mark.parametrize(
    "unit, flops, nbytes, seconds",
    [
        ("memory", 0, 1e9, 0.01),
        ("matmul", 4e12, 1e9, 2.0),
        ("matmul", 4e6, 1e9, 0.01),  # whichever takes longer
        ("attention", 4e12, 0, 4.0),
        ("fp8", 4e12, 0, 2.0),  # as it multiplies in bf16, where nothing is known of float8
        ("grouped", 4e12, 0, 2.0 / rates.GROUPED_SHARE),
    ],
)
def test_an_operator_takes_what_its_flops_or_its_bytes_take(unit, flops, nbytes, seconds):
    assert known().operator_seconds(unit, flops, nbytes) == pytest.approx(seconds)
    assert known(kernel_us=1e7).operator_seconds(unit, flops, nbytes) == 10.0


@pytest.mark.parametrize(
    "kind, ranks, nodes, ranks_per_node, sending, hops",
    [
        ("all_gather", 8, 1, 8, 0.08, 7 * rates.LINK_HOP),  # a ring
        ("all_reduce", 8, 1, 8, 0.08, 7 * rates.LINK_HOP * 2 * 3 / 8),  # a tree, up and down
        ("all_gather", 16, 2, 8, 0.2, 14 * rates.LINK_HOP + rates.NETWORK_HOP),
        ("all_gather", 12, 3, 4, 0.4, 9 * rates.LINK_HOP + 2 * rates.NETWORK_HOP),
    ],
)
def test_a_collective_takes_its_bytes_and_the_hops_of_its_ring_or_tree(
    kind, ranks, nodes, ranks_per_node, sending, hops
):
    """Three calls, and 8 GB sent over 100 GB/s in a node, or 5 GB/s of each rank of a node between nodes."""
    seconds = known(**LINKS).collective_seconds(kind, ranks, nodes, ranks_per_node, 3, 8e9)
    assert seconds - sending == pytest.approx(3 * hops, rel=1e-6)


def test_launches_and_collectives_run_beside_the_computation():
    group = ("forward", "all_gather", 2, 1, 2)
    counts = {("seconds", "forward", "matmul"): 10.0, ("dispatches", "forward"): 2000}
    counts |= {("calls", *group): 1, ("sent_bytes", *group): 1e11}
    step = rates.price_step(counts, known(**LINKS))
    assert (step["exposed"], step["launches"], step["gaps"]) == (0, 0, 0)
    assert step["step"] == pytest.approx(10 + rates.CONTENTION, rel=1e-3)
    counts |= {("exposed_calls", *group): 1, ("exposed_bytes", *group): 1e11}
    assert rates.price_step(counts, known(**LINKS))["exposed"] == pytest.approx(1.0, rel=1e-3)
    counts["dispatches", "forward"] = 20_000
    bounded = rates.price_step(counts, known(**LINKS))
    assert (bounded["step"], bounded["host"]) == (pytest.approx(20.0), pytest.approx(20.0))
    counts[("kernels", "forward")] = 1e6  # between which the GPU idles for longer than the host takes
    counts[("seconds", "forward", "matmul")] = 20.0
    assert rates.price_step(counts, known(**LINKS))["launches"] == 0
    assert rates.price_step(counts, known(**LINKS))["gaps"] == pytest.approx(1e6 * rates.GAP_US / 1e6)


def test_the_host_takes_its_time_for_each_compiled_layer_and_for_each_of_its_kernels():
    counts = {("dispatches", "forward"): 1000, ("layers", "forward"): 4, ("launches", "forward"): 500}
    step = rates.price_step(counts, known(layer_us=100_000.0, launch_us=200.0))
    assert step["host"] == step["step"] == pytest.approx(1.0 + 0.4 + 0.1)


def test_the_copy_of_gradients_into_what_is_reduced_is_slower_than_other_copies():
    assert known().operator_seconds("chunk_cat", 0, 1e9) == pytest.approx(0.01 / rates.CHUNK_CAT_SHARE)


# ---- The table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["H100", "h100-nvl", "A100 80GB", "RTX4090", "4090", "a6000"])
def test_a_bare_name_takes_the_usual_kind_and_says_which_others_there_are(typed):
    kind, others = gpu_names.choose_kind(typed)
    found = rates.choose_rates(parse(["--plan", "--plan-gpu", typed]))
    assert found.device == kind and find_gpu(kind).memory_gib == found.memory_gib
    assert all(repr(other) in found.resolved_from for other in others) and bool(found.resolved_from) == bool(others)


@pytest.mark.slow
def test_a_gpu_is_added_by_one_row(tmp_path):
    """In a copy of the program: --plan-gpu takes what users call it."""
    script = copy_with_gpu(tmp_path, "Voodoo 7 Ultra", 100)
    flags = "--plan --json --demo --no-compile --plan-seconds 0 --plan-gpus 1 --sequence-length 64"
    process = start([sys.executable, script, *flags.split(), "--plan-gpu", "voodoo-7"])
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert (found["gpu"], found["capacity_gib"], found["verdict"]) == ("Voodoo 7 Ultra", 100, "fits")
    assert found["rates"]["matmul_tflops"] == pytest.approx(rates.MODEL_MATMUL_EFFICIENCY * 0.9 * 1000)
    fp8 = rates.FP8_MODEL_EFFICIENCY * rates.FP8_MATMUL_SHARE * 2 * 1000  # no share in the row: the default
    assert found["rates"]["fp8_tflops"] == pytest.approx(fp8)
