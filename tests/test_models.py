"""Configs, tokenizers, weights and kernels: what is used, and what is refused by name."""

import json

import pytest
from conftest import PROGRAM, train, write_model
from multirank import SIZES
from transformers import AutoConfig, AutoModelForCausalLM


def test_a_folder_without_a_config_is_named(mistake, tmp_path):
    (tmp_path / "empty").mkdir()
    assert mistake("--model", tmp_path / "empty") == f"--model {tmp_path / 'empty'}: the folder has no config.json"


@pytest.mark.parametrize("config", ["", "{", "[]", "{}", '{"model_type": "nothing"}'])
def test_a_config_that_cannot_be_used_is_named(mistake, tmp_path, config):
    (tmp_path / "model" / "config.json").write_text(config)
    assert mistake().startswith(f"--model {tmp_path / 'model'}: its config.json cannot be used")


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
    assert mistake(*flags.split()).startswith(flags)


def test_fused_loss_is_refused_where_the_logits_are_bent_after_the_head(mistake, tmp_path):
    sizes = SIZES | {"head_dim": 16, "query_pre_attn_scalar": 16}
    write_model(tmp_path / "model", "gemma2", **sizes)
    assert mistake("--fused-loss").startswith("--fused-loss: ")


def test_fp8_is_refused_where_no_linear_fits_it(mistake, tmp_path):
    sizes = SIZES | {"hidden_size": 40, "head_dim": 10, "intermediate_size": 100}
    write_model(tmp_path / "model", "llama", **sizes)
    assert mistake("--precision", "fp8", "--fp8-emulate").startswith("--precision fp8: ")
