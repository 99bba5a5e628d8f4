"""Args are given, then resolved once."""

import ast
import dataclasses
import re

import pytest
from conftest import ROOT, parse, words

from harness.flags import Settings
from harness.model import load_config
from harness.resolving import resolve

RUNS = [
    "--model demo",
    "--demo --document-mask --eval-interval 10",
    "--model demo --precision fp8 --fp8-emulate --sequence-length 64 --num-tokens 1M",
    "--model demo --dataset synthetic --attention eager --no-fused-loss --compile",
    "--model demo --streaming --num-workers 0 --warmup-steps 3 --no-final-checkpoint",
    "--model demo --plan-gpu B200 --batch-size auto --no-own-plan",
    "--plan --model qwen3-8b --batch-size auto",
    "--plan --model llama3.1-8b --precision fp8 --batch-size auto --sequence-length 8196",
    "--model demo --num-steps 0 --init pretrained --export x",
]


def resolved(flags: str) -> Settings:
    """As a run on one rank has it; of auto batches the second smallest fits."""
    settings = parse(words(flags))
    return resolve(settings, load_config(settings.model), lambda known: 2 * known.batch_size_multiple())


@pytest.mark.parametrize("flags", RUNS)
def test_nothing_of_what_is_resolved_waits_to_be_decided(flags, device):
    settings = resolved(flags)
    decided = {name: getattr(settings, name) for name in Settings.__annotations__}
    assert [name for name, value in decided.items() if value is None] == []
    assert [name for name, value in vars(settings).items() if value == "auto" and name != "resume"] == []
    assert settings.batch_size % settings.batch_size_multiple() == 0


def test_a_plan_resolves_as_the_run_does(device):
    flags = "--model demo --precision fp32 --no-compile --sequence-length 64 --eval-interval 5 --batch-size"
    for size in ("2", "auto"):
        run, plan = resolved(f"{flags} {size} --plan-gpu B200"), resolved(f"--plan {flags} {size} --plan-gpu B200")
        assert dataclasses.replace(plan, plan=False, explicit=run.explicit) == run


def test_what_was_resolved_stays_as_it_is_and_nothing_else_returns_settings():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved("--model demo").batch_size = 2
    returning = set()
    for path in [ROOT / "train_fsdp.py", ROOT / "utils.py", *(ROOT / "harness").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            returns = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
            if re.search(r"\b(Args|Settings)\b", returns):
                returning.add(node.name)
    # of a command line, of flags that were given; and a plan with the batch that it found
    assert returning == {"begin", "parse_args", "complete", "resolve", "make_plan"}
