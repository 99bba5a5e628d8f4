"""Names: what a mistyped flag, or a mistyped name of anything else, may have meant."""

import dataclasses
import difflib
from collections.abc import Iterable

from harness.flags.settings import Settings


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty where no name in `known` is near."""
    name, known = name.lower().replace("_", "-"), sorted(known)
    meanings = {own: own for own in known}
    for field in dataclasses.fields(Settings):
        own = f"--{field.name.replace('_', '-')}"
        if own in known:
            for other in field.metadata["also"].split():
                meanings.setdefault(f"--{other}", own)
    near = []
    if name in meanings and name not in known:
        near = [meanings[name]]
    if not near and len(name) > 4:
        near = [own for own in known if own.startswith(name)]
    if not near:
        near = [meanings[other] for other in difflib.get_close_matches(name, meanings, 1, 0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
