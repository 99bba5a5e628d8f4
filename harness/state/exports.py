"""Export: a folder that transformers loads, written from a sharded model that no rank can hold whole."""

import contextlib
import copy
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from harness import base, data, flags, job
from harness import model as models
from harness.state.find import resumes_same_run
from harness.state.shards import size_in_words
from harness.state.train_state import Checkpoint, TrainState, persistent_tensors, saved_tensors
from harness.state.transformers4 import old_tokenizer_config, with_old_names

MAX_SINGLE_FILE_BYTES = 5e9  # bytes up to which weights are one file, the limit of older transformers' save_pretrained
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
REMOTE_CODE_KEYS = ("auto_map", "_auto_class")  # name Python code of the source, which was not run and is not exported
OTHER_WEIGHTS = ("quantization_config", "transformers_weights")  # say how the source's files are, not an export's


# ---- The folder ------------------------------------------------------------------------------------------------------


def check_export(settings: flags.Args, checkpoint: Checkpoint | None, folder: pathlib.Path | None) -> None:
    """Every rank calls this before anything is trained.

    Args:
        checkpoint: that the run goes on from, or that is exported.
        folder: of the run; None where nothing is trained.

    Raises:
        UserError: --export could not be written later, or would write over something else than an earlier export of
            this run or of the same command.
    """
    is_same_run = checkpoint is not None and (folder is None or resumes_same_run(checkpoint, folder))
    run_id = checkpoint.manifest["run_id"] if is_same_run else None
    base.broadcast_from_rank_0(lambda: check_place(settings, run_id))


def check_place(settings: flags.Args, run_id: str | None) -> None:
    """`check_export` of the run `run_id`, which is None for a new one."""
    final = folder_of(settings)
    try:
        existing = next((parent for parent in final.parents if parent.exists()), final)
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise base.UserError(f"--export {settings.export}: cannot be written ({error.strerror})") from error
    if os.path.realpath(os.path.expanduser(settings.model)) == os.path.realpath(final):
        raise base.UserError(f"--export: {settings.export} is the folder of --model; choose another folder")
    if not os.path.lexists(final):
        return
    header, advice = header_of_export(final), "choose another folder or remove it"
    if not header:
        raise base.UserError(f"--export: {settings.export} exists and is no export; {advice}")
    if header["run_id"] != run_id and header.get("command") != checksum_of_command(settings):
        raise base.UserError(f"--export: {settings.export} holds the export of another run; {advice}")


def folder_of(settings: flags.Flags) -> pathlib.Path:
    """The folder of --export, by a path that ends in its name: that of `.` is the current folder's."""
    return pathlib.Path(os.path.abspath(os.path.expanduser(settings.export)))


def header_of_export(folder: pathlib.Path) -> dict[str, str]:
    """What the header of a file of weights says of the run that was exported; empty for a folder that was not written
    here."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            header = file.metadata() or {}
            return header if "run_id" in header else {}
    return {}


def trained_on(settings: flags.Settings, record: data.DataRecord | None) -> list[dict[str, Any]]:
    """The rules of the sources that weights were trained on, as far as they are known: by the run of `record`, and by
    that whose export they began with. Every rank calls this."""
    sources = [*record.removed.values(), *record.sources.values()] if record else []
    if settings.init == "pretrained":
        header = base.broadcast_from_rank_0(lambda: header_of_export(pathlib.Path(settings.model).expanduser()))
        sources += json.loads(header.get("trained_on", "[]"))
    return sources


def checksum_of_command(settings: flags.Flags) -> str:
    """Tells commands apart by the flags that were given; their values, such as paths, are nothing to publish."""
    given = json.dumps(dict(settings.explicit), sort_keys=True, default=str)
    return hashlib.sha256(given.encode()).hexdigest()[:20]


def export(
    settings: flags.Settings,
    state: TrainState,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: list[int],
    trained_on: list[dict[str, Any]],
) -> None:
    """Writes the folder of --export, which AutoModelForCausalLM and AutoTokenizer.from_pretrained load, in the place of
    an earlier export there. The weights keep their training precision: fp32, or bf16 with bf16-pure. Of adapters it is
    a folder of peft's or, with --export-weights merged, the model with them, in the precision of its frozen weights.
    `ends` are the tokens that end a text, `trained_on` the rules of the sources. Every rank calls this.

    Raises:
        UserError: the model is not finite, or the folder cannot be written; nothing of it is left.
    """
    final = folder_of(settings)
    temporary = final.with_name(f".{final.name}.writing")

    def on_rank_0(write: Callable[[], None]) -> None:
        """Has rank 0 write; where that fails, every rank raises the error."""

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

    problem = state.what_is_broken()
    if problem:
        raise base.UserError(f"--export {settings.export}: the model {problem}; nothing is exported", exit_code=1)
    on_rank_0(lambda: make_folder(temporary))
    write_weights(temporary, settings, state, trained_on, on_rank_0)
    on_rank_0(lambda: write_configs(temporary, settings, state.model, tokenizer, ends))
    on_rank_0(lambda: replace_folder(final, temporary))
    parts = [os.path.expanduser(settings.export), state.describe_steps()]
    if settings.lora_rank:
        parts.append("adapters alone, for peft" if exports_adapters(settings) else "the adapters merged into the model")
    if tokenizer is None:
        parts.append("without a tokenizer")
    job.print0(f"exported   {', '.join(parts)}")


def make_folder(folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
    folder.mkdir(parents=True)


def replace_folder(final: pathlib.Path, new: pathlib.Path) -> None:
    """Gives the folder `new` the name `final`; what had it, an earlier export, is removed then."""
    old = final.with_name(f".{final.name}.deleting")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def exports_adapters(settings: flags.Settings) -> bool:
    """Whether an export has the adapters alone."""
    return settings.lora_rank > 0 and settings.export_weights != "merged"


def exported_tensors(settings: flags.Settings, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that an export is made of: of adapters merged into a model, both."""
    return saved_tensors(model) if exports_adapters(settings) else persistent_tensors(model)


