"""LoRA, by peft: adapters beside the linears of decoder layers, whose own weights are frozen.

The forward, the start values and the names are peft's. Everything else follows from `requires_grad`: what is frozen has
no gradient, no optimizer state and no place in a checkpoint. Its weights are loaded, sharded and gathered in bf16;
adapters are trained in the dtype of master weights, in the same groups of FSDP2 as the layers that they are in.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
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
from harness.model.routing import find_routers
from harness.model.weights import decoder_layers, on_meta

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTERS_FILE = "adapter_model.safetensors"
PREFIX, NAME = "base_model.model.", ".default."  # in peft's names: of its wrapper; of the adapters of a model
ALL_LINEARS = (None, ("all-linear",))  # --lora-targets; the latter is peft's word for it
NOT_SUPPORTED_BY_PEFT = "peft has no place for adapters of that name in this family"
# Fields of an adapter_config.json that are followed, then those that change nothing of what trained tensors compute.
# Any other that is set is refused, also what a newer peft adds.
TAKEN_FIELDS = {"peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "target_modules"}
TAKEN_FIELDS |= {"exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "bias"}
TAKEN_FIELDS |= {"init_lora_weights"}
TAKEN_FIELDS |= {"peft_version", "auto_mapping", "task_type", "inference_mode", "fan_in_fan_out", "lora_dropout"}
TAKEN_FIELDS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}  # of `init_lora_weights`
TAKEN_FIELDS |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}
MERGE = "merge them into the base with peft (merge_and_unload) and train new ones on it, or train on with peft"
PLAIN_INITS = ("gaussian", "eva", "orthogonal")  # the others change the base, or freeze a part of the adapters


def loaded_dtype(settings: flags.Settings) -> torch.dtype:
    """In which a model's own weights are built, loaded and held."""
    return torch.bfloat16 if settings.lora_rank and settings.precision == "bf16" else weight_dtype(settings)


def has_frozen(model: nn.Module) -> bool:
    """Whether weights of a model are not trained: they are in no checkpoint."""
    return not all(parameter.requires_grad for parameter in model.parameters())


# ---- Which linears ---------------------------------------------------------------------------------------------------


def find_targets(settings: flags.Settings, model: nn.Module, trained: LoraConfig | None) -> list[str]:
    """The names of the linears that have adapters, of a model without any. `trained` is the config of a folder of
    adapters: in it names that match nothing have no effect, as in peft.

    Raises:
        UserError: --lora-targets names what is none, or is outside the decoder layers, or routes tokens to experts, or
            what peft loads no adapters of; peft loads none of this model.
    """
    linears, loaded = decoder_linears(model), supported_linears(model)
    if not loaded:
        raise base.UserError(f"--lora-rank: peft loads no adapters of the linears of {settings.model}")
    if settings.lora_targets in ALL_LINEARS:
        names = matching_modules(loaded, model, trained) if trained else loaded
        return [name for name in loaded if name in names]
    found: set[str] = set()
    is_typed = trained is None or "lora_targets" in settings.explicit
    for target in settings.lora_targets:
        given = f"--lora-targets {target}" if is_typed else f"--model {settings.model}: target_modules has {target}"
        matches = matching_modules(target if flags.is_pattern(target) else [target], model, trained)
        there = f"linears of its decoder layers: {', '.join(leaf_names(loaded))}"
        if not matches and is_typed:
            raise base.UserError(f"{given}: {settings.model} has nothing of that name; {there}")
        if others := [name for name in matches if name not in loaded]:
            reason = NOT_SUPPORTED_BY_PEFT if others[0] in linears else "adapters are for linears of decoder layers"
            raise base.UserError(f"{given}: it matches {others[0]}, and {reason}; {there}")
        found |= {*matches}
    if not found:
        raise base.UserError(f"--model {settings.model}: its target_modules match no linear of its base; {there}")
    return [name for name in loaded if name in found]


def decoder_linears(model: nn.Module) -> list[str]:
    """The names of the linears of a model's decoder layers, without those that route tokens to experts."""
    inside = {module for layer in decoder_layers(model) for module in layer.modules()}
    inside -= {module for router, _ in find_routers(model) for module in router.modules()}
    return [n for n, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module in inside]


def supported_linears(model: nn.Module) -> list[str]:
    """The names of the linears of decoder layers whose adapters peft loads from a folder with the adapters of all."""
    linears = decoder_linears(model)
    while lost := unsupported_linears(model, linears):
        linears = [name for name in linears if name not in lost]
    return linears


