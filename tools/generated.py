"""Generated parts of pages: print a table, or put it between its two markers in a page."""

import argparse
import pathlib
import sys

from harness import base


def between_markers(page: str, command: str, table: str) -> str:
    """A Markdown page with `table` between the markers of `command`.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- begin: python -m {command} -->\n", f"<!-- end: python -m {command} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"it lacks the line {begin.strip()} or, below it, {end}")
    return f"{before}{begin}{table}{end}{after}"


def main(command: str, table: str) -> None:
    """The command line of a module that prints `table`."""
    base.ignore_closed_pipes()
    parser = argparse.ArgumentParser(prog=f"python -m {command}")
    help = "put the table between its markers in this file [print it]"
    parser.add_argument("page", nargs="?", metavar="FILE", type=pathlib.Path, help=help)
    page = parser.parse_args().page
    if page is None:
        print(table, end="")
        return
    try:
        page.write_text(between_markers(page.read_text(), command, table))
    except (OSError, ValueError) as error:
        sys.exit(f"{command}: error: {page}: {error}")
