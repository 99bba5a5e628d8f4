"""A run that is killed at any moment loses at most the steps since its last checkpoint, and resumes as the same run."""

import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from checkpoints import files_of_at_most, flip, forge, reseal, tensors_of
from conftest import (
    DEMO,
    PROGRAM,
    ROOT,
    STORIES,
    Stop,
    chat,
    forked,
    forking,
    lines_logged,
    metrics_of,
    slow_case,
    small_run,
    start,
    torchrun_command,
    train,
    wait_until,
    words,
    write_model,
)
from corpora import write_records
from multirank import MODELS, SIZES, program
from tokenizers import normalizers
from torch.distributed.checkpoint import metadata as dcp_metadata
from transformers import AutoTokenizer

from harness import job, loop
from harness import model as models
from harness.base import saved
from harness.job import folders
from harness.job.signals import StopRequest
from harness.state import store

needs_stager = pytest.mark.skipif(torch.__version__ < store.STAGER_SINCE, reason="saves are waited for on this torch")
STEPS = 6
KEYS = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "eval_loss", "final")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A tiny run of a few steps; flags of a test win."""
    flags = f"--dataset demo --num-steps {STEPS} --sequence-length 32 --batch-size 4 --lr 1e-3"
    return small_run(tmp_path_factory.mktemp("checkpoints"), flags, tie_word_embeddings=False)


@pytest.fixture
def arguments(flags, tmp_path) -> list:
    """Those of such a run in tmp_path/r, for `mistake`."""
    return [*flags, "--output-dir", tmp_path]


@pytest.fixture
def run(device, arguments):
    """Trains in this process under tmp_path/NAME; returns the exit code."""

    def start_run(name: str, *more, stop_after: int = -1, passes: int = 0) -> int:
        return train([*arguments, "--run-name", name, *more], device, Stop(stop_after, passes))

    return start_run


@pytest.fixture(scope="module")
def finished(device, flags, tmp_path_factory):
    """A finished run with a checkpoint of every second step; tests copy it before they touch it."""
    folder = tmp_path_factory.mktemp("finished")
    more = words(
        f"--output-dir {folder} --run-name r --checkpoint-interval 2 --keep-checkpoints 9 --no-async-checkpoint"
    )
    assert train([*flags, *more], device) == 0
    return folder / "r"


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run, as its only one."""
    return shutil.copytree(finished, tmp_path / "r")


EVAL_LOSS = KEYS.index("eval_loss")


