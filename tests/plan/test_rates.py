"""A plan's time: measured by --measure where it was, scaled from what was, else assumed and said to be."""

import json
import math
from collections import Counter

import multirank
import pytest
import torch
from conftest import forked, parse, python, words

from harness.base import UserError
from harness.plan import calls, gpus, measure, operators, predict, rates
from harness.plan.operators import Layout
from harness.plan.rates import LIST, Operator, Rates

MM = Operator("aten::mm float32", "4x8 8x2", 128, 224)
SECTION = {
    "operators": {
        "aten::mm float32": [["4x8 8x2", 128, 224, 1.0], ["40x8 8x2", 1280, 2000, 5.0]],
        "aten::_fused_adamw_ float32": [[LIST, 0, 1000, 2.0]],
    },
    "collectives": {"all_gather 2 2": [[100, 1.0], [300, 2.0]]},
    "rates": {"matmul_tflops": 1e-10, "memory_gb_per_s": 1e-6},
    "host_us": 3e6,
    "launch_us": 5e5,
    "wait_us": 0.0,
}


def known(on_gpu: bool = False, section: dict = SECTION) -> Rates:
    return Rates("a device", 1.0, None, {}, on_gpu, section)


def test_an_operator_takes_what_was_measured_at_its_shape():
    assert known().time_of(MM) == (1.0, "measured")


def test_at_another_shape_it_takes_what_the_nearest_takes_in_proportion():
    assert known().time_of(MM._replace(shape="60x8 8x2", flops=1920)) == (7.5, "scaled")
    assert known().time_of(MM._replace(shape="1x8 8x2", flops=32)) == (0.5, "scaled")  # no less than a launch


def test_a_list_of_parameters_takes_time_with_its_bytes():
    assert known().time_of(Operator("aten::_fused_adamw_ float32", LIST, 0, 500)) == (1.0, "measured")


def test_of_what_was_not_measured_the_rate_of_its_class_is_taken():
    add = Operator("aten::add float32", "1000", 0, 4000)
    assert known().time_of(add) == (pytest.approx(4.0), "scaled")
    assumed = gpus.find_rates("H100 SXM", {})
    assert assumed.time_of(MM) == (gpus.KERNEL_US / 1e6, "assumed")
    large = MM._replace(flops=1e13)
    assert assumed.time_of(large).seconds == pytest.approx(10 / (gpus.MODEL_MATMUL_EFFICIENCY * 0.803 * 989))


def test_a_compiled_region_takes_what_it_was_measured_to_take_else_what_its_parts_do():
    region = Operator("region abc", "4x8", 128, 500)
    counts, step = {}, {("forward", region): 2, ("optimizer", MM): 1}
    parts = {region: Counter({MM: 1, Operator("fused", "", 0, 2000): 1})}
    apart = rates.predict_time(counts, step, parts, known())
    assert apart["step"] == pytest.approx(2 * (1.0 + 2.0) + 1.0)
    section = SECTION | {"operators": SECTION["operators"] | {"region abc": [["4x8", 128, 500, 0.6]]}}
    whole = rates.predict_time(counts, step, parts, known(section=section))
    assert whole["step"] == pytest.approx(2 * 0.6 + 1.0)
    assert whole["matmul"] + whole["memory"] == pytest.approx(1.2)
    assert whole["matmul"] == pytest.approx(0.4)  # a region's time is divided as its parts would take it


def test_on_a_processor_nothing_runs_beside_anything_and_on_a_gpu_launches_and_collectives_do():
    key = ("forward", "all_gather", 2, 2)
    counts = {("dispatches", "forward"): 2, ("calls", *key): 1, ("sent_bytes", *key): 100, ("whole_bytes", *key): 200}
    step = {("forward", MM): 10}
    one = rates.predict_time(counts, step, {}, known())
    assert one["step"] == pytest.approx(10 + 1.5 + 2 * 3.0)  # a collective between two measured sizes
    waits = rates.predict_time(counts, step, {}, known(section=SECTION | {"wait_us": 2e6}))
    assert (waits["exposed"], waits["step"]) == (pytest.approx(3.5), pytest.approx(one["step"] + 2.0))
    other = rates.predict_time(counts, step, {}, known(on_gpu=True))
    assert (other["exposed"], other["launches"]) == (0, 0)
    assert other["step"] == pytest.approx(10 + rates.CONTENTION * 1.5)
    counts["dispatches", "forward"] = 7
    waits = rates.predict_time(counts, step, {}, known(on_gpu=True))
    assert waits["step"] == pytest.approx(7 * 3.0)


