"""Whatever fails, and wherever a run is killed, the next start resumes as if nothing had happened: faults at the
points of a save and of a start. tests/faults.py has the machinery."""

import gc
import json
import pathlib
import zlib

import faults
import pytest
from conftest import forked
from faults import Point, Start


def answer(file: pathlib.Path, function, *arguments) -> None:
    gc.freeze()  # what the forks share
    file.write_text(json.dumps(function(*arguments)))


def of_a_resumed_run(point: Point) -> list[str]:
    """Around a rename a kill and a power cut, at a sync an error too, at every third other point one of the faults."""
    if point.operation == "fsync":
        return ["kill", "power cut", "error"]
    if point.operation == "rename":
        return ["kill", "power cut"]
    number = zlib.crc32(str(point).encode())
    return [[*faults.FAULTS][number // 3 % len(faults.FAULTS)]] if number % 3 == 0 else []


def of_a_fresh_run(point: Point) -> list[str]:
    return ["full disk"] if point.operation == "mkdir" else []


def of_2_ranks(point: Point) -> list[str]:
    return ["error"] if point.rank == 1 and point.operation == "fsync" else []


ONE, TWO = Start("--batch-size 4 --keep-checkpoints 1"), Start("--batch-size 2 --keep-checkpoints 1", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, resumed, choose, least",
    [(ONE, True, of_a_resumed_run, 40), (ONE, False, of_a_fresh_run, 5), (TWO, False, of_2_ranks, 2)],
    ids=["a resumed run", "a fresh run", "2 ranks"],
)
def test_after_a_fault_at_any_point_the_next_start_continues(tmp_path, start, resumed, choose, least):
    """In a process without threads, which can fork."""
    forked(1, answer, tmp_path / "answer.json", faults.disturb_at_points, start, resumed, tmp_path / "runs", choose)
    injected, wrong = json.loads((tmp_path / "answer.json").read_text())
    assert wrong == []
    assert injected >= least
