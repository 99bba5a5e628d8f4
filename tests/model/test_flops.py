"""FLOPs per token are what torch's own counter counts, from a model or its config (every family: test_families.py), and
PaLM's formula if it holds."""

import families
import multirank
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import utils
from harness.model import flops
from harness.model.configs import load_config

SIZES = multirank.SIZES
VARIANTS = {  # in addition to multirank.MODELS: (family, sizes)
    "one dense layer": ("qwen3_moe", SIZES | multirank.EXPERTS | {"head_dim": 16, "mlp_only_layers": [0]}),
    "a shared expert": ("qwen2_moe", SIZES | multirank.EXPERTS | {"shared_expert_intermediate_size": 32}),
}
NAMES = ("smollm3", "uneven", "mistral", "gpt2", *VARIANTS, "deepseek_v3", "gpt_oss")
SEQUENCE = 64


@pytest.mark.parametrize("name", NAMES)
def test_flops_equal_torchs_counter_to_the_digit_of_a_model_its_config_and_documents(name):
    if name in ("deepseek_v3", "gpt_oss"):
        config = families.small_config(name)
    else:
        family, sizes = (multirank.MODELS | VARIANTS)[name]
        config = AutoConfig.for_model(family, **sizes)
    counted = families.flops_on_real_tensors(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for source in (model, model.config):
        assert utils.get_model_flops_per_token(source, SEQUENCE) == counted
    by_length = utils.get_flops_by_length(config, np.array([8, SEQUENCE]))
    assert by_length.round().tolist() == [utils.get_model_flops_per_token(config, 8), counted]


def test_an_outer_product_that_takes_a_gradient_counts_and_one_of_rotary_angles_does_not():
    column, row = torch.ones(1, 8, 1), torch.ones(1, 1, 4, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=flops.CORRECTED_FORMULAS) as counter:
        (column @ row).sum().backward()  # the gradient of row is a product too
    with FlopCounterMode(display=False, custom_mapping=flops.CORRECTED_FORMULAS) as angles, torch.no_grad():
        column @ row
    assert (counter.get_total_flops(), angles.get_total_flops()) == (2 * 2 * 8 * 4, 0)


@pytest.mark.parametrize("takes_gradient, products", [(False, 2), (True, 3)])
def test_of_a_convolution_the_gradients_that_are_needed_count(takes_gradient, products):
    """Forward, the weight's gradient, and the input's if it needs one."""
    inputs = torch.ones(1, 4, 16, requires_grad=takes_gradient)
    convolution = torch.nn.Conv1d(4, 4, 3, groups=4, padding=1)
    with FlopCounterMode(display=False, custom_mapping=flops.CORRECTED_FORMULAS) as counter:
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


@pytest.mark.parametrize("name, parameters", PARAMETERS.items())
def test_presets_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):  # 70 billion of them take no memory
        model = AutoModelForCausalLM.from_config(load_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_flops_of_smollm3_3b_by_hand():
    config = load_config("smollm3-3b")
    attention = 12 * 36 * 16 * 128 * 8192  # layers, heads, head_dim, sequence
    projections = 2048 * 2048 * 2 + 2048 * 512 * 2  # q and o; k and v with 4 heads
    matmuls = 36 * (projections + 3 * 2048 * 11008) + 2048 * 128256
    assert utils.get_model_flops_per_token(config, 8192) == 6 * matmuls + attention == 25_697_452_032
    assert utils.get_model_flops_per_token(config, 8192, causal=True) == 6 * matmuls + attention // 2 == 22_073_573_376


def test_flops_of_a_mixture_count_active_experts_only():
    attention = 2048 * 128 * (32 + 4 + 4 + 32)  # q, k, v, o
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768  # router; gate, up and down of 8 experts of the 128
    matmuls = 2 * layer + 2048 * 151936
    config = load_config("qwen3-30b-a3b")
    config.num_hidden_layers = 2  # of 48 equal ones
    assert utils.get_model_flops_per_token(config, 4096) == 6 * matmuls + 12 * 2 * 32 * 128 * 4096


# A window bounds the keys of fused attention, in the layers whose mask has it; eager attention computes every score.
# Over a sequence of 64 a query of a window of 16 meets 14 keys that come before it.
SLIDING = {"head_dim": 16, "sliding_window": 16}
WINDOWS = {  # (family, sizes, attention): keys that a query meets in both layers, and where it is causal
    "fused": ("mistral", SLIDING, "sdpa", 16 + 16, 14 + 14),
    "eager": ("mistral", SLIDING, "eager", 64 + 64, 32 + 32),
    "one layer": ("gemma3_text", SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}, "sdpa", 80, 46),
    "of no mask": ("qwen2", SLIDING | {"use_sliding_window": False}, "sdpa", 64 + 64, 32 + 32),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_bounds_the_keys_of_the_layers_that_have_it(name):
    family, sizes, attention, keys, keys_before = WINDOWS[name]
    config = AutoConfig.for_model(family, **SIZES | sizes)
    config._attn_implementation = attention
    full, causal = (utils.get_model_flops_per_token(config, SEQUENCE, causal) for causal in (False, True))
    config._attn_implementation = "eager"
    without = utils.get_model_flops_per_token(config, SEQUENCE)
    of_a_key = 12 * 4 * 16  # heads, head_dim
    assert (without - full, without - causal) == (of_a_key * (128 - keys), of_a_key * (128 - keys_before))


def test_a_chunk_bounds_the_keys_also_the_last_one_which_is_shorter():
    sizes = SIZES | {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 24, "no_rope_layers": [1, 1]}
    config = AutoConfig.for_model("llama4_text", **sizes)
    counts = {}
    for config._attn_implementation in ("sdpa", "eager"):
        counts[config._attn_implementation] = utils.get_model_flops_per_token(config, 64)
    left_out = 2 * 12 * 4 * 16 * (64 - (24 * 24 + 24 * 24 + 16 * 16) / 64)  # 2 layers, 4 heads of 16
    assert counts["eager"] - counts["sdpa"] == pytest.approx(left_out, abs=1)


@pytest.mark.parametrize("frozen_layers, products", [(0, 12), (1, 8), (2, 4)])
def test_a_window_leaves_out_only_the_products_that_a_layer_computes(frozen_layers, products):
    """Six for each key in a layer, of which two are forward; a compiled model has its parameters under other names."""
    config = AutoConfig.for_model("mistral", **SIZES | SLIDING)
    model = AutoModelForCausalLM.from_config(config)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:frozen_layers].requires_grad_(False)
    flops = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        flops[attention] = utils.get_model_flops_per_token(model, SEQUENCE)
        assert utils.get_model_flops_per_token(torch.compile(model), SEQUENCE) == flops[attention]
    assert flops["eager"] - flops["sdpa"] == products * 2 * 4 * 16 * (SEQUENCE - 16)


@pytest.mark.parametrize(
    "family, causal, reason",
    [
        ("llama4_text", True, "the FLOPs of llama4_text come from torch's counter"),
        ("jetmoe", False, "torch cannot count it"),  # its routing depends on the data
        ("mamba", False, "torch cannot count it: it takes more than 3,000 operators"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_what_it_is(monkeypatch, family, causal, reason):
    monkeypatch.setattr(flops, "MAX_OPERATORS", 3_000)
    with pytest.raises(ValueError, match=reason):
        utils.get_model_flops_per_token(families.small_config(family), SEQUENCE, causal)