@pytest.mark.parametrize(
    "kind, ranks, seconds",
    [
        ("all_gather", 8, 7 * rates.LINK_HOP),  # a ring
        ("all_reduce", 8, 7 * rates.LINK_HOP * 2 * 3 / 8),  # a tree, up and down
        ("all_gather", 16, 14 * rates.LINK_HOP + rates.NETWORK_HOP),
    ],
)
def test_a_small_collective_takes_the_hops_of_its_ring_or_tree(kind, ranks, seconds):
    """Three calls on nodes of 8, and 8 GB sent over 100 GB/s in a node, or 8 x 5 GB/s between nodes."""
    assumed = {"intra_node_gb_per_s": 100, "inter_node_gb_per_s": 5}
    time = Rates("a device", 1.0, None, assumed).time_of_collective(kind, ranks, 8, 3, 8e9, 0)
    sending = 0.08 if ranks == 8 else 0.2
    assert (time.seconds - sending, time.source) == (pytest.approx(3 * seconds, rel=1e-6), "assumed")


def test_of_a_ring_one_hop_of_each_node_leaves_it():
    group = ("forward", "all_gather", 16, 8)
    alone = ("forward", "all_gather", 1, 1)
    counts = {("calls", *group): 2.0, ("sent_bytes", *group): 8.0 * 2**30, ("calls", *alone): 5.0}
    (entry,) = predict.list_collectives(counts)
    assert (entry["calls"], entry["gib"], entry["gib_between_nodes"]) == (2, 8.0, 1.0)


def test_a_collective_that_was_not_measured_on_a_processor_is_an_error_that_says_how():
    with pytest.raises(UserError, match=r"torchrun --nproc_per_node=4 train_fsdp\.py --measure"):
        known().time_of_collective("all_gather", 4, 4, 1, 1.0, 1.0)


def contents(device: str = "CPU x", torch_version: str = "1", **sections) -> dict:
    return {"device": device, "versions": {"torch": torch_version}, "date": "2026-01-01", "sections": sections}


def test_a_new_measurement_keeps_what_an_earlier_one_by_the_same_versions_found(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(contents(**{"1": SECTION, "4": SECTION})))
    new = {"aten::mm float32": [["4x8 8x2", 128, 224, 0.5]]}
    merged = rates.merge(path, contents(**{"1": SECTION | {"operators": new}}))
    assert merged["sections"]["4"] == SECTION
    assert sorted(merged["sections"]["1"]["operators"]["aten::mm float32"]) == [
        ["40x8 8x2", 1280, 2000, 5.0],
        ["4x8 8x2", 128, 224, 0.5],
    ]
    other = rates.merge(path, contents(torch_version="2", **{"1": SECTION | {"operators": new}}))
    assert other["sections"] == {"1": SECTION | {"operators": new}}


@pytest.mark.parametrize("damage", ["{", '{"sections": {"1": {}}}', '{"sections": {"x": 1}}', '{"sections": []}'])
def test_a_damaged_file_is_a_mistake_in_one_line_and_measuring_replaces_it(tmp_path, damage):
    path = tmp_path / "rates.json"
    path.write_text(damage)
    with pytest.raises(UserError, match=f"--plan-rates {path}: ") as raised:
        rates.read_file(path)
    assert "\n" not in str(raised.value)
    new = contents(**{"1": SECTION})
    assert rates.merge(path, new) == new


def test_a_plan_reads_what_was_measured_on_its_kind_of_gpu(tmp_path):
    folder = rates.folder_of_rates(str(tmp_path))
    folder.mkdir()
    h200 = contents("NVIDIA H200", **{"1": SECTION}) | {"memory_gib": 139.7}
    rates.file_of("NVIDIA H200", str(tmp_path)).write_text(json.dumps(h200))
    plan = ["--plan", "--cache-dir", str(tmp_path), "--plan-gpu"]
    found = gpus.choose_rates(parse([*plan, "H200"]))
    assert found.sections == {"1": SECTION}
    assert "NVIDIA H200, 2026-01-01, torch 1" in found.source
    assert not gpus.choose_rates(parse([*plan, "H100 SXM"])).sections
    assert not gpus.choose_rates(parse([*plan, "H200", "--plan-rates", "none"])).sections
    with pytest.raises(UserError, match="--plan-gpu cpu: of a processor nothing is assumed"):
        gpus.choose_rates(parse([*plan, "cpu"]))


def test_a_slow_rank_is_named_with_its_host():
    ranks = [("node-a", 10), ("node-a", 11), ("node-b", 12), ("node-b", 13)]
    assert measure.slow_ranks([1.0, 1.05, 1.0, 1.2], ranks) == [
        "rank 3 (node-b, pid 13): 17 % slower than the median of the ranks"
    ]
    assert measure.slow_ranks([1.0, 1.05, 1.0, 1.1], ranks) == []


def test_a_slow_link_is_named_with_both_ends():
    ranks = [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5), ("c", 6)]
    speeds = [400.0, 40.0, 390.0, 41.0, 410.0, 20.0]  # to the next rank; 1, 3 and 5 are between nodes
    (line,) = measure.slow_links(speeds, ranks, {})
    assert line == "link from rank 5 (c, pid 6) to rank 0 (a, pid 1): 20 GB/s, 40 expected of a link between nodes"
    lines = measure.slow_links(speeds, ranks, {"in a node": 1000.0, "between nodes": 10.0})
    assert [line.split(" (")[0] for line in lines] == ["link from rank 0", "link from rank 2", "link from rank 4"]


