"""--plan says what a run needs: compared with real ranks on real tensors, and as its user sees it.

tests/planranks.py measures with 1, 2 and 4 ranks and plans the same, each once a session.
"""

import concurrent.futures
import itertools
import json

import planranks
import pytest
import torch
from conftest import forked, metrics_of, parse, python, slow_case, words, write_model
from multirank import MODELS, SIZES

import train_fsdp
from harness import plan as planning
from harness.model import loss
from harness.plan import fake_step

GIB = 2**30
QUICK_RANKS = 2  # of the quick tier


def case(ranks: int, name: str):
    make = pytest.param if ranks == QUICK_RANKS else slow_case
    return make(ranks, name, id=f"{ranks}-{name}")


# Planned beside them: {name: (ranks, model, flags)}. The model "ten" has ten layers, of which two shallow models are
# recorded; of "ten unlike", which differ, every layer is.
ACCUMULATING = "--gradient-accumulation-steps 5"
OTHERS = {
    "ten": (8, "ten", ACCUMULATING),
    "ten unlike": (8, "ten unlike", ACCUMULATING),
    "ten normuon": (8, "ten", f"{ACCUMULATING} --optimizer normuon --dp-replicate-size 2"),
    "ten unlike normuon": (8, "ten unlike", f"{ACCUMULATING} --optimizer normuon --dp-replicate-size 2"),
    "offloaded": (1, "deep", "--cpu-offload"),
    "offloaded with an average": (1, "deep", "--cpu-offload --ema 0.99"),
}
CASES = [case(ranks, name) for ranks in planranks.RANKS for name in planranks.cases(ranks)]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    write_model(folder / "models" / "deep", *MODELS["deep"][:1], **MODELS["deep"][1])
    ten = SIZES | {"num_hidden_layers": 10, "tie_word_embeddings": True}
    write_model(folder / "models" / "ten", "smollm3", **ten, no_rope_layers=[1, 0] * 5)
    write_model(folder / "models" / "ten unlike", "smollm3", **ten, no_rope_layers=[1] * 5 + [0] * 5)
    return folder


@pytest.fixture(scope="session")
def results(request, models):
    """(what was planned, what was measured with each number of ranks of the tier); both are made side by side."""
    worlds, others = planranks.RANKS, OTHERS
    if request.config.option.markexpr == "not slow":
        worlds, others = (QUICK_RANKS,), {}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        plans = threads.submit(forked, 1, planranks.plan_cases, models, worlds, others)
        for ranks in worlds:
            forked(ranks, planranks.main, models)
        plans.result()
    measured = {ranks: json.loads((models / f"measured-{ranks}.json").read_text()) for ranks in worlds}
    return json.loads((models / "planned.json").read_text()), measured


@pytest.fixture(scope="session")
def planned(results):
    return results[0]


@pytest.fixture(scope="session")
def measured(results):
    return results[1]


@pytest.mark.parametrize("ranks, name", CASES)
def test_planned_bytes_are_those_of_a_real_step(planned, measured, ranks, name):
    plan, real = planned[str(ranks)][name], measured[ranks][name]
    memory = plan["memory_gib"]
    assert memory["parameters"] * GIB == pytest.approx(real["parameters"], rel=0.02)
    assert memory["optimizer"] * GIB == pytest.approx(real["optimizer"], rel=0.02)
    assert plan["peaks_gib"]["optimizer"]["gradients"] * GIB == pytest.approx(real["gradients"], rel=0.02)
    assert memory["gradients"] >= plan["peaks_gib"]["optimizer"]["gradients"]
    assert memory["total"] * GIB == pytest.approx(real["total"], rel=0.02)
    in_optimizer = sum(plan["peaks_gib"]["optimizer"].values())
    assert in_optimizer * GIB == pytest.approx(real["in optimizer"], rel=0.02)
    assert memory.get("average", 0) * GIB == pytest.approx(real["average"], rel=0.02)
    at_rest = real["parameters"] + real["optimizer"] + real["average"]
    at_peak = plan["at_peak_gib"]
    passing = at_peak["gradients"] + at_peak["activations"] + at_peak["communication"]
    assert passing * GIB == pytest.approx(real["total"] - at_rest, rel=0.02)


