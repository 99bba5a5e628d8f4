"""Recipes: those of CONTRIBUTING.md work as they stand, and those of launch/recipes fit and plan to what is shown."""

import json
import pathlib
import re
import shlex
import sys
import textwrap

import pytest
from conftest import ROOT, copy_program, metrics_of, parse, python, start

# ----------------------------------------------------------------------------------------------------------------------
# CONTRIBUTING.md

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# (\S+\.py)(?:, below the line that begins with: (.+))?\n", re.MULTILINE)


def carry_out(block: str, root: pathlib.Path) -> None:
    """Writes the files of a block, or inserts its lines into them."""
    before, *parts = FILE.split(block)
    assert not before and parts, block
    for name, anchor, code in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        file = root / name
        if anchor is None:
            assert not file.exists()
            file.write_text(code)
            continue
        lines = file.read_text().splitlines(keepends=True)
        (place,) = (number for number, line in enumerate(lines) if line.strip().startswith(anchor))
        file.write_text("".join([*lines[: place + 1], code, *lines[place + 1 :]]))


@pytest.fixture(scope="module")
def changed(tmp_path_factory) -> pathlib.Path:
    """The project with every recipe carried out, a run of two starts in it, and what --help shows."""
    root = copy_program(tmp_path_factory.mktemp("changed"))
    for block in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        carry_out(textwrap.dedent(block), root)
    stories = [f"Once there was a dog who had {number} bones and ate them all." for number in range(2000)]
    (root / "stories.nodata").write_text("\n\n".join(stories))
    for steps in (3, 6):
        run(root, f"{NEW} {SMALL} --num-steps {steps}", note="a trial")
    return root


NEW = "--dataset stories.nodata --optimizer momentum-sgd --lr-scheduler cubic --log-with sheet"
SMALL = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --log-interval 1 --lr 0.1 --eval-interval 0 \
--warmup-steps 1 --perf-warmup-steps 1 --sample-tokens 2 --resume auto --run-name r --cache-dir cache"


def run(root: pathlib.Path, flags: str, note: str = "") -> str:
    notes = ["--note", note] if note else []
    process = start([sys.executable, "train_fsdp.py", *flags.split(), *notes], cwd=root)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def lines_of(root: pathlib.Path) -> list[dict]:
    return [line for line in metrics_of(root / "outputs" / "r") if not line.get("final")]


@pytest.mark.slow
def test_the_recipe_of_a_reader_an_optimizer_and_a_schedule(changed):
    """The run that has them trained, and went on in its second start."""
    record = json.loads((changed / "outputs" / "r" / "config.json").read_text())
    assert (record["flags"]["optimizer"], record["flags"]["lr_scheduler"]) == ("momentum-sgd", "cubic")
    assert [line["step"] for line in lines_of(changed)] == [*range(1, 7)]
    help_of_all = run(changed, "--help")
    for word in ("momentum-sgd", "cubic", ".nodata", "sheet", "--note"):
        assert word in help_of_all


@pytest.mark.slow
def test_the_recipe_of_an_optimizer_is_planned_too(changed):
    planned = json.loads(run(changed, f"{NEW} --model demo --plan --plan-gpus 2 --plan-seconds 0 --json"))
    assert planned["memory_gib"]["optimizer"] == pytest.approx(planned["memory_gib"]["parameters"], rel=0.02)


@pytest.mark.slow
def test_the_recipe_of_a_figure(changed):
    assert {line["tokens_per_step"] for line in lines_of(changed)} == {64}
    process = start([sys.executable, "-m", "tools.figure_table"], cwd=changed)
    assert "| `tokens_per_step` | `data/tokens_per_step` | tokens | tokens of a step, on all ranks |" in process.stdout


@pytest.mark.slow
def test_the_recipe_of_a_figure_that_survives_a_restart(changed):
    lines = lines_of(changed)
    losses = [line["loss"] for line in lines]
    assert [line["lowest_loss"] for line in lines] == [min(losses[:number]) for number in range(1, 7)]
    manifest = json.loads((changed / "outputs/r/checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["lowest_loss"] == min(losses[:3])


@pytest.mark.slow
def test_the_recipe_of_a_flag(changed):
    assert json.loads((changed / "outputs" / "r" / "config.json").read_text())["given"]["note"] == "a trial"
    assert "note       a trial" in run(changed, f"{NEW} {SMALL} --num-steps 7", note="a trial")


@pytest.mark.slow
def test_the_recipe_of_a_tracker(changed):
    rows = (changed / "outputs" / "r" / "sheet.csv").read_text().splitlines()
    assert rows[:6] == [f"{line['step']},{line['loss']}" for line in lines_of(changed)][:6]


# ----------------------------------------------------------------------------------------------------------------------
# launch/recipes

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))
SHOWN = (ROOT / "docs" / "LAUNCH.md").read_text()


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
    gib, card, speed = re.search(r"([\d.]+) of ([\d.]+) GiB; ([\d,]+) tokens/s", line).groups()
    assert plan["verdict"] == "fits"
    assert plan["memory_gib"]["reserved"] == pytest.approx(float(gib), abs=0.2)
    assert plan["capacity_gib"] == pytest.approx(float(card), abs=0.05)
    assert plan["tokens_per_sec"] == pytest.approx(int(speed.replace(",", "")), rel=0.01)
