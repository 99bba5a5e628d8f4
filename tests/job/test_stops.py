"""Signals to a run, seen from outside: when and how it ends, and its files."""

import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import multirank
import psutil
import pytest
from conftest import PROGRAM, ROOT, forked, forking, losses_of, metrics_of, parse, torchrun_command, wait_until, words

from harness.job import endings, signals

SIZES = words("--sequence-length 32 --batch-size 1 --precision fp32 --num-workers 0 --log-interval 1 --no-compile")

# ----------------------------------------------------------------------------------------------------------------------
# Child processes


def start_by_fork() -> int:
    runs, begins = os.pipe()
    child = os.fork()
    if not child:
        os.write(begins, b".")
        time.sleep(60)
    os.read(runs, 1)
    return child


def start_by_subprocess_in_a_thread() -> int:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return threads.submit(lambda: subprocess.Popen(["sleep", "60"]).pid).result()


def signal_children() -> None:
    """End child processes by each signal, in a process that listens to them."""
    signals.listen(parse(["--demo"]))
    for start_child in (start_by_fork, start_by_subprocess_in_a_thread):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            child = psutil.Process(start_child())
            child.send_signal(number)
            assert child.wait(30) != 0, (start_child, number)


def test_child_processes_get_signals_as_usual():
    run = multiprocessing.get_context("fork").Process(target=signal_children)
    run.start()
    run.join(300)
    assert run.exitcode == 0


def listen_as_rank(writing: int) -> None:
    endings.LISTENERS.clear()  # of runs in this process
    signals.listen(parse(["--demo"]))
    os.write(writing, b".")
    time.sleep(30)


def launch(variable: str, writing: int) -> None:
    os.environ[variable] = "no"
    rank = multiprocessing.get_context("fork").Process(target=listen_as_rank, args=(writing,))
    rank.start()
    rank.join()


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
def test_a_rank_ends_with_its_launcher(variable):
    reading, writing = os.pipe()
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(variable, writing))
    launcher.start()
    os.close(writing)
    assert os.read(reading, 1) == b"."
    began = time.monotonic()
    launcher.kill()
    assert os.read(reading, 1) == b"" and time.monotonic() < began + 10  # the rank has closed its end
    os.close(reading)


ON_CTRL_C = {  # in a long run: whether the first Ctrl-C saves
    "": True,
    "--checkpoint-interval 9": False,
    "--keep-best --eval-interval epoch": True,  # that may be hours
    "--no-final-checkpoint": False,
}


@pytest.mark.parametrize("more", ON_CTRL_C)
def test_ctrl_c_in_a_long_run_saves_unless_checkpoints_are_saved_at_an_interval(more):
    stop = signals.StopRequest(parse(["--demo", *words(more)]))
    stop.can_save = True
    assert stop.saves_on_interrupt(stop.began + 2 * stop.LONG_RUN) == ON_CTRL_C[more]


def fail_at_a_signal(number: int) -> None:
    endings.LISTENERS.clear()  # of runs in this process
    signals.StopRequest.react = lambda *_: 1 / 0
    signals.listen(parse(["--demo"]))
    os.kill(os.getpid(), number)
    time.sleep(60)


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_bug_in_the_answer_to_a_signal_ends_the_run(number, exit_code):
    run = multiprocessing.get_context("fork").Process(target=fail_at_a_signal, args=(number,))
    run.start()
    run.join(10)
    run.kill()
    assert run.exitcode == exit_code


# ----------------------------------------------------------------------------------------------------------------------
# A stop in each phase of a run

