"""One rank of the tests of skipped steps: what breaks on one rank has to be skipped on all of them."""

import itertools
import json
import math
import pathlib

import torch
import torch.distributed as dist
from multirank import resolved

import train_fsdp
import utils
from harness import model as models
from harness.base.ranks import all_gather_objects
from harness.job.world import start_processes, stop_processes
from harness.model.optimization import local


def bits_of(model, optimizer) -> dict[str, bytes]:
    """The bytes of this rank's part of every weight and state; NaN equals itself, and 0 is not -0."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = local(parameter)
        for key, state in optimizer.state[parameter].items():
            part = state.to_local() if hasattr(state, "to_local") else state
            if hasattr(part, "codes"):  # of 8 bits
                tensors[f"{name}.{key}.codes"], tensors[f"{name}.{key}.scale"] = part.codes, part.scale
            else:
                tensors[f"{name}.{key}"] = part
    return {
        name: tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def skips(flags: str, workspace: pathlib.Path) -> list:
    """[whether each of three steps was skipped, whether both skipped ones changed nothing here, whether the third
    changed something, whether replicas have the same weights after it]. In the first step the loss of one rank is NaN,
    in the second its gradient is infinite when all are reduced already."""
    broken = dist.get_world_size() - 1
    words = ["--no-compile", "--precision", "fp32", "--model", workspace / "models" / "uneven", *flags.split()]
    settings, config = resolved([*map(str, words), "--sequence-length", "16", "--batch-size", "1"])
    mesh = train_fsdp.build_mesh(settings, torch.device("cpu"))
    model = train_fsdp.build_model(settings, config, mesh)
    optimizer = models.build_optimizer(settings, model)
    tokens = torch.randint(0, 1000, (1, 17))
    good = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    divisor = math.nan if dist.get_rank() == broken else 1.0
    batches = itertools.chain([good | {"loss_divisor": divisor}], [dict(good) for _ in range(2)])
    tracker, skipped, unchanged = utils.PerformanceTracker(0, dist.get_world_size(), 0), [], []
    before = bits_of(model, optimizer)
    for step in range(3):
        if step == 1:
            plant_after_reduction(model, broken)
        result = train_fsdp.train_step(settings, model, optimizer, batches, tracker)
        skipped.append(result.skipped.item())
        unchanged.append(bits_of(model, optimizer) == before)
    replicas_equal = True
    if "replicate" in mesh.mesh_dim_names:
        shard, bits = mesh.get_local_rank("shard"), bits_of(model, optimizer)
        of_ranks = all_gather_objects((shard, bits))
        replicas_equal = all(of_rank == bits for other, of_rank in of_ranks if other == shard)
    return [skipped, unchanged[0] and unchanged[1], not unchanged[2], replicas_equal]


def plant_after_reduction(model, broken: int) -> None:
    """Makes one number of the next gradients infinite on one rank, once they are reduced."""
    original = models.clip_grad_norm

    def clip(optimizer, max_norm):
        models.clip_grad_norm = original
        if dist.get_rank() == broken:
            largest = max((local(parameter.grad) for parameter in model.parameters()), key=torch.numel)
            largest.view(-1)[0] = math.inf
        return original(optimizer, max_norm)

    models.clip_grad_norm = clip


def main(workspace: pathlib.Path, folder: pathlib.Path, flags_by_name: dict[str, str]) -> None:
    start_processes()
    found = {name: skips(flags, workspace) for name, flags in flags_by_name.items()}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    stop_processes(None)
