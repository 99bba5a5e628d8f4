"""Mixtures: exact shares after any number of samples, and an order that is a function of the sample and the history."""

import itertools
import json
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from harness.data.batches import RankBatches, TrainingData
from harness.data.mixture import (
    MAX_WEIGHT,
    DataRecord,
    Mixture,
    Segment,
    StepSize,
    as_integers,
    begin_history,
    describe_changes,
    floor_sum,
    read_record,
    record_of_run,
    renamed,
)
from harness.data.windows import PackedDataset
from harness.flags import parse_args
from harness.flags.sources import parse_stage

SEQ_LEN = 4
WEIGHTS = [
    {"a": 7, "b": 3},
    {"a": 1, "b": 1},
    {"a": 5, "b": 3, "c": 2},
    {"a": 999, "b": 1},
    {"a": 70, "b": 20, "c": 9, "d": 1},
    {"a": 441, "b": 3, "c": 21, "d": 1000, "e": 452, "f": 2, "g": 1, "h": 1000, "i": 1000},
]


def segment(first: int, **weights) -> Segment:
    fractions = {name: Fraction(weight) for name, weight in weights.items()}
    return Segment(first, fractions, dict.fromkeys(weights, Fraction(1)))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_source_is_within_a_sample_or_two_of_its_share_after_any_number_of_samples(weights):
    mixture, total, counts = Mixture([segment(0, **weights)]), sum(weights.values()), Counter()
    limit = 1 if len(weights) <= 3 else 2
    for sample in range(5000):
        name, lane, number = mixture.locate(sample)
        assert (lane, number) == (0, counts[name])
        counts[name] += 1
        for source, weight in weights.items():
            assert abs(counts[source] - weight * (sample + 1) / total) < limit
    assert mixture.counts(5000) == counts


def test_shares_stay_exact_far_on():
    weights = {"a": Fraction("0.123456"), "b": Fraction("0.3"), "c": Fraction(1, 3)}
    mixture = Mixture([segment(0, **weights)])
    for samples in (10**9, 10**12 + 7):
        for name, count in mixture.counts(samples).items():
            assert abs(count - samples * weights[name] / sum(weights.values())) < 1


def test_huge_weights_are_rounded_and_small_ones_stay():
    weights = {"a": Fraction(10**15 + 7), "b": Fraction(1, 10**9), "c": Fraction(10**15), "d": Fraction(0)}
    integers = as_integers(weights)
    assert sum(integers.values()) <= MAX_WEIGHT + 3 and integers["b"] == 1 and "d" not in integers
    assert integers["a"] / integers["c"] == pytest.approx(float(weights["a"] / weights["c"]), rel=1e-8)


def random_history(generator: random.Random) -> list[Segment]:
    names = "abcdefg"[: generator.randint(1, 7)]
    history, first = [], 0
    for _ in range(generator.randint(1, 4)):
        chosen = generator.sample(names, generator.randint(1, len(names)))
        history.append(segment(first, **{name: Fraction(generator.randint(1, 1000), 1000) for name in chosen}))
        first += generator.randint(1, 300)
    return history


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_a_history_agree_sample_by_sample(seed):
    lanes, counts = (1, 4, 7, 24)[seed % 4], Counter()
    mixture = Mixture(random_history(random.Random(seed)), lanes)
    for sample in range(900):
        name, lane, number = mixture.locate(sample)
        assert lane == sample % lanes and number == counts[name, lane]
        if sample % 37 == 0:
            for source in mixture.names:
                assert mixture.counts(sample)[source] == sum(counts[source, lane] for lane in range(lanes))
        counts[name, lane] += 1


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("lanes", [2, 8, 64, 1024])
def test_in_lanes_each_source_is_within_six_samples_of_its_share_and_read_alike_in_each(weights, lanes):
    mixture, total, counts = Mixture([segment(0, **weights)], lanes), sum(weights.values()), Counter()
    for sample in range(3000):
        counts[mixture.locate(sample)[0]] += 1
        for source, weight in weights.items():
            assert abs(counts[source] - weight * (sample + 1) / total) < 6
    turns = 10**6
    for source, weight in weights.items():
        for lane in range(0, lanes, 37):
            assert abs(mixture.count(source, lane, turns * lanes) - turns * weight / total) < 12


