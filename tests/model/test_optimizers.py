"""Optimizers: what a step changes, what it does not, and what it leaves behind."""

import dataclasses
import functools
import gc
import json
import re
import sys

import pytest
import torch
import torch._dynamo
from conftest import copy_program, losses_of, metrics_of, parse, slow_case, start, words
from multirank import resolved
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import train_fsdp
from harness import model as models
from harness.base.errors import UserError
from harness.flags.settings import OPTIMIZERS
from harness.model.optimization import (
    OptimizerKind,
    build_optimizer,
    clip_grad_norm,
    find_optimizer,
    local,
    memory_saving_optimizers,
    parameter_bytes,
)
from harness.model.optimizers import adamw, adamw8bit
from harness.model.optimizers.adamw import AdamW


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


def local_gradients(model) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters()]


def test_steps_leave_nothing_behind(built):
    """Through DTensor each step of torch 2.11 left 1,642 objects and 154 KiB."""
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


class Multiplied(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.__name__.partition(".")[0]
        assert "mul" not in name and "div" not in name, name
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_gradients_that_are_not_clipped_are_not_touched(built, name):
    model, optimizer = built("--optimizer", name)
    before = [gradient.clone() for gradient in local_gradients(model)]
    with Multiplied():
        norm = clip_grad_norm(optimizer, 0)
    if name == "adamw":
        with Multiplied():
            optimizer.step()
    expected = torch.cat([gradient.flatten() for gradient in before]).norm()
    torch.testing.assert_close(norm, expected)
    for now, then in zip(local_gradients(model), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("name", ["adamw", slow_case("adamw8bit")])
def test_a_step_takes_the_gradients_scaled_down_to_the_norm(built, name):
    """AdamW's first moment after one step is a tenth of the gradient (beta 0.9)."""
    model, optimizer = built("--optimizer", name)
    before = [gradient.clone() for gradient in local_gradients(model)]
    norm = clip_grad_norm(optimizer, 0.5)
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        moment = optimizer.state[parameter]["exp_avg"].to_local()
        if hasattr(moment, "dequantize"):
            continue  # its rounding is torchao's
        torch.testing.assert_close(moment, 0.1 * gradient * 0.5 / norm, rtol=1e-4, atol=1e-9)
    optimizer.zero_grad()
    assert getattr(optimizer, "grad_scale", None) is None  # it was for one step


def test_a_parameter_without_gradient_is_left_as_it_is(built):
    """An expert that no token chose."""
    model, optimizer = built()
    for _ in range(2):
        clip_grad_norm(optimizer, 1.0)
        optimizer.step()
    parameter, *others = model.parameters()
    before = [tensor.clone() for tensor in (parameter, *optimizer.state[parameter].values())]
    parameter.grad = None
    clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    for now, then in zip((parameter, *optimizer.state[parameter].values()), before, strict=True):
        assert torch.equal(now, then)
    assert {optimizer.state[other]["step"].item() for other in others} == {3}


def test_steps_are_those_of_torchs_adamw_over_dtensors(built):
    (model, optimizer), (other, _) = built(), built()
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = dict(other.named_parameters())
    for group, own in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = [theirs[names[parameter]] for parameter in own["params"]]
    torchs = torch.optim.AdamW(groups, fused=True)
    assert isinstance(optimizer, AdamW) and type(torchs) is torch.optim.AdamW
    for _ in range(3):
        norm = clip_grad_norm(optimizer, 1.0)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).full_tensor())
        optimizer.step()
        torchs.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], msg=name)
        for key, state in torchs.state[theirs[name]].items():
            torch.testing.assert_close(optimizer.state[parameter][key], state, msg=f"{name}.{key}")


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


