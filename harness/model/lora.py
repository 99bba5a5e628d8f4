"""LoRA, by peft: adapters of linears in decoder layers, whose own weights are frozen.

The forward, the start values and the names are peft's. Everything else follows from `requires_grad`: a frozen weight
has no gradient, no optimizer state and no place in a checkpoint. It is loaded, sharded and gathered in bf16; adapters
are trained in the dtype of master weights, in the FSDP2 groups of their layers.

peft adds the adapters to a copy of the model without storage. Its modules move from there to one layer at a time, after
the layer's weights are loaded: adapters rename the weights to `base_layer`, which transformers' conversion rules for
checkpoints do not know.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pathlib
import re
import textwrap
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
PARTS = ("lora_A", "lora_B")
PREFIX, NAME = "base_model.model.", ".default."  # parts of peft's names: its wrapper, the adapters of a model
# what torch.compile, checkpoint_wrapper and FSDP1 put into the names of parameters
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
ALL_LINEARS = (None, ("all-linear",))  # values of --lora-targets; the latter is peft's word
# The fields of an adapter_config.json that are passed on to peft, then also those that are flags here or have no effect
# on the trained tensors. A folder that sets any other field, also one that a newer peft adds, is refused.
FOLLOWED_FIELDS = ("use_rslora", "exclude_modules", "layers_to_transform", "layers_pattern")
TAKEN_FIELDS = {*FOLLOWED_FIELDS, "peft_type", "base_model_name_or_path", "revision"}
TAKEN_FIELDS |= {"r", "lora_alpha", "target_modules", "bias"}
TAKEN_FIELDS |= {"peft_version", "auto_mapping", "task_type", "inference_mode", "fan_in_fan_out", "lora_dropout"}
TAKEN_FIELDS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # options of `init_lora_weights`
TAKEN_FIELDS |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base, or freeze a part of the adapters
MERGE = "merge the adapters into the base with peft (merge_and_unload) and train new ones on it, or train on with peft"


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
        config = adapter_config(settings, model, folder)
        adapted = find_adapted(settings, model, config)
        self.dtype = weight_dtype(settings)
        self.adapted = {model.get_submodule(name): (name, module) for name, module in adapted.items()}
        self.file = base.call_on_all_ranks(lambda: open_adapters(folder, adapted)) if folder else None
        model.peft_config = {"default": config}

    def add_to(self, layer: nn.Module) -> None:
        """Add adapters to a decoder layer whose weights are loaded."""
        for name, linear in [*layer.named_modules()]:
            if linear not in self.adapted:
                continue
            full_name, adapted = self.adapted[linear]
            adapted.base_layer = linear
            layer.set_submodule(name, adapted)
            matrices = {part: getattr(adapted, part)["default"] for part in PARTS}
            for matrix in matrices.values():
                weight = torch.empty_like(matrix.weight, device=linear.weight.device, dtype=torch.float32)
                matrix.weight = nn.Parameter(weight)
            adapted.reset_lora_parameters("default", True)
            for part, matrix in matrices.items():
                matrix.weight.data = matrix.weight.data.to(self.dtype)
                if self.file:
                    matrix.weight.data.copy_(self.file.get_tensor(f"{PREFIX}{full_name}.{part}.weight"))


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
        import peft

        if len(adapters) > 1:
            raise ValueError(f"FLOPs are counted with one adapter, and the model has {', '.join(adapters)}")
        ((name, config),) = adapters.items()
        with quiet_on_meta():
            peft.inject_adapter_in_model(copy.deepcopy(config), model, name)
    named = ((WRAPPERS.sub("", name), parameter) for name, parameter in trained.named_parameters())
    is_trained = {name.removeprefix(PREFIX): parameter.requires_grad for name, parameter in named}
    for name, parameter in model.named_parameters():
        if name not in is_trained:
            raise ValueError(f"the model lacks {name}, which its config has")
        parameter.requires_grad_(is_trained[name])


# ---- Target linears --------------------------------------------------------------------------------------------------


def adapter_config(settings: flags.Settings, model: nn.Module, folder: pathlib.Path | None) -> LoraConfig:
    """peft's config of the adapters in a folder, or of new ones. Without targets they are for all linears of decoder
    layers that peft loads.

    Raises:
        UserError: peft loads none, or refuses the config in the folder.
    """
    import peft

    followed = read_config(settings, folder) if folder else {}
    targets: Any = settings.lora_targets
    if targets in ALL_LINEARS:
        targets = loaded_linears(model)
        if not targets:
            raise base.UserError(f"--lora-rank: peft loads no adapters of the linears of {settings.model}")
    elif flags.is_pattern(targets[0]):
        targets = targets[0]
    else:
        targets = [*targets]
    try:
        return peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=targets, **followed)
    except (TypeError, ValueError) as error:
        problem = f"peft refuses its {base.ADAPTER_CONFIG} ({base.first_line(error)})"
        raise base.UserError(f"--model {folder}: {problem}") from error


def find_adapted(settings: flags.Settings, model: nn.Module, config: LoraConfig) -> dict[str, Any]:
    """{name: peft's module without storage} of the linears that get adapters. As in peft, names in the config of a
    folder that match nothing have no effect.

    Raises:
        UserError: peft refuses the config; it matches more than linears of decoder layers that peft loads; a name that
            was given with --lora-targets matches nothing.
    """

    def refusal(problem: str) -> base.UserError:
        flag = f"--lora-targets {' '.join(settings.lora_targets or ('all-linear',))}"
        names = ", ".join(leaf_names(loaded_linears(model)))
        return base.UserError(f"{flag}: {problem}; give linears of decoder layers whose adapters peft loads: {names}")

    try:
        adapted = adapt_copy(model, config)
    except (ValueError, RuntimeError, re.error) as error:
        reason = textwrap.shorten(str(error), 160, placeholder=" ...")  # it may have the text of a module
        raise refusal(f"peft refuses ({reason})") from error
    linears = decoder_linears(model)
    for name, module in adapted.items():
        if name not in linears or module is None:
            raise refusal(f"it matches {name}, which has no adapters here")
    for target in settings.explicit.get("lora_targets") or ():
        if not flags.is_pattern(target) and not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise refusal(f"{settings.model} has nothing named {target}")
    return adapted


def adapt_copy(model: nn.Module, config: LoraConfig) -> dict[str, Any]:
    """{name: peft's module} of all that gets adapters in a copy of a model without storage; None for a module whose
    adapters peft does not load from a folder.

    Raises:
        ValueError, RuntimeError, re.error: peft refuses the config.
    """
    import peft

    with quiet_on_meta():
        wrapped = peft.PeftModel(copy.deepcopy(model), config)
        copied = wrapped.get_base_model()
        result: Any = peft.set_peft_model_state_dict(wrapped, to_peft_names(copied.state_dict()))
    not_loaded = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in result.missing_keys}
    adapted = ((name, module) for name, module in copied.named_modules() if hasattr(module, "lora_A"))
    return {name: None if name in not_loaded else module for name, module in adapted}


def loaded_linears(model: nn.Module) -> list[str]:
    """The linears of decoder layers whose adapters peft loads. In families whose experts were linears once it takes
    names of dense linears for those of experts; if it refuses the linears together, those of each name are tried
    alone."""
    import peft

    linears = decoder_linears(model)
    adapted: dict[str, Any] = {}
    try:
        adapted = adapt_copy(model, peft.LoraConfig(r=1, target_modules=linears))
    except (ValueError, RuntimeError):
        for leaf in leaf_names(linears):
            names = [name for name in linears if leaf_names([name]) == [leaf]]
            with contextlib.suppress(ValueError, RuntimeError):
                adapted |= adapt_copy(model, peft.LoraConfig(r=1, target_modules=names))
    return [name for name in linears if adapted.get(name) is not None]


def decoder_linears(model: nn.Module) -> list[str]:
    """The names of the linears of a model's decoder layers, without the routers of experts."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    inside -= {module for router, _ in find_routers(model) for module in router.modules()}
    return [name for name, module in model.named_modules() if module in inside and is_linear(module)]


def is_linear(module: nn.Module) -> bool:
    """True for a linear, also GPT-2's. A subclass with sizes of another kind computes something else, such as
    DeepSeek-V4's projection of groups."""
    return isinstance(module, Conv1D) or type(module).__init__ is nn.Linear.__init__


def leaf_names(names: Iterable[str]) -> list[str]:
    """The last parts of dotted names, each once: `q_proj` for `model.layers.0.self_attn.q_proj`."""
    return [*dict.fromkeys(name.rpartition(".")[2] for name in names)]


# ---- Folders of adapters ---------------------------------------------------------------------------------------------


def read_config(settings: flags.Settings, folder: pathlib.Path) -> dict[str, Any]:
    """The FOLLOWED_FIELDS in the config of a folder of adapters. As in peft, fields that it does not know are ignored
    with a warning.

    Raises:
        UserError: it is of more than adapters of linears, or changes the base.
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
    return {field: known[field] for field in FOLLOWED_FIELDS if field in known}


def open_adapters(folder: pathlib.Path, adapted: dict[str, Any]) -> Any:
    """Open the tensors of a folder of adapters for `adapted`, {name: peft's module}.

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
    shapes = {}
    for name, module in adapted.items():
        for part in PARTS:
            shapes[f"{PREFIX}{name}.{part}.weight"] = tuple(getattr(module, part)["default"].weight.shape)
    if found == shapes:
        return file
    name = min(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    in_file, in_model = (tensors.get(name, "missing") for tensors in (found, shapes))
    problem = f"{name} is {in_file} in {ADAPTERS_FILE} and {in_model} in the model"
    fields = "r, target_modules, base_model_name_or_path"
    advice = f"leave out --lora-targets, correct {base.ADAPTER_CONFIG} ({fields}), or {MERGE}"
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
    content = json.dumps(config.to_dict(), indent=2, default=sorted)  # peft has sets of names
    (folder / base.ADAPTER_CONFIG).write_text(content + "\n")


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
        reason = "peft has no place for adapters of that name in this family"
        adapters += f", not on {count} ({', '.join(leaf_names(left_out))}): {reason}"
    return f"{share}: {adapters}; the others are frozen in {frozen}"
