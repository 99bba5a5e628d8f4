"""Activation checkpointing: which activations of a decoder layer are kept for its backward pass."""

import contextlib
import functools
import re

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def checkpoint_activations(layer: nn.Module, mode: str) -> None:
    """Make the backward pass of `layer` recompute activations: with "full" all but the layer's input, with "selective"
    the cheap ones, with "none" nothing."""
    if mode == "full":
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    elif mode == "selective":
        recompute = functools.partial(checkpoint, use_reentrant=False, context_fn=selective_contexts)
        layer.forward = functools.partial(recompute, layer.forward)


def selective_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Keep the results of matmuls and attention; recompute everything else. Grouped matmuls of experts are recomputed
    too: they have a row for each expert that a token is sent to, so for their FLOPs they take several times the memory
    of the other matmuls."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        # str(op) is a name like aten.addmm.default or ..._flash_attention.default
        expensive = re.search(r"(?<!grouped_)mm\.|attention|attn", str(op))
        return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
