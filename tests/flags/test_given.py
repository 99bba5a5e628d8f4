"""What was given is kept apart from what it was resolved to: the precision, the steps, the batch of a run that goes
on."""

import dataclasses
import itertools
import json
import re
import shlex
import sys

import multirank
import pytest
import torch
from checkpoints import write_checkpoint
from conftest import PROGRAM, ROOT, forked, metrics_of, parse, python, slow_case, train, unlock, words, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from harness import flags, state
from harness.base import UserError

SMALL = "--dataset synthetic --sequence-length 16 --num-workers 0 --no-compile --log-interval 1"


@pytest.fixture
def small(tmp_path) -> str:
    """The flags of a run of a small model, in tmp_path."""
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    return f"{SMALL} --model {model} --final-checkpoint --output-dir {tmp_path}"


@pytest.fixture
def printed(device, monkeypatch, capfd):
    """`printed(command)`: the output of a run in this process, which ends well."""
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
    """The flags of the command with which a run says that it goes on, as a shell passes them on."""
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

    assert (
        parse(["--resume", first]).num_steps == 2
    )  # of the checkpoint, as the last step of synthetic data is not saved
    args = parse(words(f"--resume {first} --num-tokens 4096 --lr-scheduler cosine"))
    assert (args.num_tokens, args.lr_scheduler, args.weight_decay) == (4096, "cosine", 0)
    assert "num_steps" not in args.explicit
    assert parse(words("--resume auto --run-name first")).dataset != "synthetic"


def test_a_resume_leaves_out_flags_of_the_run_that_those_given_make_void(tmp_path):
    given = {"precision": "fp8", "fp8_recipe": "rowwise", "lr_scheduler": "warmup_stable_decay", "decay_steps": 3}
    write_checkpoint(tmp_path / "r", 1, given=given)
    args = parse(["--resume", tmp_path / "r"])
    assert (args.fp8_recipe, args.decay_steps, args.inherited) == ("rowwise", 3, tuple(given))
    args = parse(["--resume", tmp_path / "r", *words("--precision bf16 --lr-scheduler cosine")])
    assert args.inherited == ()
    write_checkpoint(tmp_path / "r", 2, given={"demo": True, "eval_split": "other.jsonl"})  # --demo evaluates
    assert parse(["--resume", tmp_path / "r", "--num-steps", 9]).explicit["eval_split"] == "other.jsonl"
    write_checkpoint(tmp_path / "r", 3, given={"dataset": "synthetic", "keep_checkpoints": 9})  # without a final save
    assert parse(["--resume", tmp_path / "r"]).keep_checkpoints == 9  # a stop saves, and must not remove the others
    write_checkpoint(tmp_path / "r", 4, given={"optimizer": "adamw-bf16"})
    with pytest.raises(UserError, match=r"--betas: .* \(with the flags of .*r\)"):
        parse(["--resume", tmp_path / "r", "--betas", "0.9", "0.9999"])


def test_flags_of_a_checkpoint_in_float8_do_not_bind_an_evaluation_in_another_precision(tmp_path):
    given = {"dataset": "synthetic", "precision": "fp8", "fp8_recipe": "rowwise", "fp8_emulate": True}
    record = flags.record_flags(parse(flags.as_words(given)))
    write_checkpoint(tmp_path / "r", 1, **record)
    (tmp_path / "r" / "config.json").write_text(json.dumps(record))
    run = ["--num-steps", 0, "--resume", tmp_path / "r", "--export", "e"]
    for file in ([], ["--config", tmp_path / "r" / "config.json"]):
        same, other = parse([*run, *file]), parse([*run, *file, "--precision", "bf16"])
        assert (same.precision, same.fp8_recipe, same.fp8_emulate) == ("fp8", "rowwise", True)
        assert (other.precision, other.fp8_recipe, other.fp8_emulate) == ("bf16", None, False)


