"""Stand-ins: a plan's replacements for functions that read data or depend on the device."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from harness.model import activations, loss, newton_schulz, skipping
from harness.model.attention import any_attention_kernel


@contextlib.contextmanager
def without_data(choose_chunks: Callable, on_host: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """A context in which a step on fake CPU tensors runs as on a GPU: no step is skipped, and attention may take any of
    its kernels. `choose_chunks(starts)` returns the chunks of a loss to compute; what is allocated under `on_host()` is
    the host's.

    Products are added in place, and multiplied in the dtype of their tensors. A real CPU may do neither; fake tensors
    need no CPU kernel for a dtype.
    """
    starts, empty_on_host = loss.chunk_starts, activations.empty_on_host

    def on_the_host(tensor: torch.Tensor) -> torch.Tensor:
        with on_host():
            return empty_on_host(tensor)

    with contextlib.ExitStack() as stack:
        replace = lambda module, name, by: stack.enter_context(mock.patch.object(module, name, by))  # noqa: E731
        replace(loss, "chunk_starts", lambda tokens, size: choose_chunks(starts(tokens, size)))
        replace(activations, "empty_on_host", on_the_host)
        replace(skipping, "on_host", lambda skip: False)
        replace(loss, "add_product", lambda total, a, b: torch.addmm(total, a, b, out=total))
        replace(newton_schulz, "product_dtype", lambda x: x.dtype)
        stack.enter_context(any_attention_kernel())
        yield
