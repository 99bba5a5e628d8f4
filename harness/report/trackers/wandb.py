"""Weights & Biases, by its own client: `wandb login`, or WANDB_MODE=offline."""

import pathlib
import shlex

from harness import base, flags, job
from harness import state as states
from harness.report.trackers import Tracker, over_tokens, to_tracker_names

STEP = "train/step"
FINISH_SECONDS = 60  # timeout for uploads at the end of a run


class Wandb(Tracker):
    """A run in wandb, with the same id for all starts. Its x axis is the metric `train/step`. wandb's own step counts
    rows: wandb drops a row that is not after the last one, such as a step that a resumed run repeats."""

    name = "wandb"

    def __init__(self, args: flags.Args, folder: pathlib.Path):
        import wandb

        self.args, self.folder = args, folder
        try:
            ready = wandb.setup().settings.mode != "online" or wandb.login(prompt=False)
        except Exception as error:  # no network, or a wrong key
            advice = "WANDB_MODE=offline keeps the run in its folder, for `wandb sync`"
            raise base.UserError(
                f"--log-with wandb: no login to wandb ({base.first_line(error)}); {advice}", 1
            ) from error
        if not ready:
            raise base.UserError("--log-with wandb: not logged in; run `wandb login`, or set WANDB_MODE=offline")

    def start(self, run: dict, state: states.TrainState) -> str:
        import wandb

        self.run = wandb.init(
            project=self.args.project_name,
            name=self.folder.name,
            dir=str(self.folder),
            id=run["run_id"],
            resume="allow",
            config=run,
            settings=wandb.Settings(finish_timeout=FINISH_SECONDS),
        )
        self.row = max(self.run.step, state.step)  # offline, after the rows of an earlier start
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self.run.define_metric("by_tokens/*", step_metric="data/tokens_seen")
        if self.run.disabled:
            return "disabled, by WANDB_MODE or WANDB_DISABLED: nothing is kept"
        folders = shlex.quote(str(pathlib.Path(self.run.dir).parents[1]))
        pattern = f"{folders}/offline-run-*-{self.run.id}"
        return self.run.url or f"offline; later: wandb sync {pattern}"

    def log(self, metrics: dict) -> None:
        self.run.log(
            {STEP: metrics["step"]} | to_tracker_names(metrics) | over_tokens(metrics), step=self.row, commit=True
        )
        self.row += 1

    def finish(self, metrics: dict) -> None:
        self.run.summary.update(to_tracker_names(metrics))

    def close(self, exit_code: int) -> None:
        import wandb

        if exit_code == job.STOPPED:
            self.run.mark_preempting()  # shown as preempted, not as failed
        self.run.finish(exit_code=exit_code)
        wandb.teardown(exit_code)  # waits for its process, which would die with this one


TRACKER = Wandb
