"""Configs, tokenizers, weights and kernels: what is used, and what is refused by name."""

import json
import types

import multirank
import pytest
import torch
from conftest import PROGRAM, forked, losses_of, parse, train, words, write_model
from multirank import MODELS, SIZES, resolved
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import sdpa_attention

from harness import model as models
from harness.base import versions
from harness.base.errors import UserError
from harness.model import tokenizer as tokenizer_module
from harness.model.attention import choose_attention, describe_attention, use_gqa_in_sdpa
from harness.model.configs import load_config
from harness.model.tokenizer import load_tokenizer


def test_a_folder_without_a_config_is_named(mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    assert mistake("--model", tmp_path / "empty") == f"--model {tmp_path / 'empty'}: the folder has no config.json"


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"model_type": "nothing"}'])
def test_a_config_that_cannot_be_used_is_named(mistake, tmp_path, config):
    (tmp_path / "model" / "config.json").write_text(config)
    assert mistake().startswith(f"--model {tmp_path / 'model'}: its config.json cannot be used")


@pytest.mark.parametrize(
    "figures, named",
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_act": "no_such_activation"}, "no_such_activation"),
        ({"head_dim": -1}, "negative dimension"),
        ({"rope_parameters": {"rope_type": "no_such_type"}}, "no_such_type"),
        ({"pad_token_id": 10**9}, "Padding_idx"),
    ],
)
def test_a_config_with_figures_that_no_model_has_is_refused(mistake, tmp_path, figures, named):
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | figures))
    message = mistake()
    assert message.startswith("--model") and named in message


def test_a_config_of_no_causal_language_model_is_named(mistake, tmp_path):
    write_model(tmp_path / "model", "t5")
    assert str(tmp_path / "model") in mistake()


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "~/none", "a/b/c", PROGRAM])
def test_a_model_folder_that_is_not_there_is_named(mistake, model):
    assert mistake("--model", model).startswith(f"--model {model}: ")


