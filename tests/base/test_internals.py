"""The private names of libraries that are not yet beside their use are there in the installed versions."""

import importlib
import inspect
import operator
import re
from importlib.util import find_spec

import pytest
import torch

from harness.base import package_internals, torch_internals

INTERNALS = (torch_internals, package_internals)
OPTIONAL = ("datasets", "torchao")


def owner_of(path: str):
    """The module, or the class or other object after a colon, that a key of NAMES names."""
    module, _, of_module = path.partition(":")
    owner = importlib.import_module(module)
    return operator.attrgetter(of_module)(owner) if of_module else owner


def has(owner, name: str) -> bool:
    """Whether an owner has a name, or its source sets it on an object."""
    if hasattr(owner, name):
        return True
    try:
        return re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    except (TypeError, OSError):  # it is not written in Python
        return False


def missing(names: dict[str, tuple[str, ...]]) -> list[str]:
    """Those of NAMES that the installed libraries do not have."""
    gone = []
    for path, of_owner in names.items():
        package = re.split("[.:]", path)[0]
        if package in OPTIONAL and not find_spec(package):
            continue
        try:
            owner = owner_of(path)
        except (ImportError, AttributeError):
            gone.append(path)
            continue
        for name in of_owner:
            needs_cuda = name.startswith("_cuda_") and not torch.backends.cuda.is_built()
            if not needs_cuda and not has(owner, name):
                gone.append(f"{path}.{name}")
    return gone


@pytest.mark.parametrize("file", INTERNALS)
def test_every_private_name_is_in_the_installed_version(file):
    gone = missing(file.NAMES)
    assert not gone, f"{file.__name__} uses what this version no longer has: {', '.join(gone)}"


def test_names_that_are_gone_are_named():
    names = {"torch": ("_foreach_norm", "_gone"), "torch._gone": ("name",), "torch:Gone": ("name",)}
    assert missing(names) == ["torch._gone", "torch._gone", "torch:Gone"]


@pytest.mark.parametrize("file", INTERNALS)
def test_every_private_name_in_the_file_is_listed(file):
    used = set(re.findall(r"\.(_(?!_)\w+)", inspect.getsource(file)))
    listed = set()
    for path, names in file.NAMES.items():
        listed.update(re.split("[.:]", path), names)
    assert used <= listed
