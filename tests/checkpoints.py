"""Checkpoints without shards, and manifests that are written again."""

import hashlib
import json
import pathlib

from harness.base import saved


def write_checkpoint(run: pathlib.Path, step: int, **manifest) -> pathlib.Path:
    """A complete checkpoint in a run's folder, but without shards."""
    folder = run / "checkpoints" / saved.checkpoint_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / saved.MANIFEST).write_text(saved.seal({"format": saved.FORMAT, "step": step, "files": {}} | manifest))
    return folder


def reseal(checkpoint: pathlib.Path, **changes) -> None:
    """Changes what a manifest says; its checksum fits again."""
    manifest = json.loads((checkpoint / saved.MANIFEST).read_text()) | changes
    del manifest["sha256"]
    (checkpoint / saved.MANIFEST).write_text(saved.seal(manifest))


def forge(checkpoint: pathlib.Path) -> None:
    """Makes the manifest fit the files, as somebody with ill intent would."""
    files = [path for path in checkpoint.iterdir() if path.name != saved.MANIFEST]
    reseal(
        checkpoint,
        files={path.name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files},
    )
