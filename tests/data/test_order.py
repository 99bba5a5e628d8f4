"""The order of a source's sequences: each epoch is a permutation of them, computed number by number."""

import itertools
import tracemalloc
from collections import Counter

import pytest

from harness.data.mixture import SequenceOrder


def epoch_of(order: SequenceOrder, epoch: int = 0) -> list[int]:
    return [order.sequence_at(epoch * order.num_sequences + number) for number in range(order.num_sequences)]


def test_an_epoch_of_any_size_has_each_sequence_once():
    for size in (*range(1, 130), 255, 256, 257, 1009, 1024, 4095, 2**14 + 1):
        for epoch in (0, 3):
            assert sorted(epoch_of(SequenceOrder(size, 42), epoch)) == [*range(size)], size


def test_seed_epoch_and_source_each_give_another_order_and_nothing_else_does():
    orders = [(SequenceOrder(1000, 1, name), epoch) for name in (None, "a", "b") for epoch in (0, 1)]
    orders.append((SequenceOrder(1000, 2), 0))
    epochs = [epoch_of(*order) for order in orders]
    for number, one in enumerate(epochs):
        for other in epochs[:number]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # chance gives 1 of 1,000
    backwards = SequenceOrder(1000, 1, "a")
    assert [backwards.sequence_at(sample) for sample in reversed(range(2000))][::-1] == epochs[2] + epochs[3]


def test_the_order_is_the_one_that_checkpoints_continue_in():
    """Another one would give a resumed run sequences that it has read, without a word."""
    assert epoch_of(SequenceOrder(10, 42)) == [6, 2, 3, 5, 9, 8, 0, 7, 4, 1]
    assert SequenceOrder(10**8, 42, "web").sequence_at(10**9 + 7) == 71_970_921


def test_all_orders_of_a_few_sequences_are_as_frequent_and_neighbours_of_many_are_far_apart():
    counts = Counter(tuple(epoch_of(SequenceOrder(4, seed))) for seed in range(2400))
    assert len(counts) == 24 and min(counts.values()) > 60 and max(counts.values()) < 140  # four sigma around 100
    order = SequenceOrder(10**6, 42)
    found = [order.sequence_at(sample) for sample in range(3000)]
    steps = [abs(a - b) for a, b in itertools.pairwise(found)]
    assert sum(steps) / len(steps) == pytest.approx(10**6 / 3, rel=0.05)
    tenths = Counter(sequence // 10**5 for sequence in found)
    assert all(225 < tenths[tenth] < 375 for tenth in range(10))  # 300 by chance


def test_the_order_of_a_hundred_million_sequences_takes_no_memory():
    tracemalloc.start()
    order = SequenceOrder(10**8, 42)
    for sample in range(0, 10**9, 10**7 + 1):
        assert 0 <= order.sequence_at(sample) < 10**8
    assert tracemalloc.get_traced_memory()[1] < 100_000  # bytes; an array of them has 800 million
    tracemalloc.stop()
