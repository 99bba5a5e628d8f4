"""The state of a training run: everything that must survive a restart."""

import dataclasses
import math
import pathlib
import re
import statistics
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from harness.base.errors import UserError
from harness.base.package_internals import wrapped_weight
from harness.state.shards import SafeReader, checkpoint_error
from harness.state.staging import like, local_part

# The clock may be set while a run goes on, so it is read once and time is then counted.
PROCESS_STARTED = psutil.Process().create_time()
CLOCK = time.time() - time.monotonic()


@dataclasses.dataclass
class TrainState:
    """Everything that must survive a restart. The data position is `samples`, as the order of the data is fixed; in a
    stream `position` is the last place before it where reading can begin."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None  # these three are not there for an export
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    tracker: Any = None  # utils.PerformanceTracker
    step: int = 0
    samples: int = 0  # global, consumed so far
    position: tuple[int, int, int] | None = None  # as StreamedDataset.chunks has it
    tokens: int = 0  # global
    started: float = PROCESS_STARTED  # of the first process
    elapsed_before: float = 0.0  # seconds from there to the start of this process
    productive_before: float = 0.0  # `productive_seconds` of the processes before
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])  # of the trackers
    branched_from: dict | None = None  # as `saved.find_origin` has it, where the run began with another's checkpoint

    POSITION = ("step", "samples", "position", "tokens")
    NUMBERS = (*POSITION, "started", "run_id", "branched_from")

    def count(self, samples: int, tokens: int) -> None:
        """One more step of a global batch of `samples` with `tokens`."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    @property
    def elapsed(self) -> float:
        """Seconds since the first process of the run started; never less than was said before."""
        return self.elapsed_before + CLOCK + time.monotonic() - PROCESS_STARTED

    def productive_seconds(self) -> float:
        """What the steps so far take at their usual speed, that of the median window, and at most what they took."""
        windows, tracker = self.tracker.windows, self.tracker
        usual = statistics.median_low([seconds / steps for steps, seconds in windows] or [0.0])
        measured = sum(s if s < 2 * n * usual else n * usual for n, s in windows)  # else it stood still
        return self.productive_before + measured + min(usual * tracker.warmup_steps, tracker.warmup_seconds)

    def numbers(self) -> dict:
        """What goes into the manifest."""
        own = {name: getattr(self, name) for name in self.NUMBERS} | {"elapsed": self.elapsed}
        return own | {"tracker": dict(self.tracker.total), "productive": self.productive_seconds()}

    def finite(self) -> bool:
        """Whether every parameter and optimizer state is finite, on all ranks."""
        tensors = [local_part(unwrapped(parameter)) for parameter in self.model.parameters()]
        tensors += [getattr(local, "scale", local) for _, _, local in self.optimizer_states()]  # scale: of 8-bit states
        largest = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], math.inf)
        broken = largest.isfinite().logical_not().int().to(tensors[0].device)
        dist.all_reduce(broken)
        return not broken.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes into the shards, under names that no number of ranks changes; loading writes into these tensors.

        An 8-bit optimizer state is saved twice: in fp32 for any other sharding, and its codes and scales, which are
        exact, for the same one.
        """
        tensors = {f"model.{name}": tensor for name, tensor in persistent_tensors(self.model).items()}
        for name, state, local in self.optimizer_states():
            tensors[name] = unwrapped(state)
            if hasattr(local, "codes"):
                mesh = state.device_mesh
                shard = f"{mesh.get_local_rank('shard')}of{mesh['shard'].size()}"
                tensors[name] = like(state, local.dequantize())
                tensors |= {f"{name}.{part}.{shard}": getattr(local, part) for part in ("codes", "scale")}
        rng = f"rng.{dist.get_rank()}of{dist.get_world_size()}"
        tensors[f"{rng}.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[f"{rng}.cuda"] = torch.cuda.get_rng_state()
        return tensors

    def optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, state, this rank's part of it)."""
        for name, parameter in self.model.named_parameters() if self.optimizer else ():
            for key, state in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", state, local_part(state)

    def load(self, path: pathlib.Path, numbers: dict, origin: dict | None = None, run_id: str | None = None) -> None:
        """Takes over a checkpoint that was saved on any number of ranks, in any stage. With `origin` it is another
        run's, and this one gets `run_id`, if it has one, and begins its own clock and averages."""
        reader, tensors = SafeReader(path), self.tensors()
        own = re.compile(r"\.\d+of\d+(\.cpu|\.cuda)?$")  # belongs to one sharding or world size
        try:
            index = reader.read_metadata()
            reader.read_metadata = lambda: index  # a rank where DCP's own look failed would load alone
            saved = index.state_dict_metadata
            tensors = {name: tensor for name, tensor in tensors.items() if name in saved or not own.search(name)}
            dcp.load(tensors, storage_reader=reader)
        except (Exception, dcp.CheckpointException) as error:
            raise UserError(f"--resume {path}: cannot be loaded ({checkpoint_error(error)})", 1) from error
        for name, _, local in self.optimizer_states():
            if hasattr(local, "codes") and not any(other.startswith(f"{name}.codes.") for other in tensors):
                local.copy_(tensors[name].to_local())
        for name, tensor in tensors.items():
            if name.startswith("rng."):
                (torch.cuda if name.endswith("cuda") else torch).set_rng_state(tensor.cpu())
        if origin:
            self.branched_from, self.run_id = origin, run_id or self.run_id
            self.take_position(numbers)
        else:
            self.take(numbers)

    def take(self, numbers: dict) -> None:
        """Takes over what a manifest has."""
        self.take_position(numbers)
        self.started, self.run_id, self.branched_from = (numbers.get(name) for name in self.NUMBERS[-3:])
        since_then = PROCESS_STARTED - self.started  # by clocks that may have been set, or be another machine's
        self.elapsed_before = max(since_then, numbers.get("elapsed", 0.0))
        if self.tracker:
            self.productive_before = numbers.get("productive", 0.0)
            if numbers["world_size"] == dist.get_world_size():
                self.tracker.total |= numbers["tracker"]

    def take_position(self, numbers: dict) -> None:
        """Takes over where a manifest's run was."""
        for name in self.POSITION:
            setattr(self, name, numbers[name])
        if self.scheduler:
            self.scheduler.last_epoch = self.step - 1  # the schedule is a function of flags and step
            self.scheduler.step()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The master weight that a float8 weight wraps; any other tensor as it is."""
    local = local_part(tensor)
    weight = wrapped_weight(local)
    return tensor if weight is local else like(tensor, weight)


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied one once."""
    kept = model.state_dict().keys()  # leaves out the buffers that are not persistent
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: unwrapped(tensor) for name, tensor in named if name in kept}
