"""Checkpoints, as far as flags need them before torch is loaded: which one --resume means, and the flags of the run in
it. Whether its files are undamaged is found out when it is loaded."""

import json
import pathlib
from typing import Any

from harness import base
from harness.flags.settings import PRESETS, Args, flags_where
from harness.flags.sources import same_dataset

PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}  # of a LoraConfig, for an adapter_config.json without them


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint that --resume PATH means: itself, or the newest of a run's folder."""
    path = pathlib.Path(resume).expanduser()
    if (path / base.MANIFEST).exists():
        return path
    return base.newest_checkpoint(path) or path


def no_checkpoint(resume: str) -> str:
    """Why there is no checkpoint at --resume PATH, and what could be resumed instead; empty where there is one, even a
    damaged one."""
    path, checkpoint = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    is_named_as_one = base.step_in_name(path) is not None or (path / base.MANIFEST).exists()
    if checkpoint.is_dir() and (checkpoint != path or is_named_as_one):
        return ""
    problem = "it holds no checkpoint" if path.is_dir() else "no such folder"
    if path.parent.name == "checkpoints":
        others = set(base.complete_checkpoints(path.parent.parent))
    else:
        folders = {folder.parent for folder in (*path.parent.glob("*/checkpoints"), *path.glob("*/checkpoints"))}
        others = {folder for folder in folders if base.newest_checkpoint(folder)}
    if others:
        return f"{problem}; what can be resumed is {', '.join(map(str, sorted(others)[-3:]))}"
    return f"{problem}, and no checkpoint is beside it; a run saves some with --checkpoint-interval"


def flags_of_checkpoint(settings: Args) -> dict[str, Any]:
    """The flags that a run of no step takes from the checkpoint of its --resume where none is given: those of the
    model, for an evaluation or --show-samples those of the data, unless another --dataset is given, and for samples
    the chat template. None where the checkpoint cannot be read, which is reported when it is loaded."""
    try:
        flags = base.read_manifest(checkpoint_folder(settings.resume))["flags"]
    except (OSError, ValueError, KeyError):
        return {}
    names = flags_where("from_checkpoint", "model")
    is_same = same_dataset(settings.explicit.get("dataset", flags["dataset"]), flags["dataset"])
    if is_same and (settings.eval_interval or settings.show_samples is not None):
        names += flags_where("from_checkpoint", "data")
        if "eval_steps" not in settings.explicit:
            names.append("eval_windows")
    found = {name: flags[name] for name in names if name in flags}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def folder_of_adapters(model: str) -> pathlib.Path | None:
    """The folder that --model names where it is one of peft's, adapters without a model; else None."""
    path = pathlib.Path(model).expanduser()
    is_one = (path / base.ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    return path if is_one and model not in PRESETS else None


def flags_of_adapters(model: str) -> dict[str, Any]:
    """The flags that train on the adapters in a folder of peft's, where --model names one; none for anything else.

    Raises:
        UserError: as `read_adapter_config` does.
    """
    if not folder_of_adapters(model):
        return {}
    config = read_adapter_config(model)
    targets = config["target_modules"]
    return {
        "init": "pretrained",
        "lora_rank": int(config["r"]),
        "lora_alpha": int(config["lora_alpha"]),
        "lora_targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
    }


def read_adapter_config(model: str) -> dict[str, Any]:
    """The adapter_config.json of a folder of adapters that --model names, with peft's defaults where fields of numbers
    are missing.

    Raises:
        UserError: it cannot be read, or a field is missing or of another kind.
    """
    try:
        config = PEFT_DEFAULTS | base.read_json(pathlib.Path(model).expanduser() / base.ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        problem = f"{base.ADAPTER_CONFIG} cannot be read ({base.first_line(error)})"
        raise base.UserError(f"--model {model}: {problem}") from error
    targets = config.get("target_modules")
    names = targets if isinstance(targets, list) else [targets]
    checks = {
        "peft_type": (config.get("peft_type") == "LORA", '"LORA" alone is trained here'),
        "r": (is_count(config["r"]), "it is a positive integer"),
        "lora_alpha": (is_count(config["lora_alpha"]), "it is a positive integer"),
        "target_modules": (
            bool(names) and all(name and isinstance(name, str) for name in names),
            "it is a list of the names of the linears that have adapters, or a pattern of them",
        ),
        "base_model_name_or_path": (
            isinstance(config.get("base_model_name_or_path"), str | None),
            "it is the folder or hub id of the model that the adapters are for",
        ),
        "revision": (isinstance(config.get("revision"), str | None), "it is the revision of the base on the hub"),
    }
    for field, (is_right, wanted) in checks.items():
        if not is_right:
            has = f"has {field} {json.dumps(config[field])}" if field in config else f"lacks {field}"
            raise base.UserError(f"--model {model}: {base.ADAPTER_CONFIG} {has}; {wanted}")
    return config


def is_count(value: Any) -> bool:
    """Whether a value of a JSON file is a positive integer, 8.0 too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31 and value == int(value)
