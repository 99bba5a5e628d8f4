"""config.json: what it takes to repeat a run, and each of its starts."""

import contextlib
import json
import pathlib
import time

import torch
import torch.distributed as dist

from harness import job
from harness.base.saved import read_config
from harness.base.versions import commit, versions
from harness.flags.parser import record_flags
from harness.flags.settings import Settings
from harness.job import replace_file
from harness.report.run_files import read_metrics
from harness.state.train_state import TrainState


def describe_identity(folder: pathlib.Path, state: TrainState) -> dict:
    """Which run this is, in config.json: by it `saved` tells a copy of the folder from the run itself."""
    identity = {"run_id": state.run_id, "folder": str(folder.resolve())}
    if state.branched_from:
        identity["branched_from"] = state.branched_from
    return identity


def describe_origin(origin: dict) -> str:
    return f"from {origin['folder']} at step {origin['step']:,}"


def describe_starts(folder: pathlib.Path, state: TrainState, changed: str = "") -> list[dict]:
    """The starts of the run in `folder` so far and this one: each with its time, the step that it resumed from, how
    many logged steps after that one are repeated, the number of ranks, and the flags that it `changed`. The starts and
    lines in a copied folder are another run's and do not count."""
    config = read_config(folder)
    copied = state.branched_from and config.get("run_id") != state.run_id
    starts, logged = [], []
    if not copied:
        logged = read_metrics(folder / "metrics.jsonl")
        if isinstance(config.get("starts"), list):
            starts = config["starts"]
    last_logged = max((line["step"] for line in logged), default=state.step)
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": state.step,
        "lost_steps": max(0, last_logged - state.step),
        "world_size": dist.get_world_size(),
    }
    if changed:
        start["changed"] = changed
    return [*starts, start]


def record_start(folder: pathlib.Path, state: TrainState) -> None:
    """Adds a start with nothing to train to config.json, with how it ends; leaves it out where the file cannot be
    written."""
    with contextlib.suppress(OSError):
        run = read_config(folder)
        if run:
            keep_config(folder, run | {"starts": describe_starts(folder, state)} | describe_identity(folder, state))


def keep_config(folder: pathlib.Path, run: dict) -> None:
    """Writes config.json now, and at the end with the exit code of this start, which torchrun does not pass on."""
    write_config(folder, run)
    job.at_exit(lambda code: write_config(folder, run, exit_code=code))


def write_config(folder: pathlib.Path, run: dict, **ending) -> None:
    """Writes config.json, with `ending` in the entry of the latest start."""
    *earlier, start = run["starts"]
    replace_file(folder / "config.json", json.dumps(run | {"starts": [*earlier, start | ending]}, indent=2) + "\n")


def describe_run(settings: Settings) -> dict:
    """What it takes to repeat a run: flags, versions, commit, world size, GPU."""
    run = record_flags(settings) | {"versions": versions(), "commit": commit()}
    run["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return run | {"world_size": dist.get_world_size()}
