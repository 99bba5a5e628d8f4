"""Compare: one page with the curves of several runs, their last metrics and the flags that differ."""

import pathlib
from typing import Any, NamedTuple

from harness import base, flags, job
from harness.report.files import read_metrics
from harness.report.metrics import METRICS, Metric, find_metric
from harness.report.page import Line, draw_chart, fill_template, is_number, label, text, with_unit

NOT_COMPARED = ("run_name", "output_dir", "cache_dir", "resume", "config", "export")


class Run(NamedTuple):
    lines: list[dict]  # of metrics.jsonl
    config: dict  # config.json

    def last(self, metric: Metric) -> str:
        """The last value of a metric as a cell; empty without one."""
        values = [line[metric.key] for line in self.lines if metric.key in line]
        return with_unit(metric, values[-1]) if values else ""

    def curve(self, key: str) -> Line:
        return [(line["step"], line[key]) for line in self.lines if is_number(line.get(key)) and "final" not in line]


def write_comparison(args: flags.Args) -> None:
    """Write the page of --compare as OUTPUT_DIR/compare.html and print its path.

    Raises:
        UserError: a folder does not exist, none is a run's, or the page cannot be written.
    """
    runs = read_runs(args.compare or ())
    title = f"{base.counted(len(runs), 'run')} compared"
    body = f"<h1>{title}</h1><p class=muted>curves over optimizer steps</p>\n{draw_table(runs)}\n{draw_curves(runs)}"
    path = pathlib.Path(args.output_dir).expanduser() / "compare.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        job.replace_file(path, fill_template(title, body))
    except OSError as error:
        raise base.UserError(f"--output-dir {args.output_dir}: {path} cannot be written ({error.strerror})") from error
    job.print0(job.columns({"compared": ", ".join(runs), "report": str(path)}))


def read_runs(paths: tuple[str, ...]) -> dict[str, Run]:
    """The runs by the names of their folders, or by their paths if names are equal. A folder that is no run's is left
    out with a warning, so that a pattern of the shell may name it."""
    folders = {pathlib.Path(path).expanduser().resolve(): path for path in paths}
    names = [folder.name for folder in folders]
    runs = {}
    for folder, path in folders.items():
        try:
            lines, exists = read_metrics(folder / "metrics.jsonl"), folder.exists()
        except OSError as error:
            job.warn(
                f"--compare {path}: {error.filename or 'metrics.jsonl'} cannot be read ({error.strerror}); left out"
            )
            continue
        if lines:
            runs[path if names.count(folder.name) > 1 else folder.name] = Run(lines, base.read_config(folder))
        elif exists:
            job.warn(f"--compare {path}: no run with a logged step is there; left out")
        else:
            raise base.UserError(f"--compare {path}: no such folder; give folders of runs, such as outputs/my-run")
    if not runs:
        raise base.UserError(f"--compare: none of {', '.join(paths)} is the folder of a run with a logged step")
    return runs


def draw_table(runs: dict[str, Run]) -> str:
    """A column for each run; a row for each flag that differs and each main metric."""
    cells = {}
    for name in flags.FLAGS:
        values = [run.config.get("flags", {}).get(name) for run in runs.values()]
        if name not in NOT_COMPARED and differ(values):
            cells[flags.as_flag(name)] = list(map(show, values))
    for name in ("world_size", "gpu"):
        values = [run.config.get(name) for run in runs.values()]
        if differ(values):
            cells[label(name)] = list(map(show, values))
    for key, metric in METRICS.items():
        if metric.tile and any(key in line for run in runs.values() for line in run.lines):
            cells[label(key)] = [run.last(metric) for run in runs.values()]
    dots = [f"<span class=dot style=background:var(--c{number % 8})></span>" for number in range(len(runs))]
    rows = ["<tr><th></th>" + "".join(f"<th>{dot}{text(name)}</th>" for dot, name in zip(dots, runs, strict=True))]
    for name, row in cells.items():
        rows.append(f"<tr><th>{text(name)}</th>" + "".join(f"<td>{text(cell)}</td>" for cell in row))
    table = f"<table>{''.join(rows)}</table>"
    return f"<h2>Flags that differ, and last metrics</h2>\n<div class=card style=overflow-x:auto>{table}</div>"


def differ(values: list) -> bool:
    return any(value != values[0] for value in values)


def show(value: Any) -> str:
    """A value from config.json in a cell; empty for null."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None else str(value)


def draw_curves(runs: dict[str, Run]) -> str:
    """A chart for each metric that has one on a run's page, with a line for each run."""
    keys = {key for run in runs.values() for line in run.lines for key in line if find_metric(key)}
    charts: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: (list(METRICS.values()).index(find_metric(key)), key)):
        metric, curves = find_metric(key), {name: run.curve(key) for name, run in runs.items()}
        if metric and metric.chart and any(curves.values()):
            title = label(key).capitalize() if metric.chart in charts or "/" in key else metric.chart
            colors = [number for number, curve in enumerate(curves.values()) if curve]
            drawn = {name: curve for name, curve in curves.items() if curve}
            charts[title] = draw_chart(text(title), metric.unit, drawn, [], colors)
    return f"<h2>Curves</h2>\n<div class=charts>{''.join(charts.values())}</div>"
