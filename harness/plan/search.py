"""Search: the fastest configuration that fits, found by planning as few as possible. Called by `planning`. Independent
of how a prediction is made."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable

from harness.flags import Settings, as_flags, contradiction, to_paste
from harness.model.loss import choose_loss
from harness.plan.fitting import MAX_BATCH_SIZE, next_size, what_fits
from harness.plan.gpus import TIGHT
from harness.plan.predict import Prediction

LEVELS = ("none", "selective", "full")  # of activation checkpointing: each holds less, and is slower
MIN_GAIN = 0.01  # share of the speed; what could gain less is not planned, and not called faster
SEARCHED = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")


class Clock:
    """The time of a search: no plan is begun that would not be ready within `seconds` of the clock's start."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.began = time.monotonic()
        self.slowest = 0.0  # seconds of the slowest plan

    def timed(self, plan: Callable[..., Prediction]) -> Callable[..., Prediction]:
        """`plan`, with each call timed by this clock."""

        @functools.wraps(plan)
        def call(*args, **options) -> Prediction:
            began = time.monotonic()
            prediction = plan(*args, **options)
            self.slowest = max(self.slowest, time.monotonic() - began)
            return prediction

        return call

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def check(self) -> None:
        """
        Raises:
            TimeoutError: another plan would take too long.
        """
        if self.elapsed() + self.slowest > self.seconds:
            raise TimeoutError


def techniques(settings: Settings, world: int) -> tuple[list[dict], list[dict]]:
    """What may be combined with any batch, each once: stages 2, 3 and the asked one, and those that are seldom the
    fastest. Less checkpointing comes before more, as it is faster where it fits."""
    nodes = world // settings.gpus_per_node if world % settings.gpus_per_node == 0 else 1
    one_microbatch = settings.gradient_accumulation_steps == 1 and settings.batch_size == 1
    often = [(settings.zero_stage, settings.dp_replicate_size)]
    seldom = []
    for replicas in (settings.dp_replicate_size, 1, nodes):
        if replicas < world:  # a rank that shards with nobody has one stage
            often += [(3, replicas), (2, replicas)]
            if not one_microbatch:  # with one, stage 1 is stage 2
                seldom.append((1, replicas))
    if settings.dp_replicate_size < world:
        seldom.append((0, 1))
    seldom = [layout for layout in seldom if layout not in often]
    return with_checkpointing(settings, often), with_checkpointing(settings, seldom)


def with_checkpointing(settings: Settings, layouts: list[tuple[int, int]]) -> list[dict]:
    """Each (stage, replicas) of `layouts` once with each level of activation checkpointing, as changes of settings;
    without those that contradict other settings."""
    levels = LEVELS if settings.activation_memory_budget is None else (settings.activation_checkpointing,)
    combined = []
    for level in levels:
        for stage, replicas in dict.fromkeys(layouts):
            changes = {"activation_checkpointing": level, "zero_stage": stage, "dp_replicate_size": replicas}
            if not contradiction(dataclasses.replace(settings, **changes)):
                combined.append(changes)
    return combined


