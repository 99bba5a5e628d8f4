"""Checkpoints: which one --resume names, and the flags recorded in it, read before torch is loaded. Their files are
verified when they are loaded."""

import json
import pathlib
from typing import Any

from harness import base
from harness.flags.settings import PRESETS, Args, flags_where
from harness.flags.sources import same_dataset

PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}  # of peft.LoraConfig


def checkpoint_folder(resume: str) -> pathlib.Path:
    """The checkpoint of --resume PATH: the path itself, or the newest in the folder of a run."""
    path = pathlib.Path(resume).expanduser()
    if (path / base.MANIFEST).exists():
        return path
    return base.newest_checkpoint(path) or path


def no_checkpoint(resume: str) -> str:
    """An error if --resume PATH has no checkpoint, with nearby ones; empty if it has one, even a damaged one."""
    path, checkpoint = pathlib.Path(resume).expanduser(), checkpoint_folder(resume)
    has_its_name = base.step_in_name(path) is not None or (path / base.MANIFEST).exists()
    if checkpoint.is_dir() and (checkpoint != path or has_its_name):
        return ""
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
        flags = base.read_manifest(checkpoint_folder(args.resume))["flags"]
    except (OSError, ValueError, KeyError):
        return {}
    names = flags_where("from_checkpoint", "model")
    is_same = same_dataset(args.explicit.get("dataset", flags["dataset"]), flags["dataset"])
    if is_same and (args.eval_interval or args.show_samples is not None):
        names += flags_where("from_checkpoint", "data")
        if "eval_steps" not in args.explicit:
            names.append("eval_sequences")
    found = {name: flags[name] for name in names if name in flags}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def adapter_folder(model: str) -> pathlib.Path | None:
    """The folder of --model if it has adapters of peft and no model; else None."""
    path = pathlib.Path(model).expanduser()
    has_adapters = (path / base.ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()
    return path if has_adapters and model not in PRESETS else None


def adapter_flags(model: str) -> dict[str, Any]:
    """The flags that train the adapters in --model; empty if it is no folder of adapters.

    Raises:
        UserError: from `read_adapter_config`.
    """
    if not adapter_folder(model):
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
    """The adapter_config.json of --model, with peft's default rank and alpha. `harness/model/lora.py` checks the fields
    that are not used before torch is loaded.

    Raises:
        UserError: it cannot be read, or a field is missing or of the wrong type.
    """
    try:
        config = PEFT_DEFAULTS | base.read_json(pathlib.Path(model).expanduser() / base.ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        problem = f"{base.ADAPTER_CONFIG} cannot be read ({base.first_line(error)})"
        raise base.UserError(f"--model {model}: {problem}") from error
    targets = config.get("target_modules")
    names = targets if isinstance(targets, list) else [targets]
    checks = {
        "peft_type": (config.get("peft_type") == "LORA", 'only "LORA" is supported'),
        "r": (is_count(config["r"]), "give a positive integer"),
        "lora_alpha": (is_count(config["lora_alpha"]), "give a positive integer"),
        "target_modules": (
            bool(names) and all(name and isinstance(name, str) for name in names),
            "give a list of names of linears, or a pattern",
        ),
        "base_model_name_or_path": (
            isinstance(config.get("base_model_name_or_path"), str | None),
            "give the folder or hub id of the base model",
        ),
        "revision": (isinstance(config.get("revision"), str | None), "give a revision of the base model"),
    }
    for field, (is_right, wanted) in checks.items():
        if not is_right:
            has = f"has {field} {json.dumps(config[field])}" if field in config else f"lacks {field}"
            raise base.UserError(f"--model {model}: {base.ADAPTER_CONFIG} {has}; {wanted}")
    return config


def is_count(value: Any) -> bool:
    """True for a positive integer from JSON, also written as 8.0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31 and value == int(value)
