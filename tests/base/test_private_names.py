"""A private name of a library stands where it is used, with a comment `# private: why` on its line or the one before at
one of its places in a file, and the installed libraries have it."""

import ast
import pathlib
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from conftest import ROOT

LIBRARIES = ("torch", "transformers", "torchao", "datasets", "accelerate", "argparse")
DOCUMENTED = {"_exit", "_replace"}  # Python's own documentation names them
TAKES_NAMES = {"getattr", "hasattr", "setattr", "delattr", "patch", "object", "import_module"}  # of attributes, in text


def program() -> dict[pathlib.Path, str]:
    paths = [ROOT / "train_fsdp.py", ROOT / "utils.py", *sorted((ROOT / "harness").rglob("*.py"))]
    return {path: path.read_text() for path in paths}


def is_private(name: str) -> bool:
    return re.match(r"_\w*[^\W_]\w*(?<!__)$", name) is not None


def defined_names(source: str) -> set[str]:
    """The functions, classes and variables that a file defines, and the attributes that its objects set on `self`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def used_names(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of what a file imports, of attributes, and of those that are named in a text."""
    for node in ast.walk(ast.parse(source)):
        dotted = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            dotted = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            dotted = [node.attr]
        elif isinstance(node, ast.Name):
            dotted = [node.id]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TAKES_NAMES:
            dotted = [
                part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
        for name in dotted:
            yield from ((node.end_lineno, part) for part in (name or "").split("."))


def foreign_names(sources: dict[pathlib.Path, str]) -> dict[pathlib.Path, list[tuple[int, str]]]:
    """(line, name) of the private names in each file that none of the files defines."""
    known = set().union(DOCUMENTED, *map(defined_names, sources.values()))
    found = {}
    for path, source in sources.items():
        found[path] = [(line, name) for line, name in used_names(source) if is_private(name) and name not in known]
    return found


def unmarked(sources: dict[pathlib.Path, str]) -> list[str]:
    """The private names for which no line of their file says why, nor the line before."""
    problems = []
    for path, names in foreign_names(sources).items():
        lines = ["", *sources[path].splitlines()]
        marked = {name for line, name in names if re.search(r"# private: \S", f"{lines[line - 1]}\n{lines[line]}")}
        problems += [f"{path}:{line} {name}" for line, name in names if name not in marked]
    return problems


def missing(names: set[str]) -> set[str]:
    """Those of some names that stand nowhere in the sources of the libraries, nor in torch's compiled part."""
    places = []
    for spec in filter(None, map(find_spec, LIBRARIES)):
        places += spec.submodule_search_locations or [spec.origin]
    command = ["grep", "-rohwF", "--include=*.py", "--include=*.pyi", "-f", "-", *places]
    found = subprocess.run(command, input="\n".join(names), capture_output=True, text=True).stdout.split()
    return names - {*found, *dir(torch._C._distributed_c10d)}


def test_every_private_name_says_why_no_public_one_does():
    assert unmarked(program()) == []


def test_every_private_name_is_in_the_installed_versions():
    names = {name for found in foreign_names(program()).values() for _, name in found}
    gone = missing(names | {"_gone_for_ever"})
    if not torch.backends.cuda.is_built():  # a torch for the CPU lacks it
        gone = {name for name in gone if not re.match("_cuda_|.*_nccl_", name)}
    assert gone == {"_gone_for_ever"}


def test_a_private_name_is_found_where_it_is_used_and_where_it_is_written():
    theirs = "import torch._dynamo\nfrom torch._a import _b\nx.y._c()\ngetattr(x, '_d')\nmock.patch('torch._e.f')\n"
    found = {place.split()[1] for place in unmarked({pathlib.Path("a.py"): theirs})}
    assert found == {"_dynamo", "_a", "_b", "_c", "_d", "_e"}
    ours = "def _c(x):\n    self._d = x.__class__, [_ for _ in x]  # private: none\n"
    assert unmarked({pathlib.Path("a.py"): ours + "y._c()._d\n# private: it has no other\nx._y()\n"}) == []
