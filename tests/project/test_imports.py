"""The layout: imports go one way, without a cycle, and importing loads and starts no more than it should."""

import ast
import graphlib
import json
import pathlib
import sys

import pytest
from conftest import PROGRAM, ROOT, start

# Each may import those after it. The two files on top, then the wings: data and model are neighbours, of which neither
# imports the other.
LAYERS = (
    *("tests/**/*.py", "benchmarks/**/*.py", "tools/*.py", "train_fsdp.py", "utils.py"),
    *(f"harness/{wing}/**/*.py" for wing in ("plan", "report", "state", "model", "data", "job", "flags", "base")),
    "harness/*.py",
)
NEIGHBOURS = {"harness.model", "harness.data"}
OPTIONAL = {"datasets", "wandb", "torchao", "prometheus_client", "tensorboard", "matplotlib", "plotly"}
OPTIONAL |= {"wandb_workspaces"}


def modules_of(root: pathlib.Path) -> dict[str, tuple[int, pathlib.Path]]:
    """The project's modules by the name under which they are imported, with their layer."""
    found = {}
    for layer, pattern in enumerate(LAYERS):
        for path in sorted(root.glob(pattern)):
            inside = path.relative_to(root).with_suffix("").parts
            name = ".".join(inside).removesuffix(".__init__") if inside[0] == "harness" else path.stem
            assert name not in found, f"{path} and {found[name][1]} have one name"
            found[name] = (layer, path)
    return found


def imported(path: pathlib.Path, package: str = "") -> set[str]:
    """Every dotted name that a file imports, functions included; of `from a import b` that is a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, [package if node.level else "", node.module]))
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {".".join(name[:depth]) for name in parts for depth in range(1, len(name) + 1)}


def wing_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def problems(root: pathlib.Path) -> list[str]:
    """Imports in the wrong direction or between neighbours, and the first cycle."""
    modules = modules_of(root)
    edges = {
        name: imported(path, name.rpartition(".")[0]) & modules.keys() - {name} for name, (_, path) in modules.items()
    }
    found = [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if modules[other][0] < modules[name][0] or {wing_of(name), wing_of(other)} == NEIGHBOURS
    ]
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        found.append(f"cycle of {', '.join(sorted(set(error.args[1])))}")
    return found


MODULES = modules_of(ROOT)
HARNESS = [name for name in MODULES if name.startswith("harness.")]


def test_imports_go_one_way_without_a_cycle():
    assert {"train_fsdp", "utils", "harness", "harness.flags.settings", "bench", "common", "conftest"} <= MODULES.keys()
    assert problems(ROOT) == []


@pytest.mark.parametrize(
    "file, source, said",
    [
        ("utils.py", "", []),
        ("utils.py", "def late():\n    from train_fsdp import run", ["utils imports train_fsdp"]),
        ("harness/plan/c.py", "from harness.base import d", []),
        ("harness/base/d.py", "from harness.plan import c", ["harness.base.d imports harness.plan.c"]),
        (
            "harness/model/e.py",
            "def late():\n    from harness.data import f",
            ["harness.model.e imports harness.data.f"],
        ),
        ("harness/data/f.py", "from harness.model import e", ["harness.data.f imports harness.model.e"]),
        ("harness/base/d.py", "import utils", ["harness.base.d imports utils"]),
        ("harness/b.py", "if False:\n    import train_fsdp as script", ["harness.b imports train_fsdp"]),
        ("harness/b.py", "from bench import main", ["harness.b imports bench"]),
        ("harness/b.py", "def late():\n    from harness.a import name", ["cycle of harness.a, harness.b"]),
        ("harness/b.py", "from harness import a", ["cycle of harness.a, harness.b"]),
        ("harness/b.py", "from . import a", ["cycle of harness.a, harness.b"]),
        ("harness/__init__.py", "from harness.a import name", ["cycle of harness, harness.a"]),
        ("benchmarks/plots.py", "def late():\n    import bench", ["cycle of bench, plots"]),
        ("benchmarks/peers/common.py", "from bench import main", ["cycle of bench, common, plots"]),
    ],
)
def test_a_wrong_direction_and_a_cycle_are_seen(tmp_path, file, source, said):
    sources = {"utils.py": "", "harness/__init__.py": "", "harness/a.py": "from harness import b", "harness/b.py": ""}
    sources |= {"train_fsdp.py": "import utils\nfrom harness.a import name", "benchmarks/bench.py": "import plots"}
    sources |= {"benchmarks/plots.py": "import common", "benchmarks/peers/common.py": "from train_fsdp import run"}
    sources |= {f"harness/{name}.py": "" for name in ("plan/c", "base/d", "model/e", "data/f")}
    for name, text in (sources | {file: source}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = problems(tmp_path)
    assert found[: len(said)] == said
    assert bool(found) == bool(said)


def test_what_is_made_for_torchs_own_tests_is_imported_in_one_place():
    users = {name for name, (_, path) in MODULES.items() if "torch.testing._internal" in imported(path)}
    assert users == {"harness.plan.fake_step"}


@pytest.mark.parametrize("name", ["train_fsdp", "utils", "harness", *HARNESS])
def test_a_module_begins_with_what_it_is_for(name):
    assert (ast.get_docstring(ast.parse(MODULES[name][1].read_text())) or "").endswith(".")


# ----------------------------------------------------------------------------------------------------------------------
# One fresh interpreter, which imports one module after the other

IMPORT_ALL = """
import importlib, json, psutil, sys
process, known, seen = psutil.Process(), set(sys.modules), {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    dist = sys.modules.get("torch.distributed")
    seen[name] = {"loads": sorted(set(sys.modules) - known), "threads": process.num_threads()}
    seen[name] |= {"children": len(process.children()), "joined": bool(dist) and dist.is_initialized()}
    known = set(sys.modules)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, dict]:
    """What each module loaded that was not there before, and what ran after it."""
    late = ["harness.flags.settings", "harness.plan.fake_step"]
    others = [name for name in HARNESS if name not in late]
    names = [late[0], "torch", "transformers", "utils", *others, "train_fsdp", late[1]]
    process = start([sys.executable, "-c", IMPORT_ALL, *names], PYTHONPATH=str(ROOT))
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_the_settings_load_nothing_heavy_so_that_help_is_there_at_once(fresh):
    assert not {"torch", "numpy", "transformers"} & set(fresh["harness.flags.settings"]["loads"])


def test_importing_a_module_loads_no_optional_package_and_starts_nothing(fresh):
    ours = {name: found for name, found in fresh.items() if name not in ("torch", "transformers")}
    assert {"utils", *HARNESS} <= ours.keys()
    for name, found in ours.items():
        assert not OPTIONAL & set(found["loads"]), name
        assert found["threads"] <= fresh["transformers"]["threads"], name
        assert (found["children"], found["joined"]) == (0, False), name


def test_fake_tensors_are_loaded_only_when_a_plan_is_made(fresh):
    loaders = {name for name, found in fresh.items() if "harness.plan.fake_step" in found["loads"]}
    assert loaders and loaders <= {"harness.plan.fake_step"}


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
    said = [line for line in process.stdout.splitlines() if "plotly" in line]
    assert said == ["report     not written: needs the package plotly (pip install plotly)"]
    process = start([sys.executable, "-c", WITHOUT, ",".join(OPTIONAL), PROGRAM, *flags.split(), "--log-with", "wandb"])
    assert process.stderr.startswith("train_fsdp.py: error: --log-with wandb: needs the package wandb"), process.stderr
