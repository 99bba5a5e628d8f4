"""--plan against real ranks on real tensors, and as its user sees it."""

import concurrent.futures
import json
import re
import sys
import typing

import planranks
import pytest
from conftest import answer_of, copy_with_gpu, forked, metrics_of, parse, start, words, write_model
from multirank import MODELS, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
from harness import base, resolving
from harness import model as models
from harness import plan as planning
from harness.base import UserError
from harness.flags import Attention
from harness.model import load_config
from harness.plan import fake_step, search
from harness.plan.planning import find_warnings
from harness.plan.rates import choose_rates
from harness.plan.recorder import HOST, KINDS

GIB = 2**30

# What a step of the model "deep" sends: its 3 layers and the root (embedding, norm, head) are a group each. A layer is
# gathered for its forward and at stage 3 again for its backward, in each microbatch; the norm of gradients takes one
# all-reduce over shards and one over replicas.
COMMUNICATION = {
    "stage 3": {"all_gather": 2 * 4 - 1, "reduce_scatter": 4, "all_reduce": 1},
    "checkpointed": {"all_gather": 2 * 4 - 1, "reduce_scatter": 4, "all_reduce": 1},
    "offloaded inputs": {"all_gather": 2 * (2 * 4 - 1), "reduce_scatter": 2 * 4, "all_reduce": 1},
    # two exchanges a layer in the forward pass, the same computed again, and their backward pass
    "2 ranks a sequence": {"all_gather": 2 * 4 - 1, "reduce_scatter": 4, "all_reduce": 1, "all_to_all": 3 * 3 * 2},
    "stage 2 in 2 microbatches": {"all_gather": 4, "reduce_scatter": 2 * 4, "all_reduce": 1},
    "deferred in 2 microbatches": {"all_gather": 2 * (2 * 4 - 1), "reduce_scatter": 4, "all_reduce": 1},
    "stage 1 in 4 microbatches": {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1},
    "stage 0": {"all_reduce": 4 + 1},
    "2 replicas in 2 microbatches": {"all_gather": 2 * (2 * 4 - 1), "reduce_scatter": 2 * 4, "all_reduce": 4 + 2},
    # nothing of the root is trained, so nothing of it is reduced
    "adapters": {"all_gather": 2 * 4 - 1, "reduce_scatter": 3, "all_reduce": 1},
    "adapters, stage 2 in 2 microbatches": {"all_gather": 4, "reduce_scatter": 2 * 3, "all_reduce": 1},
    "adapters, stage 0, checkpointed": {"all_reduce": 3 + 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_planned_of_a_step_is_what_real_ranks_hold_and_send(tmp_path, ranks):
    model = write_model(tmp_path / "deep", MODELS["deep"][0], **MODELS["deep"][1])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)  # that adapters are for
    flags = {name: planranks.arguments(model, planranks.CASES[name]) for name in planranks.NAMES[ranks]}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        planning_all = threads.submit(forked, 1, planranks.plan_all, ranks, flags, tmp_path / "planned")
        measured = answer_of(ranks, planranks.measure_all, flags)
        planning_all.result()
    planned = json.loads((tmp_path / "planned").read_text())
    assert planned.keys() == measured.keys() == flags.keys()
    for name, plan in planned.items():
        compare_memory(name, plan, measured[name])
        compare_traffic(name, plan, measured[name]["sent"] if ranks > 1 else {})


def compare_memory(name: str, plan: dict, real: dict) -> None:
    memory, at_peak, in_optimizer = plan["memory_gib"], plan["at_peak_gib"], plan["peaks_gib"]["optimizer"]
    at_rest = real["parameters"] + real["optimizer"]
    # buffers and stacks of matrices of Muon, besides weights, gradients and states
    of_muon = real["in optimizer"] - at_rest - real["gradients"] if "muon" in name else 0
    pairs = {
        "parameters": (memory["parameters"], real["parameters"]),
        "optimizer": (memory["optimizer"], real["optimizer"]),
        "gradients": (in_optimizer["gradients"], real["gradients"]),
        "in the optimizer": (sum(in_optimizer.values()), real["in optimizer"]),
        "total": (memory["total"], real["total"]),
        "host": (memory["host"], real["host"]),
        "passing": (at_peak["gradients"] + at_peak["activations"] + at_peak["communication"], real["total"] - at_rest),
    }
    for part, (gib, nbytes) in pairs.items():
        assert gib * GIB == pytest.approx(nbytes, rel=0.02), (name, part)
    assert memory["gradients"] >= in_optimizer["gradients"], name
    if of_muon:
        assert (in_optimizer["activations"] + in_optimizer["communication"]) * GIB == pytest.approx(of_muon, rel=0.15)
        assert of_muon > 0.1 * real["parameters"], name
    # what a stream allocates serves no other
    held = sorted(filter(None, plan["held_by_streams_gib"]))
    assert [size * GIB for size in held] == pytest.approx(real["held"], rel=0.02), name
    assert memory["total"] <= sum(held) * (1 + 1e-9) < memory["reserved"], name


def compare_traffic(name: str, plan: dict, sent: dict[str, tuple[int, int]]) -> None:
    calls: dict[str, int] = {}
    sizes: dict[str, float] = {}
    for entry in plan["collectives"]:
        kind, others = entry["collective"], (entry["ranks"] - 1) / entry["ranks"]
        calls[kind] = calls.get(kind, 0) + entry["calls"]
        full = entry["gib"] * GIB / others / (2 if kind == "all_reduce" else 1)
        sizes[kind] = sizes.get(kind, 0) + full
    assert calls == {kind: count for kind, (count, _) in sent.items()}, name
    assert sizes == pytest.approx({kind: size for kind, (_, size) in sent.items()}, rel=1e-6), name
    if sent and name in COMMUNICATION:
        assert calls == COMMUNICATION[name], name
    if "all_to_all" in sent and "sequence" in name:  # 128 of 256 tokens of 4 heads, 2 of keys, of 16 bf16 numbers
        assert sizes["all_to_all"] == 3 * 3 * 128 * 16 * 2 * ((4 + 2 + 2) + 4)


@pytest.mark.slow
def test_shallow_models_extrapolate_to_what_the_whole_model_gives(tmp_path):
    """Of ten layers half have no rotary embedding: in turn, of which two shallow models are recorded, or one half after
    the other, where every layer is. It is the same work in another order."""
    ten = SIZES | {"num_hidden_layers": 10, "tie_word_embeddings": True}
    orders = {"in turn": [1, 0] * 5, "halves": [1] * 5 + [0] * 5}
    models = {name: write_model(tmp_path / name, "smollm3", **ten, no_rope_layers=o) for name, o in orders.items()}
    flags = "--gradient-accumulation-steps 5 --optimizer muon --dp-replicate-size 2"
    argvs = {name: planranks.arguments(model, flags) for name, model in models.items()}
    forked(1, planranks.plan_all, 8, argvs, tmp_path / "planned")
    few, every = json.loads((tmp_path / "planned").read_text()).values()
    for part in ("memory_gib", "time_ms"):
        assert few[part] == pytest.approx(every[part], rel=2e-3, abs=2e-5)
    for one, other in zip(few["collectives"], every["collectives"], strict=True):
        assert one.pop("collective") == other.pop("collective")
        assert one == pytest.approx(other, rel=1e-6)
    assert few["flops_executed"] == pytest.approx(every["flops_executed"], rel=1e-6)


# ---- As its user sees it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_as_json_is_one_object_and_writes_nothing(tmp_path):
    """For a GPU that a row was added for; --plan-gpu takes what users call it."""
    script = copy_with_gpu(tmp_path / "program", "Voodoo 7 Ultra", 2.2)
    flags = "--demo --plan --json --plan-gpus 16 --plan-gpu voodoo-7 --gpu-hour-usd 4 --batch-size auto"
    flags += " --sequence-length 512 --num-steps 5000 --plan-seconds 120"  # enough on a busy machine too
    process = start([sys.executable, script, *words(flags), "--output-dir", tmp_path / "runs"])
    assert process.returncode == 0, process.stderr
    plan = json.loads(process.stdout)
    memory = plan["memory_gib"]
    assert (plan["gpu"], plan["capacity_gib"], plan["parameters"]) == ("Voodoo 7 Ultra", 2.2, 2_623_744)
    parts = ("parameters", "gradients", "optimizer", "activations", "communication")
    assert memory["total"] == pytest.approx(sum(plan["at_peak_gib"][part] for part in parts))
    assert all(memory[part] >= plan["at_peak_gib"][part] for part in parts)
    assert memory["total"] < memory["reserved"] <= 2.2
    assert plan["fits"] and plan["largest_batch_size"] > 1
    assert 500 < plan["rates"]["matmul_tflops"] < 1000  # the peak in the row
    hours = 1e9 / plan["tokens_per_sec"] / 3600
    assert plan["cost_per_billion_tokens"] == pytest.approx(hours * 16 * 4)
    hours = 5000 * plan["step_time_ms"] / 1000 / 3600
    tokens = hours * 3600 * plan["tokens_per_sec"]
    assert plan["run"] == pytest.approx({"steps": 5000, "tokens": tokens, "hours": hours, "cost": hours * 16 * 4})
    assert plan["assumptions"]
    assert list(tmp_path.iterdir()) == [script.parent]


@pytest.mark.slow
def test_a_plan_opens_with_the_answer_and_the_advised_command_does_what_it_says(tmp_path):
    """On a card on which the demo does not fit as given."""
    program = [sys.executable, copy_with_gpu(tmp_path, "Voodoo", 1.2)]
    flags = "--plan --demo --no-compile --plan-gpu Voodoo --plan-gpus 2 --sequence-length 512 --batch-size 8"
    command = [*program, *words(flags), "--plan-seconds", "600"]  # enough to compare all, on a busy machine too
    best = json.loads(start([*command, "--json"]).stdout)["fastest"]
    details = start([*command, "--plan-details"]).stdout.partition("\n")[2]
    assert details.startswith("verdict    does not fit: ") and "\nassumptions" in details
    assert f"\ncommand    {best['command']}\n" in details.split("\n\n")[0] + "\n"
    advised = words(best["command"].split("train_fsdp.py ")[1])
    flags = words("--plan --json --plan-seconds 0 --plan-gpu Voodoo --plan-gpus 2")
    again = json.loads(start([*program, *advised, *flags]).stdout)
    assert again["fits"] and best["fits"]
    assert again["memory_gib"]["reserved"] == pytest.approx(best["reserved_gib"])
    assert again["tokens_per_sec"] == pytest.approx(best["tokens_per_sec"])


@pytest.mark.slow
def test_a_model_to_be_tuned_that_does_not_fit_learns_that_adapters_do(tmp_path):
    command = [sys.executable, copy_with_gpu(tmp_path, "Voodoo", 12), *words("--model llama3.2-1b --init pretrained")]
    command += words("--plan --no-compile --plan-gpus 1 --plan-gpu Voodoo --sequence-length 512 --plan-seconds")
    printed = start([*command, 20]).stdout
    assert "\nverdict    does not fit: " in f"\n{printed}" and "\nassumptions" not in printed
    advised = re.search("^adapters   (--lora-rank 16 .*?): ", printed, re.MULTILINE)[1]
    plan = json.loads(start([*command, 0, "--json", *words(advised)]).stdout)
    assert plan["fits"] and plan["trained_parameters"] < 0.02 * plan["parameters"]


def test_what_cannot_be_planned_is_refused(mistake, tmp_path):
    assert mistake("--batch-size", "auto").startswith("--batch-size auto: a CPU's capacity is not known")
    with pytest.raises(UserError, match=r"^--plan-gpus 12: that is 1\.5 nodes of 8 GPUs; plan whole nodes"):
        planning.make_plan(parse(words("--plan --plan-gpus 12")), train_fsdp.RECIPE)
    folder = write_model(tmp_path, "gpt_oss")
    with pytest.raises(UserError, match=r"^--attention flex_attention: a plan has only eager attention for gpt_oss;"):
        planning.make_plan(parse(["--plan", "--model", folder, "--attention", "flex_attention"]), train_fsdp.RECIPE)


@pytest.mark.slow
def test_a_run_ends_with_its_plan_beside_its_metrics(tmp_path):
    flags = "--demo --num-steps 2 --batch-size auto --sequence-length 512 --plan-gpu Voodoo --perf-warmup-steps 0"
    options = ["--output-dir", tmp_path, "--run-name", "run", "--cache-dir", tmp_path / "cache", "--no-compile"]
    script = copy_with_gpu(tmp_path / "program", "Voodoo", 0.7)
    process = start([sys.executable, script, *words(flags), *options])
    assert process.returncode == 0, process.stderr
    assert "planned    --batch-size" in process.stdout
    final = metrics_of(tmp_path / "run")[-1]
    assert 0 < final["predicted_peak_memory_alloc"] < final["predicted_peak_memory_reserved"] <= 0.7
    assert final["predicted_step_time_ms"] > 0
    assert "planned    alloc" in process.stdout


@pytest.mark.parametrize(
    "flags, world, nodes",
    [
        ("", 8, 0),
        ("", 16, 2),
        ("--zero-stage 1", 64, 8),
        ("--zero-stage 0", 16, 0),
        ("--dp-replicate-size 1", 16, 0),  # chosen
        ("--dp-replicate-size 2", 16, 0),
        ("--gpus-per-node 1", 16, 0),
    ],
)
def test_one_shard_group_over_several_nodes_is_named_with_its_alternative(flags, world, nodes):
    settings = parse(["--plan", *words(flags)])
    layouts = search.Search(settings, None, (world,), None, 0, 0).replicas(world)
    line = "; ".join(find_warnings(settings, layouts))
    assert bool(line) == bool(nodes) and (not nodes or f"--dp-replicate-size {nodes}," in line)


@pytest.mark.parametrize("precision, warns", [("fp32", True), ("bf16", False)])
def test_a_plan_of_fp32_warns_that_its_rates_are_those_of_bf16(precision, warns):
    warnings = find_warnings(parse(["--plan", "--precision", precision]), [])
    assert any("those of bf16" in warning for warning in warnings) == warns


# ---- What a plan counts ----------------------------------------------------------------------------------------------

DEMO = "--demo --no-compile --sequence-length 64"
EXPERTS = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
EXPERTS |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "num_experts": 8}


