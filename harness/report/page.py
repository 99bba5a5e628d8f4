"""Page: report.html of a run, drawn from its metrics.jsonl and config.json alone: charts in SVG, no script, one file.

A run writes it where it ends; `python -m harness.report.page OUTPUT_DIR/RUN_NAME` writes that of a run that was killed.
"""

import html
import json
import math
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

from harness import base, job
from harness import flags as flag_rules
from harness.report.figures import FIGURES, find
from harness.report.files import read_metrics

WIDTH, HEIGHT = 1000, 300  # of a chart's drawing, which CSS stretches
BUCKETS = 120  # points of a line; more are drawn as their means and a band from the least to the greatest
MAX_DOTS = 20  # a line of at most so many points has a dot at each
MAX_STORIES, MAX_STORY = 6, 900  # how many stories, of how many characters


def write_report(folder: pathlib.Path) -> pathlib.Path:
    """Writes report.html into a run's folder; its path.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    lines, config = read_metrics(folder / "metrics.jsonl"), base.read_config(folder)
    path, template = folder / "report.html", (flag_rules.ASSETS / "page.html").read_text(encoding="utf-8")
    values = {"title": text(folder.resolve().name), "body": draw_body(folder.resolve().name, lines, config)}
    # in one pass: a placeholder in a run's text stays text
    job.replace_file(path, re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template))
    return path


def draw_body(name: str, lines: list[dict], config: dict) -> str:
    final = lines[-1] if lines else {}
    sections = {
        "Stories": draw_stories(lines),
        "Plan and reality": plan_and_reality(final),
        "Configuration": configuration(config),
    }
    parts = [f"<h1>{text(name)}</h1><p class=muted>{text(summary(lines, config))}</p>"]
    parts += [draw_tiles(final), draw_charts([line for line in lines if "final" not in line])]
    parts += [f"<h2>{heading}</h2>\n{content}" for heading, content in sections.items() if content]
    return "\n".join([*parts, "<footer>drawn from metrics.jsonl and config.json of the run's folder</footer>"])


def text(words: object) -> str:
    return html.escape(str(words))


def is_number(value: object) -> bool:
    """Whether a value of a line is a finite number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---- Words -----------------------------------------------------------------------------------------------------------


def summary(lines: list[dict], config: dict) -> str:
    """What was trained on what, how far it came, and in what time."""
    flags, words = config.get("flags", {}), []
    if flags:
        words.append(f"{flags.get('model', '')} on {base.one_or_more(flags.get('dataset', ''))}")
    if "world_size" in config:
        words.append(f"{config['world_size']} x {config.get('gpu') or 'CPU'}")
    if config.get("branched_from"):
        origin = config["branched_from"]
        words.append(f"branched from {pathlib.Path(origin['folder']).name} at step {origin['step']}")
    words.append(how_far(lines, flags))
    if lines and is_number(lines[-1].get("elapsed_seconds")):
        seconds = round(lines[-1]["elapsed_seconds"])
        words.append(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} since the first start")
    if len(config.get("starts", [])) > 1:
        words.append(f"{len(config['starts'])} starts")
    return " · ".join(words)


def how_far(lines: list[dict], flags: dict) -> str:
    for line in lines:
        for key in ("loss", "grad_norm", "eval_loss", "eval_loss_ema"):
            if key in line and not is_number(line[key]):
                return f"{key.replace('_', ' ')} was not finite at step {line['step']:,}"
    if not lines:
        return "no step was logged"
    if "final" in lines[-1]:
        return "complete"
    of_all = f" of {flags['num_steps']:,}" if "num_steps" in flags else ""
    return f"ended at step {lines[-1]['step']:,}{of_all}"


def in_words(key: str) -> str:
    """A key of metrics.jsonl as a person says it, such as "memory reserved"."""
    words = key.replace("_", " ")
    said = {"peak ": "", " percent": "", " ms": "", "mfu": "MFU", "per sec": "a second"}
    for of_key, of_person in (said | {"eval loss": "held-out loss", "ema": "of the average"}).items():
        words = words.replace(of_key, of_person)
    return words


