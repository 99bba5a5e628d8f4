"""A run's own plan, made by a process beside the training, to stand beside its figures, and for --batch-size auto.

Called by the script. It knows the command line of --plan and nothing of how a plan is made.
"""

import argparse
import functools
import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist

from harness.settings import ROOT
from utils import UserError


def start_plan(args: argparse.Namespace) -> subprocess.Popen:
    """Plans this run in another process, which sees no GPU and gives way to the training."""
    gpu = args.plan_gpu or torch.cuda.get_device_name()
    flags = ["--plan", "--json", "--plan-gpus", str(dist.get_world_size()), "--plan-gpu", gpu]
    flags += ["--batch-size", str(args.batch_size), "--compile" if args.compile else "--no-compile"]
    flags += ["--gradient-accumulation-steps", str(args.gradient_accumulation_steps)]  # a resume may have changed it
    world = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in world}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train_fsdp.py"), *args.argv, *flags],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(os.nice, 19),
    )


def read_plan(process: subprocess.Popen, patience: float) -> tuple[dict | None, str]:
    """(the plan, None where there is none; why there is none)."""
    try:
        output, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no plan within {patience:.0f} s"
    if process.returncode:
        return None, (errors.strip() or "no plan").splitlines()[-1]
    return json.loads(output), ""


def resolve_batch_size(args: argparse.Namespace) -> int:
    """--batch-size auto: the largest that fits by a plan of this run."""
    if not (args.plan_gpu or torch.cuda.is_available()):
        raise UserError("--batch-size auto: a CPU's capacity is not known; give a number, or a GPU with --plan-gpu")
    result, problem = read_plan(start_plan(args), patience=600)
    if not result:
        raise UserError(f"--batch-size auto: {problem}")
    if not result["largest_batch_size"]:
        advice = f"; it fits with {result['fits_with']['flags']}" if result.get("fits_with") else ""
        raise UserError(f"--batch-size auto: not one sequence fits on {result['gpu']} by the plan{advice}")
    return result["largest_batch_size"]
