"""Stand-ins: what a plan's step has in the place of what reads data or depends on the device."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from harness.model import loss, newton_schulz, skipping
from harness.model.attention import any_attention_kernel


@contextlib.contextmanager
def without_data(choose_chunks: Callable) -> Iterator[None]:
    """Inside, a step runs on fake CPU tensors as a GPU would take it: no step is skipped, and attention takes whichever
    of its kernels runs. `choose_chunks(starts)` says which chunks of a loss are computed.

    Products are added in place and multiplied in the dtype of their tensors; a CPU may do neither. Fake tensors allow
    it for dtypes of which the CPU has no kernel.
    """
    starts = loss.chunk_starts
    with contextlib.ExitStack() as stack:
        replace = lambda module, name, by: stack.enter_context(mock.patch.object(module, name, by))  # noqa: E731
        replace(loss, "chunk_starts", lambda tokens, size: choose_chunks(starts(tokens, size)))
        replace(skipping, "on_host", lambda skip: False)
        replace(loss, "add_product", lambda total, a, b: torch.addmm(total, a, b, out=total))
        replace(newton_schulz, "dtype_of_products", lambda x: x.dtype)
        stack.enter_context(any_attention_kernel())
        yield
