"""Advice: the flags that would fit, or be faster, found by planning them. Called by `planning`, and by the script for
the flags that save memory. It does not know how a plan is made."""

import contextlib
import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from harness.loss import choose_loss
from harness.settings import Settings, contradiction
from harness.terminal import without

LEVELS = ("none", "selective", "full")  # of activation checkpointing: each holds less, and is slower
TOLD = 0.01  # what could be faster by less than this share is not planned, and not called faster
BEYOND = 4096  # sequences; no larger batch is looked at
SEARCHED = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")


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


def largest_batch(planned, capacity: float) -> int:
    """The largest --batch-size that fits; 0 if none does."""
    reserved, size, sizes = {}, 1, range(1, BEYOND + 1)
    while size:
        reserved[size] = planned(batch_size=size)["memory_gib"]["reserved"]
        size = next_size(reserved, sizes, capacity)
    return max((size for size in reserved if reserved[size] <= capacity), default=0)


def memory_savers(settings: Settings) -> list[dict]:
    """Changes that lower memory, the cheapest in speed first, less what is so already."""
    batch, checkpointing = settings.batch_size, settings.activation_checkpointing
    steps = settings.gradient_accumulation_steps * (1 if batch == "auto" else batch)
    ways = [
        ({"fused_loss": True}, settings.fused_loss is False),
        ({"zero_stage": 3}, settings.zero_stage < 3),
        ({"activation_checkpointing": "selective"}, checkpointing == "none"),
        ({"batch_size": 1, "gradient_accumulation_steps": steps}, batch != 1),
        ({"activation_checkpointing": "full"}, checkpointing != "full"),
        ({"optimizer": "adamw8bit"}, settings.optimizer != "adamw8bit" and find_spec("torchao")),
        ({"cpu_offload": True}, not settings.cpu_offload),
    ]
    return [changes for changes, possible in ways if possible]


