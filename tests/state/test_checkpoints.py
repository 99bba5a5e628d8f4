"""A run that is killed at any moment loses at most the steps since its last checkpoint, and goes on as the same run."""

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import psutil
import pytest
import torch
from conftest import (
    PROGRAM,
    ROOT,
    Stop,
    metrics_of,
    parse,
    slow_case,
    start,
    torchrun_command,
    train,
    without_repeated_flags,
    words,
    write_model,
)
from multirank import MODELS, SIZES
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_fsdp
from harness.base import saved
from harness.base.errors import UserError
from harness.data import sample_order
from harness.job import endings, folders, preflight
from harness.job.signals import StopRequest
from harness.state import export, store
from harness.state.shards import SafeReader
from harness.state.train_state import TrainState
from utils import PerformanceTracker

STEPS = 6
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A tiny run of a few steps; what a test gives beside it wins."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = write_model(folder / "model", "llama", **SIZES | {"tie_word_embeddings": False})
    small = f"--num-steps {STEPS} --sequence-length 32 --batch-size 4 --num-workers 0 --precision fp32 --log-interval 1"
    places = f"--cache-dir {folder / 'cache'} --tokenizer {ROOT / 'assets' / 'demo'} --model {model} --dataset demo"
    return words(f"{small} {places} --lr 1e-3 --no-compile")


@pytest.fixture
def run(device, flags, tmp_path):
    """Trains in this process under tmp_path/NAME; returns the exit code."""

    def start_run(name: str, *more, stop_after: int = -1) -> int:
        return train([*flags, "--output-dir", tmp_path, "--run-name", name, *more], device, Stop(stop_after))

    start_run.device = device
    return start_run


@pytest.fixture
def refused(run):
    """The message of a run that ends with a mistake of the user."""

    def start_run(*args, exit_code: int = 2, **options) -> str:
        with pytest.raises(UserError) as raised:
            run(*args, **options)
        assert raised.value.exit_code == exit_code
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return start_run


