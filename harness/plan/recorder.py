"""Recorder: one training step on fake tensors, and what it allocates, computes, moves and sends. Called by `predict`,
which makes memory and time of it, and by `measure`. Independent of any GPU."""

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import re
import weakref
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from harness.base.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_dispatch_modes,
    backend_like_inductor,
    backward_is_running,
    compiled_for_each_shape,
    compiled_without_random_states,
    disable_dispatch_modes,
    dtensor_shapes_unrecorded,
    fake_store,
    fsdp_chunks_as,
    group_of_collective,
    is_default_cpu_stream,
    tree_map_only,
)
from harness.flags.settings import Settings
from harness.model import loss, newton_schulz, skipping, whole_matrices
from harness.model.attention import any_attention_kernel, without_packing_detection
from harness.model.averages import WeightAverage
from harness.model.matrices import MatrixWeight, matrix_weights
from harness.model.optimization import find_optimizer
from harness.model.weights import decoder_layers, on_meta
from harness.plan.fusion import RegionMemory, fused_memory
from harness.plan.operators import (
    KINDS,
    allocated_bytes,
    attention_workspace,
    kind_of,
    layout_of,
    moved_bytes,
    nbytes,
    operator_flops,
    shapes,
    tensors_in,
)
from harness.plan.rates import DIVIDES_WORK, LIST, Operator


