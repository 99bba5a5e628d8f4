"""The program from a user's side: started from a shell, judged by its output and files."""

import json
import math
import re
import sys

import multirank
import pytest
import torch
from conftest import (
    DEMO,
    PROGRAM,
    ROOT,
    STORIES,
    cold_python,
    forked,
    losses_of,
    metrics_of,
    parse,
    slow_case,
    small_run,
    start,
    story_texts,
    torchrun_command,
    train,
    words,
    write_model,
)
from corpora import write_records
from multirank import SIZES, resolved
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train_fsdp
import utils
from harness.flags.settings import FLAGS

PROMPT = "Once upon a time"


# ----------------------------------------------------------------------------------------------------------------------
# One demo run with everything on


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(the finished process, the run's folder)"""
    folder = tmp_path_factory.mktemp("demo")
    flags = "--demo --num-steps 12 --sequence-length 64 --batch-size 4 --log-interval 4 --perf-warmup-steps 2"
    flags += " --eval-interval 6 --eval-steps 2 --sample-tokens 8 --log-with all --project-name tales --run-name first"
    places = ["--output-dir", folder / "out", "--cache-dir", folder / "cache", "--sample-prompt", PROMPT]
    env = {"WANDB_MODE": "offline", "HOME": str(folder / "home")}
    return cold_python(*flags.split(), *places, **env), folder / "out" / "first"


@pytest.mark.smoke
def test_the_demo_learns_and_ends_with_a_sample_and_no_warning_and_writes_into_its_folder_alone(demo):
    process, folder = demo
    assert (process.returncode, process.stderr) == (0, "")
    losses = losses_of(folder)
    assert losses[-1] < losses[0] - 0.5
    assert f"loss {losses[0]:.4f}" in process.stdout and f"loss {losses[-1]:.4f}" in process.stdout
    assert process.stdout.count(f"\n{PROMPT}") == 2  # after the evaluation at step 6, and at the end
    *_, samples, after = process.stdout.split("\n\n")
    assert samples.startswith(PROMPT)
    assert re.match("export +.*\nresume +.*\nreport +.*/first/report.html$", after)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert {path.name for path in folder.parent.parent.iterdir()} <= {"out", "cache", "home"}
    home = folder.parent.parent / "home"
    assert {path.name for path in home.glob("*")} <= {".cache", ".triton"}  # of wandb and torch themselves
    assert [*folder.rglob("run-*.wandb")] and [*folder.rglob("events.out.tfevents.*")]


SPEED = {"tokens_per_sec", "tokens_per_sec_per_gpu", "steps_per_sec", "step_time_ms"}
SPEED |= {"data_wait_percent", "actual_tflops_per_sec", "goodput_percent"}


def test_each_logged_step_is_a_line_with_speed_after_warmup_and_the_last_one_has_the_averages(demo):
    _, folder = demo
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 4, 6, 8, 12, 12]
    for line in lines:
        assert {"step", "loss", "grad_norm", "learning_rate", "tokens_seen"} <= set(line)
        assert line["tokens_seen"] == line["step"] * 4 * 64
        assert SPEED & set(line) == (SPEED if line["step"] > 2 else set())
        assert 0 < line.get("goodput_percent", 1) < 100
        assert not {"mfu_percent", "theoretical_tflops_total"} & set(line)  # a CPU has no peak
        assert not any(key.startswith("peak_memory") for key in line)
        assert ("eval_loss" in line) == (line["step"] in (6, 12))
        metrics = [value for key, value in line.items() if key != "samples"]
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in metrics)
        assert ("samples" in line) == (line["step"] == 6 or "final" in line)
    *logged, final = lines
    assert final["final"] is True and not any("final" in line for line in logged)
    assert final["loss"] == logged[-1]["loss"]
    # 10 steps after warmup: 2 in the interval that ends at step 4, 2, 2, and 4
    times = [line["step_time_ms"] for line in logged[1:]]
    assert final["step_time_ms"] == pytest.approx((2 * times[0] + 2 * times[1] + 2 * times[2] + 4 * times[3]) / 10)


def test_config_json_has_what_it_takes_to_repeat_the_run(demo):
    _, folder = demo
    config = json.loads((folder / "config.json").read_text())
    assert set(config["flags"]) >= {*FLAGS}
    assert (config["flags"]["num_steps"], config["flags"]["model"]) == (12, "demo")
    assert torch.__version__.startswith(config["versions"]["torch"])  # which may lack +cu130
    assert {"python", "transformers", "accelerate", "datasets"} <= set(config["versions"])
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", config["commit"])
    assert (config["world_size"], config["gpu"]) == (1, None)


