"""The log of a run: what every step, log line and ending leaves in config.json, metrics.jsonl, the trackers, on the
console and on the page.

    with report.Log(settings, state, data, folder, device, trackers, flops_by_length, changed) as log:
        with log.step() as due:
            ...                                 # the optimizer step, counted in the state
            log.count(result)
        metrics, problem = log.metrics()        # where a log line or a save is due
        log.write(metrics, samples)
        log.finish(samples)

All ranks call these methods, which gather what all ranks measure; rank 0 alone writes.
"""

import contextlib
import gc
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from harness import base, flags, job
from harness import state as states
from harness.report import page
from harness.report.files import MetricsFile, describe_run, write_config
from harness.report.health import StepResult, count_skipped, first_not_finite, read_results, read_routing, read_terms
from harness.report.metrics import NOTES, gather_metrics, with_run_times
from harness.report.profiling import dump_memory, profiling
from harness.report.prometheus import Prometheus
from harness.report.summary import describe_held_out, describe_skipped, print_samples, summarize
from harness.report.trackers import Tracker


def open_trackers(settings: flags.Args, folder: pathlib.Path) -> list[Tracker]:
    """The trackers of a run and its Prometheus endpoint, on rank 0; empty on the others. Every rank calls this, before
    anything is loaded, as a tracker that cannot work is an error now and not at the first log line.

    Raises:
        UserError: as a tracker's `__init__` says.
    """
    opened: list[Tracker] = []

    def open_each() -> None:
        names = {"none": [], "all": list(flags.TRACKERS)}.get(settings.log_with, [settings.log_with])
        files = {name: f"harness.report.trackers.{name.replace('-', '_')}" for name in names}
        kinds = {f"--log-with {name}": importlib.import_module(file).TRACKER for name, file in files.items()}
        if settings.metrics_port:
            kinds["--metrics-port"] = Prometheus
        for flag, kind in kinds.items():
            try:
                opened.append(kind(settings, folder))
            except ImportError as error:
                advice = f"pip install {error.name}, or leave the flag out"
                raise base.UserError(f"{flag}: needs the package {error.name}; {advice}") from error

    base.broadcast_from_rank_0(open_each)
    return opened


