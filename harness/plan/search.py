"""Search: configurations planned one after the other in the order of a list, until the time is over, and which of them
to take. Called by `planning`. Independent of how a prediction is made."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from harness import flags
from harness import model as models
from harness.plan.predict import TIGHT

MIN_GAIN = 0.01  # share of the speed; what gains less is not called faster
MAX_BATCH_SIZE = 4096  # sequences; no larger batch is planned
MORE_GPUS = (2, 4, 8)  # times as many, planned where nothing fits
SHOWN = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")
COMPARED = (
    *("gpus", "fits", "verdict", "communication_gib_per_step", "exposed_communication_percent", "step_time_ms"),
    *("tokens_per_sec", "mfu_percent", "cost_per_billion_tokens"),
)  # of a prediction


class OutOfTimeError(Exception):
    """The time for planning is over."""


class Search:
    """What was planned of a run, as it was asked for and otherwise, on `worlds[0]` GPUs and on the other numbers.

    `plan(settings, world)` gives a prediction. No plan but the first begins after `ends`, by time.monotonic: planning
    takes at most one plan longer. The tokens of a step stay those that were asked for, but with --batch-size auto,
    where the batch is the largest that fits.
    """

    def __init__(self, settings: flags.Settings, config, worlds: tuple[int, ...], plan, capacity: float, ends: float):
        self.settings, self.config, self.worlds, self.world = settings, config, worlds, worlds[0]
        self.plan: Callable[[flags.Settings, int], dict[str, Any]] = plan
        self.capacity, self.ends = capacity, ends  # GiB, seconds
        self.is_auto = settings.batch_size == "auto"
        self.asked: dict = {"batch_size": settings.batch_step()} if self.is_auto else {}  # what "as asked" changes
        self.is_complete = True
        self.rows: dict[tuple, dict] = {}  # by world and changes, in the order in which they were planned

    def run(self, only_asked: bool = False) -> None:
        """Plans the run as it was asked for, then what may fit or be faster, and that on the other numbers of GPUs."""
        try:
            self.plan_asked()
            if only_asked:
                return
            if self.row()["verdict"] != "fits":
                self.make_it_fit()
            self.make_it_faster()
            best = self.fastest()
            for world in self.worlds[1:]:
                if best and best["gpus"] == self.world:
                    self.row(world, **best["changes"] | {"dp_replicate_size": self.settings.dp_replicate_size})
        except OutOfTimeError:
            self.is_complete = False

    def row(self, world: int | None = None, **changes) -> dict:
        """The row of the asked run with these changes, planned if they are new.

        Raises:
            OutOfTimeError: it was not planned in time.
        """
        world, changes = world or self.world, self.asked | changes
        changes = {name: value for name, value in changes.items() if value != getattr(self.settings, name)}
        key = world, *sorted(changes.items())
        if key not in self.rows:
            if self.rows and time.monotonic() > self.ends:
                raise OutOfTimeError
            configured = dataclasses.replace(self.settings, **changes)
            plan = self.plan(configured, world)
            row = {name: getattr(configured, name) for name in SHOWN}
            row |= {name: plan[name] for name in COMPARED if name in plan}
            self.rows[key] = row | {
                "changes": changes,
                "flags": flags.as_flags(changes),
                "command": command(self.settings, world, changes),
                "reserved_gib": plan["memory_gib"]["reserved"],
                "host_gib": plan["memory_gib"]["host"],
                "activations_gib": plan["at_peak_gib"]["activations"],
                "tokens_per_step": configured.tokens_per_step(world),
            }
        return self.rows[key]

    # ---- The list ----------------------------------------------------------------------------------------------------

    def plan_asked(self) -> None:
        """As it was asked for, on each number of GPUs; where these are several also with one shard group a node."""
        if self.is_auto:
            self.asked = {"batch_size": self.largest_batch({}) or self.settings.batch_step()}
        for world in self.worlds:
            self.row(world)
        for world in self.worlds if len(self.worlds) > 1 else ():
            for layout in self.replicas(world):
                self.row(world, **layout)

    def make_it_fit(self) -> None:
        """Adds one saver of memory after the other, the one that costs least speed first, until it fits; then GPUs."""
        changes: dict = {}
        for saver in memory_savers(self.settings):
            if "fused_loss" in saver and not models.choose_loss(None, self.config):
                continue
            if not self.allowed(changes | saver):
                continue
            changes |= saver
            if self.row(**changes)["verdict"] == "fits":
                return
        for times in MORE_GPUS:
            if not self.fastest():
                self.row(self.world * times, **changes)

    def make_it_faster(self) -> None:
        """Changes one thing after the other of the fastest so far."""
        layouts: list[dict] = []
        if self.world > 1:  # a rank that shards with nobody has one stage
            layouts = [{"zero_stage": 2}, {"zero_stage": 3}, *self.replicas(self.world)]
        for layout in layouts:
            self.try_beside(layout)
        for level in ("selective", "none"):  # some where there is none, for its room
            self.try_beside({"activation_checkpointing": level})
        if self.is_auto:
            self.try_beside({"activation_checkpointing": "full"})
        else:
            self.enlarge_microbatch()
        if layouts and self.settings.gradient_accumulation_steps > 1:
            self.try_beside({"zero_stage": 1})
        for layout in layouts:  # that do not fit without any
            self.try_beside(layout | {"activation_checkpointing": "selective"})

    def try_beside(self, change: dict) -> None:
        """Plans the fastest so far with this change too; with --batch-size auto at the largest batch that fits."""
        best = self.fastest()
        if not best or best["gpus"] != self.world or not self.allowed(best["changes"] | change):
            return
        changes = best["changes"] | change
        if self.is_auto:
            changes["batch_size"] = self.largest_batch(changes) or best["batch_size"]
        self.row(**changes)

    def enlarge_microbatch(self) -> None:
        """Plans the fastest so far in fewer, larger microbatches: the most that should fit, by the activations."""
        best = self.fastest()
        if not best or best["gpus"] != self.world:
            return
        batch_size, room = best["batch_size"], TIGHT * self.capacity - best["reserved_gib"]
        samples = batch_size * best["gradient_accumulation_steps"]
        for size in range(samples, batch_size, -1):
            grows = best["activations_gib"] * (size / batch_size - 1)
            if samples % size or size % self.settings.batch_step() or grows > room:
                continue
            changes = {"batch_size": size, "gradient_accumulation_steps": samples // size}
            if self.row(**best["changes"] | changes)["verdict"] == "fits":
                return

    def allowed(self, changes: dict) -> bool:
        return not flags.contradiction(dataclasses.replace(self.settings, **changes))

    def replicas(self, world: int) -> list[dict]:
        """One shard group a node, where there are several nodes."""
        nodes = world // self.settings.gpus_per_node
        return [{"dp_replicate_size": nodes}] if 1 < nodes < world and self.settings.zero_stage else []

    def largest_batch(self, changes: dict) -> int:
        """The largest --batch-size with these changes that fits and is not tight, or that fits where all are tight; 0
        where none does."""

        def reserved(size: int) -> float:
            return self.row(**changes | {"batch_size": size})["reserved_gib"]

        step = self.settings.batch_step()
        return largest_size(reserved, TIGHT * self.capacity, step) or largest_size(reserved, self.capacity, step)

    # ---- Which to take -----------------------------------------------------------------------------------------------

    def fastest(self, world: int | None = None) -> dict | None:
        """The row to advise for `world` GPUs, None where nothing that was planned fits. For the first number it is one
        of the fewest GPUs that will do where nothing fits on these.

        One with another optimizer only where no other fits, and a tight one only where nothing else does. Of those that
        are slower than the fastest by no more than MIN_GAIN the one with the smallest step, and of these the one that
        leaves most room.
        """

        def reluctance(row: dict) -> tuple:
            more_gpus = 0 if row["gpus"] == self.world else row["gpus"]
            return more_gpus, "optimizer" in row["changes"], row["verdict"] == "tight"

        rows = [row for row in self.rows.values() if row["fits"] and world in (None, row["gpus"])]
        least = min(map(reluctance, rows), default=None)
        rows = [row for row in rows if reluctance(row) == least]
        best = max((row["tokens_per_sec"] for row in rows), default=0)
        nearly_best = [row for row in rows if row["tokens_per_sec"] * (1 + MIN_GAIN) >= best]
        return min(nearly_best, key=lambda row: (row["tokens_per_step"], row["reserved_gib"]), default=None)

    def result(self) -> dict:
        """The JSON object's part of it."""
        asked, best = self.row(), self.fastest()
        for row in self.rows.values():
            row |= {"asked": row is asked, "fastest": row is best}
        result: dict[str, Any] = {
            "configurations": list(self.rows.values()),
            "fastest": best,
            "fits_with": None if asked["fits"] else best,
            "search": {"planned": len(self.rows), "complete": self.is_complete},
        }
        if self.is_auto:
            result["largest_batch_size"] = asked["batch_size"] if asked["fits"] else 0
        if len(self.worlds) > 1:  # as asked, with one shard group a node, and the fastest
            result["scaling"] = []
            for world in self.worlds:
                layouts = [self.asked, *(self.asked | layout for layout in self.replicas(world))]
                for row in self.rows.values():
                    if row["gpus"] == world and (row["changes"] in layouts or row is self.fastest(world)):
                        result["scaling"].append(row)
        return result


