"""Plan page: the picture of a plan, for --plan --html. Called by `planning`. Independent of how a plan is made, and of
how the page looks, which is assets/page.html."""

import pathlib
import textwrap

from harness.base import UserError
from harness.report import page_parts as parts

MAX_BARS = 8  # configurations in the chart of memory; all are in the table
NAME_WIDTH = 56  # characters of a bar's name on one line
COLUMNS = {
    "gpus": "GPUs",
    "dp_replicate_size": "replicas",
    "flags": "flags",
    "fits": "fits",
    "reserved_gib": "GiB reserved",
    "step_time_ms": "ms a step",
    "tokens_per_sec": "tok/s",
    "mfu_percent": "MFU %",
    "exposed_communication_percent": "exposed communication %",
    "communication_gib_per_step": "GiB sent a step",
    "cost_per_billion_tokens": "USD for a billion tokens",
}
TIMES = {
    "matmul": "matmul",
    "attention": "attention",
    "memory": "memory-bound",
    "optimizer": "optimizer",
    "exposed": "exposed communication",
    "contention": "contention",
    "launches": "the host",
}


def write_plan(path: pathlib.Path, plan: dict) -> pathlib.Path:
    """The picture of a plan, the object that --plan --json prints; its path.

    Raises:
        UserError: plotly is not installed, or `path` cannot be written.
    """
    title = f"{plan['model']} on {plan['gpus']:,} x {plan['gpu']}"
    sections = [parts.section("", parts.tiles(planned_figures(plan)))]
    if plan.get("fastest"):
        sections.append(parts.section("The fastest that fits", parts.command(plan["fastest"]["command"])))
    sections.append(chart_section(plan))
    configurations, world_sizes = plan.get("configurations"), plan.get("scaling")
    if configurations:
        sections.append(parts.section("Configurations", table_of(configurations)))
    if world_sizes:
        sections.append(parts.section("World sizes", table_of(world_sizes)))
    assumptions = plan.get("assumptions", {})
    sections.append(parts.section("Assumptions", parts.table(assumptions.items())))
    try:
        return parts.write_page(path, title, f"plan · {verdict(plan)}", sections)
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written ({error.strerror})", 1) from error


def verdict(plan: dict) -> str:
    if plan.get("verdict_text"):
        return plan["verdict_text"]
    fits = "fits" if plan["fits"] else "does not fit"
    return f"{fits}: {plan['memory_gib']['reserved']:.1f} of {plan['capacity_gib']:.1f} GiB"


def planned_figures(plan: dict) -> dict[str, str]:
    """The figures of the plan's tiles, as text by their names; empty ones are not known."""
    figures = {
        "GiB reserved": f"{plan['memory_gib']['reserved']:.1f}",
        "ms a step": f"{plan['step_time_ms']:,.1f}",
        "tokens per second": f"{plan['tokens_per_sec']:,.0f}",
    }
    if plan["mfu_percent"]:
        figures["MFU"] = f"{plan['mfu_percent']:.1f} %"
    figures["hours for a billion tokens"] = f"{plan['hours_per_billion_tokens']:,.2f}"
    if "cost_per_billion_tokens" in plan:
        figures["USD for a billion tokens"] = f"{plan['cost_per_billion_tokens']:,.0f}"
    return figures


def table_of(rows: list[dict]) -> dict:
    """A table of configurations, with the columns for which any of them has a value."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    cells = [[cell(key, row.get(key)) for key in keys] for row in rows]
    return parts.table(cells, [COLUMNS[key] for key in keys])


def cell(key: str, value) -> str:
    if key == "flags" and not value:
        return "as it is"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:,.2f}"
    return str(value)


# ----------------------------------------------------------------------------------------------------------------------
# Charts


def chart_section(plan: dict) -> dict:
    capacity = plan["capacity_gib"]
    charts = [memory_chart(rows_of_memory(plan), capacity), time_chart(plan["time_ms"])]
    world_sizes = plan.get("scaling") or []
    if len({row["gpus"] for row in world_sizes}) > 1:
        charts.append(scaling_chart(world_sizes, "Speed over world sizes", "tokens per second", "tokens_per_sec"))
        charts[-1]["log_y"] = True
        exposed = "Exposed communication over world sizes"
        charts.append(scaling_chart(world_sizes, exposed, "% of the step", "exposed_communication_percent"))
    notes = [parts.note(f"the dashed line: the {capacity:.1f} GiB that a process can have of the card")]
    share = plan.get("published_share")
    if share:
        words = f"{plan['published_runs']} reached {share[0]:.0%} to {share[-1]:.0%} of such plans' speed"
        notes.append(parts.note(words))
    return parts.section("As planned, not measured", parts.charts(charts), *notes)


def rows_of_memory(plan: dict) -> dict[str, dict]:
    """The configurations in the chart of memory by their names: the plan's own, the fastest, then others."""
    rows, fastest = {"as it is": plan}, plan.get("fastest")
    if fastest and fastest["flags"]:
        rows[f"fastest that fits: {fastest['flags']}"] = fastest
    for row in plan.get("configurations") or []:
        if row["flags"] and row != fastest and len(rows) < MAX_BARS:
            rows[row["flags"]] = row
    return rows


def bar(name: str, color: int, x: list, y: list[str]) -> dict:
    """Stretches of horizontal bars, x long, in the rows y; None has no length."""
    return {"name": name, "color": color, "x": x, "y": y}


def memory_chart(rows: dict[str, dict], capacity: float) -> dict:
    """Stacked bars by kind, of what a process holds at the peak; a row without kinds is one bar."""
    gib_by_kind: list[dict[str, float]] = []
    for row in rows.values():
        gib = dict(row.get("at_peak_gib") or {})
        reserved = row.get("reserved_gib") or row["memory_gib"]["reserved"]
        rest = "allocator, CUDA, NCCL" if gib else "reserved, all kinds"
        gib[rest] = max(0.0, reserved - sum(gib.values()))
        gib_by_kind.append(gib)
    kinds: dict[str, None] = {}  # in their order, each once
    for gib in gib_by_kind:
        kinds |= dict.fromkeys(gib)
    names = ["\n".join(textwrap.wrap(name, NAME_WIDTH)) for name in rows]
    traces = [bar(kind, color, [gib.get(kind) for gib in gib_by_kind], names) for color, kind in enumerate(kinds)]
    return {"title": "Memory of the fullest GPU", "unit": "GiB", "bars": True, "limit": capacity, "traces": traces}


def time_chart(time_ms: dict[str, float]) -> dict:
    """One bar, of what a step's time is spent on."""
    traces = []
    for color, (key, name) in enumerate(TIMES.items()):
        if time_ms.get(key):
            traces.append(bar(name, color, [time_ms[key]], ["step"]))
    return {"title": "Time of a step", "unit": "ms", "bars": True, "traces": traces}


def scaling_chart(rows: list[dict], title: str, unit: str, key: str) -> dict:
    """A figure over world sizes, a line for one shard group over all nodes and one for a shard group a node."""
    lines: dict[str, list[tuple]] = {"one shard group": [], "a shard group a node": []}
    for row in rows:
        name = "a shard group a node" if row["dp_replicate_size"] > 1 else "one shard group"
        lines[name].append((row["gpus"], row[key]))
    traces = []
    for color, (name, points) in enumerate(lines.items()):
        if points:
            x, y = zip(*points, strict=True)
            traces.append({"name": name, "color": color, "x": x, "y": y, "points": True})
    return {"title": title, "unit": unit, "x_title": "GPUs", "traces": traces}
