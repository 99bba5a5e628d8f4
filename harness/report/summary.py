"""The summary: what a run says of its evaluations, its skipped steps and its end, and what can be done with what it
left."""

import contextlib
import math
import os
import pathlib
import sys
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from harness import base, flags, job
from harness import state as states
from harness.report.files import as_json
from harness.report.header import significant
from harness.report.health import Skipped, first_not_finite

MAX_EXPONENT = 709  # the exponential of more overflows a float


# ---- Losses and stories ----------------------------------------------------------------------------------------------


def of_sources(metrics: dict, key: str) -> dict[str, float]:
    """A figure of a line by the sources of the data: `eval_loss/web` and its like under "web"."""
    return {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith(f"{key}/")}


def perplexity(loss: float) -> float:
    """Infinite where a float does not hold it."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf


def with_perplexity(loss: float) -> str:
    value = perplexity(loss)
    return f"{loss:.4f} (perplexity {value:,.2f})" if value < 1e9 else f"{loss:.4f} (perplexity {value:.2g})"


def describe_held_out(metrics: dict) -> str:
    """The held-out losses of a line: of all tokens, of the averaged weights, of each of several sources; empty where it
    has none."""
    if metrics.get("eval_loss") is None:
        return ""
    parts = [f"held-out loss {with_perplexity(metrics['eval_loss'])}"]
    if metrics.get("eval_loss_ema") is not None:
        parts.append(f"of the average {with_perplexity(metrics['eval_loss_ema'])}")
    losses = of_sources(metrics, "eval_loss")
    if len(losses) > 1:
        parts += [f"{source} {loss:.4f}" for source, loss in losses.items()]
    return ", ".join(parts)


def describe_stories(stories: list[dict[str, str]]) -> str:
    return "\n\n".join(story["text"] for story in stories)


class Answer(contextlib.AbstractContextManager):
    """What a run of no step prints, in the place of a log. With --json one object on stdout, and all else on stderr."""

    page = None

    def __init__(self, settings: flags.Settings):
        self.json, self.stdout = settings.json, sys.stdout

    def __enter__(self) -> "Answer":
        if self.json:
            sys.stdout = sys.stderr
        return self

    def __exit__(self, kind, error, trace) -> None:
        sys.stdout = self.stdout

    def say_evaluation(self, run: Any, losses: dict[str, float], tokens: int) -> None:
        """The line of an evaluation, and with --json the object. `tokens` is how many the losses are over.

        Raises:
            UserError: a loss is NaN or infinite.
        """
        settings = run.settings
        step = run.manifest["step"] if run.manifest else None
        problem = first_not_finite({"step": step or 0} | losses, [])
        if problem:
            whose = run.checkpoint or settings.model
            raise base.UserError(f"--eval-interval: the {problem.words} by {whose}", exit_code=1)
        weights = f"step {step:,} of {settings.resume}" if step is not None else settings.model
        size = f"{tokens:,} tokens"
        if settings.chat_loss == "assistant" and any(windows.is_chat for windows in run.data.held_out.values()):
            size += ", of conversations the assistant's alone"
        said = f"{weights} on {settings.describe_dataset()}: {describe_held_out(losses)}, {size}"
        job.say(job.columns({"evaluated": said}))
        if settings.json and dist.get_rank() == 0:
            figures = {"model": settings.model, "step": step, "dataset": settings.describe_dataset(), "tokens": tokens}
            figures |= losses | {"perplexity": perplexity(losses["eval_loss"])}
            print(as_json(figures), file=self.stdout, flush=True)

    def finish(self, stories: list[dict[str, str]], predicted: dict[str, float]) -> dict:
        """Prints the stories; there are no figures."""
        for story in stories:
            job.say_story("\n" + describe_stories([story]))
        return {}


# ---- Skipped steps ---------------------------------------------------------------------------------------------------


def describe_skipped(skipped: list[Skipped], data, folder: pathlib.Path) -> str:
    """Which steps were skipped and why, with the command that shows what the first one trained on. `data` is the record
    of the run's data."""
    first, count = skipped[0], len(skipped)
    steps = base.shortened([f"{step:,}" for step, _ in skipped])
    reasons = base.shortened(list(dict.fromkeys(reason for _, reason in skipped)), 3)
    samples = data.samples_of_step(first.step)
    command = flags.to_paste(job.launcher(), config=folder / "config.json", show_samples=first.step)
    whose = "which" if count == 1 else "the first of which"
    text = f"{'step' if count == 1 else 'steps'} {steps}: {reasons}; {whose} had samples {samples.start:,} to "
    return job.columns({"skipped": f"{text}{samples.stop - 1:,}, shown by: {command}"})


# ---- The end ---------------------------------------------------------------------------------------------------------


def summarize(
    metrics: dict, folder: pathlib.Path, state: states.TrainState, seconds: float, first_loss: float | None
) -> str:
    """The last lines of a run: how much it trained, its averages after warmup, and its own plan beside them. `seconds`
    is how long this start trained, `first_loss` the run's first."""
    lines = {"done": describe_training(metrics, state, seconds)}
    loss = metrics.get("loss")
    if loss is not None and first_loss is not None and loss > first_loss:
        words = f"the loss ended at {loss:,.4f}, above its first, {first_loss:,.4f}"
        lines["worse"] = f"{words}: a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"
    lines["speed"] = describe_speed(metrics)
    epochs = [f"{source} {passes:.1f}" for source, passes in of_sources(metrics, "epochs").items()]
    if epochs:
        lines["sources"] = "epochs of " + ", ".join(epochs)
    kinds = [kind for kind in ("alloc", "reserved") if f"peak_memory_{kind}" in metrics]
    if kinds:
        lines["memory"] = ", ".join(f"{kind} {metrics[f'peak_memory_{kind}']:.2f} GiB" for kind in kinds)
    if "predicted_step_time_ms" in metrics:
        alloc, reserved = (metrics[f"predicted_peak_memory_{kind}"] for kind in ("alloc", "reserved"))
        milliseconds = metrics["predicted_step_time_ms"]
        lines["planned"] = f"alloc {alloc:.2f} GiB, reserved {reserved:.2f} GiB, {milliseconds:,.1f} ms a step"
    lines["files"] = str(folder)
    return "\n" + job.columns(lines, wrap=True)


