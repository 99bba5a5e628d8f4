"""Muon and NorMuon: the same on any sharding as on whole matrices in one process, each matrix computed once."""

import collections
import json
import math
import types

import muonranks
import pytest
import torch
from conftest import forked, losses_of, slow_case, words
from multirank import resolved
from muonranks import MODELS, case
from torch.optim import _muon as torchs
from transformers import AutoConfig

import train_fsdp
from harness.base.errors import UserError
from harness.model import newton_schulz, whole_matrices
from harness.model.matrices import matrix_weights
from harness.model.optimization import build_optimizer, clip_grad_norm, find_optimizer, local, parameter_bytes
from harness.model.weights import on_meta
from harness.model.whole_matrices import deal
from harness.report.header import describe_setup
from harness.state import TrainState

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    muonranks.write_models(folder)
    return folder


def model_of(name: str):
    model_type, sizes = MODELS[name]
    return on_meta(AutoConfig.for_model(model_type, **sizes))


# ----------------------------------------------------------------------------------------------------------------------
# The iteration


@pytest.mark.parametrize("iteration", ["newton-schulz", "polar-express"])
@pytest.mark.parametrize("shape", [(2, 24, 40), (3, 40, 24), (1, 16, 16)])
def test_a_stack_in_fp32_is_torchs_iteration_of_each_matrix_without_its_cast(monkeypatch, shape, iteration):
    monkeypatch.setattr(newton_schulz, "DTYPE", torch.float32)
    polynomials = muonranks.POLAR_EXPRESS if iteration == "polar-express" else None
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for matrix, result in zip(matrices, newton_schulz.orthogonalize(matrices, iteration), strict=True):
        whole = muonranks.zeropower(matrix, COEFFICIENTS, 5, 1e-7, polynomials)
        torch.testing.assert_close(result, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("multiplies_bf16, products", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_stack_in_bf16_is_torchs_iteration_but_for_the_rounding_of_sums(monkeypatch, multiplies_bf16, products):
    monkeypatch.setattr(newton_schulz, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    assert newton_schulz.dtype_of_products(torch.zeros(1, dtype=torch.bfloat16)) == products
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1))
    for matrix, result in zip(matrices, newton_schulz.orthogonalize(matrices), strict=True):
        whole = torchs._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        assert result.dtype == whole.dtype == torch.bfloat16
        assert (result.float() - whole.float()).norm() < 0.01 * whole.float().norm()


def test_the_iteration_keeps_singular_vectors_and_polar_express_comes_nearer_to_one(monkeypatch):
    monkeypatch.setattr(newton_schulz, "DTYPE", torch.float32)
    left, _, right = torch.linalg.svd(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
    matrix = left @ torch.diag(torch.logspace(-2, 0, 32)) @ right
    worst = {}
    for iteration in ("newton-schulz", "polar-express"):
        (result,) = newton_schulz.orthogonalize(matrix[None], iteration)
        values = left.T @ result @ right.T
        assert (values - torch.diag(values.diag())).abs().max() < 1e-4
        worst[iteration] = (values.diag() - 1).abs().max()
    assert worst["polar-express"] < 0.25 < worst["newton-schulz"] < 0.4


def test_a_matrix_of_zeros_stays_zero():
    for iteration in ("newton-schulz", "polar-express"):
        assert not newton_schulz.orthogonalize(torch.zeros(2, 8, 4), iteration).any()


# ----------------------------------------------------------------------------------------------------------------------
# Which matrices there are, and who computes them

COUNTS = {  # of a layer, by the last word of a parameter's name
    "llama": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 1),
    "fused": {"qkv_proj": 3, "o_proj": 1, "gate_up_proj": 2, "down_proj": 1},
    "experts": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate"), 1)
    | {"gate_up_proj": 12, "down_proj": 6},
    "interleaved": dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "router"), 1)
    | {"gate_up_proj": 12, "down_proj": 6},
    "transposed": {"c_attn": 3, "attn.c_proj": 1, "c_fc": 1, "mlp.c_proj": 1},
}


