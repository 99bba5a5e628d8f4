"""Averages of the weights in many worlds beside a plain one in one process. The reference holds every tensor whole and
takes it in after each step. tests/model/test_averages.py reads what they gave."""

import contextlib
import json
import pathlib

import numpy as np
import torch
import torch.distributed as dist
from multirank import resolved
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
import utils
from harness import model as models
from harness.job.world import start_processes, stop_processes
from harness.model.averages import WeightAverage
from harness.model.float8 import float8_weights
from harness.state.train_state import TrainState, unwrapped

DECAY, STEPS, SEQUENCES, TOKENS = 0.9, 5, 8, 32
STAGES = {f"stage {stage}": f"--zero-stage {stage}" for stage in (3, 2, 1, 0)}
ACCUMULATED = {
    f"stage {stage} in 2 microbatches": f"--zero-stage {stage} --gradient-accumulation-steps 2" for stage in (3, 2, 1)
}
PRECISIONS = {
    "offloaded": "--cpu-offload",
    "bf16": "--precision bf16 --zero-stage 2",
    "bf16-pure": "--precision bf16-pure --zero-stage 2",
    "fp8": "--precision fp8 --fp8-emulate",
    "fp8 at stage 2": "--precision fp8 --fp8-emulate --zero-stage 2",
}
REPLICAS = {
    "2 replicas": "--dp-replicate-size 2",
    "2 replicas at stage 1": "--dp-replicate-size 2 --zero-stage 1 --gradient-accumulation-steps 2",
}
LAYOUTS = {
    1: STAGES | {"stage 1 in 2 microbatches": ACCUMULATED["stage 1 in 2 microbatches"]} | PRECISIONS,
    2: STAGES | ACCUMULATED | PRECISIONS,
    4: STAGES | ACCUMULATED | REPLICAS | {"fp8": PRECISIONS["fp8"]},
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on every rank; of a float8 weight the master weight that it wraps."""
    tensor = unwrapped(tensor.detach())
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def has_scale(weight: torch.Tensor) -> bool:
    return weight._precomputed_scale is not None


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


HELD_OUT = torch.randint(0, 1536, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(99))


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(0, 1536, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))


def follow(argv: list, device: torch.device) -> dict:
    """Some steps with an average: what of it is as it should be, and the numbers to compare between worlds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    settings, config = resolved(argv)
    mesh = train_fsdp.build_mesh(settings, device)
    model = train_fsdp.build_model(settings, config, mesh)
    optimizer = models.build_optimizer(settings, model)
    average = WeightAverage(model, DECAY)
    models.verify_sharding(settings, model, optimizer, mesh, averages=average.tensors)
    state = TrainState(model, optimizer, average=average)
    names = list(average.tensors)
    parameters = [dict(model.named_parameters())[name] for name in names]
    reference = [whole(parameter).float().clone() for parameter in parameters]
    size = SEQUENCES // world // settings.gradient_accumulation_steps

    def batches():
        for step in range(STEPS):
            tokens = batch_of(step)
            for microbatch in range(settings.gradient_accumulation_steps):
                first = (microbatch * world + rank) * size
                part = tokens[first : first + size]
                yield {"input_ids": part.clone(), "labels": part.roll(-1, 1)}

    def loss() -> float:
        """As an evaluation finds it, the same on every rank."""
        found, _ = train_fsdp.evaluate(settings, model, {"": Held()}, device)
        return found["eval_loss"]

    moves, found, stream = [], {}, batches()
    found["begins as a copy"] = all(map(torch.equal, reference, map(whole, average.tensors.values())))
    for _ in range(STEPS):
        train_fsdp.train_step(settings, model, optimizer, stream, utils.PerformanceTracker(0, 1, 0))
        average.update()
        for of_name, parameter in zip(reference, parameters, strict=True):
            of_name.lerp_(whole(parameter).float(), 1 - DECAY)
        moves.append(all(map(torch.equal, reference, map(whole, average.tensors.values()))))
    found["equal after each step"] = moves

    before = bits([whole(tensor) for tensor in average.tensors.values()])
    average.update(skip=torch.tensor(True))
    found["a skipped step changes no bit"] = all(
        map(torch.equal, before, bits([whole(tensor) for tensor in average.tensors.values()]))
    )
    weights = bits([whole(parameter) for parameter in parameters])
    found["raw"] = loss()
    scales = [weight._precomputed_scale for weight in float8_weights(model)]
    with average.as_weights():
        found["inside no float8 scale is that of the weights"] = not any(map(has_scale, float8_weights(model)))
        rounded = [tensor.to(parameter.dtype) for tensor, parameter in zip(reference, parameters, strict=True)]
        found["inside the weights are the average"] = all(map(torch.equal, rounded, map(whole, parameters)))
        found["average"] = loss()
    with contextlib.suppress(ZeroDivisionError), average.as_weights(), models.evaluating(model):
        model(input_ids=batch_of(1), use_cache=False)
        raise ZeroDivisionError
    found["raw afterwards"] = loss()
    found["afterwards all is as it was"] = all(
        map(torch.equal, weights + before, bits([whole(tensor) for tensor in (*parameters, *average.tensors.values())]))
    )
    kept = [weight._precomputed_scale is scale for weight, scale in zip(float8_weights(model), scales, strict=True)]
    found["afterwards each float8 weight has its scale"] = all(kept)
    found["plain raw"] = plain_loss(config, names, [whole(parameter) for parameter in parameters])
    found["plain average"] = plain_loss(config, names, reference)
    found["share"] = sum(t.to_local().numel() for t in average.tensors.values()) / sum(map(torch.numel, reference))
    average.update(skip=torch.tensor(0.0))
    for of_name, parameter in zip(reference, parameters, strict=True):
        of_name.lerp_(whole(parameter).float(), 1 - DECAY)
    found["an update on the device"] = all(map(torch.equal, reference, map(whole, average.tensors.values())))
    found["finite"] = state.finite()
    largest = max(average.tensors.values(), key=lambda tensor: tensor.to_local().numel())
    if rank == world - 1:
        unwrapped(largest).to_local().view(-1)[0] = float("nan")
    found["finite with a NaN in the average"] = state.finite()
    return found


class Held:
    """Held-out windows."""

    end_of_text = None

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> np.ndarray:
        return HELD_OUT[index].numpy()


def plain_loss(config, names: list[str], tensors: list[torch.Tensor]) -> float:
    """The loss of a plain model of transformers with these weights, on the held-out batch."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()), dtype=torch.float32).eval()
    model.load_state_dict(dict(zip(names, (tensor.float() for tensor in tensors), strict=True)), strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits = model(input_ids=HELD_OUT[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), HELD_OUT[:, 1:].flatten()).item()


def main(folder: pathlib.Path, name: str, layouts: dict[str, str]) -> None:
    """Follows the average in these layouts, into FOLDER/NAME.json. Nothing in the model `uneven` divides by the ranks;
    float8 wants sizes in multiples of 16."""
    device, world = start_processes(), dist.get_world_size()
    result = {}
    for layout, flags in layouts.items():
        accumulation = 2 if "accumulation" in flags else 1
        model = folder / ("even" if "fp8" in flags else "uneven")
        sizes = ["--batch-size", SEQUENCES // world // accumulation, "--sequence-length", TOKENS, "--num-workers", 0]
        precision = [] if "--precision" in flags else ["--precision", "fp32"]
        argv = ["--model", model, "--dataset", "synthetic", "--no-compile", "--lr", "1e-2", *sizes, *precision]
        result[layout] = follow([*argv, *flags.split()], device)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(result))
    stop_processes()
