"""A run writes into one folder below OUTPUT_DIR, which is its own, and nowhere else. The table of links is in
pair/test_security.py."""

import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import write_checkpoint
from conftest import ROOT, parse, write_model
from multirank import SIZES

from harness.base import UserError
from harness.job import folders


@pytest.mark.parametrize("model, name", [("..", "model"), ("../model/", "model"), ("/", "")])
def test_a_run_without_a_name_has_that_of_its_models_folder_or_needs_one(tmp_path, monkeypatch, model, name):
    write_model(tmp_path / "model", "llama", **SIZES)
    (tmp_path / "model" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "model" / "below" if model == ".." else tmp_path / "model")
    settings = parse(["--model", model, "--resume", "auto", "--output-dir", tmp_path / "out"])
    if name:
        assert folders.choose_folder(settings) == tmp_path / "out" / name
    else:
        with pytest.raises(UserError, match=r"--run-name: the name .*, from --model, is not a plain folder name"):
            folders.choose_folder(settings)


def test_starts_of_the_same_second_have_folders_of_their_own_even_at_the_same_moment(tmp_path, monkeypatch):
    mkdir = pathlib.Path.mkdir

    def after_another_start(self, *arguments, **options):
        if self.name == "demo-20260101-000000" and not self.exists():
            mkdir(self, parents=True)
        mkdir(self, *arguments, **options)

    monkeypatch.setattr(time, "strftime", lambda *_: "-20260101-000000")
    monkeypatch.setattr(pathlib.Path, "mkdir", after_another_start)
    chosen = [folders.choose_folder(parse(["--demo", "--output-dir", tmp_path])).name for _ in range(2)]
    assert chosen == ["demo-20260101-000000-2", "demo-20260101-000000-3"]


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(UserError, match=r"the lock of a run cannot be written \(No locks available\)"):
        folders.choose_folder(parse(["--demo", "--output-dir", tmp_path]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, out/a, with two checkpoints; one is copied to another folder. The current folder is tmp_path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("out/a/checkpoints/step-00000002")
    for folder, step in (("out/a", 1), ("out/a", 2), ("copied", 2)):
        write_checkpoint(tmp_path / folder, step)
    (tmp_path / "out" / "a" / "metrics.jsonl").touch()
    return tmp_path / "out" / "a"


RESUMED = {  # the current folder and the flags: the folder of the run, from tmp_path
    (".", "--resume out/a"): "out/a",
    (".", "--resume {there}/out/a/checkpoints/step-00000002"): "out/a",
    (".", "--resume link"): "out/a",
    (".", "--output-dir {there}/out --run-name a --resume out/a"): "out/a",
    (".", "--output-dir out --run-name a --resume out/../link"): "out/a",
    ("out", "--output-dir . --run-name a --resume a/"): "out/a",
    ("out/a", "--resume ."): "out/a",
    ("out/a/checkpoints", "--resume step-00000002"): "out/a",
    ("out/a/checkpoints", "--resume .."): "out/a",
    ("out/a/checkpoints/step-00000002", "--resume ."): "out/a",
    (".", "--output-dir other --resume out/a"): "other/a",  # a new run
    (".", "--run-name b --resume out/a"): "outputs/b",
    (".", "--resume copied/checkpoints/step-00000002"): "outputs/smollm3-3b",  # as it is in no run's folder
}


@pytest.mark.parametrize("where, typed", RESUMED)
def test_a_resumed_run_is_found_by_any_path_and_another_output_folder_is_a_new_run(run, tmp_path, where, typed):
    os.chdir(tmp_path / where)
    folder = folders.choose_folder(parse(typed.format(there=tmp_path).split()))
    assert folder.resolve() == tmp_path / RESUMED[where, typed]


@pytest.mark.parametrize("resume", ["", "--resume out/b"])
def test_checkpoints_without_a_log_are_a_run_that_is_not_written_over(run, resume):
    write_checkpoint(pathlib.Path("out/b"), 1)
    (run / "metrics.jsonl").unlink()
    settings = parse(f"--output-dir out --run-name a {resume}".split())
    with pytest.raises(
        UserError, match=r"--run-name a: out/a already holds a run; .*, or continue it with --resume auto"
    ):
        folders.choose_folder(settings)
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    (run / "checkpoints" / "step-00000001" / "manifest.json").write_text("damaged")
    with pytest.raises(UserError, match="already holds a run"):
        folders.choose_folder(settings)


@pytest.mark.parametrize("more", ["", "--output-dir out", "--output-dir {there}/out --run-name a"])
def test_an_older_checkpoint_is_not_resumed_in_its_own_folder(run, tmp_path, more):
    settings = parse(f"--resume out/a/checkpoints/step-00000001 {more.format(there=tmp_path)}".split())
    with pytest.raises(UserError, match="out/a holds newer checkpoints, which the run would overwrite"):
        folders.choose_folder(settings)


def test_a_model_is_never_written_over(mistake, tmp_path):
    before = (tmp_path / "model" / "config.json").read_bytes()
    message = mistake("--resume", "auto", "--run-name", "model", "--output-dir", tmp_path)
    assert message.startswith("--run-name ") and "choose another name" in message
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    assert not (tmp_path / "model" / "metrics.jsonl").exists()


def test_a_forked_process_does_not_keep_the_lock_of_a_rank_that_was_killed(tmp_path):
    """Data workers outlive a killed rank for some seconds."""
    code = "import os, pathlib, time; from harness.job import folders; "
    code += f"lock = folders.lock_folder(pathlib.Path({str(tmp_path)!r})); "
    code += "child = os.fork(); print(child or '', end=' ', flush=True); time.sleep(1000)"
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    printed = ""
    while not re.search(r"\d+ ", printed):
        printed += rank.stdout.read(1)
    rank.kill()
    rank.wait()
    try:
        assert folders.lock_folder(tmp_path).is_locked
    finally:
        os.kill(int(printed), signal.SIGKILL)
        rank.stdout.close()
