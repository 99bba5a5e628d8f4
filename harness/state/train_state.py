"""The state of a training run: everything that must survive a restart."""

import dataclasses
import math
import pathlib
import re
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from harness.base.errors import UserError
from harness.base.ranks import of_all_ranks
from harness.model.averages import WeightAverage
from harness.model.finite import loss_without_data
from harness.state.shards import SafeReader, checkpoint_error
from harness.state.staging import like, local_part

# The clock may be set while a run goes on, so it is read once and time is then counted.
PROCESS_STARTED = psutil.Process().create_time()
CLOCK = time.time() - time.monotonic()
AVERAGE = "average."  # begins the names of averages in the shards


# ---- Fields of the manifest ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ManifestEntry:
    """How a field of `TrainState` is written into a checkpoint's manifest and restored from it."""

    key: str | None  # None: the field's name
    taken_by_branch: bool
    write: Callable[["TrainState"], Any] | None
    restore: Callable[["TrainState", Any, dict], None] | None


def in_manifest(
    default=dataclasses.MISSING,
    *,
    default_factory=dataclasses.MISSING,
    key: str | None = None,
    taken_by_branch: bool = False,
    write: Callable[["TrainState"], Any] | None = None,
    restore: Callable[["TrainState", Any, dict], None] | None = None,
):
    """A field of `TrainState` that survives a restart. Nothing else has to know it.

    Args:
        default, default_factory: its value in a fresh run, and in a checkpoint that is older than the field.
        key: its key in the manifest; by default the field's name.
        taken_by_branch: whether a run that goes on from another run's checkpoint takes it over. Otherwise that run
            begins it anew, as it does its clock and averages.
        write: returns what JSON holds of it; by default the field's value. It has to be the same on every rank, as rank
            0 writes the manifest, and to hold on another number of ranks.
        restore: gets the state, what `write` returned, and the whole manifest; by default the field is set.
    """
    entry = ManifestEntry(key, taken_by_branch, write, restore)
    return dataclasses.field(default=default, default_factory=default_factory, metadata={"manifest": entry})


def restore_elapsed(state: "TrainState", elapsed: float, manifest: dict) -> None:
    since_start = PROCESS_STARTED - state.started  # by clocks that may have been set, or be another machine's
    state.elapsed_before = max(since_start, elapsed)


def restore_totals(state: "TrainState", totals: dict, manifest: dict) -> None:
    """Averages over all steps, which another number of ranks begins anew."""
    if state.tracker and manifest["world_size"] == dist.get_world_size():
        state.tracker.total |= totals


def restore_positions(state: "TrainState", positions: dict, manifest: dict) -> None:
    if manifest.get("position"):  # of a version that had one stream, of one source
        positions = {"": {"0": manifest["position"]}}
    state.positions = {}
    for source, of_source in positions.items():
        state.positions[source] = {int(stream): tuple(position) for stream, position in of_source.items()}