def plans_of(folder, *lines: str) -> list[dict]:
    """The plan of each line of flags, by default for one GPU, made in a process of their own: a plan makes a process
    group."""
    argvs = {str(index): words(line) for index, line in enumerate(lines)}
    forked(1, planranks.plan_all, 1, argvs, folder / "plans")
    return [*json.loads((folder / "plans").read_text()).values()]


@pytest.mark.slow
def test_every_kernel_of_attention_is_planned_without_a_gpu_and_its_package(tmp_path):
    """A run's own plan sees no GPU either. Kernels other than eager save the same."""
    kernels = typing.get_args(Attention)
    plans = plans_of(tmp_path, *(f"{DEMO} --precision bf16 --attention {kernel}" for kernel in kernels))
    totals = {kernel: plan["memory_gib"]["total"] for kernel, plan in zip(kernels, plans, strict=True)}
    assert len(set(totals.values())) == 2 and list(totals.values()).count(totals["eager"]) == 1


@pytest.mark.slow
def test_a_plan_for_a_hundred_thousand_gpus_takes_no_longer_than_another(tmp_path):
    (plan,) = plans_of(tmp_path, f"{DEMO} --dp-replicate-size 12500 --plan-gpus 100000")
    found = {(entry["collective"], entry["ranks"], entry["nodes"]) for entry in plan["collectives"]}
    assert found >= {("all_gather", 8, 1), ("all_reduce", 12_500, 12_500)}


