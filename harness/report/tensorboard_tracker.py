"""Tensorboard: the event files of a run. Called by `trackers`. Independent of how a figure is computed."""

import html
import json
import pathlib
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable

from harness import job
from harness.base.text import one_or_more
from harness.flags.settings import Settings
from harness.report.figure_list import FIGURES
from harness.report.tracker_rows import by_tokens, grouped, program
from harness.state.train_state import TrainState

# columns of the table in which tensorboard compares runs; it shows the first five by alphabet at first
COMPARED_FLAGS = (
    "batch_size",
    "dataset",
    "gradient_accumulation_steps",
    "lr",
    "model",
    "optimizer",
    "precision",
    "seed",
    "sequence_length",
    "warmup_steps",
    "weight_decay",
    "world_size",
    "zero_stage",
)


class Tensorboard:
    """Event files of a run: one over steps, one over tokens, and one with how it began and ended.

    Tensorboard keeps the first status of a session that it reads, so the file with the status is replaced each time.
    """

    name = "tensorboard"

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        self.folder, self.logdir, self.config = folder, folder / settings.project_name, config
        threading.excepthook = without_writers(threading.excepthook)
        self.last = {"step": state.step}  # the figures of the last line
        self.kept = state.step, state.tokens  # of the last row that is in the files
        self.restart()

    def restart(self) -> int:
        """Continues in new files, which hide the rows that earlier files have after the last complete one; its step."""
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
            self.add_stories(stories, metrics["step"])
        self.settle()
        self.kept = metrics["step"], metrics["tokens_seen"]

    def add_stories(self, stories: list[dict[str, str]], step: int) -> None:
        self.steps.add_text("stories", "\n\n---\n\n".join(map(as_markdown, stories)), step)

    def settle(self) -> None:
        for writer in (self.steps, self.tokens):
            writer.flush()

    def summarize(self, metrics: dict, stories: list[tuple[int, str, str]]) -> None:
        """The averages of the last line, and the stories of the end."""
        self.last = metrics
        of_the_end = [{"prompt": prompt, "text": text} for step, prompt, text in stories if step == metrics["step"]]
        if of_the_end:
            self.add_stories(of_the_end, metrics["step"])
        self.steps.flush()

    def finish(self, exit_code: int) -> None:
        state = job.state_of(exit_code)
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

        flags = compared_flags(self.config)
        columns = [api.HParamInfo(name=key, type=data_type(value)) for key, value in flags.items()]
        names = [api.MetricInfo(name=api.MetricName(tag=figure.name)) for figure in FIGURES if figure.compared]
        started = plugin.SessionStartInfo()
        for key, value in flags.items():
            setattr(started.hparams[key], value_field(value), value)
        messages = {
            metadata.EXPERIMENT_TAG: {"experiment": api.Experiment(hparam_infos=columns, metric_infos=names)},
            metadata.SESSION_START_INFO_TAG: {"session_start_info": started},
        }
        if status != "STATUS_RUNNING":
            ended = plugin.SessionEndInfo(status=api.Status.Value(status))
            messages[metadata.SESSION_END_INFO_TAG] = {"session_end_info": ended}
        shutil.rmtree(self.logdir / "summary", ignore_errors=True)
        with SummaryWriter(str(self.logdir / "summary")) as writer:
            for tag, message in messages.items():
                data = plugin.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **message).SerializeToString()
                about = SummaryMetadata(plugin_data={"plugin_name": metadata.PLUGIN_NAME, "content": data})
                writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, metadata=about)]))
            for name, value in grouped(self.last).items():
                writer.add_scalar(name, value, self.last["step"])


def compared_flags(config: dict) -> dict[str, bool | int | float | str]:
    run = config["flags"] | {"world_size": config["world_size"]}
    compared = {}
    for key in COMPARED_FLAGS:
        value = run[key]
        if isinstance(value, list):
            value = one_or_more(value)
        compared[key] = value if isinstance(value, int | float) else str(value)
    return compared


def data_type(value) -> str:
    """The type of a flag's column, as the messages of tensorboard name it."""
    if isinstance(value, bool):
        return "DATA_TYPE_BOOL"
    return "DATA_TYPE_STRING" if isinstance(value, str) else "DATA_TYPE_FLOAT64"


def value_field(value) -> str:
    """The field of a protobuf value that holds a flag."""
    if isinstance(value, bool):
        return "bool_value"
    return "string_value" if isinstance(value, str) else "number_value"


def without_writers(hook: Callable) -> Callable:
    """threading.excepthook that is silent about tensorboard's writers, whose errors the next call raises as well."""

    def excepthook(args) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            hook(args)

    return excepthook


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
