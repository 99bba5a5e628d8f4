"""Weights: the model on the meta device, its decoder layers, and their values, layer by layer."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, conversion_mapping

from harness import base, flags
from harness.model.attention import ONE_KERNEL
from harness.model.configs import text_config
from harness.model.pretrained import PretrainedWeights


def on_meta(
    config: transformers.PretrainedConfig, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model without storage, with one of `--attention`'s kernels, by default transformers' choice. Its tensors have
    `dtype`, but for those that the family keeps in fp32.

    Raises:
        UserError: transformers builds no model of the config, or not with this kernel.
    """
    # given even if None: otherwise the config could name a kernel of the hub
    options = {"attn_implementation": "sdpa" if attention in ONE_KERNEL else attention, "trust_remote_code": False}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (ValueError, ImportError) as error:
        raise base.UserError(f"--attention {attention}: {base.first_line(error)}") from error
    except Exception as error:  # a negative size, an unknown activation
        reason = f"{type(error).__name__}: {base.first_line(error)}"
        raise base.UserError(f"--model: transformers builds no model of its config.json ({reason})") from error
    # private: only `from_pretrained` has them in fp32
    if fp32_patterns := model._get_dtype_plan(dtype):
        kept, *_ = transformers.core_model_loading.build_glob_alternation([*fp32_patterns])
        for name, tensor in model.state_dict(keep_vars=True).items():
            if kept.search(name):
                tensor.data = tensor.data.float()
    model._weight_conversions = rules_of_exports(model)  # private: `as_in_checkpoint` applies them
    return model


