"""Checkpoints: which one --resume names, and the flags recorded in it, read before torch is loaded. Files other than
the manifest are verified when they are loaded."""

import pathlib
from typing import Any

from harness import base
from harness.flags.settings import Args, flags_where
from harness.flags.sources import lacks_sources, same_dataset


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint of --resume PATH: the path itself, or the newest in the folder of a run."""
    path = pathlib.Path(resume).expanduser()
    if (path / base.MANIFEST).exists():
        return path
    return base.newest_checkpoint(path) or path


def no_checkpoint(resume: str) -> str:
    """An error if --resume PATH cannot be read or has no checkpoint, with nearby ones, or if the checkpoint's manifest
    is damaged; empty otherwise."""
    try:
        return find_no_checkpoint(resume)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"


def find_no_checkpoint(resume: str) -> str:
    path, checkpoint = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    if checkpoint != path:  # the newest one of a run, with an intact manifest
        return ""
    if path.is_dir() and (base.step_in_name(path) is not None or (path / base.MANIFEST).exists()):
        problem = manifest_problem(path)
        return problem and f"{path.name} cannot be used ({problem}); choose another"
    damaged = base.named_checkpoints(path) if path.is_dir() else []
    if damaged:
        problem = manifest_problem(damaged[-1]) or "it is a link"
        return f"all its checkpoints are damaged ({damaged[-1].name}: {problem}); copy one back, or give another run"
    problem = "it holds no checkpoint" if path.is_dir() else "no such folder"
    if path.parent.name == "checkpoints":
        others = set(base.complete_checkpoints(path.parent.parent))
    else:
        folders = {folder.parent for folder in (*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints"))}
        folders.add(path.parent)  # PATH may be a folder of a run
        others = {folder for folder in folders if base.newest_checkpoint(folder)}
    if others:
        return f"{problem}; checkpoints nearby: {', '.join(map(str, sorted(others)[-3:]))}"
    return f"{problem}, and there is no checkpoint nearby; --checkpoint-interval saves some"


def manifest_problem(checkpoint: pathlib.Path) -> str:
    """The damage of a checkpoint's manifest, or its other format; empty if it can be used."""
    try:
        base.read_manifest(checkpoint)
    except OSError as error:
        return f"{base.MANIFEST}: {error.strerror}"
    except ValueError as error:
        return str(error)
    return ""


def checkpoint_flags(args: Args) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the flags that an evaluation, export, plan or --show-samples takes from its checkpoint by default: those of the
    model, and for evaluations and --show-samples those of the data, unless --dataset is another one; a --text-field
    among them that was explicit, as such a one is read in place of conversations). Empty if the checkpoint cannot be
    read, which `no_checkpoint` reports."""
    try:
        manifest = base.read_manifest(checkpoint_folder(args.resume))
        flags, given = manifest["flags"], manifest.get("given", {})
    except (OSError, ValueError, KeyError):
        return {}, {}
    names = flags_where("from_checkpoint", "model")
    is_same = same_dataset(args.explicit.get("dataset", flags["dataset"]), flags["dataset"])
    if is_same and (args.eval_interval or args.show_samples is not None):
        names += flags_where("from_checkpoint", "data")
        if "eval_steps" not in args.explicit:
            names.append("eval_sequences")
    found = {name: flags[name] for name in names if name in flags}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return found, {name: found[name] for name in ("text_field",) if name in found and name in given}


def resumed_flags(args: Args) -> dict[str, Any]:
    """The explicit flags of the checkpoint's run that a run or plan with --resume PATH takes where `args.explicit` has
    no others: those of model, data, optimization and kept checkpoints. Empty if the checkpoint cannot be read, as
    above."""
    if args.resume in ("none", "auto") or not (args.trains() or args.plan):
        return {}
    try:
        manifest = base.read_manifest(checkpoint_folder(args.resume))
        given = manifest["given"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"demo", *(name for kind in ("model", "data", "training") for name in flags_where("from_checkpoint", kind))}
    if "dataset" in args.explicit and lacks_sources(args.explicit["dataset"], manifest["flags"]["dataset"]):
        names -= {"mixture_stage", "dataset_config", "text_field", "dataset_split"}  # of the run's sources
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in names}
