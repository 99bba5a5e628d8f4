"""FLOPs as torch counts them: a forward and a backward of a model on the meta device, which computes shapes only.
`utils.get_model_flops_per_token` has a readable formula and compares it with this count."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import nn
from torch._ops import OpOverload  # private: the type of a dispatch mode's operators has no public name
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch's own counters are made of it
from torch.utils.flop_counter import FlopCounterMode, bmm_flop
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, masking_utils
from transformers.integrations import hub_kernels

from harness import base
from harness.model import patches
from harness.model.weights import decoder_layers

MAX_OPERATORS = 500_000  # operators in one count, some 10 s; a dense model of 80 layers has 20,000


def flops_or_zeros(
    model: transformers.PreTrainedModel,
    lengths: np.ndarray,
    get_flops_by_length: Callable[[transformers.PreTrainedModel, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, str]:
    """Return (FLOPs per token in documents of these lengths, zeros if unknown; the header's text about the last one).
    `get_flops_by_length` is that of `utils`, which harness cannot import."""
    try:
        flops = get_flops_by_length(model, lengths)
    except ValueError as error:
        return np.zeros(len(lengths)), f"FLOPs not known, so no MFU ({error})"
    return flops, f"{flops[-1] / 1e9:,.3f} GFLOP a token"


def eager_on_meta(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model of a config without storage, with eager attention, whose products torch's counter sees.

    Raises:
        ValueError: transformers builds no such model.
    """
    options = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": False}
    try:
        with torch.device("meta"):
            # batched: the experts of a token are not looked up in data
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), experts_implementation="batched_mm", **options
            )
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"torch cannot count it: {base.first_line(error).split('. ')[0]}") from error
    return model.to("meta").eval()  # some models make a tensor on the CPU


def computes_every_score(config: transformers.PretrainedConfig) -> bool:
    """True if a model of this config has eager attention, which computes the scores that its masks then leave out."""
    attention = config._attn_implementation  # private: the public name is an argument of `from_config` only
    if attention is None:
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return not family._supports_sdpa  # private: transformers chooses by it
    return attention == "eager"


def count_flops(model: nn.Module, tokens: int) -> int:
    """FLOPs of a forward and a backward of one sequence of `tokens` in a model of `eager_on_meta`.

    Raises:
        ValueError: see `counted`.
    """
    return counted(model, tokens).get_total_flops()


def attention_flops_per_key(model: nn.Module) -> np.ndarray:
    """FLOPs per token that each decoder layer takes for each further key, from the counts of two lengths. Products
    whose gradients nothing needs, such as below the first trained weight, are not computed."""
    names = {module: name for name, module in model.named_modules()}
    paths = [f"{type(model).__name__}.{names[layer]}" for layer in decoder_layers(model)]

    def per_token(tokens: int) -> np.ndarray:
        by_module = counted(model, tokens).get_flop_counts()
        return np.array([sum(by_module[path].values()) / tokens for path in paths])

    return (per_token(8) - per_token(4)) / 4


def counted(model: nn.Module, tokens: int) -> FlopCounterMode:
    """torch's counter after a forward and a backward of one sequence.

    Raises:
        ValueError: the model does not run without data, or takes operators for each token, as Mamba does without its
            kernels.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping=CORRECTED_FORMULAS)
    with running_on_meta(), OperatorLimit(), counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter


@contextlib.contextmanager
def running_on_meta() -> Iterator[None]:
    """A context in which a model of `eager_on_meta` runs.

    Raises:
        ValueError: see `counted`.
    """
    try:
        with (
            # transformers would look for documents in positions, which have no data
            mock.patch.object(masking_utils, "find_packed_sequence_indices", patches.one_document),
            # private: transformers reads tokens to warn of padding, without an option
            mock.patch.object(transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
            # private: the option to take no kernel from the hub is for the whole process
            mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
            torch.device("meta"),
        ):
            yield
    except Exception as error:  # models and torch raise many kinds without data
        raise ValueError(f"torch cannot count it: {base.first_line(error).split('. ')[0]}") from error


class OperatorLimit(TorchDispatchMode):
    operators = 0

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators += 1
        if self.operators > MAX_OPERATORS:
            raise ValueError(f"it takes more than {MAX_OPERATORS:,} operators")
        return op(*args, **(kwargs or {}))


def convolution_backward_flops(
    grad_output: torch.Size, inputs: torch.Size, weight: torch.Size, *others: Any, **_: object
) -> int:
    """FLOPs by the shapes: torch's formula takes a grouped convolution for one without groups."""
    output_mask = others[7]  # True for each gradient that is computed: input, weight, bias
    return 2 * grad_output.numel() * weight[1:].numel() * sum(output_mask[:2])


def bmm_flops(first: torch.Size, second: torch.Size, *_: object, **__: object) -> int:
    """FLOPs as torch has them, but 0 for rotary angles, which some versions of transformers compute as a product of
    positions and frequencies: an outer product without gradient."""
    # private: the public ways to know of a running backward are hooks, not operators
    in_backward = torch._C._current_graph_task_id() != -1
    is_rotary = first[-1] == 1 and not torch.is_grad_enabled() and not in_backward
    return 0 if is_rotary else bmm_flop(first, second)


CORRECTED_FORMULAS = {torch.ops.aten.convolution_backward: convolution_backward_flops, torch.ops.aten.bmm: bmm_flops}