@pytest.mark.parametrize("ranks, name", [case for case in CASES if "muon" in case.values[1]])
def test_what_muon_holds_while_it_computes_is_planned(planned, measured, ranks, name):
    """Its buffers and stacks of matrices, beside weights, gradients and states."""
    plan, real = planned[str(ranks)][name]["peaks_gib"]["optimizer"], measured[ranks][name]
    at_rest = real["parameters"] + real["optimizer"] + real["gradients"]
    held = (plan["activations"] + plan["communication"]) * GIB
    assert held == pytest.approx(real["in optimizer"] - at_rest, rel=0.15)
    assert held > 0.1 * real["parameters"]


@pytest.mark.slow
def test_an_average_lies_on_the_host_beside_offloaded_weights(planned):
    without, averaged = planned["offloaded"]["memory_gib"], planned["offloaded with an average"]["memory_gib"]
    parameters = 4 * planned["offloaded"]["parameters"] / GIB
    assert averaged["host"] - without["host"] == pytest.approx(parameters, rel=0.02)
    assert averaged["total"] == pytest.approx(without["total"], rel=0.02)
    assert "average" not in averaged
    assert planned["offloaded with an average"]["time_ms"]["optimizer"] > planned["offloaded"]["time_ms"]["optimizer"]


@pytest.mark.parametrize("ranks, name", CASES)
def test_what_a_stream_allocates_serves_no_other_and_is_planned_as_in_a_real_step(planned, measured, ranks, name):
    plan, real = planned[str(ranks)][name], measured[ranks][name]
    held = sorted(filter(None, plan["held_by_streams_gib"]))
    assert [size * GIB for size in held] == pytest.approx(real["held"], rel=0.02)
    assert plan["memory_gib"]["total"] <= sum(held) * (1 + 1e-9) < plan["memory_gib"]["reserved"]


@pytest.mark.parametrize("ranks, name", CASES)
def test_planned_traffic_is_that_of_a_real_step(planned, measured, ranks, name):
    calls: dict[str, int] = {}
    sizes: dict[str, float] = {}
    for entry in planned[str(ranks)][name]["collectives"]:
        kind, others = entry["collective"], (entry["ranks"] - 1) / entry["ranks"]
        calls[kind] = calls.get(kind, 0) + entry["calls"]
        whole = entry["gib"] * GIB / others / (2 if kind == "all_reduce" else 1)
        sizes[kind] = sizes.get(kind, 0) + whole
    real = measured[ranks][name]["sent"] if ranks > 1 else {}
    assert calls == {kind: count for kind, (count, _) in real.items()}
    assert sizes == pytest.approx({kind: size for kind, (_, size) in real.items()}, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["", " normuon"])
def test_shallow_models_extrapolate_to_what_the_whole_model_gives(planned, optimizer):
    """Half the layers have no rotary embedding, in turn or one half after the other: the same work in another order."""
    few, whole = planned["ten" + optimizer], planned["ten unlike" + optimizer]
    for part in ("memory_gib", "time_ms"):
        assert few[part] == pytest.approx(whole[part], rel=2e-3, abs=2e-5)
    for one, other in zip(few["collectives"], whole["collectives"], strict=True):
        assert one.pop("collective") == other.pop("collective")
        assert one == pytest.approx(other, rel=1e-6)
    assert few["flops_executed"] == pytest.approx(whole["flops_executed"], rel=1e-6)


@pytest.mark.slow
def test_executed_flops_of_eager_attention_are_the_models(planned):
    plan = planned["4"]["eager attention"]
    assert plan["flops_executed"] == pytest.approx(plan["flops_per_token"] * 256, rel=1e-4)  # and rotary angles


@pytest.mark.slow
def test_a_model_whose_flops_are_not_known_is_planned_without_an_mfu():
    forked(1, plan_without_flops)


