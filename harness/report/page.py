"""Page: report.html of one run or of several, made from metrics.jsonl and config.json alone. Called by `report` when a
run ends, and as a program: python -m harness.report.page RUN [RUN...]. Independent of how a figure is computed, and of
how the page looks, which is assets/page.html."""

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import sys

from harness import base
from harness.base import UserError, first_line, one_or_more
from harness.flags import Settings
from harness.report import page_parts as parts
from harness.report.figure_list import (
    BY_KEY,
    FIGURES,
    GRAD_NORM,
    LOSS,
    Chart,
    Figure,
    figures_by_chart,
    find_figure,
    sources_in,
    split_source,
)
from harness.report.run_files import Run, is_number, read_run

MAX_STRETCHES = 1000  # of a line in a chart; each has at most two points
MAX_SOURCES_OF_HALF = 4  # of the data, in a chart of half the page's width
MAX_STORIES = 6  # of a prompt, that are not folded away


def write_report(folders: list[pathlib.Path], output: pathlib.Path) -> pathlib.Path:
    """The page of one run, or of several side by side; its path.

    Raises:
        UserError: a folder holds no run, or plotly is not installed.
        OSError: `output` cannot be written; nothing is left of it.
    """
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(folder)) for run, folder in zip(runs, folders, strict=True)]
    if len(runs) == 1:
        title, summary = runs[0].name, summary_of(runs[0])
        sections = sections_of_one(runs[0])
    else:
        title, summary = f"{len(runs)} runs side by side", ""
        sections = sections_of_several(runs)
    footer = "made from metrics.jsonl and config.json by python -m harness.report.page"
    unreadable = sum(run.unreadable for run in runs)
    if unreadable:
        footer += f"; {unreadable} lines of metrics.jsonl could not be read"
    return parts.write_page(output, title, summary, sections, footer)


def sections_of_one(run: Run) -> list[dict]:
    sections = [parts.section("", parts.tiles(final_figures(run)))]
    sections += figure_sections([run])
    written = stories(run)
    if written:
        sections.append(parts.section("Stories", written))
    planned = plan_beside_actual(run)
    if planned:
        sections.append(parts.section("Plan beside actual", planned))
    skipped = skipped_steps(run)
    if skipped:
        sections.append(parts.section("Skipped steps", skipped_table(skipped)))
    sections += start_sections(run)
    sections += configuration_sections(run)
    return sections


def sections_of_several(runs: list[Run]) -> list[dict]:
    sections = [parts.section("", side_by_side(runs))]
    sections += figure_sections(runs)
    sections.append(parts.section("What differs", differences(runs)))
    of_runs = []
    for run in runs:
        written = stories(run)
        if written:
            of_runs += [{"kind": "subheading", "text": run.name}, written]
    if of_runs:
        sections.append(parts.section("Stories", *of_runs))
    return sections


# ----------------------------------------------------------------------------------------------------------------------
# How far a run came


def summary_of(run: Run) -> str:
    """What was trained on what, and how far it came."""
    flags, world_size = run.flags(), run.config.get("world_size")
    words = []
    if flags:
        words.append(f"{flags.get('model', '')} on {one_or_more(flags.get('dataset', ''))}")
    if world_size:
        words.append(f"{world_size} x {run.config.get('gpu') or 'CPU'}")
    words += [origin_of(run), state_of(run), times_of(run)]
    return " · ".join(word for word in words if word)


def origin_of(run: Run) -> str:
    """The run and step that this one branched from; empty for any other."""
    origin = run.config.get("branched_from")
    if not isinstance(origin, dict):  # none, or an edited config.json
        return ""
    return f"branched from {pathlib.Path(str(origin.get('folder'))).name} at step {origin.get('step')}"


def state_of(run: Run) -> str:
    """How far the run came."""
    for line in run.lines:
        for key in ("loss", "grad_norm", "eval_loss", "eval_loss_ema"):
            if key in line and not is_number(line[key]):
                return f"{key.replace('_', ' ')} was no number at step {line['step']:,}"
    if run.complete:
        return "complete"
    if not run.lines:
        return "no step was logged"
    state = f"ended at step {run.final['step']:,}"
    num_steps = run.flags().get("num_steps")
    if is_number(num_steps):
        state += f" of {num_steps:,}"
    return state


def times_of(run: Run) -> str:
    """How long it trained, and how much time passed since its first start; empty where that was not measured."""
    trained, elapsed = run.final.get("trained_seconds"), run.final.get("elapsed_seconds")
    if not (is_number(trained) and is_number(elapsed)):
        return ""
    return f"{as_duration(trained)} of training, {as_duration(elapsed)} since the first start"


