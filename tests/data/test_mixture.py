"""Mixtures: sources that continue where they were, shares, and an order that follows from a number."""

import hashlib
import json
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

import utils
from harness.base import UserError
from harness.data.mixture import BLOCK, Mixture, Segment, describe_changes, make_record, read_data_record
from harness.flags import parse_args

WEIGHTS = {"a": 441, "b": 3, "c": 21, "d": 1000, "e": 452, "f": 2, "g": 1, "h": 1000, "i": 1000}


def mixture_of(weights: dict[str, int], seed: int, num_shards: int = 1) -> Mixture:
    fractions = {name: Fraction(weight) for name, weight in weights.items()}
    return Mixture([Segment(0, fractions, dict.fromkeys(weights, Fraction(1)))], seed, num_shards)


def record(
    dataset: str, stages: str = "", before=None, step=0, samples=0, num_shards: int = 1, samples_per_step: int = 8
):
    """What a run of these flags records that begins, or continues from a record after so many steps and samples."""
    settings = parse_args(["--dataset", *dataset.split(), "--num-steps", "100", *stages.split()])
    weights = {source.name: source.weight for source in settings.sources()}
    ones, rules = dict.fromkeys("abcde", Fraction(1)), {name: {} for name in weights}
    return make_record(
        settings=settings,
        specs=rules,
        weights=weights,
        tokens_per_sample=ones,
        samples_per_step=samples_per_step,
        num_shards=num_shards,
        before=before,
        step=step,
        num_samples=samples,
    )


@pytest.mark.parametrize("shards", [1, 7, 24])
def test_a_mixture_that_changes_at_resumes_continues_each_source_at_its_position(shards):
    """Also one that was left out for a while, in a stage as well; and any sample is found by its number alone."""
    run = record("x/a:3 x/b:2 x/c:1", num_shards=shards, samples_per_step=40)
    run = record("x/a:1 x/c:5", "--mixture-stage 0.5:a=1", run, 13, 520, num_shards=shards, samples_per_step=40)
    run = record("x/c:1 x/b:1 x/e:0.001", "--mixture-stage 0.75:e=2,b=1", run, 60, 2400, samples_per_step=40)
    run = read_data_record({"data": json.loads(json.dumps(run.to_json()))})
    assert [segment.first for segment in run.segments] == [0, 520, 2000, 2400, 3000]
    mixture, taken, in_shard = Mixture(run.segments, 42, shards), Counter(), Counter()
    for sample in range(6000):
        name, number = mixture.locate(sample)
        assert number == in_shard[name, sample % shards]
        taken[name] += 1
        in_shard[name, sample % shards] += 1
    assert dict(zip(mixture.names, mixture.counts(6000).tolist(), strict=True)) == taken and set(taken) == set("abce")
    for sample in random.Random(0).sample(range(6000), 40):
        assert Mixture(run.segments, 42, shards).locate(sample) == mixture.locate(sample)


@pytest.mark.parametrize("weights, shards", [({"a": 1, "b": 1}, 8), ({"a": 7, "b": 3}, 10), (WEIGHTS, 1024)])
def test_each_shard_has_about_its_share_of_each_source(weights, shards):
    """Also where a regular order would give all samples of a source to every second shard."""
    samples, total = 1000 * shards, sum(weights.values())
    mixture = mixture_of(weights, 3, shards)
    found = np.array([mixture.count_in_shard(1000, shard) for shard in range(shards)])
    for name, by_shard in zip(mixture.names, found.T, strict=True):
        share = weights[name] / total
        spread = math.sqrt(1000 * share * (1 - share))  # of independent draws
        assert np.abs(by_shard - 1000 * share).max() < 6 * spread + 2, name
    assert mixture.counts(samples).tolist() == found.sum(0).tolist()
    parts = [mixture.counts(samples, rank, 3) for rank in range(3)]
    assert sum(parts).tolist() == found.sum(0).tolist()  # the shares of three ranks


