"""Ranks: collectives of Python objects, and marks of ranks that work without waiting for others."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import contextlib
import functools
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from harness.base.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
WORK: list[Callable[[], str]] = []  # descriptions of this process's work, innermost last


@contextlib.contextmanager
def working(describe: Callable[[], str] = str) -> Iterator[None]:
    """Mark this rank as working: it waits for no other rank and has not stalled, however long it takes. `describe`
    returns its progress, such as "1.2 GB written". Also a decorator."""
    WORK.append(describe)
    try:
        yield
    finally:
        WORK.remove(describe)


@functools.cache
def count_compiling_as_work() -> None:
    """Mark this process as working during all later compilations."""
    from torch._dynamo import callback  # private: no public name says that the compiler runs

    def describe() -> str:
        return "compiling"

    callback.on_compile_start(lambda _: WORK.append(describe))
    callback.on_compile_end(lambda _: WORK.remove(describe))


def call_on_all_ranks(make: Callable[[], T]) -> T:
    """Call `make` on every rank and return its result on this one. An error on any rank is raised on all ranks, so that
    none waits for a failed one. Every rank calls this."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    result, error = attempt(make)
    for error_of_rank in all_gather_objects(error):
        if error_of_rank is not None:
            raise error_of_rank
    return result


@working()
def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result of `make` or None, its exception in a form that can be pickled or None)."""
    try:
        return make(), None
    except UserError as error:
        return None, error
    except Exception:  # not every exception can be pickled
        return None, RuntimeError(traceback.format_exc())


def broadcast_from_node_main(make: Callable[[], T], is_main: bool) -> T:
    """Call `make` on the first rank of each node, which has `is_main`, and send its pickled result to the other ranks
    of the node. An error is raised on all ranks. Every rank calls this."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    result, error = attempt(make) if is_main else (None, None)
    outcomes = all_gather_objects((is_main, error))
    for _, error_of_rank in outcomes:
        if error_of_rank is not None:
            raise error_of_rank
    rank = dist.get_rank()
    main_ranks = [main_rank for main_rank, (main, _) in enumerate(outcomes) if main]
    answer: list = [result]
    if is_main:
        next_node = next((main_rank for main_rank in main_ranks if main_rank > rank), len(outcomes))
        for peer in range(rank + 1, next_node):
            dist.send_object_list(answer, dst=peer)
    else:
        dist.recv_object_list(answer, src=max(main_rank for main_rank in main_ranks if main_rank < rank))
    return answer[0]


def broadcast_from_rank_0(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 and return its result, or raise its error, on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    outcome: list = [attempt(make) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, src=0)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def all_gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather `mine`, pickled, from each rank, in the order of ranks. Every rank of the group calls this."""
    import torch.distributed as dist

    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def all_to_all_lists(lists: list[list[T]]) -> list[list[T]]:
    """Send `lists[rank]`, pickled, to each rank; return what each rank has sent to this one, in the order of ranks. An
    empty list costs nothing but its size. Every rank calls this."""
    import torch
    import torch.distributed as dist

    pickled = [pickle.dumps(items) if items else b"" for items in lists]
    sent_sizes, joined = torch.tensor([len(part) for part in pickled]), bytearray(b"".join(pickled))
    received_sizes = torch.zeros_like(sent_sizes)
    dist.all_to_all_single(received_sizes, sent_sizes)
    sent = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, received_sizes.tolist(), sent_sizes.tolist())
    parts = received.split(received_sizes.tolist())
    return [pickle.loads(part.numpy().tobytes()) if len(part) else [] for part in parts]
