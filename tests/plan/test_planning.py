"""--plan against real ranks on real tensors, and as its user sees it."""

import concurrent.futures
import json
import sys
import typing

import planranks
import pytest
from conftest import copy_with_gpu, forked, metrics_of, parse, python, start, words, write_model
from multirank import MODELS, SIZES
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
from harness import base, resolving
from harness import model as models
from harness import plan as planning
from harness.flags import Attention
from harness.model import load_config, loss
from harness.plan import fake_step, search
from harness.plan.planning import describe_spread
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
        forked(ranks, planranks.main, flags, tmp_path / "measured")
        planning_all.result()
    planned, measured = (json.loads((tmp_path / name).read_text()) for name in ("planned", "measured"))
    assert planned.keys() == measured.keys() == flags.keys()
    for name, plan in planned.items():
        compare_memory(name, plan, measured[name])
        if "adapters" in name:
            compare_adapters(plan, measured[name], ranks if "stage 0" not in name else 1)
        compare_traffic(name, plan, measured[name]["sent"] if ranks > 1 else {})


def compare_memory(name: str, plan: dict, real: dict) -> None:
    memory, at_peak, in_optimizer = plan["memory_gib"], plan["at_peak_gib"], plan["peaks_gib"]["optimizer"]
    at_rest = real["parameters"] + real["optimizer"]
    # buffers and stacks of matrices of Muon, beside weights, gradients and states
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


def compare_adapters(plan: dict, real: dict, shards: int) -> None:
    """The base is held in 2 bytes a number and gathered so; what is trained has 4 bytes, its gradients and their sums
    too, and 8 for AdamW's moments. Uneven shards are padded."""
    trained, everything = plan["trained_parameters"], plan["parameters"]
    near = {"rel": 0.03, "abs": 30_000}  # a tensor of one number takes 512 bytes
    assert real["parameters"] == pytest.approx((2 * (everything - trained) + 4 * trained) / shards, **near)
    assert real["gradients"] == pytest.approx(4 * trained / shards, **near)
    assert real["optimizer"] == pytest.approx(8 * trained / shards, **near)
    reductions = real["sent"].get("reduce_scatter")
    if reductions:
        passes = reductions[0] / 3  # of 3 layers
        assert reductions[1] == pytest.approx(passes * 4 * trained, rel=0.03)


def compare_traffic(name: str, plan: dict, sent: dict[str, tuple[int, int]]) -> None:
    calls: dict[str, int] = {}
    sizes: dict[str, float] = {}
    for entry in plan["collectives"]:
        kind, others = entry["collective"], (entry["ranks"] - 1) / entry["ranks"]
        calls[kind] = calls.get(kind, 0) + entry["calls"]
        whole = entry["gib"] * GIB / others / (2 if kind == "all_reduce" else 1)
        sizes[kind] = sizes.get(kind, 0) + whole
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
    few, whole = json.loads((tmp_path / "planned").read_text()).values()
    for part in ("memory_gib", "time_ms"):
        assert few[part] == pytest.approx(whole[part], rel=2e-3, abs=2e-5)
    for one, other in zip(few["collectives"], whole["collectives"], strict=True):
        assert one.pop("collective") == other.pop("collective")
        assert one == pytest.approx(other, rel=1e-6)
    assert few["flops_executed"] == pytest.approx(whole["flops_executed"], rel=1e-6)


