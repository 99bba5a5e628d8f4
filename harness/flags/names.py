"""Names: what to write for a flag that this program does not have, and what a mistyped name may have meant."""

import difflib
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from harness.flags.migration import TRAINERS

MIN_LIKENESS = 0.75  # of names, by difflib's ratio

# Flags that are no more, and what takes their place.
REMOVED = {
    "--ema": "--average-checkpoints K, with --num-steps 0 --resume RUN, averages the weights of saved checkpoints",
    "--skip-spikes": "steps that are not finite are skipped by themselves; a lower --max-grad-norm tames spikes",
    "--muon-iteration": "muon has one iteration, Newton-Schulz; leave it out",
    "--muon-scale": "muon scales as match_rms_adamw; leave it out",
    "--momentum-dtype": "muon's momentum is in fp32; leave it out",
    "--measure": "plans go by assumed rates; docs/PLAN.md has them beside runs on GPUs",
    "--plan-rates": "plans go by assumed rates; --plan-gpu names a GPU of the table",
    "--activation-memory-budget": "--activation-checkpointing selective or full keeps fewer activations",
}


class Answer(NamedTuple):
    """What to write for a flag of another trainer."""

    name: str  # as the trainer writes it
    text: str  # the end of an error


def no_such_flag(name: str, known: Collection[str]) -> str:
    """What is wrong with a flag that is not in `known`, and what takes its place or may have been meant."""
    if name in REMOVED:
        return f"no such flag any more; {REMOVED[name]}"
    key = without_dashes(name)
    if key not in ANSWERS:
        key = key.rpartition(".")[2]  # as in --training.local_batch_size
    if key in ANSWERS:
        return f"no such flag; {ANSWERS[key].text}"
    switch = f"--{key.removeprefix('no-')}"
    if key.startswith("no-") and switch in known:
        return f"no such flag; leave {switch} out"
    if nearest := suggest(key, known):
        return f"no such flag{nearest}"
    near = difflib.get_close_matches(key, ANSWERS, 1, MIN_LIKENESS)
    return f"no such flag; for {ANSWERS[near[0]].name} {ANSWERS[near[0]].text}" if near else "no such flag"


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty if no name in `known` is near."""
    key, own = without_dashes(name), {without_dashes(one): one for one in sorted(known)}
    near = [one for one in own if len(key) > 2 and one.startswith(key)]
    near = near or difflib.get_close_matches(key, own, 1, MIN_LIKENESS)
    return f"; did you mean {' or '.join(own[one] for one in near)}?" if near else ""


def without_dashes(name: str) -> str:
    """A name to compare: `batch-size` for `--Batch_Size`. Dashes that all flags begin with would make them alike."""
    return name.lower().lstrip("-").replace("_", "-")


def answers() -> dict[str, Answer]:
    """The answer to each name of another trainer; the first row that has a name counts."""
    found: dict[str, Answer] = {}
    for row in (row for rows in TRAINERS.values() for row in rows):
        here, note = map(as_plain_text, (row.here, row.note))
        text = f"use {here}" if here.startswith("--") else here
        for name in row.theirs.split():
            found.setdefault(without_dashes(name), Answer(name, f"{text}; {note}" if note else text))
    return found


def as_plain_text(markdown: str) -> str:
    """Markdown of a page in docs/ without backticks, with the pages that its links lead to."""
    linked = re.sub(r"\[(.+?)\]\((.*?)#.*?\)", lambda link: f"docs/{link[2] or 'MIGRATION.md'} ({link[1]})", markdown)
    return linked.replace("`", "")


ANSWERS = answers()
