"""Masks: what attention sees, whatever a model's forward hands to transformers' mask functions: the tokens of a
document, and those that other ranks have of a sequence. The positions of a model, and the default of
--sequence-length."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, PretrainedConfig, masking_utils

from harness import base, flags
from harness.model import patches
from harness.model.configs import attends_by_positions, text_config
from harness.model.context import ContextGroup
from harness.model.weights import on_meta

# Layer types that attend to what their mask lets through, by the positions that they are given. Llama 4's, of
# chunked_attention, count positions by themselves; with minimax_m3_sparse or compressed_* documents reach each other.
# "deepseek_sparse_attention" is what transformers 5.17 names "indexed_attention".
RESTRICTABLE_LAYERS = {"full_attention", "sliding_attention", "indexed_attention", "deepseek_sparse_attention"}
# Flash attention has none: it takes documents as lengths, and rules.py refuses it.
MASK_FUNCTIONS = {
    name: masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa", "flex_attention")
}


class SequenceMasks:
    """transformers' mask functions for full sequences, restricted to documents.

    Args:
        documents: the document number of each token that attention sees, (batch, seq_len); None for one document.
        parts: the forward pass has one of so many parts of each sequence.
    """

    def __init__(self, documents: torch.Tensor | None, parts: int):
        self.documents, self.parts = documents, parts
        self.were_made = False

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """A context for one forward pass. Layers get masks as inputs, so recomputed layers have them too."""
        for name, make_mask in MASK_FUNCTIONS.items():
            AttentionMaskInterface.register(name, functools.partial(self.make, make_mask))
        try:
            yield
        finally:
            for name, make_mask in MASK_FUNCTIONS.items():
                AttentionMaskInterface.register(name, make_mask)

    def make(
        self, make_mask: Callable, *, q_length: int, kv_length: int, mask_function: Callable, **options: Any
    ) -> Any:
        self.were_made = True
        if self.documents is not None:
            in_document = masking_utils.packed_sequence_mask_function(self.documents)
            mask_function = masking_utils.and_masks(in_document, mask_function)
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # either gives no mask
        if self.parts > 1:
            options["attention_mask"] = None  # some families make one of ones, as long as a part
        lengths = {"q_length": q_length * self.parts, "kv_length": kv_length * self.parts}
        return make_mask(mask_function=mask_function, **lengths, **options)


def prepare_masks(model: nn.Module, name: str, document_mask: bool, group: ContextGroup | None = None) -> None:
    """Keep transformers from looking for documents; with `document_mask`, restrict attention to them, which begin where
    `position_ids` are 0. A forward pass takes this rank's part of each sequence that `group` shares. `name` is that of
    the model in messages.

    Raises:
        UserError: the family mixes tokens in other ways too; the forward pass raises it if no mask is made.
    """
    patches.skip_packing_detection()
    if document_mask:
        check_restrictable(model, name)
    forward, offset, group = model.forward, first_position(model), group or ContextGroup()

    @functools.wraps(forward)
    def forward_sequences(*args: Any, **options: Any) -> Any:
        positions, documents = options.get("position_ids"), None
        is_generating = options.get("past_key_values") is not None  # of one document
        if document_mask and positions is not None and not is_generating:
            documents = (positions == 0).cumsum(-1)
        options = group.take_part(options)
        masks = SequenceMasks(documents, group.parts)
        if masks.documents is None and masks.parts == 1:
            return forward(*args, **options)
        with masks.registered():
            result = forward(*args, **options | {"position_ids": options["position_ids"] + offset})
        if masks.documents is not None and not masks.were_made:
            problem = f"{name} computes attention without transformers' masks"
            raise base.UserError(
                f"--document-mask: {problem}; use --no-document-mask, with which documents see each other"
            )
        return result

    model.forward = forward_sequences


def check_restrictable(model: nn.Module, name: str) -> None:
    """Raise a UserError if the tokens of a family meet in more than attention over positions."""
    if not attends_by_positions(type(model), text_config(model), RESTRICTABLE_LAYERS):
        problem = f"{name} cannot separate the documents of a sequence, as it is more than attention over positions"
        advice = "give --packing none, which pads each to a sequence of its own, or --no-document-mask, with which the "
        advice += "documents of a sequence see those before them"
        raise base.UserError(f"--document-mask (the default for conversations and labels): {problem}; {advice}")


def first_position(model: nn.Module) -> int:
    """The position of a sequence's first token: 0, or in RoBERTa and its kin the one after the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def max_positions(config: PretrainedConfig) -> int | None:
    """The number of tokens that a model has positions for; None if it has them for any number."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions and positions - first_position(on_meta(config))


def choose_sequence_length(settings: flags.Args, config: PretrainedConfig) -> int:
    """--sequence-length in tokens, by default 8192 or the number of the model's positions if that is smaller.

    Raises:
        UserError: the model has fewer positions and something is trained.
    """
    positions = max_positions(config)
    length = settings.sequence_length or min(8192, positions or 8192)
    if positions and length > positions and settings.num_steps:
        advice = f"give --sequence-length {positions} or less, or --rope-scaling yarn"
        raise base.UserError(f"--sequence-length {length}: {settings.model} has {positions} positions; {advice}")
    return length