class Search:
    """What was planned for one world size, and what of it is the fastest.

    `plan(**changes)` gives the prediction of `settings` with these changes, as long as `clock` has time. The tokens of
    a step are kept, unless `free`: then the batch grows, not the accumulation.
    """

    def __init__(self, settings: Settings, world: int, plan: Callable[..., Prediction], clock: Clock, free: bool):
        self.settings = settings
        self.world = world
        self.plan = clock.timed(plan)
        self.clock = clock
        self.free = free
        self.complete = True  # the clock did not stop the search
        self.capacity = self.plan().capacity_gib
        self.limit = TIGHT * self.capacity  # GiB that a configuration may reserve
        self.rows: dict[tuple, dict] = {}  # what was planned, by its changes
        self.base: dict = {}  # what else is changed in all that is tried
        self.growth: dict[str, float] = {}  # GiB a sequence at least, by activation checkpointing
        self.try_out()

    def try_out(self, **changes) -> dict:
        """The row of `settings` with these changes, planned if they are new.

        Raises:
            TimeoutError: it would take too long.
        """
        changes = {name: value for name, value in changes.items() if value != getattr(self.settings, name)}
        key = tuple(sorted(changes.items()))
        if key in self.rows:
            return self.rows[key]
        if self.rows:
            self.clock.check()
        self.rows[key] = self.describe(changes, self.plan(**changes))
        return self.rows[key]

    def describe(self, changes: dict, plan: Prediction) -> dict:
        """A row of the JSON object's `configurations`."""
        configured = dataclasses.replace(self.settings, **changes)
        row = {"changes": changes}
        for name in SEARCHED:
            row[name] = getattr(configured, name)
        row |= {
            "flags": as_flags(changes),
            "command": command(self.settings, self.world, changes),
            "reserved_gib": plan.memory_gib["reserved"],
            "host_gib": plan.memory_gib["host"],
            "fits": plan.fits,
            "verdict": plan.verdict,
            "at_peak_gib": plan.at_peak_gib,
            "step_time_ms": plan.step_time_ms,
            "tokens_per_sec": plan.tokens_per_sec,
            "mfu_percent": plan.mfu_percent,
        }
        if plan.cost_per_billion_tokens is not None:
            row["cost_per_billion_tokens"] = plan.cost_per_billion_tokens
        row |= {
            "tokens_per_step": configured.tokens_per_step(self.world),
            "asked": not changes,
            "fastest": False,
            "products_ms": plan.time_ms["matmul"] + plan.time_ms["attention"],
        }
        return row

    @contextlib.contextmanager
    def in_time(self):
        """Ends what stands in it when the clock has no time for another plan."""
        try:
            yield
        except TimeoutError:
            self.complete = False

    def try_near(self) -> None:
        """Plans what differs by one flag, to be shown beside the others."""
        near = [{"activation_checkpointing": level} for level in LEVELS]
        near += [{"zero_stage": stage} for stage in (2, 3) if self.world > self.settings.dp_replicate_size]
        for one in near:
            if not contradiction(dataclasses.replace(self.settings, **one)):
                self.try_out(**one)

    def try_all(self, techniques: list[dict]) -> None:
        """Plans the techniques at their best batch sizes, less those that cannot fit or cannot be the fastest."""
        sizes = range(1, MAX_BATCH_SIZE + 1) if self.free else divisors(self.samples())
        sizes = [size for size in sizes if size % self.settings.batch_step() == 0]
        start = self.settings.batch_size
        too_large = []  # what does not fit, as figures with each of which memory grows
        unbounded = []  # layouts whose batch is not bounded by memory: more checkpointing only slows them down
        for technique in techniques:
            stage, level = technique["zero_stage"], technique["activation_checkpointing"]
            layout = (-stage, technique["dp_replicate_size"] if stage else self.world)
            demand = (*layout, -LEVELS.index(level))
            if any(needs_as_much(demand, other) for other in too_large):
                continue
            if layout in unbounded or self.is_too_slow(level):
                continue
            candidates = sizes
            if stage == 1 and not self.free:  # in one microbatch it is stage 2
                candidates = [size for size in sizes if size < self.samples()]
            if not candidates:
                continue
            largest, is_bounded = self.try_batches(technique, candidates, start)
            if largest:
                start = largest
            else:
                too_large.append(demand)
            if not is_bounded:
                unbounded.append(layout)

    def samples(self) -> int:
        """Sequences of a step of a rank."""
        return self.settings.batch_size * self.settings.gradient_accumulation_steps

    def try_batches(self, technique: dict, sizes: list[int], start: int) -> tuple[int, bool]:
        """Plans `technique` at the sizes that may be its best, from `start` on. Returns the largest that fits, 0 if
        none does, and whether it is memory that bounds it."""
        level = technique["activation_checkpointing"]
        rows: dict[int, dict] = {}  # of each size that is planned
        size = max((size for size in sizes if size <= start), default=sizes[0])
        while size:
            changes = self.base | technique | {"batch_size": size}
            if not self.free:
                changes["gradient_accumulation_steps"] = self.samples() // size
            rows[size] = self.try_out(**changes)
            fitting = {size: rows[size] for size in sorted(rows) if rows[size]["reserved_gib"] <= self.limit}
            if fitting and self.is_too_slow(level):
                break
            if self.free:
                enough = enough_sequences(fitting)
                sizes = [size for size in sizes if size <= enough]
            size = self.pick_size(level, rows, sizes)
        self.learn_growth(level, rows)
        largest = max(fitting, default=0)
        return largest, largest < sizes[-1]

    def pick_size(self, level: str, rows: dict[int, dict], sizes: list[int]) -> int | None:
        """The size to plan after those of `rows`; None when the largest that fits is planned, or none fits."""
        reserved = {size: row["reserved_gib"] for size, row in rows.items()}
        growth = self.growth.get(level)
        if len(reserved) == 1 and growth:  # memory grows with the batch as it does in other stages
            ((planned, gib),) = reserved.items()
            fitting = [size for size in sizes if gib + growth * (size - planned) <= self.limit]
            if fitting:
                return fitting[-1] if fitting[-1] != planned else None
        return next_size(reserved, sizes, self.limit)

    def learn_growth(self, level: str, rows: dict[int, dict]) -> None:
        """Keeps how memory grows with the batch, the least of all stages."""
        if len(rows) > 1:
            few, many = min(rows), max(rows)
            growth = (rows[many]["reserved_gib"] - rows[few]["reserved_gib"]) / (many - few)
            self.growth[level] = min(growth, self.growth.get(level, growth))

    def is_too_slow(self, level: str) -> bool:
        """Whether with this checkpointing the matmuls and attention of a token, which take the same at any batch size,
        stage and number of replicas, alone take as long as a token of the fastest that fits."""
        best = max((row["tokens_per_sec"] for row in self.with_room()), default=0)
        alike = [row for row in self.rows.values() if row["activation_checkpointing"] == level]
        bounds = [1000 * row["tokens_per_step"] / row["products_ms"] for row in alike]
        if not bounds:
            return False
        return max(bounds) < (1 + MIN_GAIN) * best

    def with_room(self) -> list[dict]:
        """What fits and is not tight."""
        return [row for row in self.rows.values() if row["verdict"] == "fits"]

    def fastest(self, tokens: int | None = None) -> dict | None:
        """The row to advise, of those with so many tokens a step if they are given; None where nothing that was planned
        fits.

        A tight one only where nothing else fits, and one with another optimizer only where no other does. Of those that
        are slower than the fastest by no more than MIN_GAIN the one with the smallest step, and of these the one that
        leaves most room.
        """
        fitting = [row for row in self.rows.values() if row["fits"] and tokens in (None, row["tokens_per_step"])]
        same_optimizer = [row for row in fitting if "optimizer" not in row["changes"]]
        if same_optimizer:
            fitting = same_optimizer
        with_room = [row for row in fitting if row["verdict"] == "fits"]
        if with_room:
            fitting = with_room
        best = max((row["tokens_per_sec"] for row in fitting), default=0)
        nearly_best = [row for row in fitting if row["tokens_per_sec"] * (1 + MIN_GAIN) >= best]
        order = lambda row: (row["tokens_per_step"], row["reserved_gib"], not row["asked"])  # noqa: E731
        return min(nearly_best, key=order, default=None)

    def result(self) -> dict:
        """The JSON object's part of it: the fastest, all that was planned, how the search went, what makes it fit."""
        rows = list(self.rows.values())
        best = self.fastest()
        for row in rows:
            row["fastest"] = row is best
        result = {
            "fastest": best,
            "configurations": rows,
            "search": {"planned": len(rows), "complete": self.complete, "keeps_batch": not self.free},
        }
        asked = rows[0]
        if not asked["fits"]:
            row = self.fastest(asked["tokens_per_step"]) or best  # the same run, if there is one
            names = ("flags", "reserved_gib", "tokens_per_sec", "mfu_percent", "cost_per_billion_tokens")
            result["fits_with"] = {name: row[name] for name in names if name in row} if row else None
        return result


