"""Which checkpoint --resume means, and what its flags say of the model."""

import contextlib
import difflib
import os
import pathlib

from harness.base import saved


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint that --resume PATH means: itself, or the newest of a run's folder."""
    path = pathlib.Path(resume).expanduser()
    return path if os.path.exists(path / saved.MANIFEST) else saved.newest(path) or path


def no_checkpoint(resume: str) -> str:
    """Why nothing can go on from --resume PATH, and what is there to go on from; empty where a checkpoint is, whole or
    not."""
    path, found = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    if found.is_dir() and (found != path or saved.step_of(path) is not None or (path / saved.MANIFEST).exists()):
        return ""
    others = {
        run.parent for runs in (path.parent, path) for run in runs.glob("*/checkpoints") if saved.newest(run.parent)
    }
    if path.parent.name == "checkpoints":
        others = set(saved.complete(path.parent.parent))
    near = sorted(others, key=lambda other: -difflib.SequenceMatcher(None, path.name, other.name).ratio())[:3]
    runs = sorted(str(metrics.parent) for metrics in path.parent.glob("*/metrics.jsonl"))[:3]
    there = f"{', '.join(runs)} saved none: --checkpoint-interval does" if runs else "no run is beside it"
    if near:
        there = f"what can be resumed is {', '.join(map(str, near))}"
    return f"{'it holds no checkpoint' if path.is_dir() else 'no such folder'}; {there}"


def flags_of_checkpoint(resume: str, evaluates: bool, of_data: bool) -> dict:
    """The flags that say what model a checkpoint holds, for an evaluation how it attends, and with `of_data` which text
    was held out; none if it cannot be read, which is reported later."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        flags = saved.read_manifest(checkpoint_folder(resume))["flags"]
        names = "model init tokenizer dataset sequence_length precision fp8_recipe fp8_emulate optimizer"
        if evaluates:
            names += " document_mask"
        if evaluates and of_data:
            names += " dataset_config dataset_split eval_split text_field skip_bad_records seed"
        return {name: flags[name] for name in names.split()}
    return {}
