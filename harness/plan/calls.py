"""Calls: an operator with random arguments, laid out as they were recorded, and how long it takes. Called by `measure`.
Independent of the step that the operator belongs to."""

import collections
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from harness.base.torch_internals import occupy_gpu, schema_of, tree_leaves, tree_map, tree_map_only
from harness.plan.operators import Layout, moved_bytes, tensors_in
from harness.plan.rates import LIST, Operator

MAX_OPTIMIZER_BYTES = 2**28  # of the parameters that an optimizer is timed with
MAX_COPIES, MAX_COPIED_BYTES = 32, 2**28  # of an operator's arguments
MIN_BATCH_SECONDS = 3e-4  # between two readings of the clock


def make_tensor(layout: Layout, bound: int, device: torch.device) -> torch.Tensor:
    """A tensor of random numbers with this layout: none negative, as squares have to be; integers below `bound`, so
    that they can be indices."""
    size = 1 + sum((n - 1) * step for n, step in zip(layout.shape, layout.stride, strict=True))
    if layout.dtype.is_floating_point:
        storage = torch.rand(max(size, 1), device=device).to(layout.dtype)
    else:
        bound = 2 if layout.dtype == torch.bool else bound
        storage = torch.randint(0, bound, (max(size, 1),), device=device).to(layout.dtype)
    return storage.as_strided(layout.shape, layout.stride)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, storage included."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return storage.clone().as_strided(tensor.size(), tensor.stride())


def no_attention(query, key, value, *_, **__) -> tuple[torch.Tensor, ...]:
    """Replaces attention's kernel in a compiled region, since that is timed by itself: it allocates, and computes
    nothing."""
    return torch.empty_like(query), torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


def no_attention_backward(_, query, key, value, *__, **___) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class Call:
    """A function, and copies of its arguments that take turns.

    In a step an operator's arguments are seldom in a cache, where a loop would find them, and its results go to memory
    that was not in use a moment ago: so there are as many copies as fill `working_set` bytes. `nbytes` is what a call
    reads and writes, `written` the positions of arguments that it writes into.
    """

    def __init__(
        self, function: Callable, arguments: tuple[tuple, dict], nbytes: float, working_set: float, written=()
    ):
        self.function = function
        self.nbytes = nbytes
        self.written = list(written)
        args, _ = arguments
        self.before = [copy_of(tensor) for position in self.written for tensor in tensors_in(args[position])]
        size = max(1, sum(tensor.nbytes for tensor in tensors_in(arguments)))
        count = max(1, min(MAX_COPIES, math.ceil(working_set / size), int(MAX_COPIED_BYTES / size)))
        self.copies = [arguments]
        for _ in range(count - 1):
            self.copies.append(tree_map_only(torch.Tensor, copy_of, arguments))
        self.turn = 0
        self.results = collections.deque(maxlen=count)

    def restore(self) -> None:
        """Puts back what the next call writes into: the exponential of an exponential is soon infinite."""
        if self.written:
            args, _ = self.copies[(self.turn + 1) % len(self.copies)]
            tensors = tensors_in([args[position] for position in self.written])
            for tensor, before in zip(tensors, self.before, strict=True):
                tensor.copy_(before)

    def __call__(self) -> None:
        self.turn = (self.turn + 1) % len(self.copies)
        args, kwargs = self.copies[self.turn]
        self.results.append(self.function(*args, **kwargs))


def make_call(operator: Operator, call, args, kwargs, device: torch.device, working_set: float) -> Call:
    """A call of an operator with random arguments, laid out as they were recorded (`StepRecorder.examples`)."""
    if operator.unit == "attention":
        return make_attention_call(operator, call, args, kwargs, device, working_set)
    if isinstance(call, torch.fx.GraphModule):
        return make_region_call(operator, call, args, kwargs, device, working_set)
    if operator.shape == LIST:
        return make_list_call(operator, call, args, kwargs, device, working_set)
    arguments = make_arguments(operator, args, kwargs, device)
    return Call(call, arguments, operator.nbytes, working_set, written_positions(call))


