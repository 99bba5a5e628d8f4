"""Which checkpoint a run goes on from, whether it is damaged, and whether the run is then the one that saved it."""

import pathlib

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from harness import base, flags, job
from harness.state.identity import check_same_model
from harness.state.shards import sha256
from harness.state.train_state import Checkpoint, TrainState, local_part, saved_tensors


def find_checkpoint(resume: str, folder: pathlib.Path | None) -> Checkpoint | None:
    """The checkpoint that --resume names, checked, or that auto finds in a run's `folder`; None to start fresh. Every
    rank calls this.

    Raises:
        UserError: the path that --resume names is no complete checkpoint, or auto finds checkpoints of the run and can
            use none of them: a fresh start would train over them.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return find_newest(folder) if folder else None
    absent = base.broadcast_from_rank_0(lambda: flags.no_checkpoint(resume))
    if absent:
        raise base.UserError(f"--resume {resume}: {absent}")
    path = base.broadcast_from_rank_0(lambda: flags.checkpoint_folder(resume))
    manifest, problem = verify_checkpoint(path)
    if not problem:
        return Checkpoint(path, manifest)
    if base.broadcast_from_rank_0(lambda: not path.exists()):  # removed by a run that goes on: take the next one
        return find_checkpoint(resume, folder)
    raise base.UserError(f"--resume {resume}: {path.name} is damaged ({problem}); choose another, or auto")


def load_for_inference(
    settings: flags.Settings, state: TrainState, config: PretrainedConfig, checkpoint: Checkpoint
) -> Checkpoint:
    """Loads a checkpoint for what trains nothing, or with --average-checkpoints the mean of the newest ones up to it;
    returns the one that was loaded. A run that goes on may remove it meanwhile: then the next newest one of that run
    is. Every rank calls this.

    Raises:
        UserError: it cannot be loaded, or as `load_mean` says.
    """
    try:
        state.load(checkpoint)
    except base.UserError:
        if base.broadcast_from_rank_0(checkpoint.path.exists):
            raise
        return load_for_inference(settings, state, config, find_checkpoint(settings.resume, None))
    job.print0(f"loaded     {checkpoint.path}, step {state.step:,}")
    if settings.average_checkpoints:
        load_mean(settings, state, config, checkpoint.path)
        job.print0(f"averaged   {state.describe_steps()}")
    return checkpoint


def load_mean(settings: flags.Settings, state: TrainState, config: PretrainedConfig, newest: pathlib.Path) -> None:
    """Loads the mean of the weights of a run's newest --average-checkpoints complete checkpoints, summed in fp32, the
    same on any number of ranks. Every rank calls this.

    Args:
        config: of the model, which all of them must have.
        newest: the checkpoint that --resume names, the last one that counts.

    Raises:
        UserError: there are fewer, one is damaged, or is another run's or of another model.
    """
    count, flag = settings.average_checkpoints, f"--average-checkpoints {settings.average_checkpoints}"
    run_checkpoints = base.broadcast_from_rank_0(lambda: base.complete_checkpoints(newest.parent.parent))
    paths = run_checkpoints[: run_checkpoints.index(newest) + 1][-count:] if newest in run_checkpoints else []
    if len(paths) < count:
        has = f"{newest.parent.parent} has {base.counted(len(paths), 'complete checkpoint')}"
        raise base.UserError(f"{flag}: {has} up to {newest.name}; give at most so many, or --keep-checkpoints more")
    run_ids: set[str] = set()
    total: dict[str, torch.Tensor] = {}
    for path in paths:
        manifest, problem = verify_checkpoint(path)
        if problem:
            raise base.UserError(f"{flag}: {path} is damaged ({problem}); remove it, or choose a smaller number", 1)
        check_same_model(config, manifest)
        run_ids.add(manifest["run_id"])
        state.load_tensors(path)
        for name, tensor in local_weights(state).items():
            total[name] = total[name] + tensor.float() if name in total else tensor.float().clone()
    if len(run_ids) > 1:
        raise base.UserError(f"{flag}: the checkpoints in {newest.parent} are of {len(run_ids)} runs, not of one")
    with torch.no_grad():
        for name, tensor in local_weights(state).items():
            tensor.copy_(total[name] / count)
    state.averaged_steps = [int(path.name.removeprefix("step-")) for path in paths]


def local_weights(state: TrainState) -> dict[str, torch.Tensor]:
    """This rank's parts of what checkpoints hold of the model, but for whole numbers."""
    parts = {name: local_part(tensor) for name, tensor in saved_tensors(state.model).items()}
    return {name: part for name, part in parts.items() if part.is_floating_point()}