def test_flags_of_a_runs_sources_are_not_taken_for_others(tmp_path):
    given = {"dataset": ["a=x.jsonl:1", "b=y.jsonl:1"], "mixture_stage": ["0.5:a=1"], "text_field": "body"}
    of_sources = {"mixture_stage", "text_field", "dataset_split"}
    record = flags.record_flags(parse(flags.as_words(given | {"dataset_split": "train[:9]", "seed": 3})))
    write_checkpoint(tmp_path / "r", 1, **record)
    for dataset in ("x=x.jsonl", "z.txt", "a=x.jsonl:1 c=z.jsonl:1", "synthetic"):
        args = parse(words(f"--resume {tmp_path}/r --dataset {dataset}"))
        assert args.inherited == ("seed",)
    for dataset in ("b=y.jsonl:3 a=x.jsonl:1", "a=moved.jsonl:1 b=y.jsonl:1", "a=x.jsonl:1 b=y.jsonl:1 c=z.jsonl:1"):
        args = parse(words(f"--resume {tmp_path}/r --dataset {dataset}"))
        assert {*args.inherited} == {*of_sources, "seed"}


def test_a_plan_of_a_resume_plans_what_the_resume_trains(tmp_path):
    """Also in the precision that the run had by default, where it began."""
    given = {"model": "qwen3-8b", "sequence_length": 96, "optimizer": "muon", "batch_size": 4, "num_tokens": 10**6}
    recorded = flags.record_flags(parse(flags.as_words(given)))["flags"] | {"precision": "fp32"}
    write_checkpoint(tmp_path / "r", 1, given=given, flags=recorded)
    planned, trained = (parse(["--resume", tmp_path / "r", "--lr", 1, *more]) for more in (["--plan"], []))
    assert planned.explicit == trained.explicit | {"plan": True} and planned.inherited == trained.inherited
    assert (planned.model, planned.precision, planned.compile) == ("qwen3-8b", "fp32", None)
    assert parse(words(f"--plan --resume {tmp_path}/r --model demo --precision bf16")).model == "demo"


def test_going_on_keeps_what_was_given_and_what_it_was_resolved_to(run, printed, tmp_path):
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


@pytest.mark.slow
@pytest.mark.smoke
def test_a_plan_for_a_gpu_is_in_bf16_and_says_how_many_steps_so_many_tokens_are():
    plan = "--plan --plan-details --plan-gpus 4 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32"
    words_printed = python(*words(plan), *words("--no-compile --num-tokens 1e6 --batch-size 2")).stdout
    assert "--precision bf16 " in header(words_printed, "flags")
    assert "3,907 steps" in words_printed  # of 256 tokens


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

CHAINS = [(1, 2, 2), (1, 2, 1), (2, 1, 2), (1, 2, 4), (4, 2, 1), (1, 4, 4), (4, 1, 2), (2, 4, 2)]
STYLES = ("the same flags", "no batch flags", "a file", "what the start before printed")


@pytest.mark.parametrize("batch", [{}, {"batch_size": 4}, {"batch_size": 2, "gradient_accumulation_steps": 4}], ids=str)
def test_three_starts_on_any_ranks_keep_the_batch_that_was_given(batch, tmp_path, monkeypatch):
    """However the second and the third are given their flags; on the same ranks they have the same microbatches."""
    common = {"demo": True, "run_name": "r", "resume": "auto"}
    (tmp_path / "run.toml").write_text("\n".join(f"{name} = {value}" for name, value in batch.items()))

    def flags_of(style: str, before) -> dict:
        if style == "a file":
            return common | {"config": tmp_path / "run.toml"}
        if style == "what the start before printed":
            return common | flags.run_flags(before)
        return common if style == "no batch flags" else common | batch

    for worlds, second, third in itertools.product(CHAINS, STYLES, STYLES):
        manifest, settings, seen, global_batches = None, None, {}, set()
        for world, style in zip(worlds, (STYLES[0], second, third), strict=True):
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
            settings = parse(flags.as_words(flags_of(style, settings)))
            if manifest:
                settings = state.keep_global_batch(settings, manifest)
            manifest = json.loads(json.dumps(flags.record_flags(settings) | {"world_size": world}))
            microbatches = settings.batch_size, settings.gradient_accumulation_steps
            assert seen.setdefault(world, microbatches) == microbatches
            global_batches.add(world * microbatches[0] * microbatches[1])
        assert len(global_batches) == 1, (worlds, second, third)


