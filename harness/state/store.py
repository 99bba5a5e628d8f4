"""Checkpoints: how all ranks save a state together, and never leave half of one."""

import contextlib
import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from harness import job
from harness.base import saved
from harness.base.devices import wait_for_device
from harness.base.ranks import of_all_ranks
from harness.base.saved import MANIFEST, manifest_checksum, place_of
from harness.base.text import first_line
from harness.flags.parser import record_flags
from harness.flags.settings import Settings
from harness.job import say
from harness.state.shards import Writer, checkpoint_error, sha256
from harness.state.staging import Stager
from harness.state.train_state import TrainState


class Checkpoints:
    """Saves the state of all ranks without gathering it, in the background, and never leaves half a checkpoint.

    A checkpoint is staged in a hidden folder; when every rank has written and every file's size and checksum is in the
    manifest, the folder gets its final name, and only then old ones go. `sync_log` makes the log so far durable.
    """

    def __init__(
        self,
        settings: Settings,
        folder: pathlib.Path,
        identity: dict,
        device: torch.device,
        sync_log: Callable[[], None],
    ):
        self.settings, self.folder, self.device, self.sync_log = settings, folder / "checkpoints", device, sync_log
        self.place = place_of(folder)
        self.of_run = identity | {  # the part of every manifest that does not change during the run
            "world_size": dist.get_world_size(),
            **record_flags(settings),
            "folder": str(folder.resolve()),
        }
        self.group = dist.new_group(backend="gloo")  # the writing threads' own
        self.stager = Stager(device)
        self.thread: threading.Thread | None = None
        self.failures = 0
        if dist.get_rank() == 0:
            remove_leftovers(folder)

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Saves `state`. Returns after the copy to host memory, or with `wait` when all is on disk. Every rank calls
        this. While the save before is still being written, nothing is saved."""
        start = time.perf_counter()
        wait = wait or not self.settings.saves_beside()
        if wait:
            self.finish()
        is_writing = self.thread is not None and self.thread.is_alive()
        anyone_writing = torch.tensor(int(is_writing), device=self.device)
        dist.all_reduce(anyone_writing, dist.ReduceOp.MAX)
        if anyone_writing.item():
            say(f"skipped    checkpoint at step {state.step}: the one before is still being written")
            return
        if self.settings.streaming:
            state.share_positions()
        tensors = state.tensors()
        if not wait:  # otherwise they do not change while they are written, and no memory is needed for a copy
            tensors = self.stager.stage(tensors)
        wait_for_device()
        stall = None if wait else time.perf_counter() - start
        self.thread = threading.Thread(target=self._write, args=(tensors, state.numbers() | self.of_run, stall))
        self.thread.start()
        if wait:
            self.finish()

    def prepare(self, state: TrainState) -> None:
        """Begins to pin the memory from which later saves are written during training; called after the first step.
        Where every save is waited for, none is needed."""
        steps_left = self.settings.num_steps - state.step
        saves_during_training = self.settings.saves_beside() and self.settings.checkpoint_interval < steps_left
        if self.device.type == "cuda" and saves_during_training:
            self.stager.prepare(state.tensors())

    def finish(self) -> None:
        """Waits for the save that is under way."""
        if self.thread is not None:
            self.thread.join()

    def _together(self, work: Callable[[], Any], main_only: bool = False) -> tuple:
        """Does `work` on every rank, or with `main_only` on rank 0. Returns the results of all ranks; where it fails on
        one, all raise an OSError with its message."""
        result, error = None, ""
        try:
            if not main_only or dist.get_rank() == 0:
                with job.writing(work.__name__):
                    result = work()
        except (Exception, dcp.CheckpointException) as exception:
            error = checkpoint_error(exception)
        results, errors = zip(*of_all_ranks((result, error), self.group), strict=True)
        for error in errors:
            if error:
                raise OSError(error)
        return results

    def _write(self, tensors: dict, manifest: dict, stall: float | None) -> None:
        """Writes a checkpoint, in a thread: prepare, write, publish, each of which all ranks end together."""
        start, rank = time.perf_counter(), dist.get_rank()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread has GPU 0
        final = self.folder / saved.name_of(manifest["step"])
        temporary = self.folder / f".{final.name}.writing"

        def prepare():
            if place_of(self.folder.parent) != self.place:
                raise OSError(f"{self.folder.parent} was moved away; move it back")
            remove(temporary)
            self.folder.mkdir(exist_ok=True)
            temporary.mkdir()

        def write():
            dcp.save(tensors, storage_writer=Writer(temporary), process_group=self.group)
            written = list(temporary.glob(f"__{rank}_*.distcp"))
            if rank == 0:
                written.append(temporary / ".metadata")
            return {path.name: [path.stat().st_size, sha256(path)] for path in written}

        def publish():
            for name, (size, _) in sorted(files.items()):
                if not (temporary / name).exists() or (temporary / name).stat().st_size != size:
                    raise OSError(f"rank 0 does not see {name}; --output-dir must be a disk that all nodes share")
            self.sync_log()  # otherwise the log of a resumed run might lack the steps before it
            contents = manifest | {"files": dict(sorted(files.items()))}
            (temporary / MANIFEST).write_text(json.dumps(contents | {"sha256": manifest_checksum(contents)}, indent=1))
            sync(temporary / MANIFEST)
            shutil.rmtree(final, ignore_errors=True)  # damaged if it exists, or the run would have resumed from it
            sync(temporary)
            temporary.rename(final)
            sync(self.folder)
            older = [path for path in saved.complete(self.folder.parent) if path.name < final.name]
            surplus = len(older) + 1 - self.settings.keep_checkpoints
            for path in older[: max(surplus, 0)]:
                path.rename(path.with_name(f".{path.name}.deleting"))
            remove_leftovers(self.folder.parent)

        try:
            self._together(prepare, main_only=True)
            files = {}  # name: [size, checksum], of all ranks
            for files_of_rank in self._together(write):
                files |= files_of_rank
            self._together(publish, main_only=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: another rank has died
            self.failures += 1
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            cause = first_line(error)
            say(f"failed     checkpoint {final.name}: {cause}; the run goes on, older checkpoints stay")
            return
        megabytes = sum(size for size, _ in files.values()) / 1e6
        pause = "" if stall is None else f", training paused for {stall:.3f} s"
        say(f"saved      {final.name}, {megabytes:,.1f} MB in {time.perf_counter() - start:.1f} s{pause}")


def remove_leftovers(folder: pathlib.Path) -> None:
    """Removes the files and folders that were being written or deleted when a run was killed. What cannot be removed
    stays, until a later save or start tries again."""
    for leftover in saved.leftovers(folder):
        remove(leftover)
    with contextlib.suppress(OSError):
        (folder / ".config.json.writing").unlink(missing_ok=True)


def remove(path: pathlib.Path) -> None:
    """Removes a folder with all that is in it, or a file or link; what cannot be removed stays."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Makes a file's content durable, or a rename in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
