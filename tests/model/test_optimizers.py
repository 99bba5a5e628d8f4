"""Optimizers: the changes and the memory of a step."""

import dataclasses
import functools
import gc

import pytest
import torch
import torch._dynamo
from conftest import parse, words
from multirank import resolved

import train_fsdp
from harness import model as models
from harness.base.errors import UserError
from harness.flags import OPTIMIZERS
from harness.model.optimization import build_optimizer, clip_grad_norm, find_optimizer, local, memory_saving_optimizers
from harness.model.optimizers import adamw8bit
from harness.model.optimizers.adamw import AdamW, groups_of_equal_size, update


@pytest.fixture
def built(device, arguments):
    """`built(*flags)`: a model whose parameters have gradients, and its optimizer."""

    def build(*flags):
        settings, config = resolved([*arguments, *flags])
        model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
        optimizer = build_optimizer(settings, model)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return model, optimizer

    return build


def test_steps_leave_nothing_behind(built):
    """With DTensors each step of torch 2.11 left 1,642 objects and 154 KiB."""
    _, optimizer = built()
    counts = []
    for step in range(60):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (step + 1)  # an argument that is new in each step
        clip_grad_norm(optimizer, 1.0)
        optimizer.step()
        if step in (9, 59):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 50


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_parameter_without_gradient_is_left_as_it_is(built, name):
    """An expert that no token chose."""
    model, optimizer = built("--optimizer", name)
    for _ in range(2):
        clip_grad_norm(optimizer, 1.0)
        optimizer.step()
    parameter, other = (layer.mlp.up_proj.weight for layer in model.model.layers)
    before, moved = ([tensor.clone() for tensor in (p, *optimizer.state[p].values())] for p in (parameter, other))
    parameter.grad = None
    clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    for now, then in zip((parameter, *optimizer.state[parameter].values()), before, strict=True):
        assert torch.equal(now, then)
    for now, then in zip((other, *optimizer.state[other].values()), moved, strict=True):
        assert not torch.equal(now, then)


@pytest.mark.parametrize(
    "by", ["torch's kernel", "its own update", "its compiled update", "its compiled update for large tensors"]
)
def test_steps_are_those_of_torchs_adamw_over_dtensors(built, by):
    (model, optimizer), (other, _) = built(), built()
    if by != "torch's kernel":
        optimizer.update = torch.compile(update, backend="aot_eager") if "compiled" in by else update
    if "large" in by:
        sizes = {parameter.numel() for parameter in model.parameters()}
        optimizer.min_numel = 4096
        assert min(sizes) < optimizer.min_numel < max(sizes)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = dict(other.named_parameters())
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = [theirs[names[parameter]] for parameter in own["params"]]
    torchs = torch.optim.AdamW(groups, fused=True)
    assert isinstance(optimizer, AdamW) and type(torchs) is torch.optim.AdamW
    for step in range(3):
        for parameters in (model.parameters(), other.parameters()):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
        norm = clip_grad_norm(optimizer, 1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).full_tensor())
        optimizer.step()
        torchs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-6, msg=name)
        for key, state in torchs.state[theirs[name]].items():
            torch.testing.assert_close(optimizer.state[parameter][key], state, msg=f"{name}.{key}")


def test_no_more_than_two_lengths_of_list_are_compiled():
    tensors = [(torch.zeros(size), torch.zeros(())) for size in [3] * 9 + [5] * 4 + [0] * 4 + [7]]
    lists = list(groups_of_equal_size(tensors))
    assert sorted([len(equal) for equal in lists]) == [1, 1, 4, 4, 4]
    assert all(len({row[0].shape for row in equal}) == 1 for equal in lists)


def test_moments_in_bf16_are_rounded_after_the_update_has_used_them(built):
    (model, optimizer), (other, reference) = built("--optimizer", "adamw-bf16"), built()
    for of in (optimizer, reference):
        clip_grad_norm(of, 1.0)
        of.step()
    for parameter, exact in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, exact)
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][name].dtype == torch.bfloat16
            assert torch.equal(optimizer.state[parameter][name], reference.state[exact][name].bfloat16())


def test_a_compiled_update_gives_the_numbers_of_the_eager_one(built, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    (model, optimizer), (other, eager) = (
        built("--optimizer", "adamw-bf16", "--compile" if compiled else "--no-compile") for compiled in (True, False)
    )
    for step in range(4):
        for of in (optimizer, eager):
            for group in of.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            clip_grad_norm(of, 1.0)
            of.step()
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, same)


