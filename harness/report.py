"""Report: what a run says of itself: header, metrics.jsonl, trackers, Prometheus, profile, gates, summary. Called by
the script, which hands it figures. It does not know how they come about (see `utils`)."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
import threading
import time

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tqdm import tqdm

import utils
from harness import page, trackers
from harness.base.devices import GIB, wait_for_device
from harness.base.errors import UserError
from harness.base.saved import newest, place_of, read_config
from harness.base.text import counted, first_line
from harness.base.versions import commit, versions
from harness.endpoint import Endpoint
from harness.flags.commands import flags_of_run, to_paste, with_value
from harness.flags.settings import Settings
from harness.health import KernelClock
from harness.job import endings, terminal
from harness.job.folders import lock_folder, replace_file
from harness.job.printing import columns, say
from harness.metrics_file import MetricsFile, as_json, metrics_text
from harness.model.attention import describe_attention
from harness.page import whole_lines
from harness.state.train_state import TrainState
from harness.trackers import Trackers

SAVE_MINUTES = 15  # between two checkpoints, as advised to a run that saves none


def check_that_figures_will_exist(settings: Settings, device: torch.device) -> None:
    """Raises UserError for a gate or a record of something that this machine does not measure."""
    if settings.min_mfu and not (settings.peak_tflops or utils.get_gpu_peak_tflops()):
        raise UserError("--min-mfu: there is no MFU without the device's peak; give --peak-tflops")
    of_memory = {"--max-memory-gib": settings.max_memory_gib, "--memory-snapshot": settings.memory_snapshot}
    if device.type != "cuda" and (given := [flag for flag, value in of_memory.items() if value]):
        raise UserError(f"{given[0]}: memory is measured on a GPU only; leave it out")


def check_gates(settings: Settings, metrics: dict) -> None:
    """Raises UserError with exit code 3 when a figure missed its gate."""
    missed, reserved = [], metrics.get("peak_memory_reserved", 0.0)
    mfu = metrics.get("mfu_percent", 0.0)  # a resumed run may end within its warmup
    if settings.min_mfu and mfu < settings.min_mfu:
        missed.append(f"--min-mfu {settings.min_mfu:g}: the MFU was {mfu:.2f} %")
    if settings.max_memory_gib and reserved > settings.max_memory_gib:
        missed.append(f"--max-memory-gib {settings.max_memory_gib:g}: peak_memory_reserved was {reserved:.2f} GiB")
    if missed:
        raise UserError("acceptance gate missed: " + "; ".join(missed), exit_code=3)


@contextlib.contextmanager
def profiling(folder: pathlib.Path, state: TrainState):
    """Traces the steps taken inside, on rank 0, and says where their time went; no speed figure counts them."""
    with state.tracker.excluded():
        with contextlib.nullcontext() if dist.get_rank() else torch.profiler.profile() as profile:
            wait_for_device()  # the clock starts when the profiler has: CUPTI takes seconds
            before, start = state.step, time.perf_counter()
            yield
            wait_for_device()
            seconds = time.perf_counter() - start
        if profile:
            (folder / "profile").mkdir(exist_ok=True)
            profile.export_chrome_trace(str(folder / "profile" / "rank-0.json"))
            steps, shares = state.step - before, time_shares(profile.events(), seconds)
            table = ", ".join(f"{name} {share:.1f} %" for name, share in shares.items())
            say(columns({"profile": f"{steps} steps of {1000 * seconds / steps:,.1f} ms: {table}"}))
        dist.barrier()  # until rank 0 has written: the others' clocks must not count that either


def record_memory(folder: pathlib.Path) -> None:
    """Records allocations from now on; running out of memory writes them down."""
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    torch._C._cuda_attach_out_of_memory_observer(lambda *_: dump_memory(folder))


def dump_memory(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank-{dist.get_rank()}.pickle"))


def describe_setup(settings, model, mesh, train_set, flops: str, peak: float | None, verified: str) -> str:
    """The header: what will run, in figures that can be checked by hand."""
    world, shards = dist.get_world_size(), mesh["shard"].size()
    cuda = mesh.device_type == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"CPU with {counted(torch.get_num_threads(), 'thread')}"
    master = ", fp32 master weights and gradient reduction"
    precision = {
        "bf16": "bf16 compute and all-gather" + master,
        "fp8": f"{'emulated ' * settings.fp8_emulate}float8 linears ({settings.fp8_recipe}), bf16 elsewhere" + master,
        "fp32": "fp32 throughout",
        "bf16-pure": "bf16 throughout, optimizer included",
    }
    run = "compiled" if settings.compile else "eager"
    techniques = [
        describe_attention(settings, model.config, mesh.device_type)
        + " inside documents (FLOPs counted as if across them)" * settings.document_mask,
        f"{run} layers",
        f"fused loss ({run} chunks)" if settings.fused_loss else "loss from full logits",
        f"{settings.activation_checkpointing.replace('none', 'no')} activation checkpointing"
        if settings.activation_memory_budget is None
        else f"activation memory budget {settings.activation_memory_budget:g}",
        settings.optimizer,
    ]
    mfu = f"{significant(peak)} TFLOPS peak a {'GPU' if cuda else 'rank'}" if peak else "no MFU on a CPU"
    if not peak and cuda:
        mfu = f"no MFU: {where} is not in the table; give its dense bf16 peak with --peak-tflops"
    lines = {}
    if settings.demo and settings.dataset != "demo":
        lines["demo"] = f"the embedded model and its sizes, but on {settings.dataset} in place of the embedded stories"
    lines |= {
        "model": f"{settings.model} ({type(model).__name__.removeprefix('FSDP')}), {settings.init} weights, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {flops}, {mfu}",
        "sharding": f"ZeRO-{settings.zero_stage} on {world} x {where}, replicas x shards {world // shards} x {shards}"
        + ", offloaded to the host" * settings.cpu_offload,
        "verified": verified,
        "precision": precision[settings.precision],
        "technique": ", ".join(techniques),
        "batch": f"{settings.describe_batch(world)}, {settings.num_steps:,} steps",
    }
    lines |= train_set.header
    return columns(lines, wrap=True)


def significant(figure: float) -> str:
    """A positive figure to three digits, from 100 on to whole ones."""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def watching(settings: Settings, folder: pathlib.Path) -> dict[str, str]:
    """Where to watch a run while it goes on: by command, address or file, what there is of each."""
    places = {}
    if settings.metrics_port:
        places["metrics"] = f"http://{settings.metrics_host}:{settings.metrics_port}/metrics"
    if settings.profile:
        places["profile"] = str(folder / "profile" / "rank-0.json")
    return places


class Report:
    """What a run says of itself, on rank 0: config.json, metrics.jsonl, the trackers, the console."""

    def __init__(
        self,
        settings: Settings,
        accelerator: Accelerator,
        endpoint: Endpoint,
        folder: pathlib.Path,
        state: TrainState,
        changed: str = "",  # which flags are not those of the checkpoint that it goes on from, in words
    ):
        self.num_steps, self.file, self.failed, self.excluded = settings.num_steps, None, False, state.tracker.excluded
        self.endpoint, self.closing, self.closed = endpoint, threading.Lock(), False
        self.settings, self.advised = settings, False
        if accelerator.is_main_process:
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
        self.bar = terminal.Bar(
            total=self.num_steps, initial=state.step, leave=False, dynamic_ncols=True, disable=not shown
        )

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
        self.bar.figures = (loss, *filter(None, speed.split("  ")))
        parts = [loss, f"grad {metrics['grad_norm']:.2f}", f"lr {metrics['learning_rate']:.1e}", *self.bar.figures[1:]]
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
        lines = whole_lines(path)
        if lines and "final" not in lines[-1]:
            lines.append(lines[-1] | state.tracker.summary() | {"final": True})
            replace_file(path, metrics_text(lines))
            last = {key: value for key, value in lines[-1].items() if key not in trackers.WORDS}
            Trackers(settings, folder, state, read_config(folder)).summarize(last)
    except OSError as error:
        raise UserError(f"--output-dir: {path} cannot be written ({error.strerror})", 1) from error
    return lines[-1] if lines else {}


def describe_identity(folder: pathlib.Path, state: TrainState) -> dict:
    """Which run this is, in config.json: by it `saved` tells a copy of the folder from the run itself."""
    identity = {"run_id": state.run_id, "folder": str(folder.resolve())}
    return identity | ({"branched_from": state.branched_from} if state.branched_from else {})


def describe_origin(origin: dict) -> str:
    return f"from {origin['folder']} at step {origin['step']:,}"


def describe_starts(folder: pathlib.Path, state: TrainState, changed: str = "") -> list[dict]:
    """The starts of the run in `folder` so far and this one: each with its time, the step that it went on from, how
    many logged steps after it are done again, the ranks, and the flags that it `changed`. What a new run finds in a
    copied folder was another's."""
    config, step = read_config(folder), state.step
    copied = state.branched_from and config.get("run_id") != state.run_id
    starts = config.get("starts")
    starts = starts if isinstance(starts, list) and not copied else []
    logged = [] if copied else whole_lines(folder / "metrics.jsonl")
    reached = max((line["step"] for line in logged), default=step)
    now = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "step": step}
    now |= {"lost_steps": max(0, reached - step), "world_size": dist.get_world_size()}
    return [*starts, now | ({"changed": changed} if changed else {})]


