"""The door of a wing: the one list of what the rest of the project may use of it.

    # harness/data/__init__.py
    __getattr__, __all__ = doors.open_door(__name__, {"sources": "load", "batches": "mix training_batches"})

Elsewhere: `from harness import data`, then `data.load(...)`. A file of the wing is imported when the first of its names
is used, so a door itself is light.
"""

from __future__ import annotations  # older interpreters read this far, to be told so

import importlib
from collections.abc import Callable
from typing import Any


def open_door(wing: str, files: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of the package `wing`. `files` has, for each of its files, the names that others may
    use. None may be that of a file, which would hide it once the file is imported."""
    file_of = {name: file for file, names in files.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"{wing} has no {name!r} at its door")
        return getattr(importlib.import_module(f"{wing}.{file_of[name]}"), name)

    return find, list(file_of)
