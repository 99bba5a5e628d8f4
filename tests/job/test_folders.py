"""A run writes into one folder below OUTPUT_DIR, which is its own, and nowhere else."""

import os
import shutil

import pytest
from conftest import parse, words, write_model
from multirank import SIZES

from harness.base.errors import UserError
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


def test_metrics_that_are_a_folder_are_one_line(mistake, tmp_path):
    (tmp_path / "out" / "r" / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl is no file; remove it" in mistake("--resume", "auto")


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000002"])
def test_what_is_in_the_way_of_a_checkpoint_is_said_at_the_start(mistake, tmp_path, name):
    """Every save would fail, at that step and at each later one."""
    place = tmp_path / "out" / "r" / name
    place.parent.mkdir(parents=True)
    place.write_text("notes")
    assert f"{place} is no folder" in mistake("--resume", "auto", "--checkpoint-interval", 1)
    place.unlink()
    if name != "checkpoints":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
        assert f"{place} is a link, where a checkpoint is to be" in mistake("--resume", "auto")


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_pipe_in_a_runs_folder_is_one_line_and_no_wait(mistake, tmp_path, name):
    (tmp_path / "out" / "r").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "r" / name)
    (tmp_path / "out" / "r" / ".lock").touch()
    assert f"{tmp_path / 'out' / 'r' / name} is no file; remove it" in mistake("--resume", "auto")


def test_a_lock_that_was_removed_or_made_anew_meanwhile_is_not_the_folders(tmp_path):
    lock = tmp_path / ".lock"
    lock.touch()
    descriptor = os.open(lock, os.O_RDWR)
    assert folders.is_of_this_folder(descriptor, lock)
    lock.unlink()
    assert not folders.is_of_this_folder(descriptor, lock)
    lock.touch()
    assert not folders.is_of_this_folder(descriptor, lock)
    os.close(descriptor)


def test_a_copy_of_hard_links_has_a_lock_of_its_own(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".lock").write_text("[]")
    shutil.copytree(tmp_path / "r", tmp_path / "copy", copy_function=os.link)
    folders.lock_folder(tmp_path / "copy")
    assert (tmp_path / "r" / ".lock").read_text() == "[]" and (tmp_path / "copy" / ".lock").read_text() != "[]"
    assert not os.path.samefile(tmp_path / "r" / ".lock", tmp_path / "copy" / ".lock")
