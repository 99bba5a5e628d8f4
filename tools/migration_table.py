"""The tables of other trainers' flags, made from `harness.flags.migration`. A test compares docs/MIGRATION.md with
them:

    python -m tools.migration_table docs/MIGRATION.md
"""

from harness import flags
from tools import generated

COMMAND = "tools.migration_table"


def table() -> str:
    """The tables in Markdown, one per trainer."""
    parts = []
    for trainer, rows in flags.TRAINERS.items():
        parts.append(f"\n## From {trainer}\n\n| there | here | |\n|---|---|---|\n")
        for row in rows:
            cells = [", ".join(f"`{name}`" for name in row.theirs.split()), row.here]
            if row.note:
                cells.append(row.note)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts) + "\n"


if __name__ == "__main__":
    generated.main(COMMAND, table())
