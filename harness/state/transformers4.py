"""What transformers 4 reads under other names than 5 writes. An export has both, so that both load the same model."""

from typing import Any

# The fields of 4 for the base frequency of each kind of layer, where a family's layers differ in it.
BASES_BY_LAYER = {
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "gemma3n_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "olmo3": {"full_attention": "rope_theta"},
    "modernbert-decoder": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
}
OWN_FIELDS = {  # of single families, by the common ones
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
OWN_LAYER_TYPES = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
THREE_FIELDS = ("phi3", "phi4_multimodal")  # in rope_scaling: more are refused


def with_old_names(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, of its parts too, with those that transformers 4 reads beside them."""
    content = {name: with_old_names(part) if is_config(part) else part for name, part in content.items()}
    if rope := content.get("rope_parameters"):
        content |= old_rope(content, rope)
    for new, old in OWN_FIELDS.get(content.get("model_type"), {}).items():
        content[old] = content[new]
    if layer_types := OWN_LAYER_TYPES.get(content.get("model_type")):
        content["layer_types"] = [layer_types[kind] for kind in content["layer_types"]]
    return content


def is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def old_rope(content: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as fields of transformers 4; none where layers differ in them and 4 lacks the family."""
    if "rope_type" in rope:
        bases = {"rope_theta": rope["rope_theta"]}
    else:
        fields = BASES_BY_LAYER.get(content["model_type"], {})
        bases = {field: rope[layers]["rope_theta"] for layers, field in fields.items()}
        if not bases:
            return {}
        rope = rope["full_attention"]
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    old = bases | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    before = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope":
        # it is read beside rope_scaling, and its ratio to max_position_embeddings is the factor then
        if before != content["max_position_embeddings"]:
            old["original_max_position_embeddings"] = before
        if content["model_type"] in THREE_FIELDS:
            old["rope_scaling"] = {"type": "longrope", **{name: rope[name] for name in ("short_factor", "long_factor")}}
    return old
