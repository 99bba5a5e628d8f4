"""The recommendation of a plan: configurations that fit, and faster ones, planned in a fixed order.

Most tests search among plans of a formula, which can be compared with all there are.
"""

import dataclasses
import itertools
import json
import shlex

import pytest
from conftest import ROOT, parse, words

from harness.base import UserError
from harness.model import load_config
from harness.plan import predict, search, text

LEVELS = {"none": 10.0, "selective": 6.0, "full": 1.0, "offload": 0.5}  # GiB a sequence of 8,192 tokens
UNSEARCHED = {"optimizer", "cpu_offload"}


def by_formula(s, world: int, capacity: float, scale: float = 1) -> dict:
    """A plan in which memory is linear in the batch and each microbatch costs something; `scale` multiplies memory."""
    if s.zero_stage == 1 and s.gradient_accumulation_steps == 1:
        s = dataclasses.replace(s, zero_stage=2)  # the same program
    shards = world // (world if s.zero_stage == 0 else s.dp_replicate_size)
    states = 0 if s.cpu_offload else (1 if s.lora_rank else 32 if s.optimizer == "adamw" else 20) / shards
    level = LEVELS[s.activation_checkpointing]
    activations = scale * level * s.batch_size * s.sequence_length / 8192 / s.context_parallel
    reserved = scale * (2 + states + {3: 0.5, 2: 4, 1: 8, 0: 8}[s.zero_stage]) + activations
    products = 100 * s.batch_size * s.gradient_accumulation_steps * {1.0: 4 / 3, 0.5: 1.4}.get(level, 1)
    traffic = {3: 40, 2: 25, 1: 20, 0: 45}[s.zero_stage] / s.dp_replicate_size
    step = products + traffic * s.gradient_accumulation_steps + 1000 * s.cpu_offload + 5 * (level == 6.0) + 10
    return {  # of a prediction what a search reads
        "gpus": world,
        "fits": predict.find_verdict(reserved, capacity) != "does not fit",
        "verdict": predict.find_verdict(reserved, capacity),
        "memory_gib": {"reserved": reserved, "host": 0.0},
        "at_peak_gib": {"activations": activations},
        "step_time_ms": step,
        "tokens_per_sec": 1000 * s.tokens_per_step(world) / step,
    }


def searched(
    flags: str, capacity: float, worlds=(16,), plans: int = 1000, scale: float = 1, formula=by_formula, **options
) -> search.Search:
    """The finished search; `plans` is how many it has time for."""
    settings = parse(["--plan", "--no-compile", *words(f"--sequence-length 8192 --precision bf16 {flags}")])
    settings = dataclasses.replace(settings, compile=False, fused_loss=True)
    done = []

    def plan(settings, world):
        done.append(world)
        if len(done) == plans:
            found.deadline = 0.0
        return formula(settings, world, capacity, scale)

    found = search.Search(settings, None, worlds, plan, capacity, float("inf"), **options)
    found.run()
    return found


