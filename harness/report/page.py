"""Page: report.html of a run, one file without scripts, made from its metrics.jsonl and config.json."""

import html
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from harness import base, job
from harness import flags as flag_rules
from harness.report.files import describe_end, read_metrics
from harness.report.metrics import METRICS, Metric, find_metric

WIDTH, HEIGHT = 1000, 300  # of a chart in SVG units; CSS stretches it
MAX_POINTS = 120  # per line; a longer one is drawn as means of intervals, with a band from minimum to maximum
MAX_SAMPLES, MAX_SAMPLE_LENGTH = 6, 900  # samples, and characters of each

Line = list[tuple[int, float]]  # (step, value)


def write_report(folder: pathlib.Path) -> pathlib.Path:
    """Write report.html into a run's folder. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    lines, config = read_metrics(folder / "metrics.jsonl"), base.read_config(folder)
    path = folder / "report.html"
    name = text(folder.resolve().name)
    last = lines[-1] if lines else {}
    parts = [f"<h1>{name}</h1><p class=muted>{text(describe_state(lines, config))}</p>", draw_tiles(last)]
    parts += [draw_charts([line for line in lines if "final" not in line], resumed_steps(config))]
    parts += [draw_samples(lines), draw_plan(last), draw_origin(config)]
    job.replace_file(path, fill_template(name, "\n".join(parts)))
    return path


def fill_template(title: str, body: str) -> str:
    """A page with this title and body, in HTML."""
    template = (flag_rules.ASSETS / "page.html").read_text(encoding="utf-8")
    values = {"title": title, "body": body}
    # in one pass, so that placeholders in a run's text stay text
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def text(words: object) -> str:
    return html.escape(str(words))


def is_number(value: object) -> bool:
    """True for a finite number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and math.isfinite(value)


# ---- Words -----------------------------------------------------------------------------------------------------------


def describe_state(lines: list[dict], config: dict) -> str:
    """Model, data and devices of a run, and its last step."""
    flags, words, total_text = config.get("flags", {}), [], ""
    if flags:
        words.append(f"{flags['model']} on {base.one_or_more(flags['dataset'])}")
        words.append(f"{config['world_size']} x {config['gpu'] or 'CPU'}")
        total_text = f" of {flags['num_steps']:,}"
    if not lines:
        words.append("no step was logged")
    elif "final" in lines[-1]:
        words.append("complete")
    else:
        words.append(f"ended at step {lines[-1]['step']:,}{total_text}")
        words += [f"{label(key)} not finite" for key, value in lines[-1].items() if value is None]
        words += [f"step {one['step']:,} skipped: {one['reason']}" for one in lines[-1].get("skipped", [])[-1:]]
    return " · ".join(words)


def resumed_steps(config: dict) -> list[int]:
    """The steps from which later starts resumed."""
    return [start["step"] for start in config.get("starts", [])[1:]]


def draw_origin(config: dict) -> str:
    """Command, commit and starts of the run; empty without a config.json."""
    if not config.get("starts"):
        return ""
    rows = {"command": config.get("command", ""), "commit": config.get("commit") or "unknown"}
    if "parameters" in config:
        rows = {"model": f"{config['parameters']:,} parameters"} | rows
    for number, start in enumerate(config["starts"]):
        words = start["time"].replace("T", " ").replace("Z", " UTC")
        if start["step"]:
            words += f", from step {start['step']:,}"
        if start.get("changed"):
            words += f", changed: {start['changed']}"
        rows["resumed" if number else "started"] = f"{rows['resumed']}\n{words}" if "resumed" in rows else words
    cells = [f"<tr><th>{name}</th><td class=words>{text(words)}</td></tr>" for name, words in rows.items() if words]
    return f"<h2>Where it comes from</h2>\n<div class=card><table>{''.join(cells)}</table></div>"


def label(key: str) -> str:
    """A key of metrics.jsonl in words, such as "memory reserved"."""
    words = re.sub("^peak_|_(percent|ms)$", "", key).replace("_", " ")
    return words.replace("per sec", "per second")


