"""A run writes into one folder below OUTPUT_DIR, which is its own, and nowhere else."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, parse, start, words, write_model
from multirank import SIZES

from harness.base import UserError
from harness.job import folders

NO_NAMES = ["", " ", ".", "..", "...", "a/b", "a\\b", "a\nb", "a\x1b[2Jb", "a\u202eb", "x" * 201, "é" * 101]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_is_no_folders_is_refused(name):
    with pytest.raises(UserError, match="--run-name"):
        parse(["--run-name", name])


@pytest.mark.parametrize("model", ["/", "company/name\x07", "company/name?", f"company/{'x' * 201}"])
def test_a_name_derived_from_a_model_obeys_the_same_rule(model, tmp_path):
    with pytest.raises(UserError, match=r"--run-name: the name .*, from --model, is "):
        folders.choose_folder(parse(["--model", model, "--resume", "auto", "--output-dir", tmp_path]))


@pytest.mark.parametrize("model", [".", "..", "../model/"])
def test_a_model_given_by_dots_gives_the_run_its_folders_name(tmp_path, monkeypatch, model):
    write_model(tmp_path / "model", "llama", **SIZES)
    (tmp_path / "model" / "below").mkdir()
    monkeypatch.chdir(tmp_path / "model" / ("" if model == "." else "below" if model == ".." else "."))
    settings = parse(["--model", model, "--resume", "auto", "--output-dir", tmp_path / "out"])
    assert folders.choose_folder(settings) == tmp_path / "out" / "model"


@pytest.mark.parametrize(
    "flags", ["--model .. --output-dir .", "--run-name model --output-dir ../..", "--run-name other"]
)
def test_a_model_is_never_written_over(mistake, tmp_path, monkeypatch, flags):
    for name in ("model", "other"):
        write_model(tmp_path / name, "llama", **SIZES)
    before = (tmp_path / "model" / "config.json").read_bytes()
    (tmp_path / "model" / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "model" / "outputs")
    where = [] if "--output-dir" in flags else ["--output-dir", tmp_path]
    derived = [] if "--run-name" in flags else ["--run-name", "model", "--output-dir", tmp_path]
    message = mistake("--resume", "auto", *words(flags), *where, *derived)
    assert message.startswith("--run-name ") and "choose another name" in message
    assert (tmp_path / "model" / "config.json").read_bytes() == before
    assert not (tmp_path / "model" / "metrics.jsonl").exists() and not (tmp_path / "other" / "metrics.jsonl").exists()


def test_a_link_that_leads_out_of_the_output_folder_is_not_followed(mistake, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "r").symlink_to(tmp_path / "elsewhere")
    assert "is a link that leads out of" in mistake("--resume", "auto")
    assert not any((tmp_path / "elsewhere").iterdir())


def test_what_is_no_folder_is_said_at_the_start(mistake, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "r").write_text("notes")
    assert mistake("--resume", "auto").startswith("--")
    assert (tmp_path / "out" / "r").read_text() == "notes"


def test_a_process_takes_its_own_folder_twice_and_another_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_PATIENCE", 0.5)
    first, again = folders.lock_folder(tmp_path), folders.lock_folder(tmp_path)
    assert first.is_locked and again.is_locked
    code = "import pathlib; from harness.job import folders; folders.LOCK_PATIENCE = 0.5; "
    code += f"folders.lock_folder(pathlib.Path({str(tmp_path)!r}))"
    said = start([sys.executable, "-c", code]).stderr
    assert f"another run is in {tmp_path}, whose processes `fuser {tmp_path}/.lock` names; end it or" in said


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
