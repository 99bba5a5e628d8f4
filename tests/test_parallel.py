"""Sharding and every technique beside it change where numbers lie, not what they are.

tests/multirank.py trains with 1, 2 and 4 ranks, each once a session; every test here checks one claim on what it saw.
"""

import pytest
from multirank import FAMILIES, MODELS, NEAR, NEAR_STEPS, ROUND_TRIPS, SAME_LOSSES, STEPS, UNEVEN

RANKS = (1, 2, 4)
GROUPS = MODELS["deep"][1]["num_hidden_layers"] + 1  # one for each decoder layer, and the root's


def get(observed: dict, kind: str, name: str):
    """What the workers saw of one case; fails with their traceback where there is none."""
    if name not in observed.get(kind, {}):
        pytest.fail(observed.get("errors", {}).get(f"{kind}: {name}") or observed["ending"], pytrace=False)
    return observed[kind][name]


def cases(table: dict) -> list:
    return [pytest.param(ranks, name, id=f"{ranks}-{name}") for ranks in RANKS for name in table[ranks]]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_ends_well(observed, ranks):
    assert "complete" in observed(ranks), observed(ranks)["ending"]
    assert not observed(ranks)["errors"]


@pytest.mark.parametrize("ranks, name", cases(SAME_LOSSES))
def test_losses_do_not_depend_on_ranks_stage_or_technique(observed, ranks, name):
    reference, seen = get(observed(1), "runs", "stage 3"), get(observed(ranks), "runs", name)
    assert len(seen["losses"]) == STEPS
    assert seen["losses"] == pytest.approx(reference["losses"], rel=3e-6)
    # Adam and clipping hide a gradient of the wrong size from the losses
    assert seen["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("ranks, name", cases(dict.fromkeys(RANKS, UNEVEN)))
def test_losses_do_not_depend_on_sizes_that_the_ranks_divide(observed, ranks, name):
    reference, seen = get(observed(1), "runs", "uneven stage 3"), get(observed(ranks), "runs", name)
    assert seen["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert seen["grad_norms"] == pytest.approx(reference["grad_norms"], rel=1e-3)


def test_the_reference_learns(observed):
    losses = get(observed(1), "runs", "stage 3")["losses"]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("ranks, name", cases(NEAR))
def test_losses_of_a_cheaper_precision_stay_near_those_of_fp32(observed, ranks, name):
    reference = get(observed(1), "runs", "stage 3")
    seen = get(observed(ranks), "runs", name)
    near = 3e-2 if "fp8" in name else 1e-2
    assert seen["losses"] == pytest.approx(reference["losses"][:NEAR_STEPS], rel=near)
    assert seen["grad_norms"][0] == pytest.approx(reference["grad_norms"][0], rel=near)
    assert seen["losses"] != pytest.approx(reference["losses"][:NEAR_STEPS], rel=1e-7)  # it is another computation


@pytest.mark.parametrize("ranks, name", [case for case in cases(NEAR) if "fp8" in case.values[1]])
def test_fp8_swaps_every_linear_of_the_decoder_layers(observed, ranks, name):
    seen = get(observed(ranks), "runs", name)
    assert seen["float8_linears"] == seen["linears"] == 2 * 7  # layers x (q, k, v, o, gate, up, down)


@pytest.mark.parametrize("ranks", (1, 4))
def test_only_bf16_pure_stores_parameters_in_bf16(observed, ranks):
    assert get(observed(ranks), "runs", "bf16-pure")["dtypes"] == ["torch.bfloat16"]
    for name in ("stage 3", "bf16", "fp8 tensorwise"):
        assert get(observed(ranks), "runs", name)["dtypes"] == ["torch.float32"]


def test_adamw8bit_keeps_the_states_of_the_embedding_in_a_byte_an_element(observed):
    eight, reference = (get(observed(2), "runs", name) for name in ("adamw8bit", "stage 3"))
    assert eight["optimizer"] == "AdamW8bit"
    elements = 1536 * 64 // 2  # of a rank; the other matrices are too small for it
    saved = 2 * elements * (4 - 1 - 4 / 256)  # of two moments: a byte each, and an fp32 scale for each 256
    assert reference["state_bytes"] - eight["state_bytes"] == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize("ranks", (1, 2))
def test_adamw_bf16_keeps_its_moments_in_half_the_bytes(observed, ranks):
    half, reference = (get(observed(ranks), "runs", name)["state_bytes"] for name in ("adamw-bf16", "stage 3"))
    assert half == pytest.approx(reference / 2, rel=0.01)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model, names", [("smollm3", SAME_LOSSES), ("uneven", dict.fromkeys(RANKS, UNEVEN))])
def test_first_weights_do_not_depend_on_ranks_or_stage(observed, ranks, model, names):
    reference = get(observed(1), "runs", {"smollm3": "stage 3", "uneven": "uneven stage 3"}[model])["initial_weights"]
    assert reference
    for name in names[ranks]:
        assert get(observed(ranks), "runs", name)["initial_weights"] == reference, name


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("name", ["stage 3", "stage 2", "stage 1", "uneven stage 3"])
def test_each_rank_holds_its_share_of_the_parameters_and_optimizer_states(observed, ranks, name):
    seen, whole = (get(observed(world), "runs", name) for world in (ranks, 1))
    assert seen["largest_share"] == pytest.approx(1 / ranks, rel=0.02)
    assert seen["state_bytes"] == pytest.approx(whole["state_bytes"] / ranks, rel=0.02)


@pytest.mark.parametrize("ranks", (2, 4))
def test_stage_0_holds_everything_on_each_rank(observed, ranks):
    assert get(observed(ranks), "runs", "stage 0")["largest_share"] == 1


def test_two_replicas_of_two_shards_hold_a_half_each(observed):
    assert get(observed(4), "runs", "2 replicas")["largest_share"] == 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_families_train_alike_on_one_and_two_ranks(observed, name):
    one, two = (get(observed(ranks), "families", name) for ranks in (1, 2))
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-3)
    assert two["initial_weights"] == one["initial_weights"]
    assert two["largest_share"] == pytest.approx(0.5, rel=0.02)
    assert one["losses"][1] < one["losses"][0]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_pretrained_weights_give_the_logits_that_transformers_gives(observed, name):
    assert get(observed(2), "round_trips", name) < 1e-4


# ----------------------------------------------------------------------------------------------------------------------
# Communication: all-gathers and reduce-scatters of parameters, and all-reduces of gradients, in one optimizer step of
# N microbatches. A layer is gathered for its forward and again for its backward, the root (embedding, norm, head) once.

N = (1, 3)


def collectives(observed: dict, name: str, microbatches: int) -> tuple[int, int, int]:
    counts = dict(get(observed, "collectives", f"{name} in {microbatches} microbatches"))
    gathers, scatters = counts.pop("c10d.allgather", 0), counts.pop("c10d.reduce_scatter", 0)
    # one is that of the gradient norm, where gradients are sharded
    reduces = counts.pop("c10d.allreduce", 0) - ("stage 0" not in name)
    assert not counts, "collectives that nobody expects"
    return gathers, scatters, reduces


@pytest.mark.parametrize("microbatches", N)
def test_stage_3_gathers_for_each_forward_and_backward_and_scatters_each_backward(observed, microbatches):
    expected = (microbatches * (2 * GROUPS - 1), microbatches * GROUPS, 0)
    assert collectives(observed(4), "stage 3", microbatches) == expected


@pytest.mark.parametrize("microbatches", N)
def test_deferred_sync_scatters_once_a_step(observed, microbatches):
    expected = (microbatches * (2 * GROUPS - 1), GROUPS, 0)
    assert collectives(observed(4), "stage 3 deferred", microbatches) == expected
    assert collectives(observed(4), "stage 2 deferred", microbatches) == (GROUPS, GROUPS, 0)


@pytest.mark.parametrize("microbatches", N)
def test_checkpointing_adds_no_communication(observed, microbatches):
    assert collectives(observed(4), "stage 3 checkpointed", microbatches) == collectives(
        observed(4), "stage 3", microbatches
    )


@pytest.mark.parametrize("microbatches", N)
def test_stage_2_gathers_once_a_step_and_scatters_each_backward(observed, microbatches):
    assert collectives(observed(4), "stage 2", microbatches) == (GROUPS, microbatches * GROUPS, 0)


@pytest.mark.parametrize("microbatches", N)
def test_stage_1_gathers_and_scatters_once_a_step(observed, microbatches):
    assert collectives(observed(4), "stage 1", microbatches) == (GROUPS, GROUPS, 0)


@pytest.mark.parametrize("microbatches", N)
def test_stage_0_reduces_gradients_once_a_step_and_gathers_nothing(observed, microbatches):
    assert collectives(observed(4), "stage 0", microbatches) == (0, 0, GROUPS)


@pytest.mark.parametrize("microbatches", N)
def test_replicas_reduce_their_gradients_once_a_step(observed, microbatches):
    expected = (microbatches * (2 * GROUPS - 1), microbatches * GROUPS, GROUPS)
    assert collectives(observed(4), "2 replicas", microbatches) == expected
    expected = (GROUPS, microbatches * GROUPS, GROUPS)
    assert collectives(observed(4), "2 replicas at stage 2", microbatches) == expected
