"""The log of a run: config.json, metrics.jsonl, trackers, console lines and the page.

    with report.Log(settings, state, ...) as log:
        with log.timed_step() as due:
            ...                                 # the optimizer step, counted in the state
            log.keep(result, document_lengths)
        metrics, problem = log.metrics()        # if a log line or a save is due
        log.write(metrics, samples)
        log.finish(samples)

All ranks call these methods, as they contain collectives; only rank 0 writes.
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
from harness import data as corpora
from harness import state as states
from harness.report import page
from harness.report.files import MetricsFile, make_config, write_config
from harness.report.health import StepResult, count_skipped, first_not_finite, read_results, read_routing, read_terms
from harness.report.metrics import EXTRA_KEYS, METRICS, gather_metrics, registered_metrics, with_run_times
from harness.report.profiling import dump_memory, profiling
from harness.report.prometheus import Prometheus
from harness.report.summary import describe_eval_loss, describe_skipped, print_samples, summarize
from harness.report.trackers import Tracker


def open_trackers(args: flags.Args, folder: pathlib.Path) -> list[Tracker]:
    """Open the trackers of a run and its Prometheus endpoint on rank 0; empty on other ranks. Every rank calls this
    before anything is loaded, so that a tracker that cannot work fails early.

    Raises:
        UserError: a package is missing, or the tracker's `__init__` raised it.
    """
    opened: list[Tracker] = []

    def open_each() -> None:
        names = {"none": [], "all": list(flags.TRACKERS)}.get(args.log_with, [args.log_with])
        files = {name: f"harness.report.trackers.{name.replace('-', '_')}" for name in names}
        kinds = {f"--log-with {name}": importlib.import_module(file).TRACKER for name, file in files.items()}
        if args.metrics_port:
            kinds["--metrics-port"] = Prometheus
        for flag, kind in kinds.items():
            try:
                opened.append(kind(args, folder))
            except ImportError as error:
                advice = f"pip install {error.name}, or leave the flag out"
                raise base.UserError(f"{flag}: needs the package {error.name}; {advice}") from error

    base.broadcast_from_rank_0(open_each)
    return opened


class Log(contextlib.AbstractContextManager):
    """The log of one start of a run. Inside its context garbage is collected at log lines only: a collection on one
    rank in the middle of a step makes all ranks wait."""

    def __init__(
        self,
        *,
        settings: flags.Settings,
        state: states.TrainState,
        data: corpora.TrainingData,
        folder: pathlib.Path,
        device: torch.device,
        trackers: list[Tracker],
        flops_by_length: np.ndarray,
        changed: str,
        has_room: bool,
    ):
        """Read the run's files and start its trackers, on rank 0.

        Args:
            flops_by_length: FLOPs per token, by the length of its document; zeros if unknown.
            changed: the flags that differ from the resumed checkpoint's, in words.
            has_room: True if the disk has room for a checkpoint.

        Raises:
            UserError: metrics.jsonl cannot be read, or a tracker does not start.
        """
        self.settings, self.state, self.data, self.device = settings, state, data, device
        self.folder, self.trackers, self.flops_by_length = folder, trackers, flops_by_length
        self.first_step, self.has_room = self.state.step + 1, has_room
        self.results: list[StepResult] = []  # since the last call of `metrics`
        self.skipped: dict[int, str] = {}  # {step: reason} since the last line
        self.document_lengths = np.empty(0, np.int64)  # tokens of each document of the last step on this rank
        self.speed: dict[str, float] = {}  # of the interval that ended with this step
        self.learning_rate = 0.0
        self.last: dict = {}  # metrics of the last line
        self.profile = contextlib.ExitStack()
        self.file: MetricsFile | None = None  # on rank 0
        if dist.get_rank() == 0:
            self._open(changed)
        shown = self.file is not None and job.is_terminal(sys.stderr)
        self.bar = job.step_bar(self.settings.num_steps, self.state.step, shown=shown)
        self.began = time.monotonic()

    @base.working()
    def _open(self, changed: str) -> None:
        try:
            self.config = make_config(self.settings, self.folder, self.state, self.data.record, changed)
            is_complete = self.state.step >= self.settings.num_steps
            self.file = MetricsFile(self.folder, self.config, self.state.step, is_complete)
        except OSError as error:
            raise base.UserError(
                f"--output-dir: {error.filename or 'metrics.jsonl'} cannot be read ({error.strerror})", 1
            ) from error
        self.last = self.file.last
        locations = {"run": str(self.folder)}
        for tracker in self.trackers:
            try:
                locations[tracker.name] = tracker.start(self.config, self.state)
            except Exception as error:
                what = f"--log-with {self.settings.log_with}: {tracker.name} does not start ({base.first_line(error)})"
                raise base.UserError(f"{what}; --log-with none leaves it out", 1) from error
        if self.settings.profile:
            locations["profile"] = str(self.folder / "profile" / "rank-0.json")
        job.print0(job.columns(locations) + "\n")
        job.at_exit(self.end)

    def __enter__(self) -> "Log":
        freeze_gc()
        gc.disable()
        if self.settings.compile:
            job.print0("compile    layers are compiled in the first step, which takes minutes for large models")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        gc.enable()
        if error is None:  # after an error another rank may be gone, and closing a profile waits for all
            self.profile.close()
        self.bar.close()

    # ---- A step ------------------------------------------------------------------------------------------------------

    def due_at(self, step: int) -> job.Actions:
        return job.due(self.settings, step, self.first_step, self.has_room, self.data.ends_epoch)

    @contextlib.contextmanager
    def timed_step(self) -> Iterator[job.Actions]:
        """Time the next optimizer step, and profile it if that is due. Yields what is due. Inside, call `keep` and
        advance the state."""
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
                freeze_gc()  # the compiler made many objects
        self.speed = {}
        if not due.profiled:
            tokens = self.state.tokens - tokens
            # Exact for each interval and for streams, unlike a mean over the corpus. Each rank multiplies the FLOPs of
            # its group's documents by the number of groups; a log line has the mean over ranks.
            groups = self.settings.groups(dist.get_world_size())
            lengths = self.document_lengths
            flops = groups * float(lengths @ self.flops_by_length[lengths])
            self.speed = self.state.tracker.step(tokens, flops / tokens, synchronize=due.log)

    def keep(self, result: StepResult, document_lengths: np.ndarray) -> None:
        """Keep the result of a step, on the device until `metrics` reads it, and the tokens of each document of it."""
        self.results.append(result)
        self.document_lengths = document_lengths

    # ---- A line ------------------------------------------------------------------------------------------------------

    def metrics(self) -> tuple[dict, str]:
        """(metrics after the current step, a problem that ends the run, or ""); those of the last line if there was no
        step since. Problems are NaN or infinity in a loss since the last call or in this step's gradient norm or
        update, and too many skipped steps. A skipped step has no loss and no gradient norm."""
        if not self.results:
            return self.last, ""
        state, steps = self.state, read_results(self.results)
        last_terms = read_terms(self.results[-1]) | read_routing(self.results[-1])
        with state.tracker.paused():
            registered = registered_metrics(state.model, self.results[-1], self.device)
        self.results.clear()
        skipped, too_many = count_skipped(state, steps, self.settings.max_skipped)
        self.skipped |= skipped
        if skipped:
            job.print0(describe_skipped(skipped, self.data.record, self.folder))
        metrics: dict[str, Any] = {"step": state.step}
        if not steps[-1].skipped:
            metrics |= {"loss": steps[-1].loss, "grad_norm": steps[-1].grad_norm} | last_terms
        metrics |= registered | {"learning_rate": self.learning_rate, "tokens_seen": state.tokens}
        metrics["skipped_steps"] = state.skipped_steps
        problem = first_not_finite(metrics, steps)
        if too_many and not problem:
            problem = state.describe_update_fault() or too_many
        metrics |= gather_metrics(self.speed, state, self.device)
        return metrics | self.data.metrics(state.samples, state.tokens), problem

    def needs_evaluation(self) -> bool:
        """True on rank 0 if an earlier start logged and saved this step without its eval loss, in the line or, with
        --keep-best, in the checkpoint."""
        is_recorded = self.state.eval_loss is not None or not self.settings.keep_best
        was_evaluated = "eval_loss" in self.last and is_recorded
        return self.last.get("step") == self.state.step and not was_evaluated

    def write(self, metrics: dict, samples: list[dict[str, Any]] | None = None) -> None:
        """Write a log line to metrics.jsonl, trackers and console, with generated `samples`. Metrics of an evaluation
        alone are merged into the last line."""
        job.enter_phase("log")
        self.last = metrics if "skipped_steps" in metrics else self.last | metrics
        if "eval_loss" in metrics:
            with self.state.tracker.paused():
                freeze_gc()  # the compiler may have run for forward passes without gradients
        else:
            gc.collect()
        if self.file is None:
            return
        self._write_line(self.file, metrics, samples)
        self._notify(lambda tracker: tracker.log(metrics))
        self._print_line(metrics)
        print_samples(samples or [])

    def _write_line(self, file: MetricsFile, metrics: dict, samples: list | None, **extra: Any) -> None:
        """Write a line of metrics.jsonl with its `EXTRA_KEYS`; an evaluation alone replaces the line of its step."""
        if samples:
            extra["samples"] = samples
        if self.skipped:
            extra["skipped"] = [{"step": step, "reason": reason} for step, reason in self.skipped.items()]
            self.skipped = {}
        try:
            if "skipped_steps" in metrics:
                file.write(metrics | extra)
            else:
                file.replace_last(metrics | extra)
        except OSError as error:
            raise base.UserError(f"--output-dir: {self.folder} cannot be written ({error.strerror})", 1) from error

    def _notify(self, call: Callable[[Tracker], None]) -> None:
        """Call each tracker, and drop one that fails."""
        for tracker in list(self.trackers):
            try:
                with base.working():  # a tracker may wait for the network
                    call(tracker)
            except Exception as error:  # whatever it is, the run has its own metrics.jsonl
                self.trackers.remove(tracker)
                where = f"{tracker.name}, from step {self.state.step} on"
                job.print0(f"failed     {where}: {base.first_line(error)}; the run continues without it")

    def _print_line(self, metrics: dict) -> None:
        """Print the console line, and update the progress bar."""
        step, num_steps = metrics["step"], self.settings.num_steps
        parts = []
        if "loss" in metrics:
            parts = [f"loss {metrics['loss']:.4f}", f"grad {metrics['grad_norm']:.2f}"]
        elif "skipped_steps" in metrics:
            parts = ["skipped"]
        mfu_text = f", MFU {metrics['mfu_percent']:.1f} %" if "mfu_percent" in metrics else ""
        if parts:  # a step, not an evaluation alone
            self.bar.set_postfix_str(parts[0] + mfu_text, refresh=False)
            parts.append(f"lr {metrics['learning_rate']:.1e}")
        parts += [f"{key} {metrics[key]:.4g}" for key, row in METRICS.items() if row.on_console and key in metrics]
        if "step_time_ms" in metrics:
            parts.append(self.state.tracker.get_print_message(metrics))
            parts.append(f"eta {tqdm.format_interval((num_steps - step) * metrics['step_time_ms'] / 1000)}")
        if eval_text := describe_eval_loss(metrics):
            parts.append(eval_text)
        name = f"step {step:>{len(str(num_steps))}}/{num_steps}"
        job.print0("  ".join([name, *parts]))

    def sync(self) -> None:
        """Write and fsync all lines so far, on rank 0, before a checkpoint is published.

        Raises:
            OSError: the disk refused it.
        """
        self.file.sync()

    # ---- The end -----------------------------------------------------------------------------------------------------

    def finish(self, samples: list[dict[str, Any]], planned: dict[str, float] | None = None) -> dict:
        """Write the last line and print the summary of a complete run. Returns the metrics of that line.

        `planned` are metrics for the last line only. A run that was complete before keeps its last line.
        """
        metrics, speed = self.last, self.state.tracker.summary()
        took_steps = self.state.step >= self.first_step
        if took_steps:
            metrics = metrics | gather_metrics(speed, self.state, self.device) | (planned or {})
            if self.settings.memory_snapshot:
                dump_memory(self.folder)
        elif metrics and "final" not in metrics:  # killed after its last checkpoint
            metrics = metrics | with_run_times(speed, self.state) | (planned or {})
        metrics = {key: value for key, value in metrics.items() if key not in EXTRA_KEYS}
        if not self.file:
            return metrics
        if metrics and "final" not in self.last:
            self._write_line(self.file, metrics, samples, final=True)
            self._notify(lambda tracker: tracker.finish(metrics))
        self.bar.close()
        if took_steps:
            job.print0(summarize(metrics, self.file.first, self.state, time.monotonic() - self.began))
        else:
            steps = f"step {self.state.step:,} of {self.settings.num_steps:,}"
            if self.state.step > self.settings.num_steps:
                steps += "; --num-steps counts the steps before a resume too"
            job.print0(f"done       nothing to train: {steps}")
        print_samples(samples)
        return metrics

    def has_unwritten_lines(self) -> bool:
        """True on rank 0 if lines that the disk refused wait in memory."""
        return self.file is not None and bool(self.file.waiting)

    def check_written(self) -> None:
        """Raise UserError if metrics.jsonl lacks lines at the end of the run."""
        try:
            if self.file:
                self.file.sync()
        except OSError as error:
            raise base.UserError(f"--output-dir: {self.folder}: {error}; its last lines are lost", 1) from error

    def end(self, exit_code: int) -> None:
        """Complete config.json, the page and the trackers. Called on rank 0 whenever the process ends, in a thread. A
        start without a line or a save leaves the files of earlier ones."""
        if self.file.has_begun():
            self._end_files(exit_code)
        for tracker in self.trackers:
            with contextlib.suppress(Exception):
                tracker.close(exit_code)

    def _end_files(self, exit_code: int) -> None:
        with contextlib.suppress(OSError):
            self.file.sync()
        with contextlib.suppress(OSError):
            self.config["starts"][-1]["exit_code"] = exit_code  # torchrun does not pass it on
            write_config(self.folder, self.config)
        try:
            page.write_report(self.folder)
        except Exception as error:  # a page is not worth a run
            job.print0(f"report     not written: {base.first_line(error)}")


def freeze_gc() -> None:
    """Make later garbage collections skip all objects that exist now."""
    gc.collect()
    gc.freeze()