def find_newest(folder: pathlib.Path) -> Checkpoint | None:
    """The newest checkpoint of the run in `folder` that is not damaged; None where it has saved none."""
    paths = base.broadcast_from_rank_0(lambda: base.named_checkpoints(folder))
    for path in reversed(paths):
        manifest, problem = verify_checkpoint(path)
        if not problem:
            return Checkpoint(path, manifest)
        job.print0(f"skipped    {path.name} is damaged: {problem}")
    if paths:
        advice = "repair or copy back one of them, or choose another --run-name to start fresh"
        raise base.UserError(f"--resume auto: every checkpoint in {folder / 'checkpoints'} is damaged; {advice}", 1)
    before = base.broadcast_from_rank_0(lambda: base.read_config(folder).get("flags", {}).get("resume"))
    if before not in (None, "none", "auto"):
        again = f"remove that folder and give --resume {before} again"
        raise base.UserError(f"--resume auto: {folder} began with --resume {before} and has saved nothing; {again}")
    return None


def verify_checkpoint(path: pathlib.Path) -> tuple[dict, str]:
    """(manifest, the damage in words, empty where the checkpoint is whole). Every rank reads its share of the files."""
    manifest, problem = {}, ""
    try:
        manifest = base.read_manifest(path)
        for name, (size, checksum) in list(manifest["files"].items())[dist.get_rank() :: dist.get_world_size()]:
            problem = problem or find_damage(path, name, size, checksum)
    except OSError as error:
        problem = f"{pathlib.Path(error.filename or path).name}: {error.strerror}"  # an unreadable sector has no name
    except ValueError as error:
        problem = str(error)
    for rank_problem in base.all_gather_objects(problem):
        if rank_problem:
            return manifest, rank_problem
    return manifest, ""


def find_damage(checkpoint: pathlib.Path, name: str, size: int, checksum: str) -> str:
    """How a file differs from what the manifest has of it, in words; empty where it does not."""
    if pathlib.PurePath(name).name != name:
        return f"{name} is outside the checkpoint"
    found_size = (checkpoint / name).stat().st_size
    if found_size != size:
        return f"{name} has {found_size:,} bytes instead of {size:,}"
    return "" if sha256(checkpoint / name) == checksum else f"{name} has changed"


def find_recorded_data(settings: flags.Args, checkpoint: Checkpoint | None) -> dict | None:
    """What a run recorded of its data, as a checkpoint's manifest has it: in the `checkpoint` of --resume, or in the
    config.json of --run-name or --config. None where they name no run."""
    if checkpoint:
        return checkpoint.manifest
    if not (settings.run_name or settings.config):
        return None
    folder = pathlib.Path(settings.config or "").expanduser().parent
    if settings.run_name:
        folder = pathlib.Path(settings.output_dir).expanduser() / settings.run_name
    config = base.broadcast_from_rank_0(lambda: base.read_config(folder))
    if "data" in config:
        return {"data": config["data"], "flags": config["flags"], "step": 0, "samples": 0}
    return None


def resumes_same_run(checkpoint: Checkpoint | None, folder: pathlib.Path) -> bool:
    """Whether the run in `folder` goes on from a checkpoint of its own; the run of any other folder is a new one. Every
    rank calls this."""
    return base.broadcast_from_rank_0(
        lambda: checkpoint is not None and folder.resolve() in checkpoint.path.resolve().parents[:2]
    )


def refuse_broken(settings: flags.Settings, state: TrainState, checkpoint: Checkpoint | None) -> None:
    """Every rank calls this before anything is done with weights that may have been loaded.

    Raises:
        UserError: they were, and they, or what was loaded with them, are NaN or infinite, or give no finite loss.
    """
    if not checkpoint and settings.init == "random":
        return
    problem = state.what_is_broken()
    if problem and checkpoint:
        advice = "remove that folder, and --resume auto goes on from the one before"
        raise base.UserError(f"--resume {checkpoint.path}: it {problem}; {advice}", exit_code=1)
    if problem:
        advice = "try other weights" if settings.precision == "fp32" else "try other weights or --precision fp32"
        raise base.UserError(f"--model {settings.model}: it {problem}; {advice}", exit_code=1)
