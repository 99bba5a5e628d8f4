"""A mistake is one line that names the flag or file; nothing is trained and nothing is lost."""

import json
import math
import re
import shlex
import shutil
import sys

import pytest
from conftest import (
    ROOT,
    STORIES,
    cold_python,
    python,
    slow_case,
    start,
    torchrun,
    train,
    without_repeated_flags,
    words,
)

from harness.job import endings
from harness.report.not_finite import first_not_finite

PREFIX = "train_fsdp.py: error: "


def test_the_run_that_the_mistakes_are_made_in_works(device, arguments, tmp_path):
    train(arguments, device)
    assert (tmp_path / "out" / "r" / "metrics.jsonl").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Data: what get_dataset refuses is in test_data.py


def test_too_little_text_for_one_global_batch_is_refused(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 20)
    message = mistake("--dataset", tmp_path / "data.txt", "--batch-size", 100)
    assert message.startswith(f"--dataset {tmp_path / 'data.txt'}")
    assert "200" not in message and "100" in message


def test_too_little_text_for_one_window_is_refused(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox.")
    assert f"--dataset {tmp_path / 'data.txt'}" in mistake("--dataset", tmp_path / "data.txt")


def test_a_missing_held_out_split_is_named_with_those_that_are_there(mistake, tmp_path):
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 100)
    message = mistake("--dataset", tmp_path / "data.txt", "--eval-interval", 1, "--eval-split", "test")
    assert message == f"--dataset {tmp_path / 'data.txt'}, split 'test': there is none; there is train"


# ----------------------------------------------------------------------------------------------------------------------
# Techniques that this machine lacks


def test_replicas_that_do_not_divide_the_world_are_refused(mistake):
    assert mistake("--dp-replicate-size", 2).startswith("--dp-replicate-size 2: ")


def test_a_batch_that_would_never_be_ready_is_refused(mistake):
    flags = ["--dataset", "synthetic", "--batch-size", 10**6, "--sequence-length", 256]
    assert mistake(*flags).startswith("--batch-size 1000000: 256,000,000 tokens in one microbatch")


