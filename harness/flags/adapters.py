"""Adapters: the flags that train a folder of peft's adapters, read from its adapter_config.json before torch is loaded.
`harness/model/lora.py` checks its other fields."""

import json
import pathlib
from typing import Any

from harness import base
from harness.flags.settings import PRESETS

PEFT_DEFAULTS = {"r": 8, "lora_alpha": 8}  # of peft.LoraConfig


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
    """The adapter_config.json of --model, with peft's default rank and alpha.

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
