"""The recipe: functions of train_fsdp.py and utils.py for plans, which do not import the pair."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness import flags


class Recipe(NamedTuple):
    build_mesh: Callable[[flags.Flags, torch.device], DeviceMesh]
    build_model: Callable[..., transformers.PreTrainedModel]
    train_step: Callable[[flags.Settings, nn.Module, torch.optim.Optimizer, Iterator[dict[str, Any]]], object]
    estimate_mfu: Callable[[float, float, float, int, float | None], dict[str, float]]
    get_flops_by_length: Callable[[transformers.PreTrainedModel, np.ndarray], np.ndarray]
