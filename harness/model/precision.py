"""Precision: the default of --precision, and a warning if a CPU computes slowly in it."""

import os
from typing import NamedTuple

import torch

from harness import flags, job

# On two cores without bf16 instructions, lowest and highest of several runs (torch 2.13.0).
DEMO_SPEEDS = "the demo trains at 295 to 424 tokens/s in it and at 2,800 to 5,300 in fp32"


def cpu_multiplies_bf16() -> bool:
    """True if the CPU has instructions that oneDNN uses for products of bf16."""
    # private: get_cpu_capability lacks it, and torch.cpu's functions do not follow ONEDNN_MAX_CPU_ISA
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class ChosenPrecision(NamedTuple):
    name: flags.Precision
    fp8_recipe: flags.Fp8Recipe | None  # None without fp8
    fp8_emulate: bool


def choose_precision(settings: flags.Args, manifest: dict | None) -> ChosenPrecision:
    """Resolve --precision and its flags: as typed, else from the checkpoint of `manifest`, else bf16 on a GPU and fp32
    on a CPU. Warns on rank 0 if a CPU without bf16 instructions would compute in bf16, and if accelerate launch asks
    for another precision."""
    on_gpu = settings.plan or torch.cuda.is_available()  # a plan is of a GPU
    chosen = ChosenPrecision(settings.precision, settings.fp8_recipe, settings.fp8_emulate)
    if settings.precision is None and manifest:
        saved = manifest["flags"]
        chosen = ChosenPrecision(saved["precision"], saved["fp8_recipe"], saved["fp8_emulate"])
    elif settings.precision is None:
        chosen = chosen._replace(name="bf16" if on_gpu else "fp32")
    if chosen.name != "fp8":
        chosen = chosen._replace(fp8_recipe=None)  # a plan takes a run's flags, also those without effect
    is_refused = chosen.name == "fp8" and not chosen.fp8_emulate  # check_float8 raises the error
    if not on_gpu and chosen.name != "fp32" and not is_refused and not cpu_multiplies_bf16():
        job.warn(f"--precision {chosen.name}: this CPU has no instructions for bf16; {DEMO_SPEEDS}: give fp32")
    accelerate_precision = os.environ.pop("ACCELERATE_MIXED_PRECISION", "").lower()
    if accelerate_precision not in ("", "no", chosen.name):
        problem = (
            f"ACCELERATE_MIXED_PRECISION={accelerate_precision} (of accelerate launch or its config) is not followed"
        )
        job.warn(f"{problem}: this run computes in {chosen.name}; --precision chooses")
    return chosen
