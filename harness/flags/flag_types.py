"""Types and actions of flags for argparse: conversion and range checks of values."""

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from harness import base
from harness.flags.sources import parse_source, parse_stage

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", int, str)

MAX_WORLD = 2**20  # ranks in a plan
TOKEN_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}
MAX_SEQUENCES = 1_000_000  # of a microbatch


def number(
    kind: type[Number], min: float | None = None, max_exclusive: float = math.inf, other: str = ""
) -> Callable[[str], Number]:
    """An argparse type: a number in [min, max_exclusive), by default positive; integers fit 32 bits by default.
    `other` names other values that the flag takes, for the error."""
    if kind is int and max_exclusive == math.inf:
        max_exclusive = 2**31
    wanted = "a whole number" if kind is int else "a number" if max_exclusive < math.inf else "a finite number"
    wanted += " above 0" if min is None else f" of at least {min}"
    if max_exclusive < math.inf:
        wanted += f" and below {max_exclusive}"
    if other:
        wanted += f", or {other}"

    def parse(text: str) -> Number:
        try:
            value = kind(text)
            fits = (value > 0 if min is None else value >= min) and value < max_exclusive
        except ValueError:
            fits = False
        if not fits:
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    parse.__name__ = kind.__name__
    return parse


def percent(text: str) -> float:
    """An argparse type: a percentage of at least 1; a value below is probably a fraction."""
    try:
        return number(float, 1, 100)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; it is in percent, as in 40") from None


def choice(choices: Sequence[Choice]) -> Callable[[str], Choice | str]:
    """An argparse type: one of `choices`; other texts are returned for argparse to refuse."""
    by_text = {str(one): one for one in choices}
    return lambda text: by_text.get(text, text)


def token_count(text: str) -> int:
    """An argparse type: a whole number of tokens, such as 20e9, 20B, 1.5T or 500M."""
    digits, unit = text, 1
    if text[-1:].upper() in TOKEN_UNITS:
        digits, unit = text[:-1], TOKEN_UNITS[text[-1].upper()]
    try:
        value = Fraction(str(float(digits))) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens, such as 20e9, 20B, 1.5T or 500M") from None
    if value.denominator != 1 or not 0 < value < 10**18:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of tokens above 0 and below 1e18")
    return int(value)


def text(value: str) -> str:
    """An argparse type: a text that is not blank and can be encoded."""
    if not value.strip():
        raise argparse.ArgumentTypeError("its value is empty; give one, or leave the flag out")
    try:
        value.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        problem = f"{value!a} holds bytes that are not {encoding}; rename it, or set PYTHONUTF8=1 where it is UTF-8"
        raise argparse.ArgumentTypeError(problem) from None
    return value


def path_or_url(value: str) -> str:
    """An argparse type: a text that can be the path of a file or folder, a URL or a hub id."""
    expanded = os.path.expanduser(text(value))
    if expanded.startswith("~") and not os.path.lexists(expanded):
        raise argparse.ArgumentTypeError(f"{value}: no such user; for a file of that name give ./{value}")
    try:
        os.lstat(expanded)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"{value[:40]}... is too long for a path; give a shorter one") from None
    return value


def path(value: str) -> str:
    """An argparse type: a text that can be the path of a local file or folder."""
    if base.is_url(value):
        advice = "copy or sync the folder (docs/LAUNCH.md, Object stores)"
        raise argparse.ArgumentTypeError(f"{value} is a URL, and a local path is needed; {advice}")
    return path_or_url(value)


def path_or_hub_id(value: str) -> str:
    """An argparse type: a text that can be the path of a local folder, or a hub id."""
    if base.is_url(value):
        raise argparse.ArgumentTypeError(f"{value} is a URL; give a hub id such as OWNER/NAME, or a local folder")
    return path_or_url(value)


def gpu_counts(text: str) -> tuple[int, ...]:
    """An argparse type: world sizes, comma-separated, each once."""
    parse = number(int, 1, MAX_WORLD + 1, other="several with commas, such as 8,64")
    counts = text.split(",")
    return tuple(dict.fromkeys(parse(count or text) for count in counts))


def batch_size(text: str) -> int | str:
    """An argparse type: a positive number, or auto."""
    return text if text == "auto" else number(int, 1, MAX_SEQUENCES + 1, other="auto")(text)


def evaluation_interval(text: str) -> int | str:
    """An argparse type: a number of steps, 0 too, or epoch."""
    return text if text == "epoch" else number(int, 0, other="epoch")(text)


def stage(text: str) -> str:
    """An argparse type: SHARE:NAME=WEIGHT,NAME=WEIGHT, checked by `sources.parse_stage`."""
    try:
        parse_stage(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; such as 0.8:web=0.5,code=0.5") from None
    return text


class Collect(argparse.Action):
    """An action that collects the values of a repeated flag."""

    def __call__(self, parser: object, namespace: argparse.Namespace, value: Any, *others: object) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), value))


class DatasetWords(argparse.Action):
    """The action of --dataset: a text for one plain word, a tuple for several or one with a name or weight."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, *others: object) -> None:
        name, _, weight = parse_source(values[0])
        is_plain = len(values) == 1 and not name and weight is None
        setattr(namespace, self.dest, values[0] if is_plain else tuple(values))
