"""Exports: a folder that transformers loads, written from a sharded model that does not fit on one rank."""

import contextlib
import copy
import fcntl
import functools
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from harness import base, data, flags, job
from harness import model as models
from harness.state.find import resumes_same_run
from harness.state.shards import size_in_words
from harness.state.train_state import Checkpoint, TrainState, persistent_tensors, saved_tensors
from harness.state.transformers4 import old_tokenizer_config, with_old_names

MAX_SINGLE_FILE_BYTES = 5e9  # larger weights are several files, as in older transformers' save_pretrained
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
REMOTE_CODE_KEYS = ("auto_map", "_auto_class")  # name Python code, which is neither run nor exported
OTHER_WEIGHTS = ("quantization_config", "transformers_weights")  # describe the source's files, not an export's


# ---- The folder ------------------------------------------------------------------------------------------------------


def check_export(settings: flags.Args, checkpoint: Checkpoint | None, folder: pathlib.Path | None) -> str:
    """Check --export before anything is trained. Returns the id of the run whose export is in DIR and may be replaced,
    "" for none. Every rank calls this.

    Args:
        checkpoint: the checkpoint to resume or export; None for a fresh start.
        folder: the run's folder; None if nothing is trained.

    Raises:
        UserError: --export cannot be written, overlaps the folder of the run or of the checkpoint's, or exists and is
            no earlier export of this run or command.
    """
    is_same_run = checkpoint is not None and (folder is None or resumes_same_run(checkpoint, folder))
    run_id = checkpoint.manifest["run_id"] if is_same_run else None
    in_use = [folder] if folder else []
    if checkpoint:
        run = checkpoint.path.parent.parent
        is_in_run = checkpoint.path.parent.name == "checkpoints" and base.is_run(run)
        in_use.append(run if is_in_run else checkpoint.path)
    return base.broadcast_from_rank_0(lambda: check_target(settings, run_id, in_use))


def check_target(settings: flags.Args, run_id: str | None, in_use: list[pathlib.Path]) -> str:
    """Check DIR as `check_export` does. `run_id` is that of the run that exports, None for a new one; `in_use` are the
    folders that DIR must not overlap."""
    final = export_folder(settings)
    try:
        existing = next((parent for parent in final.parents if parent.exists()), final)
        tempfile.TemporaryFile(dir=existing).close()
        header = read_earlier_export(settings)
    except OSError as error:
        raise base.UserError(f"--export {settings.export}: cannot be written ({error.strerror})") from error
    if final.is_mount():
        problem = "is a mount point, which an export cannot replace"
        raise base.UserError(f"--export: {settings.export} {problem}; give a folder inside it")
    if os.path.realpath(os.path.expanduser(settings.model)) == os.path.realpath(final):
        raise base.UserError(f"--export: {settings.export} is the folder of --model; choose another folder")
    for folder in map(pathlib.Path.resolve, in_use):
        if final.is_relative_to(folder) or folder.is_relative_to(final):
            raise base.UserError(
                f"--export: {settings.export} overlaps the run's folder {folder}; choose another folder"
            )
    if header and header["run_id"] != run_id and header.get("command") != command_checksum(settings):
        raise holds_other_export(settings)
    return header.get("run_id", "")


def export_folder(settings: flags.Flags) -> pathlib.Path:
    """Return the absolute path of --export, without links."""
    return pathlib.Path(os.path.realpath(os.path.expanduser(settings.export)))


def read_earlier_export(settings: flags.Flags) -> dict[str, str]:
    """Return the header of the export in DIR; {} if DIR does not exist or is an empty folder.

    Raises:
        UserError: DIR is something else.
    """
    final = export_folder(settings)
    header = read_export_header(final)
    if not header and os.path.lexists(final) and not (final.is_dir() and not any(final.iterdir())):
        advice = "choose another folder or remove it"
        raise base.UserError(f"--export: {settings.export} exists and is no export; {advice}")
    return header


def holds_other_export(settings: flags.Flags) -> base.UserError:
    advice = "choose another folder or remove it"
    return base.UserError(f"--export: {settings.export} holds the export of another run; {advice}")


