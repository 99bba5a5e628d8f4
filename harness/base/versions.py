"""Versions: those of this program and its packages, read without imports, and errors for unsuitable interpreters. It
must run on any Python 3."""

from __future__ import annotations  # for older interpreters, which are refused here

import argparse
import contextlib
import os
import pathlib
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import NoReturn

from harness.base import console

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
OLDEST_PYTHON = (3, 11)
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}  # of requirements-floor.txt
OLDEST_TORCHAO = (0, 18)  # before it a compiled cast to float8 could store NaN (torchao issue 4652)
REQUIRED = ("accelerate", "filelock", "numpy", "psutil", "safetensors", "torch", "tqdm", "transformers")


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version(package)


def version_parts(number: str) -> tuple[int, ...]:
    """The first two numbers of a version, for comparisons."""
    return tuple(map(int, re.findall(r"\d+", number)[:2]))


def package_versions() -> dict[str, str]:
    """{name: version} of Python and the packages that affect the results of a run."""
    numbers = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "accelerate", "torchao", "datasets"):
        number = installed(name)
        if number:
            numbers[name] = number
    return numbers


def commit() -> str | None:
    """The commit of this program, with `-dirty` if files have changed; None outside a git repository."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


class ShowVersion(argparse.Action):
    """The action of --version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        number = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
        print(f"train_fsdp {number}, commit {commit() or 'unknown'}")
        print(", ".join(f"{name} {number}" for name, number in package_versions().items()))
        parser.exit()


def refuse_old_python() -> None:
    """Exit with code 2 if this interpreter is too old."""
    if sys.version_info < OLDEST_PYTHON:
        exit_with_error("Python {}; {}.{} or newer is needed".format(sys.version.split()[0], *OLDEST_PYTHON))


def refuse_missing_packages() -> None:
    """Exit with code 2 if a required package is missing or too old."""
    missing = [name for name in REQUIRED if not find_spec(name)]
    if missing:
        exit_with_error(f"which lacks {', '.join(missing)}")
    for name, oldest in OLDEST.items():
        number = installed(name)
        if number and version_parts(number) < oldest:
            exit_with_error(f"which has {name} {number}; {'.'.join(map(str, oldest))} or newer is needed")


def exit_with_error(problem: str) -> NoReturn:
    """Exit with code 2, with advice to use the interpreter of ./setup.sh."""
    advice = f"run ./setup.sh, then start it with {ROOT / '.venv' / 'bin' / 'python'}"
    console.exit_with_error(f"train_fsdp.py: error: this is {os.path.abspath(sys.executable)}, {problem}; {advice}")
