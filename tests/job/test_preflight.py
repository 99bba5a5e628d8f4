"""What would end a run late is found before it trains, with what to do.

No GPU has run these: what ranks report of one is made up, and so is the driver's package.
"""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from conftest import parse, train

from harness.base import GIB, UserError
from harness.data import create_collate_fn
from harness.job import host, preflight
from harness.model.configs import load_config
from harness.model.optimization import parameter_bytes
from harness.model.weights import count_parameters


def found(rank: int, node: str, **versions: str) -> preflight.Findings:
    return preflight.Findings(f"rank {rank} ({node}, pid {100 + rank})", node, {"torch": "2.13.0"} | versions)


def test_what_a_rank_reports_is_less_than_a_kilobyte(device):
    own = preflight.describe(device)
    assert {"python", "torch", "transformers", "program"} <= own.versions.keys()
    own.versions |= {"nccl": "2.28.9", "cuda": "13.0"}
    assert len(pickle.dumps(dataclasses.replace(own, node="n" * 64, taken_gpu="g" * 200))) < 1024


def test_a_node_with_other_versions_is_named_with_what_rank_0_has():
    a, b = found(0, "node-a", program="0"), {"torch": "2.11.0", "program": "1"}
    assert preflight.compare_versions([a, found(1, "node-a", program="0")]) == []
    lines = preflight.compare_versions([a, found(1, "node-b", **b), found(2, "node-b", **b)])
    has, usual = "rank 1 (node-b, pid 101)", "on rank 0 (node-a, pid 100)"
    assert lines == [
        f"{has}: torch 2.11.0, but 2.13.0 {usual}; give all ranks the same",
        f"{has}: program 1, but 0 {usual}; give all ranks the same",
    ]
    (line,) = preflight.compare_versions([found(0, "a", torchao="0.18"), found(1, "b")])
    assert line.startswith("rank 1 (b, pid 101): torchao missing, but 0.18 on rank 0 (a, pid 100)")


# ----------------------------------------------------------------------------------------------------------------------
# The GPU


