"""Plans of this program's runs on GPUs, benchmarks/results/plan_measured.json, made again."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from harness.plan import predict


@pytest.mark.slow
def test_runs_that_were_measured_are_planned_as_closely_as_the_docs_say(tmp_path):
    """The seven runs by which rates were chosen: bf16 within 3 %, eager within 6 %, the demo, which its host bounds,
    within 25 %. Those that came after, with a commit of their own: bf16 within 4 %, float8 within 6 %, 32,768 tokens
    within 13 %. Memory of 3B and 8B as `predict.RESERVED_SHARE` has it."""
    written = tmp_path / "plan_measured.json"
    command = [sys.executable, "benchmarks/plan_measured.py", "--out", str(written)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    runs = json.loads(written.read_text())["runs"]
    runs = {name: run for name, run in runs.items() if "left_out" not in run}
    assert len(runs) == 14
    for name, run in runs.items():
        real, planned = run[run["compared"]], run["planned"]
        is_demo = name.startswith("demo")
        within = 0.04 if "commit" in run else 0.03
        for mark, wider in {"eager": 0.06, "fp8": 0.06, "32,768": 0.13, "demo": 0.25}.items():
            if mark in name:
                within = wider
        assert planned["step_time_ms"] == pytest.approx(real["step_time_ms"], rel=within), name
        assert planned["bound_by"] == ("host" if is_demo else "device"), name
        if not is_demo:
            assert planned["peak_memory_alloc"] == pytest.approx(real["peak_memory_alloc"], rel=0.015), name
            share = real["peak_memory_reserved"] / planned["peak_memory_reserved"]
            least, most = predict.RESERVED_SHARE
            assert least - 0.01 < share < most + 0.01, name
