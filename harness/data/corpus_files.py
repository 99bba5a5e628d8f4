"""The data files of a folder or pattern, and those that are left out."""

import contextlib
import fnmatch
import glob
import os
import pathlib
from collections.abc import Iterator

from harness.base.errors import UserError
from harness.base.saved import place_of
from harness.base.text import shortened
from harness.data.formats import DATA_SUFFIXES, reader_of
from harness.data.records import COMPRESSIONS


def walk(top: pathlib.Path, left_out: dict[pathlib.Path, str]) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """(folder, the names in it) of a folder and all below it, without hidden ones. Each real folder comes once, by a
    path without links where there is one; `left_out` gets the others, and those that cannot be read, with the reason.
    """
    folders, links, entered = [top], [], {}
    while folders or links:
        folder = folders.pop() if folders else links.pop(links.index(min(links)))
        try:
            place = place_of(folder)
            if place in entered:
                left_out[folder] = f"the same as {os.path.relpath(entered[place], top)}"
                continue
            if place:
                entered[place] = folder
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            left_out[folder] = error.strerror
            continue
        for path in filter(os.path.isdir, (folder / name for name in names)):
            (links if path.is_symlink() else folders).append(path)
        yield folder, names


def match(folder: pathlib.Path, parts: list[str]) -> Iterator[pathlib.Path]:
    """What the parts of a pattern match in a folder, as `glob` does, but ** enters each real folder once: a link to a
    folder above would never end."""
    if not parts:
        yield folder
        return
    first, *rest = parts
    if first == "**":
        for below, _ in walk(folder, {}):
            yield from match(below, rest or ["*"])
    elif glob.has_magic(first):
        with contextlib.suppress(OSError):
            names = sorted(fnmatch.filter(os.listdir(folder), first))
            for name in names:
                if first.startswith(".") or not name.startswith("."):
                    yield from match(folder / name, rest)
    elif os.path.lexists(folder / first):
        yield from match(folder / first, rest)


def find_files(dataset: str) -> tuple[list[pathlib.Path], list[str]]:
    """The data files of a local file, folder or pattern, each real file once, and what else is there and is not read,
    in words. Hidden files are not looked at. None of either when `dataset` is a hub id."""
    top, left_out = pathlib.Path(dataset), {}
    is_pattern = glob.has_magic(dataset) and not os.path.exists(dataset)
    if is_pattern:
        found = list(match(pathlib.Path(top.anchor), list(top.relative_to(top.anchor).parts)))
        if "**" not in top.parts:
            left_out |= dict.fromkeys(filter(os.path.isdir, found), "a folder")
        found = [path for path in found if not os.path.isdir(path)]
    elif os.path.isdir(top):
        found = [folder / name for folder, names in walk(top, left_out) for name in names]
        found = [path for path in found if not os.path.isdir(path)]
    else:
        found = [top] if os.path.exists(top) else []
    files: dict[tuple, pathlib.Path] = {}
    for path in sorted(found, key=lambda path: (path.is_symlink(), path)):
        if not reader_of(path) or (path != top and path.name.lower() == "readme.md"):
            left_out[path] = ""
        elif not os.path.exists(path):
            left_out[path] = "a broken link" if path.is_symlink() else "cannot be read"
        elif not os.path.isfile(path):
            left_out[path] = "no regular file"
        elif (first := files.setdefault(place_of(path), path)) != path:
            left_out[path] = f"the same as {os.path.relpath(first, top) if os.path.isdir(top) else first}"
    named = []
    for path, why in sorted(left_out.items()):
        name = os.path.relpath(path, top) if os.path.isdir(top) else str(path)
        name = name if name.isprintable() else ascii(name)
        named.append(f"{name} ({why})" if why else name)
    return sorted(files.values()), named


def local_files(dataset: str) -> list[pathlib.Path]:
    """The data files of a local file, folder or pattern; none when `dataset` is a hub id. A UserError where a path or a
    pattern leads to none."""
    files, left_out = find_files(dataset)
    is_pattern, exists = glob.has_magic(dataset), os.path.exists(dataset)
    if not files and (exists or left_out):
        seen = f"there is only {shortened(left_out)}" if left_out else "it is empty"
        if not os.path.isdir(dataset) and exists:
            seen = "convert it"
        suffixes, packed = "/".join(DATA_SUFFIXES), "/".join(COMPRESSIONS)
        raise UserError(f"--dataset {dataset}: needs {suffixes} files, which may be packed as {packed}; {seen}")
    if not files and is_pattern:
        raise UserError(f"--dataset {dataset}: no such files")
    if not files:
        check_exists(dataset)
    return files


def check_exists(dataset: str) -> None:
    """Raises a UserError where `dataset` names a local file or folder that does not exist. A hub id passes, and so does
    a pattern, whose files would have to be looked for."""
    looks_local = reader_of(dataset) or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1
    path = os.path.expanduser(dataset)
    if looks_local and not os.path.exists(path) and not glob.has_magic(path):
        raise UserError(f"--dataset {dataset}: no such file or folder")
