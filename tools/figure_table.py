"""The table of all figures, made from `harness.report.figures`. A test compares docs/MONITORING.md with
it:

    python -m tools.figure_table                     # prints the table
    python -m tools.figure_table docs/MONITORING.md    # puts it between the two markers of that file
"""

import argparse
import pathlib
import re
import sys

from harness import base, report

BEGIN, END = "<!-- begin: python -m tools.figure_table -->", "<!-- end: python -m tools.figure_table -->"


def table() -> str:
    """The table in Markdown, a row for each figure."""
    rows = []
    for figure in report.FIGURES.values():
        name = f"`{figure.name}`" if figure.name else ""
        words = re.sub(r"\w+_\w+", r"`\g<0>`", figure.words)
        rows.append(f"| `{figure.key}` | {name} | {figure.unit} | {words} |\n")
    return "| key | in the trackers | unit | what it is |\n|---|---|---|---|\n" + "".join(rows)


def with_table(page: str) -> str:
    """A page in Markdown with the table between its markers.

    Raises:
        ValueError: it lacks one of them.
    """
    before, _, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"it lacks the line {BEGIN} or, below it, {END}")
    return f"{before}{BEGIN}\n{table()}{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.figure_table", description="The table of all figures.")
    parser.add_argument(
        "page", nargs="?", metavar="FILE", type=pathlib.Path, help="put it between the markers of this file [print it]"
    )
    page = parser.parse_args(arguments).page
    if page is None:
        print(table(), end="")
        return
    try:
        page.write_text(with_table(page.read_text()))
    except (OSError, ValueError) as error:
        sys.exit(f"tools.figure_table: error: {page}: {error}")


if __name__ == "__main__":
    base.never_fail()
    main()
