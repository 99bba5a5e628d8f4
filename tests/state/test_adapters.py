"""Checkpoints and exports of --lora-rank: adapters alone, which peft, transformers and a resumed run load."""

import functools
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
from checkpoints import IDS, change, folder_of, logits_of, tensors_of
from conftest import eval_loss_of, forked, losses_of, parse, slow_case, train, words
from multirank import SIZES, program
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import train_fsdp
import utils
from harness import base, resolving
from harness import model as models
from harness.job import preflight

FLAGS = "--precision fp32 --no-compile --sequence-length 32 --batch-size 4 --lr 1e-2"
FLAGS += " --num-workers 0 --dataset demo --log-interval 1 --num-steps 4 --warmup-steps 0 --lr-scheduler constant"
ADAPTERS_FILE = "adapter_model.safetensors"


def run_flags(workspace, folder, model, *others, new: str = "--init pretrained --lora-rank 2") -> list[str]:
    """The flags of a run below a folder with `new` adapters on a model of the workspace with weights, or on a folder;
    without, on a folder of adapters."""
    where = ["--tokenizer", workspace / "tokenizer", "--cache-dir", workspace / "cache", "--output-dir", folder]
    where += ["--run-name", "r", "--model", workspace / "checkpoints" / model]
    return [*map(str, [*words(f"{FLAGS} {new}"), *where, *others])]


@pytest.fixture
def flags(workspace, tmp_path):
    """`flags(model, *others)`: those of a run in tmp_path/r."""
    return functools.partial(run_flags, workspace, tmp_path)


TARGETS = ["q_proj", "up_proj"]
MORE = words("--checkpoint-interval 2 --keep-checkpoints 9 --eval-interval 4 --eval-steps 2 --lora-targets") + TARGETS


