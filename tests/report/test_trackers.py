"""wandb and tensorboard: what a run shows there is what metrics.jsonl holds, and how it ends there. tests/pair/
test_program.py reads a whole run back."""

import glob
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest
from conftest import PROGRAM, lines_logged, metrics_of, parse, train, wait_until, words

from harness.base.errors import UserError
from harness.job import endings
from harness.report.log import open_trackers
from harness.report.trackers import Tracker

# ----------------------------------------------------------------------------------------------------------------------
# What they have written, read back


def wandb_records(file: pathlib.Path) -> Iterator:
    """The records of a .wandb file, which is a LevelDB log: blocks of 32 KiB, each record in one or more parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:  # too little room for a part's header: the rest of the block is empty
            position += 2**15 - position % 2**15
            continue
        length, kind = struct.unpack("<4xHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield Record.FromString(parts)
            parts = b""


def as_dict(items) -> dict:
    """Keys and values of a row or a summary in a .wandb file."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def newest_records(folder: pathlib.Path) -> list:
    """The records in the newest .wandb file of a run."""
    return list(wandb_records(max(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)))


def wandb_rows(folder: pathlib.Path) -> list[dict]:
    return [as_dict(record.history.item) for record in newest_records(folder) if record.HasField("history")]


def read_events(folder: pathlib.Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


# ----------------------------------------------------------------------------------------------------------------------
# Trackers on their own


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(endings, "LISTENERS", [])
    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path / "data")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


@pytest.fixture
def opened(offline, device, tmp_path):
    """`opened(log_with, step)`: the trackers of a run in tmp_path that resumes from a step."""

    def start_each(log_with: str, step: int = 0) -> list[Tracker]:
        state = types.SimpleNamespace(step=step, tokens=64 * step)
        run = {"given": {"lr": 1e-3}, "run_id": "abc"}
        trackers = open_trackers(parse(["--log-with", log_with]), tmp_path)
        for tracker in trackers:
            tracker.start(run, state)
        return trackers

    return start_each


@pytest.fixture
def a_second_later(monkeypatch):
    """`a_second_later()`: the clock is a second ahead from now on, as trackers name their files by the second."""

    def go():
        before = time.time
        monkeypatch.setattr(time, "time", lambda: before() + 1)

    return go


def line(step: int, **more) -> dict:
    return {"step": step, "loss": 5.0 / step, "tokens_seen": 64 * step} | more


def test_both_have_the_metrics_of_each_source_over_steps_and_losses_over_tokens(opened, tmp_path):
    sources = ("web", "v1.2-wiki_en", "step")
    trackers = opened("all")
    assert {tracker.name for tracker in trackers} >= {"wandb", "tensorboard"}
    for tracker in trackers:
        for step in (1, 2):
            more = {f"eval_loss/{source}": step + number for number, source in enumerate(sources)}
            tracker.log(line(step, grad_norm=float("nan"), **more, **{"share/web": 0.7}))
        tracker.finish(line(2, step_time_ms=7.0, **more))
        tracker.close(0)
    events = read_events(tmp_path)
    rows = wandb_rows(tmp_path)
    for number, source in enumerate(sources):
        name = f"eval/loss/{source}"
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(1, 1 + number), (2, 2 + number)]
        by_tokens = events.Scalars(f"by_tokens/eval_loss/{source}")
        assert [(event.step, event.value) for event in by_tokens] == [(64, 1 + number), (128, 2 + number)]
        assert [row[name] for row in rows] == [1 + number, 2 + number]
        assert rows[1][f"by_tokens/eval_loss/{source}"] == 2 + number
    assert [(row["train/step"], str(row["train/grad_norm"]), row["data/share/web"]) for row in rows] == [
        (1, "nan", 0.7),
        (2, "nan", 0.7),
    ]
    assert [(event.step, event.value) for event in events.Scalars("final/perf/step_time_ms")] == [(2, 7.0)]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_tensorboard_names_each_run_of_a_sweep_by_its_run(offline, device, tmp_path):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    for name in ("lr-1e-3", "lr-3e-4"):
        (tracker,) = open_trackers(parse(["--log-with", "tensorboard"]), tmp_path / name)
        tracker.start({"given": {}, "run_id": name}, types.SimpleNamespace(step=0, tokens=0))
        tracker.log(line(1))
        tracker.finish(line(1))
        tracker.close(0)
    assert EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload().Runs().keys() == {"lr-1e-3", "lr-3e-4"}


def test_steps_that_are_taken_again_after_a_resume_replace_the_first_ones(opened, a_second_later, tmp_path):
    for step, factor in ((0, 1.0), (2, 10.0)):
        a_second_later()
        kept = [line(number) for number in range(1, step + 1)]  # as the log leaves them before it starts trackers
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
        (tensorboard,) = opened("tensorboard", step)
        for number in (1, 2, 3):
            tensorboard.log(line(step + number, loss=factor * 5 / (step + number)))
        tensorboard.close(143)
    events = read_events(tmp_path)
    assert [event.value for event in events.Scalars("train/loss")] == [5, 2.5, pytest.approx(50 / 3), 12.5, 10]
    by_tokens = [(event.step, event.value) for event in events.Scalars("by_tokens/loss")]
    assert by_tokens == [(64, 5), (128, 2.5), (192, pytest.approx(50 / 3)), (256, 12.5), (320, 10)]


