"""Flag files: what --config reads, as words of a command line, and what a mistyped flag or name may have meant. Called
by `settings`. It does not know what a flag means."""

import argparse
import contextlib
import dataclasses
import difflib
import json
import pathlib
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from harness.flags.removed import asks_for_nothing, describe_removal

ELSEWHERE = {  # what other trainers call these flags
    "--activation-checkpointing": "gradient-checkpointing",
    "--batch-size": "per-device-train-batch-size device-batch-size micro-batch-size local-batch-size",
    "--checkpoint-interval": "save-steps save-interval save-every",
    "--dataset": "dataset-name data train-file",
    "--dataset-config": "dataset-config-name",
    "--eval-interval": "eval-every",
    "--keep-checkpoints": "save-total-limit",
    "--log-interval": "logging-steps log-every",
    "--log-with": "report-to wandb tensorboard",
    "--lr": "learning-rate max-lr",
    "--model": "model-name-or-path model-name pretrained-model-name-or-path",
    "--num-steps": "max-steps steps max-iters num-iterations epochs num-epochs num-train-epochs",
    "--optimizer": "optim",
    "--output-dir": "out-dir output",
    "--precision": "bf16 fp8 fp16 mixed-precision dtype",
    "--resume": "resume-from-checkpoint",
    "--sequence-length": "seq-len max-seq-len max-seq-length block-size context-length",
    "--text-field": "text-column text-column-name",
    "--zero-stage": "fsdp sharding-strategy",
}


class Collect(argparse.Action):
    """A flag that may stand there several times, each with a value that counts; a default goes with the first."""

    def __call__(self, parser, namespace, value, option_string=None):
        before, default = getattr(namespace, self.dest), parser.get_default(self.dest)
        setattr(namespace, self.dest, (value,) if before is default else (*before, value))


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty where nothing known is near."""
    name, known = name.lower().replace("_", "-"), sorted(known)
    near = [own for own, others in ELSEWHERE.items() if name[2:] in others.split() and own in known]
    near = near or [other for other in known if other.startswith(name) and len(name) > 4]
    alike = {f"--{other}": own for own, others in ELSEWHERE.items() for other in others.split() if own in known}
    alike |= {other: other for other in known}
    near = near or [alike[other] for other in difflib.get_close_matches(name, alike, 1, 0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def describe_unknown(flag: str, known: Iterable[str]) -> str:
    """Why a flag is none of `known`: it was removed, or mistyped."""
    return describe_removal(flag) or f"no such flag{suggest(flag, known)}"


def read_flags(file: str, actions: dict[str, argparse.Action], fields: tuple[dataclasses.Field, ...]) -> list[str]:
    """The words of a command line that say what a file says: TOML, whose tables group keys as they like, or the
    config.json of a run.

    Raises:
        OSError, ValueError: the file cannot be read; what is wrong with it, or with which key.
    """
    path, words = pathlib.Path(file).expanduser(), {}
    text, run = path.read_text(encoding="utf-8-sig"), path.suffix == ".json"
    try:
        content = json.loads(text, object_pairs_hook=each_once) if run else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no {'JSON' if run else 'TOML'} ({error})") from error
    pairs = flags_of_run(content, fields) if run else flattened(content)
    for key, value in pairs:
        flag = f"--{key.replace('_', '-')}"
        if asks_for_nothing(flag, value):
            continue
        if flag in words:
            raise ValueError(f"{key} stands there twice")
        words[flag] = as_words(key, flag, value, actions)
    return [word for part in words.values() for word in part]


def each_once(pairs: list[tuple[str, Any]]) -> dict:
    """An object of JSON, which would otherwise keep the last value of a key that stands there twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands there twice")
    return content


def flattened(content: dict) -> Iterator[tuple[str, Any]]:
    """The keys and values of a table and of those in it, however deep they lie."""
    tables = [content]
    for table in tables:
        for key, value in table.items():
            if isinstance(value, dict):
                tables.append(value)
            else:
                yield key, value


def flags_of_run(config: dict, fields: tuple[dataclasses.Field, ...]) -> list[tuple[str, Any]]:
    """What the config.json of a run asks of another run. Left out is what was that run's alone: its name, what it went
    on from, what it exported; and what the other one decides by itself: defaults, and what followed from them."""
    flags = config.get("flags") if isinstance(config, dict) else None
    if not isinstance(flags, dict):
        raise ValueError("it is not the config.json of a run: it has no flags (a model's config.json goes to --model)")
    own = {"demo", "config", "run_name", "resume", "export"}
    own |= {field.name for field in fields if "help" not in field.metadata}  # are no flags
    defaults = {field.name: list(d) if isinstance(d := field.default, tuple) else d for field in fields}
    with contextlib.suppress(KeyError, TypeError):
        defaults |= {"fp8_recipe": "tensorwise", "sequence_length": 8192, "warmup_steps": flags["num_steps"] // 20}
        flags = flags | {"gradient_accumulation_steps": flags["given_accumulation"]}
    if any(str(word).startswith("--text-field") for word in flags.get("argv") or ()):
        del defaults["text_field"]  # it is not the default where it was given: it wins over a column input_ids
    asked = ((name, value) for name, value in flags.items() if name not in own and value is not None)
    return [(name, value) for name, value in asked if name not in defaults or value != defaults[name]]


def as_words(key: str, flag: str, value: Any, actions: dict[str, argparse.Action]) -> list[str]:
    """A key of a file and its value as words of a command line, whose parser looks at numbers and choices."""
    settable = {name for name in actions if name not in ("--config", "--help", "--version") and name[:5] != "--no-"}
    if flag not in settable:
        raise ValueError(f"{key}: {describe_unknown(flag, settable)}")
    action, switch = actions[flag], actions[flag].nargs == 0
    if switch != isinstance(value, bool):
        wanted = "true or false" if switch else "a value"
        raise ValueError(f"{key}: {json.dumps(value, default=str)} where {wanted} belongs")
    if switch:
        off = f"--no-{flag[2:]}"
        return [flag] if value else [off] * (off in actions)
    if isinstance(value, list) and isinstance(action, Collect):
        return [f"{flag}={part}" for part in value]
    if isinstance(value, list) and action.nargs is None:
        if "," not in str(action.metavar):  # as that of --plan-gpus, N[,N...]
            raise ValueError(f"{key}: a list where one value belongs")
        value = ",".join(map(str, value))
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]
