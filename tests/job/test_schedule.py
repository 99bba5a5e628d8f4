"""What is due at which optimizer step."""

from conftest import parse

from harness import job
from harness.flags import PROFILED_STEPS


def steps(what: str, *flags, first_step: int = 1) -> list[int]:
    """The steps of a run of 20 at which something is due."""
    settings = parse(["--num-steps", 20, *flags])
    return [step for step in range(first_step, 21) if getattr(job.due(settings, step, first_step), what)]


def test_a_line_is_logged_at_the_first_the_last_and_every_interval():
    assert steps("log", "--log-interval", 8) == [1, 8, 16, 20]
    assert steps("log", "--log-interval", 8, first_step=5) == [8, 16, 20]


def test_an_evaluation_comes_at_its_interval_and_after_the_last_step_and_has_a_line():
    evaluating = ("--log-interval", 8, "--eval-interval", 6)
    assert steps("evaluate", *evaluating) == [6, 12, 18, 20]
    assert steps("log", *evaluating) == [1, 6, 8, 12, 16, 18, 20]
    assert steps("evaluate") == []


def test_a_checkpoint_comes_at_its_interval_and_at_the_end_where_the_state_is_kept():
    assert steps("save", "--checkpoint-interval", 7) == [7, 14, 20]
    assert steps("save", "--checkpoint-interval", 7, "--no-final-checkpoint") == [7, 14]
    assert steps("save", "--dataset", "synthetic") == []


def test_the_first_and_the_last_step_are_those_of_this_start():
    assert steps("first", first_step=9) == [9] and steps("last", first_step=9) == [20]


def test_the_profile_leaves_out_the_warmup_and_at_least_the_first_step():
    for warmup, begin in ((4, 5), (0, 2)):
        flags = ("--profile", "--perf-warmup-steps", warmup)
        expected = list(range(begin, begin + PROFILED_STEPS))
        assert steps("profiled", *flags) == expected
        assert steps("profile_begins", *flags) == expected[:1]
        assert steps("profile_ends", *flags) == expected[-1:]
    assert steps("profiled") == []
