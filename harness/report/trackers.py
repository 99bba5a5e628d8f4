"""Trackers: what wandb and tensorboard show of a run: figures in groups, configuration, stories, its ending. Called by
the report; the script asks at the start whether they work. It does not know how a figure comes about."""

import contextlib
import functools
import html
import json
import os
import pathlib
import re
import shlex
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec

from harness.base.errors import UserError
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import endings, terminal
from harness.job.printing import say
from harness.job.signals import StopRequest
from harness.report.figure_list import BY_KEY, FIGURES, figures_in
from harness.report.run_files import read_metrics
from harness.state.train_state import TrainState

DIFFERING = (  # columns of the table in which tensorboard compares runs; it shows the first five by alphabet at first
    *("batch_size", "dataset", "gradient_accumulation_steps", "lr", "model", "optimizer", "precision"),
    *("seed", "sequence_length", "warmup_steps", "weight_decay", "world_size", "zero_stage"),
)
FLUSH = 0.1  # seconds until a row is in wandb's file; by default 15
PATIENCE = 60.0  # seconds that the end of a run waits for what wandb has not uploaded
STUCK = 10.0  # seconds after which a row that is not in wandb's file is lost
PAUSE = 10.0  # seconds until a tracker that failed is tried again; twice as long after each try
ROOM = 2**20  # bytes that a disk must take before
TAIL = 32 * 2**15  # bytes at the end of wandb's file in which its last row is looked for: blocks of 32 KiB


def choose_trackers(log_with: str) -> list[str]:
    """The names of the trackers; one that cannot work is an error now, not at the first log line."""
    names = {"none": [], "all": ["wandb", "tensorboard"]}.get(log_with, [log_with])
    for package in names:
        if not find_spec(package):
            raise UserError(f"--log-with {log_with}: needs the package {package} (pip install {package})")
    if "wandb" in names:
        import wandb

        try:
            ready = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
        except Exception as error:  # the server is not reached, or does not know the key
            advice = "WANDB_MODE=offline keeps the run in its folder, for `wandb sync`"
            raise UserError(f"--log-with {log_with}: no login to wandb ({first_line(error)}); {advice}", 1) from error
        if not ready:
            advice = f"run `{program('wandb')} login`, or set WANDB_MODE=offline"
            raise UserError(f"--log-with {log_with}: not logged in to wandb; {advice}")
    return names


def program(name: str) -> str:
    """A tracker's command as it can be typed here: it may be beside the interpreter alone."""
    return name if shutil.which(name) else shlex.quote(os.path.relpath(pathlib.Path(sys.executable).with_name(name)))


def grouped(metrics: dict) -> dict[str, float]:
    """The figures of a line of metrics.jsonl under their names in the trackers; one that is not in `FIGURES` is in the
    group `other`."""
    named = {}
    for key, value in metrics.items():
        name = BY_KEY[key].name if key in BY_KEY else f"other/{key}"
        if name is not None:
            named[name] = value
    return named


def by_tokens(metrics: dict) -> dict[str, float]:
    """The figures that are shown over tokens too."""
    return {f"by_tokens/{one.key}": metrics[one.key] for one in FIGURES if one.over_tokens and one.key in metrics}