def test_wandb_drops_no_line_of_a_start_that_resumes_from_before_the_last_one(opened, tmp_path):
    (first,) = opened("wandb")
    for step in (1, 2, 3):
        first.log(line(step))
    first.start({"given": {}, "run_id": "abc"}, types.SimpleNamespace(step=1, tokens=64))  # as online: the same run
    for step in (2, 3, 4):
        first.log(line(step, grad_norm=2.0))
    first.close(0)
    rows = wandb_rows(tmp_path)
    again = [row["train/step"] for row in rows if row.get("train/grad_norm") == 2.0]
    assert again == [2, 3, 4] and len({row["_step"] for row in rows}) == len(rows)
    defined = [record.metric for record in newest_records(tmp_path) if record.HasField("metric")]
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in defined}
    assert axes["*"] == "train/step" and axes["by_tokens/*"] == "data/tokens_seen"


def test_the_hint_of_wandb_names_the_folders_of_all_starts_and_none_where_it_is_disabled(
    offline, device, a_second_later, tmp_path, monkeypatch
):
    state, places = types.SimpleNamespace(step=0, tokens=0), []
    for mode in ("offline", "offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        a_second_later()
        (tracker,) = open_trackers(parse(["--log-with", "wandb"]), tmp_path)
        places.append(tracker.start({"given": {}, "run_id": "abc"}, state))
        tracker.close(0)
    pattern = places[0].removeprefix("offline; later: wandb sync ")
    assert places[1] == places[0] and len(glob.glob(pattern)) == 2
    assert places[2] == "disabled, by WANDB_MODE or WANDB_DISABLED: nothing is kept"


@pytest.mark.parametrize("how", ["raises", "does not start"])
def test_a_tracker_that_fails_does_not_end_a_run_and_one_that_does_not_start_does(
    how, offline, arguments, device, tmp_path, monkeypatch, capsys
):
    import wandb

    def fail(*args, **options):
        raise wandb.errors.CommError("timed out after 90.0 sec.\nand more")

    flags = [*arguments, "--num-steps", 3, "--log-interval", 1, "--log-with", "wandb"]
    if how == "raises":
        monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", fail)
        assert train(flags, device) == 0
        printed = capsys.readouterr().out
        assert (
            printed.count("failed     wandb, from step 1 on: timed out after 90.0 sec.; the run continues without") == 1
        )
        assert [line["step"] for line in metrics_of(tmp_path / "out" / "r")] == [1, 2, 3, 3]
    else:
        monkeypatch.setattr(wandb, "init", fail)
        with pytest.raises(UserError) as refused:
            train(flags, device)
        why = "wandb does not start (timed out after 90.0 sec.)"
        assert str(refused.value) == f"--log-with wandb: {why}; --log-with none leaves it out"
        assert refused.value.exit_code == 1


def test_a_server_that_is_not_reached_is_one_line_before_anything_begins(mistake, monkeypatch):
    import wandb

    def no_network(**options):
        raise wandb.errors.AuthenticationError("Failed to authenticate with http://127.0.0.1:9: no route.\nand more")

    monkeypatch.setattr(wandb, "setup", lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online")))
    monkeypatch.setattr(wandb, "login", no_network)
    printed = mistake("--log-with", "wandb", exit_code=1)
    assert printed.startswith("--log-with wandb: no login to wandb (Failed to authenticate with http://127.0.0.1:9: no")
    assert "WANDB_MODE=offline" in printed


def test_a_package_that_is_missing_is_named(mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert mistake("--log-with", "tensorboard").startswith(
        "--log-with tensorboard: needs the package tensorboard; pip install tensorboard, or leave the flag out"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The program


@pytest.mark.slow
def test_wandb_hears_how_a_stopped_program_ends_and_both_have_every_line(tmp_path):
    flags = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --log-interval 1"
    flags += f" --num-steps 100000 --log-with all --run-name r --output-dir {tmp_path}"
    environment = os.environ | {"WANDB_MODE": "offline"}
    with subprocess.Popen(
        [sys.executable, PROGRAM, *words(flags)], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        wait_until(lambda: lines_logged(tmp_path / "r") > 1, [process])
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 143
    records = newest_records(tmp_path / "r")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [143]
    assert [record.HasField("preempting") for record in records].count(True) == 1
    steps = [line["step"] for line in metrics_of(tmp_path / "r")]
    assert [row["train/step"] for row in wandb_rows(tmp_path / "r")] == steps
    events = read_events(tmp_path / "r").Scalars("train/loss")
    assert [event.step for event in events] == steps
