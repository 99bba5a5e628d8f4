"""Files of flags: what --config reads, as words of a command line. Called by `parser`."""

import argparse
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from harness.flags.flag_types import Collect
from harness.flags.names import suggest
from harness.flags.settings import OF_ONE_RUN
from harness.flags.sources import words_of_stages, words_of_table


def read_flags(file: str, actions: Mapping[str, argparse.Action]) -> list[str]:
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
    words: dict[str, list[str]] = {}
    for key, value in given_to_run(content) if is_json else flattened(content, actions):
        flag = f"--{key.replace('_', '-')}"
        if flag in words:
            raise ValueError(f"{key} stands there twice")
        words[flag] = words_of(key, flag, value, actions)
    return [word for part in words.values() for word in part]


def each_once(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object from its pairs; a ValueError for a key that stands there twice, of which json keeps the last."""
    content = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key} stands there twice")
        content[key] = value
    return content


def given_to_run(config: dict) -> list[tuple[str, Any]]:
    """The flags that the config.json of a run gives to another run: those that it was given itself, without what was
    that run's alone."""
    flags = config.get("given") if isinstance(config, dict) else None
    if not isinstance(flags, dict):
        problem = "it is not the config.json of a run: it has no flags that were given"
        raise ValueError(f"{problem} (a model's config.json goes to --model)")
    return [(name, value) for name, value in flags.items() if name not in OF_ONE_RUN]


def flattened(content: dict, known: Mapping[str, argparse.Action]) -> Iterator[tuple[str, Any]]:
    """The keys and values of a table and of those in it, however deep they lie. A table `dataset` has sources under
    their names, unless it holds flags, and an array of tables `mixture-stage` stages."""
    tables = [content]
    for table in tables:  # grows while it is read
        for key, value in table.items():
            flag = key.replace("_", "-")
            is_table = isinstance(value, dict)
            holds_flags = is_table and any(f"--{name.replace('_', '-')}" in known for name in value)
            if flag == "dataset" and is_table and not holds_flags:
                yield key, words_of_table(value)
            elif is_table:
                tables.append(value)
            elif flag == "mixture-stage" and isinstance(value, list) and value and isinstance(value[0], dict):
                yield key, words_of_stages(value)
            else:
                yield key, value


def words_of(key: str, flag: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    """A key of a file and its value as words of a command line; the parser checks numbers and choices.

    Raises:
        ValueError: there is no such flag, or the value is of another kind.
    """
    elsewhere = ("--config", "--help", "--version")
    settable = {name for name in actions if name not in elsewhere and not name.startswith("--no-")}
    if flag not in settable:
        raise ValueError(f"{key}: no such flag{suggest(flag, settable)}")
    action = actions[flag]
    is_switch = action.nargs == 0
    if is_switch != isinstance(value, bool):
        wanted = "true or false" if is_switch else "a value"
        raise ValueError(f"{key}: {json.dumps(value, default=str)} where {wanted} belongs")
    if is_switch:
        word = flag if value else f"--no-{flag[2:]}"
        return [word] if word in actions else []  # a switch that is off by default has no word for that
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    if isinstance(action, Collect):
        return [f"{flag}={part}" for part in value]
    if action.nargs is not None:
        return [flag, *map(str, value)]
    if "," in str(action.metavar):  # as that of --plan-gpus, N[,N...]
        return [f"{flag}={','.join(map(str, value))}"]
    raise ValueError(f"{key}: a list where one value belongs")
