"""Checkpoints and exports of --lora-rank: adapters alone, which peft, transformers and a resumed run load."""

import json
import re
import shlex
import shutil
import types

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import tensors_of
from conftest import forked, losses_of, metrics_of, parse, slow_case, train, words
from multirank import SIZES, program
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import train_fsdp
import utils
from harness import base
from harness import model as models
from harness.job import preflight

FLAGS = "--init pretrained --lora-rank 2 --precision fp32 --no-compile --sequence-length 32 --batch-size 4 --lr 1e-2"
FLAGS += " --num-workers 0 --dataset demo --log-interval 1 --num-steps 4 --warmup-steps 0 --lr-scheduler constant"
ADAPTERS_FILE = "adapter_model.safetensors"
IDS = torch.arange(24).view(1, 24) * 7


@pytest.fixture
def flags(workspace, tmp_path):
    """`flags(model)`: a run with adapters on a model of the workspace with weights, or on a folder."""

    def flags_for(model, *others) -> list[str]:
        tokenizer, cache = workspace / "tokenizer", workspace / "cache"
        where = ["--tokenizer", tokenizer, "--cache-dir", cache, "--output-dir", tmp_path / "out", "--run-name", "r"]
        return [*map(str, ["--model", workspace / "checkpoints" / model, *words(FLAGS), *where, *others])]

    return flags_for


@pytest.fixture
def built(monkeypatch) -> list:
    """The models that a run has built."""
    kept, build = [], train_fsdp.build_model
    monkeypatch.setattr(
        train_fsdp, "build_model", lambda *args, **options: kept.append(build(*args, **options)) or kept[-1]
    )
    return kept


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("which", ["adapters", "merged"])
def test_the_best_of_a_run_is_exported_as_the_run_was_asked_to(flags, device, tmp_path, capfd, which):
    best = "--keep-best --eval-interval 2 --eval-steps 1 --checkpoint-interval 2 --export-weights"
    assert train(flags("llama", *words(best), which, "--export", tmp_path / "last"), device) == 0
    line = re.search(r"^best .* exported by: (.*)$", capfd.readouterr().out, re.MULTILINE)
    command = shlex.split(line[1])
    assert train(command[command.index("--export-weights") :], device) == 0
    config_name = "adapter_config.json"
    for folder in (tmp_path / "last", tmp_path / "out" / "r-best"):
        assert (folder / config_name).exists() == (which == "adapters")
        assert (folder / "config.json").exists() == (which == "merged")


@pytest.mark.parametrize("name", ["llama", "smollm3", "qwen3_moe", "gpt2"])
def test_peft_and_transformers_load_an_export_with_the_logits_of_the_run(
    workspace, flags, built, device, tmp_path, name
):
    """With an untied and a tied head, experts in one weight, and weights that are stored transposed."""
    folders = {kind: tmp_path / kind for kind in ("adapters", "merged")}
    assert train(flags(name, "--export", folders["adapters"]), device) == 0
    trained = logits_of(built[0])
    merged = ["--num-steps", 0, "--resume", tmp_path / "out" / "r", "--export", folders["merged"]]
    assert train([*merged, "--export-weights", "merged"], device) == 0
    plain = AutoModelForCausalLM.from_pretrained(workspace / "checkpoints" / name, dtype=torch.float32)
    assert (logits_of(plain) - trained).abs().max() > 1e-3
    by_peft = peft.PeftModel.from_pretrained(plain, folders["adapters"])
    assert (logits_of(by_peft) - trained).abs().max() < 1e-5
    merged_model = AutoModelForCausalLM.from_pretrained(folders["merged"], dtype=torch.float32)
    assert (logits_of(merged_model) - trained).abs().max() < 1e-5
    assert not {path.name for path in folders["adapters"].iterdir()} & {"config.json", "model.safetensors"}


