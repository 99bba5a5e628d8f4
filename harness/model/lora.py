"""LoRA, by peft: adapters of linears in decoder layers, whose own weights are frozen.

The forward, the start values and the names are peft's. Everything else follows from `requires_grad`: a frozen weight
has no gradient, no optimizer state and no place in a checkpoint. It is loaded, sharded and gathered in bf16; adapters
are trained in the dtype of master weights, in the FSDP2 groups of their layers.

Adapters are added to one layer at a time, after its weights are loaded. Added to the meta model they would rename the
weights to `base_layer`, which transformers' conversion rules for checkpoints do not know.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pathlib
import re
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from harness import base, flags, job
from harness.model.configs import find_source
from harness.model.optimization import weight_dtype
from harness.model.pretrained import quantization_fields
from harness.model.routing import find_routers
from harness.model.weights import decoder_layers, on_meta

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTERS_FILE = "adapter_model.safetensors"
PREFIX, NAME = "base_model.model.", ".default."  # parts of peft's names: its wrapper, the adapters of a model
# what torch.compile, checkpoint_wrapper and FSDP1 put into the names of parameters
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
ALL_LINEARS = (None, ("all-linear",))  # values of --lora-targets; the latter is peft's word
NOT_SUPPORTED_BY_PEFT = "peft has no place for adapters of that name in this family"
# The fields of an adapter_config.json that are followed, or have no effect on the trained tensors. A folder that sets
# any other field, also one that a newer peft adds, is refused.
TAKEN_FIELDS = {"peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "bias"}
TAKEN_FIELDS |= {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
TAKEN_FIELDS |= {"peft_version", "auto_mapping", "task_type", "inference_mode", "fan_in_fan_out", "lora_dropout"}
TAKEN_FIELDS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # options of `init_lora_weights`
TAKEN_FIELDS |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base, or freeze a part of the adapters
MERGE = "merge them into the base with peft (merge_and_unload) and train new ones on it, or train on with peft"


def base_weights_dtype(settings: flags.Settings) -> torch.dtype:
    """The dtype in which a model's own weights are built, loaded and sharded."""
    return torch.bfloat16 if settings.lora_rank and settings.precision == "bf16" else weight_dtype(settings)


def has_frozen(model: nn.Module) -> bool:
    """True if some weights of a model are not trained: they are in no checkpoint."""
    return not all(parameter.requires_grad for parameter in model.parameters())


# ---- Adapters --------------------------------------------------------------------------------------------------------


class Adapters:
    """The adapters of --lora-rank: those in the folder that --model names, or new ones. Freezes a model that has no
    storage yet; `add_to` gives one of its layers adapters.

    Raises:
        UserError: peft is missing; weights are quantized; --lora-targets, or the adapters in the folder, do not fit.
    """

    def __init__(self, settings: flags.Settings, model: Any):
        if not find_spec("peft"):
            raise base.UserError("--lora-rank: needs the package peft (pip install peft)")
        if settings.init == "pretrained" and quantization_fields(model.config):
            problem = f"the weights of {settings.model} are quantized, and adapters are for bf16 or fp32 weights here"
            raise base.UserError(f"--lora-rank: {problem}; choose weights that are not quantized")
        model.requires_grad_(False)
        folder = flags.adapter_folder(settings.model) if settings.init == "pretrained" else None
        saved = read_config(settings, folder) if folder else None
        targets = find_targets(settings, model, saved)
        self.dtype = weight_dtype(settings)
        self.names = {model.get_submodule(name): name for name in targets}
        scaling = {"lora_alpha": settings.lora_alpha, "use_rslora": bool(saved and saved.use_rslora)}
        self.config = functools.partial(lora_config, r=settings.lora_rank, **scaling)
        model.peft_config = {"default": self.config(target_modules=target_modules(model, targets))}
        self.file = None
        if folder:
            needed = try_to_load(model, targets, settings.lora_rank)
            self.file = base.call_on_all_ranks(lambda: open_adapters(folder, needed))

    def add_to(self, layer: nn.Module) -> None:
        """Add adapters to a decoder layer whose weights are loaded."""
        inside = {name: self.names[module] for name, module in layer.named_modules() if module in self.names}
        if not inside:
            return
        # a pattern of full names in the layer: the names in `peft_config` may begin outside of it
        inject_on_meta(self.config(target_modules="|".join(map(re.escape, inside))), layer)
        for name, full_name in inside.items():
            adapted: Any = layer.get_submodule(name)
            device = adapted.base_layer.weight.device
            linears = {part: getattr(adapted, part)["default"] for part in ("lora_A", "lora_B")}
            for linear in linears.values():
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device, dtype=torch.float32))
            adapted.reset_lora_parameters("default", True)
            for part, linear in linears.items():
                linear.weight.data = linear.weight.data.to(self.dtype)
                if self.file:
                    linear.weight.data.copy_(self.file.get_tensor(f"{PREFIX}{full_name}.{part}.weight"))