@pytest.mark.parametrize("seed", range(50))
def test_sums_of_floors_are_those_of_a_loop(seed):
    draw = random.Random(seed)
    count, divisor, step, start = (draw.randint(1, most) for most in (60, 1000, 5000, 5000))
    assert floor_sum(count, divisor, step, start) == sum((start + i * step) // divisor for i in range(count))


def test_stages_begin_at_the_step_nearest_to_their_share_of_the_planned_run():
    stages = [parse_stage("0.5:a=1,b=1"), parse_stage("0.81:b=1")]
    weights = {"a": Fraction(1), "b": Fraction(0)}
    history = begin_history(weights, dict.fromkeys("ab", Fraction(1)), stages, num_steps=100, samples_per_step=8)
    assert [(part.first, part.shares()) for part in history] == [
        (0, {"a": 1.0, "b": 0.0}),
        (400, {"a": 0.5, "b": 0.5}),
        (648, {"b": 1.0}),
    ]


def test_a_stage_given_at_a_resume_begins_at_its_step_though_steps_before_it_had_other_sizes():
    first = recorded("--dataset x/a:1 x/b:1")
    settings = parse_args(["--dataset", "x/a:1", "x/b:1", "--mixture-stage", "0.75:b=1", "--num-steps", "100"])
    ones = dict.fromkeys("ab", Fraction(1))
    then = record_of_run(settings, {"a": {}, "b": {}}, ones, ones, 4, 1, first, step=50, samples=400)
    assert then.history[-1].first == then.samples_of_step(76).start == 500


# ---- The samples of ranks --------------------------------------------------------------------------------------------


def data_of(history: list[Segment], lengths: dict[str, int], plain: str | None = None) -> TrainingData:
    """Sources whose tokens say where they come from: 1,000 x (number of the source + 1) + window."""
    sources = {}
    for number, (name, length) in enumerate(lengths.items(), 1):
        tokens = np.repeat(np.arange(length, dtype=np.uint32), SEQ_LEN) + 1000 * number
        sources[name] = PackedDataset(np.append(tokens, tokens[-1]), SEQ_LEN)
    record = DataRecord({name: {} for name in sources}, plain, 1, {}, history, [StepSize(0, 0, 24)])
    return TrainingData(sources, record, SEQ_LEN, seed=5)


def samples_seen(data: TrainingData, world: int, batch_size: int, accumulation: int, first: int, count: int) -> list:
    """The first tokens of `count` samples from `first` on, as so many ranks see them."""
    seen = {}
    for rank in range(world):
        batches = iter(RankBatches(data, batch_size, accumulation, rank, world, first))
        for microbatch in range(count // (world * batch_size)):
            windows = next(batches)["input_ids"][:, 0].tolist()
            begin = first + (microbatch * world + rank) * batch_size
            seen |= dict(zip(range(begin, begin + batch_size), windows, strict=True))
    return [seen[sample] for sample in range(first, first + count)]


@pytest.mark.parametrize("world, batch_size, accumulation", [(1, 24, 1), (2, 3, 4), (3, 8, 1), (4, 2, 3), (8, 1, 3)])
def test_ranks_batches_and_resumes_see_the_same_samples(world, batch_size, accumulation):
    history = [segment(0, a=7, b=3), segment(48, a=1, b=1, c=1)]
    data = data_of(history, {"a": 20, "b": 9, "c": 30})
    expected = samples_seen(data, 1, 1, 1, 0, 240)
    assert samples_seen(data, world, batch_size, accumulation, 0, 240) == expected
    for first in (24, 48, 96):
        assert samples_seen(data, world, batch_size, accumulation, first, 120) == expected[first : first + 120]


def test_workers_divide_the_microbatches_in_turn():
    data = data_of([segment(0, a=1, b=2)], {"a": 20, "b": 9})
    batches = RankBatches(data, 2, 3, rank=1, world_size=2)
    whole = [batch["input_ids"].tolist() for batch in itertools.islice(batches.batches_of(0, 1), 12)]
    for workers in (2, 3, 5):
        readers = [batches.batches_of(worker, workers) for worker in range(workers)]
        assert [next(readers[n % workers])["input_ids"].tolist() for n in range(12)] == whole


def test_a_source_is_read_whole_before_any_of_it_repeats():
    data = data_of([segment(0, a=1, b=3)], {"a": 10, "b": 7})
    seen = samples_seen(data, 1, 4, 1, 0, 80)
    of_a, of_b = ([token for token in seen if token // 1000 == number] for number in (1, 2))
    for epoch in range(2):
        assert len(set(of_a[10 * epoch : 10 * (epoch + 1)])) == 10
    for epoch in range(8):
        assert len(set(of_b[7 * epoch : 7 * (epoch + 1)])) == 7
    assert data.epochs(80) == {"a": 2.0, "b": 60 / 7}
    assert data.figures(80, 80 * SEQ_LEN) == {"share/a": 0.25, "share/b": 0.75, "epochs/a": 2.0, "epochs/b": 60 / 7}


def test_the_length_of_a_mixture_is_where_each_source_was_read_once_though_samples_have_other_numbers_of_tokens():
    ones, per_sample = {"a": Fraction(1), "b": Fraction(1)}, {"a": Fraction(1), "b": Fraction(4)}
    data = data_of([Segment(0, ones, per_sample)], {"a": 10, "b": 6})
    assert len(data) == 30
    assert data.epochs(30) == {"a": 2.4, "b": 1.0}


def test_a_source_goes_on_where_it_was_when_others_come_and_go():
    alone = samples_seen(data_of([segment(0, a=1)], {"a": 50}, plain="a"), 1, 1, 1, 0, 50)
    history = [segment(0, a=1), segment(10, a=1, b=1), segment(30, a=1)]
    mixed = samples_seen(data_of(history, {"a": 50, "b": 9}, plain="a"), 1, 1, 1, 0, 60)
    assert [token for token in mixed if token < 2000] == alone


# ---- What a checkpoint records ---------------------------------------------------------------------------------------


def recorded(flags: str, before: DataRecord | None = None, step: int = 0, samples: int = 0, **sources) -> DataRecord:
    settings = parse_args([*flags.split(), "--num-steps", "100"])
    weights = {source.name: source.weight or Fraction(1) for source in settings.sources()}
    rules = {name: sources.get(name, {"dataset": "x"}) for name in weights}
    per_sample = dict.fromkeys(weights, Fraction(SEQ_LEN))
    return record_of_run(settings, rules, weights, per_sample, 8, 1, before, step, samples)


def test_a_record_survives_json_and_a_resume_without_changes():
    first = recorded("--dataset x/a:0.7 x/b:0.3 --mixture-stage 0.5:b=1")
    again = recorded("--dataset x/a:0.70 x/b:0.3 --mixture-stage 0.5:b=1", first, step=10, samples=80)
    assert read_record({"data": json.loads(json.dumps(first.record()))}) == first == again
    assert describe_changes(first, again, 80) == []


def test_a_longer_run_keeps_the_samples_at_which_its_stages_begin():
    first = recorded("--dataset x/a:0.7 x/b:0.3 --mixture-stage 0.5:b=1")
    settings = parse_args(["--dataset", "x/a:0.7", "x/b:0.3", "--mixture-stage", "0.5:b=1", "--num-steps", "1000"])
    rules = {name: {"dataset": "x"} for name in "ab"}
    ones = dict.fromkeys("ab", Fraction(1))
    longer = record_of_run(settings, rules, ones, ones, 8, 1, first, 100, 800)
    assert [part.first for part in longer.history] == [0, 400]


def test_other_weights_hold_from_the_resumed_sample_on_and_are_named():
    first = recorded("--dataset x/a:0.7 x/b:0.3")
    then = recorded("--dataset x/a:0.5 x/c:0.5", first, step=10, samples=80)
    assert [(part.first, part.shares()) for part in then.history] == [
        (0, {"a": 0.7, "b": 0.3}),
        (80, {"a": 0.5, "c": 0.5}),
    ]
    assert describe_changes(first, then, 80) == [
        "source c added",
        "source b removed",
        "mixture a 70 %, b 30 % -> a 50 %, c 50 %",
    ]


def test_a_removed_source_is_still_known_after_further_resumes():
    record = recorded("--dataset a=x:1 b=y:1", b={"dataset": "y"})
    for step in (10, 20):
        record = recorded("--dataset a=x:1", record, step, 24 * step)
    assert record.removed == {"b": {"dataset": "y"}}
    assert not recorded("--dataset a=x:1 b=y:1", record, 30, 720, b={"dataset": "y"}).removed


def test_steps_of_other_sizes_are_recorded():
    first = recorded("--dataset x/a:1 x/b:1")
    settings = parse_args(["--dataset", "x/a:1", "x/b:1"])
    ones = dict.fromkeys("ab", Fraction(1))
    then = record_of_run(settings, {"a": {}, "b": {}}, ones, ones, 4, 1, first, step=10, samples=80)
    assert [then.samples_of_step(step) for step in (1, 10, 11, 12)] == [
        range(0, 8),
        range(72, 80),
        range(80, 84),
        range(84, 88),
    ]


def test_a_source_that_was_moved_has_its_record_under_its_new_name():
    moved = renamed(recorded("--dataset x/a"), "b")
    assert (list(moved.sources), moved.plain, list(moved.history[0].weights)) == (["b"], "b", ["b"])
