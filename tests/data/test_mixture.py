"""Mixtures: exact shares after any number of samples, and an order that is a function of the sample and the history."""

import random
from collections import Counter
from fractions import Fraction

import pytest

from harness.data.mixture import Mixture, Segment, describe_changes, record_of_run
from harness.flags import parse_args

WEIGHTS = {"a": 441, "b": 3, "c": 21, "d": 1000, "e": 452, "f": 2, "g": 1, "h": 1000, "i": 1000}


def segment(first: int, **weights) -> Segment:
    fractions = {name: Fraction(weight) for name, weight in weights.items()}
    return Segment(first, fractions, dict.fromkeys(weights, Fraction(1)))


def random_history(generator: random.Random) -> list[Segment]:
    names = "abcdefg"[: generator.randint(1, 7)]
    history, first = [], 0
    for _ in range(generator.randint(1, 4)):
        chosen = generator.sample(names, generator.randint(1, len(names)))
        history.append(segment(first, **{name: Fraction(generator.randint(1, 1000), 1000) for name in chosen}))
        first += generator.randint(1, 300)
    return history


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("weights, lanes", [({"a": 7, "b": 3}, 8), ({"a": 999, "b": 1}, 64), (WEIGHTS, 1024)])
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


def test_a_stage_given_at_a_resume_begins_at_its_step_though_steps_before_it_had_other_sizes():
    def record(stages: list[str], samples_per_step: int, *before):
        settings = parse_args(["--dataset", "x/a:1", "x/b:1", "--num-steps", "100", *stages])
        ones, rules = dict.fromkeys("ab", Fraction(1)), {"a": {}, "b": {}}
        return record_of_run(settings, rules, ones, ones, samples_per_step, 1, *before)

    then = record(["--mixture-stage", "0.75:b=1"], 4, record([], 8), 50, 400)
    assert then.history[-1].first == then.samples_of_step(76).start == 500


def test_the_same_shares_written_otherwise_are_the_same_mixture():
    def record(dataset: str, stages: str = "", *before):
        settings = parse_args(["--dataset", *dataset.split(), "--num-steps", "100", *stages.split()])
        weights = {source.name: source.weight for source in settings.sources()}
        ones, rules = dict.fromkeys("abc", Fraction(1)), {name: {} for name in "abc"}
        return record_of_run(settings, rules, weights, ones, 8, 1, *before)

    stage = "--mixture-stage 0.5:a=3,b=1"
    first = record("x/a:0.5 x/b:0.3 x/c:0.2", stage)
    for dataset, stages in (
        ("x/a:5 x/b:3 x/c:2", stage),
        ("x/c:20 x/a:50 x/b:30", "--mixture-stage .50:a=0.75,b=0.25,c=0"),
    ):
        now = record(dataset, stages, first, 25, 200)
        assert now.history == first.history and describe_changes(first, now, 200) == []
    other = record("x/a:5 x/b:3 x/c:3", stage, first, 25, 200)
    assert other.history != first.history and describe_changes(first, other, 200)
