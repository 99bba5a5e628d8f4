"""Stand-ins: a plan's replacements for functions that read data or depend on the device."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from harness.model import loss, newton_schulz, skipping
from harness.model.attention import any_attention_kernel


@contextlib.contextmanager
def without_data(choose_chunks: Callable) -> Iterator[None]:
    """A context in which a step on fake CPU tensors runs as on a GPU: no step is skipped, and attention may take any of
    its kernels. `choose_chunks(starts)` returns the chunks of a loss to compute.

    Products are added in place, and multiplied in the dtype of their tensors. A real CPU may do neither; fake tensors
    need no CPU kernel for a dtype.
    """
    starts = loss.chunk_starts
    with contextlib.ExitStack() as stack:
        replace = lambda module, name, by: stack.enter_context(mock.patch.object(module, name, by))  # noqa: E731
        replace(loss, "chunk_starts", lambda tokens, size: choose_chunks(starts(tokens, size)))
        replace(skipping, "on_host", lambda skip: False)
        replace(loss, "add_product", lambda total, a, b: torch.addmm(total, a, b, out=total))
        replace(newton_schulz, "product_dtype", lambda x: x.dtype)
        stack.enter_context(any_attention_kernel())
        yield
