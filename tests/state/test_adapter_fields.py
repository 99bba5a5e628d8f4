"""A folder of adapters computes what peft computes with it, whatever its adapter_config.json has, or is refused."""

import json
import math
import shutil

import huggingface_hub
import peft
import pytest
import torch
import transformers
from checkpoints import logits_of
from conftest import SMALL, parse, train, words
from multirank import resolved
from transformers import AutoModelForCausalLM

import train_fsdp
from harness import base

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
    {"target_modules": ["q_proj", "w1"], "init_lora_weights": False},
    {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
    {"target_modules": r".*layers\.1\..*proj", "init_lora_weights": "eva"},
    {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"], "init_lora_weights": "orthogonal"},
    {"exclude_modules": r".*layers\.0\..*"},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"layers_to_transform": 0, "bias": "all"},
    {"use_rslora": True},
]
REFUSED = {
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica"],
    "rank_pattern": [{"q_proj": 2}, {".*layers.1.*": 2}],
    "modules_to_save": [["lm_head"]],
    "use_dora": [True],
}


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


def build(folder, device):
    settings, config = resolved(["--model", folder, *words("--precision fp32 --no-compile --sequence-length 32")])
    return train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)


def has_pefts_logits(plain, folder, device) -> bool:
    """Compare what a run begins with and what peft computes with a folder of adapters, which differs from the base."""
    unadapted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    before = logits_of(unadapted)
    theirs = logits_of(peft.PeftModel.from_pretrained(unadapted, folder))
    assert (theirs - before).abs().max() > 1e-2
    return (logits_of(build(folder, device)) - theirs).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: str(fields)[1:60])
def test_what_peft_computes_with_adapters_is_what_a_run_begins_with(plain, device, tmp_path, fields, capfd):
    save_adapters(plain, tmp_path, **fields)
    assert has_pefts_logits(plain, tmp_path, device)
    warnings = capfd.readouterr().err.count("had a dropout of 0.1; training continues without")
    assert warnings == ("lora_dropout" in fields)


@pytest.mark.parametrize("lacking", [("r",), ("lora_alpha",), ("r", "lora_alpha")], ids=str)
def test_a_missing_rank_or_alpha_is_pefts_default(plain, device, tmp_path, lacking):
    save_adapters(plain, tmp_path, r=8, lora_alpha=8)
    config = base.read_json(tmp_path / base.ADAPTER_CONFIG)
    (tmp_path / base.ADAPTER_CONFIG).write_text(json.dumps({key: config[key] for key in config if key not in lacking}))
    settings = parse(["--model", tmp_path])
    assert (settings.lora_rank, settings.lora_alpha) == (8, 8)
    assert (settings.init, settings.lora_targets) == ("pretrained", ("q_proj", "v_proj"))
    assert has_pefts_logits(plain, tmp_path, device)


@pytest.fixture
def adapters(plain, tmp_path):
    """`adapters(**fields)`: a folder of adapters with these fields in its config; ... leaves a field out."""
    save_adapters(plain, tmp_path / "adapters")
    path = tmp_path / "adapters" / base.ADAPTER_CONFIG
    written = base.read_json(path)

    def with_fields(**fields):
        path.write_text(json.dumps({key: value for key, value in (written | fields).items() if value is not ...}))
        return path.parent

    return with_fields


MALFORMED = {  # field: its values, and what is wanted
    "r": ([None, 0, 4.5, True, "x", math.inf], "give a positive integer"),
    "lora_alpha": ([None, 0], "give a positive integer"),
    "target_modules": ([None, [], ["q_proj", 5], ""], "give a list of names of linears, or a pattern"),
    "base_model_name_or_path": ([["a"]], "give the folder or hub id of the base model"),
    "revision": ([5], "give a revision of the base model"),
    "peft_type": (["IA3", None], 'only "LORA" is supported'),
}