DENSE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}  # and experts beside it
SHARED = DENSE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
SHARED |= {"topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8}
MIXED = {  # {family: (its config, linears that peft reads as experts or refuses)}
    "qwen3_moe": (DENSE | {"num_experts": 4, "mlp_only_layers": [0], "head_dim": 16}, "gate_proj, up_proj, down_proj"),
    "deepseek_v2": (SHARED | LATENT, "gate_proj, up_proj, down_proj"),
    "dots1": (SHARED, "gate_proj, up_proj, down_proj"),
    "glm4_moe": (SHARED, "gate_proj, up_proj, down_proj"),
    "ernie4_5_moe": ({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}, "gate_proj, up_proj, down_proj"),
    "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2, "head_dim": 16}, "gate_proj, up_proj, down_proj"),
    "nemotron_h": (MAMBA | DENSE | {"n_routed_experts": 4, "moe_shared_expert_intermediate_size": 32}, "out_proj"),
    "qwen2_moe": (DENSE | {"num_experts": 4, "shared_expert_intermediate_size": 32}, ""),
}


@pytest.mark.parametrize("family", [f if f in ("qwen3_moe", "nemotron_h") else slow_case(f) for f in MIXED])
def test_linears_whose_adapters_peft_does_not_load_have_none_and_are_named(
    workspace, flags, built, device, tmp_path, capsys, family
):
    fields, left_out = MIXED[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | fields | {"pad_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    assert train(flags(tmp_path / family, "--export", tmp_path / "adapters"), device) == 0
    found = re.search(r"^adapters .*, not on \d+ linears? \((.*)\): peft has no place", capsys.readouterr().out, re.M)
    assert (found.group(1) if found else "") == left_out
    trained = logits_of(built[0])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
    assert (logits_of(plain) - trained).abs().max() > 1e-3
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    assert (logits_of(by_peft) - trained).abs().max() < 1e-5
    adapted = {name.split(".")[-3] for name in safetensors.torch.load_file(tmp_path / "adapters" / ADAPTERS_FILE)}
    if models.describe_routing(built[0]):  # transformers 5.17 does not know the routers of Hunyuan
        assert adapted and not adapted & {"gate", "wg"}
    for name in left_out.split(", ") if left_out else []:
        with pytest.raises(base.UserError, match=f"--lora-targets {name}: it matches .*, and peft has no place"):
            train(flags(tmp_path / family, "--run-name", "named", "--lora-targets", name), device)


def test_a_checkpoint_has_adapters_and_their_states_and_nothing_of_the_base(flags, device, tmp_path):
    assert train(flags("llama"), device) == 0
    names = tensors_of(tmp_path / "out" / "r" / "checkpoints" / "step-00000004").keys()
    tensors = {name for name in names if name.startswith(("model.", "optimizer."))}
    assert tensors and all(".lora_" in name for name in tensors)
    assert len(tensors) == 2 * 7 * 2 * (1 + 3)  # of 2 layers, 7 linears, A and B: the weight and AdamW's states


@pytest.mark.slow
def test_a_run_continues_after_a_kill_on_other_ranks_as_if_uninterrupted(flags, tmp_path):
    """Two ranks, killed after their second checkpoint; then four, then one."""
    batch = {ranks: ["--batch-size", 8 // ranks] for ranks in (1, 2, 4)}
    whole = flags("llama", "--checkpoint-interval", 2, "--keep-checkpoints", 9, "--num-steps", 6)
    forked(2, program, *whole, *map(str, batch[2]), "--export", str(tmp_path / "expected"))
    run = tmp_path / "out" / "r"
    expected, adapters = losses_of(run), tensors_of(run / "checkpoints" / "step-00000006", "model.")
    for ranks in (4, 1):
        shutil.rmtree(run / "checkpoints" / "step-00000006")
        (run / "checkpoints" / ".step-00000006.writing").mkdir()
        forked(ranks, program, *whole, "--resume", "auto")
        assert losses_of(run) == pytest.approx(expected, rel=1e-6)
        for name, tensor in tensors_of(run / "checkpoints" / "step-00000006", "model.").items():
            assert torch.allclose(tensor, adapters[name], atol=1e-6), (ranks, name)


def test_another_base_or_other_adapters_are_no_resume(workspace, flags, device, tmp_path):
    base_folder = tmp_path / "base"
    shutil.copytree(workspace / "checkpoints" / "llama", base_folder)
    asked = ["--model", base_folder, "--checkpoint-interval", 2]
    assert train(flags("llama", *asked), device) == 0
    model = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    changes = {
        "--lora-rank was 2": ["--lora-rank", 3, "--lora-alpha", 4],
        "--lora-alpha was 4": ["--lora-alpha", 2],
        "--lora-targets was None": ["--lora-targets", "q_proj"],
    }
    again = [*asked, "--resume", "auto", "--num-steps", 6]
    for problem, change in changes.items():
        with pytest.raises(base.UserError, match=problem):
            train(flags("llama", *again, *change), device)
    model.save_pretrained(base_folder)
    for command in (
        flags("llama", *again),
        ["--num-steps", 0, "--resume", tmp_path / "out" / "r", "--export", tmp_path / "e"],
    ):
        with pytest.raises(base.UserError, match="the checkpoint's adapters were trained for other weights"):
            train(command, device)


def test_the_same_base_in_other_files_is_a_resume(workspace, flags, device, tmp_path):
    """Qwen3's norms of queries and keys are small tensors: the bytes after them differ between divisions into files."""
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(workspace / "models" / "qwen3"))
    for name, size in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 5
    assert train(flags(tmp_path / "one", "--checkpoint-interval", 2), device) == 0
    again = ["--checkpoint-interval", 2, "--resume", "auto", "--num-steps", 6]
    assert train(flags(tmp_path / "many", *again), device) == 0
    with torch.no_grad():
        model.model.layers[1].self_attn.q_norm.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(base.UserError, match="adapters were trained for other weights"):
        train(flags(tmp_path / "other", *again, "--num-steps", 8), device)


@pytest.mark.parametrize("which", ["adapters", "merged"])
def test_the_room_for_an_export_is_that_of_the_weights_that_it_writes(flags, device, tmp_path, monkeypatch, which):
    asked = ["--export-weights", which, "--export", tmp_path / "e"]
    assert train(flags("llama", *asked, "--export", tmp_path / "written"), device) == 0
    (path,) = (tmp_path / "written").glob("*.safetensors")
    size = sum(tensor.nbytes for tensor in safetensors.torch.load_file(path).values())
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 0 if folder == tmp_path / "e" else 10**12)
    with pytest.raises(base.UserError, match=r"^--export .*: it takes .*, there are 0") as raised:
        train(flags("llama", *asked, "--run-name", "again"), device)
    takes = re.search(r"it takes (\S+) (kB|MB)", str(raised.value))
    assert float(takes[1]) * {"kB": 1e3, "MB": 1e6}[takes[2]] == pytest.approx(size, rel=0.01)


def test_an_export_of_adapters_says_how_answers_end(flags, device, tmp_path):
    """Answers end by the end token of the base, and by the one of the texts in training."""
    exported = ["--export", tmp_path / "adapters"]
    assert train(flags("llama", *exported), device) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapters")
    ends = transformers.GenerationConfig.from_pretrained(tmp_path / "adapters").eos_token_id
    assert tokenizer.eos_token_id in ends


def test_training_continues_from_a_folder_of_adapters_on_its_base(workspace, flags, device, tmp_path, capfd):
    adapters, run = tmp_path / "adapters", tmp_path / "out" / "r"
    evaluated = ["--eval-interval", 4, "--eval-steps", 2]
    assert train(flags("llama", "--export", adapters, *evaluated, "--lora-targets", "q_proj", "up_proj"), device) == 0
    loss = next(line["eval_loss"] for line in metrics_of(run) if "eval_loss" in line)
    continued = without_rank(flags(adapters, *evaluated))
    assert train([*continued, "--run-name", "second", "--lr", "1e-12"], device) == 0
    second = metrics_of(tmp_path / "out" / "second")
    assert next(line["eval_loss"] for line in second if "eval_loss" in line) == pytest.approx(loss, rel=1e-6)
    given = json.loads((tmp_path / "out" / "second" / "config.json").read_text())["flags"]
    assert (given["lora_rank"], given["lora_alpha"], given["lora_targets"]) == (2, 4, ["q_proj", "up_proj"])
    config = base.read_json(adapters / base.ADAPTER_CONFIG)
    for flag, value, has in (("--lora-rank", "0", 2), ("--lora-rank", "3", 2), ("--lora-alpha", "5", 4)):
        with pytest.raises(base.UserError, match=rf"{flag} {value}: the adapters of .* have {has}; leave it out"):
            parse([*continued, flag, value])
    (adapters / base.ADAPTER_CONFIG).write_text(json.dumps(config | {"lora_dropout": 0.05}))
    assert train([*continued, "--run-name", "undropped", "--num-steps", 1], device) == 0
    assert capfd.readouterr().err.count("had a dropout of 0.05; training continues without") == 1
    wrong = {
        "is not there": config | {"base_model_name_or_path": "/nowhere/llama"},
        "do not name the model": config | {"base_model_name_or_path": None},
        "has use_dora true, and adapters here are plain LoRA; merge": config | {"use_dora": True},
        "its adapters have base_model": config | {"target_modules": ["q_proj"]},
    }
    for problem, content in wrong.items():
        (adapters / base.ADAPTER_CONFIG).write_text(json.dumps(content))
        with pytest.raises(base.UserError, match=problem):
            train([*continued, "--run-name", "third"], device)


MALFORMED = {
    '"r": null': "has r null; give a positive integer",
    '"r": 0': "has r 0; give a positive integer",
    '"r": -3': "has r -3; ",
    '"r": 4.5': "has r 4.5; ",
    '"r": true': "has r true; ",
    '"r": "x"': 'has r "x"; ',
    '"r": [4]': "has r [4]; ",
    '"r": {}': "has r {}; ",
    '"lora_alpha": null': "has lora_alpha null; give a positive integer",
    '"lora_alpha": 0': "has lora_alpha 0; ",
    '"lora_alpha": [1]': "has lora_alpha [1]; ",
    '"lora_alpha": Infinity': "has lora_alpha Infinity; ",
    '"target_modules": null': "has target_modules null; give a list of names of linears",
    '"target_modules": 5': "has target_modules 5; ",
    '"target_modules": []': "has target_modules []; ",
    '"target_modules": ["q_proj", 5]': 'has target_modules ["q_proj", 5]; ',
    '"target_modules": ""': 'has target_modules ""; ',
    '"base_model_name_or_path": ["a"]': 'has base_model_name_or_path ["a"]; give the folder or hub id',
    '"peft_type": "IA3"': 'has peft_type "IA3"; only "LORA" is supported',
    '"peft_type": null': "has peft_type null; ",
    "target_modules": "lacks target_modules; ",
    "peft_type": "lacks peft_type; ",
    "[]": "cannot be read (no object)",
    "{": "cannot be read (Expecting property name",
}


@pytest.fixture
def adapters(workspace, tmp_path):
    """A folder of adapters whose adapter_config.json a test writes."""
    folder, plain = tmp_path / "adapters", AutoModelForCausalLM.from_pretrained(workspace / "checkpoints" / "llama")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(plain, config).save_pretrained(folder)
    return folder


def without_rank(command: list[str]) -> list[str]:
    """A command without its --lora-rank and --init."""
    first = command.index("--init")
    return command[:first] + command[first + 4 :]


def test_an_adapter_config_that_cannot_be_followed_is_one_line(flags, adapters):
    path = adapters / base.ADAPTER_CONFIG
    config = json.loads(path.read_text())
    for given, problem in MALFORMED.items():
        if given.startswith('"'):
            text = json.dumps(config | json.loads("{" + given + "}"))
        else:
            text = given if given in ("[]", "{") else json.dumps({key: config[key] for key in config.keys() - {given}})
        path.write_text(text)
        with pytest.raises(base.UserError) as raised:
            parse(without_rank(flags(adapters)))
        line = str(raised.value)
        assert line.startswith(f"--model {adapters}: adapter_config.json {problem}") and "\n" not in line, given


def test_a_missing_rank_or_alpha_is_that_of_peft(flags, adapters):
    """The defaults of its LoraConfig."""
    path = adapters / base.ADAPTER_CONFIG
    config = json.loads(path.read_text())
    for lacking in ({"r"}, {"lora_alpha"}, {"r", "lora_alpha"}):
        path.write_text(json.dumps({key: config[key] for key in config.keys() - lacking}))
        settings, loaded = parse(without_rank(flags(adapters))), peft.PeftConfig.from_pretrained(adapters)
        assert (settings.lora_rank, settings.lora_alpha) == (loaded.r, loaded.lora_alpha)
        assert (settings.init, settings.lora_targets) == ("pretrained", ("q_proj", "v_proj"))


def test_adapters_without_a_rank_in_their_config_have_the_logits_that_peft_gives(
    workspace, flags, adapters, built, device
):
    path = adapters / base.ADAPTER_CONFIG
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in config.keys() - {"r", "lora_alpha"}}))
    assert train([*without_rank(flags(adapters)), "--lr", "1e-12"], device) == 0
    plain = AutoModelForCausalLM.from_pretrained(workspace / "checkpoints" / "llama", dtype=torch.float32)
    by_peft = peft.PeftModel.from_pretrained(plain, adapters)
    assert (logits_of(by_peft) - logits_of(built[0])).abs().max() < 1e-5


