"""Staging: a copy on the host of what a checkpoint saves, so that the loop goes on while a thread writes it. Called by
`Checkpoints`. It does not know what the tensors are for, nor how they are written."""

import contextlib
import functools
import threading
import weakref

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.base.text import first_line
from harness.job.printing import say

Layout = dict[str, tuple[torch.Size, torch.dtype]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor laid out as `tensor` over another local part, which may be on the host where the mesh is of GPUs."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.device_type != local.device.type:  # or from_local would move the local part to the mesh's device
        mesh = mesh_on(mesh, local.device.type)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@functools.cache
def mesh_on(mesh: DeviceMesh, device_type: str) -> DeviceMesh:
    """The same mesh, with the same process groups, for tensors on another kind of device."""
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


class Stager:
    """Copies tensors into host memory that is allocated once and used again at every later save; what was staged before
    must have been written by then.

    Each tensor has a storage of its own in that one piece of memory: DCP's writer would copy a view of a larger one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.layout: Layout = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.thread: threading.Thread | None = None

    def prepare(self, tensors: dict[str, torch.Tensor]) -> None:
        """Begins to allocate and pin what `stage` will need, which takes seconds, in a thread."""
        self.thread = threading.Thread(target=self._allocate, args=(layout_of(tensors),), daemon=True)
        self.thread.start()

    def _allocate(self, layout: Layout) -> None:
        self.buffers = {}  # the old memory goes before the new comes
        memory, buffers = allocate(layout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread has GPU 0
            if why := pin(memory):
                say(f"slow       copies for checkpoints: their host memory cannot be pinned ({why})")
        self.layout, self.buffers = layout, buffers

    @torch.no_grad()
    def stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same names with the values of now, on the host; DTensors stay DTensors, laid out alike."""
        if self.thread:
            self.thread.join()
        if layout_of(tensors) != self.layout:
            self._allocate(layout_of(tensors))
        for name, tensor in tensors.items():
            self.buffers[name].copy_(local_part(tensor), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {
            name: like(tensor, self.buffers[name]) if isinstance(tensor, DTensor) else self.buffers[name]
            for name, tensor in tensors.items()
        }


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    return {name: (local_part(tensor).shape, tensor.dtype) for name, tensor in tensors.items()}


def allocate(layout: Layout) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """One piece of host memory, and in it an empty tensor of each shape and dtype; it goes with the last of them."""
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-shape.numel() * dtype.itemsize // 64) * 64
    memory = torch.empty(size, dtype=torch.uint8).numpy()
    return memory, {
        name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offsets[name]).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in layout.items()
    }


def pin(memory: np.ndarray) -> str:
    """Pins memory until it is freed; torch's own pinned memory comes in powers of two, 64 GiB for 37. Returns why it
    cannot be pinned, as in a container that limits locked memory; empty where it is."""
    address, runtime = memory.ctypes.data, torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, 1))  # 1: for every context
    except RuntimeError as error:
        forget_error()
        return first_line(error)
    weakref.finalize(memory, lambda: runtime.cudaHostUnregister(address)).atexit = False
    return ""


def forget_error() -> None:
    """CUDA hands the error of a failed call to whoever asks next too, which is the next kernel's launch: this one."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
