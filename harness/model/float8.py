"""Float8: the linears of decoder layers multiply in float8, by torchao (--precision fp8).

A linear of weight (outputs, inputs) has three products, each of two float8 matrices with bf16 as its result:
    output       (tokens, outputs)  = input @ weight.t()
    grad_input   (tokens, inputs)   = grad_output @ weight
    grad_weight  (outputs, inputs)  = grad_output.t() @ input
A matrix is scaled so that its largest magnitude becomes float8's (tensorwise), or each of its rows or columns is
(rowwise), then rounded: 4 exponent and 3 mantissa bits, 5 and 2 for grad_output with tensorwise. rowwise_with_gw_hp
leaves grad_weight in bf16. Tensor cores take a row-major matrix times a column-major one, with sizes in multiples of
16; torchao copies an operand that has the other layout.

Three things differ from torchao's defaults. With tensorwise a rank casts its shard and the all-gather moves 1 byte a
weight in place of 2; a weight needs its scale before that, so all of them are found after each optimizer step by one
all-reduce. The cast itself is compiled (`patches.cast_before_all_gather`), which torchao's eager one is not. Linears
that torchao measured to gain nothing stay in bf16. The price is a patch of torchao's weight class and the names marked
private below, which a new version of torchao may break.

The alternative is a linear of our own: an autograd.Function with three `torch._scaled_mm`, as nanochat has it, without
torchao. It was rejected because the float8 all-gather would need a tensor subclass too, and tests on CPUs an emulation.
"""

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
    """Check that --precision fp8 runs here and computes right.

    Raises:
        UserError: the GPU has no float8 (Ada, Hopper, CDNA 3 and newer have it) and this is no emulation and no plan;
            torchao is missing or old; the number of tokens is no multiple of 16.
    """
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
    """A function of (module, path in its decoder layer), True for linears that become float8.

    They are the ones that gain by torchao's rule for the recipe, measured on H100s: smaller matmuls save less than
    their casts cost. torchao has no rule for rowwise_with_gw_hp; that of rowwise is used, as the casts are the same.
    With emulation nothing gains, and every linear with both sizes in multiples of 16 is taken.

    A router of experts never is, as its logits choose between close numbers; nor a subclass of nn.Linear, whose forward
    would be lost.
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


def fp8_converter(settings: flags.Settings, layers: Iterable[nn.Module]) -> Callable[[nn.Module], object]:
    """A function that swaps the linears of one of these decoder layers for torchao's float8 ones, in place.

    Raises:
        UserError: no linear of any layer is taken.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, emulate = settings.fp8_recipe, settings.fp8_emulate
    takes = float8_filter(recipe, emulate)
    if not any(takes(module, path) for layer in layers for path, module in layer.named_modules()):
        problem = f"no linear of the decoder layers is large enough to gain from it ({recipe})"
        if emulate:
            problem = "no linear of the decoder layers has sizes in multiples of 16"
        raise base.UserError(f"--precision fp8: {problem}; use bf16")
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=recipe == "tensorwise")
    if recipe == "tensorwise":
        patches.cast_before_all_gather(settings.compile)
    return functools.partial(convert_to_float8_training, config=config, module_filter_fn=takes)


def describe_float8(layers: Iterable[nn.Module]) -> str:
    """The header's text: the number of float8 linears in the decoder layers, and the other linears by name and size."""
    from torchao.float8.float8_linear import Float8Linear

    linears = [
        (path, module) for layer in layers for path, module in layer.named_modules() if isinstance(module, nn.Linear)
    ]
    others = [(path, module) for path, module in linears if not isinstance(module, Float8Linear)]
    words = f"{len(linears) - len(others)} of {len(linears)} linears of the layers are float8"
    sizes = {f"{path.rpartition('.')[2]} {module.in_features} x {module.out_features}": None for path, module in others}
    return f"{words}, not {', '.join(sizes)}" if sizes else words


def float8_weights(model: nn.Module) -> list[Any]:
    """This rank's shards of the weights that are cast before their all-gather, each with its `_precomputed_scale`."""
    parameters: Any = model.parameters()  # DTensors; torch types them as parameters
    # private: public `to_local` makes another object, whose scale does not reach the next all-gather
    shards = [parameter._local_tensor for parameter in parameters]
    return [shard for shard in shards if hasattr(shard, "_precomputed_scale")]  # private: an attribute of torchao's


@torch.no_grad()
def compute_float8_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are cast before their next all-gather, after an optimizer step: the
    largest magnitudes by one kernel and one all-reduce, over local tensors. torchao's function takes DTensors, which
    cost the host time for each weight."""
    weights = float8_weights(model)
    if not weights:
        return
    mesh = mesh_of(model)
    group = mesh.get_group("shard")
    # private: torchao keeps the master weight there. An empty shard has no largest magnitude.
    masters = [weight._tensor for weight in weights if weight.numel()]
    # private: one kernel for all
    norms = iter(torch._foreach_norm(masters, ord=math.inf) if masters else ())
    zero = torch.zeros((), device=weights[0].device)
    largest = torch.stack([next(norms) if weight.numel() else zero for weight in weights])
    if group.size() > 1:
        largest = largest.to(mesh.device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # fp64 as in torchao: a compiled division then gives the same result
    dtype = weights[0]._dtype  # private: torchao keeps the dtype of the cast there
    scales = torch.finfo(dtype).max / largest.clamp(min=1e-12).double()
    for weight, scale in zip(weights, scales.float(), strict=True):
        weight._precomputed_scale = scale