def test_a_tokenizer_folder_without_one_is_named(mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    message = mistake("--tokenizer", tmp_path / "empty")
    assert message.startswith(f"--tokenizer {tmp_path / 'empty'}: ")


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(mistake, tmp_path):
    write_model(tmp_path / "model", "llama", **SIZES | {"vocab_size": 1000})
    message = mistake()
    assert message.startswith("--tokenizer ")
    assert "1000" in message


def test_a_sequence_longer_than_the_models_positions_is_refused(mistake):
    message = mistake("--sequence-length", 257)
    assert message.startswith("--sequence-length 257: ")
    assert "256" in message


def test_a_sample_longer_than_the_models_positions_is_refused(mistake):
    assert mistake("--sample-prompt", "Once", "--sample-tokens", 256).startswith("--sample-tokens 256: ")


# ----------------------------------------------------------------------------------------------------------------------
# Pretrained weights


def test_a_folder_without_weights_cannot_be_pretrained(mistake):
    assert mistake("--init", "pretrained").startswith("--init pretrained: ")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the config and weights of a tiny llama."""
    config = AutoConfig.for_model("llama", **SIZES | {"tie_word_embeddings": False})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_that_lack_a_parameter_are_refused_by_its_name(mistake, checkpoint):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    message = mistake("--init", "pretrained")
    assert message.startswith("--init pretrained: ")
    assert "layers.1.mlp.up_proj.weight" in message


def test_weights_of_another_shape_are_refused(mistake, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    message = mistake("--init", "pretrained")
    assert message.startswith("--init pretrained: ")
    assert "_proj.weight" in message


def test_weights_with_more_layers_than_the_config_are_refused_or_ignored_alike(device, arguments, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 1
    config.pop("layer_types", None)
    (checkpoint / "config.json").write_text(json.dumps(config))
    train([*arguments, "--init", "pretrained"], device)


def test_weights_cut_short_are_refused(mistake, checkpoint):
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert mistake("--init", "pretrained").startswith("--init pretrained: ")


# ----------------------------------------------------------------------------------------------------------------------
# Techniques that this machine or this model lacks


@pytest.mark.parametrize(
    "flags", ["--precision fp8", "--attention cudnn", "--attention flash_attention_2", "--attention flex_attention"]
)
def test_what_needs_a_gpu_is_refused_without_one(mistake, flags):
    assert mistake("--precision", "bf16", *flags.split()).startswith(flags)


def test_fused_loss_is_refused_where_the_logits_are_bent_after_the_head(mistake, tmp_path):
    sizes = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
    write_model(tmp_path / "model", "gemma2", **sizes)
    assert mistake("--fused-loss").startswith("--fused-loss: ")


def test_fp8_is_refused_where_no_linear_fits_it(mistake, tmp_path):
    sizes = SIZES | {"hidden_size": 40, "head_dim": 10, "intermediate_size": 100}
    write_model(tmp_path / "model", "llama", **sizes)
    assert mistake("--precision", "fp8", "--fp8-emulate").startswith("--precision fp8: ")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_takes_tokens_in_multiples_of_16_and_names_the_nearest_length_and_batch_that_work(mistake, recipe):
    """Also where it is emulated, which would take any number."""
    flags = ["--precision", "fp8", "--fp8-emulate", "--fp8-recipe", recipe, "--batch-size", "2"]
    message = mistake(*flags, "--sequence-length", "29")
    assert message.startswith(f"--sequence-length 29: --precision fp8 ({recipe}) takes batch x sequence in multiples")
    assert "give 32, or --batch-size 16, " in message
    parse([*flags, "--sequence-length", "32"])
    parse([*flags, "--sequence-length", "29", "--batch-size", "16"])
    parse([*flags, "--sequence-length", "29", "--num-steps", "0", "--export", "x", "--init", "pretrained"])


def test_fp8_with_weight_gradients_in_bf16_takes_any_length(device, arguments):
    recipe = ["--precision", "fp8", "--fp8-emulate", "--fp8-recipe", "rowwise_with_gw_hp"]
    assert train([*arguments, *recipe, "--sequence-length", "13", "--batch-size", "1"], device) == 0


def test_fp8_does_not_take_a_models_own_length_that_does_not_fit(tmp_path):
    source = write_model(tmp_path / "model", "llama", **SIZES | {"max_position_embeddings": 100})
    with pytest.raises(UserError, match=r"--sequence-length 100: .* give 96, or --batch-size 4,"):
        resolved(["--model", source, "--precision", "fp8", "--fp8-emulate"])


def test_fp8_is_refused_with_a_torchao_whose_compiled_casts_may_store_nan(mistake, monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "0.17.0")
    message = mistake("--precision", "fp8", "--fp8-emulate")
    assert message.startswith("--precision fp8: this is torchao 0.17.0, ") and "0.18 or newer" in message


@pytest.mark.slow
def test_float8_weights_whose_rows_the_ranks_do_not_divide_train_as_on_one_rank(device, arguments, tmp_path):
    """64 rows are 22, 22 and 20 on three ranks, and an all-gather takes the same from each."""
    flags = [*arguments, *words("--precision fp8 --fp8-emulate --num-steps 3 --lr 1e-3 --log-interval 1")]
    forked(3, multirank.program, *flags, "--run-name", "three", "--batch-size", "2")
    assert train([*flags, "--run-name", "one", "--batch-size", "6"], device) == 0
    three, one = (losses_of(tmp_path / "out" / name) for name in ("three", "one"))
    assert len(three) == 3
    assert three == pytest.approx(one, rel=1e-3)  # the scales of activations are found on each rank


# ----------------------------------------------------------------------------------------------------------------------
# Attention kernels


@pytest.fixture
def header(monkeypatch, tmp_path):
    """`header(*flags)`: what the header says of attention, and with what torch was asked: heads of keys, whether there
    was a mask, enable_gqa."""
    asked, chosen = [], SDPBackend.CUDNN_ATTENTION

    def choice(query, key, value, mask=None, *, is_causal, enable_gqa):
        assert query.shape[1] in (key.shape[1], key.shape[1] * (2 if enable_gqa else 1))
        asked.append((key.shape[1], mask is not None, enable_gqa))
        if mask is not None:
            assert mask.shape == (1, 1, query.shape[2], key.shape[2])
            assert mask.untyped_storage().nbytes() == key.shape[2]  # not a square of it
        return chosen.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", use_gqa_in_sdpa)

    def say(*flags, kernel=chosen):
        nonlocal chosen
        chosen = kernel
        source = write_model(tmp_path / "gqa", "llama", **SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2})
        settings, config = resolved(["--model", source, "--sequence-length", "16", *flags])
        config._attn_implementation = "sdpa"
        return describe_attention(settings, config, "cpu"), asked[-1]

    return say


def test_the_header_asks_torch_for_the_kernel_as_transformers_will(header):
    assert header() == ("sdpa attention (cudnn_attention)", (2, False, True))
    assert header("--document-mask")[1] == (4, True, False)  # transformers repeats the keys then
    with pytest.raises(UserError, match="--attention flash: torch's kernel does not take this model's heads; use sdpa"):
        header("--attention", "flash", "--precision", "bf16", kernel=SDPBackend.ERROR)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(9)`: a GPU of that major capability, for what only asks."""

    def pretend(capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))

    return pretend