@pytest.mark.parametrize("name", COUNTS)
def test_fused_projections_and_experts_are_the_matrices_that_they_are(name):
    counts = {}
    for parameter, weight in matrix_weights(model_of(name)).items():
        words = parameter.removesuffix(".weight").split(".")
        if ".0." in parameter:
            counts[".".join(words[-2:]) if words[-1] == "c_proj" else words[-1]] = weight.count()
        assert sum(a * b for a, b in weight.sizes) * weight.count() == len(weight.sizes) * weight.shape.numel()
    assert counts == COUNTS[name]


def test_the_matrices_of_a_weight_are_views_of_any_of_its_rows():
    interleaved = matrix_weights(model_of("interleaved"))["model.layers.0.mlp.experts.gate_up_proj"]
    assert interleaved.is_transposed and interleaved.sizes == [(56, 48), (56, 48)]
    experts = torch.arange(48 * 112).view(1, 48, 112)
    gate, up = interleaved.split(experts)
    assert torch.equal(gate, experts[..., ::2]) and torch.equal(up, experts[..., 1::2])
    fused = matrix_weights(model_of("fused"))["model.layers.0.self_attn.qkv_proj.weight"]
    rows = torch.arange(96)[:, None]
    assert [part.flatten().tolist() for part in fused.split(rows[40:60], 40)] == [
        [*range(40, 48)],  # queries
        [*range(48, 60)],  # keys
        [],
    ]


def products(weight) -> int:
    """What orthogonalizing its matrices takes, in proportion."""
    return sum(min(sides) ** 2 * (2 * max(sides) + min(sides)) for sides in weight.sizes)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_weights_are_dealt_to_ranks_alike_in_batches_of_a_limited_size(monkeypatch, world):
    weights = list(matrix_weights(model_of("llama")).values()) * 6
    for limit in (10**9, 3 * 2 * 48 * 56, 1):
        monkeypatch.setattr(whole_matrices, "MAX_BATCH_BYTES", limit)
        owned, work = collections.Counter(), collections.Counter()
        for batch in deal(weights, world):
            assert len({weight.kind for of_rank in batch.owned for weight in of_rank}) == 1
            sizes = [2 * sum(weight.shape.numel() for weight in of_rank) for of_rank in batch.owned]
            assert max(sizes) <= limit or max(map(len, batch.owned)) == 1
            for rank, of_rank in enumerate(batch.owned):
                owned.update(of_rank)
                work[rank] += sum(map(products, of_rank))
        assert owned == collections.Counter(weights)
        assert max(work.values()) < 1.2 * min(work.values())


# ----------------------------------------------------------------------------------------------------------------------
# Equal to a plain reference

LIMITS = {"fp32": 1e-5, "bf16": 1e-4}
QUICK = {"muon": case("uneven", ""), "normuon": case("fused", "", "--optimizer normuon")}
ONE = {
    "experts": case("experts", ""),
    "experts, normuon": case("experts", "", "--optimizer normuon"),
    "interleaved": case("interleaved", "", "--optimizer normuon"),
    "interleaved, all experts chosen": case("all_chosen", "", iteration="bf16"),
    "transposed": case("transposed", ""),
    "normuon, original": case("fused", "", "--optimizer normuon --muon-scale original"),
    "polar express": case("llama", "", "--optimizer muon --muon-iteration polar-express"),
    "original": case("transposed", "", "--optimizer muon --muon-scale original"),
    "frozen": case("uneven", "", frozen="gate_proj"),
}
MANY = {
    2: QUICK | {"normuon": case("fused", "", "--optimizer normuon"), "bf16": case("uneven", "", iteration="bf16")},
    3: {"uneven": case("uneven", ""), "accumulating": case("uneven", "--gradient-accumulation-steps 4")},
    4: {
        "2 replicas": case("uneven", "--dp-replicate-size 2"),
        "2 replicas offloaded": case("uneven", "--dp-replicate-size 2 --cpu-offload"),
        "stage 0": case("uneven", "--zero-stage 0"),
        "stage 1 in 3 microbatches": case("uneven", "--zero-stage 1 --gradient-accumulation-steps 3"),
        "transposed, 2 replicas": case("transposed", "--dp-replicate-size 2"),
        "normuon, 2 replicas": case("fused", "--dp-replicate-size 2", "--optimizer normuon"),
        "experts": case("experts", "--dp-replicate-size 2", "--optimizer normuon"),
        "frozen": case("uneven", "", frozen="gate_proj"),
        "bf16": case("uneven", "--dp-replicate-size 2", iteration="bf16"),
    },
    8: {"ranks without a row": case("uneven", ""), "bf16": case("uneven", "", iteration="bf16")},
}