def test_a_story_on_a_text_of_the_users_own_begins_as_that_text_does(device, arguments, tmp_path, capfd):
    text = "The harbour master of Lisbon counted his gulls. " * 200
    (tmp_path / "mine.txt").write_text(text)
    flags = ["--dataset", tmp_path / "mine.txt", "--sample-tokens", 3, "--eval-interval", 2]
    train([*arguments, "--demo", *flags], device)
    written = json.loads((tmp_path / "out" / "r" / "metrics.jsonl").read_text().splitlines()[-1])["samples"]
    assert len(written) == 1 and written[0]["prompt"] in text and len(written[0]["prompt"]) > 5
    (sample,) = re.findall("^sample .*", capfd.readouterr().out, re.MULTILINE)
    assert shlex.split(sample)[-1] == written[0]["prompt"]


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_an_output_folder_under_a_file_is_refused(mistake, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert mistake("--output-dir", folder).startswith(f"--output-dir {folder}: ")


def test_a_run_name_is_used_once_and_the_first_run_stays_as_it_is(device, arguments, mistake, tmp_path):
    train(arguments, device)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert len(before) >= 2
    assert mistake().startswith("--run-name r: ")
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


def test_a_mistake_leaves_no_run_behind(mistake, tmp_path, monkeypatch):
    for flags in (("--sequence-length", 257), ("--precision", "fp8")):
        monkeypatch.setattr(endings, "LISTENERS", [])
        mistake(*flags)
        for listener in endings.LISTENERS:  # as the program ends
            listener(2)
        assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# While training


@pytest.mark.parametrize("flags", ["", "--log-interval 3 --num-steps 9"])
def test_a_loss_that_is_no_number_ends_the_run_and_names_its_step(mistake, tmp_path, flags):
    divergent = words("--lr 1e30 --max-grad-norm 0 --warmup-steps 0 --num-steps 9 --max-skipped 0")
    message = mistake(*divergent, *flags.split(), exit_code=1)
    step = int(re.search(r"step (\d+)", message)[1])
    logged = [json.loads(line) for line in (tmp_path / "out" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert 1 < step <= 3
    assert all(line["step"] < step and line["loss"] < 1e9 for line in logged[:-1])
    assert logged[-1]["step"] >= step and not {"loss", "grad_norm"} & logged[-1].keys()
    assert not any(line.get("final") for line in logged)


@pytest.mark.parametrize(
    "figures, losses, problem",
    [
        ({}, [2.0, 1.0, 1.0], None),
        ({}, [2.0, math.nan, math.inf], (8, "loss became nan")),
        ({"grad_norm": math.inf}, [2.0], (9, "grad norm became inf")),
        ({"eval_loss": math.nan}, [], (9, "eval loss became nan")),
        ({}, [2.0, None, math.nan], (9, "loss became nan")),  # a step that was skipped has no loss
        ({"grad_norm": None}, [2.0, None], None),
    ],
)
def test_what_is_not_finite_is_named_by_its_own_step(figures, losses, problem):
    metrics = {"step": 9, "loss": 1.0, "grad_norm": 1.0} | figures
    found = first_not_finite(metrics, losses)
    assert (found and (found.step, found.words)) == problem


# ----------------------------------------------------------------------------------------------------------------------
# From outside


def only_line(process, exit_code: int = 2) -> str:
    """The one line that a failed command left on stderr, besides that a test gives a flag in place of its fixture's."""
    assert process.returncode == exit_code, process.stderr
    lines = without_repeated_flags(process.stderr).splitlines()
    assert len(lines) == 1, process.stderr
    assert lines[0].startswith(PREFIX)
    return lines[0].removeprefix(PREFIX)


NO_NETWORK = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": None, "https_proxy": None}


def test_a_model_that_no_one_has_is_one_line_and_exit_2(arguments):
    """Without a network this has to come at once, not after the hub client's tries."""
    flags = [*arguments, "--model", "no-such-company/no-such-model"]
    message = only_line(cold_python(*flags, **NO_NETWORK))
    assert message.startswith("--model no-such-company/no-such-model: ")


def test_a_tokenizer_folder_that_is_not_there_is_not_the_hubs_fault(arguments):
    message = only_line(python(*arguments, "--tokenizer", "/absent/path"))
    assert message.startswith("--tokenizer /absent/path: no such folder; ") and "hub" not in message


def test_the_folder_of_a_run_as_the_model_points_to_its_export(device, arguments, tmp_path):
    train(arguments, device)
    run = tmp_path / "out" / "r"
    for folder in (run, *(run / "checkpoints").glob("step-*")):
        message = only_line(python("--model", folder, "--dataset", "synthetic"))
        assert message.startswith(f"--model {folder}: a folder of a run, not of a model; ")
        assert f"--num-steps 0 --resume {folder} --export DIR" in message


def test_json_has_its_error_as_json_where_config_has_no_value():
    process = python("--json", "--config")
    assert only_line(process) == json.loads(process.stdout)["error"] == "--config: expected one argument"


@pytest.mark.slow
def test_data_that_no_one_has_is_one_line_and_exit_2(arguments):
    flags = [*arguments, "--dataset", "no-such-company/no-such-stories"]
    message = only_line(cold_python(*flags, **NO_NETWORK))
    assert message.startswith("--dataset no-such-company/no-such-stories: ")


def test_wandb_without_a_login_is_one_line_and_exit_2(arguments, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    process = cold_python(*arguments, "--log-with", "wandb", HOME=str(home), NETRC=str(home / ".netrc"))
    assert only_line(process).startswith("--log-with wandb: ")
    assert not (tmp_path / "out").exists()


def test_divergence_is_one_line_and_exit_1(arguments):
    process = python(*arguments, "--lr", "1e30", "--max-grad-norm", "0", "--warmup-steps", "0", "--num-steps", "9")
    assert "step" in only_line(process, exit_code=1)


@pytest.mark.parametrize(
    "ranks, flags, names",
    [
        (2, ["--batch-size", "0"], "--batch-size"),
        slow_case(3, ["--dp-replicate-size", "2"], "--dp-replicate-size 2"),
        slow_case(2, ["--lr", "1e30", "--max-grad-norm", "0", "--warmup-steps", "0", "--num-steps", "9"], "step"),
    ],
)
def test_a_mistake_of_every_rank_is_one_line_of_one_rank(arguments, ranks, flags, names):
    process = torchrun(ranks, *arguments, *flags)
    assert process.returncode != 0
    ours, _, launchers_report = process.stderr.partition("torch/distributed/elastic")
    errors = [line for line in ours.splitlines() if PREFIX in line]
    assert len(errors) == 1, process.stderr
    assert errors[0].startswith(PREFIX)
    assert process.stderr.rstrip().splitlines()[-2].strip() == errors[0]  # and the last line is a rule
    assert names in errors[0]
    assert "Traceback" not in ours
    assert launchers_report


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(arguments, tmp_path):
    broken = tmp_path / "program"
    broken.mkdir()
    for name in ("train_fsdp.py", "utils.py"):
        shutil.copy(ROOT / name, broken)
    for name in ("assets", "harness"):
        shutil.copytree(ROOT / name, broken / name)
    flops = broken / "harness" / "model" / "flops.py"
    flops.write_text(flops.read_text() + "\n\ndef count_flops(*_, **__):\n    return 1 // 0\n")
    process = start([sys.executable, broken / "train_fsdp.py", *arguments])
    assert process.returncode == 1
    assert "Traceback" in process.stderr
    assert "ZeroDivisionError" in process.stderr


def test_the_demos_stories_are_there():
    assert sorted(file.name for file in STORIES.glob("*.jsonl")) == ["train.jsonl", "validation.jsonl"]