@pytest.mark.slow
def test_a_plan_as_json_is_one_object_and_writes_nothing(tmp_path):
    flags = (
        "--demo --plan --json --plan-gpus 16 --plan-gpu Voodoo --gpu-hour-usd 4 --batch-size auto --sequence-length 512"
        " --plan-seconds 120"  # enough on a busy machine too
    )
    script = copy_with_gpu(tmp_path / "program", "Voodoo", 2.2)
    process = start([sys.executable, script, *words(flags), "--output-dir", tmp_path / "runs"])
    assert process.returncode == 0, process.stderr
    plan = json.loads(process.stdout)
    memory = plan["memory_gib"]
    assert plan["parameters"] == 2_623_744
    parts = ("parameters", "gradients", "optimizer", "activations", "communication")
    assert memory["total"] == pytest.approx(sum(plan["at_peak_gib"][part] for part in parts))
    assert all(memory[part] >= plan["at_peak_gib"][part] for part in parts)
    assert memory["total"] < memory["reserved"] <= 2.2
    assert plan["fits"] and plan["largest_batch_size"] > 1
    hours = 1e9 / plan["tokens_per_sec"] / 3600
    assert plan["cost_per_billion_tokens"] == pytest.approx(hours * 16 * 4)
    assert plan["assumptions"]
    assert list(tmp_path.iterdir()) == [script.parent]


@pytest.mark.slow
def test_what_does_not_fit_learns_what_makes_it_fit(tmp_path):
    flags = words("--demo --plan --json --no-compile --plan-gpus 1 --plan-gpu Voodoo --batch-size 64 --no-fused-loss")
    command = [sys.executable, copy_with_gpu(tmp_path, "Voodoo", 1.4), *flags, "--plan-seconds"]
    plan = json.loads(start([*command, 30]).stdout)
    assert not plan["fits"]
    assert "--fused-loss" in plan["fastest"]["flags"]
    changed = json.loads(start([*command, 0, *words(plan["fastest"]["flags"])]).stdout)
    assert changed["fits"]
    assert changed["memory_gib"]["reserved"] == pytest.approx(plan["fastest"]["reserved_gib"])


@pytest.mark.slow
def test_a_model_to_be_tuned_that_does_not_fit_learns_that_adapters_do(tmp_path):
    flags = words("--model llama3.2-1b --init pretrained --plan --no-compile --plan-gpus 1 --plan-gpu Voodoo")
    flags += words("--sequence-length 512 --plan-seconds 20")
    command = [sys.executable, copy_with_gpu(tmp_path, "Voodoo", 12), *flags]
    plan = json.loads(start([*command, "--json"]).stdout)
    advised = plan["with_adapters"]
    assert not plan["fits"] and advised["fits"] and "--lora-rank 16" in advised["command"]
    assert not plan["fastest"] or "lora_rank" not in plan["fastest"]["changes"]  # it is other training
    changed = json.loads(start([*command, "--json", "--plan-seconds", 0, *words(advised["flags"])]).stdout)
    assert changed["memory_gib"]["reserved"] == pytest.approx(advised["reserved_gib"])
    assert changed["trained_parameters"] < 0.02 * changed["parameters"]
    assert "adapters   --lora-rank 16" in start(command).stdout


