"""Skipped steps: a run continues through bad batches, reports them, ends if there are too many, and resumes alike."""

import math
import re
import shlex

import torch
from conftest import Stop, metrics_of, parse, train

import train_fsdp
from harness import data
from harness import model as models
from harness.base import saved


def plant(monkeypatch, divisors: dict[int, float]) -> None:
    """Divides the loss of steps by what makes their gradients NaN, infinite or large."""
    make_batches = data.training_batches

    def planted(settings, data, state, device):
        for step, batch in enumerate(make_batches(settings, data, state, device), state.step + 1):
            if step in divisors:
                batch["loss_divisor"] = torch.tensor(divisors[step])
            yield batch

    monkeypatch.setattr(data, "training_batches", planted)


def leave_out(monkeypatch, steps: set[int]) -> None:
    """Trains without the updates of these steps."""
    taken = []

    def step_unless_left_out(optimizer, skip):
        taken.append(skip)
        if len(taken) not in steps:
            optimizer.step()

    monkeypatch.setattr(models, "step_or_skip", step_unless_left_out)


def logged(folder) -> list[dict]:
    """The lines of a run without what depends on the clock."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "skipped_steps", "skipped")
    return [{key: line[key] for key in keys if key in line} for line in metrics_of(folder)]


def test_a_stop_keeps_the_reasons_of_skipped_steps(device, arguments, tmp_path, monkeypatch):
    """They are logged with the steps of an interval, which the stop cuts off."""
    plant(monkeypatch, {2: math.nan})
    flags = [*arguments, "--num-steps", 8, "--log-interval", 5]
    assert train(flags, device, Stop(3)) == 143
    lines = metrics_of(tmp_path / "out" / "r")
    assert [line["step"] for line in lines] == [1, 3]
    assert [skipped["step"] for skipped in lines[-1]["skipped"]] == [2]


# ---- A run -----------------------------------------------------------------------------------------------------------


def test_a_run_through_bad_batches_is_one_without_their_updates(device, arguments, tmp_path, monkeypatch, capfd):
    """With more skipped ones in all than --max-skipped in a row. What is saved after one still gives a finite loss."""
    flags = [*arguments, "--num-steps", 12, "--log-interval", 4, "--max-skipped", 3]
    flags += ["--checkpoint-interval", 4, "--keep-checkpoints", 9, "--no-async-checkpoint"]
    with monkeypatch.context() as planting:
        plant(planting, {3: math.nan, 6: 0.0, 7: math.nan, 8: math.nan})
        train(flags, device)
    console = capfd.readouterr().out
    with monkeypatch.context() as leaving:
        leave_out(leaving, {3, 6, 7, 8})
        train([*flags, "--run-name", "other"], device)
    assert [path.name[-2:] for path in saved.named_checkpoints(tmp_path / "out" / "r")] == ["04", "08", "12"]
    lines, others = logged(tmp_path / "out" / "r"), logged(tmp_path / "out" / "other")
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 12]
    assert [line["skipped_steps"] for line in lines] == [0, 1, 4, 4, 4]
    assert "loss" not in lines[2] and "grad_norm" not in lines[2] and "loss" in others[2]
    for line, other in zip(lines, others, strict=True):
        shared = line.keys() - {"skipped_steps", "skipped"}
        assert {key: line[key] for key in shared} == {key: other[key] for key in shared}
    entries = [entry for line in lines for entry in line.get("skipped", [])]
    assert [entry["step"] for entry in entries] == [3, 6, 7, 8]
    assert "skipped    step 3: gradient norm is nan; step 3 had samples 4 to 5, shown by: " in console
    assert re.search("^skipped    step 6, 7, 8: .*; step 6 had samples 10 to 11", console, re.MULTILINE)
    assert "step  8/12  skipped  lr " in console and "done       12 steps (4 skipped), " in console

    command = re.search("^skipped    step 6.*shown by: (.*)$", console, re.MULTILINE)[1]
    shown = shlex.split(command)
    assert train_fsdp.train_or_evaluate(parse(shown[shown.index("--config") :]), device, Stop()) == 0
    assert "step 6: 2 samples, from sample 10 on" in capfd.readouterr().out


def test_a_streak_continues_over_a_restart(device, arguments, mistake, tmp_path, monkeypatch):
    plant(monkeypatch, dict.fromkeys(range(4, 9), math.nan))
    flags = ["--checkpoint-interval", 6, "--num-steps", 12, "--log-interval", 1, "--max-skipped", 4]
    train([*arguments, *flags], device, Stop(steps=6))
    message = mistake(*flags, "--resume", "auto", exit_code=1)
    assert message.startswith("the gradient norm is nan at step 4; 5 steps in a row skipped, more than --max-skipped 4")
    assert "the last good checkpoint is step-00000006" in message


# ---- Its end ---------------------------------------------------------------------------------------------------------


def test_an_update_that_overflows_ends_the_run_and_is_not_saved(device, arguments, mistake, tmp_path, monkeypatch):
    step = models.step_or_skip

    def overflow(optimizer, skip):
        step(optimizer, skip)
        with torch.no_grad():
            optimizer.param_groups[1]["params"][0].to_local()[0] = math.inf  # of a norm

    monkeypatch.setattr(models, "step_or_skip", overflow)
    found = "the update made weights or optimizer states infinite or NaN at step"
    printed = mistake("--num-steps", 20, "--checkpoint-interval", 2, "--log-interval", 20, exit_code=1)
    assert printed.startswith(f"{found} 1; nothing was saved")  # step 2 was skipped
    assert not list((tmp_path / "out").rglob("step-*"))
