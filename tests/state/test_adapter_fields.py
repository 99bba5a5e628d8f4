"""A folder of adapters computes what peft computes with it, whatever its adapter_config.json has, or is refused."""

import json
import shutil

import huggingface_hub
import peft
import pytest
import torch
from conftest import SMALL, train, words
from multirank import resolved
from transformers import AutoModelForCausalLM

import train_fsdp
from harness import base

IDS = torch.arange(24).view(1, 24) * 7
# Fields by themselves or with others. The model is a llama of two layers, without biases.
HARMLESS = {
    "task_type": None,
    "peft_version": "0.9.0",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "revision": "main",  # of a folder, which has none
    "inference_mode": False,
    "lora_dropout": 0.1,
    "fan_in_fan_out": True,
    "megatron_core": "megatron",
    "ensure_weight_tying": True,
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"scale": "unit"},
    "qalora_group_size": 32,
    "modules_to_save": [],
    "target_parameters": [],
}
TAKEN = [
    HARMLESS,
    {"target_modules": ["q_proj", "w1"]},
    {"target_modules": "all-linear"},
    {"target_modules": r".*layers\.1\..*proj"},
    {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"]},
    {"exclude_modules": r".*layers\.0\..*"},
    {"layers_to_transform": [1]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"bias": "all"},
    {"use_rslora": True},
    {"init_lora_weights": False},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "eva"},
    {"init_lora_weights": "orthogonal"},
]
REFUSED = {
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica"],
    "rank_pattern": [{"q_proj": 2}, {".*layers.1.*": 2}],
    "alpha_pattern": [{"q_proj": 2}],
    "modules_to_save": [["lm_head"]],
    "megatron_config": [{"hidden_size": 4}],
    "trainable_token_indices": [[1]],
    "use_dora": [True],
    "velora_config": [{"num_groups": 2}],
    "alora_invocation_tokens": [[1, 2]],
    "use_qalora": [True],
    "monteclora_config": [{"num_samples": 2}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "lora_bias": [True],
    "target_parameters": [["mlp.experts.down_proj"]],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 1}],
    "kasa_config": [{"beta": 0.1}],
}
OF_OTHER_TESTS = {"peft_type", "base_model_name_or_path", "r", "lora_alpha"}


def test_every_field_of_peft_is_in_a_table():
    fields = {*peft.LoraConfig().to_dict()}
    assert {field for case in [*TAKEN, REFUSED] for field in case} | OF_OTHER_TESTS == fields


@pytest.fixture(scope="module")
def plain(workspace):
    """The folder of a model without adapters."""
    return workspace / "checkpoints" / "llama"


def save_adapters(plain, folder, **fields) -> None:
    """Write a folder of adapters that are not zero, by peft."""
    usual = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(plain), peft.LoraConfig(**usual | fields))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def build(folder, device):
    settings, config = resolved(["--model", folder, *words("--precision fp32 --no-compile --sequence-length 32")])
    return train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: str(fields)[1:60])
def test_what_peft_computes_with_adapters_is_what_a_run_begins_with(plain, device, tmp_path, fields):
    save_adapters(plain, tmp_path / "adapters", **fields)
    ours = logits(build(tmp_path / "adapters", device))
    unadapted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    before = logits(unadapted)
    theirs = logits(peft.PeftModel.from_pretrained(unadapted, tmp_path / "adapters"))
    assert (theirs - before).abs().max() > 1e-2
    assert (ours - theirs).abs().max() < 1e-5


@pytest.fixture
def adapters(plain, tmp_path):
    """A folder of adapters; `set_field(**fields)` writes into its config."""
    save_adapters(plain, tmp_path / "adapters")
    path = tmp_path / "adapters" / base.ADAPTER_CONFIG

    def set_field(**fields):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
        return tmp_path / "adapters"

    return set_field


