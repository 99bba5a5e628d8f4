"""Run folders: which folder a run has, that it can be written, that no other run is in it, how its files are replaced.
Called by the script before anything is loaded, and by `report`."""

import contextlib
import fcntl
import json
import os
import pathlib
import tempfile
import time

from harness.base import UserError, saved
from harness.flags import Settings, not_a_folder_name
from harness.job import endings, heartbeats

LOCK_TRIES = 10
SECONDS_BETWEEN_TRIES = 0.5


def name_of(settings: Settings) -> str:
    """The name of the run's folder: --run-name, else the model's name, for a new run with the time.

    Raises:
        UserError: a folder cannot have that name.
    """
    model = os.path.expanduser(settings.model)
    if os.path.isdir(model):
        model = os.path.realpath(model)  # a folder such as . or .. has another name
    name = settings.run_name or pathlib.Path(model).name
    if not settings.run_name and settings.resume == "none":
        name += time.strftime("-%Y%m%d-%H%M%S")
    if problem := not_a_folder_name(name):
        raise UserError(f"--run-name: the name {name!r}, from --model, is {problem}; give one")
    return name


def choose_folder(settings: Settings) -> pathlib.Path:
    """Makes and locks the run's folder, and returns it.

    Raises:
        UserError: it cannot be written, another process is in it, or it holds a run that is not resumed.
    """
    resumed = folder_of_resumed_run(settings)
    name = name_of(settings)
    outputs = pathlib.Path(settings.output_dir).expanduser()
    if resumed and not settings.run_name:
        folder = resumed
        check_place(settings, folder, None)
    else:
        folder = outputs / name
        check_place(settings, folder, None if folder == resumed else outputs)
    goes_on = None
    if resumed and folder.resolve() == resumed.resolve():
        goes_on = resumed
    refuse_run(settings, folder, goes_on)
    check_writable(f"--output-dir {settings.output_dir}", folder)
    if settings.export:
        check_writable(f"--export {settings.export}", pathlib.Path(settings.export).expanduser())
    folder = take_folder(folder, alone=not settings.run_name and settings.resume == "none")
    refuse_links(folder)
    refuse_run(settings, folder, goes_on)  # again: another start may have been in it until this one had the lock
    return folder


def folder_of_resumed_run(settings: Settings) -> pathlib.Path | None:
    """The folder of the run that --resume PATH is in, or names; None without a PATH."""
    if settings.resume in ("none", "auto"):
        return None
    path = pathlib.Path(settings.resume).expanduser()
    for folder in (path, *path.parents[:2]):
        if (folder / "checkpoints").is_dir():
            return folder
    return None


def refuse_run(settings: Settings, folder: pathlib.Path, goes_on: pathlib.Path | None) -> None:
    """Raises a UserError where `folder` holds a run that would be lost. `goes_on` is the folder where it holds the run
    of --resume PATH."""
    path, newest = pathlib.Path(settings.resume).expanduser(), saved.newest(folder)
    name, metrics = folder.name, folder / "metrics.jsonl"
    if goes_on and path != goes_on and newest and saved.step_of(newest) > saved.step_saved(path):
        problem = f"{folder} holds newer checkpoints, which the run would write over"
        raise UserError(f"--resume {settings.resume}: {problem}; give another --run-name to branch off, or remove them")
    if metrics.exists() and not goes_on and settings.resume != "auto":
        advice = "choose another name, remove it, or go on with it by --resume auto"
        raise UserError(f"--run-name {name}: {folder} holds a run already; {advice}")
    try:
        ended = metrics.exists() and b'"final": true' in metrics.read_bytes()
    except OSError as error:
        raise UserError(f"--output-dir: {metrics} cannot be read ({error.strerror})", 1) from error
    if settings.resume == "auto" and not saved.by_name(folder) and ended:
        raise UserError(f"--run-name {name}: {folder} holds a finished run without checkpoints; choose another name")


def take_folder(folder: pathlib.Path, alone: bool) -> pathlib.Path:
    """Makes a run's folder and locks it; it is removed at the end if nothing was written into it.

    With `alone`, for a name that the user did not give, it is always a new folder: where another start of the same
    second has that name, a number is appended.
    """
    named, number = folder, 1
    while True:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True)
            endings.LISTENERS.append(lambda _, new=new: discard(new))
            break
        except FileExistsError:
            if not alone:
                break
            number += 1
            folder = named.with_name(f"{named.name}-{number}")
        except OSError as error:
            raise UserError(f"--output-dir: {folder} cannot be written ({error.strerror})", 1) from error
    lock_folder(folder)
    return folder


def discard(new: list[pathlib.Path]) -> None:
    """Removes a run's folder, and its parents that were made with it, if it holds nothing but its lock. `new` has the
    folder first."""
    with contextlib.suppress(OSError):
        if [path.name for path in new[0].iterdir()] == [".lock"]:
            (new[0] / ".lock").unlink()
            for folder in new:
                folder.rmdir()


