"""Store: all ranks save a state together, and never leave an incomplete checkpoint."""

import contextlib
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from harness import base, flags, job
from harness.state.identity import eval_identity
from harness.state.shards import Writer, checkpoint_error, sha256
from harness.state.train_state import TrainState, dtensor_like, local_part

STAGER_SINCE = "2.13"  # of torch; the stager of 2.11 stages once


class Checkpoints:
    """Saves the state of all ranks in the background, without gathering it.

    A checkpoint is written to a hidden folder. When every rank has written and the manifest has every file's size and
    checksum, the folder gets its final name; then old checkpoints are removed. `sync_log` syncs the log to disk.
    `failures` counts the failed saves.

    As a context manager it waits for the save in progress before an error ends the run.
    """

    def __init__(
        self,
        settings: flags.Settings,
        folder: pathlib.Path,
        identity: dict,
        device: torch.device,
        sync_log: Callable[[], None],
    ):
        self.settings, self.folder, self.device, self.sync_log = settings, folder / "checkpoints", device, sync_log
        # fields of every manifest that do not change during the run
        machine = {"world_size": dist.get_world_size(), "gpu": base.gpu_name()}
        self.run_fields = identity | flags.record_flags(settings) | machine | {"format": base.FORMAT}
        self.group = job.new_gloo_group()  # for the writing threads
        self.stager = make_stager(device) if settings.saves_async() else None  # without a stager every save waits
        self.thread: threading.Thread | None = None
        self.failures = 0
        if dist.get_rank() == 0:
            with base.working():
                remove_leftovers(folder)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.wait()

    def save(self, state: TrainState, wait: bool = False) -> None:
        """Save `state`. Returns after the copy to host memory, or with `wait` when all is on disk. Every rank calls
        this. While the previous save is still being written, nothing is saved."""
        with state.tracker.paused():
            start = time.perf_counter()
            job.enter_phase("save")
            if wait or self._is_best(state):
                self.wait()
            if any(base.all_gather_objects(self.thread is not None and self.thread.is_alive())):
                job.print0(f"skipped    checkpoint at step {state.step}: the previous one is still being written")
                return
            manifest, tensors = state.counters() | self.run_fields, state.tensors()
            # with `wait` the tensors do not change while they are written, so they need no copy
            copies = None if wait else self._stage(tensors)
            base.wait_for_device()
            pause = time.perf_counter() - start if copies else None
            self.thread = threading.Thread(target=self._write, args=(copies or tensors, manifest, pause))
            self.thread.start()
            if not copies:
                self.thread.join()

    def check_saved(self) -> None:
        """Raise UserError if a save failed."""
        if self.failures:
            flag = "--keep-best" if self.settings.keep_best else "--final-checkpoint"
            if self.settings.checkpoint_interval:
                flag = "--checkpoint-interval"
            raise base.UserError(
                f"{flag}: {base.counted(self.failures, 'checkpoint')} could not be saved, see above", 1
            )

    def record_eval_loss(self, state: TrainState, loss: float) -> None:
        """Set the eval loss of `state` for the next save, and record it in the checkpoint of this step if a stop came
        before that was evaluated. Every rank calls this."""
        if not math.isfinite(loss):  # such a loss ends the run
            return
        state.eval_loss = loss
        if self.settings.keep_best:
            base.broadcast_from_rank_0(lambda: self._add_eval_loss(state))

    def _add_eval_loss(self, state: TrainState) -> None:
        """Record the eval loss of `state` in its checkpoint, if that is of this run and its eval data and has none."""
        checkpoint = self.folder / base.checkpoint_name(state.step)
        try:
            manifest = base.read_manifest(checkpoint)
            is_same = manifest["run_id"] == state.run_id and eval_identity(manifest) == eval_identity(self.run_fields)
            if is_same and manifest["eval_loss"] is None:
                manifest["eval_loss"] = state.eval_loss
                job.replace_file(checkpoint / base.MANIFEST, base.dump_with_checksum(manifest))
        except (FileNotFoundError, ValueError):  # not saved yet, or damaged: it is saved next
            pass
        except OSError as error:
            job.print0(f"failed     {checkpoint.name}: its eval loss is not recorded ({base.first_line(error)})")

    def best_metrics(self) -> dict[str, float]:
        """Return `best_step` and `best_eval_loss` of the checkpoint that --keep-best keeps; {} without one. Every rank
        calls this."""
        best = base.broadcast_from_rank_0(self._find_best) if self.settings.keep_best else None
        return {"best_step": base.step_in_name(best[0]), "best_eval_loss": best[1]} if best else {}

    def _is_best(self, state: TrainState) -> bool:
        """Return True if `state` has a lower eval loss than every checkpoint."""
        if not self.settings.keep_best or state.eval_loss is None:
            return False
        best = base.broadcast_from_rank_0(self._find_best)
        return best is None or state.eval_loss < best[1]

    def _find_best(self) -> tuple[pathlib.Path, float] | None:
        """Return (path, eval loss) of the best complete checkpoint on this run's eval data."""
        return self._find_best_by_eval_data().get(eval_identity(self.run_fields))

    def _find_best_by_eval_data(self) -> dict[str, tuple[pathlib.Path, float]]:
        """Return (path, eval loss) of the first complete checkpoint with the lowest loss, by the identity of its eval
        data."""
        best: dict[str, tuple[pathlib.Path, float]] = {}
        for path in base.complete_checkpoints(self.folder.parent):
            with contextlib.suppress(OSError, ValueError):  # it was removed meanwhile
                manifest = base.read_manifest(path)
                loss, eval_data = manifest.get("eval_loss"), eval_identity(manifest)
                if loss is not None and (eval_data not in best or loss < best[eval_data][1]):
                    best[eval_data] = path, loss
        return best

    def wait(self) -> None:
        """Wait for the save in progress."""
        job.enter_phase("save")
        if self.thread is not None:
            self.thread.join()

    def _stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Copy tensors to host memory that all saves share. Returns None, from then on, if the host has no pinned
        memory."""
        if self.stager is None:
            return None
        try:
            copies: Any = self.stager.stage({name: local_part(tensor) for name, tensor in tensors.items()})
        except RuntimeError as error:
            job.print0(f"waits      for each checkpoint: no host memory for copies of it ({base.first_line(error)})")
            self.stager = None
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)  # takes CUDA's error, which the next launch reports again
            return None
        return {
            name: dtensor_like(t, copies[name]) if isinstance(t, DTensor) else copies[name]
            for name, t in tensors.items()
        }

    def _together(self, work: Callable[[], Any], main_only: bool = False) -> tuple:
        """Call `work` on every rank, or with `main_only` on rank 0. Returns the results of all ranks. If it fails on
        one rank, all raise OSError with its message."""
        result, error = None, ""
        try:
            if not main_only:
                result = work()
            elif dist.get_rank() == 0:
                with base.working():
                    result = work()
        except (Exception, dcp.CheckpointException) as exception:
            error = checkpoint_error(exception)
        job.end_save_stage()
        results, errors = zip(*base.all_gather_objects((result, error), self.group), strict=True)
        for error in errors:
            if error:
                raise OSError(error)
        return results

    def _write(self, tensors: dict, manifest: dict, pause: float | None) -> None:
        """Write a checkpoint, in a thread, in three stages that all ranks finish together: prepare, write, publish."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread starts on GPU 0
        final = self.folder / base.checkpoint_name(manifest["step"])
        temporary = self.folder / f".{final.name}.writing"

        def prepare() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            temporary.mkdir()

        def write() -> dict[str, list]:
            dcp.save(tensors, storage_writer=Writer(temporary), process_group=self.group)
            written = list(temporary.glob(f"__{dist.get_rank()}_*.distcp"))
            if dist.get_rank() == 0:
                written.append(temporary / ".metadata")
            return {path.name: [path.stat().st_size, sha256(path)] for path in written}

        def publish() -> None:
            for name, (size, _) in files.items():
                if not (temporary / name).exists() or (temporary / name).stat().st_size != size:
                    raise OSError(f"rank 0 does not see {name}; --output-dir must be a disk that all nodes share")
            self.sync_log()  # the log must not lack steps before the checkpoint
            (temporary / base.MANIFEST).write_text(base.dump_with_checksum(manifest | {"files": files}))
            base.sync_to_disk(temporary / base.MANIFEST)
            shutil.rmtree(final, ignore_errors=True)  # if it exists, it is damaged: the run did not resume from it
            base.sync_to_disk(temporary)
            temporary.rename(final)
            base.DAMAGED.discard(final)
            try:  # the checkpoint is saved, whatever becomes of the older ones
                base.sync_to_disk(self.folder)
                self._rotate(final)
            except OSError as error:
                problem = f"{error.filename or self.folder}: {error.strerror}"
                job.print0(
                    f"kept       older checkpoints until the next save, after {final.name} was saved ({problem})"
                )

        try:
            self._together(prepare, main_only=True)
            files: dict[str, list] = {}  # {name: [bytes, checksum]} of all ranks
            for rank_files in self._together(write):
                files |= rank_files
            self._together(publish, main_only=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: another rank has died
            self.failures += 1
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            problem = f"checkpoint {final.name}: {base.first_line(error)}"
            job.print0(f"failed     {problem}; older checkpoints stay")
            return
        megabytes = sum(size for size, _ in files.values()) / 1e6
        paused = "" if pause is None else f", training paused for {pause:.3f} s"
        job.print0(f"saved      {final.name}, {megabytes:,.1f} MB in {time.perf_counter() - start:.1f} s{paused}")

    def _rotate(self, latest: pathlib.Path) -> None:
        """Remove the oldest checkpoints up to `latest`, except the best of each eval data and the newest
        --keep-checkpoints."""
        complete = [path for path in base.complete_checkpoints(self.folder.parent) if path.name <= latest.name]
        best = [path for path, _ in self._find_best_by_eval_data().values()] if self.settings.keep_best else []
        for path in complete[: -self.settings.keep_checkpoints]:
            if path not in best:
                path.rename(path.with_name(f".{path.name}.deleting"))
        remove_leftovers(self.folder.parent)


def make_stager(device: torch.device) -> DefaultStager | None:
    """Return torch's stager with blocking copies; None, after a line, if this torch's stager works only once."""
    if torch.__version__ < STAGER_SINCE:
        job.print0(f"waits      for each checkpoint: --async-checkpoint needs torch 2.13, this is {torch.__version__}")
        return None
    on_gpu = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )
    return DefaultStager(options)


def remove_leftovers(folder: pathlib.Path) -> None:
    """Remove checkpoints that were being written or deleted when a run was killed. A later save or start tries again to
    remove the rest."""
    for leftover in base.unfinished_checkpoints(folder):
        shutil.rmtree(leftover, ignore_errors=True)
