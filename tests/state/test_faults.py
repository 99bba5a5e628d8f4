"""Whatever fails, and wherever a run is killed, the next start goes on as if nothing had been.

Faults at the points of a save and of a start, and what each ending says; tests/faults.py has the machinery.
"""

import gc
import json
import os
import pathlib
import zlib

import faults
import pytest
from conftest import forked
from faults import SAVES, Point, Start


def answer(file: pathlib.Path, function, *arguments) -> None:
    gc.freeze()  # what the forks share
    file.write_text(json.dumps(function(*arguments)))


@pytest.fixture
def in_a_fork(tmp_path):
    """`in_a_fork(function, *arguments)`: what it returns in a process without threads, which can fork."""

    def call(function, *arguments):
        file = tmp_path / "answer.json"
        forked(1, answer, file, function, *arguments)
        return json.loads(file.read_text())

    return call


# ----------------------------------------------------------------------------------------------------------------------
# One fault


def a_few(name: str, fault: str, point: Point) -> bool:
    """Around a rename or a sync a kill and a power cut, at every third other point one of the faults."""
    if name == "a fresh run":
        return fault == "full disk" and point.operation == "mkdir"
    if name == "2 ranks":
        return fault == "error" and point.rank == 1 and point.operation == "fsync"
    if point.operation in ("rename", "fsync"):
        return fault in ("kill before", "power cut, names")
    usable, number = [fault for fault in faults.FAULTS if faults.applies(fault, point)], zlib.crc32(str(point).encode())
    return not faults.in_a_shard(point) and number % 3 == 0 and fault == usable[number // 3 % len(usable)]


@pytest.mark.slow
@pytest.mark.parametrize("name, least", [("a resumed run", 40), ("a fresh run", 5), ("2 ranks", 2)])
def test_after_a_fault_at_any_point_the_next_start_goes_on(in_a_fork, tmp_path, name, least):
    injected, wrong = in_a_fork(faults.enumerate_faults, name, tmp_path / "runs", a_few)
    assert wrong == []
    assert injected >= least


# ----------------------------------------------------------------------------------------------------------------------
# Exit codes


def endings(folder: pathlib.Path) -> dict[str, tuple[int, str]]:
    """{how a start of the program ended: (exit code, its output)}."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(faults.MODEL))
    out, said = folder / "out", {}

    def start(what: str, num_steps: int, flags: str = "", **options) -> None:
        ending = faults.run(Start(f"{SAVES} --num-steps {num_steps} {flags}", **options), out)
        said[what] = (ending.code, ending.output)

    start("done", 4)
    start("nothing to train", 4)
    start("a missed gate", 6, "--min-mfu 99 --peak-tflops 100")
    start("a gate that was missed at the end", 6, "--min-mfu 99 --peak-tflops 100")
    start("a signal", 9, stop=(8, "SIGTERM"))
    start("a signal outside training", 10, stop=(9, "SIGUSR1"))  # a start's first step is not training yet
    start("an export that fails", 10, f"--export {out}/e", fault="error", point=Point(0, "mkdir", ".e.writing", 1))
    start("a save that fails", 12, fault="full disk", point=Point(0, "write", "r/metrics.jsonl", 1))
    start("a loss that is no number", 16, "--lr 1e30 --max-grad-norm 0 --max-skipped 0")
    start("wrong usage", 16, "--dp-replicate-size 2")
    start("another run's checkpoint", 16, "--seed 7")
    newest = out / "r" / "checkpoints" / faults.whole(out)[-1]
    os.truncate(newest / "__0_0.distcp", 10)
    start("a damaged checkpoint", 16, f"--resume {newest}")
    return said


@pytest.mark.slow
def test_exit_codes_are_the_documented_ones(in_a_fork, tmp_path):
    expected = {
        "done": (0, "done       4 steps"),
        "nothing to train": (0, "nothing to train"),
        "a missed gate": (3, "error: acceptance gate missed: --min-mfu"),
        "a gate that was missed at the end": (3, "error: acceptance gate missed: --min-mfu"),
        "a signal": (143, "stopped    by SIGTERM"),
        "a signal outside training": (143, "SIGUSR1 outside training, nothing to save"),
        "an export that fails": (1, "error: --export "),
        "a save that fails": (1, "error: --checkpoint-interval: "),
        "a loss that is no number": (1, "; a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"),
        "wrong usage": (2, "error: --dp-replicate-size 2: "),
        "another run's checkpoint": (2, "error: --seed was 42"),
        "a damaged checkpoint": (2, "error: --resume "),
    }
    found = in_a_fork(endings, tmp_path / "runs")
    assert {what: code for what, (code, _) in found.items()} == {what: code for what, (code, _) in expected.items()}
    starts = json.loads((tmp_path / "runs" / "out" / "r" / "config.json").read_text())["starts"]
    assert [start.get("exit_code") for start in starts] == [0, 0, 3, 3, 143, 143, 1, None, 1]  # one: a full disk
    for what, (code, output) in found.items():
        assert expected[what][1] in output
        assert output.count("train_fsdp.py: error: ") == (code in (1, 2, 3))
        assert "Traceback" not in output
