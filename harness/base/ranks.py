"""Ranks: how the processes of a job give each other Python objects."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from harness.base.errors import UserError


def from_main_process(make: Callable[[], Any], is_main: bool) -> Any:
    """Calls `make` where `is_main`, one process of each node or of the world, and gives the others its result, pickled.

    Every rank calls this; what `make` raises is raised on every rank, so that none waits for one that has given up.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    # gloo, with a patience of its own: tokenizing a large corpus outlasts NCCL's watchdog
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    result, error = None, None
    try:
        result = make() if is_main else None
    except UserError as exception:
        error = exception
    except Exception:  # not every exception can be pickled
        error = RuntimeError(traceback.format_exc())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (is_main, error), group=group)
    if errors := [error for _, error in everyone if error is not None]:
        raise errors[0]
    mains, answer = [rank for rank, (main, _) in enumerate(everyone) if main], result
    for main in mains:  # a tokenizer is large: broadcasts, where gathering would hold it once for each rank
        dist.broadcast_object_list(box := [result], src=main, group=group)
        answer = box[0] if main <= dist.get_rank() else answer
    dist.destroy_process_group(group)
    return answer


def on_main_rank(make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on every rank; what it raises, too."""
    return from_main_process(make, dist.get_rank() == 0)


def of_all_ranks(mine: Any, group: dist.ProcessGroup | None = None) -> list:
    """`mine` of each rank."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
