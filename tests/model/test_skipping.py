"""A step whose gradient norm is NaN or infinite changes nothing, on any rank, whatever the optimizer."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import answer_of, slow_case, words
from tiny import build

import train_fsdp
from harness import model as models
from harness.base import all_gather_objects
from harness.job import Stopped
from harness.model.optimization import local
from harness.state import TrainState

BROKEN = ("loss", "gradient", "", "loss", "")  # what is broken in each step, on the last rank
SKIPPED, TAKEN = [1.0, False, False, True], [0.0, True, True, True]  # as in `train`
EXPECTED = [SKIPPED if broken else TAKEN for broken in BROKEN]
OPTIMIZERS = ("adamw", "adamw-bf16", "muon", "muon --precision bf16-pure", slow_case("adamw8bit"))
LAYOUTS = {f"stage {stage}": f"--zero-stage {stage}" for stage in (0, 1, 2, 3)}
LAYOUTS |= {"offloaded": "--cpu-offload", "2 replicas": "--dp-replicate-size 2"}
LAYOUTS |= {f"{name}, muon": f"{flags} --optimizer muon" for name, flags in LAYOUTS.items()}


def bits(model, optimizer) -> dict[str, int]:
    """A hash of this rank's part of every weight and state, in which NaN equals itself and 0 is not -0."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = local(parameter.detach())
        for key, state in optimizer.state[parameter].items():
            state = state.to_local() if hasattr(state, "to_local") else state
            if hasattr(state, "codes"):  # of 8 bits
                tensors |= {f"{name}.{key} codes": state.codes, f"{name}.{key} scale": state.scale}
            else:
                tensors[f"{name}.{key}"] = state
    return {name: torch.hash_tensor(tensor).item() for name, tensor in tensors.items()}


def train(workspace, flags: str) -> list[list]:
    """[whether it was skipped, whether anything changed, whether all steps and queries' weights did, whether replicas
    are equal] of each step of BROKEN. A loss is NaN, or a gradient infinite after the reduction."""
    argv = ["--model", workspace / "models" / "uneven", "--sequence-length", 16, "--precision", "fp32", "--no-compile"]
    settings, model, optimizer = build([*argv, *flags.split()])
    tokens = torch.randint(0, 1000, (1, 17))
    clip, is_last = models.clip_grad_norm, dist.get_rank() == dist.get_world_size() - 1

    def plant_and_clip(optimizer, max_norm):
        largest = max((local(parameter.grad) for parameter in model.parameters()), key=torch.numel)
        largest.view(-1)[0] = math.inf
        return clip(optimizer, max_norm)

    def take_step(broken: str) -> list:
        before = bits(model, optimizer)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if broken == "loss" and is_last:
            batch["loss_divisor"] = math.nan
        clips = plant_and_clip if broken == "gradient" and is_last else clip
        with mock.patch.object(models, "clip_grad_norm", clips):
            result = train_fsdp.train_step(settings, model, optimizer, iter([batch]))
        after = bits(model, optimizer)
        changed = {name for name in after if after[name] != before[name]}
        wanted = {name for name in after if name.endswith((".step", "q_proj.weight"))}
        mesh = next(model.parameters()).device_mesh
        all_bits = all_gather_objects((mesh.get_local_rank("shard"), after))
        equal = all(other == after for shard, other in all_bits if shard == mesh.get_local_rank("shard"))
        return [result.skipped.item(), bool(changed), changed >= wanted, equal]

    return [take_step(broken) for broken in BROKEN]


def train_all(workspace, names: list[str]) -> list[dict]:
    """{layout: what `train` returned} of each rank."""
    return all_gather_objects({name: train(workspace, LAYOUTS[name]) for name in names})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit_of_weights_states_and_counts(device, workspace, monkeypatch, optimizer):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # as adamw8bit does
    assert train(workspace, f"--optimizer {optimizer}") == EXPECTED


@pytest.mark.parametrize("flags", ["--zero-stage 1", "--zero-stage 2 --defer-grad-sync", "--zero-stage 3"])
def test_a_step_that_a_stop_interrupts_leaves_no_gradient(device, workspace, flags):
    argv = ["--model", workspace / "models" / "uneven", "--sequence-length", 16, "--no-compile"]
    settings, model, optimizer = build([*argv, *words(f"--gradient-accumulation-steps 2 {flags}")])
    tokens = torch.arange(34).reshape(2, 17)
    batches = [{"input_ids": row[None, :-1], "labels": row[None, 1:]} for row in tokens]
    state, expected = TrainState(model, optimizer), models.loss_and_norm(model, optimizer, batches[0])

    def second_is_a_stop():
        yield dict(batches[1], loss_divisor=1e-30)
        raise Stopped

    with pytest.raises(Stopped), state.step_undone_if_stopped():
        train_fsdp.train_step(settings, model, optimizer, second_is_a_stop())
    assert models.loss_and_norm(model, optimizer, batches[0]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("ranks, names", [(2, ["stage 0"]), (4, [*LAYOUTS])], ids=["2, stage 0", "4, all"])
def test_what_breaks_on_one_rank_is_skipped_on_all(workspace, ranks, names):
    assert answer_of(ranks, train_all, workspace, names) == [dict.fromkeys(names, EXPECTED)] * ranks
