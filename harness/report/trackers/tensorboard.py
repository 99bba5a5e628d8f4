"""TensorBoard event files in the run's folder."""

import json
import pathlib
import shlex
import textwrap
from typing import Any

from harness import flags
from harness import state as states
from harness.report.files import read_metrics
from harness.report.trackers import Tracker, over_tokens, to_tracker_names


class Tensorboard(Tracker):
    """Event files in the run's folder itself, so that TensorBoard names the run by it: metrics over steps, losses over
    tokens, and at the end the averages as `final/NAME`, with the explicit flags in the tab HPARAMS."""

    name = "tensorboard"

    def __init__(self, args: flags.Args, folder: pathlib.Path):
        import tensorboard  # noqa: F401 - check that it is installed

        self.folder = folder

    def start(self, run: dict, state: states.TrainState) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.explicit = {name: str(value) for name, value in run["given"].items()}
        # hides the events that an earlier start wrote after this step
        self.writer = SummaryWriter(str(self.folder), purge_step=state.step + 1)
        for line in read_metrics(self.folder / "metrics.jsonl"):
            # TensorBoard takes tokens for steps, and has hidden these too
            if "final" not in line and line["step"] <= state.step < line["tokens_seen"]:
                self._log_over_tokens(line)
        # indented text is a code block in Markdown, shown unchanged
        self.writer.add_text("config", textwrap.indent(json.dumps(run, indent=2), "    "), state.step)
        self.writer.flush()
        return f"tensorboard --logdir {shlex.quote(str(self.folder.parent))}"  # which names runs by their folders

    def log(self, metrics: dict) -> None:
        for name, value in to_tracker_names(metrics).items():
            self.writer.add_scalar(name, value, metrics["step"])
        self._log_over_tokens(metrics)
        self.writer.flush()  # so that a kill loses nothing

    def _log_over_tokens(self, metrics: dict) -> None:
        for name, value in over_tokens(metrics).items():
            if value is not None:  # NaN, read back from JSON
                self.writer.add_scalar(name, value, metrics["tokens_seen"])

    def finish(self, metrics: dict) -> None:
        from torch.utils.tensorboard.summary import hparams

        averages = {f"final/{name}": value for name, value in to_tracker_names(metrics).items()}
        # `add_hparams` would make a run of its own
        file: Any = self.writer.file_writer  # None once it is closed
        for summary in hparams(self.explicit, averages):
            file.add_summary(summary)
        for name, value in averages.items():
            self.writer.add_scalar(name, value, metrics["step"])

    def close(self, exit_code: int) -> None:
        self.writer.close()


TRACKER = Tensorboard
