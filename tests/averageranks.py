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
HELD_OUT = torch.randint(0, 1536, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(99))


class Held:
    """Held-out windows."""

    end_of_text = None

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> np.ndarray:
        return HELD_OUT[index].numpy()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor on every rank; of a float8 weight the master weight that it wraps."""
    tensor = unwrapped(tensor.detach())
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def has_scale(weight: torch.Tensor) -> bool:
    return weight._precomputed_scale is not None


def bits(tensors) -> list[torch.Tensor]:
    return [whole(tensor).clone().view(torch.uint8) for tensor in tensors]


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(0, 1536, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))


def follow(argv: list, device: torch.device) -> dict:
    """Some steps with an average: {what of it is as it should be}, under `figures` the numbers to compare."""
    rank, world = dist.get_rank(), dist.get_world_size()
    settings, config = resolved(argv)
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    optimizer = models.build_optimizer(settings, model)
    average = WeightAverage(model, DECAY)
    averages, parameters = [*average.tensors.values()], dict(model.named_parameters())
    state = TrainState(model, optimizer, average=average)
    parameters = [parameters[name] for name in average.tensors]
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

    def take_in() -> None:
        for tensor, parameter in zip(reference, parameters, strict=True):
            tensor.lerp_(whole(parameter).float(), 1 - DECAY)

    def is_reference() -> bool:
        return all(map(torch.equal, reference, map(whole, averages)))

    found, stream = {"begins as a copy": is_reference()}, batches()
    for step in range(STEPS):
        train_fsdp.train_step(settings, model, optimizer, stream, utils.PerformanceTracker(0, 1, 0))
        average.update()
        take_in()
        found[f"equal after step {step}"] = is_reference()
    average.update(skip=torch.tensor(True))
    found["a skipped step changes nothing"] = is_reference()
    average.update(skip=torch.tensor(0.0))
    take_in()
    found["an update is asked for on the device"] = is_reference()

    before, raw = bits([*parameters, *averages]), loss()
    scales = [weight._precomputed_scale for weight in float8_weights(model)]
    with average.as_weights():
        found["inside no float8 scale is that of the weights"] = not any(map(has_scale, float8_weights(model)))
        rounded = [tensor.to(parameter.dtype) for tensor, parameter in zip(reference, parameters, strict=True)]
        found["inside the weights are the average"] = all(map(torch.equal, rounded, map(whole, parameters)))
        evaluated = loss()
    with contextlib.suppress(ZeroDivisionError), average.as_weights(), models.evaluating(model):
        model(input_ids=batch_of(1), use_cache=False)
        raise ZeroDivisionError
    found["afterwards all is as it was"] = all(map(torch.equal, before, bits([*parameters, *averages])))
    kept = [weight._precomputed_scale is scale for weight, scale in zip(float8_weights(model), scales, strict=True)]
    found["afterwards each float8 weight has its scale"] = all(kept)
    found["afterwards the loss is as it was"] = loss() == raw
    found["finite"] = state.finite()
    if rank == world - 1:
        largest = max(averages, key=lambda tensor: tensor.to_local().numel())
        unwrapped(largest).to_local().view(-1)[0] = float("nan")
    found["not finite with a NaN in the average"] = not state.finite()
    plain = plain_loss(config, dict(zip(average.tensors, reference, strict=True)))
    share = sum(t.to_local().numel() for t in averages) / sum(map(torch.numel, reference))
    return found | {"figures": {"raw": raw, "average": evaluated, "plain average": plain, "share": share}}


def plain_loss(config, tensors: dict[str, torch.Tensor]) -> float:
    """The loss of a plain model of transformers with these weights, on the held-out batch."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()), dtype=torch.float32).eval()
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits = model(input_ids=HELD_OUT[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), HELD_OUT[:, 1:].flatten()).item()


def main(workspace: pathlib.Path, out: pathlib.Path, layouts: dict[str, str]) -> None:
    """Follows the average in these layouts. Nothing in the model `uneven` divides by the ranks; float8 wants sizes in
    multiples of 16."""
    device, world = start_processes(), dist.get_world_size()
    result = {}
    for layout, flags in layouts.items():
        accumulation = 2 if "accumulation" in flags else 1
        model = workspace / "models" / ("smollm3" if "fp8" in flags else "uneven")
        sizes = ["--batch-size", SEQUENCES // world // accumulation, "--sequence-length", TOKENS, "--num-workers", 0]
        precision = [] if "--precision" in flags else ["--precision", "fp32"]
        argv = ["--model", model, "--dataset", "synthetic", "--no-compile", "--lr", "1e-2", *sizes, *precision]
        result[layout] = follow([*argv, *flags.split()], device)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    stop_processes()