def draw_tiles(final: dict) -> str:
    """The last figures, in large."""
    tiles = []
    for key, figure in FIGURES.items():
        if figure.tile and is_number(final.get(key)):
            value = short(final[key]) if final[key] >= 1e6 else format(final[key], figure.tile)
            unit = f" {figure.unit}" if figure.unit in ("%", "GiB", "ms") else ""
            tiles.append(f"<div class=tile><small>{in_words(key)}</small><b>{value}{unit}</b></div>")
    rows = max(1, math.ceil(len(tiles) / 6))  # as equal as they can be
    return f"<div class=tiles style=--columns:{max(1, math.ceil(len(tiles) / rows))}>{''.join(tiles)}</div>"


def draw_stories(lines: list[dict]) -> str:
    """What the model wrote, at most MAX_STORIES from the first to the last."""
    written = [(line["step"], story) for line in lines for story in line.get("samples", [])]
    if not written:
        return ""
    places = {round(number * (len(written) - 1) / (MAX_STORIES - 1)) for number in range(MAX_STORIES)}
    drawn = []
    for step, story in (written[place] for place in sorted(places)):
        words = story["text"].removeprefix(story["prompt"])
        if len(words) > MAX_STORY:
            words = words[:MAX_STORY] + " …"
        words = f"<em>{text(story['prompt'])}</em>{text(words)}"
        drawn.append(f"<div class=story><small>step {step:,}</small><p>{words}</p></div>")
    return f"<div class=card>{''.join(drawn)}</div>"


def plan_and_reality(final: dict) -> str:
    """The run's own plan beside its figures; empty where it was not planned, as on a CPU."""
    rows = []
    for key in ("peak_memory_alloc", "peak_memory_reserved", "step_time_ms"):
        planned, measured = final.get(f"predicted_{key}"), final.get(key)
        if is_number(planned) and is_number(measured) and planned > 0:
            unit, change = FIGURES[key].unit, 100 * (measured / planned - 1)
            rows.append([in_words(key), f"{planned:,.2f} {unit}", f"{measured:,.2f} {unit}", f"{change:+.1f} %"])
    head = "<tr><th></th><th>planned</th><th>measured</th><th>measured over planned</th></tr>"
    return draw_table(rows, head) if rows else ""


def configuration(config: dict) -> str:
    """The flags that were given, machine and versions."""
    shown = {f"--{name.replace('_', '-')}": value for name, value in config.get("given", {}).items()}
    shown |= {key: config[key] for key in ("gpu", "world_size", "commit") if config.get(key)}
    shown |= config.get("versions", {})
    rows = []
    for name, value in shown.items():
        if isinstance(value, list):
            value = base.one_or_more(value)
        rows.append([name, value if isinstance(value, str) else json.dumps(value)])
    return draw_table(rows, look="flags") if rows else ""