def lora_config(**fields: Any) -> LoraConfig:
    import peft

    return peft.LoraConfig(**fields)


def inject_on_meta(config: LoraConfig, model: nn.Module, name: str = "default") -> None:
    """Inject adapters without storage into a model, or a layer of one."""
    import peft

    with quiet_on_meta():
        peft.inject_adapter_in_model(config, model, name)


@contextlib.contextmanager
def quiet_on_meta() -> Iterator[None]:
    """A context in which tensors have no storage and peft's warnings are off, such as of a Conv1D's transposed weight,
    which it handles."""
    with warnings.catch_warnings(action="ignore"), torch.device("meta"):
        yield


def trained_on_meta(settings: flags.Settings, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model without storage, with its adapters if it has any."""
    model = on_meta(config, settings.attention)
    if settings.lora_rank:
        adapters = Adapters(settings, model)
        for layer in decoder_layers(model):
            adapters.add_to(layer)
    return model


def freeze_as_in(trained: Any, model: nn.Module) -> None:
    """Inject the adapters of `trained`, if it has some, into a model without, and freeze the parameters that are frozen
    there.

    Raises:
        ValueError: `trained` has several adapters, or lacks a parameter of the model.
    """
    if adapters := getattr(trained, "peft_config", None):
        if len(adapters) > 1:
            raise ValueError(f"FLOPs are counted with one adapter, and the model has {', '.join(adapters)}")
        ((name, config),) = adapters.items()
        inject_on_meta(copy.deepcopy(config), model, name)
    named = ((WRAPPERS.sub("", name), parameter) for name, parameter in trained.named_parameters())
    is_trained = {name.removeprefix(PREFIX): parameter.requires_grad for name, parameter in named}
    for name, parameter in model.named_parameters():
        if name not in is_trained:
            raise ValueError(f"the model lacks {name}, which its config has")
        parameter.requires_grad_(is_trained[name])


# ---- Target linears --------------------------------------------------------------------------------------------------


def find_targets(settings: flags.Settings, model: nn.Module, saved: LoraConfig | None) -> list[str]:
    """The names of the linears that get adapters, in a model without any: those of --lora-targets, by default all that
    peft loads. `saved` is the config of a folder of adapters: as in peft, its names that match nothing have no effect.

    Raises:
        UserError: --lora-targets matches nothing, no linear of a decoder layer, or one that peft does not load; it
            loads none of this model.
    """
    linears = decoder_linears(model)
    if settings.lora_targets in ALL_LINEARS:
        names = loaded_linears(model, matching_modules(linears, model, saved) if saved else linears)
        if not names:
            raise base.UserError(f"--lora-rank: peft loads no adapters of the linears of {settings.model}")
        return names
    advice = f"linears of its decoder layers: {', '.join(leaf_names(linears))}"
    targets: dict[str, str] = {}  # {module: the name or pattern that matches it}
    for target in settings.lora_targets:
        names = matching_modules(target if flags.is_pattern(target) else [target], model, saved)
        if not names and "lora_targets" in settings.explicit:
            raise base.UserError(f"--lora-targets {target}: {settings.model} has nothing of that name; {advice}")
        targets |= dict.fromkeys(names, target)
    loaded = loaded_linears(model, [name for name in linears if name in targets])
    for name, target in targets.items():
        if name not in loaded:
            reason = NOT_SUPPORTED_BY_PEFT if name in linears else "adapters are for linears of decoder layers"
            raise base.UserError(f"--lora-targets {target}: it matches {name}, and {reason}; {advice}")
    return loaded


def decoder_linears(model: nn.Module) -> list[str]:
    """The names of the linears of a model's decoder layers, without the routers of experts."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    inside -= {module for router, _ in find_routers(model) for module in router.modules()}
    return [name for name, module in model.named_modules() if module in inside and is_linear(module)]


def is_linear(module: nn.Module) -> bool:
    """True for a linear, also GPT-2's. A subclass with sizes of another kind computes something else, such as
    DeepSeek-V4's projection of groups."""
    return isinstance(module, Conv1D) or type(module).__init__ is nn.Linear.__init__


def matching_modules(target: str | list[str], model: nn.Module, saved: LoraConfig | None = None) -> list[str]:
    """The names of the modules, and of the stacked weights of experts, that peft matches by a pattern or names, with
    the exclusions in the config `saved`.

    Raises:
        UserError: the pattern is no regular expression.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, parameter in model.named_parameters() if parameter.dim() > 2]
    config = copy.copy(saved or lora_config())
    config.target_modules = target
    try:
        return [name for name in names if check_target_module_exists(config, name)]
    except re.error as error:
        raise base.UserError(f"--lora-targets {target}: it is no pattern ({error})") from error


def loaded_linears(model: nn.Module, linears: list[str]) -> list[str]:
    """Those of the linears whose adapters peft loads. In families whose experts were linears once it takes names of
    dense linears for those of experts; if it refuses the linears together, those of each name are tried alone."""
    loaded = try_to_load(model, linears)
    if not loaded:
        for leaf in leaf_names(linears):
            loaded |= try_to_load(model, [name for name in linears if leaf_names([name]) == [leaf]])
    return [name for name in linears if f"{PREFIX}{name}.lora_B.weight" in loaded]


def try_to_load(model: nn.Module, linears: list[str], rank: int = 1) -> dict[str, torch.Tensor]:
    """The tensors, by their names in a folder and without storage, that peft loads of adapters of all these linears;
    empty if it refuses one."""
    import peft

    with quiet_on_meta():
        try:
            config = lora_config(r=rank, target_modules=target_modules(model, linears))
            wrapped = peft.PeftModel(copy.deepcopy(model), config)
            tensors = to_peft_names(wrapped.get_base_model().state_dict())
            result: Any = peft.set_peft_model_state_dict(wrapped, tensors)
        except (ValueError, RuntimeError):
            return {}
    missing = {name.replace(NAME, ".") for name in result.missing_keys}
    return {name: tensor for name, tensor in tensors.items() if name not in missing}


def target_modules(model: nn.Module, targets: list[str]) -> list[str]:
    """The target_modules of peft's config for the linears `targets`: the last parts of their names, or the full names
    if these parts match other modules too."""
    names = sorted(leaf_names(targets))
    return names if {*matching_modules(names, model)} == {*targets} else targets


def leaf_names(names: Iterable[str]) -> list[str]:
    """The last parts of dotted names, each once: `q_proj` for `model.layers.0.self_attn.q_proj`."""
    return [*dict.fromkeys(name.rpartition(".")[2] for name in names)]


# ---- Folders of adapters ---------------------------------------------------------------------------------------------


def read_config(settings: flags.Settings, folder: pathlib.Path) -> LoraConfig:
    """The config of a folder of adapters. As in peft, fields that it does not know are ignored with a warning.

    Raises:
        UserError: peft refuses it, or it is of more than adapters of linears, or changes the base.
    """
    import peft

    config = flags.read_adapter_config(str(folder))
    config.pop("runtime_config", None)  # peft drops it too
    defaults = peft.LoraConfig().to_dict()
    known = {field: value for field, value in config.items() if field in defaults}
    for field, value in known.items():
        is_plain_init = field == "init_lora_weights" and value in PLAIN_INITS
        if not (is_plain_init or field in TAKEN_FIELDS or not value or value == defaults[field]):
            problem = f"its {base.ADAPTER_CONFIG} has {field} {json.dumps(value)}, and adapters here are plain LoRA"
            raise base.UserError(f"--model {folder}: {problem}; {MERGE}")
    if not settings.plan:  # a plan reads it for each configuration
        if unknown := ", ".join(sorted(config.keys() - known.keys())):
            problem = f"its {base.ADAPTER_CONFIG} has {unknown}"
            problem += f", which peft {peft.__version__} does not know and ignores"
            job.warn(f"--model {folder}: {problem}; if a newer peft wrote it, pip install -U peft")
        if config.get("lora_dropout"):
            job.warn(f"{folder}: its adapters had a dropout of {config['lora_dropout']}; training continues without")
    try:
        with warnings.catch_warnings(action="ignore"):  # of options of other `init_lora_weights`
            return peft.LoraConfig(**known)
    except (TypeError, ValueError) as error:
        problem = f"peft refuses its {base.ADAPTER_CONFIG} ({base.first_line(error)})"
        raise base.UserError(f"--model {folder}: {problem}") from error


def open_adapters(folder: pathlib.Path, needed: dict[str, torch.Tensor]) -> Any:
    """Open the tensors of a folder of adapters; `needed` are those of the model, by their names, without storage.

    Raises:
        UserError: the file cannot be read, or has tensors of other names or shapes.
    """
    try:
        file = safe_open(folder / ADAPTERS_FILE, framework="pt")
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except Exception as error:
        problem = f"{ADAPTERS_FILE} cannot be read ({base.first_line(error)})"
        advice = "fetch it again, or write adapters of another format with peft's save_pretrained"
        raise base.UserError(f"--model {folder}: {problem}; {advice}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in needed.items()}
    if found == shapes:
        return file
    name = min(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if name in found and name in shapes:
        problem = f"{name} has the shape {found[name]}, and its {base.ADAPTER_CONFIG} says {shapes[name]}"
        advice = "set r and base_model_name_or_path there to those of its training"
    elif ".lora_" in name:
        problem = f"its adapters {'have' if name in found else 'lack'} {name}"
        advice = "give the --lora-targets that they were trained with"
    else:
        problem, advice = f"{ADAPTERS_FILE} has {name}, which is no adapter of a linear", MERGE
    raise base.UserError(f"--model {folder}: {problem}; {advice}")


def to_peft_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among a model's tensors, by their names in a folder that peft writes."""
    return {PREFIX + name.replace(NAME, "."): tensor for name, tensor in tensors.items() if ".lora_" in name}


def write_adapter_config(folder: pathlib.Path, settings: flags.Settings, model: Any) -> None:
    """Write the adapter_config.json of a model's adapters into `folder`."""
    config = model.peft_config["default"]
    _, source, config.revision = find_source(settings.model)
    path = pathlib.Path(source).expanduser()
    config.base_model_name_or_path = str(path.absolute()) if path.is_dir() else source
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    first = next(layer for layer in model.modules() if hasattr(layer, "lora_A"))
    config.fan_in_fan_out = isinstance(first.base_layer, Conv1D)
    content = config.to_dict()
    content["target_modules"] = sorted(content["target_modules"])
    (folder / base.ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, default=str) + "\n")


