"""Choices: what flags take from the modules of a folder: their names, their first sentences, their constants. The
files are read, not imported, so that --help answers at once."""

import ast
import contextlib
import pathlib
import re
from typing import Any


def modules_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files of the modules in a folder, sorted, without those that begin with an underscore."""
    return sorted(folder.glob("[!_]*.py"))


def choices_in(folder: pathlib.Path, first: str) -> dict[str, str]:
    """The first sentence of each module's docstring, by the name of its file with - for _; `first` comes first."""
    files = {path.stem.replace("_", "-"): path for path in modules_in(folder)}
    names = sorted(files, key=lambda name: (name != first, name))
    return {name: first_sentence(files[name]) for name in names}


def first_sentence(file: pathlib.Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(parse_file(file)) or ""
    return re.split(r"\.(?:\s|$)", " ".join(docstring.split()))[0]


def constants_of(file: pathlib.Path) -> dict[str, Any]:
    """The constants of a module whose values are literals, by name."""
    constants = {}
    for statement in parse_file(file).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # it is computed
                constants[statement.targets[0].id] = ast.literal_eval(statement.value)
    return constants


def parse_file(file: pathlib.Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file)