class Wandb:
    """A run in wandb, whose step is that of the optimizer. It keeps its id over restarts (`resume="allow"`)."""

    name = "wandb"

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.resolve() / "wandb"))  # tables that are to be uploaded
        self.begin = functools.partial(self._begin, settings, folder, state.run_id, config)
        self.kept = self.last = state.step  # the last step that is known to be in a file, and the last of all
        self.begin()

    def _begin(self, settings: Settings, folder: pathlib.Path, run_id: str, config: dict) -> None:
        """Opens the run, in a new file if there is one already."""
        import wandb

        options = wandb.Settings(
            x_transaction_log_flush_interval=FLUSH, finish_timeout=PATIENCE, finish_timeout_raises=True
        )
        run = {"project": settings.project_name, "name": folder.name, "dir": str(folder), "id": run_id}
        self.run = wandb.init(**run, resume="allow", config=config, settings=options)
        self.teardown = wandb.teardown
        self.run.define_metric("by_tokens/*", step_metric=BY_KEY["tokens_seen"].name)
        self.file = pathlib.Path(self.run.settings.sync_file)
        self.size, self.waits_since = 0, None  # of the file, and since when a row is logged that it may lack

    def place(self) -> tuple[str, str]:
        return "wandb", self.run.url or f"offline; later: {self.upload()}"

    def upload(self) -> str:
        """The command that uploads what lies in the run's folder, of its earlier starts too."""
        folder = pathlib.Path(self.run.dir).parent
        parts = folder.with_name(folder.name.partition("run-")[0] + "run-")  # [offline-]run-TIME-ID
        return f"{program('wandb')} sync {shlex.quote(str(parts))}*"

    def log(self, metrics: dict, stories: list[dict[str, str]]) -> None:
        row = grouped(metrics) | by_tokens(metrics)
        if stories:
            row["stories"] = self.table((metrics["step"], story["prompt"], story["text"]) for story in stories)
        self.run.log(row, step=metrics["step"], commit=True)
        self.last = metrics["step"]
        self.notice_a_stuck_file()

    def notice_a_stuck_file(self) -> None:
        """Raises OSError where wandb's own process writes no more: it does not tell of a full disk, and does not go on
        when there is room again."""
        now, size = time.monotonic(), self.file.stat().st_size
        if size != self.size or self.waits_since is None:
            self.size, self.waits_since = size, now
        elif now - self.waits_since > STUCK and self.run.offline:
            raise OSError(f"{self.file.name} does not grow any more, as on a full disk")

    def settle(self) -> None:
        """Raises OSError where the last row does not come into the file."""
        until = time.monotonic() + STUCK
        while self.run.offline and self.kept < self.last:
            self.kept = max(self.kept, last_step(self.file))
            if time.monotonic() > until:
                raise OSError(f"{self.file.name} ends with step {self.kept:,}, as on a full disk")
            time.sleep(0.02)

    def restart(self) -> int:
        """Goes on in a new file; returns the last step that the ones before have. Online there is no going on: nobody
        knows what the server has, and a new beginning may take minutes."""
        if not self.run.offline:
            raise RuntimeError("wandb is online")
        with contextlib.suppress(OSError):
            self.kept = max(self.kept, last_step(self.file))
        for end in (self.run.finish, self.teardown):  # its process may be gone
            with contextlib.suppress(Exception):
                end()
        self.begin()
        return self.kept

    def table(self, stories: Iterable[tuple[int, str, str]]):
        import wandb

        return wandb.Table(columns=["step", "prompt", "text"], data=[list(story) for story in stories])

    def summarize(self, metrics: dict, stories: list[tuple[int, str, str]]) -> None:
        """The averages of the last line, and all stories in one table."""
        self.run.summary.update(grouped(metrics) | ({"stories": self.table(stories)} if stories else {}))

    def finish(self, exit_code: int) -> None:
        if exit_code == StopRequest.EXIT_CODE:
            self.run.mark_preempting()  # wandb then calls it preempted, else failed
        try:
            self.run.finish(exit_code=exit_code)
            self.teardown(exit_code)  # until its process has written the last record: it ends with this one
        except TimeoutError:
            terminal.tell(f"wandb      not all is uploaded after {PATIENCE:.0f} s; later: {self.upload()}")


