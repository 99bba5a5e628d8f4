"""Evaluation in a run and without training: of a checkpoint, an export and other texts, never of training data."""

import json
import math
import re
import shutil

import multirank
import pytest
import torch
import transformers
from conftest import chat, eval_loss_of, forked, python, small_run, story_texts, train, words
from corpora import write_records
from safetensors import safe_open

from harness import data
from harness.base import UserError
from harness.data.eval_checks import find_trained_spec
from harness.data.eval_split import BY_NUMBER


def write_documents(path, first: int = 0, count: int = 200) -> None:
    write_records(path, story_texts(first, first + count))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(name, *flags)`: flags of a run of two steps on my.jsonl in `start.folder`."""
    folder = tmp_path_factory.mktemp("eval")
    write_documents(folder / "my.jsonl")
    write_documents(folder / "other.jsonl", 1000, 40)
    small = small_run(folder, f"--num-steps 2 --sequence-length 32 --dataset {folder}/my.jsonl")

    def flags(name: str, *others) -> list:
        return [*small, "--run-name", name, *others]

    flags.folder = folder
    return flags


@pytest.fixture(scope="module")
def runs(start, device):
    """The folder of five runs: `all` and `streamed` trained on every document, `held` has eval documents and was
    exported, `part` trained on a slice, `valid` on a split validation; beside copies of their data."""
    assert train(start("all"), device) == 0
    assert train(start("streamed", "--streaming"), device) == 0
    assert train(start("held", "--eval-interval", 2, "--export", start.folder / "export"), device) == 0
    assert train(start("part", "--dataset-split", "train[:90%]"), device) == 0
    write_documents(start.folder / "two" / "train.jsonl", 2000, 40)
    write_documents(start.folder / "two" / "validation.jsonl", 3000, 40)
    on_validation = ["--dataset", start.folder / "two", "--dataset-split", "validation"]
    assert train(start("valid", *on_validation), device) == 0
    shutil.copy(start.folder / "my.jsonl", start.folder / "copy.jsonl")
    (start.folder / "link.jsonl").symlink_to(start.folder / "my.jsonl")
    (start.folder / "both").mkdir()
    for name in ("my.jsonl", "other.jsonl"):
        (start.folder / "both" / name).symlink_to(start.folder / name)
    write_records(start.folder / "few.jsonl", ["a " * 99, "b", "c"])
    for name in ("train", "validation"):
        write_documents(start.folder / "copies" / f"{name}.jsonl", 50, 40)
    (start.folder / "three").mkdir()
    shutil.copy(start.folder / "other.jsonl", start.folder / "three")
    shutil.copytree(start.folder / "two", start.folder / "twins")
    (start.folder / "four" / "validation").mkdir(parents=True)
    write_documents(start.folder / "four" / "train.jsonl", 4000, 40)
    write_documents(start.folder / "four" / "validation" / "a.jsonl", 4100, 40)
    (start.folder / "four" / "validation" / "link.jsonl").symlink_to(start.folder / "my.jsonl")
    (start.folder / "three" / "link.jsonl").symlink_to(start.folder / "two" / "validation.jsonl")
    return start.folder


@pytest.fixture
def evaluate(start, device, capfd):
    """`evaluate(*flags, printed=words)`: the JSON object of an evaluation, whose line about the eval data begins so."""

    def evaluate(*flags, printed: str = "") -> dict:
        capfd.readouterr()
        given = ["--num-steps", 0, "--eval-interval", 1, "--json", "--cache-dir", start.folder / "cache", *flags]
        assert train(given, device) == 0
        out, err = capfd.readouterr()
        assert re.search(f"^eval data +{printed}", err, re.MULTILINE)
        return json.loads(out)

    return evaluate


@pytest.fixture
def refused(evaluate):
    """`refused(*flags)`: the one line of an evaluation that is refused."""

    def refused(*flags) -> str:
        with pytest.raises(UserError) as raised:
            evaluate(*flags)
        assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
        return str(raised.value)

    return refused


def test_a_checkpoint_and_its_export_have_the_eval_loss_of_the_run_and_of_transformers_trainer(
    runs, evaluate, monkeypatch
):
    opened = []
    load = data.load
    monkeypatch.setattr(data, "load", lambda *args, **more: opened.append(load(*args, **more)) or opened[-1])
    found = evaluate("--resume", runs / "held")
    (sequences,) = opened[-1].eval_sets.values()
    assert found["eval_loss"] == pytest.approx(eval_loss_of(runs / "held"), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    assert (found["step"], found["tokens"]) == (2, 32 * len(sequences))

    flags = ["--dataset", runs / "my.jsonl", "--sequence-length", 32, "--precision", "fp32", "--batch-size", 3]
    exported = evaluate("--init", "pretrained", "--model", runs / "export", *flags)
    assert exported["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-6) and exported["step"] is None

    tokens = [torch.from_numpy(sequence.astype("int64")) for sequence in sequences]
    rows = [{"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in tokens]
    options = {"report_to": "none", "use_cpu": True, "remove_unused_columns": False, "per_device_eval_batch_size": 1}
    trainer = transformers.Trainer(
        transformers.AutoModelForCausalLM.from_pretrained(runs / "export"),
        transformers.TrainingArguments(runs / "trainer", **options),
        eval_dataset=rows,
    )
    assert found["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)


def test_another_text_another_split_and_fewer_batches_are_evaluated_as_they_are_named(runs, evaluate):
    whole = evaluate("--resume", runs / "held")
    some = evaluate("--resume", runs / "held", "--eval-steps", 2, "--batch-size", 1)
    assert some["tokens"] == 2 * 32 < whole["tokens"]
    (runs / "short").mkdir()
    (runs / "short" / "train.txt").write_text("A fox.")  # too little for a sequence, and not evaluated
    (runs / "short" / "validation.txt").write_text("The fox ran home. " * 300)
    assert evaluate("--resume", runs / "held", "--dataset", runs / "short")["tokens"]
    (runs / "short.txt").write_text("The fox ran home. " * 300)  # less than a global batch would need to train
    assert evaluate("--resume", runs / "held", "--dataset", runs / "short.txt", "--batch-size", 999)["tokens"]


@pytest.mark.slow
def test_two_ranks_have_the_loss_of_one_also_where_they_have_no_equal_share(runs, evaluate):
    found = evaluate("--resume", runs / "held")
    flags = ["--resume", str(runs / "held"), "--cache-dir", str(runs / "cache"), "--batch-size", "3"]
    assert found["tokens"] // 32 % 6
    printed = forked(2, multirank.program, "--num-steps", "0", "--eval-interval", "1", *flags)
    eval_part = f"eval loss {found['eval_loss']:.4f} (perplexity {found['perplexity']:,.2f})"
    assert f"{runs / 'my.jsonl'}: {eval_part}, {found['tokens']:,} tokens" in printed


def test_an_error_of_an_evaluation_as_json_is_an_object_and_a_line(runs):
    flags = ["--json", "--resume", runs / "held", "--dataset", "no/such.txt"]
    ended = python("--num-steps", 0, "--eval-interval", 1, *flags)
    assert ended.stderr.splitlines()[-1] == f"train_fsdp.py: error: {json.loads(ended.stdout)['error']}"
    assert ended.returncode == 2


# ----------------------------------------------------------------------------------------------------------------------
# What the run trained on


TRAINED_ON = {  # a run and flags: what the refusal names
    "all": "--eval-interval: the run has no eval documents",
    "streamed": "--eval-interval: the run has no eval documents",
    "streamed --dataset {}/copy.jsonl": "the run has no eval documents",
    "streamed --eval-split {}/copy.jsonl": "its tokens were trained on; give what was not",
    "held --dataset {}/copy.jsonl --streaming": "leave out --streaming",
    "held --dataset {}/both": "my.jsonl",
    "held --eval-split train": "--eval-split train",
    "held --dataset {}/copy.jsonl --eval-split train": "--eval-split train: it overlaps 'train', which was trained on",
    "held --eval-split {}/link.jsonl": "{}/link.jsonl is in the training data too; ",
    "part --eval-split train[50%:]": "--eval-split train[50%:]",
    "part --eval-split train[-20:]": "--eval-split train[-20:]",  # not known without counting
    "part --dataset-split train[50%:]": "train[:90%]",
    "valid": "the run has no eval documents",
    "valid --dataset-split train": "--eval-split validation: it overlaps 'validation' of {}/two",  # the default
    "valid --dataset {}/twins --dataset-split train": "--eval-split validation: its tokens were trained on",
    "valid --dataset {}/twins --dataset-split train --streaming": "--eval-split validation: its tokens were trained on",
    "held --dataset {}/four": "--eval-split validation: it overlaps 'train' of {}/my.jsonl, which the run trained on",
}


@pytest.mark.parametrize("flags, named", TRAINED_ON.items())
def test_what_was_trained_on_is_not_evaluated_by_any_name(runs, refused, flags, named):
    assert named.replace("{}", str(runs)) in refused(*words(f"--resume {{}}/{flags}".replace("{}", str(runs))))


NOT_TRAINED_ON = ["all --dataset {}/other.jsonl", "part --eval-split train[90%:]", "part --eval-split train[-10%:]"]


@pytest.mark.parametrize("flags", NOT_TRAINED_ON)
def test_what_was_not_trained_on_is_evaluated(runs, evaluate, flags):
    assert evaluate(*words(f"--resume {{}}/{flags}".replace("{}", str(runs))))["tokens"] > 0


EVAL_DATA_TRAINED_ON = {  # flags of a run: what the refusal names
    "--dataset-split train[:90%] --eval-split train[50%:]": r"--eval-split train\[50%:\]: it overlaps",
    "--dataset-split train[:90%] --eval-split train[80:]": r"--eval-split train\[80:\]: it overlaps",
    # 67 % of three documents are two of them, 90 % are cut off in the first one
    "--dataset {}/few.jsonl --dataset-split train[:67%] --eval-split train[90%:]": r"train\[90%:\]: it overlaps",
    "--dataset {}/copies": "--eval-split validation: its tokens were trained on",
    "--dataset {}/copies --streaming": "--eval-split validation: its tokens were trained on",
    "--dataset one={}/my.jsonl all={}/both": "my.jsonl has eval documents of one and is trained on as a part of all",
    "--dataset two={}/two:1 three={}/three:1 --streaming": "validation.jsonl has eval documents of two",
}


@pytest.mark.parametrize("flags, named", EVAL_DATA_TRAINED_ON.items())
def test_a_run_does_not_evaluate_on_what_it_trains_on(runs, start, device, flags, named):
    with pytest.raises(UserError, match=named) as raised:
        train(start("no", "--eval-interval", 1, *words(flags.replace("{}", str(runs)))), device)
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
    assert not list(runs.glob("no/metrics.jsonl"))


@pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["cached", "streamed"])
def test_a_run_on_the_split_validation_has_eval_documents_of_it(runs, start, device, streaming, capfd):
    on_validation = ["--dataset", runs / "two", "--dataset-split", "validation", "--eval-interval", 2]
    assert train(start(f"on validation {len(streaming)}", *on_validation, *streaming, "--batch-size", 1), device) == 0
    assert re.search("^eval data +one of every 20 documents of it", capfd.readouterr().out, re.MULTILINE)


def test_a_run_that_trained_on_all_gets_no_evaluation_when_it_continues(runs, start, device):
    with pytest.raises(UserError, match="--eval-interval"):
        train(start("all", "--num-steps", 4, "--eval-interval", 2, "--resume", "auto"), device)


def test_a_corpus_that_changed_is_refused_by_an_evaluation(start, device, refused, tmp_path):
    corpus = tmp_path / "grows.jsonl"
    write_documents(corpus)
    assert train(start("grown", "--dataset", corpus, "--eval-interval", 2), device) == 0
    corpus.write_text(corpus.read_text() + '{"text": "One more story."}\n')
    assert "is not what it was at the checkpoint" in refused("--resume", start.folder / "grown")


def test_an_evaluation_of_a_stream_takes_the_eval_documents_of_the_run(start, device, evaluate):
    flags = words("--streaming --eval-steps 3 --streams 4")
    assert train(start("four", "--eval-interval", 2, *flags), device) == 0
    found = evaluate("--resume", start.folder / "four")
    assert found["eval_loss"] == pytest.approx(eval_loss_of(start.folder / "four"), rel=1e-6)
    assert found["tokens"] == 3 * 2 * 32


@pytest.mark.parametrize("field", [[], ["--text-field", "text"]])
def test_an_evaluation_reads_the_field_that_the_run_read(start, device, tmp_path, evaluate, field):
    records = [chat("Tell me.", story) | {"text": story} for story in story_texts(0, 60)]
    file = write_records(tmp_path / "both.jsonl", records)
    flags = ["--dataset", file, "--output-dir", tmp_path, "--eval-interval", 2, *field]
    if not field:
        flags += ["--chat-template", "chatml"]
    assert train(start("r", *flags), device) == 0
    assert evaluate("--resume", tmp_path / "r")["eval_loss"] == pytest.approx(eval_loss_of(tmp_path / "r"), rel=1e-6)


WHOLE, A_PART = "all of it, 40 documents", "one of every 20 documents of it, 10 of 200"


@pytest.mark.parametrize("of", ["checkpoint", "export"])
@pytest.mark.parametrize("name, eval_part", {"other": WHOLE, "my": A_PART, "copy": A_PART}.items())
def test_training_data_of_weights_are_known_by_their_tokens_and_other_data_are_taken_whole(
    runs, evaluate, of, name, eval_part
):
    exported = ["--init", "pretrained", "--model", runs / "export", "--sequence-length", 32, "--precision", "fp32"]
    weights = {"checkpoint": ["--resume", runs / "held"], "export": exported}[of]
    found = evaluate(*weights, "--dataset", runs / f"{name}.jsonl", printed=eval_part)
    if eval_part == A_PART:
        assert found["eval_loss"] == pytest.approx(eval_loss_of(runs / "held"), rel=1e-6)


def test_documents_that_one_of_two_runs_trained_on_are_no_eval_documents_of_their_weights():
    specs = [{"eval_rule": rule, "beginning": "0123"} for rule in (BY_NUMBER, None)]
    for trained_on in (specs, specs[::-1]):
        assert find_trained_spec(trained_on, "0123")["eval_rule"] is None
    assert find_trained_spec(specs[:1], "0123") == specs[0] and find_trained_spec(specs, "4567") is None


def test_a_run_from_an_export_evaluates_a_split_that_the_export_was_not_trained_on(start, runs, device):
    folder = runs / "with a split"
    folder.mkdir()
    shutil.copy(runs / "my.jsonl", folder / "train.jsonl")  # of which the export has eval documents
    shutil.copy(runs / "other.jsonl", folder / "validation.jsonl")
    exported = ["--init", "pretrained", "--model", runs / "export"]
    assert train(start("further", *exported, "--dataset", folder, "--eval-interval", 2), device) == 0


def test_an_export_of_a_run_on_an_export_knows_what_both_were_trained_on(start, runs, evaluate, refused, device):
    tuned = start("tuned", "--init", "pretrained", "--model", runs / "export", "--dataset", runs / "other.jsonl")
    assert train([*tuned, "--export", runs / "tuned-export"], device) == 0
    weights = ["--init", "pretrained", "--model", runs / "tuned-export", "--sequence-length", 32]
    evaluate(*weights, "--dataset", runs / "my.jsonl", printed=A_PART)
    assert "the run has no eval documents" in refused(*weights, "--dataset", runs / "other.jsonl")
    with pytest.raises(UserError, match="the weights of --model were trained on the eval documents of other"):
        train([*tuned, "--run-name", "again", "--eval-interval", 1, "--model", runs / "tuned-export"], device)
    for name in ("my", "other"):
        line = refused(*weights, "--eval-split", runs / f"{name}.jsonl")
        assert line.endswith("its tokens were trained on; give what was not")


def test_an_export_after_an_evaluation_of_other_data_names_the_data_that_were_trained_on(runs, evaluate, tmp_path):
    def header(folder) -> str:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            return file.metadata()["trained_on"]

    evaluate("--resume", runs / "held", "--dataset", runs / "other.jsonl", "--export", tmp_path / "export")
    assert header(tmp_path / "export") == header(runs / "export")
