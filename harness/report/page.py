"""Page: what a run left, its metrics.jsonl and config.json, or what a plan found, as one HTML file that needs
no network. Called by `report` when a run ends, by `planning`, and as a program: python -m harness.report.page RUN
[RUN...]. It does not know how a figure came about."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from html import escape
from importlib.util import find_spec

from harness.base import console
from harness.base.errors import UserError
from harness.base.saved import read_config
from harness.base.text import first_line
from harness.flags.settings import ASSETS, Settings
from harness.job.folders import replace_file
from harness.report.figure_list import BY_KEY, FIGURES, Chart, Figure, figures_by_chart

POINTS = 1000  # of a line in a chart there are at most about twice as many
SHOWN = 6  # stories of a prompt that are not folded away


@dataclasses.dataclass
class Run:
    """What a run's folder holds."""

    name: str
    lines: list[dict]  # as logged, without the last one's averages
    final: dict  # that one; of a run that did not come to its end, the last that was logged
    complete: bool
    config: dict
    unreadable: int  # lines of metrics.jsonl

    def flags(self) -> dict:
        flags = self.config.get("flags")
        hidden = {"argv", "given_accumulation", "lacks_disk", "lacks_memory"}
        return {key: flags[key] for key in flags if key not in hidden} if isinstance(flags, dict) else {}


def whole_lines(path: pathlib.Path) -> list[dict]:
    """The lines of a metrics file, if there is one, but for those cut off by a kill or that are no entry."""
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(line)
            if entry["step"] >= 0:
                lines.append(entry)
    return lines


def read_run(folder: pathlib.Path) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: holds no metrics.jsonl; name a run's folder, OUTPUT_DIR/RUN_NAME")
    lines = whole_lines(path)
    logged = [line for line in lines if "final" not in line]
    unreadable = sum(bool(line.strip()) for line in path.read_bytes().splitlines()) - len(lines)
    complete = bool(lines) and "final" in lines[-1]
    return Run(folder.resolve().name, logged, lines[-1] if lines else {}, complete, read_config(folder), unreadable)


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def format_figure(metrics: dict, figure: Figure) -> str:
    """A figure as a person reads it; empty where there is none."""
    value = metrics.get(figure.key)
    return figure.written.format(value) if is_number(value) else ""


# ----------------------------------------------------------------------------------------------------------------------
# Charts, drawn by the script in assets/page.html


def thin(points: list[tuple]) -> list[tuple]:
    """Of points (step, tokens, value) at most about 2 x POINTS: of each stretch the least and the greatest."""
    size = math.ceil(len(points) / POINTS)
    stretches = (points[start : start + size] for start in range(0, len(points), max(size, 1)))
    value = lambda point: point[2]  # noqa: E731
    return points if size <= 2 else [p for s in stretches for p in sorted({min(s, key=value), max(s, key=value)})]


def line_of(run: Run, figure: Figure, name: str, color: int) -> dict | None:
    """A line of a chart, over steps and over tokens; None where nothing was logged."""
    points = [
        (line["step"], line.get("tokens_seen"), line[figure.key])
        for line in run.lines
        if is_number(line.get(figure.key)) and is_number(line["step"])
    ]
    if not points:
        return None
    steps, tokens, values = zip(*thin(points), strict=True)
    tokens = tokens if all(map(is_number, tokens)) else None
    # plotly reads tags in names
    return {
        "name": escape(name),
        "color": color,
        "x": steps,
        "tokens": tokens,
        "y": values,
        "points": figure.group == "eval",  # at evaluations there are few
    }


def charts_of(runs: list[Run]) -> list[dict]:
    """The charts for which there are figures: of one run a line for each figure, of several a line for each run."""
    drawn = []
    for chart, figures in charts_on_page().items():
        if len(runs) == 1:
            lines = [(runs[0], figure, figure.line_name) for figure in figures]
            drawn.append(draw(chart, chart.title, lines))
            continue
        for figure in figures:
            title = chart.title
            if len(figures) > 1:
                title += f", {figure.line_name}"
            drawn.append(draw(chart, title, [(run, figure, run.name) for run in runs]))
    return [chart for chart in drawn if chart["traces"]]