@pytest.mark.parametrize("wrong", ["r", "base_model_name_or_path"])
def test_adapters_of_another_rank_or_model_than_their_config_has_are_one_line(
    workspace, flags, adapters, device, tmp_path, wrong
):
    narrow = transformers.AutoConfig.from_pretrained(workspace / "checkpoints" / "llama", hidden_size=32)
    AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "narrow")
    others = {"r": 4, "base_model_name_or_path": str(tmp_path / "narrow")}
    path = adapters / base.ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {wrong: others[wrong]}))
    with pytest.raises(
        base.UserError, match=r"--model .*: .*q_proj.lora_..weight has the shape .*; set r and base_mod"
    ):
        train(without_rank(flags(adapters)), device)


def test_without_a_step_adapters_are_evaluated_averaged_and_continued(flags, device, tmp_path, capsys):
    run = tmp_path / "out" / "r"
    saved = ["--checkpoint-interval", 2, "--keep-checkpoints", 9, "--eval-interval", 4, "--eval-steps", 2]
    assert train(flags("llama", *saved), device) == 0
    loss = next(line["eval_loss"] for line in metrics_of(run) if "eval_loss" in line)
    shown = ["--num-steps", 0, "--resume", run, "--eval-interval", 1, "--json"]
    capsys.readouterr()
    assert train([*shown, "--sample-prompt", "Once", "--sample-tokens", 4], device) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(loss, rel=1e-6)
    mean = ["--num-steps", 0, "--resume", run, "--average-checkpoints", 2, "--export", tmp_path / "mean"]
    assert train(mean, device) == 0
    both = [tensors_of(run / "checkpoints" / f"step-0000000{step}", "model.") for step in (2, 4)]
    for name, tensor in safetensors.torch.load_file(tmp_path / "mean" / ADAPTERS_FILE).items():
        name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.allclose(tensor, (both[0][name] + both[1][name]) / 2)


