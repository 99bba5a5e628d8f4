"""Which checkpoint a run goes on from, and whether it is damaged."""

import pathlib

import torch.distributed as dist

from harness.base import saved
from harness.base.errors import UserError
from harness.base.ranks import of_all_ranks
from harness.base.saved import MANIFEST
from harness.flags.resume import checkpoint_folder, no_checkpoint
from harness.flags.settings import Settings
from harness.job import say
from harness.state.shards import sha256


def verify_checkpoint(path: pathlib.Path) -> tuple[dict, str]:
    """(manifest, the damage in words, empty where the checkpoint is whole). Every rank reads its share of the files."""
    manifest, problem = {}, ""
    try:
        manifest = saved.read_manifest(path)
        problem = damage_of_files(path, list(manifest["files"].items())[dist.get_rank() :: dist.get_world_size()])
    except OSError as error:
        problem = f"{pathlib.Path(error.filename or path).name}: {error.strerror}"  # an unreadable sector has no name
    except ValueError as error:
        problem = str(error)
    except (TypeError, KeyError, AttributeError):
        problem = f"{MANIFEST} cannot be read"
    for problem_of_rank in of_all_ranks(problem):
        if problem_of_rank:
            return manifest, problem_of_rank
    return manifest, ""


def damage_of_files(path: pathlib.Path, files: list) -> str:
    """The first file that is not as the manifest has it, in words; empty where there is none. `files` are pairs of a
    name and its (size, checksum). A TypeError where a name leads out of the checkpoint."""
    for name, _ in files:
        if pathlib.PurePath(name).name != name:
            raise TypeError(f"{name} is outside the checkpoint")
    for name, (size, checksum) in files:
        found_size = (path / name).stat().st_size
        if found_size != size:
            return f"{name} has {found_size:,} bytes instead of {size:,}"
        if sha256(path / name) != checksum:
            return f"{name} has changed"
    return ""


def find_checkpoint(resume: str, folder: pathlib.Path) -> tuple[pathlib.Path, dict] | tuple[None, None]:
    """The checkpoint to resume from and its manifest, checked; (None, None) to start fresh.

    A UserError where the path that --resume names is no complete checkpoint, and where auto finds checkpoints of the
    run and can use none of them: a fresh start would train over them.
    """
    if resume == "none":
        return None, None
    auto = resume == "auto"
    if auto:
        paths = list(reversed(saved.by_name(folder)))
    else:
        paths = [checkpoint_folder(resume)]
        problem = no_checkpoint(resume)
        if problem:
            raise UserError(f"--resume {resume}: {problem}")
    paths_of_main = of_all_ranks(paths)[0]  # a rank that saw others would be alone in its next collective
    for path in paths_of_main:
        manifest, problem = verify_checkpoint(path)
        if not problem:
            return path, manifest
        if not auto:
            raise UserError(f"--resume {resume}: {path.name} is damaged ({problem}); choose another, or auto")
        say(f"skipped    {path.name} is damaged: {problem}")
    if paths_of_main:
        advice = "repair or copy back one of them, or choose another --run-name to start fresh"
        raise UserError(
            f"--resume auto: every checkpoint in {folder / 'checkpoints'} is damaged; {advice}", exit_code=1
        )
    origin = of_all_ranks(saved.read_origin(folder))[0]
    return find_branch_point(folder, origin) if origin else (None, None)


def find_recorded_data(settings: Settings) -> dict | None:
    """What a run recorded of its data, as a checkpoint's manifest has it: of --resume, or of the config.json of
    --run-name or --config. None where they name no run."""
    if settings.resume not in ("none", "auto"):
        return find_checkpoint(settings.resume, pathlib.Path())[1]
    folders = []
    if settings.run_name:
        folders.append(pathlib.Path(settings.output_dir).expanduser() / settings.run_name)
    if settings.config:
        folders.append(pathlib.Path(settings.config).expanduser().parent)
    for folder in folders:
        config = of_all_ranks(saved.read_config(folder))[0]
        if "data" in config:
            return {"data": config["data"], "step": 0, "samples": 0}
    return None


def find_branch_point(folder: pathlib.Path, origin: dict) -> tuple[pathlib.Path, dict]:
    """The checkpoint at which the run in `folder` branched off, and its manifest: a run that has saved nothing since
    resumes there."""
    path = pathlib.Path(origin["checkpoint"])
    manifest, problem = verify_checkpoint(path)
    if problem or manifest["run_id"] != origin["run_id"] or manifest["step"] != origin["step"]:
        reason = f"it branched off at {path}, saved nothing since, and that is not there any more"
        raise UserError(f"--resume auto: {folder}: {reason}; remove the folder, or choose another --run-name")
    return path, manifest
