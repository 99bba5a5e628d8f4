"""Masks: attention inside documents, whatever a model's forward hands to transformers' mask functions."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, masking_utils

from harness import base

# Flash attention has none: it takes documents as lengths, and rules.py refuses it.
MASK_FUNCTIONS = {
    name: masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa", "flex_attention")
}


class DocumentMasks:
    """transformers' mask functions, restricted to documents.

    Args:
        documents: the document number of each token, (batch, seq_len); of all tokens that attention sees.
    """

    def __init__(self, documents: torch.Tensor):
        self.documents = documents
        self.were_made = False

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """A context for one forward pass. Layers get their masks as inputs, so recomputed ones have them too."""
        for name, make_mask in MASK_FUNCTIONS.items():
            AttentionMaskInterface.register(name, functools.partial(self.make, make_mask))
        try:
            yield
        finally:
            for name, make_mask in MASK_FUNCTIONS.items():
                AttentionMaskInterface.register(name, make_mask)

    def make(self, make_mask: Callable, *, mask_function: Callable, **options: Any) -> Any:
        self.were_made = True
        in_document = masking_utils.packed_sequence_mask_function(self.documents)
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # either would give no mask
        return make_mask(mask_function=masking_utils.and_masks(in_document, mask_function), **options)


def restrict_attention_to_documents(model: nn.Module, name: str) -> None:
    """Make `model` compute each document as if it were alone, if `position_ids` restart at 0 in each.

    A forward pass that asks for no mask raises a UserError.
    """
    forward, offset = model.forward, first_position(model)

    @functools.wraps(forward)
    def forward_documents(*args: Any, **options: Any) -> Any:
        positions = options.get("position_ids")
        if positions is None or options.get("past_key_values") is not None:  # a sample, which is one document
            return forward(*args, **options)
        masks = DocumentMasks((positions == 0).cumsum(-1))
        with masks.registered():
            result = forward(*args, **options | {"position_ids": positions + offset})
        if not masks.were_made:
            problem = f"{name} computes attention without transformers' masks"
            raise base.UserError(
                f"--document-mask: {problem}; use --no-document-mask, with which documents see each other"
            )
        return result

    model.forward = forward_documents


def first_position(model: nn.Module) -> int:
    """The position of a sequence's first token: 0, or in RoBERTa and its kin the one after padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
