"""--eval-split as an eval dataset of its own: read whole in every format, never trained on, beside streams and
mixtures, by a checkpoint and by its export; and what is refused."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import chat, eval_loss_of, metrics_of, parse, small_run, story_texts, train, words
from corpora import write_records

from harness import data, loop
from harness.base import UserError
from harness.data import files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts to train on and others to evaluate on, in every format."""
    folder = tmp_path_factory.mktemp("held")
    trained, held = story_texts(0, 60), story_texts(1000, 1010)
    write_records(folder / "a.jsonl", trained)
    write_records(folder / "b.jsonl", story_texts(100, 130))
    write_records(folder / "held.jsonl", held)
    (folder / "held.txt").write_text("<|endoftext|>".join(held))
    write_records(folder / "a-chats.jsonl", [chat(text[:40], text[40:]) for text in trained])
    write_records(folder / "chats.jsonl", [chat(text[:40], text[40:]) for text in held])
    write_records(folder / "alpaca.jsonl", [{"instruction": text[:40], "output": text[40:]} for text in held])
    np.save(folder / "held.npy", (np.arange(16 * 30 + 1) % 200).astype(np.uint16))
    write_records(folder / "splits" / "train" / "x.jsonl", trained[:1])
    write_records(folder / "splits" / "validation" / "x.jsonl", held)
    return folder


@pytest.fixture
def flags(folder, tmp_path):
    """`flags(more)` of a run of two steps on a.jsonl; {} is the folder of the texts."""
    small = small_run(folder, f"--output-dir {tmp_path} --num-steps 2 --dataset {folder}/a.jsonl --eval-interval 2")
    return lambda more: [*small, *words(more.replace("{}", str(folder)))]


def loaded(given: list):
    run = loop.open_run(parse(given))
    return data.load(run.settings, run.corpora, run.tokenizer, run.config)


EVALUATION = "--num-steps 0 --eval-interval 1 --json"


DATASETS = {  # --eval-split and the flags beside it: its documents, None if they are not counted
    "{}/held.jsonl": 10,
    "{}/held.txt": 10,
    "{}/held.*l": 10,
    "{}/held.npy": None,
    "{}/splits": 10,  # its split validation
    "{}/held.jsonl --streaming": 10,
    "{}/held.jsonl --dataset {}/a.jsonl:0.7 {}/b.jsonl:0.3": 10,
    "{}/chats.jsonl --dataset {}/a-chats.jsonl --chat-template chatml": 10,
    "{}/alpaca.jsonl --dataset {}/a-chats.jsonl --chat-template chatml": 10,  # another layout
    "{}/held.jsonl --dataset {}/a-chats.jsonl --chat-template chatml": 10,
}


@pytest.mark.parametrize("more, documents", DATASETS.items())
def test_an_eval_dataset_of_its_own_is_taken_whole_and_nothing_else_is(flags, device, more, documents):
    found = loaded(flags(f"--eval-split {more}"))
    trains_on_all = loaded(flags(more.partition(" ")[2] + " --eval-interval 0"))
    (sequences,) = found.eval_sets.values()
    assert found.record.to_json() == trains_on_all.record.to_json()
    assert documents is None or len(sequences.tokens.doc_ends) == documents
    name = more.split()[0].removeprefix("{}/")
    assert re.search(f"/{re.escape(name)}.*, all of it", found.header["eval data"])


def test_eval_chats_need_no_document_mask_if_each_document_has_its_own_sequence(flags):
    found = loaded(flags("--eval-split {}/chats.jsonl --packing none --chat-template chatml"))
    assert len(found.eval_sets["chats"].tokens.doc_ends) == 10