@pytest.mark.parametrize("capacity", [200, 60, 30, 24, 14, 8])
@pytest.mark.parametrize(
    "flags", ["--batch-size 1", "--batch-size 4 --gradient-accumulation-steps 2", "--batch-size 2 --zero-stage 1"]
)
def test_a_few_plans_find_nearly_what_planning_everything_finds(flags, capacity):
    found = searched(flags, capacity)
    settings = found.settings
    samples = settings.batch_size * settings.gradient_accumulation_steps
    everything = []
    for stage, replicas, level, size in itertools.product((0, 1, 2, 3), (1, 2), LEVELS, (1, 2, 4, 8)):
        if samples % size == 0 and (stage or replicas == 1):
            changes = {"zero_stage": stage, "dp_replicate_size": replicas, "activation_checkpointing": level}
            changes |= {"batch_size": size, "gradient_accumulation_steps": samples // size}
            everything.append(by_formula(dataclasses.replace(settings, **changes), 16, capacity))
    with_room = [plan["tokens_per_sec"] for plan in everything if plan["verdict"] == "fits"]
    best = max(with_room, default=None)
    fastest = found.fastest()
    assert found.is_complete and len(found.result()["configurations"]) <= 15
    assert fastest["fits"] and fastest["tokens_per_step"] == settings.tokens_per_step(16)
    assert fastest["verdict"] == "fits" or not with_room
    if best:
        assert fastest["tokens_per_sec"] * 1.05 >= best
        assert not UNSEARCHED & fastest["changes"].keys()
    given = found.row()
    assert fastest["tokens_per_sec"] * 1.01 >= given["tokens_per_sec"] or given["verdict"] != "fits"


def test_the_fastest_is_tight_only_where_nothing_else_fits():
    given = 2 + 32 / 16 + 0.5 + LEVELS["none"]  # GiB
    found = searched("--batch-size 1", given / 0.98)
    assert found.row()["verdict"] == "tight"
    assert found.fastest()["verdict"] == "fits"
    least = 2 + 0.5 + LEVELS["offload"]  # all that the host can take is there
    assert searched("--batch-size 1", least / 0.98).fastest()["verdict"] == "tight"


def test_what_may_fit_by_the_least_that_runs_reserved_is_tight_and_not_refused():
    least, most = predict.RESERVED_SHARE
    verdicts = [predict.find_verdict(share * 100, 100) for share in (0.99 / most, 1.0, 0.99 / least, 1.01 / least)]
    assert verdicts == ["fits", "tight", "tight", "does not fit"]
    given = 2 + 32 / 2 + 0.5 + LEVELS["full"]
    found = searched("--batch-size auto --activation-checkpointing full", given * 0.98, worlds=(2,))
    assert found.base_changes["batch_size"] == 1 and found.row()["verdict"] == "tight"


def test_where_the_advised_is_tight_a_row_with_room_is_offered_as_safer():
    """Full checkpointing is tight, the states of another optimizer leave room, and more tokens a second."""
    given = 2 + 32 / 2 + 0.5 + LEVELS["full"]  # of two GPUs at stage 3
    found = searched("--batch-size 1", given / 0.98, worlds=(2,))
    result = found.result()
    assert result["fastest"]["verdict"] == "tight" and "optimizer" not in result["fastest"]["changes"]
    assert result["safer"]["verdict"] == "fits" and result["safer"]["changes"]["optimizer"] != "adamw"
    assert [row for row in result["configurations"] if row["safer"]] == [result["safer"]]
    assert searched("--batch-size 1", 200).result()["safer"] is None


@pytest.mark.parametrize("worlds", [(4,), (4, 16)])
@pytest.mark.parametrize("flags", ["--batch-size 4 --zero-stage 1", "--batch-size auto"])
@pytest.mark.parametrize("scale", [1, 10])
def test_what_saves_most_is_planned_before_the_verdict_however_little_time_there_is(flags, worlds, scale):
    """On a small card and on one ten times as large, of a model ten times as large."""
    found = searched(flags, 5.0 * scale, worlds, plans=1, scale=scale)  # the first plan takes all the time
    assert not found.is_complete and len(found.rows) == 2 and not found.row()["fits"]
    changes = found.result()["fastest"]["changes"]
    assert changes["cpu_offload"] and "optimizer" in changes and changes["activation_checkpointing"] == "offload"


def test_adapters_of_pretrained_weights_are_planned_before_the_verdict_too():
    found = searched("--batch-size 1 --init pretrained", 5.0, worlds=(4,), plans=1)
    assert not found.is_complete and len(found.rows) == 3
    assert found.result()["with_adapters"]["changes"]["activation_checkpointing"] == "full"
    complete = searched("--batch-size 1 --init pretrained", 14.0, worlds=(2,)).result()
    assert complete["with_adapters"]["changes"] == search.ADAPTERS  # the faster one of those that fit


@pytest.mark.parametrize("takes_float8", [True, False])
def test_float8_is_reported_beside_the_fastest_and_is_never_the_fastest(takes_float8):
    def plan(settings, *others):
        result = by_formula(settings, *others)
        if settings.precision == "fp8":
            if not takes_float8:
                raise UserError("--precision fp8: no linear of the decoder layers is large enough to gain from it")
            result["tokens_per_sec"] *= 1.2
        return result

    found = searched("--batch-size 1", 200, formula=plan, has_float8=True)
    fastest, in_float8 = found.result()["fastest"], found.result()["in_float8"]
    assert fastest["changes"].get("precision") is None and found.is_complete
    assert (in_float8 and in_float8["tokens_per_sec"] / fastest["tokens_per_sec"]) == (
        pytest.approx(1.2) if takes_float8 else None
    )
    assert searched("--batch-size 1", 200).result()["in_float8"] is None


def test_a_batch_that_may_grow_does_up_to_the_memory():
    found = searched("--batch-size auto", 70)
    given = found.result()
    assert given["largest_batch_size"] == int((70 * predict.TIGHT - 2 - 2 - 0.5) / LEVELS["none"])
    assert found.fastest()["batch_size"] > given["largest_batch_size"]  # with less to hold of each sequence
    out_of_time = searched("--batch-size auto", 70, plans=1)
    assert not out_of_time.is_complete and out_of_time.row()["batch_size"] == given["largest_batch_size"]


def test_the_longest_sequence_that_fits_is_found_by_few_plans():
    """As it is, with layer inputs on the host, with 8 ranks a sequence, and with both."""
    found = searched("--batch-size 1", 79, context_parallel=8)
    ways = ("none", 1), ("offload", 1), ("none", 8), ("offload", 8)
    for row, (level, ranks) in zip(found.result()["longest"], ways, strict=True):
        longest = (predict.TIGHT * 79 - 2 - 32 / 16 - 0.5) / LEVELS[level] * 8192 * ranks
        assert row["fits"] and (1 - 1 / 32) * longest < row["sequence_length"] <= longest
        assert row["changes"].get("activation_checkpointing", "none") == level
        assert row["changes"].get("context_parallel", 1) == ranks
    assert len([row for row in found.rows.values() if "sequence_length" in row["changes"]]) <= 12
    assert searched("--batch-size 1 --plan-seconds 0", 79).longest == []


def test_ranks_share_a_sequence_that_does_not_fit_with_full_checkpointing():
    found = searched("--batch-size 2", 5, scale=1.0, context_parallel=8)
    best = found.fastest()
    assert best["changes"]["context_parallel"] == 8 and "cpu_offload" not in best["changes"]
    assert best["tokens_per_step"] == found.row()["tokens_per_step"]


def test_what_fits_with_no_flag_may_fit_on_another_number_of_gpus():
    assert searched("--batch-size 1 --cpu-offload", 2.8, worlds=(2,)).fastest() is None
    found = searched("--batch-size 1 --optimizer adamw8bit --cpu-offload", 3.6, worlds=(2,))
    assert found.fastest()["gpus"] == 2  # the host takes the states
    found = searched("--batch-size 1 --activation-checkpointing full", 3.9, worlds=(2, 256))
    assert {row["gpus"] for row in found.rows.values() if row["fits"]} >= {256}
    assert searched("--batch-size 1", 1.0).result()["fastest"] is None


def test_changes_that_do_not_run_on_another_number_of_gpus_have_no_row_there():
    """8 ranks a sequence are what fits on 8 GPUs, and do not divide 12."""

    def plan(settings, world: int, *others) -> dict:
        if world % settings.context_parallel:
            raise UserError(f"--context-parallel: does not divide the world of {world} ranks")
        return by_formula(settings, world, *others)

    found = searched("--batch-size 2 --gpus-per-node 12", 7.5, (8, 12), formula=plan, context_parallel=8)
    assert found.fastest()["changes"]["context_parallel"] == 8 and found.is_complete
    assert [row["changes"] for row in found.rows.values() if row["gpus"] == 12] == [{}]


def test_a_search_that_is_out_of_time_has_the_best_of_what_it_planned():
    found = searched("--batch-size 4", 30, plans=3)  # does not fit as it is
    assert not found.is_complete and len(found.rows) == 3
    assert found.result()["configurations"][0]["given"]


def test_other_numbers_of_gpus_have_what_was_asked_one_shard_group_a_node_and_the_fastest():
    found = searched("--batch-size 1 --activation-checkpointing full", 60, worlds=(8, 32))
    rows = [row for row in found.result()["configurations"] if row["gpus"] == 32]
    assert [row["dp_replicate_size"] for row in rows] == [1, 4, 1]
    assert rows[-1]["changes"] == found.fastest()["changes"] and found.fastest()["gpus"] == 8


def test_a_command_trains_what_was_asked_with_the_changes_and_without_the_flags_of_plans():
    flags = "--plan --plan-gpus=16 --plan-gpu B200 --json --lr 1e-3 --zero-stage 3 --no-fused-loss --no-own-plan"
    settings = parse([*words(flags), "--sample-prompt", "Once upon", "--plan-seconds", "5", "--gpu-hour-usd", "3"])
    printed = search.command(settings, 16, {"zero_stage": 2, "fused_loss": True})
    assert printed.startswith("torchrun --nnodes=2 --nproc_per_node=8 ")
    kept = ("--lr", "--zero-stage 2", "--fused-loss", "--no-own-plan", "--sample-prompt 'Once upon'")
    assert all(flag in printed for flag in kept) and "plan-" not in printed and "--json" not in printed
    assert search.command(settings, 4, {}).startswith("torchrun --nproc_per_node=4 train_fsdp.py ")
    assert search.command(settings, 1, {}).startswith("python train_fsdp.py ")


COMMANDS = {  # flags that a plan takes: those of them that the command of the given configuration lacks
    "--batch-size 1 --gradient-accumulation-steps 4 --defer-grad-sync": "",
    "--batch-size 2 --defer-grad-sync": "--defer-grad-sync",
    "--batch-size 1 --gradient-accumulation-steps 4 --zero-stage 1 --defer-grad-sync": "--defer-grad-sync",
    "--batch-size 4 --gradient-accumulation-steps 2 --zero-stage 2 --defer-grad-sync": "",
    "--batch-size auto --gradient-accumulation-steps 2 --defer-grad-sync": "",
    "--batch-size 1 --lora-rank 8 --lora-alpha 8": "",
    "--batch-size 1 --init pretrained --lora-alpha 8": "--lora-alpha",
    "--batch-size 1 --init pretrained --lora-targets q_proj": "--lora-targets",
    "--batch-size 1 --fp8-recipe rowwise --precision fp8": "",
    "--batch-size 1 --fp8-recipe rowwise --sequence-length 100": "--fp8-recipe",
    # 8,196 is a multiple of 4, and tokens in multiples of 16 are taken
    "--batch-size 4 --precision fp8 --sequence-length 8196 --gradient-accumulation-steps 3": "",
    "--batch-size auto --precision fp8 --sequence-length 8196 --gradient-accumulation-steps 3": "",
    "--batch-size 1 --adamw-lr 1e-3": "--adamw-lr",
    "--batch-size 1 --optimizer muon --adamw-lr 1e-3": "",
    "--batch-size 1 --keep-best --no-async-checkpoint --eval-steps 5": "--keep-best --no-async-checkpoint --eval-steps",
    "--batch-size 1 --dataset synthetic --packing none --keep-checkpoints 3": "--packing --keep-checkpoints",
    "--batch-size 1 --gpus-per-node 8 --no-own-plan": "--gpus-per-node",
    "--batch-size 1 --demo --document-mask --packing none": "--document-mask",
}


@pytest.mark.parametrize("capacity", [200, 14, 6])
@pytest.mark.parametrize("flags, dropped", COMMANDS.items())
def test_the_program_takes_every_command_that_a_search_prints(flags, dropped, capacity):
    found = searched(flags, capacity, (16, 8, 1), has_float8=True, context_parallel=8)
    assert len(found.rows) > 5
    for row in found.rows.values():
        if "sequence_length" in row["changes"]:
            continue
        planned = parse(shlex.split(row["command"].split("train_fsdp.py ")[1]))  # exits if it is refused
        assert {name: getattr(planned, name) for name in row["changes"]} == row["changes"]
    command, typed = found.row()["command"].split(), [word for word in words(flags) if word.startswith("--")]
    assert [flag for flag in typed if flag not in command] == words(dropped)


# ---- The text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, gpu, world, bound_by, own, published",
    [
        ("", "H200", 1, "device", True, True),
        ("", "NVIDIA H200", 1, "device", True, True),  # as the driver calls it, in a run's own plan
        ("", "NVIDIA H100 80GB HBM3", 1, "device", True, True),
        ("", "H200", 8, "device", False, True),
        ("", "A100 80GB", 1, "device", False, True),
        ("", "B200", 1, "device", False, False),
        ("", "H200", 1, "host", False, False),
        ("--cpu-offload", "H200", 1, "device", False, False),
        ("--lora-rank 8", "H200", 1, "device", False, False),
        ("--precision fp32", "H200", 1, "device", False, False),
        ("--model qwen3-30b-a3b", "H200", 1, "device", False, False),
    ],
)
def test_a_range_is_reported_of_plans_of_the_kinds_that_were_measured(flags, gpu, world, bound_by, own, published):
    settings = parse(["--plan", *words(flags)])
    result = {"gpu": gpu, "gpus": world, "bound_by": bound_by}
    shares = text.measured_shares(settings, load_config(settings.model), result)
    assert shares == (text.OWN_SHARE if own else None, text.PUBLISHED_SHARE if published else None)


