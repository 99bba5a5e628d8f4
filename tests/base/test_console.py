"""stdout and stderr that are closed, full, without a reader or not UTF-8: a process does what it would do, and ends
with the exit code that it would end with."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import PROGRAM, ROOT, metrics_of, torchrun_command, wait_until

from harness import base
from harness.base import console

# every way in which the program prints, then a file, then an ending of its own
PRINTS = r"""
import contextlib, logging, os, sys
from harness.base import console
console.ignore_closed_pipes()
from tqdm import tqdm
from harness.job import terminal
for step in range(500):
    print("step", step, "\u201cquoted\u201d", flush=step % 2 == 0)
    print("to stderr", step, file=sys.stderr)
    tqdm.write("written")
    logging.getLogger("x").warning("logged")
    terminal.print_error("told, \u201cquoted\u201d, \udcff")
    with contextlib.suppress(OSError):
        os.write(1, b"by a library")
bar = terminal.step_bar(3, 0, shown=True)
for _ in range(3):
    bar.update()
with open(sys.argv[1], "w") as file:
    print("all of it", file=file)
sys.exit(5)
"""
NO_READER, FULL = "a pipe without a reader", "a full disk"


def exit_code(command: list, stdout: str, stderr: str) -> int:
    """Run a command whose streams are NO_READER, FULL or closed, and take ASCII only."""
    pipe, no_reader = os.pipe()
    os.close(pipe)
    full = os.open("/dev/full", os.O_WRONLY)
    descriptors = {NO_READER: no_reader, FULL: full, "closed": subprocess.DEVNULL}
    closing = "".join(f" {n}>&-" for n, stream in ((1, stdout), (2, stderr)) if stream == "closed")
    process = subprocess.run(
        ["sh", "-c", f'exec "$@"{closing}', "sh", *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
        stdout=descriptors[stdout],
        stderr=descriptors[stderr],
        timeout=600,
    )
    os.close(no_reader)
    os.close(full)
    return process.returncode


@pytest.mark.parametrize("stdout, stderr", [(NO_READER, FULL), (FULL, NO_READER), ("closed", "closed")])
def test_printing_never_fails_and_no_file_takes_the_place_of_a_stream(tmp_path, stdout, stderr):
    assert exit_code([sys.executable, "-c", PRINTS, tmp_path / "file"], stdout, stderr) == 5
    assert (tmp_path / "file").read_text() == "all of it\n"


def test_a_rank_whose_terminal_is_paused_counts_as_working():
    reader, pipe = os.pipe()
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))
    printing = threading.Thread(target=console.Output(pipe).write, args=(b"a line",))
    printing.start()
    wait_until(lambda: base.WORK)
    os.set_blocking(reader, False)
    while printing.is_alive():
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 4096)
    assert not base.WORK


@pytest.mark.parametrize("flags, code", [("--help", 0), ("--lr 0", 2)])
def test_what_only_prints_has_its_exit_code_where_nobody_reads_it(flags, code):
    assert exit_code([sys.executable, PROGRAM, *flags.split()], NO_READER, FULL) == code


@pytest.mark.slow
def test_two_ranks_without_any_console_train_to_the_end_and_leave_all_their_files(tmp_path):
    flags = "--demo --num-steps 4 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 2 --eval-steps 1"
    flags += f" --log-interval 1 --sample-tokens 3 --precision fp32 --output-dir {tmp_path} --run-name r"
    command = [*torchrun_command(2), PROGRAM, *flags.split(), "--cache-dir", tmp_path / "cache"]
    code = exit_code([*command, "--sample-prompt", "“Well”"], NO_READER, FULL)
    assert code in (0, 120)  # 120 is torchrun's own, whose stderr could not be flushed
    lines = metrics_of(tmp_path / "r")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4] and lines[-1]["final"]
    assert json.loads((tmp_path / "r" / "config.json").read_text())["starts"][-1]["exit_code"] == 0
    assert (tmp_path / "r" / "report.html").read_text(encoding="utf-8").startswith("<!")
