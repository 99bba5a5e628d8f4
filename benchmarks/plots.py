"""Plots of the suites' JSON files. Colours are Okabe and Ito's, which colour-blind readers tell apart."""

import json
import pathlib
import re
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from ratios import ratios

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
BLUE, ORANGE, GREY = COLOURS[0], COLOURS[1], "#666666"
plt.rcParams |= {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
}


def draw(folder: pathlib.Path) -> list[pathlib.Path]:
    """A PNG for each part that was measured in the JSON files of `folder`."""
    drawn = []
    for suite in ("cpu", "gpu", "compare", "compare-cpu", "fabric"):
        file = folder / f"{suite}.json"
        if not file.exists():
            continue
        results = json.loads(file.read_text())
        parts = results["parts"]
        figures = {name: kind(parts[name]) for name, kind in PLOTS.items() if name in parts and measured(parts[name])}
        if suite == "cpu" and any(ratio_rows(part) for part in parts.values()):
            figures["ratios"] = ratio_plot(parts)
        if suite == "compare-cpu" and any(ratio_rows(part) for part in parts.values()):
            figures["ratios"] = round_plot(parts)
        for name, figure in figures.items():
            if results["rehearsal"]:
                figure.suptitle("REHEARSAL: demo model on a CPU, not a measurement", color=ORANGE)
            drawn.append(folder / (f"{suite}.png" if name == suite else f"{suite}-{name}.png"))
            figure.savefig(drawn[-1])
            plt.close(figure)
    if (folder / "learn.json").exists():
        figure = learning(json.loads((folder / "learn.json").read_text()))
        drawn.append(folder / "learn.png")
        figure.savefig(drawn[-1])
        plt.close(figure)
    return drawn


def measured(part: dict) -> bool:
    return any(config["runs"] for config in part["configs"].values())


def median(config: dict, key: str) -> float:
    return statistics.median(run[key] for run in config["runs"])


def where(part: dict) -> str:
    """The machine that the newest run was made on."""
    run = max((run for config in part["configs"].values() for run in config["runs"]), key=lambda run: run["date"])
    return f"{run['ranks']} ranks on {run['on']}" if run["ranks"] > 1 else run["on"]


