"""Files: the flags in a file of --config, as words of a command line."""

import argparse
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from harness.flags.commands import as_words
from harness.flags.names import no_such_flag
from harness.flags.settings import COLLECTED, as_flag, flags_where


def read_flags(file: str) -> list[tuple[str, Any]]:
    """Read (key, value) of each flag from TOML with or without tables, or from a run's config.json: its explicit flags
    that another run inherits.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file.
    """
    path = pathlib.Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8; save the file as UTF-8") from error
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        content = parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid {kind} ({error})") from error
    if kind == "JSON":
        content = content.get("given") if isinstance(content, dict) else None
        if not isinstance(content, dict):
            problem = "it is not the config.json of a run: it has no flags"
            raise ValueError(f"{problem} (a model's config.json goes to --model)")
        content = {name: value for name, value in content.items() if name not in flags_where("not_inherited", True)}
    return list(flat_items(content))


def flags_as_words(items: list[tuple[str, Any]], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The flags of a file as words of a command line.

    Raises:
        ValueError: an unknown key, one that is given twice, or a value of the wrong kind.
    """
    words: dict[str, list[str]] = {}
    for key, value in items:
        flag = as_flag(key)
        if flag in words:
            raise ValueError(f"{key} is given twice")
        words[flag] = to_words(key, flag, value, actions)
    return [word for part in words.values() for word in part]


def flat_items(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The items of a table and its subtables, without the names of these."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat_items(value)
        else:
            yield key, value


def to_words(key: str, flag: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    """A key and its value as words of a command line. The parser checks numbers and choices.

    Raises:
        ValueError: an unknown flag, a switch with a value, or another flag without one.
    """
    excluded = ("--config", "--help", "--version")
    settable = {name for name in actions if name not in excluded and not name.startswith("--no-")}
    switch = f"--{flag.removeprefix('--no-')}"
    if flag != switch and switch in settable and actions[switch].nargs == 0 and isinstance(value, bool):
        raise ValueError(f"{key}: unknown key; write {key[3:]} = {json.dumps(not value)}")
    if flag not in settable:
        raise ValueError(f"{key}: {no_such_flag(flag, settable)}")
    field, nargs = actions[flag].dest, actions[flag].nargs
    is_switch, takes_list = nargs == 0, nargs is not None or field in (*COLLECTED, "plan_gpus")
    for one in value if takes_list and isinstance(value, list) else [value]:
        if isinstance(one, bool) != is_switch or one is None or isinstance(one, list | dict):
            wanted = "true or false" if is_switch else "a value"
            raise ValueError(f"{key}: {json.dumps(one, default=str)} is not {wanted}")
    if value == []:
        raise ValueError(f"{key}: its value is empty; give one, or leave it out")
    return as_words({field: value})