def unsupported_linears(model: nn.Module, linears: list[str]) -> set[str]:
    """Those of these linears whose adapters peft would not load from a folder that has them: in families whose experts
    were linears once, it takes the names of dense ones for those of experts."""
    if not linears:
        return set()
    import peft

    config = lora_config(r=1, target_modules=target_modules(model, linears))
    with quiet_on_meta():
        tensors = {name: torch.empty(shape) for name, shape in adapter_shapes(model, linears, 1).items()}
        try:
            wrapped = peft.PeftModel(copy.deepcopy(model), config)
            result: Any = peft.set_peft_model_state_dict(wrapped, tensors)
        except (ValueError, RuntimeError) as error:  # some of these names it refuses in this family
            parts = leaf_names(linears)
            if len(parts) == 1:
                return {*linears}
            named = [[name for name in linears if name.rpartition(".")[2] == part] for part in parts]
            if refused := set().union(*(unsupported_linears(model, names) for names in named)):
                return refused
            raise base.UserError(f"--lora-rank: peft refuses this model ({base.first_line(error)})") from error
    filled = {name for name in wrapped.state_dict() if name not in result.missing_keys}
    return {n for n in linears for part in ("lora_A", "lora_B") if f"{PREFIX}{n}.{part}{NAME}weight" not in filled}


def adapter_shapes(model: nn.Module, linears: list[str], rank: int) -> dict[str, tuple[int, int]]:
    """The shapes of the tensors in a folder of adapters of these linears, by their names."""
    shapes = {}
    for name in linears:
        linear: Any = model.get_submodule(name)
        out_features, in_features = linear.weight.t().shape if isinstance(linear, Conv1D) else linear.weight.shape
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (rank, in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (out_features, rank)
    return shapes


def leaf_names(names: Iterable[str]) -> list[str]:
    """`q_proj` of `model.layers.0.self_attn.q_proj`, each once."""
    return [*dict.fromkeys(name.rpartition(".")[2] for name in names)]


def matching_modules(target: str | list[str], model: nn.Module, trained: LoraConfig | None = None) -> list[str]:
    """The names of the modules that peft would match by a pattern or names, without those that the config `trained`
    leaves out, and of the weights in which experts are stacked, for which it has a way of its own."""
    from peft.tuners.tuners_utils import check_target_module_exists

    left_out = ("exclude_modules", "layers_to_transform", "layers_pattern")
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, parameter in model.named_parameters() if parameter.dim() > 2]
    try:
        config = lora_config(target_modules=target, **{name: getattr(trained, name, None) for name in left_out})
        return [name for name in names if check_target_module_exists(config, name)]
    except (ValueError, re.error) as error:  # a pattern beside layers_to_transform
        raise base.UserError(f"--lora-targets {target}: it is no pattern ({error})") from error


def target_modules(model: nn.Module, targets: list[str]) -> list[str]:
    """What peft's config says of the linears `targets`: the last parts of their names, or where something else has such
    a name too, the names."""
    names = sorted(leaf_names(targets))
    matched = {*matching_modules(names, model)}
    return names if matched == {*targets} else targets


def lora_config(**fields: Any) -> LoraConfig:
    import peft

    return peft.LoraConfig(**fields)


# ---- Injection -------------------------------------------------------------------------------------------------------


def adapter_injector(settings: flags.Settings, model: Any) -> Callable[[nn.Module], None]:
    """Freezes a model that has no storage yet. Returns what gives one decoder layer of it, when its weights are there,
    its adapters: those of the folder that --model names, or new ones. Without --lora-rank it does nothing.

    Raises:
        UserError: peft is missing; --lora-targets, or the adapters in the folder, do not fit the model.
    """
    if not settings.lora_rank:
        return lambda layer: None
    if not find_spec("peft"):
        raise base.UserError("--lora-rank: needs the package peft (pip install peft)")
    refuse_quantized(settings, model.config)
    model.requires_grad_(False)
    folder = flags.adapter_folder(settings.model) if settings.init == "pretrained" else None
    trained = read_config(settings, folder) if folder else None
    targets = find_targets(settings, model, trained)
    if folder and trained:
        refuse_patterns(folder, trained, targets)
    use_rslora = trained is not None and trained.use_rslora
    place = functools.partial(lora_config, r=settings.lora_rank, lora_alpha=settings.lora_alpha, use_rslora=use_rslora)
    model.peft_config = {"default": place(target_modules=target_modules(model, targets))}
    shapes = adapter_shapes(model, targets, settings.lora_rank)
    read = base.call_on_all_ranks(lambda: open_adapters(settings, folder, shapes)) if folder else None
    names = {model.get_submodule(name): name for name in targets}

    def inject(layer: nn.Module) -> None:
        inside = {name: names[module] for name, module in layer.named_modules() if module in names}
        if not inside:
            return
        # by whole names: a layer knows only the ends of those that --lora-targets matches
        inject_on_meta(place(target_modules="|".join(map(re.escape, inside))), layer)
        for name, whole_name in inside.items():
            adapted: Any = layer.get_submodule(name)
            device = adapted.base_layer.weight.device
            linears = {part: getattr(adapted, part)["default"] for part in ("lora_A", "lora_B")}
            for linear in linears.values():
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device=device, dtype=torch.float32))
            adapted.reset_lora_parameters("default", True)
            for part, linear in linears.items():
                linear.weight.data = linear.weight.data.to(weight_dtype(settings))
                if read:
                    linear.weight.data.copy_(read(f"{PREFIX}{whole_name}.{part}.weight"))

    return inject


