"""Tests of a GPU: `pytest -m gpu` on one that is idle otherwise, under two minutes on an H100.

    REHEARSE_GPU_TESTS=1 pytest tests/pair/test_gpu.py

runs them on the CPU with a tiny model, without inductor, cuDNN and checks of the device's speed or memory. Nothing here
needs `datasets`; float8 is skipped if torchao is missing.
"""

import contextlib
import functools
import gc
import json
import os
import pathlib
import sys
from importlib.util import find_spec

import pytest
import torch
import torch._dynamo
import transformers
from conftest import ROOT, build_step, metrics_of, start, train, write_model
from tiny import END, MODELS, NoReadBack
from torch._dynamo.utils import counters

from harness import data
from harness import model as models
from harness.base import GIB, wait_for_device
from harness.flags import PRESETS
from harness.model.attention import describe_attention
from harness.model.optimizers import adamw

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (CUDA or os.environ.get("REHEARSE_GPU_TESTS")),
        reason="no GPU, or no -m gpu: tests see one with it alone; REHEARSE_GPU_TESTS=1 rehearses them on the CPU",
    ),
]
SMALL = MODELS["smollm3"]
WIDE = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192}
SIZES = SMALL | WIDE if CUDA else SMALL
LENGTH = 2048 if CUDA else 32


@pytest.fixture(scope="module")
def on_cpu_without_inductor():
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture(scope="module")
def build(device, tmp_path_factory, on_cpu_without_inductor):
    """`build(*flags)`: settings, model, optimizer and a function that takes one step on random tokens."""

    def make(*flags, family="smollm3", sizes=SIZES, length=LENGTH):
        gc.unfreeze()  # a run in this process freezes its objects
        gc.collect()
        torch.cuda.empty_cache()
        source = write_model(tmp_path_factory.mktemp("model"), family, **sizes)
        shape = ["--sequence-length", str(length), "--num-workers", "0", "--num-steps", "99", "--lr", "1e-3"]
        return build_step(device, ["--model", source, "--dataset", "demo", *shape, *flags])

    return make


@pytest.fixture
def loss_and_gradients(build, device):
    """`loss_and_gradients(*flags)` of one batch in a fresh model: (loss, all gradients in one tensor)."""

    def run(*flags):
        torch._dynamo.reset()
        _, model, _, _ = build(*flags)
        tokens = data.SyntheticDataset(SIZES["vocab_size"], LENGTH)
        packed = [tokens[index] % (LENGTH // 4) for index in range(2)]  # about four document ends in each
        if "--document-mask" in flags:
            sets = [data.PackedDataset(sequence, LENGTH, document_mask=True, end_of_text=END) for sequence in packed]
            packed = [sequences[0] for sequences in sets]
        batch = data.create_collate_fn()(packed)
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}, use_cache=False).loss
        loss.backward()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        return loss.item(), torch.cat([p.grad.to_local().float().flatten() for p in parameters])

    return run


def assert_close(one, other, gradients: float, loss: float = 2e-3):
    """Compare losses, and gradients by their relative distance: bf16 rounds each product to three digits."""
    assert one[0] == pytest.approx(other[0], rel=loss)
    assert ((one[1] - other[1]).norm() / other[1].norm()).item() < gradients


# ----------------------------------------------------------------------------------------------------------------------
# The numbers


PAIRS = {  # a claim: two ways that it compares
    "the compiled fused loss is that of full logits": ("--compile --fused-loss", "--no-compile --no-fused-loss"),
    "cuDNN's attention is torch's flash attention": (
        "--no-compile --precision bf16 --attention flash",
        f"--no-compile --precision bf16 --attention {'cudnn' if CUDA else 'eager'}",
    ),
    "keys repeated for fp32 give what shared keys give": (
        "--no-compile --precision fp32",
        "--no-compile --precision bf16",
    ),
}


@pytest.mark.parametrize("claim", PAIRS)
def test_two_ways_have_the_same_loss_and_gradients(loss_and_gradients, claim):
    one, other = (loss_and_gradients(*flags.split()) for flags in PAIRS[claim])
    is_fp32 = "fp32" in claim
    assert_close(one, other, gradients=0.05 if is_fp32 else 0.03, loss=5e-3 if is_fp32 else 2e-3)


