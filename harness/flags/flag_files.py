"""Flag files: what --config reads, as words of a command line, and what a mistyped flag or name may have meant. Called
by `parser`. Independent of what a flag means."""

import argparse
import difflib
import json
import pathlib
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from harness.flags.removed import asks_for_nothing, describe_removal
from harness.flags.sources import words_of_stages, words_of_table

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
    """A flag that may be given several times, and collects its values; the first one replaces the default."""

    def __call__(self, parser, namespace, value, option_string=None):
        values = getattr(namespace, self.dest)
        if values is parser.get_default(self.dest):
            values = ()
        setattr(namespace, self.dest, (*values, value))


def suggest(name: str, known: Iterable[str]) -> str:
    """What a mistyped name may have meant, as the end of an error; empty where no name in `known` is near."""
    name, known = name.lower().replace("_", "-"), sorted(known)
    meanings = {own: own for own in known}
    for own, names_elsewhere in ELSEWHERE.items():
        if own in known:
            for other in names_elsewhere.split():
                meanings.setdefault(f"--{other}", own)
    near = []
    if name in meanings and name not in known:
        near = [meanings[name]]
    if not near and len(name) > 4:
        near = [own for own in known if own.startswith(name)]
    if not near:
        near = [meanings[other] for other in difflib.get_close_matches(name, meanings, 1, 0.7)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def describe_unknown(flag: str, known: Iterable[str]) -> str:
    """Why a flag is none of `known`: it was removed, or mistyped."""
    return describe_removal(flag) or f"no such flag{suggest(flag, known)}"


def read_flags(file: str, actions: dict[str, argparse.Action]) -> list[str]:
    """The flags in a file as words of a command line: TOML, with tables or without, or a run's config.json.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no flags, or a key or value that is no flag's.
    """
    path = pathlib.Path(file).expanduser()
    text = path.read_text(encoding="utf-8-sig")
    is_json = path.suffix == ".json"
    try:
        content = json.loads(text, object_pairs_hook=each_once) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no {'JSON' if is_json else 'TOML'} ({error})") from error
    pairs = flags_of_run(content) if is_json else flattened(content, actions)
    words = {}
    for key, value in pairs:
        flag = f"--{key.replace('_', '-')}"
        if asks_for_nothing(flag, value):
            continue
        if flag in words:
            raise ValueError(f"{key} stands there twice")
        words[flag] = as_words(key, flag, value, actions)
    return [word for part in words.values() for word in part]


def each_once(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object from its pairs; a ValueError for a key that stands there twice, of which json keeps the last."""
    content = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key} stands there twice")
        content[key] = value
    return content


def flattened(content: dict, known: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The keys and values of a table and of those in it, however deep they lie. A table `dataset` has sources under
    their names, an array of tables `mixture-stage` stages."""
    tables = [content]
    for table in tables:  # grows while it is read
        for key, value in table.items():
            flag = key.replace("_", "-")
            if flag == "dataset" and isinstance(value, dict) and not has_flags(value, known):
                yield key, words_of_table(value)
            elif isinstance(value, dict):
                tables.append(value)
            elif flag == "mixture-stage" and isinstance(value, list) and value and isinstance(value[0], dict):
                yield key, words_of_stages(value)
            else:
                yield key, value


def has_flags(table: dict, known: Iterable[str]) -> bool:
    """Whether a table only groups flags, under a title of its own."""
    return any(f"--{key.replace('_', '-')}" in known for key in table)


def flags_of_run(config: dict) -> list[tuple[str, Any]]:
    """The flags that the config.json of a run gives to another run: those that it was given itself, without what was
    that run's alone: its name, --resume and --export."""
    flags = config.get("given") if isinstance(config, dict) else None
    if not isinstance(flags, dict):
        problem = "it is not the config.json of a run: it has no flags that were given"
        raise ValueError(f"{problem} (a model's config.json goes to --model)")
    return [(name, value) for name, value in flags.items() if name not in ("run_name", "resume", "export")]


def as_words(key: str, flag: str, value: Any, actions: dict[str, argparse.Action]) -> list[str]:
    """A key of a file and its value as words of a command line; the parser checks numbers and choices.

    Raises:
        ValueError: there is no such flag, or the value is of another kind.
    """
    elsewhere = ("--config", "--help", "--version")
    settable = {name for name in actions if name not in elsewhere and not name.startswith("--no-")}
    if flag not in settable:
        raise ValueError(f"{key}: {describe_unknown(flag, settable)}")
    action = actions[flag]
    is_switch = action.nargs == 0
    if is_switch != isinstance(value, bool):
        wanted = "true or false" if is_switch else "a value"
        raise ValueError(f"{key}: {json.dumps(value, default=str)} where {wanted} belongs")
    if is_switch and value:
        return [flag]
    if is_switch:
        off = f"--no-{flag[2:]}"
        return [off] if off in actions else []
    if isinstance(value, list) and isinstance(action, Collect):
        return [f"{flag}={part}" for part in value]
    if isinstance(value, list) and action.nargs is None:
        if "," not in str(action.metavar):  # as that of --plan-gpus, N[,N...]
            raise ValueError(f"{key}: a list where one value belongs")
        value = ",".join(map(str, value))
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
