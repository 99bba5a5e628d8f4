"""Checkpoints: what must survive a restart, how all ranks save it, how it is checked, found again and loaded. Called by
the script. It does not know how a model is built or trained, only its parameters, buffers and optimizer."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import utils
from harness.base import saved
from harness.base.devices import wait_for_device
from harness.base.errors import UserError
from harness.base.ranks import of_all_ranks
from harness.base.saved import MANIFEST, open_file, place_of, seal
from harness.base.text import first_line
from harness.data.documents import vocabulary_of
from harness.flags.resume import checkpoint_folder, no_checkpoint
from harness.flags.settings import Settings
from harness.job import heartbeats
from harness.job.printing import say
from harness.staging import Stager, like, local_part

# What a checkpoint's own index may name when it is unpickled: plain records, nothing that runs. BytesStorageMetadata is
# not among them: DCP would unpickle such an entry without restriction, and a state of tensors has none.
INDEX_RECORDS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata ChunkStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size float64 float32 float16 bfloat16 uint8 int8 int16 int32 int64 bool",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, whose index is a pickle; this one refuses any class that an index does not need."""

    def read_metadata(self, *args, **kwargs) -> dcp.Metadata:
        class Records(pickle.Unpickler):
            def find_class(self, module: str, name: str):
                if name not in INDEX_RECORDS.get(module, "").split():
                    raise pickle.UnpicklingError(f"the index names {module}.{name}")
                return super().find_class(module, name)

        with open_file(pathlib.Path(self.path, ".metadata")) as file:
            metadata = Records(file).load()
        for name in {record.relative_path for record in metadata.storage_data.values()}:
            if pathlib.PurePath(name).name != name:
                raise pickle.UnpicklingError(f"the index names {name}, outside the checkpoint")
            open_file(pathlib.Path(self.path, name)).close()
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def checkpoint_error(error: BaseException) -> str:
    """One line of what went wrong; DCP wraps it, by rank, into an exception that is no Exception."""
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return first_line(error)


class Writer(dcp.FileSystemWriter):
    """DCP's writer; of a write that failed it gives the disk's error, not the complaint of the archive left open."""

    def __init__(self, folder: pathlib.Path):
        super().__init__(folder, per_thread_copy_ahead=0)  # all is on the host: nothing to copy, no stream to wait for

    def write_data(self, *args, **kwargs):
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            raise error.__context__ or error from None


# The clock may be set while a run goes on, so it is read once and time is then counted.
PROCESS_STARTED = psutil.Process().create_time()
CLOCK = time.time() - time.monotonic()


