"""A run that diverged has failed: what is saved, exported or called done has given a finite loss after its update."""

import json
import math
import re

import multirank
import pytest
import torch
from conftest import DEMO, Stop, forked, losses_of, metrics_of, python, train, words
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base import UserError

# After its first update the gradients are NaN; the loss stays finite, as RMSNorm turns what overflows into zeros.
DIVERGES = words("--lr 1e20 --max-grad-norm 0 --warmup-steps 0 --num-steps 6")


@pytest.fixture
def arguments(arguments, tmp_path) -> list:
    """Flags of the smallest run, on a short text."""
    (tmp_path / "data.txt").write_text("The fox had a red ball, and the dog wanted it.\n\n" * 300)
    return [*arguments, "--dataset", str(tmp_path / "data.txt")]


def steps_saved(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "out" / "r" / "checkpoints").glob("step-*"))


def left_nothing(tmp_path) -> bool:
    """True if a run that diverged saved, exported and reported nothing."""
    assert not any(line.get("final") for line in metrics_of(tmp_path / "out" / "r"))
    assert "NaN" not in (tmp_path / "out" / "r" / "metrics.jsonl").read_text()
    return not steps_saved(tmp_path) and not (tmp_path / "export").exists()


def test_a_run_that_diverged_is_one_line_and_leaves_nothing(arguments, tmp_path):
    flags = words("--max-skipped 100 --checkpoint-interval 2")
    process = python(*arguments, *DIVERGES, *flags, "--export", tmp_path / "export")
    assert process.returncode == 1 and "done  " not in process.stdout
    (line,) = process.stderr.splitlines()
    assert line.startswith("train_fsdp.py: error: ") and "at step 1; nothing was saved; a lower --lr" in line
    assert left_nothing(tmp_path)


def test_a_last_step_that_diverged_is_an_error_too_and_leaves_nothing(arguments, mistake, tmp_path):
    flags = words("--no-final-checkpoint --num-steps 1")
    message = mistake(*DIVERGES, *flags, "--export", tmp_path / "export", exit_code=1)
    assert "at step 1; nothing was saved; a lower --lr" in message and left_nothing(tmp_path)


def test_the_last_good_checkpoint_is_named_and_stays_and_the_run_resumes_from_it(device, arguments, mistake, tmp_path):
    assert train([*arguments, "--checkpoint-interval", 1, "--keep-checkpoints", 1], device) == 0
    onward = [*arguments, "--resume", "auto", "--num-steps", 8, "--checkpoint-interval", 2]
    message = mistake(*onward, "--lr", "1e20", "--max-grad-norm", 0, exit_code=1)
    assert "at step 3; the last good checkpoint is step-00000002; a lower --lr" in message
    assert steps_saved(tmp_path) == ["step-00000002"]
    assert train(onward, device) == 0
    assert steps_saved(tmp_path)[-1] == "step-00000008"


def test_a_signal_does_not_save_a_diverged_state(arguments, device, tmp_path):
    with pytest.raises(UserError, match="at step 1; nothing was saved") as raised:
        train([*arguments, *DIVERGES], device, Stop(steps=4))
    assert raised.value.exit_code == 1 and not steps_saved(tmp_path)


@pytest.mark.slow
def test_all_ranks_agree_that_a_run_diverged(arguments, tmp_path):
    flags = words("--dp-replicate-size 2 --gradient-accumulation-steps 2 --document-mask --checkpoint-interval 1")
    forked(4, multirank.program, *arguments, *flags)
    onward = [*arguments, *flags, *words("--resume auto --num-steps 8 --checkpoint-interval 2")]
    with pytest.raises(RuntimeError, match="exit code 1") as ended:
        forked(4, multirank.program, *onward, *words("--lr 1e20 --max-grad-norm 0"))
    assert str(ended.value).count("train_fsdp.py: error: ") == 1
    assert "at step 3; the last good checkpoint is step-00000002" in str(ended.value)
    assert steps_saved(tmp_path)[-1] == "step-00000002"


# ---- Weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["a loss of NaN", "NaN in it"])
def test_weights_that_give_no_finite_loss_are_refused_before_anything_is_made_of_them(device, tmp_path, capfd, harm):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **multirank.SIZES), dtype=torch.float32)
    with torch.no_grad():
        if harm == "NaN in it":
            model.model.layers[1].mlp.up_proj.weight[3, 4] = math.nan
        else:
            model.lm_head.weight.mul_(1e30)
            model.model.norm.weight.mul_(1e30)
    model.save_pretrained(tmp_path / "spoiled")
    spoiled = ["--init", "pretrained", "--model", tmp_path / "spoiled", "--tokenizer", DEMO]
    sizes = words("--dataset demo --sequence-length 16 --precision fp32 --num-workers 0")
    for flags in (
        [*sizes, "--num-steps", 6, "--output-dir", tmp_path / "out", "--run-name", "r"],
        [*sizes, *words("--num-steps 0 --eval-interval 1 --json")],
        ["--num-steps", 0, "--sample-prompt", "Once upon a time"],
        ["--num-steps", 0, "--export", tmp_path / "export"],
    ):
        with pytest.raises(UserError) as refused:
            train([*spoiled, *flags], device)
        assert str(refused.value).startswith(f"--model {tmp_path / 'spoiled'}: it ")
        assert "\n" not in str(refused.value) and refused.value.exit_code == 1
    printed = capfd.readouterr().out
    assert "Once upon" not in printed and "eval_loss" not in printed
    assert not (tmp_path / "export").exists() and not steps_saved(tmp_path)


def test_a_loss_that_ends_above_its_first_one_is_in_the_last_lines(device, arguments, tmp_path, token_cache, capfd):
    """Also, a perplexity beyond the largest float is null."""
    high = words("--lr 100 --max-grad-norm 0 --warmup-steps 0 --num-steps 2 --log-interval 1 --eval-interval 2")
    assert train([*arguments, *high], device) == 0
    losses, printed = losses_of(tmp_path / "out" / "r"), capfd.readouterr().out
    assert losses[-1] > 20 > losses[0]
    assert f"worse      the last loss, {losses[-1]:,.4f}, is above the first, {losses[0]:,.4f}: a lower --lr" in printed
    assert not re.search(r"[\d,.]{20}", printed)  # no perplexity of hundreds of digits
    evaluation = words("--num-steps 0 --eval-interval 1 --json")
    train([*evaluation, "--resume", tmp_path / "out" / "r", "--cache-dir", token_cache], device)
    found = json.loads(capfd.readouterr().out)
    assert found["eval_loss"] > 800 and found["perplexity"] is None

    train([*arguments, "--num-steps", 30, "--run-name", "good"], device)
    assert "worse" not in capfd.readouterr().out