class Log(contextlib.AbstractContextManager):
    """The log of one start of a run. Inside it garbage is collected at log lines only: in the middle of a step one rank
    stops and all wait for it."""

    def __init__(
        self,
        settings: flags.Settings,
        state: states.TrainState,
        data: Any,
        folder: pathlib.Path,
        device: torch.device,
        trackers: list[Tracker],
        flops_by_length: np.ndarray,
        changed: str,
        has_room: bool,
    ):
        """`data` is what the run trains on, a `data.TrainingData`; `trackers` are open; `flops_by_length` are
        those of a token, by the length of its document, zeros where they are not known; `changed` names the flags that
        are not those of the checkpoint that the run goes on from; `has_room` is True if the disk has room for a
        checkpoint."""
        self.settings, self.state, self.data, self.device = settings, state, data, device
        self.folder, self.trackers, self.flops_by_length = folder, trackers, flops_by_length
        self.first_step, self.has_room = self.state.step + 1, has_room
        self.results: list[StepResult] = []  # of the steps since the last `metrics`
        self.skipped: dict[int, str] = {}  # why, by step, since the last line
        self.speed: dict[str, float] = {}  # of the window that this step closed
        self.learning_rate = 0.0
        self.last: dict = {}  # the figures of the last line
        self.profile = contextlib.ExitStack()
        self.file: MetricsFile | None = None  # on rank 0
        if dist.get_rank() == 0:
            self._open(changed)
        shown = self.file is not None and job.is_terminal(sys.stderr)
        self.bar = job.step_bar(self.settings.num_steps, self.state.step, shown=shown)
        self.began = time.monotonic()

    @base.working()
    def _open(self, changed: str) -> None:
        """Opens the run's files and its trackers, on rank 0."""
        try:
            self.described = describe_run(self.settings, self.folder, self.state, self.data.record, changed)
            is_over = self.state.step >= self.settings.num_steps
            self.file = MetricsFile(self.folder / "metrics.jsonl", self.state.step, is_over)
            write_config(self.folder, self.described)
        except OSError as error:
            raise base.UserError(f"--output-dir: {self.folder} cannot be written ({error.strerror})", 1) from error
        self.last = self.file.last
        places = {"run": str(self.folder)}
        for tracker in self.trackers:
            try:
                places[tracker.name] = tracker.start(self.described, self.state)
            except Exception as error:
                what = f"--log-with {self.settings.log_with}: {tracker.name} does not start ({base.first_line(error)})"
                raise base.UserError(f"{what}; --log-with none leaves it out", 1) from error
        if self.settings.profile:
            places["profile"] = str(self.folder / "profile" / "rank-0.json")
        job.print0(job.columns(places) + "\n")
        job.at_exit(self.end)

    def __enter__(self) -> "Log":
        freeze_gc()
        gc.disable()
        if self.settings.compile:
            job.print0("compile    the layers, within the first step; of a large model that takes minutes")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        gc.enable()
        if error is None:  # else another rank may be gone, for which a profile would wait
            self.profile.close()  # of a run that was stopped within it
        self.bar.close()

    # ---- A step ------------------------------------------------------------------------------------------------------

    def due_at(self, step: int) -> job.Actions:
        return job.due(self.settings, step, self.first_step, self.has_room, self.data.ends_epoch)

    @contextlib.contextmanager
    def step(self) -> Iterator[job.Actions]:
        """Time the next optimizer step, and profile it if that is due. Yields what is due at it."""
        due, tokens = self.due_at(self.state.step + 1), self.state.tokens
        job.enter_phase("data", due.step)
        self.learning_rate = float(self.state.scheduler.get_last_lr()[0])
        if due.profile_begins:
            self.profile.enter_context(profiling(self.folder, self.state))
        yield due
        if due.profile_ends:
            self.profile.close()
        self.bar.update()
        if due.first:
            with self.state.tracker.paused():
                freeze_gc()  # the compiler has made more than there was before
        self.speed = {}
        if not due.profiled:
            tokens = self.state.tokens - tokens
            # Exact for each window of the clock, and for streams, which a mean over the corpus is not. Each rank counts
            # its own documents times the number of ranks; a log line has the mean over ranks.
            lengths = np.concatenate(self.results[-1].document_lengths)
            flops = dist.get_world_size() * float(lengths @ self.flops_by_length[lengths])
            self.speed = self.state.tracker.step(tokens, flops / tokens, synchronize=due.log)

    def count(self, result: StepResult) -> None:
        """Takes what a step gave; its numbers stay on the device until `metrics` reads them."""
        self.results.append(result)

    # ---- A line ------------------------------------------------------------------------------------------------------

    def metrics(self) -> tuple[dict, str]:
        """(the figures of a log line after the step that was just taken, what ends the run: NaN or infinity in a loss
        since the last call or in this step's gradient norm or update, too many skipped steps). A skipped step has no
        loss and no gradient norm."""
        state, steps = self.state, read_results(self.results)
        last_terms = read_terms(self.results[-1]) | read_routing(self.results[-1])
        self.results.clear()
        skipped, too_many = count_skipped(state, steps, self.settings.max_skipped)
        self.skipped |= skipped
        if skipped:
            job.print0(describe_skipped(skipped, self.data.record, self.folder))
        metrics: dict[str, Any] = {"step": state.step}
        if not steps[-1].skipped:
            metrics |= {"loss": steps[-1].loss, "grad_norm": steps[-1].grad_norm} | last_terms  # of this step alone
        metrics |= {"learning_rate": self.learning_rate, "tokens_seen": state.tokens}
        metrics["skipped_steps"] = state.skipped_steps
        problem = first_not_finite(metrics, steps)
        if too_many and not problem:
            problem = state.broken_by_update() or too_many
        figures = gather_metrics(self.speed, state, self.device)
        return metrics | figures | self.data.metrics(state.samples, state.tokens), problem

    def needs_evaluation(self) -> bool:
        """On rank 0: whether the last step that an earlier start logged and saved was not evaluated, or its checkpoint
        does not say so."""
        was_evaluated = "eval_loss" in self.last and self.state.eval_loss is not None
        return self.last.get("step") == self.state.step and not was_evaluated

    def write(self, metrics: dict, samples: list[dict[str, Any]] | None = None) -> None:
        """A log line: metrics.jsonl, the trackers, the console. `samples` are what the model wrote now. A line of an
        evaluation alone adds to the last one."""
        job.enter_phase("log")
        self.last = metrics if "skipped_steps" in metrics else self.last | metrics
        if "eval_loss" in metrics:
            with self.state.tracker.paused():
                freeze_gc()  # the compiler may have run again, for passes without gradients
        else:
            gc.collect()
        if self.file is None:
            return
        self._write_line(self.file, metrics, samples)
        self._notify(lambda tracker: tracker.log(metrics))
        self._print_line(metrics)
        print_samples(samples or [])

    def _write_line(self, file: MetricsFile, metrics: dict, samples: list | None, **notes: Any) -> None:
        """A line of metrics.jsonl with its notes; that of an evaluation alone takes the place of its step's line."""
        if samples:
            notes["samples"] = samples
        if self.skipped:
            notes["skipped"] = [{"step": step, "reason": reason} for step, reason in self.skipped.items()]
            self.skipped = {}
        if "skipped_steps" in metrics:
            file.write(metrics | notes)
        else:
            file.replace_last(metrics | notes)

    def _notify(self, call: Callable[[Tracker], None]) -> None:
        """Calls each tracker; one that fails is left out from now on."""
        for tracker in list(self.trackers):
            try:
                with base.working():  # a tracker may wait for its network
                    call(tracker)
            except Exception as error:  # whatever it is, the run has its own files
                self.trackers.remove(tracker)
                where = f"{tracker.name}, from step {self.state.step} on"
                job.print0(f"failed     {where}: {base.first_line(error)}; the run goes on without it")

    def _print_line(self, metrics: dict) -> None:
        """The line of the console, and the figures in the bar."""
        step, num_steps = metrics["step"], self.settings.num_steps
        parts = []
        if "loss" in metrics:
            parts = [f"loss {metrics['loss']:.4f}", f"grad {metrics['grad_norm']:.2f}"]
        elif "skipped_steps" in metrics:
            parts = ["skipped"]
        mfu_text = f", MFU {metrics['mfu_percent']:.1f} %" if "mfu_percent" in metrics else ""
        if parts:  # else an evaluation alone
            self.bar.set_postfix_str(parts[0] + mfu_text, refresh=False)
            parts.append(f"lr {metrics['learning_rate']:.1e}")
        if "step_time_ms" in metrics:
            parts.append(self.state.tracker.get_print_message(metrics))
            parts.append(f"eta {tqdm.format_interval((num_steps - step) * metrics['step_time_ms'] / 1000)}")
        if held_out := describe_held_out(metrics):
            parts.append(held_out)
        name = f"step {step:>{len(str(num_steps))}}/{num_steps}"
        job.print0("  ".join([name, *parts]))

    def sync(self) -> None:
        """Makes all lines so far durable, on rank 0, before a checkpoint is published.

        Raises:
            OSError: they are not.
        """
        self.file.sync()

    # ---- The end -----------------------------------------------------------------------------------------------------

    def finish(self, samples: list[dict[str, Any]], planned: dict[str, float] | None = None) -> dict:
        """The last line and the summary of a run that has taken all its steps; returns the line's figures.

        `planned` are figures of the last line alone. A run that had taken all its steps before keeps its last line.
        """
        metrics, speed = self.last, self.state.tracker.summary()
        took_steps = self.state.step >= self.first_step
        if took_steps:
            metrics = metrics | gather_metrics(speed, self.state, self.device) | (planned or {})
            if self.settings.memory_snapshot:
                dump_memory(self.folder)
        elif metrics and "final" not in metrics:  # it was killed behind its last checkpoint
            metrics = metrics | with_run_times(speed, self.state) | (planned or {})
        metrics = {key: value for key, value in metrics.items() if key not in NOTES}
        if not self.file:
            return metrics
        if metrics and "final" not in self.last:
            self._write_line(self.file, metrics, samples, final=True)
            self._notify(lambda tracker: tracker.finish(metrics))
        self.bar.close()
        if took_steps:
            job.print0(summarize(metrics, self.file.first, self.state, time.monotonic() - self.began))
        else:
            job.print0(f"done       nothing to train: step {self.state.step:,} of {self.settings.num_steps:,}")
        print_samples(samples)
        return metrics

    def lacks_lines(self) -> bool:
        """On rank 0: whether lines wait in memory, which the disk refused."""
        return self.file is not None and bool(self.file.waiting)

    def check_written(self) -> None:
        """Raises UserError where metrics.jsonl lacks lines at the end of the run."""
        try:
            if self.file:
                self.file.sync()
        except OSError as error:
            raise base.UserError(f"--output-dir: {self.folder}: {error}; its last lines are lost", 1) from error

    def end(self, exit_code: int) -> None:
        """What is left to do where the process ends, however that came; in a thread of its own on rank 0."""
        with contextlib.suppress(OSError):
            self.file.sync()
        with contextlib.suppress(OSError):
            self.described["starts"][-1]["exit_code"] = exit_code  # which torchrun does not pass on
            write_config(self.folder, self.described)
        try:
            page.write_report(self.folder)
        except Exception as error:  # the run has its result
            job.print0(f"report     not written: {base.first_line(error)}")
        for tracker in self.trackers:
            with contextlib.suppress(Exception):
                tracker.close(exit_code)


def freeze_gc() -> None:
    """Lets later garbage collections skip all objects that exist now."""
    gc.collect()
    gc.freeze()
