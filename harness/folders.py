"""Run folders: which folder a run has, that it can be written, that nobody else is in it, how a file in it is replaced.
Called by the script before anything is loaded, and by `report`. It does not know what lies in the folder but for the
marks of a run."""

import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
import time

from harness import heartbeats
from harness.settings import Settings, not_a_folder_name
from utils import UserError


def name_of(settings: Settings) -> str:
    """The name of the run's folder."""
    stamp = time.strftime("-%Y%m%d-%H%M%S") if settings.resume == "none" else ""
    model = os.path.expanduser(settings.model)  # a folder such as . or .. has its name elsewhere
    name = settings.run_name or pathlib.Path(os.path.realpath(model) if os.path.isdir(model) else model).name + stamp
    if problem := not_a_folder_name(name):
        raise UserError(f"--run-name: the name {name!r}, from --model, is {problem}; give one")
    return name


def choose_folder(settings: Settings) -> pathlib.Path:
    """The run's folder, checked: it can be written, and it holds no run unless that one is resumed."""
    named, path = settings.resume not in ("none", "auto"), pathlib.Path(settings.resume).expanduser()
    own = next((p for p in (path, *path.parents[:2]) if named and (p / "checkpoints").is_dir()), None)  # PATH's run
    name = name_of(settings)
    outputs = pathlib.Path(settings.output_dir).expanduser()
    folder = own if own and not settings.run_name else outputs / name
    check_place(settings, folder, None if folder == own else outputs)
    goes_on = own and folder.resolve() == own.resolve()
    newest = max((p.name for p in (folder / "checkpoints").glob("step-*")), default="")
    if goes_on and path != own and newest > path.name:
        problem = f"{folder} holds newer checkpoints, which the run would write over"
        raise UserError(f"--resume {settings.resume}: {problem}; give another --run-name to branch off, or remove them")
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and not goes_on and settings.resume != "auto":
        advice = "choose another name, remove it, or go on with it by --resume auto"
        raise UserError(f"--run-name {name}: {folder} holds a run already; {advice}")
    try:
        ended = metrics.exists() and b'"final": true' in metrics.read_bytes()
    except OSError as error:
        raise UserError(f"--output-dir: {metrics} cannot be read ({error.strerror})", 1) from error
    if settings.resume == "auto" and not newest and ended:
        raise UserError(f"--run-name {name}: {folder} holds a finished run without checkpoints; choose another name")
    if folder.exists():
        lock_folder(folder)
        refuse_links(folder)
    check_writable(f"--output-dir {settings.output_dir}", folder)
    if settings.export:
        check_writable(f"--export {settings.export}", pathlib.Path(settings.export).expanduser())
    return folder


def check_place(settings: Settings, folder: pathlib.Path, outputs: pathlib.Path | None) -> None:
    """Raises a UserError where a run in `folder` would write outside `outputs`, or over what is not a run's."""
    if outputs and folder.resolve().parent != outputs.resolve():
        raise UserError(f"--run-name {folder.name}: {folder} is a link that leads out of {outputs}; remove it")
    for flag, path in {"--model": settings.model, "--dataset": settings.dataset}.items():
        if os.path.exists(folder) and os.path.realpath(os.path.expanduser(path)) == str(folder.resolve()):
            raise UserError(f"--run-name {folder.name}: {folder} is the folder of {flag}; choose another name")
    if (folder / "config.json").exists() and not any((folder / mark).exists() for mark in (".lock", "metrics.jsonl")):
        raise UserError(f"--run-name {folder.name}: the config.json in {folder} is not a run's; choose another name")
    if os.path.isdir(folder / "metrics.jsonl"):
        raise UserError(f"--run-name {folder.name}: {folder / 'metrics.jsonl'} is a folder; remove it")


def place_of(folder: pathlib.Path) -> tuple[int, int] | None:
    """What a folder keeps when it is moved, and another one in its place has not; None if none is there."""
    with contextlib.suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino


def check_writable(flag: str, path: pathlib.Path) -> None:
    """Raises a UserError now if a folder at `path` could not be made and written later."""
    try:
        tempfile.TemporaryFile(dir=next(parent for parent in (path, *path.parents) if parent.exists())).close()
    except OSError as error:
        raise UserError(f"{flag}: cannot be written ({error.strerror})") from error


def lock_folder(folder: pathlib.Path) -> int:
    """Makes the folder this process's own until it ends, however it ends; a UserError names who has it. One that was
    just killed gets a few seconds to be gone. Returns the lock's file descriptor."""
    lock = folder / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        for _ in range(10):
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never closed
                if os.fstat(descriptor).st_nlink == 1:  # else a hard link: it is a file of somewhere else too
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(heartbeats.RANKS).encode(), 0)
                return descriptor
            time.sleep(0.5)
    except OSError as error:
        raise UserError(f"--output-dir: {lock} cannot be written ({error.strerror})") from error
    holders = "unknown"
    with contextlib.suppress(OSError, ValueError, TypeError):
        hosts: dict[str, list[str]] = {}
        for host, pid in json.loads(os.pread(descriptor, 2**20, 0)):
            hosts.setdefault(str(host), []).append(str(int(pid)))
        holders = "; ".join(f"on {host} (kill {' '.join(pids)})" for host, pids in hosts.items())
    problem = f"another run is in {folder}, its ranks {holders}"
    raise UserError(f"--run-name {folder.name}: {problem}; end it or choose another name")


def refuse_links(folder: pathlib.Path) -> None:
    """Raises a UserError for a link by which something that a run writes would come to lie outside its folder."""
    inside = os.path.realpath(folder)
    for path in (*folder.iterdir(), *folder.glob("profile/*")):
        if path.is_symlink() and not pathlib.Path(os.path.realpath(path)).is_relative_to(inside):
            advice = "remove it, or choose another name; for another disk give --output-dir"
            raise UserError(f"--run-name {folder.name}: {path} is a link that leads out of the run's folder; {advice}")


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes `text` into a new file that, synced, takes the name `path`: whole or not at all, and through no link."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x") as file:  # it has the umask's permissions; a link of that name is an error
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
