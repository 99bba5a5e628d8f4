"""The summary: the last lines of a run, and what can be done with what it left."""

import contextlib
import json
import math
import os
import pathlib
import sys

import torch.distributed as dist
from tqdm import tqdm

from harness.base.errors import UserError
from harness.base.saved import newest, read_config
from harness.base.text import counted
from harness.flags.commands import flags_of_run, to_paste
from harness.flags.settings import Settings
from harness.job import terminal
from harness.job.folders import replace_file
from harness.job.printing import columns, say
from harness.report.figure_list import figures_in
from harness.report.header import significant
from harness.report.metrics_file import as_json, metrics_text
from harness.report.run_files import read_metrics
from harness.report.trackers import Trackers
from harness.state.train_state import TrainState

SAVE_MINUTES = 15  # between two checkpoints, as advised to a run that saves none


@contextlib.contextmanager
def only_json_on_stdout(settings: Settings):
    """With --json every other line goes to stderr; gives the real stdout."""
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if settings.json else contextlib.nullcontext():
        yield stdout


def say_evaluation(settings: Settings, loss: float, tokens: int, step: int | None, stdout) -> None:
    """The line of an evaluation without training, and with --json its object on stdout."""
    what = f"step {step:,} of {settings.resume}" if step is not None else settings.model
    found = f"{describe_held_out({'eval_loss': loss})}, {tokens:,} tokens"
    say(columns({"evaluated": f"{what} on {settings.dataset}: {found}"}))
    if settings.json and dist.get_rank() == 0:
        figures = {"model": settings.model, "step": step, "dataset": settings.dataset, "tokens": tokens}
        figures |= {"eval_loss": loss, "perplexity": math.exp(min(loss, 700))}
        print(json.dumps(as_json(figures), allow_nan=False), file=stdout, flush=True)


def describe_stories(stories: list[dict[str, str]]) -> str:
    return "\n\n".join(story["text"] for story in stories)


def describe_held_out(metrics: dict) -> str:
    loss = metrics.get("eval_loss")
    return "" if loss is None else f"held-out loss {loss:.4f} (perplexity {math.exp(min(loss, 700)):,.2f})"


def finish_metrics(settings: Settings, folder: pathlib.Path, state: TrainState) -> dict:
    """The last line of a run that took all its steps, written, for the trackers too, if a kill came between it and the
    last checkpoint."""
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
    """The last words: what the averages after warmup are, and how long after the run's first start."""
    elapsed, origin = tqdm.format_interval(state.elapsed), state.branched_from or {"step": 0, "tokens": 0}
    steps, tokens = metrics["step"] - origin["step"], metrics["tokens_seen"] - origin["tokens"]
    trained = f"{counted(steps, 'step')}, {tokens:,} tokens in {elapsed}"
    if state.elapsed_before and "trained_seconds" in metrics:
        spent = tqdm.format_interval(metrics["trained_seconds"])
        trained = f"{counted(steps, 'step')}, {tokens:,} tokens in {spent} of training, {elapsed} since the first start"
    if state.branched_from:
        trained += f" after step {origin['step']:,} of {pathlib.Path(origin['folder']).name}"
    done = f"{trained}, loss {metrics['loss']:.4f}"
    done = ", ".join(filter(None, [done, describe_held_out(metrics)]))
    measured = {
        "tokens_per_sec": "{tokens_per_sec:,.0f} tok/s, {tokens_per_sec_per_gpu:,.0f} a rank",
        "step_time_ms": ", {step_time_ms:,.1f} ms a step",
        "actual_tflops_per_sec": ", {actual_tflops_per_sec} TFLOPS",
        "mfu_percent": " of {theoretical_tflops_total}, MFU {mfu_percent:.2f} %",
        "goodput_percent": ", goodput {goodput_percent:.1f} %",
    }
    shown = metrics | {key: significant(value) for key, value in metrics.items() if "_tflops" in key}
    speed = "".join(text.format_map(shown) for key, text in measured.items() if key in metrics)
    lines = {"done": done, "speed": speed or "not measured: no step after the --perf-warmup-steps"}
    memory = [f"{key[12:]} {value:.2f} GiB" for key, value in metrics.items() if key.startswith("peak_memory_")]
    if memory:
        lines["memory"] = ", ".join(memory)
    if "predicted_step_time_ms" in metrics:
        alloc, reserved = (metrics[f"predicted_peak_memory_{kind}"] for kind in ("alloc", "reserved"))
        milliseconds = metrics["predicted_step_time_ms"]
        lines["planned"] = f"alloc {alloc:.2f} GiB, reserved {reserved:.2f} GiB, {milliseconds:,.1f} ms a step"
    return "\n" + columns(lines, wrap=True) + "\n" + columns({"files": str(folder)})


def next_commands(settings: Settings, folder: pathlib.Path, prompt: str, shown: pathlib.Path | None) -> str:
    """What can be done with what this run left, as commands to paste. `prompt` is what a story may
    begin with, empty where there is no tokenizer, `shown` the page of the run, if it has one."""
    launcher, lines = terminal.launcher(), {}
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
        given = flags_of_run(settings, folder, "num_steps", "output_dir", "export")
        lines["go on"] = to_paste(launcher, given, **source, num_steps=2 * settings.num_steps)
    elif not settings.export:
        lines["kept"] = "no weights: --final-checkpoint or --export DIR keeps them"
    return "\n" + columns(lines | ({"report": str(shown)} if shown else {}))


def describe_unsaved(settings: Settings, steps_left: int, step_ms: float) -> str:
    """What a run without --checkpoint-interval should know that --resume auto starts again after a kill; empty where it
    saves on its way."""
    if settings.resume != "auto" or settings.checkpoint_interval:
        return ""
    interval = max(1, round(60_000 * SAVE_MINUTES / step_ms))
    what = "--resume auto: without --checkpoint-interval nothing is saved before the end"
    if interval >= steps_left:
        return f"{what}, within {math.ceil(steps_left * step_ms / 60_000)} min"
    return (
        f"{what}; --checkpoint-interval {interval} saves about every {SAVE_MINUTES} minutes at {step_ms:,.0f} ms a step"
    )
