"""Which checkpoint a run goes on from, and whether it is damaged."""

import pathlib

import torch.distributed as dist

from harness.base import saved
from harness.base.errors import UserError
from harness.base.ranks import of_all_ranks
from harness.base.saved import MANIFEST
from harness.flags.resume import checkpoint_folder, no_checkpoint
from harness.job.printing import say
from harness.state.shards import sha256


def damage(path: pathlib.Path) -> tuple[dict, str]:
    """(manifest, what is wrong with this checkpoint, empty if nothing). Every rank reads its share of the files."""
    manifest, wrong = {}, ""
    try:
        manifest = saved.read_manifest(path)
        for name, (size, checksum) in list(manifest["files"].items())[dist.get_rank() :: dist.get_world_size()]:
            if pathlib.PurePath(name).name != name:
                raise TypeError(f"{name} is outside the checkpoint")
            if not wrong and (path / name).stat().st_size != size:
                wrong = f"{name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
            if not wrong and sha256(path / name) != checksum:
                wrong = f"{name} has changed"
    except OSError as error:
        wrong = f"{pathlib.Path(error.filename or path).name}: {error.strerror}"  # an unreadable sector has no name
    except ValueError as error:
        wrong = str(error)
    except (TypeError, KeyError, AttributeError):
        wrong = f"{MANIFEST} cannot be read"
    return manifest, next(filter(None, of_all_ranks(wrong)), "")


def find_checkpoint(resume: str, folder: pathlib.Path) -> tuple[pathlib.Path, dict] | tuple[None, None]:
    """The checkpoint to resume from and its manifest, checked; (None, None) to start fresh.

    A UserError where the path that --resume names is no complete checkpoint.
    """
    if resume == "none":
        return None, None
    auto = resume == "auto"
    paths = saved.by_name(folder)[::-1] if auto else [checkpoint_folder(resume)]
    if not auto and (problem := no_checkpoint(resume)):
        raise UserError(f"--resume {resume}: {problem}")
    for path in of_all_ranks(paths)[0]:  # all look at the same ones, so that they stay together
        manifest, wrong = damage(path)
        if not wrong:
            return path, manifest
        if not auto:
            raise UserError(f"--resume {resume}: {path.name} is damaged ({wrong}); choose another, or auto")
        say(f"skipped    {path.name} is damaged: {wrong}")
    origin = of_all_ranks(saved.read_origin(folder))[0]
    return find_branch_point(folder, origin) if origin else (None, None)


def find_branch_point(folder: pathlib.Path, origin: dict) -> tuple[pathlib.Path, dict]:
    """The checkpoint at which the run in `folder` branched off, and its manifest: a run that has saved nothing since
    goes on from there, not from nothing."""
    path = pathlib.Path(origin["checkpoint"])
    manifest, wrong = damage(path)
    if wrong or any(manifest[key] != origin[key] for key in ("run_id", "step")):
        what = f"it branched off at {path}, saved nothing since, and that is not there any more"
        raise UserError(f"--resume auto: {folder}: {what}; remove the folder, or choose another --run-name")
    return path, manifest