def as_flags(changes: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')}" + f" {v}" * (v is not True) for name, v in changes.items())


def what_fits(settings: Settings, config, planned) -> dict | None:
    """The changes that make it fit at the least cost in speed, by planning them; None where nothing does.

    They are tried one on top of the other, the cheapest in speed first, until it fits; then what is not needed is
    taken out again.
    """

    def merged(chosen: list[dict]) -> dict:
        return {name: value for changes in chosen for name, value in changes.items()}

    chosen: list[dict] = []
    for changes in memory_savers(settings):
        if "fused_loss" in changes and not choose_loss(None, config):
            continue
        chosen = [one for one in chosen if one.keys() != changes.keys()] + [changes]  # full in place of selective
        if planned(**merged(chosen))["fits"]:
            break
    else:
        return None
    for changes in chosen[:-1]:
        fewer = [one for one in chosen if one is not changes]
        if planned(**merged(fewer))["fits"]:
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
    `settings` with these changes. None is begun that would not be ready after `seconds`. The tokens of a step are
    kept, unless `free`: then the batch grows, not the accumulation."""

    def __init__(self, settings: Settings, world: int, plan: Callable[..., dict], seconds: float, free: bool):
        self.settings, self.world, self.plan, self.free = settings, world, plan, free
        self.began = time.monotonic()
        self.ends, self.slowest, self.seconds, self.complete = self.began + seconds, 0.0, 0.0, True
        self.capacity, self.rows = plan()["capacity_gib"], {}
        self.base: dict = {}  # what else is changed in all that is tried
        self.growth: dict[str, float] = {}  # GiB a sequence at least, by activation checkpointing
        self.try_out()

    def try_out(self, **changes) -> dict:
        """The row of `settings` with these changes, planned if they are new.

        Raises:
            TimeoutError: it would take too long.
        """
        began = time.monotonic()
        changes = {name: value for name, value in changes.items() if value != getattr(self.settings, name)}
        key = tuple(sorted(changes.items()))
        if key in self.rows:
            return self.rows[key]
        if len(self.rows) > 1 and began + self.slowest > self.ends:
            raise TimeoutError
        plan = self.plan(**changes)
        self.slowest = max(self.slowest, time.monotonic() - began)
        configured = dataclasses.replace(self.settings, **changes)
        told = ("fits", "at_peak_gib", "step_time_ms", "tokens_per_sec", "mfu_percent", "cost_per_billion_tokens")
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
        sizes = [size for size in range(1, (BEYOND if self.free else samples) + 1) if self.free or samples % size == 0]
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
            fitting = sorted(size for size in rows if rows[size]["fits"])
            if fitting and self.is_too_slow(level):
                break
            if self.free and len(fitting) > 1:  # the step's time is a line too: no size beyond `enough` gains a TOLD
                few, many = (rows[size]["step_time_ms"] for size in fitting[-2:])
                each = max((many - few) / (fitting[-1] - fitting[-2]), 1e-9)
                enough = max((many / each - fitting[-1]) / TOLD, fitting[-1])
                sizes = [size for size in sizes if size <= enough]
            growth = self.growth.get(level) if len(reserved) == 1 else None  # as it was in other stages
            if growth and (guess := [n for n in sizes if reserved[size] + growth * (n - size) <= self.capacity]):
                size = guess[-1] if guess[-1] != size else None
            else:
                size = next_size(reserved, sizes, self.capacity)
        if len(reserved) > 1:
            few, many = min(reserved), max(reserved)
            growth = (reserved[many] - reserved[few]) / (many - few)
            self.growth[level] = min(growth, self.growth.get(level, growth))
        largest = max(fitting, default=0)
        return largest, largest < sizes[-1]

    def is_too_slow(self, level: str) -> bool:
        """Whether with this checkpointing the matmuls and attention of a token, which take the same at any batch size,
        stage and number of replicas, alone take as long as a token of the fastest that fits."""
        best = max((row["tokens_per_sec"] for row in self.rows.values() if row["fits"]), default=0)
        alike = [row for row in self.rows.values() if row["activation_checkpointing"] == level]
        bounds = [1000 * row["tokens_per_step"] / row["products_ms"] for row in alike]
        return bool(bounds) and max(bounds) < (1 + TOLD) * best

    def fastest(self, tokens: int | None = None) -> dict | None:
        """The row to advise, of those with so many tokens a step if they are given; None where nothing that was planned
        fits. What was asked, where no other is told to be faster; of those that are alike the smallest step; with
        another optimizer only where nothing else fits."""
        fitting = [row for row in self.rows.values() if row["fits"] and tokens in (None, row["tokens_per_step"])]
        fitting = [row for row in fitting if "optimizer" not in row["changes"]] or fitting
        best = max((row["tokens_per_sec"] for row in fitting), default=0)
        alike = [row for row in fitting if row["tokens_per_sec"] * (1 + TOLD) >= best]
        order = lambda row: (not row["asked"], row["tokens_per_step"], -row["tokens_per_sec"])  # noqa: E731
        return min(alike, key=order, default=None)

    def result(self) -> dict:
        """The JSON object's part of it: the fastest, all that was planned, how the search went, what makes it fit."""
        best, rows = self.fastest(), list(self.rows.values())
        for row in rows:
            row["fastest"] = row is best
        how = {"planned": len(rows), "seconds": self.seconds, "complete": self.complete, "keeps_batch": not self.free}
        result = {"fastest": best, "configurations": rows, "search": how}
        if not rows[0]["fits"]:  # the same run, if there is one
            row = self.fastest(rows[0]["tokens_per_step"]) or best
            result["fits_with"] = row and {name: row[name] for name in ("flags", "reserved_gib", "tokens_per_sec")}
        return result


def search(settings: Settings, config, plan, world: int, seconds: float, free: bool, first=None) -> Search:
    """Searches for one world size; where nothing fits, among the other flags that save memory, and then again with
    those. Where `first` says what to begin with, all of it has to be planned in time; else something that fits is
    looked for however long it takes, and half the time again is left to find what is faster."""
    found = Search(settings, world, plan, seconds, free)
    often, seldom = techniques(settings, world)
    if not found.fastest() and settings.fused_loss is False and choose_loss(None, config):  # the cheapest saver
        found.base = {"fused_loss": True}
    with found.in_time():
        found.try_out(**(first or {}))
        found.try_all(often)
    if not found.fastest():
        with found.in_time():
            ends, found.ends = found.ends, math.inf if first is None else found.ends
            if changes := what_fits(settings, config, found.try_out):
                found.base = {name: value for name, value in changes.items() if name not in SEARCHED}
                found.ends = ends if first is not None else max(ends, time.monotonic() + seconds / 2)
                found.try_all(often)
    with found.in_time():
        found.try_near()
        found.try_all(seldom)
    found.seconds = time.monotonic() - found.began
    return found


def command(settings: Settings, world: int, changes: dict) -> str:
    """What trains `settings` with `changes` on `world` GPUs: the command line as given, less what is about plans."""
    of_plans, group = set(), None
    for field in dataclasses.fields(Settings):
        group = field.metadata.get("group", group)
        of_plans |= {field.name} if group == "planning" and field.name != "own_plan" else set()
    words = shlex.join(without(settings.argv, *of_plans, *changes))
    local = math.gcd(world, settings.gpus_per_node)
    launcher = "python" if world == 1 else f"torchrun --nproc_per_node={world}"
    if world > settings.gpus_per_node:
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
        launcher = f"torchrun --nnodes={world // local} --nproc_per_node={local} {rendezvous}"
    return " ".join(filter(None, (launcher, "train_fsdp.py", words, as_flags(changes))))


def scaling(settings: Settings, planned, worlds: tuple[int, ...]) -> list[dict]:
    """Plans at each world size; where it spans nodes also with one shard group a node, if that was not decided."""
    speed = ("step_time_ms", "tokens_per_sec", "mfu_percent", "exposed_communication_percent")
    rows, told = [], ("fits", "communication_gib_per_step", *speed)
    for world in worlds:
        nodes = world // settings.gpus_per_node
        hybrid = [nodes] if nodes > 1 and not world % settings.gpus_per_node and settings.zero_stage else []
        for replicas in [settings.dp_replicate_size, *(hybrid if settings.dp_replicate_size == 1 else [])]:
            row = planned(world, dp_replicate_size=replicas)
            rows.append({"gpus": world, "dp_replicate_size": replicas} | {name: row[name] for name in told})
    return rows


def advise_each(rows: list[dict], settings: Settings, config, planned, found: Search, seconds: float) -> None:
    """Adds to the first row of each world size the fastest configuration there, and what makes it fit where it does not
    as asked. `found` is the search for the first; each of the others has `seconds`, and begins with what was the
    fastest at the size before."""
    searches = {found.world: found}
    for row in rows:
        if row["gpus"] in searches:
            continue
        best = found.fastest()
        changes = best["changes"].items() if best else ()
        first = {name: value for name, value in changes if name in SEARCHED and name != "dp_replicate_size"}
        plan = functools.partial(planned, row["gpus"])
        found = searches[row["gpus"]] = search(settings, config, plan, row["gpus"], seconds, found.free, first)
    for world, found in searches.items():
        of_world = next(row for row in rows if row["gpus"] == world)
        result = found.result()
        of_world |= {name: result[name] for name in ("fastest", "fits_with", "search") if name in result}
