"""The layout: imports go one way and through the public APIs of the packages; importing starts nothing and needs no
optional package."""

import ast
import json
import pathlib
import sys

import pytest
from conftest import PROGRAM, ROOT, start

# Each may import those before it, data and model not each other.
ORDER = ("base", "flags", "job", "data", "model", "state", "resolving", "report", "register", "plan", "loop")
PACKAGES = [name for name in ORDER if name not in ("resolving", "register", "loop")]  # each of which is one file
NEIGHBOURS = {"data", "model"}
OPTIONAL = {"datasets", "wandb", "torchao", "prometheus_client", "tensorboard", "matplotlib", "peft"}
FILES = ["train_fsdp.py", "utils.py", *(f"{folder}/**/*.py" for folder in ("harness", "benchmarks", "tools", "launch"))]


def imported(path: pathlib.Path) -> set[str]:
    """Every dotted name that a file imports, also in functions; `from a import b` is a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_one_way_and_through_public_apis():
    found = []
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        place = path.relative_to(ROOT)
        own = place.parts[1].removesuffix(".py") if place.parts[0] == "harness" else ""
        own = own if own in ORDER else ""
        for name in sorted(imported(path)):
            top, *inner = name.split(".")
            if own and top in ("train_fsdp", "utils", "benchmarks", "tools"):
                found.append(f"{place} imports {name}")
            if top != "harness" or not inner or inner[0] not in {*ORDER} - {own}:
                continue
            package = inner[0]
            if own and (ORDER.index(package) > ORDER.index(own) or {package, own} == NEIGHBOURS):
                found.append(f"{place} imports {name}")
            if len(inner) > 1 and (ROOT / "harness" / package / f"{inner[1]}.py").exists():
                found.append(f"{place} imports {name} past the public API of {package}")
    assert found == []


# ----------------------------------------------------------------------------------------------------------------------
# What importing does

IMPORT = """
import gc, json, psutil, sys
gc.disable()  # as the program does
process, threads = psutil.Process(), psutil.Process().num_threads()
import harness.base, harness.flags, harness.job
light = [*sys.modules]
import utils
import torch.distributed as dist
started = process.num_threads() - threads, len(process.children()), dist.is_initialized()
print(json.dumps([light, [*sys.modules], started]))
"""


def test_importing_utils_starts_nothing_and_loads_no_optional_package_and_lower_packages_nothing_heavy():
    process = start([sys.executable, "-c", IMPORT], PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    light, loaded, started = json.loads(process.stdout)
    assert not {"torch", "numpy", "transformers"} & {*light}
    assert not {"transformers", "accelerate", *OPTIONAL} & {*loaded}
    assert started == [0, 0, False]


WITHOUT = """
import importlib, psutil, runpy, sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
for name in sys.argv[2].split(","):
    importlib.import_module(name)
assert not psutil.Process().children() and not sys.modules["torch.distributed"].is_initialized()
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_packages_and_a_run_on_synthetic_tokens_need_no_optional_package_and_importing_starts_nothing(tmp_path):
    packages = ",".join(f"harness.{package}" for package in PACKAGES)
    flags = "--model demo --dataset synthetic --sequence-length 32 --checkpoint-interval 3 --profile"
    flags += f" --perf-warmup-steps 0 --num-steps 6 --output-dir {tmp_path} --run-name r --cache-dir {tmp_path}"
    process = start([sys.executable, "-c", WITHOUT, ",".join(OPTIONAL), packages, PROGRAM, *flags.split()])
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "r" / "checkpoints" / "step-00000006").exists()
