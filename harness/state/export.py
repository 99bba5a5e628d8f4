"""Export: a folder that transformers loads, written from a sharded model that no rank can hold whole. Called by the
script at the end of a run. It does not know what the weights were trained for."""

import copy
import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from harness.base import saved
from harness.base.errors import UserError
from harness.base.ranks import from_main_process
from harness.base.text import first_line
from harness.base.transformers_internals import as_in_checkpoint
from harness.flags.commands import given
from harness.flags.settings import Settings
from harness.job import heartbeats
from harness.job.folders import name_of
from harness.job.printing import say
from harness.model.configs import read_generation_config
from harness.state.train_state import TrainState, persistent_tensors

EXPORT_SHARD = 5e9  # bytes of one safetensors file, the limit of transformers' save_pretrained
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Flags that a run may be given anew without other weights; any other one, a new one too, shapes them.
SHAPES_NO_WEIGHT = (
    "demo config cache_dir num_workers num_steps eval_steps sample_prompt sample_prompts sample_tokens "
    "checkpoint_interval keep_checkpoints async_checkpoint final_checkpoint resume export timeout_minutes output_dir "
    "run_name log_with project_name log_interval metrics_port metrics_host perf_warmup_steps peak_tflops min_mfu "
    "max_memory_gib profile memory_snapshot plan plan_gpus plan_gpu gpus_per_node plan_rates plan_seconds gpu_hour_usd "
    "json html measure own_plan argv lacks_disk lacks_memory "
    "gradient_accumulation_steps"  # which follows from given_accumulation and ranks
)
DECIDED_LATER = "sequence_length batch_size attention compile fused_loss warmup_steps"  # where they are not given
FOREIGN_CODE = ("auto_map", "_auto_class")  # they speak of code that was not run here and is not exported


def step_of_export(settings: Settings) -> int:
    """The step after which a run that goes on by --resume auto was exported, if that is all that it was to do: its
    --export is there, whole, and of its last step; else 0. A UserError where something else is there."""
    final = pathlib.Path(settings.export or "").expanduser()
    if not settings.export or settings.resume != "auto" or not os.path.lexists(final):
        return 0
    run, step = origin_of(final)
    folder = pathlib.Path(settings.output_dir, name_of(settings)).expanduser()
    config = saved.read_config(folder)
    own = run and config.get("run_id") == run and saved.is_same_run(folder, run, config.get("folder"))
    if not (own and same_weights(settings, config.get("flags"))):
        raise UserError(f"--export: {settings.export} exists already; choose another folder or remove it")
    newest = saved.newest(folder)
    reached = max(settings.num_steps, saved.step_of(newest) if newest else 0)
    if step < reached:
        what = f"holds this run after step {step}, which is to be at step {reached}"
        raise UserError(f"--export: {settings.export} {what}; choose another folder or remove it")
    return step


def same_weights(settings: Settings, flags) -> bool:
    """Whether the flags of config.json that shape weights are those of `settings`, in which what is left open is not
    decided yet. The step is compared by itself."""
    if not isinstance(flags, dict):
        return False
    open_still = {name for name in DECIDED_LATER.split() if name not in given(settings.argv)}
    now = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    saved_flags = dataclasses.asdict(Settings()) | flags  # of flags newer than it the defaults
    left_out = {*SHAPES_NO_WEIGHT.split(), *open_still}
    return all(saved_flags[name] == now[name] for name in now if name not in left_out)


