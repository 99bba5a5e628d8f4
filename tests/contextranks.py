"""Ranks of the tests of --context-parallel: full runs with equal samples, and the gradients of single families."""

import copy
import pathlib
import warnings

import torch
import torch.distributed as dist
import transformers
from tiny import NoReadBack, build
from transformers import AutoModelForCausalLM

import train_fsdp
from harness import model as models
from harness import resolving
from harness.base import IGNORE_INDEX, UserError
from harness.flags import parse_args
from harness.job import start_processes, stop_processes
from harness.job.signals import StopRequest

SEQUENCES = 4  # of each optimizer step
FLAGS = "--precision fp32 --num-workers 0 --log-interval 1 --lr-scheduler constant --lr 1e-3 --sequence-length 64"
FLAGS += " --no-compile --perf-warmup-steps 0 --no-own-plan --num-steps 4"


def run(folder: pathlib.Path, name: str, flags: str, size: int) -> None:
    """Train on all ranks, `size` of which share a sequence, and export into NAME-export."""
    batch_size = SEQUENCES * size // dist.get_world_size()  # unless the flags have another
    argv = [*FLAGS.split(), "--run-name", name, "--batch-size", batch_size, "--context-parallel", size]
    argv += ["--output-dir", folder, "--cache-dir", folder / "cache", "--export", folder / f"{name}-export"]
    settings = parse_args([*map(str, argv), *flags.split()])
    train_fsdp.train_or_evaluate(settings, torch.device("cpu"), StopRequest())


def main(folder: pathlib.Path, runs: list[tuple]) -> None:
    start_processes()
    for arguments in runs:
        run(folder, *arguments)
        torch.compiler.reset()
    stop_processes()


def measure_peak(config, length: int, size: int, out: pathlib.Path) -> None:
    """Write the bytes by which the process of rank 0 grows at most in one training step of one sequence a group."""
    start_processes()
    model = out.parent / f"model-{dist.get_rank()}"
    config.save_pretrained(model)
    flags = ["--model", model, *FLAGS.split(), "--dataset", "synthetic"]
    settings, model, optimizer = build([*flags, "--sequence-length", length, "--context-parallel", size])
    tokens = torch.randint(
        0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(dist.get_rank() // size)
    )
    batches = iter([{"input_ids": tokens, "labels": tokens}])
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = memory_of_process("VmRSS")
    with NoReadBack():  # a GPU would not wait either
        train_fsdp.train_step(settings, model, optimizer, batches)
    if dist.get_rank() == 0:
        out.write_text(str(memory_of_process("VmHWM") - before))
    stop_processes()


def memory_of_process(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


# ---- Families --------------------------------------------------------------------------------------------------------


def gradients(config, flags: list[str], size: int, batch: dict) -> tuple[float, list[torch.Tensor]]:
    """(the loss, each parameter's gradient): means over ranks, `size` of which share each sequence."""
    settings = resolving.resolve(parse_args([*flags, "--context-parallel", str(size)]), config)
    torch.manual_seed(0)
    attention = settings.attention
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)  # by default attention would hardly matter
    models.adapt_forward(model, settings)
    model.train()
    loss = model(**batch, use_cache=False).loss
    total = loss
    if model.routing:
        total = loss + 0.1 * model.routing.read()[0]
    total.backward()
    found = [loss.detach()] + [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    found = [tensor.contiguous() / dist.get_world_size() for tensor in found]
    for tensor in found:
        dist.all_reduce(tensor)
    return found[0].item(), found[1:]


def compare(config, flags: list[str]) -> float | str | None:
    """The difference of the loss or the gradients on one rank and with all ranks a sequence, relative to their size;
    in words why a family is refused; None if it does not train on one rank."""
    ids = torch.randint(5, 500, (2, 65), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
    batch["labels"][:, :20] = IGNORE_INDEX  # the parts have different numbers of labels
    if "--document-mask" in flags:
        batch["position_ids"] = torch.cat([torch.arange(41), torch.arange(23)]).expand(2, -1)
    try:
        loss, expected = gradients(config, flags, 1, batch)
    except Exception:
        return None
    try:
        shared_loss, found = gradients(config, flags, dist.get_world_size(), batch)
    except UserError as error:
        return str(error)
    squares = [((one - other).square().sum(), other.square().sum()) for one, other in zip(found, expected, strict=True)]
    error, norm = (sum(column).item() ** 0.5 for column in zip(*squares, strict=True))
    return max(error / norm, abs(shared_loss - loss) / loss)


def compare_families(configs: dict[str, str], *flags: str) -> dict[str, float | str | None]:
    """What `compare` says of each config, {name: folder}."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for name, folder in configs.items():
        config = models.load_config(folder)
        found[name] = compare(config, ["--model", folder, *FLAGS.split(), *flags])
    return found