def test_flex_attention_is_sdpa_inside_documents(loss_and_gradients, monkeypatch):
    masked = loss_and_gradients("--no-compile", "--document-mask", "--attention", "sdpa")
    across = loss_and_gradients("--no-compile", "--attention", "sdpa")
    if not CUDA:  # torch has its backward for a CPU, and refuses it
        monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
        monkeypatch.setattr(models, "choose_attention", lambda *_: "flex_attention")
    compiled = "--compile" if CUDA else "--no-compile"
    flex = loss_and_gradients(compiled, "--document-mask", "--attention", "flex_attention")
    assert_close(flex, masked, gradients=0.03)
    assert (across[1] - masked[1]).norm() > 0.1 * masked[1].norm()  # the mask does matter


def test_float8_learns_what_bf16_learns(build):
    if not find_spec("torchao"):
        pytest.skip("torchao is not installed")
    losses = {}
    fp8 = ["--compile"] if CUDA else ["--no-compile", "--fp8-emulate"]
    for flags in (["--precision", "fp8", *fp8], ["--precision", "bf16", fp8[0]]):
        torch._dynamo.reset()
        *_, step = build(*flags)
        losses[flags[1]] = [step()[0].item() for _ in range(8)]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.01)
    assert losses["fp8"] != losses["bf16"]


def test_the_compiled_adamw_updates_as_torchs_kernel_does(build):
    _, model, compiled, _ = build("--compile")
    _, other, kernel, _ = build("--no-compile")
    if not CUDA:
        compiled.update, compiled.min_numel = torch.compile(adamw.update), 4096
    assert compiled.update and not kernel.update
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert min(sizes) < compiled.min_numel < max(sizes)
    for step in range(3):
        for parameters, optimizer in ((model.parameters(), compiled), (other.parameters(), kernel)):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            models.clip_grad_norm(optimizer, 1.0)
            optimizer.step()
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, same, rtol=1e-6, atol=1e-6)


