"""Configs, tokenizers, weights and kernels: the ones that are used, and refusals by name."""

import contextlib
import dataclasses
import json
import types

import multirank
import pytest
import torch
from conftest import forked, losses_of, parse, train, words, write_model
from huggingface_hub.utils import filter_repo_objects
from multirank import SIZES, resolved
from tiny import build
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, modeling_flash_attention_utils
from transformers.integrations import sdpa_attention

from harness import base
from harness import model as models
from harness.base import UserError
from harness.flags import PRESETS
from harness.model import pretrained
from harness.model import tokenizer as tokenizer_module
from harness.model.attention import FLASH_PACKAGES, choose_attention, describe_attention
from harness.model.configs import load_config
from harness.model.float8 import float8_filter
from harness.model.tokenizer import load_tokenizer

GEMMA = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
SMALL_LINEARS = SIZES | {"hidden_size": 40, "head_dim": 10, "intermediate_size": 100}
CONFIGS = {  # (text or family, its sizes, flags, how the message begins, a word that is in it)
    "half of JSON": ("{", {}, "", "--model {}: its config.json cannot be used", ""),
    "a list": ("[]", {}, "", "--model {}: its config.json cannot be used", ""),
    "no family": ("nothing", {}, "", "--model {}: its config.json cannot be used", ""),
    "heads": ("llama", SIZES | {"num_key_value_heads": 3}, "", "--model", "num_key_value_heads is 3"),
    "layers": ("llama", SIZES | {"num_hidden_layers": 0}, "", "--model", "num_hidden_layers is 0"),
    "activation": ("llama", SIZES | {"hidden_act": "no_such_activation"}, "", "--model", "no_such_activation"),
    "padding": ("llama", SIZES | {"pad_token_id": 10**9}, "", "--model", "Padding_idx"),
    "not causal": ("t5", {}, "", "--model", "/model"),
    "vocabulary": ("llama", SIZES | {"vocab_size": 1000}, "", "--tokenizer ", "1000"),
    "capped logits": ("gemma2", GEMMA, "--fused-loss", "--fused-loss: ", ""),
    "no linear fits": ("llama", SMALL_LINEARS, "--precision fp8 --fp8-emulate", "--precision fp8: ", ""),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_does_not_work_is_refused(mistake, tmp_path, name):
    family, sizes, flags, beginning, word = CONFIGS[name]
    text = json.dumps({"model_type": family, **sizes}) if family.isalnum() else family
    (tmp_path / "model" / "config.json").write_text(text)
    message = mistake(*words(flags))
    assert message.startswith(beginning.format(tmp_path / "model")) and word in message


# ----------------------------------------------------------------------------------------------------------------------
# float8


def test_fp8_takes_tokens_in_multiples_of_16_and_names_the_nearest_length_and_batch_that_work(mistake, tmp_path):
    """With emulation too, which would take any number, and where the length is the model's own."""
    flags = words("--precision fp8 --fp8-emulate --batch-size 2")
    message = mistake(*flags, "--sequence-length", "29")
    assert message.startswith("--sequence-length 29: --precision fp8 (tensorwise) needs a multiple of 16 tokens")
    assert "give 32, or --batch-size 16, " in message
    parse([*flags, "--sequence-length", "32"])
    parse([*flags, "--sequence-length", "29", "--batch-size", "16"])
    parse([*flags, "--sequence-length", "29", "--num-steps", "0", "--export", "x", "--init", "pretrained"])
    source = write_model(tmp_path / "model", "llama", **SIZES | {"max_position_embeddings": 100})
    with pytest.raises(UserError, match=r"--sequence-length 100: .* give 96, or --batch-size 4,"):
        resolved(["--model", source, "--precision", "fp8", "--fp8-emulate"])


def test_fp8_is_refused_with_a_torchao_whose_compiled_casts_may_store_nan(mistake, monkeypatch):
    monkeypatch.setattr(base, "installed", lambda package: "0.17.0")
    message = mistake("--precision", "fp8", "--fp8-emulate")
    assert message.startswith("--precision fp8: this is torchao 0.17.0, ") and "0.18 or newer" in message


@pytest.mark.parametrize(
    "preset, recipe, taken",
    [
        ("smollm3-3b", "tensorwise", "self_attn.q_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"),
        ("smollm3-3b", "rowwise", "mlp.gate_proj mlp.up_proj"),
        ("smollm3-3b", "rowwise_with_gw_hp", "mlp.gate_proj mlp.up_proj"),
        ("qwen3-30b-a3b", "tensorwise", "self_attn.q_proj self_attn.o_proj"),
        ("qwen3-30b-a3b", "rowwise", ""),
    ],
)
def test_float8_takes_the_linears_that_gain(preset, recipe, taken):
    """Keys and values of 2,048 by 512 cost more in casts than their matmuls save."""
    config = AutoConfig.for_model(**json.loads(PRESETS[preset].read_text()))
    layer = models.decoder_layers(models.on_meta(config))[0]
    takes = float8_filter(recipe, emulate=False)
    assert [path for path, module in layer.named_modules() if takes(module, path)] == taken.split()


@pytest.mark.parametrize(
    "family, experts, sizes",
    [
        ("hunyuan_v1_moe", 64, {"num_experts": 64, "moe_topk": 2, "head_dim": 128}),
        ("longcat_flash", 768, {"num_layers": 1}),
        ("llama4_text", 16, {}),
        ("jetmoe", 16, {"num_local_experts": 16}),
    ],
)
def test_a_router_of_experts_is_never_float8(family, experts, sizes):
    """In families whose router is an nn.Linear; others have a module of their own."""
    sizes = {"num_hidden_layers": 4, "vocab_size": 256} | sizes
    model = models.on_meta(AutoConfig.for_model(family, **sizes))
    linears = [(module, path) for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    routers = [(module, path) for module, path in linears if module.out_features == experts]
    assert routers
    for recipe, emulate in (("tensorwise", False), ("tensorwise", True), ("rowwise", False)):
        takes = float8_filter(recipe, emulate)
        assert not any(takes(module, path) for module, path in routers)


def test_the_header_says_which_linears_are_float8(device, arguments, capsys):
    train([*arguments, *words("--precision fp8 --fp8-emulate --num-steps 1")], device)
    assert " 14 of 14 linears of the layers are float8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_float8_weights_whose_rows_the_ranks_do_not_divide_train_as_on_one_rank(device, arguments, tmp_path):
    """64 rows are 22, 22 and 20 on three ranks, and an all-gather takes equal parts."""
    flags = [*arguments, *words("--precision fp8 --fp8-emulate --num-steps 3 --lr 1e-3 --log-interval 1")]
    forked(3, multirank.program, *flags, "--run-name", "three", "--batch-size", "2")
    assert train([*flags, "--run-name", "one", "--batch-size", "6"], device) == 0
    three, one = (losses_of(tmp_path / "out" / name) for name in ("three", "one"))
    assert len(three) == 3
    assert three == pytest.approx(one, rel=1e-3)  # the scales of activations are found on each rank


# ----------------------------------------------------------------------------------------------------------------------
# Attention kernels


def choose(args, config):
    return choose_attention(args, config, args.precision, args.sequence_length, bool(args.document_mask))


def fake_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    "capability, family, flags, allowed",
    [
        ((9, 0), "llama", "--sequence-length 704 --document-mask", False),
        ((9, 0), "llama", "--sequence-length 640 --document-mask", True),
        ((9, 0), "mistral", "--sequence-length 704", False),  # its window is a mask
        ((10, 0), "mistral", "--sequence-length 704 --document-mask", True),
    ],
)
def test_cudnn_is_left_out_where_its_gradients_may_be_nan(monkeypatch, capability, family, flags, allowed):
    fake_gpu(monkeypatch, capability)
    config = AutoConfig.for_model(family)
    settings = {kernel: parse(words(f"--model demo {flags} --attention {kernel}")) for kernel in ("sdpa", "cudnn")}
    assert choose(settings["sdpa"], config) == "sdpa"
    assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    if allowed:
        assert choose(settings["cudnn"], config) == "cudnn"
    else:
        with pytest.raises(UserError, match=r"--attention cudnn: .* 704 tokens.*--sequence-length 768"):
            choose(settings["cudnn"], config)


@pytest.mark.parametrize(
    "capability, kernel, flags, heads, warns",
    [
        ((9, 0), "FLASH_ATTENTION", "", 8, True),  # H100, H200
        ((10, 3), "FLASH_ATTENTION", "", 8, True),  # B300
        ((9, 0), "CUDNN_ATTENTION", "", 8, False),
        ((9, 0), "FLASH_ATTENTION", "--attention flash", 8, False),
        ((9, 0), "FLASH_ATTENTION", "", 2, False),  # heads of 256, which cuDNN's backward pass has not
        ((8, 0), "FLASH_ATTENTION", "", 8, False),  # A100
    ],
)
def test_a_gpu_that_has_no_cudnn_although_torch_prefers_it_is_warned_of(
    monkeypatch, capfd, capability, kernel, flags, heads, warns
):
    fake_gpu(monkeypatch, capability)
    choice = getattr(torch.nn.attention.SDPBackend, kernel).value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: choice)
    config = AutoConfig.for_model("llama", hidden_size=512, num_attention_heads=heads, num_key_value_heads=heads)
    config._attn_implementation = "sdpa"
    settings = parse(words(f"--model demo --sequence-length 64 {flags}"))
    settings = dataclasses.replace(settings, attention=choose(settings, config))
    assert describe_attention(settings, config, "meta").startswith(f"sdpa attention ({kernel.lower()}")
    assert ("warning: --attention auto: torch takes flash attention" in capfd.readouterr().err) == warns


