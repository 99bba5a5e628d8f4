"""Imports: the files of --import, which run once in this process before anything is built. What they may add is in
harness/register.py."""

import contextlib
import hashlib
import pathlib
import sys
import traceback
import types
from collections.abc import Iterable

from harness import base

IMPORTED: dict[str, str] = {}  # {file as typed: SHA-256 of its content}
REGISTERED: list[str] = []  # what these files added, such as "optimizer lion"


def run_files(files: Iterable[str]) -> None:
    """Run each file that this process has not run yet.

    Raises:
        UserError: a file cannot be read, or raises an error.
    """
    for file in files:
        path = pathlib.Path(file).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise base.UserError(f"--import {file}: cannot be read ({error.strerror}); give a Python file") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest in IMPORTED.values():
            continue
        IMPORTED[file] = digest
        # a name of its own, so that a file called random.py hides no other module; equal on all ranks, for pickles
        module = types.ModuleType(f"{path.stem}_{digest[:8]}")
        module.__file__ = str(path.resolve())
        sys.modules[module.__name__] = module
        try:
            with contextlib.redirect_stdout(sys.stderr):  # with --json stdout has one object only
                exec(compile(content, module.__file__, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            fault = describe_fault(error, file)
            del IMPORTED[file]
            raise fault from error
    for name in model_types():
        if f"model {name}" not in REGISTERED:
            REGISTERED.append(f"model {name}")


def describe_fault(error: BaseException, file: str) -> base.UserError:
    """An error in the code of a file of --import, as one line with the innermost line of such a file."""
    typed = {str(pathlib.Path(name).expanduser().resolve()): name for name in IMPORTED}
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    where = [f"{typed[name]}, line {line}" for name, line in places if name in typed]
    text = base.first_line(error)
    if not isinstance(error, base.UserError):
        text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else text}"
    return base.UserError(f"--import {where[-1] if where else file}: {text}")


def describe_imports() -> str:
    """The names of this process's files with the beginning of their SHA-256; empty if there are none."""
    return ", ".join(f"{pathlib.Path(file).name} ({digest[:12]})" for file, digest in IMPORTED.items())


def model_types() -> list[str]:
    """The model types that were registered with transformers."""
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    return list(auto.CONFIG_MAPPING._extra_content) if auto else []  # private: no public name lists only these
