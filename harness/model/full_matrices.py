"""Full matrices: assigns each sharded weight to an owner rank, sends the full gradient to the owner, and sends the
owner's update back.

Weights of one kind travel together: an all-to-all over the shard group sends each owner its full gradients, another
returns the updates. Replicas divide the weights among themselves, so an all-gather over the replicas follows. A rank
holds full matrices of its experts already: replicas divide them, and only the all-gather is left.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.model.matrices import MatrixWeight
from harness.model.optimization import local

MAX_BATCH_BYTES = 2**26  # bytes of a rank's weights in one batch, 2 per number; a single weight may be larger


@dataclasses.dataclass(frozen=True)
class Batch:
    """Weights of one kind that travel and are computed together, in a list for each rank of the mesh, their owner."""

    owned: list[list[MatrixWeight]]

    @property
    def weight(self) -> MatrixWeight:
        """One of the weights; all have its kind."""
        return next(weight for rank_weights in self.owned for weight in rank_weights)

    @property
    def slots(self) -> int:
        """The number of weights that each rank receives; the last are padding for a rank that owns fewer."""
        return max(map(len, self.owned))


def deal(weights: Iterable[MatrixWeight], world: int) -> list[Batch]:
    """Batches of weights of two dimensions, the largest first, whose owners are the ranks in turn."""
    kinds: dict[tuple, list[MatrixWeight]] = {}
    for weight in weights:
        kinds.setdefault(weight.kind, []).append(weight)
    batches, turn = [], 0
    for same_shape in sorted(kinds.values(), key=lambda same_shape: same_shape[0].shape.numel(), reverse=True):
        size = world * max(1, MAX_BATCH_BYTES // (2 * same_shape[0].shape.numel()))
        for first in range(0, len(same_shape), size):
            batch = Batch([[] for _ in range(world)])
            for weight in same_shape[first : first + size]:
                batch.owned[turn % world].append(weight)
                turn += 1
            batches.append(batch)
    return batches


def shard_rows(length: int, shard: int, shards: int) -> range:
    """The rows of a shard when FSDP2 and torch.chunk divide `length` rows; the last shards may be empty."""
    size = -(-length // shards)
    return range(min(shard * size, length), min((shard + 1) * size, length))


class Ranks:
    """This rank's place in a mesh of (shard,) or (replicate, shard), and its collectives, on the mesh's device. A
    method that starts a collective returns a function that waits for the result."""

    def __init__(self, mesh: DeviceMesh):
        self.device = torch.device(mesh.device_type)
        self.shards, self.shard = mesh["shard"].size(), mesh.get_local_rank("shard")
        self.shard_group = mesh.get_group("shard")
        self.replicas, self.replica, self.replica_group = 1, 0, None
        if "replicate" in mesh.mesh_dim_names:
            self.replicas, self.replica = mesh["replicate"].size(), mesh.get_local_rank("replicate")
            self.replica_group = mesh.get_group("replicate")

    def rows(self, weight: MatrixWeight) -> range:
        """This rank's rows of a weight of two dimensions."""
        return shard_rows(weight.shape[0], self.shard, self.shards)

    def owned_slots(self, batch: Batch, replica: int) -> list[tuple[int, int, MatrixWeight]]:
        """(shard, slot, weight) of the weights that a replica's ranks own."""
        found = []
        for shard, owned in enumerate(batch.owned[replica * self.shards :][: self.shards]):
            found += [(shard, slot, weight) for slot, weight in enumerate(owned)]
        return found

    def empty(self, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of (shards, slots, most rows of a shard, columns)."""
        length, columns = batch.weight.shape
        rows = len(shard_rows(length, 0, self.shards))
        return torch.empty(self.shards, batch.slots, rows, columns, dtype=dtype, device=self.device)

    def gather(self, batch: Batch, dtype: torch.dtype, load: "Load") -> Callable[[], torch.Tensor]:
        """Start to send this rank's rows to the weights' owners; `join` makes full gradients of received rows."""
        sent, rows = self.empty(batch, dtype), len(self.rows(batch.weight))
        for replica in range(self.replicas):
            slots = self.owned_slots(batch, replica)
            targets = [sent[shard, slot, :rows] for shard, slot, _ in slots] if replica == self.replica else None
            load([(weight, slice(None)) for *_, weight in slots], targets)
        return self.exchange(sent)

    def join(self, batch: Batch, received: torch.Tensor) -> torch.Tensor:
        """The full gradients from received rows, (weights that this rank owns, rows, columns)."""
        own = len(batch.owned[self.replica * self.shards + self.shard])
        return received[:, :own].transpose(0, 1).flatten(1, 2)[:, : batch.weight.shape[0]]

    def give_back(self, batch: Batch, full: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send results, shaped as by `join`, back to the ranks that have their rows."""
        if self.shards == 1 and len(full) == batch.slots:
            return lambda: full[None]
        sent = self.empty(batch, full.dtype)
        for shard, shard_buffer in enumerate(sent):
            rows = shard_rows(batch.weight.shape[0], shard, self.shards)
            shard_buffer[: len(full), : len(rows)] = full[:, rows.start : rows.stop]
        return self.exchange(sent)

    def exchange(self, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start an all-to-all among the shards of a replica, in equal parts."""
        if self.shards == 1:
            return lambda: sent
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.shard_group, async_op=True)
        return after(work, sent, received)

    def share(self, results: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to gather the results of all replicas, (replicas, ...)."""
        if self.replicas == 1:
            return lambda: results[None]
        gathered = results.new_empty(self.replicas, *results.shape)
        work = dist.all_gather_into_tensor(gathered.flatten(0, 1), results, group=self.replica_group, async_op=True)
        return after(work, results, gathered)

    def results(self, batch: Batch, gathered: torch.Tensor) -> tuple[list[MatrixWeight], list[torch.Tensor]]:
        """(all weights of a batch, this rank's rows of each), from the result of `share`."""
        weights, updates, rows = [], [], len(self.rows(batch.weight))
        for replica in range(self.replicas):
            for shard, slot, weight in self.owned_slots(batch, replica):
                weights.append(weight)
                updates.append(gathered[replica, shard, slot, :rows])
        return weights, updates


# Writes what is computed on, made of this rank's gradients of some rows of weights, to targets of the same shapes, in
# another dtype or on another device. It is called once a step for each row that this rank has; weights that another
# replica owns have no targets.
Load = Callable[[list[tuple[MatrixWeight, slice]], list[torch.Tensor] | None], None]


@dataclasses.dataclass(frozen=True)
class FullUpdate:
    """An update of weights that is computed from full matrices, each on one rank.

    `compute` turns what `load` wrote, matrices (count, rows, columns) in `dtype`, into updates, on the rank that owns
    them. `add(matrices, updates, size)` adds updates to this rank's rows of matrices of one size, (outputs, inputs).
    """

    ranks: Ranks
    dtype: torch.dtype
    load: Load
    compute: Callable[[torch.Tensor], torch.Tensor]
    add: Callable[[list[torch.Tensor], list[torch.Tensor], tuple[int, int]], None]

    def run(self, weights: list[MatrixWeight]) -> None:
        """Update all weights. All ranks have the same list, so they agree on the owners."""
        divided = [weight for weight in weights if not weight.is_expert_stack]
        tasks = [self.update_batch(batch) for batch in deal(divided, self.ranks.replicas * self.ranks.shards)]
        for weight in weights:
            if weight.is_expert_stack:
                tasks += self.expert_tasks(weight)
        interleave(tasks)

    def update_batch(self, batch: Batch) -> Iterator[None]:
        """Update the weights of a batch; at each yield a collective is running, and another batch may continue."""
        ranks = self.ranks
        wait = ranks.gather(batch, self.dtype, self.load)
        yield
        full = ranks.join(batch, wait())
        self.compute_in_place(batch.weight, full)
        wait = ranks.give_back(batch, full)
        yield
        wait = ranks.share(wait())
        yield
        weights, updates = ranks.results(batch, wait())
        self.receive([(weight, ...) for weight in weights], updates, ranks.rows(batch.weight).start)

    def expert_tasks(self, weight: MatrixWeight) -> Iterator[Iterator[None]]:
        """The tasks that update this rank's experts, some at a time, divided among replicas."""
        size = max(1, MAX_BATCH_BYTES // (2 * weight.shape[1:].numel())) * self.ranks.replicas
        experts = range(len(local(weight.parameter)))
        for first in experts[::size]:
            yield self.update_experts(weight, experts[first : first + size])

    def update_experts(self, weight: MatrixWeight, experts: range) -> Iterator[None]:
        ranks = self.ranks
        share = -(-len(experts) // ranks.replicas)
        full = torch.zeros(share, *weight.shape[1:], dtype=self.dtype, device=ranks.device)
        for replica in range(ranks.replicas):
            owned = experts[replica * share :][:share]
            targets = [full[: len(owned)]] if replica == ranks.replica else None
            self.load([(weight, slice(owned.start, owned.stop))], targets)
        self.compute_in_place(weight, full)
        wait = ranks.share(full)
        yield
        updates = wait().flatten(0, 1)[: len(experts)]
        self.receive([(weight, expert) for expert in experts], list(updates))

    def compute_in_place(self, weight: MatrixWeight, full: torch.Tensor) -> None:
        """Overwrite the gradients of weights, (count, rows, columns), with updates."""
        for matrices in weight.split(full) if len(full) else ():
            matrices.copy_(self.compute(matrices))

    def receive(self, updated: list[tuple], updates: list[torch.Tensor], first_row: int = 0) -> None:
        """Add updates to this rank's rows, from `first_row` on, of weights of one kind. `updated` are (a weight, the
        index of its expert or `...`)."""
        weight, _ = updated[0]
        targets = [weight.split(local(one.parameter)[expert], first_row) for one, expert in updated]
        sources = [weight.split(update.to(targets[0][0].device), first_row) for update in updates]
        for number, size in enumerate(weight.sizes):
            part_targets, part_sources = ([parts[number] for parts in tensors] for tensors in (targets, sources))
            self.add(part_targets, part_sources, size)


def after(work: dist.Work, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that waits for a collective and returns the received tensor. Waiting frees `sent` and `work`, which
    refers to it, even if the function is kept."""
    pending = [(work, sent)]

    def wait() -> torch.Tensor:
        work, _ = pending.pop()
        work.wait()
        return received

    return wait


def interleave(tasks: Iterable[Iterator[None]]) -> None:
    """Run generators to their end. Each starts before those before it continue, so that its collective runs while they
    compute."""
    running: list[Iterator[None]] = []
    for task in tasks:
        running = [other for other in [task, *running] if advance(other)]
    while running:
        running = [other for other in running if advance(other)]


def advance(task: Iterator[None]) -> bool:
    """Run a generator to its next yield; return False if it ended."""
    return next(task, "ended") is None
