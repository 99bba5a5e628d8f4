"""Recipes: those of CONTRIBUTING.md work verbatim, and those of launch/recipes are accepted and fit."""

import json
import math
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
FILE = re.compile(r"^# (\S+\.py)(?:, after: (.+))?\n", re.MULTILINE)


def carry_out(block: str, root: pathlib.Path) -> None:
    """Write the files of a block, or insert its lines into them."""
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


NEW = "--dataset stories.nodata --optimizer momentum-sgd --lr-scheduler cubic --log-with sheet --z-loss 0.1"
SMALL = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --log-interval 1 --lr 0.1 --eval-interval 0 \
--warmup-steps 1 --perf-warmup-steps 1 --sample-tokens 2 --resume auto --run-name r --cache-dir cache"


@pytest.mark.slow
def test_the_recipes_of_contributing_work_verbatim(tmp_path):
    """A run of two starts, --help and a plan have all that they add."""
    root = copy_program(tmp_path)
    for block in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text()):
        carry_out(textwrap.dedent(block), root)
    stories = [f"Once there was a dog who had {number} bones and ate them all." for number in range(2000)]
    (root / "stories.nodata").write_text("\n\n".join(stories))

    def run(*words: str) -> str:
        process = start([sys.executable, *words], cwd=root)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    for steps in ("3", "6"):
        printed = run("train_fsdp.py", *f"{NEW} {SMALL} --num-steps".split(), steps, "--note", "a trial")
    folder = root / "outputs" / "r"
    lines = [line for line in metrics_of(folder) if not line.get("final")]
    losses = [line["loss"] for line in lines]
    assert [line["step"] for line in lines] == [*range(1, 7)]  # an optimizer, a reader and a schedule, which resume
    record = json.loads((folder / "config.json").read_text())
    assert (record["flags"]["optimizer"], record["flags"]["lr_scheduler"]) == ("momentum-sgd", "cubic")
    assert {line["tokens_per_step"] for line in lines} == {64}  # a figure
    assert [line["lowest_loss"] for line in lines] == [min(losses[:number]) for number in range(1, 7)]  # one that stays
    manifest = json.loads((folder / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    assert manifest["lowest_loss"] == min(losses[:3])
    assert record["given"]["note"] == "a trial" and "note       a trial" in printed  # a flag
    rows = (folder / "sheet.csv").read_text().splitlines()
    assert rows == [f"{line['step']},{line['loss']}" for line in lines]  # a tracker
    near = 0.1 * math.log(1536) ** 2  # of weights that know nothing, of as many tokens
    assert all(near / 3 < line["z_loss"] < 3 * near for line in lines)  # a term of the loss

    answers = [{"question": f"How many bones has dog {number}?", "answer": f"{number} bones."} for number in range(500)]
    (root / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    asked = f"{SMALL} --dataset answers.jsonl --chat-template chatml --run-name answers --num-steps 1"
    assert "question and answer" in run("train_fsdp.py", *asked.split())  # a layout of conversations
    (root / "answers.jsonl").write_text(json.dumps({"question": 1, "answer": "one"}))
    refused = start([sys.executable, "train_fsdp.py", *asked.split()], cwd=root)
    assert refused.returncode == 2 and "answers.jsonl, line 1: question+answer[0] is " in refused.stderr

    help_of_all = run("train_fsdp.py", "--help")
    for word in ("momentum-sgd", "cubic", ".nodata", "sheet", "--note", "--z-loss"):
        assert word in help_of_all
    table = run("-c", "from tools import metric_table; print(metric_table.table())")
    assert "| `tokens_per_step` | `data/tokens_per_step` | tokens |" in table
    planned = f"{NEW} --model demo --plan --plan-gpus 2 --plan-seconds 0 --json"
    memory = json.loads(run("train_fsdp.py", *planned.split()))["memory_gib"]
    assert memory["optimizer"] == pytest.approx(memory["parameters"], rel=0.02)


# ----------------------------------------------------------------------------------------------------------------------
# launch/recipes

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.toml"))


def command_of(recipe, name: str) -> list[str]:
    """The words of a command at the recipe's head, behind the program's name."""
    return shlex.split(re.search(rf"^#   {name} .*?train_fsdp\.py (.*)$", recipe.read_text(), re.MULTILINE)[1])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_commands_in_a_recipes_head_are_accepted(recipe, monkeypatch, tmp_path):
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "texts").mkdir()  # the user's own, in the head of one of them
    monkeypatch.chdir(tmp_path)
    run = parse([*command_of(recipe, "launch"), "--output-dir", tmp_path])
    assert run.config == f"launch/recipes/{recipe.name}" and run.resume == "auto" and run.checkpoint_interval
    assert parse(command_of(recipe, "plan")).plan


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits(recipe):
    planned = python(*command_of(recipe, "plan"), "--plan-seconds", "0", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["verdict"] == "fits"
