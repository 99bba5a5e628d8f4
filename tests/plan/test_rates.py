"""Rates of a plan: a flat file, what --measure writes into it, and what a step takes at them."""

import json
import sys

import multirank
import pytest
from conftest import copy_program, forked, parse, python, start, words

from harness import job
from harness.base import find_gpu
from harness.base import gpus as gpu_names
from harness.base.errors import UserError
from harness.job import heartbeats
from harness.plan import measure, rates
from harness.plan.rates import Rates

VALUES = {"matmul_tflops": 2.0, "attention_tflops": 1.0, "memory_gb_per_s": 100.0, "host_us": 1000.0}
LINKS = {"intra_node_gb_per_s": 100.0, "inter_node_gb_per_s": 5.0}


def known(on_gpu: bool = True, **others: float) -> Rates:
    return Rates("a device", 1.0, None, VALUES | others, {}, on_gpu)


@pytest.mark.parametrize(
    "unit, flops, nbytes, seconds",
    [
        ("memory", 0, 1e9, 0.01),
        ("matmul", 4e12, 1e9, 2.0),
        ("matmul", 4e6, 1e9, 0.01),  # whichever takes longer
        ("attention", 4e12, 0, 4.0),
        ("fp8", 4e12, 0, 2.0),  # as it multiplies in bf16, where nothing is known of float8
        ("grouped", 4e12, 0, 2.0 / rates.GROUPED_SHARE),
    ],
)
def test_an_operator_takes_what_its_flops_or_its_bytes_take(unit, flops, nbytes, seconds):
    assert known().seconds_of(unit, flops, nbytes) == pytest.approx(seconds)
    assert known(kernel_us=1e7).seconds_of(unit, flops, nbytes) == 10.0


@pytest.mark.parametrize(
    "kind, ranks, nodes, of_node, sending, hops",
    [
        ("all_gather", 8, 1, 8, 0.08, 7 * rates.LINK_HOP),  # a ring
        ("all_reduce", 8, 1, 8, 0.08, 7 * rates.LINK_HOP * 2 * 3 / 8),  # a tree, up and down
        ("all_gather", 16, 2, 8, 0.2, 14 * rates.LINK_HOP + rates.NETWORK_HOP),
        ("all_gather", 12, 3, 4, 0.4, 9 * rates.LINK_HOP + 2 * rates.NETWORK_HOP),
    ],
)
def test_a_collective_takes_its_bytes_and_the_hops_of_its_ring_or_tree(kind, ranks, nodes, of_node, sending, hops):
    """Three calls, and 8 GB sent over 100 GB/s in a node, or 5 GB/s of each rank of a node between nodes."""
    seconds = known(**LINKS).seconds_of_collective(kind, ranks, nodes, of_node, 3, 8e9)
    assert seconds - sending == pytest.approx(3 * hops, rel=1e-6)


def test_on_a_processor_nothing_runs_beside_anything_and_on_a_gpu_launches_and_collectives_do():
    group = ("forward", "all_gather", 2, 1, 2)
    counts = {("seconds", "forward", "matmul"): 10.0, ("dispatches", "forward"): 2000}
    counts |= {("calls", *group): 1, ("sent_bytes", *group): 1e11}
    on_cpu = rates.price_step(counts, known(on_gpu=False, **LINKS))
    assert (on_cpu["exposed"], on_cpu["step"]) == (pytest.approx(1.0, rel=1e-3), pytest.approx(10 + 1 + 2, rel=1e-3))
    assert on_cpu["gaps"] == 0
    on_gpu = rates.price_step(counts, known(**LINKS))
    assert (on_gpu["exposed"], on_gpu["launches"]) == (0, 0)
    assert on_gpu["step"] == pytest.approx(10 + rates.CONTENTION, rel=1e-3)
    counts |= {("end_calls", *group): 1, ("end_bytes", *group): 1e11}
    assert rates.price_step(counts, known(**LINKS))["exposed"] == pytest.approx(1.0, rel=1e-3)
    counts["dispatches", "forward"] = 20_000
    bounded = rates.price_step(counts, known(**LINKS))
    assert (bounded["step"], bounded["host"]) == (pytest.approx(20.0), pytest.approx(20.0))
    counts[("kernels", "forward")] = 1e6  # between which the GPU idles for longer than the host takes
    counts[("seconds", "forward", "matmul")] = 20.0
    assert rates.price_step(counts, known(**LINKS))["launches"] == 0
    assert rates.price_step(counts, known(**LINKS))["gaps"] == pytest.approx(1e6 * rates.GAP_US / 1e6)


