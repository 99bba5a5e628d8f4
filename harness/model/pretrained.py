"""Pretrained weights: the safetensors of a folder or hub id, read one decoder layer at a time.

The choice of files, dequantization, dtypes, tied heads and ignored tensors are those of `from_pretrained`. What cannot
be read as it does is a UserError, and so is a missing parameter, for which it would draw random values.
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
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.gguf")  # the last two are refused with advice
SAMPLES, SAMPLE_BYTES = 4, 256  # per tensor in `weights_digest`
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # safetensors' names of dtypes whose values are the weights


def find_files(folder: pathlib.Path, named: str | None) -> list[pathlib.Path]:
    """The files of a folder's weights: the one that its config names, else model.safetensors, else those of the index.

    Raises:
        UserError: there are no safetensors, or an adapter is in the folder.
        OSError: the index cannot be read.
        ValueError: the index is no JSON, or names files outside the folder.
    """
    if (folder / base.ADAPTER_CONFIG).is_file():
        problem = f"{folder} has an adapter next to its weights, which from_pretrained applies and a run does not"
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
    """`find_files` of a local folder, or of a hub id after a download."""
    folder = source.weights
    if not os.path.isdir(folder):
        others = ["*/*", "consolidated*"]  # the weights in other formats
        folder = snapshot_download(
            folder, revision=source.revision, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=others
        )
    return find_files(pathlib.Path(folder), getattr(config, "transformers_weights", None))


@base.working()
def weights_digest(source: configs.Source, config: transformers.PretrainedConfig) -> str:
    """A checksum that identifies weights: of the name, dtype and shape of each tensor, and of samples of its bytes, as
    many for a large tensor as for a small one. It does not depend on the division into files.

    Raises:
        UserError: the files cannot be read.
    """
    tensors = {}
    try:
        for path in weight_files(source, config):
            with path.open("rb") as file:  # its layout: the header's length in 8 bytes, the header, the tensors
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


def describe_ignored_weights(model: str) -> str:
    """A warning that the folder of --model has weights, for a run with --init random; empty if it has none."""
    folder = pathlib.Path(configs.find_source(model).weights)
    if not any(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        return ""
    return f"random weights: {model} has weights, --init pretrained reads them"


def describe_missing_weights(folder: pathlib.Path) -> str:
    """The reason for which a folder has no weights to read, and a way to make some."""
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        advice = "download it too, or write one as docs/TROUBLESHOOTING.md has it"
        return f"it has {shards[0]}, but neither {WEIGHTS_NAME} nor {INDEX}; {advice}"
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if not gguf and not any(folder.glob("*.bin")):
        return f"it has no {WEIGHTS_NAME}; give a model that has one, or leave out --init pretrained"
    options = f", gguf_file='{gguf[0]}'" if gguf else ""
    command = f"AutoModelForCausalLM.from_pretrained('{folder}'{options}).save_pretrained(DIR)"
    return f"it has no {WEIGHTS_NAME}; {command} of transformers converts its weights into a new folder"


def quantization_fields(config: transformers.PretrainedConfig) -> dict | None:
    """The quantization_config of a model's config or of its text part, None if the weights are not quantized."""
    parts = (config, config.get_text_config())
    return next((part.quantization_config for part in parts if getattr(part, "quantization_config", None)), None)


def dequantizer(config: transformers.PretrainedConfig) -> "HfQuantizer | None":
    """transformers' quantizer for the quantization_config of a config, set to dequantize; None without one.

    Raises:
        UserError: transformers does not dequantize such weights while it loads, or lacks a package for it.
    """
    fields = quantization_fields(config)
    if not fields:
        return None
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig  # imports torchao

    method = fields.get("quant_method")
    try:
        quantization = AutoQuantizationConfig.from_dict(fields)
        if not hasattr(quantization, "dequantize"):
            raise ValueError("transformers does not dequantize them while it loads")
        quantization.dequantize = True
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # an unknown method, or a missing package
        problem = f"its weights are quantized ({method}) and cannot be dequantized: {base.first_line(error)}"
        raise base.UserError(f"--init pretrained: {problem}; choose weights that are not quantized") from error
    return quantizer


def open_weights(model: Any, layers: nn.ModuleList, name: str, dtype: torch.dtype) -> "PretrainedWeights":
    """Open the weights of a --model, a folder or hub id. Every rank calls this: an error on one node is raised on all
    ranks."""
    return base.call_on_all_ranks(lambda: PretrainedWeights(model, layers, configs.find_source(name), dtype))