@pytest.mark.slow
def test_a_loss_in_many_chunks_is_planned_with_the_flops_of_full_logits(tmp_path):
    """By three of its eight chunks, as all but the last are alike."""
    plans = plans_of(tmp_path, *(f"{DEMO} --batch-size 512 {loss}" for loss in ("--fused-loss", "--no-fused-loss")))
    assert plans[0]["flops_executed"] == plans[1]["flops_executed"]


@pytest.mark.slow
def test_a_step_that_the_host_bounds_has_one_value_however_often_it_is_planned(tmp_path):
    """The first plan of a process compiles, and what runs for that is no part of a step."""
    model = write_model(tmp_path / "deep", "llama", **SIZES | {"num_hidden_layers": 8})
    first, second = plans_of(tmp_path, *[f"--model {model} --sequence-length 64 --batch-size 1"] * 2)
    assert first["bound_by"] == second["bound_by"] == "host"
    assert first["step_time_ms"] == second["step_time_ms"]


@pytest.mark.slow
def test_experts_in_fp32_are_planned_with_their_flops(tmp_path):
    """Fake tensors take no grouped product but of bf16, and transformers has an operator of its own for others."""
    model = write_model(tmp_path / "model", "qwen3_moe", **EXPERTS, num_experts_per_tok=2)
    kinds = ("bf16 --no-compile", "fp32 --no-compile", "fp32 --compile")
    plans = plans_of(tmp_path, *(f"--model {model} --sequence-length 256 --precision {kind}" for kind in kinds))
    assert len({plan["flops_executed"] for plan in plans}) == 1


