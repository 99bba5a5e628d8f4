"""Joining and leaving the world, what a signal does to it, and how a run's end reaches those who show it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import multirank
import pytest
from conftest import PROGRAM, ROOT, cold_python, forked, parse

from harness.base import UserError
from harness.job import endings, signals, world
from harness.job.startup import check_launcher_env


@pytest.mark.parametrize("nodes, restarts, shared", [("1", "3", "True"), ("2", "0", "True"), ("2", "3", "False")])
def test_restarts_on_several_nodes_need_a_store_of_their_own(nodes, restarts, shared):
    names = ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
    world.check_restarts(dict(zip(names, (nodes, restarts, shared), strict=True)))
    with pytest.raises(UserError, match="--max-restarts 3: on several nodes"):
        world.check_restarts(dict(zip(names, ("2", "3", "True"), strict=True)))


@pytest.mark.slow
def test_a_rank_has_the_answer_of_its_own_node():
    assert "[0, 1, 1]" in forked(3, multirank.asking_on_two_nodes, timeout=100).splitlines()


HALF_WORLDS = {  # an environment: how the line begins
    "RANK=0": "RANK=0 is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the ranks by torchrun",
    "RANK=0 WORLD_SIZE=2 MASTER_PORT=29500": "RANK=0 is set, but not MASTER_ADDR;",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=29500": "RANK=0 is set, but not MASTER_ADDR;",
    "RANK=0 WORLD_SIZE=² MASTER_ADDR=a MASTER_PORT=1": "WORLD_SIZE=² is not a whole number;",
    "RANK=2 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1": "RANK=2 is not below WORLD_SIZE=2;",
    "RANK=first WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1": "RANK=first is not a whole number;",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http": "MASTER_PORT=http is not a whole number;",
    "RANK=0 WORLD_SIZE=0 MASTER_ADDR=a MASTER_PORT=1": "WORLD_SIZE=0 is below 1;",
    "RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=0 MASTER_ADDR=a MASTER_PORT=1": "LOCAL_WORLD_SIZE=0 is below 1;",
    "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=99999": "MASTER_PORT=99999 is above 65535;",
    "WORLD_SIZE=8": "WORLD_SIZE=8 is set, but RANK is not;",
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0": "OMPI_COMM_WORLD_SIZE=4 is set, but RANK is not: each process",
    "PMI_SIZE=4 PMI_RANK=0": "PMI_SIZE=4 is set, but RANK is not: each process would train alone;",
    "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0": "SLURM_STEP_NUM_TASKS=2 is set, but RANK is not: each process",
    "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1": "",  # which waits for the line of the first one
}


@pytest.mark.parametrize("environment, line", HALF_WORLDS.items())
def test_half_a_world_is_one_line_that_names_the_variable(environment, line, monkeypatch, capfd):
    monkeypatch.setattr(os, "environ", dict(word.split("=") for word in environment.split()))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as left:
        check_launcher_env(parse(["--demo"]))
    printed = capfd.readouterr().err
    assert left.value.code == 2 and printed.count("\n") == bool(line)
    assert printed.startswith(f"train_fsdp.py: error: {line}" if line else "")


def test_half_a_world_is_found_before_anything_begins():
    process = cold_python("--demo", WORLD_SIZE="8")
    assert (process.returncode, process.stdout) == (2, "") and process.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# Signals


OUTSIDE_TRAINING = [  # a command's beginning and the signals to it: how it ends
    ([], [signal.SIGINT], 130, "stopped    by Ctrl-C before the first step\n"),
    ([], [signal.SIGTERM], 143, "train_fsdp.py: SIGTERM outside training, nothing to save\n"),
    ([], [signal.SIGHUP], 143, "train_fsdp.py: SIGHUP outside training, nothing to save\n"),
    (["nohup"], [signal.SIGHUP, signal.SIGTERM], 143, "train_fsdp.py: SIGTERM outside training, nothing to save\n"),
]


@pytest.mark.parametrize("launcher, numbers, exit_code, line", OUTSIDE_TRAINING)
def test_a_signal_while_torch_is_loaded_ends_with_its_exit_code(launcher, numbers, exit_code, line):
    command = [*launcher, sys.executable, PROGRAM, "--demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.readline()
        for number in numbers:
            process.send_signal(number)
        printed = process.stderr.read().removeprefix("nohup: ignoring input\n")
    assert (process.returncode, printed) == (exit_code, line)


def wait_for_ever(listens) -> None:
    signals.listen(parse(["--demo"]))
    listens.set()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_ctrl_c_ends_a_rank_that_waits_for_ever():
    context = multiprocessing.get_context("fork")
    listens = context.Event()
    rank = context.Process(target=wait_for_ever, args=(listens,))
    rank.start()
    assert listens.wait(300)
    os.kill(rank.pid, signal.SIGINT)
    rank.join(300)
    assert rank.exitcode == 130


# ----------------------------------------------------------------------------------------------------------------------
# Who hears how a run ends


def test_one_that_fails_or_hangs_keeps_nobody(monkeypatch):
    heard, never = [], threading.Event()
    monkeypatch.setattr(endings, "LISTENERS", [lambda code: 1 / 0, lambda code: never.wait(), heard.append])
    monkeypatch.setattr(endings, "ENDING", [])
    start = time.monotonic()
    endings.announce(1, timeout=0.5)
    assert heard == [1]
    assert time.monotonic() - start < 30
    never.set()
