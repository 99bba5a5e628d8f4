"""Report: the console, the files and the trackers of a run, and its acceptance gates.

Before loading: `check_measurable`, `open_trackers`, `record_memory`. The header: `describe_setup`. Steps, log lines and
the end: `Log`, which takes a `StepResult` per step. Divergence: `first_not_finite`, `divergence_error`. Gates:
`check_gates`. Last lines: `next_commands`, `describe_stop`. Without training: `print_evaluation`, `print_samples`,
`keep_stdout_for_json`, `write_comparison`. For tools: `METRICS`, the table of all metrics. For --import: `Metric`, a
row of that table, and `REDUCTIONS`.
"""

from harness.report.compare import write_comparison
from harness.report.header import describe_setup
from harness.report.health import StepResult, divergence_error, first_not_finite
from harness.report.log import Log, open_trackers
from harness.report.metrics import METRICS, REDUCTIONS, RESERVED_KEYS, Metric, check_gates, check_measurable
from harness.report.profiling import record_memory
from harness.report.summary import describe_stop, keep_stdout_for_json, next_commands, print_evaluation, print_samples
