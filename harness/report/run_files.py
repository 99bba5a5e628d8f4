"""Run files: metrics.jsonl and config.json of a run, read back from its folder whatever state a kill left them in.
Called by the page, the trackers, the summary and the record of starts. Independent of what is made of them."""

import contextlib
import dataclasses
import json
import math
import pathlib

from harness.base import UserError
from harness.base.saved import read_config

# fields of Settings in config.json that no flag sets
DERIVED_SETTINGS = {"lacks_disk", "lacks_memory"}


@dataclasses.dataclass
class Run:
    """What a run's folder holds."""

    name: str
    lines: list[dict]  # as logged, without the last one's averages
    final: dict  # the line with the averages; of a run that did not come to its end, the last that was logged
    complete: bool
    config: dict
    unreadable: int  # number of lines of metrics.jsonl that are not one JSON object with a step

    def flags(self) -> dict:
        flags = self.config.get("flags")
        if not isinstance(flags, dict):  # an edited config.json
            return {}
        return {key: value for key, value in flags.items() if key not in DERIVED_SETTINGS}


def read_metrics(path: pathlib.Path) -> list[dict]:
    """The lines of a metrics.jsonl, an empty list where there is none. Lines that a kill cut off, or that are not an
    object with a step, are left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(line)
            if entry["step"] >= 0:
                lines.append(entry)
    return lines


def read_run(folder: pathlib.Path) -> Run:
    """What the folder of a run holds.

    Raises:
        UserError: there is no metrics.jsonl in it.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: holds no metrics.jsonl; name a run's folder, OUTPUT_DIR/RUN_NAME")
    lines = read_metrics(path)
    written = [line for line in path.read_bytes().splitlines() if line.strip()]
    last = lines[-1] if lines else {}
    return Run(
        name=folder.resolve().name,
        lines=[line for line in lines if "final" not in line],
        final=last,
        complete="final" in last,
        config=read_config(folder),
        unreadable=len(written) - len(lines),
    )


def is_number(value) -> bool:
    """Whether a value of a line is a finite number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
