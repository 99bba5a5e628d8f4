"""Search: plan configurations in a fixed order until the time is over, and choose among them."""

import bisect
import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from harness import base, flags
from harness import model as models
from harness.plan.predict import TIGHT

MIN_GAIN = 0.01  # share of the speed; a smaller gain is not faster
MAX_BATCH_SIZE = 4096  # sequences; no larger batch is planned
LENGTH_UNIT = 1024  # tokens; the longest sequence is a multiple
MAX_LENGTH_PLANS = 5  # of different lengths, to find the longest sequence of one configuration
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
OFFLOAD: dict[str, Any] = {"activation_checkpointing": "offload"}
ADAPTERS = {"lora_rank": 16, "lora_alpha": 32}
# changes of these train something else, and are listed separately
OTHER_TRAINING = ("precision", "lora_rank", "sequence_length")
FLOAT8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}
SHOWN = ("zero_stage", "dp_replicate_size", "activation_checkpointing", "batch_size", "gradient_accumulation_steps")


class OutOfTimeError(Exception):
    """The time for planning is over."""


class Search:
    """Plans of the given configuration and of changes to it, on `worlds[0]` GPUs and on the other numbers.

    `plan(settings, world)` returns a prediction. After `deadline` (time.monotonic) no plan starts, except the first,
    those for the batch of --batch-size auto and, if the first does not fit, the one that saves most memory. The tokens
    per step stay, except with --batch-size auto, which takes the largest batch that fits.
    """

    def __init__(
        self,
        settings: flags.Settings,
        config: PretrainedConfig,
        worlds: tuple[int, ...],
        plan: Callable[[flags.Settings, int], dict[str, Any]],
        capacity: float,
        deadline: float,
        has_float8: bool = False,
        context_parallel: int = 1,
    ):
        self.has_float8 = has_float8
        self.context_parallel = context_parallel  # the largest on `worlds[0]` GPUs, which is tried for long sequences
        self.settings, self.config, self.worlds, self.world = settings, config, worlds, worlds[0]
        self.plan = plan
        self.capacity, self.deadline = capacity, deadline  # GiB, seconds
        self.is_auto = settings.explicit.get("batch_size") == "auto"
        # changes in every row: the size that "auto" chose
        self.base_changes: dict = {"batch_size": settings.batch_size_multiple()} if self.is_auto else {}
        self.is_complete = True
        self.is_timed = True  # False while `deadline` is ignored
        self.rows: dict[tuple, dict] = {}  # {(world, *changes): row}, in the order of planning
        self.longest: list[dict] = []  # rows with the longest sequence that fits, one for each of `longer`

    def run(self) -> None:
        """Plan the given configuration; then, unless --plan-seconds is 0, changes that may fit or be faster, the
        fastest on the other numbers of GPUs, and the longest sequences."""
        try:
            self.plan_given()
            if not self.settings.plan_seconds:
                return
            if self.row()["verdict"] != "fits":
                self.make_it_fit()
            best = self.fastest()
            if best and best["gpus"] == self.world:
                self.make_it_faster()
                for world in self.worlds[1:]:
                    changes = self.fastest()["changes"] | {"dp_replicate_size": self.settings.dp_replicate_size}
                    with contextlib.suppress(base.UserError):  # these changes do not run on this number
                        self.row(world, **changes)
                self.plan_float8()
            for changes in longer(self.settings, self.context_parallel):
                self.plan_longest(changes)
        except OutOfTimeError:
            self.is_complete = False

    def row(self, world: int | None = None, **changes: Any) -> dict:
        """Return the row of the given configuration with these changes, planned if it is new: its scalar predictions,
        flags and command.

        Raises:
            OutOfTimeError: no time is left to plan it.
        """
        world, changes = world or self.world, self.base_changes | changes
        named = {"batch_size"} if self.is_auto else set()  # its command has the size in place of "auto"
        changes = {n: value for n, value in changes.items() if n in named or value != getattr(self.settings, n)}
        key = world, *sorted(changes.items())
        if key not in self.rows:
            if self.rows and self.is_timed and time.monotonic() > self.deadline:
                raise OutOfTimeError
            configured = dataclasses.replace(self.settings, **changes)
            try:
                plan = self.plan(configured, world)
            except base.UserError:
                if changes.get("activation_checkpointing") != "selective":
                    raise
                return self.row(world, **changes | FULL)  # a layer changes what selective checkpointing saves
            row = {name: getattr(configured, name) for name in (*SHOWN, "sequence_length")}
            row |= {name: value for name, value in plan.items() if not isinstance(value, dict | list)}
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

    def plan_given(self) -> None:
        """Plan the given configuration on each number of GPUs; if there are several, also with a shard group per
        node."""
        if self.is_auto:  # even after the deadline: a smaller batch would not be the answer
            self.is_timed = False
            self.base_changes = {"batch_size": self.largest_batch({}) or self.settings.batch_size_multiple()}
            self.is_timed = True
        if self.settings.plan_seconds and not self.row()["fits"]:
            self.plan_most_savers()
        for world in self.worlds:
            self.row(world)
            if len(self.worlds) > 1:
                for layout in self.replicas(world):
                    self.row(world, **layout)

    def plan_most_savers(self) -> None:
        """Plan all memory savers together, and adapters with full checkpointing, even after the deadline: on a busy
        machine the first plan may take all of the time."""
        self.is_timed = False
        for changes in self.savers()[-1:]:
            self.row(**changes)
        if self.tries_adapters():
            self.row(**ADAPTERS, **FULL)
        self.is_timed = True

    def make_it_fit(self) -> None:
        """Add memory savers, the cheapest in speed first, until it fits."""
        if not self.row()["fits"] and self.tries_adapters() and self.row(**ADAPTERS, **FULL)["fits"]:
            self.row(**ADAPTERS, activation_checkpointing="none")  # selective saves results that adapters do not need
        savers = self.savers()
        if self.row()["fits"] or (savers and self.row(**savers[-1])["fits"]):
            for changes in savers:
                if self.row(**changes)["verdict"] == "fits":
                    return

    def savers(self) -> list[dict]:
        """Return the changes that save memory: the first saver, the first two, up to all compatible ones."""
        together: list[dict] = []
        changes: dict = {}
        for saver in memory_savers(self.settings, self.context_parallel):
            if "fused_loss" in saver and not models.choose_loss(None, self.config):
                continue
            if self.allowed(changes | saver):
                changes |= saver
                together.append(dict(changes))
        return together

    def tries_adapters(self) -> bool:
        return self.settings.init == "pretrained" and self.allowed(ADAPTERS)

    def make_it_faster(self) -> None:
        """Change one setting after the other of the fastest so far."""
        layouts: list[dict] = []
        if self.world > 1:  # on one rank all stages are equal
            layouts = [{"zero_stage": 2}, {"zero_stage": 3}, *self.replicas(self.world)]
        for change in (*layouts, SELECTIVE, {"activation_checkpointing": "none"}):
            self.try_change(change)
        if self.is_auto:
            self.try_change(FULL)
        else:
            self.enlarge_microbatch()
        if layouts and self.settings.gradient_accumulation_steps > 1:
            self.try_change({"zero_stage": 1})
        for layout in layouts:  # that do not fit without checkpointing
            self.try_change(layout | SELECTIVE)

    def try_change(self, change: dict) -> None:
        """Plan the fastest so far with this change; with --batch-size auto at the largest batch that fits."""
        best = self.fastest()
        changes = best["changes"] | change
        if not self.allowed(changes):
            return
        if self.is_auto:
            changes["batch_size"] = self.largest_batch(changes) or best["batch_size"]
        self.row(**changes)

    def plan_float8(self) -> None:
        """Plan the fastest so far in float8, whose lower precision is listed separately."""
        best = self.fastest()
        changes = best["changes"] | FLOAT8
        if self.settings.precision == "bf16" and self.has_float8 and self.allowed(changes):
            with contextlib.suppress(base.UserError):  # no linear is large enough for float8
                self.row(**changes)

    def enlarge_microbatch(self) -> None:
        """Plan the fastest so far with fewer, larger microbatches."""
        best = self.fastest()
        least, samples = best["batch_size"], best["batch_size"] * best["gradient_accumulation_steps"]
        sizes = [size for size in range(least, samples + 1, self.settings.batch_size_multiple()) if samples % size == 0]
        options = [{"batch_size": size, "gradient_accumulation_steps": samples // size} for size in sizes]
        self.largest(best["changes"], options)

    def plan_longest(self, changes: dict) -> None:
        """Plan the longest sequence that fits with these changes. The first plan has the given length, or the longest
        that fits without them; memory is nearly linear in the length, so the next ones come from a line."""
        length = self.longest[-1]["sequence_length"] if self.longest else self.settings.sequence_length
        fitting, too_large = None, None
        for _ in range(MAX_LENGTH_PLANS):
            row = self.row(**changes, sequence_length=length)
            if row["verdict"] == "fits":
                fitting = row
            else:
                too_large = row
            estimate = self.estimate(row, fitting, too_large, "sequence_length")
            unit = max(LENGTH_UNIT, 2 ** (int(estimate).bit_length() - 7))  # at most 1/64 of the length
            length = int(estimate / unit) * unit
            if too_large and length >= too_large["sequence_length"]:
                length = too_large["sequence_length"] - unit
            if length <= (fitting["sequence_length"] if fitting else 0):
                break
        if fitting:
            self.longest.append(fitting)

    def allowed(self, changes: dict) -> bool:
        return not flags.contradiction(dataclasses.replace(self.settings, **changes))

    def replicas(self, world: int) -> list[dict]:
        """Return the change to one shard group per node, [] on one node."""
        nodes = world // self.settings.gpus_per_node
        return [{"dp_replicate_size": nodes}] if 1 < nodes < world and self.settings.zero_stage else []

    def largest_batch(self, changes: dict) -> int:
        """Return the largest --batch-size with these changes that fits and is not tight; else the smallest if it is
        tight, else 0."""
        step = self.settings.batch_size_multiple()
        options = [{"batch_size": size} for size in range(step, MAX_BATCH_SIZE + 1, step)]
        row = self.largest(changes, options)
        if not row:
            smallest = self.row(**changes | options[0])
            row = smallest if smallest["fits"] else None
        return row["batch_size"] if row else 0

    def largest(self, changes: dict, options: list[dict]) -> dict | None:
        """Return the row with `changes` and the largest of `options`, sorted by batch size, whose verdict is "fits";
        None if none does. The next option to plan comes from `estimate`."""
        fitting, too_large = None, None
        least, most, index = 0, len(options), 0  # options before `least` fit, from `most` on they do not
        while least < most:
            row = self.row(**changes | options[index])
            if row["verdict"] == "fits":
                fitting, least = row, index + 1
            else:
                too_large, most = row, index
            size = self.estimate(row, fitting, too_large, "batch_size")
            index = bisect.bisect(options, size, key=lambda option: option["batch_size"]) - 1
            index = min(max(index, least), most - 1)
        return fitting

    def estimate(self, row: dict, fitting: dict | None, too_large: dict | None, name: str) -> float:
        """Return the value of `name`, a batch size or a length, at which memory reaches its limit: on the line through
        the two nearest rows, or if all fit or none does, from the activations of the last `row`."""
        limit = TIGHT * self.capacity  # approximate: without the memory of CUDA and NCCL
        gib, size = row["activations_gib"], row[name]
        if fitting and too_large:
            gib, size = too_large["reserved_gib"] - fitting["reserved_gib"], too_large[name] - fitting[name]
        return row[name] + (limit - row["reserved_gib"]) / max(gib / size, 1e-9)

    # ---- Choice ------------------------------------------------------------------------------------------------------

    def fastest(self) -> Any:
        """Return the row to recommend, None if nothing planned fits.

        Another number of GPUs only if nothing fits on these, and then the smallest; another optimizer only if nothing
        else fits, and a tight row only if there is no other. Of the rows within MIN_GAIN of the fastest, the one with
        the fewest tokens per step, and of these the one with the least memory.
        """

        def preference(row: dict) -> tuple:
            more_gpus = 0 if row["gpus"] == self.world else row["gpus"]
            return more_gpus, "optimizer" in row["changes"], row["verdict"] == "tight"

        rows = [row for row in self.rows.values() if row["fits"] and is_same_training(row)]
        least = min(map(preference, rows), default=None)
        rows = [row for row in rows if preference(row) == least]
        best = max((row["tokens_per_sec"] for row in rows), default=0)
        nearly_best = [row for row in rows if row["tokens_per_sec"] * (1 + MIN_GAIN) >= best]
        return min(nearly_best, key=lambda row: (row["tokens_per_step"], row["reserved_gib"]), default=None)

    def safer(self) -> Any:
        """Return the fastest row that is not tight, on as many GPUs and with the same training, if the recommended one
        is tight; None otherwise, or if none was planned."""
        best = self.fastest()
        if not best or best["verdict"] != "tight":
            return None
        rows = [row for row in self.rows.values() if row["verdict"] == "fits" and row["gpus"] == best["gpus"]]
        rows = [row for row in rows if is_same_training(row)]
        return max(rows, key=lambda row: row["tokens_per_sec"], default=None)

    def result(self) -> dict:
        """Return the search's keys of the JSON object."""
        given, best, safer = self.row(), self.fastest(), self.safer()
        for row in self.rows.values():
            row |= {"given": row is given, "fastest": row is best, "safer": row is safer}
        in_float8 = [row for row in self.rows.values() if "precision" in row["changes"] and row["fits"]]
        with_adapters = [row for row in self.rows.values() if "lora_rank" in row["changes"] and row["fits"]]
        result: dict[str, Any] = {
            "configurations": [row for row in self.rows.values() if "sequence_length" not in row["changes"]],
            "fastest": best,
            "safer": safer,
            "in_float8": in_float8[0] if in_float8 else None,
            "with_adapters": max(
                with_adapters, key=lambda row: (row["verdict"] == "fits", row["tokens_per_sec"]), default=None
            ),
            "longest": self.longest,
            "search": {"planned": len(self.rows), "complete": self.is_complete},
        }
        if self.is_auto:
            result["largest_batch_size"] = given["batch_size"] if given["fits"] else 0
        return result


def is_same_training(row: dict) -> bool:
    """Return True if a row's changes keep what is trained."""
    return not any(name in row["changes"] for name in OTHER_TRAINING)


def longer(settings: flags.Flags, context_parallel: int) -> list[dict]:
    """Return the changes with which the longest sequence is planned: none, each that is made for long sequences, and
    all of these together."""
    rows: list[tuple[bool, dict[str, Any]]] = [
        (settings.activation_checkpointing != "offload", OFFLOAD),
        (settings.context_parallel < context_parallel, {"context_parallel": context_parallel}),
    ]
    changes = [change for saves, change in rows if saves]
    together = {name: value for change in changes for name, value in change.items()}
    return [{}, *changes, *([together] if len(changes) > 1 else [])]


def memory_savers(settings: flags.Flags, context_parallel: int = 1) -> list[dict]:
    """Return the changes of settings that save memory, the cheapest in speed first. The tokens per step stay.
    `context_parallel` is the largest possible."""
    level, batch, least = settings.activation_checkpointing, settings.batch_size, settings.batch_size_multiple()
    fewer_sequences: dict[str, Any] = {}
    microbatches = settings.gradient_accumulation_steps
    if isinstance(batch, int) and batch != least:
        microbatches = microbatches * batch // least
        fewer_sequences = {"batch_size": least, "gradient_accumulation_steps": microbatches}
    shared_microbatches, rest = divmod(microbatches * context_parallel, settings.context_parallel)
    shared_sequences = {"context_parallel": context_parallel, "gradient_accumulation_steps": shared_microbatches}
    savers: list[tuple[bool, dict[str, Any]]] = [
        (settings.fused_loss is False, {"fused_loss": True}),
        (settings.zero_stage < 3, {"zero_stage": 3}),
        (settings.dp_replicate_size > 1, {"dp_replicate_size": 1}),
        (level == "none", SELECTIVE),
        (bool(fewer_sequences), fewer_sequences),
        (level in ("none", "selective"), FULL),
        (settings.context_parallel < context_parallel and not rest, shared_sequences),
        (level != "offload", OFFLOAD),
        *((True, {"optimizer": name}) for name in models.memory_saving_optimizers(settings.optimizer)),
        (not settings.cpu_offload, {"cpu_offload": True}),
    ]
    return [saver for saves, saver in savers if saves]


def command(settings: flags.Settings, world: int, changes: dict) -> str:
    """Return the command that trains `settings` with `changes` on `world` GPUs: the explicit flags without those of
    plans and those without effect, which a plan accepts and a run does not."""
    names = list(flags.FLAGS)
    plan_flags = names[names.index("plan") : names.index("own_plan")]
    given = {name: value for name, value in settings.explicit.items() if name not in plan_flags}
    if changes.get("lora_rank", settings.lora_rank) and settings.init == "random":
        given["init"] = "pretrained"  # a run trains no adapters of random weights
    given = with_effect(given, changes)
    if world == 1:
        launcher = "python"
    elif world <= settings.gpus_per_node:
        launcher = f"torchrun --nproc_per_node={world}"
    else:
        per_node = settings.gpus_per_node
        rendezvous = "--rdzv_backend=c10d --rdzv_endpoint=$HEAD_NODE:29500"
        launcher = f"torchrun --nnodes={world // per_node} --nproc_per_node={per_node} {rendezvous}"
    return flags.shell_command(f"{launcher} train_fsdp.py", given, **changes)


def with_effect(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of `given` that have an effect together with `changes`."""
    without_effect = flags.flags_without_effect(flags.complete(given | changes))
    kept = {name: value for name, value in given.items() if name not in without_effect}
    return kept if kept == given else with_effect(kept, changes)  # a flag may depend on a dropped one


def memory_advice(settings: flags.Flags) -> str:
    """Return one sentence with flags that save memory."""
    return f"Try {', '.join(flags.as_flags(changes) for changes in memory_savers(settings)[:3])}."
