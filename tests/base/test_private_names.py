"""A private name of a library stands where it is used, with a comment `# private: why` on its line or the one before at
one of its places in a file, and the installed version has it."""

import ast
import importlib
import pathlib
import re
import subprocess
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT

IS_FOR_GPUS = torch.backends.cuda.is_built()
LIBRARIES = ("torch", "transformers", "torchao", "datasets", "accelerate", "argparse")
DOCUMENTED = {"os._exit", "_replace"}  # Python's own documentation names them
# Functions that take the name of an attribute, or a path with it, as a string.
TAKES_NAMES = {"getattr", "hasattr", "setattr", "delattr", "mock.patch", "mock.patch.object", "importlib.import_module"}


def program() -> dict[pathlib.Path, str]:
    paths = [ROOT / "train_fsdp.py", ROOT / "utils.py", *sorted((ROOT / "harness").rglob("*.py"))]
    return {path: path.read_text() for path in paths}


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
    """(line, name) of what a file imports, of its attributes with what stands before them, where that is names alone,
    and of attributes that are named in a string."""
    used = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            used.append((node.end_lineno, dotted if re.fullmatch(r"[\w.]+", dotted) else node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in TAKES_NAMES:
            texts = [part for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            used += [(part.lineno, part.value) for part in texts]
    return used


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__")


def foreign_names(sources: dict[pathlib.Path, str]) -> list[tuple[pathlib.Path, int, str]]:
    """(file, line, name) of the private names that none of the files defines; the longest of those on a line that are
    one name with others behind it."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    ours = set().union(*map(defined_names, trees.values()))
    foreign = []
    for path, tree in trees.items():
        for line, name in used_names(tree):
            private = [part for part in name.split(".") if is_private(part) and part not in ours]
            if private and not {name, name.rpartition(".")[2]} & DOCUMENTED:
                foreign.append((path, line, name))
    return foreign


def private_parts(name: str) -> set[str]:
    return {part for part in name.split(".") if is_private(part)}


def unmarked(sources: dict[pathlib.Path, str]) -> list[str]:
    """The places of private names for which no line of their file says why."""
    places = foreign_names(sources)
    marked: dict[pathlib.Path, set[str]] = {path: set() for path in sources}
    for path, line, name in places:
        if is_marked(sources[path], line):
            marked[path] |= private_parts(name)
    return [f"{path}:{line} {name}" for path, line, name in places if not private_parts(name) <= marked[path]]


def is_marked(source: str, line: int) -> bool:
    """Whether a line, or the one before, says why no public name does."""
    return re.search(r"# private: \S", "\n".join(source.splitlines()[max(0, line - 2) : line])) is not None


def aliases_of(tree: ast.Module) -> dict[str, str]:
    """What the names that a file imports stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {alias.name.partition(".")[0]: alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def has(dotted: str) -> bool | None:
    """Whether a module has a name; None where its owner is an object that exists while the program runs only, or a
    package that is not installed."""
    parts = dotted.split(".")
    if not find_spec(parts[0]):
        return None
    owner = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 1):
        if not IS_FOR_GPUS and re.match("_cuda_|.*_nccl_", part):  # a torch for the CPU lacks it
            return True
        try:
            owner = getattr(owner, part)
        except AttributeError:
            try:
                owner = importlib.import_module(".".join(parts[: number + 1]))
            except ImportError:
                return False if isinstance(owner, type | type(torch)) else None
    return True


def words_of_libraries(words: set[str]) -> set[str]:
    """Those of some words that stand in the sources of the libraries."""
    specs = [spec for spec in map(find_spec, LIBRARIES) if spec]
    places = [path for spec in specs for path in spec.submodule_search_locations or [spec.origin]]
    command = ["grep", "-rohwF", "--include=*.py", "--include=*.pyi", "-f", "-", *places]
    return set(subprocess.run(command, input="\n".join(words), capture_output=True, text=True).stdout.split())


def missing(sources: dict[pathlib.Path, str]) -> list[str]:
    """The private names that the installed libraries do not have."""
    gone, of_objects = [], {}
    for path, line, name in foreign_names(sources):
        root, _, rest = name.partition(".")
        module = aliases_of(ast.parse(sources[path])).get(root, root if root in LIBRARIES else "")
        found = has(f"{module}.{rest}") if module and rest else None
        if found is None:
            of_objects[f"{path}:{line} {name}"] = private_parts(name)
        elif not found:
            gone.append(f"{path}:{line} {name}")
    if not IS_FOR_GPUS:
        of_objects = {place: words for place, words in of_objects.items() if "_nccl_" not in place}
    there = words_of_libraries(set().union(*of_objects.values()))
    return gone + [place for place, words in of_objects.items() if not words <= there]


def test_every_private_name_says_why_no_public_one_does():
    assert unmarked(program()) == []


def test_every_private_name_is_in_the_installed_versions():
    assert missing(program()) == []


@pytest.mark.parametrize(
    "line, is_there",
    [
        ("torch._foreach_norm(x)", True),
        ("torch._foreach_gone(x)", False),
        ("import torch._dynamo", True),
        ("import torch._gone", False),
        ("from torch.utils import _pytree", True),
        ("from torch._subclasses.fake_tensor import FakeTensor", True),
        ("from torch._subclasses.fake_tensor import Gone", False),
        ("model.config._attn_implementation = 'eager'", True),
        ("getattr(weight, '_is_hf_initialized', False)", True),
        ("mock.patch('torch._functorch.partitioners.gone', f)", False),
        ("self._gone_for_ever(x)", False),
    ],
)
def test_a_private_name_is_found_and_tried(line, is_there):
    source = {pathlib.Path("a.py"): f"import torch\n{line}\n"}
    assert unmarked(source) and all(place.startswith("a.py:2 ") for place in unmarked(source))
    assert (missing(source) == []) == is_there


def test_names_of_the_project_and_public_ones_need_no_reason():
    ours = "class A:\n    def _load(self):\n        self._rows = torch.nn.functional.relu(x.__class__)"
    theirs = "a._load(), a._rows, getattr(a, 'rows'), [_ for _ in rows]"
    assert foreign_names({pathlib.Path("a.py"): ours, pathlib.Path("b.py"): theirs}) == []
    assert is_marked("# private: it has no other\nx._y()", 2) and is_marked("x._y()  # private: none", 1)
    assert not is_marked("# private:\nx._y()", 2)