@pytest.mark.parametrize("ranks, how", [((1, 2, 1), "a file"), slow_case((2, 1, 2), "printed")])
def test_three_starts_on_other_ranks_are_one_run(small, token_cache, printed, tmp_path, ranks, how):
    """With the losses of a run that was never stopped, also those of the windows that --eval-steps take."""
    (tmp_path / "run.toml").write_text('dataset = "demo"\nbatch-size = 2\ngradient-accumulation-steps = 2')
    more = f"--lr-scheduler constant --eval-interval 2 --eval-steps 3 --tokenizer {ROOT / 'assets' / 'demo'}"
    common = words(f"{small.replace('--dataset synthetic', '')} --cache-dir {token_cache} {more}")
    common += ["--config", str(tmp_path / "run.toml")]
    printed([*common, "--run-name", "whole", "--num-steps", "6", "--batch-size", 2 * ranks[0]])
    start = [*common, "--run-name", "r", "--resume", "auto"]
    for steps, world in zip(("2", "4", "6"), ranks, strict=True):
        command = [*start, "--num-steps", steps]
        output = printed(command) if world == 1 else forked(world, multirank.program, *command)
        assert "global batch" not in output
        if world == 1:
            unlock(tmp_path / "r")
        if how == "printed":
            start = shlex.split(header(output, "resume"))
            start = start[next(i for i, word in enumerate(start) if word.startswith("--")) :]
    assert metrics_of(tmp_path / "r")[-1]["tokens_seen"] == metrics_of(tmp_path / "whole")[-1]["tokens_seen"]
    for name in ("loss", "eval_loss"):
        whole, moved = ([m[name] for m in metrics_of(tmp_path / run) if name in m] for run in ("whole", "r"))
        assert moved == pytest.approx(whole, rel=1e-5)


def test_so_many_tokens_have_a_decay_and_a_resume_is_judged_by_the_warmup_that_it_keeps(run, small, device, tmp_path):
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
    """And that a folder has weights, which are not read, is said."""
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
    """With the origin that the header prints, before and after the settings are resolved."""
    path = write_checkpoint(tmp_path / "r", 1, given={"demo": True, "lr": 0.5}, flags={"lr": 0.5})
    args = parse(words(typed.format(r=tmp_path / "r")))
    manifest = json.loads((path / "manifest.json").read_text()) if "--resume" in typed else None
    assert flags.choose_lr(args, manifest) == LEARNING_RATES[typed]
    resolved = dataclasses.replace(args, lr=LEARNING_RATES[typed][0])
    assert flags.choose_lr(resolved, manifest) == LEARNING_RATES[typed]


def test_a_resumed_demo_trains_with_its_checkpoints_learning_rate(printed, tmp_path):
    small = f"--num-workers 0 --sequence-length 32 --batch-size 2 --eval-interval 0 --output-dir {tmp_path}"
    printed(words(f"--demo {small} --sample-tokens 2 --lr 0.5 --num-steps 1 --run-name kb"))
    for steps, resume in enumerate((f"--resume {tmp_path / 'kb'}", "--demo --run-name kb --resume auto"), 2):
        output = printed(words(f"{small} --num-steps {steps} --log-interval 1 --lr-scheduler constant {resume}"))
        assert header(output, "lr") == "0.5 at its peak, constant; as in the checkpoint"
        assert metrics_of(tmp_path / "kb")[-1]["learning_rate"] == 0.5
