"""Saved: the checkpoints in a run's folder and their manifests, without torch."""

from __future__ import annotations  # for older interpreters, which `versions` refuses

import contextlib
import hashlib
import json
import os
import pathlib
import re

MANIFEST = "manifest.json"  # of a checkpoint; includes the flags of the run
ADAPTER_CONFIG = "adapter_config.json"  # of a folder of adapters, by peft
FORMAT = 3  # version of the checkpoint format; others are refused
DAMAGED: set[pathlib.Path] = set()  # checkpoints with intact manifests whose other files this process found damaged
UNFINISHED = re.compile(r"\.step-[0-9]{8}\.(writing|deleting)")


def read_json(path: pathlib.Path) -> dict:
    """Read the object in a JSON file.

    Raises:
        OSError: it cannot be read, or is not a regular file: a FIFO would block.
        ValueError: it does not hold an object.
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
    """Read config.json in a run's folder; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / "config.json")
    return {}


def is_run(folder: pathlib.Path) -> bool:
    """True if a folder is that of a run with checkpoints, and not one into which a checkpoint was copied."""
    return (folder / "checkpoints").is_dir() and (folder / "metrics.jsonl").exists()


class OtherFormatError(ValueError):
    """A checkpoint of another version of this program."""


def sync_to_disk(path: pathlib.Path) -> None:
    """fsync a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- Checkpoints of a run --------------------------------------------------------------------------------------------


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def step_in_name(path: pathlib.Path) -> int | None:
    """The step in a checkpoint's name, `step-` and eight digits; None for other names."""
    return int(path.name[5:]) if re.fullmatch("step-[0-9]{8}", path.name) else None


def named_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """All paths in a run's folder with the name of a checkpoint, oldest first: complete and damaged ones, also files
    and links.

    Raises:
        OSError: the folder of checkpoints is there and cannot be read.
    """
    try:
        return sorted(path for path in (folder / "checkpoints").iterdir() if step_in_name(path) is not None)
    except FileNotFoundError:
        return []


def complete_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete checkpoints in a run's folder, oldest first: folders, not links, with an intact manifest. The files
    that it lists are not read; checkpoints in which a resume found a damaged one are left out. Empty if the folder
    cannot be read."""
    found: list[pathlib.Path] = []
    try:
        paths = named_checkpoints(folder)
    except OSError:
        return []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            read_manifest(path)
            if not path.is_symlink() and path not in DAMAGED:
                found.append(path)
    return found


def newest_checkpoint(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The newest complete checkpoint in a run's folder; None if there is none."""
    paths = complete_checkpoints(folder) if folder else []
    return paths[-1] if paths else None


def unfinished_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Folders of checkpoints whose run was killed while it wrote or deleted them."""
    return [path for path in folder.glob("checkpoints/.step-*") if UNFINISHED.fullmatch(path.name)]


# ---- Manifests -------------------------------------------------------------------------------------------------------


def dump_with_checksum(manifest: dict) -> str:
    """A manifest as JSON text with its checksum."""
    return json.dumps(manifest | {"sha256": manifest_checksum(manifest)}, indent=1)


def manifest_checksum(manifest: dict) -> str:
    """The checksum of a manifest after a round trip through JSON, where integer keys become strings and sort
    differently."""
    written = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: pathlib.Path) -> dict:
    """Read a checkpoint's manifest, without its checksum.

    Raises:
        OSError: it cannot be read.
        OtherFormatError: it has another format than this version reads.
        ValueError: it is damaged, or has another step than expected.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST)
        written, step = manifest.pop("sha256"), manifest["step"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{MANIFEST} cannot be read") from error
    if manifest.get("format") != FORMAT:
        problem = f"{MANIFEST} has format {manifest.get('format')}, and this version reads {FORMAT}"
        raise OtherFormatError(f"{problem}: resume or export with the version that wrote it")
    if written != manifest_checksum(manifest):
        raise ValueError(f"{MANIFEST} has changed")
    if step_in_name(checkpoint) not in (None, step):
        raise ValueError(f"{MANIFEST} has step {step}")
    return manifest
