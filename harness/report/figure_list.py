"""Figures: the list of all that a line of metrics.jsonl has, one entry each, and how it is shown by the trackers, the
page, Prometheus, the wandb view and docs/TRACKING.md, which all ask this list. Independent of how a figure is computed.
"""

import dataclasses

SOURCE = "SOURCE"  # in a key and a name of the list: stands for the name of each source of the data


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of the page and of the wandb view; figures with the same chart share it, in the order of the list."""

    title: str
    unit: str = ""  # shown behind the title
    section: str = "Other"  # of the wandb view
    on_page: bool = True
    from_zero: bool = True  # whether the page's vertical axis begins at 0
    loss_axis: bool = False  # the page's axis is linear or logarithmic by its switch, and fits the later steps
    stepped: bool = False  # a value holds until the next one
    expected: bool = True  # whether the page says so where it was not logged


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number in metrics.jsonl, and where it is shown: nowhere but in metrics.jsonl, the trackers and Prometheus where
    an optional field is left out. One whose key and name end with `/SOURCE` is a number for each source of the data,
    such as `eval_loss/web`; its chart has a line for each, and Prometheus a label `source`."""

    key: str  # in metrics.jsonl; in Prometheus behind `training_`
    name: str | None  # in wandb and tensorboard, group/name; None: it is their axis
    unit: str
    words: str  # its meaning, in a short sentence without a capital and a full stop
    label: str = ""  # on the page; by default the key with blanks
    written: str | None = None  # format of a tile on the page and of a column where runs stand side by side
    chart: Chart | None = None
    line: str = ""  # name of its line in the chart; by default the label
    compared: bool = False  # in the tables in which wandb and tensorboard compare runs
    over_tokens: bool = False  # the trackers show it over tokens too, to compare batch sizes and world sizes

    @property
    def title(self) -> str:
        return self.label or self.key.replace("_", " ")

    @property
    def line_name(self) -> str:
        return self.line or self.title

    @property
    def group(self) -> str:
        return (self.name or "").partition("/")[0]

    @property
    def by_source(self) -> bool:
        return self.key.endswith(f"/{SOURCE}")


LOSS = Chart("Loss", section="Loss", from_zero=False, loss_axis=True)
TOKENS = Chart("Tokens", section="Data", on_page=False)
THROUGHPUT = Chart("Throughput", "tokens per second, all ranks", section="Speed")
STEP_TIME = Chart("Time of a step", "ms", section="Speed", on_page=False)
MFU = Chart("MFU", "% of the dense bf16 peak", section="Speed")
MEMORY = Chart("Memory of the fullest GPU", "GiB at the peak", section="Memory")
DATA_WAIT = Chart("Waiting for data", "% of the step", section="Data")
PADDING = Chart("Padding", "% of the windows", section="Data", expected=False)
SOURCES_LOSS = Chart("Held-out loss of the sources", section="Loss", from_zero=False, loss_axis=True, expected=False)
SOURCES_SHARE = Chart("Shares of the sources", "of the tokens, as asked for", "Data", stepped=True, expected=False)
SOURCES_EPOCHS = Chart("Epochs of the sources", section="Data", expected=False)
GOODPUT = Chart("Goodput", "%", section="Speed", on_page=False)
GRAD_NORM = Chart("Gradient norm", "before clipping", section="Training", from_zero=False)
SKIPPED = Chart("Skipped steps", section="Training", on_page=False, stepped=True)
ROUTER_LOSS = Chart("Router loss", section="Training", from_zero=False, expected=False)
EXPERT_LOAD = Chart("Load of the fullest expert", "of an even share", "Training", from_zero=False, expected=False)
LEARNING_RATE = Chart("Learning rate", section="Training")