def test_flex_attention_is_not_for_a_model_with_attention_dropout(monkeypatch):
    fake_gpu(monkeypatch, (9, 0))
    config = AutoConfig.for_model("llama", attention_dropout=0.1)
    settings = parse(words("--model demo --sequence-length 64 --document-mask --precision bf16"))
    assert choose(settings, AutoConfig.for_model("llama")) == "flex_attention"
    assert choose(settings, config) == "sdpa"
    with pytest.raises(UserError, match="--attention flex_attention: llama has attention dropout"):
        choose(parse(words("--model demo --sequence-length 64 --attention flex_attention")), config)


def test_torchs_flash_attention_alone_is_not_for_a_window(monkeypatch):
    fake_gpu(monkeypatch, (9, 0))
    settings = {length: parse(words(f"--model demo --attention flash --sequence-length {length}")) for length in (8, 9)}
    config = AutoConfig.for_model("mistral", sliding_window=8)
    assert choose(settings[8], config) == "flash"
    with pytest.raises(UserError, match="--attention flash: torch's kernel takes no mask, and mistral has a window"):
        choose(settings[9], config)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_scores_that_a_config_caps_are_not_given_to_kernels_that_leave_out_the_cap(family):
    config = AutoConfig.for_model(family, attn_logit_softcapping=50.0)
    assert choose(parse(words("--model demo --sequence-length 64")), config) == "eager"
    with pytest.raises(UserError, match=r"--attention sdpa: .* caps scores"):
        choose(parse(words("--model demo --sequence-length 64 --attention sdpa")), config)


