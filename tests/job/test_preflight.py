"""Checks before a run trains: room on the disk, other processes on a GPU (with a fake driver), shards over nodes."""

import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from conftest import parse, slow_case, train

from harness.base import GIB, UserError
from harness.flags.settings import OPTIMIZERS
from harness.job import preflight, start_processes


def test_several_ranks_without_local_rank_are_one_line_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UserError, match=r"WORLD_SIZE=2 is set, but not LOCAL_RANK, .*; set it for each rank, or start"):
        start_processes()


def test_memory_that_others_hold_of_a_gpu_is_named_with_their_pids_where_the_driver_says_so(device, monkeypatch):
    processes = [(os.getpid(), 1000), (7, 15 * GIB), (8, 5 * GIB)]
    own, *others = (types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(uuid="abc"))
    package = types.SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid)
    package.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [own, *others] if gpu == "GPU-abc" else []
    monkeypatch.setitem(sys.modules, "pynvml", package)
    printed = preflight.describe_other_processes(preflight.other_processes_on_gpu())
    assert f", pid {os.getpid()}): 20.0 GiB of its GPU are used by other processes (pid 7, 8); " in printed
    package.nvmlDeviceGetComputeRunningProcesses = lambda gpu: others  # a container
    assert preflight.describe_other_processes(preflight.other_processes_on_gpu()) == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)  # no package
    assert preflight.other_processes_on_gpu() == {}


# ----------------------------------------------------------------------------------------------------------------------
# The disk


@pytest.mark.parametrize("optimizer", [slow_case(o) if o == "adamw8bit" else o for o in OPTIMIZERS])
def test_a_checkpoint_is_as_large_as_is_reported(device, tmp_path, arguments, mistake, monkeypatch, optimizer):
    given = ["--optimizer", optimizer, "--precision", "bf16", "--num-steps", 1, "--checkpoint-interval", 1]
    assert train([*arguments, *given], device) == 0
    (saved,) = (tmp_path / "out" / "r" / "checkpoints").iterdir()
    size = sum(path.stat().st_size for path in saved.iterdir())
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 0)
    printed = mistake(*given, "--run-name", "again", exit_code=1)
    takes = re.match(r"--output-dir: a checkpoint takes (\S+) MB, ", printed)[1]
    assert size == pytest.approx(float(takes) * 1e6, rel=0.15)  # a small model: names and offsets count too


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 768 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_run_whose_checkpoint_has_no_room_ends_before_it_trains(small_disk, mistake):
    printed = mistake("--output-dir", small_disk, "--checkpoint-interval", 1, exit_code=1)
    assert printed.startswith("--output-dir: a checkpoint takes 3.1 MB, ")
    assert f"{small_disk / 'r'} has 0.7" in printed and printed.endswith(" MB free; choose another disk, or make room")
    assert not any(small_disk.glob("r/*.jsonl"))
    printed = mistake("--export", small_disk / "export", exit_code=1)
    assert printed.startswith("--export ") and "free; choose another disk" in printed


def test_a_last_state_that_has_no_room_is_one_warning_and_no_error(small_disk, device, arguments, mistake, capfd):
    assert train([*arguments, "--output-dir", small_disk], device) == 0
    output, errors = capfd.readouterr()
    assert errors.count("the last state will not be saved; make room") == errors.count("warning") == 1
    assert "no weights: no checkpoint could be saved" in output
    assert not (small_disk / "r" / "checkpoints").exists()
    given = json.loads((small_disk / "r" / "config.json").read_text())["given"]
    assert "final_checkpoint" not in given  # --config repeats what was given: there may be room then
    printed = mistake("--output-dir", small_disk, "--run-name", "asked", "--final-checkpoint", exit_code=1)
    assert printed.startswith("--output-dir: a checkpoint takes 3.1 MB, ")


@pytest.mark.parametrize(
    "ranks_per_node, shards, given, is_spread",
    [(8, 16, [], True), (8, 8, [], False), (1, 4, [], False), (8, 16, [1], False)],
)
def test_a_shard_group_over_several_nodes_is_one_line_that_names_the_flag(ranks_per_node, shards, given, is_spread):
    settings = parse(["--demo", *(["--dp-replicate-size", *given] if given else [])])
    printed = preflight.describe_spread(settings, shards, ranks_per_node)
    assert bool(printed) == is_spread
    if is_spread:
        assert printed.startswith("shards     over 2 nodes; --plan compares that with --dp-replicate-size 2, ")
