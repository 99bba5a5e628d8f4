"""Muon: the same on any sharding as on full matrices in one process, each computed once."""

import json
import types

import muonranks
import pytest
import torch
import torch._dynamo
from conftest import forked, losses_of, words
from multirank import resolved
from muonranks import case
from torch.optim import _muon as torchs

import train_fsdp
from harness.model import newton_schulz
from harness.model.optimization import build_optimizer
from harness.model.optimizers import muon
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


def wide_matrices(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    left, right = torch.linalg.qr(random(rows, rows))[0], torch.linalg.qr(random(columns, rows))[0]
    spectra = {f"condition 1e{power}": torch.logspace(0, -power, rows) for power in (2, 4, 6)}
    spectra["power law"] = 1 / torch.arange(1, rows + 1)
    spectra["one large singular value"] = torch.tensor([1.0] + [1e-3] * (rows - 1))
    noise = 1e-3 * random(rows, columns)
    return {
        "random": random(rows, columns),
        "of rank 8": random(rows, 8) @ random(8, columns),
        "of a quarter of the rank, and noise": random(rows, rows // 4) @ random(rows // 4, columns) / rows**0.5 + noise,
        "equal rows": random(1, columns).expand(rows, columns),
        "a large mean": random(rows, columns) + 5 * random(1, columns),
    } | {name: left @ torch.diag(values) @ right.T for name, values in spectra.items()}


@pytest.mark.parametrize("size", [(64, 128), (48, 200), (640, 128)], ids=str)
def test_wide_and_tall_matrices_are_as_near_to_the_exact_iteration_as_torchs(monkeypatch, size):
    """The singular values, and the result as a whole. The exact iteration is that of fp64."""
    monkeypatch.setattr(newton_schulz, "cpu_multiplies_bf16", lambda: False)
    assert newton_schulz.gains_by_gram(torch.zeros(1, min(size), max(size), dtype=torch.bfloat16))
    matrices = wide_matrices(min(size), max(size))
    for name, matrix in matrices.items():
        matrix = matrix if size[0] < size[1] else matrix.T
        exact = muonranks.zeropower(matrix.bfloat16().double(), COEFFICIENTS, 5, 1e-7)
        torchs_result = torchs._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        own, theirs = newton_schulz.orthogonalize(matrix[None])[0].double(), torchs_result.double()
        assert (own - exact).norm() <= 1.1 * (theirs - exact).norm(), name
        errors = [(torch.linalg.svdvals(x) - torch.linalg.svdvals(exact)).abs().max() for x in (own, theirs)]
        assert errors[0] <= max(errors[1], 0.015), name


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


def test_compiled_updates_are_the_eager_ones(built):
    (model, optimizer, _), (other, eager, _) = built("--optimizer", "muon"), built("--optimizer", "muon")
    torch._dynamo.reset()
    for name in ("move_momenta", "add_updates"):
        setattr(optimizer, name, torch.compile(getattr(muon, name), backend="aot_eager"))
    for step in range(3):
        for of in (optimizer, eager):
            of.grad_scale, of.skip = torch.tensor(2.0), torch.tensor(float(step == 1))
            for group in of.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            of.step()
        torch.manual_seed(step)
        for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            same.grad = parameter.grad.clone()
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, same)
        torch.testing.assert_close(dict(optimizer.state[parameter]), dict(eager.state[same]))
