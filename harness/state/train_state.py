"""The state of a training run: everything that must survive a restart."""

import contextlib
import dataclasses
import math
import pathlib
import re
import statistics
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.tensor import DTensor

from harness import base, job
from harness import data as corpora
from harness import model as models
from harness.state.shards import SafeReader, checkpoint_error

# The clock may be set during a run, so it is read once; then time is counted.
PROCESS_STARTED = psutil.Process().create_time()
CLOCK = time.time() - time.monotonic()
LAYOUT_SUFFIX = re.compile(r"\.\d+of\d+(\.cpu|\.cuda)?$")  # of tensors that only one sharding or world size has


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    path: pathlib.Path
    manifest: dict  # the run's record, with `Counters`


def reset_in_new_run(**options: Any) -> Any:
    """Return the field of a counter that starts from its default when a checkpoint begins a new run."""
    return dataclasses.field(metadata={"reset_in_new_run": True}, **options)


@dataclasses.dataclass(kw_only=True)
class Counters:
    """Values that survive a restart and are no tensors, as JSON in a checkpoint's manifest. A new one is one line.

    All ranks have equal values, except `positions`, and they are valid on another number of ranks.
    """

    step: int = 0  # optimizer steps
    samples: int = 0  # global, consumed so far; the position in the data, whose order is fixed
    tokens: int = 0  # global
    # by source and stream shard: the last position before `samples` from which reading can start
    positions: corpora.Positions = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None  # of the next step
    eval_loss: float | None = None  # after `step`, if it was evaluated
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # up to the last step
    run_id: str = reset_in_new_run(default_factory=lambda: uuid.uuid4().hex[:12])  # for trackers
    started: float = reset_in_new_run(default=PROCESS_STARTED)  # the run's first process, seconds since the epoch
    elapsed_before: float = reset_in_new_run(default=0.0)  # seconds from `started` to the start of this process
    productive_before: float = reset_in_new_run(default=0.0)  # seconds of steps in earlier processes
    totals: dict[str, float] = reset_in_new_run(default_factory=dict)  # noqa: RUF009 - a field; the tracker's sums

    def restore(self, manifest: dict, from_other_run: bool) -> None:
        """Set the counters from a manifest; from another run's, only those of the weights and the data. A counter that
        the manifest lacks stays."""
        for field in dataclasses.fields(Counters):
            is_reset = from_other_run and "reset_in_new_run" in field.metadata
            if field.name in manifest and not is_reset:
                setattr(self, field.name, manifest[field.name])
        for source, by_shard in self.positions.items():  # JSON has no integer keys and no tuples
            self.positions[source] = {int(shard): corpora.Position(*position) for shard, position in by_shard.items()}