def as_duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03."""
    return str(datetime.timedelta(seconds=round(seconds)))


def format_figure(metrics: dict, figure: Figure) -> str:
    """A figure as a person reads it; empty where there is none."""
    value = metrics.get(figure.key)
    return figure.written.format(value) if is_number(value) else ""


def final_figures(run: Run) -> dict[str, str]:
    return {figure.title: format_figure(run.final, figure) for figure in FIGURES if figure.written}


def side_by_side(runs: list[Run]) -> dict:
    """A row for each run, with the figures that any of them has."""
    shown = []
    for figure in FIGURES:
        if figure.written and any(format_figure(run.final, figure) for run in runs):
            shown.append(figure)
    rows = []
    for run in runs:
        figures = [format_figure(run.final, figure) for figure in shown]
        rows.append([run.name, *figures, state_of(run)])
    return parts.table(rows, ["run", *(figure.title for figure in shown), "state"], look="runs")


# ----------------------------------------------------------------------------------------------------------------------
# Charts


def figure_sections(runs: list[Run]) -> list[dict]:
    """The section of charts, with the titles of those that were not logged; none where nothing was."""
    drawn = charts_of(runs)
    if not drawn:
        return []
    figures = parts.section("Figures", parts.charts(drawn), switches=True)
    absent = absent_charts(runs)
    if absent:
        figures["parts"].append(parts.note(f"not logged: {', '.join(absent)}"))
    return [figures]


def charts_on_page() -> dict[Chart, list[Figure]]:
    return {chart: figures for chart, figures in figures_by_chart().items() if chart.on_page}


def keys_logged(runs: list[Run]) -> set[str]:
    keys: set[str] = set()
    for run in runs:
        for line in run.lines:
            keys |= line.keys()
    return keys


def absent_charts(runs: list[Run]) -> list[str]:
    logged = keys_logged(runs)
    absent = []
    for chart, figures in charts_on_page().items():
        if chart.expected and not any(figure.key in logged for figure in figures):
            absent.append(chart.title)
    return absent


def charts_of(runs: list[Run]) -> list[dict]:
    """The charts for which there are figures: of one run a line for each figure, of several a line for each run."""
    logged = keys_logged(runs)
    sources: dict[str, None] = {}  # of all runs, each once
    for run in runs:
        sources |= dict.fromkeys(sources_in(run.lines))
    drawn = []
    for chart, figures in charts_on_page().items():
        keys = keys_in_chart(figures, list(sources))
        if len(runs) == 1:
            drawn.append(draw(chart, chart.title, [(runs[0], key, name) for key, name in keys.items()]))
            continue
        shown = {key: name for key, name in keys.items() if key in logged}
        for key, name in shown.items():
            title = chart.title
            if len(shown) > 1:
                title += f", {name}"
            drawn.append(draw(chart, title, [(run, key, run.name) for run in runs]))
    return [chart for chart in drawn if chart["traces"]]


def keys_in_chart(figures: list[Figure], sources: list[str]) -> dict[str, str]:
    """The keys of the lines of a chart, with their names."""
    keys = {}
    for figure in figures:
        if figure.by_source:
            key, _ = split_source(figure.key)
            keys |= {f"{key}/{source}": source for source in sources}
        else:
            keys[figure.key] = figure.line_name
    return keys


def draw(chart: Chart, title: str, lines: list[tuple[Run, str, str]]) -> dict:
    """What the template draws of a chart with these lines: (run, key, name)."""
    traces = []
    for color, (run, key, name) in enumerate(lines):
        trace = trace_of(run, key, name, color)
        if trace:
            traces.append(trace)
    of_sources = any(name == split_source(key)[1] for _, key, name in lines)
    unit, marks = chart.unit, []
    if chart in (LOSS, GRAD_NORM) and len({run.name for run, _, _ in lines}) == 1:
        marks = [entry["step"] for entry in skipped_steps(lines[0][0])]
    if marks:
        unit = ", ".join(words for words in (unit, "skipped steps dotted") if words)
    return {
        "title": title,
        "unit": unit,
        "marks": marks,
        "traces": traces,
        "loss_axis": chart.loss_axis,
        "from_zero": chart.from_zero,
        "stepped": chart.stepped,
        "legend": len(traces) > 1 or of_sources,  # the title does not say which source a single line is of
        "wide": of_sources and len(traces) > MAX_SOURCES_OF_HALF,
    }


def trace_of(run: Run, key: str, name: str, color: int) -> dict | None:
    """A line of a chart, over steps and over tokens; None where nothing was logged."""
    points = []
    for line in run.lines:
        value = line.get(key)
        if is_number(value) and is_number(line["step"]):
            points.append((line["step"], line.get("tokens_seen"), value))
    if not points:
        return None
    steps, tokens, values = zip(*thin(points), strict=True)
    return {
        "name": name,
        "color": color,
        "x": steps,
        "tokens": tokens if all(map(is_number, tokens)) else None,
        "y": values,
        "points": find_figure(key).group == "eval",  # evaluations are few: marked one by one
    }


def thin(points: list[tuple]) -> list[tuple]:
    """Points (step, tokens, value) of a long run, thinned out: the least and the greatest value of each stretch."""
    length = math.ceil(len(points) / MAX_STRETCHES)
    if length <= 2:
        return points
    kept = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        least = min(stretch, key=lambda point: point[2])
        greatest = max(stretch, key=lambda point: point[2])
        kept += sorted({least, greatest})
    return kept


# ----------------------------------------------------------------------------------------------------------------------
# Skipped steps


def skipped_steps(run: Run) -> list[dict]:
    """The skipped steps that the lines of a run list, each {"step": 41, "reason": "...", "samples": [first, last]}."""
    listed = []
    for line in run.lines:
        entries = line.get("skipped")
        if isinstance(entries, list):
            listed += [entry for entry in entries if isinstance(entry, dict) and is_number(entry.get("step"))]
    return listed


def skipped_table(skipped: list[dict]) -> dict:
    rows = []
    for entry in skipped:
        samples = ""
        if isinstance(entry.get("samples"), list):
            samples = " to ".join(format_count(sample) for sample in entry["samples"])
        rows.append([format_count(entry["step"]), str(entry.get("reason", "")), samples])
    return parts.table(rows, ["step", "why", "global samples"])


# ----------------------------------------------------------------------------------------------------------------------
# Stories, plan, starts, configuration


def stories(run: Run) -> dict | None:
    """What the model wrote, prompt by prompt in the order of steps; None where it wrote nothing."""
    lines = [*run.lines, run.final] if run.complete else run.lines
    of_prompt: dict[str, list[dict]] = {}
    for line in lines:
        samples = line.get("samples")
        if not isinstance(samples, list):
            continue
        for sample in samples:
            story = story_of(line, sample)
            if story:
                of_prompt.setdefault(sample["prompt"], []).append(story)
    if not of_prompt:
        return None
    prompts = [{"stories": written, "shown": evenly_spaced(len(written))} for written in of_prompt.values()]
    return {"kind": "stories", "prompts": prompts}


def story_of(line: dict, sample) -> dict | None:
    """One story with the step and the loss at which it was written; None for an entry that is none."""
    if not isinstance(sample, dict):
        return None
    prompt, text = sample.get("prompt"), sample.get("text")
    if not (isinstance(prompt, str) and isinstance(text, str)):
        return None
    caption = [f"step {line['step']:,}"]
    loss = format_figure(line, BY_KEY["eval_loss"])
    if loss:
        caption.append(f"held-out loss {loss}")
    if text.startswith(prompt):
        return {"caption": caption, "prompt": prompt, "text": text[len(prompt) :]}
    return {"caption": caption, "prompt": "", "text": text}


def evenly_spaced(count: int) -> list[int]:
    """At most MAX_STORIES of the numbers below `count`, from the first to the last."""
    last = count - 1
    return sorted({round(place * last / (MAX_STORIES - 1)) for place in range(MAX_STORIES)})


def plan_beside_actual(run: Run) -> dict | None:
    """The run's own plan beside its figures; None where it was not planned, as on a CPU."""
    compared = (
        ("memory allocated", "peak_memory_alloc", "GiB"),
        ("memory reserved", "peak_memory_reserved", "GiB"),
        ("time of a step", "step_time_ms", "ms"),
    )
    rows = []
    for name, key, unit in compared:
        planned, actual = run.final.get(f"predicted_{key}"), run.final.get(key)
        if is_number(planned) and is_number(actual) and planned > 0:
            change = 100 * (actual / planned - 1)
            rows.append([name, f"{planned:,.2f} {unit}", f"{actual:,.2f} {unit}", f"{change:+.1f} %"])
    if not rows:
        return None
    return parts.table(rows, ["", "planned", "actual", "actual over planned"])


