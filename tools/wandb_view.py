"""The saved view of a wandb project: the charts of `harness.report.figure_list` in their sections. Called by a person,
once a project:

    python -m tools.wandb_view ENTITY/PROJECT

It needs the package wandb-workspaces, a login and the network. Independent of what a run logged.
"""

import argparse
import sys

from harness.base import console
from harness.base.errors import UserError
from harness.base.text import first_line
from harness.report.figure_list import BY_KEY, FIGURES, SOURCE, Chart, Figure, figures_by_chart

SECTIONS = ("Loss", "Training", "Speed", "Memory", "Data")  # in this order; any others follow


def build(entity: str, project: str):
    """The view as a `wandb_workspaces.workspaces.Workspace`, which is not saved.

    Raises:
        UserError: there is no package wandb-workspaces.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(
            "needs the package wandb-workspaces (pip install wandb-workspaces)", entry="missing-package"
        ) from error

    panels: dict[str, list] = {section: [] for section in SECTIONS}
    for chart, figures in figures_by_chart().items():
        section = panels.setdefault(chart.section, [])
        section.append(reports.LinePlot(x="Step", **lines_of(chart, figures)))
        over_tokens = [figure for figure in figures if figure.over_tokens]
        if over_tokens:
            section.append(reports.LinePlot(x=BY_KEY["tokens_seen"].name, **lines_of(chart, over_tokens)))
    panels["Stories"] = [reports.WeavePanelSummaryTable(table_name="stories")]
    panels["Differences"] = [reports.RunComparer(diff_only="split")]
    columns = [f"summary:{figure.name}" for figure in FIGURES if figure.compared]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="train_fsdp",
        sections=[workspaces.Section(name=name, panels=shown, is_open=True) for name, shown in panels.items()],
        runset_settings=workspaces.RunsetSettings(pinned_columns=["run:displayName", *columns]),
    )


def lines_of(chart: Chart, figures: list[Figure]) -> dict:
    """What a `LinePlot` draws: figures by their names, or a line for each source of the data by a regular expression,
    as no run is known here."""
    if not figures[0].by_source:
        return {"y": [figure.name for figure in figures]}
    names = "|".join(figure.name.removesuffix(SOURCE) for figure in figures)
    return {"title": chart.title, "metric_regex": f"^({names})"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wandb_view", description="Makes the view of a project.")
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="as in the address of its page")
    entity, _, project = parser.parse_args().project.partition("/")
    if not (entity and project) or "/" in project:
        # entry: wandb-view
        parser.error("it is ENTITY/PROJECT, as in the address of the project's page")
    try:
        view = build(entity, project)
        import wandb

        if not wandb.login(prompt=False):
            raise UserError("not logged in to wandb; run `wandb login`", entry="no-wandb-login")
        print(view.save().url)
    except UserError as error:
        # entry: wandb-view
        sys.exit(f"tools.wandb_view: error: {error}")
    except Exception as error:  # of the network, of the server, of the package
        # entry: wandb-view
        sys.exit(f"tools.wandb_view: error: the view was not saved: {first_line(error)}")


if __name__ == "__main__":
    console.never_fail()
    main()