@pytest.mark.parametrize("attention", FLASH_PACKAGES)
def test_a_flash_attention_that_is_not_installed_is_refused_by_its_package(attention):
    package, _ = FLASH_PACKAGES[attention]
    with pytest.raises(UserError, match=f"--attention {attention}: needs a GPU and the package {package}; use sdpa"):
        choose(parse(["--model", "demo", "--precision", "bf16", "--attention", attention]), load_config("demo"))


@pytest.mark.parametrize("model, taken", [("llama", "234"), ("gpt_oss", "4"), ("mpt", "")])
def test_a_flash_attention_that_transformers_does_not_give_a_family_is_refused(monkeypatch, model, taken):
    """gpt_oss has attention sinks: transformers would fetch a kernel that knows them from the hub."""
    fake_gpu(monkeypatch, (9, 0))
    for version in "234":
        attention = f"flash_attention_{version}"
        monkeypatch.setitem(FLASH_PACKAGES, attention, ("its package", lambda: True))
        settings = parse(words(f"--model demo --precision bf16 --attention {attention} --sequence-length 64"))
        if version in taken:
            assert choose(settings, AutoConfig.for_model(model)) == attention
        else:
            with pytest.raises(UserError, match=f"--attention {attention}: transformers does not support .* {model};"):
                choose(settings, AutoConfig.for_model(model))