def start_sections(run: Run) -> list[dict]:
    """When the run started and resumed, and how many steps it repeated; none where config.json does not list it."""
    listed = run.config.get("starts")
    if not isinstance(listed, list):
        return []
    starts = [start for start in listed if isinstance(start, dict)]
    if not starts:
        return []
    rows, lost_steps = [], 0
    for start in starts:
        rows.append([str(start.get(key, "")) for key in ("time", "step", "lost_steps", "world_size", "changed")])
        if is_number(start.get("lost_steps")):
            lost_steps += start["lost_steps"]
    words = "one start, nothing lost"
    if len(starts) > 1:
        words = f"{len(starts)} starts, {lost_steps:,} logged steps done again"
    listing = parts.table(rows, ["time", "from step", "steps lost", "ranks", "changed"])
    sections = [parts.section("Starts", parts.text(words), listing)]
    mixture = mixture_table(starts)
    if mixture:
        sections.append(parts.section("Mixture", mixture))
    return sections


def mixture_table(starts: list[dict]) -> dict | None:
    """The shares of the sources, a row for each change, as the latest start has them; None for a single source.

    A start's `mixture` is a list of {"from_sample": 0, "from_step": 0 or None, "weights": {"web": 0.7}}.
    """
    changes = []
    for start in starts:
        if isinstance(start.get("mixture"), list):
            changes = [change for change in start["mixture"] if isinstance(change, dict)]
    changes = [change for change in changes if isinstance(change.get("weights"), dict)]
    sources: dict[str, None] = {}  # each once
    for change in changes:
        sources |= dict.fromkeys(change["weights"])
    if len(sources) < 2:
        return None
    rows = []
    for change in changes:
        shares = [format_share(change["weights"].get(source)) for source in sources]
        rows.append([format_count(change.get("from_step")), format_count(change.get("from_sample")), *shares])
    return parts.table(rows, ["from step", "from sample", *sources])


