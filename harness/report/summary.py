"""The summary: the last lines of a run, and what can be done with what it left."""

import contextlib
import json
import math
import os
import pathlib
import sys

import torch.distributed as dist
from tqdm import tqdm

from harness import job
from harness.base.errors import UserError
from harness.base.saved import newest, read_config
from harness.base.text import counted
from harness.flags.commands import flags_of_run, to_paste
from harness.flags.parser import LENGTHS
from harness.flags.settings import Settings
from harness.job import columns, replace_file, say
from harness.report.figure_list import figures_in, of_each_source
from harness.report.header import significant
from harness.report.metrics_file import as_json, metrics_text
from harness.report.run_files import read_metrics
from harness.report.trackers import Trackers
from harness.state.train_state import TrainState

SAVE_MINUTES = 15  # between two checkpoints, as advised to a run that saves none
MAX_EXPONENT = 709  # the exponential of more overflows a float


@contextlib.contextmanager
def only_json_on_stdout(settings: Settings):
    """With --json every other line goes to stderr; yields the real stdout."""
    stdout = sys.stdout
    if not settings.json:
        yield stdout
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield stdout


def say_evaluation(
    settings: Settings, held_out: dict, losses: dict[str, float], tokens: int, step: int | None, stdout
) -> None:
    """The line of an evaluation without training, and with --json its object on stdout. `held_out` are the windows of
    each source, `tokens` how many tokens the losses are over."""
    weights = f"step {step:,} of {settings.resume}" if step is not None else settings.model
    size = f"{tokens:,} tokens"
    if settings.chat_loss == "assistant" and any(windows.is_chat for windows in held_out.values()):
        size += ", of conversations the assistant's alone"
    values = [describe_held_out(losses), *describe_held_out_average(losses), *describe_held_out_sources(losses)]
    result = ", ".join([*values, size])
    say(columns({"evaluated": f"{weights} on {settings.describe_dataset()}: {result}"}))
    if settings.json and dist.get_rank() == 0:
        figures = {"model": settings.model, "step": step, "dataset": settings.describe_dataset(), "tokens": tokens}
        figures |= losses | {"perplexity": perplexity(losses["eval_loss"])}
        print(json.dumps(as_json(figures), allow_nan=False), file=stdout, flush=True)


def describe_stories(stories: list[dict[str, str]]) -> str:
    return "\n\n".join(story["text"] for story in stories)


def perplexity(loss: float) -> float:
    """Infinite where a float does not hold it."""
    return math.exp(loss) if loss < MAX_EXPONENT else math.inf


def describe_perplexity(loss: float) -> str:
    value = perplexity(loss)
    return f"perplexity {value:,.2f}" if value < 1e9 else f"perplexity {value:.2g}"


def describe_held_out(metrics: dict) -> str:
    """The held-out loss of a log line; empty where it has none."""
    loss = metrics.get("eval_loss")
    if loss is None:
        return ""
    return f"held-out loss {loss:.4f} ({describe_perplexity(loss)})"


def describe_held_out_average(metrics: dict) -> list[str]:
    """The held-out loss of the averaged weights in a log line; none without --ema."""
    if metrics.get("eval_loss_ema") is None:
        return []
    loss = metrics["eval_loss_ema"]
    return [f"of the average {loss:.4f} ({describe_perplexity(loss)})"]


def describe_held_out_sources(metrics: dict) -> list[str]:
    """The held-out loss of each source in a log line, `web 2.0104`; none where there is one source."""
    losses = of_each_source(metrics, "eval_loss")
    if len(losses) < 2:
        return []
    return [f"{source} {loss:.4f}" for source, loss in losses.items()]


def finish_metrics(settings: Settings, folder: pathlib.Path, state: TrainState) -> dict:
    """The last line of a run that took all its steps. Where a kill came between the last checkpoint and that line, it
    is written now, to the trackers too.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    path = folder / "metrics.jsonl"
    try:
        lines = read_metrics(path)
        if lines and "final" not in lines[-1]:
            lines.append(lines[-1] | state.tracker.summary() | {"final": True})
            replace_file(path, metrics_text(lines))
            Trackers(settings, folder, state, read_config(folder)).summarize(figures_in(lines[-1]))
    except OSError as error:
        raise UserError(f"--output-dir: {path} cannot be written ({error.strerror})", 1) from error
    return lines[-1] if lines else {}


def summarize(metrics: dict, folder: pathlib.Path, state: TrainState) -> str:
    """The last lines of a run: how much it trained, its averages after warmup, and its own plan beside them."""
    lines = {"done": describe_training(metrics, state)}
    worse = describe_worse_end(folder)
    if worse:
        lines["worse"] = worse
    lines["speed"] = describe_speed(metrics)
    sources = describe_sources(metrics)
    if sources:
        lines["sources"] = sources
    prefix = "peak_memory_"
    memory = [f"{key.removeprefix(prefix)} {gib:.2f} GiB" for key, gib in metrics.items() if key.startswith(prefix)]
    if memory:
        lines["memory"] = ", ".join(memory)
    if "predicted_step_time_ms" in metrics:
        alloc, reserved = (metrics[f"predicted_peak_memory_{kind}"] for kind in ("alloc", "reserved"))
        milliseconds = metrics["predicted_step_time_ms"]
        lines["planned"] = f"alloc {alloc:.2f} GiB, reserved {reserved:.2f} GiB, {milliseconds:,.1f} ms a step"
    return "\n" + columns(lines, wrap=True) + "\n" + columns({"files": str(folder)})


def describe_training(metrics: dict, state: TrainState) -> str:
    """Steps, tokens, time and losses; of a run that branched from another without the other's steps and tokens."""
    steps, tokens = metrics["step"], metrics["tokens_seen"]
    if state.branched_from:
        steps -= state.branched_from["step"]
        tokens -= state.branched_from["tokens"]
    skipped = f" ({metrics['skipped_steps']:,} skipped)" if metrics.get("skipped_steps") else ""
    words = f"{counted(steps, 'step')}{skipped}, {tokens:,} tokens in "
    elapsed = tqdm.format_interval(state.elapsed)
    if state.elapsed_before and "trained_seconds" in metrics:
        words += f"{tqdm.format_interval(metrics['trained_seconds'])} of training, {elapsed} since the first start"
    else:
        words += elapsed
    if state.branched_from:
        words += f" after step {state.branched_from['step']:,} of {pathlib.Path(state.branched_from['folder']).name}"
    if "loss" in metrics:  # the last step was not skipped
        words += f", loss {metrics['loss']:.4f}"
    held_out = describe_held_out(metrics)
    if held_out:
        words = ", ".join([words, held_out, *describe_held_out_average(metrics), *describe_held_out_sources(metrics)])
    return words


