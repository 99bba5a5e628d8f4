"""Muon: on any sharding the same as on full matrices in one process, each computed once.

The reference holds every matrix in full, as a tensor of its own, and gives it to torch.optim.Muon. With fp32 iterations
both leave out the cast to bf16.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from conftest import answer_of, forked, losses_of, slow_case, train, words, write_model
from multirank import program
from tiny import build, rank_share, take_steps
from torch.optim import _muon as torchs

from harness.model import newton_schulz

STEPS, SEQUENCES, TOKENS, LR, ADAMW_LR = 20, 24, 32, 2e-3, 1e-3
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SIZES = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
UNEVEN = {"hidden_size": 33, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
INTERLEAVED = {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16}
GPT2 = {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MODELS = {
    # of its key projections with 10 rows five of eight ranks have two rows each, and the last three none
    "uneven": ("llama", SIZES | UNEVEN | {"head_dim": 10}),
    "fused": ("phi3", SIZES),
    "experts": ("qwen3_moe", SIZES | EXPERTS),
    "interleaved": ("gpt_oss", SIZES | INTERLEAVED),
    "transposed": ("gpt2", GPT2),
}
# Where a parameter is several matrices: rows of each, or one row of so many.
PARTS = {"fused": {"qkv_proj": [48, 24, 24], "gate_up_proj": [56, 56]}, "experts": {"gate_up_proj": [32, 32]}}
PARTS |= {"interleaved": {"gate_up_proj": 2}, "transposed": {"c_attn": [48, 48, 48]}}
OUTPUTS_LAST = ("interleaved", "transposed")  # experts and linears that are stored input by output

QUICK = {"uneven": (2, "uneven", ""), "fused": (2, "fused", "")}  # {name: (ranks, model, flags)}
SLOW = {
    "experts": (1, "experts", ""),
    "interleaved": (1, "interleaved", ""),
    "transposed": (1, "transposed", ""),
    "accumulating": (3, "uneven", "--gradient-accumulation-steps 4"),
    "2 replicas offloaded": (4, "uneven", "--dp-replicate-size 2 --cpu-offload"),
    "stage 0": (4, "uneven", "--zero-stage 0"),
    "stage 1 in 3 microbatches": (4, "uneven", "--zero-stage 1 --gradient-accumulation-steps 3"),
    "transposed, 2 replicas": (4, "transposed", "--dp-replicate-size 2"),
    "fused, 2 replicas": (4, "fused", "--dp-replicate-size 2"),
    "experts, 2 replicas": (4, "experts", "--dp-replicate-size 2"),
    "iterations in bf16": (4, "uneven", "--dp-replicate-size 2"),
    "ranks without a row": (8, "uneven", ""),
}
CASES = QUICK | SLOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    for name, (model_type, sizes) in MODELS.items():
        write_model(folder / name, model_type, **sizes)
    return folder


# ---- The iteration ---------------------------------------------------------------------------------------------------


def zeropower(matrix: torch.Tensor, coefficients, steps: int, eps: float) -> torch.Tensor:
    """torch's function without its cast to bf16."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


