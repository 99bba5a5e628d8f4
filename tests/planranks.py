"""Memory and traffic of a real step, and of its plan; tests/plan/test_planning.py compares the two.

Ranks call `measure_all`, which measures on real tensors; `plan_all` plans the same and writes a JSON file.
"""

import collections
import contextlib
import itertools
import json
import pathlib
import weakref

import torch
import torch.distributed as dist
from tiny import build
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_fsdp
from harness import plan as planning
from harness.flags import parse_args
from harness.model import activations, newton_schulz

CASES = {
    "stage 3": "",
    "stage 2 in 2 microbatches": "--zero-stage 2 --gradient-accumulation-steps 2",
    "pure bf16 from full logits": "--precision bf16-pure --no-fused-loss",
    "muon": "--optimizer muon",
    "deferred in 2 microbatches": "--defer-grad-sync --gradient-accumulation-steps 2",
    "stage 1 in 4 microbatches": "--zero-stage 1 --gradient-accumulation-steps 4",
    "stage 0": "--zero-stage 0",
    "2 ranks a sequence": "--context-parallel 2 --activation-checkpointing full",
    "checkpointed": "--activation-checkpointing full",
    "selectively checkpointed": "--activation-checkpointing selective",
    "offloaded inputs": "--activation-checkpointing offload --gradient-accumulation-steps 2",
    "eager attention": "--attention eager --zero-stage 2",
    "2 replicas in 2 microbatches": "--dp-replicate-size 2 --gradient-accumulation-steps 2",
    "muon, 2 replicas": "--optimizer muon --dp-replicate-size 2",
    "muon, stage 0": "--optimizer muon --zero-stage 0",
    "muon, stage 2": "--optimizer muon --zero-stage 2",
    "adapters": "--init pretrained --lora-rank 64",
    "adapters, stage 2 in 2 microbatches": "--init pretrained --lora-rank 64 --zero-stage 2"
    " --gradient-accumulation-steps 2",
    "adapters, stage 0, checkpointed": "--init pretrained --lora-rank 64 --zero-stage 0"
    " --activation-checkpointing full",
}
FEW = ("stage 3", "stage 2 in 2 microbatches", "pure bf16 from full logits", "adapters")
NAMES = {  # by ranks
    1: (*FEW, "muon"),
    2: ("stage 2 in 2 microbatches", "adapters", "muon", "offloaded inputs", "2 ranks a sequence"),
    4: tuple(CASES),
}


def arguments(model: pathlib.Path, flags: str) -> list[str]:
    plain = ["--sequence-length", "256", "--no-compile", "--precision", "bf16"]  # the last --precision counts
    return ["--model", str(model), *plain, *flags.split()]


def measure(argv) -> dict:
    """Take one step, and ask every storage that an operator gave out for its size after every operator."""

    def rounded(storage) -> int:
        return -(-storage.nbytes() // 512) * 512

    def local_bytes(tensors) -> int:
        local = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        return sum(map(rounded, {id(t.untyped_storage()): t.untyped_storage() for t in local}.values()))

    class Live(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.storages, self.peak, self.sent = {}, 0, {}  # the first by id: (weak reference, stream it was made in)
            self.held = {}  # the peak of each stream
            self.on_host = 0  # the peak of the host

        def see(self, tensor, stream) -> None:
            """A tensor whose storage was made in this stream, if it was not seen before."""
            storage = tensor.untyped_storage()
            seen, _ = self.storages.get(id(storage), (lambda: None, None))
            if seen() is not storage:  # also of a storage that is gone, whose id this one has
                self.storages[id(storage)] = weakref.ref(storage), stream

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if DTensor in types:
                return NotImplemented
            result = op(*args, **(kwargs or {}))
            made_by = [(leaf, None) for leaf in tree_leaves((args, kwargs))]  # gloo makes some where nobody sees it
            made_by += [(leaf, torch.cpu.current_stream()) for leaf in tree_leaves(result)]
            for leaf, stream in made_by:
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf, stream)
            of_streams = collections.Counter()
            for key, (seen, stream) in list(self.storages.items()):
                storage = seen()
                if storage is None:
                    del self.storages[key]
                else:
                    of_streams[stream] += rounded(storage)
            self.on_host = max(self.on_host, of_streams.pop(host, 0))
            self.peak = max(self.peak, of_streams.total())
            for stream in of_streams.keys() - {None}:
                self.held[stream] = max(self.held.get(stream, 0), of_streams[stream])
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
                if "c10d" in op.namespace and kind.replace("_", "") in op.name().replace("_", ""):
                    size = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
                    calls, total = self.sent.get(kind, (0, 0))
                    self.sent[kind] = calls + 1, total + size
            return result

    host, allocate = torch.cpu.Stream(), activations.empty_on_host  # a stream as a name of the host's memory

    def allocate_there(tensor):
        with torch.cpu.stream(host):
            return allocate(tensor)

    activations.empty_on_host = allocate_there
    settings, model, optimizer = build(argv)
    seen = {}

    def before_optimizer(*_) -> None:
        seen.update(gradients=local_bytes([p.grad for p in model.parameters() if p.grad is not None]), passes=live.peak)
        live.peak = 0

    optimizer.register_step_pre_hook(before_optimizer)
    tokens = torch.zeros(settings.batch_size, settings.sequence_length, dtype=torch.int64)
    batches = ({"input_ids": tokens.clone(), "labels": tokens.clone()} for _ in itertools.count())
    parameters = list(itertools.chain(model.parameters(), model.buffers()))
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    held = {"parameters": local_bytes(parameters), "optimizer": local_bytes(states)}
    live = Live()
    with live if dist.get_rank() == 0 else contextlib.nullcontext():
        for tensor in itertools.chain(parameters, states):  # what was there before
            live.see(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, torch.cpu.current_stream())
        train_fsdp.train_step(settings, model, optimizer, batches)
    dist.barrier()
    activations.empty_on_host = allocate
    peaks = {"total": max(seen["passes"], live.peak), "in optimizer": live.peak}
    return held | seen | peaks | {"host": live.on_host, "sent": live.sent, "held": sorted(live.held.values())}


def plan(argv, ranks: int) -> dict:
    """The plan of these flags for so many ranks, by assumed rates."""
    flags = ["--plan", "--plan-seconds", "0", "--plan-gpus", str(ranks)]
    return planning.make_plan(parse_args([*flags, *argv]), train_fsdp.RECIPE)[1]


def plan_all(ranks: int, flags: dict[str, list[str]], out: pathlib.Path) -> None:
    out.write_text(json.dumps({name: plan(argv, ranks) for name, argv in flags.items()}))


def measure_all(flags: dict[str, list[str]]) -> dict[str, dict]:
    newton_schulz.product_dtype = lambda x: x.dtype  # as on a GPU
    return {name: measure(argv) for name, argv in flags.items()}
