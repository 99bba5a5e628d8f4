"""Float8: torchao's linears, and the cast before their all-gather."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import base, flags
from harness.model import patches
from harness.model.optimization import mesh_of


def check_float8(settings: flags.Settings) -> None:
    """Raises a UserError where --precision fp8 cannot run or computes wrong: the GPU has no float8 (Ada, Hopper, CDNA 3
    and newer have it) and this is no emulation and no plan; torchao is missing or old; float8 does not take the number
    of tokens."""
    if settings.precision != "fp8":
        return
    cuda = torch.cuda.is_available()
    has_float8 = cuda and (torch.version.hip or torch.cuda.get_device_capability() >= (8, 9))
    if not (has_float8 or settings.fp8_emulate or settings.plan):
        device = torch.cuda.get_device_name() if cuda else "a CPU"
        raise base.UserError(
            f"--precision fp8: needs a GPU with float8 (Ada, Hopper or newer), this is {device}; use bf16"
        )
    if not find_spec("torchao"):
        raise base.UserError("--precision fp8: needs the package torchao (pip install torchao)")
    version = base.installed("torchao")
    if base.version_parts(version) < base.OLDEST_TORCHAO:
        problem = "its compiled casts may store NaN"
        oldest = ".".join(map(str, base.OLDEST_TORCHAO))
        raise base.UserError(
            f"--precision fp8: this is torchao {version}, {problem}; install torchao {oldest} or newer"
        )
    if settings.num_steps and (problem := flags.misfits_float8(settings)):
        raise base.UserError(problem)


def float8_filter(recipe: str, emulate: bool) -> Callable[[nn.Module, str], bool]:
    """Which modules of a decoder layer become float8 linears, by module and path in the layer.

    Those that gain, by torchao's own rule for a recipe, measured on H100s: smaller matmuls save less than their casts
    cost. torchao has none for rowwise_with_gw_hp, which casts as rowwise does and saves less: that of rowwise. Nothing
    gains where float8 is emulated; there every linear that the tensor cores take, with both sizes in multiples of 16.

    Never a router of experts, whose logits choose between close numbers; nor a subclass of nn.Linear, as the swap would
    lose its forward.
    """
    from torchao.float8 import _auto_filter_for_recipe  # private: torchao calls it experimental, and torchtitan uses it

    gains = _auto_filter_for_recipe("tensorwise" if recipe == "tensorwise" else "rowwise", filter_fqns=[])

    def takes(module: nn.Module, path: str) -> bool:
        if type(module) is not nn.Linear or {"router", "gate"} & set(path.split(".")):
            return False
        if emulate:
            return module.in_features % 16 == 0 and module.out_features % 16 == 0
        return gains(module, path)

    return takes


def fp8_converter(layers: Iterable[nn.Module], recipe: str, emulate: bool, compiled: bool) -> Callable:
    """A function that swaps the linears of one of these decoder layers for torchao's float8 ones, in place. A UserError
    where none of any layer is one that float8 takes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    takes = float8_filter(recipe, emulate)
    if not any(takes(module, path) for layer in layers for path, module in layer.named_modules()):
        problem = f"no linear of the decoder layers is large enough to gain from it ({recipe})"
        if emulate:
            problem = "no linear of the decoder layers has sizes in multiples of 16"
        raise base.UserError(f"--precision fp8: {problem}; use bf16")
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=recipe == "tensorwise")
    if recipe == "tensorwise":
        patches.cast_before_all_gather(compiled)
    return functools.partial(convert_to_float8_training, config=config, module_filter_fn=takes)


def describe_float8(layers: Iterable[nn.Module]) -> str:
    """How many linears of the decoder layers are float8, and which are not, by name and size."""
    from torchao.float8.float8_linear import Float8Linear

    linears = [
        (path, module) for layer in layers for path, module in layer.named_modules() if isinstance(module, nn.Linear)
    ]
    others = [(path, module) for path, module in linears if not isinstance(module, Float8Linear)]
    words = f"{len(linears) - len(others)} of {len(linears)} linears of the layers are float8"
    sizes = {f"{path.rpartition('.')[2]} {module.in_features} x {module.out_features}": None for path, module in others}
    return f"{words}, not {', '.join(sizes)}" if sizes else words


def float8_weights(model: nn.Module) -> list[Any]:
    """This rank's parts of the weights that are cast before their all-gather, each with its `_precomputed_scale`."""
    parameters: Any = model.parameters()  # DTensors, whatever torch's types say
    # private: public `to_local` makes another object, which takes no scale to the next all-gather
    shards = [parameter._local_tensor for parameter in parameters]
    return [shard for shard in shards if hasattr(shard, "_precomputed_scale")]  # private: torchao's own part


@torch.no_grad()
def compute_float8_scales(model: nn.Module) -> None:
    """Finds the scales of all weights that are cast before their next all-gather, after the optimizer moved them: the
    largest magnitudes by one kernel and one all-reduce, over local tensors. torchao's own function does it over
    DTensors, which costs the host time for each weight."""
    weights = float8_weights(model)
    if not weights:
        return
    mesh = mesh_of(model)
    group = mesh.get_group("shard")
    # private: torchao keeps the master weight there. A shard may be empty, and has no largest.
    held = [weight._tensor for weight in weights if weight.numel()]
    # private: one kernel for all
    norms = iter(torch._foreach_norm(held, ord=math.inf) if held else ())
    none = torch.zeros((), device=weights[0].device)
    largest = torch.stack([next(norms) if weight.numel() else none for weight in weights])
    if group.size() > 1:
        largest = largest.to(mesh.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # In fp64, as torchao has it, so that a compiled division gives the same.
    dtype = weights[0]._dtype  # private: torchao keeps the dtype of the cast there
    scales = torch.finfo(dtype).max / largest.clamp(min=1e-12).double()
    for weight, scale in zip(weights, scales.float(), strict=True):
        weight._precomputed_scale = scale
