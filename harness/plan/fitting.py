"""Fitting: what fits on a GPU: the largest batch, and the flags that save memory, found by planning them. Called by
`search`, `planning` and the script. Independent of how a prediction is made."""

import math
from collections.abc import Callable, Sequence

from harness.flags import Settings
from harness.model.loss import choose_loss
from harness.model.optimization import memory_saving_optimizers
from harness.plan.gpus import TIGHT

MAX_BATCH_SIZE = 4096  # sequences; no larger batch is planned


def next_size(reserved: dict[int, float], sizes: Sequence[int], capacity: float) -> int | None:
    """The batch size to plan next, on the way to the largest of `sizes` (ascending) that fits; None when that is known,
    or that none fits. `reserved` has the GiB of those that are planned.

    The peak is the largest of several sums that grow evenly with the batch, so it is a convex curve::

        GiB |             /  _- line through two that fit: the curve is above it, so what the line puts above
            |          _-/_-    the capacity does not fit
            |      _-_-_/
            |  _-_---       the line from one that fits to one that does not is above the curve between them: what it
            +-----------    puts below the capacity fits
              batch size
    """
    fitting = sorted(size for size, gib in reserved.items() if gib <= capacity)
    too_large = min((size for size in reserved if size not in fitting), default=math.inf)
    if not fitting:
        return None if sizes[0] in reserved else sizes[0]

    def on_line(a: int, b: int, size: int) -> float:
        return reserved[a] + (reserved[b] - reserved[a]) / (b - a) * (size - a)

    largest = fitting[-1]
    candidates = [size for size in sizes if largest < size < too_large]
    if len(fitting) > 1:
        candidates = [size for size in candidates if on_line(fitting[-2], largest, size) <= capacity]
    elif candidates and too_large == math.inf:
        return candidates[0]
    if not candidates:
        return None
    if too_large == math.inf:
        return candidates[-1]
    certain = [size for size in candidates if on_line(largest, too_large, size) <= capacity]
    return certain[-1] if certain else candidates[0]


def largest_batch(planned, capacity: float, step: int = 1, check: Callable[[], None] = lambda: None) -> int:
    """The largest --batch-size of the multiples of `step` that fits and is not tight, or that fits where all are tight;
    0 if none does. `check` raises where there is no time for another plan."""
    reserved: dict[int, float] = {}
    sizes = range(step, MAX_BATCH_SIZE + 1, step)
    for limit in (TIGHT * capacity, capacity):
        while size := next_size(reserved, sizes, limit):
            check()
            reserved[size] = planned(batch_size=size).memory_gib["reserved"]
        fitting = [size for size in reserved if reserved[size] <= limit]
        if fitting:
            return max(fitting)
    return 0


def memory_savers(settings: Settings) -> list[dict]:
    """Changes of settings that lower memory, the one that costs least speed first; without those that are made
    already."""
    least = settings.batch_step()
    batch = settings.batch_size
    samples = settings.gradient_accumulation_steps * (least if batch == "auto" else batch)
    savers = []
    if settings.fused_loss is False:
        savers.append({"fused_loss": True})
    if settings.zero_stage < 3:
        savers.append({"zero_stage": 3})
    if settings.activation_checkpointing == "none":
        savers.append({"activation_checkpointing": "selective"})
    if batch != least:
        savers.append({"batch_size": least, "gradient_accumulation_steps": samples // least})
    if settings.activation_checkpointing != "full":
        savers.append({"activation_checkpointing": "full"})
    for name in memory_saving_optimizers(settings.optimizer):
        savers.append({"optimizer": name})
    if not settings.cpu_offload:
        savers.append({"cpu_offload": True})
    return savers


def merged(several: list[dict]) -> dict:
    """One dict of several, of which the last wins."""
    result: dict = {}
    for changes in several:
        result |= changes
    return result


def what_fits(settings: Settings, config, planned, verdicts: tuple[str, ...]) -> dict | None:
    """The changes at the least cost in speed that bring it to one of these verdicts, by planning them; None where
    nothing does.

    They are tried one on top of the other, the cheapest in speed first, until it fits; then what is not needed is
    taken out again.
    """

    def suffices(several: list[dict]) -> bool:
        return planned(**merged(several))["verdict"] in verdicts

    savers = memory_savers(settings)
    if settings.fused_loss is False and not choose_loss(None, config):
        savers = [changes for changes in savers if "fused_loss" not in changes]
    if not suffices(savers):
        return None
    chosen: list[dict] = []
    for changes in savers:
        others = [other for other in chosen if other.keys() != changes.keys()]  # full in place of selective
        chosen = [*others, changes]
        if suffices(chosen):
            break
    for changes in chosen[:-1]:
        fewer = [other for other in chosen if other is not changes]
        if suffices(fewer):
            chosen = fewer
    return merged(chosen)
