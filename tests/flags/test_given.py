"""Typed flags are kept apart from what they were resolved to: precision, steps and batch of a run that continues."""

import dataclasses
import json
import re
import shlex
import sys

import multirank
import pytest
import torch
from checkpoints import write_checkpoint
from conftest import PROGRAM, metrics_of, parse, train, words, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from harness import flags, state
from harness.base import UserError
from harness.model import load_config
from harness.resolving import resolve, resolve_steps

SMALL = "--dataset synthetic --sequence-length 16 --num-workers 0 --no-compile --log-interval 1"


@pytest.fixture
def small(tmp_path) -> str:
    """The flags of a run of a small model, in tmp_path."""
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    return f"{SMALL} --model {model} --final-checkpoint --output-dir {tmp_path}"


@pytest.fixture
def printed(device, monkeypatch, capfd):
    """`printed(command)`: the output of a run in this process, which succeeds."""
    monkeypatch.setattr(sys, "argv", [PROGRAM])

    def start(command: list) -> str:
        capfd.readouterr()
        assert train(command, device) == 0
        done = capfd.readouterr()
        assert re.sub("train_fsdp.py: warning: --precision bf16: this CPU has no .*\n", "", done.err) == ""
        return done.out

    return start


@pytest.fixture
def run(small, printed):
    """`run(name, flags)`: the output of a run in a folder of its own name."""
    return lambda name, flags: printed(words(f"{small} --run-name {name} {flags}"))


def paste(output: str) -> list[str]:
    """The flags of the command that resumes a run, from its output."""
    words_of_command = shlex.split(header(output, "resume"))
    return words_of_command[1 + next(i for i, word in enumerate(words_of_command) if word.endswith("train_fsdp.py")) :]


def record_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def header(output: str, name: str) -> str:
    return re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1]


