"""Pretrained weights: the safetensors of a folder or hub id, read one decoder layer at a time."""

import json
import os
import pathlib
import re
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import safe_open
from torch import nn
from transformers import conversion_mapping

from harness import base, job


class PretrainedWeights:
    """The safetensors of a local folder or hub id, read one decoder layer at a time.

    transformers' own conversion rules are applied, so a checkpoint in another layout than the model's (experts stored
    one by one, say) loads as it does with from_pretrained.

    Raises:
        UserError: there are no safetensors, they cannot be read, or a weight of the model is not among them.
    """

    def __init__(self, model: Any, layers: nn.ModuleList, source: str, dtype: torch.dtype):
        downloads_are_shown = job.is_first_rank() and not are_progress_bars_disabled()
        transformers.utils.logging.disable_progress_bar()  # of each layer, but it ends those of downloads too
        if downloads_are_shown:
            enable_progress_bars()
        self.model, self.source, self.dtype = model, source, dtype
        # private: how names and layouts of a checkpoint become the model's; `from_pretrained` reads whole models only
        self.rules: Any = conversion_mapping.get_model_conversion_mapping(model)
        self.names = model.state_dict()
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
                    of_layer = re.match(rf"{re.escape(path)}\.(\d+)\.", self.name_in_model(key))
                    layer = int(of_layer[1]) if of_layer else None
                    self.slices.setdefault(layer, {})[key] = tensors.get_slice(key)
        except Exception as error:
            raise base.UserError(f"--init pretrained: no weights from {source} ({base.first_line(error)})") from error

    def name_in_model(self, key: str) -> str:
        """The model's name of a tensor of the checkpoint."""
        # private: as above
        renamings = [rule for rule in self.rules if isinstance(rule, transformers.core_model_loading.WeightRenaming)]
        converters = [rule for rule in self.rules if isinstance(rule, transformers.core_model_loading.WeightConverter)]
        prefix = self.model.base_model_prefix
        return transformers.core_model_loading.rename_source_key(key, renamings, converters, prefix, self.names)[0]

    def load(self, layer: int | None, modules: list[nn.Module], device: torch.device) -> None:
        """Reads the tensors of one decoder layer (None: of all else) into the model's `modules`."""
        # private: as above
        config = transformers.modeling_utils.LoadStateDictConfig(
            dtype=self.dtype, weight_mapping=self.rules, device_map={"": device}
        )
        transformers.core_model_loading.convert_and_load_state_dict_in_model(
            self.model, self.slices.get(layer, {}), config
        )
        self.model.tie_weights()
        for path, module in self.model.named_modules():
            if module not in modules:
                continue
            for name, weight in module.named_parameters(recurse=False):
                if not getattr(weight, "_is_hf_initialized", False):  # private: the mark of what was read
                    missing = f"{path}.{name} of shape {tuple(weight.shape)}"
                    raise base.UserError(f"--init pretrained: {self.source} has no {missing}")
