"""Files: config.json and metrics.jsonl of a run, written by its log and read by its page, also after a kill."""

import contextlib
import io
import json
import math
import os
import pathlib
import threading
import time
from typing import Any

import torch.distributed as dist

from harness import base, flags, job
from harness import data as corpora
from harness import state as states


def as_json(metrics: dict) -> str:
    """Metrics as a JSON object, with null for NaN and infinity."""
    not_finite = {key: None for key, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(metrics | not_finite)


def read_metrics(path: pathlib.Path) -> list[dict]:
    """The lines of a metrics.jsonl, empty if it does not exist. Lines that a kill cut off, and others without a step,
    are left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(line)
            if entry["step"] >= 0:
                lines.append(entry)
    return lines


class MetricsFile:
    """metrics.jsonl and config.json of a run. Both change on disk with this start's first line or sync, so a
    start that fails earlier leaves them as they were. Lines that a full disk refuses are kept in memory, about 0.5 KB
    each."""

    def __init__(self, folder: pathlib.Path, config: dict, step: int, is_complete: bool):
        """Read it, without lines that an earlier start wrote after `step`, also without the final averages unless the
        run is complete; the samples in that line move to their step's line. `first` is the run's first line, `last` the
        last one that is kept, `config` the content of config.json.

        Raises:
            OSError: it cannot be read.
        """
        self.path, self.config = folder / "metrics.jsonl", config
        lines: list[dict] = []
        for line in read_metrics(self.path):
            if line["step"] <= step and (is_complete or "final" not in line):
                lines.append(line)
            elif lines and line["step"] == lines[-1]["step"] and "samples" in line:
                lines[-1]["samples"] = line["samples"]
        self.first, self.last = (lines[0], lines[-1]) if lines else ({}, {})
        self.kept = lines
        self.file: io.FileIO | None = None  # before the first line or sync
        self.waiting = b""
        self.lock = threading.Lock()  # a checkpoint's thread syncs the lines while the loop adds more

    def has_begun(self) -> bool:
        """True if this start has written a line or synced."""
        return self.file is not None

    def write(self, line: dict) -> None:
        """Append a line, after those that wait. If the disk refuses it, it waits for the next call; the console says
        so once.

        Raises:
            OSError: this start's first line, or config.json, cannot be written.
        """
        self.first = self.first or line
        with self.lock:
            if self.file is None:
                self._open(self.kept)
            had_waiting = bool(self.waiting)
            self.waiting += as_json(line).encode() + b"\n"
            try:
                self._write_waiting()
            except OSError as error:
                if not had_waiting:
                    problem = f"metrics.jsonl, from step {line['step']} on: {error.strerror}"
                    job.print0(f"failed     {problem}; its lines wait in memory, the run continues")

    def replace_last(self, line: dict) -> None:
        """Merge `line` into the last line of an earlier start, or append it if the disk refuses that."""
        try:
            with self.lock:
                self._open([*self.kept[:-1], self.last | line])
        except OSError:
            self.write(line)

    def sync(self) -> None:
        """Write and fsync all lines so far.

        Raises:
            OSError: the disk refused it.
        """
        try:
            with self.lock:
                os.fsync(self._write_waiting().fileno())
            base.sync_to_disk(self.path.parent)  # the file was renamed when this start began
        except OSError as error:
            raise OSError(f"metrics.jsonl could not be written ({error.strerror})") from error

    def _write_waiting(self) -> io.FileIO:
        file = self.file or self._open(self.kept)
        while self.waiting:
            self.waiting = self.waiting[file.write(self.waiting) :]
        return file

    def _open(self, lines: list[dict]) -> io.FileIO:
        """Write config.json and, instead of the lines of earlier starts, `lines`; open for appending."""
        write_config(self.path.parent, self.config)
        job.replace_file(self.path, "".join(as_json(line) + "\n" for line in lines))
        self.file = io.FileIO(self.path, "a")  # unbuffered: Python's buffer drops what it cannot write
        return self.file


def make_config(
    settings: flags.Settings, folder: pathlib.Path, state: states.TrainState, data: corpora.DataRecord, changed: str
) -> dict:
    """The content of config.json: flags, versions, --import files and command of the run, its id, the record of its
    `data`, and its starts, each with time, first step, number of ranks, and the flags that it `changed`, in words."""
    before = base.read_config(folder)
    start = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "step": state.step}
    start["world_size"] = dist.get_world_size()
    if changed:
        start["changed"] = changed
    run: dict[str, Any] = flags.record_flags(settings) | {"versions": base.package_versions(), "commit": base.commit()}
    run["imports"] = flags.IMPORTED
    run["command"] = flags.shell_command(job.launcher(), settings.explicit)
    run["parameters"] = sum(parameter.numel() for parameter in state.model.parameters())
    run["gpu"] = base.gpu_name()
    run |= {"world_size": dist.get_world_size(), "run_id": state.run_id, "folder": str(folder.resolve())}
    return run | {"starts": [*before.get("starts", []), start], "data": data.to_json()}


def write_config(folder: pathlib.Path, run: dict) -> None:
    job.replace_file(folder / "config.json", json.dumps(run, indent=2) + "\n")


def describe_end(sample: dict[str, Any]) -> str:
    """`ended` for a sample with an end token, else its length."""
    return "ended" if sample["ended"] else f"cut at {base.counted(sample['tokens'], 'token')}"
