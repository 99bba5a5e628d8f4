"""The data files of a folder or pattern, and those that are left out."""

import contextlib
import fnmatch
import glob
import os
import pathlib
from collections.abc import Iterator

from harness.base import UserError, is_url, shortened
from harness.data.formats import DATA_SUFFIXES, owner_of, reader_of, reason_to_leave_out
from harness.data.mapped import damaged
from harness.data.records import COMPRESSIONS
from harness.data.storage import DataFile, RemoteFile, has_pattern, list_files
from harness.flags import Source


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


def is_folder(dataset: str) -> bool:
    """Whether a path or URL is that of a folder; of a URL by its name, which is no data file's and no pattern."""
    if is_url(dataset):
        return not (has_pattern(dataset) or reader_of(RemoteFile(dataset, 0)))
    return os.path.isdir(dataset)


def find_remote_files(dataset: str) -> tuple[list[RemoteFile], list[str]]:
    """What `find_files` gives, of a URL."""
    left_out: dict[str, str] = {}
    files = []
    for file in list_files(dataset, left_out):
        if not reader_of(file) or (file.url != dataset and file.name.lower() == "readme.md"):
            left_out[str(file)] = ""
        else:
            files.append(file)
    top = f"{dataset.rstrip('/')}/"
    described = []
    for url, reason in sorted(left_out.items()):
        name = url.removeprefix(top)
        if not name.isprintable():
            name = ascii(name)
        described.append(f"{name} ({reason})" if reason else name)
    return files, described


def find_files(dataset: str) -> tuple[list[DataFile], list[str]]:
    """The data files of a file, folder or pattern on this machine or at a URL, each real file once, and what else is
    there and is not read, in words. Hidden files are not looked at. None of either when `dataset` is a hub id."""
    if is_url(dataset):
        return find_remote_files(dataset)
    top = pathlib.Path(dataset)
    in_folder = os.path.isdir(top)
    left_out: dict[pathlib.Path, str] = {}
    files: dict[tuple, pathlib.Path] = {}
    paths = list_paths(top, left_out)
    for path in sorted(paths, key=lambda path: (path.is_symlink(), path)):
        owner = owner_of(path)
        if owner is not None:
            check_owner(path, owner)
        elif not reader_of(path) or (path != top and path.name.lower() == "readme.md"):
            left_out[path] = ""
        elif not os.path.exists(path):
            left_out[path] = "a broken link" if path.is_symlink() else "cannot be read"
        elif not os.path.isfile(path):
            left_out[path] = "no regular file"
        elif reason_to_leave_out(path):
            left_out[path] = reason_to_leave_out(path)
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


def check_owner(path: pathlib.Path, owner: pathlib.Path) -> None:
    """Raises a UserError where the data file that an index belongs to is missing."""
    if not os.path.exists(owner):
        raise damaged(path, f"it is the index of {owner.name}, which is not there", "restore it, or remove the index")


def local_files(dataset: str) -> list[DataFile]:
    """The data files of a file, folder or pattern on this machine or at a URL; none when `dataset` is a hub id. A
    UserError where a path, pattern or URL leads to none."""
    files, left_out = find_files(dataset)
    if files:
        return files
    exists = os.path.exists(dataset)
    if exists or left_out:
        seen = f"there is only {shortened(left_out)}" if left_out else "it is empty"
        is_file = left_out == [dataset] if is_url(dataset) else exists and not os.path.isdir(dataset)
        if is_file:
            owner = None if is_url(dataset) else owner_of(pathlib.Path(dataset))
            seen = f"give {owner.name}" if owner else "convert it"
        suffixes, packed = "/".join(DATA_SUFFIXES), "/".join(COMPRESSIONS)
        raise UserError(f"--dataset {dataset}: needs {suffixes} files, which may be packed as {packed}; {seen}")
    if is_url(dataset):
        raise UserError(f"--dataset {dataset}: no such files in that store, or no such bucket")
    if glob.has_magic(dataset):
        raise UserError(f"--dataset {dataset}: no such files")
    check_exists(dataset)
    return []


def check_sources_exist(sources: list[Source]) -> None:
    """Raises a UserError for the first source that is a local file or folder and does not exist."""
    for source in sources:
        check_exists(source.dataset)


def check_exists(dataset: str) -> None:
    """Raises a UserError where `dataset` names a local file or folder that does not exist. A hub id passes, and so do a
    pattern and a URL, whose files would have to be looked for."""
    if is_url(dataset):
        return
    looks_local = reader_of(dataset) or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1
    path = os.path.expanduser(dataset)
    if looks_local and not os.path.exists(path) and not glob.has_magic(path):
        megatron = f"; there is {path}.bin" if os.path.exists(f"{path}.bin") else ""  # which names its corpora without
        raise UserError(f"--dataset {dataset}: no such file or folder{megatron}")
