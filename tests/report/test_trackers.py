"""wandb and tensorboard: every figure has its place, every row is there at once, and every way to end is told."""

import functools
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from subprocess import DEVNULL
from unittest.mock import Mock

import psutil
import pytest
import torch
from conftest import PROGRAM, metrics_of, parse, slow_case, words
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.hparams import api_pb2, metadata
from test_program import as_dict, read_events, wandb_records
from test_tracker import FLOPS, TOKENS

import utils
from harness.base.errors import UserError
from harness.job import endings
from harness.model.flops import DocumentFlops
from harness.plan import own_plan
from harness.report import figures, tensorboard_tracker, tracker_rows, trackers, wandb_tracker
from harness.report.figure_list import FIGURES
from harness.report.figures import figures_of_all_ranks, memory_figures

TINY = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --sample-tokens 2 --log-interval 1"
CONFIG = {"flags": {**vars(parse([])), "betas": [0.9, 0.95]}}
CONFIG |= {"versions": {"torch": "2.13.0"}, "world_size": 1, "gpu": None, "commit": None, "run_id": "abc", "starts": []}


def written(folder) -> list:
    """The records in the newest .wandb file of a run."""
    return list(wandb_records(max(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)))


def rows(folder) -> list[dict]:
    return [as_dict(record.history.item) for record in written(folder) if record.HasField("history")]


def exit_codes(folder) -> list[int]:
    return [record.exit.exit_code for record in written(folder) if record.HasField("exit")]


def status(logdir) -> str:
    """What the tab HPARAMS says of a run's end."""
    content = read_events(logdir / "summary").PluginTagToContent(metadata.PLUGIN_NAME)
    if metadata.SESSION_END_INFO_TAG not in content:
        return "STATUS_RUNNING"
    ended = metadata.parse_session_end_info_plugin_data(content[metadata.SESSION_END_INFO_TAG])
    return api_pb2.Status.Name(ended.status)


def line(step: int, **more) -> dict:
    return {"step": step, "loss": 5.0 / step, "tokens_seen": 64 * step} | more


# ----------------------------------------------------------------------------------------------------------------------
# Groups


def test_every_figure_of_metrics_jsonl_has_its_entry(monkeypatch, device):
    options = {"num_gpus": 2, "peak_tflops": 100, "document_flops": DocumentFlops(1, 1)}
    clock = utils.PerformanceTracker(warmup_steps=0, **options)
    keys = {"loss", "eval_loss", "grad_norm", "learning_rate", "tokens_seen", "padding_percent", "skipped_steps"}
    keys |= {"router_loss", "expert_load_max"}
    keys |= {"eval_loss/SOURCE", "eval_loss_ema", "eval_loss_ema/SOURCE", "share/SOURCE", "epochs/SOURCE"}
    speed = clock.step(TOKENS, FLOPS)
    stats = dict.fromkeys(("active_bytes.all.peak", "allocated_bytes.all.peak", "reserved_bytes.all.peak"), 1)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    memory = memory_figures(types.SimpleNamespace(type="cuda"))
    ranks = [figures.RankFigures(**memory, step_time_ms=9, data_wait_percent=1, waited_ms=2)] * 2
    keys |= {*figures.worst_of_ranks(ranks)}
    state = types.SimpleNamespace(productive_seconds=lambda: 1, elapsed=2, tracker=clock)
    keys |= {*figures_of_all_ranks(speed, state, device, waited_ms=0.0)}
    keys |= {*figures_of_all_ranks(clock.summary(), state, device, waited_ms=0.0)}
    plan = {"memory_gib": {"total": 1, "reserved": 2}, "step_time_ms": 3}
    monkeypatch.setattr(own_plan, "read_plan", lambda process, patience: (plan, ""))
    keys |= {*own_plan.predicted_figures(types.SimpleNamespace(poll=lambda: 0))}
    assert keys == {figure.key for figure in FIGURES} - {"step"}


def test_a_figure_without_an_entry_is_shown_all_the_same():
    assert tracker_rows.grouped({"step": 3, "loss": 1.5, "new": 2}) == {"train/loss": 1.5, "other/new": 2}