def test_a_resume_by_its_path_takes_model_data_and_optimization_of_the_run_unless_given(run, printed, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run("first", "--num-steps 2 --weight-decay 0 --lr-scheduler linear --zero-stage 2")
    output = printed(words(f"--resume {first} --num-steps 3 --log-interval 1 --no-compile"))
    model = f"--dataset synthetic --sequence-length 16 --model {tmp_path / 'model'}"
    taken = words(f"{model} --weight-decay 0.0 --lr-scheduler linear")
    assert sorted(words(header(output, "its flags"))) == sorted(taken)
    given = record_of(first)["given"]
    assert (given["weight_decay"], given["lr_scheduler"], given["num_steps"]) == (0, "linear", 3)
    assert "zero_stage" not in given and "num_workers" not in given

    whole = words(f"{model} --lr-scheduler linear --weight-decay 0 --num-steps 3 --log-interval 1 --no-compile")
    run("second", "--num-steps 2 --weight-decay 0 --lr-scheduler linear --zero-stage 2")
    printed([*whole, "--resume", second])
    last = [[line["loss"] for line in metrics_of(folder) if line["step"] == 3] for folder in (first, second)]
    assert last[0] == last[1]

    assert parse(["--resume", first]).num_steps == 2  # of the checkpoint: step 3 was not saved
    args = parse(words(f"--resume {first} --num-tokens 4096 --lr-scheduler cosine"))
    assert (args.num_tokens, args.lr_scheduler, args.weight_decay) == (4096, "cosine", 0)
    assert "num_steps" not in args.explicit
    assert parse(words("--resume auto --run-name first")).dataset != "synthetic"


def test_a_resume_leaves_out_flags_of_the_run_that_typed_ones_make_void(tmp_path):
    given = {"precision": "fp8", "fp8_recipe": "rowwise", "lr_scheduler": "warmup_stable_decay", "decay_steps": 3}
    write_checkpoint(tmp_path / "r", 1, given=given)
    args = parse(["--resume", tmp_path / "r"])
    assert (args.fp8_recipe, args.decay_steps, args.inherited) == ("rowwise", 3, tuple(given))
    args = parse(["--resume", tmp_path / "r", *words("--precision bf16 --lr-scheduler cosine")])
    assert args.inherited == ()
    (tmp_path / "f.toml").write_text("warmup-steps = 5")
    assert parse(["--config", tmp_path / "f.toml", "--lr-scheduler", "constant"]).warmup_steps == 0
    write_checkpoint(tmp_path / "r", 2, given={"demo": True, "eval_split": "other.jsonl"})  # --demo evaluates
    assert parse(["--resume", tmp_path / "r", "--num-steps", 9]).explicit["eval_split"] == "other.jsonl"
    write_checkpoint(tmp_path / "r", 3, given={"dataset": "synthetic", "keep_checkpoints": 9})  # without a final save
    assert parse(["--resume", tmp_path / "r"]).keep_checkpoints == 9  # a stop saves, and must not remove the others
    write_checkpoint(tmp_path / "r", 4, given={"optimizer": "adamw-bf16"})
    with pytest.raises(UserError, match=r"--betas: .* \(with the flags of .*r\)"):
        parse(["--resume", tmp_path / "r", "--betas", "0.9", "0.9999"])


def test_flags_of_a_runs_sources_are_not_taken_for_others(tmp_path):
    given = {"dataset": ["a=x.jsonl:1", "b=y.jsonl:1"], "mixture_stage": ["0.5:a=1"], "text_field": "body"}
    record = flags.record_flags(parse(flags.as_words(given | {"dataset_split": "train[:9]", "seed": 3})))
    write_checkpoint(tmp_path / "r", 1, **record)
    for dataset in ("x=x.jsonl", "z.txt", "a=x.jsonl:1 c=z.jsonl:1", "synthetic"):
        args = parse(words(f"--resume {tmp_path}/r --dataset {dataset}"))
        assert args.inherited == ("seed",)
    for dataset in ("b=y.jsonl:3 a=x.jsonl:1", "a=moved.jsonl:1 b=y.jsonl:1", "a=x.jsonl:1 b=y.jsonl:1 c=z.jsonl:1"):
        args = parse(words(f"--resume {tmp_path}/r --dataset {dataset}"))
        assert {*args.inherited} == {"mixture_stage", "text_field", "dataset_split", "seed"}


def test_a_plan_of_a_resume_plans_what_the_resume_trains(tmp_path):
    """Also in the precision that the run had by default, where it began."""
    given = {"model": "qwen3-8b", "sequence_length": 96, "optimizer": "muon", "batch_size": 4, "num_tokens": 10**6}
    recorded = flags.record_flags(parse(flags.as_words(given)))["flags"] | {"precision": "fp32"}
    write_checkpoint(tmp_path / "r", 1, given=given, flags=recorded)
    planned, trained = (parse(["--resume", tmp_path / "r", "--lr", 1, *more]) for more in (["--plan"], []))
    assert planned.explicit == trained.explicit | {"plan": True} and planned.inherited == trained.inherited
    assert (planned.model, planned.precision, planned.compile) == ("qwen3-8b", "fp32", None)
    assert parse(words(f"--plan --resume {tmp_path}/r --model demo --precision bf16")).model == "demo"


def test_a_plan_resolves_its_flags_as_the_run_does(device):
    flags = "--model demo --precision fp32 --no-compile --sequence-length 64 --eval-interval 5 --plan-gpu B200"
    config = load_config("demo")
    for size in ("2", "auto"):
        run = resolve_steps(resolve(parse(words(f"{flags} --batch-size {size}")), config))
        plan = resolve(parse(words(f"{flags} --batch-size {size} --plan")), config)
        assert dataclasses.replace(plan, plan=False, explicit=run.explicit) == run


def test_a_resume_keeps_typed_flags_and_what_they_were_resolved_to(run, printed, tmp_path):
    output = run("first", "--num-steps 20 --batch-size 2")
    assert header(output, "precision") == "fp32 throughout; the default on a CPU"
    first = record_of(tmp_path / "first")
    typed = f"{SMALL.replace('no-compile', 'compile')} --model --final-checkpoint --output-dir --run-name --num-steps"
    typed += " --batch-size"
    assert {f"--{name.replace('_', '-')}" for name in first["given"]} == set(re.findall(r"--[\w-]+", typed))
    assert first["flags"]["precision"] == "fp32"
    manifest = json.loads(next((tmp_path / "first" / "checkpoints").glob("*/manifest.json")).read_text())
    assert manifest["given"] == first["given"]

    printed(paste(output))
    second = record_of(tmp_path / "first")
    assert second["flags"]["num_steps"] == 40
    assert second["flags"]["warmup_steps"] == first["flags"]["warmup_steps"]  # though 5 % of the steps are two
    del first["given"]["run_name"], first["given"]["output_dir"]  # --resume says which run it is
    assert second["given"].items() >= (first["given"] | {"num_steps": 40}).items()


def test_a_resumed_run_has_its_checkpoints_precision(run, tmp_path):
    assert header(run("bf16", "--num-steps 1 --precision bf16"), "precision").endswith("; by --precision")
    resumed = run("bf16", "--num-steps 2 --resume auto")
    assert re.fullmatch("bf16 compute .*; as in the checkpoint", header(resumed, "precision"))
    assert record_of(tmp_path / "bf16")["flags"]["precision"] == "bf16"


def test_tokens_become_steps_by_the_global_batch_and_a_resume_counts_those_that_were_trained_on(run, tmp_path):
    printed = run("r", "--num-tokens 0.25e3 --batch-size 2 --gradient-accumulation-steps 2")  # 64 a step
    assert [line["step"] for line in metrics_of(tmp_path / "r")][-2:] == [4, 4]
    record = record_of(tmp_path / "r")
    assert (record["given"]["num_tokens"], record["flags"]["num_steps"]) == (250, 4)
    assert "--num-tokens 500" in " ".join(paste(printed))
    run("r", "--num-tokens 500 --batch-size 4 --gradient-accumulation-steps 2 --resume auto")  # 256 + 2 x 128
    assert metrics_of(tmp_path / "r")[-1]["step"] == 6 and metrics_of(tmp_path / "r")[-1]["tokens_seen"] == 512


# ----------------------------------------------------------------------------------------------------------------------
# The global batch over other numbers of ranks


@pytest.mark.parametrize("again", [True, False], ids=["the same flags", "no batch flags"])
@pytest.mark.parametrize("batch", [{"batch_size": 4}, {"batch_size": 2, "gradient_accumulation_steps": 4}], ids=str)
def test_starts_on_other_ranks_keep_the_global_batch(batch, again, monkeypatch):
    flags_of_run, manifest, global_batches = {"demo": True, "run_name": "r", "resume": "auto"}, None, set()
    for world in (1, 2, 4, 1):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
        settings = parse(flags.as_words(flags_of_run | (batch if again or not manifest else {})))
        if manifest:
            settings = state.keep_global_batch(settings, manifest)
        manifest = json.loads(json.dumps(flags.record_flags(settings) | {"world_size": world}))
        global_batches.add(world * settings.batch_size * settings.gradient_accumulation_steps)
    assert len(global_batches) == 1


def test_tokens_have_a_decay_and_a_resume_is_judged_by_the_warmup_that_it_keeps(run, small, device, tmp_path):
    decay = "--lr-scheduler warmup_stable_decay --decay-steps 4"
    run("r", f"--num-tokens 320 --batch-size 2 {decay}")  # 10 steps of 32, none of warmup
    assert metrics_of(tmp_path / "r")[-1]["step"] == 10
    run("w", f"--num-tokens 320 --batch-size 2 {decay} --warmup-steps 6")
    too_long = f"{small} --run-name w --resume auto --num-steps 12 --batch-size 2 {decay.replace('4', '7')}"
    with pytest.raises(UserError, match="--decay-steps 7: the run has 6 steps after warmup"):
        train(words(too_long), device)


@pytest.mark.smoke
def test_other_batch_flags_are_another_batch_which_is_reported(run, tmp_path):
    run("r", "--num-steps 2 --batch-size 4")
    printed = run("r", "--num-steps 4 --batch-size 6 --resume auto")
    assert "global batch 4 -> 6, batch size 4 -> 6, num steps 2 -> 4" in header(printed, "changed")
    printed = run("r", "--num-steps 6 --resume auto")
    assert header(printed, "changed").startswith("num steps 4 -> 6")
    assert "--batch-size 6" in header(printed, "resume")


# ----------------------------------------------------------------------------------------------------------------------
# The learning rate of pretrained weights


def test_pretrained_weights_have_a_learning_rate_of_their_own_which_a_resume_keeps(tmp_path, device, capfd):
    """Also, weights that a folder has and that are not read are a warning."""
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    small = words("--dataset synthetic --sequence-length 16 --num-workers 0 --no-compile --final-checkpoint")
    small += ["--model", model, "--output-dir", str(tmp_path)]

    def words_printed(flags: str) -> tuple[str, str]:
        capfd.readouterr()
        assert train([*small, *words(flags)], device) == 0
        printed = capfd.readouterr()
        return header(printed.out, "lr"), printed.err

    unread = f"train_fsdp.py: warning: random weights: {model} has weights, --init pretrained reads them"
    line, warned = words_printed("--num-steps 2 --run-name random")
    assert line == "0.0003 at its peak, cosine; the default of --init random" and unread in warned
    line, warned = words_printed("--num-steps 2 --run-name p --init pretrained")
    assert line == "2e-05 at its peak, cosine; the default of --init pretrained" and unread not in warned
    line, warned = words_printed("--num-steps 4 --run-name p --resume auto --lr-scheduler constant")
    assert line == "2e-05 at its peak, constant; as in the checkpoint" and unread not in warned
    assert metrics_of(tmp_path / "p")[-1]["learning_rate"] == 2e-5
    line, _ = words_printed("--num-steps 6 --run-name p --resume auto --lr 1e-4")
    assert line == "0.0001 at its peak, cosine; by --lr"
    assert record_of(tmp_path / "p")["flags"]["lr"] == 1e-4


LEARNING_RATES = {
    "--demo --resume {r} --lr 1e-3": (1e-3, "by --lr"),
    "--demo --resume auto --lr 1e-3": (1e-3, "by --lr"),
    "--resume {r}": (0.5, "as in the checkpoint"),
    "--demo --resume {r}": (0.5, "as in the checkpoint"),
    "--demo --resume auto": (0.5, "as in the checkpoint"),
    "--demo --resume auto --init pretrained": (0.5, "as in the checkpoint"),
    "--demo": (0.004, "that of --demo"),
    "--demo --init pretrained": (2e-5, "the default of --init pretrained"),
    "--demo --init pretrained --lr 1e-3": (1e-3, "by --lr"),
    "--lora-rank 4 --init pretrained": (2e-4, "the default of --lora-rank"),
    "": (3e-4, "the default of --init random"),
}


@pytest.mark.parametrize("typed", LEARNING_RATES)
def test_a_learning_rate_is_the_typed_one_then_the_checkpoints_then_a_default(typed, tmp_path):
    """Also the origin that the header prints, before and after the settings are resolved."""
    path = write_checkpoint(tmp_path / "r", 1, given={"demo": True, "lr": 0.5}, flags={"lr": 0.5})
    args = parse(words(typed.format(r=tmp_path / "r")))
    manifest = json.loads((path / "manifest.json").read_text()) if "--resume" in typed else None
    assert flags.choose_lr(args, manifest) == LEARNING_RATES[typed]
    resolved = dataclasses.replace(args, lr=LEARNING_RATES[typed][0])
    assert flags.choose_lr(resolved, manifest) == LEARNING_RATES[typed]
