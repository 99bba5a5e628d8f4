"""Trackers: where the figures of a run are shown beside its own files. Each file of this folder is one, and its name is
a value of --log-with, which harness/flags/choices.py has with the file's first sentence. A file ends with `TRACKER`, a
class of the interface below; the libraries that it needs are imported in its methods.
"""

import pathlib

from harness import flags
from harness import state as states
from harness.report.metrics import find_metric, to_tracker_names


class Tracker:
    """What the log of a run calls, on rank 0 alone, in this order: the methods below, of which `log` comes once a log
    line. A method that raises ends the run before training, up to `start`; later the run goes on without the tracker.
    """

    name = ""  # as --log-with has it

    def __init__(self, settings: flags.Args, folder: pathlib.Path):
        """Before anything is loaded. `folder` is the run's, in which alone a tracker may write.

        Raises:
            UserError: this cannot work: no package, no login. The message says what to do.
        """

    def start(self, run: dict, state: states.TrainState) -> str:
        """Begins, or goes on after `state.step`: what was shown of later steps is void. `run` is what config.json
        holds, `run["run_id"]` stays the same over restarts. Returns where to look, an address or a command."""
        return ""

    def log(self, metrics: dict) -> None:
        """A line of metrics.jsonl, by its keys, without what was not measured, such as speed in the warmup or the loss
        of a skipped step. `to_tracker_names` gives the names to show."""

    def finish(self, metrics: dict) -> None:
        """The last line, with the averages after warmup, of a run that took all its steps."""

    def close(self, exit_code: int) -> None:
        """The process is about to end with this exit code."""


def over_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """The losses of a line, which are shown over tokens too: so runs of different batch sizes compare."""
    losses = {}
    for key, value in metrics.items():
        metric = find_metric(key)
        if metric and metric.unit == "nats per token":
            losses[f"by_tokens/{key}"] = value
    return losses


__all__ = ["Tracker", "over_tokens", "to_tracker_names"]
