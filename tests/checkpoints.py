"""Checkpoints without shards, manifests and JSON files that are changed, tensors and logits, and a full disk."""

import contextlib
import hashlib
import json
import pathlib
import resource

import torch
import torch.distributed.checkpoint as dcp

from harness.base import saved


def change(file: pathlib.Path, **keys) -> None:
    """Set keys of a JSON object in a file, which need not be there."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | keys))


def write_checkpoint(run: pathlib.Path, step: int, **manifest) -> pathlib.Path:
    """A complete checkpoint in a run's folder, but without shards."""
    folder = folder_of(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / saved.MANIFEST).write_text(
        saved.dump_with_checksum({"format": saved.FORMAT, "step": step, "files": {}} | manifest)
    )
    return folder


def reseal(checkpoint: pathlib.Path, **changes) -> None:
    """Changes what a manifest says; its checksum fits again."""
    manifest = json.loads((checkpoint / saved.MANIFEST).read_text()) | changes
    del manifest["sha256"]
    (checkpoint / saved.MANIFEST).write_text(saved.dump_with_checksum(manifest))


def forge(checkpoint: pathlib.Path) -> None:
    """Makes the manifest fit the files, as somebody with ill intent would."""
    files = [path for path in checkpoint.iterdir() if path.name != saved.MANIFEST]
    reseal(
        checkpoint,
        files={path.name: [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files},
    )


def flip(file: pathlib.Path) -> None:
    """Changes a bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def folder_of(run: pathlib.Path, step: int) -> pathlib.Path:
    return run / "checkpoints" / saved.checkpoint_name(step)


def tensors_of(checkpoint: pathlib.Path, kind: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `kind`, full ones, by the rest of their names."""
    index = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.items()
        if name.startswith(kind)
    }
    dcp.load(tensors, checkpoint_id=checkpoint)
    return {name.removeprefix(kind): tensor for name, tensor in tensors.items()}


def limit_files(size: int) -> None:
    """Writing more than `size` bytes into one file fails from now on, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def files_of_at_most(size: int):
    before, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files(size)
    try:
        yield
    finally:
        limit_files(before)


IDS = torch.arange(24).view(1, 24) * 7


def logits_of(model) -> torch.Tensor:
    """The logits that a model of at least 168 tokens gives of some."""
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits
