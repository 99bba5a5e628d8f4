"""FLOPs per token are what torch's own counter counts, from a model or its config (every family: test_families.py), and
PaLM's formula where it holds."""

import json
import sys
import types

import multirank
import pytest
import torch
from conftest import ROOT, slow_case
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(ROOT / "benchmarks"))

import families

import utils
from harness.flags import PRESETS
from harness.model import flops
from harness.model.configs import load_config

EXPERTS = multirank.EXPERTS
SIZES = multirank.SIZES | {"vocab_size": 512}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
FAMILIES = {
    "smollm3": SIZES | {"num_hidden_layers": 4},
    "llama": SIZES,
    "llama tied": SIZES | {"tie_word_embeddings": True},
    "qwen2": SIZES,
    "qwen3 with head_dim 32": SIZES | {"head_dim": 32},
    "mistral": SIZES | {"sliding_window": None},
    "mistral with a window": SIZES | {"sliding_window": 16},
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 16},
    "qwen3_moe with one dense layer": SIZES | EXPERTS | {"head_dim": 16, "mlp_only_layers": [0]},
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 32},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": SIZES
    | LATENT
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
    "gpt2": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256} | SPECIAL_TOKENS,
    "gpt_neox": SIZES,
    "phi": SIZES,
    "phi3": SIZES,
    "gemma2": SIZES | {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": SIZES | {"head_dim": 16, "sliding_window": 16},
    "olmo2": SIZES,
    "granite": SIZES,
    "starcoder2": SIZES | {"sliding_window": None},
    "cohere": SIZES,
    "stablelm": SIZES,
    "nemotron": SIZES,
    "glm4": SIZES | {"head_dim": 16},
    "opt": {"vocab_size": 512, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 256, "word_embed_proj_dim": 64}
    | SPECIAL_TOKENS,
    "bloom": {"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4} | SPECIAL_TOKENS,
    "falcon": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | SPECIAL_TOKENS,
}
SEQUENCE = 64


def tiny(name: str, **attention):
    config = AutoConfig.for_model(name.split()[0], **FAMILIES[name])
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, **attention)


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_equal_torchs_counter_and_palms_formula_to_the_digit(name):
    model = tiny(name, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the counter does not see into the grouped matmul of a CPU
    tokens = torch.randint(0, 512, (2, SEQUENCE))
    with FlopCounterMode(display=False, custom_mapping=flops.MENDED) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert utils.get_model_flops_per_token(model, SEQUENCE) == counted
    assert utils.get_model_flops_per_token(model.config, SEQUENCE) == counted


def test_an_outer_product_that_takes_a_gradient_counts_and_one_of_rotary_angles_does_not():
    column, row = torch.ones(1, 8, 1), torch.ones(1, 1, 4, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=flops.MENDED) as counter:
        (column @ row).sum().backward()  # the gradient of row is a product too
    with FlopCounterMode(display=False, custom_mapping=flops.MENDED) as angles, torch.no_grad():
        column @ row
    assert (counter.get_total_flops(), angles.get_total_flops()) == (2 * 2 * 8 * 4, 0)


@pytest.mark.parametrize("takes_gradient, products", [(False, 2), (True, 3)])
def test_of_a_convolution_the_gradients_that_are_asked_for_count(takes_gradient, products):
    """Forward, the weight's gradient, and the input's where it takes one."""
    inputs = torch.ones(1, 4, 16, requires_grad=takes_gradient)
    convolution = torch.nn.Conv1d(4, 4, 3, groups=4, padding=1)
    with FlopCounterMode(display=False, custom_mapping=flops.MENDED) as counter:
        convolution(inputs).sum().backward()
    assert counter.get_total_flops() == products * 2 * (4 * 16) * 3


PARAMETERS = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm3-3b": 3_075_098_624,
}


def preset(name: str):
    return load_config(name)


