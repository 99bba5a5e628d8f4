"""What a plan advises: what fits, and is faster, of a list of configurations planned one after the other.

Most tests search among plans of a formula, which can be compared with all there are.
"""

import dataclasses
import itertools
import json

import pytest
from conftest import ROOT, parse, python, words

from harness.base.errors import UserError
from harness.plan import planning, predict, search, text

LEVELS = {"none": 10.0, "selective": 6.0, "full": 1.0}  # GiB a sequence
UNSEARCHED = {"optimizer", "cpu_offload"}


def by_formula(s, world: int, capacity: float) -> dict:
    """A plan in which memory is linear in the batch and each microbatch costs something."""
    if s.zero_stage == 1 and s.gradient_accumulation_steps == 1:
        s = dataclasses.replace(s, zero_stage=2)  # the same program
    shards = world // (world if s.zero_stage == 0 else s.dp_replicate_size)
    states = 0 if s.cpu_offload else (32 if s.optimizer == "adamw" else 20) / shards
    level = LEVELS[s.activation_checkpointing]
    activations = level * s.batch_size
    reserved = 2 + states + {3: 0.5, 2: 4, 1: 8, 0: 8}[s.zero_stage] + activations
    products = 100 * s.batch_size * s.gradient_accumulation_steps * (4 / 3 if level == 1.0 else 1)
    traffic = {3: 40, 2: 25, 1: 20, 0: 45}[s.zero_stage] / s.dp_replicate_size
    step = products + traffic * s.gradient_accumulation_steps + 1000 * s.cpu_offload + 5 * (level == 6.0) + 10
    return {  # of a prediction what a search reads
        "gpus": world,
        "fits": reserved <= capacity,
        "verdict": predict.verdict_of(reserved, capacity),
        "memory_gib": {"reserved": reserved, "host": 0.0},
        "at_peak_gib": {"activations": activations},
        "step_time_ms": step,
        "tokens_per_sec": 1000 * s.tokens_per_step(world) / step,
    }


def searched(flags: str, capacity: float, worlds: tuple[int, ...] = (16,), plans: int = 1000) -> search.Search:
    """The finished search; `plans` is how many it has time for."""
    settings = parse(["--plan", "--no-compile", *words(flags)])
    settings = dataclasses.replace(settings, compile=False, fused_loss=True, sequence_length=8192)
    done = []

    def plan(settings, world):
        done.append(world)
        if len(done) == plans:
            found.ends = 0.0
        return by_formula(settings, world, capacity)

    found = search.Search(settings, None, worlds, plan, capacity, float("inf"))
    found.run()
    assert len(done) == len(found.rows) <= plans
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
    assert found.is_complete and len(found.rows) <= 14
    assert fastest["fits"] and fastest["tokens_per_step"] == settings.tokens_per_step(16)
    assert fastest["verdict"] == "fits" or not with_room
    if best:
        assert fastest["tokens_per_sec"] * 1.05 >= best
        assert not UNSEARCHED & fastest["changes"].keys()
    asked = found.row()
    assert fastest["tokens_per_sec"] * 1.01 >= asked["tokens_per_sec"] or asked["verdict"] != "fits"


def test_the_asked_configuration_is_advised_where_no_other_is_faster():
    found = searched("--batch-size 1 --zero-stage 2 --dp-replicate-size 2", 200)
    result = found.result()
    assert result["fastest"]["asked"] and result["fastest"]["flags"] == "" and result["fits_with"] is None


def test_the_fastest_is_tight_only_where_nothing_else_fits():
    asked = 2 + 32 / 16 + 0.5 + LEVELS["none"]  # GiB
    found = searched("--batch-size 1", asked / 0.95)
    assert found.row()["verdict"] == "tight"
    assert found.fastest()["verdict"] == "fits"
    least = 2 + 0.5 + LEVELS["full"]  # all that the host can take is there
    assert searched("--batch-size 1", least / 0.95).fastest()["verdict"] == "tight"


def test_fits_is_what_published_runs_took_of_their_plans():
    """One constant: a run may take as much more than its plan as the worst of those did."""
    for reserved, verdict in (100 / 1.19, "fits"), (84.1, "tight"), (100, "tight"), (100.1, "does not fit"):
        assert predict.verdict_of(reserved, 100) == verdict


def test_of_plans_within_a_hundredth_of_the_fastest_the_one_with_most_room_is_taken():
    found = searched("--batch-size 4 --gradient-accumulation-steps 8", 200)
    fitting = [row for row in found.rows.values() if row["verdict"] == "fits"]
    best = max(row["tokens_per_sec"] for row in fitting)
    alike = [row for row in fitting if row["tokens_per_sec"] * 1.01 >= best]
    assert found.fastest()["reserved_gib"] == min(row["reserved_gib"] for row in alike)


