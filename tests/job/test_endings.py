"""How a run ends reaches those who show it: once, whatever they do with it, and no later than it must."""

import threading
import time

import pytest

from harness.job import endings, heartbeats


@pytest.fixture(autouse=True)
def listeners(monkeypatch):
    monkeypatch.setattr(endings, "LISTENERS", [])
    monkeypatch.setattr(endings, "ENDING", [])
    return endings.LISTENERS


def test_every_listener_hears_the_exit_code_once(listeners):
    heard = []
    listeners += [lambda code: heard.append(("first", code)), lambda code: heard.append(("second", code))]
    endings.announce(143)
    endings.announce(1)
    assert sorted(heard) == [("first", 143), ("second", 143)]


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
    listeners += [lambda code: 1 / 0, lambda code: never.wait(), heard.append]
    start = time.monotonic()
    endings.announce(1, patience=0.5)
    assert heard == [1]
    assert time.monotonic() - start < 30
    never.set()


def test_a_missed_gate_is_a_failure_and_a_signal_is_none():
    assert [endings.state_of(code) for code in (0, 1, 2, 3, 130, 143)] == ["done", *["failed"] * 3, *["stopped"] * 2]