def describe_worse_end(folder: pathlib.Path) -> str:
    """A warning where the last loss of a run is above its first one; empty where it is not. As long as metrics.jsonl is
    there, which rank 0 writes."""
    losses = [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line.get("loss") is not None]
    if not losses or losses[-1] <= losses[0]:
        return ""
    words = f"the loss ended at {losses[-1]:,.4f}, above its first, {losses[0]:,.4f}"
    return f"{words}: a lower --lr, more --warmup-steps or --max-grad-norm 1 may help"


def describe_sources(metrics: dict) -> str:
    """How often each source of the data was passed over: `web 1.0 epochs, code 3.2`; empty where that is not known."""
    passes = [f"{source} {epochs:.1f}" for source, epochs in of_each_source(metrics, "epochs").items()]
    if not passes:
        return ""
    passes[0] += " epochs"
    return ", ".join(passes)


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
    if "mfu_documents_percent" in metrics:
        words += f" ({metrics['mfu_documents_percent']:.2f} % by documents)"
    if "goodput_percent" in metrics:
        words += f", goodput {metrics['goodput_percent']:.1f} %"
    return words


def next_commands(settings: Settings, folder: pathlib.Path, prompt: str, shown: pathlib.Path | None) -> str:
    """What can be done with what this run left, as commands to paste.

    Args:
        prompt: what a story may begin with, empty where there is no tokenizer.
        shown: the page of the run, None where it was not written.
    """
    launcher, lines = job.launcher(), {}
    saved = newest(folder) is not None
    source = {"resume": folder} if saved else {"init": "pretrained", "model": settings.export or ""}
    if prompt and (saved or settings.export):
        lines["sample"] = to_paste(launcher, num_steps=0, **source, sample_prompt=prompt)
    if saved and settings.eval_interval:  # otherwise no text was held out
        lines["evaluate"] = to_paste(launcher, num_steps=0, **source, eval_interval=1)
    if settings.export:
        lines["load"] = f"transformers.AutoModelForCausalLM.from_pretrained({os.path.expanduser(settings.export)!r})"
    elif saved:
        lines["export"] = to_paste(launcher, num_steps=0, **source, export=f"{folder}-export")
    if saved:
        given = flags_of_run(settings, folder, *LENGTHS, "output_dir", "export", "export_weights")
        longer = {"num_steps": 2 * settings.num_steps}
        if settings.num_tokens:
            longer = {"num_tokens": 2 * settings.num_tokens}
        lines["go on"] = to_paste(launcher, given, **source, **longer)
        if settings.lr_scheduler == "warmup_stable_decay" and settings.decay_steps == 0:
            lines["decay"] = decay_command(settings, folder)
    elif not settings.export:
        lines["kept"] = "no weights: --final-checkpoint or --export DIR keeps them"
    if shown:
        lines["report"] = str(shown)
    return "\n" + columns(lines)


def decay_command(settings: Settings, folder: pathlib.Path) -> str:
    """The command of a branch that decays the learning rate of a run that ended in the stable phase, in a fifth of all
    its steps."""
    given = flags_of_run(settings, folder, *LENGTHS, "decay_steps", "export", "export_weights")
    steps = max(1, settings.num_steps // 4)
    branch = {"resume": folder, "run_name": f"{folder.name}-decayed"}
    return to_paste(job.launcher(), given, **branch, num_steps=settings.num_steps + steps, decay_steps=steps)


def describe_unsaved(settings: Settings, steps_left: int, step_ms: float) -> str:
    """A warning for a run with --resume auto that saves nothing before its end, so that a restart after a kill repeats
    everything; empty for any other. `step_ms` is milliseconds of a step."""
    if settings.resume != "auto" or settings.checkpoint_interval:
        return ""
    interval = max(1, round(60_000 * SAVE_MINUTES / step_ms))
    warning = "--resume auto: without --checkpoint-interval nothing is saved before the end"
    if interval >= steps_left:
        return f"{warning}, within {math.ceil(steps_left * step_ms / 60_000)} min"
    advice = f"--checkpoint-interval {interval} saves about every {SAVE_MINUTES} minutes at {step_ms:,.0f} ms a step"
    return f"{warning}; {advice}"