def test_an_offloaded_run_is_the_same_run(build):
    *_, step = build("--no-compile")
    _, model, _, offloaded = build("--no-compile", "--cpu-offload")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert [step()[0].item() for _ in range(4)] == pytest.approx([offloaded()[0].item() for _ in range(4)], rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_header_names_the_kernel_that_runs(build, device, precision):
    settings, model, _, step = build("--no-compile", "--precision", precision)
    printed = describe_attention(settings, model.config, device.type)
    step()
    with torch.profiler.profile() as profile:
        step()
    ran = {event.name for event in profile.events() if "aten::_scaled_dot_product" in event.name}
    forward = {name for name in ran if "backward" not in name}
    kernel = printed.removeprefix("sdpa attention (").removesuffix(")")
    assert forward and all(kernel.removesuffix("_attention") in name for name in forward), (printed, ran)
    assert kernel != "math"


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_a_resumed_run_continues_bit_for_bit(device, tmp_path, on_cpu_without_inductor):
    """With kernels that add in one order: eager attention, as flash attention's backward adds in any."""
    model = write_model(tmp_path / "model", "smollm3", **SIZES)
    flags = ["--model", model, "--dataset", "synthetic", "--sequence-length", "256" if CUDA else "32"]
    flags += ["--attention", "eager", "--no-compile", "--num-steps", "4", "--log-interval", "1", "--no-own-plan"]
    flags += ["--checkpoint-interval", "2", "--output-dir", tmp_path, "--run-name", "r", "--num-workers", "0"]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(flags, device)
        before, newest = metrics_of(tmp_path / "r"), tmp_path / "r" / "checkpoints" / "step-00000004"
        shards = shards_of(newest)
        assert shards and newest.rename(tmp_path / "aside")
        train([*flags, "--resume", "auto"], device)
    finally:
        torch.use_deterministic_algorithms(False)
    after = metrics_of(tmp_path / "r")
    assert [line["step"] for line in after] == [line["step"] for line in before]
    assert [line["loss"] for line in after] == [line["loss"] for line in before]
    assert shards_of(newest) == shards


def shards_of(checkpoint: pathlib.Path) -> dict[str, list]:
    """Sizes and checksums of its tensors' files, as its manifest has them."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".distcp")}


# ----------------------------------------------------------------------------------------------------------------------
# The step that is measured: SmolLM3-3B's layers, eight of them, compiled


@pytest.fixture(scope="module")
def smollm3(build):
    """(flags, a function that takes a compiled step, bytes that others hold); on a CPU the tiny model."""
    gc.unfreeze()
    gc.collect()
    others = torch.cuda.memory_allocated() if CUDA else 0
    torch._dynamo.reset()
    counters.clear()
    sizes, length = SMALL | {"num_hidden_layers": 8, "no_rope_layers": [1, 1, 1, 0] * 2}, LENGTH
    if CUDA:
        preset = json.loads(PRESETS["smollm3-3b"].read_text())
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        sizes |= {name: preset[name] for name in names} | {"head_dim": 128, "max_position_embeddings": 8192}
        length = 8192
    flags = ["--compile", "--zero-stage", "2"]
    settings, *_, step = build(*flags, sizes=sizes, length=length)
    step(), step()
    return ["--model", settings.model, "--sequence-length", str(length), *flags], step, others


def test_nothing_is_compiled_after_the_first_step_and_no_graph_breaks(smollm3):
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            smollm3[1]()
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (2 + 2, {})  # the last norm, the loss


def test_a_step_reads_nothing_back(smollm3, device):
    check_reads_nothing(smollm3[1], device)


STEPS = [
    "--precision fp8",
    "--precision fp8 --fp8-recipe rowwise_with_gw_hp",
    "--optimizer muon --gradient-accumulation-steps 2 --zero-stage 1",
    "--optimizer adamw-bf16 --betas 0.9 0.95 --no-fused-loss --activation-checkpointing selective",
    "--no-fused-loss --gradient-accumulation-steps 2 --zero-stage 2",
    "--document-mask",
    "--activation-checkpointing offload",
]


@pytest.mark.parametrize("flags", STEPS)
def test_a_step_reads_nothing_back_whatever_the_flags(build, device, flags):
    """Small and eager but for the compiled casts of float8, as a graph waits for the same."""
    if "fp8" in flags and not find_spec("torchao"):
        pytest.skip("torchao is not installed")
    if "fp8" in flags and not CUDA:
        flags += " --fp8-emulate"
    torch._dynamo.reset()
    gains = {"hidden_size": 2048, "intermediate_size": 5632} if CUDA else {}  # from float8 by rows
    *_, step = build("--no-compile", *flags.split(), sizes=SIZES | gains | {"num_hidden_layers": 2})
    step()
    check_reads_nothing(step, device)


@pytest.mark.skipif(CUDA, reason="was not tried on a GPU: whether kernels of experts wait for it")
def test_a_step_of_experts_and_eager_attention_reads_nothing_back(build, device):
    if transformers.__version__ < "5.18":
        pytest.skip("transformers 5.17 sends a zero to the device for the mask of eager attention")
    flags = "--no-compile --precision fp32 --attention eager"
    *_, step = build(*flags.split(), family="qwen3_moe", sizes=MODELS["qwen3_moe"])
    step()
    check_reads_nothing(step, device)


def check_reads_nothing(step, device):
    with NoReadBack() if not CUDA else sync_is_an_error():
        for _ in range(2):
            loss, norm, *_ = step()
        with pytest.raises((RuntimeError, AssertionError)):  # a read is seen
            loss.item()
    assert loss.item() > 0 and norm.item() > 0


@contextlib.contextmanager
def sync_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PLAN = "import json, sys, planranks; print(json.dumps(planranks.plan(sys.argv[1:], 1)['memory_gib']))"


def test_memory_is_as_planned(smollm3):
    flags, step, others = smollm3
    process = start(
        [sys.executable, "-c", PLAN, *flags], CUDA_VISIBLE_DEVICES="", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"
    )
    assert process.returncode == 0, process.stderr
    planned = json.loads(process.stdout)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    step()
    wait_for_device()
    if CUDA:
        total = (torch.cuda.max_memory_allocated() - others) / GIB
        assert planned["total"] == pytest.approx(total, rel=0.05)
