"""A rank for which the others wait is named by the log lines while it is slow; `slowest_rank_ms` is its own time."""

import re

import multirank
import pytest
from conftest import forked, metrics_of, words

from harness.base.versions import installed


@pytest.mark.slow
def test_log_lines_name_the_rank_that_the_others_wait_for_while_they_do(tmp_path):
    """Two ranks on two nodes, one of which is slow in its first steps and has other versions."""
    sizes = "--sequence-length 32 --batch-size 1 --gradient-accumulation-steps 2 --num-workers 0 --num-steps 10"
    flags = [*words(sizes), *words("--log-interval 1 --eval-interval 0 --perf-warmup-steps 1 --checkpoint-interval 0")]
    flags += [
        "--sample-tokens",
        "1",
        "--output-dir",
        str(tmp_path),
        "--run-name",
        "r",
        "--cache-dir",
        str(tmp_path / "c"),
    ]
    printed, logged = forked(2, multirank.uneven, "--demo", *flags), metrics_of(tmp_path / "r")
    said = {int(step): line for line, step in re.findall(r"^(step +(\d+)/10 .*)$", printed, re.MULTILINE)}
    for step in (2, 3, 4):
        waited = re.search(r"the others wait (\d+) ms for rank 1 \(node-b, pid \d+\)", said[step])
        assert waited and 150 < int(waited[1]) < 3000, said[step]
    assert "for rank 1" not in said[10]

    lines = {line["step"]: line for line in logged if "final" not in line}
    assert "slowest_rank" not in lines[1]  # there is no speed yet
    assert lines[2]["slowest_rank"] == 1 and lines[2]["slowest_rank_ms"] >= 300
    for line in (lines[2], lines[10], logged[-1]):
        assert 0 < line["slowest_rank_ms"] <= 1.05 * line["step_time_ms"]  # its time outside collectives

    (other,) = [line for line in printed.splitlines() if ": warning: " in line and "torch 0.1" in line]
    assert f"torch 0.1, but {installed('torch')} on rank 0 (node-a, pid " in other
