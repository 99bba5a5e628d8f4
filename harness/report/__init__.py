"""Report: what a run shows of itself, and what it is judged by.

Before anything is loaded: `check_measurable`, `open_trackers`, `record_memory`; then `describe_setup`, the header.
The log (`Log`) of its steps, lines and end; `StepResult` is what a step gives it. `first_not_finite` finds what ends a
run, `divergence_error` is how. Gates are `check_gates`. The last lines: `next_commands`, `describe_stop`. Without
training `print_evaluation` and `print_samples`, with `json_alone`. `METRICS`, the table of all metrics, and
`time_shares` are for tools and benchmarks.
"""

from harness.report.header import describe_setup
from harness.report.health import StepResult, divergence_error, first_not_finite
from harness.report.log import Log, open_trackers
from harness.report.metrics import METRICS, check_gates, check_measurable
from harness.report.profiling import record_memory, time_shares
from harness.report.summary import describe_stop, json_alone, next_commands, print_evaluation, print_samples

__all__ = [
    "METRICS",
    "Log",
    "StepResult",
    "check_gates",
    "check_measurable",
    "describe_setup",
    "describe_stop",
    "divergence_error",
    "first_not_finite",
    "json_alone",
    "next_commands",
    "open_trackers",
    "print_evaluation",
    "print_samples",
    "record_memory",
    "time_shares",
]
