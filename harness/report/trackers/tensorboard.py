"""TensorBoard event files in the run's folder."""

import json
import pathlib
import shlex
import textwrap
from typing import Any

from harness import flags as flag_rules
from harness import state as states
from harness.report.trackers import Tracker, named, over_tokens

COMPARED_FLAGS = (  # columns of the tab in which runs are compared
    *("model", "dataset", "sequence_length", "batch_size", "gradient_accumulation_steps", "precision", "zero_stage"),
    *("optimizer", "lr", "warmup_steps", "weight_decay", "seed"),
)


class Tensorboard(Tracker):
    """Event files of a run: one over steps, one over tokens and, when it is done, one with its averages beside its
    flags, for the tab HPARAMS."""

    name = "tensorboard"

    def __init__(self, settings: flag_rules.Settings, folder: pathlib.Path):
        import tensorboard  # noqa: F401 - that it is there

        self.folder = folder / settings.project_name

    def start(self, run: dict, state: states.TrainState) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.run = run
        # what an earlier start wrote after this point is hidden
        self.steps = SummaryWriter(str(self.folder), purge_step=state.step + 1)
        self.tokens = SummaryWriter(str(self.folder / "by_tokens"), purge_step=state.tokens + 1)
        self.steps.add_text("config", as_it_is(json.dumps(run, indent=2)), state.step)
        self.steps.flush()
        return f"tensorboard --logdir {shlex.quote(str(self.folder.parent))}"

    def log(self, metrics: dict[str, Any], stories: list[dict[str, str]]) -> None:
        for name, value in named(metrics).items():
            self.steps.add_scalar(name, value, metrics["step"])
        for name, value in over_tokens(metrics).items():
            self.tokens.add_scalar(name, value, metrics["tokens_seen"])
        self.add_stories(stories, metrics["step"])
        self.steps.flush()  # a kill loses nothing
        self.tokens.flush()

    def add_stories(self, stories: list[dict[str, str]], step: int) -> None:
        if stories:
            self.steps.add_text("stories", "\n\n---\n\n".join(as_it_is(story["text"]) for story in stories), step)

    def finish(self, metrics: dict[str, Any], stories: list[dict[str, str]]) -> None:
        self.add_stories(stories, metrics["step"])
        flags = {"world_size": self.run["world_size"]}
        for name in COMPARED_FLAGS:
            value = self.run["flags"][name]
            flags[name] = " ".join(value) if isinstance(value, list) else value
        self.steps.add_hparams(flags, named(metrics), run_name="summary", global_step=metrics["step"])

    def close(self, exit_code: int) -> None:
        self.steps.close()
        self.tokens.close()


def as_it_is(text: str) -> str:
    """A text as a block of code, the one thing in which Markdown changes nothing."""
    return textwrap.indent(text, "    ", lambda line: True)


TRACKER = Tensorboard
