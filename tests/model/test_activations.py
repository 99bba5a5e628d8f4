"""Layer inputs on the host: the numbers of full checkpointing, without the memory of the inputs."""

import functools
import hashlib
import json
import pathlib
import weakref

import pytest
import torch
import torch.distributed as dist
from conftest import forked, write_model
from loraranks import whole
from multirank import MODELS, resolved
from transformers import AutoConfig, AutoModelForCausalLM

import train_fsdp
import utils
from harness import model as models
from harness.job.world import start_processes, stop_processes

CASES = {
    "stage 3": "--precision bf16",
    "stage 2 in 2 microbatches": "--zero-stage 2 --gradient-accumulation-steps 2",
    "documents": "--document-mask --precision bf16",
    "adapters": "--init pretrained --lora-rank 3",
    "compiled": "--compile --precision bf16",
}
STEPS = 3


def take_steps(model: str, flags: str, device: torch.device) -> dict:
    """Losses and gradient norms of a few steps of `train_fsdp`, and a checksum of the weights after them."""
    argv = ["--model", model, "--dataset", "demo", "--sequence-length", 64, "--batch-size", 2, "--lr", 1e-2]
    argv += ["--num-steps", 99, "--warmup-steps", 0, *(() if "--compile" in flags else ("--no-compile",))]
    settings, config = resolved([*argv, *(() if "--precision" in flags else ("--precision", "fp32")), *flags.split()])
    torch._dynamo.reset()
    sharded = train_fsdp.build_model(settings, config, train_fsdp.build_mesh(settings, device))
    optimizer = models.build_optimizer(settings, sharded)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(STEPS):
        batches = []
        for _ in range(settings.gradient_accumulation_steps):
            ids = torch.randint(1536, (2, 65), generator=generator)
            batches.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()})
            if settings.document_mask:
                batches[-1]["position_ids"] = torch.cat([torch.arange(24), torch.arange(40)]).expand(2, -1)
        step = train_fsdp.train_step(settings, sharded, optimizer, iter(batches), utils.PerformanceTracker(0, 1, 0))
        seen += [step.loss.item(), step.grad_norm.item()]
    digest = hashlib.sha256()
    for parameter in sharded.parameters():
        digest.update(whole(parameter).contiguous().view(torch.uint8).numpy().tobytes())
    return {"steps": seen, "weights": digest.hexdigest()}


def compare(cases: dict[str, str], model: str, out: pathlib.Path) -> None:
    """Run each case in both modes, and see the copies to the host: how many there are, and how many inputs of earlier
    layers are still on the device then. The forward pass of the model holds that of the first layer until its end."""
    device = start_processes()
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # inductor takes a minute
    copy, storages, still_there = models.HostInputs._copy, [], []

    def watch(self, tensor):
        still_there.append(sum(storage() is not None for storage in storages))
        storages.append(weakref.ref(tensor.untyped_storage()))
        return copy(self, tensor)

    models.HostInputs._copy = watch
    results = {}
    for name, flags in cases.items():
        for mode in ("full", "offload"):
            result = take_steps(model, f"{flags} --activation-checkpointing {mode}", device)
            results[f"{name}, {mode}"] = result | {"still there": still_there[:]}
            still_there.clear()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    stop_processes()


@pytest.mark.slow
@pytest.mark.parametrize("names", [["compiled"], [name for name in CASES if name != "compiled"]])
def test_offloaded_inputs_change_no_bit_of_a_run_and_leave_the_device(tmp_path, names):
    model = write_model(tmp_path / "deep", MODELS["deep"][0], **MODELS["deep"][1])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)  # that adapters are for
    cases = {name: CASES[name] for name in names}
    forked(2, compare, cases, model, tmp_path / "results")
    results = json.loads((tmp_path / "results").read_text())
    for name, flags in cases.items():
        full, offloaded = results[f"{name}, full"], results[f"{name}, offload"]
        passes = STEPS * (2 if "accumulation" in flags else 1)
        assert (full.pop("still there"), offloaded.pop("still there")) == ([], [0, 1, 1] * passes), name
        assert full == offloaded, name
        assert full["steps"][0] != full["steps"][2], name
