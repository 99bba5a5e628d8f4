"""A run writes into one folder below OUTPUT_DIR, which is its own, and nowhere else. The table of links is in
pair/test_security.py."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, parse, write_model
from multirank import SIZES

from harness.base import UserError
from harness.job import folders


@pytest.mark.parametrize("model, name", [("..", "model"), ("../model/", "model"), ("/", ""), ("company/name?", "")])
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
    said = ""
    while not re.search(r"\d+ ", said):
        said += rank.stdout.read(1)
    rank.kill()
    rank.wait()
    try:
        assert folders.lock_folder(tmp_path).is_locked
    finally:
        os.kill(int(said), signal.SIGKILL)
        rank.stdout.close()
