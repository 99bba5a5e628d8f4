"""TensorBoard event files in the run's folder."""

import json
import pathlib
import shlex
import textwrap

from harness import flags
from harness import state as states
from harness.report.trackers import Tracker, named, over_tokens


class Tensorboard(Tracker):
    """Event files of a run: one over steps, one over tokens and, when it is done, one with its averages beside the
    flags that were given, for the tab HPARAMS."""

    name = "tensorboard"

    def __init__(self, settings: flags.Settings, folder: pathlib.Path):
        import tensorboard  # noqa: F401 - that it is there

        self.folder = folder / settings.project_name

    def start(self, run: dict, state: states.TrainState) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.given = {name: str(value) for name, value in run["given"].items()}
        # what an earlier start wrote after this point is hidden
        self.steps = SummaryWriter(str(self.folder), purge_step=state.step + 1)
        self.tokens = SummaryWriter(str(self.folder / "by_tokens"), purge_step=state.tokens + 1)
        # indented, a text is a block of code, in which Markdown changes nothing
        self.steps.add_text("config", textwrap.indent(json.dumps(run, indent=2), "    "), state.step)
        self.steps.flush()
        return f"tensorboard --logdir {shlex.quote(str(self.folder.parent))}"

    def log(self, metrics: dict) -> None:
        for name, value in named(metrics).items():
            self.steps.add_scalar(name, value, metrics["step"])
        for name, value in over_tokens(metrics).items():
            self.tokens.add_scalar(name, value, metrics["tokens_seen"])
        self.steps.flush()  # a kill loses nothing
        self.tokens.flush()

    def finish(self, metrics: dict) -> None:
        self.steps.add_hparams(self.given, named(metrics), run_name="summary", global_step=metrics["step"])

    def close(self, exit_code: int) -> None:
        self.steps.close()
        self.tokens.close()


TRACKER = Tensorboard
