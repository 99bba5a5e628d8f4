"""Checkpoints: how all ranks save a state together, and never leave half of one."""

import contextlib
import dataclasses
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

from harness.base import saved
from harness.base.devices import wait_for_device
from harness.base.ranks import of_all_ranks
from harness.base.saved import MANIFEST, place_of, seal
from harness.base.text import first_line
from harness.flags.settings import Settings
from harness.job import heartbeats
from harness.job.printing import say
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
        self.run = identity | {"world_size": dist.get_world_size(), "flags": dataclasses.asdict(settings)}
        self.run["folder"] = str(folder.resolve())
        self.group = dist.new_group(backend="gloo")  # the writing threads' own
        self.stager = Stager(device)
        self.thread: threading.Thread | None = None
        self.failures = 0
        if dist.get_rank() == 0:
            remove_leftovers(folder)

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Saves `state`; returns after the copy, or with `wait` when all is on disk. Every rank calls this."""
        start = time.perf_counter()
        wait = wait or not self.settings.saves_beside()
        if wait:
            self.finish()
        busy = torch.tensor(int(self.thread is not None and self.thread.is_alive()), device=self.device)
        dist.all_reduce(busy, dist.ReduceOp.MAX)
        if busy.item():
            say(f"skipped    checkpoint at step {state.step}: the one before is still being written")
            return
        # what is waited for is written from where it is: there need be no memory for a copy of all
        staged = state.tensors() if wait else self.stager.stage(state.tensors())
        wait_for_device()
        stall = None if wait else time.perf_counter() - start
        self.thread = threading.Thread(target=self._write, args=(staged, state.numbers() | self.run, stall))
        self.thread.start()
        if wait:
            self.finish()

    def prepare(self, state: TrainState) -> None:
        """Begins to pin the memory from which a later save is written beside the training; called after the first step.
        Where each save is waited for, no memory is needed."""
        left = self.settings.num_steps - state.step
        if self.device.type == "cuda" and self.settings.saves_beside() and self.settings.checkpoint_interval < left:
            self.stager.prepare(state.tensors())

    def finish(self) -> None:
        """Waits for the save that is under way."""
        if self.thread is not None:
            self.thread.join()

    def _together(self, work: Callable[[], Any], main_only: bool = False) -> tuple:
        """Does `work` on every rank or on rank 0, returns all results; if it fails on one rank, all raise its error."""
        heartbeats.HERE.writing = work.__name__
        try:
            mine = (None if main_only and dist.get_rank() else work(), None)
        except (Exception, dcp.CheckpointException) as error:
            mine = (None, checkpoint_error(error))
        heartbeats.HERE.writing = ""
        results, errors = zip(*of_all_ranks(mine, self.group), strict=True)
        for error in filter(None, errors):
            raise OSError(error)
        return results

    def _write(self, staged: dict, manifest: dict, stall: float | None) -> None:
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
            dcp.save(staged, storage_writer=Writer(temporary), process_group=self.group)
            mine = [*temporary.glob(f"__{rank}_*.distcp"), *[temporary / ".metadata"][rank:]]
            return {path.name: [path.stat().st_size, sha256(path)] for path in mine}

        def publish():
            for name, (size, _) in files.items():
                if not (temporary / name).exists() or (temporary / name).stat().st_size != size:
                    raise OSError(f"rank 0 does not see {name}; --output-dir must be a disk that all nodes share")
            self.sync_log()  # or a resumed run might lack the lines of the steps before it
            contents = manifest | {"files": files}
            (temporary / MANIFEST).write_text(json.dumps(contents | {"sha256": seal(contents)}, indent=1))
            sync(temporary / MANIFEST)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of that name, or it would have been resumed from
            sync(temporary)
            temporary.rename(final)
            sync(self.folder)
            older = [path for path in saved.complete(self.folder.parent) if path.name < final.name]
            for path in older[: max(0, len(older) - self.settings.keep_checkpoints + 1)]:
                path.rename(path.with_name(f".{path.name}.deleting"))
            remove_leftovers(self.folder.parent)

        try:
            self._together(prepare, main_only=True)
            files = dict(sorted(item for written in self._together(write) for item in written.items()))
            self._together(publish, main_only=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: another rank has died
            self.failures += 1
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            cause = first_line(error)
            say(f"failed     checkpoint {final.name}: {cause}; the run goes on, older checkpoints stay")
            return
        size = sum(size for size, _ in files.values())
        stood = "" if stall is None else f", the loop stood still for {stall:.3f} s"
        say(f"saved      {final.name}, {size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s{stood}")


def remove_leftovers(folder: pathlib.Path) -> None:
    """Removes what was being written or deleted when a run was killed; what cannot be removed now, a later save or
    start tries again."""
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
