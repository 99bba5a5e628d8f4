"""A step whose gradient norm is NaN or infinite changes nothing, on any rank, whatever the optimizer."""

import itertools
import json
import math

import pytest
import skipranks
import torch
from conftest import forked, slow_case
from multirank import resolved
from tiny import NoReadBack

import train_fsdp
import utils
from harness.flags import OPTIMIZERS
from harness.model.optimization import build_optimizer, clip_grad_norm, local
from harness.model.skipping import decide_skip, skips_on_device, step_or_skip

CASES = {name: f"--optimizer {name}" for name in OPTIMIZERS}
CASES |= {
    "adamw-bf16 compiled": "--optimizer adamw-bf16 --compile",
    "muon in bf16": "--optimizer muon --precision bf16-pure",
}
SLOW = ("adamw8bit", "adamw-bf16 compiled")


@pytest.fixture
def built(device, arguments):
    """`built(flags)`: a tiny model and its optimizer."""

    def build(flags: str):
        settings, config = resolved(["--no-compile", *arguments, *flags.split()])
        model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
        return model, build_optimizer(settings, model)

    return build


def take_step(model, optimizer, planted: float | None = None) -> torch.Tensor:
    """A step with random gradients; `planted` is written into those of the first and of a middle parameter."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    if planted is not None:
        for parameter in (parameters[0], parameters[2], parameters[-1]):
            local(parameter.grad).view(-1)[3] = planted
    skip = decide_skip(clip_grad_norm(optimizer, 1.0))
    step_or_skip(optimizer, skip)
    optimizer.zero_grad()
    return skip


@pytest.mark.parametrize("name", [slow_case(name) if name in SLOW else name for name in CASES])
def test_a_skipped_step_changes_no_bit_of_weights_states_and_counts(built, name):
    """In the first step, and in a later one."""
    model, optimizer = built(CASES[name])
    torch.manual_seed(0)
    for _ in range(2):
        before = skipranks.bits_of(model, optimizer)
        for planted in (math.nan, math.inf):
            assert take_step(model, optimizer, planted).item() == 1
            assert skipranks.bits_of(model, optimizer) == before
        assert take_step(model, optimizer).item() == 0
        after = skipranks.bits_of(model, optimizer)
        assert all(after[name] != before[name] for name in after if name.endswith((".step", "q_proj.weight")))
        assert all(local(parameter).isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_no_step_brings_a_number_to_the_host(device, arguments, name):
    settings, config = resolved(["--no-compile", *arguments, *CASES[name].split()])
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    optimizer = build_optimizer(settings, model)
    if not skips_on_device(optimizer):
        pytest.skip("the host reads each norm")
    tokens = torch.randint(1, 1000, (2, 17))
    batches = itertools.repeat({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    tracker = utils.PerformanceTracker(0, 1, 0)
    for _ in range(2):
        with NoReadBack():
            train_fsdp.train_step(settings, model, optimizer, map(dict, batches), tracker)


# ---- Ranks -----------------------------------------------------------------------------------------------------------


LAYOUTS = {f"stage {stage}": f"--zero-stage {stage}" for stage in (0, 1, 2, 3)}
LAYOUTS |= {"offloaded": "--cpu-offload", "2 replicas": "--dp-replicate-size 2"}
LAYOUTS |= {f"{name}, muon": f"{flags} --optimizer muon" for name, flags in LAYOUTS.items()}


@pytest.mark.parametrize("ranks, names", [(2, ["stage 0"]), slow_case(4, LAYOUTS)], ids=["2, stage 0", "4, all"])
def test_what_breaks_on_one_rank_is_skipped_on_all(ranks, names, workspace, tmp_path):
    forked(ranks, skipranks.main, workspace, tmp_path, {name: LAYOUTS[name] for name in names})
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found == {name: [[1.0, 1.0, 0.0], True, True, True] for name in names}