def test_the_order_of_sources_is_the_one_that_checkpoints_continue_in():
    """Another one would give a resumed run sequences that it has read, without a word."""
    mixture = mixture_of({"a": 5, "b": 3, "c": 2}, 42)
    names = "".join(mixture.locate(sample)[0] for sample in range(4 * BLOCK))
    assert names[:24] == "bcaacabbacaabaabbcaabaca"
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "c7795bd108d2c53b"
    assert mixture.locate(10**9 + 7) == ("b", 300_000_002)


def test_another_batch_changes_no_order_and_stages_keep_their_steps():
    """Also one that is given at the resume."""
    both, stage = "x/a:1 x/b:1", "--mixture-stage 0.75:b=1"
    first, without_stage = record(both, stage), record(both)
    then, added = (record(both, stage, before, 50, 400, samples_per_step=4) for before in (first, without_stage))
    assert (then.samples_of_step(50), then.samples_of_step(51)) == (range(392, 400), range(400, 404))
    for run in (then, added):
        assert run.segments[-1].first == run.samples_of_step(76).start == 500
    before, now = Mixture(first.segments, 42), Mixture(then.segments, 42)
    assert [now.locate(sample) for sample in range(500)] == [before.locate(sample) for sample in range(500)]


def test_the_same_shares_written_otherwise_are_the_same_mixture():
    stage = "--mixture-stage 0.5:a=3,b=1"
    first = record("x/a:0.5 x/b:0.3 x/c:0.2", stage)
    for dataset, stages in (
        ("x/a:5 x/b:3 x/c:2", stage),
        ("x/c:20 x/a:50 x/b:30", "--mixture-stage .50:a=0.75,b=0.25,c=0"),
    ):
        now = record(dataset, stages, first, 25, 200)
        assert now.segments == first.segments and describe_changes(first, now, 200) == []
    other = record("x/a:5 x/b:3 x/c:3", stage, first, 25, 200)
    assert other.segments != first.segments and describe_changes(first, other, 200)[0].startswith("mixture a ")
    later = record("x/a:5 x/b:3 x/c:2", "--mixture-stage 0.6:a=3,b=1", first, 25, 200)
    assert describe_changes(first, later, 200) == ["later stages of the mixture"]


@pytest.mark.parametrize("sources, within", [(3, 1), (12, 2), (84, 3)])
def test_each_source_is_within_a_few_samples_of_its_share_after_any_number_of_blocks(sources, within):
    generator = random.Random(sources)
    for largest in (1, 10, 1000):  # weights that are equal, alike and very different
        weights = {f"s{number}": generator.randint(1, largest) ** 2 for number in range(sources)}
        (segment,) = mixture_of(weights, 42).segments
        for blocks in range(1, 20):
            for name, count in segment.divide(blocks * BLOCK).items():
                assert abs(count - blocks * BLOCK * weights[name] / sum(weights.values())) <= within


def test_a_mixture_of_a_library_ends_after_its_length(tmp_path):
    for name, tokens in (("a", 170), ("b", 90)):
        np.save(tmp_path / f"{name}.npy", np.arange(tokens, dtype=np.uint16))
    mixed = utils.get_dataset(None, 8, dataset=[f"{tmp_path}/a.npy:1", f"{tmp_path}/b.npy:1"], vocab_size=1536)
    assert len([*mixed]) == len(mixed) == 42
    for outside in (-1, len(mixed)):
        with pytest.raises(IndexError):
            mixed[outside]
    by_size = utils.get_dataset(None, 8, dataset=[tmp_path / "a.npy", tmp_path / "b.npy"], vocab_size=1536)
    assert len(by_size) == 21 + 11
    with pytest.raises(UserError, match="b has weight 0 in the whole run"):  # as a run is refused
        utils.get_dataset(None, 8, dataset=[f"{tmp_path}/a.npy:1", f"{tmp_path}/b.npy:0"], vocab_size=1536)
