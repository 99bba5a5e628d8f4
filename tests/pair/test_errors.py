"""A mistake that is found after the flags were read is one line that names the flag or file; nothing is trained and
nothing is lost."""

import json
import re
import shlex
import sys

import pytest
from conftest import cold_python, copy_program, python, slow_case, start, torchrun, train, words

PREFIX = "train_fsdp.py: error: "
DIVERGENT = "--lr 1e30 --max-grad-norm 0 --warmup-steps 0 --num-steps 9 --max-skipped 0"
NO_NETWORK = {"HF_ENDPOINT": "https://hub.invalid", "HTTPS_PROXY": None, "https_proxy": None}


def only_line(process, exit_code: int = 2) -> str:
    """The one line that a failed command left on stderr."""
    assert process.returncode == exit_code, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(PREFIX)
    return line.removeprefix(PREFIX)


@pytest.fixture
def files(tmp_path):
    """The files and folders that the mistakes name."""
    (tmp_path / "short.txt").write_text("The fox.")
    (tmp_path / "data.txt").write_text("The fox had a red ball. " * 100)
    return tmp_path


MISTAKES = {  # flags beside those of a run that works: (exit code, how the line begins)
    "--dataset {}/short.txt": (2, "--dataset {}/short.txt"),
    "--dataset {}/data.txt --batch-size 1000": (2, "--dataset {}/data.txt"),
    "--dataset {}/data.txt --eval-interval 1 --eval-split test": (
        2,
        "--dataset {}/data.txt, split 'test': there is none; there is train",
    ),
    "--dp-replicate-size 2": (2, "--dp-replicate-size 2: "),
    "--sequence-length 257": (2, "--sequence-length"),
    "--precision fp8": (2, "--precision fp8: "),
    "--output-dir {}/data.txt": (2, "--output-dir {}/data.txt: "),
    "--output-dir {}/data.txt/deeper": (2, "--output-dir {}/data.txt/deeper: "),
    "--tokenizer /absent/path": (2, "--tokenizer /absent/path: no such folder; "),
    DIVERGENT: (1, ""),
}


@pytest.mark.parametrize("flags, ending", MISTAKES.items())
def test_a_mistake_is_one_line_that_names_the_flag_or_file_and_leaves_no_run(arguments, files, flags, ending):
    exit_code, said = ending
    process = python(*arguments, *words(flags.replace("{}", str(files))))
    assert only_line(process, exit_code).startswith(said.replace("{}", str(files)))
    assert (files / "out").exists() == (exit_code == 1)


@pytest.mark.smoke
def test_a_misspelt_flag_is_one_line_that_names_the_nearest():
    line = only_line(cold_python("--demo", "--num-stpes", 3))
    assert line == "--num-stpes: no such flag; did you mean --num-steps?"


def test_a_loss_that_is_no_number_ends_the_run_and_names_its_step(mistake, tmp_path):
    message = mistake(*words(DIVERGENT), *words("--log-interval 3"), exit_code=1)
    step = int(re.search(r"step (\d+)", message)[1])
    logged = [json.loads(line) for line in (tmp_path / "out" / "r" / "metrics.jsonl").read_text().splitlines()]
    assert 1 < step <= 3
    assert all(line["step"] < step and line["loss"] < 1e9 for line in logged[:-1])
    assert logged[-1]["step"] >= step and not {"loss", "grad_norm"} & logged[-1].keys()
    assert not any(line.get("final") for line in logged)


def test_a_run_name_is_used_once_and_the_first_run_stays_as_it_is(device, arguments, mistake, tmp_path):
    train(arguments, device)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert len(before) >= 2
    assert mistake().startswith("--run-name r: ")
    assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before


def test_a_story_on_a_text_of_the_users_own_begins_as_that_text_does(device, arguments, tmp_path, capfd):
    text = "The harbour master of Lisbon counted his gulls. " * 200
    (tmp_path / "mine.txt").write_text(text)
    flags = ["--dataset", tmp_path / "mine.txt", "--sample-tokens", 3, "--eval-interval", 2]
    train([*arguments, "--demo", *flags], device)
    written = json.loads((tmp_path / "out" / "r" / "metrics.jsonl").read_text().splitlines()[-1])["samples"]
    assert len(written) == 1 and written[0]["prompt"] in text and len(written[0]["prompt"]) > 5
    (sample,) = re.findall("^sample .*", capfd.readouterr().out, re.MULTILINE)
    assert shlex.split(sample)[-1] == written[0]["prompt"]


def test_the_folder_of_a_run_as_the_model_points_to_its_export(device, arguments, tmp_path):
    train(arguments, device)
    run = tmp_path / "out" / "r"
    for folder in (run, *(run / "checkpoints").glob("step-*")):
        message = only_line(python("--model", folder, "--dataset", "synthetic"))
        assert message.startswith(f"--model {folder}: a folder of a run, not of a model; ")
        assert f"--num-steps 0 --resume {folder} --export DIR" in message


@pytest.mark.parametrize(
    "flag, name",
    [("--model", "no-such-company/no-such-model"), slow_case("--dataset", "no-such-company/no-such-stories")],
)
def test_what_no_one_has_is_one_line_at_once_without_a_network(arguments, flag, name):
    assert only_line(cold_python(*arguments, flag, name, **NO_NETWORK)).startswith(f"{flag} {name}: ")


def test_wandb_without_a_login_is_one_line_and_exit_2(arguments, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    process = cold_python(*arguments, "--log-with", "wandb", HOME=str(home), NETRC=str(home / ".netrc"))
    assert only_line(process).startswith("--log-with wandb: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "ranks, flags, names",
    [
        (2, "--batch-size 0", "--batch-size"),
        slow_case(3, "--dp-replicate-size 2", "--dp-replicate-size 2"),
        slow_case(2, DIVERGENT, "step"),
    ],
)
def test_a_mistake_of_every_rank_is_one_line_of_one_rank(arguments, ranks, flags, names):
    process = torchrun(ranks, *arguments, *flags.split())
    assert process.returncode != 0
    ours, _, launchers_report = process.stderr.partition("torch/distributed/elastic")
    (error,) = [line for line in ours.splitlines() if PREFIX in line]
    assert error.startswith(PREFIX) and names in error and "Traceback" not in ours
    assert process.stderr.rstrip().splitlines()[-2].strip() == error  # and the last line is a rule
    assert launchers_report


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(arguments, tmp_path):
    broken = copy_program(tmp_path / "program")
    program = broken / "train_fsdp.py"
    step = "def train_step("
    program.write_text(
        program.read_text().replace(step, f"def train_step(*_):\n    1 // 0\n\n\n{step[:-1]}_before(", 1)
    )
    process = start([sys.executable, program, *arguments])
    assert process.returncode == 1
    assert "Traceback" in process.stderr and "ZeroDivisionError" in process.stderr