FIGURES = (  # tiles, charts and tables have this order
    Figure(
        "loss",
        "train/loss",
        "nats per token",
        "mean cross-entropy over every trained token of the global batch",
        written="{:.4f}",
        chart=LOSS,
        line="training",
        compared=True,
        over_tokens=True,
    ),
    Figure(
        "eval_loss",
        "eval/loss",
        "nats per token",
        "mean loss over the held-out tokens, at evaluations",
        label="held-out loss",
        written="{:.4f}",
        chart=LOSS,
        line="held out",
        compared=True,
        over_tokens=True,
    ),
    Figure(
        "eval_loss/SOURCE",
        "eval/loss/SOURCE",
        "nats per token",
        "mean loss over the held-out tokens of a source, at evaluations",
        chart=SOURCES_LOSS,
        over_tokens=True,
    ),
    Figure(
        "eval_loss_ema",
        "eval/loss_ema",
        "nats per token",
        "mean loss of the averaged weights (`--ema`) over the held-out tokens, at evaluations",
        label="held-out loss of the average",
        written="{:.4f}",
        chart=LOSS,
        line="held out, average",
        over_tokens=True,
    ),
    Figure(
        "eval_loss_ema/SOURCE",
        "eval/loss_ema/SOURCE",
        "nats per token",
        "mean loss of the averaged weights (`--ema`) over the held-out tokens of a source, at evaluations",
    ),
    Figure(
        "step",
        None,
        "steps",
        "optimizer steps so far, counted from the run's first start",
        label="steps",
        written="{:,}",
    ),
    Figure(
        "tokens_seen",
        "data/tokens_seen",
        "tokens",
        "tokens that were trained on so far, on all ranks",
        label="tokens",
        written="{:,}",
        chart=TOKENS,
    ),
    Figure(
        "tokens_per_sec",
        "perf/tokens_per_sec",
        "tokens/s",
        "tokens of the window over its seconds, on all ranks",
        label="tokens per second",
        written="{:,.0f}",
        chart=THROUGHPUT,
        compared=True,
    ),
    Figure(
        "tokens_per_sec_per_gpu", "perf/tokens_per_sec_per_gpu", "tokens/s", "tokens_per_sec over the number of ranks"
    ),
    Figure("steps_per_sec", "perf/steps_per_sec", "steps/s", "optimizer steps of the window over its seconds"),
    Figure(
        "step_time_ms",
        "perf/step_time_ms",
        "ms",
        "mean time of a step in the window, on rank 0",
        label="ms a step",
        written="{:,.1f}",
        chart=STEP_TIME,
    ),
    Figure(
        "slowest_rank_ms",
        "perf/slowest_rank_ms",
        "ms",
        "the longest step_time_ms that any rank's own clock saw",
        chart=STEP_TIME,
    ),
    Figure("slowest_rank", "perf/slowest_rank", "rank", "the rank that worked longest between its collectives"),
    Figure(
        "mfu_percent",
        "perf/mfu_percent",
        "%",
        "model FLOPs utilization, 100 x actual_tflops_per_sec / theoretical_tflops_total",
        label="MFU",
        written="{:.2f} %",
        chart=MFU,
        compared=True,
    ),
    Figure(
        "actual_tflops_per_sec",
        "perf/actual_tflops_per_sec",
        "TFLOPS",
        "tokens_per_sec x FLOPs per token, on all ranks",
    ),
    Figure(
        "theoretical_tflops_total",
        "perf/theoretical_tflops_total",
        "TFLOPS",
        "dense bf16 peak of one GPU x number of ranks",
    ),
    Figure(
        "peak_memory_reserved",
        "memory/peak_reserved_gib",
        "GiB",
        "the most that torch's allocator held of a GPU, the largest of all ranks",
        label="memory reserved",
        written="{:.2f} GiB",
        chart=MEMORY,
        line="reserved",
        compared=True,
    ),
    Figure(
        "peak_memory_alloc",
        "memory/peak_alloc_gib",
        "GiB",
        "the most that tensors were given, the largest of all ranks",
        chart=MEMORY,
        line="allocated",
    ),
    Figure(
        "peak_memory_active",
        "memory/peak_active_gib",
        "GiB",
        "the most in blocks that were in use or awaited by a stream, the largest of all ranks",
        chart=MEMORY,
        line="active",
    ),
    Figure(
        "data_wait_percent",
        "data/wait_percent",
        "%",
        "share of the window that the host waited for batches, the largest of all ranks",
        label="waiting for data",
        written="{:.1f} %",
        chart=DATA_WAIT,
        line="data wait",
    ),
    Figure(
        "padding_percent",
        "data/padding_percent",
        "%",
        "share of padding in the windows that were trained on since the last line",
        label="padding",
        written="{:.1f} %",
        chart=PADDING,
    ),
    Figure(
        "share/SOURCE",
        "data/share/SOURCE",
        "",
        "share of a source in the tokens that was asked for at this step, 0 to 1",
        chart=SOURCES_SHARE,
    ),
    Figure("epochs/SOURCE", "data/epochs/SOURCE", "epochs", "passes over a source so far", chart=SOURCES_EPOCHS),
    Figure(
        "goodput_percent",
        "perf/goodput_percent",
        "%",
        "100 x trained_seconds / elapsed_seconds, at most 100",
        label="goodput",
        written="{:.1f} %",
        chart=GOODPUT,
        compared=True,
    ),
    Figure(
        "trained_seconds",
        "perf/trained_seconds",
        "s",
        "time of all steps at their usual speed, that of the median window",
    ),
    Figure("elapsed_seconds", "perf/elapsed_seconds", "s", "time since the run's first process started"),
    Figure(
        "grad_norm",
        "train/grad_norm",
        "",
        "norm of the gradients before clipping",
        label="gradient norm",
        chart=GRAD_NORM,
    ),
    Figure(
        "router_loss",
        "train/router_loss",
        "",
        "router loss of a mixture of experts before its coefficient, mean of the microbatches of all ranks",
        chart=ROUTER_LOSS,
    ),
    Figure(
        "expert_load_max",
        "train/expert_load_max",
        "",
        "tokens of the fullest expert of any layer over those of an even share, all ranks; 1 is even",
        chart=EXPERT_LOAD,
    ),
    Figure(
        "skipped_steps",
        "train/skipped_steps",
        "steps",
        "steps so far whose update was left out, as their gradient norm was NaN, infinite or a spike",
        chart=SKIPPED,
    ),
    Figure("learning_rate", "train/learning_rate", "", "learning rate of the step", chart=LEARNING_RATE),
    Figure(
        "predicted_peak_memory_alloc",
        "plan/peak_alloc_gib",
        "GiB",
        "peak_memory_alloc as the run's own plan predicted it, on the last line",
    ),
    Figure(
        "predicted_peak_memory_reserved",
        "plan/peak_reserved_gib",
        "GiB",
        "peak_memory_reserved as the run's own plan predicted it, on the last line",
    ),
    Figure(
        "predicted_step_time_ms",
        "plan/step_time_ms",
        "ms",
        "step_time_ms as the run's own plan predicted it, on the last line",
    ),
)
BY_KEY = {figure.key: figure for figure in FIGURES}
NOTES = ("final", "samples", "changed", "skipped")  # keys of a line that are not figures