def read_export_header(folder: pathlib.Path) -> dict[str, str]:
    """Return the header of a weights file in an export: `run_id`, `step`, `command`, `trained_on`; {} if the folder is
    no export."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            header = file.metadata() or {}
            return header if "run_id" in header else {}
    return {}


def trained_on(settings: flags.Settings, record: data.DataRecord | None) -> list[data.SourceSpec]:
    """Return the records of the sources that weights were trained on, as far as they are known: those in `record`, and
    those of the run whose export the weights came from. Every rank calls this."""
    sources = list(record.sources.values()) if record else []
    if settings.init == "pretrained":
        header = base.broadcast_from_rank_0(lambda: read_export_header(pathlib.Path(settings.model).expanduser()))
        sources += json.loads(header.get("trained_on", "[]"))
    return sources


def command_checksum(settings: flags.Flags) -> str:
    """Return a checksum of the explicit flags: an export identifies its command without publishing paths."""
    given = json.dumps(dict(settings.explicit), sort_keys=True, default=str)
    return hashlib.sha256(given.encode()).hexdigest()[:20]


def export(
    settings: flags.Settings,
    state: TrainState,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: list[int],
    trained_on: list[data.SourceSpec],
    replaced_run: str,
) -> None:
    """Write the folder of --export, for AutoModelForCausalLM and AutoTokenizer.from_pretrained. It replaces an earlier
    export. Every rank calls this.

    Weights keep their training precision: fp32, or bf16 with bf16-pure. Adapters give a folder for peft or, with
    --export-weights merged, the merged model in the precision of its frozen weights.

    Args:
        stop_ids: ids of the tokens that end a text.
        trained_on: records of the sources, for the header.
        replaced_run: from `check_export`.

    Raises:
        UserError: the model is not finite, or the folder cannot be written; nothing is left then. Or another run has
            exported to it meanwhile; then this export has another name.
    """
    final = export_folder(settings)
    # a new name and a lock, as other processes may write an export of this run at the same time
    temporary = final.with_name(f".{final.name}.{state.run_id}-{uuid.uuid4().hex[:8]}.writing")

    problem = state.describe_fault()
    if problem:
        raise base.UserError(f"--export {settings.export}: the model {problem}; nothing is exported", exit_code=1)
    write = functools.partial(write_on_rank_0, settings, temporary)
    write(lambda: create_locked(temporary))
    write_weights(temporary, settings, state, trained_on)
    write(lambda: write_configs(temporary, settings, state.model, tokenizer, stop_ids))
    write(lambda: sync_folder(temporary))  # before an earlier export is removed: the power may be cut
    base.broadcast_from_rank_0(lambda: publish(settings, temporary, {state.run_id, replaced_run}))
    parts = [os.path.expanduser(settings.export), state.describe_steps()]
    if settings.lora_rank:
        parts.append("only adapters, for peft" if exports_adapters(settings) else "the adapters merged into the model")
    if tokenizer is None:
        parts.append("without a tokenizer")
    model_type = state.model.config.model_type
    if model_type in flags.model_types():
        parts.append(f"loading it needs the classes of {model_type}, registered by {flags.describe_imports()}")
    job.print0(f"exported   {', '.join(parts)}")


def create_locked(folder: pathlib.Path) -> None:
    """Create a folder that no other export removes while this process lives."""
    folder.mkdir(parents=True)
    with contextlib.suppress(OSError):  # a file system without locks
        lock(folder)


def lock(folder: pathlib.Path) -> None:
    """Lock a folder until this process ends. Raises OSError if another process has locked it, or if its file system
    has no locks."""
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_on_rank_0(settings: flags.Settings, temporary: pathlib.Path, write: Callable[[], None]) -> None:
    """Call `write` on rank 0. If it fails, remove the folder `temporary` and raise the error on every rank."""

    def write_or_clean_up() -> None:
        try:
            with base.working(lambda: size_in_words(temporary)):
                write()
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            problem = f"--export {settings.export}: cannot be written ({base.first_line(error)})"
            raise base.UserError(problem, exit_code=1) from error

    job.enter_phase("export")
    base.broadcast_from_rank_0(write_or_clean_up)


def sync_folder(folder: pathlib.Path) -> None:
    for path in (*folder.rglob("*"), folder):
        base.sync_to_disk(path)


@base.working()
def publish(settings: flags.Settings, new: pathlib.Path, replaced_runs: set[str]) -> None:
    """Rename the finished export `new` to DIR, and remove the earlier one there if it is of `replaced_runs`.

    Raises:
        UserError: DIR holds something else by now, or cannot be replaced; `new` gets a free name then.
    """
    final = export_folder(settings)
    old = final.with_name(f".{final.name}.deleting")
    try:
        header = read_earlier_export(settings)
        if header and header["run_id"] not in replaced_runs:
            raise holds_other_export(settings)
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        new.rename(final)
    except (OSError, base.UserError) as error:
        if old.exists() and not final.exists():
            old.rename(final)
        names = (final.with_name(f"{final.name}-{number}") for number in itertools.count(2))
        free = next(name for name in names if not os.path.lexists(name))
        new.rename(free)
        cause = f"cannot be replaced ({error.strerror})" if isinstance(error, OSError) else "was written meanwhile"
        problem = f"--export: {settings.export} {cause}; this export is in {free}"
        raise base.UserError(problem, exit_code=1) from error
    unfinished, _, _ = new.name.rpartition("-")
    for leftover in final.parent.glob(f"{glob.escape(unfinished)}-*.writing"):  # of killed exports of this run
        with contextlib.suppress(OSError):
            lock(leftover)
            shutil.rmtree(leftover)
    shutil.rmtree(old, ignore_errors=True)


def exports_adapters(settings: flags.Settings) -> bool:
    """Return True if an export has only adapters."""
    return settings.lora_rank > 0 and settings.export_weights != "merged"


def exported_tensors(settings: flags.Settings, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors from which an export is made: only adapters, or all. Of tied ones it has the name to
    which the others are tied, which transformers reads."""
    if exports_adapters(settings):
        return saved_tensors(model)
    tensors = persistent_tensors(model)
    for name, source in model.all_tied_weights_keys.items():
        if name in tensors and source not in tensors:  # a family may define its head before its embedding
            tensors[source] = tensors.pop(name)
    return tensors


