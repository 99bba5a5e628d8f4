"""Epochs: how many steps --num-epochs are, that an evaluation can be at the end of each, and what has no epochs."""

import math

import multirank
import numpy as np
import pytest
from conftest import ROOT, STORIES, forked, metrics_of, parse, python, train, unlock, words, write_model

from harness import data, loop
from harness.base import UserError


@pytest.fixture
def flags(tmp_path):
    """`flags(more)`: those of a run on a.npy, 20 windows long, beside b.npy with 10 and held.npy."""
    for name, sequences in (("a", 20), ("b", 10), ("held", 3)):
        np.save(tmp_path / f"{name}.npy", (np.arange(sequences * 16 + 1) % 200).astype(np.uint16))
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    small = words("--sequence-length 16 --num-workers 0 --precision fp32 --no-compile --log-interval 1 --no-own-plan")
    small += ["--model", model, "--tokenizer", str(ROOT / "assets" / "demo"), "--cache-dir", str(tmp_path / "cache")]
    small += ["--output-dir", str(tmp_path), "--run-name", "r", "--dataset", str(tmp_path / "a.npy")]
    return lambda more: [*small, *words(more.replace("{}", str(tmp_path)))]


def opened(given: list) -> loop.Opened:
    return loop.open_run(parse(given))


def evaluated(folder) -> list[int]:
    return [line["step"] for line in metrics_of(folder) if "eval_loss" in line and "final" not in line]


STEPS = {  # flags: the fewest steps that read each of 20 windows so often
    "--num-epochs 1 --batch-size 4": 5,
    "--num-epochs 1 --batch-size 3": 7,  # the last one takes a window of the next epoch
    "--num-epochs 3 --batch-size 3": 20,
    "--num-epochs 0.1 --batch-size 1": 2,
    "--num-epochs 2.5 --batch-size 2 --gradient-accumulation-steps 5": 5,
    "--num-epochs 2 --batch-size 3 --dataset {}/a.npy {}/b.npy": 20,  # by size, of 30 windows
    "--num-epochs 2 --batch-size 3 --max-epochs 2": 14,
}


@pytest.mark.parametrize("more, steps", STEPS.items())
def test_epochs_are_so_many_steps(flags, device, more, steps):
    run = opened(flags(more))
    assert run.settings.num_steps == steps
    dataset = data.load(run.settings, run.corpora, run.tokenizer, run.config)
    wanted = run.settings.num_epochs
    read = dataset.epochs(dataset.record.samples_of_step(steps).stop).values()
    read_before = dataset.epochs(dataset.record.samples_of_step(steps).start).values()
    slack = 0.2 if len(dataset.sources) > 1 else 0  # inside a block a mixture is within some samples of its shares
    assert min(read) >= wanted - slack and min(read_before) < wanted


def test_eval_documents_are_in_no_epoch(flags, device, tmp_path):
    (tmp_path / "my.jsonl").write_text("".join((STORIES / "train.jsonl").read_text().splitlines(True)[:60]))
    steps = {}
    for more in ("", "--eval-interval 5"):
        run = opened(flags(f"--dataset {{}}/my.jsonl --num-epochs 1 {more}"))
        dataset = data.load(run.settings, run.corpora, run.tokenizer, run.config)
        assert run.settings.num_steps == math.ceil(len(dataset))
        steps[more] = run.settings.num_steps
    assert steps["--eval-interval 5"] < steps[""]


@pytest.mark.smoke
def test_a_run_of_epochs_evaluates_at_the_end_of_each_and_says_both_lengths(flags, device, tmp_path, capfd):
    train(flags("--num-epochs 3 --batch-size 3 --eval-interval epoch --eval-split {}/held.npy"), device)
    printed = capfd.readouterr().out
    assert "= 48 tokens a step, 20 steps, 3 epochs" in printed and "--num-epochs 6.0" in printed
    assert evaluated(tmp_path / "r") == [7, 14, 20]


@pytest.mark.slow
def test_a_resume_on_other_ranks_has_the_same_steps_and_evaluations(flags, device, tmp_path):
    more = "--batch-size 4 --eval-interval epoch --eval-split {}/held.npy --resume auto"
    train(flags(f"{more} --num-steps 3"), device)
    assert evaluated(unlock(tmp_path / "r")) == [3]
    forked(2, multirank.program, *flags(f"{more} --num-epochs 2"))
    assert evaluated(tmp_path / "r") == [3, 5, 10]


def test_a_resume_with_another_global_batch_counts_what_was_read(flags, device, tmp_path):
    more = "--eval-interval epoch --eval-split {}/held.npy --resume auto"
    train(flags(f"{more} --num-steps 2 --batch-size 4"), device)  # 8 windows
    train(flags(f"{more} --num-epochs 2 --batch-size 8"), device)
    assert evaluated(tmp_path / "r") == [2, 4, 6]  # 24 of 20 windows, then 40


def test_what_a_source_would_be_read_too_often_for_names_the_steps_of_its_epochs(flags, device):
    with pytest.raises(
        UserError, match=r"a would be read 4\.5 times in 30 steps; --max-epochs 3 of it is --num-steps 20"
    ):
        train(flags("--num-steps 30 --batch-size 3 --max-epochs 3"), device)
    mixed = "--batch-size 4 --dataset {}/a.npy:1 {}/b.npy:3 --max-epochs 3"  # b has 10 windows, and 3 of 4 samples
    with pytest.raises(UserError, match="--max-epochs 3 of it is --num-steps 10, or give it a smaller weight"):
        train(flags(f"{mixed} --num-steps 30"), device)
    assert train(flags(f"{mixed} --num-steps 9 --run-name mixed"), device) == 0
    assert train(flags("--num-steps 20 --batch-size 3 --max-epochs 3"), device) == 0


def test_a_run_whose_sources_changed_has_no_epochs(flags, device):
    train(flags("--num-steps 2"), device)
    for more in ("--num-epochs 2", "--num-steps 9 --eval-interval epoch --eval-split {}/held.npy"):
        with pytest.raises(UserError, match="the sources or their weights are not those of the run's beginning"):
            train(flags(f"{more} --resume auto --dataset {{}}/a.npy {{}}/b.npy"), device)


def test_a_plan_has_no_hours_of_epochs_and_says_so():
    plan = "--plan --plan-gpus 1 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32 --no-compile"
    printed = python(*words(plan), *words("--num-epochs 3 --eval-interval epoch --batch-size 2"))
    assert printed.returncode == 0, printed.stderr
    assert "--num-epochs 3: the number of steps depends on the data" in printed.stdout
