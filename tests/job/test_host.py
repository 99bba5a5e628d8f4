"""How many threads a rank computes with, how they wait, and what a container leaves it."""

import os
import subprocess
import sys

import pytest
from conftest import parse

from harness.job import host


def test_a_container_bounds_memory_and_cores(monkeypatch, tmp_path):
    """A container of 1,000 bytes and one and a half cores, in which a group allows more."""
    (tmp_path / "box" / "job").mkdir(parents=True)
    for name, memory, cpu in (("box", "1000", "150000 100000"), ("box/job", "max", "400000 100000")):
        (tmp_path / name / "memory.max").write_text(memory + "\n")
        (tmp_path / name / "cpu.max").write_text(cpu + "\n")
    monkeypatch.setattr(host, "CGROUPS", str(tmp_path))
    limits = host.limits
    monkeypatch.setattr(host, "limits", lambda name: limits(name, "/box/job"))
    assert host.memory() == 1000
    assert host.cores() == 1


@pytest.fixture
def threads(monkeypatch):
    """`threads(flags, busy, **environment)`: (threads, how they wait) of a rank on a machine with eight cores and no
    GPU, `busy` of which others use."""
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    monkeypatch.setattr(host, "cores", lambda: 8)
    monkeypatch.setattr(os.path, "exists", lambda path: False)

    def choose(flags=(), busy=0.0, **environment):
        monkeypatch.setattr(host, "busy_cores", lambda: busy)
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            host.set_threads(parse([*flags]))
            policy, spins = os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")
            chosen = os.environ["OMP_NUM_THREADS"], policy or f"spin {spins}"
        for name in names:
            os.environ.pop(name, None)
        os.environ["OMP_NUM_THREADS"] = "1"
        return chosen

    return choose


SPIN = f"spin {host.SPIN_COUNT}"


@pytest.mark.parametrize(
    "environment, flags, busy, chosen",
    [
        ({}, [], 0.3, ("8", SPIN)),
        ({"LOCAL_WORLD_SIZE": "3"}, [], 2.0, ("2", SPIN)),  # busy: the other two ranks, which are starting
        ({"OMP_NUM_THREADS": "7"}, ["--streaming"], 0.0, ("7", SPIN)),
        # threads that would take a core from somebody sleep while they wait
        ({}, [], 1.0, ("8", "passive")),
        ({}, ["--streaming"], 0.0, ("8", "passive")),  # its reader needs a core
        ({"OMP_NUM_THREADS": "9"}, [], 0.0, ("9", "passive")),  # more than the affinity mask or a quota leaves
        ({"LOCAL_WORLD_SIZE": "16"}, [], 0.0, ("1", "passive")),
        # what the environment says stays
        ({"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "active"}, [], 0.0, ("5", "active")),
        ({"GOMP_SPINCOUNT": "7"}, [], 0.0, ("8", "spin 7")),
    ],
)
def test_ranks_share_the_cores_and_wait_on_them_where_they_are_free(threads, environment, flags, busy, chosen):
    assert threads(flags, busy, **environment) == chosen


@pytest.mark.parametrize("given, expected", [({}, "4"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_what_torchrun_sets_by_itself_is_not_the_users(threads, monkeypatch, given, expected):
    with subprocess.Popen(["sleep", "60"], env=given) as torchrun:
        monkeypatch.setattr(os, "getppid", lambda: torchrun.pid)
        chosen = threads(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="it", LOCAL_WORLD_SIZE="2")
        torchrun.kill()
    assert chosen[0] == expected


def test_a_process_that_computes_beside_this_one_counts_as_a_busy_core():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            busy = host.busy_cores(0.5)
        finally:
            spinning.kill()
    assert 0.3 < busy <= os.cpu_count()