def record_start(folder: pathlib.Path, state: TrainState) -> None:
    """A start with nothing to train, in config.json with how it ends; where that cannot be written it is left out."""
    with contextlib.suppress(OSError):
        if run := read_config(folder):
            keep_config(folder, run | {"starts": describe_starts(folder, state)} | describe_identity(folder, state))


def keep_config(folder: pathlib.Path, run: dict) -> None:
    """Writes config.json, and again with how this start ended: torchrun and what stands above it do not tell."""
    write_config(folder, run)
    endings.LISTENERS.append(lambda code: write_config(folder, run, exit_code=code))


def write_config(folder: pathlib.Path, run: dict, **ending) -> None:
    *before, now = run["starts"]
    replace_file(folder / "config.json", json.dumps(run | {"starts": [*before, now | ending]}, indent=2) + "\n")


def describe_run(settings: Settings) -> dict:
    """What it takes to repeat a run: flags, versions, commit, world size, GPU."""
    run = {"flags": dataclasses.asdict(settings), "versions": versions(), "commit": commit()}
    run["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return run | {"world_size": dist.get_world_size()}


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
    program, lines = terminal.launcher(), {}
    saved, start = newest(folder) is not None, [*program, "--num-steps", "0"]
    source = with_value("--resume", folder)
    if not saved:
        source = ["--init", "pretrained", *with_value("--model", settings.export or "")]
    if prompt and (saved or settings.export):
        lines["sample"] = to_paste([*start, *source, *with_value("--sample-prompt", prompt)])
    if saved and settings.eval_interval:  # otherwise no text was held out
        lines["evaluate"] = to_paste([*start, *source, "--eval-interval", "1"])
    if settings.export:
        lines["load"] = f"transformers.AutoModelForCausalLM.from_pretrained({os.path.expanduser(settings.export)!r})"
    elif saved:
        lines["export"] = to_paste([*start, *source, *with_value("--export", f"{folder}-export")])
    if saved:
        given = flags_of_run(settings, folder, "num_steps", "output_dir", "export")
        lines["go on"] = to_paste([*program, *given, *source, "--num-steps", str(2 * settings.num_steps)])
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


def figures_of_all_ranks(
    speed: dict[str, float],
    state: TrainState,
    device: torch.device,
    waited_ms: float | None = None,
    clock: KernelClock | None = None,
) -> dict[str, float]:
    """Speed as this rank saw it, the slowest rank's step time and data wait, the fullest rank's memory, goodput.

    With the milliseconds of a step that each rank was in collectives also `slowest_rank`, the one that was there least;
    with a clock, where it is due, the fixed kernel's time on the slowest rank.
    """
    worst, rank, world = memory_figures(device), dist.get_rank(), dist.get_world_size()
    if "step_time_ms" in speed:
        worst |= {"slowest_rank_ms": speed["step_time_ms"], "data_wait_percent": speed["data_wait_percent"]}
    if worst:
        # each rank's in its place: the largest is what it says
        own = torch.full((3, world), -math.inf, dtype=torch.float64)
        # not clipped: on a GPU collectives run beside the work, and all ranks may be in them for longer than a step
        own[0, rank] = speed.get("step_time_ms", 0.0) - (waited_ms or 0.0)
        if clock and "step_time_ms" in speed:
            with state.tracker.excluded():
                own[1:, rank] = torch.tensor(clock.measure(state.step), dtype=own.dtype)
        values = torch.cat([torch.tensor([*worst.values()], dtype=torch.float64), own.flatten()]).to(device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        values = values.tolist()
        worst = dict(zip(worst, values, strict=False))
        worked, kernel_ms, reasons = (values[len(values) + n * world :][:world] for n in (-3, -2, -1))
        if waited_ms is not None and world > 1 and "step_time_ms" in speed:
            worst["slowest_rank"] = worked.index(max(worked))
        if clock and "step_time_ms" in speed:
            worst |= clock.judge(kernel_ms, [*map(int, reasons)], state.step, worst["slowest_rank_ms"])
    if "step_time_ms" not in speed:
        return worst
    # the rest of the time since the run began is start-up, compilation, evaluation, standing still, and after a resume
    # what was lost and the time between
    trained, elapsed = state.productive_seconds(), state.elapsed
    times = {"trained_seconds": trained, "elapsed_seconds": elapsed}
    return speed | worst | times | {"goodput_percent": min(100.0, 100 * trained / elapsed)}


def memory_figures(device: torch.device) -> dict[str, float]:
    """This rank's peaks since the last reset in GiB, by torch's caching allocator; `{}` on a CPU.

    `peak_memory_active` counts blocks in use or still awaited by a stream, `peak_memory_alloc` what tensors were given,
    `peak_memory_reserved` what the process held of the card.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {"active": "active_bytes", "alloc": "allocated_bytes", "reserved": "reserved_bytes"}
    return {f"peak_memory_{name}": stats[f"{key}.all.peak"] / GIB for name, key in names.items()}


def time_shares(events, seconds: float) -> dict[str, float]:
    """Percent of `seconds` in which a device computed, communicated, did only the latter, and did nothing.

    Args:
        events: of a `torch.profiler.profile`. Where there are GPU kernels they alone count, NCCL's as communication;
            on a CPU every operator counts, collectives and gloo's threads as communication.
    """
    events = [event for event in events if not event.is_user_annotation or event.name.startswith("gloo:")]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list] = {False: [], True: []}
    for event in kernels or events:
        communicates = re.match("nccl|gloo:|c10d::|_c10d_functional::", event.name) is not None
        spans[communicates].append((event.time_range.start, event.time_range.end))
    compute, busy = covered(spans[False]), covered(spans[False] + spans[True])
    microseconds = {
        "compute": compute,
        "communication": covered(spans[True]),
        "exposed communication": busy - compute,
        "idle": 1e6 * seconds - busy,
    }
    return {name: value / seconds / 1e4 for name, value in microseconds.items()}


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