def draw_table(rows: Iterable[list[str]], head: str = "", look: str = "") -> str:
    """A table, of which the first cell of a row is its name."""
    drawn = []
    for name, *cells in rows:
        drawn.append(f"<tr><th>{text(name)}</th>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="card scroll"><table class="{look}"><thead>{head}</thead>{"".join(drawn)}</table></div>'


# ---- Charts ----------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Of a line, what lies in a bucket of steps."""

    step: float
    least: float
    mean: float
    greatest: float


class Axis(NamedTuple):
    low: float
    high: float

    def place(self, value: float, size: int) -> int:
        """Where a value is on an axis of this size."""
        return round(size * (value - self.low) / (self.high - self.low))

    def ticks(self) -> list[float]:
        """At most 6 round numbers on it."""
        size = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (size * factor) <= 5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def draw_charts(lines: list[dict]) -> str:
    """A chart for each title in the table of figures for which there are numbers."""
    of_titles: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for figure in FIGURES.values():
        of_titles.setdefault(figure.chart, {})
    for key in dict.fromkeys(key for line in lines for key in line):
        of_key = find(key)
        numbers = [(line["step"], line[key]) for line in lines if is_number(line.get(key))]
        if of_key and numbers and numbers not in of_titles[of_key.chart].values():  # of one rank it is the slowest
            name = key.partition("/")[2] or ("training" if key == "loss" else in_words(key))
            of_titles[of_key.chart][name] = numbers
    charts = [draw_chart(title, of_names) for title, of_names in of_titles.items() if title and of_names]
    return f"<div class=charts>{''.join(charts)}</div>" if charts else ""


def points_of(numbers: list[tuple[int, float]]) -> list[Point]:
    """At most BUCKETS points of a line (step, value), each of as many of its numbers in a row."""
    size = math.ceil(len(numbers) / BUCKETS)
    points = []
    for first in range(0, len(numbers), size):
        steps, values = zip(*numbers[first : first + size], strict=True)
        points.append(Point(sum(steps) / len(steps), min(values), math.fsum(values) / len(values), max(values)))
    return points


def draw_chart(title: str, numbers: dict[str, list[tuple[int, float]]]) -> str:
    """A chart of lines (step, value), by their names, over steps."""
    lines = {name: points_of(of_line) for name, of_line in numbers.items()}
    figure = next(figure for figure in FIGURES.values() if figure.chart == title)
    across = widened(min(line[0].step for line in lines.values()), max(line[-1].step for line in lines.values()))
    low = min(point.least for line in lines.values() for point in line)
    tops = sorted(point.greatest for line in lines.values() for point in line)
    # the start of a long run, and its spikes, lie far above the rest: they leave the picture
    high = tops[-1 - len(tops) // 20] if max(map(len, numbers.values())) > BUCKETS else tops[-1]
    is_loss = figure.unit == "nats per token"
    upward = widened(low if is_loss else min(low, 0.0), high, margin=0.05)
    grid = "".join(f"M0 {HEIGHT - upward.place(tick, HEIGHT)}h{WIDTH}" for tick in upward.ticks())
    drawn, legend = [f'<path class=grid d="{grid}"/>'], []
    for number, (name, line) in enumerate(lines.items()):
        drawn.append(draw_line(line, across, upward, number % 8))
        last = f"<b>{short(numbers[name][-1][1])}</b>"
        if len(lines) > 1 or figure.key.endswith("/SOURCE"):  # else the title says what it is
            last = f"<span class=dot style=background:var(--c{number % 8})></span>{text(name)} {last}"
        legend.append(f"<span>{last}</span>")
    labels = [f"<i class=y style=bottom:{upward.place(tick, 1000) / 10}%>{short(tick)}</i>" for tick in upward.ticks()]
    steps = [tick for tick in across.ticks() if tick == int(tick)]
    labels += [f"<i class=x style=left:{across.place(tick, 1000) / 10}%>{short(tick)}</i>" for tick in steps]
    heading = f"<h3>{title} <span>{figure.unit}</span></h3><div>{''.join(legend)}</div>"
    svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio=none role=img aria-label='{title} over steps'>"
    return (
        f"<div class=card><div class=legend>{heading}</div>"
        f"<div class=chart>{svg}{''.join(drawn)}</svg>{''.join(labels)}</div></div>\n"
    )


def widened(low: float, high: float, margin: float = 0.0) -> Axis:
    """An axis from one number to another, with a margin at the upper end and, unless it is zero, at the lower one."""
    if low == high:
        low, high = low - abs(low), high + (abs(high) or 1.0)
    return Axis(low - margin * (high - low) if low else low, high + margin * (high - low))


def draw_line(line: list[Point], across: Axis, upward: Axis, color: int) -> str:
    """A line through the means, and the band in which the numbers lie."""

    def path(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{across.place(x, WIDTH)},{HEIGHT - upward.place(y, HEIGHT)}" for x, y in points)

    drawn = ""
    if any(point.least < point.greatest for point in line):
        edge = [(point.step, point.greatest) for point in line] + [(point.step, point.least) for point in line[::-1]]
        drawn = f'<polygon style=fill:var(--c{color}) points="{path(edge)}"/>'
    drawn += f'<polyline style=stroke:var(--c{color}) points="{path((point.step, point.mean) for point in line)}"/>'
    if len(line) <= MAX_DOTS:
        dots = "".join(f"M{path([(point.step, point.mean)])}h0" for point in line)
        drawn += f'<path class=dots style=stroke:var(--c{color}) d="{dots}"/>'
    return drawn


def short(value: float) -> str:
    """A number of an axis or a legend, such as 12,500 or 52 K, 0.0003 or 3e-6."""
    size = abs(value)
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= 10 * factor or (factor > 1e3 and size >= factor):
            return f"{value / factor:.4g} {unit}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}".replace("e-0", "e-")


if __name__ == "__main__":
    try:
        print(write_report(pathlib.Path(sys.argv[1])))
    except (IndexError, OSError) as problem:
        sys.exit(f"usage: python -m harness.report.page OUTPUT_DIR/RUN_NAME ({problem})")
