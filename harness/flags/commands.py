"""Commands: a command line taken apart and put together again, to be pasted: which flags stand in it, which twice, it
without some of them, a flag with its value, quoted for the shell. Called by `settings` and by whatever prints a
command. Independent of what a flag means."""

import pathlib
import shlex
from collections.abc import Iterable


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, and no value such as "-- Well, she said."."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def given(words: Iterable[str]) -> set[str]:
    """The fields of the settings whose flags stand in a command line."""
    names = {word[2:].partition("=")[0].replace("-", "_") for word in words if is_flag(word)}
    return names | {name.removeprefix("no_") for name in names}


def without(words: Iterable[str], *fields: str) -> list[str]:
    """A command line without the flags of these fields of the settings, and what stands behind them."""
    left, kept = [], True
    for word in words:
        if is_flag(word):
            kept = not given([word]) & {*fields}
        if kept:
            left.append(word)
    return left


def with_value(flag: str, value: object) -> list[str]:
    """A flag and its value as words; as one word where the value would be taken for a flag."""
    value = str(value)
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def flags_of_run(settings, folder: pathlib.Path, *said_anew: str) -> list[str]:
    """The flags of the run in `folder`, for a command that goes on with it: its config.json has all but --export; where
    there is none, or it would be no shorter, they are those of its command line. Without the flags `said_anew`, and
    without those that say which run it is."""
    argv, config = without(settings.argv, "resume", "run_name", *said_anew), folder / "config.json"
    from_file = with_value("--config", config)
    if settings.export and "export" not in said_anew:
        from_file += with_value("--export", settings.export)
    shorter = sum(map(len, from_file)) < sum(map(len, argv))
    return from_file if shorter and config.exists() else argv


def to_paste(words: Iterable[str]) -> str:
    """A command for the shell, from words that may hold blanks and quotes."""
    return shlex.join(words)