def memory_savers(settings: flags.Settings) -> list[dict]:
    """Changes of settings that lower memory, the one that costs least speed first; without those that are made
    already. The tokens of a step stay."""
    least, batch = settings.batch_step(), settings.batch_size
    savers: list[dict[str, Any]] = []
    if settings.fused_loss is False:
        savers.append({"fused_loss": True})
    if settings.zero_stage < 3:
        savers.append({"zero_stage": 3})
    if settings.dp_replicate_size > 1:
        savers.append({"dp_replicate_size": 1})
    if settings.activation_checkpointing == "none":
        savers.append({"activation_checkpointing": "selective"})
    if batch not in ("auto", least):
        samples = settings.gradient_accumulation_steps * batch
        savers.append({"batch_size": least, "gradient_accumulation_steps": samples // least})
    if settings.activation_checkpointing != "full":
        savers.append({"activation_checkpointing": "full"})
    savers += [{"optimizer": name} for name in models.memory_saving_optimizers(settings.optimizer)]
    if not settings.cpu_offload:
        savers.append({"cpu_offload": True})
    return savers


def largest_size(reserved: Callable[[int], float], limit: float, step: int = 1) -> int:
    """The largest multiple of `step` up to MAX_BATCH_SIZE for which `reserved` is at most `limit`; 0 if there is none.

    Memory over the batch is nearly a straight line: the line through two known sizes gives the next one to ask for.
    """
    reserved = functools.cache(reserved)
    if reserved(step) > limit:
        return 0
    fits, too_large = step, MAX_BATCH_SIZE + step
    other, size = step, 2 * step  # another known size; the next to ask for
    while too_large - fits > step:
        size = min(max(size, fits + step), too_large - step)
        if reserved(size) <= limit:
            other = fits if too_large > MAX_BATCH_SIZE else too_large
            fits = size
        else:
            other = too_large = size
        slope = (reserved(other) - reserved(fits)) / (other - fits)
        size = fits + int((limit - reserved(fits)) / slope) // step * step if slope > 0 else too_large
    return fits


def command(settings: flags.Settings, world: int, changes: dict) -> str:
    """What trains `settings` with `changes` on `world` GPUs: the command line as given, less what is about plans."""
    plan_flags, group = set(), None
    for name, field in flags.FLAGS.items():
        group = field.metadata["group"] or group  # of several flags the first names it
        if group == "planning" and name != "own_plan":
            plan_flags.add(name)
    given = {name: value for name, value in settings.given.items() if name not in plan_flags}
    if world == 1:
        launcher = "python"
    elif world <= settings.gpus_per_node:
        launcher = f"torchrun --nproc_per_node={world}"
    else:
        per_node = settings.gpus_per_node
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
        launcher = f"torchrun --nnodes={world // per_node} --nproc_per_node={per_node} {rendezvous}"
    return flags.to_paste(f"{launcher} train_fsdp.py", given, **changes)


def memory_advice(settings: flags.Settings) -> str:
    """Which flags make room on a device that has no memory left."""
    return f"Try {', '.join(flags.as_flags(changes) for changes in memory_savers(settings)[:3])}."
