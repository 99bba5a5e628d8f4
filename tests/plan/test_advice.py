"""What a plan advises: the fastest configuration that fits, found without planning all of them.

Most tests search among plans of a formula, which can be compared with all there are.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import pathlib
import re
import shutil
import sys
import tempfile
import types

import pytest
from conftest import ROOT, forked, parse, start, words

import train_fsdp
from harness.base import UserError, find_gpu
from harness.base import gpus as gpu_names
from harness.base.gpus import GPUS
from harness.flags import parse_args
from harness.plan import fitting, gpus, own_plan, planning, text
from harness.plan import search as searching
from harness.plan.predict import Prediction

LEVELS = {"none": 10.0, "selective": 6.0, "full": 1.0}  # GiB a sequence


def by_formula(settings, capacity: float, world: int, **changed) -> types.SimpleNamespace:
    """A plan in which memory is linear in the batch and each microbatch costs something."""
    s = dataclasses.replace(settings, **changed)
    if s.zero_stage == 1 and s.gradient_accumulation_steps == 1:
        s = dataclasses.replace(s, zero_stage=2)  # the same program
    shards = world // (world if s.zero_stage == 0 else s.dp_replicate_size)
    states = 0 if s.cpu_offload else (32 if s.optimizer == "adamw" else 20) / shards
    level = LEVELS[s.activation_checkpointing]
    whole = {3: 0.5, 2: 4, 1: 8, 0: 8}[s.zero_stage]
    reserved = 2 + states + whole + level * s.batch_size
    products = 100 * s.batch_size * s.gradient_accumulation_steps * (4 / 3 if level == 1.0 else 1)
    traffic = {3: 40, 2: 25, 1: 20, 0: 45}[s.zero_stage] / s.dp_replicate_size
    step = products + traffic * s.gradient_accumulation_steps + 1000 * s.cpu_offload + 5 * (level == 6.0) + 10
    return types.SimpleNamespace(  # the fields of a Prediction that a search reads
        capacity_gib=capacity,
        fits=reserved <= capacity,
        verdict=gpus.verdict_of(reserved, capacity),
        memory_gib={"reserved": reserved, "host": 0.0},
        at_peak_gib={},
        step_time_ms=step,
        time_ms={"matmul": 0.8 * products, "attention": 0.2 * products},
        tokens_per_sec=1000 * s.tokens_per_step(world) / step,
        mfu_percent=None,
        cost_per_billion_tokens=None,
    )


def searched(flags: str, capacity: float, world: int = 16, seconds: float = 60, free: bool = False):
    """(settings, the finished search, how many plans it took)."""
    settings = parse(["--plan", "--no-compile", *words(flags)])
    settings = dataclasses.replace(settings, compile=False, fused_loss=True, sequence_length=8192)
    plans = functools.cache(functools.partial(by_formula, settings, capacity, world))
    search = searching.search(settings, None, plans, world, searching.Clock(seconds), free)
    return settings, search, plans.cache_info().currsize


@pytest.mark.parametrize("capacity", [200, 60, 30, 24, 14, 8])
@pytest.mark.parametrize(
    "flags", ["--batch-size 1", "--batch-size 4 --gradient-accumulation-steps 2", "--batch-size 2 --zero-stage 1"]
)
def test_the_search_finds_what_planning_everything_finds(flags, capacity):
    settings, search, planned = searched(flags, capacity)
    samples = settings.batch_size * settings.gradient_accumulation_steps
    everything = [
        by_formula(
            settings,
            capacity,
            16,
            zero_stage=stage,
            dp_replicate_size=replicas,
            activation_checkpointing=level,
            batch_size=size,
            gradient_accumulation_steps=samples // size,
        )
        for stage, replicas, level, size in itertools.product((0, 1, 2, 3), (1, 2), LEVELS, (1, 2, 4, 8))
        if samples % size == 0 and (stage or replicas == 1)
    ]
    with_room = [plan.tokens_per_sec for plan in everything if plan.verdict == "fits"]
    tight = [plan.tokens_per_sec for plan in everything if plan.verdict == "tight"]
    best = max(with_room or tight, default=None)
    assert search.complete
    fastest = search.fastest()
    assert fastest["verdict"] == "fits" or not with_room
    assert fastest["fits"] and fastest["tokens_per_step"] == settings.tokens_per_step(16)
    if best:
        assert fastest["tokens_per_sec"] * 1.01 >= best
        assert not {"optimizer", "cpu_offload"} & fastest["changes"].keys()
    else:
        assert {"optimizer", "cpu_offload"} & fastest["changes"].keys()
    asked = by_formula(settings, capacity, 16)
    assert fastest["tokens_per_sec"] >= asked.tokens_per_sec or asked.verdict != "fits"
    assert planned < 0.6 * len(everything)


def test_the_asked_configuration_is_advised_where_no_other_is_faster():
    _, search, _ = searched("--batch-size 1 --zero-stage 2 --dp-replicate-size 2", 200)
    result = search.result()
    assert result["fastest"]["asked"] and result["fastest"]["flags"] == "" and "fits_with" not in result
    keys = [tuple(row[name] for name in searching.SEARCHED) for row in result["configurations"]]
    assert len(keys) == len(set(keys))


def test_the_fastest_is_tight_only_where_nothing_else_fits():
    asked = 2 + 32 / 16 + 0.5 + LEVELS["none"]  # GiB
    _, search, _ = searched("--batch-size 1", asked / 0.95)
    best, shown = search.fastest(), search.result()["configurations"][0]
    assert (shown["asked"], shown["verdict"]) == (True, "tight")
    assert best["verdict"] == "fits" and not best["asked"]
    least = 2 + 32 / 16 + 0.5 + LEVELS["full"]
    _, search, _ = searched("--batch-size 1", least / 0.95)
    assert search.fastest()["verdict"] == "tight"
    assert not {"optimizer", "cpu_offload"} & search.fastest()["changes"].keys()


@pytest.mark.parametrize("reserved, verdict", [(92, "fits"), (92.1, "tight"), (100, "tight"), (100.1, "does not fit")])
def test_a_plan_is_judged_in_three_words(reserved, verdict):
    assert gpus.verdict_of(reserved, 100) == verdict


def test_the_tokens_of_a_step_stay_where_the_command_line_names_none():
    settings, search, _ = searched("", 79)
    assert {row["tokens_per_step"] for row in search.rows.values()} == {settings.tokens_per_step(16)}


def test_of_plans_within_a_hundredth_of_the_fastest_the_one_with_most_room_is_taken():
    _, search, _ = searched("--batch-size 4 --gradient-accumulation-steps 8", 200)
    with_room = search.with_room()
    best = max(row["tokens_per_sec"] for row in with_room)
    alike = [row for row in with_room if row["tokens_per_sec"] * 1.01 >= best]
    assert len(alike) > 1
    assert search.fastest()["reserved_gib"] == min(row["reserved_gib"] for row in alike)


def test_a_batch_that_may_grow_does_up_to_the_memory():
    settings, search, planned = searched("", 79, free=True)
    fastest = search.fastest()
    assert fastest["gradient_accumulation_steps"] == 1
    assert fastest["batch_size"] > 1 and fastest["reserved_gib"] + LEVELS["none"] > 0.92 * 79
    assert fastest["tokens_per_step"] == fastest["batch_size"] * settings.tokens_per_step(16)
    assert planned < 27
    assert not search.result()["search"]["keeps_batch"]


def test_a_batch_is_not_made_larger_for_less_than_a_hundredth():
    _, search, _ = searched("", 100_000, free=True)
    without_end = 1000 * 16 * 8192 / 100  # tokens/s of the products alone
    assert 0.98 * without_end < search.fastest()["tokens_per_sec"]
    assert search.fastest()["batch_size"] < 100


def test_one_gpu_has_one_stage():
    _, search, _ = searched("--batch-size 1", 200, world=1)
    assert {row["zero_stage"] for row in search.rows.values()} == {3}
    assert all("torchrun" not in row["command"] for row in search.rows.values())


def test_a_search_that_is_out_of_time_says_so_and_has_what_was_asked():
    _, search, planned = searched("--batch-size 4", 200, seconds=0)
    result = search.result()
    assert not result["search"]["complete"] and planned == result["search"]["planned"] <= 2
    assert result["configurations"][0]["asked"]


def test_no_plan_is_begun_that_would_not_be_ready_in_time(monkeypatch):
    """Each plan takes 4 s by a clock that only plans move."""
    now = [0.0]
    monkeypatch.setattr(searching.time, "monotonic", lambda: now[0])
    plans = by_formula
    monkeypatch.setattr(
        sys.modules[__name__], "by_formula", lambda *a, **k: now.__setitem__(0, now[0] + 4) or plans(*a, **k)
    )
    for seconds, least in (30, 6), (10, 2), (5, 1):
        now[0] = 0.0
        _, search, planned = searched("--batch-size 4", 200, seconds=seconds)
        assert now[0] <= seconds and planned >= least and not search.complete


def test_a_search_that_took_longer_than_it_was_given_says_so():
    found = {"planned": 1, "seconds": 11.9, "seconds_allowed": 10.0, "plan_seconds": 10.0, "complete": False}
    assert "too short" not in text.describe_search(found)
    assert "--plan-seconds 10 was too short" in text.describe_search(found | {"seconds": 12.1})


def test_what_makes_it_fit_is_the_same_run_where_there_is_one():
    settings, search, _ = searched("", 9.5, free=True)
    result = search.result()
    same = [row for row in search.rows.values() if row["flags"] == result["fits_with"]["flags"]]
    assert same[0]["tokens_per_step"] == settings.tokens_per_step(16) < result["fastest"]["tokens_per_step"]
    assert result["fastest"]["tokens_per_sec"] >= result["fits_with"]["tokens_per_sec"]
    result["search"] |= {"seconds": 1.0, "seconds_allowed": 30.0, "plan_seconds": 30.0}
    lines = text.describe_fastest(result | {"fits": False, "capacity_gib": 9.5, "published_share": (0.5, 0.8, 1.0)})
    assert lines["fits with"].startswith(result["fits_with"]["flags"]) and " to " in lines["fits with"]
    _, hopeless, _ = searched("--batch-size 1", 1.0)
    assert hopeless.result()["fits_with"] is None and hopeless.result()["fastest"] is None


def reserving(batch_size: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(memory_gib={"reserved": batch_size})


@pytest.mark.parametrize("kink, slope, capacity", [(0, 1.0, 20.5), (10, 3.0, 47.0), (3, 0.01, 12.0), (0, 9.0, 8.0)])
def test_the_largest_batch_that_fits_is_found_with_few_plans(kink, slope, capacity):
    planned = []

    def plan(batch_size):
        planned.append(batch_size)
        return reserving(10 + 0.1 * batch_size + slope * max(batch_size - kink, 0))

    size = fitting.largest_batch(plan, capacity)
    gib = {n: plan(n).memory_gib["reserved"] for n in range(1, fitting.MAX_BATCH_SIZE + 1)}
    room = [n for n in gib if gib[n] <= 0.92 * capacity]
    assert size == max(room or [n for n in gib if gib[n] <= capacity], default=0)
    assert len(planned) - fitting.MAX_BATCH_SIZE <= 8


def test_a_batch_that_fills_the_capacity_to_the_byte_fits():
    assert fitting.next_size({1: 1.0, 2: 2.0}, range(1, 17), 8.0) == 8


def test_batches_that_float8_does_not_take_are_not_planned():
    """8,196 is a multiple of 4, batch x sequence has to be one of 16."""
    settings = parse(["--plan", "--precision", "fp8", "--sequence-length", "8196", "--batch-size", "4"])
    assert fitting.largest_batch(reserving, 24.5, 4) == 20
    settings = dataclasses.replace(settings, compile=False, fused_loss=True, gradient_accumulation_steps=3)
    for free in (False, True):
        plan = functools.partial(by_formula, settings, 79, 16)
        found = searching.search(settings, None, plan, 16, searching.Clock(60), free)
        assert {row["batch_size"] % 4 for row in found.rows.values()} == {0}
        assert {row["batch_size"] for row in found.rows.values()} - {4}
    assert {changes.get("batch_size") for changes in fitting.memory_savers(settings)} == {None}


def test_a_command_trains_what_was_asked_with_the_changes_and_without_the_flags_of_plans():
    argv = words("--plan --plan_gpus=16 --plan-gpu B200 --json --lr 1e-3 --zero-stage 3 --no-fused-loss --no-own-plan")
    settings = parse([*argv, "--sample-prompt", "Once upon a time", "--plan-seconds", "5", "--gpu-hour-usd", "3"])
    said = searching.command(settings, 16, {"zero_stage": 2, "fused_loss": True})
    flags = "--lr 0.001 --zero-stage 2 --fused-loss --no-own-plan --sample-prompt 'Once upon a time'"
    assert said.startswith("torchrun --nnodes=2 --nproc_per_node=8 ") and said.endswith(f" train_fsdp.py {flags}")
    assert searching.command(settings, 4, {}).startswith("torchrun --nproc_per_node=4 train_fsdp.py --lr 0.001")
    assert searching.command(dataclasses.replace(settings, given={}), 1, {}) == "python train_fsdp.py"


# ----------------------------------------------------------------------------------------------------------------------
# Real plans, of the embedded model

DEMO = "--plan --demo --no-compile --plan-gpu H200 --sequence-length 512 --gpu-hour-usd 3 "


def plan(flags: str) -> str:
    """What a plan prints, by a clock on which each configuration takes a second, however busy the machine is."""
    said, _ = plan_and_count(flags)
    return said


def plan_and_count(flags: str) -> tuple[str, int]:
    """(what a plan prints, how many configurations it planned), in a process of its own: it makes a process group."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "planned.json"
        forked(1, plan_by_a_clock, flags, file)
        said, planned = json.loads(file.read_text())
        return said, planned