@pytest.fixture(scope="module")
def finished(device, flags, tmp_path_factory):
    """A finished run with a checkpoint of every second step; tests copy it before they touch it."""
    folder = tmp_path_factory.mktemp("finished")
    more = words(
        f"--output-dir {folder} --run-name r --checkpoint-interval 2 --keep-checkpoints 9 --no-async-checkpoint"
    )
    assert train([*flags, *more], device) == 0
    return (folder / "r").rename(folder / "moved")  # where it was trained is no run any more


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run under the name r."""
    return shutil.copytree(finished, tmp_path / "r")


@pytest.fixture
def settled(copied):
    """The finished run as if it had been trained where it is, a while ago."""
    for path in saved.complete(copied):
        reseal(path, folder=str(copied), started=1e9, elapsed=5000.0, productive=4000.0)
    change_config(copied, folder=str(copied))
    return copied


def reseal(checkpoint, **changes) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"sha256": saved.manifest_checksum(manifest)}))


def change_config(run_folder, **changes) -> None:
    (run_folder / "config.json").write_text(json.dumps(config_of(run_folder) | changes))


def steps_of(folder) -> list[list]:
    return [[line[key] for key in KEYS] for line in metrics_of(folder) if not line.get("final")]


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def checkpoint_names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


# ----------------------------------------------------------------------------------------------------------------------
# The same run


@pytest.mark.parametrize(
    "technique",
    [
        "",
        "--no-async-checkpoint --gradient-accumulation-steps 2",
        "--precision bf16 --num-workers 2",
        "--precision bf16-pure --lr-scheduler warmup_stable_decay",
        "--precision fp8 --fp8-emulate",
        slow_case("--optimizer adamw8bit"),
        "--optimizer adamw-bf16",
        "--optimizer normuon",
        "--optimizer muon --momentum-dtype bf16 --precision bf16-pure",
        "--cpu-offload --zero-stage 0",
        "--model {dropout}",
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path, technique):
    model_type, sizes = MODELS["gpt2"]
    technique = technique.format(dropout=write_model(tmp_path / "dropout", model_type, **sizes | {"resid_pdrop": 0.2}))
    if "adamw8bit" in technique:  # torchao compiles its step for each shape that a parameter has: fewer shapes
        square = SIZES | {"intermediate_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": False}
        technique += f" --model {write_model(tmp_path / 'square', 'llama', **square)}"
    assert run("whole", *words(technique)) == 0
    assert run("r", *words(technique), stop_after=3) == StopRequest.EXIT_CODE
    assert names(tmp_path / "r") == checkpoint_names(3)
    assert len(steps_of(tmp_path / "r")) == 3
    assert run("r", "--resume", "auto", *words(technique)) == 0
    assert steps_of(tmp_path / "r") == steps_of(tmp_path / "whole")
    assert [line.get("final") for line in metrics_of(tmp_path / "r")] == [None] * STEPS + [True]


def test_a_stop_after_the_last_step_is_the_end_of_the_run(run, tmp_path, capsys):
    assert run("r", stop_after=STEPS) == 0
    assert metrics_of(tmp_path / "r")[-1]["final"]
    assert "\nstopped " not in capsys.readouterr().out


def test_saving_changes_no_number(run, finished, tmp_path):
    run("plain")
    assert steps_of(finished) == steps_of(tmp_path / "plain")


def test_each_step_trains_on_new_samples_after_a_resume_too(run, monkeypatch):
    seen = []
    window_of = sample_order.WindowOrder.window_of
    monkeypatch.setattr(
        sample_order.WindowOrder, "window_of", lambda self, sample: seen.append(sample) or window_of(self, sample)
    )
    run("r", stop_after=2)
    run("r", "--resume", "auto")
    assert seen == list(range(STEPS * 4))


def test_a_kill_after_the_last_checkpoint_repeats_its_steps_and_logs_them_once(run, copied, finished):
    """The folder as a kill leaves it after step 5 and a half: a checkpoint at 4, and half of the last line."""
    shutil.rmtree(copied / "checkpoints" / "step-00000006")
    leftover = copied / "checkpoints" / ".step-00000006.writing"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    assert run("r", "--resume", "auto", "--checkpoint-interval", 2) == 0
    assert steps_of(copied) == steps_of(finished)
    assert names(copied) == checkpoint_names(4, 6)


def test_auto_starts_fresh_where_there_is_nothing_and_does_nothing_after_the_end(run, tmp_path, capsys):
    for _ in range(2):
        assert run("r", "--resume", "auto", "--checkpoint-interval", 4) == 0
    assert "nothing to train" in capsys.readouterr().out
    assert len(metrics_of(tmp_path / "r")) == STEPS + 1


def test_more_steps_go_on_from_the_end_of_a_finished_run(run, copied, capsys):
    assert run("r", "--resume", "auto", "--num-steps", STEPS + 2) == 0
    assert [line["step"] for line in metrics_of(copied)] == [*range(1, STEPS + 3), STEPS + 2]
    assert f"num steps {STEPS} -> {STEPS + 2}" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [1, 4])
def test_old_checkpoints_go_and_those_to_keep_stay(run, tmp_path, kept):
    run("r", "--checkpoint-interval", 1, "--keep-checkpoints", kept, "--no-async-checkpoint")
    assert names(tmp_path / "r") == checkpoint_names(*range(STEPS - kept + 1, STEPS + 1))


def test_the_stall_of_the_loop_is_said(run, capsys):
    run("r", "--checkpoint-interval", 3)
    assert "saved      step-00000003" in (output := capsys.readouterr().out)
    assert "training paused for" in output


def test_a_save_is_in_no_figure_of_speed(run, monkeypatch):
    clock_stands, save = [], store.Checkpoints.save

    def watched(saver, state, wait=False):
        clock_stands.append(state.tracker._start is None)
        save(saver, state, wait)

    monkeypatch.setattr(store.Checkpoints, "save", watched)
    assert run("r", "--checkpoint-interval", 2, "--num-steps", 4) == 0
    assert clock_stands == [True, True]


def test_a_save_under_way_keeps_its_values_and_the_next_one_is_skipped(run, finished, tmp_path, monkeypatch):
    save, say, skipped = store.dcp.save, store.say, threading.Event()
    monkeypatch.setattr(store.dcp, "save", lambda *args, **to: skipped.wait(300) and save(*args, **to))
    monkeypatch.setattr(store, "say", lambda text: skipped.set() if text.startswith("skipped") else say(text))
    run("r", "--checkpoint-interval", 2, "--keep-checkpoints", 9)
    assert names(tmp_path / "r") == checkpoint_names(2, 6)
    run("branch", "--resume", tmp_path / "r" / "checkpoints" / "step-00000002")
    assert steps_of(tmp_path / "branch") == steps_of(finished)[2:]


def test_trackers_continue_after_a_kill(run, tmp_path, monkeypatch):
    from test_program import as_dict, read_events, wandb_records

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(endings, "LISTENERS", [])

    def leave(exit_code):
        monkeypatch.setattr(endings, "ENDING", [])
        endings.announce(exit_code)
        endings.LISTENERS.clear()

    folder, more = tmp_path / "r", words("--log-with all --checkpoint-interval 2 --keep-checkpoints 9 --resume auto")
    run("r", *more, "--no-async-checkpoint", stop_after=4)
    leave(StopRequest.EXIT_CODE)
    shutil.rmtree(folder / "checkpoints" / "step-00000004")  # the trackers have seen more than the checkpoint
    run("r", *more)
    leave(0)
    steps = steps_of(folder)
    for name, tag, axis in (("", "train/loss", 0), ("by_tokens", "by_tokens/loss", -1)):
        events = read_events(folder / "train_fsdp" / name).Scalars(tag)
        assert [(e.step, e.value) for e in events] == [(s[axis], pytest.approx(s[1], rel=1e-6)) for s in steps]
    records = [list(wandb_records(file)) for file in sorted(folder.rglob("run-*.wandb"))]
    runs = [[r.run.run_id for r in those if r.HasField("run")] for those in records]
    manifest = json.loads((folder / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert runs == [[manifest["run_id"]]] * 2
    assert [[r.exit.exit_code for r in those if r.HasField("exit")] for those in records] == [[143], [0]]

    final = metrics_of(folder)[-1]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics_of(folder)[:-1]))
    run("r", *more)  # killed between the last checkpoint and the last line: nothing to train
    leave(0)
    records = list(wandb_records(max(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)))
    *_, summary = [as_dict(r.summary.update) for r in records if r.HasField("summary") and "train/" in str(r)]
    assert summary["train/loss"] == final["loss"]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]


def test_a_stopped_run_goes_on_by_its_own_config_alone(run, device, tmp_path):
    technique = words("--gradient-accumulation-steps 2 --precision bf16 --seed 3 --betas 0.8 0.9")
    assert run("whole", *technique) == 0
    assert run("r", *technique, stop_after=3) == StopRequest.EXIT_CODE
    assert train(["--config", tmp_path / "r" / "config.json", "--run-name", "r", "--resume", "auto"], device) == 0
    assert steps_of(tmp_path / "r") == steps_of(tmp_path / "whole")


def test_a_finished_run_keeps_its_last_state_unless_told_not_to(run, finished, tmp_path, capsys):
    assert run("r") == 0
    assert names(tmp_path / "r") == checkpoint_names(STEPS)
    output, place = capsys.readouterr().out, tmp_path / "r"
    for name, rest in {"sample": "--sample-prompt ", "export": "--export ", "go on": "--num-steps 12"}.items():
        assert f"--resume {place} {rest}" in told(output, name), name
    last, saved_beside = (saved_values(folder / "checkpoints" / "step-00000006") for folder in (place, finished))
    assert last.keys() == saved_beside.keys() and all(torch.equal(last[name], saved_beside[name]) for name in last)

    for flags, kept in {
        "--no-final-checkpoint": [],
        "--dataset synthetic": [],
        "--dataset synthetic --final-checkpoint": [STEPS],
        "--dataset synthetic --checkpoint-interval 4": [4, STEPS],
        "--no-final-checkpoint --checkpoint-interval 4": [4],
    }.items():
        name = "run" + flags.replace(" ", "")
        assert run(name, *words(flags)) == 0
        folder = tmp_path / name / "checkpoints"
        assert [path.name for path in saved.complete(tmp_path / name)] == checkpoint_names(*kept), flags
        assert folder.exists() == bool(kept)
        assert ("no weights: --final-checkpoint or --export DIR" in capsys.readouterr().out) == (not kept)


def test_a_last_state_that_could_not_be_written_is_a_failure(finished, refused, capsys):
    with files_of_at_most(100_000):
        message = refused("r", exit_code=1)
    assert message == "--final-checkpoint: 1 checkpoints could not be saved, see above"
    assert "failed     checkpoint step-00000006: " in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Another run


def test_data_and_a_tokenizer_that_changed_under_their_names_are_named_and_not_by_a_checksum(run, refused, tmp_path):
    shutil.copytree(ROOT / "assets" / "demo", tmp_path / "t", ignore=shutil.ignore_patterns("stories*"))
    data, same = tmp_path / "corpus.txt", ("r", "--tokenizer", tmp_path / "t", "--checkpoint-interval", 1)
    data.write_text("The fox had a red ball. " * 200)
    assert run(*same, "--dataset", data, "--num-steps", 1) == 0
    go_on = (*same, "--dataset", data, "--resume", "auto", "--num-steps", 2)
    held_out = refused(*go_on, "--eval-interval", 1)  # for want of another split the last 5 % of the training's
    assert held_out.startswith("--eval-interval was 0 in the checkpoint and is 1 now; ")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t")
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "t")
    assert refused(*go_on).startswith("--tokenizer: its vocabulary is not what it was at the checkpoint")
    shutil.copy(ROOT / "assets" / "demo" / "tokenizer.json", tmp_path / "t")
    data.write_text("The owl had a red ball. " * 200)
    assert refused(*go_on).startswith(f"--dataset: {data} is not what it was at the checkpoint; a resumed run must")


def test_a_path_that_leads_to_no_checkpoint_is_told_with_those_that_are_there(refused, copied, finished, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "without" / "demo").mkdir(parents=True)
    (tmp_path / "without" / "demo" / "metrics.jsonl").touch()
    shutil.copytree(finished, tmp_path / "tales")
    both, step = f"what can be resumed is {tmp_path / 'tales'}, {copied}", copied / "checkpoints" / "step-0000000"
    there = {
        "tale": f"no such folder; {both}",
        "empty": f"it holds no checkpoint; {both}",
        "r/checkpoints/step-00000005": f"no such folder; what can be resumed is {step}6, {step}4, {step}2",
        "empty/r": "no such folder; no run is beside it",
        "without/r": f"no such folder; {tmp_path / 'without' / 'demo'} saved none: --checkpoint-interval does",
    }
    for path, said in there.items():
        message = refused("r", "--resume", tmp_path / path)
        start = f"--resume {tmp_path / path}: "
        assert sorted(message.replace(",", "").split()) == sorted(f"{start}{said}".replace(",", "").split())
        assert path != "tale" or message == start + said  # the nearest name first
    (tmp_path / "empty").rmdir()
    assert refused("r", "--resume", tmp_path).endswith((str(copied), str(tmp_path / "tales")))


@pytest.mark.parametrize(
    "change, named",
    [
        ("--sequence-length 64", "--sequence-length was 32"),
        ("--seed 7", "--seed was 42"),
        ("--dataset synthetic", "--dataset was demo in the checkpoint and is synthetic now"),
        ("--dataset-split train[:50%]", "--dataset-split was train in the checkpoint and is train[:50%] now"),
        ("--optimizer adamw-bf16", "--optimizer was adamw"),
        ("--optimizer muon", "--optimizer was adamw in the checkpoint and is muon now"),
        ("--model {wider}", "--model: intermediate_size was 96"),
        ("--tokenizer {other}", "--tokenizer was {demo} in the checkpoint and is {other} now"),
    ],
)
def test_another_run_is_refused_by_what_changed(copied, refused, tmp_path, change, named):
    write_model(tmp_path / "wider", "llama", **SIZES | {"intermediate_size": 128, "tie_word_embeddings": False})
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "other")
    before = (copied / "metrics.jsonl").read_bytes()
    places = {"wider": tmp_path / "wider", "other": tmp_path / "other", "demo": ROOT / "assets" / "demo"}
    change, named = change.format(**places), named.format(**places)
    message = refused("r", "--resume", "auto", "--num-steps", 9, *words(change))
    assert message.startswith(named)
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert names(copied) == checkpoint_names(2, 4, 6)


def test_changes_that_are_no_other_run_are_told(run, copied, capsys):
    changes = "--num-steps 8 --lr 5e-4 --batch-size 2 --weight-decay 0 --zero-stage 2 --precision bf16"
    assert run("r", "--resume", "auto", *words(changes)) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("changed"))
    for change in ("num steps 6 -> 8", "lr 0.001 -> 0.0005", "batch size 4 -> 2", "weight decay 0.1 -> 0.0"):
        assert change in told
    assert "zero stage 3 -> 2" in told and "precision fp32 -> bf16" in told
    lines = {line["step"]: line for line in metrics_of(copied)}
    assert lines[7]["tokens_seen"] - lines[6]["tokens_seen"] == 2 * 32
    assert lines[7]["learning_rate"] < 5e-4


def test_a_flag_newer_than_the_checkpoint_counts_as_its_default(run, copied, capsys):
    for path in (copied / "checkpoints").glob("step-*"):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["sha256"], manifest["flags"]["document_mask"]
        (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": saved.manifest_checksum(manifest)}))
    assert run("r", "--resume", "auto", "--num-steps", STEPS + 1) == 0
    assert "document mask" not in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# --resume PATH


def test_a_path_with_newer_checkpoints_beside_it_is_refused_but_can_branch_off(run, refused, copied, tmp_path):
    path = copied / "checkpoints" / "step-00000002"
    before = (copied / "metrics.jsonl").read_bytes()
    assert "--run-name" in refused("r", "--resume", path)
    assert run("branch", "--resume", path) == 0
    assert [step[0] for step in steps_of(tmp_path / "branch")] == [3, 4, 5, 6]
    assert steps_of(tmp_path / "branch") == steps_of(copied)[2:]
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_runs_folder_stands_for_its_newest_checkpoint(run, copied, capsys):
    assert run("r", "--resume", copied, "--num-steps", STEPS + 1) == 0
    assert f"step-00000006 at step {STEPS}" in capsys.readouterr().out


def test_a_checkpoint_after_the_last_step_trains_nothing(run, copied, capsys):
    before = (copied / "metrics.jsonl").read_bytes()
    assert run("r", "--resume", "auto", "--num-steps", 3) == 0
    assert "nothing to train: step 6 of 3" in capsys.readouterr().out
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_needs_no_room_for_a_checkpoint(run, copied, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "free_bytes", lambda path: 1000)
    assert run("r", "--resume", "auto", "--checkpoint-interval", 2) == 0
    assert "nothing to train" in capsys.readouterr().out


def test_a_run_is_not_written_over_from_within_its_own_folder(refused, copied, monkeypatch):
    monkeypatch.chdir(copied)
    before = (copied / "metrics.jsonl").read_text()
    assert "holds a run already" in refused("r")
    assert (copied / "metrics.jsonl").read_text() == before


def test_a_finished_run_without_checkpoints_is_not_written_over(copied, refused):
    shutil.rmtree(copied / "checkpoints")
    before = (copied / "metrics.jsonl").read_bytes()
    assert "holds a finished run without checkpoints" in refused("r", "--resume", "auto")
    assert (copied / "metrics.jsonl").read_bytes() == before


def test_the_last_line_that_a_kill_prevented_is_written_by_the_next_start(run, copied):
    lines = (copied / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert run("r", "--resume", "auto") == 0
    last = json.loads((copied / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["final"] and last["loss"] == json.loads(lines[-1])["loss"]


def test_a_path_that_is_not_there_is_named(refused):
    assert refused("r", "--resume", "/no/such/step").startswith("--resume /no/such/step: ")


# ----------------------------------------------------------------------------------------------------------------------
# One folder, one run


def test_a_folder_with_a_running_run_is_refused(refused, copied, monkeypatch):
    code = "import pathlib, sys; from harness.job.folders import lock_folder\n"
    code += "lock = lock_folder(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, copied], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        other.stdout.readline()
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        message = refused("r", "--resume", "auto", "--num-steps", STEPS + 1)
        other.communicate(b"\n")
    assert message.startswith(f"--run-name r: another run is in {copied}, whose processes `fuser {copied}/.lock` names")


def test_a_start_that_waited_for_the_lock_asks_again_what_is_in_the_folder(refused, copied, tmp_path, monkeypatch):
    """Both had seen no folder; the other one trained, and is done."""
    first = copied.rename(tmp_path / "first")
    lock = folders.lock_folder
    train_meanwhile = lambda folder: [shutil.copytree(first, folder, dirs_exist_ok=True), lock(folder)]  # noqa: E731
    monkeypatch.setattr(folders, "lock_folder", train_meanwhile)
    before = (first / "metrics.jsonl").read_bytes()
    assert f"{copied} holds a run already" in refused("r")
    assert (copied / "metrics.jsonl").read_bytes() == before and names(copied) == checkpoint_names(2, 4, 6)


def test_a_start_that_waited_for_the_lock_goes_on_from_what_the_other_saved(run, copied, tmp_path, monkeypatch, capsys):
    first = copied.rename(tmp_path / "first")
    lock = folders.lock_folder
    train_meanwhile = lambda folder: [shutil.copytree(first, folder, dirs_exist_ok=True), lock(folder)]  # noqa: E731
    monkeypatch.setattr(folders, "lock_folder", train_meanwhile)
    assert run("r", "--resume", "auto", "--num-steps", 7) == 0
    assert "step-00000006 at step 6" in capsys.readouterr().out
    assert [line["step"] for line in metrics_of(copied)] == [*range(1, 8), 7]


def test_starts_of_the_same_second_have_folders_of_their_own_and_a_failed_one_leaves_none(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: "-20260101-000000")
    monkeypatch.setattr(endings, "LISTENERS", [])
    settings = parse([*flags, "--output-dir", tmp_path / "out"])
    chosen = [folders.choose_folder(settings).name for _ in range(3)]
    assert chosen == [f"model-20260101-000000{number}" for number in ("", "-2", "-3")]
    (tmp_path / "out" / chosen[1] / "metrics.jsonl").touch()
    for listener in endings.LISTENERS:
        listener(2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [chosen[1]]


STOP_AND_RESUME = """
import sys
import torch
from harness.flags.parser import parse_args
from harness.job.world import start_processes
import train_fsdp

