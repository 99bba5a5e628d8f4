"""Trackers: whether wandb and tensorboard can work, which the script asks at the start, and the rows that the report
gives them. Independent of how a figure is computed and of how each tracker stores it."""

import pathlib
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec

from harness import job
from harness.base.errors import UserError
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import say
from harness.report.figure_list import figures_in
from harness.report.run_files import read_metrics
from harness.report.tensorboard_tracker import Tensorboard
from harness.report.tracker_rows import program
from harness.report.wandb_tracker import Wandb
from harness.state.train_state import TrainState

RETRY_SECONDS = 10.0  # until a tracker that failed is tried again; twice as long after each try
MIN_FREE_BYTES = 2**20  # that a disk must take before


def choose_trackers(log_with: str) -> list[str]:
    """The names of the trackers; one that cannot work is an error now, not at the first log line."""
    names = {"none": [], "all": ["wandb", "tensorboard"]}.get(log_with, [log_with])
    for package in names:
        if not find_spec(package):
            raise UserError(f"--log-with {log_with}: needs the package {package} (pip install {package})")
    if "wandb" in names:
        import wandb

        try:
            ready = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
        except Exception as error:  # the server is not reached, or does not know the key
            advice = "WANDB_MODE=offline keeps the run in its folder, for `wandb sync`"
            raise UserError(f"--log-with {log_with}: no login to wandb ({first_line(error)}); {advice}", 1) from error
        if not ready:
            advice = f"run `{program('wandb')} login`, or set WANDB_MODE=offline"
            raise UserError(f"--log-with {log_with}: not logged in to wandb; {advice}")
    return names


class Trackers:
    """The trackers of one run, on rank 0. One that fails is left out until it works again, and then gets the rows that
    it lacks from metrics.jsonl."""

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        """`config` is what config.json holds.

        Raises:
            UserError: one does not start.
        """
        self.file = folder / "metrics.jsonl"
        self.open, self.failed = [], []
        self.tried_at = 0.0  # when the failed ones were tried last
        self.pause = RETRY_SECONDS  # until they are tried again
        for kind in (Wandb, Tensorboard):
            if settings.log_with in (kind.name, "all"):
                self.open.append(start(kind, settings, folder, state, config))

    def places(self) -> dict[str, str]:
        """Where to watch the run in each of them, by command or address."""
        return dict(tracker.place() for tracker in self.open)

    def log(self, metrics: dict, stories: list[dict[str, str]]) -> None:
        self._call_each(lambda tracker: tracker.log(metrics, stories), f", from step {metrics['step']} on")

    def settle(self) -> None:
        """Waits until all rows are in the files, and gives those that failed another try."""
        self._call_each(lambda tracker: tracker.settle())
        self.pause = 0.0
        self.mend()

    def mend(self) -> None:
        """Restarts those that failed, if it is time and there is room on the disk."""
        if not self.failed or time.monotonic() - self.tried_at < self.pause:
            return
        self.tried_at, self.pause = time.monotonic(), 2 * self.pause
        for tracker in list(self.failed):
            try:
                if not self._has_room():
                    return
                kept, lines = self._restart(tracker)
            except Exception:  # later, perhaps
                continue
            self.failed.remove(tracker)
            self.open.append(tracker)
            self.pause = RETRY_SECONDS
            say(f"recovered  {tracker.name}: it has the {len(lines):,} rows after step {kept:,} that it lacked")

    def _has_room(self) -> bool:
        with tempfile.TemporaryFile(dir=self.file.parent, buffering=0) as probe:
            return probe.write(bytes(MIN_FREE_BYTES)) == MIN_FREE_BYTES

    def _restart(self, tracker) -> tuple[int, list[dict]]:
        """The last step that the tracker has kept, and the lines after it, which it gets."""
        kept = tracker.restart()
        lines = [line for line in read_metrics(self.file) if "final" not in line and line["step"] > kept]
        for line in lines:
            tracker.log(figures_in(line), line.get("samples", []))
        tracker.settle()
        return kept, lines

    def summarize(self, metrics: dict) -> None:
        """What stands in the overview of finished runs: `metrics` is the last line."""
        self._call_each(lambda tracker: tracker.summarize(metrics, self._stories()))

    def _stories(self) -> list[tuple[int, str, str]]:
        """(step, prompt, text) of every story of the run."""
        stories = []
        for line in read_metrics(self.file):
            for sample in line.get("samples", ()):
                stories.append((line["step"], sample["prompt"], sample["text"]))
        return stories

    def _call_each(self, call: Callable, where: str = "") -> None:
        for tracker in list(self.open):
            try:
                call(tracker)
            except Exception as error:  # whatever it is, the run has its own files
                self.open.remove(tracker)
                self.failed.append(tracker)
                self.tried_at = time.monotonic()
                say(f"failed     {tracker.name}{where}: {reason_of(error)}; the run goes on without it")


def start(kind: type, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
    """A tracker that hears how the process ends; UserError where it does not start."""
    try:
        tracker = kind(settings, folder, state, config)
    except Exception as error:
        what = f"--log-with {settings.log_with}: {kind.name} does not start ({reason_of(error)})"
        raise UserError(f"{what}; --log-with none leaves it out", 1) from error
    job.at_exit(tracker.finish)
    return tracker


def reason_of(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)
