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
from conftest import PROGRAM, ROOT, forked, parse

from harness.base import UserError
from harness.job import endings, heartbeats, signals, world


@pytest.mark.parametrize("nodes, restarts, shared", [("1", "3", "True"), ("2", "0", "True"), ("2", "3", "False")])
def test_restarts_on_several_nodes_need_a_store_of_their_own(nodes, restarts, shared):
    names = ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
    world.check_restarts(dict(zip(names, (nodes, restarts, shared), strict=True)))
    with pytest.raises(UserError, match="--max-restarts 3: on several nodes"):
        world.check_restarts(dict(zip(names, ("2", "3", "True"), strict=True)))


@pytest.mark.slow
def test_every_group_gives_up_a_rank_that_does_not_come():
    assert {"replicas: gave up", "objects: gave up"} <= set(forked(2, multirank.abandoned).splitlines())


def test_ranks_answer_each_other_in_one_group_for_the_life_of_a_world():
    said = forked(2, multirank.asking_in_two_worlds, timeout=100)
    assert {"one 1, one 2, 1", "two 1, two 2, 1"} <= set(said.splitlines())


def test_a_rank_has_the_answer_of_its_own_node():
    assert "[0, 1, 1]" in forked(3, multirank.asking_on_two_nodes, timeout=100).splitlines()


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def test_a_request_to_one_rank_stops_all_after_the_same_step():
    said = forked(2, multirank.stopping_for_one, timeout=100)
    assert str([[False, False, True]] * 2) in said.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_torch_is_loaded_ends_with_its_exit_code(number):
    with subprocess.Popen(
        [sys.executable, PROGRAM, "--demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        said = process.stderr.read()
    if number == signal.SIGINT:
        assert (process.returncode, said) == (130, "stopped    by Ctrl-C before the first step\n")
    else:
        expected = f"train_fsdp.py: {number.name} outside training, nothing to save\n"
        assert (process.returncode, said) == (143, expected)


def listen(training: bool, reports) -> None:
    stop = signals.StopRequest()
    stop.can_save = training
    stop.listen()
    reports.send("listens")
    while not stop.name:
        time.sleep(0.01)
    time.sleep(2 * signals.StopRequest.SAME_REQUEST)  # what comes now is another request
    reports.send("asked")
    time.sleep(1000)


@pytest.mark.parametrize("number", signals.StopRequest.SIGNALS)
def test_a_second_signal_or_one_outside_training_ends_the_rank_at_once(number, monkeypatch):
    monkeypatch.setattr(signals.StopRequest, "SAME_REQUEST", 0.2)
    for training, waits_for in ((False, ["listens"]), (True, ["listens", "asked"])):
        reports, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=listen, args=(training, sender))
        child.start()
        for report in waits_for:
            assert reports.recv() == report and child.is_alive()
            os.kill(child.pid, number)
        child.join(300)
        assert child.exitcode == endings.STOPPED


def wait_for_ever(listens, forked) -> None:
    signals.listen(parse(["--demo"]))
    child = os.fork()
    if child == 0:  # as a data worker or a pool's process
        time.sleep(1000)
    forked.value = child
    listens.set()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_ctrl_c_ends_a_rank_that_waits_for_ever_and_sigterm_a_process_that_it_forked():
    context = multiprocessing.get_context("fork")
    listens, forked = context.Event(), context.Value("i")
    rank = context.Process(target=wait_for_ever, args=(listens, forked))
    rank.start()
    assert listens.wait(300)
    os.kill(forked.value, signal.SIGTERM)
    os.kill(rank.pid, signal.SIGINT)
    rank.join(300)
    assert rank.exitcode == 130
    deadline = time.monotonic() + 60
    while heartbeats.process_status(forked.value) not in heartbeats.GONE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ----------------------------------------------------------------------------------------------------------------------
# Listeners


@pytest.fixture
def listeners(monkeypatch):
    monkeypatch.setattr(endings, "LISTENERS", [])
    monkeypatch.setattr(endings, "ENDING", [])
    return endings.LISTENERS


def test_no_other_thread_leaves_or_goes_on_before_the_first_one_has_left(listeners):
    listening, heard = threading.Event(), []
    listeners.append(lambda code: (listening.wait(), heard.append(code)))
    first = threading.Thread(target=endings.announce, args=(130,), daemon=True)
    first.start()
    while not endings.ENDING:
        time.sleep(0.01)
    others = [(endings.announce, (0,)), (heartbeats.enter_phase, ("forward", 7)), (endings.announce, (1, 0.1))]
    others = [threading.Thread(target=call, args=arguments, daemon=True) for call, arguments in others]
    for other in others:
        other.start()
    listening.set()
    first.join(30)
    assert heard == [130]
    assert all(other.is_alive() for other in others)


def test_one_that_fails_or_hangs_keeps_nobody(listeners):
    heard, never = [], threading.Event()
    listeners += [lambda code: 1 / 0, lambda code: never.wait()]
    endings.at_exit(heard.append)
    start = time.monotonic()
    endings.announce(1, patience=0.5)
    endings.announce(143)
    assert heard == [1]
    assert time.monotonic() - start < 30
    never.set()


def test_a_missed_gate_is_a_failure_and_a_signal_is_none():
    assert [endings.state_of(code) for code in (0, 1, 2, 3, 130, 143)] == ["done", *["failed"] * 3, *["stopped"] * 2]
