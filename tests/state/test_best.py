"""--keep-best: the checkpoint with the lowest eval loss is kept with the newest and is named, over resumes, stops
and other ranks. The eval tokens are random: the more a run learns of its text, the higher their loss."""

import pkgutil
import re
import shlex

import multirank
import numpy as np
import pytest
from conftest import Stop, forked, metrics_of, slow_case, small_run, train, unlock, words

import train_fsdp
from harness import loop
from harness.base import saved


@pytest.fixture
def flags(tmp_path):
    """`flags(more)`: those of a run that evaluates every two steps."""
    np.save(tmp_path / "text.npy", (np.arange(16 * 64 + 1) % 50).astype(np.uint16))
    random = np.random.default_rng(0).integers(0, 1536, 16 * 20 + 1)
    np.save(tmp_path / "random.npy", random.astype(np.uint16))
    np.save(tmp_path / "other.npy", random[::-1].astype(np.uint16))
    rest = f"--dataset {tmp_path}/text.npy --keep-best --lr 1e-2 --lr-scheduler constant --eval-interval 2"
    small = small_run(tmp_path, f"{rest} --log-interval 10 --keep-checkpoints 1 --eval-split")
    return lambda more, eval_part="random": [*small, str(tmp_path / f"{eval_part}.npy"), "--num-steps", *words(more)]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "r"


def kept(run) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def losses(run) -> dict[int, float]:
    """Return a run's eval losses by step."""
    return {line["step"]: line["eval_loss"] for line in metrics_of(run) if "eval_loss" in line and "final" not in line}


def check_best(run, steps: int) -> None:
    """The best of a run, which has taken so many steps, is the lowest of its losses; it and the newest are kept."""
    best = min(losses(run), key=losses(run).get)
    assert best < steps and kept(run) == [best, steps]
    final = metrics_of(run)[-1]
    assert (final["best_step"], final["best_eval_loss"]) == (best, losses(run)[best])


def test_the_best_is_kept_beside_the_newest_and_what_exports_it_is_reported(flags, run, device, capfd):
    assert train(flags("8"), device) == 0
    check_best(run, 8)
    best = min(losses(run), key=losses(run).get)
    printed = capfd.readouterr().out
    line = re.search(r"^best +step-0*(\d+), eval loss ([\d.]+), exported by: (.*)$", printed, re.MULTILINE)
    assert (int(line[1]), line[2]) == (best, f"{losses(run)[best]:.4f}")
    command = shlex.split(line[3])
    command = command[next(i for i, word in enumerate(command) if word.startswith("--")) :]
    assert train(command, device) == 0
    assert f"exported   {run}-best, step {best}" in capfd.readouterr().out
    continues = words(
        re.search(r"^from best +a new run starts with (.*)$", printed, re.MULTILINE)[1].replace("NAME", "q")
    )
    assert train([*flags("8"), *continues], device) == 0
    assert losses(run.with_name("q")).keys() == {step for step in (4, 6, 8) if step > best}


def test_a_resume_by_its_path_keeps_what_the_run_keeps(flags, run, device, capfd):
    assert train([*flags("8 --no-async-checkpoint"), "--keep-checkpoints", 3], device) == 0
    assert kept(run) == [2, 4, 6, 8] and min(losses(run), key=losses(run).get) == 2
    assert train(["--resume", run, *words("--num-steps 10 --num-workers 0 --no-compile")], device) == 0
    assert kept(run) == [2, 6, 8, 10]
    assert re.search(r"^its flags .*--keep-best", capfd.readouterr().out, re.MULTILINE)


def test_a_resume_that_keeps_less_says_so_before_it_removes_anything(flags, run, device, capfd):
    assert train([*flags("4"), "--keep-checkpoints", 3], device) == 0
    without = [word for word in flags("6 --resume auto") if word != "--keep-best"]
    assert train(without, device) == 0
    changed = re.search(r"^changed +(.*)$", capfd.readouterr().out, re.MULTILINE)[1]
    assert "keep checkpoints 3 -> 1, keep best True -> False" in changed
    assert kept(run) == [6] and "best_step" not in metrics_of(run)[-1]