@dataclasses.dataclass
class TrainState:
    """Everything that must survive a restart. The data position is `samples`, as the order of the data is fixed; in a
    stream `position` is the last place before it where reading can begin."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None  # these three are not there for an export
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    tracker: utils.PerformanceTracker | None = None
    step: int = 0
    samples: int = 0  # global, consumed so far
    position: tuple[int, int, int] | None = None  # as StreamedDataset.chunks has it
    tokens: int = 0  # global
    started: float = PROCESS_STARTED  # of the first process
    elapsed_before: float = 0.0  # seconds from there to the start of this process
    productive_before: float = 0.0  # `productive_seconds` of the processes before
    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])  # of the trackers
    branched_from: dict | None = None  # as `saved.find_origin` has it, where the run began with another's checkpoint

    POSITION = ("step", "samples", "position", "tokens")
    NUMBERS = (*POSITION, "started", "run_id", "branched_from")

    def count(self, samples: int, tokens: int) -> None:
        """One more step of a global batch of `samples` with `tokens`."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens

    @property
    def elapsed(self) -> float:
        """Seconds since the first process of the run started; never less than was said before."""
        return self.elapsed_before + CLOCK + time.monotonic() - PROCESS_STARTED

    def productive_seconds(self) -> float:
        """What the steps so far take at their usual speed, that of the median window, and at most what they took."""
        windows, tracker = self.tracker.windows, self.tracker
        usual = statistics.median_low([seconds / steps for steps, seconds in windows] or [0.0])
        measured = sum(s if s < 2 * n * usual else n * usual for n, s in windows)  # else it stood still
        return self.productive_before + measured + min(usual * tracker.warmup_steps, tracker.warmup_seconds)

    def numbers(self) -> dict:
        """What goes into the manifest."""
        own = {name: getattr(self, name) for name in self.NUMBERS} | {"elapsed": self.elapsed}
        return own | {"tracker": dict(self.tracker.total), "productive": self.productive_seconds()}

    def finite(self) -> bool:
        """Whether every parameter and optimizer state is finite, on all ranks."""
        tensors = [local_part(unwrapped(parameter)) for parameter in self.model.parameters()]
        tensors += [getattr(local, "scale", local) for _, _, local in self.optimizer_states()]  # scale: of 8-bit states
        largest = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], math.inf)
        broken = largest.isfinite().logical_not().int().to(tensors[0].device)
        dist.all_reduce(broken)
        return not broken.item()

    def tensors(self) -> dict[str, torch.Tensor]:
        """What goes into the shards, under names that no number of ranks changes; loading writes into these tensors.

        An 8-bit optimizer state is saved twice: in fp32 for any other sharding, and its codes and scales, which are
        exact, for the same one.
        """
        tensors = {f"model.{name}": tensor for name, tensor in persistent_tensors(self.model).items()}
        for name, state, local in self.optimizer_states():
            tensors[name] = unwrapped(state)
            if hasattr(local, "codes"):
                mesh = state.device_mesh
                shard = f"{mesh.get_local_rank('shard')}of{mesh['shard'].size()}"
                tensors[name] = like(state, local.dequantize())
                tensors |= {f"{name}.{part}.{shard}": getattr(local, part) for part in ("codes", "scale")}
        rng = f"rng.{dist.get_rank()}of{dist.get_world_size()}"
        tensors[f"{rng}.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors[f"{rng}.cuda"] = torch.cuda.get_rng_state()
        return tensors

    def optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, state, this rank's part of it)."""
        for name, parameter in self.model.named_parameters() if self.optimizer else ():
            for key, state in self.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", state, local_part(state)

    def load(self, path: pathlib.Path, numbers: dict, origin: dict | None = None, run_id: str | None = None) -> None:
        """Takes over a checkpoint that was saved on any number of ranks, in any stage. With `origin` it is another
        run's, and this one gets `run_id`, if it has one, and begins its own clock and averages."""
        reader, tensors = SafeReader(path), self.tensors()
        own = re.compile(r"\.\d+of\d+(\.cpu|\.cuda)?$")  # belongs to one sharding or world size
        try:
            index = reader.read_metadata()
            reader.read_metadata = lambda: index  # a rank where DCP's own look failed would load alone
            saved = index.state_dict_metadata
            tensors = {name: tensor for name, tensor in tensors.items() if name in saved or not own.search(name)}
            dcp.load(tensors, storage_reader=reader)
        except (Exception, dcp.CheckpointException) as error:
            raise UserError(f"--resume {path}: cannot be loaded ({checkpoint_error(error)})", 1) from error
        for name, _, local in self.optimizer_states():
            if hasattr(local, "codes") and not any(other.startswith(f"{name}.codes.") for other in tensors):
                local.copy_(tensors[name].to_local())
        for name, tensor in tensors.items():
            if name.startswith("rng."):
                (torch.cuda if name.endswith("cuda") else torch).set_rng_state(tensor.cpu())
        if origin:
            self.branched_from, self.run_id = origin, run_id or self.run_id
            self.take_position(numbers)
        else:
            self.take(numbers)

    def take(self, numbers: dict) -> None:
        """Takes over what a manifest has."""
        self.take_position(numbers)
        self.started, self.run_id, self.branched_from = (numbers.get(name) for name in self.NUMBERS[-3:])
        since_then = PROCESS_STARTED - self.started  # by clocks that may have been set, or be another machine's
        self.elapsed_before = max(since_then, numbers.get("elapsed", 0.0))
        if self.tracker:
            self.productive_before = numbers.get("productive", 0.0)
            if numbers["world_size"] == dist.get_world_size():
                self.tracker.total |= numbers["tracker"]

    def take_position(self, numbers: dict) -> None:
        """Takes over where a manifest's run was."""
        for name in self.POSITION:
            setattr(self, name, numbers[name])
        if self.scheduler:
            self.scheduler.last_epoch = self.step - 1  # the schedule is a function of flags and step
            self.scheduler.step()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The master weight that a float8 weight wraps; any other tensor as it is."""
    local = local_part(tensor)
    return like(tensor, local._tensor) if hasattr(local, "_tensor") else tensor


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, a tied one once."""
    kept = model.state_dict().keys()  # leaves out the buffers that are not persistent
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: unwrapped(tensor) for name, tensor in named if name in kept}