def check_losses(folder, ranks: int, runs: dict, steps: int = muonranks.STEPS) -> None:
    references, own = folder / f"reference-{ranks}.json", folder / f"own-{ranks}.json"
    plain = {name: muonranks.reference_of(run) for name, run in runs.items()}
    forked(1, muonranks.main, folder, plain, references, True, steps)
    forked(ranks, muonranks.main, folder, runs, own, False, steps)
    references, own = (json.loads(file.read_text()) for file in (references, own))
    for name, run in runs.items():
        worst = muonranks.worst_difference(own[name], references[name])
        assert len(own[name]) == steps and worst < LIMITS[run["iteration"]], name


def test_losses_of_two_ranks_are_those_of_whole_matrices_in_one_process(folder):
    check_losses(folder, 2, QUICK, steps=4)


@pytest.mark.slow
def test_losses_of_one_rank_are_those_of_torchs_muon(folder):
    check_losses(folder, 1, ONE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MANY)
def test_losses_of_many_ranks_are_those_of_whole_matrices_in_one_process(folder, ranks):
    check_losses(folder, ranks, MANY[ranks])


# ----------------------------------------------------------------------------------------------------------------------
# What is moved and held


@pytest.mark.parametrize(
    "ranks, flags, model",
    [
        (2, "--optimizer normuon", "uneven"),
        slow_case(4, "--optimizer muon", "uneven"),
        slow_case(4, "--optimizer normuon", "uneven"),
        slow_case(4, "--optimizer muon", "experts"),
    ],
)
def test_a_step_moves_what_the_formula_says_and_holds_what_the_file_says(folder, ranks, flags, model):
    """docs/OPTIMIZERS.md: each weight is sent to its owner and back, but for the owner's rows; slots that are left over
    are sent too. The norms of NorMuon's matrices take one all-reduce."""
    layout = "--dp-replicate-size 2" if ranks == 4 else ""
    out = folder / f"moves-{ranks}.json"
    forked(ranks, muonranks.moves, folder, case(model, layout, flags), out)
    everyone = json.loads(out.read_text())
    weights = list(matrix_weights(model_of(model)).values())
    divided = [weight for weight in weights if not weight.is_of_experts]
    replicas = 2 if layout else 1
    shards = ranks // replicas
    assert sum(rank["owned"] for rank in everyone) == len(divided)
    for rank in everyone:
        assert rank["calls"]["all_to_all"] == 2 * rank["batches"]
        gathered = rank["batches"] + len(weights) - len(divided)
        assert rank["calls"].get("all_gather", 0) == (gathered if replicas > 1 else 0)
        assert rank["calls"].get("all_reduce", 0) == ("normuon" in flags)
    sent = 0
    for batch in deal(divided, ranks):
        length, columns = batch.weight.shape
        sent += ranks * (shards - 1) * batch.slots * math.ceil(length / shards) * columns
    assert sum(rank["sent"]["all_to_all"] for rank in everyone) == 2 * 2 * sent  # bytes, there and back
    settings, config = resolved(["--model", folder / model, *flags.split()])
    parameters = sum(parameter.numel() for parameter in on_meta(config).parameters())
    states = parameter_bytes(settings, config).states * parameters
    assert sum(rank["states"] for rank in everyone) == pytest.approx(replicas * states, rel=1e-9)


