"""setup.sh installs a list of pins into a folder; the list of the oldest versions is the other one but for two pins."""

import re
import shutil

from conftest import ROOT, start

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
    assert [line.split()[-1] for line in installs] == ["requirements.txt", "requirements-floor.txt"]
    assert (tmp_path / ".venv-floor" / "installed.txt").read_text() == (ROOT / "requirements-floor.txt").read_text()
