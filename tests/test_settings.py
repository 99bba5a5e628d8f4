"""The command line: flags, their defaults, and what does not go together."""

import re

import pytest
from conftest import parse, python
from test_errors import only_line
from test_tracker import FLOPS, TOKENS, clock  # noqa: F401 - the fixture

import utils
from utils import UserError


def test_help_names_every_flag_with_its_default():
    process = python("--help")
    assert (process.returncode, process.stderr) == (0, "")
    described: dict[str, str] = {}
    for line in process.stdout.splitlines():
        if flag := re.match(r"  (-\S+)", line):
            described[flag[1].rstrip(",")] = ""
        if described:
            described[list(described)[-1]] += line.strip() + " "
    args = vars(parse([]))
    for name in args.keys() - {"argv", "given_accumulation"}:  # what was given, before a resume changes it
        assert "--" + name.replace("_", "-") in described, name
    without_default = {"-h", "--demo", "--sample-prompt", "--peak-tflops"}  # off unless given
    without_default |= {"--defer-grad-sync", "--cpu-offload", "--fp8-emulate", "--export"}
    without_default |= {"--plan", "--measure", "--plan-rates", "--gpu-hour-usd", "--json", "--html", "--sample-prompts"}
    for flag, text in described.items():
        assert flag in without_default or re.search(r"\[[^\]]+\]", text.replace("[:5%]", "")), flag
    for flag in ("--sequence-length", "--batch-size", "--num-steps", "--lr", "--seed", "--zero-stage"):
        default = args[flag[2:].replace("-", "_")]
        assert float(re.search(r"\[([^\]]+)\]", described[flag])[1]) == default


@pytest.mark.parametrize(
    "flags",
    [
        "--batch-size 0",
        "--batch-size -1",
        "--batch-size 1.5",
        "--batch-size many",
        "--sequence-length 0",
        "--gradient-accumulation-steps 0",
        "--num-steps 0",
        "--num-steps 0 --sample-prompt Once",
        "--num-steps 0 --demo",
        "--html there.html",
        "--batch-size auto --num-steps 0 --export there",
        "--measure --plan",
        "--measure --batch-size auto",
        "--num-workers -1",
        "--lr 0",
        "--lr -1",
        "--lr nan",
        "--lr inf",
        "--betas 0.9 1",
        "--betas 0.9",
        "--weight-decay -0.1",
        "--max-grad-norm -1",
        "--warmup-steps -1",
        "--seed -1",
        "--zero-stage 4",
        "--dp-replicate-size 0",
        "--precision fp16",
        "--optimizer sgd",
        "--attention fast",
        "--attention cudnn --precision fp32",
        "--attention flash --precision fp32",
        "--lr-scheduler none",
        "--log-with mlflow",
        "--log-interval 0",
        "--peak-tflops 0",
        "--run-name a/b",
        "--run-name ..",
        "--fp8-recipe rowwise",
        "--fp8-emulate",
        "--dp-replicate-size 2 --zero-stage 0",
        "--warmup-steps 5 --lr-scheduler constant",
        "--batch-siz 3",
        "--no-such-flag",
        "--output-dir",
        "positional",
    ],
)
def test_a_bad_flag_is_named(flags):
    with pytest.raises(utils.UserError) as raised:
        parse(flags.split())
    assert raised.value.exit_code == 2
    assert flags.split()[0] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_flags_beside_demo_win_wherever_they_stand():
    for argv in (["--demo", "--num-steps", "3", "--lr", "1"], ["--num-steps", "3", "--lr", "1", "--demo"]):
        args = parse(argv)
        assert (args.num_steps, args.lr, args.model, args.dataset) == (3, 1, "demo", "demo")


@pytest.mark.parametrize("flags", ["--lr-scheduler constant", "--num-steps 5", "--dataset synthetic", "--zero-stage 0"])
def test_what_demo_sets_is_no_mistake_of_the_user(flags):
    args = parse(["--demo", *flags.split()])
    assert args.warmup_steps < args.num_steps
    assert args.lr_scheduler != "constant" or args.warmup_steps == 0


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_project_name_that_is_no_plain_name_is_refused(mistake, monkeypatch, tracker):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "--project-name" in mistake("--log-with", tracker, "--project-name", "../tales")


def test_a_bad_flag_is_one_line_and_exit_2():
    assert "--batch-size" in only_line(python("--batch-size", "0"))


@pytest.mark.parametrize("flags", ["--no-compile", "--compile --activation-checkpointing full"])
def test_a_memory_budget_that_could_not_apply_is_refused(flags):
    with pytest.raises(UserError, match="--activation-memory-budget: needs --compile"):
        parse(["--activation-memory-budget", "0.5", *flags.split()])


@pytest.mark.parametrize("flags", ["--dataset synthetic", "--attention flash_attention_2", "--attention flash"])
def test_a_document_mask_that_could_not_work_is_refused(flags):
    with pytest.raises(UserError, match="--document-mask"):
        parse(["--document-mask", *flags.split()])


@pytest.mark.parametrize("flags, enough", [("--min-mfu 40 --peak-tflops 1", 11), ("--profile", 14)])
def test_no_step_left_to_measure_is_refused(flags, enough):
    with pytest.raises(UserError, match=f"give --num-steps at least {enough}"):
        parse([*flags.split(), "--num-steps", "10"])
    parse([*flags.split(), "--num-steps", str(enough)])