def test_a_batch_that_may_grow_does_up_to_the_memory():
    found = searched("--batch-size auto", 79)
    asked = found.result()
    assert asked["largest_batch_size"] == int((79 * predict.TIGHT - 2 - 2 - 0.5) / LEVELS["none"])
    assert found.fastest()["batch_size"] > asked["largest_batch_size"]  # with less to hold of each sequence


def test_what_fits_with_no_flag_fits_on_more_gpus():
    found = searched("--batch-size 1 --cpu-offload", 3.4, worlds=(2,))
    assert found.fastest() is None
    found = searched("--batch-size 1 --optimizer adamw8bit --cpu-offload", 3.6, worlds=(2,))
    assert found.fastest()["gpus"] == 2  # the host takes the states
    hopeless = searched("--batch-size 1", 1.0)
    assert hopeless.result()["fits_with"] is None and hopeless.result()["fastest"] is None


@pytest.mark.parametrize("plans", [1, 2, 3])
def test_a_search_that_is_out_of_time_has_the_best_of_what_it_planned(plans):
    found = searched("--batch-size 4", 30, plans=plans)  # does not fit as it is
    assert not found.is_complete and len(found.rows) == plans
    assert found.result()["configurations"][0]["asked"]


def test_other_numbers_of_gpus_have_what_was_asked_one_shard_group_a_node_and_the_fastest():
    found = searched("--batch-size 1 --activation-checkpointing full", 60, worlds=(8, 32))
    rows = [row for row in found.result()["configurations"] if row["gpus"] == 32]
    assert [row["dp_replicate_size"] for row in rows] == [1, 4, 1]
    assert rows[-1]["changes"] == found.fastest()["changes"] and found.fastest()["gpus"] == 8


@pytest.mark.parametrize("kink, slope, limit", [(0, 1.0, 20.5), (10, 3.0, 47.0), (3, 0.01, 12.0), (0, 9.0, 8.0)])
def test_the_largest_batch_that_fits_is_found_with_few_plans(kink, slope, limit):
    def activations(size):
        return 0.1 * size + slope * max(size - kink, 0)

    def plan(settings, world):
        found = activations(settings.batch_size)
        return by_formula(settings, world, limit) | {
            "memory_gib": {"reserved": 10 + found, "host": 0.0},
            "at_peak_gib": {"activations": found},
        }

    settings = parse(words("--plan --batch-size auto --sequence-length 8192"))
    search_of_sizes = search.Search(settings, None, (1,), plan, limit, float("inf"))
    options = [{"batch_size": size} for size in range(1, search.MAX_BATCH_SIZE + 1)]
    row = search_of_sizes.largest({}, options, limit)
    assert len(search_of_sizes.rows) <= 9
    fitting = [option["batch_size"] for option in options if 10 + activations(option["batch_size"]) <= limit]
    assert (row["batch_size"] if row else 0) == max(fitting, default=0)


def test_batches_that_float8_does_not_take_are_not_planned():
    """8,196 is a multiple of 4, batch x sequence has to be one of 16."""
    flags = "--precision fp8 --sequence-length 8196 --gradient-accumulation-steps 3 --batch-size"
    for size in ("4", "auto"):
        settings = parse(["--plan", *words(flags), size])
        settings = dataclasses.replace(settings, compile=False, fused_loss=True)
        found = search.Search(settings, None, (16,), lambda s, world: by_formula(s, world, 79), 79, float("inf"))
        found.run()
        assert {row["batch_size"] % 4 for row in found.rows.values()} == {0}


def test_a_command_trains_what_was_asked_with_the_changes_and_without_the_flags_of_plans():
    flags = "--plan --plan-gpus=16 --plan-gpu B200 --json --lr 1e-3 --zero-stage 3 --no-fused-loss --no-own-plan"
    settings = parse([*words(flags), "--sample-prompt", "Once upon", "--plan-seconds", "5", "--gpu-hour-usd", "3"])
    said = search.command(settings, 16, {"zero_stage": 2, "fused_loss": True})
    assert said.startswith("torchrun --nnodes=2 --nproc_per_node=8 ")
    given = ("--lr", "--zero-stage 2", "--fused-loss", "--no-own-plan", "--sample-prompt 'Once upon'")
    assert all(flag in said for flag in given) and "plan-" not in said and "--json" not in said
    assert search.command(settings, 4, {}).startswith("torchrun --nproc_per_node=4 train_fsdp.py ")
    assert search.command(settings, 1, {}).startswith("python train_fsdp.py ")


