"""Joining and leaving the world; what a rank says when it fails, and what a signal does to it."""

import subprocess
import sys

import multirank
import pytest
from conftest import PROGRAM, ROOT, forked

from harness.base import UserError
from harness.job import world
from harness.job.signals import StopRequest
from harness.job.world import check_restarts, stop_processes


def test_a_rank_waits_for_the_others_before_it_leaves(monkeypatch):
    """A gloo rank that leaves while others still talk to it aborts them, but only now and then."""
    called = []
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(world.dist, name, lambda name=name: called.append(name))
    stop_processes()
    assert called == ["barrier", "destroy_process_group"]


@pytest.mark.parametrize("nodes, restarts, shared", [("1", "3", "True"), ("2", "0", "True"), ("2", "3", "False")])
def test_restarts_on_several_nodes_need_a_store_of_their_own(nodes, restarts, shared):
    names = ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE")
    check_restarts(dict(zip(names, (nodes, restarts, shared), strict=True)))
    with pytest.raises(UserError, match="--max-restarts 3: on several nodes"):
        check_restarts(dict(zip(names, ("2", "3", "True"), strict=True)))


@pytest.mark.slow
def test_every_group_gives_up_a_rank_that_does_not_come():
    assert {"replicas: gave up", "objects: gave up"} <= set(forked(2, multirank.abandoned).splitlines())


def test_a_new_group_is_limited_as_the_default_one_is(device, monkeypatch):
    limited = []
    monkeypatch.setattr(world, "limit_waiting", lambda *groups: limited.extend(groups))
    assert world.new_group() in limited


def test_ranks_answer_each_other_in_one_group_for_the_life_of_a_world():
    said = forked(2, multirank.asking_in_two_worlds, timeout=100)
    assert {"one 1, one 2, 1", "two 1, two 2, 1"} <= set(said.splitlines())


def test_a_rank_has_the_answer_of_its_own_node():
    assert "[0, 1, 1]" in forked(3, multirank.asking_on_two_nodes, timeout=100).splitlines()


def test_a_request_to_one_rank_stops_all_after_the_same_step():
    said = forked(2, multirank.stopping_for_one, timeout=100)
    assert str([[False, False, True]] * 2) in said.splitlines()


@pytest.mark.parametrize("number", StopRequest.SIGNALS)
def test_a_signal_while_torch_is_loaded_ends_with_143(number):
    with subprocess.Popen(
        [sys.executable, PROGRAM, "--demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.readline()
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 143
    assert said == f"train_fsdp.py: {number.name} outside training, nothing to save\n"
