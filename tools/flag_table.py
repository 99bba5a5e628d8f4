"""The table of all flags: `python -m tools.flag_table > docs/FLAGS.md`. A test compares that file with it."""

import argparse

from harness import base, flags

BEGINNING = """# All flags

The text of `--help`, made by `python -m tools.flag_table > docs/FLAGS.md`. Defaults are in brackets. \
The [README](../README.md#what-it-trades) has the trade-offs of the main flags, [Migration](MIGRATION.md) the names in \
other trainers. `--config FILE` sets them too, as `batch-size = 4` or `batch_size = 4`.
"""


def escaped(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("%%", "%").replace("|", "\\|")


def shown(action: argparse.Action) -> str:
    """A flag as it is typed: its names and values."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    values = action.metavar if isinstance(action.metavar, tuple) else [action.metavar]
    return f"{names} " + escaped(" | ".join(map(str, action.choices)) if action.choices else " ".join(values))


def table() -> str:
    """The page in Markdown, with a table for each group of --help."""
    parts = [BEGINNING]
    for group in flags.make_parser()._action_groups:
        rows = [
            f"| {shown(action)} | {escaped(action.help)} |"
            for action in group._group_actions
            if "--help" not in action.option_strings
        ]
        if rows:
            title = "Versions" if group.title == "options" else group.title.capitalize()
            parts.append("\n".join([f"## {title}\n", "| flag | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    base.ignore_closed_pipes()
    print(table(), end="")
