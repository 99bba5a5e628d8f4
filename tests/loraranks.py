"""One rank of the tests of adapters: a few steps of the program's own, from adapters that are known by their names."""

import json
import pathlib

import torch
import torch.distributed as dist
from multirank import resolved
from torch.distributed.tensor import DTensor, distribute_tensor

import train_fsdp
import utils
from harness import model as models
from harness.base.ranks import all_gather_objects
from harness.job.world import start_processes, stop_processes

SEQUENCES, LENGTH, STEPS = 8, 32, 4
FLAGS = "--init pretrained --lora-rank 3 --lr 1e-2 --num-steps 4 --lr-scheduler constant --warmup-steps 0 --no-compile"


def start_value(name: str, shape: torch.Size) -> torch.Tensor:
    """Of an adapter, by its name: B is zero at the start of a run, and would hide A's gradient."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return 0.1 * torch.randn(shape, generator=generator)


def tokens_of(step: int, masked: bool = False) -> dict[str, torch.Tensor]:
    """The global batch of a step: ids, labels that are shifted already, and positions of two documents in each row.
    Where `masked` every second label is left out, as of a conversation."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 1536, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if masked:
        labels[:, ::2] = -100
    positions = torch.cat([torch.arange(LENGTH // 4), torch.arange(3 * LENGTH // 4)]).expand(SEQUENCES, -1)
    return {"input_ids": ids[:, :-1], "labels": labels, "position_ids": positions}


def share_of(step: int, settings, masked: bool):
    """This rank's microbatches of a step."""
    rank, world, parts = dist.get_rank(), dist.get_world_size(), settings.gradient_accumulation_steps
    size = SEQUENCES // world // parts
    whole = tokens_of(step, masked)
    if not settings.document_mask:
        del whole["position_ids"]
    for part in range(parts):
        first = (part * world + rank) * size
        yield {name: tensor[first : first + size] for name, tensor in whole.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def take_steps(model_folder: pathlib.Path, words: str) -> dict:
    """Losses and norms of the steps, the adapters after them by peft's names, and bytes of what is frozen."""
    masked = "masked" in words
    argv = ["--model", model_folder, *FLAGS.split(), *words.replace("masked", "").split()]
    parts = argv[argv.index("--gradient-accumulation-steps") + 1] if "--gradient-accumulation-steps" in argv else 1
    size = SEQUENCES // dist.get_world_size() // int(parts)
    settings, config = resolved([*argv, "--sequence-length", LENGTH, "--batch-size", size])
    model = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, torch.device("cpu")))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                start = start_value(name, parameter.shape).to(parameter.dtype)
                parameter.copy_(distribute_tensor(start, parameter.device_mesh, parameter.placements))
    optimizer = models.build_optimizer(settings, model)
    losses, norms = [], []
    for step in range(STEPS):
        batches = share_of(step, settings, masked)
        result = train_fsdp.train_step(settings, model, optimizer, batches, utils.PerformanceTracker(0, 1, 0))
        losses.append(sum(all_gather_objects(result.loss.item())) / dist.get_world_size())
        norms.append(result.grad_norm.item())
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    trained = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    return {
        "losses": losses,
        "norms": norms,
        "adapters": {name: tensor.float().tolist() for name, tensor in trained.items()},
        "frozen dtypes": sorted({str(parameter.dtype) for parameter in frozen}),
        "states": len(optimizer.state),
        "gradients of frozen": sum(parameter.grad is not None for parameter in frozen),
    }


def main(models_folder: pathlib.Path, cases: dict[str, tuple[str, str]], out: pathlib.Path) -> None:
    start_processes()
    seen = {name: take_steps(models_folder / model, words) for name, (model, words) in cases.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    stop_processes()
