"""Sharding and every technique beside it change where numbers lie, not what they are.

tests/multirank.py trains with 1, 2 and 4 ranks, each once a session; every test here checks one claim on what it saw.
"""

import itertools

import multirank
import pytest
import torch
from conftest import ROOT, forked, losses_of, slow_case, words, write_model
from multirank import (
    COUNTED,
    FAMILIES,
    MODELS,
    NEAR,
    NEAR_STEPS,
    REPLICATED,
    ROUND_TRIPS,
    SAME_LOSSES,
    SIZES,
    STEPS,
    UNEVEN,
    resolved,
)

import train_fsdp
import utils
from harness import model as models
from harness.model.optimization import local

RANKS = (1, 2, 4)
GROUPS = MODELS["deep"][1]["num_hidden_layers"] + 1  # one for each decoder layer, and the root's


def get(observed: dict, kind: str, name: str):
    """What the workers saw of one case; fails with their traceback where there is none."""
    if name not in observed.get(kind, {}):
        pytest.fail(observed.get("errors", {}).get(f"{kind}: {name}") or observed["ending"], pytrace=False)
    return observed[kind][name]


def of_ranks(ranks: int, *values, id: str | None = None):
    """A case with so many ranks: four are slow."""
    return slow_case(ranks, *values, id=id) if ranks == 4 else pytest.param(ranks, *values, id=id)


def cases(table: dict) -> list:
    return [of_ranks(ranks, name, id=f"{ranks}-{name}") for ranks in RANKS for name in table[ranks]]


@pytest.mark.parametrize("ranks", [of_ranks(ranks) for ranks in RANKS])
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


