"""What is staged is a copy on the host, in memory that is allocated once and used at every save."""

import gc
import pathlib
import threading
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import parse
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.state import staging
from harness.state.shards import SafeReader, Writer
from harness.state.store import Checkpoints

CPU = torch.device("cpu")


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
    staged = staging.Stager(CPU).stage(tensors)
    for tensor in tensors.values():
        staging.local_part(tensor).zero_()
    for name, tensor in staged.items():
        assert torch.equal(staging.local_part(tensor), before[name])
        assert tensor.dtype == before[name].dtype
    assert isinstance(staged["sharded"], DTensor)
    assert staged["sharded"].placements == tensors["sharded"].placements


def test_every_save_uses_the_memory_of_the_first_until_a_shape_or_dtype_changes(tensors):
    stager = staging.Stager(CPU)
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
    for tensor in staging.Stager(CPU).stage(tensors).values():
        assert staging.local_part(tensor).untyped_storage().nbytes() == staging.local_part(tensor).nbytes
        assert staging.local_part(tensor).is_contiguous()


class Driver:
    """Stands in for CUDA's runtime: every registration succeeds, or none."""

    def __init__(self, monkeypatch, refuses: bool = False):
        self.registered, self.freed, self.synchronized, self.launches = [], [], 0, 0
        self.refuses, self.threads = refuses, set()
        self.cudaHostRegister, self.cudaHostUnregister = self.register, self.freed.append
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self.check)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *size, device=None: self.launch() if device else ones(*size))

    def register(self, address, size, flags):
        self.threads.add(threading.current_thread())
        if not self.refuses:
            self.registered.append((address, size))
        return self.refuses

    def check(self, code):
        if code:
            raise RuntimeError("OS call failed or operation not supported on this OS (304)")

    def synchronize(self):
        self.synchronized += 1

    def launch(self):
        self.launches += 1
        raise RuntimeError("CUDA error: OS call failed, of the call before")


def test_pinned_memory_is_one_piece_that_is_pinned_once_and_let_go_with_its_last_tensor(tensors, monkeypatch):
    driver = Driver(monkeypatch)
    stager = staging.Stager(torch.device("cuda", 0))
    for _ in range(2):
        staged = stager.stage(tensors)
    assert driver.synchronized == 2 and not driver.launches
    ((address, size),) = driver.registered
    for tensor in map(staging.local_part, staged.values()):
        assert not tensor.numel() or address <= tensor.data_ptr() <= address + size - tensor.nbytes
    tensors["step"] = torch.ones(2)
    del stager, tensor
    gc.collect()
    assert not driver.freed  # what is still being written keeps it
    del staged
    gc.collect()
    assert driver.freed == [address]


def test_memory_that_cannot_be_pinned_is_one_line_and_the_copies_are_as_good(tensors, monkeypatch, capsys):
    """As in a container that limits locked memory. CUDA's error is taken away, or the next step's kernel raises it."""
    driver, stager = Driver(monkeypatch, refuses=True), staging.Stager(torch.device("cuda", 0))
    for value in (1, 2):
        staging.local_part(tensors["sharded"]).fill_(value)
        assert (stager.stage(tensors)["sharded"].to_local() == value).all()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("cannot be pinned (OS call failed or operation not supported on this OS (304))")
    assert (driver.launches, driver.synchronized, driver.freed) == (1, 2, [])


def test_memory_is_pinned_beside_the_steps_after_the_first_where_a_save_will_need_it(tensors, monkeypatch):
    cuda = torch.device("cuda", 0)
    group = dist.new_group(backend="gloo")
    monkeypatch.setattr(dist, "new_group", lambda **_: group)
    state = types.SimpleNamespace(step=1, tensors=lambda: tensors)
    for flags, pins in {
        "--checkpoint-interval 5": True,
        "--checkpoint-interval 5 --no-async-checkpoint": False,
        "--checkpoint-interval 99": False,  # only the last is saved, which is waited for
        "": False,
    }.items():
        with monkeypatch.context() as faked:
            driver = Driver(faked)
            settings = parse(["--model", "demo", "--dataset", "demo", "--num-steps", 20, *flags.split()])
            saver = Checkpoints(settings, pathlib.Path("nowhere"), {}, cuda, lambda: None)
            saver.prepare(state)
            if pins:
                saver.stager.thread.join()
                assert driver.threads == {saver.stager.thread}
                saver.stager.stage(tensors)
            assert len(driver.registered) == pins, flags


def test_a_save_that_is_waited_for_copies_nothing(device, tensors, monkeypatch, tmp_path):
    """Neither on the host nor pinned: what is written is what the run holds."""
    monkeypatch.setattr(staging, "allocate", lambda layout: pytest.fail("memory for a copy"))
    numbers = {"step": 3}
    state = types.SimpleNamespace(step=3, tensors=lambda: tensors, numbers=lambda: numbers)
    settings = parse(["--model", "demo", "--dataset", "demo"])
    saver = Checkpoints(settings, tmp_path, {}, CPU, lambda: None)
    saver.save(state, wait=True)
    assert saver.failures == 0
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, storage_reader=SafeReader(tmp_path / "checkpoints" / "step-00000003"))
    for name, tensor in tensors.items():
        assert torch.equal(staging.local_part(loaded[name]), staging.local_part(tensor)), name


def test_a_dtensor_on_a_mesh_of_gpus_is_staged_on_the_host(device):
    gpus = DeviceMesh.from_group([dist.group.WORLD] * 2, "cuda", mesh=[[0]], mesh_dim_names=("replicate", "shard"))
    local = torch.empty(6, 4, device="meta")  # stands for one on a GPU
    tensor = DTensor.from_local(local, gpus, [Replicate(), Shard(0)], run_check=False)
    staged = staging.like(tensor, torch.ones(6, 4))
    assert staged.device.type == staged.to_local().device.type == "cpu"
    assert (staged.placements, staged.shape) == (tensor.placements, tensor.shape)
    assert staged.device_mesh.mesh_dim_names == gpus.mesh_dim_names
    assert staging.mesh_on(gpus, "cpu") is staged.device_mesh  # made once


@pytest.mark.parametrize("writer", [Writer, dcp.FileSystemWriter])
def test_with_gpus_too_the_writing_thread_waits_for_no_stream(tensors, tmp_path, monkeypatch, writer):
    """DCP's own choice of settings does, which shows that this would see it."""
    used, serial = [], filesystem._SerialCpuLoader  # the other needs a GPU
    for name in ("_SerialCpuLoader", "_OverlappingCpuLoader"):
        monkeypatch.setattr(filesystem, name, lambda resolve, name=name, **_: used.append(name) or serial(resolve))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    group = dist.new_group(backend="gloo")
    dcp.save(staging.Stager(CPU).stage(tensors), storage_writer=writer(tmp_path / "c"), process_group=group)
    assert used == ["_SerialCpuLoader" if writer is Writer else "_OverlappingCpuLoader"]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".metadata", "__0_0.distcp"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    monkeypatch.undo()
    dcp.load(loaded, storage_reader=SafeReader(tmp_path / "c"))
    for name, tensor in tensors.items():
        assert torch.equal(staging.local_part(loaded[name]), staging.local_part(tensor)), name