def plan_without_flops() -> None:
    """In a process of its own: a plan makes a process group."""

    def not_known(*_) -> None:
        raise ValueError("a reason")

    flags = "--demo --plan --no-compile --plan-gpus 8,16 --plan-gpu A100-SXM4-40GB --plan-seconds 0"
    settings = parse(words(flags))
    _, found = planning.make_plan(settings, train_fsdp.RECIPE._replace(flops_per_token=not_known))
    assert (found["flops_per_token"], found["mfu_percent"]) == (None, None)
    assert [row["mfu_percent"] for row in found["configurations"]] == [None, None, None]
    assert found["flops"] == "FLOPs not known, so no MFU (a reason)"


@pytest.mark.slow
def test_checkpointing_executes_more_flops_and_holds_less(planned):
    plans = planned["4"]
    assert plans["checkpointed"]["flops_executed"] > 1.1 * plans["stage 3"]["flops_executed"]
    assert plans["checkpointed"]["memory_gib"]["total"] < plans["stage 3"]["memory_gib"]["total"]


@pytest.mark.slow
def test_a_plan_as_json_is_one_object_and_writes_nothing(tmp_path):
    flags = (
        "--demo --plan --json --plan-gpus 16 --plan-gpu B200 --gpu-hour-usd 4 --batch-size auto --sequence-length 512"
        " --plan-seconds 30"
    )
    capacity = tmp_path / "rates.json"
    capacity.write_text(json.dumps({"memory_gib": 2.2}))
    process = python(*words(flags), "--output-dir", tmp_path / "runs", "--plan-rates", capacity)
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
    between = sum(entry["gib_between_nodes"] for entry in plan["collectives"])
    assert between == pytest.approx(plan["communication_gib_per_step"] / 8)  # a ring leaves each node once
    assert plan["assumptions"]
    assert list(tmp_path.iterdir()) == [capacity]


@pytest.mark.slow
def test_what_does_not_fit_is_told_what_makes_it_fit(tmp_path):
    capacity = tmp_path / "rates.json"
    capacity.write_text(json.dumps({"memory_gib": 1.5}))
    flags = words("--demo --plan --json --no-compile --plan-gpus 1 --plan-gpu H200 --batch-size 64 --no-fused-loss")
    flags += ["--plan-rates", capacity, "--plan-seconds"]
    plan = json.loads(python(*flags, 30).stdout)
    assert not plan["fits"]
    assert "--fused-loss" in plan["fits_with"]["flags"]
    changed = json.loads(python(*flags, 0, *words(plan["fits_with"]["flags"])).stdout)
    assert changed["fits"]
    assert changed["memory_gib"]["reserved"] == pytest.approx(plan["fits_with"]["reserved_gib"])


@pytest.mark.parametrize(
    "flags, words_of_the_error",
    [
        (["--plan", "--plan-gpu", "Voodoo 2"], "--plan-gpu 'Voodoo 2'"),
        (["--plan", "--plan-gpus", "0"], "--plan-gpus"),
        (["--plan", "--plan-gpus", "1000000000000"], "--plan-gpus"),
        (["--plan", "--batch-size", "1000000000"], "--batch-size"),
        (["--plan", "--plan-gpu", "cpu", "--cache-dir", "/nowhere"], "--plan-gpu cpu: of a processor"),
        (["--plan", "--plan-rates", "/nowhere.json"], "--plan-rates /nowhere.json"),
        (["--plan", "--plan-gpu", "A100 80GB", "--precision", "fp8"], "--precision fp8"),
        (["--plan", "--plan-gpus", "8", "--dp-replicate-size", "3"], "--dp-replicate-size 3"),
        (["--plan", "--plan-gpus", "12"], "--plan-gpus 12: that is 1.5 nodes of 8 GPUs; plan whole nodes"),
        (["--batch-size", "auto", "--demo"], "--batch-size auto: a CPU's capacity is not known"),
    ],
)
def test_a_mistake_in_a_plan_is_one_line(flags, words_of_the_error):
    process = python(*flags, *(["--json"] if "--plan" in flags else []))
    assert process.returncode == 2
    assert process.stderr.startswith("train_fsdp.py: error: ") and process.stderr.count("\n") == 1
    assert words_of_the_error in process.stderr
    if "--plan" in flags:  # who reads the object is told there too
        assert json.loads(process.stdout) == {"error": process.stderr.strip().removeprefix("train_fsdp.py: error: ")}


