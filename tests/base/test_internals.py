"""The private names of libraries that the program uses stand in three files, and are there in the installed
versions."""

import ast
import importlib
import inspect
import operator
import pathlib
import re
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT

from harness.base import package_internals, torch_internals, transformers_internals

INTERNALS = (torch_internals, transformers_internals, package_internals)
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


# ---- No private name stands elsewhere --------------------------------------------------------------------------------

# Names with an underscore that their owners document, and one that could not stand in the three files.
EXCEPTIONS = {
    "os._exit": "Python documents it: ends a process without its handlers",
    "_replace": "Python documents it: a method of every NamedTuple",
    "_option_string_actions": "argparse has no public list of a parser's flags; the parser imports nothing of torch",
}
# Functions that take the name of an attribute, or a path with it, as a string.
TAKES_NAMES = {"getattr", "hasattr", "setattr", "delattr", "mock.patch", "mock.patch.object", "importlib.import_module"}


def program() -> dict[str, ast.Module]:
    """The syntax trees of the program's files, but for those of private names."""
    paths = [ROOT / "train_fsdp.py", ROOT / "utils.py", *sorted((ROOT / "harness").rglob("*.py"))]
    private = {pathlib.Path(file.__file__) for file in INTERNALS}
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths if path not in private}


def defined_names(tree: ast.Module) -> set[str]:
    """The functions, classes and variables that a file defines, and the attributes that its objects set on `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def used_names(tree: ast.Module) -> list[tuple[int, str]]:
    """The (line, dotted name) of what a file imports, of its attributes, and of attributes that are named in a
    string."""
    used = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used += [(node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            owner = f"{node.value.id}." if isinstance(node.value, ast.Name) else ""
            used.append((node.lineno, owner + node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in TAKES_NAMES:
            words = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            used += [(node.lineno, word) for word in words]
    return used


def is_private(part: str) -> bool:
    return part.startswith("_") and part != "_" and not part.endswith("__")


def foreign_private_names(trees: dict[str, ast.Module]) -> dict[str, str]:
    """{file and line: name} of the private names that none of the files defines."""
    ours = set().union(*map(defined_names, trees.values()))
    foreign = {}
    for path, tree in trees.items():
        for line, name in used_names(tree):
            parts = name.split(".")
            if any(is_private(part) and part not in ours for part in parts):
                foreign[f"{path}:{line} {name}"] = name
    return foreign


def is_exception(name: str) -> bool:
    return name in EXCEPTIONS or name.rpartition(".")[2] in EXCEPTIONS


def is_marked(place: str) -> bool:
    """Whether the line or the one before it says why no public name does."""
    file, _, number = place.split()[0].rpartition(":")
    lines = (ROOT / file).read_text().splitlines()
    return any("# private: " in line for line in lines[int(number) - 2 : int(number)])


def test_private_names_stand_in_the_three_files_or_are_marked():
    names = foreign_private_names(program())
    assert [place for place, name in names.items() if not is_exception(name) and not is_marked(place)] == []


def test_every_exception_is_needed():
    names = set(foreign_private_names(program()).values())
    assert {name for name in EXCEPTIONS if not any(used.endswith(name) for used in names)} == set()


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_norm(x)",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "model.config._attn_implementation = 'eager'",
        "getattr(weight, '_is_hf_initialized', False)",
        "mock.patch('torch._functorch.partitioners.name', f)",
        "self._new_buffer(x)",
    ],
)
def test_a_private_name_is_found(line):
    assert foreign_private_names({"a.py": ast.parse(line)})


def test_names_of_the_project_and_public_ones_are_left():
    ours = "class A:\n    def _load(self):\n        self._rows = torch.nn.functional.relu(x.__class__)"
    theirs = "a._load(), a._rows, getattr(a, 'rows'), [_ for _ in rows]"
    assert foreign_private_names({"a.py": ast.parse(ours), "b.py": ast.parse(theirs)}) == {}
