"""Export: a folder that transformers loads, written from a sharded model that no rank can hold whole. The script calls
it at the end of a run. Independent of optimizer and data."""

import contextlib
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

from harness import job
from harness.base import saved
from harness.base.errors import UserError
from harness.base.ranks import from_main_process
from harness.base.text import first_line
from harness.base.transformers_internals import as_in_checkpoint
from harness.flags.commands import given
from harness.flags.settings import Settings
from harness.job import say
from harness.job.folders import name_of
from harness.model.configs import read_generation_config
from harness.state.train_state import TrainState, persistent_tensors

EXPORT_SHARD = 5e9  # bytes of one safetensors file, the limit of transformers' save_pretrained
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Flags that a run may be given anew without other weights; any other one, a new one too, shapes them.
SHAPES_NO_WEIGHT = (
    "demo config cache_dir num_workers num_steps num_tokens eval_steps sample_prompt sample_prompts sample_tokens "
    "checkpoint_interval keep_checkpoints async_checkpoint final_checkpoint resume export timeout_minutes max_skipped "
    "output_dir run_name log_with project_name log_interval metrics_port metrics_host perf_warmup_steps peak_tflops "
    "min_mfu max_memory_gib profile memory_snapshot show_samples max_epochs "
    "plan plan_gpus plan_gpu gpus_per_node plan_rates plan_seconds gpu_hour_usd "
    "json html measure own_plan argv lacks_disk lacks_memory "
    "gradient_accumulation_steps"  # which follows from given_accumulation and ranks
)
# where they are not given
DECIDED_LATER = "precision sequence_length batch_size attention compile fused_loss warmup_steps document_mask"
FOREIGN_CODE = ("auto_map", "_auto_class")  # name Python code of the source, which was not run and is not exported


def step_of_export(settings: Settings) -> int:
    """The step of an --export that a run with --resume auto has already written, complete and of its last step, so that
    nothing is left to do; 0 where there is none. A UserError where something else is in that folder."""
    if not settings.export or settings.resume != "auto":
        return 0
    final = pathlib.Path(settings.export).expanduser()
    if not os.path.lexists(final):
        return 0
    run_id, step = origin_of(final)
    folder = pathlib.Path(settings.output_dir, name_of(settings)).expanduser()
    config = saved.read_config(folder)
    is_own = run_id and config.get("run_id") == run_id and saved.is_same_run(folder, run_id, config.get("folder"))
    if not is_own or not same_weights(settings, config.get("flags")):
        raise UserError(f"--export: {settings.export} exists already; choose another folder or remove it")
    last_step = settings.num_steps
    newest = saved.newest(folder)
    if newest:
        last_step = max(last_step, saved.step_of(newest))
    if step < last_step:
        problem = f"holds this run after step {step}, which is to be at step {last_step}"
        raise UserError(f"--export: {settings.export} {problem}; choose another folder or remove it")
    return step


def same_weights(settings: Settings, flags) -> bool:
    """Whether the flags of config.json that shape the weights are those of `settings`. Flags that are left open in
    `settings` are not compared: they are decided later. Nor is the number of steps."""
    if not isinstance(flags, dict):
        return False
    left_open = {name for name in DECIDED_LATER.split() if name not in given(settings.argv)}
    now = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    saved_flags = dataclasses.asdict(Settings()) | flags  # of flags newer than it the defaults
    ignored = {*SHAPES_NO_WEIGHT.split(), *left_open}
    return all(saved_flags[name] == now[name] for name in now if name not in ignored)


