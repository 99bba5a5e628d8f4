"""benchmarks/plan_published.py: published runs, and what of them a plan prints. No figure is checked for its size."""

import json
import sys

import torch
from conftest import ROOT
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_published

from harness.flags.parser import parse_args

RUNS = json.loads(plan_published.RESULTS.read_text())["runs"]


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
    assert {name for run in RUNS.values() for name in run["otherwise"]} == plan_published.OTHERWISE.keys()


def test_every_published_run_has_a_source_and_flags_that_the_program_takes():
    for run in RUNS.values():
        settings = parse_args(["--plan", "--json", *run["flags"].split()])
        assert run["source"] and settings.plan_gpus
        assert ("--model CONFIG" in run["flags"]) == (run["config"] is not None)