@pytest.mark.parametrize("multiplies_bf16, products", [(True, torch.bfloat16), (False, torch.float32)])
def test_a_stack_in_bf16_is_torchs_iteration_but_for_the_rounding_of_sums(monkeypatch, multiplies_bf16, products):
    """A matrix of zeros stays zero."""
    monkeypatch.setattr(newton_schulz, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    assert newton_schulz.product_dtype(torch.zeros(1, dtype=torch.bfloat16)) == products
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
    matrices[2] = 0
    for matrix, result in zip(matrices, newton_schulz.orthogonalize(matrices), strict=True):
        full = torchs._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        assert result.dtype == full.dtype == torch.bfloat16
        assert (result.float() - full.float()).norm() <= 0.01 * full.float().norm()


def wide_matrices(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(rows, columns, generator=generator)
    left, _, right = torch.linalg.svd(torch.randn(rows, columns, generator=generator), full_matrices=False)
    index = torch.arange(rows)
    spectra = {f"condition 1e{power}": torch.logspace(0, -power, rows) for power in (2, 4, 6)}
    spectra |= {f"of rank {rank}": (index < rank).float() for rank in (1, 8)}
    spectra |= {"power law": 1 / (index + 1), "one large singular value": torch.where(index == 0, 1, 1e-3)}
    matrices = {name: left @ torch.diag(values) @ right for name, values in spectra.items()}
    return matrices | {"random": random, "a large mean": random + 5}


@pytest.mark.parametrize("size", [(64, 128), (48, 200), (640, 128)], ids=str)
def test_wide_and_tall_matrices_are_as_near_to_the_exact_iteration_as_torchs(monkeypatch, size):
    """The singular values, and the result as a whole. The exact iteration is that of fp64."""
    monkeypatch.setattr(newton_schulz, "cpu_multiplies_bf16", lambda: False)
    assert newton_schulz.gains_by_gram(torch.zeros(1, min(size), max(size), dtype=torch.bfloat16))
    for name, matrix in wide_matrices(min(size), max(size)).items():
        matrix = matrix if size[0] < size[1] else matrix.T
        exact = zeropower(matrix.bfloat16().double(), COEFFICIENTS, 5, 1e-7)
        torchs_result = torchs._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        own, theirs = newton_schulz.orthogonalize(matrix[None])[0].double(), torchs_result.double()
        assert (own - exact).norm() <= 1.1 * (theirs - exact).norm(), name
        errors = [(torch.linalg.svdvals(x) - torch.linalg.svdvals(exact)).abs().max() for x in (own, theirs)]
        assert errors[0] <= max(errors[1], 0.015), name


# ---- Equal to a plain reference --------------------------------------------------------------------------------------


class Reference:
    """What `train_step` needs of an optimizer, over the full parameters of one process."""

    def __init__(self, settings, model, name: str):
        self.param_groups = [{"params": [*model.parameters()]}]
        self.cuts = []  # (parameter, a function that cuts it or its gradient, the cut as a parameter of its own)
        matrices, decayed, rest = [], [], []
        for full_name, parameter in model.named_parameters():
            in_layers = ".layers." in full_name or ".h." in full_name
            is_decayed = parameter.dim() >= 2 and "bias" not in full_name
            is_muons = in_layers and is_decayed and "norm" not in full_name
            for cut in cuts_of(name, full_name, parameter) if is_muons else [lambda tensor: tensor]:
                plain = torch.nn.Parameter(cut(parameter.to_local().detach()))
                self.cuts.append((parameter, cut, plain))
                (matrices if is_muons else decayed if is_decayed else rest).append(plain)
        decay = settings.weight_decay
        adamw = {"lr": settings.adamw_lr, "betas": settings.betas}
        self.parts = [
            torch.optim.Muon(matrices, lr=settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(decayed, weight_decay=decay, **adamw),
            torch.optim.AdamW(rest, weight_decay=0.0, **adamw),
        ]

    def step(self) -> None:
        for parameter, cut, plain in self.cuts:
            plain.grad = None if parameter.grad is None else cut(parameter.grad.to_local())
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def cuts_of(name: str, full_name: str, parameter) -> list:
    """Functions that cut a parameter of a layer, or its gradient, into its matrices, each output by input."""
    projection = [word for word in full_name.split(".") if word != "weight"][-1]
    is_transposed = name in OUTPUTS_LAST and (parameter.dim() == 3 or name == "transposed")
    outputs = parameter.shape[-1 if is_transposed else -2]
    parts = PARTS.get(name, {}).get(projection, [outputs])
    if isinstance(parts, int):
        slices = [slice(start, None, parts) for start in range(parts)]
    else:
        slices = [slice(end - size, end) for size, end in zip(parts, itertools.accumulate(parts), strict=True)]
    experts = range(len(parameter)) if parameter.dim() == 3 else [...]
    return [
        lambda tensor, expert=expert, rows=rows: (tensor[expert].T if is_transposed else tensor[expert])[rows]
        for expert in experts
        for rows in slices
    ]


@contextlib.contextmanager
def iterating_in_fp32():
    """Inside, Muon and its reference iterate in fp32."""
    with (
        mock.patch.object(newton_schulz, "DTYPE", torch.float32),
        mock.patch.object(torchs, "_zeropower_via_newtonschulz", zeropower),
    ):
        yield


def losses(folder, case: str, steps: int, is_reference: bool = False) -> list[float]:
    """The loss of each step, over all tokens of the global batch. The reference is not sharded."""
    _, name, layout = CASES[case]
    argv = ["--model", folder / name, "--sequence-length", TOKENS, "--lr", LR, "--adamw-lr", ADAMW_LR]
    argv += words("--optimizer muon --precision fp32 --no-compile")
    settings, model, optimizer = build([*argv, *([] if is_reference else layout.split())])
    if is_reference:
        optimizer = Reference(settings, model, name)
    tokens = torch.randint(0, 128, (4, SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    steps_tokens = itertools.islice(itertools.cycle(tokens), steps)
    global_batches = ({"input_ids": step[:, :-1], "labels": step[:, 1:]} for step in steps_tokens)
    shares = (rank_share(batch, settings.gradient_accumulation_steps) for batch in global_batches)
    with contextlib.nullcontext() if "bf16" in case else iterating_in_fp32():
        return take_steps(settings, model, optimizer, itertools.chain.from_iterable(shares), steps)[0]


def train_all(folder, cases: list[str], steps: int) -> dict[str, list[float]]:
    return {case: losses(folder, case, steps) for case in cases}


@pytest.mark.parametrize(
    "ranks, cases, steps",
    [
        (2, QUICK, 4),
        *(
            slow_case(ranks, [case for case in SLOW if SLOW[case][0] == ranks], STEPS)
            for ranks in sorted({ranks for ranks, *_ in SLOW.values()})
        ),
    ],
)
def test_losses_of_any_number_of_ranks_are_those_of_full_matrices_in_one_process(folder, device, ranks, cases, steps):
    for case, found in answer_of(ranks, train_all, folder, [*cases], steps).items():
        reference = losses(folder, case, steps, is_reference=True)
        assert found == pytest.approx(reference, rel=1e-4 if "bf16" in case else 1e-5), case
        assert len(found) == steps


RESUMES = [  # ranks, sequences of a microbatch, sharding
    (2, 6, "--zero-stage 2"),
    (3, 4, "--zero-stage 3"),
    (4, 3, "--dp-replicate-size 2 --zero-stage 1"),
    (2, 6, "--zero-stage 0"),
    (1, 12, "--cpu-offload"),
]


def run(flags: list[str]) -> None:
    """A full run, with fp32 iterations, whose losses do not depend on the ranks."""
    with iterating_in_fp32():
        program(*flags)


@pytest.mark.slow
def test_a_checkpoint_continues_on_other_numbers_of_ranks_and_stages_as_if_uninterrupted(folder, tmp_path):
    """Two steps on each number of ranks, which divides no size; compared with all steps on one rank."""
    common = words(f"--optimizer muon --model {folder / 'uneven'} --dataset synthetic")
    common += words("--sequence-length 32 --precision fp32 --no-compile --lr-scheduler constant --lr 2e-3")
    common += words(f"--log-interval 1 --final-checkpoint --num-workers 0 --output-dir {tmp_path}")
    for index, (ranks, batch_size, sharding) in enumerate(RESUMES):
        more = f"--run-name r --resume auto --num-steps {2 * index + 2} --batch-size {batch_size} {sharding}"
        forked(ranks, run, [*common, *words(more)])
    steps = 2 * len(RESUMES)
    forked(1, run, [*common, *words(f"--run-name full --num-steps {steps} --batch-size 12")])
    assert len(losses_of(tmp_path / "full")) == steps
    assert losses_of(tmp_path / "r") == pytest.approx(losses_of(tmp_path / "full"), rel=1e-5)


def test_the_header_says_how_many_of_each_and_which(folder, device, tmp_path, capsys):
    flags = f"--optimizer muon --model {folder / 'fused'} --dataset synthetic --sequence-length 16 --num-steps 1"
    train([*words(flags), "--no-compile", "--output-dir", tmp_path], device)
    header = " ".join(capsys.readouterr().out.split())
    assert "muon on 14 matrices (o_proj, qkv_proj, gate_up_proj, down_proj)" in header
    assert "adamw on 7 other parameters (embed_tokens," in header
