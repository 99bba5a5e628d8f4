"""Rates of a plan: the assumptions about a kind of GPU, and the time of a step."""

import pytest
from conftest import parse

from harness.base import find_gpu
from harness.base import gpus as gpu_names
from harness.plan import rates

VALUES = {"memory_gb_per_s": 100.0, "host_us": 0.0, "intra_node_gb_per_s": 100.0, "inter_node_gb_per_s": 5.0}


def test_a_collective_runs_beside_the_computation_and_what_does_not_fit_behind_it_is_exposed():
    group = ("forward", "all_gather", 2, 1, 2)
    for computing, least, most in ((10.0, 10.0, 11.0), (0.25, 1.0, 1.25)):  # seconds; sending takes one
        counts = {("seconds", "forward", "matmul"): computing, ("calls", *group): 1, ("sent_bytes", *group): 1e11}
        step = rates.price_step(counts, rates.Rates("a device", 1.0, 1.0, VALUES))
        assert least <= step["step"] < most
        assert step["exposed"] == pytest.approx(max(0.0, 1 - computing), rel=1e-3)


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