def trained_on_meta(settings: flags.Settings, config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """The model without storage, with its adapters if it has any."""
    model = on_meta(config, settings.attention)
    inject = adapter_injector(settings, model)
    for layer in decoder_layers(model):
        inject(layer)
    return model


def inject_on_meta(config: LoraConfig, model: nn.Module) -> None:
    """Has peft put adapters without storage into a model, or a layer of one."""
    import peft

    with quiet_on_meta():
        peft.inject_adapter_in_model(config, model)


@contextlib.contextmanager
def quiet_on_meta() -> Iterator[None]:
    """In it tensors have no storage, and peft does not warn of what it finds in a model."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # among them that the weights of a Conv1D are transposed, which it heeds
        yield


def freeze_as_in(trained: Any, model: nn.Module) -> None:
    """Gives a model without adapters those of a model that is `trained`, if it has some, and freezes what is frozen
    there."""
    if adapters := getattr(trained, "peft_config", None):
        (config,) = adapters.values()
        inject_on_meta(copy.deepcopy(config), model)
    is_trained = {name.removeprefix(PREFIX): one.requires_grad for name, one in trained.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained.get(name, True))


def refuse_quantized(settings: flags.Settings, config: transformers.PretrainedConfig) -> None:
    """Raises a UserError where the weights to be frozen are quantized: they would be held dequantized, and adapters
    be trained for weights that a server does not have."""
    parts = (config, config.get_text_config())
    if settings.init == "pretrained" and any(getattr(part, "quantization_config", None) for part in parts):
        problem = f"the weights of {settings.model} are quantized, and adapters are trained here for whole ones"
        raise base.UserError(f"--lora-rank: {problem}; choose weights that are not quantized")


def read_config(settings: flags.Settings, folder: pathlib.Path) -> LoraConfig:
    """The config of a folder of adapters. Fields that peft does not know are ignored with a warning, as by peft.

    Raises:
        UserError: peft refuses it; it asks for more than adapters of linears, or for a base that peft changes; the
            flags have another rank or alpha.
    """
    import peft

    config = flags.read_adapter_config(str(folder))
    config.pop("runtime_config", None)  # as peft does
    defaults = peft.LoraConfig().to_dict()
    known = {field: value for field, value in config.items() if field in defaults}
    for field, value in known.items():
        if field not in TAKEN_FIELDS and value and value != defaults[field]:
            refuse_adapters(folder, field, value)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init not in PLAIN_INITS:
        refuse_adapters(folder, "init_lora_weights", init)
    for flag, field in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if getattr(settings, flag) != config.get(field):
            problem = f"the adapters of {folder} have {config.get(field)}"
            raise base.UserError(f"--{flag.replace('_', '-')} {getattr(settings, flag)}: {problem}; leave it out")
    if not settings.plan:  # which reads it for each configuration
        if unknown := ", ".join(sorted(config.keys() - known.keys())):
            problem = (
                f"its {base.ADAPTER_CONFIG} has {unknown}, which peft {peft.__version__} does not know and ignores"
            )
            job.warn(f"--model {folder}: {problem}; if a newer peft wrote it, pip install -U peft")
        if config.get("lora_dropout"):
            job.warn(f"{folder}: its adapters had a dropout of {config['lora_dropout']}; training continues without")
    try:
        with warnings.catch_warnings(action="ignore"):  # of settings of other `init_lora_weights`
            return peft.LoraConfig(**known)
    except (TypeError, ValueError) as error:
        problem = f"peft refuses its {base.ADAPTER_CONFIG} ({base.first_line(error)})"
        raise base.UserError(f"--model {folder}: {problem}") from error


def refuse_adapters(folder: pathlib.Path, field: str, value: Any) -> None:
    """Raises a UserError for a field of an adapter_config.json that is not followed here."""
    problem = f"its {base.ADAPTER_CONFIG} has {field} {json.dumps(value)}, and adapters here are plain LoRA"
    raise base.UserError(f"--model {folder}: {problem}; {MERGE}")


def refuse_patterns(folder: pathlib.Path, config: LoraConfig, targets: list[str]) -> None:
    """Raises a UserError where linears have a rank or an alpha of their own."""
    from peft.utils.other import get_pattern_key

    for field, usual in (("rank_pattern", config.r), ("alpha_pattern", config.lora_alpha)):
        pattern = getattr(config, field) or {}
        for name in targets:
            if pattern.get(get_pattern_key([*pattern], name), usual) != usual:
                refuse_adapters(folder, field, pattern)


def open_adapters(
    settings: flags.Settings, folder: pathlib.Path, shapes: dict[str, tuple[int, int]]
) -> Callable[[str], torch.Tensor]:
    """A function that reads a tensor of a folder of adapters by its name; those that it has to have, by their names.

    Raises:
        UserError: they are of another rank, of other linears or another model, or more than adapters of linears.
    """
    try:
        file = safe_open(folder / ADAPTERS_FILE, framework="pt")
        there = {*file.keys()}
    except Exception as error:
        problem = f"{ADAPTERS_FILE} cannot be read ({base.first_line(error)})"
        raise base.UserError(f"--model {folder}: {problem}") from error
    if others := [name for name in there if not name.endswith((".lora_A.weight", ".lora_B.weight"))]:
        problem = f"{ADAPTERS_FILE} has {min(others)}, which is no adapter of a linear"
        raise base.UserError(f"--model {folder}: {problem}; {MERGE}")
    for problem, names in (("lack", shapes.keys() - there), ("have", there - shapes.keys())):
        if names:
            advice = "give the --lora-targets that they were trained with"
            raise base.UserError(f"--model {folder}: its adapters {problem} {min(names)}; {advice}")
    for name, shape in shapes.items():
        if (found := tuple(file.get_slice(name).get_shape())) != shape:
            problem = f"{name} has the shape {found}, and with rank {settings.lora_rank} this model's has {shape}"
            advice = f"set r and base_model_name_or_path in its {base.ADAPTER_CONFIG} to what it was trained with"
            raise base.UserError(f"--model {folder}: {problem}; {advice}")
    return file.get_tensor


# ---- What an export has ----------------------------------------------------------------------------------------------


def to_peft_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among a model's tensors, by the names that a folder of peft's has."""
    return {PREFIX + name.replace(NAME, "."): tensor for name, tensor in tensors.items() if ".lora_" in name}


def write_adapter_config(folder: pathlib.Path, settings: flags.Settings, model: Any) -> None:
    """Writes the adapter_config.json of a model's adapters."""
    config = model.peft_config["default"]
    _, source, config.revision = find_source(settings.model)
    is_folder = pathlib.Path(source).expanduser().is_dir()
    config.base_model_name_or_path = str(pathlib.Path(source).expanduser().absolute()) if is_folder else source
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    first = next(layer for layer in model.modules() if hasattr(layer, "lora_A"))
    config.fan_in_fan_out = isinstance(first.base_layer, Conv1D)
    content = config.to_dict()
    if not isinstance(content["target_modules"], str):
        content["target_modules"] = sorted(content["target_modules"])
    (folder / base.ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, default=str) + "\n")