def draw_tiles(last: dict) -> str:
    """The last values of the main metrics, in large type."""
    tiles = []
    for key, metric in METRICS.items():
        if metric.tile and key in last:
            tiles.append(f"<div class=tile><small>{label(key)}</small><b>{with_unit(metric, last[key])}</b></div>")
    return f"<div class=tiles>{''.join(tiles)}</div>"


def with_unit(metric: Metric, value: float | None) -> str:
    """The value of a metric with a tile; None, the null of metrics.jsonl, is NaN or infinite."""
    if value is None or not is_number(value):
        return "not finite"
    number = short(value) if value >= 1e6 else format(value, metric.tile)
    return f"{number} {metric.unit}" if metric.unit in ("%", "GiB", "ms") else number


def draw_samples(lines: list[dict]) -> str:
    """The samples of all prompts at the last step, and at earlier ones evenly from the whole run, together about
    MAX_SAMPLES."""
    sampled = [line for line in lines if line.get("samples")]
    if not sampled:
        return ""
    stride = math.ceil(sum(len(line["samples"]) for line in sampled) / MAX_SAMPLES)
    drawn: list[str] = []
    for line in sampled[::-stride][::-1]:
        for sample in line["samples"]:
            words = text(sample["text"].removeprefix(sample["prompt"])[:MAX_SAMPLE_LENGTH])
            words = f"<p><em>{text(sample['prompt'])}</em>{words}</p>"
            about = f"step {line['step']:,}, {describe_end(sample)}"
            drawn.append(f"<div class=sample><small>{about}</small>{words}</div>")
    return f"<h2>Samples</h2>\n<div class=card>{''.join(drawn)}</div>"


def draw_plan(last: dict) -> str:
    """A table of planned and measured metrics; empty for a run without a plan, as on a CPU."""
    rows = []
    for key in ("peak_memory_alloc", "peak_memory_reserved", "step_time_ms"):
        planned, measured = last.get(f"predicted_{key}"), last.get(key)
        if is_number(planned) and is_number(measured) and planned > 0:
            unit, change = METRICS[key].unit, 100 * (measured / planned - 1)
            cells = (f"{planned:,.2f} {unit}", f"{measured:,.2f} {unit}", f"{change:+.1f} %")
            rows.append(f"<tr><th>{label(key)}</th><td>{'</td><td>'.join(cells)}</td></tr>")
    if not rows:
        return ""
    head = "<tr><th></th><th>planned</th><th>measured</th><th>measured over planned</th></tr>"
    return f"<h2>Plan and measurement</h2>\n<div class=card><table><thead>{head}</thead>{''.join(rows)}</table></div>"


# ---- Charts ----------------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    low: float
    high: float

    def position(self, value: float, size: int) -> int:
        """The position of a value on an axis of length `size`."""
        return round(size * (value - self.low) / (self.high - self.low))

    def ticks(self) -> dict[float, str]:
        """At most 6 round numbers on the axis, each with its label."""
        size = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (size * factor) <= 5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        numbers = [number * step for number in range(first, last + 1)]
        digits = 1 + math.floor(math.log10(max(map(abs, numbers)))) - math.floor(math.log10(step) + 1e-9)
        return {number: short(number, digits) for number in numbers}


def draw_charts(lines: list[dict], resumed: list[int]) -> str:
    """A chart for each title in the table of metrics that has values, with marks at the steps `resumed`."""
    charts: dict[str, dict[str, Line]] = {metric.chart: {} for metric in METRICS.values() if metric.chart}
    units = {metric.chart: metric.unit for metric in METRICS.values()}
    for key in dict.fromkeys(key for line in lines for key in line):
        metric = find_metric(key)
        numbers = [(line["step"], line[key]) for line in lines if is_number(line.get(key))]
        if metric and metric.chart and numbers:
            name = key.partition("/")[2] or ("training" if key == "loss" else label(key))
            charts[metric.chart][name] = numbers
    drawn = [draw_chart(title, units[title], named, resumed) for title, named in charts.items() if named]
    return f"<div class=charts>{''.join(drawn)}</div>"


def downsample(line: Line) -> list[tuple[float, float, float, float]]:
    """(mean step, minimum, mean, maximum) for at most MAX_POINTS equal intervals of a line."""
    size = math.ceil(len(line) / MAX_POINTS)
    points = []
    for first in range(0, len(line), size):
        steps, numbers = zip(*line[first : first + size], strict=True)
        points.append((statistics.fmean(steps), min(numbers), statistics.fmean(numbers), max(numbers)))
    return points