def export_bytes(settings: flags.Settings, model: PreTrainedModel) -> int:
    """Return the bytes of the weights that --export writes, of all ranks."""
    tensors = exported_tensors(settings, model)
    if not exports_adapters(settings):
        tensors = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def write_weights(
    folder: pathlib.Path, settings: flags.Settings, state: TrainState, trained_on: list[data.SourceSpec]
) -> None:
    """Write the weights, under their names on the hub. Every rank calls this.

    Up to MAX_SINGLE_FILE_BYTES they are one file, else a file for each decoder layer and one for the rest, so rank 0
    never holds the model. Only adapters are one file, with peft's names. A file's header has the run's id, the step, a
    checksum of the command and the sources trained on."""
    from safetensors.torch import save_file

    only_adapters = exports_adapters(settings)
    tensors = exported_tensors(settings, state.model)
    parts = [tensors]
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_SINGLE_FILE_BYTES and not only_adapters:
        parts = by_layer(tensors)
    command = command_checksum(settings)
    step = state.describe_steps() if state.averaged_steps else str(state.step)
    header = {"format": "pt", "run_id": state.run_id, "step": step, "command": command}
    header["trained_on"] = json.dumps(trained_on)
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}

    def write(name: str, part: dict[str, torch.Tensor]) -> None:
        if only_adapters:
            weights = models.to_peft_names(part)
        else:
            weights = models.as_in_checkpoint(state.model, models.merged(state.model, part))
        for key, tensor in weights.items():  # copies: parts of a fused tensor share its storage
            weights[key] = tensor.clone(memory_format=torch.contiguous_format)
        save_file(weights, folder / name, header)
        index["weight_map"] |= dict.fromkeys(weights, name)
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in weights.values())

    for number, part in enumerate(parts, 1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        if only_adapters:
            name = "adapter_model.safetensors"
        write_on_rank_0(settings, folder, functools.partial(write, name, gather(part)))
    if len(parts) > 1:
        write_on_rank_0(settings, folder, lambda: write_json(folder / "model.safetensors.index.json", index))


def by_layer(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split tensors by layer (`model.layers.7.`), with the rest together."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        prefix = re.match(r".*?\.\d+\.", name)
        layers.setdefault(prefix[0] if prefix else "", {})[name] = tensor
    return [*layers.values()]


def gather(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather full tensors to the host on rank 0; {} on the other ranks. Every rank calls this."""
    gathered = {}
    for name, tensor in tensors.items():
        detached = tensor.detach()
        full = detached.full_tensor() if isinstance(detached, DTensor) else detached
        if dist.get_rank() == 0:
            gathered[name] = full.cpu()
    return gathered


# ---- Configs and tokenizer -------------------------------------------------------------------------------------------


def write_configs(
    folder: pathlib.Path,
    settings: flags.Settings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: list[int],
) -> None:
    if exports_adapters(settings):
        models.write_adapter_config(folder, settings, model)
    else:
        write_json(folder / "config.json", model_config(model, tokenizer, settings.init == "pretrained"))
    if model.can_generate():
        write_json(folder / "generation_config.json", generation_config(settings, model, tokenizer, stop_ids))
    if tokenizer:
        for name in REMOTE_CODE_KEYS:
            vars(tokenizer).pop(name, None)
            tokenizer.init_kwargs.pop(name, None)
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        write_json(path, old_tokenizer_config(base.read_json(path), tokenizer))
        warn_of_other_tokenizer(folder, settings, tokenizer)
    for path in folder.glob("*.safetensors"):  # safetensors writes them with the owner's permissions only
        shutil.copymode(next(folder.glob("*config.json")), path)


def warn_of_other_tokenizer(folder: pathlib.Path, settings: flags.Settings, tokenizer: Any) -> None:
    """Warn if AutoTokenizer makes another tokenizer of the folder than the one that was trained with: for some model
    types, such as qwen2, it takes their own class whatever the files say."""
    if not tokenizer.is_fast:
        return

    def rules(tokenizer: Any) -> list:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        return [content[part] for part in ("normalizer", "pre_tokenizer", "post_processor")]

    try:
        read: Any = AutoTokenizer.from_pretrained(folder)
        problem = f"reads its tokenizer as {type(read).__name__}, which splits text otherwise"
        is_same = rules(read) == rules(tokenizer)
    except Exception as error:  # transformers raises many kinds
        problem, is_same = f"does not read its tokenizer ({base.first_line(error)})", False
    if not is_same:
        advice = f"read it with PreTrainedTokenizerFast.from_pretrained({settings.export!r})"
        job.warn(f"--export {settings.export}: AutoTokenizer {problem}; {advice}")


def model_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, pretrained: bool) -> dict:
    """Return the config of an export. A model with random initial weights gets the tokenizer's BOS and EOS, which it
    was trained with. The padding token stays, as its embedding gets no gradient."""
    config = copy.deepcopy(model.config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # of the text part of mllama or emu3, read inside the full one
        kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING
        full = next(kind for kind in kinds if kind.sub_configs.get("text_config") is type(config))
        config = full(text_config=config, tie_word_embeddings=config.tie_word_embeddings)
    config.update({"architectures": [type(model).__name__.removeprefix("FSDP")], "use_cache": True})
    config.get_text_config().use_cache = True
    config.dtype = next(model.parameters()).dtype
    if tokenizer and not pretrained:
        config.get_text_config().bos_token_id = tokenizer.bos_token_id
        config.get_text_config().eos_token_id = tokenizer.eos_token_id
    # generation fields in configs of old models: save_pretrained would refuse them
    misplaced = GenerationConfig().to_dict().keys() - type(config)().to_dict().keys()
    unwanted = {*misplaced, *REMOTE_CODE_KEYS, *OTHER_WEIGHTS}
    content = {key: value for key, value in config.to_diff_dict().items() if key not in unwanted}
    return with_old_names(content)


def generation_config(
    settings: flags.Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stop_ids: list[int]
) -> dict:
    """Return the generation config of an export: the source's for pretrained weights, else the model's with the
    tokenizer's special tokens. `stop_ids`, which ended documents or a chat's answers in training, are EOS too. If the
    source's cannot be read, a line says so, and the export is written without it."""
    config = model.generation_config.to_diff_dict()
    if settings.init == "pretrained":
        try:
            source = models.read_generation_config(settings.model)
            GenerationConfig.from_dict(source)  # as `generate` will
            config = source
        except Exception as error:  # the file may have any content
            problem = f"generation config of {settings.model}, which cannot be read ({base.first_line(error)})"
            job.print0(f"export     without the {problem}")
        before = config.get("eos_token_id")
        if tokenizer:
            all_stop_ids = [*(before if isinstance(before, list) else [before]), *stop_ids]
            config["eos_token_id"] = [end for end in dict.fromkeys(all_stop_ids) if end is not None]
    elif tokenizer:
        config |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
        if len(stop_ids) > 1:
            config["eos_token_id"] = stop_ids
    unwanted = {"use_cache", "_from_model_config", *REMOTE_CODE_KEYS}
    return {key: value for key, value in config.items() if key not in unwanted and value is not None}


def write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
