"""What was given is kept apart from what it was resolved to: the precision, the steps, the batch of a run that goes
on."""

import json
import re
import shlex
import shutil

import multirank
import pytest
from conftest import cold_python, forked, metrics_of, python, words

SMALL = "--model demo --dataset synthetic --sequence-length 16 --num-workers 0 --no-compile --log-interval 1"


@pytest.fixture
def run(tmp_path):
    """`run(name, flags)`: the output of a run that ends well, in a folder of its own name."""

    def start(name: str, flags: str) -> str:
        done = python(*words(f"{SMALL} --final-checkpoint --output-dir {tmp_path} --run-name {name} {flags}"))
        said = re.sub("train_fsdp.py: warning: --precision bf16: this CPU has no .*\n", "", done.stderr)
        assert (done.returncode, said) == (0, ""), done.stderr
        return done.stdout

    return start


def paste(output: str, name: str) -> list[str]:
    """The flags of a command that a run printed, as a shell passes them on."""
    printed = re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1]
    words_of_command = shlex.split(printed)
    return words_of_command[1 + next(i for i, word in enumerate(words_of_command) if word.endswith("train_fsdp.py")) :]


def record_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def header(output: str, name: str) -> str:
    return re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1]


# ----------------------------------------------------------------------------------------------------------------------
# Precision


def test_the_precision_is_fp32_on_a_cpu_a_checkpoints_on_a_resume_and_the_header_says_why(run, tmp_path):
    assert header(run("plain", "--num-steps 1"), "precision") == "fp32 throughout; the default on a CPU"
    record = record_of(tmp_path / "plain")
    assert "precision" not in record["given"] and record["flags"]["precision"] == "fp32"
    assert header(run("bf16", "--num-steps 1 --precision bf16"), "precision").endswith("; by --precision")
    resumed = run("bf16", "--num-steps 2 --resume auto")
    assert re.fullmatch("bf16 compute .*; as in the checkpoint", header(resumed, "precision"))
    assert record_of(tmp_path / "bf16")["flags"]["precision"] == "bf16"


@pytest.mark.smoke
def test_a_plan_for_a_gpu_is_in_bf16():
    plan = "--plan --plan-details --plan-gpus 1 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32"
    assert "--precision bf16 " in header(python(*words(plan), "--no-compile").stdout, "flags")


@pytest.mark.slow
def test_bf16_on_a_cpu_without_its_instructions_is_one_warning_with_the_price(tmp_path):
    as_on_avx2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    flags = words(f"{SMALL} --num-steps 1 --precision bf16 --output-dir {tmp_path} --run-name r")
    process = cold_python(*flags, **as_on_avx2)
    (line,) = process.stderr.splitlines()
    assert process.returncode == 0
    assert line.startswith("train_fsdp.py: warning: --precision bf16: this CPU has no instructions for bf16; ")
    assert "295 to 424 tokens/s" in line and line.endswith("give fp32")


def test_what_the_default_precision_does_not_go_with_is_refused():
    process = python(*words(f"{SMALL} --attention flash"))
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1)
    assert process.stderr.startswith("train_fsdp.py: error: --attention flash: takes no fp32")


# ----------------------------------------------------------------------------------------------------------------------
# What was given


@pytest.mark.parametrize("warmup", ["--warmup-steps 2", ""])
def test_going_on_keeps_the_warmup_that_was_given_or_resolved(run, tmp_path, warmup):
    printed = run("first", f"--num-steps 20 {warmup}")
    first = record_of(tmp_path / "first")
    again = python(*paste(printed, "go on"))
    assert (again.returncode, again.stderr) == (0, "")
    second = record_of(tmp_path / "first")
    assert second["flags"]["num_steps"] == 40
    assert second["flags"]["warmup_steps"] == first["flags"]["warmup_steps"]
    del first["given"]["run_name"], first["given"]["output_dir"]  # --resume says which run it is
    assert second["given"].items() >= (first["given"] | {"num_steps": 40}).items()


def test_a_config_json_gives_another_run_what_was_given_and_nothing_that_followed_from_it(run, tmp_path):
    run("first", "--num-steps 20 --warmup-steps 1 --batch-size 2")
    given = record_of(tmp_path / "first")["given"]
    typed = f"{SMALL.replace('no-compile', 'compile')} --final-checkpoint --output-dir --run-name --num-steps"
    typed += " --warmup-steps --batch-size"
    assert {f"--{name.replace('_', '-')}" for name in given} == {word for word in words(typed) if word[0] == "-"}
    manifest = json.loads(next((tmp_path / "first" / "checkpoints").glob("*/manifest.json")).read_text())
    assert manifest["given"] == given
    config = f"--config {tmp_path / 'first' / 'config.json'} --num-steps 40"
    assert python(*words(f"{config} --run-name second")).returncode == 0
    rates = [line["learning_rate"] for line in metrics_of(tmp_path / "second") if not line.get("final")]
    assert rates[1] == max(rates)  # after one step of warmup, though 5 % of the steps are two


# ----------------------------------------------------------------------------------------------------------------------
# --num-tokens


def test_tokens_become_steps_by_the_global_batch_and_a_resume_counts_those_that_were_trained_on(run, tmp_path):
    printed = run("r", "--num-tokens 0.25e3 --batch-size 2 --gradient-accumulation-steps 2")  # 64 a step
    assert [line["step"] for line in metrics_of(tmp_path / "r")][-2:] == [4, 4]
    record = record_of(tmp_path / "r")
    assert (record["given"]["num_tokens"], record["flags"]["num_steps"]) == (250, 4)
    assert "--num-tokens 500" in " ".join(paste(printed, "go on"))
    run("r", "--num-tokens 500 --batch-size 4 --gradient-accumulation-steps 2 --resume auto")  # 256 + 2 x 128
    assert metrics_of(tmp_path / "r")[-1]["step"] == 6 and metrics_of(tmp_path / "r")[-1]["tokens_seen"] == 512


def test_a_plan_of_so_many_tokens_says_how_many_steps_they_are():
    plan = "--plan --json --plan-gpus 4 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32 --no-compile"
    planned = json.loads(python(*words(f"{plan} --num-tokens 1e6 --batch-size 2")).stdout)
    assert planned["run"]["steps"] == 3907  # of 256 tokens


# ----------------------------------------------------------------------------------------------------------------------
# The batch on another number of ranks


@pytest.mark.smoke
def test_a_run_goes_on_with_its_global_batch_on_two_ranks_or_names_both_ways_on(run, tmp_path):
    run("r", "--num-steps 2 --batch-size 4")
    again = words(f"{SMALL} --final-checkpoint --output-dir {tmp_path} --run-name r --resume auto --num-steps 4")
    with pytest.raises(RuntimeError) as raised:
        forked(2, multirank.program, *again, "--batch-size", "4")
    said = "--batch-size 4: 2 ranks keep the run's global batch of 4 with --batch-size 2; leave the batch flags out, or"
    assert said in str(raised.value)
    with pytest.raises(RuntimeError, match=r"3 ranks cannot share the run's global batch of 4 sequences; .* 1, 2, 4"):
        forked(3, multirank.program, *again)
    for by_config in ([], ["--config", str(tmp_path / "r" / "config.json")]):
        printed = forked(2, multirank.program, *again, *by_config)
        assert "batch size 4 -> 2" in printed and "global batch" not in printed
        assert metrics_of(tmp_path / "r")[-1]["tokens_seen"] == 4 * 4 * 16
        shutil.rmtree(tmp_path / "r")
        run("r", "--num-steps 2 --batch-size 4")
