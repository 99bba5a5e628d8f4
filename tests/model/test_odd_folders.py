"""Folders of weights as other tools leave them: each is read as `from_pretrained` reads it, or refused in one line."""

import json

import pytest
import torch
from checkpoints import change
from conftest import SMALL, train, words
from safetensors.torch import load_file, save_file
from tiny import SIZES
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from harness.base import UserError
from harness.model import describe_ignored_weights

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized"}
COMPRESSED |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8}}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write(folder, family: str = "llama", **sizes):
    """Write a model of a family by save_pretrained; return its weights."""
    folder.mkdir()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"pad_token_id": None} | sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def put(folder, weights: dict[str, torch.Tensor], name: str = "model.safetensors", **fields) -> None:
    """Write weights into a file, and fields into the config."""
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / name, {"format": "pt"})
    change(folder / "config.json", **fields)


def read(folder, export, device) -> None:
    """Export the weights of a folder as the program reads them."""
    flags = f"--num-steps 0 --dataset synthetic --init pretrained --model {folder} --export {export}"
    assert train(words(flags), device) == 0


def index(folder, files: dict[str, dict[str, torch.Tensor]]) -> None:
    weight_map = {key: file for file, weights in files.items() for key in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def halves(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    return {file: {name: weights[name] for name in names} for file, names in parts.items()}


def in_float8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of linears as float8 with a scale for each block of 32 x 32."""
    coded = dict(weights)
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scales = blocks.abs().amax((1, 3)) / 448
            coded[name] = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = scales
    return coded


# ---- Read as from_pretrained reads them: what is in the folder, and what the line on left out tensors begins with ----


def shards(folder):
    files = halves(write(folder))
    for file, weights in files.items():
        put(folder, weights, file)
    index(folder, files)
    (folder / "model.safetensors").unlink()


def an_old_index_beside_newer_weights(folder):
    weights = write(folder)
    files = halves({name: weight + 1 for name, weight in weights.items()})
    for file, old in files.items():
        put(folder, old, file)
    index(folder, files)


def a_file_that_its_config_names(folder):
    weights = write(folder)
    put(folder, {name: weight + 1 for name, weight in weights.items()}, "other.safetensors")
    put(folder, weights, transformers_weights="other.safetensors")


def what_the_family_ignores(folder):
    put(folder, write(folder) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})


def without_the_prefix(folder):
    weights = write(folder, tie_word_embeddings=True)
    put(folder, {name.removeprefix("model."): weight for name, weight in weights.items()})


def tied_with_the_same_head(folder):
    weights = write(folder, tie_word_embeddings=True)
    put(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})


def tied_with_the_head_alone(folder):
    weights = write(folder, tie_word_embeddings=True)
    put(folder, weights | {"lm_head.weight": weights.pop("model.embed_tokens.weight")})


def float8_experts(folder):
    put(folder, in_float8(write(folder, "qwen3_moe", **EXPERTS)), quantization_config=FP8)


def experts_in_four_bits(folder):
    weights = write(folder, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(110, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
    put(folder, weights, quantization_config={"quant_method": "mxfp4"})


def float8_of_fewer_layers(folder):
    put(folder, in_float8(write(folder, "qwen3")), quantization_config=FP8, num_hidden_layers=3, layer_types=None)
    return "18 tensors of {} left out, as the model has no place for them: model.layers.3.input_layernorm.weight, "


def plain_weights_whose_config_says_float8(folder):
    put(folder, write(folder), quantization_config=FP8)


READ = [an_old_index_beside_newer_weights, a_file_that_its_config_names]
READ += [what_the_family_ignores, without_the_prefix, tied_with_the_same_head, tied_with_the_head_alone]
READ += [float8_experts, experts_in_four_bits, float8_of_fewer_layers, plain_weights_whose_config_says_float8]


@pytest.mark.parametrize("folder", READ, ids=lambda make: make.__name__)
def test_a_folder_is_read_as_from_pretrained_reads_it(device, tmp_path, capfd, folder):
    left_out = folder(tmp_path / "model")
    read(tmp_path / "model", tmp_path / "export", device)
    printed = capfd.readouterr().out
    line = f"weights    {left_out.format(tmp_path / 'model')}" if left_out else ""
    assert line in printed and ("weights  " in printed) == bool(left_out)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    expected = dict(theirs.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, weight in ours.named_parameters():
        assert weight.dtype == torch.float32 and torch.equal(weight, expected[name].float()), name
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & config.keys()


def test_no_rule_for_initial_weights_replaces_loaded_ones(device, tmp_path, monkeypatch):
    """Not even one that writes without transformers' functions, which leave loaded parameters alone."""
    own = LlamaPreTrainedModel._init_weights  # of buffers too

    def init_weights(model, module):
        own(model, module)
        for parameter in module.parameters():
            parameter.data.fill_(1)

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", init_weights)
    torch.manual_seed(0)
    weights = {name: torch.randn_like(weight) for name, weight in write(tmp_path / "model").items()}
    put(tmp_path / "model", weights)
    read(tmp_path / "model", tmp_path / "export", device)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


# ---- Refused in one line, which says what to do ----------------------------------------------------------------------


def a_head_of_its_own_that_is_tied(folder):
    weights = write(folder, tie_word_embeddings=True)
    put(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
    return "another lm_head.weight than model.embed_tokens.weight", "set tie_word_embeddings to false"


def an_adapter_beside_weights(folder):
    write(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    return ("has an adapter next to its weights", "merge_and_unload, or take adapter_config.json away")


def pickles_alone(folder):
    weights = write(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return "no model.safetensors", "AutoModelForCausalLM.from_pretrained('{}').save_pretrained(DIR)"


def gguf_alone(folder):
    write(folder)
    (folder / "model.safetensors").rename(folder / "model-q8.gguf")
    return "no model.safetensors", "from_pretrained('{}', gguf_file='model-q8.gguf').save_pretrained(DIR)"


def a_config_alone(folder):
    write(folder)
    (folder / "model.safetensors").unlink()
    return "no model.safetensors", "give a model that has one, or leave out --init pretrained"


def shards_without_an_index(folder):
    shards(folder)
    (folder / "model.safetensors.index.json").unlink()
    return "it has model-00001-of-00002.safetensors, but neither", "or write one as docs/TROUBLESHOOTING.md has it"


def a_shard_that_is_missing(folder):
    shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "no weights from {}", "model-00002-of-00002.safetensors"


def a_tensor_that_is_missing(folder):
    weights = write(folder)
    del weights["model.layers.2.mlp.up_proj.weight"]
    put(folder, weights)
    return "has no model.layers.2.mlp.up_proj.weight of shape (96, 64)", ""


def a_file_that_is_cut(folder):
    write(folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return "no weights from {}", ""


def float8_without_a_config(folder):
    put(folder, in_float8(write(folder)))
    return "_proj.weight in F8_E4M3 without a scale that its config.json says", "choose weights that are not quantized"


def float8_without_the_scale_of_one_weight(folder):
    weights = in_float8(write(folder))
    del weights["model.layers.1.mlp.up_proj.weight_scale_inv"]
    put(folder, weights, quantization_config=FP8)
    return "has model.layers.1.mlp.up_proj.weight in F8_E4M3 without a scale", "fetch all of its files again"


def float8_whose_blocks_do_not_fit(folder):
    weights = in_float8(write(folder))
    weights["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(5, 2)
    put(folder, weights, quantization_config=FP8)
    return "model.layers.1.mlp.up_proj.weight cannot be read (", "not divisible by scale grid (5, 2)"


def int8_without_the_package_that_reads_it(folder):
    put(folder, write(folder), quantization_config=COMPRESSED)
    return "its weights are quantized (compressed-tensors) and cannot be dequantized", "not quantized"


def a_method_that_is_not_turned_back(folder):
    put(folder, write(folder), quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    return "(gptq) and cannot be dequantized: transformers does not", "choose weights that are not quantized"


REFUSED = [a_head_of_its_own_that_is_tied, an_adapter_beside_weights, pickles_alone, gguf_alone, a_config_alone]
REFUSED += [shards_without_an_index, a_shard_that_is_missing, a_tensor_that_is_missing]
REFUSED += [a_file_that_is_cut, float8_without_a_config, float8_without_the_scale_of_one_weight]
REFUSED += [float8_whose_blocks_do_not_fit, int8_without_the_package_that_reads_it, a_method_that_is_not_turned_back]


@pytest.mark.parametrize("folder", REFUSED, ids=lambda make: make.__name__)
def test_a_folder_that_cannot_be_read_so_is_one_line_that_says_what_to_do(device, tmp_path, folder):
    problem, advice = (text.format(tmp_path / "odd") for text in folder(tmp_path / "odd"))
    with pytest.raises(UserError) as raised:
        read(tmp_path / "odd", tmp_path / "export", device)
    message = str(raised.value)
    assert message.startswith(("--init pretrained: ", "--model ")) and "\n" not in message
    assert problem in message and advice in message
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model-00001-of-00002.bin", "model-q8.gguf", "training_args.bin"]
)
def test_weights_of_any_format_that_are_not_read_are_a_warning(tmp_path, name):
    write(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / name)
    warning = describe_ignored_weights(str(tmp_path / "model"))
    assert warning.startswith("random weights: ") == (name != "training_args.bin")


def test_weights_that_are_not_read_may_be_as_they_like(device, tmp_path):
    """Random weights need only a config, and an export drops the quantization from it."""
    float8_without_a_config(tmp_path / "model")
    put(tmp_path / "model", {}, "adapter_model.safetensors", quantization_config=FP8)
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    flags = f"--model {tmp_path / 'model'} --dataset synthetic --output-dir {tmp_path} --export {tmp_path / 'export'}"
    assert train([*SMALL, *words(flags)], device) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.float32