@pytest.fixture(scope="module")
def finished(device, workspace, tmp_path_factory):
    """A run that was saved twice, evaluated at its end and exported to ../adapters; tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    assert train(run_flags(workspace, folder, "llama", *MORE, "--export", folder / "adapters"), device) == 0
    return folder / "r"


@pytest.fixture
def built(monkeypatch) -> list:
    """The models that a run has built."""
    kept, build = [], train_fsdp.build_model
    monkeypatch.setattr(
        train_fsdp, "build_model", lambda *args, **options: kept.append(build(*args, **options)) or kept[-1]
    )
    return kept


def test_the_best_of_a_run_is_exported_as_the_run_was_asked_to(flags, device, tmp_path, capfd):
    best = "--keep-best --eval-interval 2 --eval-steps 1 --checkpoint-interval 2 --export-weights merged"
    assert train(flags("llama", *words(best), "--export", tmp_path / "last"), device) == 0
    line = re.search(r"^best .* exported by: (.*)$", capfd.readouterr().out, re.MULTILINE)
    command = shlex.split(line[1])
    assert train(command[command.index("--export-weights") :], device) == 0
    for folder in (tmp_path / "last", tmp_path / "r-best"):
        assert (folder / "config.json").exists() and not (folder / base.ADAPTER_CONFIG).exists()


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


QUICK_FAMILIES = ("llama", "smollm3", "qwen3_moe", "gpt2", "nemotron_h")


def write_base(workspace, folder, family: str) -> str:
    """The base of a family: a model of the workspace, or one of MIXED."""
    if family not in MIXED:
        return str(workspace / "checkpoints" / family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | MIXED[family][0] | {"pad_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "family", [f if f in QUICK_FAMILIES else slow_case(f) for f in ("llama", "smollm3", "gpt2", *MIXED)]
)
def test_peft_and_transformers_load_an_export_with_the_logits_of_the_run(
    workspace, flags, built, device, tmp_path, capsys, family
):
    """With an untied and a tied head, weights that are stored transposed, and experts in one weight. Linears whose
    adapters peft does not load have none, and are named."""
    source, left_out = write_base(workspace, tmp_path / family, family), MIXED.get(family, ({}, ""))[1]
    folders = {kind: tmp_path / kind for kind in ("adapters", "merged")}
    assert train(flags(source, "--export", folders["adapters"]), device) == 0
    found = re.search(r"^adapters .*, not on \d+ linears? \((.*)\): peft has no place", capsys.readouterr().out, re.M)
    assert (found.group(1) if found else "") == left_out
    trained = logits_of(built[0])
    merged = ["--num-steps", 0, "--resume", tmp_path / "r", "--export", folders["merged"]]
    assert train([*merged, "--export-weights", "merged"], device) == 0
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert (logits_of(plain) - trained).abs().max() > 1e-3
    by_peft = peft.PeftModel.from_pretrained(plain, folders["adapters"])
    assert (logits_of(by_peft) - trained).abs().max() < 1e-5
    merged_model = AutoModelForCausalLM.from_pretrained(folders["merged"], dtype=torch.float32)
    assert (logits_of(merged_model) - trained).abs().max() < 1e-5
    assert not {path.name for path in folders["adapters"].iterdir()} & {"config.json", "model.safetensors"}
    adapted = {name.split(".")[-3] for name in safetensors.torch.load_file(folders["adapters"] / ADAPTERS_FILE)}
    if models.describe_routing(built[0]):  # transformers 5.17 does not know the routers of Hunyuan
        assert adapted and not adapted & {"gate", "wg"}
    for name in left_out.split(", ") if left_out else []:
        with pytest.raises(base.UserError, match=f"--lora-targets {name}: it matches .*, and peft has no place"):
            train(flags(source, "--run-name", "named", "--lora-targets", name), device)


def test_a_checkpoint_has_adapters_and_their_states_and_nothing_of_the_base(finished):
    names = {name for name in tensors_of(folder_of(finished, 4)) if name.startswith(("model.", "optimizer."))}
    assert all(".lora_" in name for name in names)
    assert len(names) == 2 * len(TARGETS) * 2 * (1 + 3)  # of 2 layers, A and B: the weight and AdamW's states


@pytest.mark.slow
def test_a_run_continues_after_a_kill_on_other_ranks_as_if_uninterrupted(flags, tmp_path):
    """Two ranks, killed after their second checkpoint; then four, then one."""
    command, run = flags("llama", *words("--checkpoint-interval 2 --keep-checkpoints 9 --num-steps 6")), tmp_path / "r"
    forked(2, program, *command, "--batch-size", "4", "--export", str(tmp_path / "expected"))
    expected, adapters = losses_of(run), tensors_of(folder_of(run, 6), "model.")
    for ranks in (4, 1):
        shutil.rmtree(folder_of(run, 6))
        (run / "checkpoints" / ".step-00000006.writing").mkdir()
        forked(ranks, program, *command, "--resume", "auto")
        assert losses_of(run) == pytest.approx(expected, rel=1e-6)
        for name, tensor in tensors_of(folder_of(run, 6), "model.").items():
            assert torch.allclose(tensor, adapters[name], atol=1e-6), (ranks, name)


def test_other_adapters_are_no_resume(flags, finished, device, tmp_path):
    shutil.copytree(finished, tmp_path / "r")
    for problem, other in {
        "--lora-rank was 2": "--lora-rank 3 --lora-alpha 4",
        "--lora-alpha was 4": "--lora-alpha 2",
        "--lora-targets was ": "--lora-targets q_proj",
    }.items():
        with pytest.raises(base.UserError, match=problem):
            train(flags("llama", *MORE, *words(f"--resume auto --num-steps 6 {other}")), device)


def test_the_same_base_in_other_files_is_a_resume_and_another_base_is_none(workspace, flags, device, tmp_path):
    """Qwen3's norms of queries and keys are small tensors: the bytes after them differ between divisions into files."""
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(workspace / "models" / "qwen3"))
    for name, size in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 5
    again = words("--checkpoint-interval 2 --resume auto --num-steps")
    assert train(flags(tmp_path / "one", *again, 4), device) == 0
    assert train(flags(tmp_path / "many", *again, 6), device) == 0
    with torch.no_grad():
        model.model.layers[1].self_attn.q_norm.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    export = ["--num-steps", 0, "--resume", tmp_path / "r", "--export", tmp_path / "e"]
    for command in (flags(tmp_path / "many", *again, 8), export):
        with pytest.raises(base.UserError, match="the checkpoint's adapters were trained for other weights"):
            train(command, device)


@pytest.mark.parametrize("which", ["adapters", "merged"])
def test_the_room_for_an_export_is_that_of_the_weights_that_it_writes(
    workspace, flags, finished, device, tmp_path, monkeypatch, which
):
    written = finished.parent / "adapters" if which == "adapters" else workspace / "checkpoints" / "llama"
    files = [safetensors.torch.load_file(path) for path in written.glob("*.safetensors")]
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 0 if folder == tmp_path / "e" else 10**12)
    with pytest.raises(base.UserError, match=r"^--export .*: it takes .*, there are 0") as raised:
        train(flags("llama", "--lora-targets", *TARGETS, "--export-weights", which, "--export", tmp_path / "e"), device)
    takes = re.search(r"it takes (\S+) (kB|MB)", str(raised.value))
    assert float(takes[1]) * {"kB": 1e3, "MB": 1e6}[takes[2]] == pytest.approx(size, rel=0.01)