class StepRecorder(TorchDispatchMode):
    """Records what runs under it: allocations in order, FLOPs, bytes moved, collectives.

    Sizes are rounded as the CUDA caching allocator does. A storage's kind may become known after it was allocated (a
    buffer that turns out to be a gradient), so events are kept and summed at the end.
    """

    def __init__(self, gpus_per_node: int):
        super().__init__()
        self.gpus_per_node = gpus_per_node
        self.events: list[tuple[int, int]] = []  # (number of the storage, bytes), negative for a release
        self.kinds: list[str] = []  # of each storage
        self.kind = "activations"  # of a storage of which nothing else is known
        self.pools: list[int] = []  # of each storage: the stream that it was allocated in, 0 for the default one
        self._streams: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.marks: list[tuple] = [(0, (None, "build"))]  # (first event, its key: see `mark`)
        self.counts: collections.Counter = collections.Counter()  # (name, phase, ...): sums over a step
        self.operators: collections.Counter = collections.Counter()  # (phase, Operator): how often
        self.examples: dict[Operator, tuple] = {}  # (what to call, args, kwargs), with layouts in the place of tensors
        self.parts: dict[Operator, collections.Counter] = {}  # of a compiled region: what it is without the compiler
        self.weight = 1  # of the microbatch at work; more than 1 for one that stands for several
        self.microbatch: int | None = None
        self.last_microbatch = False
        self.after_backward = False  # in this microbatch
        self.compiled_regions = 0
        self.collectives: list[tuple] = []  # (phase, kind, ranks, those of a node, bytes sent, of the whole buffer)
        self._number: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._group_sizes: dict[Any, tuple[int, int]] = {}  # of a process group: its ranks, those on the first's node
        self._fused: set[int] | None = None  # storages made in the compiled region that runs; None outside of one
        self._parts: collections.Counter = collections.Counter()  # operators of that region

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def mark(self, *key) -> None:
        """What is allocated from here on belongs to (microbatch, *key): the phase, and in a pass the layer."""
        self.marks.append((len(self.events), (self.microbatch, *key)))

    def start_microbatch(self, index: int, recorded: int, real: int) -> None:
        """Where fewer microbatches are recorded than there are, the second stands for all between first and last."""
        self.microbatch = index
        self.last_microbatch = index == recorded - 1
        self.after_backward = False
        self.weight = real - recorded + 1 if index == 1 else 1
        self.mark("forward", "embedding")

    def start_optimizer(self, parameters) -> None:
        with torch.no_grad():  # so that `to_local` is no operator
            self.label([p.grad.to_local() for p in parameters if p.grad is not None], "gradients")
        self.mark("optimizer")
        # The ends of a step have no computation beside them: the first two gathers, the last reduction of each kind.
        gathers = [entry for entry in self.collectives if entry[1] == "all_gather"]
        last_reductions = {}
        for entry in self.collectives:
            if entry[0] == "backward" and entry[1] != "all_gather":
                last_reductions[entry[1]] = entry
        for phase, *group, sent, whole in [*gathers[:2], *last_reductions.values()]:
            self.counts["end_calls", phase, *group] += 1
            self.counts["end_bytes", phase, *group] += sent
            self.counts["end_whole_bytes", phase, *group] += whole

    def end_optimizer(self) -> None:
        """The first collective of an optimizer that divides its work, and the last, have no computation beside them."""
        moves = [entry for entry in self.collectives if entry[0] == "optimizer" and entry[1] in DIVIDES_WORK]
        if moves:
            for phase, *group, sent, whole in (moves[0], moves[-1]):
                self.counts["end_calls", phase, *group] += 1
                self.counts["end_bytes", phase, *group] += sent
                self.counts["end_whole_bytes", phase, *group] += whole

    def label(self, tensors, kind: str) -> None:
        for tensor in tensors:
            self.kinds[self.see(tensor.untyped_storage())] = kind

    def run_compiled(self, graph: torch.fx.GraphModule, args, name: str, memory: RegionMemory):
        """Runs a compiled region's graph. Of its intermediate tensors none is recorded, but `memory.peak` bytes that
        exist while it runs."""
        self.compiled_regions += 1
        self._scratch(memory.peak)
        self._fused, self._parts = set(), collections.Counter()
        result = graph(*args)
        kept, self._fused = self._fused, None
        for number in kept:
            self.events.append((number, self._alive[number][1]))
        if memory.kernels:
            self._parts[Operator("fused", "", 0, memory.moved / memory.kernels)] = memory.kernels
        flops = sum(times * part.flops for part, times in self._parts.items())
        moved = sum(times * part.nbytes for part, times in self._parts.items())
        region = Operator(name, shapes(args), flops, moved)
        self.parts[region] = self._parts
        self.keep_example(region, graph, args, {})
        phase = self.phase
        if self.microbatch is not None:
            self.counts["dispatches", phase] += self.weight
            self.operators[phase, region] += self.weight
        return result

    @property
    def phase(self) -> str:
        if self.microbatch is None:
            return "build"
        if backward_is_running():
            self.after_backward = True
            return "backward"
        return "optimizer" if self.last_microbatch and self.after_backward else "forward"

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(issubclass(t, FakeTensor) or t in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented  # counted when a DTensor or a float8 tensor has become its parts
        result = op(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        for tensor in outputs:
            if tensor.device.type != "meta":
                self.see(tensor.untyped_storage())
        if self.microbatch is None:
            return result
        phase, name = self.phase, op.name()
        if self._fused is None and op.namespace != "prim":  # prim::device: only a fake tensor's device is an operator
            self.counts["dispatches", phase] += self.weight
        if op.namespace in ("c10d", "_c10d_functional"):
            self._count_collective(name, args, inputs, phase)
        else:
            self._count_operator(op, args, kwargs, result, phase)
        if op.namespace == "fsdp" and "chunk_cat" in name:
            self.label(args[0], "gradients")
        return result

    def _count_operator(self, op, args, kwargs, result, phase: str) -> None:
        name, inputs = op.name(), tensors_in((args, kwargs))
        flops = operator_flops(op, args, kwargs, result)
        moved = moved_bytes(op, args, kwargs, tensors_in(result))
        if not flops and (self._fused is not None or not moved):  # a region's fused kernels are counted as a whole
            return
        counted = Operator(kind_of(name, inputs), shapes((args, kwargs)), flops, moved)
        if not flops and (re.match("aten::_(foreach|fused)", name) or len(inputs) > 6):  # over parameters
            counted = counted._replace(shape=LIST, nbytes=0)
            self.counts["list_bytes", phase, counted.kind] += moved * self.weight
        self.keep_example(counted, op, args, kwargs)
        if self._fused is None or counted.unit == "attention":  # each device has kernels of its own for it
            self.operators[phase, counted] += self.weight
        else:
            self._parts[counted] += 1
        self._scratch(attention_workspace(op, inputs))

    def keep_example(self, operator: Operator, call, args, kwargs) -> None:
        """What `measure` runs to time an operator; no tensor is kept, which would be memory that is never freed."""
        if operator not in self.examples:
            args, kwargs = tree_map_only(torch.Tensor, layout_of, (args, kwargs))
            self.examples[operator] = call, args, kwargs

    def _count_collective(self, name: str, args, inputs: list[torch.Tensor], phase: str) -> None:
        match = re.search("all_?gather|reduce_scatter|all_?reduce|broadcast|all_?to_?all", name)
        if not match:
            return
        names = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}
        kind, group = names.get(match[0], match[0]), group_of_collective(args)
        ranks, per_node = self._sizes_of(group)
        whole = max(map(nbytes, inputs))
        sent = whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
        key = (phase, kind, ranks, per_node)
        self.counts["calls", *key] += self.weight
        self.counts["sent_bytes", *key] += sent * self.weight
        self.counts["whole_bytes", *key] += whole * self.weight
        self.collectives.append((*key, sent, whole))
        if kind in ("all_gather", "reduce_scatter", "all_to_all"):
            self.label(inputs, "communication")
        if kind == "reduce_scatter":
            self.label(inputs[:1], "gradients")

    def _sizes_of(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """The number of a group's ranks, and of those that are on the node of the first."""
        if group not in self._group_sizes:
            ranks = dist.get_process_group_ranks(group)
            node = ranks[0] // self.gpus_per_node
            per_node = sum(rank // self.gpus_per_node == node for rank in ranks)
            self._group_sizes[group] = len(ranks), per_node
        return self._group_sizes[group]

    def see(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage; it is recorded when it is new or has another size than before."""
        number, size = self._number.get(storage), allocated_bytes(storage.nbytes())
        if number is None:
            number = self._number[storage] = self._add()
            self._alive[number] = (weakref.ref(storage, lambda _: self._free(number)), size)
            if self._fused is None:
                self.events.append((number, size))
            else:
                self._fused.add(number)
            return number
        reference, before = self._alive[number]
        is_fused = self._fused is not None and number in self._fused
        if size != before and not is_fused:
            self._alive[number] = reference, size
            self.events.append((number, size - before))
        return number

    def _free(self, number: int) -> None:
        _, size = self._alive.pop(number)
        if self._fused is not None and number in self._fused:
            self._fused.remove(number)
        else:
            self.events.append((number, -size))

    def _scratch(self, size: int) -> None:
        """A kernel's own workspace: there while it runs."""
        if self._fused is None:
            number = self._add()
            self.events += [(number, size), (number, -size)]

    def _add(self) -> int:
        """The number of a new storage. FSDP2 enters its streams on a CPU too, where they are names only."""
        stream = torch.cpu.current_stream()
        if is_default_cpu_stream(stream):
            self.pools.append(0)
        else:
            self.pools.append(self._streams.setdefault(stream, len(self._streams) + 1))
        self.kinds.append(self.kind)
        return len(self.kinds) - 1

    def peaks(self, pool: int | None = None) -> dict[Any, np.ndarray]:
        """For each key of `mark` the bytes by kind (in the order of KINDS) at the moment that held most of them; those
        of one pool alone if it is given."""
        owners, sizes = np.array(self.events).T
        if pool is not None:
            sizes = sizes * (np.array(self.pools)[owners] == pool)
        kinds = np.array([KINDS.index(kind) for kind in self.kinds])[owners]
        live = np.cumsum(sizes)
        peaks: dict[Any, np.ndarray] = {}
        ends = [start for start, _ in self.marks[1:]] + [len(sizes)]
        for (start, key), end in zip(self.marks, ends, strict=True):
            if key[-1] is None:
                continue
            begin = max(start - 1, 0)  # what was there when it began counts too
            at = begin + int(live[begin:end].argmax()) + 1
            peak = np.bincount(kinds[:at], sizes[:at], len(KINDS))
            if key not in peaks or peak.sum() > peaks[key].sum():
                peaks[key] = peak
        return peaks


@functools.cache
def recording_backend():
    """A backend for torch.compile that partitions graphs as inductor does and runs them under a StepRecorder."""

    def run(graph, name, memory, *args):
        recorder = next(mode for mode in active_dispatch_modes() if isinstance(mode, StepRecorder))
        return recorder.run_compiled(graph, args, name, memory)

    def compiler(graph, inputs):
        operators = "\n".join(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        dtypes = " ".join(str(tensor.dtype) for tensor in tensors_in(inputs))
        name = "region " + hashlib.sha256(f"{operators}\n{dtypes}".encode()).hexdigest()[:12]
        return functools.partial(run, graph, name, fused_memory(graph))

    return backend_like_inductor(compiler)


class Chunks:
    """The shards that FSDP2 cuts a tensor into, each made when it is asked for. A plan of one rank needs one or two of
    them; a list of all takes minutes from 4,096 ranks on."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int):
        self.tensor, self.count, self.dim = tensor, count, dim

    def __getitem__(self, rank: int) -> torch.Tensor:
        length = self.tensor.size(self.dim)
        size = -(-length // self.count)
        if rank * size >= length:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rank * size, min(size, length - rank * size))


def deal_at_full_depth(config, deal=whole_matrices.deal):
    """A function in the place of `whole_matrices.deal`, by which a shallow model does what the optimizer of the whole
    model does: how many weights a rank owns is not linear in the depth. Each weight that the shallow model lacks lies
    where one of its kind does."""

    def deal_all(weights: list[MatrixWeight], world: int) -> list[whole_matrices.Batch]:
        places = {weight.kind: weight for weight in weights}
        with disable_dispatch_modes():
            whole_model = matrix_weights(on_meta(config))
        return deal([places[weight.kind] for weight in whole_model.values() if not weight.is_of_experts], world)

    return deal_all


@contextlib.contextmanager
def products_as_on_a_gpu():
    """Adds a product in place and multiplies in the dtype of the tensors; a CPU may do neither. Fake tensors on the CPU
    allow the first for dtypes of which the CPU has no kernel."""
    with (
        mock.patch.object(loss, "add_product", lambda total, a, b: torch.addmm(total, a, b, out=total)),
        mock.patch.object(newton_schulz, "dtype_of_products", lambda x: x.dtype),
    ):
        yield


@contextlib.contextmanager
def on_fake_tensors(recorder: StepRecorder, config=None, on_gpu: bool = True):
    """Fake tensors under `recorder`; `config` is that of the model at its full depth. Patches what is no operator, does
    not run on fake tensors, or runs otherwise on a GPU."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):  # how FSDP allocates and frees gathered parameters, without an operator
        resize(storage, size)
        recorder.kinds[recorder.see(storage)] = "communication"

    def three_chunks(tokens, size, starts=loss.chunk_starts):  # the second stands for all between first and last
        starts, weight = starts(tokens, size), recorder.weight
        for index in sorted({0, min(1, len(starts) - 1), len(starts) - 1}):
            recorder.weight = weight * max(len(starts) - 2, 1) if index == 1 else weight
            yield starts[index]
        recorder.weight = weight

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        dtensor_shapes_unrecorded(),
        mock.patch.object(loss, "chunk_starts", three_chunks),
        mock.patch.object(whole_matrices, "deal", deal_at_full_depth(config)),
        mock.patch.object(skipping, "on_host", lambda skip: False),
        fsdp_chunks_as(Chunks),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=recording_backend())),
        compiled_without_random_states(),
        compiled_for_each_shape(),
        any_attention_kernel(),
        products_as_on_a_gpu() if on_gpu else contextlib.nullcontext(),
        without_packing_detection(),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
    ):
        yield


def new_group_of_rank_0(ranks, **options) -> dist.ProcessGroup | None:
    """Makes a group if rank 0 is in it. A mesh of two dimensions makes the groups of all ranks, and a plan of rank 0
    needs its own two."""
    return dist.new_group(ranks, **options) if 0 in ranks else None


def at_depth(config, depth: int):
    """The config of the model's first `depth` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return config


def record_step(
    settings: Settings, recipe, config, world: int, depth: int, edge: int, on_gpu: bool = True
) -> StepRecorder:
    """Builds a model of `depth` layers as rank 0 of `world` and takes one optimizer step, all of it recorded.

    The peaks of the first and the last `edge` layers are kept apart, and at most three microbatches are taken. Rank 0
    is the fullest rank, as fully_shard splits dimension 0 like torch.chunk. `recipe` is a `predict.Recipe`.

    Raises:
        RuntimeError: layers are to be compiled and none was.
    """
    microbatches = settings.gradient_accumulation_steps
    settings = dataclasses.replace(settings, init="random", gradient_accumulation_steps=min(microbatches, 3))
    # Other attention kernels do not run here; they save and allocate the same. A document mask is left out: a GPU's
    # flex attention skips what is masked, and the plan takes nothing as masked.
    attention = "eager" if settings.attention == "eager" else "sdpa"
    settings = dataclasses.replace(settings, attention=attention, document_mask=False)
    full_config, config = config, at_depth(config, depth)
    recorder = StepRecorder(settings.gpus_per_node)
    optimizer_kind = find_optimizer(settings.optimizer)
    if optimizer_kind.before_plan and optimizer_kind.is_installed():
        optimizer_kind.before_plan()

    def batches():
        for index in range(settings.gradient_accumulation_steps):
            recorder.start_microbatch(index, settings.gradient_accumulation_steps, microbatches)
            shape = (settings.batch_size, settings.sequence_length)
            yield {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}

    def watch(layer: nn.Module, key: int | None) -> None:
        def after(module, inputs, output):
            hidden = output if torch.is_tensor(output) else output[0]
            hidden.register_hook(lambda grad: recorder.mark("backward", key))

        layer.register_forward_pre_hook(lambda *_: recorder.mark("forward", key))
        layer.register_forward_hook(after)

    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world)
    try:
        with mock.patch.object(torch.distributed.device_mesh, "new_group", new_group_of_rank_0):
            mesh = recipe.build_mesh(settings, torch.device("cpu"))
        with on_fake_tensors(recorder, full_config, on_gpu):
            recorder.kind = "parameters"
            model = recipe.build_model(settings, config, mesh)
            recorder.kind = "optimizer"
            optimizer = recipe.build_optimizer(settings, model)
            recorder.kind = "average"
            average = WeightAverage(model, settings.ema) if settings.ema else None
            layers = decoder_layers(model)
            for index, layer in enumerate(layers):
                if index < edge:
                    watch(layer, index)
                elif index >= depth - edge:
                    watch(layer, index - depth)
                else:
                    watch(layer, None)
            layers[-1].register_forward_hook(lambda *_: recorder.mark("head"))
            optimizer.register_step_pre_hook(lambda *_: recorder.start_optimizer(model.parameters()))
            optimizer.register_step_post_hook(lambda *_: recorder.end_optimizer())
            recorder.kind = "activations"
            if settings.fp8_recipe == "tensorwise":  # as every step but the first finds it
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                precompute_float8_dynamic_scale_for_fsdp(model)
            recipe.train_step(settings, model, optimizer, batches(), recipe.make_tracker(0, world, 0))
            if average:
                average.update()
    finally:
        dist.destroy_process_group()
    if settings.compile and not recorder.compiled_regions:
        raise RuntimeError("the plan's step ran eagerly although the layers are compiled")
    return recorder
