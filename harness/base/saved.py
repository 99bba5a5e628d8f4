"""Saved: which checkpoints a run's folder holds and what their manifests record. Without
torch, as flags and job ask here too."""

from __future__ import annotations  # older interpreters read this far, to be told so

import contextlib
import hashlib
import json
import os
import pathlib
import re

MANIFEST = "manifest.json"  # of a checkpoint; it records the flags of the run too
ADAPTER_CONFIG = "adapter_config.json"  # of a folder of adapters, as peft writes it
FORMAT = 1  # of a checkpoint; another one is refused
LEFT_OVER = re.compile(r"\.step-[0-9]{8}\.(writing|deleting)")


def read_json(path: pathlib.Path) -> dict:
    """The object in a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file, of which a FIFO would be waited for.
        ValueError: it holds no object.
    """
    if path.exists() and not path.is_file():
        raise OSError(0, "not a regular file", str(path))
    try:
        content = json.loads(path.read_bytes())
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


def sync_to_disk(path: pathlib.Path) -> None:
    """Makes a file's content durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- Checkpoints of a run --------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def step_in_name(path: pathlib.Path) -> int | None:
    """The step that stands in a checkpoint's name, `step-` and eight digits; None for any other name."""
    return int(path.name[5:]) if re.fullmatch("step-[0-9]{8}", path.name) else None


def named_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """What has a checkpoint's name in a run's folder, the oldest first: complete checkpoints, damaged ones, files or
    links in the place of one."""
    try:
        return sorted(path for path in (folder / "checkpoints").iterdir() if step_in_name(path) is not None)
    except OSError:
        return []


def complete_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints of a run's folder, the oldest first: folders, no links to one, whose manifest is whole.
    The files that the manifest lists are not read."""
    found = []
    for path in named_checkpoints(folder):
        with contextlib.suppress(OSError, ValueError):
            read_manifest(path)
            if not path.is_symlink():
                found.append(path)
    return found


def newest_checkpoint(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The newest complete checkpoint of a run's folder; None where there is none."""
    paths = complete_checkpoints(folder) if folder else []
    return paths[-1] if paths else None


def unfinished_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Folders of checkpoints that were being written or deleted when their run was killed."""
    return [path for path in folder.glob("checkpoints/.step-*") if LEFT_OVER.fullmatch(path.name)]


# ---- Manifests -------------------------------------------------------------------------------------------------------


def dump_with_checksum(manifest: dict) -> str:
    """The text of a manifest with its checksum."""
    return json.dumps(manifest | {"sha256": manifest_checksum(manifest)}, indent=1)


def manifest_checksum(manifest: dict) -> str:
    """Checksum of a manifest as JSON holds it: integer keys are strings there, which sort in another order."""
    written = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: pathlib.Path) -> dict:
    """A checkpoint's manifest without its checksum.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, of another format, or of another step than the checkpoint's name.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        written, step = manifest.pop("sha256"), manifest["step"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if manifest.get("format") != FORMAT:
        problem = f"{MANIFEST} is of format {manifest.get('format')}, and this program reads {FORMAT}"
        raise ValueError(f"{problem}: go on with the version that wrote it, or export from there")
    if written != manifest_checksum(manifest):
        raise ValueError(f"{MANIFEST} has changed")
    if step_in_name(checkpoint) not in (None, step):
        raise ValueError(f"{MANIFEST} is of step {step}")
    return manifest