def last_step(file: pathlib.Path) -> int:
    """The step of the last whole row near the end of a .wandb file, 0 if there is none. It is a LevelDB log: blocks of
    32 KiB, each record in one or more parts, behind 7 bytes of wandb's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, found, parts = 2**15, 0, b""
    with file.open("rb") as opened:
        first = max(0, file.stat().st_size - TAIL) // block * block
        opened.seek(first)
        data = opened.read()
    position = 0 if first else 7
    while position + 7 <= len(data):
        if block - position % block < 7:  # too little room for a part's header: the rest of the block is empty
            position += block - position % block
            continue
        length, kind = struct.unpack("<4xHB", data[position : position + 7])
        part = data[position + 7 : position + 7 + length]
        if len(part) < length or kind not in (1, 2, 3, 4):  # cut off
            break
        parts = part if kind in (1, 2) else parts + part
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part; what began before `first` is no record
            with contextlib.suppress(Exception):
                record = Record.FromString(parts)
                if record.HasField("history"):
                    found = record.history.step.num
    return found


class Tensorboard:
    """Event files of a run: one over steps, one over tokens, and one with how it began and ended.

    Tensorboard keeps the first status of a session that it reads, so the last one is written anew each time.
    """

    name = "tensorboard"

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        self.folder, self.logdir, self.config = folder, folder / settings.project_name, config
        threading.excepthook = without_writers(threading.excepthook)
        self.last = {"step": state.step}  # the figures of the last line
        self.kept = state.step, state.tokens  # of the last row that is in the files
        self.restart()

    def restart(self) -> int:
        """Goes on in new files, which hide what those before have of rows after the last that is whole; its step."""
        from torch.utils.tensorboard import SummaryWriter

        self.conclude("STATUS_RUNNING")
        step, tokens = self.kept
        self.steps = SummaryWriter(str(self.logdir), purge_step=step + 1)
        self.tokens = SummaryWriter(str(self.logdir / "by_tokens"), purge_step=tokens + 1)
        self.steps.add_text("config", as_table(self.config), step)
        self.steps.flush()
        return step

    def place(self) -> tuple[str, str]:
        return "watch", f"{program('tensorboard')} --logdir {shlex.quote(str(self.folder))}"

    def log(self, metrics: dict, stories: list[dict[str, str]]) -> None:
        self.last = metrics
        for name, value in grouped(metrics).items():
            self.steps.add_scalar(name, value, metrics["step"])
        for name, value in by_tokens(metrics).items():
            self.tokens.add_scalar(name, value, metrics["tokens_seen"])
        if stories:
            self.steps.add_text("stories", "\n\n---\n\n".join(map(as_markdown, stories)), metrics["step"])
        self.settle()
        self.kept = metrics["step"], metrics["tokens_seen"]

    def settle(self) -> None:
        for writer in (self.steps, self.tokens):
            writer.flush()

    def summarize(self, metrics: dict, stories: list[tuple[int, str, str]]) -> None:
        """The averages of the last line, and the stories of the end."""
        self.last = metrics
        told = [{"prompt": prompt, "text": text} for step, prompt, text in stories if step == metrics["step"]]
        if told:
            self.steps.add_text("stories", "\n\n---\n\n".join(map(as_markdown, told)), metrics["step"])
        self.steps.flush()

    def finish(self, exit_code: int) -> None:
        state = endings.state_of(exit_code)
        ending = f"{state}, exit code {exit_code}; the last row is of step {self.last['step']:,}"
        self.steps.add_text("ending", ending, self.last["step"])
        self.steps.close()
        self.tokens.close()
        self.conclude({"done": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}.get(state, "STATUS_UNKNOWN"))

    def conclude(self, status: str) -> None:
        """Writes the row of the tab HPARAMS: flags, the figures of the last line, `status`."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams import api_pb2 as api
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams import plugin_data_pb2 as plugin
        from torch.utils.tensorboard import SummaryWriter

        run = self.config["flags"] | {"world_size": self.config["world_size"]}
        flags = {key: run[key] if isinstance(run[key], int | float) else str(run[key]) for key in DIFFERING}
        kinds = {bool: "DATA_TYPE_BOOL", int: "DATA_TYPE_FLOAT64", float: "DATA_TYPE_FLOAT64", str: "DATA_TYPE_STRING"}
        columns = [api.HParamInfo(name=key, type=kinds[type(value)]) for key, value in flags.items()]
        names = [api.MetricInfo(name=api.MetricName(tag=one.name)) for one in FIGURES if one.compared]
        started = plugin.SessionStartInfo()
        for key, value in flags.items():
            setattr(
                started.hparams[key], {bool: "bool_value", str: "string_value"}.get(type(value), "number_value"), value
            )
        told = {
            metadata.EXPERIMENT_TAG: {"experiment": api.Experiment(hparam_infos=columns, metric_infos=names)},
            metadata.SESSION_START_INFO_TAG: {"session_start_info": started},
        }
        if status != "STATUS_RUNNING":
            ended = plugin.SessionEndInfo(status=api.Status.Value(status))
            told[metadata.SESSION_END_INFO_TAG] = {"session_end_info": ended}
        shutil.rmtree(self.logdir / "summary", ignore_errors=True)
        with SummaryWriter(str(self.logdir / "summary")) as writer:
            for tag, message in told.items():
                data = plugin.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **message).SerializeToString()
                about = SummaryMetadata(plugin_data={"plugin_name": metadata.PLUGIN_NAME, "content": data})
                writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, metadata=about)]))
            for name, value in grouped(self.last).items():
                writer.add_scalar(name, value, self.last["step"])