def describe_training(metrics: dict, state: states.TrainState, seconds: float) -> str:
    """Steps, tokens, time and losses; of a run that branched from another without the other's steps and tokens."""
    steps, tokens = metrics["step"], metrics["tokens_seen"]
    if state.branched_from:
        steps -= state.branched_from["step"]
        tokens -= state.branched_from["tokens"]
    skipped = f" ({metrics['skipped_steps']:,} skipped)" if metrics.get("skipped_steps") else ""
    words = f"{base.counted(steps, 'step')}{skipped}, {tokens:,} tokens in "
    if state.elapsed_before:  # of the starts before, only the time of their steps is known
        seconds = metrics.get("trained_seconds", seconds)
    first = "first " if state.elapsed_before else ""
    words += (
        f"{tqdm.format_interval(seconds)} of training, {tqdm.format_interval(state.elapsed)} since the {first}start"
    )
    if state.branched_from:
        words += f" after step {state.branched_from['step']:,} of {pathlib.Path(state.branched_from['folder']).name}"
    if "loss" in metrics:  # the last step was not skipped
        words += f", loss {metrics['loss']:.4f}"
    held_out = describe_held_out(metrics)
    return f"{words}, {held_out}" if held_out else words


def describe_speed(metrics: dict) -> str:
    """The averages after warmup, as far as they were measured."""
    if "tokens_per_sec" not in metrics:
        return "not measured: no step after the --perf-warmup-steps"
    words = f"{metrics['tokens_per_sec']:,.0f} tok/s, {metrics['tokens_per_sec_per_gpu']:,.0f} a rank"
    words += f", {metrics['step_time_ms']:,.1f} ms a step"
    if "actual_tflops_per_sec" in metrics:
        words += f", {significant(metrics['actual_tflops_per_sec'])} TFLOPS"
    if "mfu_percent" in metrics:
        words += f" of {significant(metrics['theoretical_tflops_total'])}, MFU {metrics['mfu_percent']:.2f} %"
    if "goodput_percent" in metrics:
        words += f", goodput {metrics['goodput_percent']:.1f} %"
    return words


def next_commands(settings: flags.Settings, folder: pathlib.Path, prompt: str, page: pathlib.Path | None) -> str:
    """What can be done with what this run left, as commands to paste.

    Args:
        prompt: what a story may begin with, empty where there is no tokenizer.
        page: of the run, None where it was not written.
    """
    launcher, lines = job.launcher(), {}
    is_saved = base.newest_checkpoint(folder) is not None
    source = {"resume": folder} if is_saved else {"init": "pretrained", "model": settings.export or ""}
    if prompt and (is_saved or settings.export):
        lines["sample"] = flags.to_paste(launcher, num_steps=0, **source, sample_prompt=prompt)
    if is_saved and settings.eval_interval:  # otherwise no text was held out
        lines["evaluate"] = flags.to_paste(launcher, num_steps=0, **source, eval_interval=1)
    if settings.export:
        lines["load"] = f"transformers.AutoModelForCausalLM.from_pretrained({os.path.expanduser(settings.export)!r})"
    elif is_saved:
        lines["export"] = flags.to_paste(launcher, num_steps=0, **source, export=f"{folder}-export")
    if is_saved:
        given = flags.flags_of_run(settings, folder, *flags.LENGTHS, "output_dir", "export", "export_weights")
        longer = {"num_steps": 2 * settings.num_steps}
        if settings.num_tokens:
            longer = {"num_tokens": 2 * settings.num_tokens}
        lines["go on"] = flags.to_paste(launcher, given, **source, **longer)
        if settings.lr_scheduler == "warmup_stable_decay" and settings.decay_steps == 0:
            lines["decay"] = decay_command(settings, folder)
    elif not settings.export:
        lines["kept"] = "no weights: --final-checkpoint or --export DIR keeps them"
    if page:
        lines["report"] = str(page)
    return "\n" + job.columns(lines)


def decay_command(settings: flags.Settings, folder: pathlib.Path) -> str:
    """The command of a branch that decays the learning rate of a run that ended in the stable phase, in a fifth of all
    its steps."""
    given = flags.flags_of_run(settings, folder, *flags.LENGTHS, "decay_steps", "export", "export_weights")
    steps = max(1, settings.num_steps // 4)
    branch = {"resume": folder, "run_name": f"{folder.name}-decayed"}
    return flags.to_paste(job.launcher(), given, **branch, num_steps=settings.num_steps + steps, decay_steps=steps)


def leave_early(run: Any, log: Any, checkpoints: Any, stop: Any) -> int:
    """The last lines of a run that a signal ended, and its exit code."""
    log.write_page()
    lines = {"stopped": f"by {stop.name or 'a signal to another rank'} after step {run.state.step}"}
    if not checkpoints.failures:
        lines["stopped"] += f", saved in {checkpoints.folder}"
        lines["go on"] = job.command(run.settings, run.folder)
    if log.page:
        lines["report"] = str(log.page)
    job.say(job.columns(lines))
    return 1 if checkpoints.failures or log.failed else job.STOPPED
