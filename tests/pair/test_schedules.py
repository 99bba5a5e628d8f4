"""Schedules: warmup_stable_decay's shapes, a stable run decayed from a checkpoint by one command, and all others."""

import math

import pytest
import torch
from conftest import metrics_of, parse, small_run, train, words

from harness import model as models
from harness.base import saved
from harness.flags import SCHEDULES

PEAK, WARMUP, STEPS = 1e-3, 2, 10
SHAPES = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}


def rate(step: int, num_steps: int, decay_steps: int, shape: str = "cosine") -> float:
    """The learning rate of a step; steps count from 1."""
    if step <= WARMUP:
        return PEAK * (step - 1) / WARMUP
    progress = max(0, step - 1 - (num_steps - decay_steps)) / max(1, decay_steps)
    return PEAK * SHAPES[shape](progress)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    flags = f"--dataset demo --num-steps {STEPS} --lr {PEAK} --warmup-steps {WARMUP}"
    return small_run(tmp_path_factory.mktemp("schedules"), flags, num_hidden_layers=1)


def rates_of(folder) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in metrics_of(folder) if not line.get("final")}


def scheduled(flags: list) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    scheduler, rates = models.build_scheduler(parse(flags), optimizer), []
    for _ in range(STEPS):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


DECAYS = {  # flags: the shape, and the steps of decay
    "": ("cosine", STEPS // 5),
    "--decay-steps 1": ("cosine", 1),
    "--decay-steps 5 --decay-shape linear": ("linear", 5),
    f"--decay-steps {STEPS - WARMUP} --decay-shape 1-sqrt": ("1-sqrt", STEPS - WARMUP),
    "--decay-steps 0": ("cosine", 0),
}


@pytest.mark.parametrize("more", DECAYS)
def test_the_learning_rate_falls_by_its_shape_in_the_last_steps(flags, more):
    shape, decay_steps = DECAYS[more]
    wanted = [rate(step, STEPS, decay_steps, shape) for step in range(1, STEPS + 1)]
    assert scheduled([*flags, *words(f"--lr-scheduler warmup_stable_decay {more}")]) == pytest.approx(wanted, rel=1e-12)


def test_a_decay_after_a_long_warmup_begins_at_the_peak(flags):
    rates = scheduled([*flags, *words(f"--lr-scheduler warmup_stable_decay --warmup-steps {STEPS - 1}")])
    assert rates[-1] == pytest.approx(PEAK)


def test_a_stable_run_is_decayed_from_a_checkpoint_by_one_command_and_can_continue(device, flags, tmp_path, capsys):
    more = "--lr-scheduler warmup_stable_decay --decay-steps 0"
    more += " --checkpoint-interval 2 --keep-checkpoints 9 --no-async-checkpoint"
    assert train([*flags, *words(more), "--output-dir", tmp_path, "--run-name", "stable"], device) == 0
    source, step, decay = tmp_path / "stable", 6, 4
    before = (source / "metrics.jsonl").read_bytes()
    path = source / "checkpoints" / saved.checkpoint_name(step)
    command = f"--config {source / 'config.json'} --resume {path} --run-name decayed --output-dir {tmp_path}"
    assert train([*words(command), "--num-steps", step + decay, "--decay-steps", decay], device) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"decay steps 0 -> {decay}" in printed
    assert f"resumed {path} at step {step}" in printed
    wanted = {now: rate(now, step + decay, decay) for now in range(step + 1, step + decay + 1)}
    assert rates_of(tmp_path / "decayed") == pytest.approx(wanted, rel=1e-12)
    losses = [{line["step"]: line["loss"] for line in metrics_of(folder)} for folder in (source, tmp_path / "decayed")]
    assert losses[1][step + 1] == losses[0][step + 1]  # the first step of a decay has the whole learning rate
    assert (source / "metrics.jsonl").read_bytes() == before
    going_on = f"--config {source / 'config.json'} --resume {source} --output-dir {tmp_path} --num-steps {STEPS + 2}"
    assert train(words(going_on), device) == 0
    assert set(list(rates_of(source).values())[WARMUP:]) == {PEAK}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_rises_to_the_peak_in_the_warmup_and_never_above_it(flags, name):
    warmup = 0 if name == "constant" else WARMUP
    rates = scheduled([*flags, "--lr-scheduler", name, "--warmup-steps", warmup])
    assert max(rates) == pytest.approx(PEAK) == pytest.approx(rates[warmup])
    assert min(rates) >= 0
