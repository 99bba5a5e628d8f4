"""Saved: which checkpoints a run's folder holds, what their manifests say, and whether who goes on from one is the run
that saved it. Whatever asks what is complete, or what is the same run, asks here. It imports nothing heavy, and does
not know what a shard holds."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import stat
from typing import BinaryIO

MANIFEST = "manifest.json"  # of a checkpoint; it holds the flags too
LEFT_OVER = re.compile(r"\.step-[0-9]{8}\.(writing|deleting)")


# ---- Files -----------------------------------------------------------------------------------------------------------


def open_file(path: pathlib.Path) -> BinaryIO:
    """A regular file, to be read; an OSError for anything else: on a FIFO reading would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: pathlib.Path) -> dict:
    """The object in a file of JSON.

    Raises:
        OSError, ValueError: it cannot be read; it holds no object.
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


def place_of(folder: pathlib.Path) -> tuple[int, int] | None:
    """What a folder keeps when it is moved, and another one in its place has not; None if none is there."""
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        return status.st_dev, status.st_ino


# ---- What is complete ------------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def step_of(path: pathlib.Path) -> int | None:
    """The step that stands in a checkpoint's name, `step-` and eight digits; None for any other name."""
    return int(path.name[5:]) if re.fullmatch("step-[0-9]{8}", path.name) else None


def seal(manifest: dict) -> str:
    """Checksum of a manifest by its own content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: pathlib.Path) -> dict:
    """A checkpoint's manifest without its checksum; where the checkpoint's name has a step, it is the manifest's.

    Raises:
        OSError, ValueError: it cannot be read; what is wrong with it.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        sealed, step = manifest.pop("sha256"), manifest["step"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if sealed != seal(manifest):
        raise ValueError(f"{MANIFEST} has changed")
    if step_of(checkpoint) not in (None, step):
        raise ValueError(f"{MANIFEST} is of step {step}")
    return manifest


def step_saved(checkpoint: pathlib.Path) -> int:
    """The step that a checkpoint of any name holds: a copy may be named as its owner likes. -1 where nobody knows."""
    with contextlib.suppress(OSError, ValueError):
        return read_manifest(checkpoint)["step"]
    return -1 if step_of(checkpoint) is None else step_of(checkpoint)


def by_name(folder: pathlib.Path) -> list[pathlib.Path]:
    """What has a checkpoint's name in a run's folder, the oldest first: checkpoints, damaged ones too, and whatever
    stands where one is to be."""
    try:
        return sorted(path for path in (folder / "checkpoints").iterdir() if step_of(path) is not None)
    except OSError:
        return []


def is_complete(checkpoint: pathlib.Path) -> bool:
    """Whether it is a folder, not a link to one, with a whole manifest of that step. Whether its files are as the
    manifest has them, only `checkpoints.damage` reads."""
    try:
        return bool(read_manifest(checkpoint)) and checkpoint.is_dir() and not checkpoint.is_symlink()
    except (OSError, ValueError):
        return False


def complete(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of a run's folder, the oldest first."""
    return [path for path in by_name(folder) if is_complete(path)]


def newest(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The newest complete checkpoint of a run's folder."""
    if folder is None:
        return None
    return next((path for path in reversed(by_name(folder)) if is_complete(path)), None)


def leftovers(folder: pathlib.Path) -> list[pathlib.Path]:
    """What was being written or deleted in a run's folder when a save was killed."""
    return [path for path in folder.glob("checkpoints/.step-*") if LEFT_OVER.fullmatch(path.name)]


# ---- What is the same run --------------------------------------------------------------------------------------------


def is_same_run(folder: pathlib.Path, run_id: str, recorded: str | None) -> bool:
    """Whether the run `run_id`, which was in the folder `recorded`, is the one in `folder`. A run's folder may be
    moved, and reached by another path; but where `recorded` is another directory that still holds that run, `folder`
    is a copy of it, and a copy is another run. Earlier versions recorded no folder."""
    if not recorded:
        return True
    there = pathlib.Path(recorded)
    return place_of(there) in (None, place_of(folder)) or read_config(there).get("run_id") != run_id


def read_origin(folder: pathlib.Path) -> dict | None:
    """Where the run in `folder` branched off, as its config.json says; None of one that did not."""
    origin = read_config(folder).get("branched_from")
    known = isinstance(origin, dict) and {"folder", "checkpoint", "run_id", "step", "tokens"} <= origin.keys()
    return origin if known else None


def find_origin(folder: pathlib.Path, checkpoint: pathlib.Path, manifest: dict) -> tuple[dict | None, str | None]:
    """(None, None) where a run in `folder` that goes on from a checkpoint is the run that saved it. Else that is a new
    run: what its config.json says of where it branched off, and its id if an earlier start has given it one."""
    config, whole, before = read_config(folder), checkpoint.resolve(), read_origin(folder)
    own_id = config.get("run_id")
    here = before and (before["run_id"], before["step"]) == (manifest["run_id"], manifest["step"])
    if here and is_same_run(folder, own_id, config.get("folder")):
        return before, own_id  # it branched off at this checkpoint, and has saved nothing since
    home = whole.parent.parent if whole.parent.name == "checkpoints" else manifest.get("folder") or whole
    if place_of(folder) in map(place_of, whole.parents[:2]):
        recorded = (config if own_id == manifest["run_id"] else manifest).get("folder")
        if is_same_run(folder, manifest["run_id"], recorded):
            return None, None
        home = pathlib.Path(recorded)
    numbers = {name: manifest[name] for name in ("run_id", "step", "tokens")}
    return {"folder": str(home), "checkpoint": str(whole)} | numbers, None
