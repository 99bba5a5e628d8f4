"""--keep-best: the checkpoint with the lowest held-out loss stays beside the newest and is named, over resumes, stops
and other ranks. The held-out tokens are random: the more a run learns of its text, the higher their loss."""

import json
import re
import shlex

import multirank
import numpy as np
import pytest
from conftest import ROOT, Stop, forked, metrics_of, train, words, write_model

import train_fsdp


@pytest.fixture
def flags(tmp_path):
    """`flags(more)`: those of a run that evaluates every two steps."""
    np.save(tmp_path / "text.npy", (np.arange(16 * 64 + 1) % 50).astype(np.uint16))
    random = np.random.default_rng(0).integers(0, 1536, 16 * 20 + 1)
    np.save(tmp_path / "random.npy", random.astype(np.uint16))
    np.save(tmp_path / "other.npy", random[::-1].astype(np.uint16))
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    small = words("--sequence-length 16 --batch-size 2 --num-workers 0 --precision fp32 --no-compile --no-own-plan")
    small += ["--model", model, "--tokenizer", str(ROOT / "assets" / "demo"), "--cache-dir", str(tmp_path / "cache")]
    small += ["--output-dir", str(tmp_path), "--run-name", "r", "--dataset", str(tmp_path / "text.npy"), "--keep-best"]
    small += [*words("--lr 1e-2 --lr-scheduler constant --eval-interval 2 --keep-checkpoints 1"), "--eval-split"]
    return lambda more, held_out="random": [*small, str(tmp_path / f"{held_out}.npy"), "--num-steps", *words(more)]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "r"


def kept(run) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def losses(run) -> dict[int, float]:
    """The held-out losses of a run, by step."""
    return {line["step"]: line["eval_loss"] for line in metrics_of(run) if "eval_loss" in line and "final" not in line}


def check_best(run, steps: int) -> None:
    """The best of a run, which has taken so many steps, is the lowest of its losses; it and the newest are kept."""
    best = min(losses(run), key=losses(run).get)
    assert best < steps and kept(run) == [best, steps]
    final = metrics_of(run)[-1]
    assert (final["best_step"], final["best_eval_loss"]) == (best, losses(run)[best])


def test_the_best_is_kept_beside_the_newest_and_what_exports_it_is_said(flags, run, device, capfd):
    assert train(flags("8"), device) == 0
    check_best(run, 8)
    best = min(losses(run), key=losses(run).get)
    said = capfd.readouterr().out
    line = re.search(r"^best +step-0*(\d+), held-out loss ([\d.]+), exported by: (.*)$", said, re.MULTILINE)
    assert (int(line[1]), line[2]) == (best, f"{losses(run)[best]:.4f}")
    command = shlex.split(line[3])
    command = command[next(i for i, word in enumerate(command) if word.startswith("--")) :]
    assert train(command, device) == 0
    assert f"exported   {run}-best, step {best}" in capfd.readouterr().out
    goes_on = words(re.search(r"^from best +a new run goes on with (.*)$", said, re.MULTILINE)[1].replace("NAME", "q"))
    assert train([*flags("8"), *goes_on], device) == 0
    assert losses(run.with_name("q")).keys() == {step for step in (4, 6, 8) if step > best}


def test_it_survives_a_resume_on_other_ranks(flags, run):
    forked(1, multirank.program, *flags("4"))
    forked(2, multirank.program, *flags("8 --resume auto"))
    check_best(run, 8)


def test_a_later_better_one_takes_its_place(flags, run, device, monkeypatch):
    given = iter([3.0, 2.0, 2.0, 2.5, 1.0, 1.5])
    monkeypatch.setattr(train_fsdp, "evaluate", lambda *_: ({"eval_loss": next(given)}, 1))
    assert train(flags("8"), device) == 0
    assert kept(run) == [4, 8]  # of equal ones the first
    assert train(flags("12 --resume auto"), device) == 0
    assert kept(run) == [10, 12] and metrics_of(run)[-1]["best_step"] == 10


@pytest.mark.parametrize("passes", [0, 1])
def test_a_stop_in_its_evaluation_does_not_lose_it(flags, run, device, passes):
    """The step is saved without its loss, which the next start finds and records."""
    assert train(flags("6"), device, Stop(steps=2, passes=passes)) == 143
    (saved,) = (run / "checkpoints").glob("step-*/manifest.json")
    assert json.loads(saved.read_text())["eval_loss"] is None
    assert train(flags("6 --resume auto"), device) == 0
    assert list(losses(run)) == [2, 4, 6]
    check_best(run, 6)


def test_losses_of_other_held_out_data_do_not_compare(flags, run, device):
    assert train(flags("4"), device) == 0
    assert train(flags("8 --resume auto", "other"), device) == 0
    assert metrics_of(run)[-1]["best_step"] in (6, 8) and set(kept(run)) <= {6, 8}


def test_without_the_flag_nothing_more_is_kept(flags, run, device):
    given = [word for word in flags("4 --checkpoint-interval 2") if word != "--keep-best"]
    assert train(given, device) == 0
    assert kept(run) == [4] and "best_step" not in metrics_of(run)[-1]
