"""Staging: a copy on the host of what a checkpoint saves, so that the loop goes on while a thread writes it. Called by
`Checkpoints`. It does not know what the tensors are for, nor how they are written."""

import functools
import weakref

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


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
    """Copies tensors into host memory that is allocated at the first save and used again at every later one; what was
    staged before must have been written by then.

    Each tensor has a storage of its own in that one piece of memory: DCP's writer would copy a view of a larger one.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.layout: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same names with the values of now, on the host; DTensors stay DTensors, laid out alike."""
        layout = {name: (local_part(tensor).shape, tensor.dtype) for name, tensor in tensors.items()}
        if layout != self.layout:
            self.buffers = {}  # the old memory goes before the new comes
            self.layout, self.buffers = layout, allocate(layout, self.pinned)
        for name, tensor in tensors.items():
            self.buffers[name].copy_(local_part(tensor), non_blocking=True)
        if self.pinned:
            torch.cuda.synchronize()
        return {
            name: like(tensor, self.buffers[name]) if isinstance(tensor, DTensor) else self.buffers[name]
            for name, tensor in tensors.items()
        }


def allocate(layout: dict[str, tuple[torch.Size, torch.dtype]], pinned: bool) -> dict[str, torch.Tensor]:
    """Empty tensors of these shapes and dtypes in one piece of host memory, which goes with the last of them.

    Raises:
        torch.cuda.CudaError: the memory cannot be pinned.
    """
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-shape.numel() * dtype.itemsize // 64) * 64
    memory = torch.empty(size, dtype=torch.uint8).numpy()
    if pinned:  # torch's own pinned memory comes in powers of two: 64 GiB for 37
        address = memory.ctypes.data
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # 1: for every context
        weakref.finalize(memory, lambda: torch.cuda.cudart().cudaHostUnregister(address)).atexit = False
    return {
        name: torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=offsets[name]).view(shape)
        if shape.numel()
        else torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in layout.items()
    }
