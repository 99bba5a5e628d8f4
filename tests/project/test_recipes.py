"""The recipes are files of flags that the program takes, fit where they say, and plan to what the documents show."""

import json
import re
import shlex

import pytest
from conftest import ROOT, parse, python

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
SHOWN = (ROOT / "docs" / "RECIPES.md").read_text()


def command_of(recipe, name: str) -> list[str]:
    """The words of a command at the recipe's head, behind the program's name."""
    return shlex.split(re.search(rf"^#   {name} .*?train_fsdp\.py (.*)$", recipe.read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_taken_as_its_head_says_and_shown(recipe, monkeypatch, tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "texts").mkdir()  # the user's own, in the head of one of them
    monkeypatch.chdir(tmp_path)
    run = parse([*command_of(recipe, "launch"), "--output-dir", tmp_path])
    assert run.config == f"launch/recipes/{recipe.name}" and run.resume == "auto" and run.checkpoint_interval
    assert parse(command_of(recipe, "plan")).plan
    assert f"[{recipe.name}](../launch/recipes/{recipe.name})" in SHOWN


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_and_its_plan_is_the_one_that_is_shown(recipe):
    planned = python(*command_of(recipe, "plan"), "--plan-seconds", "0", "--json", "--plan-rates", "none")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    line = next(line for line in SHOWN.splitlines() if f"[{recipe.name}]" in line)
    gib, card, speed = re.search(r"fits: ([\d.]+) of ([\d.]+) GiB .*; ([\d,]+) tokens/s", line).groups()
    assert plan["verdict"] == "fits"
    assert plan["memory_gib"]["reserved"] == pytest.approx(float(gib), abs=0.2)
    assert plan["capacity_gib"] == float(card)
    assert plan["tokens_per_sec"] == pytest.approx(int(speed.replace(",", "")), rel=0.01)
