"""Pretrained weights: the safetensors of a folder or hub id, read one decoder layer at a time.

Which files they are, what is dequantized, which heads are tied, and which tensors have no place in the model is as
`from_pretrained` has it. What cannot be read so is one line that says what to do.
"""

import hashlib
import json
import os
import pathlib
import re
import types
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import safe_open
from torch import nn
from transformers import conversion_mapping

from harness import base, job
from harness.model import configs

if TYPE_CHECKING:
    from transformers.quantizers import HfQuantizer

WEIGHTS_NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLES, SAMPLE_BYTES = 4, 256  # of a tensor, for `digest_of_weights`
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors, whose values are the weights themselves


def find_files(folder: pathlib.Path, named: str | None) -> list[pathlib.Path]:
    """The files of a folder that hold its weights: the one that its config names, else model.safetensors, else those of
    the index.

    Raises:
        UserError: there are none in safetensors, or an adapter is to be applied to them.
        OSError, ValueError: the index cannot be read, or names files that are elsewhere.
    """
    if (folder / base.ADAPTER_CONFIG).is_file():
        problem = f"{folder} has an adapter beside its weights, which from_pretrained applies and a run does not"
        advice = (
            f"merge it with peft's merge_and_unload, or take {base.ADAPTER_CONFIG} away to train the weights without it"
        )
        raise base.UserError(f"--init pretrained: {problem}; {advice}")
    first = named or (WEIGHTS_NAME if (folder / WEIGHTS_NAME).is_file() else INDEX)
    if not (folder / first).is_file():
        raise base.UserError(f"--init pretrained: no weights from {folder}: {describe_missing_weights(folder)}")
    names = [first]
    if first.endswith(".json"):
        names = sorted(set(json.loads((folder / first).read_text())["weight_map"].values()))
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise ValueError(f"its index names {name}, which is not in the folder")
    return [folder / name for name in names]


@base.working()
def weight_files(source: configs.Source, config: transformers.PretrainedConfig) -> list[pathlib.Path]:
    """`find_files` of a local folder or hub id, from which the files are fetched."""
    folder = source.weights
    if not os.path.isdir(folder):
        folder = snapshot_download(folder, revision=source.revision, allow_patterns=["*.safetensors", "*.json"])
    return find_files(pathlib.Path(folder), getattr(config, "transformers_weights", None))


@base.working()
def digest_of_weights(source: configs.Source, config: transformers.PretrainedConfig) -> str:
    """A checksum by which weights that are read again are known: of the name, type and shape of each tensor, and of
    samples of its bytes, so that it takes no longer for large ones. How they are divided into files is no part of it.

    Raises:
        UserError: the files cannot be read.
    """
    tensors = {}
    try:
        for path in weight_files(source, config):
            with path.open("rb") as file:  # the length of its header in 8 bytes, the header, the tensors
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                for name, entry in header.items():
                    begin, end = entry.pop("data_offsets")
                    samples = b""
                    for part in range(SAMPLES):
                        offset = begin + (end - begin) * part // SAMPLES
                        file.seek(8 + length + offset)
                        samples += file.read(min(SAMPLE_BYTES, end - offset))
                    tensors[name] = [entry, hashlib.sha256(samples).hexdigest()]
    except base.UserError:
        raise
    except Exception as error:  # as in PretrainedWeights
        raise base.UserError(f"--init pretrained: no weights from {source} ({base.first_line(error)})") from error
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()


def describe_unread(model: str) -> str:
    """The warning of a run that begins with random weights though the folder of --model has some; empty for others."""
    source = configs.find_source(model)
    if not any(pathlib.Path(source.weights).glob("*.safetensors")):
        return ""
    return f"random weights: {model} has weights, --init pretrained reads them"


