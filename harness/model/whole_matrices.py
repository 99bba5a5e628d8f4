"""Whole matrices: divides the matrices of sharded parameters among all ranks, brings each to its rank in one piece, and
brings what that rank made of it back. Called by the optimizers' files. Independent of what is done to a matrix.

Matrices of equal shape form stacks. For each stack an all-to-all over the shard group sends every rank its matrices
whole, another brings the results back, and with replicas, each of which takes its own part, an all-gather over the
replicas follows. A matrix that lies on one rank, as experts do, is not sent to another.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.base.torch_internals import copy_each
from harness.model.matrices import Matrix

MAX_STACK_BYTES = 2**26  # of the matrices of a rank in one stack, in 2 bytes a number; one matrix may be larger


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of equal shape that are computed at the same time: `owned[replica][shard]` are those of each rank."""

    owned: list[list[list[Matrix]]]
    crosses_ranks: bool  # whether a rank needs rows of others


def rows_of_shard(length: int, shard: int, shards: int) -> range:
    """The indices of dimension 0 that a shard has, as FSDP2 and torch.chunk divide it; the last ones may be empty."""
    size = -(-length // shards)
    return range(min(shard * size, length), min((shard + 1) * size, length))


def rows_held(matrix: Matrix, shard: int, shards: int) -> range:
    """Which rows of a matrix, counted from its own first, a shard has."""
    held = rows_of_shard(matrix.length, shard, shards)
    if matrix.expert is not None:
        return range(len(matrix.rows) if matrix.expert in held else 0)
    first = max(held.start, matrix.rows.start) - matrix.rows.start
    return range(first, max(first, min(held.stop, matrix.rows.stop) - matrix.rows.start))


def part_of_shard(matrix: Matrix, tensor: torch.Tensor, shard: int, shards: int) -> torch.Tensor:
    """A shard's rows of a matrix, as a view of the shard of its parameter."""
    held, rows = rows_of_shard(matrix.length, shard, shards), rows_held(matrix, shard, shards)
    if not rows:
        return tensor.new_empty(0, len(matrix.columns))
    columns = slice(matrix.columns.start, matrix.columns.stop, matrix.columns.step)
    if matrix.expert is not None:
        chosen = slice(matrix.rows.start, matrix.rows.stop, matrix.rows.step)
        return tensor[matrix.expert - held.start, chosen, columns]
    first = matrix.rows.start + rows.start - held.start
    return tensor[first : first + len(rows), columns]


def cost(matrix: Matrix) -> int:
    """What orthogonalizing takes, in proportion."""
    small, large = sorted(matrix.shape)
    return small**2 * (2 * large + small)


def divide(matrices: Iterable[Matrix], replicas: int, shards: int) -> list[Stack]:
    """All matrices in stacks, each matrix on one rank of the world. The costliest are given out first, each to the rank
    with the least work so far; an expert stays on a rank that holds it."""
    work = {(replica, shard): 0 for replica in range(replicas) for shard in range(shards)}
    of_kind: dict[tuple, dict[tuple[int, int], list[Matrix]]] = {}
    for matrix in sorted(matrices, key=lambda matrix: (matrix.expert is None, cost(matrix)), reverse=True):
        candidates = list(work)
        if matrix.expert is not None:
            holder = matrix.expert // -(-matrix.length // shards)
            candidates = [rank for rank in work if rank[1] == holder]
        rank = min(candidates, key=work.__getitem__)
        work[rank] += cost(matrix)
        kind = (matrix.shape, matrix.is_transposed, matrix.expert is None)
        of_kind.setdefault(kind, {}).setdefault(rank, []).append(matrix)
    stacks = []
    for (shape, _, is_divided), owned in of_kind.items():
        size = max(1, MAX_STACK_BYTES // (2 * shape[0] * shape[1]))
        for first in range(0, max(map(len, owned.values())), size):
            part = {rank: of_rank[first : first + size] for rank, of_rank in owned.items()}
            table = [[part.get((replica, shard), []) for shard in range(shards)] for replica in range(replicas)]
            stacks.append(Stack(table, crosses_ranks=is_divided and shards > 1))
    return stacks


class Moved:
    """A tensor on its way: `take` waits for it."""

    def __init__(self, tensor: torch.Tensor, work=None, *kept):
        self.tensor, self.work, self.kept = tensor, work, kept  # what is sent has to live until then

    def take(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        self.kept = ()
        return self.tensor


class Ranks:
    """The ranks that share the matrices: a mesh of (shard,) or (replicate, shard), seen from this one.

    Tensors move on the mesh's device. `parts` are, for each matrix of the stack that this replica's ranks take, this
    rank's rows of it, in the order of `matrices_of`.
    """

    def __init__(self, mesh: DeviceMesh):
        self.device = torch.device(mesh.device_type)
        self.shards, self.shard = mesh["shard"].size(), mesh.get_local_rank("shard")
        self.shard_group = mesh.get_group("shard")
        self.replicas, self.replica, self.replica_group = 1, 0, None
        if "replicate" in mesh.mesh_dim_names:
            self.replicas, self.replica = mesh["replicate"].size(), mesh.get_local_rank("replicate")
            self.replica_group = mesh.get_group("replicate")

    def matrices_of(self, stack: Stack, replica: int) -> list[Matrix]:
        return [matrix for of_rank in stack.owned[replica] for matrix in of_rank]

    def own(self, stack: Stack) -> list[Matrix]:
        """The matrices that this rank computes."""
        return stack.owned[self.replica][self.shard]

    def part(self, matrix: Matrix, tensors: list[torch.Tensor]) -> torch.Tensor:
        """This rank's rows of a matrix, as a view of its parameter's shard."""
        return part_of_shard(matrix, tensors[matrix.parameter], self.shard, self.shards)

    def sizes(self, matrices: list[Matrix], shard: int) -> list[int]:
        """How many numbers of each matrix a shard has."""
        return [len(rows_held(matrix, shard, self.shards)) * len(matrix.columns) for matrix in matrices]

    def splits(self, stack: Stack) -> tuple[list[int], list[int]]:
        """How many numbers of whole matrices this rank sends to each of its shard group, and gets from each."""
        sent = [sum(self.sizes(of_rank, self.shard)) for of_rank in stack.owned[self.replica]]
        received = [sum(self.sizes(self.own(stack), shard)) for shard in range(self.shards)]
        return sent, received

    def gather(self, stack: Stack, tensors: list[torch.Tensor], dtype: torch.dtype) -> Moved:
        """Begins to bring this rank's matrices here, from shards of parameters; `whole` makes a stack of them."""
        matrices = self.matrices_of(stack, self.replica)
        sent = torch.empty(sum(self.sizes(matrices, self.shard)), dtype=dtype, device=self.device)
        pieces = sent.split(self.sizes(matrices, self.shard))
        parts = [self.part(matrix, tensors) for matrix in matrices]
        pack(pieces, parts)
        if not stack.crosses_ranks:
            sizes = [sum(self.sizes(of_rank, self.shard)) for of_rank in stack.owned[self.replica]]
            return Moved(sent.split(sizes)[self.shard])
        to_each, from_each = self.splits(stack)
        received = torch.empty(sum(from_each), dtype=dtype, device=self.device)
        work = dist.all_to_all_single(received, sent, from_each, to_each, group=self.shard_group, async_op=True)
        return Moved(received, work, sent)

    def whole(self, stack: Stack, received: torch.Tensor) -> torch.Tensor | None:
        """What came, as (matrices, rows, columns); None where this rank has none of the stack."""
        own = self.own(stack)
        if not own:
            return None
        shape = (len(own), *own[0].shape)
        if len(own) == 1 or not stack.crosses_ranks:
            return received.view(shape)
        whole = received.new_empty(shape)
        unpack(received.split(self.sizes_by_shard(own)), self.parts_by_shard(own, whole))
        return whole

    def sizes_by_shard(self, own: list[Matrix]) -> list[int]:
        return [size for shard in range(self.shards) for size in self.sizes(own, shard)]

    def parts_by_shard(self, own: list[Matrix], whole: torch.Tensor) -> list[torch.Tensor]:
        """Of each shard its rows of each matrix, as views of the stack: the order in which they travel."""
        parts = []
        for shard in range(self.shards):
            for matrix, of_matrix in zip(own, whole, strict=True):
                rows = rows_held(matrix, shard, self.shards)
                parts.append(of_matrix[rows.start : rows.stop])
        return parts

    def give_back(self, stack: Stack, whole: torch.Tensor | None, dtype: torch.dtype) -> Moved:
        """Begins to bring results, shaped as `whole` gave them, back to the ranks that hold their rows."""
        to_each, from_each = self.splits(stack)
        own = self.own(stack)
        largest = max(sum(self.sizes(self.matrices_of(stack, replica), self.shard)) for replica in range(self.replicas))
        received = torch.empty(largest, dtype=dtype, device=self.device)  # replicas send each other as much
        if not stack.crosses_ranks:
            if own:
                first = sum(to_each[: self.shard])
                received[first : first + whole.numel()].copy_(whole.reshape(-1))
            return Moved(received)
        if not own:
            sent = torch.empty(0, dtype=dtype, device=self.device)
        elif len(own) == 1:
            sent = whole.reshape(-1)
        else:
            sent = torch.empty(whole.numel(), dtype=dtype, device=self.device)
            pack(sent.split(self.sizes_by_shard(own)), self.parts_by_shard(own, whole))
        work = dist.all_to_all_single(
            received[: sum(to_each)], sent, to_each, from_each, group=self.shard_group, async_op=True
        )
        return Moved(received, work, sent)

    def share(self, received: torch.Tensor) -> Moved:
        """Begins to bring the results of all replicas to this one."""
        if self.replicas == 1:
            return Moved(received)
        of_all = torch.empty(self.replicas * len(received), dtype=received.dtype, device=self.device)
        work = dist.all_gather_into_tensor(of_all, received, group=self.replica_group, async_op=True)
        return Moved(of_all, work, received)

    def results(
        self, stack: Stack, of_all: torch.Tensor, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(this rank's rows of each matrix of the stack, as views of `tensors`; what came for them, on that device)."""
        parts, results = [], []
        of_all = of_all.to(tensors[0].device)
        for replica, of_replica in enumerate(of_all.view(self.replicas, -1)):
            matrices = self.matrices_of(stack, replica)
            sizes = self.sizes(matrices, self.shard)
            for matrix, result in zip(matrices, of_replica[: sum(sizes)].split(sizes), strict=True):
                part = self.part(matrix, tensors)
                if part.numel():
                    parts.append(part)
                    results.append(result.view(part.shape))
        return parts, results


def pack(pieces: Iterable[torch.Tensor], parts: Iterable[torch.Tensor]) -> None:
    """Copies parts of matrices into flat pieces of a buffer."""
    flat, views = pairs(pieces, parts)
    if flat:
        copy_each(flat, views)


def unpack(pieces: Iterable[torch.Tensor], parts: Iterable[torch.Tensor]) -> None:
    """Copies flat pieces of a buffer into parts of matrices."""
    flat, views = pairs(pieces, parts)
    if flat:
        copy_each(views, flat)


def pairs(pieces, parts) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The pieces, shaped as their parts, and the parts, without those that are empty."""
    flat, views = [], []
    for piece, part in zip(pieces, parts, strict=True):
        if part.numel():
            flat.append(piece.view(part.shape))
            views.append(part)
    return flat, views


def interleave(tasks: Iterable[Iterator]) -> None:
    """Runs generators to their end. Each begins before those before it go on: what a task waits for is on its way while
    the task before it computes."""
    running: list[Iterator] = []
    for task in tasks:
        running = [other for other in [task, *running] if goes_on(other)]
    while running:
        running = [other for other in running if goes_on(other)]


def goes_on(task: Iterator) -> bool:
    """Runs a generator to its next yield; whether it has one."""
    end = object()
    return next(task, end) is not end
