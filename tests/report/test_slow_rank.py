"""A rank for which the others wait is named by the log lines while it is slow; `slowest_rank_ms` is its own time."""

import re

import multirank
import pytest
from conftest import forked, metrics_of, words

from harness.base.versions import installed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(what two ranks on two nodes printed, their log lines)."""
    folder = tmp_path_factory.mktemp("uneven")
    sizes = "--sequence-length 32 --batch-size 1 --gradient-accumulation-steps 2 --num-workers 0 --num-steps 10"
    flags = [*words(sizes), *words("--log-interval 1 --eval-interval 0 --perf-warmup-steps 1 --checkpoint-interval 0")]
    flags += ["--sample-tokens", "1", "--output-dir", str(folder), "--run-name", "r", "--cache-dir", str(folder / "c")]
    return forked(2, multirank.uneven, "--demo", *flags), metrics_of(folder / "r")


@pytest.mark.slow
def test_log_lines_name_the_rank_that_the_others_wait_for_while_they_do(run):
    said = {int(step): line for line, step in re.findall(r"^(step +(\d+)/10 .*)$", run[0], re.MULTILINE)}
    for step in (2, 3, 4):
        waited = re.search(r"the others wait (\d+) ms for rank 1 \(node-b, pid \d+\)", said[step])
        assert waited and 150 < int(waited[1]) < 3000, said[step]
    assert "for rank 1" not in said[10]


def test_the_time_of_the_slowest_rank_is_that_outside_collectives(run):
    lines = {line["step"]: line for line in run[1] if "final" not in line}
    assert "slowest_rank" not in lines[1]  # there is no speed yet
    assert lines[2]["slowest_rank"] == 1 and lines[2]["slowest_rank_ms"] >= 300
    for line in (lines[2], lines[10], run[1][-1]):
        assert 0 < line["slowest_rank_ms"] <= 1.05 * line["step_time_ms"]


def test_a_run_warns_once_of_other_versions(run):
    (other,) = [line for line in run[0].splitlines() if ": warning: " in line and "torch 0.1" in line]
    assert f"torch 0.1, but {installed('torch')} on rank 0 (node-a, pid " in other
