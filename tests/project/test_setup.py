"""setup.sh installs the pins; an interpreter that cannot run the program is named in one line."""

import shutil
import sys
import tomllib

import pytest
from conftest import PROGRAM, ROOT, start

from harness.base import versions

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
mkdir -p "$3/bin"
printf '#!/bin/sh\\ncat "$3/wanted.txt" >> installed; echo "$@" >> installed-with\\n' > "$3/bin/python"
sed -i "s|\\$3|$3|" "$3/bin/python"
chmod +x "$3/bin/python"
"""


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_floor_is_the_oldest_versions_that_the_program_accepts():
    oldest = {name: ".".join(map(str, least)) + ".0" for name, least in versions.OLDEST.items()}
    assert pins("requirements-floor.txt") == oldest
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(dependency.split(">=") for dependency in declared)
    assert {name: f"{least[name]}.0" for name in oldest} == oldest
    assert least.keys() <= pins("requirements.txt").keys()


@pytest.fixture
def folder(tmp_path):
    """A folder with setup.sh, its pins, and an interpreter that records what it is asked to install."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("setup.sh", "requirements.txt", "requirements-dev.txt", "requirements-floor.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def setup(folder, *flags: str, **names: str):
    done = start(["./setup.sh", *flags], cwd=folder, PYTHON="./python", **names)
    assert done.returncode == 0, done.stderr
    installed = folder / "installed"
    lines = installed.read_text().splitlines() if installed.exists() else []
    installed.unlink(missing_ok=True)
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_setup_installs_the_pins_once_and_those_of_tests_on_request(folder):
    assert setup(folder) == pins("requirements.txt")
    assert setup(folder) == {}
    assert setup(folder, "--dev") == pins("requirements.txt") | pins("requirements-dev.txt")
    assert setup(folder) == setup(folder, "--dev") == {}
    floor = setup(folder, "--floor", "--dev", VENV=".venv-floor")
    assert floor == pins("requirements.txt") | pins("requirements-dev.txt") | pins("requirements-floor.txt")
    wrong = start(["./setup.sh", "--dve"], cwd=folder, PYTHON="./python")
    assert wrong.returncode == 2 and wrong.stderr.startswith("setup.sh: error: --dve: no such flag")


# ----------------------------------------------------------------------------------------------------------------------
# The interpreter

STARTED_BY = """
import runpy, sys
{change}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


OLD_TORCH = "import importlib.metadata as m; v = m.version; m.version = lambda n: '2.4.1' if n == 'torch' else v(n)"
INTERPRETERS = [
    ("sys.version_info, sys.version = (3, 9, 2), '3.9.2 (main)'", "Python 3.9.2; 3.11 or newer is needed"),
    (OLD_TORCH, "which has torch 2.4.1; 2.11 or newer is needed"),
]


@pytest.mark.parametrize("change, problem", INTERPRETERS)
def test_an_interpreter_that_cannot_run_it_is_named_in_one_line(change, problem):
    code = STARTED_BY.format(change=change)
    process = start([sys.executable, "-c", code, PROGRAM, "--demo", "--num-steps", "1"])
    (line,) = process.stderr.splitlines()
    assert process.returncode == 2
    assert line.startswith(f"train_fsdp.py: error: this is {sys.executable}, {problem}; ")
    assert "./setup.sh" in line or ".venv/bin/python" in line


def test_a_python_without_any_package_names_them_and_still_prints_the_help():
    bare = [sys.executable, "-I", "-S", "-c", STARTED_BY.format(change=f"sys.path.insert(0, {str(ROOT)!r})"), PROGRAM]
    process = start([*bare, "--demo"])
    lacks = ", ".join(versions.REQUIRED)
    assert process.stderr.startswith(f"train_fsdp.py: error: this is {sys.executable}, which lacks {lacks}; ")
    assert start([*bare, "--help"]).returncode == 0