RESUMES = [  # ranks, sequences of a microbatch, sharding
    (1, 12, ""),
    (2, 6, "--zero-stage 2"),
    (3, 4, "--zero-stage 3"),
    (4, 3, "--dp-replicate-size 2 --zero-stage 1"),
    (2, 6, "--zero-stage 0"),
    (1, 12, "--cpu-offload"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--optimizer muon --momentum-dtype bf16", "--optimizer normuon"])
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks_and_stages_as_if_nothing_had_been(folder, tmp_path, flags):
    """Of sizes that none of these numbers divides; two steps each, beside all of them on one rank."""
    common = words(f"{flags} --model {folder / 'uneven'} --dataset synthetic --sequence-length 32 --precision fp32")
    common += words(
        "--no-compile --lr-scheduler constant --lr 2e-3 --log-interval 1 --final-checkpoint --num-workers 0"
    )
    common += ["--output-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    steps = 0
    for ranks, batch_size, sharding in RESUMES:
        steps += 2
        more = f"--run-name r --resume auto --num-steps {steps} --batch-size {batch_size} {sharding}"
        forked(ranks, muonranks.train, [*common, *words(more)])
    forked(1, muonranks.train, [*common, *words(f"--run-name whole --num-steps {steps} --batch-size 12")])
    assert len(losses_of(tmp_path / "whole")) == steps
    assert losses_of(tmp_path / "r") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


@pytest.fixture
def built(device, folder):
    """`built(*flags)`: a model whose parameters have gradients, its optimizer, and its settings."""

    def build(*flags, model="llama"):
        settings, config = resolved(["--model", folder / model, "--precision", "fp32", "--no-compile", *flags])
        model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
        optimizer = build_optimizer(settings, model)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return model, optimizer, settings

    return build


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_momentum_in_bf16_takes_half_the_bytes_and_moves_weights_nearly_as_far(built, name):
    (model, optimizer, _), (other, exact, _) = (
        built("--optimizer", name, "--momentum-dtype", dtype) for dtype in ("bf16", "fp32")
    )
    weight, same = (of.model.layers[0].mlp.up_proj.weight for of in (model, other))
    before = local(weight).detach().clone()
    for of in (optimizer, exact):
        clip_grad_norm(of, 1.0)
        of.step()
    momentum, full = local(optimizer.state[weight]["momentum"]), local(exact.state[same]["momentum"])
    assert momentum.dtype == torch.bfloat16 and 2 * momentum.nbytes == full.nbytes
    moved, wanted = local(weight) - before, local(same) - before
    assert (moved - wanted).norm() < 0.02 * wanted.norm()


def test_embedding_head_norms_and_biases_are_adamws_at_its_own_rate(built):
    model, optimizer, _ = built("--optimizer", "muon", "--lr", "0.01", "--adamw-lr", "0.003", "--weight-decay", "0.2")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muons, decayed, others = (
        (group["lr"], group["weight_decay"], {names[id(p)].split(".")[-2] for p in group["params"]})
        for group in optimizer.param_groups
    )
    assert muons == (0.01, 0.2, {*COUNTS["llama"]})
    assert decayed == (0.003, 0.2, {"embed_tokens", "lm_head"})
    assert others == (0.003, 0.0, {"input_layernorm", "post_attention_layernorm", "norm"})
    _, optimizer, _ = built("--optimizer", "muon", "--lr", "0.01")
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_a_parameter_without_gradient_is_left_as_it_is_until_it_has_one(built):
    model, optimizer, _ = built("--optimizer", "normuon")
    weight, other = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    before, moved = local(weight).clone(), local(other).clone()
    weight.grad = None
    clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    assert torch.equal(local(weight), before) and not torch.equal(local(other), moved)
    assert not any(local(state).any() for state in optimizer.state[weight].values())
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(local(weight), before)
    assert all(local(state).any() for state in optimizer.state[weight].values())


def test_gradients_are_scaled_down_to_the_norm_before_they_move_the_momentum(built):
    model, optimizer, _ = built("--optimizer", "muon")
    weight = model.model.layers[0].mlp.up_proj.weight
    gradient = local(weight.grad).clone()
    norm = clip_grad_norm(optimizer, 0.5)
    optimizer.step()
    momentum = local(optimizer.state[weight]["momentum"])
    torch.testing.assert_close(momentum, 0.05 * gradient * 0.5 / norm, rtol=1e-4, atol=1e-9)
    assert optimizer.grad_scale is None


def test_match_rms_adamw_moves_each_number_by_a_fifth_of_the_rate(built):
    """So that AdamW's rate carries over: an orthogonal matrix times 0.2 sqrt(max(m, n)) has that root mean square."""
    for name in ("muon", "normuon"):
        model, optimizer, _ = built("--optimizer", name, "--lr", "0.01", "--weight-decay", "0")
        weight = model.model.layers[0].mlp.down_proj.weight
        before = local(weight).detach().clone()
        optimizer.step()
        moved = (local(weight) - before).square().mean().sqrt().item()
        assert moved == pytest.approx(0.2 * 0.01, rel=0.2 if name == "muon" else 0.01)


def test_weight_decay_shrinks_the_weight_by_the_rate_and_not_by_the_scale(built):
    after = []
    for decay in (0.0, 0.5):
        model, optimizer, _ = built("--optimizer", "muon", "--lr", "0.1", "--weight-decay", decay)
        weight = model.model.layers[0].mlp.down_proj.weight
        before = local(weight).detach().clone()
        optimizer.step()
        after.append(local(weight).detach())
    torch.testing.assert_close(after[1], after[0] - 0.1 * 0.5 * before)


def test_normuon_moves_each_neuron_as_far_and_keeps_its_second_moment(built):
    """In its first step the second moment is a twentieth of a neuron's own mean square."""
    moved, kept = {}, {}
    for name in ("muon", "normuon"):
        of, optimizer, _ = built("--optimizer", name, "--weight-decay", "0")
        weight = of.model.layers[0].mlp.up_proj.weight
        before = local(weight).detach().clone()
        optimizer.step()
        moved[name] = (local(weight).detach() - before).square().mean(1)
        kept[name] = optimizer.state[weight].get("second_moment")
    assert moved["normuon"].max() < 1.02 * moved["normuon"].min()
    assert moved["muon"].max() > 1.1 * moved["muon"].min()
    rate = 3e-4 * 0.2 * 56**0.5
    torch.testing.assert_close(local(kept["normuon"]).flatten(), 0.05 * moved["muon"] / rate**2, rtol=0.02, atol=0)


def test_normuon_refuses_linears_that_are_stored_input_by_output(built):
    with pytest.raises(UserError, match=r"^--optimizer normuon: GPT2LMHeadModel stores its linears input by"):
        built("--optimizer", "normuon", model="transposed")


def test_the_header_says_how_many_of_each_and_which(built):
    model, optimizer, settings = built("--optimizer", "muon", model="fused")
    data = types.SimpleNamespace(header={}, has_padding=False)
    mesh = next(model.parameters()).device_mesh
    header = " ".join(describe_setup(settings, TrainState(model, optimizer), mesh, data, "", None, "").split())
    assert "muon on 14 matrices (o_proj, qkv_proj, gate_up_proj, down_proj)" in header
    assert "adamw on 7 other parameters (embed_tokens," in header
    assert find_optimizer("adamw").describe is None