def bars(part: dict) -> plt.Figure:
    """Throughput of each configuration, its runs as dots, what was predicted as a diamond."""
    configs = list(part["configs"].items())
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.42 * len(configs)))
    top = max(run[part["figure"]] for _, config in configs for run in config["runs"])
    for row, (_, config) in enumerate(configs):
        if not config["runs"]:
            axes.text(0.01 * top, row, config.get("error", "not run")[:80], va="center", color=GREY, style="italic")
            continue
        values = [run[part["figure"]] for run in config["runs"]]
        axes.barh(row, statistics.median(values), height=0.62, color=BLUE)
        axes.plot(values, [row] * len(values), "|", color="black", markersize=7)
        mfu = f", {median(config, 'mfu_percent'):.1f} % MFU" if "mfu_percent" in config["runs"][0] else ""
        axes.text(max(values) + 0.015 * top, row, f"{statistics.median(values):,.0f}{mfu}", va="center")
    predictions = [(row, config["predicted"]) for row, (_, config) in enumerate(configs) if config["predicted"]]
    if predictions and predictions[0][1]["on"].split()[-1] in where(part):  # predicted for this machine
        values = [predicted["tokens_per_sec_per_gpu"] for _, predicted in predictions]
        rows = [row for row, _ in predictions]
        axes.plot(values, rows, "D", color=ORANGE, markerfacecolor="white", label="predicted before measuring")
        figure.legend(loc="outside lower right")
        top = max(top, *values)
    axes.set(xlabel="tokens per second per rank", title=f"{part['what']}\n{where(part)}", xlim=(0, 1.22 * top))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yticks(range(len(configs)), [name for name, _ in configs])
    axes.set_ylim(len(configs) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return figure


def scatter(part: dict) -> plt.Figure:
    """Memory against speed; further up and to the left is better."""
    figure, axes = plt.subplots(figsize=(8, 4.2))
    for name, config in part["configs"].items():
        if config["runs"]:
            # a CPU has no memory figure: a rehearsal shows the time to the first step in its place
            key = "peak_memory_reserved" if "peak_memory_reserved" in config["runs"][0] else "first_step_s"
            point = (median(config, key), median(config, part["figure"]))
            axes.plot(*point, "o", color=BLUE)
            axes.annotate(name, point, xytext=(6, 3), textcoords="offset points", fontsize=8)
    label = "memory held per GPU, GiB" if key == "peak_memory_reserved" else "seconds to the first step"
    axes.set(xlabel=label, ylabel="tokens per second per rank", title=f"{part['what']}\n{where(part)}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    return figure


def curves(part: dict) -> plt.Figure:
    """Training loss over tokens, all on top of each other, and held-out loss at the end, where they differ."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    names = [name for name, config in part["configs"].items() if config["runs"]]
    for row, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        runs = part["configs"][name]["runs"]
        tokens, losses = zip(*runs[0]["curve"], strict=True)
        left.plot([t / 1e3 for t in tokens], losses, color=colour, linewidth=1.3, alpha=0.8, label=name)
        right.plot([run["eval_loss"] for run in runs], [row] * len(runs), "o", color=colour)
    left.set(xlabel="thousand tokens", ylabel="training loss", title=f"Loss on the same data\n{where(part)}")
    left.legend(loc="upper right")
    right.set(xlabel="held-out loss at the end", title="Each dot one run")
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.margins(x=0.2, y=0.15)
    return figure


def costs(part: dict) -> plt.Figure:
    """Microseconds per token and GPU over model size and over sequence length."""
    figure, both = plt.subplots(1, 2, figsize=(9, 3.8))
    points: list[list[tuple]] = [[], []]
    for name, config in part["configs"].items():
        if config["runs"] and "bf16-pure" not in name:
            model = re.search(r"-([\d.]+)b", name)[1]
            length = int(re.search(r"([\d,]+) tokens", name)[1].replace(",", ""))
            cost = 1e6 / median(config, part["figure"])
            if length == 8192:
                points[0].append((float(model), cost, f"{model} B"))
            if model == "3":
                points[1].append((length / 1024, cost, f"{length // 1024} k"))
    labels = ("parameters, billions", "sequence length, in 1,024 tokens")
    for axes, series, label in zip(both, points, labels, strict=True):
        series.sort()
        if series:
            axes.plot(*list(zip(*series, strict=True))[:2], "o-", color=BLUE)
        for x, y, name in series:
            axes.annotate(name, (x, y), xytext=(4, -12), textcoords="offset points", fontsize=8)
        axes.set(xlabel=label, ylabel="microseconds per token and rank")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
    both[0].set_title(f"Model sizes at 8,192 tokens\n{where(part)}")
    both[1].set_title("SmolLM3-3B at several lengths\n")
    return figure


def bandwidth(part: dict) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4))
    for (name, config), colour in zip(part["configs"].items(), COLOURS, strict=False):
        rows = config["runs"][-1]["sizes"]
        mebibytes, buses = [row["bytes"] / 2**20 for row in rows], [row["busbw_gb_per_sec"] for row in rows]
        axes.plot(mebibytes, buses, "o-", color=colour, markersize=4, label=name.replace("_", "-"))
    axes.set_xscale("log", base=4)
    axes.set_xticks(mebibytes, [f"{size:g}" for size in mebibytes])
    axes.set(xlabel="message, MiB", ylabel="bus bandwidth, GB/s", title=f"{part['what']}\n{where(part)}")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def ratio_rows(part: dict) -> dict[str, list[float]]:
    """The pairs of a part whose figure is a speed or a time; those of losses have a plot of their own."""
    pairs = part["pairs"].items() if part["figure"] != "eval_loss" else ()
    return {label: values for label, pair in pairs if (values := ratios(part, *pair))}


def ratio_plot(parts: dict) -> plt.Figure:
    """Every pair as a dot with its extremes; ratios of seconds are turned round, so that right is faster."""
    rows = []
    for part in parts.values():
        for label, values in ratio_rows(part).items():
            seconds = part["figure"].endswith("_s") or label.endswith("seconds")
            rows.append((label, [1 / value if seconds else value for value in values]))
    figure, axes = plt.subplots(figsize=(8.6, 0.9 + 0.36 * len(rows)))
    for row, (_, values) in enumerate(rows):
        middle = statistics.median(values)
        colour = BLUE if middle >= 0.97 else ORANGE
        axes.plot([min(values), max(values)], [row, row], color=colour, linewidth=2, alpha=0.5)
        axes.plot(middle, row, "o", color=colour)
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 8}
        axes.annotate(f"{middle:.3g}", (middle, row), **above)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], [f"{tick:g}" for tick in ticks])
    axes.set_xlim(0.4, 700)
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="times as fast as what stands after the slash", title=where(next(iter(parts.values()))))
    return figure


def round_plot(parts: dict) -> plt.Figure:
    """A panel for each part: every pair's ratio of every round as a dot, their median as a line."""
    measured_parts = [part for part in parts.values() if ratio_rows(part)]
    rows_of = [ratio_rows(part) for part in measured_parts]
    heights = [1 + len(rows) for rows in rows_of]
    figure, panels = plt.subplots(
        len(heights), 1, figsize=(8.6, 0.8 + 0.27 * sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    for axes, part, rows in zip(panels[:, 0], measured_parts, rows_of, strict=True):
        for row, values in enumerate(rows.values()):
            middle = statistics.median(values)
            colour = BLUE if middle >= 1 else ORANGE
            axes.plot(values, [row] * len(values), "o", color=colour, markersize=4, alpha=0.5)
            axes.plot(middle, row, "|", color=colour, markersize=13, markeredgewidth=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_title(part["what"])
    panels[-1, 0].set_xlabel(f"times as fast as what stands after the slash, on {where(measured_parts[0])}")
    return figure


def learning(results: dict) -> plt.Figure:
    """A row for each size and text: held-out loss over the learning rate, and over tokens at the best rate."""
    import learning as sweeps

    rows = sweeps.summary(results)
    cases = list(dict.fromkeys((row["size"], row["text"]) for row in rows))
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3.2 * len(cases)), squeeze=False)
    for (size, text), (left, right) in zip(cases, axes, strict=True):
        of_case = [row for row in rows if (row["size"], row["text"]) == (size, text)]
        for row, colour in zip(of_case, (ORANGE, BLUE), strict=False):
            runs = sweeps.runs_of(results, size=size, text=text, optimizer=row["optimizer"])
            sweep = sorted((run["lr"], run["eval_loss"]) for run in runs if run["seed"] == sweeps.SEEDS[0])
            left.plot(*zip(*sweep, strict=True), "o-", color=colour, label=row["optimizer"])
            others = [run["eval_loss"] for run in runs if run["seed"] != sweeps.SEEDS[0]]
            left.plot([row["lr"]] * len(others), others, "o", color=colour, markerfacecolor="white")
            for run in runs:
                if run["lr"] == row["lr"]:
                    tokens, losses = zip(*run["held_out"], strict=True)
                    right.plot([count / 1e3 for count in tokens], losses, color=colour, linewidth=1.2, alpha=0.8)
        left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="held-out loss")
        left.set_title(f"{size}, {text}: the sweep (white: other seeds)")
        left.legend()
        right.set(yscale="log", xlabel="thousand tokens", title="at the best rate, each line a seed")
        for plot in (left, right):
            plot.yaxis.set_major_formatter("{x:.2g}")
            plot.yaxis.set_minor_formatter("{x:.2g}")
            plot.tick_params(which="minor", labelsize=7)
    return figure


PLOTS = {
    "ladder": bars,
    "peers": bars,
    "ranks": bars,
    "memory": scatter,
    "loss": curves,
    "scale": costs,
    "fabric": bandwidth,
}
