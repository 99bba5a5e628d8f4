"""Private names of optional packages that this program needs: torchao's. Each stands with why no
public name does the same; tests/base/test_internals.py compares NAMES with the installed packages. No package is
imported before it is used. Independent of what they are used for."""

import torch

# Owner, a module or "module:class", and what is used of it.
NAMES = {
    "torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor": ("_dtype", "_precomputed_scale", "_tensor"),
    "torchao.optim.adam:_AdamBase": ("_new_buffer", "_subclass_zeros"),
}


def new_state_buffer(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, signed: bool) -> torch.Tensor:
    """A state of zeros for a parameter, as an optimizer of torchao makes it. In public it does so in its first step
    only, which is too late for a checkpoint to be read into it."""
    return optimizer._new_buffer(parameter, signed)


def wrapped_weight(tensor: torch.Tensor) -> torch.Tensor:
    """The master weight that a float8 weight of torchao wraps; any other tensor as it is. Casting one would be the
    public way, at a copy."""
    return getattr(tensor, "_tensor", tensor)


def float8_dtype(weight: torch.Tensor) -> torch.dtype:
    """What a float8 weight of torchao is cast to before its all-gather."""
    return weight._dtype


def float8_scale(weight: torch.Tensor) -> torch.Tensor | None:
    """The scale that torchao computed for a float8 weight after the last step; None before the first."""
    return weight._precomputed_scale


def set_float8_scale(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    weight._precomputed_scale = scale