@pytest.mark.slow
def test_selective_checkpointing_recomputes_the_products_of_experts(tmp_path):
    model = write_model(tmp_path / "model", "qwen3_moe", **EXPERTS, num_experts_per_tok=8)
    flags = f"--model {model} --batch-size 4 --sequence-length 2048 --activation-checkpointing"
    plans = plans_of(tmp_path, f"{flags} none", f"{flags} selective")
    without, selective = (plan["memory_gib"]["activations"] for plan in plans)
    products = 2 * 4 * 2048 * 8 * (2 * 64 + 64) * 2 / 2**30  # two layers: each expert's gate and up, and down
    assert selective < without - products


@pytest.mark.slow
def test_communicators_are_the_worlds_and_those_of_a_mesh_of_two_dimensions(tmp_path):
    layouts = {"1": 0, "8": 1, "8 --zero-stage 0": 1, "8 --dp-replicate-size 2": 3}
    plans = plans_of(tmp_path, *(f"{DEMO} --plan-gpu H200 --plan-gpus {layout}" for layout in layouts))
    found = [plan["beside_tensors_gib"]["CUDA and NCCL"] for plan in plans]
    assert found == pytest.approx([base.CONTEXT_GIB + count * base.NCCL_GIB for count in layouts.values()])


# flags: gathers of a layer and of the root, reductions, range of the most gradients on the GPU as shares of all
OFFLOADED = {
    "--gradient-accumulation-steps 1": (2, 1, 1, 0, 0.5),  # those of one group, until its reduction
    "--gradient-accumulation-steps 4": (8, 4, 4, 0, 0.5),
    "--gradient-accumulation-steps 4 --zero-stage 2": (1, 1, 4, 0, 0.5),
    "--gradient-accumulation-steps 4 --defer-grad-sync": (8, 4, 1, 1, 1.2),  # those of all layers
    "--gradient-accumulation-steps 4 --zero-stage 1": (1, 1, 1, 1, 1.2),
    "--gradient-accumulation-steps 4 --dp-replicate-size 2": (8, 4, 1, 0.5, 1),  # a shard's sums over microbatches
}


