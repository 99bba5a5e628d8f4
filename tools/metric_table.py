"""The table of all figures, made from `harness.report.metrics`. A test compares docs/MONITORING.md with
it:

    python -m tools.metric_table                     # prints the table
    python -m tools.metric_table docs/MONITORING.md    # puts it between the two markers of that file
"""

import re

from harness import report
from tools import generated

COMMAND = "tools.metric_table"


def table() -> str:
    """The table in Markdown, a row for each figure."""
    rows = []
    for figure in report.METRICS.values():
        name = f"`{figure.name}`" if figure.name else ""
        words = re.sub(r"\w+_\w+", r"`\g<0>`", figure.words)
        rows.append(f"| `{figure.key}` | {name} | {figure.unit} | {words} |\n")
    return "| key | in the trackers | unit | what it is |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    generated.main(COMMAND, table())