def format_share(share) -> str:
    return f"{100 * share:.4g} %" if is_number(share) else ""


def format_count(count) -> str:
    return f"{count:,}" if is_number(count) else ""


def configuration_sections(run: Run) -> list[dict]:
    """The flags that are not at their defaults, commit, GPU and versions, then all other flags; none without any."""
    flags, defaults = as_text(run.flags()), as_text(dataclasses.asdict(Settings()))
    changed, at_default = {}, {}
    for key, value in flags.items():
        if value == defaults.get(key):
            at_default[key] = value
        else:
            changed[key] = value
    machine = as_text({key: run.config[key] for key in ("commit", "gpu", "world_size") if key in run.config})
    if not (flags or machine):
        return []
    shown = changed | machine | as_text(run.config.get("versions"))
    rest = parts.folded("flags at their defaults", parts.table(at_default.items(), look="flags"))
    return [parts.section("Configuration", parts.table(shown.items(), look="flags"), rest)]


def differences(runs: list[Run]) -> dict:
    """The flags, versions and commits in which the runs differ."""
    configurations = []
    for run in runs:
        machine = {key: run.config.get(key) for key in ("commit", "world_size", "gpu")}
        configurations.append(as_text(run.flags()) | as_text(run.config.get("versions")) | as_text(machine))
    keys: dict[str, None] = {}  # in their order, each once
    for configuration in configurations:
        keys |= dict.fromkeys(configuration)
    rows = []
    for key in keys:
        values = [configuration.get(key) for configuration in configurations]
        if key != "run_name" and len(set(values)) > 1:
            rows.append([key, *(value or "" for value in values)])
    if not rows:
        return parts.text("nothing")
    return parts.table(rows, ["", *(run.name for run in runs)], look="flags")


def as_text(values) -> dict[str, str]:
    """The values of a dictionary as text, JSON for those that are no text; nothing of what is no dictionary."""
    if not isinstance(values, dict):
        return {}
    return {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report.page", description="Makes report.html of finished, stopped or killed runs."
    )
    parser.add_argument(
        "run", nargs="+", metavar="RUN", type=pathlib.Path, help="a run's folder; several: side by side"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="FILE", help="[RUN/report.html; of several report.html here]"
    )
    args = parser.parse_args(arguments)
    output = args.output
    if output is None:
        output = args.run[0] / "report.html" if len(args.run) == 1 else pathlib.Path("report.html")
    try:
        print(write_report(args.run, output))
    except OSError as error:
        sys.exit(f"harness.report.page: error: {output}: cannot be written ({error.strerror})")
    except UserError as error:
        sys.exit(f"harness.report.page: error: {first_line(error)}")


if __name__ == "__main__":
    base.never_fail()
    main()