def test_the_kernels_of_a_compiled_region_take_the_host_longer_than_those_of_eager_code():
    eager, compiled = ({(name, "forward"): 1000} for name in ("dispatches", "launches"))
    host = [rates.price_step(counts, known(launch_us=3000.0))["step"] for counts in (eager, compiled)]
    assert host == pytest.approx([1.0, 3.0])


def test_the_copy_of_gradients_into_what_is_reduced_is_slower_than_other_copies_on_a_gpu():
    assert known().seconds_of("chunk_cat", 0, 1e9) == pytest.approx(0.01 / rates.CHUNK_CAT_SHARE)
    assert known(on_gpu=False).seconds_of("chunk_cat", 0, 1e9) == pytest.approx(0.01)


# ---- The file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["H100", "h100-nvl", "A100 80GB", "RTX4090", "4090", "a6000"])
def test_a_bare_name_takes_the_usual_kind_and_says_which_others_there_are(typed):
    kind, others = gpu_names.choose_kind(typed)
    found = rates.choose_rates(parse(["--plan", "--plan-gpu", typed, "--plan-rates", "none"]))
    assert found.device == kind and find_gpu(kind).memory_gib == found.memory_gib
    assert all(repr(other) in found.taken for other in others) and bool(found.taken) == bool(others)
    assert set(found.sources.values()) == {"assumed"}


@pytest.mark.parametrize(
    "contents, said",
    [
        ("{", "--plan-rates"),
        ('{"matmul_tflops": -1}', "needs a JSON object of positive numbers"),
        ('{"memory": 1}', "no such rate: memory"),
    ],
)
def test_a_file_that_holds_no_rates_is_a_mistake_in_one_line(tmp_path, contents, said):
    (tmp_path / "rates.json").write_text(contents)
    with pytest.raises(UserError, match=said) as raised:
        rates.choose_rates(parse(["--plan", "--plan-rates", tmp_path / "rates.json"]))
    assert "\n" not in str(raised.value)


def test_a_gpu_of_ones_own_is_planned_by_its_description(tmp_path):
    file = tmp_path / "own.json"
    flags = f"--plan --plan-gpu RTX_6000_Ada --plan-rates {file}"
    file.write_text(json.dumps({"memory_gib": 47.4, "matmul_tflops": 218}))
    with pytest.raises(UserError, match=r"--plan-rates: 'RTX_6000_Ada' .* has to give attention_tflops, memory_gb"):
        rates.choose_rates(parse(words(flags)))
    file.write_text(json.dumps(gpu_names.DESCRIBED | {"memory_gib": 47.4}))
    found = rates.choose_rates(parse(words(flags)))
    assert (found.device, found.memory_gib, found.peak_tflops) == ("RTX_6000_Ada", 47.4, None)
    assert found.sources["matmul_tflops"] == "given" and found.sources["host_us"] == "assumed"
    assert rates.choose_rates(parse([*words(flags), "--peak-tflops", "364"])).peak_tflops == 364
    file.write_text(json.dumps(gpu_names.DESCRIBED | {"peak_tflops": 300}))
    assert rates.choose_rates(parse(words(flags))).peak_tflops == 300