class TrainState(Counters):
    """Everything that must survive a restart: tensors, in a checkpoint's shards, and `Counters`, in its manifest.
    An export needs only the model. `tracker` is a utils.PerformanceTracker."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        *,
        tracker: Any = None,
        **counters: Any,
    ):
        super().__init__(**counters)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.tracker = tracker
        self.averaged_steps: list[int] = []  # steps of the checkpoints whose mean the weights are
        # by (source, shard): from this rank's finished steps, and from the batches of an unfinished step
        self.new_positions: dict[tuple[str, int], corpora.Position] = {}
        self.step_positions: dict[tuple[str, int], corpora.Position] = {}

    # ---- Counting ----------------------------------------------------------------------------------------------------

    def advance(self, record: corpora.DataRecord, tokens: int) -> None:
        """Count an optimizer step: its samples, which the `record` of the data tells, its `tokens`, and the schedule of
        the learning rate."""
        self.step += 1
        self.eval_loss = None
        self.new_positions |= self.step_positions
        self.step_positions.clear()
        samples = record.samples_of_step(self.step)
        self.samples += len(samples)
        self.tokens += tokens
        self.scheduler.step()
        self.learning_rate = float(self.scheduler.get_last_lr()[0])

    @contextlib.contextmanager
    def step_undone_if_stopped(self) -> Iterator[None]:
        """Undo a step that a stop interrupts between two microbatches: the state is that after the previous step, with
        its random state, and a resumed run repeats the interrupted one."""
        model: Any = self.model
        on_gpu = torch.cuda.is_available()
        random_state, gpu_state = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
        try:
            yield
        except job.Stopped:
            torch.set_rng_state(random_state)
            if gpu_state is not None:
                torch.cuda.set_rng_state(gpu_state)
            model.set_requires_gradient_sync(True)
            model.set_requires_all_reduce(True)
            model.set_reshard_after_backward(True)
            models.reshard(model)  # at stages below 3 parameters stay gathered between microbatches
            models.discard_unreduced_gradients(model)
            self.optimizer.zero_grad()
            raise

    def move_positions(self, positions: corpora.Positions) -> None:
        """Record, for each shard in a batch, the position of its first sequence there; these count once the step is
        complete."""
        for source, by_shard in positions.items():
            for shard, position in by_shard.items():
                self.step_positions[source, shard] = position

    def share_positions(self) -> corpora.Positions:
        """Return the positions of all ranks. Every rank calls this. If several ranks read a shard, its earliest
        position counts, as a rank may still need what follows it."""
        latest: dict[tuple[str, int], corpora.Position] = {}
        for rank_positions in base.all_gather_objects(self.new_positions):
            for key, position in rank_positions.items():
                latest[key] = min(position, latest.get(key, position))
        shared = {source: dict(by_shard) for source, by_shard in self.positions.items()}
        for (source, shard), position in latest.items():
            shared.setdefault(source, {})[shard] = position
        return shared

    def describe_steps(self) -> str:
        """Return `step 6`, or for averaged weights `mean of steps 2, 4, 6`."""
        if self.averaged_steps:
            return f"mean of steps {', '.join(f'{step:,}' for step in self.averaged_steps)}"
        return f"step {self.step:,}"

    @property
    def elapsed(self) -> float:
        """Seconds since the run's first process started; never less than at an earlier save."""
        return self.elapsed_before + CLOCK + time.monotonic() - PROCESS_STARTED

    def productive_seconds(self) -> float:
        """Return the seconds of training so far without pauses: an interval with more than twice the median time per
        step counts as if it had the median, and so does the warmup."""
        tracker = self.tracker
        intervals = [interval for interval in (*tracker.intervals, tracker.unfinished_interval()) if interval[0]]
        usual = statistics.median_low([seconds / steps for steps, seconds in intervals] or [0.0])
        productive = []
        for steps, seconds in intervals:
            training_paused = seconds >= 2 * steps * usual
            productive.append(steps * usual if training_paused else seconds)
        return self.productive_before + sum(productive) + min(usual * tracker.warmup_steps, tracker.warmup_seconds)

    def counters(self) -> dict:
        """Return the counters for a process that resumes at this step. Every rank calls this."""
        totals = dict(self.tracker.total)
        ranks = base.all_gather_objects(totals)
        totals["flops"] = sum(rank["flops"] for rank in ranks) / len(ranks)  # each rank counts its own documents
        totals["data_wait"] = max(rank["data_wait"] for rank in ranks)
        now = {
            "positions": self.share_positions(),
            "elapsed_before": self.elapsed,
            "productive_before": self.productive_seconds(),
            "totals": totals,
        }
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Counters)} | now

    # ---- Tensors -----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of the shards, by names that are equal on any number of ranks. Loading writes into them.

        An 8-bit optimizer state is saved twice: in fp32 for another sharding, and exactly, as codes and scales, for the
        same sharding.
        """
        tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in saved_tensors(self.model).items()}
        for name, state, local in self.optimizer_states():
            tensors[name] = unwrapped(state)
            if hasattr(local, "codes"):
                mesh = state.device_mesh
                shard = f"{mesh.get_local_rank('shard')}of{mesh['shard'].size()}"
                tensors[name] = dtensor_like(state, local.dequantize())
                tensors[f"{name}.codes.{shard}"] = local.codes
                tensors[f"{name}.scale.{shard}"] = local.scale
        rng = f"rng.{dist.get_rank()}of{dist.get_world_size()}"
        tensors[f"{rng}.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[f"{rng}.cuda"] = torch.cuda.get_rng_state()
        return tensors

    def saved_bytes(self) -> int:
        """Return the bytes of a checkpoint's tensors, of all ranks."""
        weights = sum(tensor.numel() * tensor.itemsize for tensor in saved_tensors(self.model).values())
        states = 0
        for _, state, local in self.optimizer_states():
            states += state.numel() * (4 + 1 if hasattr(local, "codes") else state.itemsize)  # in fp32, and its codes
        return weights + states

    def optimizer_states(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, state, this rank's part of it); nothing without an optimizer."""
        if self.optimizer is None:
            return
        for name, parameter in self.model.named_parameters():
            for key, state in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", state, local_part(state)

    def load(self, checkpoint: Checkpoint, from_other_run: bool = False) -> None:
        """Restore a checkpoint that was saved on any number of ranks, at any stage. With `from_other_run` this run
        keeps its id and clock.

        Raises:
            UserError: the shards cannot be read.
        """
        self.load_tensors(checkpoint.path)
        self.restore(checkpoint.manifest, from_other_run)
        if not from_other_run:  # the clocks may differ: set, or of two machines
            self.elapsed_before = max(PROCESS_STARTED - self.started, self.elapsed_before)
            # a speed is only valid for its number of ranks and its GPU
            saved_on = [checkpoint.manifest.get(name) for name in ("world_size", "gpu")]
            gpu = base.broadcast_from_rank_0(base.gpu_name)  # the manifest has that of rank 0 too
            if self.tracker and saved_on == [dist.get_world_size(), gpu]:
                self.tracker.total |= self.totals
        if self.scheduler:
            self.scheduler.last_epoch = self.step - 1  # the schedule is a function of flags and step
            self.scheduler.step()

    def describe_lr_change(self) -> str:
        """Describe how the next step's learning rate differs between these flags and the loaded checkpoint; "" if it
        does not."""
        before, now = self.learning_rate, self.scheduler.get_last_lr()[0]
        if before is None or f"{before:.3g}" == f"{now:.3g}":
            return ""
        return f"learning rate {before:.3g} -> {now:.3g}"

    def load_tensors(self, path: pathlib.Path) -> None:
        """Load the shards into the tensors of this state."""
        # read once: a rank on which DCP's own reading fails would leave the others waiting
        index = base.broadcast_from_rank_0(lambda: read_index(path))
        tensors = self.tensors()
        for name in list(tensors):
            if LAYOUT_SUFFIX.search(name) and name not in index.state_dict_metadata:
                del tensors[name]
        try:
            dcp.load(tensors, storage_reader=SafeReader(path, index))
        except (Exception, dcp.CheckpointException) as error:
            raise cannot_be_loaded(path, error) from error
        for name, _, local in self.optimizer_states():
            codes_loaded = any(other.startswith(f"{name}.codes.") for other in tensors)
            if hasattr(local, "codes") and not codes_loaded:
                local.copy_(tensors[name].to_local())
        for name, tensor in tensors.items():
            if name.startswith("rng.") and name.endswith(".cuda"):
                torch.cuda.set_rng_state(tensor.cpu())
            elif name.startswith("rng."):
                torch.set_rng_state(tensor.cpu())

    # ---- Health ------------------------------------------------------------------------------------------------------

    def finite(self) -> bool:
        """Return True if all parameters and optimizer states are finite, on all ranks."""
        tensors = [local_part(unwrapped(parameter)) for parameter in self.model.parameters()]
        for _, _, local in self.optimizer_states():
            tensors.append(local.scale if hasattr(local, "scale") else local)  # an 8-bit state has codes and scales
        largest = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], math.inf)
        broken = largest.isfinite().logical_not().int().to(tensors[0].device)
        dist.all_reduce(broken)
        return not broken.item()

    def describe_update_fault(self) -> str:
        """Describe the last update if it made weights or optimizer states NaN or infinite; "" if all are finite. Every
        rank calls this."""
        if self.finite():
            return ""
        step = self.step - self.skipped_in_a_row
        return f"the update made weights or optimizer states infinite or NaN at step {step}"

    def describe_fault(self) -> str:
        """Return the predicate of a sentence about a loaded or exported state, such as "gives a loss of nan"; "" if it
        is sound. Every rank calls this."""
        if not self.finite():
            return "holds values that are infinite or NaN"
        loss = models.loss_without_data(self.model)
        return "" if math.isfinite(loss) else f"gives a loss of {loss}"


def read_index(path: pathlib.Path) -> dcp.Metadata:
    try:
        return SafeReader(path).read_metadata()
    except Exception as error:
        raise cannot_be_loaded(path, error) from error


def cannot_be_loaded(path: pathlib.Path, error: BaseException) -> base.UserError:
    return base.UserError(f"--resume {path}: cannot be loaded ({checkpoint_error(error)})", exit_code=1)


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the layout of `tensor` and the local part `local`, which may be on the host even for a mesh
    of GPUs."""
    # private: public `DTensor.from_local` would move the local part to the device of the mesh
    return DTensor(local, tensor._spec, requires_grad=False)


def unwrapped(tensor: Any) -> torch.Tensor:
    """Return the master weight in a float8 weight; any other tensor unchanged."""
    local = local_part(tensor)
    weight = getattr(local, "_tensor", local)  # private: torchao's public cast copies it
    return tensor if weight is local else dtensor_like(tensor, weight)


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, a tied one once."""
    persistent = model.state_dict().keys()  # without non-persistent buffers
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: unwrapped(tensor) for name, tensor in named if name in persistent}


def saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors in a checkpoint: `persistent_tensors` without frozen parameters, which a resume reads
    from their source."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in persistent_tensors(model).items() if name not in frozen}
