"""Saved: which checkpoints a run's folder holds, what their manifests record, and whether a run that goes on from a
checkpoint is the run that saved it. Every wing asks here. Imports nothing heavy; independent of what a shard holds."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import stat
from typing import BinaryIO

MANIFEST = "manifest.json"  # of a checkpoint; it records the flags of the run too
LEFT_OVER = re.compile(r"\.step-[0-9]{8}\.(writing|deleting)")


# ---- Files -----------------------------------------------------------------------------------------------------------


def open_file(path: pathlib.Path) -> BinaryIO:
    """A regular file, opened for reading; an OSError for anything else, as reading a FIFO would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: pathlib.Path) -> dict:
    """The object in a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no object.
    """
    with open_file(path) as file:
        try:
            content = json.loads(file.read())
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content


def read_config(folder: pathlib.Path) -> dict:
    """config.json of a run's folder; {} where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / "config.json")
    return {}


def place_of(path: str | os.PathLike) -> tuple[int, int] | None:
    """Device and inode of a file or folder, which all its names share and which it keeps when it is moved; None where
    nothing is there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# ---- What is complete ------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def step_of(path: pathlib.Path) -> int | None:
    """The step that stands in a checkpoint's name, `step-` and eight digits; None for any other name."""
    return int(path.name[5:]) if re.fullmatch("step-[0-9]{8}", path.name) else None


def manifest_checksum(manifest: dict) -> str:
    """Checksum of a manifest as JSON holds it: integer keys are strings there, which sort in another order."""
    written = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: pathlib.Path) -> dict:
    """A checkpoint's manifest without its checksum.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or of another step than the checkpoint's name.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        checksum, step = manifest.pop("sha256"), manifest["step"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if checksum != manifest_checksum(manifest):
        raise ValueError(f"{MANIFEST} has changed")
    if step_of(checkpoint) not in (None, step):
        raise ValueError(f"{MANIFEST} is of step {step}")
    return manifest


def step_saved(checkpoint: pathlib.Path) -> int:
    """The step of a checkpoint by its manifest, as a copy may have any name; else by its name; else -1."""
    try:
        return read_manifest(checkpoint)["step"]
    except (OSError, ValueError):
        step = step_of(checkpoint)
        return -1 if step is None else step


def by_name(folder: pathlib.Path) -> list[pathlib.Path]:
    """What has a checkpoint's name in a run's folder, the oldest first: complete checkpoints, damaged ones, files or
    links in the place of one."""
    try:
        return sorted(path for path in (folder / "checkpoints").iterdir() if step_of(path) is not None)
    except OSError:
        return []


def is_complete(checkpoint: pathlib.Path) -> bool:
    """Whether it is a folder, not a link to one, with an undamaged manifest. The files that the manifest lists are not
    read."""
    try:
        read_manifest(checkpoint)
    except (OSError, ValueError):
        return False
    return checkpoint.is_dir() and not checkpoint.is_symlink()


def complete(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of a run's folder, the oldest first."""
    return [path for path in by_name(folder) if is_complete(path)]


def newest(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The newest complete checkpoint of a run's folder."""
    if folder is None:
        return None
    for path in reversed(by_name(folder)):
        if is_complete(path):
            return path
    return None


def leftovers(folder: pathlib.Path) -> list[pathlib.Path]:
    """Folders of checkpoints that were being written or deleted when their run was killed."""
    return [path for path in folder.glob("checkpoints/.step-*") if LEFT_OVER.fullmatch(path.name)]


# ---- What is the same run --------------------------------------------------------------------------------------------


def is_same_run(folder: pathlib.Path, run_id: str, recorded: str | None) -> bool:
    """Whether the run `run_id`, which was in the folder `recorded`, is the one in `folder`.

    A run's folder may be moved, and reached by another path. But where `recorded` is another directory that still holds
    that run, `folder` is a copy of it, and a copy is another run.
    """
    if not recorded:  # by an earlier version
        return True
    recorded_folder = pathlib.Path(recorded)
    if place_of(recorded_folder) in (None, place_of(folder)):
        return True
    return read_config(recorded_folder).get("run_id") != run_id


def read_origin(folder: pathlib.Path) -> dict | None:
    """Where the run in `folder` branched off from another, by its config.json; None where it did not."""
    origin = read_config(folder).get("branched_from")
    known = isinstance(origin, dict) and {"folder", "checkpoint", "run_id", "step", "tokens"} <= origin.keys()
    return origin if known else None


def find_origin(folder: pathlib.Path, checkpoint: pathlib.Path, manifest: dict) -> tuple[dict | None, str | None]:
    """Whether a run in `folder` that goes on from a checkpoint is the run that saved it.

    Returns (None, None) where it is. Else it is a new run, which branches off: (what its config.json records of where
    it branched off, its id if an earlier start has given it one).
    """
    config, checkpoint_path, origin = read_config(folder), checkpoint.resolve(), read_origin(folder)
    own_id = config.get("run_id")
    if origin:
        branched_here = (origin["run_id"], origin["step"]) == (manifest["run_id"], manifest["step"])
        if branched_here and is_same_run(folder, own_id, config.get("folder")):
            return origin, own_id  # it branched off at this checkpoint, and has saved nothing since
    if checkpoint_path.parent.name == "checkpoints":
        home = checkpoint_path.parent.parent
    else:
        home = manifest.get("folder") or checkpoint_path
    if place_of(folder) in map(place_of, checkpoint_path.parents[:2]):
        source = config if own_id == manifest["run_id"] else manifest
        recorded = source.get("folder")
        if is_same_run(folder, manifest["run_id"], recorded):
            return None, None
        home = pathlib.Path(recorded)
    branched_from = {"folder": str(home), "checkpoint": str(checkpoint_path)}
    for name in ("run_id", "step", "tokens"):
        branched_from[name] = manifest[name]
    return branched_from, None
