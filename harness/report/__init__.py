"""Report: what a run shows of itself, and what it is judged by.

Before anything is loaded: `check_measurable`, `open_trackers`, `record_memory`; then `describe_setup`, the header.
The log (`Log`) of its steps, lines and end; `StepResult` is what a step gives it.
What ends a run is found by `first_not_finite` and `check_pass`, and said by `give_up`; gates by `check_gates`. The last
lines: `next_commands`, `leave_early`; without training an `Answer`. `FIGURES`, the table of all figures, and
`memory_figures` are for tools and benchmarks.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "Answer": "summary",
        "FIGURES": "figures",
        "Log": "log",
        "StepResult": "health",
        "Remembered": "health",
        "check_pass": "health",
        "check_gates": "figures",
        "check_measurable": "figures",
        "describe_setup": "header",
        "describe_start": "header",
        "first_not_finite": "health",
        "give_up": "health",
        "leave_early": "summary",
        "memory_figures": "figures",
        "next_commands": "summary",
        "open_trackers": "log",
        "record_memory": "profiling",
    },
)
