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

SIZE = 1000  # width and height of a chart's drawing, which CSS stretches
BUCKETS = 150  # points of a line; more are drawn as their means and a band from the least to the greatest
MAX_DOTS = 60  # evaluations that are marked one by one
MAX_ROWS = 12  # of a table
MAX_STORIES, MAX_STORY = 6, 900  # how many stories, of how many characters
LOGARITHMIC = ("Loss", "Held-out loss by source", "Gradient norm")


class Line(NamedTuple):
    name: str
    points: list[tuple[float, float]]  # (step, value)
    dots: bool  # whether each point is marked


class Axis(NamedTuple):
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> int:
        """Where a value is on the axis, from 0 to SIZE."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(SIZE * (value - low) / (high - low))

    def ticks(self) -> list[float]:
        """At most 6 round numbers on it."""
        if self.logarithmic and self.high >= 5 * self.low:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            for digits in ((1, 2, 5), (1,)):
                numbers = [digit * 10.0**decade for decade in decades for digit in digits]
                numbers = [number for number in numbers if self.low <= number <= self.high]
                if len(numbers) <= 6:
                    return numbers
            return numbers[:: math.ceil(len(numbers) / 6)]
        size = 10 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(size * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (size * factor) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


# ---- The page --------------------------------------------------------------------------------------------------------


def write_report(folder: pathlib.Path) -> pathlib.Path:
    """Writes report.html into a run's folder; its path.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    path, template = folder / "report.html", (flag_rules.ASSETS / "page.html").read_text(encoding="utf-8")
    values = {"title": text(folder.resolve().name), "body": body(folder, lines, base.read_config(folder))}
    # in one pass: a placeholder in a run's text stays text
    job.replace_file(path, re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template))
    return path


def body(folder: pathlib.Path, lines: list[dict], config: dict) -> str:
    logged = [line for line in lines if "final" not in line]
    final = lines[-1] if lines else {}
    parts = [f"<h1>{text(folder.resolve().name)}</h1><p class=muted>{text(summary(lines, config))}</p>"]
    parts += [tiles(final), charts(logged)]
    sections = {
        "Stories": stories(lines),
        "Plan and reality": plan_and_reality(final),
        "Skipped steps": skipped_steps(logged),
        "Starts": starts(config),
        "Configuration": configuration(config),
    }
    parts += [f"<h2>{heading}</h2>\n{content}" for heading, content in sections.items() if content]
    parts.append("<footer>drawn from metrics.jsonl and config.json of the run's folder</footer>")
    return "\n".join(part for part in parts if part)


def text(words: object) -> str:
    return html.escape(str(words))


def is_number(value: object) -> bool:
    """Whether a value of a line is a finite number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def table(rows: Iterable[Iterable[object]], head: Iterable[str] = (), look: str = "") -> str:
    """A table, of which the first cell of a row is its name."""
    parts = [f'<div class="card scroll"><table class="{look}">']
    if head:
        parts.append("<thead><tr>" + "".join(f"<th>{text(name)}</th>" for name in head) + "</tr></thead>")
    for name, *cells in rows:
        parts.append(f"<tr><th>{text(name)}</th>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>")
    return "".join([*parts, "</table></div>"])


# ---- Words -----------------------------------------------------------------------------------------------------------


def summary(lines: list[dict], config: dict) -> str:
    """What was trained on what, and how far it came."""
    flags, words = config.get("flags", {}), []
    if flags:
        words.append(f"{flags.get('model', '')} on {base.one_or_more(flags.get('dataset', ''))}")
    if "world_size" in config:
        words.append(f"{config['world_size']} x {config.get('gpu') or 'CPU'}")
    if config.get("branched_from"):
        origin = config["branched_from"]
        words.append(f"branched from {pathlib.Path(origin['folder']).name} at step {origin['step']}")
    words.append(how_far(lines, flags))
    final = lines[-1] if lines else {}
    if is_number(final.get("elapsed_seconds")):
        seconds = round(final["elapsed_seconds"])
        words.append(f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} since the first start")
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
    of_all = f" of {flags['num_steps']:,}" if is_number(flags.get("num_steps")) else ""
    return f"ended at step {lines[-1]['step']:,}{of_all}"


def tiles(final: dict) -> str:
    """The last figures, in large."""
    drawn = []
    for key, figure in FIGURES.items():
        if figure.tile and is_number(final.get(key)):
            value = short(final[key]) if final[key] >= 1e6 else format(final[key], figure.tile)
            unit = f" {figure.unit}" if figure.unit in ("%", "GiB", "ms") else ""
            drawn.append(f"<div class=tile><small>{in_words(key)}</small><b>{value}{unit}</b></div>")
    rows = max(1, math.ceil(len(drawn) / 6))  # as equal as they can be
    return f"<div class=tiles style=--columns:{max(1, math.ceil(len(drawn) / rows))}>{''.join(drawn)}</div>"


def stories(lines: list[dict]) -> str:
    """What the model wrote, at most MAX_STORIES from the first to the last."""
    written = []
    for line in lines:
        written += [(line["step"], story) for story in line.get("samples", [])]
    last = len(written) - 1
    chosen = sorted({round(place * last / (MAX_STORIES - 1)) for place in range(MAX_STORIES)}) if written else []
    drawn = []
    for step, story in (written[number] for number in chosen):
        prompt, words = story["prompt"], story["text"]
        if words.startswith(prompt):
            words = words.removeprefix(prompt)
        else:
            prompt = ""
        if len(words) > MAX_STORY:
            words = words[:MAX_STORY] + " …"
        drawn.append(f"<div class=story><small>step {step:,}</small><p><em>{text(prompt)}</em>{text(words)}</p></div>")
    return f"<div class=card>{''.join(drawn)}</div>" if drawn else ""


def plan_and_reality(final: dict) -> str:
    """The run's own plan beside its figures; empty where it was not planned, as on a CPU."""
    rows = []
    for key in ("peak_memory_alloc", "peak_memory_reserved", "step_time_ms"):
        planned, measured = final.get(f"predicted_{key}"), final.get(key)
        if is_number(planned) and is_number(measured) and planned > 0:
            unit, change = FIGURES[key].unit, 100 * (measured / planned - 1)
            name = key.removesuffix("_ms").replace("_", " ")
            rows.append([name, f"{planned:,.2f} {unit}", f"{measured:,.2f} {unit}", f"{change:+.1f} %"])
    return table(rows, ["", "planned", "measured", "measured over planned"]) if rows else ""