def origin_of(folder: pathlib.Path) -> tuple[str, int]:
    """The run id and the step that stand in every weight file of an export; empty where they do not, or one is missing
    or cut."""
    from safetensors import SafetensorError, safe_open

    try:
        index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
        if index.exists():
            names = set(saved.read_json(index)["weight_map"].values())
        origins = set()
        for name in names:
            saved.open_file(folder / name).close()
            with safe_open(folder / name, "pt") as file:  # which compares the file's size with its header
                origins.add((file.metadata()["run_id"], int(file.metadata()["step"])))
        return origins.pop() if len(origins) == 1 and (folder / "config.json").exists() else ("", 0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return "", 0


def model_config(model, tokenizer, pretrained: bool) -> dict:
    """The config as it is exported, in words that transformers 4 and what is built on it read too. In one of a model
    that began with random weights texts begin and end as the tokenizer has it, for so it was trained; the padding
    stays, as its embedding is one that gets no gradient."""
    config = copy.deepcopy(model.config)
    config.update({"architectures": [type(model).__name__.removeprefix("FSDP")], "use_cache": True})
    config.get_text_config().use_cache = True
    config.dtype = next(model.parameters()).dtype
    for name in SPECIAL[:2] if tokenizer and not pretrained else ():
        setattr(config.get_text_config(), name, getattr(tokenizer, name))
    content = json.loads(config.to_json_string())
    misplaced = GenerationConfig().to_dict().keys() - type(config)().to_dict().keys()
    for name in (*misplaced, *FOREIGN_CODE):  # with the first no save_pretrained would write it any more
        content.pop(name, None)
    rope = content.get("rope_parameters") or {}
    if "rope_theta" in rope:  # transformers 4 would take 10,000 without a word
        content |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        if rope.get("rope_type", "default") != "default":
            content["rope_scaling"] = rope
    return content


def generation_config(settings: Settings, model, tokenizer) -> tuple[dict, str]:
    """What `generate` does by default with the export, and why that is not what the source of its weights does, if that
    cannot be read: at the end of a run nothing is to be lost for it. Generation ends, too, where documents ended in
    training."""
    config, why = model.generation_config.to_diff_dict(), ""
    if pretrained := settings.init == "pretrained":
        try:
            source = read_generation_config(settings.model)
            GenerationConfig.from_dict(source)  # as whoever loads the export does
            ends = source.get("eos_token_id")
            if not all(isinstance(end, int) for end in (ends if isinstance(ends, list) else [ends or 0])):
                raise ValueError("its eos_token_id is no token id")
            config = source
        except Exception as error:  # whatever stands in that file
            why = first_line(error)
    elif tokenizer:
        config |= {name: getattr(tokenizer, name) for name in SPECIAL}
    ends, own = config.get("eos_token_id"), tokenizer and tokenizer.eos_token_id
    ends = ends if isinstance(ends, list) else [ends] * (ends is not None)
    if pretrained and own is not None and own not in ends:
        config["eos_token_id"] = [*ends, own] if ends else own
    unwanted = {"use_cache", "_from_model_config", *FOREIGN_CODE}
    return {key: value for key, value in config.items() if key not in unwanted and value is not None}, why


def save_tokenizer(tokenizer, folder: pathlib.Path) -> None:
    """save_pretrained, in words that transformers 4 and what is built on it read too."""
    for name in FOREIGN_CODE:
        vars(tokenizer).pop(name, None)
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # how it was loaded here
        config.pop(name, None)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # its name until transformers 5
    if isinstance(extra := config.get("extra_special_tokens"), list):  # there it is a dictionary
        config["additional_special_tokens"] = extra
        del config["extra_special_tokens"]
    write_json(path, config)


def write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def export(settings: Settings, state: TrainState, tokenizer) -> None:
    """Writes the folder of --export, which AutoModelForCausalLM and AutoTokenizer.from_pretrained load.

    Parameters are gathered one decoder layer at a time and rank 0 writes a file whenever it holds 5 GB, so no rank
    holds the model. The weights keep their training precision: fp32, or bf16 with bf16-pure; each file's header has
    run id and step. Every rank calls this; where it cannot be written, a UserError says so and nothing is left of it.
    """
    from safetensors.torch import save_file

    path, model, origin = settings.export, state.model, {"run_id": state.run_id, "step": str(state.step)}
    if not state.finite():
        raise UserError(f"--export {path}: the weights are infinite or NaN; nothing is exported", exit_code=1)
    main, final = dist.get_rank() == 0, pathlib.Path(path).expanduser()
    temporary = final.with_name(f".{final.name}.writing")
    tensors, error = persistent_tensors(model), ""
    generation, lost = generation_config(settings, model, tokenizer) if main else ({}, "")
    files: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}

    def attempt(work: Callable, *args, **options) -> None:  # an error must not keep rank 0 from the next all-gather
        nonlocal error
        try:
            if main and not error:
                work(*args, **options)
        except Exception as exception:
            error = first_line(exception)
            shutil.rmtree(temporary, ignore_errors=True)

    def flush() -> None:
        save_file(pending, temporary / f"{len(files)}.part", metadata={"format": "pt"} | origin)
        files.append(list(pending))
        pending.clear()

    def take(group: dict[str, torch.Tensor]) -> None:
        for name, tensor in as_in_checkpoint(model, group).items():
            if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > EXPORT_SHARD:
                flush()
            pending[name] = tensor.clone(memory_format=torch.contiguous_format)  # no part of a fused tensor's storage

    def finish() -> None:
        flush()
        names = ["model.safetensors"]
        if len(files) > 1:
            names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
            weight_map = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
            write_json(temporary / "model.safetensors.index.json", index)
        for number, name in enumerate(names):
            (temporary / f"{number}.part").rename(temporary / name)
        write_json(temporary / "config.json", model_config(model, tokenizer, settings.init == "pretrained"))
        write_json(temporary / "generation_config.json", generation)
        if tokenizer:
            save_tokenizer(tokenizer, temporary)
        for name in names:
            shutil.copymode(temporary / "config.json", temporary / name)  # safetensors writes for the owner alone
        temporary.rename(final)

    attempt(shutil.rmtree, temporary, ignore_errors=True)
    attempt(temporary.mkdir, parents=True)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((re.match(r".*?\.\d+\.", name) or [""])[0], {})[name] = tensor
    for group in groups.values():
        heartbeats.at("export")
        whole = {}
        for name, tensor in group.items():
            full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
            if main:
                whole[name] = full.cpu()
        attempt(take, whole)
    attempt(finish)
    error = from_main_process(lambda: error, main)
    if error:
        raise UserError(f"--export {path}: cannot be written ({error})", exit_code=1)
    say(f"exported   {final}" + ", without a tokenizer" * (tokenizer is None))
    if lost:
        say(f"           without the generation config of {settings.model}, which cannot be read ({lost})")