@pytest.mark.parametrize("field", REFUSED)
def test_what_changes_the_forward_the_base_or_what_is_trained_is_one_line(adapters, device, field):
    for value in REFUSED[field]:
        with pytest.raises(base.UserError) as raised:
            build(adapters(**{field: value}), device)
        line = str(raised.value)
        assert f"adapter_config.json has {field} {json.dumps(value)}, and adapters here are plain LoRA; merge" in line
        assert "\n" not in line


def test_biases_in_the_file_are_one_line(workspace, device, tmp_path):
    save_adapters(workspace / "checkpoints" / "gpt2", tmp_path / "a", bias="all", target_modules=["c_attn"])
    with pytest.raises(base.UserError, match=r"adapter_model.safetensors has .*bias, which is no adapter of a linear"):
        build(tmp_path / "a", device)


def test_a_field_that_peft_does_not_know_is_ignored_with_one_warning(adapters, device, capfd):
    expected = logits(build(adapters(), device))
    assert "use_something_new" not in capfd.readouterr().err
    assert torch.equal(logits(build(adapters(use_something_new=True, runtime_config={}), device)), expected)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "warning" in line)
    assert f"has use_something_new, which peft {peft.__version__} does not know and ignores" in line


def test_a_config_that_peft_refuses_is_one_line(adapters, device):
    with pytest.raises(base.UserError, match=r"peft refuses its adapter_config.json \(.*layers_to_transform"):
        build(adapters(layers_pattern="layers"), device)


@pytest.fixture
def hub(plain, workspace, tmp_path, monkeypatch):
    """A cache of the hub with two revisions of me/base."""
    folder = tmp_path / "hub" / "models--me--base"
    (folder / "refs").mkdir(parents=True)
    for number, revision in enumerate(("main", "old"), 1):
        snapshot = folder / "snapshots" / (str(number) * 40)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(number)
        model.save_pretrained(snapshot)
        shutil.copytree(workspace / "tokenizer", snapshot, dirs_exist_ok=True)
        (folder / "refs" / revision).write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.filterwarnings("ignore")
def test_the_revision_of_the_base_is_that_which_adapters_name(hub, adapters, device, tmp_path):
    main_logits = logits(build(adapters(base_model_name_or_path="me/base"), device))
    folder = adapters(revision="old")
    theirs = logits(peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (theirs - main_logits).abs().max() > 1e-2
    assert (logits(build(folder, device)) - theirs).abs().max() < 1e-5
    command = ["--model", folder, "--dataset", "demo", "--export", tmp_path / "export", "--output-dir", tmp_path]
    assert train([*SMALL, *command, "--cache-dir", tmp_path / "cache"], device) == 0
    exported = base.read_json(tmp_path / "export" / base.ADAPTER_CONFIG)
    assert (exported["base_model_name_or_path"], exported["revision"]) == ("me/base", "old")
    with pytest.raises(
        base.UserError, match="adapters for me/base at revision new, which is no folder and not available"
    ):
        build(adapters(revision="new"), device)


@pytest.mark.filterwarnings("ignore")
def test_the_scale_of_rslora_is_in_both_exports(plain, adapters, device, tmp_path):
    run = ["--model", adapters(use_rslora=True), "--tokenizer", plain.parents[1] / "tokenizer", "--dataset", "demo"]
    places = ["--output-dir", tmp_path, "--run-name", "r", "--cache-dir", tmp_path / "cache"]
    assert train([*SMALL, *run, *places, "--export", tmp_path / "tuned"], device) == 0
    merged = ["--num-steps", 0, "--resume", tmp_path / "r", "--export", tmp_path / "merged"]
    assert train([*merged, "--export-weights", "merged"], device) == 0
    unadapted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    theirs = logits(peft.PeftModel.from_pretrained(unadapted, tmp_path / "tuned"))
    ours = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert base.read_json(tmp_path / "tuned" / base.ADAPTER_CONFIG)["use_rslora"] is True
    assert (ours - theirs).abs().max() < 1e-5