def test_an_adapter_config_that_cannot_be_followed_is_one_line(adapters):
    def line(folder) -> str:
        with pytest.raises(base.UserError) as raised:
            parse(["--model", folder])
        return str(raised.value).removeprefix(f"--model {folder}: adapter_config.json ")

    for field, (values, wanted) in MALFORMED.items():
        for value in values:
            assert line(adapters(**{field: value})) == f"has {field} {json.dumps(value)}; {wanted}"
    for field in ("target_modules", "peft_type"):
        assert line(adapters(**{field: ...})) == f"lacks {field}; {MALFORMED[field][1]}"
    for text, problem in (("[]", "no object"), ("{", "Expecting property name enclosed")):
        folder = adapters()
        (folder / base.ADAPTER_CONFIG).write_text(text)
        assert line(folder).startswith(f"cannot be read ({problem}")


WRONG = [  # fields, and the error; NARROW is a model of half the width
    ({"base_model_name_or_path": "/nowhere/llama"}, "is not there"),
    ({"base_model_name_or_path": None}, "do not name the model"),
    ({"base_model_name_or_path": "NARROW"}, r"q_proj.lora_..weight has the shape .*; set r and base_mod"),
    ({"r": 8}, r"q_proj.lora_..weight has the shape .*; set r and base_mod"),
    ({"target_modules": ["q_proj"]}, "its adapters have base_model"),
    ({"layers_pattern": "layers"}, r"peft refuses its adapter_config.json \(.*layers_to_transform"),
]


@pytest.mark.parametrize("fields, problem", WRONG, ids=lambda value: str(value)[:50])
def test_adapters_that_their_config_does_not_fit_are_one_line(plain, adapters, device, tmp_path, fields, problem):
    if "NARROW" in fields.values():
        narrow = transformers.AutoConfig.from_pretrained(plain, hidden_size=32)
        AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "narrow")
        fields = {"base_model_name_or_path": str(tmp_path / "narrow")}
    with pytest.raises(base.UserError, match=problem):
        build(adapters(**fields), device)


def test_what_changes_the_forward_the_base_or_what_is_trained_is_one_line(adapters, device):
    for field, value in ((field, value) for field, values in REFUSED.items() for value in values):
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
    expected = logits_of(build(adapters(), device))
    assert "use_something_new" not in capfd.readouterr().err
    assert torch.equal(logits_of(build(adapters(use_something_new=True, runtime_config={}), device)), expected)
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "warning" in line)
    assert f"has use_something_new, which peft {peft.__version__} does not know and ignores" in line


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
    base_name = {"base_model_name_or_path": "me/base"}
    main_logits = logits_of(build(adapters(**base_name), device))
    folder = adapters(**base_name, revision="old")
    theirs = logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert (theirs - main_logits).abs().max() > 1e-2
    assert (logits_of(build(folder, device)) - theirs).abs().max() < 1e-5
    command = ["--model", folder, "--dataset", "demo", "--export", tmp_path / "export", "--output-dir", tmp_path]
    assert train([*SMALL, *command, "--cache-dir", tmp_path / "cache"], device) == 0
    exported = base.read_json(tmp_path / "export" / base.ADAPTER_CONFIG)
    assert (exported["base_model_name_or_path"], exported["revision"]) == ("me/base", "old")
    with pytest.raises(base.UserError, match="for me/base at revision new, which is no folder and not available"):
        build(adapters(**base_name, revision="new"), device)


@pytest.mark.filterwarnings("ignore")
def test_the_scale_of_rslora_is_in_both_exports(plain, adapters, device, tmp_path):
    run = ["--model", adapters(use_rslora=True), "--tokenizer", plain.parents[1] / "tokenizer", "--dataset", "demo"]
    places = ["--output-dir", tmp_path, "--run-name", "r", "--cache-dir", tmp_path / "cache"]
    assert train([*SMALL, *run, *places, "--export", tmp_path / "tuned"], device) == 0
    merged = ["--num-steps", 0, "--resume", tmp_path / "r", "--export", tmp_path / "merged"]
    assert train([*merged, "--export-weights", "merged"], device) == 0
    unadapted = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    theirs = logits_of(peft.PeftModel.from_pretrained(unadapted, tmp_path / "tuned"))
    ours = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert base.read_json(tmp_path / "tuned" / base.ADAPTER_CONFIG)["use_rslora"] is True
    assert (ours - theirs).abs().max() < 1e-5