def merged(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors, by the names that they have without adapters: what these add is added to the weights, in fp32,
    and rounded to the weights' dtype."""
    result = {}
    for name, tensor in tensors.items():
        if ".lora_" in name:
            continue
        path, is_adapted, parameter_name = name.partition(".base_layer.")
        if is_adapted and parameter_name == "weight":
            adapted: Any = model.get_submodule(path)
            up, down = (tensors[f"{path}.{part}{NAME}weight"].float() for part in ("lora_B", "lora_A"))
            change = up @ down * adapted.scaling["default"]
            if isinstance(adapted.base_layer, Conv1D):
                change = change.t()
            tensor = (tensor.float() + change).to(tensor.dtype)
        result[f"{path}.{parameter_name}" if is_adapted else name] = tensor
    return result


def describe_adapters(settings: flags.Settings, model: Any) -> str:
    """The line of the header about adapters; empty where there are none."""
    if not settings.lora_rank:
        return ""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in model.parameters())
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    names = ", ".join(leaf_names(adapted))
    frozen = str(loaded_dtype(settings)).removeprefix("torch.")
    share = f"{trained:,} of {everything:,} parameters are trained ({100 * trained / everything:.2g} %)"
    scale = f"rank {settings.lora_rank}, alpha {settings.lora_alpha}"
    if model.peft_config["default"].use_rslora:
        scale += " (rsLoRA: alpha / sqrt(rank))"
    where = f"{scale}, on {base.counted(len(adapted), 'linear')} ({names})"
    left_out = [name for name in decoder_linears(model) if not re.search(r"\.(base_layer|lora_[AB])\b", name)]
    if left_out and settings.lora_targets in ALL_LINEARS:
        count = base.counted(len(left_out), "linear")
        where += f", not on {count} ({', '.join(leaf_names(left_out))}): {NOT_SUPPORTED_BY_PEFT}"
    return f"{share}: {where}; the others are frozen in {frozen}"
