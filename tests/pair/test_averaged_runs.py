"""--ema in whole runs: saved, resumed, evaluated beside the weights, exported."""

import json

import multirank
import pytest
import torch
from checkpoints import tensors_of
from conftest import ROOT, STORIES, metrics_of, train, words, write_model
from transformers import AutoModelForCausalLM

from harness.base import UserError, saved

STEPS = 6
KEYS = ("step", "loss", "grad_norm", "eval_loss", "eval_loss_ema")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A tiny run that evaluates; what a test gives beside it wins."""
    folder = tmp_path_factory.mktemp("averaged")
    with (STORIES / "train.jsonl").open() as stories:
        texts = [json.loads(story)["text"] for story, _ in zip(stories, range(80), strict=False)]
    (folder / "my.txt").write_text("\n\n".join(texts))
    model = write_model(folder / "model", "llama", **multirank.SIZES | {"tie_word_embeddings": False})
    small = f"--num-steps {STEPS} --sequence-length 32 --batch-size 4 --num-workers 0 --precision fp32 --log-interval 1"
    places = f"--cache-dir {folder / 'cache'} --tokenizer {ROOT / 'assets' / 'demo'} --model {model}"
    places += f" --dataset {folder / 'my.txt'}"
    return words(f"{small} {places} --lr 1e-2 --eval-interval 2 --no-compile --ema 0.8")


@pytest.fixture
def run(device, flags, tmp_path):
    """Trains in this process under tmp_path/NAME; returns the exit code."""

    def start_run(name: str, *more) -> int:
        return train([*flags, "--output-dir", tmp_path, "--run-name", name, *more], device)

    return start_run


@pytest.fixture(scope="module")
def finished(device, flags, tmp_path_factory):
    """A finished run with a checkpoint of every second step."""
    folder = tmp_path_factory.mktemp("finished")
    more = words(
        f"--output-dir {folder} --run-name r --checkpoint-interval 2 --keep-checkpoints 9 --no-async-checkpoint"
    )
    assert train([*flags, *more], device) == 0
    return folder / "r"


def lines_of(folder) -> list[list]:
    return [[line.get(key) for key in KEYS] for line in metrics_of(folder) if not line.get("final")]


def checkpoint(folder, step: int):
    return folder / "checkpoints" / saved.checkpoint_name(step)


def test_a_run_begins_and_drops_an_average_at_a_resume_and_says_so(run, finished, tmp_path, capsys):
    assert run("dropped", "--resume", checkpoint(finished, 4), "--ema", 0) == 0
    assert "ema 0.8 -> 0.0" in " ".join(capsys.readouterr().out.split())
    assert not tensors_of(checkpoint(tmp_path / "dropped", STEPS), "average.")
    losses = [line[:4] for line in lines_of(finished)[4:]]  # an average changes none of them
    assert lines_of(tmp_path / "dropped") == [[*line, None] for line in losses]
    begun = ["--resume", checkpoint(tmp_path / "dropped", STEPS), "--num-steps", STEPS + 1]
    assert run("begun", *begun) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ema 0.0 -> 0.8" in said
    first = tensors_of(checkpoint(tmp_path / "dropped", STEPS), "model.")
    second, average = (tensors_of(checkpoint(tmp_path / "begun", STEPS + 1), kind) for kind in ("model.", "average."))
    for name in first:
        assert torch.equal(average[name], first[name].lerp(second[name], 1 - 0.8)), name
    config = json.loads((tmp_path / "begun" / "config.json").read_text())
    assert config["flags"]["ema"] == 0.8 and "ema 0.0 -> 0.8" in config["starts"][-1]["changed"]


def test_both_are_evaluated_without_training_as_the_run_did_and_exported_alike(
    device, flags, finished, tmp_path, capfd
):
    def evaluation(*more) -> dict:
        capfd.readouterr()
        assert train(["--num-steps", 0, "--eval-interval", 1, "--json", *more], device) == 0
        return json.loads(capfd.readouterr().out)

    cache = flags[flags.index("--cache-dir") : flags.index("--cache-dir") + 2]
    last = metrics_of(finished)[-1]
    found = evaluation("--resume", finished, *cache)
    for key in ("eval_loss", "eval_loss_ema"):
        assert found[key] == pytest.approx(last[key], rel=1e-6)
    assert abs(found["eval_loss"] - found["eval_loss_ema"]) > 1e-3
    assert "eval_loss_ema" not in evaluation("--resume", finished, *cache, "--ema", 0)
    for kind, source in (("raw", "model."), ("ema", "average.")):
        target = tmp_path / kind
        assert train(words(f"--num-steps 0 --resume {finished} --export {target} --export-weights {kind}"), device) == 0
        assert ("the average of the weights" in capfd.readouterr().out) == (kind == "ema")
        loaded = dict(AutoModelForCausalLM.from_pretrained(target).named_parameters())
        for name, tensor in tensors_of(checkpoint(finished, STEPS), source).items():
            assert torch.equal(loaded[name], tensor)
        plain = ["--init", "pretrained", "--model", target, *cache, *flags[flags.index("--dataset") :][:2]]
        exported = evaluation(*plain, *words("--sequence-length 32 --precision fp32"))
        expected = found["eval_loss_ema" if kind == "ema" else "eval_loss"]
        assert exported["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_sources_of_a_mixture_have_a_loss_of_the_average_each(run, flags, tmp_path):
    text = flags[flags.index("--dataset") + 1]
    assert run("r", "--dataset", f"web={text}:0.5", f"code={text}:0.5", "--num-steps", 2) == 0
    line = next(line for line in metrics_of(tmp_path / "r") if "eval_loss_ema" in line)
    assert line["eval_loss_ema/web"] == pytest.approx(line["eval_loss_ema"], rel=1e-6)
    assert line["eval_loss_ema/code"] != line["eval_loss/code"]


ABSENT = {
    "--ema 1": "--ema",
    "--ema 0 --export {out} --export-weights ema": "--export-weights ema: there is no average",
    "--num-steps 0 --eval-interval 1 --resume {plain}": "--ema 0.8: there is no average of the weights, {plain}",
    "--num-steps 0 --export {out} --export-weights ema --ema 0.5 --resume {averaged}": (
        "--ema 0.5: there is no average of the weights, {averaged} holds that of --ema 0.8"
    ),
    "--num-steps 0 --export {out} --init pretrained": "--ema 0.8: there is no average of the weights, --num-steps 0",
}


def test_an_average_that_is_not_there_is_one_line(run, device, flags, tmp_path, finished):
    places = {"out": tmp_path / "out", "plain": tmp_path / "plain", "averaged": finished}
    assert run("plain", "--ema", 0, "--num-steps", 1, "--eval-interval", 1) == 0
    for wrong, said in ABSENT.items():
        with pytest.raises(UserError) as raised:
            train([*flags, "--output-dir", tmp_path, *words(wrong.format(**places))], device)
        assert str(raised.value).startswith(said.format(**places)) and "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