def test_memory_that_others_hold_of_a_gpu_is_named_with_their_pids():
    assert preflight.describe_taken("rank 1 (a, pid 101)", {9: GIB // 2}) == ""
    said = preflight.describe_taken("rank 1 (a, pid 101)", {7: 15 * GIB, 8: 5 * GIB})
    assert said.startswith("rank 1 (a, pid 101): 20.0 GiB of its GPU are held by others (pid 7, 8); ")


def test_the_driver_is_asked_for_other_processes_and_need_not_answer(monkeypatch):
    own, other = (types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in ((os.getpid(), 1000), (4321, 5)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(uuid="abc"))
    package = types.SimpleNamespace(nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid)
    package.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [own, other] if gpu == "GPU-abc" else []
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert preflight.holders_of_gpu() == {4321: 5}
    package.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [other]  # a container
    assert preflight.holders_of_gpu() == {}
    del package.nvmlDeviceGetComputeRunningProcesses  # an older package
    assert preflight.holders_of_gpu() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # no package
    assert preflight.holders_of_gpu() == {}


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def test_a_microbatch_takes_what_is_said_of_shared_memory():
    settings = parse(["--demo", "--batch-size", 4, "--sequence-length", 250_000])
    batch = create_collate_fn(shift_labels=False)([np.zeros(250_001, np.uint16)] * 4)  # as the program does
    assert preflight.batch_bytes(settings) == sum(tensor.nbytes for tensor in batch.values())


def test_too_little_shared_memory_for_data_workers_is_an_error(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 64 * 2**20)  # what docker gives
    preflight.check_shared_memory(parse(["--demo", "--num-workers", 1]))
    preflight.check_shared_memory(parse(["--demo", "--num-workers", 0]))
    many = parse(["--demo", "--batch-size", 64, "--sequence-length", 8192, "--num-workers", 4])
    with pytest.raises(UserError, match=r"^--num-workers 4: /dev/shm of .*: 67\.1 MB free, .* takes 671 MB; "):
        preflight.check_shared_memory(many)


def test_a_model_that_the_host_cannot_hold_is_refused_before_its_data_are_read(mistake, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "memory", lambda: 1000)
    assert "GiB and more (" in (message := mistake()) and message.startswith("--model ")
    assert " x 16 bytes with their gradients and optimizer states), it has 0.0; try --demo, or look for GPUs" in message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "flags, each",
    [("", 16), ("--precision bf16-pure", 8), ("--optimizer adamw-bf16", 12), ("--optimizer adamw8bit", 10)],
)
def test_nothing_that_fits_is_refused(monkeypatch, flags, each):
    monkeypatch.setattr(host, "memory", lambda: 1000 * each)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    settings = parse(flags.split())
    of_parameter = parameter_bytes(settings)
    preflight.check_memory(settings, 1000, of_parameter, 250 * of_parameter.at_rest)
    with pytest.raises(UserError):
        preflight.check_memory(settings, 1001, of_parameter, 1001 / 4 * of_parameter.at_rest)


def test_a_run_without_memory_for_such_copies_waits_for_each_save(device, arguments, monkeypatch, capfd):
    monkeypatch.setattr(host, "memory", lambda: 10_000_000)
    assert train([*arguments, "--checkpoint-interval", 1, "--num-steps", 3], device) == 0
    output, errors = capfd.readouterr()
    assert errors.count("no host memory for copies of a checkpoint: the run waits for each save") == 1
    assert output.count("saved      step-") == 3 and "training paused" not in output


# ----------------------------------------------------------------------------------------------------------------------
# The disk


@pytest.mark.parametrize("flags, each", [("", 12), ("--optimizer adamw-bf16", 8), ("--precision bf16-pure", 6)])
def test_a_checkpoint_is_as_large_as_is_said(device, tmp_path, arguments, flags, each):
    given = [*arguments, *flags.split(), "--num-steps", 1, "--checkpoint-interval", 1]
    if "precision" not in flags:
        given += ["--precision", "bf16"]
    assert train(given, device) == 0
    (saved,) = (tmp_path / "out" / "r" / "checkpoints").iterdir()
    size = sum(path.stat().st_size for path in saved.iterdir())
    settings = parse(given)
    assert parameter_bytes(settings).in_checkpoint == each
    expected = each * count_parameters(load_config(settings.model))
    assert size == pytest.approx(expected, rel=0.15)  # a small model: names and offsets count too


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
    said = mistake("--output-dir", small_disk, "--checkpoint-interval", 1, exit_code=1)
    assert said.startswith("--output-dir: a checkpoint takes 3.1 MB (")
    assert f"{small_disk / 'r'} has 0.7" in said and said.endswith(" MB free; name another disk, or make room")
    assert not any(small_disk.glob("r/*.jsonl"))
    said = mistake("--export", small_disk / "export", exit_code=1)
    assert said.startswith("--export ") and "free; name another disk" in said


def test_a_last_state_that_has_no_room_is_one_warning_and_no_error(small_disk, device, arguments, mistake, capfd):
    assert train([*arguments, "--output-dir", small_disk], device) == 0
    output, errors = capfd.readouterr()
    assert errors.count("the last state will not be kept; make room") == errors.count("warning") == 1
    assert "no weights: --final-checkpoint or --export DIR keeps them" in output
    assert not (small_disk / "r" / "checkpoints").exists()
    given = json.loads((small_disk / "r" / "config.json").read_text())["given"]
    assert "final_checkpoint" not in given  # --config repeats what was given: there may be room then
    said = mistake("--output-dir", small_disk, "--run-name", "asked", "--final-checkpoint", exit_code=1)
    assert said.startswith("--output-dir: a checkpoint takes 3.1 MB (")


@pytest.mark.parametrize(
    "free, there, flags, warned",
    [
        (40e9, 0, "--checkpoint-interval 5", False),
        (30e9, 0, "--checkpoint-interval 5", True),
        (30e9, 1, "--checkpoint-interval 5", False),  # a resumed run: one of them is there already
        (30e9, 0, "--checkpoint-interval 5 --keep-checkpoints 1", False),
        (11e9, 0, "", True),  # the last state
        (13e9, 0, "", False),
    ],
)
def test_room_for_fewer_checkpoints_than_are_kept_is_a_warning(tmp_path, monkeypatch, free, there, flags, warned):
    monkeypatch.setattr(preflight, "free_bytes", lambda _: free)
    for step in range(there):
        write_checkpoint(tmp_path, step)
    settings = parse(["--model", "demo", "--dataset", "demo", *flags.split()])
    warnings, _ = preflight.check_disk(settings, 10**9, parameter_bytes(settings), tmp_path)  # 12 GB
    assert bool(warnings) == warned


def test_what_a_killed_run_left_half_written_counts_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 40_000)
    settings = parse(["--model", "demo", "--dataset", "demo", "--checkpoint-interval", 5])
    with pytest.raises(UserError, match=r"^--output-dir: a checkpoint takes 0\.06 MB"):
        preflight.check_disk(settings, 5000, parameter_bytes(settings), tmp_path)
    half = tmp_path / "checkpoints" / ".step-00000005.writing"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(bytes(30_000))
    (warning,), _ = preflight.check_disk(settings, 5000, parameter_bytes(settings), tmp_path)
    assert "make room, or give a smaller --keep-checkpoints" in warning
