"""Rates of a plan: the assumptions about a kind of GPU, and the time of a step."""

import pytest
from conftest import parse

from harness.base import find_gpu
from harness.base import gpus as gpu_names
from harness.plan import rates
from harness.plan.rates import Rates

VALUES = {"matmul_tflops": 2.0, "attention_tflops": 1.0, "memory_gb_per_s": 100.0, "host_us": 1000.0}
VALUES |= {"layer_us": 0.0, "launch_us": 0.0, "kernel_us": 0.0}
LINKS = {"intra_node_gb_per_s": 100.0, "inter_node_gb_per_s": 5.0}


def gpu_rates(**others: float) -> Rates:
    return Rates("a device", 1.0, 1.0, VALUES | others)


def test_launches_and_collectives_run_beside_the_computation():
    group = ("forward", "all_gather", 2, 1, 2)
    counts = {("seconds", "forward", "matmul"): 10.0, ("dispatches", "forward"): 2000}
    counts |= {("calls", *group): 1, ("sent_bytes", *group): 1e11}
    step = rates.price_step(counts, gpu_rates(**LINKS))
    assert (step["exposed"], step["launches"], step["gaps"]) == (0, 0, 0)
    assert 10 <= step["step"] < 11  # and sending takes one more second
    counts |= {("exposed_calls", *group): 1, ("exposed_bytes", *group): 1e11}
    assert rates.price_step(counts, gpu_rates(**LINKS))["exposed"] == pytest.approx(1.0, rel=1e-3)
    counts["dispatches", "forward"] = 20_000
    bounded = rates.price_step(counts, gpu_rates(**LINKS))
    assert (bounded["step"], bounded["host"]) == (pytest.approx(20.0), pytest.approx(20.0))
    counts[("kernels", "forward")] = 1e6  # between which the GPU idles for longer than the host takes
    counts[("seconds", "forward", "matmul")] = 20.0
    step = rates.price_step(counts, gpu_rates(**LINKS))
    assert step["launches"] == 0 < step["gaps"]


# ---- The table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["H100", "h100-nvl", "A100 80GB", "RTX4090", "4090", "a6000"])
def test_a_bare_name_takes_the_usual_kind_and_says_which_others_there_are(typed):
    kind, others = gpu_names.choose_kind(typed)
    found = rates.choose_rates(parse(["--plan", "--plan-gpu", typed]))
    assert found.device == kind and find_gpu(kind).memory_gib == found.memory_gib
    assert all(repr(other) in found.resolved_from for other in others) and bool(found.resolved_from) == bool(others)


@pytest.mark.parametrize(
    "driver, gib",
    [
        ("NVIDIA GH200 480GB", 94.5),
        ("GH200", 94.5),
        ("NVIDIA GH200 144G HBM3e", 0),
        ("NVIDIA H20", 95),
        ("NVIDIA H20-3e", 0),
    ],
)
def test_of_a_gpu_with_two_memories_the_one_in_the_table_is_planned(driver, gib):
    gpu = find_gpu(driver)
    assert gpu.memory_gib == gib and gpu.peak_tflops and bool(gpu_names.choose_kind(driver)[0]) == bool(gib)
