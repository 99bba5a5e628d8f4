"""The door of a wing: the one list of what the rest of the project may use of it.

    # harness/data/__init__.py
    __getattr__, __all__ = doors.open_door(__name__, {"load": "sources", "training_batches": "batches"})

Elsewhere: `from harness import data`, then `data.load(...)`. A file of the wing is imported when the first of its names
is used, so a door itself is light.
"""

from __future__ import annotations  # older interpreters read this far, to be told so

import importlib
from collections.abc import Callable
from typing import Any


def open_door(wing: str, names: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of the package `wing`. `names` has, for each name that others may use, the file of the
    wing that defines it. No name may be that of a file, which would hide it once the file is imported."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{wing} has no {name!r} at its door")
        return getattr(importlib.import_module(f"{wing}.{names[name]}"), name)

    return find, list(names)


def names_of(files: dict[str, str]) -> dict[str, str]:
    """The names of a door by the files that define them, `{"text": "counted is_url"}`, as `open_door` takes them."""
    return {name: file for file, names in files.items() for name in names.split()}