REFUSED = {
    "--precision fp8 --fp8-emulate": "--lora-rank: not with --precision fp8",
    "--optimizer muon": "--lora-rank: not with --optimizer muon",
    "--init random": "--lora-rank: the weights are random",
    "--lora-targets lm_head": "lm_head: it matches lm_head, and adapters are for linears of decoder layers",
    "--lora-targets embed_tokens": "it matches model.embed_tokens",
    "--lora-targets input_layernorm": "it matches model.layers.0.input_layernorm",
    "--lora-targets q_proj w1": "--lora-targets w1: ",
    "--lora-targets q_proj .*proj": "--lora-targets: a pattern is given with others",
    "--lora-targets (": "--lora-targets (: it is no pattern",
    "--lora-rank 0 --lora-alpha 2": "--lora-alpha: only with --lora-rank",
    "--export-weights merged": "--export-weights: only with --export",
    "--lora-rank 0 --export e --export-weights merged": "--export-weights: without --lora-rank",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_adapters_cannot_be_is_one_line(flags, device, given):
    with pytest.raises(base.UserError) as raised:
        train(flags("llama", *words(given)), device)
    assert REFUSED[given] in str(raised.value) and "\n" not in str(raised.value)


def test_experts_in_one_weight_are_refused_by_any_name_for_them(flags, device):
    for target in ("gate_up_proj", "down_proj", ".*mlp.*", "gate"):
        with pytest.raises(base.UserError, match=r"--lora-targets .*q_proj, k_proj, v_proj, o_proj"):
            train(flags("qwen3_moe", "--lora-targets", target), device)


def test_quantized_weights_are_refused(workspace, flags, device, tmp_path):
    shutil.copytree(workspace / "checkpoints" / "llama", tmp_path / "quantized")
    path = tmp_path / "quantized" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(config))
    with pytest.raises(base.UserError, match="are quantized"):
        train(flags(tmp_path / "quantized"), device)


