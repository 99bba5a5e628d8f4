"""Commands: which flags a command line names, a command line without some of them, and the one place that makes a
command to be pasted into a shell. Independent of what a flag means."""

import pathlib
import shlex
from collections.abc import Iterable, Mapping


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, and no value such as "-- Well, she said."."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def given(words: Iterable[str]) -> set[str]:
    """The fields of the settings whose flags stand in a command line."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in words if is_flag(word)}
    return names | {name.removeprefix("no_") for name in names}


def without(words: Iterable[str], *fields: str) -> list[str]:
    """A command line without the flags of these fields of the settings, and without their values."""
    left, kept = [], True
    for word in words:
        if is_flag(word):
            kept = not given([word]) & {*fields}
        if kept:
            left.append(word)
    return left


def with_value(flag: str, value: object) -> list[str]:
    """A flag and its value as words; as one word where the value would be taken for a flag."""
    text = str(value)
    if text.startswith("-"):
        return [f"{flag}={text}"]
    return [flag, text]


def as_words(changes: Mapping[str, object]) -> list[str]:
    """Fields of the settings and their values as words of a command line."""
    words = []
    for field, value in changes.items():
        name = field.replace("_", "-")
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words += with_value(f"--{name}", value)
    return words


def as_flags(changes: Mapping[str, object]) -> str:
    """Fields of the settings and their values as flags, quoted for the shell."""
    return shlex.join(as_words(changes))


def to_paste(launcher: str, words: Iterable[str] = (), **changes: object) -> str:
    """A command for the shell: the launcher with its script, quoted already, then flags as words, then further
    settings by their fields."""
    parts = launcher, shlex.join(words), as_flags(changes)
    return " ".join(part for part in parts if part)


def flags_of_run(settings, folder: pathlib.Path, *given_anew: str) -> list[str]:
    """The flags of the run in `folder`, for a command that goes on with it.

    Its config.json has all but --export. Where there is no config.json, or --config would be no shorter, they are the
    flags of the command line. Left out are the fields in `given_anew` and those that say which run it is.
    """
    typed = without(settings.argv, "resume", "run_name", *given_anew)
    config = folder / "config.json"
    from_file = with_value("--config", config)
    if settings.export and "export" not in given_anew:
        from_file += with_value("--export", settings.export)
    is_shorter = sum(map(len, from_file)) < sum(map(len, typed))
    if is_shorter and config.exists():
        return from_file
    return typed
