"""Which rank worked while the others waited for it in collectives."""

import pytest
from conftest import slow_case

from harness.report import waiting


@pytest.mark.parametrize("ranks, slowest", [(1, None), (2, 1), slow_case(4, 3)])
def test_the_rank_that_worked_while_the_others_waited_is_the_slowest(observed, ranks, slowest):
    # rank r takes 10 (r + 1) ms, of which it waits 9 r
    assert observed(ranks)["figures"]["worst"].get("slowest_rank") == slowest


@pytest.mark.parametrize("ranks", [2, slow_case(4)])
def test_the_slowest_rank_is_found_where_all_are_in_collectives_longer_than_a_step(observed, ranks):
    """On a GPU they run beside the work, and several at once."""
    # rank r takes 10 (r + 1) ms, and all were in collectives for 100
    figures = observed(ranks)["figures"]["always in collectives"]
    assert (figures["slowest_rank"], figures["slowest_rank_ms"]) == (ranks - 1, 10 * ranks)


class Moment(float):
    """A CUDA event, by the milliseconds at which it was recorded."""

    def elapsed_time(self, end: float) -> float:
        return end - self


@pytest.mark.parametrize("cuda", [True, False])
def test_collectives_that_run_at_once_are_waited_for_once(monkeypatch, cuda):
    clock = object.__new__(waiting.Waiting)
    clock.cuda, clock.runs, clock.steps, clock.spans, clock.begun = cuda, False, 0, [], None
    now = iter([10, 25, 28, 50])
    monkeypatch.setattr(clock, "now", lambda: Moment(next(now) / (1 if cuda else 1000)))
    starts = [Moment(moment / (1 if cuda else 1000)) for moment in (10, 15, 50)]
    with clock.step(logs=True):
        clock.add(starts[0])  # 10 to 25
        clock.add(starts[1])  # 15 to 28
        clock.add(starts[2])  # 50 to 50
    assert clock.take() == pytest.approx(18)
    assert clock.take() == 0

    moments = iter([10, 25, 55])
    monkeypatch.setattr(clock, "now", lambda: Moment(next(moments) / (1 if cuda else 1000)))
    for begin in (10, 45):
        with clock.step(logs=True):
            clock.add(Moment(begin / (1 if cuda else 1000)))
    assert clock.take() == pytest.approx((15 + 10) / 2)  # of one step
