"""Sharding and every technique beside it change where numbers lie, not what they are.

tests/multirank.py trains on one rank and on four; each test here checks one claim about its results.
"""

import concurrent.futures
import json

import multirank
import pytest
from conftest import forked, slow_case
from filelock import FileLock
from multirank import (
    ALONE,
    ALONE_NEAR,
    COMPILED,
    QUICK,
    QUICK_NEAR,
    QUICK_TRIPS,
    REPLICATED,
    ROUND_TRIPS,
    SLOW,
    SLOW_NEAR,
)

SAME = ALONE | COMPILED | QUICK | SLOW
REFERENCES = {model: (model, "") for model, _ in SAME.values()}


@pytest.fixture(scope="session")
def observed(request, workspace):
    """The results of this tier's configurations on one rank and on four, {ranks: ...}; all processes of this test run
    share them."""
    one = {"same": REFERENCES | ALONE | COMPILED, "near": ALONE_NEAR, "replicas": {}, "round trips": {}}
    four = {"same": QUICK | SLOW, "near": QUICK_NEAR | SLOW_NEAR, "replicas": REPLICATED, "round trips": ROUND_TRIPS}
    if request.config.option.markexpr == "not slow":
        one["same"] = {model: (model, "") for model, _ in QUICK.values()} | ALONE
        four |= {"same": QUICK, "near": QUICK_NEAR, "replicas": {}, "round trips": QUICK_TRIPS}
    files = {ranks: workspace / f"observed-{ranks}.json" for ranks in (1, 4)}
    with FileLock(workspace / "observed.lock"), concurrent.futures.ThreadPoolExecutor() as threads:
        if not files[4].exists():
            worlds = ((1, one), (4, four))
            running = [threads.submit(forked, ranks, multirank.main, workspace, tables) for ranks, tables in worlds]
            for world in running:
                world.result()
    return {ranks: json.loads(file.read_text()) for ranks, file in files.items()}


def cases(quick: dict, slow: dict) -> list:
    return [*quick, *map(slow_case, slow)]


@pytest.mark.parametrize("name", cases(ALONE | QUICK, COMPILED | SLOW))
def test_losses_do_not_depend_on_ranks_stage_or_technique(observed, name):
    model, flags = SAME[name]
    ranks = 1 if name in ALONE | COMPILED else 4
    reference, seen = observed[1]["same"][model], observed[ranks]["same"][name]
    is_exact = model == "smollm3"
    assert len(seen["losses"]) == len(reference["losses"]) > 1
    assert reference["losses"][-1] < reference["losses"][0] - (0.3 if is_exact else 0)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=3e-6 if is_exact else 1e-5)
    # Adam and clipping hide a gradient of the wrong size from the losses
    assert seen["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4 if is_exact else 1e-3)
    assert seen["flops_per_token"] == reference["flops_per_token"]
    shards = 1 if "--zero-stage 0" in flags else ranks // 2 if "replicate" in flags else ranks
    assert seen["shares"] == pytest.approx([1 / shards] * 2, rel=0.02)  # of the parameters, and of optimizer states


@pytest.mark.parametrize("name", cases(ALONE_NEAR | QUICK_NEAR, SLOW_NEAR))
def test_losses_of_a_cheaper_precision_stay_near_those_of_fp32(observed, name):
    reference, seen = observed[1]["same"]["smollm3"], observed[1 if name in ALONE_NEAR else 4]["near"][name]
    near = 3e-2 if "fp8" in name else 1e-2
    assert seen["losses"] == pytest.approx(reference["losses"], rel=near)
    assert seen["grad_norms"][0] == pytest.approx(reference["grad_norms"][0], rel=near)
    assert seen["losses"] != pytest.approx(reference["losses"], rel=1e-7)  # it is another computation
    assert seen["flops_per_token"] == reference["flops_per_token"]
    assert seen["kinds_of_linears"] == ["Float8Linear" if "fp8" in name else "Linear"]  # of the decoder layers


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_begin_equal_where_each_rank_draws_other_numbers(observed, name):
    first, second, third, fourth = observed[4]["replicas"][name]
    assert (first, second) == (third, fourth)
    assert (first == second) == (name == "stage 0")  # else they are two shards


@pytest.mark.parametrize("name", [name if name in QUICK_TRIPS else slow_case(name) for name in ROUND_TRIPS])
def test_pretrained_weights_give_the_logits_that_transformers_gives(observed, name):
    assert observed[4]["round trips"][name] < 1e-4


def test_every_rank_has_a_dropout_of_its_own(observed):
    assert len(set(observed[4]["drawn after a build"])) == 4
