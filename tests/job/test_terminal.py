"""Output on a terminal: the first line, the bar below the log lines, and the last lines after Ctrl-C: the commands that
are printed to be pasted."""

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

import pytest
from checkpoints import write_checkpoint
from conftest import PROGRAM, ROOT, metrics_of, parse

from harness.job import terminal
from harness.report.summary import next_commands


def run_until_ctrl_c(folder: pathlib.Path) -> tuple[str, int]:
    """(what a run sends to a terminal of 60 columns until Ctrl-C after two saves, its exit code)."""
    flags = "--demo --num-steps 4000 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0"
    flags += f" --log-interval 2 --perf-warmup-steps 1 --checkpoint-interval 6 --output-dir {folder} --run-name it"
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
    return sent.decode(), process.wait()


@pytest.mark.slow
def test_a_terminal_has_log_lines_and_a_bar_that_fits_and_after_ctrl_c_the_command_that_continues(tmp_path):
    sent, exit_code = run_until_ctrl_c(tmp_path)
    folder = tmp_path / "it"
    assert sent.startswith("train_fsdp demo; loading torch")
    bars = re.findall(r"\r(\d+/4000[^\r\n]*)", sent)
    assert bars and all(len(bar) <= 60 for bar in bars)
    assert all("loss" in bar and "eta" in bar for bar in bars if int(bar.split("/")[0]) > 2)
    permanent = "\n".join(line.strip("\r").split("\r")[-1] for line in sent.split("\n"))
    logged = re.findall(r"^step +(\d+)/4000  loss (\S+)", permanent, re.MULTILINE)
    expected = [(str(line["step"]), f"{line['loss']:.4f}") for line in metrics_of(folder)]
    assert logged == expected[: len(logged)]
    assert len(logged) >= len(expected) - 1

    assert exit_code == 130 and "Traceback" not in sent
    where, go_on, *_ = sent[sent.rindex("stopped    by Ctrl-C") :].splitlines()
    newest = max((folder / "checkpoints").glob("step-*")).name
    assert re.fullmatch(rf"stopped    by Ctrl-C in \w+ of step \d+; {newest} is saved", where)
    script, *flags = shlex.split(go_on.removeprefix("resume     "))[1:]
    settings = parse(flags)
    assert (ROOT / script).samefile(PROGRAM)
    assert (settings.resume, settings.run_name, settings.output_dir) == ("auto", "it", str(folder.parent))
    assert (settings.num_steps, settings.checkpoint_interval) == (4000, 6)


# ----------------------------------------------------------------------------------------------------------------------
# Commands that are printed


def test_the_last_lines_do_not_need_the_folder_where_the_command_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert terminal.launcher().startswith(sys.executable)


ODD_NAMES = ["-x", "it's", 'a "b"', "two\nlines", "~", "$HOME"]


def flags_of(command: str) -> list[str]:
    """Return a printed command's arguments as a shell passes them."""
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
    printed = next_commands(settings, folder, 2, {}).strip()
    found = re.findall(r"^(export|resume) +(.*?)(?=\n(?:export|resume|report) |\Z)", printed, re.M | re.S)
    lines = {key: parse(flags_of(command)) for key, command in found}
    assert all(pathlib.Path(again.resume) == folder for again in lines.values())
    assert (lines["resume"].num_steps, lines["resume"].lr) == (2000, 1)
    if settings.export:
        assert "export" not in lines
    else:
        assert (lines["export"].export, lines["export"].num_steps) == (f"{folder}-export", 0)