def charts_on_page() -> dict[Chart, list[Figure]]:
    return {chart: figures for chart, figures in figures_by_chart().items() if chart.on_page}


def draw(chart: Chart, title: str, lines: list[tuple[Run, Figure, str]]) -> dict:
    """What the page's script draws of a chart with these lines: (run, figure, name)."""
    traces = [line_of(run, figure, name, color) for color, (run, figure, name) in enumerate(lines)]
    return {
        "title": title,
        "unit": chart.unit,
        "traces": [trace for trace in traces if trace],
        "loss": chart.loss_axis,
        "zero": chart.from_zero,
    }


def chart_cards(charts: list[dict]) -> str:
    """The places of the charts; each chart gets its id."""
    cards = []
    for number, chart in enumerate(charts):
        chart["id"] = f"chart-{number}"
        wide = " wide" * (number == 0 or bool(chart.get("bars")))
        heading = f"<h3>{escape(chart['title'])} <span>{escape(chart['unit'])}</span></h3>"
        if chart.get("loss"):
            note = "the first steps are above; double-click shows all"
            heading += f'<small id="{chart["id"]}-note" hidden>{note}</small>'
        height = f' style="height: {72 + 54 * len(chart["traces"][0]["y"])}px"' if chart.get("bars") else ""
        cards.append(f'<div class="card{wide}">{heading}<div class="chart" id="{chart["id"]}"{height}></div></div>')
    return f'<div class="charts">{"".join(cards)}</div>'


def switch(name: str, **choices: str) -> str:
    """Buttons of which one is pressed, the first; the page's script listens to them."""
    buttons = [
        f'<button type="button" name="{name}" value="{value}" aria-pressed="{str(not number).lower()}">{words}</button>'
        for number, (value, words) in enumerate(choices.items())
    ]
    return f'<div class="switch">{"".join(buttons)}</div>'


def plotly_js() -> str:
    """plotly.js, which its Python package brings along; that need not be imported for it."""
    found = find_spec("plotly")
    if found is None:
        raise UserError("needs the package plotly (pip install plotly)")
    path = pathlib.Path(found.submodule_search_locations[0], "package_data", "plotly.min.js")
    return path.read_text(encoding="utf-8")


def write_page(path: pathlib.Path, title: str, body: list[str], charts: list[dict]) -> pathlib.Path:
    """Writes the page, whole or not at all."""
    data = json.dumps(charts, allow_nan=False).replace("<", "\\u003c")
    parts = {"title": escape(title), "body": "\n".join(body), "charts": data, "plotly": plotly_js()}
    template = (ASSETS / "page.html").read_text(encoding="utf-8")
    replace_file(path, re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template))
    return path


# ----------------------------------------------------------------------------------------------------------------------
# A run, or several


