"""stdout and stderr that are closed, full, without a reader or not UTF-8: a process does what it would do, and ends
with the exit code that it would end with."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from conftest import PROGRAM, ROOT, torchrun_command

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
IN_ASCII = os.environ | {"PYTHONIOENCODING": "ascii:strict"}


@contextlib.contextmanager
def output(kind: str):
    """A file descriptor that a process is given for its output."""
    if kind == "pipe without a reader":
        read_end, descriptor = os.pipe()
        os.close(read_end)
    else:
        descriptor = os.open("/dev/full" if kind == "full disk" else os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    "stdout, stderr",
    [("pipe without a reader", "full disk"), ("full disk", "pipe without a reader"), ("closed", "closed")],
)
def test_printing_never_fails_and_no_file_takes_the_place_of_a_stream(tmp_path, stdout, stderr):
    redirect = "".join(f" {n}>&-" for n, kind in ((1, stdout), (2, stderr)) if kind == "closed")
    command = ["sh", "-c", f'exec "$@"{redirect}', "sh", sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    with output(stdout) as out, output(stderr) as errors:
        process = subprocess.run(command, cwd=ROOT, env=IN_ASCII, stdout=out, stderr=errors, timeout=600)
    assert process.returncode == 5
    assert (tmp_path / "file").read_text() == "all of it\n"


@pytest.mark.parametrize("flags, code", [("--help", 0), ("--lr 0", 2)])
def test_what_only_prints_has_its_exit_code_where_nobody_reads_it(flags, code):
    with output("pipe without a reader") as out, output("full disk") as errors:
        command = [sys.executable, PROGRAM, *flags.split()]
        assert subprocess.run(command, cwd=ROOT, stdout=out, stderr=errors, timeout=600).returncode == code


@pytest.mark.slow
def test_two_ranks_without_any_console_train_to_the_end_and_leave_all_their_files(tmp_path):
    flags = "--demo --num-steps 4 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 2 --eval-steps 1"
    flags += f" --log-interval 1 --sample-tokens 3 --precision fp32 --output-dir {tmp_path} --run-name r"
    flags += f" --cache-dir {tmp_path / 'cache'}"
    command = [*torchrun_command(2), PROGRAM, *flags.split(), "--sample-prompt", "“Well”"]
    with output("pipe without a reader") as out, output("full disk") as errors:
        options = {"cwd": ROOT, "stdout": out, "stderr": errors, "env": IN_ASCII, "timeout": 600}
        code = subprocess.run(command, **options).returncode
    assert code in (0, 120)  # 120 is torchrun's own, whose stderr could not be flushed
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4] and lines[-1]["final"]
    assert json.loads((tmp_path / "r" / "config.json").read_text())["starts"][-1]["exit_code"] == 0
    assert (tmp_path / "r" / "report.html").read_text(encoding="utf-8").startswith("<!")
