"""Run folders: which folder a run has, that it can be written, and that nobody else is in it. Called by the script
before anything is loaded. It does not know what lies in the folder but for the marks of a run."""

import contextlib
import fcntl
import os
import pathlib
import tempfile
import time

from harness.settings import Settings
from utils import UserError


def choose_folder(settings: Settings) -> pathlib.Path:
    """The run's folder, checked: it can be written, and it holds no run unless that one is resumed."""
    named, path = settings.resume not in ("none", "auto"), pathlib.Path(settings.resume).expanduser()
    own = next((p for p in (path, *path.parents[:2]) if named and (p / "checkpoints").is_dir()), None)  # PATH's run
    stamp = time.strftime("-%Y%m%d-%H%M%S") if settings.resume == "none" else ""
    name = settings.run_name or pathlib.Path(settings.model).name + stamp
    folder = pathlib.Path(settings.output_dir).expanduser() / name
    if own and not settings.run_name:
        folder = own
    goes_on = own and folder.resolve() == own.resolve()
    newest = max((p.name for p in (folder / "checkpoints").glob("step-*")), default="")
    if goes_on and path != own and newest > path.name:
        problem = f"{folder} holds newer checkpoints, which the run would write over"
        raise UserError(f"--resume {settings.resume}: {problem}; give another --run-name to branch off, or remove them")
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and not goes_on and settings.resume != "auto":
        advice = "choose another name, remove it, or go on with it by --resume auto"
        raise UserError(f"--run-name {name}: {folder} holds a run already; {advice}")
    if settings.resume == "auto" and not newest and metrics.exists() and '"final": true' in metrics.read_text():
        raise UserError(f"--run-name {name}: {folder} holds a finished run without checkpoints; choose another name")
    if folder.exists():
        lock_folder(folder)
    check_writable(f"--output-dir {settings.output_dir}", folder)
    if settings.export:
        check_writable(f"--export {settings.export}", pathlib.Path(settings.export).expanduser())
    return folder


def check_writable(flag: str, path: pathlib.Path) -> None:
    """Raises a UserError now if a folder at `path` could not be made and written later."""
    try:
        tempfile.TemporaryFile(dir=next(parent for parent in (path, *path.parents) if parent.exists())).close()
    except OSError as error:
        raise UserError(f"{flag}: cannot be written ({error.strerror})") from error


def lock_folder(folder: pathlib.Path) -> None:
    """Makes the folder this process's own until it ends, however it ends; a UserError where another process has it. One
    that was just killed gets a few seconds to be gone."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"--output-dir: {folder} cannot be written ({error.strerror})") from error
    for _ in range(10):
        with contextlib.suppress(BlockingIOError, PermissionError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never closed
            return
        time.sleep(0.5)
    raise UserError(f"--run-name {folder.name}: another process is running in {folder}; choose another name")
