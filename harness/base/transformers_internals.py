"""Private names of transformers that this program needs, each with what it stands for and why no public name does the
same. tests/base/test_internals.py compares NAMES with the installed transformers and says which of them a new version
no longer has. Independent of what they are used for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest import mock

import torch
import transformers
from torch import nn
from transformers import conversion_mapping, masking_utils
from transformers.integrations import sdpa_attention
from transformers.models.auto import tokenization_auto

if TYPE_CHECKING:  # importing it loads every quantizer's package that is installed
    from transformers import PreTrainedModel

# Owner, a module or "module:class", and what is used of it.
NAMES = {
    "transformers:PreTrainedConfig": ("_attn_implementation",),
    "transformers:PreTrainedModel": (
        "_can_record_outputs",
        "_can_set_attn_implementation",
        "_init_weights",
        "_supports_flex_attn",
        "_supports_sdpa",
        "warn_if_padding_and_no_attention_mask",
    ),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": (
        "WeightConverter",
        "WeightRenaming",
        "_is_hf_initialized",
        "convert_and_load_state_dict_in_model",
        "rename_source_key",
        "revert_weight_conversion",
    ),
    "transformers.dynamic_module_utils": ("TIME_OUT_REMOTE_CODE",),
    "transformers.integrations.hub_kernels": ("is_torchdynamo_exporting",),
    "transformers.integrations.sdpa_attention": ("use_gqa_in_sdpa",),
    "transformers.masking_utils": ("find_packed_sequence_indices",),
    "transformers.modeling_flash_attention_utils": ("_is_packed_sequence",),
    "transformers.modeling_utils": ("LoadStateDictConfig",),
    "transformers.models.auto.tokenization_auto": ("tokenizer_class_from_name",),
}

# ---- Attention -------------------------------------------------------------------------------------------------------


def attention_of(config) -> str | None:
    """The attention implementation of a config; in public it is only an argument of `from_config`."""
    return config._attn_implementation


def supports_flex_attention(family: type[PreTrainedModel]) -> bool:
    """Whether a family can train with flex_attention; in public transformers only raises where it cannot."""
    return family._supports_flex_attn


def supports_sdpa(family: type[PreTrainedModel]) -> bool:
    """Whether a family can train with torch's attention; in public transformers only raises where it cannot."""
    return family._supports_sdpa


# Whether torch's attention is given fewer keys than queries, by (mask, key, value); else each is repeated before.
use_gqa_in_sdpa = sdpa_attention.use_gqa_in_sdpa


def set_gqa_in_sdpa(rule: Callable) -> None:
    """Puts a rule in the place of `use_gqa_in_sdpa`: there is no option for it."""
    sdpa_attention.use_gqa_in_sdpa = rule


def shares_keys_in_sdpa(mask, key: torch.Tensor, value: torch.Tensor) -> bool:
    """What the rule that is set says."""
    return sdpa_attention.use_gqa_in_sdpa(mask, key, value)


def set_packing_detection(document_numbers: Callable) -> None:
    """Lets `document_numbers(position_ids)`, None for one document a row, take the place of what transformers finds out
    by reading positions on the host, in every forward for a mask and in every layer with flash_attention_2. A function
    of a mask could be registered in public; this one is called before it."""
    masking_utils.find_packed_sequence_indices = document_numbers
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda position_ids, batch_size: False


def takes_any_attention(model: PreTrainedModel) -> bool:
    """Whether a model calls the attention function that is registered under its implementation's name; in public
    transformers only raises where it does not."""
    return model._can_set_attn_implementation()


@contextlib.contextmanager
def without_packing_detection() -> Iterator[None]:
    """Inside, no row is taken for several documents. transformers reads the positions to find that out, and a tensor
    without data has none."""
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextlib.contextmanager
def without_reading_tokens() -> Iterator[None]:
    """Inside, transformers does not read tokens to warn of padding, and takes no kernel from the hub. It has no option
    for the first; the second is public for a whole process only."""
    from transformers import PreTrainedModel
    from transformers.integrations import hub_kernels

    with (
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
        mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
    ):
        yield


# ---- Weights ---------------------------------------------------------------------------------------------------------


def initialize(owner: PreTrainedModel, module: nn.Module) -> None:
    """Gives one module of a model its random values, as its family draws them; in public only a whole model gets
    them."""
    owner._init_weights(module)


def was_loaded(weight: torch.Tensor) -> bool:
    """Whether transformers has read a weight from a file, by the mark that it leaves."""
    return getattr(weight, "_is_hf_initialized", False)


def checkpoint_rules(model: PreTrainedModel) -> list:
    """How names and layouts of a checkpoint become those of a model; `from_pretrained` applies them to whole models
    only."""
    return conversion_mapping.get_model_conversion_mapping(model)


def renamed_by(rules: list, model: PreTrainedModel) -> Callable[[str], str]:
    """A function that gives the model's name of a tensor in a checkpoint."""
    loading = transformers.core_model_loading
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    prefix, names = model.base_model_prefix, model.state_dict()

    def rename(key: str) -> str:
        name, _ = loading.rename_source_key(key, renamings, converters, prefix, names)
        return name

    return rename


def load_tensors(model: PreTrainedModel, tensors: dict, rules: list, dtype: torch.dtype, device) -> None:
    """Reads tensors of a checkpoint into those parameters of a model that have their names, and leaves the others;
    `from_pretrained` reads all."""
    options = {"dtype": dtype, "weight_mapping": rules, "device_map": {"": device}}
    config = transformers.modeling_utils.LoadStateDictConfig(**options)
    transformers.core_model_loading.convert_and_load_state_dict_in_model(model, tensors, config)


def as_in_checkpoint(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some tensors of a model by the names and in the layouts of its checkpoints; `save_pretrained` takes a whole
    model."""
    return transformers.core_model_loading.revert_weight_conversion(model, tensors)


# ---- Experts ---------------------------------------------------------------------------------------------------------


def find_routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) of each router of a mixture of experts, in the order of the layers;
    none where a model has none, or of several kinds. In public transformers only returns their logits, by hooks that
    the compiler cannot trace."""
    routers = []
    for path, part in model.named_modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits")
        if not isinstance(part, transformers.PreTrainedModel) or not hasattr(recorded, "target_class"):
            continue
        for name, module in part.named_modules(prefix=path):
            place = (recorded.layer_name or "").strip(".")
            found = recorded.target_class and isinstance(module, recorded.target_class)
            if found and (not place or f".{place}." in f".{name}."):
                routers.append((module, recorded.index))
    return list(dict.fromkeys(routers))


# ---- Tokenizers ------------------------------------------------------------------------------------------------------


def never_ask_to_run_code() -> None:
    """Lets transformers take no for the answer where it would ask on stdin whether to run a folder's code: the class of
    a tokenizer can ask although `trust_remote_code` is False. No time to answer means that nobody is asked."""
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


# The class that a folder's tokenizer_config.json names; any class of transformers, also what is no tokenizer.
tokenizer_class_from_name = tokenization_auto.tokenizer_class_from_name


def set_tokenizer_class_from_name(rule: Callable[[str], type | None]) -> None:
    """Puts a stricter rule in the place of `tokenizer_class_from_name`; AutoTokenizer takes none."""
    tokenization_auto.tokenizer_class_from_name = rule
