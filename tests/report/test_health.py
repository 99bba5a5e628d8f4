"""A rank on which a small fixed kernel takes longer than on the others is named, once, and so is its recovery.

No GPU has run these: the kernel is a CPU's, and the driver's answers are made up.
"""

import random
import statistics
import types

import multirank
import pytest
import torch
from conftest import forked, metrics_of, words

from harness.base.versions import installed
from harness.job import driver, heartbeats
from harness.report import health


@pytest.fixture
def clock(device, monkeypatch):
    """`clock(milliseconds of each rank, ...)`: the lines said, by measurement, of a clock for a GPU."""
    said, ranks = [], []
    monkeypatch.setattr(health, "say", said.append)
    monkeypatch.setattr(heartbeats, "RANKS", ranks)

    def judge(*measurements: list[float], kind: str = "cuda", reasons: dict | None = None) -> list[list[str]]:
        lines, watch = [], health.KernelClock(types.SimpleNamespace(type=kind))
        ranks[:] = [(f"node-{rank}", 100 + rank) for rank in range(len(measurements[0]))]
        for step, kernel_ms in enumerate(measurements):
            said.clear()
            watch.judge(kernel_ms, [(reasons or {}).get(rank, 0) for rank in range(len(kernel_ms))], step, 1000.0)
            lines.append(said.copy())
        return lines

    return judge


def test_a_rank_that_stays_slow_is_named_once_and_once_when_it_is_no_longer(clock):
    slow, healthy = [1.0, 1.0, 1.5, 1.0], [1.0] * 4
    lines = clock(*[slow] * 9, *[healthy] * 9)
    assert [len(line) for line in lines] == [0, 0, 1, *[0] * 6, 0, 0, 1, *[0] * 6]
    assert lines[2][0].startswith("slow       rank 2 (node-2, pid 102): a fixed matmul takes 1.5 ms, 50 % more than")
    assert "nvidia-smi" in lines[2][0]
    assert lines[11][0].startswith("recovered  rank 2 (node-2, pid 102): ")


def test_what_is_slow_now_and_then_is_not_named(clock):
    slow, healthy = [1.0, 9.0, 1.0], [1.0] * 3
    assert not any(clock(*[slow, slow, healthy] * 5))


def test_of_two_ranks_the_slower_one_is_named(clock):
    assert clock(*[[1.0, 1.3]] * 3)[2][0].startswith("slow       rank 1 ")


def test_the_drivers_reason_is_told(clock):
    (line,) = clock(*[[1.0, 1.0, 2.0]] * 3, reasons={2: 0x40 | 0x80})[2]
    assert "its driver says: hardware thermal slowdown, power brake; " in line
    assert driver.name_slowdown(0x04) == ""  # at its power cap: as it was built


@pytest.mark.parametrize("kind, spread", [("cuda", 0.05), ("cpu", 0.15)])
def test_the_spread_of_healthy_devices_is_not_named(clock, kind, spread):
    numbers = random.Random(0)
    own = [max(0.5, numbers.gauss(1, spread / 2)) for _ in range(64)]  # of each device, and from line to line
    assert not any(clock(*([ms * numbers.gauss(1, spread / 2) for ms in own] for _ in range(300)), kind=kind))


def test_the_kernel_takes_a_thousandth_of_the_time_and_all_ranks_agree_when(device):
    clocks = [health.KernelClock(device) for _ in range(2)]
    for clock in clocks:
        clock.judge([2.0, 1.0], [0, 0], 10, 50.0)
    milliseconds = 2.0 * (1 + health.BATCHES * health.KERNEL["cpu"][2])
    for clock in clocks:
        assert milliseconds / ((clock.due - 10) * 50.0) == pytest.approx(0.001, rel=0.02)
        assert clock.measure(clock.due - 1) == (0.0, 0)
    due = clocks[0].due
    clocks[0].judge([0.0, 0.0], [0, 0], due - 1, 50.0)
    assert clocks[0].due == due


def test_the_kernel_draws_no_random_number_and_its_time_is_that_of_one_product(device):
    before, clock = torch.get_rng_state(), health.KernelClock(device)
    milliseconds = [clock.measure(0)[0] for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state())
    side = health.KERNEL["cpu"][0]
    gflops = 2 * side**3 / 1e6 / statistics.median(milliseconds)
    assert 0.1 < gflops < 10_000


# ----------------------------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(what two ranks on two nodes printed, their log lines)."""
    folder = tmp_path_factory.mktemp("uneven")
    sizes = "--sequence-length 32 --batch-size 1 --gradient-accumulation-steps 2 --num-workers 0 --num-steps 10"
    flags = [*words(sizes), *words("--log-interval 1 --eval-interval 0 --perf-warmup-steps 1 --checkpoint-interval 0")]
    flags += ["--sample-tokens", "1", "--output-dir", str(folder), "--run-name", "r", "--cache-dir", str(folder / "c")]
    return forked(2, multirank.uneven, "--demo", *flags), metrics_of(folder / "r")


def test_a_run_names_the_slow_rank_and_its_log_lines_have_the_kernels_time(run):
    said, lines = run
    (slow,) = (line for line in said.splitlines() if line.startswith("slow "))
    (recovered,) = (line for line in said.splitlines() if line.startswith("recovered "))
    assert slow.startswith("slow       rank 1 (node-b, pid ")
    assert ": a fixed matmul takes 3 ms, 200 % more than the median of the ranks" in slow
    assert said.index("step  3/10") < said.index(slow) < said.index("step  4/10")
    assert said.index("step  8/10") < said.index(recovered) < said.index("step  9/10")
    kernels = {line["step"]: (line.get("kernel_ms"), line.get("slowest_kernel_rank")) for line in lines}
    assert kernels[1] == (None, None)  # there is no speed yet
    assert (kernels[4], kernels[9]) == ((3.0, 1), (1.1, 1))


def test_a_run_warns_once_of_other_versions_and_of_shards_across_nodes(run):
    warnings = [line for line in run[0].splitlines() if ": warning: " in line]
    (other,) = (line for line in warnings if "torch 0.1" in line)
    assert other.startswith("train_fsdp.py: warning: rank 1 (node-b, pid ")
    assert f"torch 0.1, but {installed('torch')} on rank 0 (node-a, pid " in other
    (nodes,) = (line for line in warnings if "--dp-replicate-size" in line)
    assert "--dp-replicate-size 1: a shard group spans 2 nodes" in nodes
    assert "--plan --plan-gpus 2 --gpus-per-node 1 --dp-replicate-size 2 and" in nodes
    assert len(warnings) == 2
