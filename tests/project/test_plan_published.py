"""benchmarks/plan_published.py: what it plans, keeps, and prints. No figure of it is checked for its size."""

import json
import sys

import pytest
import torch
from conftest import ROOT, forked
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_published
from plan_published import RUNS, Run

from harness.base import UserError
from harness.flags import parse_args

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
FLAGS = "--model CONFIG --sequence-length 64 --batch-size 2 --no-compile --plan-gpus 2"
RATES = {"memory_gib": 93.1}
SET = Run("chose", 1e6, "a page", FLAGS, chose="CONTENTION", memory_gib=2.0, config=TINY, rates=RATES)
HELD_OUT = Run("held", 2e6, "a page", "--model demo --sequence-length 64 --plan-gpus 1", guessed="the batch")


@pytest.fixture
def driver(monkeypatch, tmp_path, capsys):
    """`driver(*arguments)`: what main() prints for the two runs here, and the contents of its file."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(plan_published, "RUNS", [SET, HELD_OUT])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["plan_published.py", "--out", str(out), *arguments])
        plan_published.main()
        return capsys.readouterr(), json.loads(out.read_text())

    return run


def planned(speed: float, reserved: float) -> dict:
    figures = {"tokens_per_sec_per_gpu": speed, "mfu_percent": 40.0, "step_time_ms": 5.0, "time_ms": {"matmul": 5.0}}
    memory = {"memory_gib": {"reserved": reserved}, "beside_tensors_gib": {"CUDA and NCCL": 1.0}}
    return figures | memory | {"verdict": "fits"}


def plan_both(out) -> None:
    out.write_text(json.dumps({run.name: plan_published.plan(run) for run in (SET, HELD_OUT)}))


def test_a_run_is_planned_with_its_config_and_rates_and_both_groups_have_a_table(driver, monkeypatch, tmp_path):
    forked(1, plan_both, tmp_path / "plans.json")  # a plan wants a process without a world
    plans = json.loads((tmp_path / "plans.json").read_text())
    monkeypatch.setattr(plan_published, "plan", lambda run: plans[run.name])
    printed, contents = driver()
    chose, held = contents["runs"]["chose"], contents["runs"]["held"]
    assert sum(chose["time_ms"].values()) > 0 and chose["planned"] > 0
    assert chose["error"] == pytest.approx(chose["planned"] / 1e6 - 1)
    assert chose["memory_error"] == pytest.approx(chose["planned_memory_gib"] / 2.0 - 1)
    assert held["memory_error"] is None and held["guessed"] == "the batch"
    assert contents["summary"]["set"]["runs"] == contents["summary"]["held out"]["runs"] == 1
    tables = printed.out.split("held out: ")
    assert "| chose | 1,000,000 |" in tables[0] and "| held | 2,000,000 |" in tables[1]


def test_it_goes_on_where_it_was_ended_and_plans_again_what_changed(driver, monkeypatch):
    asked = []

    def fake(run):
        asked.append(run.name)
        return planned(1e6, 3.0)

    monkeypatch.setattr(plan_published, "plan", fake)
    driver("--only", "chose")
    driver()
    driver()
    assert asked == ["chose", "held"]
    changed = Run("held", 2e6, "a page", "--model demo --sequence-length 128 --plan-gpus 1")
    monkeypatch.setattr(plan_published, "RUNS", [SET, changed])
    driver()
    assert asked == ["chose", "held", "held"]


def test_a_refused_run_is_named_and_the_others_are_planned(driver, monkeypatch):
    def refuse_one(run):
        if run.name == "chose":
            raise UserError("--model: no such folder")
        return planned(3e6, 3.0)

    monkeypatch.setattr(plan_published, "plan", refuse_one)
    printed, contents = driver()
    assert "chose: --model: no such folder" in printed.err
    assert contents["runs"].keys() == {"held"}
    assert "held out: median 50 %, worst 50 %" in printed.out


def test_the_share_that_published_runs_reached_leaves_out_what_contradicts_itself_and_other_kinds():
    speeds = [(90, 100, False, ""), (120, 100, False, ""), (100, 100, False, ""), (10, 100, True, "")]
    speeds.append((300, 100, False, "a mixture of experts"))
    names = "published", "planned", "contradicts_itself", "other_kind"
    rows = [dict(zip(names, speed, strict=True)) for speed in speeds]
    assert plan_published.published_share(rows) == [0.9, 1.0, 1.2]


def test_every_second_matmul_is_kept_in_the_forward_pass_and_again_when_it_is_recomputed():
    mm, attention = torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default
    forward, _ = plan_published.every_second_matmul()
    for is_recompute in (False, True):
        context = SelectiveCheckpointContext(is_recompute=is_recompute)
        keeps = [forward.policy_fn(context, op) == CheckpointPolicy.MUST_SAVE for op in (mm, mm, attention, mm, mm)]
        assert keeps == [True, False, True, True, False]
    assert {name for run in RUNS for name in run.otherwise} == plan_published.OTHERWISE.keys()


def test_the_page_has_the_tables_of_the_file():
    rows = json.loads((ROOT / "benchmarks" / "results" / "plan_published.json").read_text())["runs"]
    page = (ROOT / "docs" / "PLAN.md").read_text()
    assert rows.keys() == {run.name for run in RUNS}
    for group in plan_published.groups_of(rows).values():
        assert plan_published.table(group) in page


def test_median_and_worst_are_of_sizes_and_of_what_has_a_figure():
    errors = [(-0.4, None), (0.1, 0.2), (0.3, -0.5)]
    rows = [{"error": error, "memory_error": memory} for error, memory in errors]
    summary = plan_published.summary_of(rows)
    assert summary["median_error"] == 0.3 and summary["worst_error"] == 0.4
    assert summary["median_memory_error"] == pytest.approx(0.35) and summary["worst_memory_error"] == 0.5


def test_every_published_run_has_a_source_and_flags_that_the_program_takes():
    assert len({run.name for run in RUNS}) == len(RUNS)
    for run in RUNS:
        settings = parse_args(["--plan", "--json", *run.flags.split()])
        assert run.source and settings.plan_gpus
        assert ("--model CONFIG" in run.flags) == (run.config is not None)