@pytest.mark.skipif(
    transformers.__version__ < "5.18", reason="transformers 5.17 has a product for rotary angles, which torch counts"
)
@pytest.mark.parametrize("targets", [None, slow_case("o_proj"), "v_proj", slow_case("down_proj")])
def test_flops_of_adapters_are_those_that_torch_counts(workspace, flags, device, targets):
    """A frozen weight has no gradient, and before the first adapter nothing has. Checked for a sharded model, one of
    peft's, and one whose embedding alone is frozen."""
    chosen = ["--lora-targets", targets] if targets else []
    settings = parse(flags("llama", *chosen, "--attention", "eager"))
    config = models.load_config(settings.model)
    from harness import resolving

    settings = resolving.resolve_steps(resolving.resolve(settings, config))
    sharded = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    plain = AutoModelForCausalLM.from_pretrained(settings.model, attn_implementation="eager", dtype=torch.float32)
    all_linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    by_peft = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=[targets] if targets else all_linears))
    with FlopCounterMode(display=False) as counter:
        by_peft(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for model in (sharded, by_peft, by_peft.base_model.model):
        assert utils.get_model_flops_per_token(model, IDS.numel()) == round(counter.get_total_flops() / IDS.numel())
        shorter, _ = utils.get_flops_by_length(model, np.array([8, IDS.numel()]))
        assert shorter == pytest.approx(utils.get_model_flops_per_token(model, 8), rel=1e-9)
    assert utils.get_model_flops_per_token(sharded, 32) < 0.8 * utils.get_model_flops_per_token(config, 32)


@pytest.mark.parametrize("optimizer", ["adamw-bf16", slow_case("adamw8bit")])
def test_other_optimizers_train_adapters_and_resume(flags, device, tmp_path, optimizer):
    chosen = ["--optimizer", optimizer, "--checkpoint-interval", 2, "--keep-checkpoints", 9]
    assert train(flags("llama", *chosen), device) == 0
    last = tmp_path / "out" / "r" / "checkpoints" / "step-00000004"
    adapters = tensors_of(last, "model.")
    assert all(tensor.any() for tensor in adapters.values())  # B too, which begins at zero
    shutil.rmtree(last)
    assert train(flags("llama", *chosen, "--resume", "auto"), device) == 0
    again = tensors_of(last, "model.")
    assert all(torch.equal(again[name], tensor) for name, tensor in adapters.items())


def test_a_model_that_no_gpu_has_room_for_is_refused_before_it_is_read(monkeypatch):
    """A frozen weight takes its own bytes, a trained one its gradient's too."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=2**32))
    with torch.device("meta"):
        model = torch.nn.Linear(2**14, 2**15, bias=False, dtype=torch.float32)  # 2 GiB
    gpu = torch.device("cuda", 0)
    models.check_gpu_memory(model, gpu, 2)
    model.weight.data = model.weight.data.double()
    with pytest.raises(
        base.UserError, match=r"8 GiB of weights and gradients for each rank, and its GPU has 4 GiB; .*--lora"
    ):
        models.check_gpu_memory(model, gpu, 1)
    model.requires_grad_(False)
    models.check_gpu_memory(model, gpu, 1)