@pytest.mark.parametrize(
    "capability, model, flags, allowed",
    [
        (9, "llama", "--sequence-length 704 --document-mask", False),
        (9, "llama", "--sequence-length 640 --document-mask", True),
        (9, "llama", "--sequence-length 704", True),  # causal, without a mask
        (9, "mistral", "--sequence-length 704", False),  # its window is a mask
        (10, "mistral", "--sequence-length 704 --document-mask", True),
    ],
)
def test_cudnn_is_left_out_where_its_gradients_may_be_nan(gpu, tmp_path, capability, model, flags, allowed):
    sizes = MODELS[model][1] | {"max_position_embeddings": 1024}
    source = write_model(tmp_path / "model", MODELS[model][0], **sizes)
    gpu(capability)
    for attention in ("sdpa", "cudnn"):
        settings = parse(["--model", source, *flags.split(), "--attention", attention])
        if attention == "cudnn" and not allowed:
            with pytest.raises(UserError, match=r"--attention cudnn: .* 704 tokens.*--sequence-length 768"):
                choose_attention(settings, load_config(source))
        else:
            assert choose_attention(settings, load_config(source)) == attention
            assert torch.backends.cuda.cudnn_sdp_enabled() == allowed


def test_the_header_says_why_cudnn_was_left_out(header, gpu):
    gpu(9)
    flags = ("--no-compile", "--document-mask", "--attention", "sdpa", "--sequence-length")
    assert header(*flags, "128", kernel=SDPBackend.CUDNN_ATTENTION)[0] == "sdpa attention (cudnn_attention)"
    said, _ = header(*flags, "192", kernel=SDPBackend.EFFICIENT_ATTENTION)
    assert said == "sdpa attention (efficient_attention, as cuDNN's gradients may be NaN with a mask at 192 tokens)"


def test_fp32_on_a_gpu_repeats_shared_keys_as_no_fused_kernel_takes_them(header):
    assert header("--precision", "fp32")[1] == (2, False, True)  # a CPU's flash kernel takes them
    assert header("--precision", "fp32", "--plan")[1] == (4, False, False)  # planned for a GPU
    query, keys = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    module = types.SimpleNamespace(num_key_value_groups=2, is_causal=True)
    with NoSharedKeys():
        repeated, _ = sdpa_attention.sdpa_attention_forward(module, query, keys, keys, None)
    assert header("--precision", "bf16")[1] == (2, False, True)  # and the choice of one run is not that of the next
    shared, _ = sdpa_attention.sdpa_attention_forward(module, query, keys, keys, None)
    torch.testing.assert_close(repeated, shared)


class NoSharedKeys(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "attention" not in op.name() or args[0].shape == args[1].shape
        return op(*args, **kwargs or {})


def test_flash_is_torchs_flash_kernel_and_no_other():
    query, bias = torch.randn(1, 2, 8, 16), torch.zeros(1, 2, 8, 8, requires_grad=True)  # which flash does not take
    for attention, kernels in (("flash", {"flash"}), ("sdpa", {"flash", "mem_efficient", "cudnn", "math"})):
        flags = words(f"--model demo --sequence-length 64 --precision bf16 --attention {attention}")
        settings, _ = resolved(flags)
        assert settings.attention == attention
        names = ("flash", "mem_efficient", "cudnn", "math")
        assert {name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()} == kernels
        assert torch._fused_sdp_choice(query, query, query, is_causal=True) == SDPBackend.FLASH_ATTENTION.value
        if attention == "flash":
            with pytest.raises(RuntimeError, match=r"No viable|No available"):
                torch.nn.functional.scaled_dot_product_attention(query, query, query, bias)


def test_a_continuation_is_generated_without_cudnn_which_would_plan_for_each_length(device, monkeypatch):
    settings, config = resolved(["--demo"])
    tokenizer, seen = load_tokenizer(settings, config), []

    class Model(torch.nn.Linear):
        def generate(self, input_ids, **options):
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return input_ids

    assert models.sample(settings, "Once", Model(1, 1), tokenizer, device) == {"prompt": "Once", "text": "Once"}
    assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], True)


def test_a_continuation_is_drawn_by_the_seed_whatever_was_drawn_before(device):
    settings, config = resolved(["--demo", "--seed", "5"])
    tokenizer, drawn = load_tokenizer(settings, config), []

    class Model(torch.nn.Linear):
        def generate(self, input_ids, **options):
            drawn.append(torch.rand(1).item())
            return input_ids

    model = Model(1, 1)
    for before in (1, 2):
        torch.manual_seed(before)
        models.sample(settings, "Once", model, tokenizer, device)
    assert drawn == [torch.rand(1, generator=torch.Generator().manual_seed(5)).item()] * 2


def test_a_preset_whose_tokenizer_cannot_be_had_names_the_flag_and_the_login(monkeypatch):
    def refuse(*_, **__):
        raise OSError("You are trying to access a gated repo.")

    monkeypatch.setattr(tokenizer_module.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UserError) as raised:
        load_tokenizer(parse(["--model", "llama3.1-8b"]), load_config("llama3.1-8b"))
    said = str(raised.value)
    assert said.startswith("--tokenizer meta-llama/Llama-3.1-8B: ") and "gated repo" in said
    assert all(words in said for words in ("preset llama3.1-8b", "`hf auth login`", "give --tokenizer a folder"))