@pytest.mark.slow
def test_a_run_ends_with_its_plan_beside_its_figures(tmp_path):
    flags = "--demo --num-steps 2 --batch-size auto --sequence-length 512 --plan-gpu B200 --perf-warmup-steps 0"
    rates = tmp_path / "small.json"
    rates.write_text(json.dumps({"memory_gib": 0.7}))
    options = ["--output-dir", tmp_path, "--run-name", "run", "--plan-rates", rates, "--cache-dir", tmp_path / "cache"]
    process = python(*words(flags), "--no-compile", *options)
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


def test_the_shard_of_rank_0_is_torchs_first_chunk():
    for length, count in itertools.product((1, 2, 7, 8, 100), (1, 2, 3, 8, 50)):
        tensor = torch.arange(3 * length).view(length, 3)
        (chunk,) = fake_step.first_chunk(tensor, count, 0)
        assert torch.equal(chunk, torch.chunk(tensor, count)[0])


def test_a_loss_in_many_chunks_is_planned_by_three_of_them():
    forked(1, plan_many_chunks)


def plan_many_chunks() -> None:
    """In a process of its own: a plan makes a process group."""
    flags = "--plan --demo --no-compile --plan-gpus 2 --plan-rates none --plan-seconds 0 --sequence-length 112"
    settings = parse(words(f"{flags} --batch-size 1"))
    flops = []
    for tokens in (112, 56, 4):  # 1, 2 and 28 chunks
        loss.tokens_at_once = lambda weight, tokens=tokens: tokens
        flops.append(planning.make_plan(settings, train_fsdp.RECIPE)[1]["flops_executed"])
    assert flops[1:] == [flops[0]] * 2


def test_attentions_backward_takes_two_and_a_half_times_its_forward():
    """Five products for two, as flash attention computes the scores again; a causal mask leaves out half."""
    from harness.plan.operators import operator_flops

    query, key = torch.zeros(2, 4, 16, 8), torch.zeros(2, 2, 16, 8)
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default
        for end in ("", "_backward")
    )
    whole = 2 * 2 * 4 * 16 * 16 * (8 + 8)
    assert operator_flops(forward, (query, key, key, 0.0, True), {}, None) == whole // 2
    given = (query, query, key, key, query, query, 0.0, False)
    assert operator_flops(backward, given, {}, None) == 2.5 * whole


@pytest.mark.parametrize("gpu, has_range", [("H100", True), ("B200", False)])
def test_a_range_is_given_for_the_kinds_that_published_runs_are_of(gpu, has_range):
    """And a plan for an attention kernel that does not run here is made without it."""
    flags = "--plan --demo --no-compile --plan-seconds 0 --plan-rates none --attention cudnn --plan-gpus 8 --plan-gpu"
    printed = " ".join(python(*words(flags), gpu).stdout.split())
    assert ("reached 83 to 122 %" in printed) == has_range
    assert "dense models on A100, H100 and H200" in printed


@pytest.mark.slow
def test_selective_checkpointing_recomputes_the_products_of_experts(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "vocab_size": 128, "num_experts": 8, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    config = {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "intermediate_size": 64} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = "--plan --json --plan-seconds 0 --plan-rates none --plan-gpus 1 --batch-size 4 --sequence-length 2048"
    held = {}
    for level in ("none", "selective", "full"):
        process = python(*words(flags), "--model", tmp_path, "--activation-checkpointing", level)
        held[level] = json.loads(process.stdout)["memory_gib"]["activations"]
    products = 2 * 4 * 2048 * 8 * (2 * 64 + 64) * 2 / 2**30  # two layers: each expert's gate and up, and down
    assert held["selective"] < held["none"] - products