@pytest.mark.parametrize("world, whole", [(4, True), (8, True), (12, False), (16, True), (20, False)])
def test_a_world_that_is_no_whole_number_of_nodes_is_refused(world, whole):
    """What is priced is what the printed command starts."""
    if whole:
        planning.check_nodes((world,), 8)
        return
    with pytest.raises(UserError, match=rf"--plan-gpus {world}: .* --gpus-per-node 4$"):
        planning.check_nodes((world,), 8)


# ----------------------------------------------------------------------------------------------------------------------
# Real plans, of the embedded model

DEMO = "--plan --demo --no-compile --plan-rates none --plan-gpu H200 --sequence-length 512 --gpu-hour-usd 3"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The plan of a card on which the demo does not fit as asked: what it prints, with details and as JSON."""
    rates = tmp_path_factory.mktemp("rates") / "small.json"
    rates.write_text(json.dumps({"memory_gib": 1.3}))
    flags = [*words(DEMO), "--plan-rates", rates, *words("--plan-gpus 2 --batch-size 8 --num-tokens 10000000")]
    flags += ["--plan-seconds", "600"]  # enough to compare all three, on a busy machine too
    short, details = python(*flags), python(*flags, "--plan-details")
    found = json.loads(python(*flags, "--json").stdout)
    assert short.returncode == details.returncode == 0, short.stderr
    said, detailed = (process.stdout.partition("\n")[2] for process in (short, details))  # "... loading torch"
    return said, detailed, found, rates


@pytest.mark.slow
def test_a_plan_opens_with_the_answer_and_keeps_the_rest_for_who_asks(small):
    said, details, found, _ = small
    titles = [line.split()[0] for line in said.split("\n\n")[0].splitlines() if line[0] != " "]
    assert titles[:3] == ["verdict", "this", "fits"] and {"command", "tokens", "search"} <= {*titles}
    assert said.startswith("verdict    does not fit: ") and details.startswith("verdict")
    assert f"\ncommand    {found['fastest']['command']}\n" in said
    assert f"{found['fastest']['tokens_per_step']:,} a step, as asked" in said
    assert max(len(line) for line in details.splitlines() if "train_fsdp.py" not in line) <= 100
    for title in ("memory of the fullest GPU", "sent by each GPU", "time of a step", "assumptions"):
        assert title in details and title not in said
    assert "memory_gib 1.3" not in said and "matmul_tflops" in details


@pytest.mark.slow
def test_the_advised_command_does_what_the_plan_says_of_it(small):
    _, _, found, rates = small
    best = found["fastest"]
    argv = best["command"].split("train_fsdp.py ")[1].split()
    asked = words("--plan --json --plan-seconds 0 --plan-gpu H200 --plan-gpus 2")
    again = json.loads(python(*argv, *asked, "--plan-rates", rates).stdout)
    assert again["fits"] and best["fits"]
    assert again["memory_gib"]["reserved"] == pytest.approx(best["reserved_gib"])
    assert again["tokens_per_sec"] == pytest.approx(best["tokens_per_sec"])


def test_a_runs_hours_and_dollars_are_its_steps_times_the_plans():
    flags = [*words(DEMO), *words("--json --plan-seconds 0 --plan-gpus 4 --num-steps 5000")]
    result = json.loads(python(*flags).stdout)
    hours = 5000 * result["step_time_ms"] / 1000 / 3600
    run = {
        "steps": 5000,
        "tokens": 5000 * 4 * 4 * 512,
        "hours": pytest.approx(hours),
        "cost": pytest.approx(12 * hours),
    }
    assert result["run"] | {"tokens": run["tokens"]} == run
    assert result["run"]["tokens"] % 5000 == 0
    assert len(result["configurations"]) == 1  # a plan that is not to search plans once
    said = text.describe_speed(result | {"run": run | {"hours": 5.2, "cost": 62.4}, "published_share": (0.5, 0.8, 2.0)})
    assert said["this run"].startswith("5.2 h (2.6 h to 10.4 h), $62 ($31 to $125): 5,000 steps, ")
    assert "50 to 200 %" in said["expect"]


def test_what_published_runs_reached_is_what_their_plans_say():
    """The plans of benchmarks/plan_published.py."""
    planned = json.loads((ROOT / "benchmarks" / "results" / "plan_published.json").read_text())
    assert pytest.approx(planned["published_share"], abs=0.005) == text.PUBLISHED_SHARE
    assert pytest.approx(planned["published_memory_share"], abs=0.005) == predict.PUBLISHED_MEMORY_SHARE
    runs = [run for run in planned["runs"].values() if not run["other_kind"]]
    agreeing = sum(not run["contradicts_itself"] for run in runs)
    assert f"{agreeing} of {len(runs)} published runs" == text.PUBLISHED_RUNS
    of_memory = sum(run["memory_gib"] is not None for run in runs)
    assert f"{of_memory} published runs" == predict.PUBLISHED_MEMORY_RUNS
