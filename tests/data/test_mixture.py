"""Mixtures: exact shares after any number of samples, and an order that is a function of the sample and the history."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from harness.data.batches import RankBatches
from harness.data.data_record import (
    DataRecord,
    StepSize,
    asked_weights,
    describe_changes,
    read_record,
    record_of_run,
    renamed,
)
from harness.data.mixture import MAX_WEIGHT, Mixture, Segment, as_integers, begin_history, change_history, read_history
from harness.data.training_data import TrainingData
from harness.data.windows import PackedDataset
from harness.flags.parser import parse_args
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
        name, number = mixture.locate(sample)
        assert number == counts[name]
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
    weights = [Fraction(10**15 + 7), Fraction(1, 10**9), Fraction(10**15)]
    integers = as_integers(weights)
    assert sum(integers) <= MAX_WEIGHT and min(integers) == 1
    assert integers[0] / integers[2] == pytest.approx(float(weights[0] / weights[2]), rel=1e-8)


def random_history(generator: random.Random) -> list[Segment]:
    names = "abcdefg"[: generator.randint(1, 7)]
    history, first = [], 0
    for _ in range(generator.randint(1, 4)):
        chosen = generator.sample(names, generator.randint(1, len(names)))
        history.append(segment(first, **{name: Fraction(generator.randint(1, 1000), 1000) for name in chosen}))
        first += generator.randint(1, 300)
    return history


@pytest.mark.parametrize("seed", range(20))
def test_counts_numbers_and_lanes_of_a_history_agree_sample_by_sample(seed):
    lanes, counts = (1, 4, 7, 24)[seed % 4], Counter()
    mixture = Mixture(random_history(random.Random(seed)), lanes)
    sources = mixture.sources_between(0, 900)
    expected = np.zeros((len(mixture.names), lanes), int)
    for sample in range(900):
        name, number = mixture.locate(sample)
        assert number == counts[name] and mixture.names[sources[sample]] == name
        if sample % 37 == 0:
            assert +mixture.counts(sample) == counts
            assert (mixture.lane_counts(sample, chunk=100) == expected).all()
        counts[name] += 1
        expected[sources[sample], sample % lanes] += 1


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("lanes", [2, 8, 12, 64])
def test_each_lane_of_a_streamed_source_is_read_as_often_as_any_other_and_shares_stay_exact(weights, lanes):
    mixture, total = Mixture([segment(0, **weights)], lanes), sum(weights.values())
    samples = 4000 * lanes
    for source, counts in zip(mixture.names, mixture.lane_counts(samples), strict=True):
        share = samples * weights[source] / total / lanes
        assert np.abs(counts - share).max() <= 1 + 5 * share**0.5  # as if drawn
    picks, numbers = mixture.sources_between(0, 3000), np.arange(1, 3001)
    for source, name in enumerate(mixture.names):
        assert np.abs(np.cumsum(picks == source) - numbers * weights[name] / total).max() < 6


def test_a_history_survives_its_record():
    history = random_history(random.Random(3))
    assert read_history([part.record() for part in history]) == history


def test_stages_begin_at_the_step_nearest_to_their_share_of_the_planned_run():
    stages = [parse_stage("0.5:a=1,b=1"), parse_stage("0.81:b=1")]
    weights = {"a": Fraction(1), "b": Fraction(0)}
    history = begin_history(weights, dict.fromkeys("ab", Fraction(1)), stages, num_steps=100, samples_per_step=8)
    assert [(part.first, part.shares()) for part in history] == [
        (0, {"a": 1.0, "b": 0.0}),
        (400, {"a": 0.5, "b": 0.5}),
        (648, {"b": 1.0}),
    ]


def test_a_change_replaces_what_was_planned_and_keeps_what_was():
    stages = [parse_stage("0.5:b=1")]
    first = begin_history({"a": Fraction(1)}, dict.fromkeys("ab", Fraction(1)), stages, 10, 4)
    now = begin_history({"a": Fraction(3)}, dict.fromkeys("ab", Fraction(1)), stages, 20, 4, steps_before=3, first=12)
    changed = change_history(first, now)
    assert [part.first for part in changed] == [0, 12, 40]
    at_once = begin_history({"a": Fraction(3)}, dict.fromkeys("ab", Fraction(1)), [], 20, 4, steps_before=5, first=20)
    assert [(part.first, list(part.weights)) for part in change_history(first, at_once)] == [(0, ["a"]), (20, ["a"])]
    late = begin_history({"a": Fraction(3)}, dict.fromkeys("ab", Fraction(1)), stages, 20, 4, steps_before=15, first=60)
    assert [(part.first, list(part.weights)) for part in change_history(changed, late)][2:] == [
        (40, ["b"]),
        (60, ["b"]),
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
    return TrainingData(sources, Mixture(history), record, SEQ_LEN, seed=5)


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


def test_one_source_alone_has_the_order_that_versions_before_mixtures_gave_it():
    seen = samples_seen(data_of([segment(0, a=1)], {"a": 20}, plain="a"), 1, 1, 1, 0, 60)
    expected = [np.random.Generator(np.random.PCG64([5, epoch])).permutation(20) + 1000 for epoch in range(3)]
    assert seen == np.concatenate(expected).tolist()


def test_each_epoch_and_each_source_of_the_same_length_has_an_order_of_its_own():
    data = data_of([segment(0, a=1, b=1)], {"a": 50, "b": 50})
    seen = np.array(samples_seen(data, 1, 1, 1, 0, 200))
    orders = [seen[seen // 1000 == number] % 1000 for number in (1, 2)]
    epochs = [tuple(order[first : first + 50]) for order in orders for first in (0, 50)]
    assert len(set(epochs)) == 4 and {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(50))}


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
    assert read_record({"data": first.record()}) == first == again
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


def test_a_checkpoint_of_a_version_before_mixtures_has_one_source_in_one_stream():
    flags = {"dataset": "/data/a.jsonl", "batch_size": 2, "gradient_accumulation_steps": 3}
    manifest = {"flags": flags, "world_size": 4, "step": 5, "samples": 120, "dataset": "f", "held_out": None}
    record = read_record(manifest)
    assert (record.sources, record.plain, record.streams) == ({"a": {"dataset": "f", "held_out": None}}, "a", 1)
    assert record.samples_of_step(6) == range(120, 144)
    assert asked_weights({"a": None}, None) == record.asked
    moved = renamed(record, "b")
    assert (list(moved.sources), moved.plain, list(moved.history[0].weights)) == (["b"], "b", ["b"])
