"""What is due at which optimizer step."""

from conftest import parse

from harness.flags import PROFILED_STEPS
from harness.job.schedule import Schedule


def schedule(*flags, first_step: int = 1) -> Schedule:
    settings = parse(["--num-steps", 20, *flags])
    return Schedule(settings, first_step, has_held_out=settings.eval_interval > 0)


def steps(schedule: Schedule, what: str) -> list[int]:
    """The steps of a run of 20 at which something is due."""
    return [step for step in range(schedule.first_step, 21) if getattr(schedule.at(step), what)]


def test_a_line_is_logged_at_the_first_the_last_and_every_interval():
    assert steps(schedule("--log-interval", 8), "log") == [1, 8, 16, 20]
    assert steps(schedule("--log-interval", 8, first_step=5), "log") == [8, 16, 20]


def test_an_evaluation_comes_at_its_interval_and_after_the_last_step_and_has_a_line():
    evaluating = schedule("--log-interval", 8, "--eval-interval", 6)
    assert steps(evaluating, "evaluate") == [6, 12, 18, 20]
    assert steps(evaluating, "log") == [1, 6, 8, 12, 16, 18, 20]
    assert steps(evaluating, "first_evaluation") == [6]
    assert steps(schedule("--eval-interval", 6, first_step=7), "first_evaluation") == [12]
    assert steps(schedule("--eval-interval", 6, first_step=6), "first_evaluation") == [6]
    assert steps(schedule("--eval-interval", 50), "first_evaluation") == [20]
    assert steps(schedule(), "evaluate") == []


def test_a_checkpoint_comes_at_its_interval_and_at_the_end_where_the_state_is_kept():
    assert steps(schedule("--checkpoint-interval", 7), "save") == [7, 14, 20]
    assert steps(schedule("--checkpoint-interval", 7, "--no-final-checkpoint"), "save") == [7, 14]
    assert steps(schedule("--dataset", "synthetic"), "save") == []


def test_the_first_and_the_last_step_are_those_of_this_start():
    resumed = schedule(first_step=9)
    assert steps(resumed, "first") == [9] and steps(resumed, "last") == [20]


def test_the_profile_leaves_out_the_warmup_and_at_least_the_first_step():
    for warmup, begin in ((4, 5), (0, 2)):
        profiling = schedule("--profile", "--perf-warmup-steps", warmup)
        expected = list(range(begin, begin + PROFILED_STEPS))
        assert steps(profiling, "profiled") == expected
        assert steps(profiling, "profile_begins") == expected[:1]
        assert steps(profiling, "profile_ends") == expected[-1:]
    assert steps(schedule(), "profiled") == []
