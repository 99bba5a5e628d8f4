"""Layer inputs on the host: the numbers of full checkpointing, without the memory of the inputs."""

import functools
import weakref

import pytest
import torch
import torch.distributed as dist
from conftest import answer_of, write_model
from multirank import MODELS
from tiny import build, take_steps
from transformers import AutoConfig, AutoModelForCausalLM

from harness import model as models

CASES = {
    "stage 3": "--precision bf16",
    "stage 2 in 2 microbatches": "--zero-stage 2 --gradient-accumulation-steps 2",
    "documents": "--document-mask --precision bf16",
    "adapters": "--init pretrained --lora-rank 3",
    "compiled": "--compile --precision bf16",
}
STEPS = 3


def batches(has_documents: bool):
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        ids = torch.randint(1536, (2, 65), generator=generator)
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
        if has_documents:
            batch["position_ids"] = torch.cat([torch.arange(24), torch.arange(40)]).expand(2, -1)
        yield batch


def train(folder) -> dict[str, list]:
    """Train each case in both modes, and count at each copy to the host the inputs of earlier layers that are still on
    the device. The forward pass of the model holds that of the first layer until its end."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # inductor takes a minute
    copy, storages, held = models.LayerInputOffload._copy, [], []

    def watch(self, tensor):
        held.append(sum(storage() is not None for storage in storages))
        storages.append(weakref.ref(tensor.untyped_storage()))
        return copy(self, tensor)

    models.LayerInputOffload._copy = watch
    results = {}
    for name, flags in CASES.items():
        for mode in ("full", "offload"):
            torch._dynamo.reset()
            argv = ["--model", folder / "deep", "--dataset", "demo", "--sequence-length", 64, "--lr", 1e-2]
            argv += f"--no-compile --precision fp32 --activation-checkpointing {mode} {flags}".split()
            settings, model, optimizer = build(argv)
            found = take_steps(settings, model, optimizer, batches(settings.document_mask), STEPS)
            weights = [torch.hash_tensor(weight.full_tensor()).item() for weight in model.parameters()]
            results[f"{name}, {mode}"] = [found, weights, held[:]]
            held.clear()
    return results


@pytest.mark.slow
def test_offloaded_inputs_change_no_bit_of_a_run_and_leave_the_device(tmp_path):
    model = write_model(tmp_path / "deep", MODELS["deep"][0], **MODELS["deep"][1])
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)  # that adapters are for
    results = answer_of(2, train, tmp_path)
    for name, flags in CASES.items():
        (losses, norms), weights, held = results[f"{name}, full"]
        passes = STEPS * (2 if "accumulation" in flags else 1)
        assert results[f"{name}, offload"] == [[losses, norms], weights, [0, 1, 1] * passes], name
        assert held == [] and losses[0] != losses[1], name
