"""stdout and stderr that are closed, full, without a reader or not UTF-8: a process does what it would do, and ends
with the exit code that it would end with."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from conftest import PROGRAM, ROOT, slow_case, torchrun_command

# every way in which the program prints, then a file, then an ending of its own
PRINTS = r"""
import contextlib, logging, os, sys
from harness.base import console
console.never_fail()
from tqdm import tqdm
from harness.job import terminal
for step in range(500):
    print("step", step, flush=step % 2 == 0)
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


@contextlib.contextmanager
def output(kind: str):
    """A file descriptor that a process is given for its output."""
    if kind == "pipe without a reader":
        read_end, descriptor = os.pipe()
        os.close(read_end)
    elif kind == "read-only":
        descriptor = os.open(os.devnull, os.O_RDONLY)
    else:
        descriptor = os.open("/dev/full" if kind == "full disk" else os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


KINDS = ["pipe without a reader", "read-only", "full disk", "closed"]


@pytest.mark.parametrize("stdout, stderr", [*((kind, "well") for kind in KINDS), *(("well", kind) for kind in KINDS)])
def test_printing_never_fails_and_no_file_takes_the_place_of_a_stream(tmp_path, stdout, stderr):
    redirect = "".join(f" {n}>&-" for n, kind in ((1, stdout), (2, stderr)) if kind == "closed")
    command = ["sh", "-c", f'exec "$@"{redirect}', "sh", sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    with output(stdout) as out, output(stderr) as errors:
        assert subprocess.run(command, cwd=ROOT, stdout=out, stderr=errors, timeout=600).returncode == 5
    assert (tmp_path / "file").read_text() == "all of it\n"


def test_a_reader_that_leaves_in_the_middle_has_whole_lines_up_to_there(tmp_path):
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = [process.stdout.readline() for _ in range(3)]
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(600) == 5
    assert first == [b"step 0\n", b"written\n", b"by a librarystep 1\n"]
    assert errors.count(b"logged\n") == 500 and b"Traceback" not in errors


def test_a_disk_that_was_full_for_a_while_gets_the_lines_after_it(tmp_path):
    script = "import resource, signal, sys\nfrom harness.base import console\nconsole.never_fail()\n"
    script += "limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
    script += "for size in (6, 6, 100):\n    limit(size)\n    print('line', size, flush=True)"
    with (tmp_path / "log").open("w") as log:
        assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=log, timeout=600).returncode == 0
    assert (tmp_path / "log").read_text() == "line 6line 100\n"


@pytest.mark.parametrize(
    "encoding, shown", [("ascii", "?Well? caf?"), ("latin-1", "?Well? café"), ("utf-8", "“Well” café")]
)
def test_what_a_console_cannot_show_is_replaced(encoding, shown):
    script = "import sys\nfrom harness.base import console\nconsole.never_fail()\nfrom harness.job import terminal\n"
    script += r"print('\u201cWell\u201d caf\u00e9');terminal.print_error('\u201cWell\u201d caf\u00e9')"
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONIOENCODING": encoding + ":strict"}, "capture_output": True}
    process = subprocess.run([sys.executable, "-c", script], timeout=600, **options)
    assert (process.stdout.decode(encoding), process.stderr.decode(encoding)) == (f"{shown}\n", f"{shown}\n")


@pytest.mark.parametrize(
    "flags", ["--help", "--version", slow_case("--plan --model demo --plan-gpus 2 --plan-seconds 0 --json")]
)
def test_what_only_prints_ends_quietly_with_0_without_a_reader(flags):
    with output("pipe without a reader") as out:
        command = [sys.executable, PROGRAM, *flags.split()]
        process = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, timeout=600)
    assert (process.returncode, process.stderr) == (0, b"")


@pytest.mark.parametrize("kind", ["pipe without a reader", "full disk"])
def test_a_wrong_flag_is_exit_2_where_nobody_can_be_told(kind):
    with output(kind) as errors:
        command = [sys.executable, PROGRAM, "--lr", "0"]
        assert subprocess.run(command, cwd=ROOT, stderr=errors, timeout=600).returncode == 2


@pytest.mark.slow
def test_two_ranks_without_any_console_train_to_the_end_and_leave_all_their_files(tmp_path):
    flags = "--demo --num-steps 4 --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 2 --eval-steps 1"
    flags += f" --log-interval 1 --sample-tokens 3 --precision fp32 --output-dir {tmp_path} --run-name r"
    flags += f" --cache-dir {tmp_path / 'cache'}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*torchrun_command(2), PROGRAM, *flags.split(), "--sample-prompt", "“Well”"]
    with output("pipe without a reader") as out, output("full disk") as errors:
        options = {"cwd": ROOT, "stdout": out, "stderr": errors, "env": environment, "timeout": 600}
        code = subprocess.run(command, **options).returncode
    assert code in (0, 120)  # 120 is torchrun's own, whose stderr could not be flushed
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4] and lines[-1]["final"]
    assert json.loads((tmp_path / "r" / "config.json").read_text())["starts"][-1]["exit_code"] == 0
    assert (tmp_path / "r" / "report.html").read_text(encoding="utf-8").startswith("<!")
