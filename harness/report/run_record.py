"""config.json: what it takes to repeat a run, and each of its starts."""

import contextlib
import dataclasses
import json
import pathlib
import time

import torch
import torch.distributed as dist

from harness.base.saved import read_config
from harness.base.versions import commit, versions
from harness.flags.settings import Settings
from harness.job import endings
from harness.job.folders import replace_file
from harness.report.run_files import read_metrics
from harness.state.train_state import TrainState


def describe_identity(folder: pathlib.Path, state: TrainState) -> dict:
    """Which run this is, in config.json: by it `saved` tells a copy of the folder from the run itself."""
    identity = {"run_id": state.run_id, "folder": str(folder.resolve())}
    return identity | ({"branched_from": state.branched_from} if state.branched_from else {})


def describe_origin(origin: dict) -> str:
    return f"from {origin['folder']} at step {origin['step']:,}"


def describe_starts(folder: pathlib.Path, state: TrainState, changed: str = "") -> list[dict]:
    """The starts of the run in `folder` so far and this one: each with its time, the step that it went on from, how
    many logged steps after it are done again, the ranks, and the flags that it `changed`. What a new run finds in a
    copied folder was another's."""
    config, step = read_config(folder), state.step
    copied = state.branched_from and config.get("run_id") != state.run_id
    starts = config.get("starts")
    starts = starts if isinstance(starts, list) and not copied else []
    logged = [] if copied else read_metrics(folder / "metrics.jsonl")
    reached = max((line["step"] for line in logged), default=step)
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "step": step}
    now |= {"lost_steps": max(0, reached - step), "world_size": dist.get_world_size()}
    return [*starts, now | ({"changed": changed} if changed else {})]


def record_start(folder: pathlib.Path, state: TrainState) -> None:
    """A start with nothing to train, in config.json with how it ends; where that cannot be written it is left out."""
    with contextlib.suppress(OSError):
        if run := read_config(folder):
            keep_config(folder, run | {"starts": describe_starts(folder, state)} | describe_identity(folder, state))


def keep_config(folder: pathlib.Path, run: dict) -> None:
    """Writes config.json, and again with how this start ended: torchrun and what stands above it do not tell."""
    write_config(folder, run)
    endings.LISTENERS.append(lambda code: write_config(folder, run, exit_code=code))


def write_config(folder: pathlib.Path, run: dict, **ending) -> None:
    *before, now = run["starts"]
    replace_file(folder / "config.json", json.dumps(run | {"starts": [*before, now | ending]}, indent=2) + "\n")


def describe_run(settings: Settings) -> dict:
    """What it takes to repeat a run: flags, versions, commit, world size, GPU."""
    run = {"flags": dataclasses.asdict(settings), "versions": versions(), "commit": commit()}
    run["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return run | {"world_size": dist.get_world_size()}