def table(rows: Iterable[Iterable[str]], head: Iterable[str] = (), kind: str = "") -> str:
    """A table of cells that are HTML already; the first of a row is its name."""
    header = "".join(f"<th>{cell}</th>" for cell in head)
    lines = [f"<tr>{header}</tr>"] * bool(header)
    lines += [f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>" for first, *rest in rows]
    return f'<div class="card scroll"><table class="{kind}">{"".join(lines)}</table></div>'


def write_report(folders: list[pathlib.Path], output: pathlib.Path) -> pathlib.Path:
    """The page of one run, or of several side by side, made from metrics.jsonl and config.json alone; its path.

    Raises:
        UserError: a folder holds no run, or plotly is not installed.
        OSError: `output` cannot be written; nothing is left of it.
    """
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    several, charts = len(runs) > 1, charts_of(runs)
    title = f"{len(runs)} runs side by side" if several else runs[0].name
    body = [f"<h1>{escape(title)}</h1>", *([side_by_side(runs)] if several else [overview(runs[0])])]
    if charts:
        switches = switch("loss", linear="linear loss", log="log") + switch("over", step="over steps", tokens="tokens")
        body += [f'<div class="bar"><h2>Figures</h2>{switches}</div>', chart_cards(charts)]
        known = {key for run in runs for line in run.lines for key in line}
        absent = []
        for chart, figures in charts_on_page().items():
            if not any(figure.key in known for figure in figures):
                absent.append(chart.title)
        if absent:
            body.append(f'<p class="muted"><small>not logged: {", ".join(absent)}</small></p>')
    parts: list[tuple[str, Callable[[Run], str]]] = [("Stories", stories)]
    if several:
        body += ["<h2>What differs</h2>", differences(runs)]
    else:
        parts += [("Plan beside actual", plan_beside_actual), ("Starts", starts), ("Configuration", configuration)]
    for heading, part in parts:
        texts = [(run, part(run)) for run in runs]
        body += [f"<h2>{heading}</h2>"] * any(text for _, text in texts)
        body += [f"<h3>{escape(run.name)}</h3>" * several + text for run, text in texts if text]
    unreadable = sum(run.unreadable for run in runs)
    cut = f"; {unreadable} lines of metrics.jsonl could not be read" if unreadable else ""
    body.append(f"<footer>made from metrics.jsonl and config.json by python -m harness.report.page{cut}</footer>")
    return write_page(output, title, body, charts)


def state_of(run: Run) -> str:
    """How far the run came."""
    wanted, step = run.flags().get("num_steps"), run.final.get("step", 0)
    for line in run.lines:
        if broken := [key for key in ("loss", "grad_norm", "eval_loss") if key in line and not is_number(line[key])]:
            return f"{broken[0].replace('_', ' ')} was no number at step {line['step']:,}"
    of = f" of {wanted:,}" if is_number(wanted) else ""
    return "complete" if run.complete else f"ended at step {step:,}{of}" if run.lines else "no step was logged"


def origin_of(run: Run) -> str:
    """Of a run that began with another's checkpoint, whose it was."""
    origin = run.config.get("branched_from")
    if not isinstance(origin, dict):  # whatever somebody wrote there
        return ""
    return f"branched from {pathlib.Path(str(origin.get('folder'))).name} at step {origin.get('step')}"


def overview(run: Run) -> str:
    """What was trained on what, how far it came, and its figures."""
    flags, world = run.flags(), run.config.get("world_size")
    where = f"{world} x {run.config.get('gpu') or 'CPU'}" if world else ""
    data = f"{flags.get('model', '')} on {flags.get('dataset', '')}" if flags else ""
    told = " · ".join(escape(part) for part in (data, where, origin_of(run), state_of(run), times_of(run)) if part)
    figures = {figure.title: format_figure(run.final, figure) for figure in FIGURES if figure.written}
    return f'<p class="muted">{told}</p>{tiles(figures)}'


def times_of(run: Run) -> str:
    """How long it trained, and how long ago it first started when that was written."""
    times = [run.final.get(key) for key in ("trained_seconds", "elapsed_seconds")]
    if not all(map(is_number, times)):
        return ""
    trained, elapsed = (str(datetime.timedelta(seconds=round(seconds))) for seconds in times)
    return f"{trained} of training, {elapsed} since the first start"


def tiles(figures: dict[str, str]) -> str:
    """The figures that there are, large, in rows that are full."""
    shown = [f'<div class="tile"><b>{value}</b><small>{name}</small></div>' for name, value in figures.items() if value]
    columns = math.ceil(len(shown) / max(1, math.ceil(len(shown) / 6)))
    return f'<div class="tiles" style="--columns: {columns}">{"".join(shown)}</div>' if shown else ""


def side_by_side(runs: list[Run]) -> str:
    shown = [one for one in FIGURES if one.written and any(format_figure(run.final, one) for run in runs)]
    rows = []
    for color, run in enumerate(runs):
        dot = f'<span class="dot" style="background: var(--c{color % 8})"></span>'
        rows.append([dot + escape(run.name), *(format_figure(run.final, one) for one in shown), escape(state_of(run))])
    return "<p></p>" + table(rows, ["run", *(one.title for one in shown), "state"])


def differences(runs: list[Run]) -> str:
    """The flags and versions in which the runs differ."""
    told = [as_text(run.flags()) | as_text(run.config.get("versions")) for run in runs]
    for config, of_run in zip([run.config for run in runs], told, strict=True):
        of_run |= as_text({key: config.get(key) for key in ("commit", "world_size", "gpu")})
    names = [
        key for key in dict.fromkeys(key for one in told for key in one) if len({one.get(key) for one in told}) > 1
    ]
    rows = [[escape(key), *(escape(one.get(key, "")) for one in told)] for key in names if key != "run_name"]
    return table(rows, ["", *(escape(run.name) for run in runs)], "flags") if rows else "<p>nothing</p>"


def as_text(values) -> dict[str, str]:
    told = values.items() if isinstance(values, dict) else ()
    return {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in told}


def stories(run: Run) -> str:
    """What the model wrote, prompt by prompt in the order of steps; of many some are folded away."""
    of_prompt: dict[str, list[str]] = {}
    for line in [*run.lines, *[run.final] * run.complete]:
        samples = line.get("samples")
        for sample in samples if isinstance(samples, list) else ():
            prompt, text = (sample.get(key) if isinstance(sample, dict) else None for key in ("prompt", "text"))
            if not (isinstance(prompt, str) and isinstance(text, str)):
                continue
            told = (
                f"<em>{escape(prompt)}</em>{escape(text[len(prompt) :])}" if text.startswith(prompt) else escape(text)
            )
            loss = format_figure(line, BY_KEY["eval_loss"])
            held_out = f"<br>held-out loss {loss}" if loss else ""
            at = f"<small>step {line['step']:,}{held_out}</small>"
            of_prompt.setdefault(prompt, []).append(f'<div class="story"><div>{at}</div><p>{told}</p></div>')
    cards = []
    for written in of_prompt.values():
        last = len(written) - 1
        shown = {round(place * last / (SHOWN - 1)) for place in range(SHOWN)}
        card = "".join(story for number, story in enumerate(written) if number in shown)
        if len(shown) < len(written):
            card += f"<details><summary>all {len(written)}</summary>{''.join(written)}</details>"
        cards.append(f'<div class="card">{card}</div>')
    return "<p></p>".join(cards)


def plan_beside_actual(run: Run) -> str:
    """The run's own plan beside its figures; empty where it was not planned, as on a CPU."""
    rows, last = [], run.final
    for name, key, unit in (("memory allocated", "peak_memory_alloc", "GiB"), ("memory reserved", "peak_memory_reserved", "GiB"), ("time of a step", "step_time_ms", "ms")):  # fmt: skip # noqa: E501
        planned, actual = last.get(f"predicted_{key}"), last.get(key)
        if is_number(planned) and is_number(actual) and planned > 0:
            rows.append(
                [name, f"{planned:,.2f} {unit}", f"{actual:,.2f} {unit}", f"{100 * (actual / planned - 1):+.1f} %"]
            )
    return table(rows, ["", "planned", "actual", "actual over planned"]) if rows else ""


def starts(run: Run) -> str:
    """When the run started and started again, and what was done twice for it."""
    known = run.config.get("starts")
    entries = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
    rows = [
        [
            escape(str(entry.get("time", ""))),
            *(escape(str(entry.get(key, ""))) for key in ("step", "lost_steps", "world_size", "changed")),
        ]
        for entry in entries
    ]
    lost = sum(entry["lost_steps"] for entry in entries if is_number(entry.get("lost_steps")))
    again = (
        f"{len(entries)} starts, {lost:,} logged steps done again" if len(entries) > 1 else "one start, nothing lost"
    )
    return f"<p>{again}</p>" + table(rows, ["time", "from step", "steps lost", "ranks", "changed"]) if rows else ""


def configuration(run: Run) -> str:
    """The flags that are not at their defaults, then all, versions and commit."""
    flags, defaults = as_text(run.flags()), as_text(dataclasses.asdict(Settings()))
    changed = {key: value for key, value in flags.items() if value != defaults.get(key)}
    where = as_text({key: run.config[key] for key in ("commit", "gpu", "world_size") if key in run.config})
    rest = {key: value for key, value in flags.items() if key not in changed}

    def told(values: dict[str, str]) -> str:
        return table(([escape(key), escape(value)] for key, value in values.items()), kind="flags")

    if not (flags or where):
        return ""
    versions = as_text(run.config.get("versions"))
    return (
        told(changed | where | versions) + f"<details><summary>flags at their defaults</summary>{told(rest)}</details>"
    )


# ----------------------------------------------------------------------------------------------------------------------
# A plan

BARS = 8  # configurations in the chart of memory; all are in the table
COLUMNS = {"gpus": "GPUs", "dp_replicate_size": "replicas", "flags": "flags", "fits": "fits",
           "reserved_gib": "GiB reserved", "step_time_ms": "ms a step", "tokens_per_sec": "tok/s",
           "mfu_percent": "MFU %",
           "exposed_communication_percent": "exposed communication %", "communication_gib_per_step": "GiB sent a step",
           "cost_per_billion_tokens": "USD for a billion tokens"}  # fmt: skip
TIMES = {"matmul": "matmul", "attention": "attention", "memory": "memory-bound", "optimizer": "optimizer",
         "exposed": "exposed communication", "contention": "contention", "launches": "the host"}  # fmt: skip


def write_plan(path: pathlib.Path, plan: dict) -> pathlib.Path:
    """The picture of a plan, the object that --plan --json prints; its path.

    Raises:
        UserError: plotly is not installed, or `path` cannot be written.
    """
    title, capacity = f"{plan['model']} on {plan['gpus']:,} x {plan['gpu']}", plan["capacity_gib"]
    fastest, tried = plan.get("fastest"), plan.get("configurations") or []
    rows = {"as it is": plan}
    if fastest and fastest["flags"]:
        rows[f"fastest that fits: {fastest['flags']}"] = fastest
    rows |= {row["flags"]: row for row in tried if row["flags"] and row != fastest}
    charts = [memory_chart(dict([*rows.items()][:BARS]), capacity)]
    times = {name: plan["time_ms"].get(key, 0.0) for key, name in TIMES.items()}
    traces = [bar(name, color, [ms], ["step"]) for color, (name, ms) in enumerate(times.items()) if ms]
    charts.append({"title": "Time of a step", "unit": "ms", "bars": True, "traces": traces})
    if len({row["gpus"] for row in plan.get("scaling") or ()}) > 1:
        charts += scaling_charts(plan["scaling"])
    reserved = plan["memory_gib"]["reserved"]
    fits = f"{'fits' if plan['fits'] else 'does not fit'}: {reserved:.1f} of {capacity:.1f} GiB"
    figures = {
        "GiB reserved": f"{reserved:.1f}",
        "ms a step": f"{plan['step_time_ms']:,.1f}",
        "tokens per second": f"{plan['tokens_per_sec']:,.0f}",
        "MFU": f"{plan['mfu_percent']:.1f} %" if plan["mfu_percent"] else "",
        "hours for a billion tokens": f"{plan['hours_per_billion_tokens']:,.2f}",
        "USD for a billion tokens": f"{plan['cost_per_billion_tokens']:,.0f}"
        if "cost_per_billion_tokens" in plan
        else "",
    }
    body = [f"<h1>{escape(title)}</h1>", f'<p class="muted">plan · {escape(plan.get("verdict_text") or fits)}</p>']
    body.append(tiles(figures))
    if fastest:
        body += ["<h2>The fastest that fits</h2>", f'<div class="card"><pre>{escape(fastest["command"])}</pre></div>']
    body += ["<h2>As planned, not measured</h2>", chart_cards(charts)]
    body.append(f'<p class="muted">the dashed line: the {capacity:.1f} GiB that a process can have of the card</p>')
    if share := plan.get("published_share"):
        body.append(
            f'<p class="muted">published runs reached {share[0]:.0%} to {share[-1]:.0%} of such plans\' speed</p>'
        )
    for heading, listed in (("Configurations", tried), ("World sizes", plan.get("scaling") or ())):
        keys = [key for key in COLUMNS if any(key in row for row in listed)]
        if listed:
            cells = [[escape(plain(row.get(key)) or "as it is" * (key == "flags")) for key in keys] for row in listed]
            body += [f"<h2>{heading}</h2>", table(cells, [COLUMNS[key] for key in keys])]
    assumed = [[escape(name), escape(text)] for name, text in plan.get("assumptions", {}).items()]
    body += ["<h2>Assumptions</h2>", table(assumed)]
    try:
        return write_page(path, title, body, charts)
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror})", 1) from error


