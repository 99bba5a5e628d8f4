"""Summary: the console lines of evaluations, skipped steps and the end of a run, with commands to continue it."""

import contextlib
import math
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import torch.distributed as dist
from tqdm import tqdm

from harness import base, flags, job
from harness import data as corpora
from harness import state as states
from harness.report.files import as_json, describe_end
from harness.report.health import ADVICE

# ---- Losses and samples ----------------------------------------------------------------------------------------------


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 709 else math.inf


def with_perplexity(loss: float) -> str:
    value = perplexity(loss)
    return f"{loss:.4f} (perplexity {value:,.2f})" if value < 1e9 else f"{loss:.4f} (perplexity {value:.2g})"


def describe_eval_loss(metrics: dict) -> str:
    """The eval loss of a line and that of each of several sources; empty without an evaluation."""
    if "eval_loss" not in metrics:
        return ""
    words = f"eval loss {with_perplexity(metrics['eval_loss'])}"
    for name, loss in metrics.items():
        if name.startswith("eval_loss/"):
            words += f", {name.removeprefix('eval_loss/')} {loss:.4f}"
    return words


def print_samples(samples: list[dict[str, Any]]) -> None:
    """Print generated samples, with one blank line for several: early in training most lines can be blank."""
    if samples:
        texts = "\n" + "\n\n".join(f"{sample['text']} ({describe_end(sample)})" for sample in samples)
        job.print0(re.sub(r"\n(\s*\n)+", "\n\n", texts))


@contextlib.contextmanager
def keep_stdout_for_json(args: flags.Args) -> Iterator[TextIO]:
    """Yield stdout. With --json, everything printed inside goes to stderr, so that stdout has one object only."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        yield stdout


def print_evaluation(
    settings: flags.Settings,
    data: corpora.TrainingData,
    state: states.TrainState | None,
    losses: dict[str, float],
    tokens: int,
    stdout: TextIO,
) -> None:
    """Print the result of an evaluation without training, and with --json its object on `stdout`.

    Args:
        data: the data of the evaluation.
        state: of the evaluated checkpoint or average of checkpoints; None for pretrained weights.
        losses: `eval_loss`, and `eval_loss/SOURCE` of several sources.
        tokens: number of tokens in the losses.

    Raises:
        UserError: a loss is NaN or infinite.
    """
    dataset, step = settings.describe_dataset(), None
    if flags.is_eval_dataset(settings.eval_split):
        dataset = str(settings.eval_split)
    weights = settings.model
    if state:
        step = None if state.averaged_steps else state.step
        weights = f"{state.describe_steps()} of {settings.resume}"
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise base.UserError(f"--eval-interval: {name.replace('_', ' ')} is {loss} for {weights}", 1)
    size = f"{tokens:,} tokens"
    if any(sequences.has_loss_mask for sequences in data.eval_sets.values()):
        size += " with a loss"
    if left_out := sum(sequences.left_out for sequences in data.eval_sets.values()):
        size += f"; left out {base.counted(left_out, 'sequence')} without any"
    lines = {"evaluated": f"{weights} on {dataset}: {describe_eval_loss(losses)}, {size}"}
    if "eval data" in data.header:
        lines["eval data"] = data.header["eval data"]
    job.print0(job.columns(lines))
    if settings.json and dist.get_rank() == 0:
        result = {"model": settings.model, "step": step, "dataset": dataset, "tokens": tokens} | losses
        if state and state.averaged_steps:
            result["averaged_steps"] = state.averaged_steps
        result["perplexity"] = perplexity(losses["eval_loss"])
        print(as_json(result), file=stdout, flush=True)


# ---- Skipped steps ---------------------------------------------------------------------------------------------------


def describe_skipped(reasons: dict[int, str], data: corpora.DataRecord, folder: pathlib.Path) -> str:
    """The line of skipped steps from {step: reason}, with a command that shows the samples of the first one. `data` is
    the record of the run's data."""
    first = next(iter(reasons))
    steps = base.shortened([f"{step:,}" for step in reasons])
    words = base.shortened(list(dict.fromkeys(reasons.values())), 3)
    samples = data.samples_of_step(first)
    command = flags.shell_command(job.launcher(), config=folder / "config.json", show_samples=first)
    where = f"step {first:,} had samples {samples.start:,} to {samples.stop - 1:,}"
    return job.columns({"skipped": f"step {steps}: {words}; {where}, shown by: {command}"})


# ---- The end ---------------------------------------------------------------------------------------------------------