def test_the_loss_of_a_source_is_shown_over_tokens_too_and_its_share_is_not():
    shown = tracker_rows.by_tokens({"loss": 2.0, "eval_loss/web": 3.0, "share/web": 0.5, "new/web": 1})
    assert shown == {"by_tokens/loss": 2.0, "by_tokens/eval_loss/web": 3.0}


# ----------------------------------------------------------------------------------------------------------------------
# One run's trackers, in this process


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """`begin(log_with, step)`: the trackers of a run in tmp_path, from a step on."""
    for name, value in {"MODE": "offline", "SILENT": "true", "DATA_DIR": str(tmp_path / "data")}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr(endings, "LISTENERS", [])
    monkeypatch.setattr(trackers, "say", print)

    def start(log_with, step=0):
        state = types.SimpleNamespace(step=step, tokens=64 * step, run_id="abc")
        return trackers.Trackers(parse(["--log-with", log_with]), tmp_path, state, CONFIG)

    return start


def end(exit_code, monkeypatch) -> None:
    monkeypatch.setattr(endings, "ENDING", [])
    endings.announce(exit_code)
    endings.LISTENERS.clear()


def test_a_row_is_in_the_files_before_the_run_ends_so_that_a_kill_leaves_it(begin, tmp_path, monkeypatch):
    shown = begin("all")
    story = {"prompt": "Once", "text": "Once there was"}
    for step in (1, 2):
        shown.log(line(step, grad_norm=float("nan")), [story])
    assert [event.step for event in read_events(tmp_path / "train_fsdp").Scalars("train/loss")] == [1, 2]
    deadline = time.monotonic() + 300
    while len(rows(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = [(row["_step"], row["train/loss"], str(row["train/grad_norm"])) for row in rows(tmp_path)]
    assert seen == [(1, 5.0, "nan"), (2, 2.5, "nan")]
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert sorted(row for table in tables for row in table["data"]) == [[1, *story.values()], [2, *story.values()]]
    assert {(*table["columns"],) for table in tables} == {("step", "prompt", "text")}
    assert (exit_codes(tmp_path), status(tmp_path / "train_fsdp")) == ([], "STATUS_RUNNING")
    end(1, monkeypatch)
    assert (exit_codes(tmp_path), status(tmp_path / "train_fsdp")) == ([1], "STATUS_FAILURE")


def test_both_trackers_have_the_figures_of_each_source_under_its_name(begin, tmp_path, monkeypatch):
    shown, sources = begin("all"), ("web", "v1.2-wiki_en", "step")
    for step in (1, 2):
        more = {f"eval_loss/{source}": step + number for number, source in enumerate(sources)}
        shown.log(line(step, eval_loss=1.5, **more, **{"share/web": 0.7}), [])
    shown.settle()
    shown.summarize(line(2, **more))
    events = read_events(tmp_path / "train_fsdp")
    for number, source in enumerate(sources):
        name = f"eval/loss/{source}"
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(1, 1 + number), (2, 2 + number)]
        over_tokens = read_events(tmp_path / "train_fsdp" / "by_tokens").Scalars(f"by_tokens/eval_loss/{source}")
        assert [(event.step, event.value) for event in over_tokens] == [(64, 1 + number), (128, 2 + number)]
        assert [row[name] for row in rows(tmp_path)] == [1 + number, 2 + number]
        assert rows(tmp_path)[1][f"by_tokens/eval_loss/{source}"] == 2 + number
    assert [row["data/share/web"] for row in rows(tmp_path)] == [0.7, 0.7]
    end(0, monkeypatch)


def test_a_run_on_several_sources_is_compared_by_the_words_of_its_flag():
    flags = CONFIG["flags"] | {"dataset": ["web=a.jsonl:0.7", "b.bin:0.3"]}
    assert tensorboard_tracker.compared_flags(CONFIG | {"flags": flags})["dataset"] == "web=a.jsonl:0.7 b.bin:0.3"


def test_a_stopped_run_that_goes_on_is_shown_as_it_ended_last(begin, tmp_path, monkeypatch):
    seen = []
    for step, exit_code in ((0, 143), (4, 0)):
        shown = begin("tensorboard", step)
        for number in (1, 2, 3):
            shown.log(line(step + number), [])
        seen.append(status(tmp_path / "train_fsdp"))
        shown.summarize(line(step + 3, step_time_ms=7.0))
        end(exit_code, monkeypatch)
        seen.append(status(tmp_path / "train_fsdp"))
    assert seen == ["STATUS_RUNNING", "STATUS_UNKNOWN", "STATUS_RUNNING", "STATUS_SUCCESS"]
    assert [(e.step, e.value) for e in read_events(tmp_path / "train_fsdp" / "summary").Scalars("train/loss")] == [
        (7, pytest.approx(5 / 7))
    ]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(begin, tmp_path, monkeypatch, capsys):
    shown = begin("tensorboard")
    told = []
    other = types.SimpleNamespace(name="wandb", log=lambda metrics, stories: told.append(metrics["step"]))
    shown.open.append(other)
    monkeypatch.setattr(
        shown.open[0].steps, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    for step in (1, 2):
        shown.log(line(step), [])
    said = "failed     tensorboard, from step 1 on: No space left on device; the run goes on without it\n"
    assert (capsys.readouterr().out, told, shown.open) == (said, [1, 2], [other])


def test_a_tracker_that_failed_gets_the_rows_that_it_lacks_when_there_is_room_again(begin, tmp_path, capsys):
    shown, full = begin("tensorboard"), OSError(28, "No space left on device")
    file = tmp_path / "metrics.jsonl"

    def log(step):
        with file.open("a") as lines:
            lines.write(json.dumps(line(step)) + "\n")
        shown.log(line(step), [])

    log(1)
    broken = shown.open[0].tokens.flush = Mock(side_effect=full)  # the row is in one of the two files
    log(2)
    log(3)
    shown.mend()  # it is too early
    assert broken.called and shown.failed
    time.sleep(1.1)  # its files are named by the second
    shown.settle()
    log(4)
    tags = read_events(tmp_path / "train_fsdp"), read_events(tmp_path / "train_fsdp" / "by_tokens")
    assert [event.step for event in tags[0].Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in tags[1].Scalars("by_tokens/loss")] == [64, 128, 192, 256]
    assert capsys.readouterr().out == (
        "failed     tensorboard, from step 2 on: No space left on device; the run goes on without it\n"
        "recovered  tensorboard: it has the 2 rows after step 1 that it lacked\n"
    )


def all_rows(folder) -> list[int]:
    """The steps in all .wandb files of a run, in the order in which they were begun."""
    files = sorted(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    records = [record.history.item for file in files for record in wandb_records(file) if record.HasField("history")]
    return [as_dict(items)["_step"] for items in records]


@pytest.mark.parametrize("how", ["its process is killed", "its file does not grow"])
def test_wandb_offline_goes_on_in_a_new_file_that_has_what_the_one_before_lacks(
    begin, tmp_path, monkeypatch, capsys, how
):
    shown = begin("wandb")
    (wandb_run,), file = shown.open, tmp_path / "metrics.jsonl"

    def log(step):
        with file.open("a") as lines:
            lines.write(json.dumps(line(step)) + "\n")
        shown.log(line(step), [])

    log(1)
    log(2)
    shown.settle()
    if how == "its process is killed":
        for process in psutil.Process().children():
            if process.name() == "wandb-core":
                process.kill()
                process.wait()
    else:  # as on a full disk, of which wandb says nothing
        stuck = tmp_path / "stuck.wandb"
        shutil.copy(wandb_run.file, stuck)
        wandb_run.file, wandb_run.size = stuck, stuck.stat().st_size
        monkeypatch.setattr(wandb_tracker, "STUCK_SECONDS", 0.2)
    for step in (3, 4, 5):
        log(step)
        time.sleep(0.3)
    assert shown.failed == [wandb_run]
    time.sleep(0.5)  # its folder is named by the second
    shown.settle()
    log(6)
    shown.settle()
    assert shown.open == [wandb_run]
    assert sorted({*all_rows(tmp_path)}) == [1, 2, 3, 4, 5, 6] and all_rows(tmp_path)[-4:] == [3, 4, 5, 6]
    assert "recovered  wandb: it has the 3 rows after step 2 that it lacked" in capsys.readouterr().out
    end(0, monkeypatch)


def test_a_tracker_that_does_not_start_is_one_line_that_says_how_to_do_without(begin, monkeypatch):
    import wandb

    def no_network(**options):
        raise wandb.errors.CommError("Run initialization has timed out after 90.0 sec.\nand more")

    monkeypatch.setattr(wandb, "init", no_network)
    with pytest.raises(UserError) as refused:
        begin("wandb")
    assert refused.value.exit_code == 1
    why = "wandb does not start (Run initialization has timed out after 90.0 sec.)"
    assert str(refused.value) == f"--log-with wandb: {why}; --log-with none leaves it out"


def test_a_server_that_is_not_reached_is_one_line_before_anything_begins(mistake, monkeypatch):
    import wandb

    def no_network(**options):
        raise wandb.errors.AuthenticationError("Failed to authenticate with http://127.0.0.1:9: no route.\nand more")

    monkeypatch.setattr(wandb, "setup", lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online")))
    monkeypatch.setattr(wandb, "login", no_network)
    said = mistake("--log-with", "wandb", exit_code=1)
    assert said.startswith(
        "--log-with wandb: no login to wandb (Failed to authenticate with http://127.0.0.1:9: no route.)"
    )
    assert "WANDB_MODE=offline" in said


@pytest.mark.parametrize(
    "text", ["a <b>bold</b> *fox* said: [x](http://y)", "1. one\n# two\n- `three` | ~4~ &lt; 5", "_a_"]
)
def test_a_story_is_shown_as_it_was_written(text):
    page = markdown_to_safe_html(tensorboard_tracker.literal(text))
    assert html.unescape(re.sub(r"<br ?/?>|</?p>", "", page)).strip() == text


def test_the_configuration_is_a_table_with_a_row_for_each_value():
    config = CONFIG | {"flags": {"lr": 3e-4, "eval_split": None, "betas": [0.9, 0.95], "model": "a|b"}}
    page = markdown_to_safe_html(tensorboard_tracker.as_table(config))
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall("<td>(.*?)</td>", page)]
    assert dict(zip(cells[::2], cells[1::2], strict=True)) == {
        "flags.lr": "0.0003",
        "flags.eval_split": "null",
        "flags.betas": "[0.9, 0.95]",
        "flags.model": '"a|b"',
        "versions.torch": '"2.13.0"',
        "world_size": "1",
        "gpu": "null",
        "commit": "null",
        "run_id": '"abc"',
        "starts": "[]",
    }


# ----------------------------------------------------------------------------------------------------------------------
# The program's endings


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """`ended(ending)`: (exit code, the run's folder) of the real program."""
    folder = tmp_path_factory.mktemp("endings")
    ways = {
        "nan": "--num-steps 30 --lr 1e30 --max-grad-norm 1e30 --warmup-steps 0",
        "gate": "--num-steps 3 --perf-warmup-steps 1 --peak-tflops 100 --min-mfu 60",
        "signal": "--num-steps 100000 --checkpoint-interval 0",
    }

    def run(name: str) -> int:
        command = [sys.executable, PROGRAM, *words(f"{TINY} {ways[name]} --log-with all --run-name {name}")]
        environment, lines = os.environ | {"WANDB_MODE": "offline"}, folder / name / "metrics.jsonl"
        with subprocess.Popen(
            [*command, "--output-dir", folder], env=environment, stdout=DEVNULL, stderr=DEVNULL
        ) as it:
            while name == "signal" and it.poll() is None:
                if lines.exists() and len(lines.read_text().splitlines()) > 1:
                    it.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.1)
            return it.wait(300)

    return functools.cache(lambda name: (run(name), folder / name))


@pytest.mark.parametrize(
    "ending, code, shown, preempted",
    [
        slow_case("nan", 1, "STATUS_FAILURE", 0),
        slow_case("gate", 3, "STATUS_FAILURE", 0),
        ("signal", 143, "STATUS_UNKNOWN", 1),
    ],
)
def test_trackers_hear_how_the_program_ends(ended, ending, code, shown, preempted):
    exit_code, folder = ended(ending)
    assert (exit_code, exit_codes(folder), status(folder / "train_fsdp")) == (code, [code], shown)
    assert len([record for record in written(folder) if record.HasField("preempting")]) == preempted
    logged = [line["step"] for line in metrics_of(folder) if "final" not in line]
    assert [row["_step"] for row in rows(folder)] == logged
    with_loss = [line["step"] for line in metrics_of(folder) if "final" not in line and "loss" in line]
    assert [event.step for event in read_events(folder / "train_fsdp").Scalars("train/loss")] == with_loss
