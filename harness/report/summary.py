"""The summary: what a run says of its evaluations, its skipped steps and its end, and what can be done with what it
left."""

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
    """Infinite where a float does not hold it."""
    return math.exp(loss) if loss < 709 else math.inf


def with_perplexity(loss: float) -> str:
    value = perplexity(loss)
    return f"{loss:.4f} (perplexity {value:,.2f})" if value < 1e9 else f"{loss:.4f} (perplexity {value:.2g})"


def describe_held_out(metrics: dict) -> str:
    """The held-out losses of a line: of all tokens, of each of several sources; empty where it
    has none."""
    if "eval_loss" not in metrics:
        return ""
    words = f"held-out loss {with_perplexity(metrics['eval_loss'])}"
    for name, loss in metrics.items():
        if name.startswith("eval_loss/"):
            words += f", {name.removeprefix('eval_loss/')} {loss:.4f}"
    return words


def print_samples(samples: list[dict[str, Any]]) -> None:
    """Prints what the model wrote, of several blank lines in a row one: early in training most lines can be blank."""
    if samples:
        texts = "\n" + "\n\n".join(f"{sample['text']} ({describe_end(sample)})" for sample in samples)
        job.print0(re.sub(r"\n(\s*\n)+", "\n\n", texts))


@contextlib.contextmanager
def json_alone(settings: flags.Args) -> Iterator[TextIO]:
    """Yields stdout. Inside, with --json, all that is printed goes to stderr: one object is alone on stdout."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if settings.json else contextlib.nullcontext():
        yield stdout


def print_evaluation(
    settings: flags.Settings,
    data: Any,
    state: states.TrainState | None,
    losses: dict[str, float],
    tokens: int,
    stdout: TextIO,
) -> None:
    """The line of an evaluation without training, and with --json its object, on `stdout`.

    Args:
        data: what was evaluated on, a `data.TrainingData`.
        state: of the checkpoint that was evaluated, or of a mean; None for pretrained weights.
        tokens: how many the losses are over.

    Raises:
        UserError: a loss is NaN or infinite.
    """
    dataset, step = settings.describe_dataset(), None
    if flags.is_place(settings.eval_split):
        dataset = str(settings.eval_split)
    weights = settings.model
    if state:
        step = None if state.averaged_steps else state.step
        weights = f"{state.describe_steps()} of {settings.resume}"
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise base.UserError(f"--eval-interval: {name.replace('_', ' ')} became {loss} by {weights}", 1)
    size = f"{tokens:,} tokens"
    if any(sequences.has_mask for sequences in data.eval_data.values()):
        size += ", those that count in the loss"
    if left_out := sum(sequences.left_out for sequences in data.eval_data.values()):
        size += f"; left out {base.counted(left_out, 'sequence')} without one"
    lines = {"evaluated": f"{weights} on {dataset}: {describe_held_out(losses)}, {size}"}
    if "held out" in data.header:
        lines["held out"] = data.header["held out"]
    job.print0(job.columns(lines))
    if settings.json and dist.get_rank() == 0:
        figures = {"model": settings.model, "step": step, "dataset": dataset, "tokens": tokens} | losses
        if state and state.averaged_steps:
            figures["averaged_steps"] = state.averaged_steps
        figures["perplexity"] = perplexity(losses["eval_loss"])
        print(as_json(figures), file=stdout, flush=True)


# ---- Skipped steps ---------------------------------------------------------------------------------------------------


def describe_skipped(reasons: dict[int, str], data: corpora.DataRecord, folder: pathlib.Path) -> str:
    """Which steps were skipped and why, with the command that shows what the first one trained on. `data` is the record
    of the run's data."""
    first = next(iter(reasons))
    steps = base.shortened([f"{step:,}" for step in reasons])
    words = base.shortened(list(dict.fromkeys(reasons.values())), 3)
    samples = data.samples_of_step(first)
    command = flags.shell_command(job.launcher(), config=folder / "config.json", show_samples=first)
    where = f"step {first:,} had samples {samples.start:,} to {samples.stop - 1:,}"
    return job.columns({"skipped": f"step {steps}: {words}; {where}, shown by: {command}"})


