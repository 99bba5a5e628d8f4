"""Ranks: how the processes of a job give each other Python objects."""

from __future__ import annotations  # older interpreters read this far, to be told so

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from harness.base.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
WORK: list[Callable[[], str]] = []  # what this process does without waiting for other ranks, innermost last


@contextlib.contextmanager
def working(describe: Callable[[], str] = str) -> Iterator[None]:
    """Mark this rank as working: it waits for no other rank, so however long this takes, it has not stalled.
    `describe` says how far it is, such as "1.2 GB written". Also a decorator."""
    WORK.append(describe)
    try:
        yield
    finally:
        WORK.remove(describe)


@functools.cache
def count_compiling_as_work() -> None:
    """Has every compilation of this process, from now on, count as work."""
    from torch._dynamo import callback  # private: no public name says that the compiler runs

    def describe() -> str:
        return "compiling"

    callback.on_compile_start(lambda _: WORK.append(describe))
    callback.on_compile_end(lambda _: WORK.remove(describe))


def call_on_all_ranks(make: Callable[[], T]) -> T:
    """What `make` returns on this rank. What it raises on any rank is raised on every rank, so that no rank waits for
    one that has given up; every rank calls this."""
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
    """(what `make` returns, or None; what it raises, as something that can be pickled, or None)."""
    try:
        return make(), None
    except UserError as error:
        return None, error
    except Exception:  # not every exception can be pickled
        return None, RuntimeError(traceback.format_exc())


def broadcast_from_node_main(make: Callable[[], T], is_main: bool) -> T:
    """Calls `make` where `is_main`, one process of each node or of the world, and gives the others its result, pickled.

    Every rank calls this. What `make` raises is raised on every rank, so that no rank waits for one that has given up.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    result, error = attempt(make) if is_main else (None, None)
    outcomes = all_gather_objects((is_main, error))
    for _, error_of_rank in outcomes:
        if error_of_rank is not None:
            raise error_of_rank
    main_ranks = [rank for rank, (main, _) in enumerate(outcomes) if main]
    answer = result
    for main_rank in main_ranks:  # a broadcast of each: a gathering would hold a large tokenizer once for each rank
        message = [result]
        dist.broadcast_object_list(message, src=main_rank)
        if main_rank <= dist.get_rank():  # the last one is of this rank's own node
            answer = message[0]
    return answer


def broadcast_from_rank_0(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on every rank; what it raises, too."""
    import torch.distributed as dist

    return broadcast_from_node_main(make, not dist.is_initialized() or dist.get_rank() == 0)


def all_gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """`mine` of each rank, pickled, in the order of the ranks."""
    import torch.distributed as dist

    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
