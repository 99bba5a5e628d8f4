"""What is on a terminal: the first line, the bar below the log lines, wrapped words, and what Ctrl-C leaves behind: the
commands that are printed to be pasted."""

import ast
import dataclasses
import fcntl
import os
import pathlib
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time

import psutil
import pytest
from checkpoints import write_checkpoint
from conftest import PROGRAM, ROOT, metrics_of, parse

from harness.job import terminal
from harness.report.summary import next_commands

# ----------------------------------------------------------------------------------------------------------------------
# The screen


@pytest.mark.parametrize("columns", [200, 120, 80, 60, 38])
def test_the_bar_fits_and_never_loses_step_loss_and_mfu(columns):
    for step, total in ((3, 340), (12_000, 100_000)):
        bar = terminal.step_bar(total, step, shown=True)
        bar.set_postfix_str("loss 0.5226, MFU 38.1 %", refresh=False)
        line = bar.format_meter(**bar.format_dict | {"ncols": columns, "rate": 1.0})
        bar.close()
        assert len(line) <= columns
        assert line.startswith(f"{step}/{total}, loss 0.5226, MFU 38.1 %")
        assert ", eta " in line or columns < 60


def test_words_are_wrapped_to_the_width_and_addresses_stay_whole():
    address = "http://127.0.0.1:9000/" + "x" * 60
    text = f"Once upon a time there was a well-known frog.\n\nShe read {address} every day."
    wrapped = terminal.wrap_lines(text, columns=30)
    assert wrapped.split() == text.split()
    assert all(len(line) <= 30 or line == address for line in wrapped.splitlines())
    assert "\n\nShe read" in wrapped  # paragraphs stay
    assert terminal.wrap_lines("name       one two three four", 11, 20).splitlines()[1].startswith(" " * 6)
    assert terminal.wrap_lines(text) == text  # no terminal


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """(what a terminal of 60 columns was sent by a run that Ctrl-C ended, exit code, the run's folder)"""
    folder = tmp_path_factory.mktemp("terminal")
    flags = (
        "--demo --num-steps 4000 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --log-interval 2"
    )
    flags += f" --perf-warmup-steps 1 --checkpoint-interval 6 --output-dir {folder} --run-name it"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    environment = os.environ | {"TERM": "xterm", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *flags.split()], cwd=ROOT, env=environment, start_new_session=True, **streams
    )
    os.close(theirs)
    sent, deadline = b"", time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            sent += os.read(ours, 65536)
        except OSError:  # the last one has closed it
            break
        if sent.count(b"saved      step-") >= 2 and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    process.kill()
    os.close(ours)
    return sent.decode(), process.wait(), folder / "it"


def test_a_terminal_has_the_log_lines_and_below_them_one_bar_that_fits(interrupted):
    sent, _, folder = interrupted
    bars = re.findall(r"\r(\d+/4000[^\r\n]*)", sent)
    assert bars and all(len(bar) <= 60 for bar in bars)
    assert all("loss" in bar and "eta" in bar for bar in bars if int(bar.split("/")[0]) > 2)
    permanent = "\n".join(line.strip("\r").split("\r")[-1] for line in sent.split("\n"))
    logged = re.findall(r"^step +(\d+)/4000  loss (\S+)", permanent, re.MULTILINE)
    expected = [(str(line["step"]), f"{line['loss']:.4f}") for line in metrics_of(folder)]
    assert logged == expected[: len(logged)]
    assert len(logged) >= len(expected) - 1


def test_the_first_line_comes_before_torch(interrupted):
    assert interrupted[0].startswith("train_fsdp demo; loading torch")


def test_ctrl_c_says_where_what_is_saved_and_the_command_that_goes_on(interrupted):
    sent, exit_code, folder = interrupted
    assert exit_code == 130
    where, saved, go_on, *_ = sent[sent.rindex("stopped    by Ctrl-C") :].splitlines()
    assert re.fullmatch(r"stopped    by Ctrl-C in \w+ of step \d+ of 4,000", where)
    assert saved == f"saved      {max((folder / 'checkpoints').glob('step-*'))}"
    script, *flags = shlex.split(go_on.removeprefix("go on      "))[1:]
    settings = parse(flags)
    assert (ROOT / script).samefile(PROGRAM)
    assert (settings.resume, settings.run_name, settings.output_dir) == ("auto", "it", str(folder.parent))
    assert (settings.num_steps, settings.checkpoint_interval) == (4000, 6)
    assert "Traceback" not in sent