def export_bytes(settings: flags.Settings, model: PreTrainedModel) -> int:
    """The size of the weights that --export writes, in bytes, of all ranks."""
    tensors = exported_tensors(settings, model)
    if not exports_adapters(settings):
        tensors = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def write_weights(
    folder: pathlib.Path,
    settings: flags.Settings,
    state: TrainState,
    trained_on: list[dict[str, Any]],
    on_rank_0: Callable[[Callable[[], None]], None],
) -> None:
    """Writes the weights under the names that they have on the hub, into one file of at most MAX_SINGLE_FILE_BYTES,
    else into a file for each decoder layer and one for what is in none: no rank ever holds the model. A file's
    header has the run's id, the step, and checksums of the command and of what was trained on. Adapters alone are one
    file, by peft's names. Every rank calls this."""
    from safetensors.torch import save_file

    adapters_alone = exports_adapters(settings)
    tensors = exported_tensors(settings, state.model)
    parts = [tensors]
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_SINGLE_FILE_BYTES and not adapters_alone:
        parts = by_layer(tensors)
    command = checksum_of_command(settings)
    step = state.describe_steps() if state.averaged_steps else str(state.step)
    header = {"format": "pt", "run_id": state.run_id, "step": step, "command": command}
    header["trained_on"] = json.dumps(trained_on)
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}

    def write(name: str, part: dict[str, torch.Tensor]) -> None:
        if adapters_alone:
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
        if adapters_alone:
            name = "adapter_model.safetensors"
        on_rank_0(functools.partial(write, name, gather(part)))
    if len(parts) > 1:
        on_rank_0(lambda: write_json(folder / "model.safetensors.index.json", index))


def by_layer(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors of each layer (`model.layers.7.`), and those that are in none."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        prefix = re.match(r".*?\.\d+\.", name)
        layers.setdefault(prefix[0] if prefix else "", {})[name] = tensor
    return [*layers.values()]


def gather(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The full tensors on the host of rank 0, nothing on the other ranks. Every rank calls this."""
    gathered = {}
    for name, tensor in tensors.items():
        detached: Any = tensor.detach()
        full = detached.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu()
    return gathered


# ---- What is beside the weights --------------------------------------------------------------------------------------


def write_configs(
    folder: pathlib.Path,
    settings: flags.Settings,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: list[int],
) -> None:
    if exports_adapters(settings):
        models.write_adapter_config(folder, settings, model)
    else:
        write_json(folder / "config.json", model_config(model, tokenizer, settings.init == "pretrained"))
    write_json(folder / "generation_config.json", generation_config(settings, model, tokenizer, ends))
    if tokenizer:
        for name in REMOTE_CODE_KEYS:
            vars(tokenizer).pop(name, None)
            tokenizer.init_kwargs.pop(name, None)
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        write_json(path, old_tokenizer_config(base.read_json(path), tokenizer))
    for path in folder.glob("*.safetensors"):  # they are written for the owner alone
        shutil.copymode(next(folder.glob("*config.json")), path)


def model_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, pretrained: bool) -> dict:
    """The config of an export. For a model that began with random weights, the tokens that begin and end a text are the
    tokenizer's, as in its training. The padding token stays: its embedding gets no gradient."""
    config = copy.deepcopy(model.config)
    config.update({"architectures": [type(model).__name__.removeprefix("FSDP")], "use_cache": True})
    config.get_text_config().use_cache = True
    config.dtype = next(model.parameters()).dtype
    if tokenizer and not pretrained:
        config.get_text_config().bos_token_id = tokenizer.bos_token_id
        config.get_text_config().eos_token_id = tokenizer.eos_token_id
    # fields of generation, as old models have them there: save_pretrained would refuse the config
    misplaced = GenerationConfig().to_dict().keys() - type(config)().to_dict().keys()
    unwanted = {*misplaced, *REMOTE_CODE_KEYS, *OTHER_WEIGHTS}
    content = {key: value for key, value in config.to_diff_dict().items() if key not in unwanted}
    return with_old_names(content)


def generation_config(
    settings: flags.Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, ends: list[int]
) -> dict:
    """The generation config of an export: that of the source of the weights, or, where they began at random, the
    model's own with the tokens of the tokenizer. What ended documents, or answers of a chat, in training ends a text
    too: `ends`. A source's that cannot be read is said and left out: it must not cost the export at the end of a
    run."""
    config = model.generation_config.to_diff_dict()
    if settings.init == "pretrained":
        try:
            source = models.read_generation_config(settings.model)
            GenerationConfig.from_dict(source)  # as whoever loads the export does
            config = source
        except Exception as error:  # the file may hold anything
            problem = f"generation config of {settings.model}, which cannot be read ({base.first_line(error)})"
            job.print0(f"export     without the {problem}")
        before = config.get("eos_token_id")
        if tokenizer:
            all_ends = [*(before if isinstance(before, list) else [before]), *ends]
            config["eos_token_id"] = [end for end in dict.fromkeys(all_ends) if end is not None]
    elif tokenizer:
        config |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
        if len(ends) > 1:
            config["eos_token_id"] = ends
    unwanted = {"use_cache", "_from_model_config", *REMOTE_CODE_KEYS}
    return {key: value for key, value in config.items() if key not in unwanted and value is not None}


def write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
