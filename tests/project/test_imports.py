"""The layout: imports go one way and through the public APIs of the packages, which mypy sees through; importing loads
and starts no more than it should."""

import ast
import graphlib
import importlib
import json
import pathlib
import sys

import pytest
from conftest import PROGRAM, ROOT, start

# Each may import those before it, data and model not each other.
ORDER = ("base", "flags", "job", "data", "model", "state", "resolving", "report", "register", "plan", "loop")
PACKAGES = [name for name in ORDER if name not in ("resolving", "register", "loop")]  # each of which is one file
NEIGHBOURS = {"data", "model"}
WITHOUT_TORCH = ("base", "flags", "job")
OPTIONAL = {"datasets", "wandb", "torchao", "prometheus_client", "tensorboard", "matplotlib", "peft"}
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
        own = place.parts[1].removesuffix(".py") if place.parts[0] == "harness" else ""
        own = own if own in ORDER else ""
        for name in sorted(imported(path)):
            top, *inner = name.split(".")
            if (own and top in ("train_fsdp", "utils", "benchmarks", "tools")) or top == "train_fsdp" == place.stem:
                found.append(f"{place} imports {name}")
            if top != "harness" or not inner or inner[0] not in {*ORDER} - {own}:
                continue
            package = inner[0]
            if own and (ORDER.index(package) > ORDER.index(own) or {package, own} == NEIGHBOURS):
                found.append(f"{place} imports {name}")
            is_file = len(inner) > 1 and (root / "harness" / package / f"{inner[1]}.py").exists()
            if is_file:
                found.append(f"{place} imports {name} past the door of {package}")
    return found


def test_imports_go_one_way_and_through_public_apis():
    assert problems(ROOT) == []


def test_no_files_import_each_other_in_a_circle_in_functions_and_for_types_either():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "harness").rglob("*.py")}
    public_names = {f"harness.{package}.__init__" for package in PACKAGES}
    known = {name.removesuffix(".__init__"): path for name, path in files.items() if name not in public_names}
    # `from a.b import c` is of the file a.b.c or, where there is none, of a.b
    graph = {
        name: {to if to in known else to.rpartition(".")[0] for to in imported(path)} & known.keys()
        for name, path in known.items()
    }
    [*graphlib.TopologicalSorter(graph).static_order()]


# ----------------------------------------------------------------------------------------------------------------------
# What a type checker sees

WRONG = """
import pathlib
from harness import base, data, flags, job, plan, report, state
from harness import model as models
base.find_gpu(4090)
flags.parse_args(3)
job.take_folder("outputs")
data.load("wrong", 3, nonsense=1)
models.decide_skip(norm="large")
state.find_checkpoint("auto", pathlib.Path(), None, 4)
report.check_gates({})
plan.print_plan(settings=1, recipe=2)
"""
RIGHT = """
import pathlib
from harness import base, flags, job, state
base.find_gpu("H100")
job.take_folder(flags.parse_args(["--demo"]))
state.find_checkpoint("auto", pathlib.Path())
"""


def checked(path: pathlib.Path, source: str) -> list[str]:
    """The lines of mypy about a file, as the project has it check its own."""
    path.write_text(source)
    lines = start([sys.executable, "-m", "mypy", "--no-error-summary", path]).stdout.splitlines()
    return [line for line in lines if line.startswith(str(path))]


@pytest.mark.slow
def test_a_wrong_call_through_a_public_api_is_an_error_of_mypy(tmp_path):
    errors = checked(tmp_path / "wrong.py", WRONG)
    calls = [number for number, line in enumerate(WRONG.splitlines(), 1) if "(" in line]
    assert {int(line.split(":")[1]) for line in errors if ": error: " in line} == {*calls}
    assert checked(tmp_path / "right.py", RIGHT) == []


@pytest.mark.slow
def test_no_public_api_hands_on_a_name_whose_type_is_not_known(tmp_path):
    names = [
        f"harness.{package}.{name}"
        for package in PACKAGES
        for name in importlib.import_module(f"harness.{package}").__all__
    ]
    source = "".join(f"import harness.{package}\n" for package in PACKAGES) + "".join(
        f"reveal_type({name})\n" for name in names
    )
    revealed = checked(tmp_path / "names.py", source)
    assert len(revealed) == len(names)
    assert [line for line in revealed if line.endswith('"Any"')] == []


# ----------------------------------------------------------------------------------------------------------------------
# What importing does

IMPORT_ALL = """
import gc, importlib, json, psutil, sys
gc.disable()  # as the program does
process, seen = psutil.Process(), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    dist = sys.modules.get("torch.distributed")
    seen[name] = {"loaded": sorted(sys.modules), "threads": process.num_threads()}
    seen[name] |= {"children": len(process.children()), "joined": bool(dist) and dist.is_initialized()}
print(json.dumps(seen))
"""


def test_importing_starts_nothing_and_loads_no_optional_package_and_the_lower_packages_nothing_heavy():
    files = sorted((ROOT / "harness").rglob("[!_]*.py"))
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    light = [f"harness.{package}" for package in WITHOUT_TORCH]
    names = [*light, "utils", "transformers.modeling_utils", "train_fsdp", *modules]
    process = start([sys.executable, "-c", IMPORT_ALL, *names], PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout)
    of_transformers = seen["transformers.modeling_utils"]
    assert not {"torch", "numpy", "transformers"} & {*seen[light[-1]]["loaded"]}
    assert not {"transformers", "accelerate", *OPTIONAL} & {*seen["utils"]["loaded"]}
    for name in ("train_fsdp", *modules):
        # transformers looks into torchao where it is installed
        assert not OPTIONAL & {*seen[name]["loaded"]} - {*of_transformers["loaded"]}, name
        assert seen[name]["threads"] <= of_transformers["threads"], name
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
