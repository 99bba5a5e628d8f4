"""Report: what a run shows of itself, and what it is judged by.

Before anything is loaded: `check_measurable`, `open_trackers`, `record_memory`; then `describe_setup`, the header.
The log (`Log`) of its steps, lines and end; `StepResult` is what a step gives it.
What ends a run is found by `first_not_finite` and `check_updated_weights`; the error is `diverged`. Gates are
`check_gates`. The last lines: `next_commands`, `leave_early`; without training an `Answer`. `FIGURES`, the table of all
figures, and `time_shares` are for tools and benchmarks.
"""

from harness.report.figures import FIGURES, check_gates, check_measurable
from harness.report.header import describe_setup
from harness.report.health import Remembered, StepResult, check_updated_weights, diverged, first_not_finite
from harness.report.log import Log, open_trackers
from harness.report.profiling import record_memory, time_shares
from harness.report.summary import Answer, leave_early, next_commands

__all__ = [
    "FIGURES",
    "Answer",
    "Log",
    "Remembered",
    "StepResult",
    "check_gates",
    "check_measurable",
    "check_updated_weights",
    "describe_setup",
    "diverged",
    "first_not_finite",
    "leave_early",
    "next_commands",
    "open_trackers",
    "record_memory",
    "time_shares",
]