def origin_of(folder: pathlib.Path) -> tuple[str, int]:
    """(run id, step) of an export, from the headers of its weight files; ("", 0) where a file lacks them, is missing or
    is cut. Every file is opened, so that an export that was damaged later is not taken for a complete one."""
    from safetensors import SafetensorError, safe_open

    no_origin = ("", 0)
    try:
        names = {"model.safetensors"}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = set(saved.read_json(index)["weight_map"].values())
        origins = set()
        for name in names:
            saved.open_file(folder / name).close()
            with safe_open(folder / name, "pt") as file:  # which compares the file's size with its header
                header = file.metadata()
            origins.add((header["run_id"], int(header["step"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return no_origin
    if len(origins) != 1 or not (folder / "config.json").exists():
        return no_origin
    return origins.pop()


def model_config(model, tokenizer, pretrained: bool) -> dict:
    """The config of an export, with the fields that transformers 4 and what is built on it read too.

    For a model that began with random weights, the tokens that begin and end a text are the tokenizer's, as in its
    training. The padding token stays: its embedding gets no gradient.
    """
    config = copy.deepcopy(model.config)
    config.update({"architectures": [type(model).__name__.removeprefix("FSDP")], "use_cache": True})
    config.get_text_config().use_cache = True
    config.dtype = next(model.parameters()).dtype
    if tokenizer and not pretrained:
        config.get_text_config().bos_token_id = tokenizer.bos_token_id
        config.get_text_config().eos_token_id = tokenizer.eos_token_id
    content = json.loads(config.to_json_string())
    misplaced = GenerationConfig().to_dict().keys() - type(config)().to_dict().keys()
    for name in (*misplaced, *FOREIGN_CODE):  # a config with misplaced fields cannot be saved by save_pretrained
        content.pop(name, None)
    rope = content.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where transformers 4 does not find it, it takes 10,000 without a word
        content["rope_theta"] = rope["rope_theta"]
        if "partial_rotary_factor" in rope:
            content["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if rope.get("rope_type", "default") != "default":
            content["rope_scaling"] = rope
    return content


def generation_config(settings: Settings, model, tokenizer) -> tuple[dict, str]:
    """(the generation config of an export, why that of its source is not used). That of the source of the weights is
    used where it can be read; the reason is empty then, and where the weights began at random. An unreadable one raises
    nothing: at the end of a run it must not cost the export. The token that ended documents in training ends a text
    too."""
    config, unreadable = model.generation_config.to_diff_dict(), ""
    pretrained = settings.init == "pretrained"
    if pretrained:
        try:
            source = read_generation_config(settings.model)
            GenerationConfig.from_dict(source)  # as whoever loads the export does
            if not all(isinstance(end, int) for end in end_tokens(source)):
                raise ValueError("its eos_token_id is no token id")
            config = source
        except Exception as error:  # the file may hold anything
            unreadable = first_line(error)
    elif tokenizer:
        config |= {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
    ends = end_tokens(config)
    end_of_text = tokenizer.eos_token_id if tokenizer else None
    if pretrained and end_of_text is not None and end_of_text not in ends:
        config["eos_token_id"] = [*ends, end_of_text] if ends else end_of_text
    unwanted = {"use_cache", "_from_model_config", *FOREIGN_CODE}
    return {key: value for key, value in config.items() if key not in unwanted and value is not None}, unreadable


def end_tokens(generation: dict) -> list:
    """The `eos_token_id` of a generation config, which may be one, several or none."""
    ends = generation.get("eos_token_id")
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def save_tokenizer(tokenizer, folder: pathlib.Path) -> None:
    """save_pretrained, with the fields that transformers 4 and what is built on it read too."""
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
    path, final = settings.export, pathlib.Path(settings.export).expanduser()
    is_average = settings.export_weights == "ema"
    with state.average.as_weights() if is_average else contextlib.nullcontext():
        problem = state.what_is_broken()
        if problem:
            raise UserError(f"--export {path}: the model {problem}; nothing is exported", exit_code=1)
        unreadable, error = write_export(settings, state, tokenizer, final)
    if error:
        raise UserError(f"--export {path}: cannot be written ({error})", exit_code=1)
    parts = [str(final)]
    if is_average:
        parts.append("the average of the weights")
    if tokenizer is None:
        parts.append("without a tokenizer")
    say(f"exported   {', '.join(parts)}")
    if unreadable:
        say(f"           without the generation config of {settings.model}, which cannot be read ({unreadable})")


def write_export(settings: Settings, state: TrainState, tokenizer, final: pathlib.Path) -> tuple[str, str]:
    """Writes the folder of an export; every rank calls this. Returns why the generation config of the source is not in
    it, empty where it is, and the error with which the writing ended, empty where it did not."""
    is_main = dist.get_rank() == 0
    generation, unreadable = {}, ""
    if is_main:
        generation, unreadable = generation_config(settings, state.model, tokenizer)
    tensors = persistent_tensors(state.model)
    writer = ExportWriter(final, state)
    if is_main:
        writer.attempt(writer.begin)
    for group in by_layer(tensors).values():
        job.enter_phase("export")
        gathered = gather(group, is_main)
        if is_main:
            writer.attempt(writer.add, gathered)
    if is_main:
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        writer.attempt(writer.finish, settings, generation, tokenizer, total_size)
    return unreadable, from_main_process(lambda: writer.error, is_main)


def by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each layer (`model.layers.7.`), and under the empty name those that are in none."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        prefix = re.match(r".*?\.\d+\.", name)
        layers.setdefault(prefix[0] if prefix else "", {})[name] = tensor
    return layers


def gather(tensors: dict[str, torch.Tensor], is_main: bool) -> dict[str, torch.Tensor]:
    """The full tensors on the host of the main process, nothing on the other ranks. Every rank calls this."""
    gathered = {}
    for name, tensor in tensors.items():
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_main:
            gathered[name] = full.cpu()
    return gathered


class ExportWriter:
    """Writes the files of an export, on rank 0, into a hidden folder that gets its final name last."""

    def __init__(self, final: pathlib.Path, state: TrainState):
        self.final, self.temporary = final, final.with_name(f".{final.name}.writing")
        self.model = state.model
        self.origin = {"run_id": state.run_id, "step": str(state.step)}
        self.pending: dict[str, torch.Tensor] = {}  # of the next file
        self.files: list[list[str]] = []  # the names of the tensors in each file so far
        self.error = ""

    def attempt(self, work: Callable, *args) -> None:
        """Does a part of the work. An error is kept and ends the writing, not the program: rank 0 still has to take
        part in the next all-gather."""
        if self.error:
            return
        try:
            work(*args)
        except Exception as error:
            self.error = first_line(error)
            shutil.rmtree(self.temporary, ignore_errors=True)

    def begin(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Adds the tensors of a layer, under the names that they have on the hub, and writes each file that is full."""
        for name, tensor in as_in_checkpoint(self.model, tensors).items():
            size = sum(other.nbytes for other in self.pending.values())
            if self.pending and size + tensor.nbytes > EXPORT_SHARD:
                self.write_pending()
            # a copy: it may be a part of a fused tensor, whose storage would be kept
            self.pending[name] = tensor.clone(memory_format=torch.contiguous_format)

    def write_pending(self) -> None:
        from safetensors.torch import save_file

        metadata = {"format": "pt"} | self.origin
        save_file(self.pending, self.temporary / f"{len(self.files)}.part", metadata=metadata)
        self.files.append(list(self.pending))
        self.pending.clear()

    def finish(self, settings: Settings, generation: dict, tokenizer, total_size: int) -> None:
        """Writes what is pending and everything beside the weights; `total_size` is that of all tensors, in bytes."""
        self.write_pending()
        names = ["model.safetensors"]
        if len(self.files) > 1:
            names = [f"model-{i:05d}-of-{len(self.files):05d}.safetensors" for i in range(1, len(self.files) + 1)]
            weight_map = {}
            for name, keys in zip(names, self.files, strict=True):
                weight_map |= dict.fromkeys(keys, name)
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            write_json(self.temporary / "model.safetensors.index.json", index)
        for number, name in enumerate(names):
            (self.temporary / f"{number}.part").rename(self.temporary / name)
        config = model_config(self.model, tokenizer, settings.init == "pretrained")
        write_json(self.temporary / "config.json", config)
        write_json(self.temporary / "generation_config.json", generation)
        if tokenizer:
            save_tokenizer(tokenizer, self.temporary)
        for name in names:  # safetensors writes for the owner alone
            shutil.copymode(self.temporary / "config.json", self.temporary / name)
        self.temporary.rename(self.final)
