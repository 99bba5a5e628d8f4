"""Optimizers: the changes and the memory of a step."""

import dataclasses
import functools
import gc
import math
import re

import pytest
import torch
from conftest import parse, slow_case, words
from tiny import build

from harness import model as models
from harness.base import UserError
from harness.model.optimization import clip_grad_norm, find_optimizer, local, memory_saving_optimizers
from harness.model.optimizers import adamw, adamw8bit, muon


@pytest.fixture
def built(device, arguments):
    """`built(flags)`: a model whose parameters have gradients, and its optimizer."""

    def build_with_gradients(flags: str):
        _, model, optimizer = build([*arguments, *words(flags)])
        draw_gradients(model, 1)
        return model, optimizer

    return build_with_gradients


@pytest.fixture
def compiles_on_cpu(monkeypatch):
    """--compile compiles updates as on a GPU, of tensors that a tiny model has, and without inductor."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(adamw, "MIN_COMPILED", 4096)
    for module in (adamw, muon):
        monkeypatch.setattr(module, "compiles_updates", lambda groups, settings: settings.compile)


def draw_gradients(model, seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * factor


def step(optimizer, lr: float | None = None) -> torch.Tensor:
    """Clip, and take a step; the norm."""
    for group in optimizer.param_groups:
        group["lr"] = lr or group["lr"]
    norm = clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    return norm


def test_steps_leave_nothing_behind(built):
    """With DTensors each step of torch 2.11 left 1,642 objects and 154 KiB."""
    _, optimizer = built("")
    counts = []
    for index in range(60):
        step(optimizer, 1e-3 / (index + 1))  # an argument that is new in each step
        if index in (9, 59):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 50


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_parameter_without_gradient_is_left_as_it_is(built, name):
    """An expert that no token chose."""
    model, optimizer = built(f"--optimizer {name}")
    step(optimizer)
    parameter, other = (layer.mlp.up_proj.weight for layer in model.model.layers)
    before, moved = ([tensor.clone() for tensor in (p, *optimizer.state[p].values())] for p in (parameter, other))
    parameter.grad = None
    step(optimizer)
    for now, then in zip((parameter, *optimizer.state[parameter].values()), before, strict=True):
        assert torch.equal(now, then)
    for now, then in zip((other, *optimizer.state[other].values()), moved, strict=True):
        assert not torch.equal(now, then)


@pytest.mark.parametrize("flags", ["--no-compile", slow_case("--compile")])
def test_steps_are_those_of_torchs_adamw_over_dtensors(built, compiles_on_cpu, flags):
    """Of torch's kernel, and of the compiled update of large tensors."""
    (model, optimizer), (other, _) = built(flags), built("")
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = dict(other.named_parameters())
    groups = [
        {**group, "params": [theirs[names[parameter]] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    torchs = torch.optim.AdamW(groups, fused=True)
    assert type(optimizer) is not type(torchs)
    for seed in range(3):
        draw_gradients(model, seed)
        draw_gradients(other, seed)
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).full_tensor()
        torch.testing.assert_close(step(optimizer), norm)
        torchs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
        for key, state in torchs.state[theirs[name]].items():
            torch.testing.assert_close(optimizer.state[parameter][key], state, msg=f"{name}.{key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw-bf16", "muon"])
def test_a_compiled_update_gives_the_numbers_of_the_eager_one(built, compiles_on_cpu, name):
    """Also in a step that is skipped, whose gradients are NaN."""
    ((model, optimizer), (other, eager)) = (
        built(f"--optimizer {name} {flag}") for flag in ("--compile", "--no-compile")
    )
    for index in range(3):
        for each, its_model in ((optimizer, model), (eager, other)):
            draw_gradients(its_model, index, math.nan if index == 1 else 1.0)
            each.skip = torch.tensor(float(index == 1))
            step(each, 1e-3 / (index + 1))
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, same)
        torch.testing.assert_close(dict(optimizer.state[parameter]), dict(eager.state[same]))


def test_moments_in_bf16_are_rounded_after_the_update_has_used_them(built):
    (model, optimizer), (other, reference) = built("--optimizer adamw-bf16"), built("")
    step(optimizer)
    step(reference)
    for parameter, exact in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, exact)
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][name].dtype == torch.bfloat16
            assert torch.equal(optimizer.state[parameter][name], reference.state[exact][name].bfloat16())


def test_adamws_rate_is_muons_unless_it_is_given(built):
    for flags, rate in ("", 0.01), ("--adamw-lr 0.003", 0.003):
        _, optimizer = built(f"--optimizer muon --lr 0.01 {flags}")
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, rate, rate]


