"""The data files of a folder or pattern, and those that are left out."""

import contextlib
import fnmatch
import glob
import os
import pathlib
from collections.abc import Iterator

from harness.base.errors import UserError
from harness.base.text import shortened
from harness.data.formats import DATA_SUFFIXES, reader_of
from harness.data.records import COMPRESSIONS


def inode_of(path) -> tuple:
    """What two names of the same file or folder have in common."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino) if status.st_ino else (os.path.realpath(path),)


def walk(top: pathlib.Path, left_out: dict[pathlib.Path, str]) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """(folder, the names in it) of a folder and all below it, without hidden ones. Each real folder comes once, by a
    path without links where there is one; `left_out` gets the others, and those that cannot be read, with the reason.
    """
    folders, links, entered = [top], [], {}
    while folders or links:
        if folders:
            folder = folders.pop()
        else:
            folder = min(links)
            links.remove(folder)
        try:
            inode = inode_of(folder)
            if inode in entered:
                left_out[folder] = f"the same as {os.path.relpath(entered[inode], top)}"
                continue
            entered[inode] = folder
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            left_out[folder] = error.strerror
            continue
        for name in names:
            path = folder / name
            if os.path.isdir(path) and path.is_symlink():
                links.append(path)
            elif os.path.isdir(path):
                folders.append(path)
        yield folder, names


def match(folder: pathlib.Path, parts: list[str]) -> Iterator[pathlib.Path]:
    """What the parts of a pattern match in a folder, as `glob` does, but ** enters each real folder once: a link to a
    folder above would never end."""
    if not parts:
        yield folder
        return
    part, *rest = parts
    if part == "**":
        for below, _ in walk(folder, {}):
            yield from match(below, rest or ["*"])
    elif glob.has_magic(part):
        with contextlib.suppress(OSError):
            names = sorted(fnmatch.filter(os.listdir(folder), part))
            for name in names:
                if part.startswith(".") or not name.startswith("."):
                    yield from match(folder / name, rest)
    elif os.path.lexists(folder / part):
        yield from match(folder / part, rest)


def list_paths(top: pathlib.Path, left_out: dict[pathlib.Path, str]) -> list[pathlib.Path]:
    """All but folders at a path, below a folder, or where a pattern leads; `left_out` gets the folders that are
    not entered, with the reason."""
    if os.path.isdir(top):
        paths = [folder / name for folder, names in walk(top, left_out) for name in names]
    elif os.path.exists(top):
        paths = [top]
    elif glob.has_magic(str(top)):
        paths = list(match(pathlib.Path(top.anchor), list(top.relative_to(top.anchor).parts)))
        if "**" not in top.parts:
            left_out.update((path, "a folder") for path in paths if os.path.isdir(path))
    else:
        paths = []
    return [path for path in paths if not os.path.isdir(path)]


def find_files(dataset: str) -> tuple[list[pathlib.Path], list[str]]:
    """The data files of a local file, folder or pattern, each real file once, and what else is there and is not read,
    in words. Hidden files are not looked at. None of either when `dataset` is a hub id."""
    top = pathlib.Path(dataset)
    in_folder = os.path.isdir(top)
    left_out: dict[pathlib.Path, str] = {}
    files: dict[tuple, pathlib.Path] = {}
    paths = list_paths(top, left_out)
    for path in sorted(paths, key=lambda path: (path.is_symlink(), path)):
        if not reader_of(path) or (path != top and path.name.lower() == "readme.md"):
            left_out[path] = ""
        elif not os.path.exists(path):
            left_out[path] = "a broken link" if path.is_symlink() else "cannot be read"
        elif not os.path.isfile(path):
            left_out[path] = "no regular file"
        else:
            try:
                same = files.setdefault(inode_of(path), path)
            except OSError as error:  # deleted since it was listed
                left_out[path] = error.strerror
                continue
            if same != path:
                left_out[path] = f"the same as {os.path.relpath(same, top) if in_folder else same}"
    described = []
    for path, reason in sorted(left_out.items()):
        name = os.path.relpath(path, top) if in_folder else str(path)
        if not name.isprintable():
            name = ascii(name)
        described.append(f"{name} ({reason})" if reason else name)
    return sorted(files.values()), described


def local_files(dataset: str) -> list[pathlib.Path]:
    """The data files of a local file, folder or pattern; none when `dataset` is a hub id. A UserError where a path or a
    pattern leads to none."""
    files, left_out = find_files(dataset)
    if files:
        return files
    exists = os.path.exists(dataset)
    if exists or left_out:
        seen = f"there is only {shortened(left_out)}" if left_out else "it is empty"
        if exists and not os.path.isdir(dataset):
            seen = "convert it"
        suffixes, packed = "/".join(DATA_SUFFIXES), "/".join(COMPRESSIONS)
        raise UserError(
            f"--dataset {dataset}: needs {suffixes} files, which may be packed as {packed}; {seen}",
            entry="no-data-files",
        )
    if glob.has_magic(dataset):
        raise UserError(f"--dataset {dataset}: no such files", entry="no-such-data")
    check_exists(dataset)
    return []


def check_exists(dataset: str) -> None:
    """Raises a UserError where `dataset` names a local file or folder that does not exist. A hub id passes, and so does
    a pattern, whose files would have to be looked for."""
    looks_local = reader_of(dataset) or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1
    path = os.path.expanduser(dataset)
    if looks_local and not os.path.exists(path) and not glob.has_magic(path):
        raise UserError(f"--dataset {dataset}: no such file or folder", entry="no-such-data")
