"""Trackers: other programs that show the metrics of a run. Each file of this folder is one; its name is a value of
--log-with, listed in harness/flags/choices.py with the file's first sentence. A file ends with `TRACKER`, a class with
the interface below, which imports its libraries in its methods.
"""

import pathlib

from harness import flags
from harness import state as states
from harness.report.metrics import find_metric, to_tracker_names


class Tracker:
    """The interface of a tracker. The log of a run calls the methods on rank 0, in this order, `log` once per log line.
    An error in `__init__` or `start` ends the run; after a later one the run continues without the tracker."""

    name = ""  # as in --log-with

    def __init__(self, args: flags.Args, folder: pathlib.Path):
        """Check that the tracker can work, before anything is loaded. It may write only into `folder`, the run's.

        Raises:
            UserError: no package or no login; the message says what to do.
        """

    def start(self, run: dict, state: states.TrainState) -> str:
        """Start, or continue after `state.step`: values of later steps, from an earlier start, are void. `run` is the
        content of config.json; `run["run_id"]` is the same for all starts. Returns an address or a command to view the
        run with."""
        return ""

    def log(self, metrics: dict) -> None:
        """Show a line of metrics.jsonl. Keys that were not measured are absent, such as speed during warmup or the loss
        of a skipped step. `to_tracker_names` gives the names to show."""

    def finish(self, metrics: dict) -> None:
        """Show the last line of a complete run, with the averages after warmup."""

    def close(self, exit_code: int) -> None:
        """Close the tracker before the process ends with this exit code."""


def over_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """The losses of a line by names for charts over tokens, in which runs of different batch sizes compare."""
    losses = {}
    for key, value in metrics.items():
        metric = find_metric(key)
        if metric and metric.unit == "nats per token":
            losses[f"by_tokens/{key}"] = value
    return losses
