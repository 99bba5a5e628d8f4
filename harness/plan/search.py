"""Search: configurations planned one after the other in the order of a list, until the time is over, and which of them
to take. Called by `planning`. Independent of how a prediction is made."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from harness import flags
from harness import model as models
from harness.plan.predict import TIGHT, Prediction

MIN_GAIN = 0.01  # share of the speed; what gains less is not called faster
MAX_BATCH_SIZE = 4096  # sequences; no larger batch is planned
MORE_GPUS = (2, 4, 8)  # times as many, planned where nothing fits
REPLICAS = "dp_replicate_size"
SHOWN = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")


class OutOfTimeError(Exception):
    """The time for planning is over."""


class Search:
    """What was planned of a run, as it was asked for and otherwise, on `worlds[0]` GPUs and on the other numbers.

    `plan(settings, world)` gives a Prediction. No plan but the first begins after `ends`, by time.monotonic: planning
    takes at most one plan longer. The tokens of a step stay those that were asked for, but with --batch-size auto,
    where the batch is the largest that fits.
    """

    def __init__(self, settings: flags.Settings, config, worlds: tuple[int, ...], plan, capacity: float, ends: float):
        self.settings, self.config, self.worlds, self.world = settings, config, worlds, worlds[0]
        self.plan: Callable[[flags.Settings, int], Prediction] = plan
        self.capacity, self.ends = capacity, ends  # GiB, seconds
        self.is_auto = settings.batch_size == "auto"
        self.asked: dict = {}  # what "as asked" changes of the settings: the batch size, where that is auto
        self.is_complete = True
        self.rows: dict[tuple, dict] = {}  # by world and changes, in the order in which they were planned
        self.fits_with: dict | None = None  # the first row that fits, where the asked one does not

    def plan_asked(self) -> None:
        """Plans the run as it was asked for, on each number of GPUs; where these are several whole nodes also with one
        shard group a node."""
        with self.in_time():
            if self.is_auto:
                self.asked = {"batch_size": self.settings.batch_step()}
                self.asked = {"batch_size": self.largest_batch({}) or self.settings.batch_step()}
        self.row()
        with self.in_time():
            for world in self.worlds[1:]:
                self.row(world)
            for world in self.worlds if len(self.worlds) > 1 else ():
                for layout in self.replicas(world):
                    self.row(world, **layout)

    def run(self) -> None:
        """Plans what may fit or be faster, and the fastest of it on the other numbers of GPUs."""
        with self.in_time():
            if self.row()["verdict"] != "fits":
                self.make_it_fit()
            self.make_it_faster()
            best = self.fastest()
            for world in self.worlds[1:]:
                if best and best["gpus"] == self.world:
                    self.row(world, **{name: value for name, value in best["changes"].items() if name != REPLICAS})

    @contextlib.contextmanager
    def in_time(self) -> Iterator[None]:
        """Ends what stands in it when the time is over."""
        try:
            yield
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
            self.rows[key] = self.describe(configured, changes, self.plan(configured, world))
        return self.rows[key]

    def describe(self, configured: flags.Settings, changes: dict, plan: Prediction) -> dict:
        """A row of the JSON object's `configurations`."""
        row = {name: getattr(configured, name) for name in SHOWN} | {
            "gpus": plan.gpus,
            "changes": changes,
            "flags": flags.as_flags(changes),
            "command": command(self.settings, plan.gpus, changes),
            "reserved_gib": plan.memory_gib["reserved"],
            "host_gib": plan.memory_gib["host"],
            "activations_gib": plan.at_peak_gib["activations"],
            "fits": plan.fits,
            "verdict": plan.verdict,
            "communication_gib_per_step": plan.communication_gib_per_step,
            "exposed_communication_percent": plan.exposed_communication_percent,
            "step_time_ms": plan.step_time_ms,
            "tokens_per_sec": plan.tokens_per_sec,
            "mfu_percent": plan.mfu_percent,
            "tokens_per_step": configured.tokens_per_step(plan.gpus),
        }
        if plan.cost_per_billion_tokens is not None:
            row["cost_per_billion_tokens"] = plan.cost_per_billion_tokens
        return row

    def allowed(self, changes: dict) -> bool:
        return not flags.contradiction(dataclasses.replace(self.settings, **changes))

    # ---- The list ----------------------------------------------------------------------------------------------------

    def make_it_fit(self) -> None:
        """Adds one saver of memory after the other, the one that costs least speed first, until it fits; then GPUs."""
        changes: dict = {}
        for saver in memory_savers(self.settings):
            if "fused_loss" in saver and not models.choose_loss(None, self.config):
                continue
            if not self.allowed(changes | saver):
                continue
            changes |= saver
            row = self.row(**changes)
            if row["fits"] and not self.row()["fits"]:
                self.fits_with = self.fits_with or row
            if row["verdict"] == "fits":
                return
        for times in MORE_GPUS:
            if not self.fastest():
                row = self.row(self.world * times, **changes)
                self.fits_with = row if row["fits"] else None

    def make_it_faster(self) -> None:
        """Changes one thing after the other of the fastest so far."""
        layouts: list[dict] = []
        if self.world > 1:  # a rank that shards with nobody has one stage
            layouts = [{"zero_stage": 2}, {"zero_stage": 3}, *self.replicas(self.world)]
        for layout in layouts:
            self.try_beside(layout)
        for level in ("selective", "none"):  # some where there is none, for its room
            best = self.fastest()
            if best and (best["activation_checkpointing"], level) != ("full", "none"):
                self.try_beside({"activation_checkpointing": level})
        if self.is_auto:
            self.try_beside({"activation_checkpointing": "full"})
        else:
            self.enlarge_microbatch()
        if layouts and self.settings.gradient_accumulation_steps > 1:
            self.try_beside({"zero_stage": 1})
        for layout in layouts:  # that do not fit without any
            self.try_beside(layout | {"activation_checkpointing": "selective"})

    def replicas(self, world: int) -> list[dict]:
        """One shard group a node, where there are several nodes."""
        nodes = world // self.settings.gpus_per_node
        return [{REPLICAS: nodes}] if 1 < nodes < world and self.settings.zero_stage else []

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
        of more GPUs where nothing fits on these.

        A tight one only where nothing else fits, and one with another optimizer only where no other does. Of those that
        are slower than the fastest by no more than MIN_GAIN the one with the smallest step, and of these the one that
        leaves most room.
        """
        rows = [row for row in self.rows.values() if row["fits"] and row["gpus"] == (world or self.world)]
        if not rows and not world and self.fits_with:
            return self.fits_with
        for is_preferred in (lambda row: "optimizer" not in row["changes"], lambda row: row["verdict"] == "fits"):
            rows = [row for row in rows if is_preferred(row)] or rows
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
            "fits_with": self.fits_with,
            "search": {"planned": len(self.rows), "complete": self.is_complete},
        }
        if self.is_auto:
            result["largest_batch_size"] = asked["batch_size"] if asked["fits"] else 0
        if len(self.worlds) > 1:
            result["scaling"] = [row for world in self.worlds for row in self.rows_of_world(world)]
        return result

    def rows_of_world(self, world: int) -> list[dict]:
        """As asked, with one shard group a node, and the fastest."""
        layouts = [self.asked, *(self.asked | layout for layout in self.replicas(world))]
        best = self.fastest(world)
        rows = [row for row in self.rows.values() if row["gpus"] == world]
        return [row for row in rows if row["changes"] in layouts or row is best]


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

    Memory over the batch is the largest of several sums that grow evenly, a convex curve: above the line through two
    sizes that fit, below the line from one that fits to one that does not. Each line gives the next size to ask for.
    """
    known = {step: reserved(step)}
    if known[step] > limit:
        return 0
    fits, too_large, size = step, MAX_BATCH_SIZE + step, 2 * step
    while too_large - fits > step:
        size = min(max(size, fits + step), too_large - step)
        known[size] = reserved(size)
        if known[size] > limit:
            too_large = size
        else:
            fits = size
        fitting = [known_size for known_size in sorted(known) if known_size <= fits]
        other = too_large if too_large in known else fitting[-2]
        slope = (known[other] - known[fits]) / (other - fits)
        if slope <= 0:
            size = too_large - step
            continue
        size = fits + int((limit - known[fits]) / slope) // step * step
        if other < fits:  # on the line through two that fit, and the curve lies above it
            too_large = min(too_large, size + step)
    return fits


def command(settings: flags.Settings, world: int, changes: dict) -> str:
    """What trains `settings` with `changes` on `world` GPUs: the command line as given, less what is about plans."""
    plan_flags, group = set(), None
    for field in dataclasses.fields(flags.Settings):
        group = field.metadata.get("group", group)
        if group == "planning" and field.name != "own_plan":
            plan_flags.add(field.name)
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
