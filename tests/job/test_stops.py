"""Signals to a run, seen from outside: when and how it ends, and its files."""

import ctypes
import json
import multiprocessing
import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time

import multirank
import pytest
from conftest import PROGRAM, ROOT, forked, forking, losses_of, metrics_of, parse, slow_case, torchrun_command, words

from harness.job import signals

SIZES = words("--sequence-length 32 --batch-size 1 --precision fp32 --num-workers 0 --log-interval 1 --no-compile")
SECONDS = 10  # in which a stop must be answered

# ----------------------------------------------------------------------------------------------------------------------
# Child processes


def blocked_in(pid: object) -> int:
    """The signals that all threads of a process block, as a bit mask."""
    mask = 2**64 - 1
    for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
        mask &= int((thread / "status").read_text().partition("SigBlk:")[2].split()[0], 16)
    return mask


def of_subprocess() -> int:
    with subprocess.Popen(["sleep", "60"]) as child:
        mask = blocked_in(child.pid)
        child.kill()
    return mask


def of_spawned() -> int:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    mask = blocked_in(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return mask


def of_forked() -> int:
    child = os.fork()
    if not child:
        time.sleep(60)
    deadline = time.monotonic() + 30
    while (mask := blocked_in(child)) and time.monotonic() < deadline:  # what comes during the fork is held back
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return mask


def of_a_threads() -> int:
    masks: list[int] = []
    thread = threading.Thread(target=lambda: masks.append(of_subprocess()))
    thread.start()
    thread.join()
    return masks[0]


def of_wandb() -> int:
    import wandb

    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    wandb.init(dir=tempfile.mkdtemp())
    (core,) = (pid for pid in os.listdir("/proc") if pid.isdigit() and is_child(pid, "wandb-core"))
    return blocked_in(core)


def of_compile_workers() -> int:
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    return blocked_in(SubprocPool(1).process.pid)


def is_child(pid: str, name: str) -> bool:
    try:
        words = pathlib.Path(f"/proc/{pid}/stat").read_text().replace("(", " ").replace(")", " ").split()
    except OSError:  # it has ended
        return False
    return words[1] == name and words[3] == str(os.getpid())


QUICK = [of_subprocess, of_spawned, of_forked, of_a_threads, of_compile_workers]
CHILDREN = [*(pytest.param(kind, id=kind.__name__) for kind in QUICK), slow_case(of_wandb, id="of_wandb")]


def start_child(kind, answer) -> None:
    signals.listen(parse(["--demo"]))
    answer.value = kind()
    os._exit(0)


@pytest.mark.parametrize("kind", CHILDREN)
def test_child_processes_get_signals_as_usual(kind):
    context = multiprocessing.get_context("fork")
    answer = context.Value(ctypes.c_ulonglong, 2**64 - 1)
    run = context.Process(target=start_child, args=(kind, answer))
    run.start()
    run.join(300)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    assert [number for number in numbers if answer.value >> (number - 1) & 1] == []


# ----------------------------------------------------------------------------------------------------------------------
# A stop in each phase of a run

STEPS = 6
PHASES = {  # the step that is saved, and the flags of the run
    "start": (None, ""),
    "data": (2, "--gradient-accumulation-steps 60"),
    "forward": (2, "--gradient-accumulation-steps 60"),
    "evaluation": (3, "--eval-interval 3 --eval-steps 300"),
    "sampling": (3, "--eval-interval 3 --eval-steps 1 --sample-tokens 300"),
    "save": (3, "--checkpoint-interval 3 --no-async-checkpoint"),
    "end": (STEPS, ""),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    named = ["--demo", *SIZES, "--num-steps", STEPS, "--output-dir", folder, "--cache-dir", folder / "cache"]
    return folder, [*map(str, named), "--eval-interval", "0", "--sample-tokens", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("more, saved", [("", ["step-00000002"]), ("--checkpoint-interval 9", [])])
def test_ctrl_c_in_a_long_run_saves_unless_checkpoints_do(more, saved, flags):
    folder, given = flags
    name = f"interrupted-{len(saved)}"
    with forking(1, multirank.interrupted, *given, *words(more), "--run-name", name) as (world, output):
        (process,) = world.processes
        process.join(300)
        printed = output.read()
    assert process.exitcode == 130
    assert [path.name for path in (folder / name / "checkpoints").glob("step-*")] == saved
    if saved:
        assert "Ctrl-C: the last step is saved first; a second Ctrl-C ends at once" in printed
        assert f"stopped    by Ctrl-C after step 2, saved in {folder / name}" in printed and "resume     " in printed


def stop_in(phase: str, ranks: int, flags: tuple, name: str) -> tuple[list, str | None, float, pathlib.Path]:
    """(the exit code of each rank, the newest checkpoint, seconds from the signal to the end, the run's folder)."""
    folder, given = flags
    there = folder / f"{name}-is-there"
    arguments = [*given, *words(PHASES[phase][1]), "--run-name", name]
    with forking(ranks, multirank.slowed, phase, str(there), *arguments) as (world, output):
        deadline = time.monotonic() + 600
        while not there.exists():
            assert time.monotonic() < deadline and all(p.exitcode is None for p in world.processes), output.read()
            time.sleep(0.05)
        time.sleep(0.3)
        began = time.monotonic()
        for process in world.processes:  # as torchrun forwards it
            os.kill(process.pid, signal.SIGTERM)
        for process in world.processes:
            process.join(300)
        seconds = time.monotonic() - began
        codes = [process.exitcode for process in world.processes]
    saved = sorted(path.name for path in (folder / name / "checkpoints").glob("step-*"))
    return codes, saved[-1] if saved else None, seconds, folder / name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_in_each_phase_saves_the_last_complete_step_at_once(phase, ranks, flags):
    codes, saved, seconds, run = stop_in(phase, ranks, flags, f"{phase}-{ranks}")
    print(f"| {phase} | {ranks} | {codes} | {saved} | {seconds:.1f} |")
    step = PHASES[phase][0]
    assert saved == (f"step-{step:08d}" if step else None)
    assert codes == [143] * ranks
    assert seconds < SECONDS
    if step and phase != "end":
        assert [line["step"] for line in metrics_of(run)] == [*range(1, step + 1)]
        assert json.loads((run / "config.json").read_text())["starts"][-1]["exit_code"] == 143
        assert len(losses_of(run)) == step


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
    given = [*given, *words("--zero-stage 1 --num-steps 4")]
    codes, saved, _, run = stop_in("forward", 2, (folder, given), "cut")
    assert codes == [143, 143] and saved == "step-00000002"
    for name in ("cut", "whole"):
        more = words(f"--gradient-accumulation-steps 60 --resume auto --run-name {name}")
        forked(2, multirank.program, *given, *more)
    assert losses_of(run) == losses_of(folder / "whole")