def test_without_a_checkpoint_ctrl_c_says_how_to_have_one(tmp_path):
    where, saved = terminal.describe_interrupt(parse(["--demo", "--num-steps", 340]), 7, "backward", tmp_path).split(
        "\n"
    )
    assert where == "stopped    by Ctrl-C in backward of step 7 of 340"
    assert saved == "saved      nothing; --checkpoint-interval N saves every N steps"
    assert terminal.describe_interrupt(parse(["--plan"]), 0, "start", None) == "stopped    by Ctrl-C"


def test_the_command_that_goes_on_has_the_launcher_and_each_flag_once(monkeypatch, tmp_path):
    launched = [f"{tmp_path}/bin/python3", f"{tmp_path}/bin/torchrun", "--nproc_per_node=2", "train_fsdp.py", "--demo"]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: launched)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "it")
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py"])
    monkeypatch.chdir(tmp_path)
    settings = parse(["--demo", "--resume=auto", "--run_name".replace("_", "-"), "x", "--output-dir", "a b"])
    command = terminal.command(settings, tmp_path / "a b" / "x")
    assert command.startswith("bin/torchrun --nproc_per_node=2 train_fsdp.py --demo --output-dir 'a b' --resume ")
    assert command.count("--resume") == 1


# ----------------------------------------------------------------------------------------------------------------------
# Commands that are printed


ODD_NAMES = ["-x", "--lr", "it's", 'a "b"', "two\nlines", "~", "$HOME", "a b", "émile", "back\\slash"]


def flags_of(command: str) -> list[str]:
    """What a shell makes of a printed command, behind the program's name."""
    words = shlex.split(command)
    return words[next(index for index, word in enumerate(words) if word.endswith("train_fsdp.py")) + 1 :]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("flags", ["--export={name} --lr=1", "--checkpoint-interval=2 --lr=1 --eval-interval=5"])
def test_what_is_printed_to_be_pasted_means_what_it_says(monkeypatch, tmp_path, name, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my program/train_fsdp.py"])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    argv = [f"--output-dir={name}", "--run-name=-r", *(word.format(name=name) for word in flags.split())]
    settings = parse(argv)
    folder = pathlib.Path(settings.output_dir, settings.run_name).expanduser()
    write_checkpoint(folder, step=2)

    again = parse(flags_of(terminal.command(settings, folder)))
    assert (again.resume, again.run_name, again.output_dir, again.lr) == ("auto", "-r", name, 1)
    assert again.export == settings.export
    said = next_commands(settings, folder, "- 'Well', she said", 2).strip()
    lines = dict(
        re.findall(
            r"^(sample|evaluate|load|export|go on) +(.*?)(?=\n(?:sample|evaluate|load|export|go on|report) |\Z)",
            said,
            re.M | re.S,
        )
    )
    assert ("evaluate" in lines) == bool(settings.eval_interval)
    assert parse(flags_of(lines["sample"])).sample_prompt == ("- 'Well', she said",)
    for key in lines.keys() - {"load"}:
        assert pathlib.Path(parse(flags_of(lines[key])).resume) == folder
    assert (parse(flags_of(lines["go on"])).num_steps, parse(flags_of(lines["go on"])).lr) == (2000, 1)
    if settings.export:
        call = ast.parse(lines["load"]).body[0].value
        assert ast.literal_eval(call.args[0]) == os.path.expanduser(name)
    else:
        assert parse(flags_of(lines["export"])).export == f"{folder}-export"


def test_a_run_of_many_flags_goes_on_with_all_of_them(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py"])
    flags = "--demo --lr 1e-3 --seed 7 --eval-interval 50 --log-interval 5 --weight-decay 0.2 --warmup-steps 3"
    flags += " --max-grad-norm 2 --optimizer adamw-bf16 --sample-prompt a --sample-prompt b --export e --output-dir o"
    settings = parse(flags.split())
    command = terminal.command(settings, pathlib.Path("o/r"))
    assert command.endswith("--export e --output-dir o --resume auto --run-name r")
    again = dataclasses.asdict(parse(flags_of(command)))
    differ = {name for name, value in again.items() if value != dataclasses.asdict(settings)[name]}
    assert differ == {"given", "resume", "run_name"}