def needs_as_much(demand: tuple, other: tuple) -> bool:
    """Whether none of the figures is below the other's."""
    return all(mine >= theirs for mine, theirs in zip(demand, other, strict=True))


def enough_sequences(rows: dict[int, dict]) -> float:
    """The batch size beyond which no larger one gains MIN_GAIN, as the step's time is a line over the batch; `rows` are
    those that fit, by their sizes, ascending. Infinite while fewer than two are known."""
    if len(rows) < 2:
        return math.inf
    few, many = list(rows)[-2:]
    times = rows[few]["step_time_ms"], rows[many]["step_time_ms"]
    time_of_sequence = max((times[1] - times[0]) / (many - few), 1e-9)
    return max((times[1] / time_of_sequence - many) / MIN_GAIN, many)


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def search(
    settings: Settings, config, plan, world: int, clock: Clock, free: bool, begin_with: dict | None = None
) -> Search:
    """Searches for one world size; where nothing fits, among the other flags that save memory, and then again with
    those.

    With `begin_with`, changes that are planned first, the whole search has to be done in time; else something that fits
    is looked for however long it takes.
    """
    search = Search(settings, world, plan, clock, free)
    often, seldom = techniques(settings, world)
    if not search.fastest() and settings.fused_loss is False and choose_loss(None, config):  # the cheapest saver
        search.base = {"fused_loss": True}
    with search.in_time():
        search.try_out(**(begin_with or {}))
        search.try_all(often)
        if not search.with_room():  # up to the card's last GiB
            search.limit = search.capacity
            search.try_all(often)
    if not search.fastest():
        with search.in_time():
            seconds = clock.seconds
            if begin_with is None:
                clock.seconds = math.inf
            try:
                changes = what_fits(settings, config, search.try_out, ("fits",))
                if not changes:
                    changes = what_fits(settings, config, search.try_out, ("fits", "tight"))
            finally:
                clock.seconds = seconds
            if changes:
                search.base = {name: value for name, value in changes.items() if name not in SEARCHED}
                search.limit = TIGHT * search.capacity
                search.try_all(often)
    with search.in_time():
        search.try_near()
        search.try_all(seldom)
    return search


