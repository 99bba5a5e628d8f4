"""The table of all metrics, made from `harness.report.metrics`. A test compares docs/MONITORING.md with it:

python -m tools.metric_table docs/MONITORING.md    # updates it in that file
"""

import pathlib
import re
import sys

from harness import base, report

BEGIN, END = "<!-- begin: python -m tools.metric_table -->\n", "<!-- end: python -m tools.metric_table -->"


def table() -> str:
    """The table in Markdown, a row for each metric."""
    rows = []
    for metric in report.METRICS.values():
        name = f"`{metric.tracker_name}`" if metric.tracker_name else ""
        words = re.sub(r"\w+_\w+", r"`\g<0>`", metric.description)
        rows.append(f"| `{metric.key}` | {name} | {metric.unit} | {words} |\n")
    return "| key | in trackers | unit | meaning |\n|---|---|---|---|\n" + "".join(rows)


def with_table(page: str) -> str:
    """A Markdown page with the table between its two markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, found_begin, rest = page.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"it lacks the line {BEGIN.strip()} or, below it, {END}")
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    base.ignore_closed_pipes()
    page = pathlib.Path(sys.argv[1])
    page.write_text(with_table(page.read_text()))
