"""warmup_stable_decay: the shapes of its decay, and a stable run that is decayed from any checkpoint by one command."""

import math

import multirank
import pytest
import torch
from conftest import ROOT, metrics_of, parse, train, words, write_model

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
    """The learning rate of a step, which count from 1."""
    if step <= WARMUP:
        return PEAK * (step - 1) / WARMUP
    progress = max(0, step - 1 - (num_steps - decay_steps)) / max(1, decay_steps)
    return PEAK * SHAPES[shape](progress)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    model = write_model(folder / "model", "llama", **multirank.SIZES | {"num_hidden_layers": 1})
    small = f"--num-steps {STEPS} --sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32 --log-interval 1"
    places = f"--cache-dir {folder / 'cache'} --tokenizer {ROOT / 'assets' / 'demo'} --model {model} --dataset demo"
    return words(f"{small} {places} --lr {PEAK} --warmup-steps {WARMUP} --no-compile")


def rates_of(folder) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in metrics_of(folder) if not line.get("final")}


@pytest.mark.parametrize(
    "shape, decay_steps", [("cosine", None), ("cosine", 1), ("linear", 5), ("1-sqrt", STEPS - WARMUP), ("linear", 0)]
)
def test_the_learning_rate_falls_by_its_shape_in_the_last_steps(flags, shape, decay_steps):
    given = ["--lr-scheduler", "warmup_stable_decay"]
    given += [] if decay_steps is None else ["--decay-steps", decay_steps]
    given += [] if shape == "cosine" else ["--decay-shape", shape]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    scheduler = models.build_scheduler(parse([*flags, *given]), optimizer)
    rates = {}
    for step in range(1, STEPS + 1):
        rates[step] = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    of_decay = STEPS // 5 if decay_steps is None else decay_steps
    assert rates == pytest.approx({step: rate(step, STEPS, of_decay, shape) for step in rates}, rel=1e-12)


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
    of_both = [{line["step"]: line["loss"] for line in metrics_of(folder)} for folder in (source, tmp_path / "decayed")]
    assert of_both[1][step + 1] == of_both[0][step + 1]  # the first step of a decay has the whole learning rate
    assert (source / "metrics.jsonl").read_bytes() == before
    going_on = f"--config {source / 'config.json'} --resume {source} --output-dir {tmp_path} --num-steps {STEPS + 2}"
    assert train(words(going_on), device) == 0
    assert set(list(rates_of(source).values())[WARMUP:]) == {PEAK}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_row_of_the_table_is_a_schedule_of_transformers(flags, name):
    """It rises to the peak in the warmup, and never goes above it."""
    settings = parse([*flags, "--lr-scheduler", name, "--warmup-steps", 0 if name == "constant" else WARMUP])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    scheduler, rates = models.build_scheduler(settings, optimizer), []
    for _ in range(STEPS):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(PEAK) == pytest.approx(rates[0 if name == "constant" else WARMUP])
    assert min(rates) >= 0
