"""Recorder: record memory, FLOPs, traffic and communication of the code under it, and its time at given rates."""

import collections
import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload  # private: the type of what a dispatch mode is given has no public name
from torch._subclasses.fake_tensor import FakeTensor  # private: tensors on `meta` have no other device
from torch.utils._python_dispatch import TorchDispatchMode  # private: no public name sees the operators of a backward
from torch.utils.weak import WeakIdKeyDictionary

from harness import model as models
from harness.plan.fusion import RegionMemory
from harness.plan.operators import (
    allocated_bytes,
    attention_workspace,
    find_unit,
    moved_bytes,
    nbytes,
    operator_flops,
    tensors_in,
)
from harness.plan.rates import DIVIDES_WORK, Rates

# Kinds of memory.
KINDS = ("parameters", "gradients", "optimizer", "activations", "communication")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
HOST = -1  # in place of a stream's number: pinned memory of the host


class StepRecorder(TorchDispatchMode):
    """Records allocations in order, and in `counts` sums over the step.

    Sizes are rounded as by the CUDA caching allocator. A storage's kind may be known only after its allocation (a
    buffer that becomes a gradient), so events are kept and summed at the end.

    Keys of `counts`, each sum linear in the number of layers:
        (seconds, phase, unit), (bytes, phase, unit), (flops, phase, unit)    operators, by `operators.find_unit`
        (dispatches, phase)                                                   kernels that eager operators launch
        (launches, phase)                                                     kernels that compiled regions launch
        (layers, phase)                                                       forward passes of compiled layers
        (calls, phase, kind, ranks, nodes, ranks_per_node), (sent_bytes, ...) collectives: see `_count_collective`
        (exposed_calls, ...), (exposed_bytes, ...)                            of these, without overlap
        (communicators, run)                                                  groups of more than one rank, of rank 0
    The phases are forward, backward, optimizer and, within it, update: `optimizer.step`.
    """

    def __init__(self, gpus_per_node: int, rates: Rates, cpu_offload: bool = False):
        super().__init__()
        self.gpus_per_node, self.rates = gpus_per_node, rates
        self.cpu_offload = cpu_offload  # parameters and optimizer states are on the host
        self.host_gradients: set[int] = set()  # with it: the storages of reduced gradients
        self.kind = "activations"  # kind of new storages, unless known otherwise
        self.kinds: list[str] = []  # by storage
        self.streams: list[int] = []  # by storage: number of the CUDA stream of its allocation, or HOST
        self.sizes: list[int] = []  # by storage: current bytes
        self.events: list[tuple[int, int]] = []  # (storage, change in bytes)
        self.marks: list[tuple[int, tuple | None]] = [(0, None)]  # (first event, key: see `mark`)
        self.counts: dict[tuple, Any] = collections.Counter()  # int or float
        self.collectives: list[tuple] = []  # (phase, kind, ranks, nodes, ranks_per_node, bytes sent), in order
        self.weight = 1  # number of microbatches that the current one represents
        self.microbatch: int | None = None  # None while the model is built: nothing is counted
        self.last_microbatch = False
        self.after_backward = False  # in this microbatch
        self.updating = False  # in `optimizer.step`
        self.in_region = False  # in a compiled region, which is counted as one
        self.allocates_on_host = False
        self.compiled_regions = 0  # without those of the update
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # {storage: number}
        self._stream_numbers: dict[Any, int] = {}
        self._groups: dict[Any, tuple[int, int, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    # ---- Events of a step --------------------------------------------------------------------------------------------

    def mark(self, phase: str, layer: int | str) -> None:
        """Assign the allocations from here on to (phase, microbatch, layer)."""
        self.marks.append((len(self.events), (phase, self.microbatch, layer)))

    def count_layer(self) -> None:
        """Count the forward pass of a compiled layer."""
        self.counts["layers", self.phase] += self.weight

    def start_microbatch(self, index: int, recorded: int, real: int) -> None:
        """Start a microbatch. If fewer than the `real` ones are recorded, the second represents all between first and
        last."""
        self.microbatch = index
        self.last_microbatch = index == recorded - 1
        self.after_backward = False
        self.weight = real - recorded + 1 if index == 1 else 1
        self.mark("forward", "embedding")

    def start_update(self, parameters: Iterable[nn.Parameter]) -> None:
        with torch.no_grad():  # otherwise `to_local` is an operator
            self.label([models.local(p.grad) for p in parameters if p.grad is not None], "gradients")
        self.marks.append((len(self.events), ("optimizer",)))
        self.updating = True

    def end_update(self) -> None:
        self.updating = False

    def count_exposed_collectives(self) -> None:
        """Count the collectives without overlap: the first two gathers of the step, the last reduction of each kind,
        and the first and last of DIVIDES_WORK in an optimizer; all-to-alls of attention are counted as they come."""
        in_passes = [entry for entry in self.collectives if entry[0] != "update"]
        gathers = [entry for entry in in_passes if entry[1] == "all_gather"]
        reductions = {kind: (phase, kind, *rest) for phase, kind, *rest in in_passes if phase == "backward"}
        for kind in ("all_gather", "all_to_all"):
            reductions.pop(kind, None)
        moves = [entry for entry in self.collectives if entry[0] == "update" and entry[1] in DIVIDES_WORK]
        for *key, sent in (*gathers[:2], *reductions.values(), *moves[:1], *moves[-1:]):
            self.counts["exposed_calls", *key] += 1
            self.counts["exposed_bytes", *key] += sent

    def label(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            self.kinds[self.register_storage(tensor.untyped_storage())] = kind

    def run_compiled(self, graph: torch.fx.GraphModule, memory: RegionMemory, *args: Any) -> Any:
        """Run a compiled region's graph. Records its results, and `memory.peak` bytes while it runs."""
        self.compiled_regions += not self.updating
        self._scratch(memory.peak)
        self.in_region = True
        result = graph(*args)
        self.in_region = False
        for tensor in tensors_in(result):
            self.register_storage(tensor.untyped_storage())
        if self.microbatch is not None:
            self.counts["launches", self.phase] += self.weight * memory.kernels
            self.counts["kernels", self.phase] += self.weight * memory.kernels
            self._count("memory", 0, memory.moved)
        return result

    # ---- Operators ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        if self.updating:
            return "update"
        if torch._C._current_graph_task_id() != -1:  # private: publicly only hooks see that a backward runs
            self.after_backward = True
            return "backward"
        return "optimizer" if self.last_microbatch and self.after_backward else "forward"

    def __torch_dispatch__(
        self, op: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(t, FakeTensor) or t in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented  # counted after DTensors and float8 tensors are unwrapped
        result = op(*args, **kwargs)
        for tensor in tensors_in(result):
            if not self.in_region and tensor.device.type != "meta":
                self.register_storage(tensor.untyped_storage())
        if self.microbatch is not None:
            self._count_operator(op, args, kwargs, result)
        return result

    def _count_operator(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        inputs = tensors_in((args, kwargs))
        if op.namespace in ("c10d", "_c10d_functional"):
            self.counts["dispatches", self.phase] += self.weight
            self._count_collective(op.name(), args, inputs)
            return
        flops = operator_flops(op, args, kwargs, result)
        if "copy_" in op.name() and any(map(self._is_on_host, inputs)):  # its buffer is not the GPU's memory
            self._count("host_link", 0, nbytes(args[0]))
            self.counts["dispatches", self.phase] += self.weight
            return
        if flops or not self.in_region:  # other operators of a compiled region are counted as one
            moved = moved_bytes(op, args, kwargs, tensors_in(result))
            self._count(find_unit(op, flops), flops, moved)
            # Views do not count: the first call of a compiled function makes more of them than the next.
            if not self.in_region and (flops or moved):
                self.counts["dispatches", self.phase] += self.weight
                self.counts["kernels", self.phase] += self.weight
        if not self.in_region:
            self._scratch(attention_workspace(op, inputs))
        if op.namespace == "fsdp" and "chunk_cat" in op.name():
            self.label(args[0], "gradients")

    def _count(self, unit: str, flops: int, moved: int) -> None:
        if flops or moved:
            key = self.phase, unit
            self.counts["seconds", *key] += self.weight * self.rates.operator_seconds(unit, flops, moved)
            self.counts["bytes", *key] += self.weight * moved
            self.counts["flops", *key] += self.weight * flops

    def _count_collective(self, name: str, args: Sequence[Any], inputs: list[torch.Tensor]) -> None:
        """Count a collective by kind, ranks, nodes and the fewest ranks on a node, with the bytes that this rank
        sends."""
        kinds = [kind for kind in COLLECTIVES if kind.replace("_", "") in name.replace("_", "")]
        if not kinds:
            return
        (kind,), group = kinds, find_group(args)
        ranks, nodes, ranks_per_node = self._group_sizes(group)
        sent = max(map(nbytes, inputs)) * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        key = (self.phase, kind, ranks, nodes, ranks_per_node)
        self.counts["calls", *key] += self.weight
        self.counts["sent_bytes", *key] += sent * self.weight
        self.collectives.append((*key, sent))
        if kind == "all_to_all" and not self.updating:  # attention waits for it
            self.counts["exposed_calls", *key] += self.weight
            self.counts["exposed_bytes", *key] += sent * self.weight
        if kind in ("all_gather", "reduce_scatter", "all_to_all"):
            self.label(inputs, "communication")
        if kind == "reduce_scatter":
            self.label(inputs[:1], "gradients")

    def _group_sizes(self, group: dist.ProcessGroup) -> tuple[int, int, int]:
        """Return (ranks of a group, their nodes, the fewest ranks on a node)."""
        if group not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            node_counts = collections.Counter(rank // self.gpus_per_node for rank in ranks)
            self._groups[group] = len(ranks), len(node_counts), min(node_counts.values())
        return self._groups[group]

    # ---- Memory ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Record allocations as pinned memory of the host."""
        self.allocates_on_host = True
        yield
        self.allocates_on_host = False

    def copy_from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the GPU for a copy of `tensor`, and count the copy."""
        self._count("host_link", 0, nbytes(tensor))
        return torch.empty_like(tensor)

    def copy_to_host(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return memory of the host for a copy of `gradients`, and count the copy."""
        copy = self.copy_from_host(gradients)
        self.host_gradients.add(self.register_storage(copy.untyped_storage()))
        return copy

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        number = self._numbers.get(tensor.untyped_storage())
        return number is not None and self.streams[number] == HOST

    def register_storage(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage; record an event if it is new or its size changed."""
        if storage not in self._numbers:
            self._numbers[storage] = self._add()
            weakref.finalize(storage, self._resize, self._numbers[storage], 0)
        number = self._numbers[storage]
        round_up = models.pinned_bytes if self.streams[number] == HOST else allocated_bytes
        self._resize(number, round_up(storage.nbytes()))
        return number

    def _resize(self, number: int, size: int) -> None:
        if size != self.sizes[number]:
            self.events.append((number, size - self.sizes[number]))
            self.sizes[number] = size

    def _scratch(self, size: int) -> None:
        """Record a kernel's workspace, which exists while it runs."""
        number = self._add()
        self._resize(number, size)
        self._resize(number, 0)

    def _add(self) -> int:
        """Return the number of a new storage. FSDP2 uses its streams on a CPU too, as names."""
        stream = torch.cpu.current_stream()
        number = self._stream_numbers.setdefault(stream, len(self._stream_numbers))
        self.streams.append(HOST if self.allocates_on_host else number)
        self.kinds.append(self.kind)
        self.sizes.append(0)
        return len(self.sizes) - 1

    def peaks(self) -> dict[tuple, np.ndarray]:
        """Return {(stream, *key of `mark`): bytes by kind, in the order of KINDS, at the peak of their sum}. Stream
        None is all streams together, without HOST."""
        owners, all_sizes = np.array(self.events).T
        kinds = np.array([KINDS.index(kind) for kind in self.kinds])[owners]
        streams = np.array(self.streams)[owners]
        if self.cpu_offload:
            is_state = np.isin(kinds, [KINDS.index("parameters"), KINDS.index("optimizer")])
            streams[is_state | np.isin(owners, list(self.host_gradients))] = HOST
        peaks: dict[tuple, np.ndarray] = {}
        for stream in (None, *range(HOST, max(self.streams) + 1)):
            sizes = all_sizes * (streams != HOST if stream is None else streams == stream)
            live = np.cumsum(sizes)
            for (start, mark), (end, _) in itertools.pairwise([*self.marks, (len(sizes), None)]):
                if mark is None:
                    continue
                begin = max(start - 1, 0)  # memory at its start counts too
                at = begin + int(live[begin:end].argmax()) + 1
                peak = np.bincount(kinds[:at], sizes[:at], len(KINDS))
                key = stream, *mark
                if key not in peaks or peak.sum() > peaks[key].sum():
                    peaks[key] = peak
        return peaks


def find_group(args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group in the arguments of a collective's operator: c10d operators have a TorchScript object,
    functional ones the group's name after the operation's."""
    for arg in args:
        # private: the type of a TorchScript object has no public name
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    names = [arg for arg in args if isinstance(arg, str)]
    name: Any = names[-1]  # torch has a type for group names
    return dist.distributed_c10d._resolve_process_group(name)  # private: no public name finds a group by its name