def test_an_export_of_adapters_says_how_answers_end(finished):
    """By the end token of the base, and by the one of the texts in training."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.parent / "adapters")
    ends = transformers.GenerationConfig.from_pretrained(finished.parent / "adapters").eos_token_id
    assert tokenizer.eos_token_id in ends


def test_training_continues_from_a_folder_of_adapters_on_its_base(flags, finished, device, tmp_path):
    continued = flags(finished.parent / "adapters", *words("--eval-interval 4 --eval-steps 2"), new="")
    assert train([*continued, "--lr", "1e-12"], device) == 0
    assert eval_loss_of(tmp_path / "r") == pytest.approx(eval_loss_of(finished), rel=1e-6)
    given = json.loads((tmp_path / "r" / "config.json").read_text())["flags"]
    assert (given["lora_rank"], given["lora_alpha"], given["lora_targets"]) == (2, 4, TARGETS)
    for flag, value, has in (("--lora-rank", "0", 2), ("--lora-rank", "3", 2), ("--lora-alpha", "5", 4)):
        with pytest.raises(base.UserError, match=rf"{flag} {value}: the adapters of .* have {has}; leave it out"):
            parse([*continued, flag, value])


def test_without_a_step_adapters_are_evaluated_and_averaged(finished, device, tmp_path, capsys):
    shown = ["--num-steps", 0, "--resume", finished, "--eval-interval", 1, "--json"]
    capsys.readouterr()
    assert train([*shown, "--sample-prompt", "Once", "--sample-tokens", 4], device) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(eval_loss_of(finished), rel=1e-6)
    mean = ["--num-steps", 0, "--resume", finished, "--average-checkpoints", 2, "--export", tmp_path / "mean"]
    assert train(mean, device) == 0
    both = [tensors_of(folder_of(finished, step), "model.") for step in (2, 4)]
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
    change(tmp_path / "quantized" / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(base.UserError, match="are quantized"):
        train(flags(tmp_path / "quantized"), device)


@pytest.mark.skipif(
    transformers.__version__ < "5.18", reason="transformers 5.17 has a product for rotary angles, which torch counts"
)
@pytest.mark.parametrize("targets", ["down_proj", slow_case(None)])
def test_flops_of_adapters_are_those_that_torch_counts(workspace, flags, device, targets):
    """A frozen weight has no gradient, and before the first adapter nothing has. Checked for a sharded model, one of
    peft's, and one whose embedding alone is frozen."""
    chosen = ["--lora-targets", targets] if targets else []
    settings = parse(flags("llama", *chosen, "--attention", "eager"))
    config = models.load_config(settings.model)
    settings = resolving.resolve_steps(resolving.resolve(settings, config))
    sharded = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device), device)
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


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw8bit"])
def test_other_optimizers_train_adapters_and_resume(flags, device, tmp_path, optimizer):
    chosen = ["--optimizer", optimizer, "--checkpoint-interval", 2, "--keep-checkpoints", 9]
    assert train(flags("llama", *chosen), device) == 0
    last = folder_of(tmp_path / "r", 4)
    adapters = tensors_of(last, "model.")
    assert all(tensor.any() for tensor in adapters.values())  # B too, which begins at zero
    shutil.rmtree(last)
    assert train(flags("llama", *chosen, "--resume", "auto"), device) == 0
    again = tensors_of(last, "model.")
    assert all(torch.equal(again[name], tensor) for name, tensor in adapters.items())


def test_a_model_that_no_gpu_has_room_for_is_refused_before_it_is_read(monkeypatch):
    """A frozen weight takes its own bytes, a trained one its gradient's too if the run trains."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=2**32))
    with torch.device("meta"):
        model = torch.nn.Linear(2**14, 2**15, bias=False, dtype=torch.float32)  # 2 GiB
    gpu = torch.device("cuda", 0)
    trains, evaluates = (types.SimpleNamespace(cpu_offload=False, num_steps=steps) for steps in (1, 0))
    models.check_gpu_memory(trains, model, gpu, 2)
    model.weight.data = model.weight.data.double()
    with pytest.raises(
        base.UserError, match=r"8 GiB of weights and gradients for each rank, and its GPU has 4 GiB; .*--lora"
    ):
        models.check_gpu_memory(trains, model, gpu, 1)
    models.check_gpu_memory(evaluates, model, gpu, 1)
    model.requires_grad_(False)
    models.check_gpu_memory(trains, model, gpu, 1)
