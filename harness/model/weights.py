"""Weights: the model on the meta device, its decoder layers, and how each of them gets its values."""

import json
import os
import pathlib
import re

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, conversion_mapping

from harness.base.errors import UserError
from harness.base.text import first_line
from harness.job.terminal import is_first_rank
from harness.model.attention import ONE_KERNEL


def on_meta(config, attention: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model without storage, with one of `--attention`'s kernels; by default with what transformers chooses."""
    # always given, None too: the config could name a kernel of the hub
    options = {"attn_implementation": "sdpa" if attention in ONE_KERNEL else attention, "trust_remote_code": False}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"--attention {attention}: {first_line(error)}") from error
    except Exception as error:  # a negative size, an activation that nobody knows
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"--model: transformers builds no model of its config.json ({what})") from error


def count_parameters(config) -> int:
    """Elements of all parameters, one that two modules share once."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: the outermost ModuleList with as many modules as the config has layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    if not lists:
        raise UserError(f"--model: no list of {count} decoder layers found in {type(model).__name__}")
    return lists[min(lists, key=lambda name: name.count("."))]


def layer_period(config) -> tuple[nn.Module, int]:
    """The model on the meta device, and after how many layers its pattern repeats (SmolLM3: 4, one in four has no RoPE;
    the number of layers where nothing repeats)."""
    model, text = on_meta(config), config.get_text_config()
    layers = decoder_layers(model)
    lists = [value for value in vars(text).values() if isinstance(value, list) and len(value) == len(layers)]
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers]
    alike = [(shapes[index], *(value[index] for value in lists)) for index in range(len(layers))]
    periods = range(1, len(layers) // 3 + 1)
    return model, next((n for n in periods if alike[n:] == alike[:-n]), len(layers))


def make_real(model: nn.Module, modules: list[nn.Module], device, weights, layer: int | None = None) -> None:
    """Gives the meta tensors of `modules` storage on `device` and their values: random, or read from `weights`.

    Parameters are drawn in fp32 and then rounded: in bf16 torch 2.11 draws others on a CPU, and coarser ones.
    """
    real: dict[torch.Tensor, torch.Tensor] = {}  # a tied parameter is one tensor under two names
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in real:
                        if isinstance(tensor, nn.Parameter):
                            drawn = torch.empty_like(tensor, device=device, dtype=torch.float32)
                            real[tensor] = nn.Parameter(drawn, requires_grad=tensor.requires_grad)
                        else:
                            real[tensor] = torch.empty_like(tensor, device=device)
                    tensors[name] = real[tensor]
    if weights:
        weights.load(layer, modules, device)
    wholes = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    owner = {part: whole for whole in wholes for part in whole.modules()}
    for module in reversed(modules):  # children before parents, as nn.Module.apply does; what was loaded stays
        owner[module]._init_weights(module)  # a part that is a model has rules of its own
    made = {id(tensor) for tensor in real.values()}
    for module in modules:
        for name, tensor in (module._parameters | module._buffers).items():
            if id(tensor) in made and not tensor._version and tensor.numel():  # nothing was written into it
                what = f"{type(module).__name__}.{name}"
                raise UserError(f"--model: {what} gets no value, from a checkpoint or when its layer is made by itself")
    for tensor, drawn in real.items():
        drawn.data = drawn.data.to(tensor.dtype)


class PretrainedWeights:
    """The safetensors of a local folder or hub id, read one decoder layer at a time.

    transformers' own conversion rules are applied, so a checkpoint in another layout than the model's (experts stored
    one by one, say) loads as it does with from_pretrained.

    Raises:
        UserError: there are no safetensors, they cannot be read, or a weight of the model is not among them.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList, source: str, dtype: torch.dtype):
        downloads_are_shown = is_first_rank() and not are_progress_bars_disabled()
        transformers.utils.logging.disable_progress_bar()  # of each layer; and with it those of downloads
        if downloads_are_shown:
            enable_progress_bars()
        self.model, self.source, self.dtype = model, source, dtype
        self.rules = conversion_mapping.get_model_conversion_mapping(model)
        loading = transformers.core_model_loading
        kinds = (loading.WeightRenaming, loading.WeightConverter)
        renamings, converters = ([rule for rule in self.rules if isinstance(rule, kind)] for kind in kinds)
        prefix, names = model.base_model_prefix, model.state_dict()
        path = next(path for path, module in model.named_modules() if module is layers)
        self.slices: dict[int | None, dict] = {}  # by decoder layer; None: embedding, final norm, head
        try:
            if not os.path.isdir(source):
                source = snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
            index = pathlib.Path(source, "model.safetensors.index.json")
            files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
            for file in sorted(set(files)):
                if pathlib.PurePath(file).name != file:
                    raise ValueError(f"its index names {file}, which is not in the folder")
                tensors = safe_open(os.path.join(source, file), framework="pt")
                for key in tensors.keys():  # noqa: SIM118 - it is no dict
                    name, _ = loading.rename_source_key(key, renamings, converters, prefix, names)
                    layer = re.match(rf"{re.escape(path)}\.(\d+)\.", name)
                    self.slices.setdefault(layer and int(layer[1]), {})[key] = tensors.get_slice(key)
        except Exception as error:
            raise UserError(f"--init pretrained: no weights from {source} ({first_line(error)})") from error

    def load(self, layer: int | None, modules: list[nn.Module], device: torch.device) -> None:
        """Reads the tensors of one decoder layer (None: of all else) into the model's `modules`."""
        options = {"dtype": self.dtype, "weight_mapping": self.rules, "device_map": {"": device}}
        config = transformers.modeling_utils.LoadStateDictConfig(**options)
        tensors = self.slices.get(layer, {})
        transformers.core_model_loading.convert_and_load_state_dict_in_model(self.model, tensors, config)
        self.model.tie_weights()
        for path, module in self.model.named_modules():
            for name, weight in module.named_parameters(recurse=False) if module in modules else ():
                if not getattr(weight, "_is_hf_initialized", False):
                    missing = f"{path}.{name} of shape {tuple(weight.shape)}"
                    raise UserError(f"--init pretrained: {self.source} has no {missing}")