def test_a_plan_reads_what_was_measured_on_its_kind_of_gpu(tmp_path):
    file = rates.file_of("NVIDIA H200", str(tmp_path))
    file.parent.mkdir()
    file.write_text(json.dumps({"device": "NVIDIA H200", "date": "2026-01-01", "torch": "1", "matmul_tflops": 555}))
    plan = ["--plan", "--cache-dir", str(tmp_path), "--plan-gpu"]
    found = rates.choose_rates(parse([*plan, "H200"]))
    assert (found.values["matmul_tflops"], found.sources["matmul_tflops"]) == (555, "measured")
    assert found.sources["memory_gb_per_s"] == "assumed"
    for other in (["H100 SXM"], ["H200", "--plan-rates", "none"]):
        assert "measured" not in rates.choose_rates(parse([*plan, *other])).sources.values()
    with pytest.raises(UserError, match="--plan-gpu cpu: of a processor nothing is assumed"):
        rates.choose_rates(parse([*plan, "cpu"]))


VOODOO = r"Voodoo 7 (Ultra|Max),Voodoo 7 Ultra,1000,100,4000,450,50,2,0,0.9,0,the vendor's datasheet"


@pytest.mark.slow
def test_a_gpu_is_added_by_one_row(tmp_path):
    """In a copy of the program: --plan-gpu takes what users call it."""
    copy_program(tmp_path)
    table = tmp_path / "assets" / "gpus.csv"
    table.write_text(f"{table.read_text()}{VOODOO}\n")
    flags = "--plan --json --demo --no-compile --plan-seconds 0 --plan-rates none --plan-gpus 1 --sequence-length 64"
    process = start([sys.executable, "train_fsdp.py", *flags.split(), "--plan-gpu", "Voodoo 7 Ultra"], cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert (found["gpu"], found["capacity_gib"], found["verdict"]) == ("Voodoo 7 Ultra", 100, "fits")
    assert found["rates"]["matmul_tflops"]["value"] == pytest.approx(rates.MODEL_MATMUL_EFFICIENCY * 0.9 * 1000)
    fp8 = rates.FP8_MODEL_EFFICIENCY * rates.FP8_MATMUL_SHARE * 2 * 1000  # no share in the row: the default
    assert found["rates"]["fp8_tflops"]["value"] == pytest.approx(fp8)


# ---- Measuring -------------------------------------------------------------------------------------------------------


def test_a_slow_link_is_named_with_both_ends(monkeypatch):
    """Of six ranks on three nodes."""
    ranks = [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5), ("c", 6)]
    for place in (job, heartbeats):
        monkeypatch.setattr(place, "RANKS", ranks)
    speeds = [400.0, 40.0, 390.0, 41.0, 410.0, 20.0]  # to the next rank; 1, 3 and 5 are between nodes
    (line,) = measure.slow_links(speeds)
    ends = "rank 5 (c, pid 6) to rank 0 (a, pid 1)"
    assert line == f"link from {ends}: 20 GB/s, 40 is the median of those between nodes"


QUICK = words("--model demo --sequence-length 32 --batch-size 2 --no-compile --precision fp32")


@pytest.mark.slow
def test_measuring_names_a_slow_rank_and_a_plan_of_the_processor_reads_the_rates(tmp_path):
    """The second of two ranks does all work three times."""
    said = forked(2, multirank.measured, 1, *QUICK, "--cache-dir", str(tmp_path))
    assert any(line.startswith("slow       rank 1 (") for line in said.splitlines()), said
    written = json.loads((tmp_path / "rates" / "cpu.json").read_text())
    assert {*VALUES, "memory_gib", "intra_node_gb_per_s"} == written.keys() - set(gpu_names.ABOUT)
    plan = [*words("--plan --json --plan-seconds 0 --plan-gpu cpu --gpus-per-node 2 --cache-dir"), tmp_path, *QUICK]
    process = python(*plan, "--plan-gpus", 2)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["mfu_percent"] is None
    assert {rate["source"] for rate in found["rates"].values()} == {"measured"}
    assert found["time_ms"]["exposed"] == found["time_ms"]["communication"] > 0
    larger = json.loads(python(*plan, "--plan-gpus", 2, "--batch-size", 4).stdout)
    assert larger["step_time_ms"] > found["step_time_ms"]
    refused = python(*plan, "--plan-gpus", 4)
    assert refused.returncode == 2
    assert "--plan-gpus: inter_node_gb_per_s of cpu is not known" in refused.stderr