def sha256(path: pathlib.Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def damage(path: pathlib.Path) -> tuple[dict, str]:
    """(manifest, what is wrong with this checkpoint, empty if nothing). Every rank reads its share of the files."""
    manifest, wrong = {}, ""
    try:
        manifest = saved.read_manifest(path)
        for name, (size, checksum) in list(manifest["files"].items())[dist.get_rank() :: dist.get_world_size()]:
            if pathlib.PurePath(name).name != name:
                raise TypeError(f"{name} is outside the checkpoint")
            if not wrong and (path / name).stat().st_size != size:
                wrong = f"{name} has {(path / name).stat().st_size:,} bytes instead of {size:,}"
            if not wrong and sha256(path / name) != checksum:
                wrong = f"{name} has changed"
    except OSError as error:
        wrong = f"{pathlib.Path(error.filename or path).name}: {error.strerror}"  # an unreadable sector has no name
    except ValueError as error:
        wrong = str(error)
    except (TypeError, KeyError, AttributeError):
        wrong = f"{MANIFEST} cannot be read"
    return manifest, next(filter(None, of_all_ranks(wrong)), "")


def find_checkpoint(resume: str, folder: pathlib.Path) -> tuple[pathlib.Path, dict] | None:
    """The checkpoint to resume from and its manifest, checked; None to start fresh; a UserError where the path that
    --resume names is no complete checkpoint."""
    if resume == "none":
        return None
    auto = resume == "auto"
    paths = saved.by_name(folder)[::-1] if auto else [checkpoint_folder(resume)]
    if not auto and (problem := no_checkpoint(resume)):
        raise UserError(f"--resume {resume}: {problem}")
    for path in of_all_ranks(paths)[0]:  # all look at the same ones, so that they stay together
        manifest, wrong = damage(path)
        if not wrong:
            return path, manifest
        if not auto:
            raise UserError(f"--resume {resume}: {path.name} is damaged ({wrong}); choose another, or auto")
        say(f"skipped    {path.name} is damaged: {wrong}")
    origin = of_all_ranks(saved.read_origin(folder))[0]
    return find_branch_point(folder, origin) if origin else None


def find_branch_point(folder: pathlib.Path, origin: dict) -> tuple[pathlib.Path, dict]:
    """The checkpoint at which the run in `folder` branched off, and its manifest: a run that has saved nothing since
    goes on from there, not from nothing."""
    path = pathlib.Path(origin["checkpoint"])
    manifest, wrong = damage(path)
    if wrong or any(manifest[key] != origin[key] for key in ("run_id", "step")):
        what = f"it branched off at {path}, saved nothing since, and that is not there any more"
        raise UserError(f"--resume auto: {folder}: {what}; remove the folder, or choose another --run-name")
    return path, manifest


def describe_identity(settings: Settings, config, tokenizer=None, train_set=None) -> dict:
    """What a resumed run must have in common with the run that saved the checkpoint; of an export only the model."""
    passing = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
    identity = {"model": {key: value for key, value in config.to_dict().items() if key not in passing}}
    if train_set is not None:
        identity |= {
            "tokenizer": tokenizer and hashlib.sha256(vocabulary_of(tokenizer).encode()).hexdigest(),
            "streaming": settings.streaming,
            "dataset": train_set.fingerprint(),
            "sequence_length": settings.sequence_length,
            "seed": settings.seed,
        } | getattr(train_set, "rules", {})
    return json.loads(json.dumps(identity, default=str))


# The flags that say what the tokens and the tokenizer are, of which a manifest has checksums.
HELD_OUT_BY = ("eval_interval", "eval_split")
SAID_BY = {
    "dataset": ("dataset", "dataset_config", "dataset_split", "text_field", "skip_bad_records", *HELD_OUT_BY),
    "tokenizer": ("tokenizer", "model", "dataset"),
}
SAID_BY |= {"held_out": SAID_BY["dataset"], "corpus": SAID_BY["dataset"]}  # corpus: of a stream, its files


def compare(settings: Settings, identity: dict, manifest: dict) -> str:
    """What changed since the checkpoint and may change, in words; a UserError names what makes it another run."""
    other = "a resumed run must have the same; to train on from these weights start a new run from an --export"
    defaults = dataclasses.asdict(Settings())  # of flags newer than it
    saved = defaults | manifest["flags"] | manifest
    for key, now in (identity | {"optimizer": settings.optimizer}).items():
        if key not in saved:  # newer than the checkpoint, which did not compare it
            continue
        before, flag = saved[key], f"--{key.replace('_', '-')}"
        if before != now:
            if isinstance(now, dict):
                field = next((name for name in before if name in now and before[name] != now[name]), None)
                if field is None:  # other versions of transformers know other fields
                    continue
                before, now, flag = before[field], now[field], f"{flag}: {field}"
            elif key in SAID_BY:  # these are checksums
                pairs = {name: ((defaults | manifest["flags"])[name], getattr(settings, name)) for name in SAID_BY[key]}
                if all(pairs.get("eval_interval", (0,))):  # what matters is whether documents were held out
                    del pairs["eval_interval"]
                name = next((name for name, (before, now) in pairs.items() if before != now), "")
                if not name:
                    if key == "tokenizer":
                        raise UserError(f"{flag}: its vocabulary is not what it was at the checkpoint; {other}")
                    raise UserError(f"--dataset: {settings.dataset} is not what it was at the checkpoint; {other}")
                flag, (before, now) = f"--{name.replace('_', '-')}", pairs[name]
            raise UserError(f"{flag} was {before} in the checkpoint and is {now} now; {other}")
    told = (
        "world_size num_steps batch_size gradient_accumulation_steps zero_stage dp_replicate_size precision fp8_recipe "
        "lr lr_scheduler warmup_steps weight_decay betas max_grad_norm document_mask"
    )
    now = json.loads(json.dumps(dataclasses.asdict(settings), default=str)) | {"world_size": dist.get_world_size()}
    changed = (key for key in told.split() if saved.get(key) != now[key])
    return ", ".join(f"{key.replace('_', ' ')} {saved[key]} -> {now[key]}" for key in changed)


def keep_global_batch(settings: Settings, manifest: dict) -> int:
    """The gradient accumulation with which this number of ranks has the run's global batch; a UserError where they
    cannot share it. Where the batch flags are not the checkpoint's, the user asks for another batch, and is told."""
    flags, size, world = manifest["flags"], settings.batch_size, dist.get_world_size()
    if (size, settings.given_accumulation) != (flags["batch_size"], flags["given_accumulation"]):
        return settings.gradient_accumulation_steps
    sequences = manifest["world_size"] * flags["batch_size"] * flags["gradient_accumulation_steps"]
    accumulation, left_over = divmod(sequences, world * size)
    if left_over:
        problem = f"{world} ranks cannot share the run's global batch of {sequences} sequences"
        raise UserError(f"--batch-size {size}: {problem}; choose another number of ranks, or another batch size")
    return accumulation
