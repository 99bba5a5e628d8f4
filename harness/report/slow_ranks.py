"""Slow ranks: names a rank for which the others wait at one log line after another, and says when they no longer do.
Called where the figures of all ranks meet. Independent of how they are measured: `waiting` times the collectives."""

import statistics
from collections import Counter

from harness import job
from harness.job import columns, say

CONSECUTIVE_LINES = 3  # log lines until a rank is named, and until it is reported as recovered
# Share of a step that the others wait for a rank until it is named. A GPU that is 20 % slower than the others takes
# 0.17 of the step longer; GPUs of one kind differ by 8 % on average, outliers take up to 1.5 times the median (Sinha et
# al., Not All GPUs Are Created Equal, SC 2022). The cores of a CPU others use too.
MIN_SHARE = {"cuda": 0.15, "cpu": 0.35}


class SlowRanks:
    """What was reported of each rank. Every rank has one and gives it the same figures."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self.named: set[int] = set()
        self.differs: Counter[int] = Counter()  # consecutive lines at which a rank was not as last reported

    def judge(self, worked_ms: list[float], step_ms: float) -> None:
        """Says on the console which rank became slow or has recovered.

        Args:
            worked_ms: of each rank, milliseconds of a step in which it was in no collective.
            step_ms: milliseconds of a step.
        """
        usual = statistics.median_low(worked_ms)
        for rank, worked in enumerate(worked_ms):
            awaited_ms = worked - usual
            slow = awaited_ms > MIN_SHARE[self.device_type] * step_ms
            if slow == (rank in self.named):
                self.differs[rank] = 0
                continue
            self.differs[rank] += 1
            if self.differs[rank] < CONSECUTIVE_LINES:
                continue
            self.differs[rank] = 0
            if slow:
                self.named.add(rank)
                say(columns({"slow": self.describe(rank, awaited_ms, step_ms)}))
            else:
                self.named.remove(rank)
                say(columns({"recovered": f"{job.rank_name(rank)}: the others wait for it no longer"}))

    def describe(self, rank: int, awaited_ms: float, step_ms: float) -> str:
        words = f"{job.rank_name(rank)}: the others wait for it for {awaited_ms:,.1f} ms of a step of {step_ms:,.1f} ms"
        words += f", at {CONSECUTIVE_LINES} consecutive log lines"
        if self.device_type == "cuda":
            look = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER there"
        else:
            look = "other work on its cores (top)"
        return f"{words}; look at {look}, and at its data"
