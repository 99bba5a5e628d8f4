"""Own plan: a run's own plan, made by a process beside the training."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness import base, flags, job

PATIENCE = 60  # seconds that the end of a run waits for its plan
RUN = "TRAIN_FSDP_PLANS_FOR"  # the run's pid, in the environment of the process that plans


def exit_with_parent() -> None:
    """In a process that plans for a run: ends it within a second after the run has ended, however it ended."""

    def watch(run: int) -> None:
        while os.getppid() == run:
            time.sleep(1)
        os._exit(1)

    if RUN in os.environ:
        threading.Thread(target=watch, args=(int(os.environ[RUN]),), daemon=True).start()


def start_plan(settings: flags.Settings, batch_size: int | str | None = None) -> subprocess.Popen:
    """Plan this run in another process, which sees no GPU and gives way to the training."""
    resolved: dict[str, Any] = {
        "plan": True,
        "json": True,
        "plan_seconds": 0,
        "plan_gpus": dist.get_world_size(),
        "plan_gpu": settings.plan_gpu or torch.cuda.get_device_name(),
        "gpus_per_node": os.environ.get("LOCAL_WORLD_SIZE", settings.gpus_per_node),
        "compile": settings.compile,
        "batch_size": batch_size or settings.batch_size,
    }
    for name in ("precision", "fp8_recipe", "fp8_emulate", "gradient_accumulation_steps"):
        if getattr(settings, name):  # a checkpoint may have decided it
            resolved[name] = getattr(settings, name)
    words = flags.as_words({**settings.explicit, **resolved})
    world = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in world and not name.startswith("TORCHELASTIC_")  # its error file is the run's
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUN: str(os.getpid())}
    script = [sys.executable, str(base.ROOT / "train_fsdp.py")]
    command = [*("nice", "-n", "19"), *script, *words]
    no_input, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=no_input, stdout=pipe, stderr=pipe, text=True)


def read_plan(process: subprocess.Popen, timeout: float) -> tuple[dict | None, str]:
    """(the plan, None where there is none; the reason why there is none). Waits `timeout` seconds at most."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no plan within {timeout:g} s"
    if process.returncode:
        return None, (errors.strip() or "no plan").splitlines()[-1]
    return json.loads(output), ""


def choose_batch_size(settings: flags.Settings) -> int:
    """--batch-size auto: the largest that fits, by a plan of this run, on rank 0."""
    if not (settings.plan_gpu or torch.cuda.is_available()):
        advice = "give a number, or a GPU with --plan-gpu"
        raise base.UserError(f"--batch-size auto: a CPU's capacity is not known; {advice}")
    result, problem = read_plan(start_plan(settings, "auto"), timeout=600)
    if not result:
        raise base.UserError(f"--batch-size auto: {problem}")
    if not result["largest_batch_size"]:
        advice = "the same flags with --plan say what does"
        raise base.UserError(f"--batch-size auto: not one sequence fits on {result['gpu']} by the plan; {advice}")
    job.print0(f"planned    --batch-size {result['largest_batch_size']}, the largest that fits by --plan")
    return result["largest_batch_size"]


@contextlib.contextmanager
def planning_in_background(
    settings: flags.Settings, device: torch.device, steps_left: int
) -> Iterator[subprocess.Popen | None]:
    """The process that plans this run, on rank 0 where there is a GPU to plan for; it ends with the run. None where no
    step is left."""
    has_gpu = settings.plan_gpu or device.type == "cuda"
    if dist.get_rank() or not settings.own_plan or not has_gpu or steps_left <= 0:
        yield None
        return
    process = start_plan(settings)
    try:
        yield process
    finally:
        process.kill()


@base.working()
def predicted_metrics(process: subprocess.Popen | None) -> dict[str, float]:
    """The figures that a run's own plan adds to the last line of its metrics; none where there is no plan."""
    if process is None:
        return {}
    if process.poll() is None:
        job.print0(f"planned    waiting for this run's plan, {PATIENCE} s at most; --no-own-plan leaves it out")
    predicted, problem = read_plan(process, PATIENCE)
    if not predicted:
        job.print0(f"planned    nothing: {problem}")
        return {}
    return {
        "predicted_peak_memory_alloc": predicted["memory_gib"]["total"],
        "predicted_peak_memory_reserved": predicted["memory_gib"]["allocator"],
        "predicted_step_time_ms": predicted["step_time_ms"],
    }