@pytest.mark.slow
def test_three_ranks_divide_a_tied_embedding_that_does_not_divide_by_three(tmp_path):
    sizes = SIZES | {"vocab_size": 1538, "hidden_size": 64, "tie_word_embeddings": True}  # 513, 513 and 512 rows
    model = write_model(tmp_path / "model", "smollm3", **sizes)
    flags = ["--model", model, "--tokenizer", str(ROOT / "assets" / "demo"), "--dataset", "demo"]
    flags += words("--sequence-length 32 --precision fp32 --num-steps 4 --num-workers 0 --log-interval 1 --no-compile")
    flags += words("--eval-interval 4 --eval-steps 2 --checkpoint-interval 2 --no-async-checkpoint")
    flags += ["--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path)]
    forked(3, multirank.program, *flags, "--batch-size", "2", "--run-name", "three")
    forked(1, multirank.program, *flags, "--batch-size", "6", "--run-name", "one")
    three, one = losses_of(tmp_path / "three"), losses_of(tmp_path / "one")
    assert three == pytest.approx(one, rel=3e-6) and len(one) == 4 and one[-1] < one[0]
    saved = str(tmp_path / "three" / "checkpoints" / "step-00000002")
    forked(1, multirank.program, *flags, "--batch-size", "6", "--run-name", "again", "--resume", saved)
    assert losses_of(tmp_path / "again") == pytest.approx(one[2:], rel=1e-5)


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


@pytest.mark.parametrize("ranks", [1, slow_case(4)])
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_adamw_bf16_keeps_its_moments_in_half_the_bytes(observed, ranks):
    half, reference = (get(observed(ranks), "runs", name)["state_bytes"] for name in ("adamw-bf16", "stage 3"))
    assert half == pytest.approx(reference / 2, rel=0.01)


@pytest.mark.parametrize("ranks", [of_ranks(ranks) for ranks in RANKS])
@pytest.mark.parametrize("model, names", [("smollm3", SAME_LOSSES), ("uneven", dict.fromkeys(RANKS, UNEVEN))])
def test_first_weights_do_not_depend_on_ranks_or_stage(observed, ranks, model, names):
    reference = get(observed(1), "runs", {"smollm3": "stage 3", "uneven": "uneven stage 3"}[model])["initial_weights"]
    assert reference
    for name in names[ranks]:
        assert get(observed(ranks), "runs", name)["initial_weights"] == reference, name


@pytest.mark.parametrize("ranks", [2, slow_case(4)])
@pytest.mark.parametrize("name", ["stage 3", "stage 2", "stage 1", "uneven stage 3"])
def test_each_rank_holds_its_share_of_the_parameters_and_optimizer_states(observed, ranks, name):
    seen = get(observed(ranks), "runs", name)
    whole = get(observed(1), "runs", "uneven stage 3" if "uneven" in name else "stage 3")
    assert seen["largest_share"] == pytest.approx(1 / ranks, rel=0.02)
    assert seen["state_bytes"] == pytest.approx(whole["state_bytes"] / ranks, rel=0.02)


@pytest.mark.parametrize("ranks", [2, slow_case(4)])
def test_stage_0_holds_everything_on_each_rank(observed, ranks):
    assert get(observed(ranks), "runs", "stage 0")["largest_share"] == 1


@pytest.mark.slow
def test_two_replicas_of_two_shards_hold_a_half_each(observed):
    assert get(observed(4), "runs", "2 replicas")["largest_share"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_begin_equal_where_each_rank_draws_other_numbers(observed, name):
    first, second, third, fourth = get(observed(4), "replicas", name)
    assert (first, second) == (third, fourth)
    assert (first == second) == (name == "stage 0")  # else they are two shards


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


@pytest.mark.slow
def test_every_rank_has_a_dropout_of_its_own():
    assert "[True, False]" in forked(2, multirank.drawing_after_build, timeout=200).splitlines()


# ----------------------------------------------------------------------------------------------------------------------
# A rank that shards with nobody

ALONE = {
    "fp32": "--precision fp32",
    "bf16": "--precision bf16",
    "bf16-pure": "--precision bf16-pure",
    "bf16 in 2 microbatches, stage 1": "--precision bf16 --gradient-accumulation-steps 2 --zero-stage 1",
    "bf16-pure checkpointed": "--precision bf16-pure --activation-checkpointing full --gradient-accumulation-steps 2",
    "offloaded": "--precision bf16 --cpu-offload",
    "fp8": "--precision fp8 --fp8-emulate",
}


def train_alone(device, flags: str) -> tuple[list[torch.Tensor], list[torch.Tensor], object]:
    """(losses of three steps with an evaluation between them, the weights afterwards, the model)."""
    settings, config = resolved(["--demo", "--no-compile", "--sequence-length", 32, "--batch-size", 2, *flags.split()])
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    optimizer, losses = models.build_optimizer(settings, model), []
    tokens = torch.randint(1, 1000, (2, 33), generator=torch.Generator().manual_seed(1))
    batches = itertools.repeat({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
    for _ in range(3):
        losses.append(train_fsdp.train_step(settings, model, optimizer, batches, utils.PerformanceTracker())[0])
        with models.evaluating(model):
            losses.append(model(**next(batches), use_cache=False).loss)
    return losses, [local(parameter).detach().clone() for parameter in model.parameters()], model


@pytest.mark.parametrize("name", ALONE)
def test_leaving_out_the_copies_of_one_rank_changes_no_bit(device, monkeypatch, name):
    ours = train_alone(device, ALONE[name])
    monkeypatch.setattr("harness.model.collectives.alias_reduce_scatter_buffers", lambda *_: None)
    torchs = train_alone(device, ALONE[name])
    assert all(torch.equal(*pair) for pair in zip(ours[0] + ours[1], torchs[0] + torchs[1], strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Communication: all-gathers and reduce-scatters of parameters, and all-reduces of gradients, in one optimizer step of
# N microbatches. A layer is gathered for its forward and again for its backward, the root (embedding, norm, head) once.

# Of each configuration, for n microbatches: (all-gathers, reduce-scatters, all-reduces)
COMMUNICATION = {
    "stage 3": lambda n: (n * (2 * GROUPS - 1), n * GROUPS, 0),
    "stage 3 checkpointed": lambda n: (n * (2 * GROUPS - 1), n * GROUPS, 0),
    "stage 3 deferred": lambda n: (n * (2 * GROUPS - 1), GROUPS, 0),
    "stage 2": lambda n: (GROUPS, n * GROUPS, 0),
    "stage 2 deferred": lambda n: (GROUPS, GROUPS, 0),
    "stage 1": lambda n: (GROUPS, GROUPS, 0),
    "stage 0": lambda n: (0, 0, GROUPS),
    "2 replicas": lambda n: (n * (2 * GROUPS - 1), n * GROUPS, GROUPS),
    "2 replicas at stage 2": lambda n: (GROUPS, n * GROUPS, GROUPS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_communicates_as_its_stage_says(observed, name):
    counts = dict(get(observed(4), "collectives", name))
    gathers, scatters = counts.pop("c10d.allgather", 0), counts.pop("c10d.reduce_scatter", 0)
    # one is that of the gradient norm, where gradients are sharded, one brings the norms of replicas together
    sharded, replicated = "stage 0" not in name, "stage 0" in name or "replicas" in name
    reduces = counts.pop("c10d.allreduce", 0) - sharded - replicated
    assert not counts, "collectives that nobody expects"
    kind, microbatches = name.removesuffix(" microbatches").split(" in ")
    assert (gathers, scatters, reduces) == COMMUNICATION[kind](int(microbatches))
