"""Advice: the flags that would fit, or be faster, found by planning them. Called by `planning`, and by the script for
the flags that save memory. It does not know how a plan is made."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

from harness.flags.commands import as_flags, to_paste, without
from harness.flags.rules import contradiction
from harness.flags.settings import Settings
from harness.model.loss import choose_loss
from harness.model.optimization import memory_saving_optimizers
from harness.plan.gpus import TIGHT

LEVELS = ("none", "selective", "full")  # of activation checkpointing: each holds less, and is slower
TOLD = 0.01  # what could be faster by less than this share is not planned, and not called faster
BEYOND = 4096  # sequences; no larger batch is looked at
SEARCHED = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")


class Clock:
    """How much longer plans are made: none is begun that would not be ready within `seconds`."""

    def __init__(self, seconds: float):
        self.seconds, self.began, self.slowest = seconds, time.monotonic(), 0.0

    def timed(self, plan: Callable[..., dict]) -> Callable[..., dict]:
        """`plan`, of which the clock knows how long it takes."""

        @functools.wraps(plan)
        def call(*args, **options) -> dict:
            began = time.monotonic()
            result = plan(*args, **options)
            self.slowest = max(self.slowest, time.monotonic() - began)
            return result

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


def next_size(reserved: dict[int, float], sizes: Sequence[int], capacity: float) -> int | None:
    """Of `sizes`, ascending, the next to plan on the way to the largest that fits; None when it is known, or that none
    fits. `reserved` has the GiB of those that are planned.

    The peak is the largest of several sums that grow evenly with the batch: through two sizes that fit goes a line
    which is too low beyond them, so what it puts above the capacity need not be planned; the line from a size that
    fits to one that does not is too high between them.
    """
    fits = sorted(size for size, gib in reserved.items() if gib <= capacity)
    fails = min((size for size in reserved if size not in fits), default=math.inf)
    if not fits:
        return None if sizes[0] in reserved else sizes[0]

    def on_line(a: int, b: int, size: int) -> float:
        return reserved[a] + (reserved[b] - reserved[a]) / (b - a) * (size - a)

    left = [size for size in sizes if fits[-1] < size < fails]
    if len(fits) > 1:
        left = [size for size in left if on_line(*fits[-2:], size) <= capacity]
    elif left and fails == math.inf:
        return left[0]
    if fails == math.inf:
        return left[-1] if left else None
    sure = [size for size in left if on_line(fits[-1], fails, size) <= capacity]
    return sure[-1] if sure else next(iter(left), None)


def largest_batch(planned, capacity: float, step: int = 1, check: Callable[[], None] = lambda: None) -> int:
    """The largest --batch-size of the multiples of `step` that fits and is not tight, or that fits where all are tight;
    0 if none does. `check` raises where there is no time for another plan."""
    reserved: dict[int, float] = {}
    for limit in (TIGHT * capacity, capacity):
        while size := next_size(reserved, range(step, BEYOND + 1, step), limit):
            check()
            reserved[size] = planned(batch_size=size)["memory_gib"]["reserved"]
        if fitting := [size for size in reserved if reserved[size] <= limit]:
            return max(fitting)
    return 0


def memory_savers(settings: Settings) -> list[dict]:
    """Changes that lower memory, the cheapest in speed first, less what is so already."""
    batch, checkpointing = settings.batch_size, settings.activation_checkpointing
    least = settings.batch_step()
    steps = settings.gradient_accumulation_steps * (least if batch == "auto" else batch)
    ways = [
        ({"fused_loss": True}, settings.fused_loss is False),
        ({"zero_stage": 3}, settings.zero_stage < 3),
        ({"activation_checkpointing": "selective"}, checkpointing == "none"),
        ({"batch_size": least, "gradient_accumulation_steps": steps // least}, batch != least),
        ({"activation_checkpointing": "full"}, checkpointing != "full"),
        *(({"optimizer": name}, True) for name in memory_saving_optimizers(settings.optimizer)),
        ({"cpu_offload": True}, not settings.cpu_offload),
    ]
    return [changes for changes, possible in ways if possible]


def what_fits(settings: Settings, config, planned, verdicts: tuple[str, ...]) -> dict | None:
    """The changes at the least cost in speed that bring it to one of these verdicts, by planning them; None where
    nothing does.

    They are tried one on top of the other, the cheapest in speed first, until it fits; then what is not needed is
    taken out again.
    """

    def merged(chosen: list[dict]) -> dict:
        return {name: value for changes in chosen for name, value in changes.items()}

    chosen: list[dict] = []
    savers = memory_savers(settings)
    if settings.fused_loss is False and not choose_loss(None, config):
        savers = [changes for changes in savers if "fused_loss" not in changes]
    if planned(**merged(savers))["verdict"] not in verdicts:
        return None
    for changes in savers:
        chosen = [one for one in chosen if one.keys() != changes.keys()] + [changes]  # full in place of selective
        if planned(**merged(chosen))["verdict"] in verdicts:
            break
    for changes in chosen[:-1]:
        fewer = [one for one in chosen if one is not changes]
        if planned(**merged(fewer))["verdict"] in verdicts:
            chosen = fewer
    return merged(chosen)


def keeps_batch(settings: Settings) -> bool:
    """Whether the tokens of a step are to stay as they are: the command line, the demo or a file decided them."""
    if settings.batch_size == "auto":
        return False
    named = {word.split("=")[0].replace("_", "-") for word in settings.argv}
    sizes = settings.batch_size, settings.gradient_accumulation_steps
    return sizes != (1, 1) or bool(named & {"--batch-size", "--gradient-accumulation-steps"})


def techniques(settings: Settings, world: int) -> tuple[list[dict], list[dict]]:
    """What may be combined with any batch, each once: stages 2, 3 and the asked one, and those that are seldom the
    fastest. Less checkpointing comes before more, as it is faster where it fits."""
    nodes = world // settings.gpus_per_node if world % settings.gpus_per_node == 0 else 1
    several = settings.gradient_accumulation_steps > 1 or settings.batch_size > 1  # with one microbatch 1 is as 2
    layouts, seldom = [(settings.zero_stage, settings.dp_replicate_size)], []
    for replicas in (settings.dp_replicate_size, 1, nodes):
        if replicas < world:  # a rank that shards with nobody has one stage
            layouts += [(3, replicas), (2, replicas)]
            seldom += [(1, replicas)] * several
    seldom += [(0, 1)] * (settings.dp_replicate_size < world)
    levels = LEVELS if settings.activation_memory_budget is None else (settings.activation_checkpointing,)

    def combined(layouts: list[tuple[int, int]]) -> list[dict]:
        names = ("activation_checkpointing", "zero_stage", "dp_replicate_size")
        found = [dict(zip(names, (level, *one), strict=True)) for level in levels for one in dict.fromkeys(layouts)]
        return [one for one in found if not contradiction(dataclasses.replace(settings, **one))]

    return combined(layouts), combined([one for one in seldom if one not in layouts])


class Search:
    """What was planned for one world size, and what of it is the fastest. `plan(**changes)` gives the plan of
    `settings` with these changes, as long as `clock` has time. The tokens of a step are kept, unless `free`: then the
    batch grows, not the accumulation."""

    def __init__(self, settings: Settings, world: int, plan: Callable[..., dict], clock: Clock, free: bool):
        self.settings, self.world, self.plan, self.clock, self.free = settings, world, clock.timed(plan), clock, free
        self.complete = True
        self.capacity, self.rows = self.plan()["capacity_gib"], {}
        self.limit = TIGHT * self.capacity  # GiB that a configuration may reserve
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
        plan = self.plan(**changes)
        configured = dataclasses.replace(self.settings, **changes)
        told = ("fits", "verdict", "at_peak_gib", "step_time_ms", "tokens_per_sec", "mfu_percent")
        told += ("cost_per_billion_tokens",)
        row = {"changes": changes} | {name: getattr(configured, name) for name in SEARCHED}
        row |= {"flags": as_flags(changes), "command": command(self.settings, self.world, changes)}
        row |= {"reserved_gib": plan["memory_gib"]["reserved"], "host_gib": plan["memory_gib"]["host"]}
        row |= {name: plan[name] for name in told if name in plan}
        row |= {"tokens_per_step": configured.tokens_per_step(self.world), "asked": not changes, "fastest": False}
        row["products_ms"] = plan["time_ms"]["matmul"] + plan["time_ms"]["attention"]
        return self.rows.setdefault(key, row)

    @contextlib.contextmanager
    def in_time(self):
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
        samples = self.settings.batch_size * self.settings.gradient_accumulation_steps
        least = self.settings.batch_step()
        sizes = [*range(1, BEYOND + 1)] if self.free else divisors(samples)
        sizes = [size for size in sizes if size % least == 0]
        too_large, at_ease, start = [], [], self.settings.batch_size
        for technique in techniques:
            stage, level = technique["zero_stage"], technique["activation_checkpointing"]
            layout = (-stage, technique["dp_replicate_size"] if stage else self.world)
            memory = (*layout, -LEVELS.index(level))  # which grows with each of the three
            if any(all(a >= b for a, b in zip(memory, known, strict=True)) for known in too_large):
                continue
            if layout in at_ease or self.is_too_slow(level):
                continue
            several = [size for size in sizes if self.free or stage != 1 or size < samples]
            if not several:
                continue
            largest, bounded = self.try_batches(technique, several, start)
            start = largest or start
            too_large += [memory] * (not largest)
            at_ease += [layout] * (not bounded)

    def try_batches(self, technique: dict, sizes: list[int], start: int) -> tuple[int, bool]:
        """Plans `technique` at the sizes that may be its best. Returns the largest that fits, 0 if none does, and
        whether it is memory that bounds it."""
        samples = self.settings.batch_size * self.settings.gradient_accumulation_steps
        size, rows = max((size for size in sizes if size <= start), default=sizes[0]), {}
        level, reserved = technique["activation_checkpointing"], {}
        while size:
            steps = {} if self.free else {"gradient_accumulation_steps": samples // size}
            rows[size] = self.try_out(**self.base, **technique, batch_size=size, **steps)
            reserved[size] = rows[size]["reserved_gib"]
            fitting = sorted(size for size in rows if reserved[size] <= self.limit)
            if fitting and self.is_too_slow(level):
                break
            if self.free and len(fitting) > 1:  # the step's time is a line too: no size beyond `enough` gains a TOLD
                few, many = (rows[size]["step_time_ms"] for size in fitting[-2:])
                each = max((many - few) / (fitting[-1] - fitting[-2]), 1e-9)
                enough = max((many / each - fitting[-1]) / TOLD, fitting[-1])
                sizes = [size for size in sizes if size <= enough]
            growth = self.growth.get(level) if len(reserved) == 1 else None  # as it was in other stages
            if growth and (guess := [n for n in sizes if reserved[size] + growth * (n - size) <= self.limit]):
                size = guess[-1] if guess[-1] != size else None
            else:
                size = next_size(reserved, sizes, self.limit)
        if len(reserved) > 1:
            few, many = min(reserved), max(reserved)
            growth = (reserved[many] - reserved[few]) / (many - few)
            self.growth[level] = min(growth, self.growth.get(level, growth))
        largest = max(fitting, default=0)
        return largest, largest < sizes[-1]

    def is_too_slow(self, level: str) -> bool:
        """Whether with this checkpointing the matmuls and attention of a token, which take the same at any batch size,
        stage and number of replicas, alone take as long as a token of the fastest that fits."""
        best = max((row["tokens_per_sec"] for row in self.with_room()), default=0)
        alike = [row for row in self.rows.values() if row["activation_checkpointing"] == level]
        bounds = [1000 * row["tokens_per_step"] / row["products_ms"] for row in alike]
        return bool(bounds) and max(bounds) < (1 + TOLD) * best

    def with_room(self) -> list[dict]:
        """What fits and is not tight."""
        return [row for row in self.rows.values() if row["verdict"] == "fits"]

    def fastest(self, tokens: int | None = None) -> dict | None:
        """The row to advise, of those with so many tokens a step if they are given; None where nothing that was planned
        fits. A tight one, and before that one with another optimizer, only where nothing else fits. What was asked,
        where no other is told to be faster; of those that are alike the smallest step."""
        fitting = [row for row in self.rows.values() if row["fits"] and tokens in (None, row["tokens_per_step"])]
        same = [row for row in fitting if "optimizer" not in row["changes"]]
        room = [row for row in same if row["verdict"] == "fits"]
        fitting = room or same or [row for row in fitting if row["verdict"] == "fits"] or fitting
        best = max((row["tokens_per_sec"] for row in fitting), default=0)
        alike = [row for row in fitting if row["tokens_per_sec"] * (1 + TOLD) >= best]
        order = lambda row: (not row["asked"], row["tokens_per_step"], -row["tokens_per_sec"])  # noqa: E731
        return min(alike, key=order, default=None)

    def result(self) -> dict:
        """The JSON object's part of it: the fastest, all that was planned, how the search went, what makes it fit."""
        best, rows = self.fastest(), list(self.rows.values())
        for row in rows:
            row["fastest"] = row is best
        how = {"planned": len(rows), "complete": self.complete, "keeps_batch": not self.free}
        result = {"fastest": best, "configurations": rows, "search": how}
        if not rows[0]["fits"]:  # the same run, if there is one
            row = self.fastest(rows[0]["tokens_per_step"]) or best
            told = ("flags", "reserved_gib", "tokens_per_sec", "mfu_percent", "cost_per_billion_tokens")
            result["fits_with"] = row and {name: row[name] for name in told if name in row}
        return result


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def search(settings: Settings, config, plan, world: int, clock: Clock, free: bool, first=None) -> Search:
    """Searches for one world size; where nothing fits, among the other flags that save memory, and then again with
    those. Where `first` says what to begin with, all of it has to be planned in time; else something that fits is
    looked for however long it takes."""
    found = Search(settings, world, plan, clock, free)
    often, seldom = techniques(settings, world)
    if not found.fastest() and settings.fused_loss is False and choose_loss(None, config):  # the cheapest saver
        found.base = {"fused_loss": True}
    with found.in_time():
        found.try_out(**(first or {}))
        found.try_all(often)
        if not found.with_room():  # up to the card's last GiB
            found.limit = found.capacity
            found.try_all(often)
    if not found.fastest():
        with found.in_time():
            seconds, clock.seconds = clock.seconds, math.inf if first is None else clock.seconds
            try:
                changes = what_fits(settings, config, found.try_out, ("fits",))
                changes = changes or what_fits(settings, config, found.try_out, ("fits", "tight"))
            finally:
                clock.seconds = seconds
            if changes:
                found.base = {name: value for name, value in changes.items() if name not in SEARCHED}
                found.limit = TIGHT * found.capacity
                found.try_all(often)
    with found.in_time():
        found.try_near()
        found.try_all(seldom)
    return found