def steps_of(folder) -> list[list]:
    """What a run logged of each step, and at its end, but for what depends on the clock."""
    return [[line.get(key) for key in KEYS] for line in metrics_of(folder)]


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def names(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def checkpoint_names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def tensors_at_the_end(folder) -> dict[str, torch.Tensor]:
    return tensors_of(saved.newest_checkpoint(folder))


def are_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def reported(output: str, name: str) -> str:
    """Return the text of the output's line that begins with a name."""
    return next((line[11:] for line in output.splitlines() if line.startswith(f"{name:10} ")), "")


# ----------------------------------------------------------------------------------------------------------------------
# The same run


STOPPED = [  # flags of a run, and how many forward passes after step 3 the stop comes
    ("--precision bf16 --num-workers 2 --document-mask", 0),
    ("--precision bf16-pure --optimizer muon --lr-scheduler warmup_stable_decay", 0),
    slow_case("--precision fp8 --fp8-emulate --zero-stage 2", 0),
    slow_case("--optimizer adamw8bit --model {square}", 0),
    ("--optimizer adamw-bf16 --model {dropout}", 0),
    slow_case("--optimizer muon --zero-stage 1", 0),
    slow_case("--cpu-offload --zero-stage 0 --precision bf16-pure", 0),
    ("--streaming --batch-size 16 --dataset {stories}", 0),  # each sequence of a step has its stream shard
    ("--dataset web={stories}:0.7 code={stories}:0.3 --eval-interval 2 --eval-steps 2", 0),
    ("--gradient-accumulation-steps 4 --batch-size 1 --model {dropout}", 1),  # within step 4
    slow_case("--gradient-accumulation-steps 4 --batch-size 1 --streaming --dataset {stories}", 1),
    ("--eval-interval 3 --eval-steps 2 --num-steps 3", 1),  # within the last evaluation
]


@pytest.mark.parametrize("technique, passes", STOPPED)
def test_a_stopped_run_continues_bit_for_bit(run, tmp_path, technique, passes):
    """With the losses, weights, optimizer states and random numbers of a run that was not stopped; a step or evaluation
    that the stop cut off is repeated."""
    model_type, sizes = MODELS["gpt2"]
    square = SIZES | {"intermediate_size": 64, "num_key_value_heads": 4, "tie_word_embeddings": False}
    places = {
        "dropout": write_model(tmp_path / "dropout", model_type, **sizes | {"resid_pdrop": 0.2}),
        "square": write_model(tmp_path / "square", "llama", **square),  # torchao compiles its step for each shape
        "stories": STORIES,
    }
    technique = words(technique.format(**places))
    assert run("uninterrupted", *technique) == 0
    assert run("r", *technique, stop_after=3, passes=passes) == StopRequest.EXIT_CODE
    assert names(tmp_path / "r") == checkpoint_names(3)
    assert [line["step"] for line in metrics_of(tmp_path / "r")] == [1, 2, 3]
    assert "eval_loss" not in metrics_of(tmp_path / "r")[-1]
    assert run("r", "--resume", "auto", *technique) == 0
    assert steps_of(tmp_path / "r") == steps_of(tmp_path / "uninterrupted")
    assert are_equal(*(tensors_at_the_end(tmp_path / name) for name in ("r", "uninterrupted")))


@pytest.mark.smoke
def test_a_stopped_run_continues_by_its_own_config_alone(run, device, tmp_path):
    technique = words("--gradient-accumulation-steps 2 --precision bf16 --seed 3 --betas 0.8 0.9")
    assert run("uninterrupted", *technique) == 0
    assert run("r", *technique, stop_after=3) == StopRequest.EXIT_CODE
    assert train(["--config", tmp_path / "r" / "config.json", "--run-name", "r", "--resume", "auto"], device) == 0
    assert steps_of(tmp_path / "r") == steps_of(tmp_path / "uninterrupted")


@pytest.mark.smoke
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


def test_a_stop_after_the_last_step_is_the_end_of_the_run(run, finished, tmp_path, capsys):
    """Its state, saved while training went on, is the one that others wait for."""
    assert run("r", stop_after=STEPS) == 0
    assert "\nstopped " not in capsys.readouterr().out
    assert names(tmp_path / "r") == checkpoint_names(STEPS)
    assert are_equal(tensors_at_the_end(tmp_path / "r"), tensors_at_the_end(finished))


def test_a_run_whose_last_state_is_not_saved_says_which_one_is_exported(run, tmp_path, capsys):
    assert run("r", *words("--no-final-checkpoint --checkpoint-interval 4")) == 0
    assert names(tmp_path / "r") == checkpoint_names(4)
    kept = f"step-00000004, used by these commands: step {STEPS} was not saved"
    assert reported(capsys.readouterr().out, "kept").startswith(kept)


# ----------------------------------------------------------------------------------------------------------------------
# Another run


def write_lower_case(folder) -> None:
    """Writes the demo's tokenizer with another normalizer."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(folder)


def test_data_and_a_tokenizer_that_changed_under_their_names_are_refused(run, mistake, tmp_path):
    shutil.copytree(DEMO, tmp_path / "t", ignore=shutil.ignore_patterns("stories*"))
    text = tmp_path / "corpus.txt"
    text.write_text("The fox had a red ball. " * 200)
    same = ("--tokenizer", tmp_path / "t", "--dataset", text, "--resume", "auto")
    assert run("r", *same, "--num-steps", 1) == 0
    write_lower_case(tmp_path / "t")
    assert mistake(*same).startswith("--tokenizer: its vocabulary is not the checkpoint's")
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "t")
    text.write_text("The owl had a red ball. " * 200)
    assert mistake(*same).startswith(f"--dataset: {text} is not what it was at the checkpoint; a resumed run must")


def test_other_trained_turns_are_refused_by_their_flag(run, mistake, tmp_path):
    for name in ("a", "b"):
        write_records(tmp_path / f"{name}.jsonl", [chat(f"Hello {name}.", "The fox. " * 9)] * 50)
    for name, sources in {"one": ["a"], "two": ["a", "b"]}.items():
        same = ("--chat-template", "chatml", "--dataset", *(tmp_path / f"{source}.jsonl" for source in sources))
        assert run(name, *same, "--num-steps", 1) == 0
        message = mistake("--run-name", name, *same, "--resume", "auto", "--chat-loss", "all")
        assert message.startswith("--chat-loss was assistant in the checkpoint and is all now")


OTHER_RUNS = {
    "--sequence-length 64": "--sequence-length was 32",
    "--seed 7": "--seed was 42",
    "--dataset synthetic": "--dataset was demo in the checkpoint and is synthetic now",
    "--packing none": "--packing was None in the checkpoint and is none now",
    "--optimizer muon": "--optimizer was adamw in the checkpoint and is muon now",
    "--model {wider}": "--model: intermediate_size was 96",
    "--tokenizer {other}": "--tokenizer was {demo} in the checkpoint and is {other} now",
}


def test_another_run_is_refused_by_what_changed(copied, mistake, tmp_path):
    write_model(tmp_path / "wider", "llama", **SIZES | {"intermediate_size": 128, "tie_word_embeddings": False})
    write_lower_case(tmp_path / "other")
    before = (copied / "metrics.jsonl").read_bytes()
    places = {"wider": tmp_path / "wider", "other": tmp_path / "other", "demo": DEMO}
    for change, named in OTHER_RUNS.items():
        message = mistake("--resume", "auto", "--num-steps", 9, *words(change.format(**places)))
        assert message.startswith(named.format(**places))
    assert (copied / "metrics.jsonl").read_bytes() == before
    assert names(copied) == checkpoint_names(2, 4, 6)


def test_eval_documents_are_not_trained_on_by_a_resume_without_evaluations(run, mistake):
    assert run("r", "--eval-interval", 2, "--dataset", STORIES / "train.jsonl", "--num-steps", 2) == 0
    printed = mistake("--resume", "auto", "--dataset", STORIES / "train.jsonl")
    eval_part = "without the flag the run would train on its eval split"
    assert printed == f"--eval-interval was 2 in the checkpoint: {eval_part}; give it again"


CHANGES = {
    "--num-steps 8": "num steps 6 -> 8",
    "--lr 5e-4": "lr 0.001 -> 0.0005",
    "--batch-size 2": "batch size 4 -> 2",
    "--weight-decay 0": "weight decay 0.1 -> 0.0",
    "--zero-stage 2": "zero stage 3 -> 2",
    "--precision bf16": "precision fp32 -> bf16",
}


def test_changes_that_are_no_other_run_are_reported(run, copied, capsys):
    assert run("r", "--resume", "auto", *words(" ".join(CHANGES))) == 0
    output = capsys.readouterr().out
    assert [change for change in CHANGES.values() if change not in reported(output, "changed")] == []
    assert re.search(r"learning rate 0 -> \d", " ".join(output.split()))  # a finished cosine continues
    assert [line["step"] for line in metrics_of(copied)] == [*range(1, 9), 8]
    before, after = metrics_of(copied)[5:7]
    assert after["tokens_seen"] - before["tokens_seen"] == 2 * 32
    assert after["learning_rate"] < 5e-4


def test_a_start_that_waited_for_the_lock_resumes_from_what_the_other_saved(run, copied, tmp_path, monkeypatch, capsys):
    first = copied.rename(tmp_path / "first")
    lock = folders.lock_folder
    train_meanwhile = lambda folder: [shutil.copytree(first, folder, dirs_exist_ok=True), lock(folder)]  # noqa: E731
    monkeypatch.setattr(folders, "lock_folder", train_meanwhile)
    assert run("r", "--resume", "auto", "--num-steps", 7) == 0
    assert "step-00000006 at step 6" in capsys.readouterr().out
    assert [line["step"] for line in metrics_of(copied)] == [*range(1, 8), 7]


# ----------------------------------------------------------------------------------------------------------------------
# Another folder, another run


def test_a_run_that_continues_in_another_folder_than_its_checkpoints_is_a_new_one(run, copied, tmp_path, capsys):
    for path in saved.complete_checkpoints(copied):  # as if it had trained a while ago
        reseal(path, started=1e9, elapsed_before=5000.0, productive_before=4000.0)
    before, new = (copied / "config.json").read_bytes(), tmp_path / "new"
    path = copied / "checkpoints" / "step-00000002"
    assert run("new", "--resume", path, "--checkpoint-interval", 2) == 0
    output = capsys.readouterr().out
    assert reported(output, "resumed") == f"{path} at step 2"
    assert reported(output, "done").startswith("6 steps, 768 tokens, ")
    assert steps_of(new) == steps_of(copied)[2:]
    config, other = config_of(new), config_of(copied)
    assert config["run_id"] != other["run_id"] and len(config["starts"]) == 1
    manifest = saved.read_manifest(saved.newest_checkpoint(new))
    assert manifest["run_id"] == config["run_id"]
    assert manifest["elapsed_before"] < 5000 and manifest["productive_before"] < 4000 and manifest["started"] > 1e9
    assert (copied / "config.json").read_bytes() == before

    assert run("new", "--resume", "auto", "--num-steps", 7) == 0  # it continues as itself
    assert config_of(new)["run_id"] == config["run_id"] and len(config_of(new)["starts"]) == 2


def test_a_new_run_that_saved_nothing_does_not_start_over_in_silence(run, mistake, copied, tmp_path):
    path = copied / "checkpoints" / "step-00000004"
    run("new", "--resume", path)
    shutil.rmtree(tmp_path / "new" / "checkpoints")  # as a kill before its first checkpoint leaves it
    printed = mistake("--run-name", "new", "--resume", "auto")
    assert f"{tmp_path / 'new'} began with --resume {path} and has saved nothing; remove that folder" in printed


# ----------------------------------------------------------------------------------------------------------------------
# Saving


@needs_stager
def test_a_save_under_way_keeps_its_values_and_the_next_one_is_skipped(run, finished, tmp_path, monkeypatch, capsys):
    save, print0, skipped = store.dcp.save, job.print0, threading.Event()
    monkeypatch.setattr(store.dcp, "save", lambda *args, **to: skipped.wait(300) and save(*args, **to))
    monkeypatch.setattr(job, "print0", lambda *text: skipped.set() if text[0].startswith("skipped") else print0(*text))
    run("r", "--checkpoint-interval", 2, "--keep-checkpoints", 9)
    assert names(tmp_path / "r") == checkpoint_names(2, 6)
    assert "training paused for" in capsys.readouterr().out
    run("branch", "--resume", tmp_path / "r" / "checkpoints" / "step-00000002")
    assert steps_of(tmp_path / "branch") == steps_of(finished)[2:]


@needs_stager
def test_an_error_waits_for_the_save_that_is_under_way(run, tmp_path, monkeypatch):
    save, raised = store.dcp.save, threading.Event()

    def slow(*args, **to):
        raised.wait(60)
        time.sleep(0.3)
        return save(*args, **to)

    def fail(*_, **__):
        raised.set()
        raise RuntimeError("of step 2")

    steps = iter([models.clip_grad_norm, fail])
    monkeypatch.setattr(store.dcp, "save", slow)
    monkeypatch.setattr(models, "clip_grad_norm", lambda *args: next(steps)(*args))
    with pytest.raises(RuntimeError, match="of step 2"):
        run("r", "--checkpoint-interval", 1)
    assert names(tmp_path / "r") == checkpoint_names(1)


@needs_stager
def test_without_memory_for_copies_each_save_is_waited_for(run, finished, tmp_path, monkeypatch, capsys):
    """As where a container limits the memory that a GPU can copy to."""
    pin = lambda *_: torch.ones(1).view(2)  # noqa: E731 - a RuntimeError
    monkeypatch.setattr(store.DefaultStager, "stage", pin)
    assert run("r", "--checkpoint-interval", 2, "--keep-checkpoints", 9) == 0
    assert names(tmp_path / "r") == checkpoint_names(2, 4, 6)
    assert steps_of(tmp_path / "r") == steps_of(finished)
    assert capsys.readouterr().out.count("waits      for each checkpoint: no host memory for copies of it (") == 1


def test_a_full_disk_is_reported_and_the_run_continues_and_exits_with_1(run, mistake, finished, tmp_path, capsys):
    run("r", "--checkpoint-interval", 2, stop_after=2)
    with files_of_at_most(100_000):
        message = mistake("--resume", "auto", "--checkpoint-interval", 2, exit_code=1)
    assert message.startswith("--checkpoint-interval: 2 checkpoints could not be saved")
    output = capsys.readouterr().out
    for step in (4, 6):
        assert f"failed     checkpoint step-{step:08d}: [Errno 27] File too large; older checkpoints stay" in output
    assert names(tmp_path / "r") == checkpoint_names(2)
    assert steps_of(tmp_path / "r") == steps_of(finished)
    assert run("r", "--resume", "auto", "--checkpoint-interval", 2) == 0  # there is room again
    assert names(tmp_path / "r") == checkpoint_names(4, 6)


@pytest.mark.parametrize("failing, exit_code, kept", [(1, StopRequest.EXIT_CODE, [2]), (9, 1, [])])
def test_a_stop_is_a_failure_only_if_its_own_save_failed(
    run, finished, tmp_path, monkeypatch, capsys, failing, exit_code, kept
):
    """Where the first one, or the first nine, of all saves fail."""
    saves, save = itertools.count(1), store.dcp.save

    def fail_or_save(*args, **options):
        if next(saves) <= failing:
            raise OSError("no space left on device")
        return save(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(store.dcp, "save", fail_or_save)
        assert run("r", "--checkpoint-interval", 1, stop_after=2) == exit_code
    output = capsys.readouterr().out
    assert "failed     checkpoint step-00000001" in output and ("saved in" in output) == bool(kept)
    assert names(tmp_path / "r") == checkpoint_names(*kept)
    assert run("r", "--resume", "auto") == 0
    assert steps_of(tmp_path / "r") == steps_of(finished)


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def pipe(file) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "a truncated shard": ("__0_0.distcp", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "a flipped bit in a shard": ("__0_0.distcp", flip),
    "a missing shard": ("__0_0.distcp", os.remove),
    "a flipped bit in the index": (".metadata", flip),
    "a pipe for an index": (".metadata", pipe),
    "a pipe for a manifest": ("manifest.json", pipe),
    "a missing manifest": ("manifest.json", os.remove),
    "a manifest of bytes": ("manifest.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "a manifest of something else": ("manifest.json", lambda path: path.write_text("[1]")),
    "an edited manifest": ("manifest.json", lambda path: path.write_text(path.read_text().replace("42", "43"))),
}


def test_damage_is_named_and_the_checkpoint_before_is_taken(run, mistake, copied, tmp_path, capsys):
    newest, uninterrupted = copied / "checkpoints" / "step-00000006", steps_of(copied)
    shutil.copytree(newest, tmp_path / "kept")
    for damage, (name, harm) in DAMAGES.items():
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "kept", newest)
        harm(newest / name)
        message = mistake("--resume", newest)
        problem = "cannot be used" if name == "manifest.json" else "is damaged"
        assert message.startswith(f"--resume {newest}: step-00000006 {problem} ({name}"), damage
        assert message.endswith("); choose another"), damage  # auto has no effect without training
    assert run("r", "--resume", "auto") == 0
    output = capsys.readouterr().out
    assert "skipped    step-00000006 is damaged: manifest.json" in output
    assert "step-00000004 at step 4" in output
    assert steps_of(copied) == uninterrupted


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_is_removed(mistake, copied):
    newest, *others = reversed(saved.complete_checkpoints(copied))
    reseal(newest, format=1)
    for folder in others:
        flip(folder / "__0_0.distcp")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    other_format = f"manifest.json has format 1, and this version reads {saved.FORMAT}: resume or export with"
    for resume in (("--run-name", "branch", "--resume", newest), ("--resume", "auto")):
        assert other_format in mistake(*resume)
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    reseal(newest, format=saved.FORMAT)
    flip(newest / "__0_0.distcp")
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    message = mistake("--resume", "auto", "--num-steps", STEPS + 2, exit_code=1)
    assert message.startswith(f"--resume auto: every checkpoint in {copied / 'checkpoints'} is damaged; ")
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_checkpoints_that_cannot_be_read_are_no_fresh_start(mistake, copied):
    (copied / "checkpoints").rename(copied / "elsewhere")
    (copied / "checkpoints").write_text("")
    message = mistake("--resume", "auto", exit_code=1)
    assert message == f"--resume auto: {copied / 'checkpoints'} cannot be read (Not a directory)"


def test_a_run_is_saved_where_a_damaged_checkpoint_was_skipped(run, copied, capsys):
    """Stopped at the step of a damaged one, whose manifest is intact: it is no checkpoint of this run."""
    flip(copied / "checkpoints" / "step-00000006" / "__0_0.distcp")
    more = words("--resume auto --num-steps 9 --keep-checkpoints 1 --log-interval 10")
    assert run("r", *more, stop_after=1) == 143  # at step 5
    assert "step-00000005" in names(copied) and saved.newest_checkpoint(copied).name == "step-00000005"
    assert run("r", *more, stop_after=1) == 143
    output = capsys.readouterr().out
    assert output.count("skipped    step-00000006 is damaged") == 2
    assert "saved      step-00000006" in output and names(copied) == checkpoint_names(6)
    assert run("r", *more) == 0
    assert "at step 6" in reported(capsys.readouterr().out, "resumed")


def test_an_old_checkpoint_that_cannot_be_removed_is_a_line_and_no_failed_save(run, copied, monkeypatch, capsys):
    def fail(*_):
        raise OSError(5, "Input/output error", "step-00000002")

    monkeypatch.setattr(store.Checkpoints, "_rotate", fail)
    assert run("r", *words("--resume auto --num-steps 8")) == 0
    output = capsys.readouterr().out
    problem = "after step-00000008 was saved (step-00000002: Input/output error)"
    assert reported(output, "kept") == f"older checkpoints until the next save, {problem}"
    assert reported(output, "saved").startswith("step-00000008") and "step-00000008" in names(copied)


def test_a_run_that_trained_nothing_names_a_command_that_trains(run, copied, capsys):
    assert run("r", *words("--resume auto --num-steps 2")) == 0
    output = capsys.readouterr().out
    assert "step 6 of 2; --num-steps counts the steps before a resume too" in reported(output, "done")
    assert "--num-steps 12 " in reported(output, "resume")
    assert run("other", "--resume", copied, "--num-steps", "2") == 0
    assert reported(capsys.readouterr().out, "kept") == "no weights: nothing was trained"


NOT_MINE = ("step-best", "step-00000002.bak", "step-2", "step-000000002", "step-0000000x", ".step-notes")


def test_only_a_name_of_eight_digits_whose_manifest_agrees_is_a_checkpoint(run, copied, finished, capsys):
    """Copies under other names sort behind all others as text, and are their owner's, not the rotation's."""
    folder = copied / "checkpoints"
    for name in NOT_MINE:
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000009").mkdir()  # what is no checkpoint under a checkpoint's name
    shutil.copytree(folder / "step-00000002", folder / "step-00000008")
    assert run("r", *words("--resume auto --num-steps 7 --checkpoint-interval 1 --keep-checkpoints 1")) == 0
    output = capsys.readouterr().out
    assert "skipped    step-00000008 is damaged: manifest.json has step 2" in output
    assert "step-00000006 at step 6" in output
    assert names(copied) == sorted([*NOT_MINE, *checkpoint_names(7, 8, 9)])
    assert run("branch", "--resume", folder / "step-best") == 0
    assert steps_of(copied.parent / "branch") == steps_of(finished)[2:]


# ----------------------------------------------------------------------------------------------------------------------
# Trust


class Attack:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("place", ["index", "bytes entry", "tensor"])
def test_a_checkpoint_runs_no_code(mistake, copied, tmp_path, place):
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
    assert f"--resume {checkpoint}: cannot be loaded" in mistake(
        "--run-name", "branch", "--resume", checkpoint, exit_code=1
    )
    assert not mark.exists()
    pickle.loads(pickle.dumps(attack))
    assert mark.exists()  # the attack itself works


# ----------------------------------------------------------------------------------------------------------------------
# What is saved is finite


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # its optimizer takes no step
def test_a_checkpoint_that_is_not_finite_is_neither_trained_nor_exported(run, mistake, tmp_path, monkeypatch):
    @torch.no_grad()
    def overflow(optimizer, skip):
        optimizer.param_groups[1]["params"][0].to_local().fill_(math.inf)

    with monkeypatch.context() as unchecked:  # as a version without the checks saved it
        unchecked.setattr(loop, "find_non_finite", lambda *_: "")
        unchecked.setattr(models, "step_or_skip", overflow)
        run("r", "--max-skipped", STEPS)
    path = tmp_path / "r" / "checkpoints" / f"step-{STEPS:08d}"
    assert not all(tensor.isfinite().all() for tensor in tensors_of(path).values())
    assert mistake("--resume", "auto", "--num-steps", 9, exit_code=1).startswith(f"--resume {path}: it holds values")
    export = tmp_path / "export"
    message = mistake("--resume", path, "--num-steps", 0, "--export", export, exit_code=1)
    assert message.startswith(f"--resume {path}: it holds values") and not export.exists()


# ----------------------------------------------------------------------------------------------------------------------
# Signals, kills, other numbers of ranks: the program under torchrun


@pytest.mark.slow
def test_one_run_over_a_kill_and_other_numbers_of_ranks(device, flags, tmp_path):
    """2 ranks in stage 2, of which one is killed and torchrun starts both again, 4 ranks in two replicas, 1 rank; and
    the same global batch on one rank, undisturbed."""
    folder, constant = tmp_path / "r", "--lr-scheduler constant --lr 1e-4 --eval-interval 34"
    flags = [*flags, *words(constant)]
    common = [
        *flags,
        *words(f"--batch-size 1 --num-workers 1 --output-dir {tmp_path} --run-name r --resume auto --eval-steps 4"),
    ]

    more = words("--gradient-accumulation-steps 2 --zero-stage 2 --num-steps 60 --checkpoint-interval 10")
    command = [*torchrun_command(2, "--max-restarts=1"), PROGRAM, *common, *more, "--no-async-checkpoint"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        wait_until(lambda: [*folder.glob("checkpoints/step-*")], [process])
        ranks = [child for child in psutil.Process(process.pid).children() if PROGRAM in child.cmdline()]
        next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
        printed = process.communicate(timeout=600)[0]
    assert process.returncode == 0, printed
    assert printed.count("resumed    ") == 1

    printed = forked(4, program, *common, *words("--dp-replicate-size 2 --num-steps 64 --checkpoint-interval 100"))
    assert "world size 2 -> 4" in printed and "dp replicate size 1 -> 2" in printed
    assert train([*common, "--num-steps", 68], device) == 0
    uninterrupted = ["--num-steps", 68, "--output-dir", tmp_path, "--run-name", "uninterrupted", "--eval-steps", 2]
    assert train([*flags, *uninterrupted], device) == 0
    survived, reference = steps_of(folder), steps_of(tmp_path / "uninterrupted")
    assert [step[0] for step in survived] == [*range(1, 69), 68]
    assert [step[1] for step in survived] == pytest.approx([step[1] for step in reference], rel=1e-5)
    evaluated, expected = (
        {step[0]: step[EVAL_LOSS] for step in run if step[EVAL_LOSS]} for run in (survived, reference)
    )
    assert {step: evaluated[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    assert [step[3:5] for step in survived] == [step[3:5] for step in reference]
    ends = [saved.newest_checkpoint(place) for place in (folder, tmp_path / "uninterrupted")]
    weights, expected = (torch.cat([t.flatten() for t in tensors_of(end, "model.").values()]) for end in ends)
    assert (weights - expected).norm() < 1e-3 * expected.norm()


def test_a_signal_to_one_rank_ends_all_saved_and_before_that_no_second_start_gets_into_their_folder(
    arguments, mistake, tmp_path, monkeypatch
):
    with forking(2, program, *map(str, arguments), *words("--num-workers 1 --num-steps 100000")) as (world, output):
        wait_until(lambda: lines_logged(tmp_path / "r") >= 3, world.processes)
        monkeypatch.setattr(folders, "LOCK_TIMEOUT", 0.2)
        second = mistake("--resume", "auto")
        assert second.startswith(f"--run-name r: another run uses {tmp_path / 'r'}; `fuser ")
        os.kill(world.processes[1].pid, signal.SIGUSR1)
        for process in world.processes:
            process.join(600)
            assert process.exitcode == 143
        assert "stopped    by a signal to another rank after step" in output.read()
    assert names(tmp_path / "r") == checkpoint_names(lines_logged(tmp_path / "r"))


@pytest.mark.slow
def test_a_run_killed_during_a_save_repeats_its_steps_to_the_bit():
    driver = ROOT / "benchmarks" / "kill_test.py"
    process = start([sys.executable, driver, *words("--kills 1 --ranks 2 --num-steps 50 --seed 4")])
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout[process.stdout.index("{") :])
    assert (result["kills"], result["steps"]) == (1, 50)
    assert result["every_step_once"] and result["same_losses_to_the_bit"]
