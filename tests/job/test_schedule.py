"""The actions due at each optimizer step."""

import pytest
from conftest import words
from multirank import resolved

from harness import job

DUE = [  # what, the flags of a run of 20 steps, the first step of this start: the steps at which it is due
    ("log", "--log-interval 8", 1, [1, 8, 16, 20]),
    ("log", "--log-interval 8", 5, [8, 16, 20]),
    ("log", "--log-interval 8 --eval-interval 6", 1, [1, 6, 8, 12, 16, 18, 20]),
    ("evaluate", "--log-interval 8 --eval-interval 6", 1, [6, 12, 18, 20]),
    ("evaluate", "", 1, []),
    ("save", "--checkpoint-interval 7", 1, [7, 14, 20]),
    ("save", "--checkpoint-interval 7 --no-final-checkpoint", 1, [7, 14]),
    ("save", "--dataset synthetic", 1, []),
    ("save", "--dataset synthetic --final-checkpoint", 1, [20]),
    ("save", "--dataset synthetic --checkpoint-interval 7", 1, [7, 14, 20]),
]


@pytest.mark.parametrize("before, warmup", [(10, 10), (50, 2)])  # of 40 steps
def test_a_resume_keeps_the_warmup_unless_it_would_last_to_the_end(before, warmup):
    settings, _ = resolved(["--model", "demo", "--num-steps", 40])
    manifest = {"step": 28, "samples": 28, "flags": {"lr_scheduler": "cosine", "warmup_steps": before}}
    assert job.count_steps(settings, manifest, 0) == (40, warmup)


@pytest.mark.parametrize("what, flags, first_step, due", DUE)
def test_the_steps_at_which_something_is_due(what, flags, first_step, due):
    settings, _ = resolved(["--model", "demo", "--num-steps", 20, *words(flags)])
    assert [step for step in range(first_step, 21) if getattr(job.due(settings, step, first_step), what)] == due
