"""The table of all metrics, made from `harness.report.metrics`. A test compares docs/MONITORING.md with it:

python -m tools.metric_table                     # prints the table
python -m tools.metric_table docs/MONITORING.md    # updates it in that file
"""

import re

from harness import report
from tools import generated

COMMAND = "tools.metric_table"


def table() -> str:
    """The table in Markdown, a row for each metric."""
    rows = []
    for metric in report.METRICS.values():
        name = f"`{metric.tracker_name}`" if metric.tracker_name else ""
        words = re.sub(r"\w+_\w+", r"`\g<0>`", metric.description)
        rows.append(f"| `{metric.key}` | {name} | {metric.unit} | {words} |\n")
    return "| key | in trackers | unit | meaning |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    generated.main(COMMAND, table())