def command(settings: Settings, world: int, changes: dict) -> str:
    """What trains `settings` with `changes` on `world` GPUs: the command line as given, less what is about plans."""
    of_plans, group = set(), None
    for field in dataclasses.fields(Settings):
        group = field.metadata.get("group", group)
        of_plans |= {field.name} if group == "planning" and field.name != "own_plan" else set()
    words = without(settings.argv, *of_plans, *changes)
    local = math.gcd(world, settings.gpus_per_node)
    launcher = "python" if world == 1 else f"torchrun --nproc_per_node={world}"
    if world > settings.gpus_per_node:
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
        launcher = f"torchrun --nnodes={world // local} --nproc_per_node={local} {rendezvous}"
    return to_paste(f"{launcher} train_fsdp.py", words, **changes)


def scaling(
    settings: Settings, config, planned, worlds: tuple[int, ...], found: Search | None, clock: Clock
) -> list[dict]:
    """Plans at each world size; where it spans nodes also with one shard group a node, if that was not decided. With
    `found`, the search for the first, the first row of each size has the fastest configuration there too, and what
    makes it fit where it does not as it is: each further size has a third of the first one's time, and begins with what
    was the fastest at the size before."""
    speed = ("step_time_ms", "tokens_per_sec", "mfu_percent", "exposed_communication_percent")
    rows, told = [], ("fits", "verdict", "communication_gib_per_step", *speed, "cost_per_billion_tokens")
    share = clock.seconds / 3
    for world in worlds:
        nodes = world // settings.gpus_per_node
        hybrid = [nodes] if nodes > 1 and not world % settings.gpus_per_node and settings.zero_stage else []
        of_world = []
        for replicas in [settings.dp_replicate_size, *(hybrid if settings.dp_replicate_size == 1 else [])]:
            plan = planned(world, dp_replicate_size=replicas)
            row = {"gpus": world, "dp_replicate_size": replicas, "reserved_gib": plan["memory_gib"]["reserved"]}
            of_world.append(row | {name: plan[name] for name in told if name in plan})
        rows += of_world
        if not found:
            continue
        if world != found.world:
            best = found.fastest()
            changes = best["changes"].items() if best else ()
            first = {name: value for name, value in changes if name in SEARCHED and name != "dp_replicate_size"}
            clock.seconds = max(clock.seconds, clock.elapsed()) + share  # its own, however long the sizes before took
            plan = functools.partial(planned, world)
            found = search(settings, config, plan, world, clock, found.free, first)
        result = found.result()
        of_world[0] |= {name: result[name] for name in ("fastest", "fits_with", "search") if name in result}
    return rows
