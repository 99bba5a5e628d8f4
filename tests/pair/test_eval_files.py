"""Held out by --eval-split as a place of its own: read whole in every format, never trained on, beside streams and
mixtures, by a checkpoint and by its export; and what is refused."""

import json
import shutil

import multirank
import numpy as np
import pytest
from conftest import ROOT, STORIES, metrics_of, parse, train, words, write_model

from harness import data, loop
from harness.base import UserError
from harness.data import files

CHAT = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
CHAT += "{% else %}{{ m.content }}{% endif %}{% endfor %}"


def chats(stories: list[str]) -> str:
    roles = ("user", "assistant")
    lines = []
    for story in stories:
        halves = story[:40], story[40:]
        messages = [{"role": role, "content": half} for role, half in zip(roles, halves, strict=True)]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts to train on and others to hold out, in every format."""
    folder = tmp_path_factory.mktemp("held")
    lines = (STORIES / "train.jsonl").read_text().splitlines(True)
    trained, held = lines[:60], lines[1000:1010]
    stories = [json.loads(line)["text"] for line in held]
    (folder / "a.jsonl").write_text("".join(trained))
    (folder / "b.jsonl").write_text("".join(lines[100:130]))
    (folder / "held.jsonl").write_text("".join(held))
    (folder / "held.txt").write_text("<|endoftext|>".join(stories))
    (folder / "a-chats.jsonl").write_text(chats([json.loads(line)["text"] for line in trained]))
    (folder / "chats.jsonl").write_text(chats(stories))
    np.save(folder / "held.npy", (np.arange(16 * 30 + 1) % 200).astype(np.uint16))
    for split, lines in (("train", trained[:1]), ("validation", held)):
        (folder / "splits" / split).mkdir(parents=True)
        (folder / "splits" / split / "x.jsonl").write_text("".join(lines))
    (folder / "template.jinja").write_text(CHAT)
    write_model(folder / "model", "llama", **multirank.SIZES)
    return folder


@pytest.fixture
def flags(folder, tmp_path):
    """`flags(more)`: those of a run of two steps on a.jsonl; {} is the folder of the texts."""
    small = "--num-steps 2 --batch-size 2 --sequence-length 16 --num-workers 0 --precision fp32 --no-own-plan"
    places = f"--model {folder}/model --tokenizer {ROOT}/assets/demo --cache-dir {folder}/cache --output-dir {tmp_path}"
    text = f"--dataset {folder}/a.jsonl --run-name r --eval-interval 2"
    return lambda more: words(f"{small} {places} {text} {more}".replace("{}", str(folder)))


def loaded(given: list):
    run = loop.open_run(parse(given))
    return data.load(run.settings, run.corpora, run.tokenizer, run.config)


def eval_loss(folder) -> float:
    return [line["eval_loss"] for line in metrics_of(folder) if "eval_loss" in line][-1]


PLACES = {  # --eval-split and what is beside it: its documents, None where they are not counted
    "{}/held.jsonl": 10,
    "{}/held.txt": 10,
    "{}/held.*l": 10,
    "{}/held.npy": None,
    "{}/splits": 10,  # its split validation
    "{}/held.jsonl --streaming": 10,
    "{}/held.jsonl --dataset {}/a.jsonl:0.7 {}/b.jsonl:0.3": 10,
    "{}/chats.jsonl --dataset {}/a-chats.jsonl --chat-template {}/template.jinja": 10,
    "{}/held.jsonl --dataset {}/a-chats.jsonl --chat-template {}/template.jinja": 10,
}


@pytest.mark.parametrize("more, documents", PLACES.items())
def test_an_eval_dataset_of_its_own_is_taken_whole_and_nothing_else_is(flags, device, more, documents):
    found = loaded(flags(f"--eval-split {more}"))
    trains_on_all = loaded(flags(more.partition(" ")[2] + " --eval-interval 0"))
    (sequences,) = found.eval_data.values()
    assert found.record.to_json() == trains_on_all.record.to_json()
    if documents:
        assert len(sequences.tokens.doc_ends) == documents
    place = more.split()[0].removeprefix("{}/")
    assert found.header["eval data"].partition(":")[0].rpartition("/")[2].startswith(place)
    assert "all of it" in found.header["eval data"]


@pytest.mark.parametrize("more", ["", "--streaming", "--dataset {}/a.jsonl:0.7 {}/b.jsonl:0.3"])
def test_a_checkpoint_and_its_export_have_the_loss_that_the_run_had_of_it(flags, folder, device, tmp_path, capfd, more):
    assert train(flags(f"--eval-split {{}}/held.jsonl --export {tmp_path}/export {more}"), device) == 0
    wanted = eval_loss(tmp_path / "r")
    assert not any(name.startswith("eval_loss/") for line in metrics_of(tmp_path / "r") for name in line)
    alone = ["--num-steps", "0", "--eval-interval", "1", "--json", "--cache-dir", str(folder / "cache")]
    of_run = ["--resume", str(tmp_path / "r")]
    of_export = ["--model", f"{tmp_path}/export", "--init", "pretrained", "--sequence-length", "16"]
    held = ["--eval-split", f"{folder}/held.jsonl"]
    for again in (of_run, [*of_run, *held], [*of_export, *held, "--precision", "fp32"]):
        capfd.readouterr()
        assert train([*alone, *again], device) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6)
        assert found["dataset"] == f"{folder}/held.jsonl"


def test_eval_chats_need_no_choice_of_a_document_mask_with_a_document_per_sequence(flags):
    found = loaded(flags("--eval-split {}/chats.jsonl --packing none --chat-template {}/template.jinja"))
    assert len(found.eval_data["chats"].tokens.doc_ends) == 10


def test_eval_chats_may_have_another_layout_which_is_reported(flags, folder, device, capfd):
    lines = (json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines())
    alpaca = [{"instruction": user["content"], "output": answer["content"]} for user, answer in lines]
    (folder / "alpaca.jsonl").write_text("\n".join(map(json.dumps, alpaca)))
    chat = "--dataset {}/a-chats.jsonl --chat-template {}/template.jinja --eval-split"
    found = [loaded(flags(f"{chat} {{}}/{name}.jsonl")).eval_identity for name in ("chats", "alpaca")]
    assert [*found[0].values()] == [*found[1].values()]  # the same tokens and masks
    assert f"{folder}/alpaca.jsonl: instruction, input and output, as Alpaca" in capfd.readouterr().out


def test_a_run_on_random_tokens_is_evaluated_on_a_text(folder, flags, device, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(files, "find_on_hub", lambda *_: pytest.fail("there is no data set named synthetic"))
    given = flags("--dataset synthetic --final-checkpoint --eval-interval 0")
    assert train(given, device) == 0
    run = ["--num-steps", "0", "--eval-interval", "1", "--json", "--resume", str(tmp_path / "r")]
    for other in ("--eval-split", "--dataset"):
        capfd.readouterr()
        assert train([*run, other, f"{folder}/held.jsonl", "--cache-dir", f"{folder}/cache"], device) == 0
        assert json.loads(capfd.readouterr().out)["dataset"] == f"{folder}/held.jsonl"
    assert train(run, device) == 0  # on random tokens


def test_other_eval_data_at_a_resume_are_reported(flags, folder, device, tmp_path, capfd):
    assert train(flags("--eval-split {}/held.jsonl"), device) == 0
    resume = "--resume auto --num-steps 4 --eval-split"
    assert train(flags(f"{resume} {{}}/held.txt"), device) == 0  # the same texts
    assert "other eval data" not in capfd.readouterr().out
    assert train(flags(f"{resume.replace('4', '6')} {{}}/held.npy"), device) == 0
    assert "other eval data" in capfd.readouterr().out


REFUSED = {  # --eval-split and what is beside it: the line
    "{}/none.jsonl": "--eval-split {}/none.jsonl: no such file or folder",
    "none.jsonl": "--eval-split none.jsonl: no such file or folder",
    "{}/model": "--eval-split {}/model: needs .arrow/",
    "{}/a.jsonl": "--eval-split {}/a.jsonl: {}/a.jsonl is in the training data too; take",
    "{}/a-copy.jsonl": "--eval-split {}/a-copy.jsonl: its tokens were trained on; give what was not",
    "{}/a.txt": "--eval-split {}/a.txt: its tokens were trained on; give what was not",
    "{}/held.jsonl --dataset {}/*.jsonl": "--eval-split {}/held.jsonl: {}/held.jsonl is in the training data too",
    "{}/bad.txt": "--eval-split {}/bad.txt, ",
    "{}/held.jsonl --sequence-length 128 --eval-split {}/template.txt": "--eval-split {}/template.txt, split 'train'",
    "{}/chats.jsonl --chat-template {}/template.jinja": "--eval-split {}/chats.jsonl: it would have a document mask",
    "splits": "--dataset {}/a.jsonl, split 'splits': there is none; there is train",
}


@pytest.mark.parametrize("more, printed", REFUSED.items())
def test_what_cannot_be_an_eval_split_is_one_line(flags, folder, device, tmp_path, monkeypatch, more, printed):
    (folder / "template.txt").write_text("The fox.")
    shutil.copy(folder / "a.jsonl", folder / "a-copy.jsonl")
    stories = map(json.loads, (folder / "a.jsonl").read_text().splitlines())
    (folder / "a.txt").write_text("<|endoftext|>".join(story["text"] for story in stories))
    (folder / "bad.txt").write_bytes(b"a \xff")
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as raised:
        train(flags(f"--eval-split {more}"), device)
    assert str(raised.value).startswith(printed.replace("{}", str(folder))), str(raised.value)
    assert "\n" not in str(raised.value) and raised.value.exit_code in (1, 2)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_what_a_run_trained_on_is_not_evaluated_by_name(flags, folder, device, tmp_path):
    assert train(flags("--eval-split {}/held.jsonl"), device) == 0
    (tmp_path / "link.jsonl").symlink_to(folder / "a.jsonl")
    run = ["--num-steps", "0", "--eval-interval", "1", "--resume", str(tmp_path / "r")]
    with pytest.raises(UserError, match=r"link\.jsonl: .* is in the training data too; "):
        train([*run, "--eval-split", str(tmp_path / "link.jsonl")], device)
