"""Startup: signals, threads and environment, before the script's heavy imports."""

import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping

from harness import base, flags
from harness.job import heartbeats, host, signals, terminal

# Launchers that start several processes without RANK: Open MPI, MPICH and Intel MPI, MVAPICH, srun. Their variables for
# the number of processes: the variables for the process's own number.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
LAUNCHER_MINIMUMS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
MAX_PORT = 65_535
NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "torch._higher_order_ops", "transformers", "accelerate")


def begin(settings: flags.Args) -> None:
    """Listen to signals, and set the threads and the environment that torch reads when it is imported."""
    if not settings.plan:  # a plan makes its own world
        check_launcher_env(settings)
    heartbeats.PROGRESS.began = time.monotonic()  # not when this file was imported
    signals.listen(settings)
    if not (settings.json or settings.compare):  # stdout has only the JSON object; a comparison has no model
        terminal.print0(f"train_fsdp {settings.model}; loading torch")
    host.set_threads(settings)
    if not sys.warnoptions:  # `python -W default` shows all warnings
        silence_libraries()
    set_allocator()
    os.environ.setdefault("WANDB_SILENT", "true")
    gc.disable()  # until `World`: during imports, collection finds nothing and takes a fifth of the time


def set_allocator() -> None:
    """Let torch, when it is imported, allocate GPU memory in segments that grow; others leave gaps between tensors of
    different sizes."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the name before torch 2.9; the new one would override it
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def check_launcher_env(settings: flags.Args) -> None:
    """Exit with one line if a launcher started several processes but did not set the variables of a rank: they would
    wait for each other forever, or each train alone."""
    env, needed = os.environ, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    advice = f"start the ranks by torchrun or accelerate, which set {', '.join(needed)}; docs/LAUNCH.md has commands"
    problem = ""
    if "RANK" in env:
        missing = [name for name in needed[1:] if not env.get(name)]
        if missing:
            problem = f"RANK={env['RANK']} is set, but not {', '.join(missing)}"
        elif problem := wrong_number(env):
            env["RANK"] = "0"  # this rank prints the line
    elif env.get("WORLD_SIZE", "1") != "1":
        problem = f"WORLD_SIZE={env['WORLD_SIZE']} is set, but RANK is not"
        advice += "; for a run of one rank, unset it"
    else:
        for size, rank in LAUNCHERS.items():
            if env.get(size, "1") != "1":
                problem = f"{size}={env[size]} is set, but RANK is not: each process would train alone"
                env["RANK"] = env.get(rank, "0")  # one process prints the line
                break
    if problem:
        base.exit_with_error(f"train_fsdp.py: error: {problem}; {advice}", settings.json)


def wrong_number(env: Mapping[str, str]) -> str:
    """Describe the first wrong number in a launcher's variables, "" if all are right."""
    for name, least in LAUNCHER_MINIMUMS.items():
        number = env.get(name, str(least))
        if not number.isdecimal():
            return f"{name}={number} is not a whole number"
        if int(number) < least:
            return f"{name}={number} is below {least}"
    if int(env["MASTER_PORT"]) > MAX_PORT:
        return f"MASTER_PORT={env['MASTER_PORT']} is above {MAX_PORT}"
    if int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        return f"RANK={env['RANK']} is not below WORLD_SIZE={env['WORLD_SIZE']}"
    return ""


def silence_libraries() -> None:
    """Turn off the warnings of libraries, in this process and its children."""
    warnings.filterwarnings("ignore")
    os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "6"}
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without this a lost store prints 30 lines of warnings
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
