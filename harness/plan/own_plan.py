"""Own plan: the plan of a run that trains, made in another process."""

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

PLAN_TIMEOUT = 60  # seconds that a run waits for its plan at its end
RUN = "TRAIN_FSDP_PLANS_FOR"  # environment variable of the planning process: the run's pid


def exit_with_parent() -> None:
    """End a planning process within a second after its run has ended, however that ended."""

    def watch(run: int) -> None:
        while os.getppid() == run:
            time.sleep(1)
        os._exit(1)

    if RUN in os.environ:
        threading.Thread(target=watch, args=(int(os.environ[RUN]),), daemon=True).start()


def start_plan(settings: flags.Settings, batch_size: int | str | None = None) -> subprocess.Popen:
    """Plan this run in another process, without a GPU and at the lowest priority."""
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
        if getattr(settings, name):  # a checkpoint may have set it
            resolved[name] = getattr(settings, name)
    words = flags.as_words({**settings.explicit, **resolved})
    world = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in world and not name.startswith("TORCHELASTIC_")  # the run's error file
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUN: str(os.getpid())}
    script = [sys.executable, str(base.ROOT / "train_fsdp.py")]
    command = [*("nice", "-n", "19"), *script, *words]
    no_input, pipe = subprocess.DEVNULL, subprocess.PIPE
    streams: dict[str, Any] = {"stdin": no_input, "stdout": pipe, "stderr": pipe, "text": True, "errors": "replace"}
    return subprocess.Popen(command, env=environment, **streams)


def read_plan(process: subprocess.Popen, timeout: float) -> tuple[dict | None, str]:
    """Return (the plan or None, the reason for None). Waits at most `timeout` seconds."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, f"no plan within {timeout:g} s"
    if process.returncode:
        return None, (errors.strip() or "no plan").splitlines()[-1]
    try:
        return json.loads(output), ""
    except ValueError:
        return None, "its output is not one JSON object"


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


def plans_itself(settings: flags.Settings, device: torch.device) -> bool:
    """True if a run is planned while it trains: by default if there is a GPU to plan for."""
    return settings.own_plan and (settings.plan_gpu is not None or device.type == "cuda")


@contextlib.contextmanager
def planning_in_background(
    settings: flags.Settings, device: torch.device, steps_left: int
) -> Iterator[subprocess.Popen | None]:
    """Plan this run in another process, on rank 0, if it is to be planned and has a step left; else yield None. The
    process ends with the run."""
    if dist.get_rank() or not plans_itself(settings, device) or steps_left <= 0:
        yield None
        return
    try:
        process = start_plan(settings)
    except OSError as error:  # no `nice`, or no memory for another process: no reason to end the run
        job.print0(f"planned    nothing: {error}")
        yield None
        return
    try:
        yield process
    finally:
        process.kill()


@base.working()
def predicted_metrics(process: subprocess.Popen | None) -> dict[str, float]:
    """Return the metrics of a run's plan for its last log line: GiB and ms. {} without a plan."""
    if process is None:
        return {}
    if process.poll() is None:
        job.print0(f"planned    waiting at most {PLAN_TIMEOUT} s for this run's plan; --no-own-plan leaves it out")
    predicted, problem = read_plan(process, PLAN_TIMEOUT)
    if not predicted:
        job.print0(f"planned    nothing: {problem}")
        return {}
    return {
        "predicted_peak_memory_alloc": predicted["memory_gib"]["total"],
        "predicted_peak_memory_reserved": predicted["memory_gib"]["allocator"],
        "predicted_step_time_ms": predicted["step_time_ms"],
    }
