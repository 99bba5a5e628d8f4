"""The log of a run: config.json, metrics.jsonl, the trackers and the console's lines."""

import contextlib
import json
import os
import pathlib
import sys
import threading
import time

import torch.distributed as dist
from tqdm import tqdm

from harness import job
from harness.base.errors import UserError
from harness.base.saved import place_of
from harness.base.text import first_line
from harness.data.data_record import DataRecord
from harness.flags.settings import Settings
from harness.job import columns, say
from harness.report import page
from harness.report.header import watching
from harness.report.metrics_file import MetricsFile
from harness.report.prometheus import Endpoint
from harness.report.run_record import describe_identity, describe_run, describe_starts, keep_config
from harness.report.skipped_steps import SkippedStep, as_notes, describe_skipped
from harness.report.summary import (
    describe_held_out,
    describe_held_out_average,
    describe_held_out_sources,
    describe_unsaved,
)
from harness.report.trackers import Trackers
from harness.state.train_state import TrainState

NO_BREAK_SPACE = "\u00a0"


class Report:
    """The log of a run, which rank 0 writes: config.json, metrics.jsonl, the trackers, the console."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        folder: pathlib.Path,
        state: TrainState,
        data: DataRecord,
        changed: str = "",  # which flags are not those of the checkpoint that it resumes from, in words
    ):
        self.settings, self.num_steps = settings, settings.num_steps
        self.endpoint = endpoint
        self.excluded = state.tracker.excluded
        self.file: MetricsFile | None = None  # on rank 0 only
        self.failed = False  # whether lines of metrics.jsonl wait for the disk
        self.advised = False  # whether the advice on saving was given, if any
        self.closing, self.closed = threading.Lock(), False
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                starts = describe_starts(folder, state, changed)
                starts[-1]["mixture"] = data.describe_history()
                self.file = MetricsFile(folder / "metrics.jsonl", state.step)
                run = describe_run(settings) | describe_identity(folder, state) | {"starts": starts}
                run["data"] = data.record()
                keep_config(folder, run)
                endpoint.identify(run)
            except OSError as error:
                raise UserError(f"--output-dir: {folder} cannot be written ({error.strerror})", 1) from error
        self.folder, self.place = folder, place_of(folder)
        self.moved = False  # whether the folder is elsewhere now
        self.page: pathlib.Path | None = None  # once it is written
        self.step = state.step  # of the last line
        self.changed = changed
        self.data = data
        self.skipped: list[SkippedStep] = []  # since the last line
        places = {"run": str(folder)}
        if self.file:
            self.trackers = Trackers(settings, folder, state, json.loads(json.dumps(run)))
            places |= self.trackers.places() | watching(settings, folder)
            job.at_exit(self.interrupt)
        say(columns(places) + "\n")
        shown = self.file is not None and job.is_terminal(sys.stderr)
        self.bar = job.step_bar(self.num_steps, state.step, shown=shown)

        self.compiles_since = time.perf_counter() if settings.compile else None
        if self.compiles_since:
            say("compile    the layers, within the first step; of a large model that takes minutes")

    def count_step(self) -> None:
        """Counts a finished step; after the first one of a compiled model it says how long compiling took."""
        self.bar.update()
        self.endpoint.steps += 1
        if self.compiles_since:
            say(f"compiled   in {time.perf_counter() - self.compiles_since:,.0f} s, the first step included")
            self.compiles_since = None

    def log(self, metrics: dict, speed: str, stories: list[dict[str, str]] | None = None) -> None:
        if not self.file:
            return
        step = metrics["step"]
        notes = {}
        if stories:
            notes["samples"] = stories
        if self.changed:  # at the first line of this start
            notes["changed"] = self.changed
            self.changed = ""
        if self.skipped:
            notes["skipped"] = as_notes(self.skipped, self.data)
            self.skipped = []
        self.write(metrics, **notes)
        takes_seconds = stories or self.trackers.failed
        with self.excluded() if takes_seconds else contextlib.nullcontext():
            self.trackers.log(metrics, stories or [])
            if not (self.failed or self.moved):
                self.trackers.mend()
        self.show(metrics, speed)
        if "step_time_ms" in metrics and not self.advised:
            self.advised = True
            warning = describe_unsaved(self.settings, self.num_steps - step, metrics["step_time_ms"])
            if warning:
                job.print_error(f"train_fsdp.py: warning: {warning}")

    def note_skipped(self, skipped: list[SkippedStep]) -> None:
        """Says which steps were skipped; the next line of metrics.jsonl lists them."""
        if skipped:
            say(describe_skipped(skipped, self.data, self.folder))
            self.skipped += skipped

    def show(self, metrics: dict, speed: str) -> None:
        """The line of the console, and the figures in the bar."""
        step, losses = metrics["step"], ["skipped"]
        if "loss" in metrics:
            losses = [f"loss {metrics['loss']:.4f}", f"grad {metrics['grad_norm']:.2f}"]
        speeds = [figure for figure in speed.split("  ") if figure]
        mfu = [figure for figure in speeds if figure.startswith("MFU")]
        self.bar.set_postfix_str(", ".join([losses[0], *(mfu or speeds[:1])]), refresh=False)
        parts = [*losses, f"lr {metrics['learning_rate']:.1e}", *speeds]
        if "step_time_ms" in metrics:
            parts.append(f"eta {tqdm.format_interval((self.num_steps - step) * metrics['step_time_ms'] / 1000)}")
        held_out = describe_held_out(metrics)
        if held_out:
            parts += [held_out, *describe_held_out_average(metrics), *describe_held_out_sources(metrics)]
        name = f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  "
        line = name + "  ".join(part.replace(" ", NO_BREAK_SPACE) for part in parts)  # to break between parts only
        say(job.wrap_lines(line, indent=len(name)).replace(NO_BREAK_SPACE, " "))

    def sync(self) -> None:
        """Makes all lines so far durable, those included that could not be written at their time.

        Raises:
            OSError: they are not.
        """
        self.file.sync()

    def write(self, metrics: dict, **notes) -> None:
        """A line of metrics.jsonl, with `notes` in it, and the figures to the Prometheus endpoint."""
        self.endpoint.show(metrics)
        self.step = metrics["step"]
        self.file.add(metrics | notes)
        self.write_waiting(durable=bool(notes))
        moved = place_of(self.folder) != self.place
        if moved and not self.moved:
            say(f"failed     {self.folder} was moved away; move it back: nothing is lost, checkpoints wait for it")
        self.moved = moved

    def write_waiting(self, durable: bool = False) -> None:
        """Writes the lines so far; says once that this fails, and when it works again."""
        try:
            self.file.write()
            if durable:
                os.fsync(self.file.file.fileno())
        except OSError as error:
            if not self.failed:
                reason = f"metrics.jsonl, from step {self.step} on: {error.strerror}"
                say(f"failed     {reason}; its lines wait in memory, the run goes on")
            self.failed = True
            return
        if self.failed:
            say(f"recovered  metrics.jsonl: it has every line up to step {self.step}")
        self.failed = False

    def end(self, metrics: dict | None, stories: list[dict[str, str]] | None = None) -> None:
        """Writes the run's last line, unless it was stopped before its end."""
        if self.file and metrics:
            notes = {"final": True}
            if stories:
                notes["samples"] = stories
            self.write(metrics, **notes)
            self.settle()
            self.trackers.summarize(metrics)
        self.close()

    def check_written(self) -> None:
        """A UserError where metrics.jsonl lacks lines at the end of the run."""
        if not (self.failed or self.moved):
            return
        waiting = len(self.file.waiting)
        lost = f"{waiting} lines are lost" if waiting else "see above"
        raise UserError(f"--output-dir: {self.folder / 'metrics.jsonl'} could not be written, {lost}", 1)

    def settle(self) -> None:
        """Tries once more to write what waits for a disk."""
        if self.failed:
            self.write_waiting()
        if not (self.failed or self.moved):
            self.trackers.settle()

    def close(self, interrupted: bool = False) -> None:
        """Removes the bar, closes the file and writes the page, however the run ended. With `interrupted` the loop runs
        on in another thread until the process is gone: the bar and the file stay open."""
        with self.closing:
            if self.closed:
                return
            self.closed = True
            if not interrupted:
                self.bar.close()
            if not self.file:
                return
            if not interrupted:
                self.write_waiting(durable=True)
                self.settle()
                self.file.close()
            self.page = write_page(self.folder)

    def interrupt(self, exit_code: int) -> None:
        """Writes the page where the process ends before the loop."""
        self.close(interrupted=True)
        if exit_code == job.INTERRUPTED and self.page:
            job.print_error(columns({"report": str(self.page)}))


def write_page(folder: pathlib.Path) -> pathlib.Path | None:
    """Makes report.html of the run's files. Where that fails a line says so, and the run succeeds all the same."""
    try:
        return page.write_report([folder], folder / "report.html")
    except Exception as error:  # whatever it is, the run has its result
        say(columns({"report": f"not written: {getattr(error, 'strerror', None) or first_line(error)}"}))
        return None
