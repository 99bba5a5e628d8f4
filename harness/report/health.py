"""Health: a small fixed kernel, timed on every rank at log lines while the device is idle anyway, and the name of a
rank on which it takes longer than on the others: a GPU that throttles or is sick, a CPU that somebody else uses. Called
by `report`, where figures of all ranks meet. It does not know the training, which a slow rank makes wait."""

import itertools
import math
import statistics
import time
from collections import Counter

import torch

from harness.base.devices import wait_for_device
from harness.job import driver, heartbeats
from harness.job.printing import columns, say

SHARE = 0.001  # of the time of training that the kernel may take; where steps are short it is not timed at each line
# Of which the fastest counts: what is disturbed now and then reaches its speed in one, what is sick in none
BATCHES = 5
TIMES = 3  # measurements running until something is said
# By how much a rank may be slower than the median. GPUs of one kind differ by 8 % on average, outliers take up to 1.5
# times the median (Sinha et al., Not All GPUs Are Created Equal, SC 2022); the cores of a CPU others use too.
TOLERANCE = {"cuda": 0.2, "cpu": 0.5}
# Side of the square matrices, their dtype, and products in a batch: 2 ms on an H100, 25 ms on one core
KERNEL = {"cuda": (4096, torch.bfloat16, 8), "cpu": (384, torch.float32, 20)}


class KernelClock:
    """Times a matmul of two matrices of ones: no random number is drawn, nothing stays allocated."""

    def __init__(self, device: torch.device):
        self.device, self.due = device, 0
        self.named: set[int] = set()  # the ranks that were said to be slow
        self.differs: Counter[int] = Counter()  # measurements running in which a rank was not what was said last

    @torch.no_grad()
    def measure(self, step: int) -> tuple[float, int]:
        """(milliseconds of the kernel on this rank, the driver's reasons for low clocks); zeros where it is not due,
        which all ranks agree on. The device is synchronized."""
        if step < self.due:
            return 0.0, 0
        side, dtype, products = KERNEL[self.device.type]
        factor = torch.ones(side, side, dtype=dtype, device=self.device)
        result = torch.mm(factor, factor)
        wait_for_device()
        ends = [self.now()]
        for _ in range(BATCHES):
            for _ in range(products):
                torch.mm(factor, factor, out=result)
            ends.append(self.now())
        reasons = driver.slowdown()
        wait_for_device()
        if self.device.type == "cuda":
            batches = [start.elapsed_time(end) for start, end in itertools.pairwise(ends)]
        else:
            batches = [1000 * (end - start) for start, end in itertools.pairwise(ends)]
        return min(batches) / products, reasons

    def now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def judge(self, kernel_ms: list[float], reasons: list[int], step: int, step_ms: float) -> None:
        """Names a rank that became slow or is no longer, and sets when the kernel is due again. Every rank is given the
        same, what `measure` returned on each, and the milliseconds of a step."""
        if not any(kernel_ms):
            return
        slowest, usual = max(kernel_ms), statistics.median_low(kernel_ms)
        work = slowest * (1 + BATCHES * KERNEL[self.device.type][2])
        self.due = step + math.ceil(work / (SHARE * step_ms))
        for rank, milliseconds in enumerate(kernel_ms):
            slow = milliseconds > (1 + TOLERANCE[self.device.type]) * usual
            self.differs[rank] = self.differs[rank] + 1 if slow != (rank in self.named) else 0
            if self.differs[rank] == TIMES:
                self.differs[rank] = 0
                self.named ^= {rank}
                say(columns(self.describe(rank, milliseconds, usual, reasons[rank])))

    def describe(self, rank: int, milliseconds: float, usual: float, reasons: int) -> dict[str, str]:
        who = "rank {} ({}, pid {})".format(rank, *heartbeats.RANKS[rank])
        if rank not in self.named:
            return {"recovered": f"{who}: a fixed matmul takes as long as on the others again"}
        what = f"{who}: a fixed matmul takes {milliseconds:.3g} ms, {100 * (milliseconds / usual - 1):.0f} % more than"
        what += f" the median of the ranks, in {TIMES} measurements running"
        if reasons:
            what += f"; its driver says: {driver.name_slowdown(reasons)}"
        look = "look for other work on its cores (top)"
        if self.device.type == "cuda":
            look = "look at nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there, and leave the node out if it stays"
        return {"slow": f"{what}; {look}"}
