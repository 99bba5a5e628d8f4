"""What was given is kept apart from what it was resolved to: the precision, the steps, the batch of a run that goes
on."""

import json
import re
import shlex

import multirank
import pytest
from conftest import forked, metrics_of, python, words

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


def paste(output: str) -> list[str]:
    """The flags of the command with which a run says that it goes on, as a shell passes them on."""
    words_of_command = shlex.split(header(output, "go on"))
    return words_of_command[1 + next(i for i, word in enumerate(words_of_command) if word.endswith("train_fsdp.py")) :]


def record_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def header(output: str, name: str) -> str:
    return re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1]


def test_going_on_keeps_what_was_given_and_what_it_was_resolved_to(run, tmp_path):
    printed = run("first", "--num-steps 20 --batch-size 2")
    assert header(printed, "precision") == "fp32 throughout; the default on a CPU"
    first = record_of(tmp_path / "first")
    typed = f"{SMALL.replace('no-compile', 'compile')} --final-checkpoint --output-dir --run-name --num-steps"
    typed += " --batch-size"
    assert {f"--{name.replace('_', '-')}" for name in first["given"]} == set(re.findall(r"--[\w-]+", typed))
    assert first["flags"]["precision"] == "fp32"
    manifest = json.loads(next((tmp_path / "first" / "checkpoints").glob("*/manifest.json")).read_text())
    assert manifest["given"] == first["given"]

    again = python(*paste(printed))
    assert (again.returncode, again.stderr) == (0, "")
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


@pytest.mark.smoke
def test_a_plan_for_a_gpu_is_in_bf16_and_says_how_many_steps_so_many_tokens_are():
    plan = "--plan --plan-details --plan-gpus 4 --plan-gpu H200 --plan-seconds 0 --model demo --sequence-length 32"
    said = python(*words(plan), *words("--no-compile --num-tokens 1e6 --batch-size 2")).stdout
    assert "--precision bf16 " in header(said, "flags")
    assert "3,907 steps" in said  # of 256 tokens


def test_tokens_become_steps_by_the_global_batch_and_a_resume_counts_those_that_were_trained_on(run, tmp_path):
    printed = run("r", "--num-tokens 0.25e3 --batch-size 2 --gradient-accumulation-steps 2")  # 64 a step
    assert [line["step"] for line in metrics_of(tmp_path / "r")][-2:] == [4, 4]
    record = record_of(tmp_path / "r")
    assert (record["given"]["num_tokens"], record["flags"]["num_steps"]) == (250, 4)
    assert "--num-tokens 500" in " ".join(paste(printed))
    run("r", "--num-tokens 500 --batch-size 4 --gradient-accumulation-steps 2 --resume auto")  # 256 + 2 x 128
    assert metrics_of(tmp_path / "r")[-1]["step"] == 6 and metrics_of(tmp_path / "r")[-1]["tokens_seen"] == 512


@pytest.mark.smoke
def test_a_run_goes_on_with_its_global_batch_on_two_ranks_or_says_what_keeps_it(run, tmp_path):
    run("r", "--num-steps 2 --batch-size 4")
    again = words(f"{SMALL} --final-checkpoint --output-dir {tmp_path} --run-name r --resume auto --num-steps 4")
    with pytest.raises(RuntimeError) as raised:
        forked(2, multirank.program, *again, "--batch-size", "4")
    said = "--batch-size 4: 2 ranks keep the run's global batch of 4 with --batch-size 2; leave the batch flags out, or"
    assert said in str(raised.value)
    printed = forked(2, multirank.program, *again)
    assert "batch size 4 -> 2" in printed
    assert metrics_of(tmp_path / "r")[-1]["tokens_seen"] == 4 * 4 * 16
