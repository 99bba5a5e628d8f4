"""Trackers: wandb and tensorboard. Called by the report, and by the script to find out at the start whether they work.
It does not know how a figure comes about."""

import dataclasses
import os
import pathlib
import shlex
import shutil
import sys
from importlib.util import find_spec

from accelerate import Accelerator

from harness.checkpoints import TrainState
from harness.processes import say
from harness.settings import Settings
from utils import UserError


def choose_trackers(log_with: str) -> list[str]:
    """accelerate's names of the trackers; one that cannot work is an error now, not at the first log line."""
    trackers = {"none": [], "all": ["wandb", "tensorboard"]}.get(log_with, [log_with])
    for package in trackers:
        if not find_spec(package):
            raise UserError(f"--log-with {log_with}: needs the package {package} (pip install {package})")
    if "wandb" in trackers:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            advice = "run `wandb login`, or set WANDB_MODE=offline"
            raise UserError(f"--log-with {log_with}: not logged in to wandb; {advice}")
    return trackers


def start(settings: Settings, accelerator: Accelerator, folder: pathlib.Path, state: TrainState) -> None:
    if accelerator.log_with:
        flags = dataclasses.asdict(settings).items()
        flags = {key: v if isinstance(v, int | float | str) else str(v) for key, v in flags}
        trackers = {"wandb": {"name": folder.name, "dir": str(folder), "id": state.run_id, "resume": "allow"}}
        trackers["tensorboard"] = {"purge_step": state.step + 1}
        accelerator.init_trackers(settings.project_name, config=flags, init_kwargs=trackers)


def watching(trackers: list, folder: pathlib.Path) -> dict[str, str]:
    """Where to watch a run in each of its trackers, by command or address."""
    places = {}
    for tracker in trackers:
        if tracker.name == "tensorboard":
            beside = os.path.relpath(pathlib.Path(sys.executable).with_name("tensorboard"))
            program = "tensorboard" if shutil.which("tensorboard") else beside
            places["watch"] = shlex.join([program, "--logdir", str(folder)])
        elif tracker.name == "wandb":
            run = tracker.run
            places["wandb"] = run.url or f"offline; later: wandb sync {pathlib.Path(run.dir).parent}"
    return places


def log(accelerator: Accelerator, metrics: dict) -> None:
    """A log line; a tracker that fails costs the run its trackers, and nothing else."""
    try:
        accelerator.log({key: value for key, value in metrics.items() if key != "step"}, step=metrics["step"])
    except OSError as error:
        say(f"failed     trackers, from step {metrics['step']} on: {error.strerror}; the run goes on without them")
        accelerator.trackers = []


def finish(accelerator: Accelerator) -> None:
    for tracker in accelerator.trackers:  # Accelerator.end_training would end the process group too
        tracker.finish()
