"""--num-epochs in steps, evaluations at the end of each epoch, and what has no epochs."""

import numpy as np
import pytest
from conftest import metrics_of, parse, python, small_run, story_texts, train, words
from corpora import write_records

from harness import loop
from harness.base import UserError


@pytest.fixture
def flags(tmp_path):
    """`flags(more)` of a run on a.npy with 20 sequences, beside b.npy with 10 and held.npy."""
    for name, sequences in (("a", 20), ("b", 10), ("held", 3)):
        np.save(tmp_path / f"{name}.npy", (np.arange(sequences * 16 + 1) % 200).astype(np.uint16))
    small = small_run(tmp_path, f"--batch-size 1 --dataset {tmp_path}/a.npy")
    return lambda more: [*small, *words(more.replace("{}", str(tmp_path)))]


def steps_of(given: list) -> int:
    return loop.open_run(parse(given)).settings.num_steps


def evaluated(folder) -> list[int]:
    return [line["step"] for line in metrics_of(folder) if "eval_loss" in line and "final" not in line]


STEPS = {  # flags: the fewest steps that read each of 20 sequences that often
    "--num-epochs 1 --batch-size 4": 5,
    "--num-epochs 1 --batch-size 3": 7,  # the last one takes a sequence of the next epoch
    "--num-epochs 3 --batch-size 3": 20,
    "--num-epochs 0.1 --batch-size 1": 2,
    "--num-epochs 2.5 --batch-size 2 --gradient-accumulation-steps 5": 5,
    "--num-epochs 2 --batch-size 3 --dataset {}/a.npy {}/b.npy": 20,  # by size, of 30 sequences
    "--num-epochs 2 --batch-size 3 --max-epochs 2": 14,
}


@pytest.mark.parametrize("more, steps", STEPS.items())
def test_epochs_in_steps(flags, device, more, steps):
    assert steps_of(flags(more)) == steps


def test_eval_documents_are_in_no_epoch(flags, device, tmp_path):
    write_records(tmp_path / "my.jsonl", story_texts(0, 60))
    one_epoch = "--dataset {}/my.jsonl --num-epochs 1"
    assert steps_of(flags(f"{one_epoch} --eval-interval 5")) < steps_of(flags(one_epoch))


@pytest.mark.smoke
def test_a_run_of_epochs_evaluates_at_the_end_of_each_and_prints_both_lengths(flags, device, tmp_path, capfd):
    train(flags("--num-epochs 3 --batch-size 3 --eval-interval epoch --eval-split {}/held.npy"), device)
    printed = capfd.readouterr().out
    assert "= 48 tokens a step, 20 steps, 3 epochs" in printed and "--num-epochs 6.0" in printed
    assert evaluated(tmp_path / "r") == [7, 14, 20]


def test_a_resume_with_another_global_batch_counts_what_was_read(flags, device, tmp_path):
    more = "--eval-interval epoch --eval-split {}/held.npy --resume auto"
    train(flags(f"{more} --num-steps 2 --batch-size 4"), device)  # 8 sequences
    train(flags(f"{more} --num-epochs 2 --batch-size 8"), device)
    assert evaluated(tmp_path / "r") == [2, 4, 6]  # 24 of 20 sequences, then 40
    assert train(flags("--resume auto --num-epochs 3 --batch-size 8 --show-samples 7"), device) == 0


def test_a_source_that_would_be_read_too_often_is_refused_by_the_steps_of_its_epochs(flags, device):
    with pytest.raises(
        UserError, match=r"a would be read 4\.5 times in 30 steps; --max-epochs 3 of it is --num-steps 20"
    ):
        train(flags("--num-steps 30 --batch-size 3 --max-epochs 3"), device)
    mixed = "--batch-size 4 --dataset {}/a.npy:1 {}/b.npy:3 --max-epochs 3"  # b has 10 sequences, and 3 of 4 samples
    with pytest.raises(UserError, match="--max-epochs 3 of it is --num-steps 10, or give it a smaller weight"):
        train(flags(f"{mixed} --num-steps 30"), device)
    assert train(flags(f"{mixed} --num-steps 9 --run-name mixed"), device) == 0
    assert train(flags("--num-steps 20 --batch-size 3 --max-epochs 3"), device) == 0


def test_a_run_whose_sources_changed_has_no_epochs(flags, device):
    train(flags("--num-steps 2"), device)
    for more in ("--num-epochs 2", "--num-steps 9 --eval-interval epoch --eval-split {}/held.npy"):
        with pytest.raises(UserError, match="the sources or their weights are not those of the run's beginning"):
            train(flags(f"{more} --resume auto --dataset {{}}/a.npy {{}}/b.npy"), device)


PLANS = {  # flags: the output of a plan with them
    "--num-tokens 1e6": ("--precision bf16 ", "3,907 steps"),  # of 256 tokens
    "--num-epochs 3 --eval-interval epoch": ("--num-epochs 3: the number of steps depends on the data",),
}


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("more, printed", PLANS.items())
def test_a_plan_prints_how_many_steps_there_are_or_that_it_does_not_know(more, printed):
    plan = "--plan --plan-details --plan-gpus 4 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32"
    process = python(*words(plan), *words("--no-compile --batch-size 2"), *words(more))
    assert all(text in process.stdout for text in printed), process.stderr
