"""The saved view of a wandb project: charts of loss, speed, memory and data by the names that `report.trackers` gives
them. Called by a person, once a project:

    python -m tools.wandb_view ENTITY/PROJECT

It needs the package wandb-workspaces, a login and the network. It does not know what a run logged.
"""

import argparse
import sys

from harness.base import console
from harness.base.errors import UserError
from harness.base.text import first_line
from harness.report.trackers import GROUPS

SECTIONS = {  # title: charts, each the keys of metrics.jsonl that share it
    "Training": (["grad_norm"], ["learning_rate"]),
    "Speed": (["tokens_per_sec"], ["mfu_percent"], ["step_time_ms", "slowest_rank_ms"], ["goodput_percent"]),
    "Memory": (["peak_memory_active", "peak_memory_alloc", "peak_memory_reserved"],),
    "Data": (["data_wait_percent"], ["tokens_seen"]),
}
COLUMNS = ("loss", "eval_loss", "tokens_per_sec", "mfu_percent", "goodput_percent")  # of the list of runs


def build(entity: str, project: str):
    """The view as a `wandb_workspaces.workspaces.Workspace`, which is not saved.

    Raises:
        UserError: there is no package wandb-workspaces.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError("needs the package wandb-workspaces (pip install wandb-workspaces)") from error

    def chart(keys, x="Step"):
        return reports.LinePlot(x=x, y=[GROUPS[key] for key in keys])

    losses = ["loss", "eval_loss"]
    panels = {"Loss": [chart(losses), chart(losses, x=GROUPS["tokens_seen"])]}
    panels |= {title: [chart(keys) for keys in charts] for title, charts in SECTIONS.items()}
    panels["Stories"] = [reports.WeavePanelSummaryTable(table_name="stories")]
    panels["Differences"] = [reports.RunComparer(diff_only="split")]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="train_fsdp",
        sections=[workspaces.Section(name=title, panels=of, is_open=True) for title, of in panels.items()],
        runset_settings=workspaces.RunsetSettings(
            pinned_columns=["run:displayName", *(f"summary:{GROUPS[key]}" for key in COLUMNS)]
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wandb_view", description="Makes the view of a project.")
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="as in the address of its page")
    entity, _, project = parser.parse_args().project.partition("/")
    if not (entity and project) or "/" in project:
        parser.error("it is ENTITY/PROJECT, as in the address of the project's page")
    try:
        view = build(entity, project)
        import wandb

        if not wandb.login(prompt=False):
            raise UserError("not logged in to wandb; run `wandb login`")
        print(view.save().url)
    except UserError as error:
        sys.exit(f"tools.wandb_view: error: {error}")
    except Exception as error:  # of the network, of the server, of the package
        sys.exit(f"tools.wandb_view: error: the view was not saved: {first_line(error)}")


if __name__ == "__main__":
    console.never_fail()
    main()