@pytest.mark.parametrize(
    "flags, printed",
    [
        ("--plan --json --plan-gpu Voodoo", "--plan-gpu 'Voodoo'"),
        ("--plan --json --plan-gpus 12", "--plan-gpus 12: that is 1.5 nodes of 8 GPUs; plan whole nodes"),
        ("--plan --json --gpus-per-node 2000000", "--gpus-per-node: 2000000 is not a whole number above 0"),
        ("--batch-size auto --demo", "--batch-size auto: a CPU's capacity is not known"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(flags, printed):
    process = python(*words(flags))
    assert process.returncode == 2
    assert process.stderr.startswith("train_fsdp.py: error: ") and process.stderr.count("\n") == 1
    assert printed in process.stderr
    if "--json" in flags:  # who reads the object is told there too
        assert json.loads(process.stdout) == {"error": process.stderr.strip().removeprefix("train_fsdp.py: error: ")}


@pytest.mark.slow
def test_every_kernel_of_attention_is_planned_without_a_gpu_and_its_package():
    """A run's own plan sees no GPU either. Kernels other than eager save the same."""
    forked(1, plan_kernels)


def plan_kernels() -> None:
    flags = "--plan --demo --no-compile --plan-gpus 1 --plan-seconds 0 --sequence-length 64 --precision bf16"
    totals = {}
    for kernel in typing.get_args(Attention):
        settings, plan = planning.make_plan(parse(words(f"{flags} --attention {kernel}")), train_fsdp.RECIPE)
        assert settings.attention == kernel
        totals[kernel] = plan["memory_gib"]["total"]
    assert len(set(totals.values())) == 2 and list(totals.values()).count(totals["eager"]) == 1


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


@pytest.mark.slow
def test_a_plan_for_a_hundred_thousand_gpus_takes_no_longer_than_another():
    flags = "--plan --json --demo --no-compile --dp-replicate-size 12500 --plan-gpus 100000 --sequence-length 64"
    process = python(*words(flags), "--plan-seconds", 0, timeout=300)
    assert process.returncode == 0, process.stderr
    found = {
        (entry["collective"], entry["ranks"], entry["nodes"]) for entry in json.loads(process.stdout)["collectives"]
    }
    assert found >= {("all_gather", 8, 1), ("all_reduce", 12_500, 12_500)}


@pytest.mark.slow
def test_a_loss_in_many_chunks_is_planned_by_three_of_them():
    forked(1, plan_many_chunks)


def plan_many_chunks() -> None:
    """In a process of its own: a plan makes a process group."""
    flags = "--plan --demo --no-compile --plan-gpus 2 --plan-seconds 0 --sequence-length 112"
    settings = parse(words(f"{flags} --batch-size 1"))
    flops = []
    for tokens in (112, 56, 4):  # 1, 2 and 28 chunks
        loss.tokens_at_once = lambda weight, tokens=tokens: tokens
        flops.append(planning.make_plan(settings, train_fsdp.RECIPE)[1]["flops_executed"])
    assert flops[1:] == [flops[0]] * 2


@pytest.mark.slow
def test_a_step_that_the_host_bounds_has_one_value_however_often_it_is_planned(tmp_path):
    """The first plan of a process compiles, and what runs for that is no part of a step."""
    model = write_model(tmp_path / "deep", "llama", **SIZES | {"num_hidden_layers": 8})
    forked(1, plan_twice, str(model))


def plan_twice(model: str) -> None:
    flags = "--plan --plan-gpus 1 --plan-seconds 0 --sequence-length 64 --batch-size 1 --model"
    settings = parse([*words(flags), model])
    plans = [planning.make_plan(settings, train_fsdp.RECIPE)[1] for _ in range(2)]
    assert [plan["bound_by"] for plan in plans] == ["host", "host"]
    assert plans[0]["step_time_ms"] == plans[1]["step_time_ms"]


@pytest.mark.slow
def test_experts_in_fp32_are_planned_with_their_flops(tmp_path):
    """Fake tensors take no grouped product but of bf16, and transformers has an operator of its own for others."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "vocab_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    config = {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "intermediate_size": 64} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--plan --json --plan-seconds 0 --plan-gpus 1 --sequence-length 256"
    executed = set()
    for precision, compiled in (("bf16", "--no-compile"), ("fp32", "--no-compile"), ("fp32", "--compile")):
        process = python(*words(flags), "--model", tmp_path, "--precision", precision, compiled)
        assert process.returncode == 0, process.stderr
        executed.add(json.loads(process.stdout)["flops_executed"])
    assert len(executed) == 1


@pytest.mark.slow
def test_selective_checkpointing_recomputes_the_products_of_experts(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "vocab_size": 128, "num_experts": 8, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    config = {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "intermediate_size": 64} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--plan --json --plan-seconds 0 --plan-gpus 1 --batch-size 4 --sequence-length 2048"
    held = {}
    for level in ("none", "selective", "full"):
        process = python(*words(flags), "--model", tmp_path, "--activation-checkpointing", level)
        held[level] = json.loads(process.stdout)["memory_gib"]["activations"]
    products = 2 * 4 * 2048 * 8 * (2 * 64 + 64) * 2 / 2**30  # two layers: each expert's gate and up, and down
    assert held["selective"] < held["none"] - products


@pytest.mark.slow
def test_communicators_are_the_worlds_and_those_of_a_mesh_of_two_dimensions():
    forked(1, plan_communicators)


def plan_communicators() -> None:
    flags = "--plan --demo --no-compile --plan-gpu H200 --plan-seconds 0 --sequence-length 64 --plan-gpus"
    for layout, count in {"1": 0, "8": 1, "8 --zero-stage 0": 1, "8 --dp-replicate-size 2": 3}.items():
        plan = planning.make_plan(parse(words(f"{flags} {layout}")), train_fsdp.RECIPE)[1]
        expected = base.CONTEXT_GIB + count * base.NCCL_GIB
        assert plan["beside_tensors_gib"]["CUDA and NCCL"] == pytest.approx(expected), layout


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
    line = describe_spread(settings, layouts)
    assert bool(line) == bool(nodes) and (not nodes or f"--dp-replicate-size {nodes}," in line)


OFFLOADED = {  # flags: gathers of a layer and of the root, reductions
    "--gradient-accumulation-steps 1": (2, 1, 1),
    "--gradient-accumulation-steps 4": (8, 4, 4),
    "--gradient-accumulation-steps 4 --defer-grad-sync": (8, 4, 1),
    "--gradient-accumulation-steps 4 --zero-stage 2": (1, 1, 4),
    "--gradient-accumulation-steps 4 --zero-stage 1": (1, 1, 1),
    "--gradient-accumulation-steps 4 --dp-replicate-size 2": (8, 4, 1),
}


@pytest.mark.slow
def test_states_on_the_host_are_copied_at_each_gather_and_reduction_and_gradients_before_it_are_on_the_gpu():
    forked(1, plan_offloaded)


def plan_offloaded() -> None:
    ranks = 4
    for flags, (of_layers, of_root, reductions) in OFFLOADED.items():
        args = parse(words(f"--plan --demo --no-compile --sequence-length 64 --batch-size 1 --cpu-offload {flags}"))
        config = load_config(args.model)
        settings = resolving.resolve(args, config)
        rates = choose_rates(args)
        recorder = fake_step.record_step(settings, train_fsdp.RECIPE, config, ranks, config.num_hidden_layers, rates)
        model = models.trained_on_meta(settings, config)
        whole = 4 * sum(parameter.numel() for parameter in model.parameters())  # in fp32
        layers = 4 * sum(p.numel() for layer in models.decoder_layers(model) for p in layer.parameters())
        shards = ranks // settings.dp_replicate_size
        copied = sum(count for key, count in recorder.counts.items() if key[::2] == ("bytes", "host_link"))
        expected = of_layers * layers + of_root * (whole - layers) + reductions * whole
        assert copied == pytest.approx(expected / shards, rel=0.01), flags
        peaks = [(key, dict(zip(KINDS, peak.tolist(), strict=True))) for key, peak in recorder.peaks().items()]
        on_gpu = max(peak["gradients"] for (stream, *_), peak in peaks if stream is None)
        on_host = max(sum(peak.values()) for (stream, *_), peak in peaks if stream == HOST)
        assert on_host == pytest.approx(4 * whole / shards, rel=0.2), flags
        is_deferred = settings.gradient_accumulation_steps > 1 and (settings.zero_stage == 1 or "defer" in flags)
        if is_deferred:  # of all layers, in fp32
            assert whole <= on_gpu < 1.2 * whole, flags
        elif settings.dp_replicate_size > 1 and settings.gradient_accumulation_steps > 1:
            assert whole / shards <= on_gpu < whole, flags  # sums over microbatches, until the replicas' reduction
        else:  # of one group, until its reduction
            assert 0 < on_gpu < whole / 2, flags
        assert not any(peak["parameters"] + peak["optimizer"] for (stream, *_), peak in peaks if stream is None)
