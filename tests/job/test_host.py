"""The number of threads of a rank, how they wait, and the cores of a container."""

import os
import subprocess

import pytest
from conftest import parse

from harness.job import host


def test_a_container_bounds_cores(monkeypatch, tmp_path):
    """A container of one and a half cores, in which a group allows more."""
    (tmp_path / "box" / "job").mkdir(parents=True)
    for name, cpu in (("box", "150000 100000"), ("box/job", "400000 100000")):
        (tmp_path / name / "cpu.max").write_text(cpu + "\n")
    monkeypatch.setattr(host, "CGROUPS", str(tmp_path))
    cgroup_limits = host.cgroup_limits
    monkeypatch.setattr(host, "cgroup_limits", lambda name: cgroup_limits(name, "/box/job"))
    assert host.cores() == 1


SPIN = f"spin {host.SPIN_COUNT}"
TORCHRUN = {"TORCHELASTIC_RUN_ID": "it", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # of which it set the last


@pytest.mark.parametrize(
    "environment, busy, chosen",
    [
        ({}, 0.3, ("8", SPIN)),
        ({"LOCAL_WORLD_SIZE": "3"}, 2.0, ("2", SPIN)),  # busy: the other two ranks, which are starting
        ({}, 1.0, ("8", "passive")),  # threads that would take a core from somebody sleep while they wait
        ({"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "active"}, 0.0, ("5", "active")),  # what the user says stays
        (TORCHRUN, 1.0, ("4", SPIN)),
    ],
)
def test_ranks_share_the_cores_and_wait_on_them_where_they_are_free(monkeypatch, environment, busy, chosen):
    """On a machine with eight cores and no GPU, `busy` of which others use."""
    monkeypatch.setattr(host, "cores", lambda: 8)
    monkeypatch.setattr(host, "busy_cores", lambda: busy)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with subprocess.Popen(["sleep", "60"], env={}) as torchrun, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getppid", lambda: torchrun.pid)
        for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
            patch.setenv(name, "")  # so that it is restored in the end
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        host.set_threads(parse([]))
        policy = os.environ.get("OMP_WAIT_POLICY") or f"spin {os.environ.get('GOMP_SPINCOUNT')}"
        assert (os.environ["OMP_NUM_THREADS"], policy) == chosen
        torchrun.kill()
