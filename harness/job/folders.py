"""Run folders: choose and lock a run's folder, replace its files."""

import contextlib
import itertools
import os
import pathlib
import time
from typing import NoReturn

from filelock import FileLock, Timeout

from harness import base, flags
from harness.job import endings, heartbeats

LOCK_TIMEOUT = 5.0  # seconds; a run that was just killed may still hold its lock


def take_folder(settings: flags.Args) -> pathlib.Path:
    """Return the run's folder, chosen and locked by rank 0. Every rank calls this.

    Raises:
        UserError: the folder cannot be written, another run uses it, it holds another run's files, or a link in it
            leads outside; on every rank.
    """
    folder = base.broadcast_from_rank_0(lambda: choose_folder(settings))
    heartbeats.PROGRESS.folder = folder
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.resolve() / "nccl_trace_rank_"))
    return folder


def choose_folder(settings: flags.Args) -> pathlib.Path:
    """Create and lock the run's folder. Raises UserError as `take_folder` does."""
    outputs = pathlib.Path(settings.output_dir).expanduser()
    try:
        resumed = find_resumed_folder(settings)
        if settings.run_name or not resumed:
            folder = outputs / choose_name(settings)
        else:
            folder = outputs / resumed.name if "output_dir" in settings.explicit else resumed
        resumes_same_run = resumed is not None and folder.resolve() == resumed.resolve()
        if not resumes_same_run and folder.resolve().parent != outputs.resolve():
            refuse(folder, f"{folder} is a link to a folder outside {outputs}; remove it")
        holds_run = any((folder / mark).exists() for mark in (".lock", "metrics.jsonl"))
        if (folder / "config.json").exists() and not holds_run:
            refuse(folder, f"the config.json in {folder} is not a run's; choose another name")
        folder = make_folder(folder, must_be_new=not settings.run_name and settings.resume == "none")
        refuse_links(folder)
        refuse_run(settings, folder, resumes_same_run)
    except OSError as error:
        problem = f"{error.filename or 'the lock of a run'} cannot be written ({error.strerror})"
        raise base.UserError(f"--output-dir {settings.output_dir}: {problem}") from error
    return folder


def choose_name(settings: flags.Args) -> str:
    """Return the name of the run's folder: --run-name, else the model's name, for a new run with the time.

    Raises:
        UserError: it is no valid folder name.
    """
    model = os.path.expanduser(settings.model)
    if os.path.isdir(model):
        model = os.path.realpath(model)  # the name of `.` or `..`
    name = settings.run_name or pathlib.Path(model).name
    if not settings.run_name and settings.resume == "none":
        name += time.strftime("-%Y%m%d-%H%M%S")
    if problem := flags.not_a_folder_name(name):
        raise base.UserError(f"--run-name: the name {name!r}, from --model, is {problem}; give one")
    return name


def find_resumed_folder(settings: flags.Args) -> pathlib.Path | None:
    """Return the run folder of --resume PATH, which names the run or a checkpoint, also from inside the run's folder;
    None without a PATH, or for a checkpoint that is in no run's folder."""
    if settings.resume in ("none", "auto"):
        return None
    typed = pathlib.Path(settings.resume).expanduser()
    candidates = [folder for path in (typed, typed.resolve()) for folder in (path, *path.parents[:2])]
    for folder in candidates:
        if folder.name not in ("", "..") and base.is_run(folder):
            return folder
    return None


def make_folder(folder: pathlib.Path, must_be_new: bool) -> pathlib.Path:
    """Create a run's folder and lock it until this process ends; then it is removed if it is empty.

    With `must_be_new`, for a name that the user did not choose, an existing name gets a number appended.
    """
    named = folder
    for number in itertools.count(2):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=not must_be_new)
            break
        except FileExistsError:
            if not must_be_new or not folder.exists():  # it or its parent is a broken link
                raise
            folder = named.with_name(f"{named.name}-{number}")
    lock = lock_folder(folder)
    endings.at_exit(lambda _: discard(new, lock))
    return folder


def lock_folder(folder: pathlib.Path) -> FileLock:
    """Lock the folder while the returned object exists. Raises UserError if another run has locked it."""
    lock = FileLock(folder / ".lock", timeout=LOCK_TIMEOUT, is_singleton=True)  # a process may lock it twice
    try:
        lock.acquire()
    except Timeout:
        advice = f"`fuser {folder / '.lock'}` shows its processes: end them or choose another name"
        refuse(folder, f"another run uses {folder}; {advice}")
    return lock


def discard(new: list[pathlib.Path], lock: FileLock) -> None:
    """Remove the folders `new`, the run's and then its parents created with it, if the first one holds only its lock.
    `new` is empty for a folder that existed before."""
    with contextlib.suppress(OSError):
        if new and [path.name for path in new[0].iterdir()] == [".lock"]:
            (new[0] / ".lock").unlink()
            lock.release()
            for folder in new:
                folder.rmdir()


def refuse(folder: pathlib.Path, problem: str) -> NoReturn:
    raise base.UserError(f"--run-name {folder.name}: {problem}")


def refuse_links(folder: pathlib.Path) -> None:
    """Raise UserError for a link through which a run would write outside its folder."""
    inside = os.path.realpath(folder)
    for path in (*folder.iterdir(), *folder.glob("profile/*")):
        if path.is_symlink() and not pathlib.Path(os.path.realpath(path)).is_relative_to(inside):
            advice = "remove it, or choose another name; for another disk give --output-dir"
            refuse(folder, f"{path} is a link to a place outside the run's folder; {advice}")


def refuse_run(settings: flags.Args, folder: pathlib.Path, resumes_same_run: bool) -> None:
    """Raise UserError if `folder` holds a run that would be overwritten. `resumes_same_run` is True if it is the run
    of --resume PATH."""
    if resumes_same_run:
        resumed, newest = flags.checkpoint_folder(settings.resume), base.newest_checkpoint(folder)
        if newest and base.step_in_name(newest) > (base.step_in_name(resumed.resolve()) or 0):
            problem = f"{folder} holds newer checkpoints, which the run would overwrite"
            advice = "give another --run-name for a new run, or remove them"
            raise base.UserError(f"--resume {settings.resume}: {problem}; {advice}")
    elif settings.resume != "auto" and ((folder / "metrics.jsonl").exists() or base.named_checkpoints(folder)):
        advice = "choose another name, remove it, or continue it with --resume auto"
        refuse(folder, f"{folder} already holds a run; {advice}")


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write `text` to a new file, sync it and rename it to `path`: all of it or nothing, and never through a link."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)
    try:
        # "x": permissions of the umask, and an error for a link of that name
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