def test_heads_that_a_flash_attention_does_not_take_are_refused_in_one_line(monkeypatch):
    """As the package says it, which is not installed here."""

    def attend(query, *_, **__):
        raise ValueError(f"head_dim {query.shape[-1]} is not supported.\nsecond line")

    monkeypatch.setattr(modeling_flash_attention_utils, "_flash_attention_forward", attend)
    config = load_config("demo")
    config._attn_implementation = "flash_attention_4"
    settings = parse(words("--model demo --precision bf16 --attention flash_attention_4 --sequence-length 64"))
    head_dim = config.hidden_size // config.num_attention_heads
    printed = f"heads of {head_dim} on this GPU .head_dim {head_dim} is not supported.*; use sdpa$"
    with pytest.raises(UserError, match=f"^--attention flash_attention_4: does not take {printed}"):
        describe_attention(settings, config, "cpu")


def test_fp32_on_a_gpu_repeats_shared_keys_as_no_fused_kernel_takes_them():
    query, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    module, found = types.SimpleNamespace(num_key_value_groups=2, is_causal=True), []
    for precision, guard in (("fp32", NoSharedKeys()), ("bf16", contextlib.nullcontext())):
        settings = parse(["--model", "demo", "--plan", "--precision", precision, "--sequence-length", "8"])  # for a GPU
        choose(settings, load_config("demo"))
        with guard:
            found.append(sdpa_attention.sdpa_attention_forward(module, query, keys, keys, None)[0])
    torch.testing.assert_close(*found)
    with NoSharedKeys(), pytest.raises(AssertionError):  # what one run chose is not the choice of the next
        sdpa_attention.sdpa_attention_forward(module, query, keys, keys, None)


class Allocated(TorchDispatchMode):
    """Collects each tensor that an operator returns, but those on the meta device."""

    def __init__(self):
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.tensors.append(result)
        return result


class NoSharedKeys(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "attention" not in op.name() or args[0].shape == args[1].shape
        return op(*args, **kwargs or {})


def test_a_preset_whose_tokenizer_cannot_be_had_names_the_flag_and_the_login(monkeypatch):
    def refuse(*_, **__):
        raise OSError("You are trying to access a gated repo.")

    monkeypatch.setattr(tokenizer_module.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UserError) as raised:
        load_tokenizer(parse(["--model", "llama3.1-8b"]), load_config("llama3.1-8b"))
    printed = str(raised.value)
    assert printed.startswith("--tokenizer meta-llama/Llama-3.1-8B: ") and "gated repo" in printed
    assert all(words in printed for words in ("preset llama3.1-8b", "`hf auth login`", "give --tokenizer a folder"))


# ----------------------------------------------------------------------------------------------------------------------
# Pretrained weights


@pytest.mark.parametrize(
    "precision, stored, tied",
    [
        ("bf16-pure", torch.bfloat16, True),
        ("bf16-pure", torch.float32, False),
        ("bf16", torch.bfloat16, False),
        ("bf16", torch.float32, True),
    ],
)
def test_pretrained_weights_are_held_in_the_dtype_of_the_precision(device, tmp_path, precision, stored, tied):
    """No layer is made in fp32 before its weights are read in bf16."""
    config = AutoConfig.for_model("llama", **SIZES | {"tie_word_embeddings": tied})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=stored).save_pretrained(tmp_path)
    flags = ["--model", tmp_path, "--init", "pretrained", "--precision", precision, "--no-compile"]
    with Allocated() as allocated:
        _, model, _ = build([*flags, "--sequence-length", "32"])
    held = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=held).state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == held
        assert torch.equal(parameter.full_tensor(), expected[name])
    shape = (config.intermediate_size, config.hidden_size)
    made = {tensor.dtype for tensor in allocated.tensors if tensor.shape == shape}
    assert held in made and (torch.float32 in made) == (held == torch.float32)


