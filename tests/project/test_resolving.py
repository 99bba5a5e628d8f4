"""Args are given, then resolved once."""

import dataclasses

import pytest
from conftest import parse, words

from harness.flags import Settings
from harness.model import load_config
from harness.resolving import resolve, resolve_steps

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
    args = parse(words(flags))
    settings = resolve(args, load_config(args.model))
    return settings if args.plan else resolve_steps(settings)


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