def merged(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors with the names of a model without adapters. The adapters are added to the weights in fp32 and
    rounded to the weights' dtype."""
    result = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        path, is_adapted, parameter_name = name.partition(".base_layer.")
        if is_adapted and parameter_name == "weight":
            adapted: Any = model.get_submodule(path)
            up, down = (tensors[f"{path}.{part}{NAME}weight"].float() for part in ("lora_B", "lora_A"))
            delta = up @ down * adapted.scaling["default"]
            if isinstance(adapted.base_layer, Conv1D):
                delta = delta.t()
            tensor = (tensor.float() + delta).to(tensor.dtype)
        result[f"{path}.{parameter_name}" if is_adapted else name] = tensor
    return result


def describe_adapters(settings: flags.Settings, model: Any) -> str:
    """The header's line about adapters; empty without adapters."""
    if not settings.lora_rank:
        return ""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in model.parameters())
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    names = ", ".join(leaf_names(adapted))
    frozen = str(base_weights_dtype(settings)).removeprefix("torch.")
    share = f"{trained:,} of {everything:,} parameters are trained ({100 * trained / everything:.2g} %)"
    scale = f"rank {settings.lora_rank}, alpha {settings.lora_alpha}"
    if model.peft_config["default"].use_rslora:
        scale += " (rsLoRA: alpha / sqrt(rank))"
    adapters = f"{scale}, on {base.counted(len(adapted), 'linear')} ({names})"
    left_out = [name for name in decoder_linears(model) if not re.search(r"\.(base_layer|lora_[AB])\b", name)]
    if left_out and settings.lora_targets in ALL_LINEARS:
        count = base.counted(len(left_out), "linear")
        adapters += f", not on {count} ({', '.join(leaf_names(left_out))}): {NOT_SUPPORTED_BY_PEFT}"
    return f"{share}: {adapters}; the others are frozen in {frozen}"
