"""FLOPs as torch counts them: a forward and a backward of a model on the meta device, where only shapes are computed.
`utils.get_model_flops_per_token` has the formula that a person can read, and asks here whether it holds."""

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import nn
from torch._ops import OpOverload  # private: the type of what a dispatch mode is given has no public name
from torch.utils._python_dispatch import TorchDispatchMode  # private: torch's own counters are made of it
from torch.utils.flop_counter import FlopCounterMode, bmm_flop
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.integrations import hub_kernels

from harness import base
from harness.model.attention import without_packing_detection

MAX_OPERATORS = 500_000  # of one count, some 10 s; a dense model of 80 layers has 20,000


def known_flops(
    model: transformers.PreTrainedModel,
    lengths: np.ndarray,
    flops_by_length: Callable[[transformers.PreTrainedModel, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, str]:
    """FLOPs per token in documents of each of `lengths`, zeros where no figure can be trusted, and the words for the
    header about the last one. `flops_by_length` is `utils.get_flops_by_length`."""
    try:
        flops = flops_by_length(model, lengths)
    except ValueError as error:
        return np.zeros(len(lengths)), f"FLOPs not known, so no MFU ({error})"
    return flops, f"{flops[-1] / 1e9:,.3f} GFLOP a token"


def eager_on_meta(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model of a config without storage, with eager attention, whose products torch's counter sees."""
    options = {"attn_implementation": "eager", "dtype": torch.float32, "trust_remote_code": False}
    try:
        with torch.device("meta"):
            # batched: each token meets its own experts, which are not looked up in data
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), experts_implementation="batched_mm", **options
            )
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"torch cannot count it: {base.first_line(error).split('. ')[0]}") from error
    return model.to("meta").eval()  # some make a tensor on the CPU


def computes_every_score(config: transformers.PretrainedConfig) -> bool:
    """Whether a model of this config has eager attention, which computes the scores that its masks then leave out."""
    attention = config._attn_implementation  # private: in public it is only an argument of `from_config`
    if attention is None:
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return not family._supports_sdpa  # private: transformers' own choice
    return attention == "eager"


def count_flops(model: nn.Module, tokens: int) -> int:
    """FLOPs of a forward and a backward of one sequence, of a model of `eager_on_meta`.

    Raises:
        ValueError: the model does not run without data, or takes operators for each token, as Mamba does without its
            kernels.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    counter = FlopCounterMode(display=False, custom_mapping=CORRECTED_FORMULAS)
    try:
        with (
            without_packing_detection(),
            # private: no option tells transformers to read no tokens for a warning of padding
            mock.patch.object(transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
            # private: taking no kernel from the hub is an option of a whole process only
            mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
            torch.device("meta"),
            OperatorLimit(),
            counter,
        ):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except Exception as error:  # models and torch raise many kinds where data are missing
        raise ValueError(f"torch cannot count it: {base.first_line(error).split('. ')[0]}") from error
    return counter.get_total_flops()


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
    """By shapes: torch's own formula takes a grouped convolution for one without groups."""
    output_mask = others[7]  # which gradients are asked for: of input, weight and bias
    return 2 * grad_output.numel() * weight[1:].numel() * sum(output_mask[:2])


def bmm_flops(first: torch.Size, second: torch.Size, *_: object, **__: object) -> int:
    """As torch has it, but none for rotary angles, which some versions of transformers compute as a product of
    positions and frequencies: an outer product that takes no gradient."""
    # private: in public only hooks learn that a backward runs, operators do not
    in_backward = torch._C._current_graph_task_id() != -1
    is_rotary = first[-1] == 1 and not torch.is_grad_enabled() and not in_backward
    return 0 if is_rotary else bmm_flop(first, second)


CORRECTED_FORMULAS = {torch.ops.aten.convolution_backward: convolution_backward_flops, torch.ops.aten.bmm: bmm_flops}
