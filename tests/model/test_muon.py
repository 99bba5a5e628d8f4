"""Muon and NorMuon: the same on any sharding as on whole matrices in one process, each matrix computed once."""

import collections
import itertools
import json
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
from harness import report
from harness.model import newton_schulz
from harness.model.matrices import matrices_of_model
from harness.model.optimization import build_optimizer, clip_grad_norm, find_optimizer, local, parameter_bytes
from harness.model.weights import on_meta
from harness.model.whole_matrices import cost, divide, interleave, rows_held

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LAYOUTS = [(1, 1), (1, 2), (1, 3), (1, 8), (4, 1), (2, 2), (3, 4)]  # replicas and shards


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    muonranks.write_models(folder)
    return folder


def model_of(name: str):
    model_type, sizes = MODELS[name]
    return on_meta(AutoConfig.for_model(model_type, **sizes))


def all_matrices(name: str) -> list:
    found = matrices_of_model(model_of(name))
    return [matrix.of_parameter(index) for index, of in enumerate(found.values()) for matrix in of]


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
    model = model_of(name)
    found, parameters = matrices_of_model(model), dict(model.named_parameters())
    first_layer = {parameter: len(of) for parameter, of in found.items() if ".0." in parameter}
    counts = {}
    for parameter, count in first_layer.items():
        words = parameter.removesuffix(".weight").split(".")
        counts[".".join(words[-2:]) if words[-1] == "c_proj" else words[-1]] = count
    assert counts == COUNTS[name]
    for parameter, matrices in found.items():
        assert sum(len(m.rows) * len(m.columns) for m in matrices) == parameters[parameter].numel(), parameter


def test_the_halves_of_interleaved_experts_are_every_other_column():
    gate, up = matrices_of_model(model_of("interleaved"))["model.layers.0.mlp.experts.gate_up_proj"][:2]
    assert (gate.columns, up.columns) == (range(0, 112, 2), range(1, 112, 2))
    assert gate.is_transposed and gate.outputs_by_inputs == (56, 48)


def test_queries_keys_and_values_have_the_sizes_of_the_config():
    matrices = matrices_of_model(model_of("fused"))["model.layers.0.self_attn.qkv_proj.weight"]
    assert [matrix.rows for matrix in matrices] == [range(48), range(48, 72), range(72, 96)]


@pytest.mark.parametrize("name", [*COUNTS, "uneven"])
@pytest.mark.parametrize("replicas, shards", LAYOUTS)
def test_each_matrix_is_computed_once_in_the_world_and_each_of_its_rows_is_sent_once(name, replicas, shards):
    matrices = all_matrices(name)
    stacks = divide(matrices, replicas, shards)
    owned = collections.Counter()
    for stack in stacks:
        for replica, shard in itertools.product(range(replicas), range(shards)):
            of_rank = stack.owned[replica][shard]
            assert len({matrix.shape for matrix in of_rank}) <= 1
            owned.update(of_rank)
            for matrix in of_rank:
                held = [rows_held(matrix, other, shards) for other in range(shards)]
                assert [row for rows in held for row in rows] == list(range(len(matrix.rows)))
                if not stack.crosses_ranks:
                    assert len(held[shard]) == len(matrix.rows)
    assert owned == collections.Counter(matrices)


def test_ranks_have_about_as_much_to_do():
    matrices = all_matrices("llama") * 6
    work = collections.Counter()
    for stack in divide(matrices, 2, 3):
        for replica, shard in itertools.product(range(2), range(3)):
            work[replica, shard] += sum(map(cost, stack.owned[replica][shard]))
    assert max(work.values()) < 1.1 * min(work.values())


def test_a_stack_is_as_large_as_its_limit_and_a_larger_matrix_comes_alone(monkeypatch):
    matrices = [matrix for matrix in all_matrices("llama") if matrix.shape == (48, 48)]
    for limit, size in ((3 * 2 * 48 * 48, 3), (100, 1)):
        monkeypatch.setattr("harness.model.whole_matrices.MAX_STACK_BYTES", limit)
        assert {len(stack.owned[0][0]) for stack in divide(matrices * 3, 1, 1)} == {size}


def test_a_task_begins_before_the_one_before_it_goes_on():
    said = []

    def task(name):
        for part in range(2):
            said.append(f"{name}{part}")
            yield

    interleave(task(name) for name in "abc")
    assert said == ["a0", "b0", "a1", "c0", "b1", "c1"]


