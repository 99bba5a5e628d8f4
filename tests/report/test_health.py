"""A rank for which the others wait is named, once, and so is its recovery.

No GPU has run these: what a driver says of one is made up.
"""

import random
import re

import multirank
import pytest
from conftest import forked, metrics_of, words

from harness.base.versions import installed
from harness.job import heartbeats
from harness.report import slow_ranks


@pytest.fixture
def judge(monkeypatch):
    """`judge(milliseconds that each rank worked, ...)`: what is said at each log line, of steps of 100 ms on GPUs."""
    said, ranks = [], []
    monkeypatch.setattr(slow_ranks, "say", said.append)
    monkeypatch.setattr(heartbeats, "RANKS", ranks)

    def judge_lines(*log_lines: list[float], kind: str = "cuda") -> list[list[str]]:
        judged, of_lines = slow_ranks.SlowRanks(kind), []
        ranks[:] = [(f"node-{rank}", 100 + rank) for rank in range(len(log_lines[0]))]
        for worked_ms in log_lines:
            said.clear()
            judged.judge(worked_ms, 100.0)
            of_lines.append(said.copy())
        return of_lines

    return judge_lines


def test_a_rank_that_stays_slow_is_named_once_and_once_when_it_is_no_longer(judge):
    slow, healthy = [60.0, 60.0, 90.0, 60.0], [90.0] * 4
    lines = judge(*[slow] * 9, *[healthy] * 9)
    assert [len(line) for line in lines] == [0, 0, 1, *[0] * 6, 0, 0, 1, *[0] * 6]
    what = "rank 2 (node-2, pid 102): the others wait for it for 30.0 ms of a step of 100.0 ms, at 3 consecutive log"
    assert lines[2][0].startswith(f"slow       {what}") and "nvidia-smi" in lines[2][0]
    assert lines[11] == ["recovered  rank 2 (node-2, pid 102): the others wait for it no longer"]


def test_what_is_slow_now_and_then_is_not_named(judge):
    slow, healthy = [10.0, 90.0, 10.0], [90.0] * 3
    assert not any(judge(*[slow, slow, healthy] * 5))


def test_of_two_ranks_the_one_that_waits_less_is_named(judge):
    assert judge(*[[60.0, 80.0]] * 3)[2][0].startswith("slow       rank 1 ")


def test_ranks_whose_collectives_take_longer_than_a_step_are_compared_all_the_same(judge):
    assert judge(*[[-60.0, -20.0]] * 3)[2][0].startswith("slow       rank 1 ")


@pytest.mark.parametrize("kind, spread", [("cuda", 5.0), ("cpu", 15.0)])
def test_the_spread_of_healthy_devices_is_not_named(judge, kind, spread):
    numbers = random.Random(0)
    own = [numbers.gauss(70, spread / 2) for _ in range(64)]  # of each device, and from line to line
    assert not any(judge(*([ms + numbers.gauss(0, spread / 2) for ms in own] for _ in range(300)), kind=kind))


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


def test_a_run_names_the_rank_that_the_others_wait_for(run):
    said, lines = run
    (slow,) = (line for line in said.splitlines() if line.startswith("slow "))
    (recovered,) = (line for line in said.splitlines() if line.startswith("recovered "))
    assert slow.startswith("slow       rank 1 (node-b, pid ")
    assert re.search(r": the others wait for it for [\d,.]+ ms of a step of [\d,.]+ ms, at 3 consecutive", slow)
    assert said.index("step  3/10") < said.index(slow) < said.index("step  4/10")
    assert said.index("step  8/10") < said.index(recovered) < said.index("step  9/10")
    slowest = {line["step"]: line.get("slowest_rank") for line in lines}
    assert (slowest[1], slowest[4]) == (None, 1)  # there is no speed yet at step 1


def test_a_run_warns_once_of_other_versions(run):
    warnings = [line for line in run[0].splitlines() if ": warning: " in line]
    (other,) = (line for line in warnings if "torch 0.1" in line)
    assert other.startswith("train_fsdp.py: warning: rank 1 (node-b, pid ")
    assert f"torch 0.1, but {installed('torch')} on rank 0 (node-a, pid " in other
    assert len(warnings) == 1