def test_a_loss_on_other_eval_data_is_not_recorded_in_an_earlier_checkpoint(flags, run, device):
    """That has none: the run's evaluation was interrupted."""
    assert train(flags("4 --log-interval 1"), device, Stop(3)) == 143
    path = run / "checkpoints" / "step-00000003"
    assert train(flags("3 --resume auto --log-interval 1", eval_part="other"), device) == 0
    assert losses(run)[3] > 0 and saved.read_manifest(path)["eval_loss"] is None
    assert train(flags("3 --resume auto --log-interval 1"), device) == 0
    assert saved.read_manifest(path)["eval_loss"] == metrics_of(run)[-1]["eval_loss"]


@pytest.mark.slow
def test_it_survives_a_resume_on_other_ranks(flags, run, device):
    assert train(flags("4"), device) == 0
    unlock(run)
    forked(2, multirank.program, *flags("8 --resume auto"))
    check_best(run, 8)


def test_a_later_better_one_takes_its_place(flags, run, device, monkeypatch):
    given = iter([3.0, 2.0, 2.0, 2.5, 1.0, 1.5])
    monkeypatch.setattr(train_fsdp, "evaluate", lambda *_: ({"eval_loss": next(given)}, 1))
    assert train(flags("8"), device) == 0
    assert kept(run) == [4, 8]  # of equal ones the first
    assert train(flags("12 --resume auto"), device) == 0
    assert kept(run) == [10, 12] and metrics_of(run)[-1]["best_step"] == 10


class Killed(BaseException):
    """In the place of a kill: nothing in the run handles it."""


EVAL_LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}
DISTURBED = {  # a stop after so many forward passes after a step, or a kill where a function is called
    "stop in a sample": (4, 12),
    "stop in the last samples": (8, 12),
    "kill before the log line": ("harness.report.Log.write", 4),
    "kill before the save": ("harness.state.Checkpoints.save", 4),
    "kill before the last save": ("harness.state.Checkpoints.save", 8),
    "kill before the final line": ("harness.report.Log.finish", 8),
}


@pytest.mark.parametrize("how", [how if how == "stop in a sample" else slow_case(how) for how in DISTURBED])
def test_a_run_that_was_disturbed_names_and_keeps_the_best_of_an_undisturbed_one(flags, run, device, monkeypatch, how):
    evaluate, evaluate_and_log = train_fsdp.evaluate, loop.evaluate_and_log
    step, given = [0], [*flags("8 --sample-prompt a --sample-tokens 4 --no-async-checkpoint"), *words("--resume auto")]

    def note_step(a_run, due, metrics, *rest):
        step[0] = metrics["step"]
        evaluate_and_log(a_run, due, metrics, *rest)

    monkeypatch.setattr(loop, "evaluate_and_log", note_step)
    monkeypatch.setattr(
        train_fsdp, "evaluate", lambda *args: (evaluate(*args), ({"eval_loss": EVAL_LOSSES[step[0]]}, 1))[1]
    )
    assert train([*given, "--run-name", "undisturbed"], device) == 0
    first, second = DISTURBED[how]
    if how.startswith("stop"):
        assert train(given, device, Stop(steps=first, passes=second)) == 143
    else:
        step[0] = 0
        function = pkgutil.resolve_name(first)
        with monkeypatch.context() as patches:
            patches.setattr(first, lambda *args, **options: kill() if step[0] == second else function(*args, **options))
            with pytest.raises(Killed):
                train(given, device)
    assert train(given, device) == 0
    assert kept(run) == kept(run.with_name("undisturbed")) == [4, 8]
    logged, expected = metrics_of(run), metrics_of(run.with_name("undisturbed"))
    for key in ("step", "loss", "eval_loss", "best_step", "best_eval_loss", "final"):
        assert [line.get(key) for line in logged] == [line.get(key) for line in expected], key
    assert [len(line.get("samples", [])) for line in logged] == [len(line.get("samples", [])) for line in expected]
    assert logged[-1].keys() == expected[-1].keys()


def kill():
    raise Killed


@pytest.mark.parametrize("eval_part, more", [("other", ""), ("random", "--eval-steps 2")])
def test_losses_of_other_eval_data_do_not_compare_and_the_best_of_each_stays(
    flags, run, device, capfd, eval_part, more
):
    assert train(flags("4"), device) == 0
    best = min(losses(run), key=losses(run).get)
    assert train(flags(f"8 --resume auto {more}", eval_part), device) == 0
    changed = re.search(r"^changed +(.*)$", capfd.readouterr().out, re.MULTILINE)[1]
    assert "other eval data, so eval losses do not compare" in changed
    assert metrics_of(run)[-1]["best_step"] in (6, 8) and set(kept(run)) - {6, 8} == {best}