def describe_missing_weights(folder: pathlib.Path) -> str:
    """Why a folder's weights are not read, and how they can be."""
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        advice = "fetch it from where they come from, or write one as docs/TROUBLESHOOTING.md has it"
        return f"it has {shards[0]}, but neither {WEIGHTS_NAME} nor {INDEX}; {advice}"
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    options = f", gguf_file='{gguf[0]}'" if gguf else ""
    command = f"AutoModelForCausalLM.from_pretrained('{folder}'{options}).save_pretrained(DIR)"
    return f"it has no {WEIGHTS_NAME}; {command} of transformers writes what it has as safetensors into a new folder"


def dequantizer(config: transformers.PretrainedConfig) -> "HfQuantizer | None":
    """transformers' quantizer for weights that a config says are quantized, set to give them back as they were; None
    for others.

    Raises:
        UserError: transformers does not dequantize them while it loads, or lacks a package for it.
    """
    parts = (config, config.get_text_config())
    described = next((part.quantization_config for part in parts if getattr(part, "quantization_config", None)), None)
    if not described:
        return None
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig  # imports torchao

    method = described.get("quant_method")
    try:
        quantization = AutoQuantizationConfig.from_dict(described)
        if not hasattr(quantization, "dequantize"):
            raise ValueError("transformers does not turn them back while it loads")
        quantization.dequantize = True
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # of a foreign config, or of a package that is missing
        problem = f"its weights are quantized ({method}) and cannot be dequantized: {base.first_line(error)}"
        raise base.UserError(f"--init pretrained: {problem}; choose weights that are not quantized") from error
    return quantizer


