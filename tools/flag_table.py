"""The table of all flags, docs/FLAGS.md: `python -m tools.flag_table > docs/FLAGS.md`. A test compares
that file with what this makes."""

import argparse

from harness import base, flags

BEGINNING = """# All flags

As `--help` has them, in its groups; made from the parser by \
`python -m tools.flag_table > docs/FLAGS.md`. In brackets stands the default. \
What the main flags trade is in the [README](../README.md#what-it-trades), names of other trainers in \
[Migration](MIGRATION.md). `--config FILE` sets them too, as `batch-size = 4` or `batch_size = 4`.
"""


def escaped(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("%%", "%").replace("|", "\\|")


def shown(action: argparse.Action) -> str:
    """A flag as it is typed: its names and what stands behind them."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    values = action.metavar if isinstance(action.metavar, tuple) else [action.metavar]
    return f"{names} " + escaped(" | ".join(map(str, action.choices)) if action.choices else " ".join(values))


def table() -> str:
    """The page in Markdown, a table for each group of --help that has flags of this program."""
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