@pytest.mark.parametrize("precision", ["--precision bf16-pure", "--precision fp8 --fp8-emulate"])
@pytest.mark.slow
def test_adamw8bit_updates_weights_as_adamw_does(built, monkeypatch, precision):
    """In its first step: the moments are rounded to a byte after the update has used them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    (model, optimizer), (other, reference) = (
        built(f"--optimizer {name} --lr 0.05 {precision}") for name in ("adamw8bit", "adamw")
    )
    before = [local(parameter).clone() for parameter in model.parameters()]
    step(optimizer)
    step(reference)
    for parameter, same, old in zip(model.parameters(), other.parameters(), before, strict=True):
        torch.testing.assert_close(local(parameter), local(same))
        assert not torch.equal(local(parameter), old)


# ----------------------------------------------------------------------------------------------------------------------
# In which dtype everything is held

FP32, BF16 = "float32", "bfloat16"
MOMENTS = ("exp_avg", "exp_avg_sq")
EIGHT_BITS = dict.fromkeys(MOMENTS, "uint8")  # codes, next to their scales
HELD = [  # optimizer, precision, dtype of the weights, dtypes of the states
    ("adamw", "bf16", FP32, dict.fromkeys(MOMENTS, FP32)),
    ("adamw", "bf16-pure", BF16, dict.fromkeys(MOMENTS, BF16)),
    ("adamw-bf16", "bf16", FP32, dict.fromkeys(MOMENTS, BF16)),
    ("adamw8bit", "bf16", FP32, EIGHT_BITS),
    ("adamw8bit", "bf16-pure", BF16, EIGHT_BITS),
    ("muon", "bf16", FP32, dict.fromkeys((*MOMENTS, "momentum"), FP32)),
    ("muon", "bf16-pure", BF16, dict.fromkeys(MOMENTS, BF16) | {"momentum": FP32}),
]


def verify(model, optimizer, precision: str) -> str:
    mesh = next(model.parameters()).device_mesh
    return models.verify_sharding(parse(["--precision", precision]), model, optimizer, mesh)


@pytest.mark.parametrize("optimizer, precision, weights, states", HELD)
def test_weights_and_states_are_held_in_their_dtypes(built, optimizer, precision, weights, states):
    model, optimizer = built(f"--optimizer {optimizer} --precision {precision}")
    held = {}
    for parameter in model.parameters():
        for name, state in optimizer.state[parameter].items():
            if state.dim() and parameter.numel() >= 4096:  # torchao keeps those of smaller ones in fp32
                held[name] = str(getattr(local(state), "codes", local(state)).dtype).removeprefix("torch.")
    assert held == states
    assert f" parameters in {weights}, " in verify(model, optimizer, precision)


def test_a_weight_in_a_wrong_dtype_is_an_error_before_the_first_step(built):
    model, optimizer = built("--precision bf16")
    norm = model.model.norm.to(torch.bfloat16)
    optimizer.state[norm.weight] = {"exp_avg": torch.zeros_like(norm.weight)}
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is held in torch\.bfloat16, not in torch\.float32"):
        verify(model, optimizer, "bf16")


def test_gradients_in_a_wrong_dtype_are_an_error_in_the_first_step(built):
    model, optimizer = built("--precision bf16-pure")
    verify(model, optimizer, "bf16-pure")
    weight = model.lm_head.weight
    weight.grad, weight.grad_dtype = None, torch.float32
    weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    before = local(weight).clone()
    with pytest.raises(RuntimeError, match=r"the gradient of lm_head\.weight is held in torch\.float32, not in"):
        optimizer.step()
    assert torch.equal(local(weight), before)


NOT_IN_A_CHECKPOINT = {  # what the first step changes
    "param_groups[0]['k']": lambda optimizer: optimizer.param_groups[0].update(k=1),
    "state model.embed_tokens.weight.late": lambda optimizer: next(iter(optimizer.state.values())).update(late=1),
}


@pytest.mark.parametrize("name", NOT_IN_A_CHECKPOINT)
def test_what_the_first_step_changes_and_no_checkpoint_has_is_an_error(built, name):
    model, optimizer = built("--precision fp32")
    verify(model, optimizer, "fp32")
    optimizer.register_step_pre_hook(lambda *_: NOT_IN_A_CHECKPOINT[name](optimizer))
    with pytest.raises(UserError, match=re.escape(f"--optimizer adamw: its first step made or changed {name}, which")):
        optimizer.step()


def test_a_state_that_is_no_tensor_is_an_error(built):
    model, optimizer = built("--precision fp32")
    optimizer.state[model.lm_head.weight]["step"] = 0
    with pytest.raises(
        UserError, match=r"--optimizer adamw: its state lm_head\.weight\.step is no tensor; make it one"
    ):
        verify(model, optimizer, "fp32")


def test_an_optimizer_whose_package_is_missing_is_refused_by_name(built, monkeypatch):
    assert memory_saving_optimizers("adamw") == ["adamw8bit"]
    kind = dataclasses.replace(find_optimizer("adamw8bit"), package="no_such_package")
    monkeypatch.setattr(adamw8bit, "OPTIMIZER", kind)
    with pytest.raises(UserError, match=r"^--optimizer adamw8bit: needs the package no_such_package \(pip install no_"):
        built("--optimizer adamw8bit")
    assert memory_saving_optimizers("adamw") == []