def plan_by_a_clock(flags: str, file: pathlib.Path) -> None:
    now, predict = [0], planning.predict

    def in_a_second(*args) -> Prediction:
        now[0] += 1
        return predict(*args)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(searching, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(planning, "predict", in_a_second)
        planning.plan(parse([*words(flags)]), train_fsdp.RECIPE)
    file.write_text(json.dumps([said.getvalue(), now[0]]))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A card on which the demo does not fit as asked."""
    rates = tmp_path_factory.mktemp("rates") / "small.json"
    rates.write_text(json.dumps({"memory_gib": 1.3}))
    flags = DEMO + f"--json --plan-gpus 2,16 --batch-size 8 --plan-seconds 12 --plan-rates {rates}"
    found = json.loads(plan(flags))
    return found, text.describe_plan(parse(words(f"{flags} --precision bf16")), found)


@pytest.mark.slow
def test_the_advised_command_does_what_the_plan_says_of_it(small):
    found, _ = small
    assert not found["fits"]
    for row in found["scaling"]:
        if "fastest" not in row:
            continue
        best, argv = row["fastest"], row["fastest"]["command"].split("train_fsdp.py ")[1].split()
        asked = f"--plan --json --plan-seconds 0 --plan-gpu H200 --plan-gpus {row['gpus']}"
        again = json.loads(plan(" ".join([*argv, asked])))
        assert again["memory_gib"]["reserved"] == pytest.approx(best["reserved_gib"])
        assert again["tokens_per_sec"] == pytest.approx(best["tokens_per_sec"])
        assert best["fits"] and row["fits_with"]["flags"]
    assert {row["gpus"] for row in found["scaling"] if "fastest" in row} == {2, 16}


@pytest.mark.slow
def test_a_plan_as_text_names_the_faster_flags_that_it_found():
    said = plan(DEMO + "--plan-gpus 2 --activation-checkpointing full --plan-seconds 8")
    unwrapped = re.sub(r"\n {11}", " ", said)
    assert re.search(r"^fastest +--.*: \+\d+ %, [\d,]+ tokens/s", unwrapped, re.MULTILINE)


def test_a_plan_that_is_not_to_search_plans_once(monkeypatch):
    said, planned = plan_and_count(DEMO + "--plan-gpus 2 --json --plan-seconds 0")
    found = json.loads(said)
    assert planned == 1
    assert found["verdict"] == "fits" and not {"fastest", "largest_batch_size"} & found.keys()
    monkeypatch.setattr(own_plan.subprocess, "Popen", lambda command, **_: command)
    monkeypatch.setattr(own_plan.dist, "get_world_size", lambda: 2)
    assert parse_args(own_plan.start_plan(parse(["--plan-gpu", "B200", "--precision", "bf16"]))[5:]).plan_seconds == 0


def test_a_plan_opens_with_the_answer_and_is_read_without_a_manual(small):
    found, text = small
    answer = text.split("\n\n")[0].splitlines()
    assert answer[0].startswith("verdict    does not fit: ")
    assert not any(line.startswith(("expect", "this run")) for line in answer)
    assert any(line.startswith("fastest    --") for line in answer)
    best = found["fastest"]
    command = next(line for line in answer if line.startswith("command"))
    assert command == f"command    {best['command']}"
    assert max(len(line) for line in text.splitlines() if "train_fsdp.py" not in line) <= 80
    memory = text.split("memory of the fullest GPU in GiB, as it is")[1].split("\n\n")[0].splitlines()
    bar = [line for line in memory if "│" in line]
    assert {line.split()[0] for line in bar} >= {"parameters", "activations", "LACKING"}
    assert sum(float(line[17:26].replace(",", "")) for line in bar[:-1]) == pytest.approx(
        found["memory_gib"]["reserved"], abs=0.05
    )
    assert len({line.index("│") for line in bar}) == 1
    for title in ("batch x", "\n    GPUs replicas", "time of a step, ms", "\nassumptions"):
        assert text.index("verdict") < text.index(title)
    assert text.index("assumptions") > text.index("time of a step, ms")


def test_a_runs_hours_and_dollars_are_its_steps_times_the_plans(monkeypatch):
    result = json.loads(plan(DEMO + "--json --plan-seconds 0 --plan-gpus 4 --num-steps 5000"))
    hours = 5000 * result["step_time_ms"] / 1000 / 3600
    assert result["run"] == {
        "steps": 5000,
        "hours": pytest.approx(hours),
        "gpu_hour_usd": 3,
        "cost": pytest.approx(12 * hours),
    }
    run = {"steps": 5000, "hours": 5.2, "gpu_hour_usd": 3, "cost": 62.4}
    result |= {"run": run, "published_share": (0.62, 0.84, 1.08)}
    settings = dataclasses.replace(parse(words(DEMO)), batch_size=8, sequence_length=512)
    said = text.describe_speed(settings, result)
    assert said["this run"].startswith(
        "5 h 12 min (4 h 49 min to 8 h 23 min), $62 ($58 to $101) (4 GPUs at $3); 5,000 steps"
    )
    assert "(" not in said["expect"].split(" tokens/s")[0] and "62 to 108 %" in said["expect"]
    measured = text.describe_speed(settings, result | {"published_share": None})
    assert measured["this run"].startswith("5 h 12 min, $62 (4 GPUs at $3);") and " to " not in measured["expect"]


@pytest.mark.slow
def test_a_plan_of_several_sizes_has_gib_and_dollars_of_each():
    text = plan(DEMO + "--plan-seconds 0 --plan-gpus 2,4")
    head, row = text.split("    GPUs replicas")[1].splitlines()[:2]
    assert head.split()[0] == "GPU" and head.endswith("tokens")
    found = json.loads(plan(DEMO + "--json --plan-seconds 0 --plan-gpus 2,4"))["scaling"]
    assert [float(word) for word in row.split()[2:3]] == [pytest.approx(found[0]["reserved_gib"], abs=0.06)]
    assert float(row.split()[-1]) == pytest.approx(found[0]["cost_per_billion_tokens"], abs=0.006)


# ----------------------------------------------------------------------------------------------------------------------
# What it computes with


def test_what_published_runs_reached_is_what_their_plans_say():
    """The plans of benchmarks/plan_published.py."""
    planned = json.loads((ROOT / "benchmarks" / "results" / "plan_published.json").read_text())
    assert pytest.approx(planned["published_share"], abs=0.005) == gpus.PUBLISHED_SHARE
    assert pytest.approx(planned["published_memory_share"], abs=0.005) == gpus.PUBLISHED_MEMORY_SHARE
    runs = [run for run in planned["runs"].values() if not run["other_kind"]]
    agreeing = sum(not run["contradicts_itself"] for run in runs)
    assert f"{agreeing} of {len(runs)} published runs" == gpus.PUBLISHED_RUNS
    of_memory = sum(run["memory_gib"] is not None for run in runs)
    assert f"{of_memory} published runs" == gpus.PUBLISHED_MEMORY_RUNS


def test_the_kinds_that_an_error_lists_are_those_that_plans_know():
    listed = {find_gpu(name).name for name in gpu_names.PLANNED}
    assert listed == {kind.name for kind in GPUS if kind.memory_gib}
    assert len(listed) == len(gpu_names.PLANNED)


@pytest.mark.parametrize(
    "typed, kind, others",
    [
        ("H100", "H100 SXM", ["H100 PCIe", "H100 NVL"]),
        ("H100 80GB", "H100 SXM", ["H100 PCIe"]),
        ("h100-nvl", "H100 NVL", []),
        ("H100SXM", "H100 SXM", []),
        ("H100 94GB", "H100 NVL", []),
        ("A100", "A100 80GB", ["A100 40GB"]),
        ("a100-40g", "A100 40GB", []),
        ("H200", "H200", ["H200 NVL"]),
        ("H200 SXM", "H200", []),
        ("RTX4090", "RTX 4090", []),
        ("NVIDIA H200", "NVIDIA H200", []),  # a driver's name is one kind's
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", []),
        ("RTX 4090 D", "", []),
        ("H100 40GB", "", []),
        ("L40", "", []),
    ],
)
def test_a_bare_name_takes_the_usual_kind_and_says_which_others_there_are(typed, kind, others):
    assert gpu_names.choose_kind(typed) == (kind, others)
    if kind:
        rates = gpus.choose_rates(parse(["--plan", "--plan-gpu", typed, "--plan-rates", "none"]))
        assert rates.device == kind and find_gpu(kind).memory_gib == rates.memory_gib
        assert all(repr(other) in rates.taken for other in others) and bool(rates.taken) == bool(others)


VOODOO = r"Voodoo 7 (Ultra|Max),Voodoo 7 Ultra,1000,100,4000,450,50,2,0,0.9,0,the vendor's datasheet"

PEAK_AND_PLAN = """
import utils
from harness.flags.parser import parse_args
from harness.plan import planning
import train_fsdp

print(utils.get_gpu_peak_tflops("3dfx Voodoo 7 Max 100GB"))
flags = "--plan --json --demo --no-compile --plan-seconds 0 --plan-rates none --plan-gpus 1 --sequence-length 64"
planning.plan(parse_args([*flags.split(), "--plan-gpu", "Voodoo 7 Ultra"]), train_fsdp.RECIPE)
"""


@pytest.mark.slow
def test_a_gpu_is_added_by_one_row(tmp_path):
    """In a copy of the program: its peak is known by the driver's name, and --plan-gpu takes what users call it."""
    for name in ("train_fsdp.py", "utils.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("harness", "assets"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "assets" / "gpus.csv"
    table.write_text(f"{table.read_text()}{VOODOO}\n")
    process = start([sys.executable, "-c", PEAK_AND_PLAN], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert process.returncode == 0, process.stderr
    peak, _, plan = process.stdout.partition("\n")
    assert float(peak) == 1000
    found = json.loads(plan)
    assert (found["gpu"], found["capacity_gib"], found["verdict"]) == ("Voodoo 7 Ultra", 100, "fits")
    assert f"matmul_tflops {gpus.MODEL_MATMUL_EFFICIENCY * 0.9 * 1000:,.4g}" in found["assumptions"]["rates"]
    fp8 = gpus.MODEL_MATMUL_EFFICIENCY * gpus.FP8_MATMUL_SHARE * 2 * 1000  # no share in the row: the default
    assert f"fp8_tflops {fp8:,.4g}" in found["assumptions"]["rates"]


@pytest.mark.parametrize("typed, meant", [("H10", "H100 SXM or H100 PCIe or H100 NVL"), ("A6000", "RTX A6000")])
def test_a_gpu_that_plans_do_not_know_gets_the_nearest_and_all_kinds(typed, meant):
    said = gpu_names.unlisted(typed, {})
    assert f"did you mean {meant}?" in said and ", ".join(gpu_names.PLANNED) in said and "--plan-rates FILE" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "flags, contents, said",
    [
        ("--plan-gpu Voodoo", None, "--plan-gpu 'Voodoo': not a kind"),
        ("--plan-rates FILE", None, "No such file"),
        ("--plan-rates FILE", "{", "no JSON"),
        ("--plan-rates FILE", '{"memory_gib": Infinity}', "positive numbers"),
        ("--plan-rates FILE", '{"memory_gib": NaN}', "positive numbers"),
        ("--plan-rates FILE", '{"memory_gib": 1e300}', "positive numbers"),
        ("--plan-rates FILE", "[" * 100_000, "no JSON"),
        ("--plan-rates FILE", '{"memory": 1}', "no such rate: memory"),
        ("--plan-gpu A100 --precision fp8", None, "--precision fp8: needs a GPU with float8"),
        ("--plan-gpus 8,12 --dp-replicate-size 8", None, "--dp-replicate-size 8: does not divide --plan-gpus 12"),
    ],
)
def test_what_is_wrong_with_a_plans_flags_is_found_while_they_are_read(tmp_path, flags, contents, said):
    if contents:
        (tmp_path / "FILE").write_text(contents)
    with pytest.raises(UserError, match=said) as raised:
        parse(["--plan", *words(flags.replace("FILE", str(tmp_path / "FILE")))])
    assert "\n" not in str(raised.value)


def test_a_gpu_of_ones_own_is_planned_by_its_description(tmp_path):
    rates = tmp_path / "own.json"
    flags = f"--plan --plan-gpu RTX_6000_Ada --plan-rates {rates}"
    rates.write_text(json.dumps({"memory_gib": 47.4, "matmul_tflops": 218}))
    with pytest.raises(UserError, match=r"--plan-rates: 'RTX_6000_Ada' .* has to give attention_tflops, memory_gb"):
        parse(words(flags))
    rates.write_text(json.dumps(gpu_names.DESCRIBED | {"memory_gib": 47.4}))
    found = gpus.choose_rates(parse(words(flags)))
    assert (found.device, found.memory_gib, found.peak_tflops) == ("RTX_6000_Ada", 47.4, None)
    assert gpus.choose_rates(parse([*words(flags), "--peak-tflops", "364"])).peak_tflops == 364
    rates.write_text(json.dumps(gpu_names.DESCRIBED | {"peak_tflops": 300}))
    assert gpus.choose_rates(parse(words(flags))).peak_tflops == 300