class Stop:
    can_save, name, steps = False, "SIGTERM", -1
    def agreed_by_all_ranks(self):
        self.steps -= 1
        return self.steps == 0

first, device = Stop(), start_processes()
first.steps = 2
for stop, resume in ((first, "none"), (Stop(), "auto")):
    settings = parse_args([*sys.argv[1:], "--run-name", "r", "--resume", resume])
    print("EXIT", train_fsdp.run(settings, device, stop), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_field_of_a_checkpoint_is_added_by_one_line(flags, tmp_path):
    """In a copy of the program: a count of steps survives a restart."""
    for name in ("train_fsdp.py", "utils.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("harness", "assets"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "harness" / "state" / "train_state.py"
    source, last_field, counts = file.read_text(), "    productive_before: float", "        self.step += 1\n"
    assert source.count(last_field) == source.count(counts) == 1
    source = source.replace(last_field, f"    steps_counted: int = in_manifest(100)\n{last_field}")
    file.write_text(source.replace(counts, f"{counts}        self.steps_counted += 1\n"))

    command = [sys.executable, "-c", STOP_AND_RESUME, *flags, "--final-checkpoint", "--output-dir", tmp_path / "out"]
    process = start(command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert re.findall(r"^EXIT (\d+)", process.stdout, re.MULTILINE) == ["143", "0"]
    counted = {path.name: saved.read_manifest(path)["steps_counted"] for path in saved.complete(tmp_path / "out" / "r")}
    assert counted == {"step-00000002": 102, f"step-{STEPS:08d}": 100 + STEPS}


def test_a_field_that_an_older_checkpoint_lacks_has_its_default_and_a_branch_takes_over_the_position_alone(device):
    state = TrainState(torch.nn.Linear(1, 1), step=3, samples=6, tokens=9, elapsed_before=5.0, run_id="a")
    manifest = {name: getattr(state, name) for name in ("step", "samples", "tokens", "started", "run_id")}
    older, branch = TrainState(torch.nn.Linear(1, 1), productive_before=7.0), TrainState(None, run_id="b")
    older.restore_counters(manifest | {"world_size": 1, "tracker": {}})
    assert (older.step, older.samples, older.tokens, older.run_id) == (3, 6, 9, "a")
    assert (older.positions, older.branched_from, older.productive_before) == ({}, None, 0.0)
    branch.restore_counters(manifest | {"elapsed": 1000.0, "position": [8, 0, 2]}, branch=True)
    assert (branch.step, branch.samples, branch.tokens) == (3, 6, 9)
    assert branch.positions == {"": {0: (8, 0, 2)}}
    assert (branch.run_id, branch.elapsed_before) == ("b", 0.0)


@pytest.mark.parametrize("world_size, steps", [(1, 5.0), (2, 0.0)])
def test_averages_go_on_with_the_same_number_of_ranks_alone(device, world_size, steps):
    state = TrainState(torch.nn.Linear(1, 1), tracker=PerformanceTracker())
    state.restore_counters({"world_size": world_size, "tracker": {"steps": 5.0}})
    assert state.tracker.total["steps"] == steps


# ----------------------------------------------------------------------------------------------------------------------
# Another folder, another run


def told(output: str, name: str) -> str:
    return next((line[11:] for line in output.splitlines() if line.startswith(f"{name:10} ")), "")


def test_a_run_that_goes_on_in_another_folder_than_its_checkpoints_is_a_new_one(run, settled, tmp_path, capsys):
    before, branch = (settled / "config.json").read_bytes(), tmp_path / "branch"
    more = words("--lr 0.05 --checkpoint-interval 2 --perf-warmup-steps 1")
    assert run("branch", "--resume", settled / "checkpoints" / "step-00000002", *more) == 0
    output = capsys.readouterr().out
    assert told(output, "branched") == f"from {settled} at step 2"
    done = told(output, "done")
    assert done.startswith("4 steps, 512 tokens in ") and " after step 2 of r, loss" in done
    config, parent = config_of(branch), config_of(settled)
    assert config["run_id"] != parent["run_id"]
    origin = {"folder": str(settled), "run_id": parent["run_id"], "step": 2}
    assert config["branched_from"].items() >= origin.items() and len(config["starts"]) == 1
    assert "branched from r at step 2" in (branch / "report.html").read_text()
    manifest = saved.read_manifest(saved.newest(branch))
    assert (manifest["run_id"], manifest["branched_from"]) == (config["run_id"], config["branched_from"])
    assert manifest["elapsed"] < 5000 and manifest["productive"] < 4000 and manifest["started"] > 1e9
    assert (settled / "config.json").read_bytes() == before

    assert run("branch", "--resume", "auto", "--num-steps", 7, *more) == 0  # it goes on as itself
    output = capsys.readouterr().out
    assert told(output, "branched") == f"from {settled} at step 2" and told(output, "done").startswith("5 steps, ")
    assert config_of(branch)["run_id"] == config["run_id"] and len(config_of(branch)["starts"]) == 2

    assert run("twig", "--resume", branch, "--num-steps", 8) == 0  # a branch of the branch
    twig = config_of(tmp_path / "twig")
    assert twig["branched_from"].items() >= {"run_id": config["run_id"], "step": 7, "folder": str(branch)}.items()
    assert twig["run_id"] not in (config["run_id"], parent["run_id"])


WAYS = ["copied", "linked", "moved", "moved above", "seen by another path", "of an earlier version"]


@pytest.mark.parametrize("how", WAYS)
def test_a_copied_run_folder_is_a_new_run_and_a_moved_one_is_not(run, settled, tmp_path, how, capsys):
    old, place = config_of(settled)["run_id"], tmp_path / "other"
    if how == "copied":
        shutil.copytree(settled, place)
    elif how == "linked":  # cp -rl
        shutil.copytree(settled, place, copy_function=os.link)
    elif how == "moved":
        settled.rename(place)
    elif how == "moved above":
        (tmp_path / "above").mkdir()
        settled.rename(tmp_path / "above" / "other")
        (tmp_path / "above").rename(tmp_path / "outputs")
        place = tmp_path / "outputs" / "other"
    elif how == "seen by another path":
        (tmp_path / "link").symlink_to(tmp_path)
        place = tmp_path / "link" / "r"
    else:
        for path in saved.complete(settled):
            reseal(path, folder=None)
        change_config(settled, folder=None)
        shutil.copytree(settled, place)
    assert run(place.name, "--output-dir", place.parent, "--resume", "auto", "--num-steps", 7) == 0
    output, config = capsys.readouterr().out, config_of(place)
    if how in ("copied", "linked"):
        assert config["run_id"] != old and len(config["starts"]) == 1
        assert told(output, "branched") == f"from {settled} at step 6" and told(output, "done").startswith("1 step, ")
    else:
        assert config["run_id"] == old and "branched_from" not in config and len(config["starts"]) == 2
        assert told(output, "branched") == "" and told(output, "done").startswith("7 steps, ")
    assert [line["step"] for line in metrics_of(place)] == [*range(1, 8), 7]


def test_a_branch_that_saved_nothing_goes_on_from_where_it_began(run, refused, settled, tmp_path, capsys):
    branch, path = tmp_path / "branch", settled / "checkpoints" / "step-00000004"

    def kill() -> dict:
        """As a kill before its first checkpoint leaves it."""
        shutil.rmtree(branch / "checkpoints", ignore_errors=True)
        lines = (branch / "metrics.jsonl").read_text().splitlines(keepends=True)
        (branch / "metrics.jsonl").write_text(lines[0])
        return config_of(branch)

    run("branch", "--resume", path)
    first = kill()
    assert run("branch", "--resume", "auto") == 0
    assert told(capsys.readouterr().out, "resumed") == f"{path} at step 4"
    again = kill()
    assert again["run_id"] == first["run_id"] and [start["step"] for start in again["starts"]] == [4, 4]
    assert steps_of(branch) == steps_of(settled)[4:5]
    reseal(path, run_id="another")
    assert f"it branched off at {path}, saved nothing since" in refused("branch", "--resume", "auto")
    shutil.rmtree(path)
    assert f"it branched off at {path}, saved nothing since" in refused("branch", "--resume", "auto")


def test_a_copy_that_is_killed_before_it_saves_keeps_the_id_of_its_first_start(settled, tmp_path):
    copy = shutil.copytree(settled, tmp_path / "copy")
    checkpoint = saved.newest(copy)
    origin, _ = saved.find_origin(copy, checkpoint, saved.read_manifest(checkpoint))
    change_config(copy, run_id="new", folder=str(copy), branched_from=origin)
    assert saved.find_origin(copy, checkpoint, saved.read_manifest(checkpoint)) == (origin, "new")
    shutil.rmtree(settled)  # which makes it no older run
    assert saved.find_origin(copy, checkpoint, saved.read_manifest(checkpoint)) == (origin, "new")
    twin = shutil.copytree(copy, tmp_path / "twin")
    assert saved.find_origin(twin, saved.newest(twin), saved.read_manifest(checkpoint))[1] is None


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def flip(file) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a truncated shard": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "a flipped bit in a shard": ("__0_0.distcp", flip),
    "a missing shard": ("__0_0.distcp", os.remove),
    "a flipped bit in the index": (".metadata", flip),
    "a missing index": (".metadata", os.remove),
    "a missing manifest": ("manifest.json", os.remove),
    "an empty manifest": ("manifest.json", lambda path: path.write_text("")),
    "a manifest of something else": ("manifest.json", lambda path: path.write_text("[1]")),
    "a manifest of bytes": ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "an edited manifest": ("manifest.json", lambda path: path.write_text(path.read_text().replace("42", "43"))),
    "a folder for a shard": ("__0_0.distcp", lambda path: (path.unlink(), path.mkdir())),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_taken(run, refused, copied, capsys, damage):
    name, harm = DAMAGES[damage]
    newest = copied / "checkpoints" / "step-00000006"
    harm(newest / name)
    whole = steps_of(copied)
    message = refused("r", "--resume", newest)
    assert message.startswith(f"--resume {newest}: step-00000006 is damaged ({name}")
    assert run("r", "--resume", "auto") == 0
    output = capsys.readouterr().out
    assert f"skipped    step-00000006 is damaged: {name}" in output
    assert "step-00000004 at step 4" in output
    assert steps_of(copied) == whole


NOT_MINE = ("step-best", "step-00000002.bak", "step-2", "step-000000002", "step-0000000x", ".step-notes")


def test_only_a_name_of_eight_digits_whose_manifest_agrees_is_a_checkpoint(run, copied, finished, capsys):
    """Copies under other names sort behind all others as text, and are their owner's, not the rotation's."""
    folder = copied / "checkpoints"
    for name in NOT_MINE:
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000009").mkdir()  # what is no checkpoint under a checkpoint's name
    shutil.copytree(folder / "step-00000002", folder / "step-00000008")
    assert [path.name for path in saved.complete(copied)] == checkpoint_names(2, 4, 6)
    assert saved.newest(copied) == folder / "step-00000006"
    assert run("r", *words("--resume auto --num-steps 7 --checkpoint-interval 1 --keep-checkpoints 1")) == 0
    output = capsys.readouterr().out
    assert "skipped    step-00000008 is damaged: manifest.json is of step 2" in output
    assert "step-00000006 at step 6" in output
    left = sorted([*NOT_MINE, *checkpoint_names(7, 8, 9)])
    assert names(copied) == left
    assert all(
        contents_of(folder / name) == contents_of(finished / "checkpoints" / "step-00000002") for name in NOT_MINE
    )


def contents_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_of_a_checkpoint_under_another_name_can_be_named(run, refused, copied, finished, tmp_path):
    path = shutil.copytree(copied / "checkpoints" / "step-00000002", copied / "checkpoints" / "step-best")
    assert "holds newer checkpoints" in refused("r", "--resume", path)
    assert run("branch", "--resume", path) == 0
    assert steps_of(tmp_path / "branch") == steps_of(finished)[2:]


def test_a_pipe_in_a_checkpoint_is_damage_and_no_wait(run, refused, copied, capsys):
    newest, index = copied / "checkpoints" / "step-00000006", copied / "checkpoints" / "step-00000004" / ".metadata"
    for path in (newest / "manifest.json", index):
        path.unlink()
        os.mkfifo(path)
    assert saved.newest(copied) == index.parent
    assert f"{newest}: step-00000006 is damaged (manifest.json: not a regular file)" in refused("r", "--resume", newest)
    forged = json.loads((index.parent / "manifest.json").read_text())
    forged["files"].pop(".metadata")  # whoever wrote the manifest may have left it out
    del forged["sha256"]
    (index.parent / "manifest.json").write_text(json.dumps(forged | {"sha256": saved.manifest_checksum(forged)}))
    assert "not a regular file" in refused("branch", "--resume", index.parent, exit_code=1)
    index.parent.joinpath("manifest.json").unlink()
    assert run("r", "--resume", "auto") == 0
    assert "step-00000002 at step 2" in capsys.readouterr().out


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_is_removed(run, refused, copied):
    for folder in (copied / "checkpoints").iterdir():
        flip(folder / "__0_0.distcp")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    message = refused("r", "--resume", "auto", "--num-steps", STEPS + 2, exit_code=1)
    assert message.startswith(f"--resume auto: every checkpoint in {copied / 'checkpoints'} is damaged; ")
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_a_stream_of_many_lanes_goes_on_from_its_checkpoint(run, tmp_path, capsys):
    """A lane for each sequence of a step: from 11 on their numbers sort otherwise as text."""
    stream = words("--streaming --batch-size 16 --checkpoint-interval 2 --resume auto")
    stream += ["--dataset", ROOT / "assets" / "demo" / "stories"]
    assert run("s", *stream, "--num-steps", 4) == 0
    assert run("s", *stream, "--num-steps", 6) == 0
    output = capsys.readouterr().out
    assert "damaged" not in output and "step-00000004 at step 4" in output
    assert [line[0] for line in steps_of(tmp_path / "s")] == [1, 2, 3, 4, 5, 6]


# ----------------------------------------------------------------------------------------------------------------------
# Trust


class Attack:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def forge(checkpoint) -> None:
    """Makes the manifest fit the files, as somebody with ill intent would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    files = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    manifest["files"] = {f.name: [f.stat().st_size, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"sha256": saved.manifest_checksum(manifest)}))


@pytest.mark.parametrize("place", ["index", "bytes entry", "tensor"])
def test_a_checkpoint_runs_no_code(refused, copied, tmp_path, place):
    checkpoint, mark, name = copied / "checkpoints" / "step-00000004", tmp_path / "mark", "model.model.norm.weight"
    attack = Attack(f"touch {mark}")
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    if place == "index":
        index.planner_data = attack
    else:
        torch.save(attack, checkpoint / "__1_0.distcp")
        entry = next(key for key in index.storage_data if key.fqn == name)
        where = type(index.storage_data[entry])("__1_0.distcp", 0, (checkpoint / "__1_0.distcp").stat().st_size)
        if place == "bytes entry":
            del index.storage_data[entry]
            entry, index.state_dict_metadata[name] = (
                dcp_metadata.MetadataIndex(name),
                dcp_metadata.BytesStorageMetadata(),
            )
        index.storage_data[entry] = where
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    forge(checkpoint)
    assert f"--resume {checkpoint}: cannot be loaded" in refused("branch", "--resume", checkpoint, exit_code=1)
    assert not mark.exists()
    pickle.loads(pickle.dumps(attack))
    assert mark.exists()  # the attack itself works


# ----------------------------------------------------------------------------------------------------------------------
# Disks that fail


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Writing more than `size` bytes into one file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_the_run_goes_on_and_exits_with_1(run, refused, finished, tmp_path, capsys):
    run("r", "--checkpoint-interval", 2, stop_after=2)
    with files_of_at_most(100_000):
        message = refused("r", "--resume", "auto", "--checkpoint-interval", 2, exit_code=1)
    assert message.startswith("--checkpoint-interval: 2 checkpoints could not be saved")
    output = capsys.readouterr().out
    for step in (4, 6):
        assert f"failed     checkpoint step-{step:08d}: [Errno 27] File too large; the run goes on" in output
    assert names(tmp_path / "r") == checkpoint_names(2)
    assert steps_of(tmp_path / "r") == steps_of(finished)
    assert run("r", "--resume", "auto", "--checkpoint-interval", 2) == 0  # there is room again
    assert names(tmp_path / "r") == checkpoint_names(4, 6)


def test_a_stop_that_could_not_be_saved_is_a_failure(run, capsys, tmp_path):
    with files_of_at_most(100_000):
        assert run("r", stop_after=2) == 1
    assert "saved in" not in capsys.readouterr().out


def test_no_rank_saves_while_another_still_writes(device, tmp_path, monkeypatch, capsys):
    settings = parse(["--demo", "--checkpoint-interval", 1, "--async-checkpoint"])
    saver = store.Checkpoints(settings, tmp_path, {}, device, lambda: None)
    monkeypatch.setattr(store.dist, "all_reduce", lambda tensor, op: tensor.fill_(1))  # of the other rank
    saver.save(types.SimpleNamespace(step=3))
    assert "skipped    checkpoint at step 3: the one before is still being written" in capsys.readouterr().out


def test_a_slow_disk_skips_checkpoints_and_says_so(run, monkeypatch, tmp_path, capsys):
    save, say, last_skipped = store.dcp.save, store.say, threading.Event()

    def save_slowly(*args, **options):
        assert last_skipped.wait(300)
        return save(*args, **options)

    def say_and_note(text):
        say(text)
        if text.startswith(f"skipped    checkpoint at step {STEPS - 1}"):
            last_skipped.set()

    monkeypatch.setattr(store.dcp, "save", save_slowly)
    monkeypatch.setattr(store, "say", say_and_note)
    assert run("r", "--checkpoint-interval", 1) == 0
    assert "skipped    checkpoint at step 2" in capsys.readouterr().out
    assert names(tmp_path / "r") == checkpoint_names(1, STEPS)


# ----------------------------------------------------------------------------------------------------------------------
# What is saved, exported or called done is finite

DIVERGENT = words("--lr 1e6 --lr-scheduler constant --checkpoint-interval 1 --keep-checkpoints 1 --no-async-checkpoint")


def saved_values(checkpoint) -> dict[str, torch.Tensor]:
    index = SafeReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    store.dcp.load(tensors, storage_reader=SafeReader(checkpoint))
    return tensors


@pytest.mark.parametrize(
    "divergence", ["", "--lr 1e30 --max-grad-norm 0 --lr-scheduler constant_with_warmup --warmup-steps 1"]
)
def test_a_broken_model_is_never_saved_and_the_last_good_checkpoint_stays(run, refused, tmp_path, divergence):
    message = refused("r", *DIVERGENT, *words(divergence), "--num-steps", 30, exit_code=1)
    step = int(re.search(r"at step (\d+); the last good checkpoint is step-(\d+)", message)[1])
    assert names(tmp_path / "r") == checkpoint_names(step - 1)
    values = saved_values(tmp_path / "r" / "checkpoints" / f"step-{step - 1:08d}")
    assert all(tensor.isfinite().all() for tensor in values.values() if tensor.is_floating_point())
    assert not any(line.get("final") for line in metrics_of(tmp_path / "r"))

    # as every start from there will
    message = refused("r", *DIVERGENT, *words(divergence), "--num-steps", 30, "--resume", "auto", exit_code=1)
    assert f"at step {step}; the last good checkpoint is step-{step - 1:08d}" in message


def test_a_run_whose_last_update_breaks_the_model_is_not_done(refused, tmp_path):
    """The loss of the last step is that from before its update."""
    flags = words("--lr 3e38 --weight-decay 0 --lr-scheduler constant --num-steps 1 --checkpoint-interval 1")
    message = refused("r", *flags, "--export", tmp_path / "export", exit_code=1)
    assert message.startswith(
        "the update made weights or optimizer states infinite or NaN at step 1; nothing was saved"
    )
    assert not (tmp_path / "export").exists() and not (tmp_path / "r" / "checkpoints").exists()
    (line,) = metrics_of(tmp_path / "r")
    assert "final" not in line


def test_metrics_are_valid_json_where_a_figure_is_no_number(refused, tmp_path):
    refused("r", *words("--lr 3e38 --lr-scheduler constant --eval-interval 1"), exit_code=1)
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert lines[-1]["eval_loss"] is None


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # its optimizer takes no step
def test_a_checkpoint_that_is_not_finite_is_neither_trained_nor_exported(run, refused, tmp_path, monkeypatch):
    @torch.no_grad()
    def overflow(optimizer, skip):
        optimizer.param_groups[1]["params"][0].to_local().fill_(math.inf)

    with monkeypatch.context() as unchecked:  # as a version without the checks saved it
        unchecked.setattr(train_fsdp, "check_pass", lambda job, batch: None)
        unchecked.setattr(train_fsdp, "step_or_skip", overflow)
        run("r", "--max-skipped", STEPS)
    path = tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}"
    assert not all(tensor.isfinite().all() for tensor in saved_values(path).values())
    assert refused("r", "--resume", "auto", "--num-steps", 9, exit_code=1).startswith(
        f"--resume {path}: it holds values"
    )
    export = tmp_path / "export"
    message = refused("r", "--resume", path, "--num-steps", 0, "--export", export, exit_code=1)
    assert message.startswith(f"--resume {path}: it holds values") and not export.exists()


# ----------------------------------------------------------------------------------------------------------------------
# Export


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(0, 1500, 31).view(1, -1), use_cache=False).logits


@pytest.mark.parametrize("name", ["smollm3", "llama", "qwen3_moe", "mixtral", "gpt2"])
@pytest.mark.parametrize("size", [5e9, 2e5])
def test_an_export_is_the_trained_model(run, tmp_path, monkeypatch, name, size):
    """transformers loads it with the trained model's logits, and it is the next run's start."""
    trained, build_model = [], train_fsdp.build_model
    keep = lambda *args, **options: trained.append(build_model(*args, **options)) or trained[-1]  # noqa: E731
    monkeypatch.setattr(train_fsdp, "build_model", keep)
    monkeypatch.setattr(export, "EXPORT_SHARD", size)
    model = write_model(tmp_path / "model", MODELS[name][0], **MODELS[name][1])
    assert run("r", "--model", model, "--num-steps", 2, "--export", tmp_path / "export") == 0
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (size > 1e6) == (len(files) == 1)
    if len(files) > 1:
        index = saved.read_json(tmp_path / "export" / "model.safetensors.index.json")
        sizes = [tensor.nbytes for file in files for tensor in load_file(tmp_path / "export" / file).values()]
        assert index["metadata"]["total_size"] == sum(sizes)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "export").encode("The fox") != []
    expected = logits_of(trained[-1])
    assert torch.equal(logits_of(loaded), expected)
    again = words(f"--init pretrained --num-steps 0 --model {tmp_path / 'export'} --export {tmp_path / 'again'}")
    assert run("again", *again) == 0
    assert torch.equal(logits_of(trained[-1]), expected)
    assert not (tmp_path / "again-run").exists()


@pytest.mark.parametrize("technique", ["--precision bf16-pure", "--precision fp8 --fp8-emulate", "--precision bf16"])
def test_an_export_keeps_the_precision_of_the_weights(run, tmp_path, technique):
    assert run("r", "--num-steps", 2, "--export", tmp_path / "export", *words(technique)) == 0
    pure = torch.bfloat16 if "pure" in technique else torch.float32
    assert {tensor.dtype for tensor in load_file(tmp_path / "export" / "model.safetensors").values()} == {pure}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == pure


def test_a_checkpoint_is_exported_without_training(run, copied, tmp_path):
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    for step in (2, 6):
        path = copied / "checkpoints" / f"step-{step:08d}"
        assert run("r", *words(f"--num-steps 0 --resume {path} --export {tmp_path / f'export-{step}'}")) == 0
    two, six = (load_file(tmp_path / f"export-{step}" / "model.safetensors") for step in (2, 6))
    assert two.keys() == six.keys() and not torch.equal(two["lm_head.weight"], six["lm_head.weight"])
    assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


def test_a_story_is_written_from_a_checkpoint_and_from_an_export_as_the_run_itself_wrote_it(run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The fox\n\nA  frog \n")
    write = ["--sample-prompts", tmp_path / "prompts", *words("--sample-prompt Once --sample-tokens 8")]
    places = ["--checkpoint-interval", STEPS, "--export", tmp_path / "export"]
    assert run("r", *write, *places) == 0
    stories = metrics_of(tmp_path / "r")[-1]["samples"]
    assert [story["prompt"] for story in stories] == ["Once", "The fox", "A  frog"]
    texts = [" ".join(story["text"].split()) for story in stories]  # lines are broken at words
    said = " ".join(capsys.readouterr().out.split())
    for story, text in zip(stories, texts, strict=True):
        assert story["text"].startswith(story["prompt"]) and len(story["text"]) > len(story["prompt"])
        assert text in said
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for source in (["--resume", tmp_path / "r"], ["--init", "pretrained", "--model", tmp_path / "export"]):
        assert train(["--num-steps", 0, *source, *write], run.device) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert [said.count(text) for text in texts] == [1, 1, 1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("contents, why", [(None, "No such file"), ("", "no prompt"), (b"\xff", "no UTF-8")])
def test_a_file_without_prompts_is_one_line(refused, tmp_path, contents, why):
    if contents is not None:
        (tmp_path / "p").write_bytes(contents.encode() if isinstance(contents, str) else contents)
    message = refused("r", "--sample-prompts", tmp_path / "p")
    assert message.startswith(f"--sample-prompts {tmp_path / 'p'}: ") and why in message


def test_a_story_where_there_is_no_tokenizer_is_one_line(refused, flags, tmp_path):
    model = flags[flags.index("--model") + 1]
    message = refused("r", *words(f"--dataset synthetic --tokenizer {model} --sample-prompt Once"))
    assert message.startswith(f"--tokenizer {model}: ") and message.endswith("or leave out the prompts")


def test_what_a_run_prints_at_its_end_can_be_pasted(run, flags, tmp_path, capsys):
    places = ["--checkpoint-interval", STEPS, "--output-dir", tmp_path, "--run-name", "with space"]
    assert run("r", *places) == 0
    after = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.split("\n\n")[-1].splitlines()[-4:])
    assert list(after) == ["sample", "export", "go", "report"]
    for name in ("sample", "export", "go"):
        arguments = shlex.split("--" + after[name].partition(" --")[2])
        assert train([*arguments, *["--sample-tokens", "4"][: 2 * (name == "sample")]], run.device) == 0
    said = capsys.readouterr().out
    prompt = shlex.split(after["sample"])[-1]  # the first words of the text
    assert f"exported   {tmp_path / 'with space-export'}" in said and prompt in " ".join(said.split())
    lines = metrics_of(tmp_path / "with space")
    assert lines[-1]["step"] == 2 * STEPS and after["report"].endswith("with space/report.html")
    assert [start["step"] for start in config_of(tmp_path / "with space")["starts"]] == [0, STEPS]


def test_each_start_is_told_with_what_it_does_again(run, copied):
    shutil.rmtree(copied / "checkpoints" / checkpoint_names(STEPS)[0])
    assert run("r", "--resume", "auto") == 0
    first, again = config_of(copied)["starts"]
    assert (first["step"], first["lost_steps"]) == (0, 0)
    assert (again["step"], again["lost_steps"], again["world_size"]) == (STEPS - 2, 2, 1)
    assert again["time"] >= first["time"]
    assert "2 starts, 2 logged steps done again" in (copied / "report.html").read_text()


def test_a_page_that_cannot_be_written_is_one_line_and_costs_nothing_else(run, tmp_path, capsys):
    with files_of_at_most(1_000_000):
        assert run("r", "--no-final-checkpoint") == 0
    assert capsys.readouterr().out.count("report     not written: File too large\n") == 1
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [".lock", "config.json", "metrics.jsonl"]


def test_a_stopped_and_a_failed_run_leave_their_page(run, refused, tmp_path):
    assert run("stopped", stop_after=2) == StopRequest.EXIT_CODE
    assert f"ended at step 2 of {STEPS}" in (tmp_path / "stopped" / "report.html").read_text()
    refused("failed", "--lr", "1e30", "--max-grad-norm", 0, "--max-skipped", 0, exit_code=1)
    assert '"heading": "Skipped steps"' in (tmp_path / "failed" / "report.html").read_text()


def test_an_export_that_would_overwrite_or_cannot_be_written_is_refused_before_training(refused, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "there", tmp_path / "file" / "below"):
        assert f"{folder}" in refused("r", "--export", folder)
        assert not (tmp_path / "r").exists()


def test_the_same_command_again_finds_its_export_whole_and_is_done(run, refused, tmp_path, monkeypatch, capsys):
    export, same = tmp_path / "export", ("r", "--resume", "auto", "--export", tmp_path / "export")
    assert run(*same) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(train_fsdp, "prepare", lambda *_: pytest.fail("it starts once more"))
    assert run(*same) == 0  # no checkpoint is there
    assert f"nothing to do: {export} holds this run after step {STEPS}" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert f"{export} holds this run after step 6, which is to be at step 9" in refused(*same, "--num-steps", 9)
    exists = f"--export: {export} exists already"
    assert refused(*same, "--seed", 1).startswith(exists)
    assert refused("other", *same[1:]).startswith(exists)
    assert refused("r", "--export", export).startswith(exists)
    weights = export / "model.safetensors"
    for damaged in (before[weights][:-1], b""):
        weights.write_bytes(damaged)
        assert refused(*same).startswith(exists)
    weights.unlink()
    assert refused(*same).startswith(exists)
    os.mkfifo(weights)
    assert refused(*same).startswith(exists)


def test_an_export_is_a_runs_own_by_id_step_and_every_flag_that_shapes_weights(run, refused, settled, tmp_path, capsys):
    same = ("--resume", "auto", "--export", tmp_path / "export")
    assert run("r", *same) == 0
    shutil.copytree(settled, tmp_path / "copy")
    assert run("branch", "--resume", settled / "checkpoints" / "step-00000002", "--checkpoint-interval", 3) == 0
    assert run("r", *same, "--log-interval", 5, "--checkpoint-interval", 9) == 0
    assert "nothing to do" in capsys.readouterr().out
    for other in ("copy", "branch"):
        assert "exists already" in refused(other, *same)
    shaping = "--lr 0.05,--weight-decay 0,--betas 0.5 0.6,--batch-size 2,--gradient-accumulation-steps 2"
    for flag in (shaping + ",--warmup-steps 1,--zero-stage 1,--text-field other,--eval-interval 1").split(","):
        assert "exists already" in refused("r", *same, *words(flag)), flag
    assert run("r", "--resume", "auto", "--num-steps", 7, "--checkpoint-interval", 1) == 0
    assert "holds this run after step 6, which is to be at step 7" in refused("r", *same, "--num-steps", 7)
    assert "holds this run after step 6, which is to be at step 7" in refused("r", *same, "--num-steps", 6)


@pytest.mark.parametrize("size", [5e9, 2e4])
def test_a_run_that_had_taken_all_its_steps_exports_once(run, refused, copied, tmp_path, monkeypatch, size):
    monkeypatch.setattr(export, "EXPORT_SHARD", size)
    same = ("r", "--resume", "auto", "--num-steps", 4, "--export", tmp_path / "export")  # of 6 that are taken
    assert run(*same) == 0
    assert {export.origin_of(tmp_path / "export")[1]} == {STEPS}
    assert run(*same) == 0
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) > 1) == (size < 1e6)
    files[0].unlink()
    assert "exists already" in refused(*same)


def test_an_export_that_fails_is_one_line_and_leaves_nothing_behind(refused, tmp_path):
    with files_of_at_most(50_000):
        message = refused("r", "--export", tmp_path / "export", exit_code=1)
    assert message.startswith(f"--export {tmp_path / 'export'}: cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


# ----------------------------------------------------------------------------------------------------------------------
# Signals, kills, other numbers of ranks: the program under torchrun


SIGNAL_STEPS = 100_000  # never reached


def wait_until(condition, process, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def launch(command: list) -> subprocess.Popen:
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def ranks_of(process) -> list[psutil.Process]:
    """The ranks that a torchrun has started, in the order of their numbers."""
    children = psutil.Process(process.pid).children()
    return sorted(
        (child for child in children if PROGRAM in child.cmdline()), key=lambda child: int(child.environ()["RANK"])
    )


def steps_done(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.slow
def test_one_run_over_signals_kills_and_other_numbers_of_ranks(device, flags, tmp_path):
    """4 ranks until one gets SIGTERM, 2 ranks in stage 2 with one killed and started again, 4 ranks in two replicas,
    1 rank; beside it the same global batch on one rank, undisturbed."""
    folder = tmp_path / "r"
    common = [*flags, "--lr-scheduler", "constant", "--lr", "1e-4", "--batch-size", 1, "--num-workers", 1]
    common += ["--output-dir", tmp_path, "--run-name", "r", "--resume", "auto"]

    # 4 ranks; a signal to one of them
    process = launch([*torchrun_command(4), PROGRAM, *common, "--num-steps", SIGNAL_STEPS])
    wait_until(lambda: steps_done(folder) >= 3, process)
    ranks_of(process)[2].send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=600)
    stopped = steps_done(folder)
    assert process.returncode != 0
    assert "by a signal to another rank after step" in output
    assert names(folder) == checkpoint_names(stopped)
    assert "nothing to save" not in errors
    assert "exitcode  : 143" in errors

    # 2 ranks; one is killed and torchrun starts both again
    more = ["--zero-stage", 2, "--num-steps", stopped + 60, "--checkpoint-interval", 10, "--no-async-checkpoint"]
    process = launch([*torchrun_command(2, "--max-restarts=1"), PROGRAM, *common, *more])
    wait_until(lambda: names(folder)[-1:] > checkpoint_names(stopped), process)
    ranks_of(process)[1].kill()
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert output.count("resumed    ") == 2

    # 4 ranks in two replicas, 1 rank
    process = start([*torchrun_command(4), PROGRAM, *common, "--dp-replicate-size", 2, "--num-steps", stopped + 64,
                     "--checkpoint-interval", 100])  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "world size 2 -> 4" in process.stdout and "dp replicate size 1 -> 2" in process.stdout
    assert train([*common, "--num-steps", stopped + 68], device) == 0
    steps = stopped + 68
    whole = [*flags, "--lr-scheduler", "constant", "--lr", "1e-4", "--num-steps", steps]
    assert train([*whole, "--output-dir", tmp_path, "--run-name", "whole"], device) == 0
    survived, reference = steps_of(folder), steps_of(tmp_path / "whole")
    assert [step[0] for step in survived] == list(range(1, steps + 1))
    assert [step[1] for step in survived] == pytest.approx([step[1] for step in reference], rel=1e-5)
    assert [step[3:] for step in survived] == [step[3:] for step in reference]


@pytest.mark.parametrize("number", [StopRequest.SIGNALS[0], *map(slow_case, StopRequest.SIGNALS[1:])])
def test_the_program_alone_saves_and_exits_with_143(flags, tmp_path, number):
    places = ["--output-dir", tmp_path, "--run-name", "r", "--num-workers", 1, "--num-steps", SIGNAL_STEPS]
    process = launch([sys.executable, PROGRAM, *flags, *places])
    wait_until(lambda: steps_done(tmp_path / "r") >= 3, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=600)
    assert (process.returncode, without_repeated_flags(errors)) == (143, "")
    assert f"stopped    by {number.name} after step" in output
    assert names(tmp_path / "r") == checkpoint_names(steps_done(tmp_path / "r"))


@pytest.mark.slow
def test_a_run_killed_during_a_save_repeats_its_steps_to_the_bit():
    program = ROOT / "benchmarks" / "kill_test.py"
    process = start([sys.executable, program, *words("--kills 1 --ranks 2 --num-steps 100 --seed 4")])
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout[process.stdout.index("{") :])
    assert (result["kills"], result["steps"]) == (1, 100)
    assert result["every_step_once"] and result["same_losses_to_the_bit"]