class PretrainedWeights:
    """The safetensors of a local folder or hub id, read one decoder layer at a time.

    transformers' own conversion rules are applied, so a checkpoint in another layout than the model's (experts stored
    one by one, float8 blocks with scales) loads as with from_pretrained. A line names the tensors that are not used.

    Raises:
        UserError: there are no safetensors, they cannot be read, or they are quantized and cannot be dequantized.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, source: configs.Source, dtype: torch.dtype):
        downloads_are_shown = job.is_first_rank() and not are_progress_bars_disabled()
        transformers.utils.logging.disable_progress_bar()  # one per layer; this turns off those of downloads too
        if downloads_are_shown:
            enable_progress_bars()
        self.model, self.source, self.dtype = model, source, dtype
        self.quantizer = dequantizer(model.config)
        # private: the conversion of names and layouts; the public `from_pretrained` reads full models only
        self.rules: Any = conversion_mapping.get_model_conversion_mapping(model, hf_quantizer=self.quantizer)
        self.names = model.state_dict()
        path = next(path for path, module in model.named_modules() if module is layers)
        self.slices: dict[int | None, dict] = {}  # keyed by decoder layer; None: embedding, final norm, head
        unused: dict[str, list[str]] = {}  # names in the checkpoint, keyed by their names in the model
        codes: dict[str, str] = {}  # dtypes of quantized tensors
        scaled: set[str] = set()  # modules whose scales are used to dequantize
        try:
            for file in weight_files(source, model.config):
                tensors = safe_open(file, framework="pt")
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    name, tensor = self.name_in_model(key), tensors.get_slice(key)
                    layer_match = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
                    layer = int(layer_match[1]) if layer_match else None
                    self.slices.setdefault(layer, {})[key] = tensor
                    module, _, last = key.rpartition(".")
                    if name not in self.names:
                        unused.setdefault(name, []).append(key)
                    elif self.quantizer and "scale" in last:
                        scaled.add(module)
                    elif self.names[name].is_floating_point() and tensor.get_dtype() not in PLAIN_TYPES:
                        codes[key] = tensor.get_dtype()
        except base.UserError:
            raise
        except Exception as error:
            raise base.UserError(f"--init pretrained: no weights from {source} ({base.first_line(error)})") from error
        self.refuse_unscaled(codes, scaled)
        self.report_unused_tensors(unused)

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

    def refuse_unscaled(self, codes: dict[str, str], scaled: set[str]) -> None:
        """Raise a UserError for the first quantized tensor that is not dequantized: no scale of its module is one that
        the config's quantization_config reads."""
        for key, dtype in codes.items():
            if key.rpartition(".")[0] not in scaled:
                problem = f"{self.source} has {key} in {dtype} without a scale that its config.json says how to apply"
                advice = "fetch all of its files again, or choose weights that are not quantized"
                raise base.UserError(f"--init pretrained: {problem}; {advice}")

    def report_unused_tensors(self, unused: dict[str, list[str]]) -> None:
        """Print the names of tensors that are left out, but for those that the family ignores."""
        info = types.SimpleNamespace(missing_keys=set(), unexpected_keys=set(unused))
        # private: removes those that the family ignores, such as old buffers
        self.model._adjust_missing_and_unexpected_keys(info)
        left_out = [key for name in sorted(info.unexpected_keys) for key in unused[name]]
        if left_out:
            shown = base.shortened(left_out, 3)
            count = base.counted(len(left_out), "tensor")
            job.print0(f"weights    {count} of {self.source} left out, as the model has no place for them: {shown}")

    @base.working()
    def load(self, layer: int | None, modules: list[nn.Module], device: torch.device) -> None:
        """Read the tensors of one decoder layer (None: all others) into the model's `modules`.

        Raises:
            UserError: a tensor of the model is missing or cannot be converted.
        """
        # private: `from_pretrained` reads by it; there is no public way to read into modules on the meta device
        config = transformers.modeling_utils.LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self.rules,
            device_map={"": device},
            hf_quantizer=self.quantizer,
        )
        rules_of_exports = self.model._weight_conversions  # private: replaced by those that are used
        info, _ = transformers.core_model_loading.convert_and_load_state_dict_in_model(
            self.model, self.slices.get(layer, {}), config
        )
        if self.quantizer:
            self.model._weight_conversions = rules_of_exports  # an export would be quantized again
        for name, problem in info.conversion_errors.items():
            reason = str(problem).partition("\nError")[0].splitlines()[-1]  # the last line of a traceback
            raise base.UserError(f"--init pretrained: {self.source}: {name} cannot be read ({reason})")
        if layer is None:
            self.tie(info.missing_keys)
        else:
            self.model.tie_weights()
        for path, module in self.model.named_modules():
            if module not in modules:
                continue
            for name, weight in module.named_parameters(recurse=False):
                if not getattr(weight, "_is_hf_initialized", False):  # private: set when a parameter is read
                    missing = f"{path}.{name} of shape {tuple(weight.shape)}"
                    raise base.UserError(f"--init pretrained: {self.source} has no {missing}")

    def tie(self, missing: set[str]) -> None:
        """Tie the parameters that the config ties, with the values of the one in the checkpoint.

        Raises:
            UserError: the checkpoint has both, with different values.
        """
        tied = dict(self.model.all_tied_weights_keys)
        self.model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
        for name in tied.keys() - self.model.all_tied_weights_keys.keys():
            problem = f"{self.source} has another {name} than {tied[name]}, and its config.json ties them"
            advice = "set tie_word_embeddings to false there, in a copy of the folder"
            raise base.UserError(f"--init pretrained: {problem}; {advice}")