def without_writers(hook: Callable) -> Callable:
    """threading.excepthook without tensorboard's writers, whose errors the next call raises as well."""
    return lambda args: None if type(args.thread).__name__ == "_AsyncWriterThread" else hook(args)


def as_table(config: dict) -> str:
    """What config.json holds, as a Markdown table with a row for each value, `flags.lr` for one that lies deeper."""

    def rows(values: dict, within: str = "") -> Iterable[str]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from rows(value, f"{within}{key}.")
            else:
                yield f"| {literal(within + key)} | {literal(json.dumps(value))} |"

    return "\n".join(["| | |", "|---|---|", *rows(config)])


def literal(text: str) -> str:
    """Text that Markdown shows as it is, with its line breaks."""
    return re.sub(r"([\\`*_{}\[\]()#+.!|-])", r"\\\1", html.escape(text, quote=False)).replace("\n", "  \n")


def as_markdown(story: dict[str, str]) -> str:
    return f"**{literal(story['prompt'].strip())}**\n\n{literal(story['text'].strip())}"


class Trackers:
    """Those of one run, on rank 0. One that fails is left out until it works again, and then gets what it lacks from
    metrics.jsonl."""

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        """`config` is what config.json holds.

        Raises:
            UserError: one does not start.
        """
        self.file, self.open, self.failed = folder / "metrics.jsonl", [], []
        self.tried, self.pause = 0.0, PAUSE  # when the failed ones were tried last
        for kind in (Wandb, Tensorboard):
            if settings.log_with in (kind.name, "all"):
                try:
                    tracker = kind(settings, folder, state, config)
                except Exception as error:
                    what = f"--log-with {settings.log_with}: {kind.name} does not start ({said(error)})"
                    raise UserError(f"{what}; --log-with none leaves it out", 1) from error
                self.open.append(tracker)
                endings.LISTENERS.append(tracker.finish)

    def places(self) -> dict[str, str]:
        """Where to watch the run in each of them, by command or address."""
        return dict(tracker.place() for tracker in self.open)

    def log(self, metrics: dict, stories: list[dict[str, str]]) -> None:
        self._each(lambda tracker: tracker.log(metrics, stories), f", from step {metrics['step']} on")

    def settle(self) -> None:
        """Looks whether all rows are in the files, and gives those that failed another try."""
        self._each(lambda tracker: tracker.settle())
        self.pause = 0.0
        self.mend()

    def mend(self) -> None:
        """Starts those that failed anew, if it is time and there is room on the disk."""
        if not self.failed or time.monotonic() - self.tried < self.pause:
            return
        self.tried, self.pause = time.monotonic(), 2 * self.pause
        for tracker in [*self.failed]:
            try:
                with tempfile.TemporaryFile(dir=self.file.parent, buffering=0) as probe:
                    if probe.write(bytes(ROOM)) < ROOM:
                        return
                kept = tracker.restart()
                lines = [line for line in read_metrics(self.file) if "final" not in line and line["step"] > kept]
                for line in lines:
                    tracker.log(figures_in(line), line.get("samples", []))
                tracker.settle()
            except Exception:  # later, perhaps
                continue
            self.failed.remove(tracker)
            self.open.append(tracker)
            self.pause = PAUSE
            say(f"recovered  {tracker.name}: it has the {len(lines):,} rows after step {kept:,} that it lacked")

    def summarize(self, metrics: dict) -> None:
        """What is to stand in the overview of runs that are done: `metrics` is the last line."""

        def tell(tracker):
            lines = read_metrics(self.file)
            stories = [(line["step"], s["prompt"], s["text"]) for line in lines for s in line.get("samples", ())]
            tracker.summarize(metrics, stories)

        self._each(tell)

    def _each(self, tell: Callable, where: str = "") -> None:
        for tracker in [*self.open]:
            try:
                tell(tracker)
            except Exception as error:  # whatever it is, the run has its own files
                self.open.remove(tracker)
                self.failed.append(tracker)
                self.tried = time.monotonic()
                say(f"failed     {tracker.name}{where}: {said(error)}; the run goes on without it")


def said(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)