def test_only_files_that_may_be_read_are_downloaded(monkeypatch, tmp_path):
    options = {}
    monkeypatch.setattr(pretrained, "snapshot_download", lambda *_, **given: options.update(given) or str(tmp_path))
    with pytest.raises(UserError, match="--init pretrained: no weights from"):
        pretrained.weight_files(models.find_source("some/model"), load_config("demo"))
    read = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["consolidated.safetensors", "consolidated.00.pth", "original/consolidated.safetensors", "original/a.json"]
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(read + others, **patterns)) == read


# ----------------------------------------------------------------------------------------------------------------------
# Positions


def test_positions_that_begin_after_the_paddings_are_fewer(mistake, tmp_path):
    """RoBERTa's first token has the position 2, as its padding has 1."""
    sizes = {"max_position_embeddings": 258, "pad_token_id": 1, "is_decoder": True, "num_hidden_layers": 1}
    source = write_model(tmp_path / "model", "roberta", **sizes)
    assert resolved(["--model", source])[0].sequence_length == 256
    assert " has 256 positions; give --sequence-length 256 or less" in mistake("--sequence-length", "257")
    sampled = ["--sequence-length", "64", "--sample-prompt", "a", "--sample-tokens", "256"]
    assert " 256 positions with the prompt's 1 token" in mistake(*sampled)


def test_a_sequence_longer_than_the_models_positions_is_trained_with_yarn_alone(device, arguments, mistake, tmp_path):
    """The model has 256 positions; its run, an evaluation at another length and its export have those of the run."""
    longer, export = ["--sequence-length", 512], tmp_path / "export"
    assert "has 256 positions; give --sequence-length 256 or less, or --rope-scaling yarn" in mistake(*longer)
    scaled = [*longer, "--rope-scaling", "yarn", "--checkpoint-interval", 2]
    assert train([*arguments, *scaled], device) == 0
    assert mistake(*longer, "--resume", "auto", "--num-steps", 3).endswith("or --rope-scaling yarn")
    shorter = ["--resume", tmp_path / "out" / "r", "--num-steps", 0, "--sequence-length", 64, "--export", export]
    assert train([*arguments, *shorter, "--eval-interval", 1], device) == 0
    config = json.loads((export / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    assert config["max_position_embeddings"] == 512 and config["rope_parameters"].items() >= yarn.items()
    model = AutoModelForCausalLM.from_pretrained(export)
    expected = AutoConfig.for_model("llama", **SIZES | {"max_position_embeddings": 512, "rope_scaling": yarn})
    assert model.model.rotary_emb.inv_freq.equal(AutoModelForCausalLM.from_config(expected).model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "family, sizes, printed",
    [
        ("llama", {}, "256 positions, enough for --sequence-length 16; leave it out"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "is linear; set rope_parameters and"),
        ("gpt2", {}, "is none, or another for some layers"),
    ],
)
def test_a_rope_that_yarn_does_not_scale_is_refused(mistake, tmp_path, family, sizes, printed):
    write_model(tmp_path / "model", family, **(SIZES if family == "llama" else {}) | sizes)
    assert printed in mistake("--rope-scaling", "yarn")
