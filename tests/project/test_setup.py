"""setup.sh installs a list of pins into a folder; the list of the oldest versions is the other one but for two pins."""

import ast
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
from conftest import PROGRAM, ROOT, start

from harness.base import versions

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
mkdir -p "$3/bin"
printf '#!/bin/sh\\necho "$@" >> installed-with\\n' > "$3/bin/python"
chmod +x "$3/bin/python"
"""


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_oldest_versions_are_the_others_but_for_torch_and_transformers():
    newest, oldest = pins("requirements.txt"), pins("requirements-floor.txt")
    assert list(newest) == list(oldest)
    assert {name for name in newest if newest[name] != oldest[name]} == {"torch", "transformers"}
    said = dict(re.findall(r"(torch|transformers) (\S+) or newer", (ROOT / "README.md").read_text()))
    assert {name: f"{version}.0" for name, version in said.items()} == {name: oldest[name] for name in said}
    assert len(said) == 2
    assert {name: ".".join(map(str, least)) + ".0" for name, least in versions.OLDEST.items()} == {
        name: oldest[name] for name in said
    }


def test_what_only_tests_use_is_pinned_and_changes_no_version_that_a_run_has():
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert "--constraint requirements.txt" in lines
    pinned = dict(line.split("==") for line in lines if line and not line.startswith(("#", "--")))
    assert {"matplotlib", "peft"} <= pinned.keys() and not pinned.keys() & pins("requirements.txt").keys()


STEPS_OF_CI = ["setup.sh", "-m pytest -n 2", "requirements-dev.txt", "-m pytest -n 2 -m slow", "tests/pair/test_gpu.py"]


@pytest.mark.parametrize(
    "failing, code, done",
    [
        ("nothing", 0, STEPS_OF_CI),
        ("requirements-dev.txt", 0, STEPS_OF_CI),
        ("-m pytest -n 2 -m slow", 7, STEPS_OF_CI[:4]),
        ("-m pytest -n 2", 7, STEPS_OF_CI[:2]),
        ("setup.sh", 7, STEPS_OF_CI[:1]),
    ],
)
def test_ci_runs_both_tiers_and_fails_with_either_but_not_for_want_of_a_network(tmp_path, failing, code, done):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("setup.sh", ".venv/bin/python"):
        stand_in = f'#!/bin/sh\necho "$0 $*" | tee -a steps | grep -q -e "{failing} *$" && exit 7 || exit 0\n'
        (tmp_path / name).write_text(stand_in)
        (tmp_path / name).chmod(0o755)
    process = start([tmp_path / ".ci" / "run"])
    steps = (tmp_path / "steps").read_text().splitlines()
    assert process.returncode == code
    assert len(steps) == len(done)
    assert all(step.rstrip().endswith(expected) for step, expected in zip(steps, done, strict=True))
    assert ("not installed" in process.stderr) == (failing == "requirements-dev.txt")


def test_setup_installs_the_list_that_is_named_into_the_folder_that_is_named_once(tmp_path):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("setup.sh", "requirements.txt", "requirements-floor.txt"):
        shutil.copy(ROOT / name, tmp_path)
    floor = {"VENV": ".venv-floor", "REQUIREMENTS": "requirements-floor.txt"}
    for names in ({}, floor, floor, {}):
        done = start(["./setup.sh"], cwd=tmp_path, PYTHON="./python", **names)
        assert done.returncode == 0, done.stderr
    installs = (tmp_path / "installed-with").read_text().splitlines()
    assert all("--quiet" in line for line in installs)
    assert [line.split()[-1] for line in installs] == ["requirements.txt", "requirements-floor.txt"]
    assert (tmp_path / ".venv-floor" / "installed.txt").read_text() == (ROOT / "requirements-floor.txt").read_text()


def test_setup_shows_pips_progress_on_a_terminal(tmp_path):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("setup.sh", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shown, terminal = pty.openpty()
    subprocess.run(["./setup.sh"], cwd=tmp_path, env=os.environ | {"PYTHON": "./python"}, stderr=terminal, check=True)
    os.close(terminal)
    assert "--quiet" not in (tmp_path / "installed-with").read_text()
    assert os.read(shown, 4096).split(b"\r\n")[0].startswith(b"setup.sh: installing requirements.txt into .venv")


# ----------------------------------------------------------------------------------------------------------------------
# The interpreter

STARTED_BY = """
import runpy, sys
{change}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "change, problem",
    [
        ("sys.version_info, sys.version = (3, 9, 2), '3.9.2 (main)'", "Python 3.9.2; 3.11 or newer is needed"),
        (
            "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: n not in 'numpy torch' and f(n)",
            "which lacks numpy, torch",
        ),
        (
            "import importlib.metadata as m; v = m.version; m.version = lambda n: '2.4.1' if n == 'torch' else v(n)",
            "which has torch 2.4.1; 2.11 or newer is needed",
        ),
    ],
)
def test_an_interpreter_that_cannot_run_it_is_named_in_one_line(change, problem):
    code = STARTED_BY.format(change=change)
    process = start([sys.executable, "-c", code, PROGRAM, "--demo", "--num-steps", "1"])
    (line,) = process.stderr.splitlines()
    assert process.returncode == 2
    assert line.startswith(f"train_fsdp.py: error: this is {sys.executable}, {problem}; ")
    assert "./setup.sh" in line or ".venv/bin/python" in line


def test_a_python_without_any_package_says_so_and_still_helps():
    bare = [sys.executable, "-I", "-S", "-c", STARTED_BY.format(change=f"sys.path.insert(0, {str(ROOT)!r})"), PROGRAM]
    process = start([*bare, "--demo"])
    lacks = ", ".join(versions.IMPORTED)
    assert process.stderr.startswith(f"train_fsdp.py: error: this is {sys.executable}, which lacks {lacks}; ")
    assert start([*bare, "--help"]).returncode == 0


def test_what_is_imported_before_the_line_can_be_said_is_read_by_old_pythons():
    for file in (
        "train_fsdp.py",
        "harness/__init__.py",
        "harness/base/__init__.py",
        "harness/base/console.py",
        "harness/base/versions.py",
    ):
        ast.parse((ROOT / file).read_text(), feature_version=(3, 8))
    before, refusal, after = (ROOT / "train_fsdp.py").read_text().partition("\nversions.refuse_old_python()")
    assert refusal and re.findall("^(?:from|import).*", before, re.M) == ["from harness.base import console, versions"]
    assert re.findall("^(?:from|import).*", after, re.M)[0] == "from harness import job"


def test_the_packages_that_are_looked_for_are_those_that_the_program_imports_at_its_start():
    files = [*ROOT.glob("*.py"), *(ROOT / "harness").rglob("*.py")]
    nodes = [node for file in files for node in ast.parse(file.read_text()).body]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"harness", "utils"}
    assert packages - {"huggingface_hub"} <= set(versions.IMPORTED)  # which transformers stands on
    assert set(versions.IMPORTED) <= {name.replace("-", "_") for name in pins("requirements.txt")}


def test_pip_is_told_in_one_line_that_this_installs_nowhere():
    process = start([sys.executable, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", ROOT])
    assert process.returncode == 1
    said = [line for line in (process.stdout + process.stderr).splitlines() if "./setup.sh" in line]
    assert len(said) == 1 and said[0].strip().startswith("train_fsdp is run from its folder: ")
