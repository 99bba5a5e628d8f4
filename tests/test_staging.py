"""What is staged is a copy on the host, in memory that is allocated once and used at every save."""

import gc
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import checkpoints, staging


@pytest.fixture
def tensors(device):
    """A DTensor, a transposed one, a scalar, bytes and an empty shard."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    return {
        "sharded": DTensor.from_local(torch.randn(6, 4), mesh, [Shard(0)]),
        "plain": torch.randn(4, 3, dtype=torch.bfloat16).t(),
        "step": torch.tensor(3.0),
        "rng": torch.get_rng_state(),
        "empty": torch.empty(0, 5),
    }


def addresses(staged: dict) -> list[int]:
    return [staging.local_part(tensor).data_ptr() for tensor in staged.values()]


def test_what_is_staged_has_the_values_of_then_whatever_the_loop_does_next(tensors):
    before = {name: staging.local_part(tensor).clone() for name, tensor in tensors.items()}
    staged = staging.Stager(pinned=False).stage(tensors)
    for tensor in tensors.values():
        staging.local_part(tensor).zero_()
    for name, tensor in staged.items():
        assert torch.equal(staging.local_part(tensor), before[name])
        assert tensor.dtype == before[name].dtype
    assert isinstance(staged["sharded"], DTensor)
    assert staged["sharded"].placements == tensors["sharded"].placements


def test_every_save_uses_the_memory_of_the_first_until_a_shape_or_dtype_changes(tensors):
    stager = staging.Stager(pinned=False)
    first = addresses(stager.stage(tensors))
    for value in (1, 2):
        staging.local_part(tensors["sharded"]).fill_(value)
        tensors["rng"] = tensors["rng"].clone()  # a new one at each save, as the run's is
        staged = stager.stage(tensors)
        assert addresses(staged) == first
        assert (staged["sharded"].to_local() == value).all()
    for changed in (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)):
        tensors["plain"] = changed
        staged = stager.stage(tensors)
        assert torch.equal(staged["plain"], changed)
        assert staged["plain"].dtype == changed.dtype
        assert (staged["sharded"].to_local() == 2).all()


def test_the_writer_need_not_copy_what_is_staged_as_each_tensor_has_a_storage_of_its_own_size(tensors):
    for tensor in staging.Stager(pinned=False).stage(tensors).values():
        assert staging.local_part(tensor).untyped_storage().nbytes() == staging.local_part(tensor).nbytes
        assert staging.local_part(tensor).is_contiguous()


def test_pinned_memory_is_one_piece_that_is_pinned_once_and_let_go_with_its_last_tensor(tensors, monkeypatch):
    calls, synchronized, success = [], [], object()
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append((address, size)) or success,
        cudaHostUnregister=lambda address: calls.append(address),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: code is success or pytest.fail("not a code"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))
    stager = staging.Stager(pinned=True)
    for _ in range(2):
        staged = stager.stage(tensors)
    assert len(synchronized) == 2
    ((address, size),) = calls
    for tensor in map(staging.local_part, staged.values()):
        assert not tensor.numel() or address <= tensor.data_ptr() <= address + size - tensor.nbytes
    tensors["step"] = torch.ones(2)
    del stager, tensor
    gc.collect()
    assert len(calls) == 1  # what is still being written keeps it
    del staged
    gc.collect()
    assert calls[1:] == [address]


def test_a_dtensor_on_a_mesh_of_gpus_is_staged_on_the_host(device):
    gpus = DeviceMesh.from_group([dist.group.WORLD] * 2, "cuda", mesh=[[0]], mesh_dim_names=("replicate", "shard"))
    local = torch.empty(6, 4, device="meta")  # stands for one on a GPU
    tensor = DTensor.from_local(local, gpus, [Replicate(), Shard(0)], run_check=False)
    staged = staging.like(tensor, torch.ones(6, 4))
    assert staged.device.type == staged.to_local().device.type == "cpu"
    assert (staged.placements, staged.shape) == (tensor.placements, tensor.shape)
    assert staged.device_mesh.mesh_dim_names == gpus.mesh_dim_names
    assert staging.mesh_on(gpus, "cpu") is staged.device_mesh  # made once


@pytest.mark.parametrize("writer", [checkpoints.Writer, dcp.FileSystemWriter])
def test_with_gpus_too_the_writing_thread_waits_for_no_stream(tensors, tmp_path, monkeypatch, writer):
    """DCP's own choice of settings does, which shows that this would see it."""
    used, serial = [], filesystem._SerialCpuLoader  # the other needs a GPU
    for name in ("_SerialCpuLoader", "_OverlappingCpuLoader"):
        monkeypatch.setattr(filesystem, name, lambda resolve, name=name, **_: used.append(name) or serial(resolve))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    group = dist.new_group(backend="gloo")
    dcp.save(staging.Stager(pinned=False).stage(tensors), storage_writer=writer(tmp_path / "c"), process_group=group)
    assert used == ["_SerialCpuLoader" if writer is checkpoints.Writer else "_OverlappingCpuLoader"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".metadata", "__0_0.distcp"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    monkeypatch.undo()
    dcp.load(loaded, storage_reader=checkpoints.SafeReader(tmp_path / "c"))
    for name, tensor in tensors.items():
        assert torch.equal(staging.local_part(loaded[name]), staging.local_part(tensor)), name