# ---- The end ---------------------------------------------------------------------------------------------------------


def summarize(metrics: dict, first: dict, state: states.TrainState, seconds: float) -> str:
    """The last lines of a run: how much it trained, its averages after warmup, and its own plan beside them. `first`
    is its first line, `seconds` how long this start trained."""
    lines = {"done": describe_training(metrics, state, seconds)}
    loss, first_loss = metrics.get("loss"), first.get("loss")
    if loss and first_loss and loss > first_loss:
        lines["worse"] = f"the loss ended at {loss:,.4f}, above its first, {first_loss:,.4f}: {ADVICE}"
    lines["speed"] = "not measured: no step after the --perf-warmup-steps"
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
    """Steps, tokens, time and losses; of a run that goes on from another one's checkpoint its own time alone."""
    words = base.counted(metrics["step"], "step")
    if metrics["skipped_steps"]:
        words += f" ({metrics['skipped_steps']:,} skipped)"
    which = "first " if state.elapsed_before else ""
    trained = tqdm.format_interval(metrics.get("trained_seconds", seconds))  # all starts' steps, as the metrics have it
    words += f", {metrics['tokens_seen']:,} tokens, {trained} of training, "
    words += f"{tqdm.format_interval(state.elapsed)} since the {which}start"
    if "loss" in metrics:  # the last step was not skipped
        words += f", loss {metrics['loss']:.4f}"
    held_out = describe_held_out(metrics)
    return f"{words}, {held_out}" if held_out else words


def next_commands(settings: flags.Settings, folder: pathlib.Path, step: int, metrics: dict) -> str:
    """What can be done with what this run left after `step`, as commands to paste: go on, and export. `metrics` are the
    figures of its last line."""
    launcher, newest = job.launcher(), base.newest_checkpoint(folder)
    lines = {}
    if not (newest or settings.export):
        lines["kept"] = "no weights: --final-checkpoint or --export DIR keeps them"
    if "best_step" in metrics:
        best = folder / "checkpoints" / base.checkpoint_name(metrics["best_step"])
        as_asked = {"export_weights": settings.export_weights} if settings.export_weights else None
        export = flags.shell_command(launcher, as_asked, num_steps=0, resume=best, export=f"{folder}-best")
        lines["best"] = f"{best.name}, held-out loss {metrics['best_eval_loss']:.4f}, exported by: {export}"
        lines["from best"] = f"a new run goes on with --resume {best} --run-name NAME"
    if newest:
        if newest.name != base.checkpoint_name(step):
            lines["kept"] = f"{newest.name}, which these commands take: step {step:,} was not saved"
        if not settings.export:
            lines["export"] = flags.shell_command(launcher, num_steps=0, resume=folder, export=f"{folder}-export")
        given = flags.run_flags(settings, *flags.LENGTHS, "output_dir", "export", "export_weights")
        length = next(name for name in ("num_tokens", "num_epochs", "num_steps") if getattr(settings, name))
        given[length] = 2 * getattr(settings, length)
        lines["go on"] = flags.shell_command(launcher, given, resume=folder)
    return "\n" + job.columns(lines | {"report": str(folder / "report.html")})


def describe_stop(
    settings: flags.Settings, folder: pathlib.Path, step: int, signal: str, saved_in: pathlib.Path | None
) -> str:
    """The last lines of a run that a signal ended after `step`. `signal` is empty where another rank got it, `saved_in`
    the folder of its checkpoints, None where the step could not be saved."""
    lines = {"stopped": f"by {signal or 'a signal to another rank'} after step {step}"}
    if saved_in:
        lines["stopped"] += f", saved in {saved_in}"
        lines["go on"] = job.command(settings, folder)
    lines["report"] = str(folder / "report.html")
    return job.last_lines(lines)
