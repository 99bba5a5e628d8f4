"""Find the checkpoint that a run resumes, verify it, and load it without training."""

import pathlib

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from harness import base, flags, job
from harness.state.identity import check_same_model
from harness.state.shards import sha256
from harness.state.train_state import Checkpoint, TrainState, local_part, saved_tensors


def find_checkpoint(resume: str, folder: pathlib.Path | None) -> Checkpoint | None:
    """Return the verified checkpoint that --resume names, or that auto finds in the run's `folder`; None for a fresh
    start. Every rank calls this.

    Raises:
        UserError: --resume names no complete checkpoint, or auto finds only damaged ones, which a fresh start would
            overwrite.
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
    if base.broadcast_from_rank_0(lambda: not path.exists()):  # a running run removed it: find the next one
        return find_checkpoint(resume, folder)
    raise base.UserError(f"--resume {resume}: {path.name} is damaged ({problem}); choose another")


def load_for_inference(
    settings: flags.Settings, state: TrainState, config: PretrainedConfig, checkpoint: Checkpoint
) -> Checkpoint:
    """Load a checkpoint without training, or with --average-checkpoints the mean of the newest ones up to it. Returns
    the loaded checkpoint: if a running run removes one of them meanwhile, that run's next one. Every rank calls this.

    Raises:
        UserError: it cannot be loaded; see also `load_mean`.
    """
    try:
        state.load(checkpoint)
        if settings.average_checkpoints:
            load_mean(settings, state, config, checkpoint.path)
    except base.UserError:
        newest = find_checkpoint(settings.resume, None)
        if newest is None or newest.path == checkpoint.path:
            raise
        return load_for_inference(settings, state, config, newest)
    job.print0(f"loaded     {checkpoint.path}, step {state.step:,}")
    if settings.average_checkpoints:
        job.print0(f"averaged   {state.describe_steps()}")
    return checkpoint


def load_mean(settings: flags.Settings, state: TrainState, config: PretrainedConfig, newest: pathlib.Path) -> None:
    """Load the mean weights of a run's newest --average-checkpoints complete checkpoints, summed in fp32, equal on any
    number of ranks. Every rank calls this.

    Args:
        config: the model's config, equal in all of them.
        newest: the checkpoint that --resume names, the last one of the mean.

    Raises:
        UserError: there are fewer checkpoints, or one is damaged, of another run or of another model.
    """
    count, flag = settings.average_checkpoints, f"--average-checkpoints {settings.average_checkpoints}"
    run_checkpoints = base.broadcast_from_rank_0(lambda: base.complete_checkpoints(newest.parent.parent))
    paths = run_checkpoints[: run_checkpoints.index(newest) + 1][-count:] if newest in run_checkpoints else []
    if len(paths) < count:
        has = f"{newest.parent.parent} has {base.counted(len(paths), 'complete checkpoint')}"
        raise base.UserError(
            f"{flag}: {has} up to {newest.name}; give a smaller number, or train with more --keep-checkpoints"
        )
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
    """Return this rank's parts of the model's floating-point tensors in checkpoints."""
    parts = {name: local_part(tensor) for name, tensor in saved_tensors(state.model).items()}
    return {name: part for name, part in parts.items() if part.is_floating_point()}


def find_newest(folder: pathlib.Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of the run in `folder`; None if it has saved none."""
    paths = base.broadcast_from_rank_0(lambda: list_checkpoints(folder))
    base.DAMAGED.difference_update(paths)  # they may have been repaired
    for path in reversed(paths):
        manifest, problem = verify_checkpoint(path)
        if not problem:
            return Checkpoint(path, manifest)
        job.print0(f"skipped    {path.name} is damaged: {problem}")
        base.DAMAGED.add(path)
    if paths:
        advice = "repair or copy back one of them, or choose another --run-name to start fresh"
        raise base.UserError(f"--resume auto: every checkpoint in {folder / 'checkpoints'} is damaged; {advice}", 1)
    before = base.broadcast_from_rank_0(lambda: base.read_config(folder).get("flags", {}).get("resume"))
    if before not in (None, "none", "auto"):
        advice = f"remove that folder and give --resume {before} again"
        problem = f"{folder} began with --resume {before} and has saved nothing"
        raise base.UserError(f"--resume auto: {problem}; {advice}")
    return None


def list_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the paths of a run's checkpoints. Raises UserError if they cannot be read, as there may be some."""
    try:
        return base.named_checkpoints(folder)
    except OSError as error:
        raise base.UserError(f"--resume auto: {error.filename} cannot be read ({error.strerror})", 1) from error


def verify_checkpoint(path: pathlib.Path) -> tuple[dict, str]:
    """Return (manifest, description of the damage or ""). Every rank reads its share of the files.

    Raises:
        UserError: another version of this program has written it.
    """
    manifest, problem = {}, ""
    try:
        manifest = base.read_manifest(path)
        for name, (size, checksum) in list(manifest["files"].items())[dist.get_rank() :: dist.get_world_size()]:
            problem = problem or find_damage(path, name, size, checksum)
    except OSError as error:
        problem = f"{pathlib.Path(error.filename or path).name}: {error.strerror}"  # without a name: a bad sector
    except base.OtherFormatError as error:
        raise base.UserError(f"--resume {path}: {error}") from error
    except ValueError as error:
        problem = str(error)
    for rank_problem in base.all_gather_objects(problem):
        if rank_problem:
            return manifest, rank_problem
    return manifest, ""


def find_damage(checkpoint: pathlib.Path, name: str, size: int, checksum: str) -> str:
    """Describe how a file differs from the manifest's size and checksum; "" if it does not."""
    if pathlib.PurePath(name).name != name:
        return f"{name} is outside the checkpoint"
    found_size = (checkpoint / name).stat().st_size
    if found_size != size:
        return f"{name} has {found_size:,} bytes instead of {size:,}"
    return "" if sha256(checkpoint / name) == checksum else f"{name} has changed"


def find_recorded_data(settings: flags.Args, checkpoint: Checkpoint | None) -> dict | None:
    """Return a run's record of its data, with the keys of a manifest: from the `checkpoint` of --resume, or from the
    config.json of --run-name or --config. None if these name no run."""
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
    """Return True if the checkpoint is in `folder`, whose run resumes then; in any other folder the run is a new one.
    Every rank calls this."""
    return base.broadcast_from_rank_0(
        lambda: checkpoint is not None and folder.resolve() in checkpoint.path.resolve().parents[:2]
    )


def check_finite(settings: flags.Settings, state: TrainState, checkpoint: Checkpoint | None) -> None:
    """Check loaded weights before they are used. Every rank calls this.

    Raises:
        UserError: loaded weights or optimizer states are NaN or infinite, or the loss is not finite.
    """
    if not checkpoint and settings.init == "random":
        return
    problem = state.describe_fault()
    if problem and checkpoint:
        advice = (
            "remove that folder, then --resume auto takes the previous one" if settings.trains() else "choose another"
        )
        raise base.UserError(f"--resume {checkpoint.path}: it {problem}; {advice}", exit_code=1)
    if problem:
        advice = "try other weights" if settings.precision == "fp32" else "try other weights or --precision fp32"
        raise base.UserError(f"--model {settings.model}: it {problem}; {advice}", exit_code=1)
