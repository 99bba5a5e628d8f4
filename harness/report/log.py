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

from harness.base.errors import UserError
from harness.base.saved import place_of
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import endings, terminal
from harness.job.folders import lock_folder
from harness.job.printing import columns, say
from harness.report import page
from harness.report.header import watching
from harness.report.metrics_file import MetricsFile
from harness.report.prometheus import Endpoint
from harness.report.run_record import describe_identity, describe_run, describe_starts, keep_config
from harness.report.summary import describe_held_out, describe_unsaved
from harness.report.trackers import Trackers
from harness.state.train_state import TrainState


class Report:
    """What a run says of itself, on rank 0: config.json, metrics.jsonl, the trackers, the console."""

    def __init__(
        self,
        settings: Settings,
        endpoint: Endpoint,
        folder: pathlib.Path,
        state: TrainState,
        changed: str = "",  # which flags are not those of the checkpoint that it goes on from, in words
    ):
        self.num_steps, self.file, self.failed, self.excluded = settings.num_steps, None, False, state.tracker.excluded
        self.endpoint, self.closing, self.closed = endpoint, threading.Lock(), False
        self.settings, self.advised = settings, False
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock_folder(folder)
                starts = describe_starts(folder, state, changed)
                self.file = MetricsFile(folder / "metrics.jsonl", state.step)
                run = describe_run(settings) | describe_identity(folder, state) | {"starts": starts}
                keep_config(folder, run)
                endpoint.identify(run)
            except OSError as error:
                raise UserError(f"--output-dir: {folder} cannot be written ({error.strerror})", 1) from error
        self.folder, self.place, self.moved, self.page = folder, place_of(folder), False, None
        self.step, self.changed = state.step, changed  # of the last line; flags that are not the checkpoint's
        places = {"run": str(folder)}
        if self.file:
            self.trackers = Trackers(settings, folder, state, json.loads(json.dumps(run)))
            places |= self.trackers.places() | watching(settings, folder)
            endings.LISTENERS.append(self.interrupt)
        say(columns(places) + "\n")
        shown = self.file and terminal.is_terminal(sys.stderr)
        self.bar = terminal.step_bar(self.num_steps, state.step, shown=bool(shown))

        self.compiles_since = time.perf_counter() if settings.compile else None
        if self.compiles_since:
            say("compile    the layers, within the first step; of a large model that takes minutes")

    def count_step(self) -> None:
        """One step is done; of a compiled model the first one says how long that took."""
        self.bar.update()
        self.endpoint.steps += 1
        if self.compiles_since:
            say(f"compiled   in {time.perf_counter() - self.compiles_since:,.0f} s, the first step included")
            self.compiles_since = None

    def log(self, metrics: dict, speed: str, stories: list[dict[str, str]] | None = None) -> None:
        if not self.file:
            return
        step = metrics["step"]
        more = {"samples": stories} if stories else {}
        if self.changed:  # at the first line of this start
            more, self.changed = more | {"changed": self.changed}, ""
        self.write(metrics, **more)
        with self.excluded() if stories or self.trackers.failed else contextlib.nullcontext():  # these take seconds
            self.trackers.log(metrics, stories or [])
            if not (self.failed or self.moved):
                self.trackers.mend()
        loss, held_out = f"loss {metrics['loss']:.4f}", describe_held_out(metrics)
        speeds = [figure for figure in speed.split("  ") if figure]
        mfu = [figure for figure in speeds if figure.startswith("MFU")]
        self.bar.set_postfix_str(", ".join([loss, *(mfu or speeds[:1])]), refresh=False)
        parts = [loss, f"grad {metrics['grad_norm']:.2f}", f"lr {metrics['learning_rate']:.1e}", *speeds]
        if "step_time_ms" in metrics:
            parts.append(f"eta {tqdm.format_interval((self.num_steps - step) * metrics['step_time_ms'] / 1000)}")
        name = f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}  "
        figures = [figure.replace(" ", "\u00a0") for figure in (*parts, held_out) if figure]  # lines break between them
        say(terminal.wrap(name + "  ".join(figures), indent=len(name)).replace("\u00a0", " "))
        if "step_time_ms" in metrics and not self.advised:
            self.advised = True
            if warning := describe_unsaved(self.settings, self.num_steps - step, metrics["step_time_ms"]):
                terminal.tell(f"train_fsdp.py: warning: {warning}")

    def sync(self) -> None:
        """Makes the lines so far durable, those included that could not be written at their time; an OSError where that
        fails."""
        self.file.sync()

    def write(self, metrics: dict, **more) -> None:
        """A line of metrics.jsonl, with `more` in it, and the figures to the Prometheus endpoint."""
        self.endpoint.show(metrics)
        self.step = metrics["step"]
        self.file.add(metrics | more)
        self.write_waiting(durable=bool(more))
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
                what = f"metrics.jsonl, from step {self.step} on: {error.strerror}"
                say(f"failed     {what}; its lines wait in memory, the run goes on")
            self.failed = True
            return
        if self.failed:
            say(f"recovered  metrics.jsonl: it has every line up to step {self.step}")
        self.failed = False

    def end(self, metrics: dict | None, stories: list[dict[str, str]] | None = None) -> None:
        """Writes the run's last line, unless it was stopped before its end."""
        if self.file and metrics:
            self.write(metrics, final=True, **{"samples": stories} if stories else {})
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
        """Whatever waits for a disk is tried once more."""
        if self.failed:
            self.write_waiting()
        if not (self.failed or self.moved):
            self.trackers.settle()

    def close(self, interrupted: bool = False) -> None:
        """Gives back the terminal and the file, and leaves the page, however the run ended. Where the loop goes on in
        another thread until the process is gone, `interrupted`, the files stay open."""
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
        """Leaves the page where the process ends before the loop."""
        self.close(interrupted=True)
        if exit_code == terminal.INTERRUPTED and self.page:
            terminal.tell(columns({"report": str(self.page)}))


def write_page(folder: pathlib.Path) -> pathlib.Path | None:
    """Makes report.html of the run's files; that it cannot be written costs no run its success."""
    try:
        return page.write_report([folder], folder / "report.html")
    except Exception as error:  # whatever it is, the run has its result
        say(columns({"report": f"not written: {getattr(error, 'strerror', None) or first_line(error)}"}))
        return None
