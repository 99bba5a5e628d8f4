"""Resume: which checkpoint --resume means, and the flags of the model in it."""

import contextlib
import difflib
import os
import pathlib

from harness.base import saved
from harness.flags.sources import same_dataset


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint that --resume PATH means: itself, or the newest of a run's folder."""
    path = pathlib.Path(resume).expanduser()
    if os.path.exists(path / saved.MANIFEST):
        return path
    return saved.newest(path) or path


def no_checkpoint(resume: str) -> str:
    """Why there is no checkpoint at --resume PATH, and what could be resumed instead; empty where there is one, even a
    damaged one."""
    path, checkpoint = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    if checkpoint.is_dir():
        is_named_as_one = saved.step_of(path) is not None or (path / saved.MANIFEST).exists()
        if checkpoint != path or is_named_as_one:
            return ""
    problem = "it holds no checkpoint" if path.is_dir() else "no such folder"
    resumable = resumable_beside(path)
    if resumable:
        return f"{problem}; what can be resumed is {', '.join(map(str, resumable))}"
    runs = sorted(str(metrics.parent) for metrics in path.parent.glob("*/metrics.jsonl"))[:3]
    if runs:
        return f"{problem}; {', '.join(runs)} saved none: --checkpoint-interval does"
    return f"{problem}; no run is beside it"


def resumable_beside(path: pathlib.Path) -> list[pathlib.Path]:
    """Up to three runs beside or below a path, or checkpoints beside it, the nearest in name first."""
    if path.parent.name == "checkpoints":
        others = set(saved.complete(path.parent.parent))
    else:
        folders = [*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints")]
        others = {folder.parent for folder in folders if saved.newest(folder.parent)}

    def likeness(other: pathlib.Path) -> float:
        return difflib.SequenceMatcher(None, path.name, other.name).ratio()

    return sorted(others, key=likeness, reverse=True)[:3]


def flags_of_checkpoint(
    resume: str, evaluates: bool, dataset: str | tuple[str, ...] | None, trains: bool, averages: bool
) -> dict:
    """The flags of the model in a checkpoint, for an evaluation also of its attention and of what was held out, unless
    `dataset` was given and is another, with `trains` all that decides what a step trains on, with `averages` the
    average of its weights; none where the checkpoint cannot be read, which is reported later."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        flags = saved.read_manifest(checkpoint_folder(resume))["flags"]
        names = "model init tokenizer dataset sequence_length precision fp8_recipe fp8_emulate optimizer"
        if evaluates:
            names += " document_mask"
        if averages:
            names += " ema"
        if trains:
            names += " document_mask eval_interval streaming batch_size gradient_accumulation_steps mixture_stage"
        of_data = dataset is None or same_dataset(flags["dataset"], dataset)
        if evaluates and of_data:
            names += " streaming batch_size eval_steps"
        if (evaluates or trains) and of_data:
            names += " dataset_config dataset_split eval_split text_field skip_bad_records seed"
            names += " packing chat_template chat_loss"
        found = {name: flags[name] for name in names.split() if name in flags}  # older checkpoints lack the newer flags
        if isinstance(found["dataset"], list):  # JSON has no tuples
            found["dataset"] = tuple(found["dataset"])
        return found
    return {}