def summarize(metrics: dict, first: dict, state: states.TrainState, seconds: float) -> str:
    """The last lines of a run: steps, tokens and losses, averages after warmup, and its own plan. `first` is its first
    line of metrics.jsonl, `seconds` the duration of this start."""
    lines = {"done": describe_training(metrics, state, seconds)}
    loss, first_loss = metrics.get("loss"), first.get("loss")
    if loss and first_loss and loss > first_loss:
        lines["worse"] = f"the last loss, {loss:,.4f}, is above the first, {first_loss:,.4f}: {ADVICE}"
    lines["speed"] = "not measured: no step came after --perf-warmup-steps"
    if "step_time_ms" in metrics:
        step_text = f"{metrics['step_time_ms']:,.1f} ms a step  goodput {metrics['goodput_percent']:.1f} %"
        lines["speed"] = f"{state.tracker.get_print_message(metrics)}  {step_text}"
    kinds = [kind for kind in ("alloc", "reserved") if f"peak_memory_{kind}" in metrics]
    if kinds:
        lines["memory"] = ", ".join(f"{kind} {metrics[f'peak_memory_{kind}']:.2f} GiB" for kind in kinds)
    if "predicted_step_time_ms" in metrics:
        alloc, reserved = (metrics[f"predicted_peak_memory_{kind}"] for kind in ("alloc", "reserved"))
        milliseconds = metrics["predicted_step_time_ms"]
        lines["planned"] = f"alloc {alloc:.2f} GiB, reserved {reserved:.2f} GiB, {milliseconds:,.1f} ms a step"
    return "\n" + job.columns(lines)


def describe_training(metrics: dict, state: states.TrainState, seconds: float) -> str:
    """Steps, tokens, time and losses of a run. Times leave out another run whose checkpoint it started from."""
    words = base.counted(metrics["step"], "step")
    if metrics["skipped_steps"]:
        words += f" ({metrics['skipped_steps']:,} skipped)"
    which = "first " if state.elapsed_before else ""
    trained = tqdm.format_interval(metrics.get("trained_seconds", seconds))  # of all starts
    words += f", {metrics['tokens_seen']:,} tokens, {trained} of training, "
    words += f"{tqdm.format_interval(state.elapsed)} since the {which}start"
    if "loss" in metrics:  # unless the last step was skipped
        words += f", loss {metrics['loss']:.4f}"
    eval_text = describe_eval_loss(metrics)
    return f"{words}, {eval_text}" if eval_text else words


def next_commands(settings: flags.Settings, folder: pathlib.Path, step: int, metrics: dict) -> str:
    """Shell commands to export and to resume a run that ended after `step`. `metrics` are those of its last line."""
    launcher, newest = job.launcher(), base.newest_checkpoint(folder)
    lines = {}
    if not (newest or settings.export):
        reason = "--final-checkpoint or --export DIR keeps them"
        if not metrics:
            reason = "nothing was trained"
        elif settings.saves_final_checkpoint():
            reason = "no checkpoint could be saved"
        lines["kept"] = f"no weights: {reason}"
    if "best_step" in metrics:
        best = folder / "checkpoints" / base.checkpoint_name(metrics["best_step"])
        merged = {"export_weights": settings.export_weights} if settings.export_weights else None
        export = flags.shell_command(launcher, merged, num_steps=0, resume=best, export=f"{folder}-best")
        lines["best"] = f"{best.name}, eval loss {metrics['best_eval_loss']:.4f}, exported by: {export}"
        lines["from best"] = f"a new run starts with --resume {best} --run-name NAME"
    if newest:
        if newest.name != base.checkpoint_name(step):
            lines["kept"] = f"{newest.name}, used by these commands: step {step:,} was not saved"
        if not settings.export:
            lines["export"] = flags.shell_command(launcher, num_steps=0, resume=folder, export=f"{folder}-export")
        explicit = flags.run_flags(settings, *flags.LENGTHS, "output_dir", "export", "export_weights")
        length = next(name for name in ("num_tokens", "num_epochs", "num_steps") if getattr(settings, name))
        done = {"num_steps": step, "num_tokens": metrics.get("tokens_seen", 0)}.get(length, 0)
        explicit[length] = 2 * getattr(settings, length)
        if explicit[length] <= done:  # this start had nothing to train
            explicit[length] = 2 * done
        lines["resume"] = flags.shell_command(launcher, explicit, resume=folder)
    return "\n" + job.columns(lines | {"report": str(folder / "report.html")})


def describe_stop(
    settings: flags.Settings, folder: pathlib.Path, step: int, signal: str, saved_in: pathlib.Path | None
) -> str:
    """The last lines of a run that a signal stopped after `step`.

    Args:
        signal: its name, empty if another rank got it.
        saved_in: the folder of the run's checkpoints, None if the step could not be saved.
    """
    lines = {"stopped": f"by {signal or 'a signal to another rank'} after step {step}"}
    if saved_in:
        lines["stopped"] += f", saved in {saved_in}"
        lines["resume"] = job.command(settings, folder)
    lines["report"] = str(folder / "report.html")
    return job.last_lines(lines)