def skipped_in(lines: list[dict]) -> list[dict]:
    """The skipped steps of the lines, each {"step": 41, "reason": "...", "samples": [first, last]}."""
    return [entry for line in lines for entry in line.get("skipped", [])]


def skipped_steps(lines: list[dict]) -> str:
    skipped = skipped_in(lines)
    rows = []
    for entry in skipped[-MAX_ROWS:]:
        first, last = entry["samples"]
        rows.append([f"{entry['step']:,}", entry["reason"], f"{first:,} to {last:,}"])
    return f"<p>{len(skipped):,} in all</p>{table(rows, ['step', 'why', 'global samples'])}" if rows else ""


def starts(config: dict) -> str:
    """When the run started and resumed, and how many steps it repeated."""
    listed = config.get("starts", [])
    if len(listed) < 2 and not any(start.get("changed") for start in listed):
        return ""
    keys = {
        "time": "time",
        "step": "from step",
        "lost_steps": "steps lost",
        "world_size": "ranks",
        "changed": "changed",
    }
    rows = [[start.get(key, "") for key in keys] for start in listed[-MAX_ROWS:]]
    lost = sum(start.get("lost_steps", 0) for start in listed)
    return f"<p>{len(listed)} starts, {lost:,} logged steps done again</p>{table(rows, keys.values())}"


def configuration(config: dict) -> str:
    """The flags that were given, machine and versions."""
    shown = {f"--{name.replace('_', '-')}": value for name, value in config.get("given", {}).items()}
    shown |= {key: config[key] for key in ("gpu", "world_size", "commit") if config.get(key)} | config.get(
        "versions", {}
    )
    rows = []
    for name, value in shown.items():
        if isinstance(value, list):
            value = base.one_or_more(value)
        rows.append([name, value if isinstance(value, str) else json.dumps(value)])
    return table(rows, look="flags") if rows else ""


def in_words(key: str) -> str:
    """A key of metrics.jsonl as a person says it, such as "memory reserved"."""
    words = key.removeprefix("peak_").removesuffix("_percent").removesuffix("_ms").replace("_", " ")
    for short_word, word in (
        ("mfu", "MFU"),
        ("eval loss", "held-out loss"),
        ("ema", "of the average"),
        ("per sec", "a second"),
    ):
        words = words.replace(short_word, word)
    return words


# ---- Charts ----------------------------------------------------------------------------------------------------------


def charts(lines: list[dict]) -> str:
    """A chart for each title in the table of figures for which there are numbers."""
    of_titles: dict[str, list[Line]] = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        figure = find(key)
        points = [(line["step"], line[key]) for line in lines if figure and is_number(line.get(key))]
        drawn = of_titles.get(figure.chart, []) if figure else []
        if points and figure.chart and all(line.points != points for line in drawn):  # of one rank it is the slowest
            name = key.partition("/")[2] or ("training" if key == "loss" else in_words(key))
            dots = len(points) == 1 or (figure.name.startswith("eval/") and len(points) <= MAX_DOTS)
            of_titles.setdefault(figure.chart, []).append(Line(name, points, dots))
    if not of_titles:
        return ""
    marks = [entry["step"] for entry in skipped_in(lines)]
    order = dict.fromkeys(figure.chart for figure in FIGURES.values() if figure.chart in of_titles)
    charts = [chart(title, of_titles[title], marks if title in ("Loss", "Gradient norm") else []) for title in order]
    return f"<div class=charts>{''.join(charts)}</div>"


