"""Report: what a run shows of itself, and what it is judged by.

Before anything is loaded: `check_measurable`, `open_trackers`, `record_memory`; then `describe_setup`, the header.
The log (`Log`) of its steps, lines and end; `StepResult` is what a step gives it.
What ends a run is found by `first_not_finite` and `check_updated_weights`; the error is `diverged`. Gates are
`check_gates`. The last lines: `next_commands`, `leave_early`; without training an `Answer`. `FIGURES`, the table of all
figures, and `time_shares` are for tools and benchmarks.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "summary": "Answer leave_early next_commands",
        "figures": "FIGURES check_gates check_measurable",
        "log": "Log open_trackers",
        "health": "StepResult Remembered check_updated_weights diverged first_not_finite",
        "header": "describe_setup",
        "profiling": "record_memory time_shares",
    },
)