def make_attention_call(operator: Operator, call, args, kwargs, device: torch.device, working_set: float) -> Call:
    """The device's own attention kernel, in the place of the recorded one."""
    names = [argument.name for argument in schema_of(call).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = [given[name] for name in ("query", "key", "value")]
    options = {"is_causal": given["is_causal"], "enable_gqa": inputs[0].shape[1] != inputs[1].shape[1]}

    def forward(*inputs):
        with torch.enable_grad():
            inputs = [tensor.requires_grad_() for tensor in inputs]
            return F.scaled_dot_product_attention(*inputs, **options)

    def backward(output, inputs, gradient):
        return torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    arguments = make_arguments(operator, inputs, {}, device)
    if "backward" not in call.name():
        return Call(forward, arguments, operator.nbytes, working_set)
    timed = Call(backward, arguments, operator.nbytes, working_set)
    copies = []
    for tensors, _ in timed.copies:
        output = forward(*tensors)
        copies.append(((output, tensors, torch.rand_like(output)), {}))
    timed.copies = copies
    return timed


def make_region_call(operator: Operator, graph, args, kwargs, device: torch.device, working_set: float) -> Call:
    """A compiled region, compiled for the device, without its attention."""
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": device}
        if "scaled_dot_product" in str(node.target):
            node.target = no_attention_backward if "backward" in str(node.target) else no_attention
    graph.recompile()
    arguments = make_arguments(operator, args, kwargs, device)
    return Call(torch.compile(graph, dynamic=False), arguments, operator.nbytes, working_set)


def make_list_call(operator: Operator, call, args, kwargs, device: torch.device, working_set: float) -> Call:
    """An operator over many tensors; an optimizer's with the first of them, up to MAX_OPTIMIZER_BYTES."""
    if operator.kind.startswith(("aten::_foreach", "aten::_fused")):
        total = enough = 0
        for layout in args[0]:
            total += math.prod(layout.shape) * layout.dtype.itemsize
            enough += 1
            if total >= MAX_OPTIMIZER_BYTES:
                break
        args = [arg[:enough] if isinstance(arg, list | tuple) else arg for arg in args]
    arguments = make_arguments(operator, args, kwargs, device)
    timed = Call(call, arguments, operator.nbytes, working_set, written_positions(call))
    result = call(*arguments[0], **arguments[1])
    timed.nbytes = moved_bytes(call, *arguments, tensors_in(result))
    return timed


def written_positions(call) -> list[int]:
    """The positions of the arguments that an operator writes into, by its schema."""
    arguments = enumerate(schema_of(call).arguments)
    return [position for position, argument in arguments if argument.is_write and not argument.is_out]


def make_arguments(operator: Operator, args, kwargs, device: torch.device) -> tuple[tuple, dict]:
    """Random tensors in the place of layouts; integers are good as indices of any dimension."""
    layouts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Layout)]
    sizes = [size for layout in layouts for size in layout.shape if size > 1]
    bound = min(sizes, default=2)

    def materialize(leaf):
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, Layout):
            return leaf
        if "_grouped_mm" in operator.kind and not leaf.dtype.is_floating_point:
            return ends_of_experts(leaf, args, device)
        return make_tensor(leaf, bound, device)

    return tree_map(materialize, (tuple(args), kwargs))


def ends_of_experts(layout: Layout, args, device: torch.device) -> torch.Tensor:
    """The last argument of a grouped matmul, where each expert's rows end: as many rows for each. Of a weight's
    gradient, of two 2D matrices, the rows are those that are summed."""
    rows = args[0].shape[1 if len(args[1].shape) == 2 else 0]
    experts = layout.shape[0]
    ends = torch.arange(1, experts + 1, device=device) * rows // experts
    return ends.to(layout.dtype)


def time_call(call: Call, device: torch.device, patience: float) -> tuple[float, float]:
    """(median, least) seconds of one call, of about `patience` seconds of calls, after a warmup."""
    is_cuda = device.type == "cuda"

    def seconds_of_call(times: int) -> float:
        call.restore()
        if is_cuda:
            occupy_gpu(1_000_000)  # so that the launches are ahead of the device
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
        began = time.perf_counter()
        for _ in range(times):
            call()
        if not is_cuda:
            return (time.perf_counter() - began) / times
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / times

    seconds_of_call(1)
    once = max(seconds_of_call(1), 1e-7)
    times = 1 if call.written else max(1, min(50, math.ceil(MIN_BATCH_SECONDS / once)))
    batches = max(3, min(50, int(patience / (once * times))))
    seconds = [seconds_of_call(times) for _ in range(batches)]
    return statistics.median(seconds), min(seconds)