@pytest.mark.parametrize("name, parameters", PARAMETERS.items())
def test_presets_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):  # 70 billion of them take no memory
        model = AutoModelForCausalLM.from_config(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    if name != "llama3.1-70b":  # 80 layers take some seconds
        counted = flops.count_flops(flops.eager_on_meta(model.config), 8192)
        assert utils.get_model_flops_per_token(model, 8192) == counted / 8192


def test_flops_of_smollm3_3b_by_hand():
    config = preset("smollm3-3b")
    attention = 12 * 36 * 16 * 128 * 8192  # layers, heads, head_dim, sequence
    projections = 2048 * 2048 * 2 + 2048 * 512 * 2  # q and o; k and v with 4 heads
    matmuls = 36 * (projections + 3 * 2048 * 11008) + 2048 * 128256
    assert utils.get_model_flops_per_token(config, 8192) == 6 * matmuls + attention == 25_697_452_032
    assert utils.get_model_flops_per_token(config, 8192, causal=True) == 6 * matmuls + attention // 2 == 22_073_573_376


def test_flops_of_a_mixture_count_active_experts_only():
    attention = 2048 * 128 * (32 + 4 + 4 + 32)  # q, k, v, o
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768  # router; gate, up and down of 8 experts of the 128
    matmuls = 48 * layer + 2048 * 151936
    config = preset("qwen3-30b-a3b")
    assert utils.get_model_flops_per_token(config, 4096) == 6 * matmuls + 12 * 48 * 32 * 128 * 4096


def test_the_causal_half_is_the_same_for_eager_attention():
    config = AutoConfig.for_model("llama", **FAMILIES["llama"])
    halves = set()
    for config._attn_implementation in ("eager", "sdpa"):
        whole, half = (utils.get_model_flops_per_token(config, SEQUENCE, causal) for causal in (False, True))
        halves.add(half)
        assert whole - half == 6 * 2 * 4 * 16 * SEQUENCE  # layers, heads, head_dim
    assert len(halves) == 1


def test_the_causal_half_of_eager_attention_is_that_of_the_whole_square():
    config = AutoConfig.for_model("mistral", **SIZES | {"sliding_window": 16})
    config._attn_implementation = "eager"
    whole, half = (utils.get_model_flops_per_token(config, SEQUENCE, causal) for causal in (False, True))
    assert whole - half == 6 * 2 * 4 * 16 * SEQUENCE  # layers, heads, head_dim


def test_tying_the_head_to_the_embedding_changes_no_flops():
    tied, untied = (tiny("llama", attn_implementation="eager"), tiny("llama tied", attn_implementation="eager"))
    assert utils.get_model_flops_per_token(tied, 64) == utils.get_model_flops_per_token(untied, 64)


def test_a_sliding_window_bounds_the_keys_of_fused_attention_alone():
    fused, eager = (tiny("mistral with a window", attn_implementation=kind) for kind in ("sdpa", "eager"))
    scores_for_each_key = 12 * 2 * 4 * 16  # layers, heads, head_dim
    long, short = (utils.get_model_flops_per_token(fused, length) for length in (64, 16))
    assert long == short
    assert utils.get_model_flops_per_token(eager, 64) - long == scores_for_each_key * (64 - 16)
    assert utils.get_model_flops_per_token(fused, 8) == utils.get_model_flops_per_token(eager, 8)


def test_only_the_layers_whose_mask_has_a_window_are_bounded_by_it():
    sizes = SIZES | {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model("gemma3_text", **sizes)
    long, short = (utils.get_model_flops_per_token(config, length) for length in (64, 16))
    assert long - short == 12 * 4 * 16 * (64 - 16)  # of one layer


def test_a_window_in_the_config_that_no_mask_uses_bounds_nothing():
    config = AutoConfig.for_model("qwen2", **SIZES | {"sliding_window": 16, "use_sliding_window": False})
    without = AutoConfig.for_model("qwen2", **SIZES)
    assert utils.get_model_flops_per_token(config, 64) == utils.get_model_flops_per_token(without, 64)


@pytest.mark.parametrize("causal", [False, True])
def test_the_keys_of_a_window_and_of_a_chunk(causal):
    """Over a sequence of 64 a query of a window of 16 meets 14 keys that come before it, one of a chunk of 16 eight."""
    kinds = ["full_attention", "sliding_attention", "chunked_attention"]
    config = types.SimpleNamespace(
        layer_types=kinds, sliding_window=16, attention_chunk_size=16, num_attention_heads=4, head_dim=8
    )
    keys = 32 + 14 + 8 if causal else 64 + 16 + 16
    assert utils.attention_flops(config, 64, masked=True, causal=causal) == 12 * 4 * 8 * keys
    assert utils.attention_flops(config, 64, causal=False) == 12 * 4 * 8 * 3 * 64


@pytest.mark.parametrize("family", ["llama4_text", slow_case("mamba2"), slow_case("qwen3_next")])
def test_a_family_that_is_only_counted_has_no_causal_figure(family):
    with pytest.raises(ValueError, match=f"no causal figure: torch counts {family}"):
        utils.get_model_flops_per_token(families.small_config(family), 96, causal=True)


def test_what_takes_operators_for_each_token_is_refused_where_they_are_too_many(monkeypatch):
    config = families.small_config("mamba")
    assert utils.get_model_flops_per_token(config, 64)
    monkeypatch.setattr(flops, "MAX_OPERATORS", 3_000)
    with pytest.raises(ValueError, match="torch cannot count it: it takes more than 3,000 operators"):
        utils.get_model_flops_per_token(config, 64)


def test_the_counted_gemma_windows_bound_the_keys_of_fused_attention():
    """Of its four layers three slide over 16 keys."""
    config = families.small_config("gemma3")
    text, figures = config.text_config, []
    for config._attn_implementation in ("eager", "sdpa"):
        figures.append(utils.get_model_flops_per_token(config, 64))
    sliding = text.layer_types.count("sliding_attention")
    assert figures[0] - figures[1] == sliding * 12 * text.num_attention_heads * text.head_dim * (64 - 16)


def test_a_routing_that_depends_on_the_data_is_refused_by_what_it_is():
    with pytest.raises(ValueError, match="torch cannot count it"):
        utils.get_model_flops_per_token(families.small_config("jetmoe"), 64)


def test_every_preset_and_the_demo_name_their_family():
    assert {"demo", *PARAMETERS} <= set(PRESETS)
    for file in (ROOT / "assets" / "presets").glob("*.json"):
        assert json.loads(file.read_text())["model_type"]


@pytest.mark.parametrize("ranks", [1, 2, slow_case(4)])
def test_flops_do_not_depend_on_sharding_or_float8(observed, ranks):
    flops = utils.get_model_flops_per_token(AutoConfig.from_pretrained(observed.models / "smollm3"), 64)
    names = ["stage 3", "stage 0", *(name for name in multirank.NEAR[ranks] if "fp8" in name)]
    assert {observed(ranks)["runs"][name]["flops_per_token"] for name in names} == {flops}
