"""Muon: the same on any sharding as on full matrices in one process, each computed once."""

import json
import types

import muonranks
import pytest
import torch
from conftest import forked, losses_of, words
from multirank import resolved
from muonranks import case
from torch.optim import _muon as torchs

import train_fsdp
from harness.model import newton_schulz
from harness.model.optimization import build_optimizer
from harness.report.header import describe_setup
from harness.state import TrainState

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    muonranks.write_models(folder)
    return folder


@pytest.mark.parametrize("multiplies_bf16, products", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_stack_in_bf16_is_torchs_iteration_but_for_the_rounding_of_sums(monkeypatch, multiplies_bf16, products):
    """A matrix of zeros stays zero."""
    monkeypatch.setattr(newton_schulz, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    assert newton_schulz.product_dtype(torch.zeros(1, dtype=torch.bfloat16)) == products
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
    matrices[2] = 0
    for matrix, result in zip(matrices, newton_schulz.orthogonalize(matrices), strict=True):
        whole = torchs._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        assert result.dtype == whole.dtype == torch.bfloat16
        assert (result.float() - whole.float()).norm() <= 0.01 * whole.float().norm()


# ----------------------------------------------------------------------------------------------------------------------
# Equal to a plain reference

LIMITS = {"fp32": 1e-5, "bf16": 1e-4}
QUICK = {"uneven": case("uneven", ""), "fused": case("fused", "")}
RUNS = {
    1: {"experts": case("experts", ""), "interleaved": case("interleaved", ""), "transposed": case("transposed", "")},
    3: {"accumulating": case("uneven", "--gradient-accumulation-steps 4")},
    4: {
        "2 replicas offloaded": case("uneven", "--dp-replicate-size 2 --cpu-offload"),
        "stage 0": case("uneven", "--zero-stage 0"),
        "stage 1 in 3 microbatches": case("uneven", "--zero-stage 1 --gradient-accumulation-steps 3"),
        "transposed, 2 replicas": case("transposed", "--dp-replicate-size 2"),
        "fused, 2 replicas": case("fused", "--dp-replicate-size 2"),
        "experts": case("experts", "--dp-replicate-size 2"),
        "frozen": case("uneven", "", frozen="gate_proj"),
        "bf16": case("uneven", "--dp-replicate-size 2", iteration="bf16"),
    },
    8: {"ranks without a row": case("uneven", "")},
}


def check_losses(folder, device, ranks: int, runs: dict, steps: int = muonranks.STEPS) -> None:
    forked(ranks, muonranks.main, folder, runs, folder / f"{ranks}.json", steps)
    own = json.loads((folder / f"{ranks}.json").read_text())
    for name, run in runs.items():
        reference = muonranks.losses(folder, run | {"layout": ""}, device, True, steps)
        assert own[name] == pytest.approx(reference, rel=LIMITS[run["iteration"]]), name
        assert len(own[name]) == steps


def test_losses_of_two_ranks_are_those_of_full_matrices_in_one_process(folder, device):
    check_losses(folder, device, 2, QUICK, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RUNS)
def test_losses_of_any_number_of_ranks_are_those_of_full_matrices_in_one_process(folder, device, ranks):
    check_losses(folder, device, ranks, RUNS[ranks])


RESUMES = [  # ranks, sequences of a microbatch, sharding
    (1, 12, ""),
    (2, 6, "--zero-stage 2"),
    (3, 4, "--zero-stage 3"),
    (4, 3, "--dp-replicate-size 2 --zero-stage 1"),
    (2, 6, "--zero-stage 0"),
    (1, 12, "--cpu-offload"),
]


@pytest.mark.slow
def test_a_checkpoint_continues_on_other_numbers_of_ranks_and_stages_as_if_uninterrupted(folder, tmp_path):
    """Two steps on each number of ranks, which divides no size; compared with all steps on one rank."""
    common = words(f"--optimizer muon --model {folder / 'uneven'} --dataset synthetic")
    common += words("--sequence-length 32 --precision fp32 --no-compile --lr-scheduler constant --lr 2e-3")
    common += words("--log-interval 1 --final-checkpoint --num-workers 0")
    common += ["--output-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    steps = 0
    for ranks, batch_size, sharding in RESUMES:
        steps += 2
        more = f"--run-name r --resume auto --num-steps {steps} --batch-size {batch_size} {sharding}"
        forked(ranks, muonranks.train, [*common, *words(more)])
    forked(1, muonranks.train, [*common, *words(f"--run-name whole --num-steps {steps} --batch-size 12")])
    assert len(losses_of(tmp_path / "whole")) == steps
    assert losses_of(tmp_path / "r") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# In this process


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


def test_adamws_rate_is_muons_unless_it_is_given(built):
    for flags, rate in ((), 0.01), (("--adamw-lr", "0.003"), 0.003):
        _, optimizer, _ = built("--optimizer", "muon", "--lr", "0.01", *flags)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, rate, rate]


def test_the_header_says_how_many_of_each_and_which(built):
    model, optimizer, settings = built("--optimizer", "muon", model="fused")
    data = types.SimpleNamespace(header={}, has_padding=False)
    mesh = next(model.parameters()).device_mesh
    header = " ".join(describe_setup(settings, TrainState(model, optimizer), mesh, data, "", None, "").split())
    assert "muon on 14 matrices (o_proj, qkv_proj, gate_up_proj, down_proj)" in header
    assert "adamw on 7 other parameters (embed_tokens," in header