def rules_of_exports(model: Any) -> list:
    """transformers' rules for the names and layouts of published checkpoints, as its `save_pretrained` applies them to
    a model that it has not loaded. They are found by the names of classes, which `fully_shard` changes."""
    loading = transformers.core_model_loading  # private: the rules have no public name
    rules = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in rules if not isinstance(rule, loading.PrefixChange)]


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers: the outermost ModuleList with as many modules as the config has layers, in transformers'
    decoder of the model if it has one: an image or audio tower may have as many.

    Raises:
        UserError: there is none.
    """
    count = text_config(model).num_hidden_layers
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise base.UserError(f"--model: no list of {count} decoder layers found in {type(model).__name__}")
    in_decoder = set(model.get_decoder().modules())
    names = [name for name, module in lists.items() if module in in_decoder] or [*lists]
    return lists[min(names, key=lambda name: name.count("."))]


def layer_period(model: nn.Module) -> int:
    """The number of layers after which the pattern of a model repeats (SmolLM3: 4, as one in four has no RoPE); the
    number of all layers if nothing repeats."""
    text = text_config(model)
    layers = decoder_layers(model)
    lists = [value for value in vars(text).values() if isinstance(value, list) and len(value) == len(layers)]
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers]
    kinds = [(shapes[index], *(value[index] for value in lists)) for index in range(len(layers))]
    for period in range(1, len(layers) // 3 + 1):
        if kinds[period:] == kinds[:-period]:
            return period
    return len(layers)


def check_uniform_dtype(model: Any, precision: str) -> None:
    """Check that trained weights have one dtype, as FSDP2 requires; `model` has no storage yet.

    Raises:
        UserError: the family keeps some of them in fp32.
    """
    trained = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = [name for name, dtype in trained.items() if dtype == torch.float32]
    if 0 < len(kept) < len(trained):
        problem = f"{model.config.model_type} keeps {kept[0]} in fp32"
        raise base.UserError(f"--precision {precision}: {problem}; use --precision bf16, or --lora-rank 16")


def check_gpu_memory(settings: flags.Settings, model: nn.Module, device: torch.device, shards: int) -> None:
    """Check that a GPU has room for a rank's shard of the weights and, if the run trains, of the gradients of trained
    ones; `model` has no storage yet.

    Raises:
        UserError: it has not.
    """
    if device.type != "cuda" or settings.cpu_offload:
        return
    copies = {parameter: 2 if settings.num_steps and parameter.requires_grad else 1 for parameter in model.parameters()}
    needed = sum(parameter.nbytes * count for parameter, count in copies.items()) / shards
    capacity = torch.cuda.get_device_properties(device).total_memory
    if needed > capacity:
        kinds = "weights and gradients" if settings.num_steps else "weights"
        sizes = f"{needed / base.GIB:,.0f} GiB of {kinds} for each rank, and its GPU has"
        advice = "more GPUs, --zero-stage 3, --cpu-offload or --lora-rank 16; --plan says what fits"
        raise base.UserError(f"--model: {sizes} {capacity / base.GIB:,.0f} GiB; {advice}")


@torch.no_grad()
def materialize(
    model: Any,
    modules: list[nn.Module],
    device: torch.device,
    weights: PretrainedWeights | None,
    layer: int | None = None,
) -> None:
    """Give the meta tensors of `modules` storage on `device` and values: random, or from `weights`, of which `layer` is
    the decoder layer that they are in.

    Random parameters are drawn in fp32 and then rounded: in bf16 torch 2.11 draws other and coarser numbers on a CPU.
    As in transformers, parameters are tied after they were drawn. Loaded ones are still on the meta device while the
    others get their values, so no `_init_weights` can overwrite them.

    Raises:
        UserError: a tensor gets no value.
    """
    real: dict[Any, torch.Tensor] = {}  # keyed by meta tensor, which may have two names, or by (module, name)
    wanted = [(module, name, tensor) for module in modules for name, tensor in own_tensors(module)]
    tied = {} if weights else tied_parameters(model, modules)
    for module, name, tensor in wanted:
        is_loaded = weights is not None and isinstance(tensor, nn.Parameter)
        if tensor.is_meta and not is_loaded:
            key = (module, name) if (module, name) in tied else tensor
            if key not in real:
                real[key] = empty_on(device, tensor)
            setattr(module, name, real[key])
    owner = {}  # the innermost model around each module
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            owner.update(dict.fromkeys(part.modules(), part))
    for module in reversed(modules):  # children before parents, as in nn.Module.apply
        # private: the public `init_weights` is for a full model, and an inner model has rules of its own
        owner[module]._init_weights(module)
    for (module, name), source_name in tied.items():
        source = model.get_parameter(source_name)
        if not source._version:  # such as the bias of RoBERTa's head, which only the module of the other one fills
            source.copy_(getattr(module, name))
    if tied:
        model.tie_weights(recompute_mapping=False)
    if weights:
        weights.load(layer, modules, device)
    made = {id(tensor) for tensor in real.values()}
    for module in modules:
        for name, tensor in own_tensors(module):
            # private: autograd's count of in-place operations on a tensor
            if id(tensor) in made and tensor.numel() and not tensor._version:
                tensor_name = f"{type(module).__name__}.{name}"
                problem = "gets no value, from a checkpoint or when its layer is made by itself"
                raise base.UserError(f"--model: {tensor_name} {problem}")
    for module, name, planned in wanted:
        tensor = getattr(module, name)
        tensor.data = tensor.data.to(planned.dtype)
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(planned.requires_grad)


def tied_parameters(model: Any, modules: list[nn.Module]) -> dict[tuple[nn.Module, str], str]:
    """{(module, name): full name of the parameter that it becomes} of tied parameters in `modules`."""
    tied = {}
    for target, source in model.all_tied_weights_keys.items():
        path, _, name = target.rpartition(".")
        tied[model.get_submodule(path), name] = source
    return {place: source for place, source in tied.items() if place[0] in modules}


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters and buffers of a module without its children, each under all its names."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return [*parameters, *buffers]


def empty_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like one on the meta device, with storage; a parameter is in fp32."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device)
    drawn = torch.empty_like(tensor, device=device, dtype=torch.float32)
    return nn.Parameter(drawn, requires_grad=tensor.requires_grad)


def as_in_checkpoint(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Some tensors of a model with the names and layouts of its published checkpoints."""
    # private: `save_pretrained` takes full models
    return transformers.core_model_loading.revert_weight_conversion(model, tensors)