# ----------------------------------------------------------------------------------------------------------------------
# Launchers


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Flags of a run that every launcher repeats, and its folder; the eval text has a prime number of sequences."""
    folder = tmp_path_factory.mktemp("launchers")
    write_records(folder / "data" / "train.jsonl", story_texts(0, 150))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokens = tokenizer.encode(" ".join(story_texts(150, 160)))[: 13 * 64 + 20]
    write_records(folder / "data" / "validation.jsonl", [tokenizer.decode(tokens)])
    flags = f"--num-steps 4 --sequence-length 64 --eval-interval 2 --sample-tokens 6 --dataset {folder}/data --lr 1e-3"
    return [*small_run(folder, flags), "--sample-prompt", PROMPT], folder


@pytest.fixture(scope="module")
def one_process(small, device):
    assert train([*small[0], "--batch-size", "8", "--run-name", "one"], device) == 0
    return small[1] / "one"


@pytest.mark.parametrize("ranks, launcher", [(2, "none"), slow_case(2, "torchrun"), slow_case(4, "accelerate")])
def test_ranks_of_any_launcher_do_what_one_process_does(small, one_process, ranks, launcher):
    flags = [*small[0], "--batch-size", str(8 // ranks), "--run-name", launcher]
    if launcher == "none":
        printed = forked(ranks, multirank.program, *flags)
    else:
        accelerate = [sys.executable, *words("-m accelerate.commands.launch --multi_gpu --main_process_port 0")]
        accelerate += ["--num_processes", ranks]
        process = start([*(torchrun_command(ranks) if launcher == "torchrun" else accelerate), PROGRAM, *flags])
        assert process.returncode == 0, process.stderr
        printed = process.stdout
    one, several = metrics_of(one_process), metrics_of(small[1] / launcher)
    assert len(several) == len(one)
    for key in ("step", "loss", "eval_loss", "learning_rate", "tokens_seen"):
        of_one, of_several = ([line[key] for line in lines if key in line] for lines in (one, several))
        assert of_one
        assert of_several == pytest.approx(of_one, rel=1e-6), key
    assert json.loads((small[1] / launcher / "config.json").read_text())["world_size"] == ranks
    (sample,) = one[-1]["samples"]
    assert several[-1]["samples"] == [sample] and " ".join(sample["text"].split()) in " ".join(printed.split())
    assert printed.count("verified") == 1  # one rank prints


# ----------------------------------------------------------------------------------------------------------------------
# What training computes, against a plain loop


@pytest.fixture
def in_process(device, tmp_path, token_cache):
    """`in_process(*flags)`: the log lines of a run in this process."""

    def go(*flags) -> list[dict]:
        argv = small_run(
            tmp_path, "--dataset demo --lr 3e-3 --sequence-length 32 --batch-size 4", tie_word_embeddings=True
        )
        argv += ["--cache-dir", token_cache, *flags]
        train(argv, device)
        return metrics_of(tmp_path / parse(argv).run_name)

    return go


def initial_model(device, folder, seed: str):
    """The model that the program builds, as a plain module of transformers."""
    sizes = words("--precision fp32 --sequence-length 32")
    args, config = resolved(["--model", folder / "model", *sizes, "--seed", seed])
    sharded = train_fsdp.build_model(args, config, train_fsdp.build_mesh(args, device), device)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict({name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()})
    return plain


@pytest.mark.smoke
def test_training_is_what_a_plain_loop_computes(device, in_process, token_cache, tmp_path):
    steps, peak, warmup = 8, 3e-3, 3
    flags = f"--run-name r --num-steps {steps} --lr {peak} --warmup-steps {warmup} --lr-scheduler linear --seed 3"
    lines = in_process(*flags.split(), "--max-grad-norm", "0.7", "--weight-decay", "0.5")
    model, other = (initial_model(device, tmp_path, seed) for seed in "34")
    assert not torch.isclose(model.lm_head.weight, other.lm_head.weight).any(dim=1).all()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    dataset = utils.get_dataset(tokenizer, 32, dataset=str(STORIES), cache_dir=token_cache, seed=3)
    losses, norms, rates = [], [], []
    for step in range(steps):
        rates.append(peak * min(step / warmup, (steps - step) / (steps - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rates[-1]
        sequences = torch.stack([torch.from_numpy(dataset[4 * step + n].astype("int64")) for n in range(4)])
        logits = model(input_ids=sequences[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    lines = lines[:-1]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates)
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 0.7  # each step was clipped


def test_evaluation_samples_saves_and_rarer_log_lines_do_not_disturb_training_with_dropout(in_process, tmp_path):
    sizes = {"vocab_size": 1536, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.3}
    flags = ["--num-steps", "6", "--model", write_model(tmp_path / "gpt2", "gpt2", **sizes)]
    quiet = {line["step"]: line for line in in_process(*flags, "--run-name", "quiet")}
    busy_flags = "--eval-interval 2 --eval-steps 1 --sample-tokens 4 --log-interval 5 --checkpoint-interval 1"
    busy = in_process(*flags, *words(busy_flags), "--sample-prompt", PROMPT, "--run-name", "busy")
    assert [line["step"] for line in busy] == [1, 2, 4, 5, 6, 6]
    for line in busy:
        undisturbed = quiet[line["step"]]
        assert (line["loss"], line["grad_norm"]) == (undisturbed["loss"], undisturbed["grad_norm"])


def test_random_tokens_are_trained_on_and_a_given_peak_gives_mfu_on_any_device(in_process, tmp_path):
    flags = "--num-steps 3 --run-name r --dataset synthetic --eval-interval 3 --perf-warmup-steps 1 --peak-tflops 0.5"
    first, *_, final = in_process(*words(flags))
    for loss in (first["loss"], final["eval_loss"]):
        assert loss == pytest.approx(math.log(SIZES["vocab_size"]), rel=0.02)
    assert final["theoretical_tflops_total"] == 0.5
    assert final["mfu_percent"] == pytest.approx(200 * final["actual_tflops_per_sec"])
    flops = utils.get_model_flops_per_token(AutoConfig.from_pretrained(tmp_path / "model"), 32)
    assert final["actual_tflops_per_sec"] * 1e12 == pytest.approx(final["tokens_per_sec"] * flops, rel=1e-9)
