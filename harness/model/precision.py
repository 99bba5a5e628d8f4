"""Precision: what --precision is where it was not given, and a warning where a CPU computes slowly in it."""

import dataclasses

import torch

from harness import job
from harness.base.torch_internals import cpu_multiplies_bf16
from harness.flags.settings import Settings

# Tokens/s of `--demo` on two cores without bf16 instructions, lowest and highest of several runs (torch 2.13.0).
DEMO_WITHOUT_INSTRUCTIONS = {"bf16": "295 to 424", "fp32": "2,800 to 5,300"}


def computes_on_gpu(settings: Settings) -> bool:
    """Whether a GPU computes the steps, for --plan those that are planned."""
    if settings.plan:
        return (settings.plan_gpu or "").lower() != "cpu"
    return torch.cuda.is_available()


def choose_precision(settings: Settings, manifest: dict | None) -> Settings:
    """The settings with --precision decided: as given, else as in the checkpoint of `manifest`, else bf16 on a GPU and
    fp32 on a CPU. Warns on rank 0 where a CPU without instructions for bf16 would compute in it."""
    if settings.precision is None and manifest:
        names = ("precision", "fp8_recipe", "fp8_emulate")  # the others belong to fp8
        settings = dataclasses.replace(settings, **{name: manifest["flags"][name] for name in names})
    elif settings.precision is None:
        settings = dataclasses.replace(settings, precision="bf16" if computes_on_gpu(settings) else "fp32")
    on_cpu = not (settings.plan or computes_on_gpu(settings))
    if on_cpu and settings.precision != "fp32" and not cpu_multiplies_bf16() and job.is_first_rank():
        bf16, fp32 = DEMO_WITHOUT_INSTRUCTIONS["bf16"], DEMO_WITHOUT_INSTRUCTIONS["fp32"]
        price = f"the demo has {bf16} tokens/s so and {fp32} in fp32"
        warning = f"--precision {settings.precision}: this CPU has no instructions for bf16; {price}: give fp32"
        job.print_error(f"train_fsdp.py: warning: {warning}")
    return settings