def split_source(key: str) -> tuple[str, str]:
    """(the key, the source of the data): `eval_loss/web` is ("eval_loss", "web"). The source is empty where the key
    names none."""
    key, _, source = key.partition("/")
    return key, source


def find_figure(key: str) -> Figure | None:
    """The entry of a key of metrics.jsonl, of any source of the data too; None where it has none."""
    key, source = split_source(key)
    return BY_KEY.get(f"{key}/{SOURCE}" if source else key)


def tracker_name(key: str) -> str | None:
    """The name of a key in the trackers, None for their axis; without an entry it is in the group `other`."""
    figure = find_figure(key)
    if figure is None:
        return f"other/{key}"
    if figure.by_source:
        return figure.name.removesuffix(SOURCE) + split_source(key)[1]
    return figure.name


def sources_in(lines: list[dict]) -> list[str]:
    """The sources of the data that lines of metrics.jsonl have figures of, in the order in which they come first."""
    sources: dict[str, None] = {}
    for line in lines:
        for key in line:
            source = split_source(key)[1]
            if source:
                sources[source] = None
    return list(sources)


def of_each_source(line: dict, key: str) -> dict[str, float]:
    """A figure of a line for each source of the data: the values of `eval_loss/web` and its like by "web"."""
    values = {}
    for name, value in line.items():
        figure_key, source = split_source(name)
        if figure_key == key and source:
            values[source] = value
    return values


def figures_in(line: dict) -> dict[str, float]:
    """A line of metrics.jsonl without its notes."""
    return {key: value for key, value in line.items() if key not in NOTES}


def figures_by_chart() -> dict[Chart, list[Figure]]:
    """Every chart with its figures."""
    shared: dict[Chart, list[Figure]] = {}
    for figure in FIGURES:
        if figure.chart:
            shared.setdefault(figure.chart, []).append(figure)
    return shared