def test_a_checkpoint_and_its_export_have_the_eval_loss_of_the_run(flags, folder, device, tmp_path, capfd):
    mixed = "--streaming --dataset {}/a.jsonl:0.7 {}/b.jsonl:0.3"
    assert train(flags(f"--eval-split {{}}/held.jsonl --export {tmp_path}/export {mixed}"), device) == 0
    wanted = eval_loss_of(tmp_path / "r")
    assert not any(name.startswith("eval_loss/") for line in metrics_of(tmp_path / "r") for name in line)
    export = f"--model {tmp_path}/export --init pretrained --sequence-length 16 --precision fp32"
    held = f"--eval-split {folder}/held.jsonl"
    for weights in (f"--resume {tmp_path}/r", f"--resume {tmp_path}/r {held}", f"{export} {held}"):
        capfd.readouterr()
        assert train(words(f"{EVALUATION} --cache-dir {folder}/cache {weights}"), device) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6)
        assert found["dataset"] == f"{folder}/held.jsonl"


def test_a_run_on_random_tokens_is_evaluated_on_a_text(folder, flags, device, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(files, "find_on_hub", lambda *_: pytest.fail("there is no data set named synthetic"))
    assert train(flags("--dataset synthetic --final-checkpoint --eval-interval 0"), device) == 0
    evaluation = words(f"{EVALUATION} --resume {tmp_path}/r --cache-dir {folder}/cache")
    for flag in ("--eval-split", "--dataset"):
        capfd.readouterr()
        assert train([*evaluation, flag, f"{folder}/held.jsonl"], device) == 0
        assert json.loads(capfd.readouterr().out)["dataset"] == f"{folder}/held.jsonl"
    assert train(evaluation, device) == 0  # on random tokens


def test_other_eval_data_at_a_resume_are_reported(flags, folder, device, tmp_path, capfd):
    assert train(flags("--eval-split {}/held.jsonl"), device) == 0
    resume = "--resume auto --num-steps 4 --eval-split"
    assert train(flags(f"{resume} {{}}/held.txt"), device) == 0  # the same texts
    assert "other eval data" not in capfd.readouterr().out
    assert train(flags(f"{resume.replace('4', '6')} {{}}/held.npy"), device) == 0
    assert "other eval data" in capfd.readouterr().out


REFUSED = {  # --eval-split and the flags beside it: the line
    "{}/none.jsonl": "--eval-split {}/none.jsonl: no such file or folder",
    "none.jsonl": "--eval-split none.jsonl: no such file or folder",
    "{}/model": "--eval-split {}/model: needs .arrow/",
    "{}/a.jsonl": "--eval-split {}/a.jsonl: {}/a.jsonl is in the training data too; take",
    "{}/a-copy.jsonl": "--eval-split {}/a-copy.jsonl: its tokens were trained on; give what was not",
    "{}/held.jsonl --dataset {}/*.jsonl": "--eval-split {}/held.jsonl: {}/held.jsonl is in the training data too",
    "{}/bad.txt": "--eval-split {}/bad.txt, ",
    "{}/held.jsonl --sequence-length 128 --eval-split {}/template.txt": "--eval-split {}/template.txt, split 'train'",
    "{}/chats.jsonl --chat-template chatml": "--eval-split {}/chats.jsonl: it would have a document mask",
    "train[90%:150%] --dataset-split train[:90%]": "--eval-split [90%:150%]: 150% is beyond the",
    "splits": "--eval-split splits: {}/a.jsonl has no such split, only train; give one of these",
}


@pytest.mark.parametrize("more, printed", REFUSED.items())
def test_what_cannot_be_an_eval_split_is_one_line(flags, folder, device, tmp_path, monkeypatch, more, printed):
    (folder / "template.txt").write_text("The fox.")
    shutil.copy(folder / "a.jsonl", folder / "a-copy.jsonl")
    (folder / "bad.txt").write_bytes(b"a \xff")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as raised:
        train(flags(f"--eval-split {more}"), device)
    assert str(raised.value).startswith(printed.replace("{}", str(folder))), str(raised.value)
    assert "\n" not in str(raised.value) and raised.value.exit_code in (1, 2)
    assert not list(tmp_path.rglob("metrics.jsonl"))
