"""The layout: imports go one way and through the doors of the wings, and importing loads and starts no more than it
should."""

import ast
import json
import pathlib
import sys

import pytest
from conftest import PROGRAM, ROOT, start

# Each may import those before it, data and model not each other.
ORDER = ("base", "flags", "job", "data", "model", "state", "report", "plan")
NEIGHBOURS = {"data", "model"}
OPTIONAL = {"datasets", "wandb", "torchao", "prometheus_client", "tensorboard", "matplotlib"}
FILES = ["train_fsdp.py", "utils.py", *(f"{folder}/**/*.py" for folder in ("harness", "benchmarks", "tools", "launch"))]


def imported(path: pathlib.Path) -> set[str]:
    """Every dotted name that a file imports, functions included; of `from a import b` that is a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def problems(root: pathlib.Path) -> list[str]:
    """Imports in the wrong direction, between neighbours, or past a door."""
    found = []
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        place = path.relative_to(root)
        own = place.parts[1] if place.parts[0] == "harness" and len(place.parts) > 2 else ""
        for name in sorted(imported(path)):
            top, *inner = name.split(".")
            if (own and top in ("train_fsdp", "utils", "benchmarks", "tools")) or top == "train_fsdp" == place.stem:
                found.append(f"{place} imports {name}")
            opens_a_door = name == "harness.base.doors" and path.name == "__init__.py"
            if top != "harness" or not inner or inner[0] not in {*ORDER} - {own} or opens_a_door:
                continue
            wing = inner[0]
            if own and (ORDER.index(wing) > ORDER.index(own) or {wing, own} == NEIGHBOURS):
                found.append(f"{place} imports {name}")
            is_file = len(inner) > 1 and (root / "harness" / wing / f"{inner[1]}.py").exists()
            if is_file:
                found.append(f"{place} imports {name} past the door of {wing}")
    return found


def test_imports_go_one_way_and_through_the_doors():
    assert problems(ROOT) == []


# ----------------------------------------------------------------------------------------------------------------------
# What importing does

IMPORT_ALL = """
import importlib, json, psutil, sys
process, seen = psutil.Process(), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    dist = sys.modules.get("torch.distributed")
    seen[name] = {"loaded": sorted(sys.modules), "threads": process.num_threads()}
    seen[name] |= {"children": len(process.children()), "joined": bool(dist) and dist.is_initialized()}
print(json.dumps(seen))
"""


def test_importing_starts_nothing_and_loads_no_optional_package_and_a_door_nothing_heavy():
    files = sorted((ROOT / "harness").rglob("[!_]*.py"))
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    doors = [f"harness.{wing}" for wing in ORDER]
    names = ["harness.flags.parser", *doors, "transformers", "utils", "train_fsdp", *modules]
    process = start([sys.executable, "-c", IMPORT_ALL, *names], PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout)
    assert not {"torch", "numpy", "transformers"} & set(seen[doors[-1]]["loaded"])
    for name in ("utils", "train_fsdp", *modules):
        assert not OPTIONAL & set(seen[name]["loaded"]), name
        assert seen[name]["threads"] <= seen["transformers"]["threads"], name
        assert (seen[name]["children"], seen[name]["joined"]) == (0, False), name


WITHOUT = """
import runpy, sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_on_synthetic_tokens_imports_no_optional_package(tmp_path):
    flags = "--model demo --dataset synthetic --sequence-length 32 --checkpoint-interval 3 --profile"
    flags += f" --perf-warmup-steps 0 --num-steps 6 --output-dir {tmp_path} --run-name r --cache-dir {tmp_path}"
    process = start([sys.executable, "-c", WITHOUT, ",".join(OPTIONAL), PROGRAM, *flags.split()])
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "r" / "checkpoints" / "step-00000006").exists()