def command(settings: Settings, world: int, changes: dict) -> str:
    """What trains `settings` with `changes` on `world` GPUs: the command line as given, less what is about plans."""
    plan_flags, group = set(), None
    for field in dataclasses.fields(Settings):
        group = field.metadata.get("group", group)
        if group == "planning" and field.name != "own_plan":
            plan_flags.add(field.name)
    given = {name: value for name, value in settings.given.items() if name not in plan_flags}
    local = math.gcd(world, settings.gpus_per_node)
    if world == 1:
        launcher = "python"
    elif world <= settings.gpus_per_node:
        launcher = f"torchrun --nproc_per_node={world}"
    else:
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
        launcher = f"torchrun --nnodes={world // local} --nproc_per_node={local} {rendezvous}"
    return to_paste(f"{launcher} train_fsdp.py", given, **changes)


def scaling(
    settings: Settings, config, planned, worlds: tuple[int, ...], search_of_first: Search | None, clock: Clock
) -> list[dict]:
    """Plans at each world size; where it spans nodes also with one shard group a node, if that was not decided.

    With `search_of_first`, the search for the first size, the first row of each size has the fastest configuration
    there too, and what makes it fit where it does not as it is: each further size has a third of the first one's time,
    and begins with what was the fastest at the size before.
    """
    rows, latest = [], search_of_first
    share = clock.seconds / 3
    for world in worlds:
        rows_of_world = []
        for replicas in replicas_to_plan(settings, world):
            rows_of_world.append(describe_world(world, replicas, planned(world, dp_replicate_size=replicas)))
        rows += rows_of_world
        if not latest:
            continue
        if world != latest.world:
            best = latest.fastest()
            begin_with = {}
            if best:
                begin_with = {name: value for name, value in best["changes"].items() if name in SEARCHED}
                begin_with.pop("dp_replicate_size", None)
            clock.seconds = max(clock.seconds, clock.elapsed()) + share  # its own, however long the sizes before took
            plan = functools.partial(planned, world)
            latest = search(settings, config, plan, world, clock, latest.free, begin_with)
        result = latest.result()
        for name in ("fastest", "fits_with", "search"):
            if name in result:
                rows_of_world[0][name] = result[name]
    return rows


def replicas_to_plan(settings: Settings, world: int) -> list[int]:
    """The number of replicas that was asked, and where none was the number of nodes, if whole nodes are."""
    asked = settings.dp_replicate_size
    nodes, rest = divmod(world, settings.gpus_per_node)
    if asked == 1 and nodes > 1 and rest == 0 and settings.zero_stage:
        return [asked, nodes]
    return [asked]


def describe_world(world: int, replicas: int, plan: Prediction) -> dict:
    """A row of the JSON object's `scaling`."""
    row = {
        "gpus": world,
        "dp_replicate_size": replicas,
        "reserved_gib": plan.memory_gib["reserved"],
        "fits": plan.fits,
        "verdict": plan.verdict,
        "communication_gib_per_step": plan.communication_gib_per_step,
        "step_time_ms": plan.step_time_ms,
        "tokens_per_sec": plan.tokens_per_sec,
        "mfu_percent": plan.mfu_percent,
        "exposed_communication_percent": plan.exposed_communication_percent,
    }
    if plan.cost_per_billion_tokens is not None:
        row["cost_per_billion_tokens"] = plan.cost_per_billion_tokens
    return row