class PretrainedWeights:
    """The safetensors of a local folder or hub id, read one decoder layer at a time.

    transformers' own conversion rules are applied, so a checkpoint in another layout than the model's (experts stored
    one by one, weights in blocks of float8 with scales) loads as it does with from_pretrained. A line names the tensors
    that the model has no place for.

    Raises:
        UserError: there are no safetensors, they cannot be read, or a weight of the model is not among them.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, source: configs.Source, dtype: torch.dtype):
        downloads_are_shown = job.is_first_rank() and not are_progress_bars_disabled()
        transformers.utils.logging.disable_progress_bar()  # of each layer, but it ends those of downloads too
        if downloads_are_shown:
            enable_progress_bars()
        self.model, self.source, self.dtype = model, source, dtype
        self.quantizer = dequantizer(model.config)
        # private: how names and layouts of a checkpoint become the model's; `from_pretrained` reads whole models only
        self.rules: Any = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=self.quantizer)
        self.names = model.state_dict()
        path = next(path for path, module in model.named_modules() if module is layers)
        self.slices: dict[int | None, dict] = {}  # by decoder layer; None: embedding, final norm, head
        unexpected: dict[str, list[str]] = {}  # names in the checkpoint, by what they would be in the model
        coded = {}  # the types of tensors that are codes of a weight
        scaled = set()  # modules with scales, by which codes become weights
        try:
            for file in weight_files(source, model.config):
                tensors = safe_open(file, framework="pt")
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    name, tensor = self.name_in_model(key), tensors.get_slice(key)
                    layer_match = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
                    layer = int(layer_match[1]) if layer_match else None
                    self.slices.setdefault(layer, {})[key] = tensor
                    module, _, last = key.rpartition(".")
                    if "scale" in last:
                        scaled.add(module)
                    if name not in self.names:
                        unexpected.setdefault(name, []).append(key)
                    elif self.names[name].is_floating_point() and tensor.get_dtype() not in PLAIN_TYPES:
                        coded[key] = tensor.get_dtype()
        except base.UserError:
            raise
        except Exception as error:
            raise base.UserError(f"--init pretrained: no weights from {source} ({base.first_line(error)})") from error
        self.refuse_undescribed_quantization(coded, scaled)
        self.report_unused_tensors(unexpected, {key.rpartition(".")[0] for key in coded})

    def name_in_model(self, key: str) -> str:
        """The model's name of a tensor of the checkpoint."""
        loading = transformers.core_model_loading
        # private: renaming without reading
        renamings = [rule for rule in self.rules if isinstance(rule, loading.WeightRenaming)]
        converters = [rule for rule in self.rules if isinstance(rule, loading.WeightConverter)]
        prefix = self.model.base_model_prefix
        name = loading.rename_source_key(key, renamings, converters, prefix, self.names)[0]
        if name not in self.names and key in self.names:
            return key
        return name

    def refuse_undescribed_quantization(self, coded: dict[str, str], scaled: set[str]) -> None:
        """Raises a UserError where weights are codes, by their types, and what they stand for is not known: the config
        does not say, or their module is not one of those that have scales."""
        for key, kind in coded.items():
            problem = f"{self.source} has {key} in {kind}"
            if not self.quantizer:
                problem += ", and its config.json no quantization_config that says how"
                advice = "add the one that it was quantized with, or choose weights that are not quantized"
                raise base.UserError(f"--init pretrained: {problem}; {advice}")
            if key.rpartition(".")[0] not in scaled:
                advice = "fetch all of its files again, or choose weights that are not quantized"
                raise base.UserError(f"--init pretrained: {problem}, without scales; {advice}")

    def report_unused_tensors(self, unexpected: dict[str, list[str]], coded: set[str]) -> None:
        """Says which tensors are left out, but for those that the family ignores.

        Raises:
            UserError: they are scales of a module in `coded`, which were not read.
        """
        info = types.SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
        # private: which of them the family ignores, old buffers among them
        self.model._adjust_missing_and_unexpected_keys(info)
        left_out = [key for name in sorted(info.unexpected_keys) for key in unexpected[name]]
        scales = [key for key in left_out if "scale" in key and key.rpartition(".")[0] in coded]
        if scales:
            method = self.quantizer.quantization_config.quant_method
            problem = f"{self.source} has scales that its quantization_config ({method}) does not read: {scales[0]}"
            raise base.UserError(f"--init pretrained: {problem}; choose weights that are not quantized")
        if left_out:
            shown = base.shortened(left_out, 3)
            count = base.counted(len(left_out), "tensor")
            job.print0(f"weights    {count} of {self.source} left out, as the model has no place for them: {shown}")

    @base.working()
    def load(self, layer: int | None, modules: list[nn.Module], device: torch.device) -> None:
        """Reads the tensors of one decoder layer (None: of all else) into the model's `modules`."""
        # private: what `from_pretrained` reads with, which has no public name for modules on the meta device
        config = transformers.modeling_utils.LoadStateDictConfig(
            dtype=self.dtype, weight_mapping=self.rules, device_map={"": device}, hf_quantizer=self.quantizer
        )
        info, _ = transformers.core_model_loading.convert_and_load_state_dict_in_model(
            self.model, self.slices.get(layer, {}), config
        )
        if self.quantizer:
            self.model._weight_conversions = None  # private: an export would be quantized again
        for name, problem in info.conversion_errors.items():
            reason = str(problem).partition("\nError")[0].splitlines()[-1]  # a traceback, and what was done
            raise base.UserError(f"--init pretrained: {self.source}: {name} cannot be read ({reason})")
        if layer is None:
            self.tie(info.missing_keys)
        else:
            self.model.tie_weights()
        for path, module in self.model.named_modules():
            if module not in modules:
                continue
            for name, weight in module.named_parameters(recurse=False):
                if not getattr(weight, "_is_hf_initialized", False):  # private: the mark of what was read
                    missing = f"{path}.{name} of shape {tuple(weight.shape)}"
                    raise base.UserError(f"--init pretrained: {self.source} has no {missing}")
                if weight.dtype != self.dtype:  # transformers 5.17 dequantizes to bf16
                    weight.data = weight.data.to(self.dtype)

    def tie(self, missing: set[str]) -> None:
        """Ties what the config says is tied, to the one of both that the checkpoint has.

        Raises:
            UserError: it has both, with different values.
        """
        tied = dict(self.model.all_tied_weights_keys)
        self.model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
        for name in tied.keys() - self.model.all_tied_weights_keys.keys():
            problem = f"{self.source} has another {name} than {tied[name]}, and its config.json says they are tied"
            advice = "set tie_word_embeddings to false there, in a copy of the folder"
            raise base.UserError(f"--init pretrained: {problem}; {advice}")
