"""mypy finds nothing in the files that pyproject.toml names."""

import importlib.util
import sys

import pytest
from conftest import start


@pytest.mark.slow
def test_mypy_finds_nothing():
    if not importlib.util.find_spec("mypy"):
        pytest.skip("needs the package mypy")
    process = start([sys.executable, "-m", "mypy"])
    assert process.returncode == 0, process.stdout
