"""Every record that a checkpoint holds is read back as it was written."""

import dataclasses
import json

import pytest
from conftest import parse
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from harness import base
from harness.base import saved
from harness.flags import record_flags
from harness.state.train_state import Counters, TrainState
from utils import PerformanceTracker

numbers, texts = some.floats(allow_nan=False, allow_infinity=False), some.text()
places = some.tuples(some.integers(0, 2**40), some.integers(0, 2**40), some.integers(0, 2**40))
BY_TYPE = {
    int: some.integers(0, 2**60),
    float: numbers,
    str: texts,
    list[int]: some.lists(some.integers(0)),
    list[float]: some.lists(numbers),
    dict[str, float]: some.dictionaries(texts, numbers),
    dict | None: some.none() | some.dictionaries(texts, texts | some.integers()),
    dict[str, dict[int, tuple]]: some.dictionaries(texts, some.dictionaries(some.integers(0, 30), places)),
}
records = some.builds(Counters, **{field.name: BY_TYPE[field.type] for field in dataclasses.fields(Counters)})


def written(tmp_path_factory, content: dict) -> dict:
    """A manifest, read back from a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / saved.MANIFEST).write_text(saved.seal({"format": saved.FORMAT} | content))
    return saved.read_manifest(folder)


@given(counters=records)
def test_counters_are_read_back_as_they_were(tmp_path_factory, counters):
    again, branch = Counters(), Counters()
    manifest = written(tmp_path_factory, dataclasses.asdict(counters))
    again.take(manifest, of_another_run=False)
    assert again == counters
    before = dataclasses.asdict(branch)
    branch.take(written(tmp_path_factory, dataclasses.asdict(counters)), of_another_run=True)
    for field in dataclasses.fields(Counters):
        kept = before[field.name] if field.metadata else getattr(counters, field.name)
        assert getattr(branch, field.name) == kept, field.name


@pytest.mark.parametrize(
    "flags", ["--demo", "--betas 0.8 0.9 --dataset a.txt:0.7 b.txt:0.3 --sample-prompt Once --lr 1e-3"]
)
def test_flags_are_read_back_as_they_were(tmp_path_factory, flags):
    settings = parse(flags.split())
    record = record_flags(settings)
    manifest = written(tmp_path_factory, {"step": 1} | record)
    assert manifest["given"].keys() == record["given"].keys()
    for name, value in manifest["flags"].items():
        assert value == json.loads(json.dumps(getattr(settings, name), default=str)), name


def test_a_stream_that_several_ranks_read_goes_on_from_the_earliest_of_their_places(monkeypatch):
    state = TrainState(nn.Linear(1, 1), tracker=PerformanceTracker())
    state.take({"positions": {"web": {"0": [9, 0, 1], "1": [8, 0, 1], "2": [7, 0, 1]}}}, of_another_run=False)
    state.move_positions({"web": {0: (60, 0, 5), 1: (50, 0, 4)}})
    other = {("web", 0): (40, 0, 3), ("code", 0): (5, 0, 2)}
    monkeypatch.setattr(base, "of_all_ranks", lambda mine: [mine, other])
    shared = {"web": {0: (40, 0, 3), 1: (50, 0, 4), 2: (7, 0, 1)}, "code": {0: (5, 0, 2)}}
    assert state.counters()["positions"] == shared