@dataclasses.dataclass
class TrainState:
    """Everything that must survive a restart: tensors in the shards, every field that is `in_manifest` there. Only the
    model is needed for an export. The data position is `samples`, as the order of the data is fixed; of each stream
    `positions` has the last place before it where reading can begin."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    _: dataclasses.KW_ONLY
    average: WeightAverage | None = None  # of the weights, with --ema
    step: int = in_manifest(0, taken_by_branch=True)
    samples: int = in_manifest(0, taken_by_branch=True)  # global, consumed so far
    # of streams, by source and stream, as StreamedDataset.chunks has them; where the checkpoint had them
    positions: dict = in_manifest(  # noqa: RUF009 - it returns a field, as dataclasses.field does
        default_factory=dict,
        taken_by_branch=True,
        write=lambda state: state.shared_positions,
        restore=restore_positions,
    )
    tokens: int = in_manifest(0, taken_by_branch=True)  # global
    skipped_steps: int = in_manifest(0, taken_by_branch=True)
    # the skipped ones of the last 1,000 steps, and the gradient norms of the last steps that were not skipped
    recent_skipped: list = in_manifest(default_factory=list, taken_by_branch=True)  # noqa: RUF009 - as above
    recent_norms: list = in_manifest(default_factory=list, taken_by_branch=True)  # noqa: RUF009 - as above
    started: float = in_manifest(PROCESS_STARTED)  # when the first process of the run started, seconds since the epoch
    run_id: str = in_manifest(default_factory=lambda: uuid.uuid4().hex[:12])  # of the trackers
    # as `saved.find_origin` returns it, of a run that branched off
    branched_from: dict | None = in_manifest(None)  # noqa: RUF009 - it returns a field, as dataclasses.field does
    # seconds from the start of the first process to that of this one
    elapsed_before: float = in_manifest(0.0, key="elapsed", write=lambda state: state.elapsed, restore=restore_elapsed)
    # a utils.PerformanceTracker
    tracker: Any = in_manifest(  # noqa: RUF009 - as above
        None, write=lambda state: dict(state.tracker.total), restore=restore_totals
    )
    # productive_seconds() of the processes before this one
    productive_before: float = in_manifest(0.0, key="productive", write=lambda state: state.productive_seconds())

    def __post_init__(self):
        self.moved: dict[tuple[str, int], tuple[int, int, int]] = {}  # positions that this rank's batches have moved
        self.shared_positions: dict = {}  # positions of all ranks at the last `share_positions`

    def move_positions(self, positions: dict[str, dict[int, tuple[int, int, int]]]) -> None:
        """Takes over the positions that came with a batch."""
        for source, of_source in positions.items():
            for stream, position in of_source.items():
                self.moved[source, stream] = position

    def share_positions(self) -> None:
        """Brings the positions of all ranks together for a save; every rank calls this. Of a stream that several ranks
        read the earliest one counts: a rank may still need what follows it."""
        shared = {(source, stream): place for source, of in self.positions.items() for stream, place in of.items()}
        latest: dict[tuple[str, int], tuple[int, int, int]] = {}
        for moved in of_all_ranks(self.moved):
            for key, position in moved.items():
                latest[key] = min(position, latest.get(key, position))
        self.shared_positions = {}
        for (source, stream), position in (shared | latest).items():
            self.shared_positions.setdefault(source, {})[stream] = position

    def count(self, samples: int, tokens: int) -> None:
        """One more step of a global batch of `samples` with `tokens`."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    @property
    def elapsed(self) -> float:
        """Seconds since the first process of the run started; never less than at an earlier save."""
        return self.elapsed_before + CLOCK + time.monotonic() - PROCESS_STARTED

    def productive_seconds(self) -> float:
        """What the steps so far take at their usual speed, that of the median window, and at most what they took."""
        windows, tracker = self.tracker.windows, self.tracker
        usual = statistics.median_low([seconds / steps for steps, seconds in windows] or [0.0])
        productive = []
        for steps, seconds in windows:
            training_paused = seconds >= 2 * steps * usual
            productive.append(steps * usual if training_paused else seconds)
        return self.productive_before + sum(productive) + min(usual * tracker.warmup_steps, tracker.warmup_seconds)

    def numbers(self) -> dict:
        """The fields that go into the manifest, by their keys."""
        numbers = {}
        for field, entry in manifest_fields():
            numbers[entry.key or field.name] = entry.write(self) if entry.write else getattr(self, field.name)
        return numbers

    def finite(self) -> bool:
        """Whether every parameter, its average and every optimizer state is finite, on all ranks."""
        tensors = [local_part(unwrapped(parameter)) for parameter in self.model.parameters()]
        tensors += [local_part(average) for average in self.averages().values()]
        for _, _, local in self.optimizer_states():
            tensors.append(local.scale if hasattr(local, "scale") else local)  # an 8-bit state has codes and scales
        largest = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], math.inf)
        broken = largest.isfinite().logical_not().int().to(tensors[0].device)
        dist.all_reduce(broken)
        return not broken.item()

    def what_is_broken(self) -> str:
        """What is wrong with a state that was loaded, or is to be exported, in words that follow its name; empty where
        nothing is. Every rank calls this."""
        if not self.finite():
            return "holds values that are infinite or NaN"
        loss = loss_without_data(self.model)
        return "" if math.isfinite(loss) else f"gives a loss of {loss}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes into the shards, by names that are the same on any number of ranks; loading writes into them.

        An 8-bit optimizer state is saved twice: in fp32 for any other sharding, and its codes and scales, which are
        exact, for the same one.
        """
        tensors = {f"model.{name}": tensor for name, tensor in persistent_tensors(self.model).items()}
        tensors |= self.averages()
        for name, state, local in self.optimizer_states():
            tensors[name] = unwrapped(state)
            if hasattr(local, "codes"):
                mesh = state.device_mesh
                shard = f"{mesh.get_local_rank('shard')}of{mesh['shard'].size()}"
                tensors[name] = like(state, local.dequantize())
                tensors[f"{name}.codes.{shard}"] = local.codes
                tensors[f"{name}.scale.{shard}"] = local.scale
        rng = f"rng.{dist.get_rank()}of{dist.get_world_size()}"
        tensors[f"{rng}.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[f"{rng}.cuda"] = torch.cuda.get_rng_state()
        return tensors

    def averages(self) -> dict[str, torch.Tensor]:
        """The averages of the weights, by the names that they have in the shards; none without --ema."""
        if self.average is None:
            return {}
        return {f"{AVERAGE}{name}": unwrapped(average) for name, average in self.average.tensors.items()}

    def optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, state, this rank's part of it); none without an optimizer."""
        if self.optimizer is None:
            return
        for name, parameter in self.model.named_parameters():
            for key, state in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", state, local_part(state)

    def load(self, path: pathlib.Path, manifest: dict, origin: dict | None = None, run_id: str | None = None) -> None:
        """Restores a checkpoint that was saved on any number of ranks, in any stage. With `origin` it is another run's:
        this one branches off, gets `run_id`, if it has one, and begins its own clock and averages."""
        self.load_tensors(path)
        if origin:
            self.branched_from = origin
            self.run_id = run_id or self.run_id
        self.restore_counters(manifest, branch=bool(origin))

    def load_tensors(self, path: pathlib.Path) -> None:
        """Loads the shards into the tensors of this state; where they hold no average, that begins as a copy of the
        loaded weights. Raises a UserError where they cannot be read."""
        reader, tensors = SafeReader(path), self.tensors()
        of_one_layout = re.compile(r"\.\d+of\d+(\.cpu|\.cuda)?$")  # belongs to one sharding or world size
        try:
            index = reader.read_metadata()
            reader.read_metadata = lambda: index  # a rank where DCP's own look failed would load alone
            has_average = any(name.startswith(AVERAGE) for name in index.state_dict_metadata)
            for name in list(tensors):
                is_missing = of_one_layout.search(name) and name not in index.state_dict_metadata
                if is_missing or (name.startswith(AVERAGE) and not has_average):
                    del tensors[name]
            dcp.load(tensors, storage_reader=reader)
        except (Exception, dcp.CheckpointException) as error:
            raise UserError(f"--resume {path}: cannot be loaded ({checkpoint_error(error)})", 1) from error
        if self.average and not has_average:
            self.average.restart()
        for name, _, local in self.optimizer_states():
            codes_loaded = any(other.startswith(f"{name}.codes.") for other in tensors)
            if hasattr(local, "codes") and not codes_loaded:
                local.copy_(tensors[name].to_local())
        for name, tensor in tensors.items():
            if name.startswith("rng.") and name.endswith(".cuda"):
                torch.cuda.set_rng_state(tensor.cpu())
            elif name.startswith("rng."):
                torch.set_rng_state(tensor.cpu())

    def restore_counters(self, manifest: dict, branch: bool = False) -> None:
        """Restores the fields of a manifest; for a branch, the manifest of another run, only those that it takes over.
        A field that the manifest lacks gets its default."""
        for field, entry in manifest_fields():
            if branch and not entry.taken_by_branch:
                continue
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            value = manifest.get(entry.key or field.name, default)
            if entry.restore:
                entry.restore(self, value, manifest)
            else:
                setattr(self, field.name, value)
        if self.scheduler:
            self.scheduler.last_epoch = self.step - 1  # the schedule is a function of flags and step
            self.scheduler.step()


def manifest_fields() -> list[tuple[dataclasses.Field, ManifestEntry]]:
    """The fields of `TrainState` that a manifest holds, in their order."""
    fields = dataclasses.fields(TrainState)
    return [(field, field.metadata["manifest"]) for field in fields if "manifest" in field.metadata]


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The master weight that a float8 weight wraps; any other tensor as it is."""
    local = local_part(tensor)
    weight = getattr(local, "_tensor", local)  # private: torchao's public way is to cast it, at a copy
    return tensor if weight is local else like(tensor, weight)


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied one once."""
    persistent = model.state_dict().keys()  # leaves out the buffers that are not persistent
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: unwrapped(tensor) for name, tensor in named if name in persistent}