def test_a_compiled_update_gives_the_numbers_of_the_eager_one_and_is_compiled_for_few_shapes(built, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    (model, optimizer), (other, eager) = (
        built("--optimizer", "adamw-bf16", "--compile" if compiled else "--no-compile") for compiled in (True, False)
    )
    counters.clear()
    for step in range(4):
        for of in (optimizer, eager):
            for group in of.param_groups:
                group["lr"] = 1e-3 / (step + 1)
            clip_grad_norm(of, 1.0)
            of.step()
        if step == 0:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs <= 4  # with weight decay and without, the first shape and any
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, same)


@pytest.mark.parametrize("betas", ["0.9 0.999", "0.99 0.95"])
def test_moments_that_would_stand_still_in_bf16_are_refused(betas):
    with pytest.raises(UserError, match="--betas: with adamw-bf16 at most"):
        parse(["--optimizer", "adamw-bf16", "--betas", *betas.split()])


@pytest.mark.parametrize("beta, stays", [(0.98, False), (0.999, True)])
def test_a_moment_in_bf16_follows_gradients_that_become_smaller_or_stands_still(beta, stays):
    """What the refusal above is for: squares of gradients that fall to a hundredth."""
    generator = torch.Generator().manual_seed(1)
    moments = {dtype: torch.ones(1000, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    for _ in range(round(8 / (1 - beta))):
        square = (0.1 * torch.randn(1000, generator=generator)) ** 2
        for moment in moments.values():
            moment.copy_(moment.float() * beta + square * (1 - beta))
    ratio = (moments[torch.bfloat16].float() / moments[torch.float32]).mean().item()
    assert ratio > 10 if stays else abs(ratio - 1) < 0.05


@pytest.mark.parametrize("precision", ["--precision bf16-pure", "--precision fp8 --fp8-emulate", "--precision fp32"])
@pytest.mark.slow
def test_adamw8bit_updates_weights_of_every_precision_as_adamw_does(built, monkeypatch, precision):
    """Its first step: the moments are rounded to a byte after the update has used them."""
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
    kept = {
        type(state.to_local()).__name__
        for states in optimizer.state.values()
        for name, state in states.items()
        if name != "step"
    }
    assert kept >= {"OptimState8bit"}


# ----------------------------------------------------------------------------------------------------------------------
# What every optimizer's file says


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_states_of_every_optimizer_take_the_bytes_that_its_file_says(built, arguments, name, precision):
    if (name, precision) == ("adamw-bf16", "bf16-pure"):
        pytest.skip("is refused")
    model, optimizer = built("--optimizer", name, "--precision", precision)
    parameters = [p for p in model.parameters() if p.numel() >= 4096]  # torchao keeps those of smaller ones in fp32
    if find_optimizer(name).model_state_bytes:  # its parameters differ
        parameters = list(model.parameters())
    states = [local(s) for p in parameters for s in optimizer.state[p].values() if s.dim()]
    size = sum(getattr(state, "codes", state).nbytes for state in states)
    each = parameter_bytes(*resolved([*arguments, "--optimizer", name, "--precision", precision]))
    assert parameters and size == pytest.approx(each.states * sum(p.numel() for p in parameters), rel=1e-12)
    assert each.at_rest == 2 * (2 if precision == "bf16-pure" else 4) + each.states
    assert each.in_checkpoint >= each.weight + each.states


# ----------------------------------------------------------------------------------------------------------------------
# In which dtype everything is held

FP32, BF16 = "float32", "bfloat16"
MOMENTS, MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum",)
EIGHT_BITS = {f"{name} codes": "uint8" for name in MOMENTS}
STATES = {  # of an optimizer's states the dtype with --precision bf16, and with bf16-pure
    "adamw": (dict.fromkeys(MOMENTS, FP32), dict.fromkeys(MOMENTS, BF16)),
    "adamw-bf16": (dict.fromkeys(MOMENTS, BF16), None),
    "adamw8bit": (EIGHT_BITS, EIGHT_BITS),
    "muon": (dict.fromkeys(MOMENTS + MOMENTUM, FP32), dict.fromkeys(MOMENTS, BF16) | {"momentum": FP32}),
    "muon --momentum-dtype bf16": (
        dict.fromkeys(MOMENTS, FP32) | {"momentum": BF16},
        dict.fromkeys(MOMENTS + MOMENTUM, BF16),
    ),
    "normuon": (
        dict.fromkeys((*MOMENTS, *MOMENTUM, "second_moment"), FP32),
        dict.fromkeys(MOMENTS, BF16) | dict.fromkeys((*MOMENTUM, "second_moment"), FP32),
    ),
}


def verify(settings, model, optimizer) -> str:
    return models.verify_sharding(settings, model, optimizer, next(model.parameters()).device_mesh)


@pytest.fixture
def verifiable(arguments, device):
    """`verifiable(*flags)`: what `verify_sharding` is given but for the mesh, without gradients."""

    def build(*flags):
        settings, config = resolved([*arguments, *flags])
        model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
        return settings, model, build_optimizer(settings, model)

    return build


@pytest.mark.parametrize("precision", ["fp32", "bf16", slow_case("fp8 --fp8-emulate"), "bf16-pure"])
@pytest.mark.parametrize("optimizer", STATES)
def test_the_line_says_in_which_dtype_everything_is_held(verifiable, optimizer, precision):
    of_fp32, of_bf16 = STATES[optimizer]
    states, weights = (of_bf16, BF16) if precision == "bf16-pure" else (of_fp32, FP32)
    if states is None:
        pytest.skip("is refused")
    _, _, said = verify(*verifiable("--optimizer", *words(f"{optimizer} --precision {precision}"))).split("; ", 2)
    held = {}
    for part in said.split("; "):
        names, _, dtype = part.rpartition(" in ")
        held |= dict.fromkeys(names.split(", "), dtype)
    assert held["weights"] == held["sums of gradients over ranks"] == held["at the first step gradients"] == weights
    assert {name: held[name] for name in states} == states


def weight_in_bf16(settings, model, optimizer):
    model.model.norm.to(torch.bfloat16)
    optimizer.state[model.model.norm.weight] = {"exp_avg": torch.zeros_like(model.model.norm.weight)}


def sums_in_bf16(settings, model, optimizer):
    _, parameter, *_ = models.fsdp_group(model.model.layers[0]).fsdp_params
    parameter.mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "plant, message",
    [
        (weight_in_bf16, r"model\.norm\.weight: weights are held in torch\.bfloat16, not in torch\.float32"),
        (sums_in_bf16, r"model\.layers\.0, parameter 1: sums of gradients over ranks are held in torch\.bfloat16, not"),
    ],
)
def test_a_wrong_dtype_is_an_error_before_the_first_step(verifiable, plant, message):
    given = verifiable("--precision", "bf16")
    plant(*given)
    with pytest.raises(RuntimeError, match=message):
        verify(*given)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_gradients_in_a_wrong_dtype_are_an_error_in_the_first_step_and_looked_at_once(verifiable, optimizer):
    settings, model, optimizer = verifiable("--precision", "bf16-pure", "--optimizer", optimizer)
    verify(settings, model, optimizer)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32 if parameter is model.lm_head.weight else parameter.dtype
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    before = local(model.lm_head.weight).clone()
    with pytest.raises(RuntimeError, match=r"lm_head\.weight: gradients are held in torch\.float32, not in torch\.bf"):
        optimizer.step()
    assert torch.equal(local(model.lm_head.weight), before)
    assert not optimizer._optimizer_step_pre_hooks


def test_what_can_stand_in_for_an_optimizer_takes_less_memory():
    for name in OPTIMIZERS:
        for other in memory_saving_optimizers(name):
            assert find_optimizer(other).state_bytes(4) < find_optimizer(name).state_bytes(4)
    assert memory_saving_optimizers("adamw") == ["adamw8bit"]


def test_an_optimizer_whose_package_is_missing_is_refused_by_name(built, monkeypatch):
    kind = dataclasses.replace(find_optimizer("adamw8bit"), package="no_such_package")
    monkeypatch.setattr(adamw8bit, "OPTIMIZER", kind)
    with pytest.raises(UserError, match=r"^--optimizer adamw8bit: needs the package no_such_package \(pip install no_"):
        built("--optimizer", "adamw8bit")
    assert memory_saving_optimizers("adamw") == []


def test_only_an_optimizer_that_keeps_no_states_may_lack_them(built, monkeypatch):
    build = lambda groups, settings: torch.optim.SGD(groups, settings.lr)  # noqa: E731
    monkeypatch.setattr(adamw, "OPTIMIZER", OptimizerKind(build, state_bytes=lambda weight: 0))
    model, optimizer = built()
    mesh = next(model.parameters()).device_mesh
    given = (parse([]), model, optimizer, mesh)
    assert "and 0 optimizer states" in models.verify_sharding(*given, keeps_states=False)
    with pytest.raises(RuntimeError, match="has no optimizer state"):
        models.verify_sharding(*given)


# ----------------------------------------------------------------------------------------------------------------------
# One more file

SGD = '''"""SGD with momentum. The first of --betas is the momentum."""

import torch

from harness.model.optimization import OptimizerKind


def build(groups, settings):
    optimizer = torch.optim.SGD(groups, settings.lr, momentum=settings.betas[0])
    for group in groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer


OPTIMIZER = OptimizerKind(build, state_bytes=lambda weight: weight)
'''

PLAN_TRAIN_RESUME = """
import json, sys
import torch
from harness.flags.parser import parse_args
from harness.job.world import start_processes
from harness.model.configs import load_config
from harness import plan
import train_fsdp

class Stop:
    can_save, name, steps = False, "SIGTERM", -1
    def agreed_by_all_ranks(self):
        self.steps -= 1
        return self.steps == 0

flags, only_half = sys.argv[1:], Stop()
only_half.steps = 2
print("PLAN", flush=True)
plan.print_plan(parse_args([*flags, "--plan", "--json", "--plan-gpus", "2", "--plan-seconds", "0"]), train_fsdp.RECIPE)
print("END", flush=True)
device = start_processes()
for run, stop, resume in (("all", Stop(), "none"), ("half", only_half, "none"), ("half", Stop(), "auto")):
    settings = parse_args([*flags, "--run-name", run, "--resume", resume])
    print("EXIT", train_fsdp.run(settings, device, stop), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_an_optimizer_is_added_by_one_file(tmp_path):
    """In a copy of the program: --help has it, a run trains and goes on bit for bit, a plan counts its states."""
    copy_program(tmp_path)
    (tmp_path / "harness" / "model" / "optimizers" / "sgd.py").write_text(SGD)

    help_text = start([sys.executable, "train_fsdp.py", "--help"], cwd=tmp_path).stdout
    assert "--optimizer {adamw,adamw-bf16,adamw8bit,muon,normuon,sgd}" in help_text
    assert "; sgd: SGD with momentum [adamw]" in " ".join(help_text.split())

    flags = "--model demo --dataset synthetic --optimizer sgd --lr 0.01 --num-steps 4 --sequence-length 32 --no-compile"
    flags += " --log-interval 1 --final-checkpoint --precision fp32 --output-dir out --cache-dir cache"
    command = [sys.executable, "-c", PLAN_TRAIN_RESUME, *flags.split()]
    process = start(command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert re.findall(r"^EXIT (\d+)", process.stdout, re.MULTILINE) == ["0", "143", "0"]
    plan = json.loads(process.stdout.partition("PLAN\n")[2].partition("END\n")[0])
    memory = plan["memory_gib"]
    assert memory["optimizer"] == pytest.approx(memory["parameters"], rel=0.01) and memory["optimizer"] > 0
    losses = losses_of(tmp_path / "out" / "all")
    assert len(losses) == 4 and losses_of(tmp_path / "out" / "half") == losses
    half, whole = (metrics_of(tmp_path / "out" / run)[-1]["grad_norm"] for run in ("half", "all"))
    assert half == whole