def test_moments_that_would_stand_still_in_bf16_are_refused():
    with pytest.raises(UserError, match=r"--betas: at most 0\.98 with --optimizer adamw-bf16"):
        parse(words("--optimizer adamw-bf16 --betas 0.9 0.999"))


@pytest.mark.parametrize("precision", ["--precision bf16-pure", "--precision fp8 --fp8-emulate"])
@pytest.mark.slow
def test_adamw8bit_updates_weights_as_adamw_does(built, monkeypatch, precision):
    """In its first step: the moments are rounded to a byte after the update has used them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    (model, optimizer), (other, reference) = (
        built("--optimizer", name, "--lr", "0.05", *precision.split()) for name in ("adamw8bit", "adamw")
    )
    before = [local(parameter).clone() for parameter in model.parameters()]
    for of in (optimizer, reference):
        clip_grad_norm(of, 1.0)
        of.step()
    for parameter, same, old in zip(model.parameters(), other.parameters(), before, strict=True):
        torch.testing.assert_close(local(parameter), local(same))
        assert not torch.equal(local(parameter), old)


# ----------------------------------------------------------------------------------------------------------------------
# In which dtype everything is held

FP32, BF16 = "float32", "bfloat16"
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum",)
EIGHT_BITS = dict.fromkeys(MOMENTS, "uint8")  # codes, beside their scales
STATES = {  # of an optimizer's states the dtype with --precision bf16, and with bf16-pure
    "adamw": (dict.fromkeys(MOMENTS, FP32), dict.fromkeys(MOMENTS, BF16)),
    "adamw-bf16": (dict.fromkeys(MOMENTS, BF16), None),
    "adamw8bit": (EIGHT_BITS, EIGHT_BITS),
    "muon": (dict.fromkeys(MOMENTS + MOMENTUM, FP32), dict.fromkeys(MOMENTS, BF16) | {"momentum": FP32}),
}


def verify(model, optimizer, precision: str) -> str:
    mesh = next(model.parameters()).device_mesh
    return models.verify_sharding(parse(["--precision", precision]), model, optimizer, mesh)


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_states_are_held_in_their_dtypes(built, optimizer, precision):
    of_fp32, of_bf16 = STATES[optimizer]
    states, weights = (of_bf16, BF16) if precision == "bf16-pure" else (of_fp32, FP32)
    if states is None:
        pytest.skip("is refused")
    model, optimizer = built("--optimizer", *words(f"{optimizer} --precision {precision}"))
    held = {}
    for parameter in model.parameters():
        for name, state in optimizer.state[parameter].items():
            if state.dim() and parameter.numel() >= 4096:  # torchao keeps those of smaller ones in fp32
                held[name] = str(getattr(local(state), "codes", local(state)).dtype).removeprefix("torch.")
    assert held == states
    assert f" parameters in {weights}, " in verify(model, optimizer, precision)


def test_a_weight_in_a_wrong_dtype_is_an_error_before_the_first_step(built):
    model, optimizer = built("--precision", "bf16")
    norm = model.model.norm.to(torch.bfloat16)
    optimizer.state[norm.weight] = {"exp_avg": torch.zeros_like(norm.weight)}
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is held in torch\.bfloat16, not in torch\.float32"):
        verify(model, optimizer, "bf16")


def test_gradients_in_a_wrong_dtype_are_an_error_in_the_first_step(built):
    model, optimizer = built("--precision", "bf16-pure")
    verify(model, optimizer, "bf16-pure")
    weight = model.lm_head.weight
    weight.grad, weight.grad_dtype = None, torch.float32
    weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    before = local(weight).clone()
    with pytest.raises(RuntimeError, match=r"the gradient of lm_head\.weight is held in torch\.float32, not in"):
        optimizer.step()
    assert torch.equal(local(weight), before)


def test_an_optimizer_whose_package_is_missing_is_refused_by_name(built, monkeypatch):
    assert memory_saving_optimizers("adamw") == ["adamw8bit"]
    kind = dataclasses.replace(find_optimizer("adamw8bit"), package="no_such_package")
    monkeypatch.setattr(adamw8bit, "OPTIMIZER", kind)
    with pytest.raises(UserError, match=r"^--optimizer adamw8bit: needs the package no_such_package \(pip install no_"):
        built("--optimizer", "adamw8bit")
    assert memory_saving_optimizers("adamw") == []
