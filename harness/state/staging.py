"""Staging: a copy on the host of the tensors of a checkpoint, so that training goes on while a thread writes them.
`Checkpoints` calls it. Independent of what the tensors are and of how they are written."""

import contextlib
import functools
import math
import threading
import weakref

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.base.text import first_line
from harness.job import say

Layout = dict[str, tuple[torch.Size, torch.dtype]]
ALIGNMENT = 64  # bytes, of each tensor in the host memory
CUDA_HOST_REGISTER_PORTABLE = 1  # pinned for every CUDA context


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with the layout of `tensor` and another local part, which may be on the host though the mesh is one of
    GPUs."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.device_type != local.device.type:  # from_local moves the local part to the device of the mesh
        mesh = mesh_on(mesh, local.device.type)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@functools.cache
def mesh_on(mesh: DeviceMesh, device_type: str) -> DeviceMesh:
    """The same mesh, with the same process groups, for tensors on another kind of device."""
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return DeviceMesh.from_group(groups, device_type, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


class Stager:
    """Copies tensors into host memory that is allocated once and used again at every later save. Before the next
    `stage`, the tensors of the last one must have been written.

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
            problem = pin(memory)
            if problem:
                say(f"slow       copies for checkpoints: their host memory cannot be pinned ({problem})")
        self.layout, self.buffers = layout, buffers

    @torch.no_grad()
    def stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of `tensors` on the host, under the same names; DTensors stay DTensors of the same layout."""
        if self.thread:
            self.thread.join()
        layout = layout_of(tensors)
        if layout != self.layout:
            self._allocate(layout)
        for name, tensor in tensors.items():
            self.buffers[name].copy_(local_part(tensor), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        staged = {}
        for name, tensor in tensors.items():
            buffer = self.buffers[name]
            staged[name] = like(tensor, buffer) if isinstance(tensor, DTensor) else buffer
        return staged


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    """Shape and dtype of this rank's part of each tensor."""
    return {name: (local_part(tensor).shape, tensor.dtype) for name, tensor in tensors.items()}


def allocate(layout: Layout) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """One piece of host memory, and in it an empty tensor of each shape and dtype. The memory is freed with the last of
    them."""
    offsets, size = {}, 0  # in bytes
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += math.ceil(shape.numel() * dtype.itemsize / ALIGNMENT) * ALIGNMENT
    memory = torch.empty(size, dtype=torch.uint8).numpy()
    buffers = {}
    for name, (shape, dtype) in layout.items():
        if shape.numel() == 0:  # frombuffer refuses it
            buffers[name] = torch.empty(shape, dtype=dtype)
        else:
            flat = torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offsets[name])
            buffers[name] = flat.view(shape)
    return memory, buffers


def pin(memory: np.ndarray) -> str:
    """Pins memory until it is freed. Torch's own pinned memory comes in powers of two, 64 GiB for 37. Returns the error
    where it cannot be pinned, as in a container that limits locked memory; otherwise an empty string."""
    address, runtime = memory.ctypes.data, torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, CUDA_HOST_REGISTER_PORTABLE))
    except RuntimeError as error:
        clear_cuda_error()
        return first_line(error)
    weakref.finalize(memory, lambda: runtime.cudaHostUnregister(address)).atexit = False
    return ""


def clear_cuda_error() -> None:
    """Takes the error of a failed call away. CUDA reports it again at the next launch of a kernel, which is then this
    one, not one of the run."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
