"""Evaluation without training: --num-steps 0 with --eval-interval, of a checkpoint and of an export."""

import json
import math

import multirank
import pytest
import torch
import transformers
from conftest import ROOT, STORIES, forked, metrics_of, python, train, words, write_model

from harness import data


@pytest.fixture(scope="module")
def trained(device, tmp_path_factory):
    """A folder with a text, a run of two steps on it, which ended with an evaluation, and its export."""
    folder = tmp_path_factory.mktemp("evaluation")
    with (STORIES / "train.jsonl").open() as stories:
        texts = [json.loads(story)["text"] for story, _ in zip(stories, range(80), strict=False)]
    (folder / "my.txt").write_text("\n\n".join(texts))
    model = write_model(folder / "model", "llama", **multirank.SIZES)
    flags = words(
        "--num-steps 2 --sequence-length 32 --batch-size 2 --num-workers 0 --precision fp32 --eval-interval 2"
    )
    flags += ["--model", model, "--tokenizer", ROOT / "assets" / "demo", "--dataset", folder / "my.txt"]
    flags += ["--checkpoint-interval", 2, "--export", folder / "export", "--cache-dir", folder / "cache"]
    assert train([*flags, "--output-dir", folder, "--run-name", "r"], device) == 0
    return folder


@pytest.fixture
def evaluation(trained, device, capfd, monkeypatch):
    """`evaluation(*flags)`: the object of an evaluation with --json; its windows are `evaluation.windows`."""

    def evaluate(*flags) -> dict:
        def load_data(*args):
            train_set = load(*args)
            (evaluate.windows,) = train_set.held_out.values()
            return train_set

        load = data.load
        with monkeypatch.context() as patch:
            patch.setattr(data, "load", load_data)
            start = ["--num-steps", 0, "--eval-interval", 1, "--json", "--cache-dir", trained / "cache"]
            capfd.readouterr()
            assert train([*start, *flags], device) == 0
        return json.loads(capfd.readouterr().out)

    return evaluate


def test_a_checkpoint_and_its_export_have_the_held_out_loss_of_the_run_and_of_transformers_trainer(trained, evaluation):
    found = evaluation("--resume", trained / "r")
    assert found["eval_loss"] == pytest.approx(metrics_of(trained / "r")[-2]["eval_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert (found["step"], found["tokens"]) == (2, 32 * len(evaluation.windows))

    flags = ["--dataset", trained / "my.txt", "--sequence-length", 32, "--precision", "fp32", "--batch-size", 3]
    exported = evaluation("--init", "pretrained", "--model", trained / "export", *flags)
    assert exported["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-6) and exported["step"] is None

    windows = [torch.from_numpy(window.astype("int64")) for window in evaluation.windows]
    rows = [{"input_ids": w[:-1], "labels": w[1:], "shift_labels": w[1:]} for w in windows]
    options = {"report_to": "none", "use_cpu": True, "remove_unused_columns": False, "per_device_eval_batch_size": 1}
    trainer = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(trained / "export"),
        transformers.TrainingArguments(trained / "trainer", **options),
        eval_dataset=rows,
    )
    assert found["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)


def test_another_text_another_split_and_fewer_batches_are_evaluated_as_they_are_named(trained, evaluation):
    whole = evaluation("--resume", trained / "r")
    some = evaluation("--resume", trained / "r", "--eval-steps", 2, "--batch-size", 1)
    assert some["tokens"] == 2 * 32 < whole["tokens"]
    exported = ["--init", "pretrained", "--model", trained / "export", "--sequence-length", 32, "--precision", "fp32"]
    every = evaluation(*exported, "--dataset", trained / "my.txt", "--eval-split", "train")
    assert every["tokens"] > 10 * whole["tokens"] and every["eval_loss"] != whole["eval_loss"]
    (trained / "short.txt").write_text("The fox ran home. " * 300)  # less than a global batch would need to train
    assert evaluation("--resume", trained / "r", "--dataset", trained / "short.txt", "--batch-size", 999)["tokens"]


def test_two_ranks_have_the_loss_of_one_also_where_they_have_no_equal_share(trained, evaluation):
    found = evaluation("--resume", trained / "r")
    flags = ["--resume", str(trained / "r"), "--cache-dir", str(trained / "cache"), "--batch-size", "3"]
    assert len(evaluation.windows) % 6
    said = forked(2, multirank.program, "--num-steps", "0", "--eval-interval", "1", *flags)
    held_out = f"held-out loss {found['eval_loss']:.4f} (perplexity {found['perplexity']:,.2f})"
    assert f"{trained / 'my.txt'}: {held_out}, {found['tokens']:,} tokens" in said


def test_an_error_of_an_evaluation_as_json_is_an_object_and_a_line(trained):
    flags = ["--json", "--resume", trained / "r", "--dataset", "no/such.txt"]
    ended = python("--num-steps", 0, "--eval-interval", 1, *flags)
    assert ended.stderr.splitlines()[-1] == f"train_fsdp.py: error: {json.loads(ended.stdout)['error']}"
    assert ended.returncode == 2