def check_place(settings: Settings, folder: pathlib.Path, outputs: pathlib.Path | None) -> None:
    """Raises a UserError where a run in `folder` would write outside `outputs`, or over what is not a run's."""
    if outputs and folder.resolve().parent != outputs.resolve():
        raise UserError(f"--run-name {folder.name}: {folder} is a link that leads out of {outputs}; remove it")
    inputs = [("--model", settings.model), *(("--dataset", source.dataset) for source in settings.sources())]
    for flag, path in inputs:
        if os.path.exists(folder) and os.path.realpath(os.path.expanduser(path)) == str(folder.resolve()):
            raise UserError(f"--run-name {folder.name}: {folder} is the folder of {flag}; choose another name")
    if (folder / "config.json").exists() and not any((folder / mark).exists() for mark in (".lock", "metrics.jsonl")):
        raise UserError(f"--run-name {folder.name}: the config.json in {folder} is not a run's; choose another name")
    for path in (folder / "config.json", folder / "metrics.jsonl"):
        if path.exists() and not path.is_file():
            raise UserError(f"--run-name {folder.name}: {path} is no file; remove it")
    refuse_in_the_way(folder)


def refuse_in_the_way(folder: pathlib.Path) -> None:
    """Raises a UserError for a file or a link in the place of a checkpoint or of all of them: no save could succeed."""
    if os.path.lexists(folder / "checkpoints") and not os.path.isdir(folder / "checkpoints"):
        raise UserError(f"--run-name {folder.name}: {folder / 'checkpoints'} is no folder; remove it")
    for path in saved.by_name(folder):
        if path.is_symlink() or not path.is_dir():
            kind = "a link" if path.is_symlink() else "no folder"
            problem = f"{path} is {kind}, where a checkpoint is to be"
            raise UserError(f"--run-name {folder.name}: {problem}; move it away")


def check_writable(flag: str, path: pathlib.Path) -> None:
    """Raises a UserError if a folder at `path` could not be made and written later."""
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"{flag}: cannot be written ({error.strerror})") from error


# Not `filelock`: its lock belongs to an open file, so a process that locks its folder once more, as the report does,
# would shut itself out; it takes a lock file that a hard link shares with another run's folder; and it does not see the
# lock that an earlier version of this program holds.
def lock_folder(folder: pathlib.Path) -> int:
    """Makes the folder this process's own until it ends, however it ends. A run that was just killed gets a few seconds
    to be gone. Returns the file descriptor of the lock.

    Raises:
        UserError: the folder cannot be written, or another run is in it, which is named.
    """
    lock = folder / ".lock"
    try:
        for _ in range(LOCK_TRIES):
            folder.mkdir(parents=True, exist_ok=True)  # a start that failed may have removed it
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # never closed
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process has it
                time.sleep(SECONDS_BETWEEN_TRIES)
                continue
            if is_of_this_folder(descriptor, lock):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(heartbeats.RANKS).encode(), 0)
                return descriptor
    except OSError as error:
        raise UserError(f"--output-dir: {lock} cannot be written ({error.strerror})") from error
    problem = f"another run is in {folder}, its ranks {describe_holders(descriptor)}"
    raise UserError(f"--run-name {folder.name}: {problem}; end it or choose another name")


def is_of_this_folder(descriptor: int, lock: pathlib.Path) -> bool:
    """Whether the open file that is locked is this folder's lock and no other's. One that is another folder's too, of
    which `cp -rl` made this one, is removed here."""
    if not lock.exists():  # the process that held it before has removed it
        return False
    status = os.stat(lock)
    if not os.path.samestat(os.fstat(descriptor), status):
        return False
    if status.st_nlink > 1:
        lock.unlink()
        return False
    return True


def describe_holders(descriptor: int) -> str:
    """The ranks that a lock names, by host, with the command that ends them; `unknown` where it cannot be read."""
    pids_by_host: dict[str, list[str]] = {}
    try:
        for host, pid in json.loads(os.pread(descriptor, 2**20, 0)):
            pids_by_host.setdefault(str(host), []).append(str(int(pid)))
    except (OSError, ValueError, TypeError):
        return "unknown"
    return "; ".join(f"on {host} (kill {' '.join(pids)})" for host, pids in pids_by_host.items())


def refuse_links(folder: pathlib.Path) -> None:
    """Raises a UserError for a link through which a run would write outside its folder."""
    inside = os.path.realpath(folder)
    for path in (*folder.iterdir(), *folder.glob("profile/*")):
        if path.is_symlink() and not pathlib.Path(os.path.realpath(path)).is_relative_to(inside):
            advice = "remove it, or choose another name; for another disk give --output-dir"
            raise UserError(f"--run-name {folder.name}: {path} is a link that leads out of the run's folder; {advice}")


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes `text` into a new file that, once synced, takes the name `path`: all of it or nothing, and through no
    link."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    try:
        # "x": it has the umask's permissions, and a link of that name is an error
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