def test_what_own_runs_reserved_and_reached_is_what_plans_say():
    """The runs of benchmarks/results/plan_measured.json that the GPU bounds."""
    runs = json.loads((ROOT / "benchmarks" / "results" / "plan_measured.json").read_text())["runs"].values()
    runs = [run for run in runs if "left_out" not in run and run["planned"]["bound_by"] == "device"]
    assert text.OWN_RUNS.startswith(f"{len(runs)} measured runs")
    reached = [run["planned"]["step_time_ms"] / run[run["compared"]]["step_time_ms"] for run in runs]
    assert pytest.approx([min(reached), max(reached)], abs=0.005) == text.OWN_SHARE
    memory = "peak_memory_reserved"
    reserved = [run[run["compared"]][memory] / run["planned"][memory] for run in runs]
    assert pytest.approx([min(reserved), max(reserved)], abs=0.001) == predict.RESERVED_SHARE


def test_what_published_runs_reached_is_what_their_plans_say():
    """The plans of benchmarks/plan_published.py."""
    planned = json.loads((ROOT / "benchmarks" / "results" / "plan_published.json").read_text())
    assert pytest.approx(planned["published_share"], abs=0.005) == text.PUBLISHED_SHARE
    runs = [run for run in planned["runs"].values() if not run["other_kind"]]
    agreeing = sum(not run["contradicts_itself"] for run in runs)
    assert f"{agreeing} of {len(runs)} published runs" == text.PUBLISHED_RUNS