def draw_chart(
    title: str, unit: str, named: dict[str, Line], resumed: list[int], colors: Sequence[int] = range(sys.maxsize)
) -> str:
    """A chart of named lines over steps, with a mark at each step in `resumed`. `colors` are numbers, one per line."""
    lines = {name: downsample(line) for name, line in named.items()}
    steps, minima, _, maxima = map(sorted, zip(*(point for line in lines.values() for point in line), strict=True))
    # the start and the spikes of a long run lie far above the rest and are cut off
    high = maxima[-1 - len(maxima) // 20] if max(map(len, named.values())) > MAX_POINTS else maxima[-1]
    low = minima[0] if unit == "nats per token" else min(minima[0], 0.0)
    across, upward = widened(steps[0], steps[-1]), widened(low, high, margin=0.05)
    grid = "".join(f"M0 {HEIGHT - upward.position(tick, HEIGHT)}h{WIDTH}" for tick in upward.ticks())
    drawn, legend = [f'<path class=grid d="{grid}"/>'], []
    for step in dict.fromkeys(resumed):
        if across.low < step < across.high:
            mark = f"<title>resumed from step {step:,}</title>"
            drawn.append(f'<path class=resumed d="M{across.position(step, WIDTH)} 0v{HEIGHT}">{mark}</path>')
    for color, (name, line) in zip(colors, lines.items(), strict=False):
        means = [(step, mean) for step, _, mean, _ in line]
        stroke = "polyline style=stroke"
        if len(means) == 1:
            means *= 2  # a line without a length is drawn as a dot
            stroke = "polyline class=point style=stroke"
        band = [(step, top) for step, _, _, top in line] + [(step, bottom) for step, bottom, _, _ in line[::-1]]
        for shape, corners in (("polygon style=fill", band), (stroke, means)):
            places = " ".join(f"{across.position(x, WIDTH)},{HEIGHT - upward.position(y, HEIGHT)}" for x, y in corners)
            drawn.append(f'<{shape}:var(--c{color % 8}) points="{places}"/>')
        dot = f"<span class=dot style=background:var(--c{color % 8})></span>"
        legend.append(f"<span>{dot}{text(name)} <b>{short(named[name][-1][1])}</b></span>")
    labels = [
        f"<i class=y style=bottom:{upward.position(tick, 1000) / 10}%>{words}</i>"
        for tick, words in upward.ticks().items()
    ]
    labels += [
        f"<i class=x style=left:{across.position(tick, 1000) / 10}%>{words}</i>"
        for tick, words in across.ticks().items()
        if tick == int(tick)  # no fractions of a step
    ]
    heading = f"<h3>{title} <span>{unit}</span></h3><div>{''.join(legend)}</div>"
    svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio=none role=img aria-label='{title} over steps'>"
    return (
        f"<div class=card><div class=legend>{heading}</div>"
        f"<div class=chart>{svg}{''.join(drawn)}</svg>{''.join(labels)}</div></div>\n"
    )


def widened(low: float, high: float, margin: float = 0.0) -> Axis:
    """An axis from `low` to `high`, with a margin at the upper end and, unless it is zero, at the lower one. If they
    differ only by rounding, so that labels between them would need more digits than fit, it includes 0."""
    if high - low <= 1e-6 * abs(high):
        low, high = low - abs(low), high + (abs(high) or 1.0)
    return Axis(low - margin * (high - low) if low else low, high + margin * (high - low))


def short(value: float, digits: int = 3) -> str:
    """A number for an axis or a legend, such as 9,500, 52 K, 0.0003 or 3e-6, with at least `digits` digits."""
    size = abs(value)
    if size >= 1e13:
        return f"{value:.{digits}g}".replace("e+", "e")
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= 10 * factor or (factor > 1e3 and size >= factor):
            return f"{value / factor:.{max(digits, 4)}g} {unit}"
    whole_digits = len(f"{size:.0f}")
    return f"{value:,.{max(digits, whole_digits)}g}".replace("e-0", "e-")
