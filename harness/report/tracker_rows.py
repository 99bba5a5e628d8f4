"""Tracker rows: what wandb and tensorboard have in common: the figures of a log line under their names there, and the
command with which a person starts either. Called by the trackers. Independent of how either stores a row."""

import os
import pathlib
import shlex
import shutil
import sys

from harness.report.figure_list import find_figure, tracker_name


def grouped(metrics: dict) -> dict[str, float]:
    """The figures of a line of metrics.jsonl under their names in the trackers; one without an entry in `FIGURES` is in
    the group `other`."""
    named = {}
    for key, value in metrics.items():
        name = tracker_name(key)
        if name is not None:
            named[name] = value
    return named


def by_tokens(metrics: dict) -> dict[str, float]:
    """The figures that are shown over tokens too, under their names there."""
    named = {}
    for key, value in metrics.items():
        figure = find_figure(key)
        if figure and figure.over_tokens:
            named[f"by_tokens/{key}"] = value
    return named


def program(name: str) -> str:
    """A tracker's command as it can be typed in this shell: it may be installed beside the interpreter alone."""
    if shutil.which(name):
        return name
    return shlex.quote(os.path.relpath(pathlib.Path(sys.executable).with_name(name)))