def chart(title: str, lines: list[Line], marks: list[int]) -> str:
    """A chart of lines over steps; `marks` are the steps of marks at its foot."""
    across = Axis(min(line.points[0][0] for line in lines), max(line.points[-1][0] for line in lines))
    if across.low == across.high:
        across = Axis(across.low - 1, across.high + 1)
    upward = choose_axis(title, lines)
    paths, legend = [], []
    grid = "".join(f"M0 {SIZE - upward.place(tick)}h{SIZE}" for tick in upward.ticks())
    paths.append(f'<path class=grid d="{grid}"/>')
    for number, line in enumerate(lines):
        color = f"var(--c{number % 8})"
        paths += draw(line, across, upward, color)
        last = f"<b>{short(line.points[-1][1])}</b>"
        if len(lines) > 1 or "source" in title:  # else the title says what it is
            last = f"<span class=dot style=background:{color}></span>{text(line.name)} {last}"
        legend.append(f"<span>{last}</span>")
    if marks:
        places = sorted({across.place(step) for step in marks})
        feet = "".join(f"M{place} {SIZE}v-40" for place in places)
        paths.append(f'<path class=marks d="{feet}"/>')
    labels = [f"<i class=y style=bottom:{upward.place(tick) / 10:g}%>{short(tick)}</i>" for tick in upward.ticks()]
    steps = [tick for tick in across.ticks() if tick == int(tick)]
    labels += [f"<i class=x style=left:{across.place(tick) / 10:g}%>{short(tick)}</i>" for tick in steps]
    notes = [next(figure.unit for figure in FIGURES.values() if figure.chart == title)]
    if marks:
        notes.append("skipped steps at the foot")
    note = ", ".join(words for words in notes if words)
    drawing = f"<svg viewBox='0 0 {SIZE} {SIZE}' preserveAspectRatio=none role=img aria-label='{title} over steps'>"
    return (
        f"<div class=card><div class=legend><h3>{title} <span>{note}</span></h3><div>{''.join(legend)}</div></div>"
        f"<div class=chart>{drawing}{''.join(paths)}</svg>{''.join(labels)}</div></div>\n"
    )


def choose_axis(title: str, lines: list[Line]) -> Axis:
    """The vertical axis: from zero or, for losses and norms, logarithmic and fitted to what comes after the first
    twentieth of a long run, which begins far above the rest."""
    values = []
    for line in lines:
        begin = len(line.points) // 20 if len(line.points) > BUCKETS else 0
        values += [value for _, value in line.points[begin:]]
    low, high = min(values), max(values)
    if title in LOGARITHMIC and low > 0:
        return Axis(low / 1.03, high * 1.03, logarithmic=True)
    return Axis(min(low, 0.0), 1.06 * high if high > 0 else max(1.0, high), False)


def draw(line: Line, across: Axis, upward: Axis, color: str) -> list[str]:
    """The paths of a line: its points or, of many, their means and the band in which they lie."""
    points = [(across.place(step), value) for step, value in line.points if not upward.logarithmic or value > 0]
    paths = []
    if len(points) > 2 * BUCKETS:
        buckets: dict[int, list[float]] = {}
        for place, value in points:
            buckets.setdefault(place * BUCKETS // (SIZE + 1), []).append(value)
        centers = {number: round((number + 0.5) * SIZE / BUCKETS) for number in buckets}
        edge = [(centers[number], max(values)) for number, values in buckets.items()]
        edge += [(centers[number], min(values)) for number, values in reversed(buckets.items())]
        paths.append(f'<path class=band style=fill:{color} d="{path_of(edge, upward)}z"/>')
        points = [(centers[number], math.fsum(values) / len(values)) for number, values in buckets.items()]
    paths.append(f'<path style=stroke:{color} d="{path_of(points, upward)}"/>')
    if line.dots:
        dots = "".join(f"M{place} {SIZE - upward.place(value)}h0" for place, value in points)
        paths.append(f'<path class=dots style=stroke:{color} d="{dots}"/>')
    return paths


def path_of(points: list[tuple[int, float]], upward: Axis) -> str:
    """The `d` of a path through points (place, value), relative and without those on a straight level."""
    corners = [(place, SIZE - upward.place(value)) for place, value in points]
    kept = [
        corner
        for before, corner, after in zip([None, *corners], corners, [*corners[1:], None], strict=False)
        if before is None or after is None or not before[1] == corner[1] == after[1]
    ]
    (x, y), steps = kept[0], []
    for next_x, next_y in kept[1:]:
        steps.append(f"{next_x - x} {next_y - y}".replace(" -", "-"))
        x, y = next_x, next_y
    return f"M{kept[0][0]} {kept[0][1]}" + (f"l{' '.join(steps)}" if steps else "")


def short(value: float) -> str:
    """A number of an axis or a legend, such as 12,500 or 52 K, 0.0003 or 3e-6."""
    size = abs(value)
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= 10 * factor or (factor > 1e3 and size >= factor):
            return f"{value / factor:.4g} {unit}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-")


if __name__ == "__main__":
    try:
        print(write_report(pathlib.Path(sys.argv[1])))
    except (IndexError, OSError) as problem:
        sys.exit(f"usage: python -m harness.report.page OUTPUT_DIR/RUN_NAME ({problem})")