# ----------------------------------------------------------------------------------------------------------------------
# Equal to a plain reference

LIMITS = {"fp32": 1e-5, "bf16": 1e-4}
QUICK = {"muon": case("uneven", ""), "normuon": case("fused", "", "--optimizer normuon")}
ONE = {
    "experts": case("experts", ""),
    "experts, normuon": case("experts", "", "--optimizer normuon"),
    "interleaved": case("interleaved", "", "--optimizer normuon"),
    "interleaved, all experts chosen": case("all_chosen", "", iteration="bf16"),
    "transposed": case("transposed", "", "--optimizer normuon --muon-scale original"),
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
        "normuon, 2 replicas": case("transposed", "--dp-replicate-size 2", "--optimizer normuon"),
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
    """docs/OPTIMIZERS.md: to gather the P numbers of all matrices but experts the ranks together send (S - 1) / S of
    them, S shards a replica, and to give them back as many."""
    layout = "--dp-replicate-size 2" if ranks == 4 else ""
    out = folder / f"moves-{ranks}.json"
    forked(ranks, muonranks.moves, folder, case(model, layout, flags), out)
    everyone = json.loads(out.read_text())
    matrices = all_matrices(model)
    divided = [matrix for matrix in matrices if matrix.expert is None]
    replicas = 2 if layout else 1
    shards, numbers = ranks // replicas, sum(len(m.rows) * len(m.columns) for m in divided)
    neurons = sum(len(m.rows) for m in divided)
    is_normuon = "normuon" in flags
    directions, kinds = 2, 2 if is_normuon else 1
    assert sum(rank["owned"] for rank in everyone) == len(matrices)
    for rank in everyone:
        assert rank["calls"]["all_to_all"] == directions * kinds * rank["crossing"]
        assert (rank["crossing"] == rank["stacks"]) == (model != "experts")
        assert rank["calls"].get("all_gather", 0) == (kinds * rank["stacks"] if replicas > 1 else 0)
    total = sum(rank["sent"]["all_to_all"] for rank in everyone)
    bytes_moved = 2 * numbers + (4 * neurons if is_normuon else 0)
    assert total == pytest.approx(directions * bytes_moved * (shards - 1) / shards, rel=0.05)
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


@pytest.mark.parametrize(
    "model, name, outputs", [("llama", "up_proj", 56), ("transposed", "c_fc", 192), ("transposed", "attn.c_proj", 48)]
)
def test_normuon_moves_each_neuron_as_far_and_keeps_its_second_moment(built, model, name, outputs):
    """In its first step the second moment is a twentieth of a neuron's own mean square."""
    moved, kept = {}, {}
    for optimizer_name in ("muon", "normuon"):
        of, optimizer, _ = built("--optimizer", optimizer_name, "--weight-decay", "0", model=model)
        (weight,) = (
            p for full_name, p in of.named_parameters() if f".0.{name}.weight" in full_name.replace("mlp.", "")
        )
        before = local(weight).detach().clone()
        optimizer.step()
        update = local(weight).detach() - before
        moved[optimizer_name] = (update.T if model == "transposed" else update).square().mean(1)
        kept[optimizer_name] = optimizer.state[weight].get("second_moment")
    assert moved["normuon"].max() < 1.02 * moved["normuon"].min()
    assert moved["muon"].max() > 1.1 * moved["muon"].min()
    moment = local(kept["normuon"]).flatten()
    rate = 3e-4 * 0.2 * max(outputs, 48) ** 0.5
    torch.testing.assert_close(moment, 0.05 * moved["muon"] / rate**2, rtol=0.02, atol=0)


def test_the_header_says_how_many_of_each_and_which(built):
    model, optimizer, settings = built("--optimizer", "muon", model="fused")
    data = types.SimpleNamespace(header={}, has_padding=False)
    mesh = next(model.parameters()).device_mesh
    header = " ".join(report.describe_setup(settings, model, optimizer, mesh, data, "", None, "").split())
    assert "muon on 14 matrices (o_proj, qkv_proj, gate_up_proj, down_proj)" in header
    assert "adamw on 7 other parameters (embed_tokens," in header
    assert find_optimizer("adamw").describe is None
