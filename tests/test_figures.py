"""The figures of all ranks: what a log line makes of the figures of each, and that a figure is one entry."""

import random

from harness.report.figures import RankFigures, gather, worst_of_ranks

# ----------------------------------------------------------------------------------------------------------------------
# Of a list of ranks


def timed(step_time_ms: float, waited_ms: float, **more) -> RankFigures:
    return RankFigures(step_time_ms=step_time_ms, data_wait_percent=1.0, waited_ms=waited_ms, **more)


def test_every_figure_is_that_of_the_rank_where_it_is_worst():
    ranks = [
        RankFigures(30.0, 31.0, 40.0, step_time_ms=100.0, data_wait_percent=3.0, waited_ms=10.0, kernel_ms=1.0),
        RankFigures(32.0, 33.0, 39.0, step_time_ms=101.0, data_wait_percent=2.0, waited_ms=90.0, kernel_ms=1.5),
        RankFigures(10.0, 11.0, 12.0, step_time_ms=99.0, data_wait_percent=4.0, waited_ms=20.0, kernel_ms=1.2),
    ]
    assert worst_of_ranks(ranks) == {
        "peak_memory_active": 32.0,
        "peak_memory_alloc": 33.0,
        "peak_memory_reserved": 40.0,
        "slowest_rank_ms": 101.0,
        "data_wait_percent": 4.0,
        "slowest_rank": 0,
        "kernel_ms": 1.5,
        "slowest_kernel_rank": 1,
    }


def test_of_equal_ranks_the_first_is_named():
    ranks = [timed(100.0, 50.0, kernel_ms=1.0), timed(100.0, 20.0, kernel_ms=2.0), timed(100.0, 20.0, kernel_ms=2.0)]
    worst = worst_of_ranks(ranks)
    assert (worst["slowest_rank"], worst["slowest_kernel_rank"]) == (1, 1)


def test_a_rank_that_is_in_collectives_for_longer_than_a_step_is_compared_all_the_same():
    assert worst_of_ranks([timed(100.0, 130.0), timed(100.0, 110.0)])["slowest_rank"] == 1


def test_one_rank_alone_is_no_slowest():
    worst = worst_of_ranks([timed(100.0, 10.0, kernel_ms=2.0)])
    assert worst == {"slowest_rank_ms": 100.0, "data_wait_percent": 1.0, "kernel_ms": 2.0}


def test_a_rank_without_figures_of_memory_leaves_those_of_the_others():
    worst = worst_of_ranks([timed(100.0, 10.0), timed(90.0, 20.0, peak_memory_alloc=3.0)])
    assert worst["peak_memory_alloc"] == 3.0
    assert not {"peak_memory_active", "peak_memory_reserved"} & worst.keys()
    assert worst_of_ranks([RankFigures()] * 2) == {}


def test_in_warmup_there_is_memory_alone():
    assert worst_of_ranks([RankFigures(1.0, 2.0, 3.0), RankFigures(3.0, 2.0, 1.0)]) == {
        "peak_memory_active": 3.0,
        "peak_memory_alloc": 2.0,
        "peak_memory_reserved": 3.0,
    }


def test_without_a_time_in_collectives_no_rank_is_named():
    ranks = [RankFigures(step_time_ms=100.0, data_wait_percent=0.0)] * 2
    assert worst_of_ranks(ranks) == {"slowest_rank_ms": 100.0, "data_wait_percent": 0.0}


def test_the_kernels_time_is_there_where_it_was_due():
    assert not {"kernel_ms", "slowest_kernel_rank"} & worst_of_ranks([timed(100.0, 10.0)] * 2).keys()


def test_a_thousand_ranks_give_the_figures_of_the_worst():
    numbers = random.Random(0)
    ranks = [timed(100.0, numbers.uniform(50, 60), kernel_ms=numbers.uniform(1, 2)) for _ in range(1000)]
    ranks[700] = timed(103.0, 0.0, kernel_ms=9.0)
    worst = worst_of_ranks(ranks)
    assert (worst["slowest_rank_ms"], worst["slowest_rank"], worst["slowest_kernel_rank"]) == (103.0, 700, 700)


def test_what_is_gathered_is_what_was_given(device):
    """With more ranks: tests/multirank.py, `worst_figures`."""
    own = RankFigures(peak_memory_alloc=0.1 + 0.2, step_time_ms=1e5 / 3, waited_ms=-1e-7)
    assert gather(own, device) == [own]