def call(kind: str, operator, *arguments, flops: float = 0, working_set: float = 0) -> calls.Call:
    return calls.make_call(Operator(kind, "", flops, 8), operator, arguments, {}, torch.device("cpu"), working_set)


def laid_out(*shape: int, dtype: torch.dtype = torch.float32, stride: tuple | None = None) -> Layout:
    return Layout(dtype, shape, stride or torch.empty(shape).stride())


def test_what_an_operator_writes_into_is_as_it_was_before_each_look_at_the_clock():
    exponential = call("aten::exp_ float32", torch.ops.aten.exp_.default, laid_out(64), working_set=1000)
    before = exponential.copies[0][0][0].clone()
    for _ in range(20):
        exponential.restore()
        args, _ = exponential.copies[(exponential.turn + 1) % len(exponential.copies)]
        assert torch.equal(args[0], before)
        exponential()
        assert torch.equal(args[0], before.exp())
    assert len(exponential.copies) == math.ceil(1000 / 256)


def test_arguments_are_laid_out_as_they_were_recorded():
    product = call(
        "aten::mm float32", torch.ops.aten.mm.default, laid_out(4, 8), laid_out(8, 6, stride=(1, 8)), flops=9
    )
    left, right = product.copies[0][0]
    assert (left.shape, right.shape, right.stride()) == ((4, 8), (8, 6), (1, 8))
    rows, ids = laid_out(10, 4), laid_out(3, 5, dtype=torch.int64)
    product = call("aten::embedding float32 int64", torch.ops.aten.embedding.default, rows, ids)
    product()
    assert product.results[0].shape == (3, 5, 4)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_is_timed_with_the_devices_own_kernel_and_with_shared_heads(backward):
    name = f"_scaled_dot_product_flash_attention_for_cpu{'_backward' * backward}"
    query, key = laid_out(2, 4, 16, 8), laid_out(2, 2, 16, 8)
    arguments = (
        (query, query, key, key, query, laid_out(2, 4, 16), 0.0, True) if backward else (query, key, key, 0.0, True)
    )
    kind = f"attention {'backward' if backward else 'forward'} float32"
    timed = call(kind, getattr(torch.ops.aten, name).default, *arguments, flops=9)
    timed()
    shapes = [tuple(tensor.shape) for tensor in operators.tensors_in(timed.results[0])]
    assert shapes == [(2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)][: 3 if backward else 1]


def test_of_many_parameters_an_optimizer_is_timed_with_the_first(monkeypatch):
    monkeypatch.setattr(calls, "MAX_OPTIMIZER_BYTES", 1000)
    lists = [[laid_out(100)] * 10, [laid_out(100)] * 10]
    operator = Operator("aten::_foreach_add_.List float32", LIST, 0, 0)
    added = calls.make_call(operator, torch.ops.aten._foreach_add_.List, lists, {}, torch.device("cpu"), 0)
    assert len(added.copies[0][0][0]) == 3
    assert added.nbytes == 3 * 3 * 400  # reads two lists, writes one


QUICK = words("--model demo --sequence-length 32 --batch-size 2 --no-compile --precision fp32")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(what --measure of two ranks says, where it wrote); the second rank does all work twice."""
    folder = tmp_path_factory.mktemp("measured")
    return forked(2, multirank.measured, 1, *QUICK, "--cache-dir", str(folder)), folder


def test_measuring_names_a_rank_that_is_slower_than_the_others(two_ranks):
    said, _ = two_ranks
    (line,) = [
        line for line in said.splitlines() if line.startswith("slow ") and "rank 1 (" in line and "median" in line
    ]
    assert "% slower than the median of the ranks" in line
    assert "check      a real step of 4 layers took " in said


def test_a_plan_says_what_was_measured_and_of_other_sizes_what_was_scaled(two_ranks):
    _, folder = two_ranks
    plan = [*words("--plan --json --plan-seconds 0 --plan-gpu cpu --gpus-per-node 2 --cache-dir"), folder, *QUICK]
    process = python(*plan, "--plan-gpus", 2)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["gpu"].startswith("CPU ")
    assert found["mfu_percent"] is None
    assert found["time_sources"]["measured"] > 0.95
    assert found["time_ms"]["exposed"] == found["time_ms"]["communication"] > 0
    assert "% measured, " in found["assumptions"]["rates"]
    larger = json.loads(python(*plan, "--plan-gpus", 2, "--batch-size", 4).stdout)
    assert larger["time_sources"]["scaled"] > 0.1 > found["time_sources"].get("scaled", 0)
    assert larger["step_time_ms"] > found["step_time_ms"]
    refused = python(*plan, "--plan-gpus", 4)
    assert refused.returncode == 2
    assert "--plan-gpus: all_gather over 4 ranks was not measured" in refused.stderr
