"""Fields that transformers 4 reads under other names than 5 writes. An export has both, so both load the same model."""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

# Fields of 4 for the RoPE theta of each layer type, in families whose layers differ.
ROPE_THETA_BY_LAYER_TYPE = {
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "gemma3n_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "olmo3": {"full_attention": "rope_theta"},
    "modernbert-decoder": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
}
OTHER_FIELDS = {  # {model type: {field of 5: field of 4}}
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
OTHER_LAYER_TYPES = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
# Fields besides `type` in rope_scaling, for families that refuse any other, and the types that need no more. Of another
# type gets none: 5 would read it in place of rope_parameters.
SCALING_FIELDS = dict.fromkeys(("phi3", "phi4_multimodal"), ("short_factor", "long_factor"))
SCALING_FIELDS |= dict.fromkeys(("olmo", "olmo2", "hunyuan_v1_dense", "hunyuan_v1_moe"), ("factor", "alpha"))
SCALING_TYPES = ("linear", "dynamic", "longrope")


def with_old_names(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json, and of its sub-configs, with those that transformers 4 reads."""
    content = {name: with_old_names(part) if is_config(part) else part for name, part in content.items()}
    if is_config(content.get("text_config")) and "tie_word_embeddings" in content:
        content["text_config"]["tie_word_embeddings"] = content["tie_word_embeddings"]  # 4 reads it there
    if rope := content.get("rope_parameters"):
        content |= old_rope(content, rope)
    for new, old in OTHER_FIELDS.get(content.get("model_type"), {}).items():
        content[old] = content[new]
    if layer_types := OTHER_LAYER_TYPES.get(content.get("model_type")):
        content["layer_types"] = [layer_types[kind] for kind in content["layer_types"]]
    return content


def is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def old_rope(content: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as fields of transformers 4; {} if layers differ and 4 lacks the family."""
    if "rope_type" in rope:
        bases = {"rope_theta": rope["rope_theta"]}
    else:
        fields = ROPE_THETA_BY_LAYER_TYPE.get(content["model_type"], {})
        bases = {field: rope[layers]["rope_theta"] for layers, field in fields.items()}
        if not bases:
            return {}
        rope = rope["full_attention"]
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    old = bases | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    before = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope" and before != content["max_position_embeddings"]:
        # 4 computes the factor from it and max_position_embeddings
        old["original_max_position_embeddings"] = before
    if old["rope_scaling"] and content["model_type"] in SCALING_FIELDS:
        fields = {name: rope[name] for name in SCALING_FIELDS[content["model_type"]] if name in rope}
        old["rope_scaling"] = {"type": rope["rope_type"]} | fields
        if rope["rope_type"] not in SCALING_TYPES:
            del old["rope_scaling"]
    return old


def old_tokenizer_config(content: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of a tokenizer_config.json of 5 for 4 too: the class that reads tokenizer.json unchanged, with
    what the tokenizer's own class has by default (Llama's pads on the left; in 4 that class adds `token_type_ids`), and
    special tokens under names that both know."""
    content = {name: value for name, value in content.items() if name not in ("is_local", "local_files_only")}
    if tokenizer.is_fast:
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
        content |= {name: getattr(tokenizer, name) for name in ("model_input_names", "padding_side", "truncation_side")}
        pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
        if "add_prefix_space" in pre_tokenizer:  # 4 changes it to what is here, False without
            content["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    if special := content.pop("extra_special_tokens", None):
        content["additional_special_tokens"] = special
    if named := content.pop("model_specific_special_tokens", None):
        content["extra_special_tokens"] = named
    return content
