"""Files of flags: what --config reads, as words of a command line."""

import argparse
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from harness.flags.commands import as_words
from harness.flags.names import no_such_flag
from harness.flags.settings import as_flag, flags_where


def read_flags(file: str, actions: Mapping[str, argparse.Action]) -> list[str]:
    """The flags in a file as words of a command line: TOML, with tables or without, or a run's config.json, of which
    those that were given count, without what was that run's alone.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no flags, or a key or value that is no flag's.
    """
    path = pathlib.Path(file).expanduser()
    text = path.read_text(encoding="utf-8-sig")
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        content = parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no {kind} ({error})") from error
    if kind == "JSON":
        content = content.get("given") if isinstance(content, dict) else None
        if not isinstance(content, dict):
            problem = "it is not the config.json of a run: it has no flags that were given"
            raise ValueError(f"{problem} (a model's config.json goes to --model)")
        content = {name: value for name, value in content.items() if name not in flags_where("not_inherited", True)}
    words: dict[str, list[str]] = {}
    for key, value in values_in(content):
        flag = as_flag(key)
        if flag in words:
            raise ValueError(f"{key} stands there twice")
        words[flag] = words_of(key, flag, value, actions)
    return [word for part in words.values() for word in part]


def values_in(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values of a table and of those in it, however deep they lie: a name of a table says nothing."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from values_in(value)
        else:
            yield key, value


def words_of(key: str, flag: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    """A key of a file and its value as words of a command line; the parser checks numbers and choices.

    Raises:
        ValueError: there is no such flag, or a switch has a value, or another flag none.
    """
    elsewhere = ("--config", "--help", "--version")
    settable = {name for name in actions if name not in elsewhere and not name.startswith("--no-")}
    switch = f"--{flag.removeprefix('--no-')}"
    if flag != switch and switch in settable and actions[switch].nargs == 0 and isinstance(value, bool):
        raise ValueError(f"{key}: no such key; write {key[3:]} = {json.dumps(not value)}")
    if flag not in settable:
        raise ValueError(f"{key}: {no_such_flag(flag, settable)}")
    is_switch = actions[flag].nargs == 0
    if is_switch != isinstance(value, bool):
        wanted = "true or false" if is_switch else "a value"
        raise ValueError(f"{key}: {json.dumps(value, default=str)} where {wanted} belongs")
    if value is False and f"--no-{flag[2:]}" not in actions:  # it is off by default, and has no word for that
        return []
    return as_words({actions[flag].dest: value})