STEPS = 6
PHASES = {  # the step that is saved, the flags of the run, and what its last line must lack
    "start": (None, "", ""),
    "data": (2, "--gradient-accumulation-steps 20", ""),
    "evaluation": (3, "--eval-interval 3 --eval-steps 300", "eval_loss"),
    "sampling": (3, "--eval-interval 3 --eval-steps 1 --sample-tokens 300", "samples"),
    "save": (3, "--checkpoint-interval 3 --no-async-checkpoint", ""),
    "end": (STEPS, "", ""),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    named = ["--demo", *SIZES, "--num-steps", STEPS, "--output-dir", folder, "--cache-dir", folder / "cache"]
    return folder, [*map(str, named), "--eval-interval", "0", "--sample-tokens", "1"]


@pytest.mark.slow
def test_ctrl_c_in_a_long_run_saves(flags):
    folder, given = flags
    with forking(1, multirank.interrupted, *given, "--run-name", "interrupted") as (world, output):
        (process,) = world.processes
        process.join(300)
        printed = output.read()
    assert process.exitcode == 130
    assert [path.name for path in (folder / "interrupted" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert "Ctrl-C: the last step is saved first; a second Ctrl-C ends at once" in printed
    assert f"stopped    by Ctrl-C after step 2, saved in {folder / 'interrupted'}" in printed
    assert "resume     " in printed


def stop_in(phase: str, ranks: int, folder: pathlib.Path, arguments: list) -> tuple[list, list[str]]:
    """(the exit code of each rank, the checkpoints) of a run with a folder that is stopped in a phase."""
    there = folder.with_name(f"{folder.name}-is-there")
    with forking(ranks, multirank.slowed, phase, str(there), *arguments, "--run-name", folder.name) as (world, _):
        wait_until(there.exists, world.processes)
        time.sleep(0.3)
        for process in world.processes:  # as torchrun forwards it
            os.kill(process.pid, signal.SIGTERM)
        for process in world.processes:
            process.join(300)
        codes = [process.exitcode for process in world.processes]
    return codes, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_in_each_phase_saves_the_last_complete_step_at_once(phase, flags):
    """Where each piece of the phase takes a second, and there are many."""
    folder, given = flags
    step, more, missing = PHASES[phase]
    codes, saved = stop_in(phase, 2, folder / phase, [*given, *words(more)])
    assert saved == ([f"step-{step:08d}"] if step else [])
    assert codes == [143, 143]
    if step and phase != "end":
        lines = metrics_of(folder / phase)
        assert [line["step"] for line in lines] == [*range(1, step + 1)] and missing not in lines[-1]
        assert json.loads((folder / phase / "config.json").read_text())["starts"][-1]["exit_code"] == 143


def close_a_terminal(command: list, marker: bytes) -> None:
    """Run a command in a terminal of its own, and close that once the command prints `marker`."""
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(ROOT)
        os.execv(command[0], [str(word) for word in command])
    sent, deadline = b"", time.monotonic() + 600
    while marker not in sent:
        assert time.monotonic() < deadline, sent.decode()
        sent += os.read(terminal, 65536)
    os.close(terminal)
    os.waitpid(shell, 0)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[sys.executable], torchrun_command(2)], ids=["python", "torchrun"])
def test_a_closed_terminal_saves_the_last_step(launcher, flags):
    folder, given = flags
    name = f"closed-{len(launcher)}"
    close_a_terminal([*launcher, PROGRAM, *given, "--num-steps", "4000", "--run-name", name], b"step    2/4000")
    (saved,) = (folder / name / "checkpoints").glob("step-*")
    assert len(losses_of(folder / name)) == int(saved.name.removeprefix("step-"))
    assert json.loads((folder / name / "config.json").read_text())["starts"][-1]["exit_code"] == 143


@pytest.mark.slow
def test_a_step_that_a_stop_cut_off_is_trained_again_on_two_ranks(flags):
    """Below stage 3, where parameters stay gathered between microbatches."""
    folder, given = flags
    given = [*given, *words("--zero-stage 1 --num-steps 4 --gradient-accumulation-steps 20")]
    assert stop_in("forward", 2, folder / "cut", given) == ([143, 143], ["step-00000002"])
    for name in ("cut", "uncut"):
        forked(2, multirank.program, *given, "--resume", "auto", "--run-name", name)
    assert losses_of(folder / "cut") == losses_of(folder / "uncut")
