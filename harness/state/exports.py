"""Export: a folder that transformers loads, written from a sharded model that no rank can hold whole. The script calls
it at the end of a run. Independent of optimizer and data."""

import contextlib
import copy
import json
import os
import pathlib
import re
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from harness.base.errors import UserError
from harness.base.ranks import of_all_ranks
from harness.base.text import first_line
from harness.base.transformers_internals import as_in_checkpoint
from harness.flags.settings import Settings
from harness.job import heartbeats
from harness.job.printing import say
from harness.model.configs import read_generation_config
from harness.state.train_state import TrainState, persistent_tensors

EXPORT_SHARD = 5e9  # bytes of one safetensors file, the limit of transformers' save_pretrained
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
FOREIGN_CODE = ("auto_map", "_auto_class")  # name Python code of the source, which was not run and is not exported


# ---- The folder ------------------------------------------------------------------------------------------------------


def check_export(settings: Settings) -> None:
    """Raises a UserError where --export could not be written later, or would write over something else than an earlier
    export. Called on rank 0, before anything is trained."""
    final = folder_of(settings)
    try:
        existing = next(parent for parent in final.parents if parent.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"--export {settings.export}: cannot be written ({error.strerror})") from error
    if os.path.realpath(os.path.expanduser(settings.model)) == os.path.realpath(final):
        raise UserError(f"--export: {settings.export} is the folder of --model; choose another folder")
    if os.path.lexists(final) and not is_export(final):
        raise UserError(f"--export: {settings.export} exists and is no export; choose another folder or remove it")


def folder_of(settings: Settings) -> pathlib.Path:
    return pathlib.Path(settings.export).expanduser()


def is_export(folder: pathlib.Path) -> bool:
    """Whether a folder was written here, by the header of a file of weights."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            return "run_id" in (file.metadata() or {})
    return False


def export(settings: Settings, state: TrainState, tokenizer) -> None:
    """Writes the folder of --export, which AutoModelForCausalLM and AutoTokenizer.from_pretrained load, in the place of
    an earlier export there. Every rank calls this.

    Parameters are gathered one decoder layer at a time and rank 0 writes a file whenever it holds 5 GB, so no rank
    holds the model. The weights keep their training precision: fp32, or bf16 with bf16-pure.

    Raises:
        UserError: the model is not finite, or the folder cannot be written; nothing of it is left.
    """
    final, is_average = folder_of(settings), settings.export_weights == "ema"
    writer = ExportWriter(final.with_name(f".{final.name}.writing"), settings, state, tokenizer)
    with state.average.as_weights() if is_average else contextlib.nullcontext():
        problem = state.what_is_broken()
        if problem:
            raise UserError(f"--export {settings.export}: the model {problem}; nothing is exported", exit_code=1)
        for group in by_layer(persistent_tensors(state.model)).values():
            heartbeats.enter_phase("export")
            writer.add(gather(group))
        writer.finish(final)
    parts = [str(final), f"step {state.step:,}"]
    if is_average:
        parts.append("the average of the weights")
    if tokenizer is None:
        parts.append("without a tokenizer")
    say(f"exported   {', '.join(parts)}")
    if writer.unreadable:
        say(f"           without the generation config of {settings.model}, which cannot be read ({writer.unreadable})")


def by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of each layer (`model.layers.7.`), and under the empty name those that are in none."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        prefix = re.match(r".*?\.\d+\.", name)
        layers.setdefault(prefix[0] if prefix else "", {})[name] = tensor
    return layers


def gather(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The full tensors on the host of rank 0, nothing on the other ranks. Every rank calls this."""
    gathered = {}
    for name, tensor in tensors.items():
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0:
            gathered[name] = full.cpu()
    return gathered


class ExportWriter:
    """Writes the files of an export on rank 0, into a hidden folder that gets its final name last.

    An error, such as a full disk, is raised by `finish` on every rank: until then all of them gather layers.
    """

    def __init__(self, folder: pathlib.Path, settings: Settings, state: TrainState, tokenizer):
        self.folder, self.settings, self.model, self.tokenizer = folder, settings, state.model, tokenizer
        self.header = {"format": "pt", "run_id": state.run_id, "step": str(state.step)}
        self.pending: dict[str, torch.Tensor] = {}  # of the next file
        self.files: list[dict[str, int]] = []  # of each file so far, the bytes of its tensors by name
        self.error = ""
        self.unreadable = ""  # why the generation config of the source is not in it
        if dist.get_rank() == 0:
            with self.keeping_error():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)

    @contextlib.contextmanager
    def keeping_error(self):
        try:
            yield
        except Exception as error:
            self.error = self.error or first_line(error)

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Adds the tensors of a layer, under the names that they have on the hub, and writes each file that is full."""
        if self.error or not tensors:
            return
        with self.keeping_error():
            for name, tensor in as_in_checkpoint(self.model, tensors).items():
                size = sum(other.nbytes for other in self.pending.values())
                if self.pending and size + tensor.nbytes > EXPORT_SHARD:
                    self.write_pending()
                # a copy: it may be a part of a fused tensor, whose storage would be kept
                self.pending[name] = tensor.clone(memory_format=torch.contiguous_format)

    def write_pending(self) -> None:
        from safetensors.torch import save_file

        save_file(self.pending, self.folder / f"{len(self.files)}.part", metadata=self.header)
        self.files.append({name: tensor.nbytes for name, tensor in self.pending.items()})
        self.pending.clear()

    def finish(self, final: pathlib.Path) -> None:
        """Writes what is pending and everything beside the weights, and gives the folder its name. Every rank calls
        this; a UserError where something could not be written."""
        if dist.get_rank() == 0 and not self.error:
            with self.keeping_error():
                self.write_pending()
                self.write_configs()
                self.name_files()
                replace_folder(final, self.folder)
        error = of_all_ranks(self.error)[0]
        if error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise UserError(f"--export {self.settings.export}: cannot be written ({error})", exit_code=1)

    def write_configs(self) -> None:
        pretrained = self.settings.init == "pretrained"
        write_json(self.folder / "config.json", model_config(self.model, self.tokenizer, pretrained))
        generation, self.unreadable = generation_config(self.settings, self.model, self.tokenizer)
        write_json(self.folder / "generation_config.json", generation)
        if self.tokenizer:
            save_tokenizer(self.tokenizer, self.folder)

    def name_files(self) -> None:
        """Gives the files of weights their names, and writes the index of several."""
        names = ["model.safetensors"]
        if len(self.files) > 1:
            names = [f"model-{i:05d}-of-{len(self.files):05d}.safetensors" for i in range(1, len(self.files) + 1)]
            weight_map = {}
            for name, sizes in zip(names, self.files, strict=True):
                weight_map |= dict.fromkeys(sizes, name)
            total_size = sum(sum(sizes.values()) for sizes in self.files)
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)
        for number, name in enumerate(names):
            shutil.copymode(self.folder / "config.json", self.folder / f"{number}.part")  # it is the owner's alone
            (self.folder / f"{number}.part").rename(self.folder / name)


def replace_folder(final: pathlib.Path, new: pathlib.Path) -> None:
    """Gives the folder `new` the name `final`; what had it, an earlier export, is removed then."""
    old = final.with_name(f".{final.name}.deleting")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


# ---- What is beside the weights --------------------------------------------------------------------------------------


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
