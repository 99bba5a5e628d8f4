"""Checkpoints: which one --resume names, and the flags recorded in it, read before torch is loaded. Their files are
verified when they are loaded."""

import pathlib
from typing import Any

from harness import base
from harness.flags.settings import LENGTHS, Args, flags_where
from harness.flags.sources import same_dataset


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint of --resume PATH: the path itself, or the newest in the folder of a run."""
    path = pathlib.Path(resume).expanduser()
    if (path / base.MANIFEST).exists():
        return path
    return base.newest_checkpoint(path) or path


def no_checkpoint(resume: str) -> str:
    """An error if --resume PATH cannot be read or has no checkpoint, with nearby ones; empty if it names one, even a
    damaged one."""
    try:
        return find_no_checkpoint(resume)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"


def find_no_checkpoint(resume: str) -> str:
    path, checkpoint = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    has_its_name = base.step_in_name(path) is not None or (path / base.MANIFEST).exists()
    if checkpoint.is_dir() and (checkpoint != path or has_its_name):
        return ""
    if damaged := base.named_checkpoints(path):
        try:
            base.read_manifest(damaged[-1])
            problem = "it is a link"
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
        return f"all its checkpoints are damaged ({damaged[-1].name}: {problem}); copy one back, or give another run"
    problem = "it holds no checkpoint" if path.is_dir() else "no such folder"
    if path.parent.name == "checkpoints":
        others = set(base.complete_checkpoints(path.parent.parent))
    else:
        folders = {folder.parent for folder in (*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints"))}
        others = {folder for folder in folders if base.newest_checkpoint(folder)}
    if others:
        return f"{problem}; checkpoints nearby: {', '.join(map(str, sorted(others)[-3:]))}"
    return f"{problem}, and there is no checkpoint nearby; --checkpoint-interval saves some"


def checkpoint_flags(args: Args) -> dict[str, Any]:
    """The flags that an evaluation, export or --show-samples takes from its checkpoint by default: those of the model,
    and for evaluations and --show-samples those of the data, unless --dataset is another one. Empty if the checkpoint
    cannot be read, which is an error when it is loaded."""
    try:
        manifest = base.read_manifest(checkpoint_folder(args.resume))
        flags, given = manifest["flags"], manifest.get("given", {})
    except (OSError, ValueError, KeyError):
        return {}
    names = flags_where("from_checkpoint", "model")
    is_same = same_dataset(args.explicit.get("dataset", flags["dataset"]), flags["dataset"])
    if is_same and (args.eval_interval or args.show_samples is not None):
        names += flags_where("from_checkpoint", "data")
        if "eval_steps" not in args.explicit:
            names.append("eval_sequences")
    found = {name: flags[name] for name in names if name in flags}
    if "text_field" in found and "text_field" in given:  # a typed one is read in place of conversations
        found["explicit"] = {"text_field": given["text_field"], **args.explicit}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def resumed_flags(args: Args) -> dict[str, Any]:
    """The explicit flags that a run with --resume PATH takes from the checkpoint's run: those of model, data,
    optimization and kept checkpoints that are not in `args.explicit`. Empty if the checkpoint cannot be read, as
    above."""
    if args.resume in ("none", "auto") or not args.trains():
        return {}
    try:
        given = base.read_manifest(checkpoint_folder(args.resume))["given"]
    except (OSError, ValueError, KeyError):
        return {}
    names = {"demo", *(name for kind in ("model", "data", "training") for name in flags_where("from_checkpoint", kind))}
    names -= args.explicit.keys()
    if args.explicit.keys() & {*LENGTHS}:  # one of them replaces the other
        names -= {*LENGTHS}
    if args.explicit.get("precision", "fp8") != "fp8":
        names -= {"fp8_recipe", "fp8_emulate"}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in names}
