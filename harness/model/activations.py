"""Activation checkpointing: which activations of a decoder layer are kept for its backward pass, and where."""

import collections
import contextlib
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def checkpoint_activations(layer: nn.Module, mode: str) -> None:
    """Make the backward pass of `layer` recompute activations: with "full" and "offload" all but the layer's input,
    with "selective" the cheap ones, with "none" nothing."""
    if mode in ("full", "offload"):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    elif mode == "selective":
        recompute = functools.partial(checkpoint, use_reentrant=False, context_fn=selective_contexts)
        layer.forward = functools.partial(recompute, layer.forward)


def selective_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Keep the results of matmuls and attention; recompute everything else. Grouped matmuls of experts are recomputed
    too: they have a row for each expert that a token is sent to, so for their FLOPs they take several times the memory
    of the other matmuls."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        # str(op) is a name like aten.addmm.default or ..._flash_attention.default. _unsafe_view is the result of a
        # linear without bias, in the memory of its mm: saved, torch sees if a layer changes it in place.
        expensive = re.search(r"(?<!grouped_)mm\.|_unsafe_view|attention|attn", str(op))
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class LayerInputOffload:
    """Keeps the inputs of checkpointed layers in host memory, from the forward pass to the backward.

    Both copies are asynchronous, on the compute stream. A stream of their own would hide them, but a layer's compute
    per token grows with the sequence and the copies do not, so on long sequences it would gain little (docs/LONG.md).
    On the compute stream a buffer can be reused as soon as autograd has released it: the next copy into it starts after
    the last one out of it. torch's own cache of pinned memory reuses a block only when the GPU is done with it, so it
    would pin more memory whenever the host runs ahead.
    """

    def __init__(self) -> None:
        self.free: dict[tuple, list[torch.Tensor]] = collections.defaultdict(list)  # by shape, stride and dtype

    def wrap(self, layer: nn.Module) -> None:
        """Keep the input of `layer` on the host. It is the first argument of its forward function; everything else that
        autograd saves there, weights and rotary angles, is shared with other layers."""
        layer.forward = functools.partial(self._run, layer.forward)

    def _run(self, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        storage = weakref.ref(hidden.untyped_storage())  # weak, as autograd keeps the hooks with what they packed

        def pack(tensor: torch.Tensor) -> "torch.Tensor | HostCopy":
            return self._copy(tensor) if tensor.untyped_storage() is storage() else tensor

        def unpack(saved: "torch.Tensor | HostCopy") -> torch.Tensor:
            return saved.to_device() if isinstance(saved, HostCopy) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(hidden, *args, **kwargs)

    def _copy(self, tensor: torch.Tensor) -> "HostCopy":
        free = self.free[tensor.shape, tensor.stride(), tensor.dtype]
        copy = HostCopy(tensor, free.pop() if free else empty_on_host(tensor))
        weakref.finalize(copy, free.append, copy.buffer)  # when autograd releases what it saved
        return copy


class HostCopy:
    """A tensor of a device in a `buffer` on the host."""

    def __init__(self, tensor: torch.Tensor, buffer: torch.Tensor):
        self.device, self.buffer = tensor.device, buffer
        buffer.copy_(tensor, non_blocking=True)

    def to_device(self) -> torch.Tensor:
        return torch.empty_like(self.buffer, device=self.device).copy_(self.buffer, non_blocking=True)


def pinned_bytes(size: int) -> int:
    """Round bytes up to a power of two, as torch's allocator of pinned memory does (CachingHostAllocator.h)."""
    return 1 << max(size - 1, 0).bit_length()


def empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory like `tensor`, pinned if that is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
