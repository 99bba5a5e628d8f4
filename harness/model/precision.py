"""Precision: what --precision is where it was not given, and a warning where a CPU computes slowly in it."""

import os
from typing import NamedTuple

import torch

from harness import flags, job

# Tokens/s of `--demo` on two cores without bf16 instructions, lowest and highest of several runs (torch 2.13.0).
DEMO_WITHOUT_INSTRUCTIONS = "the demo has 295 to 424 tokens/s so and 2,800 to 5,300 in fp32"


def cpu_multiplies_bf16() -> bool:
    """Whether the CPU has instructions that oneDNN takes for products of bf16."""
    # private: get_cpu_capability does not say, and torch.cpu's functions do not follow ONEDNN_MAX_CPU_ISA
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def computes_on_gpu(settings: flags.Args) -> bool:
    """Whether a GPU computes the steps, for --plan those that are planned."""
    if settings.plan:
        return (settings.plan_gpu or "").lower() != "cpu"
    return torch.cuda.is_available()


class ChosenPrecision(NamedTuple):
    name: flags.Precision
    fp8_recipe: flags.Fp8Recipe | None  # None without fp8
    fp8_emulate: bool


def choose_precision(settings: flags.Args, manifest: dict | None) -> ChosenPrecision:
    """--precision and what belongs to it: as given, else as in the checkpoint of `manifest`, else bf16 on a GPU and
    fp32 on a CPU. Warns on rank 0 if a CPU without instructions for bf16 would compute in it, and if accelerate launch
    was given another one."""
    chosen = ChosenPrecision(settings.precision, settings.fp8_recipe, settings.fp8_emulate)
    if settings.precision is None and manifest:
        before = manifest["flags"]
        chosen = ChosenPrecision(before["precision"], before["fp8_recipe"], before["fp8_emulate"])
    elif settings.precision is None:
        chosen = chosen._replace(name="bf16" if computes_on_gpu(settings) else "fp32")
    on_cpu = not (settings.plan or computes_on_gpu(settings))
    refused = chosen.name == "fp8" and not chosen.fp8_emulate  # by check_float8, in one line
    if on_cpu and chosen.name != "fp32" and not refused and not cpu_multiplies_bf16():
        job.warn(
            f"--precision {chosen.name}: this CPU has no instructions for bf16; {DEMO_WITHOUT_INSTRUCTIONS}: give fp32"
        )
    asked = os.environ.pop("ACCELERATE_MIXED_PRECISION", "").lower()
    if asked not in ("", "no", chosen.name):
        followed = f"ACCELERATE_MIXED_PRECISION={asked} (of accelerate launch or its config) is not followed"
        job.warn(f"{followed}: this run computes in {chosen.name}; --precision chooses")
    return chosen
