"""Types of flags: what argparse makes of a value, and which values it refuses."""

import argparse
import math
import os
import sys

MAX_WORLD = 2**20  # ranks that are planned for
MAX_SEQUENCES = 1_000_000  # of a microbatch


def number(kind: type, least: float | None = None, below: float = math.inf):
    """An argparse type: a number in [least, below), by default a positive one; a whole one fits 32 bits."""
    below = min(below, 2**31) if kind is int and below == math.inf else below

    def parse(text: str):
        value = kind(text)
        if not (value > 0 if least is None else value >= least) or value >= below:
            wanted = "a positive number" if least is None else f"at least {least}"
            limit = f" and below {below}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}{limit}")
        return value

    parse.__name__ = kind.__name__
    return parse


def text(value: str) -> str:
    """An argparse type: a text that says something, and that files and other programs take."""
    if not value.strip():
        raise argparse.ArgumentTypeError("its value is empty; give one, or leave the flag out")
    if "\0" in value:
        raise argparse.ArgumentTypeError("its value holds a NUL byte; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        problem = f"{value!a} holds bytes that are not {encoding}; rename it, or set PYTHONUTF8=1 where it is UTF-8"
        raise argparse.ArgumentTypeError(problem) from None
    return value


def path(value: str) -> str:
    """An argparse type: what can be the name of a file or folder, though a hub id may stand there too."""
    value, whole = text(value), os.path.expanduser(value)
    if whole.startswith("~") and not os.path.lexists(whole):
        raise argparse.ArgumentTypeError(f"{value}: no such user; for a file of that name give ./{value}")
    if len(os.fsencode(whole)) > 4000 or any(len(os.fsencode(part)) > 255 for part in whole.split("/")):
        raise argparse.ArgumentTypeError(f"{value[:40]}... is too long for a path; give a shorter one")
    return value


def gpu_counts(text: str) -> tuple[int, ...]:
    """An argparse type: world sizes, comma-separated, each once."""
    return tuple(dict.fromkeys(number(int, 1, MAX_WORLD + 1)(part) for part in text.split(",")))


def batch_size(text: str) -> int | str:
    """An argparse type: a positive number, or auto."""
    return text if text == "auto" else number(int, 1, MAX_SEQUENCES + 1)(text)
