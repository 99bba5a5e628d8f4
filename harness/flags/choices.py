"""Choices: the values of a flag that are the files of a folder, and what --help says of each. Called by `settings`. The
files are read, not imported, so that --help answers at once."""

import ast
import pathlib
import re


def choices_in(folder: pathlib.Path, first: str) -> dict[str, str]:
    """The first sentence of each module's docstring, by the name of its file with - for _; `first` comes first."""
    files = {path.stem.replace("_", "-"): path for path in folder.glob("[!_]*.py")}
    names = sorted(files, key=lambda name: (name != first, name))
    return {name: first_sentence(files[name]) for name in names}


def first_sentence(file: pathlib.Path) -> str:
    """Without its full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"), file)) or ""
    return re.split(r"\.(?:\s|$)", " ".join(docstring.split()))[0]