def plain(value) -> str:
    """A cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{0 if value >= 1000 else 2}f}"
    return "" if value is None else str(value)


def bar(name: str, color: int, x: list, y: list[str]) -> dict:
    return {"name": escape(name), "color": color, "x": x, "y": y}


def memory_chart(rows: dict[str, dict], capacity: float) -> dict:
    """Stacked bars by kind, of what a process holds at the peak; a row whose kinds are not told is one bar."""
    parts: list[dict[str, float]] = []
    for row in rows.values():
        kinds = row.get("at_peak_gib") or {}
        reserved = row.get("reserved_gib") or row["memory_gib"]["reserved"]
        rest = "allocator, CUDA, NCCL" if kinds else "reserved, all kinds"
        parts.append(kinds | {rest: max(0.0, reserved - sum(kinds.values()))})
    names = ["<br>".join(textwrap.wrap(escape(name), 56)) for name in rows]
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    traces = [bar(kind, color, [part.get(kind) for part in parts], names) for color, kind in enumerate(kinds)]
    return {"title": "Memory of the fullest GPU", "unit": "GiB", "bars": True, "limit": capacity, "traces": traces}


def scaling_charts(rows: list[dict]) -> list[dict]:
    """Speed and communication over world sizes, plain sharding and one shard group a node apart."""
    charts = []
    for title, unit, key in (
        ("Speed over world sizes", "tokens per second", "tokens_per_sec"),
        ("Exposed communication over world sizes", "% of the step", "exposed_communication_percent"),
    ):
        traces = []
        for color, (name, wanted) in enumerate({"one shard group": False, "a shard group a node": True}.items()):
            points = [(row["gpus"], row[key]) for row in rows if (row["dp_replicate_size"] > 1) == wanted]
            if points:
                x, y = zip(*points, strict=True)
                traces.append({"name": name, "color": color, "x": x, "y": y, "points": True})
        charts.append({"title": title, "unit": unit, "x": "GPUs", "traces": traces, "log": key == "tokens_per_sec"})
    return charts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.report.page", description="Makes report.html of finished, stopped or killed runs.")  # fmt: skip # noqa: E501
    parser.add_argument(
        "run", nargs="+", metavar="RUN", type=pathlib.Path, help="a run's folder; several: side by side"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="FILE", help="[RUN/report.html; of several report.html here]"
    )
    args = parser.parse_args(arguments)
    output = args.output or (args.run[0] / "report.html" if len(args.run) == 1 else pathlib.Path("report.html"))
    try:
        print(write_report(args.run, output))
    except OSError as error:
        sys.exit(f"harness.report.page: error: {output}: cannot be written ({error.strerror})")
    except UserError as error:
        sys.exit(f"harness.report.page: error: {first_line(error)}")


if __name__ == "__main__":
    console.never_fail()
    main()