@pytest.mark.slow
def test_states_on_the_host_are_copied_at_each_gather_and_reduction_and_gradients_before_it_are_on_the_gpu():
    forked(1, plan_offloaded)


def plan_offloaded() -> None:
    ranks = 4
    for flags, (of_layers, of_root, reductions, least, most) in OFFLOADED.items():
        args = parse(words(f"--plan {DEMO} --batch-size 1 --cpu-offload {flags}"))
        config = load_config(args.model)
        settings = resolving.resolve(args, config)
        rates = choose_rates(args)
        recorder = fake_step.record_step(settings, train_fsdp.RECIPE, config, ranks, config.num_hidden_layers, rates)
        model = models.trained_on_meta(settings, config)
        full = 4 * sum(parameter.numel() for parameter in model.parameters())  # in fp32
        layers = 4 * sum(p.numel() for layer in models.decoder_layers(model) for p in layer.parameters())
        shards = ranks // settings.dp_replicate_size
        copied = sum(count for key, count in recorder.counts.items() if key[::2] == ("bytes", "host_link"))
        expected = of_layers * layers + of_root * (full - layers) + reductions * full
        assert copied == pytest.approx(expected / shards, rel=0.01), flags
        peaks = [(key, dict(zip(KINDS, peak.tolist(), strict=True))) for key, peak in recorder.peaks().items()]
        on_gpu = max(peak["gradients"] for (stream, *_), peak in peaks if stream is None)
        on_host = max(sum(peak.values()) for (stream, *_), peak in peaks if stream == HOST)
        assert on_host == pytest.approx(4 * full / shards, rel=0.2), flags
        assert least * full <= on_gpu < most * full and on_gpu, flags
        assert not any(peak["parameters"] + peak["optimizer"] for (stream, *_), peak in peaks if stream is None)
