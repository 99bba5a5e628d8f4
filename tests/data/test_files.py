"""Which files a name of --dataset stands for, which split each is of, and what is left out."""

import contextlib
import dataclasses
import gzip
import os
import types

import datasets
import huggingface_hub.constants
import pytest
from conftest import parse
from corpora import write_records

from harness import base, data
from harness.base.errors import UserError
from harness.data import corpora, files
from harness.data.data_file import DataFile
from harness.data.formats import open_token_file

TEXT = "Once upon a time there was a fox."


def make(folder, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {TEXT}")
    return folder


def splits_of(folder) -> dict[str, list[str]]:
    found = files.find_files(str(folder))
    return {split: [file.name for file in of_split] for split, of_split in found.splits.items()}


FOLDERS = {
    "TinyStories": ["TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"],
    "nothing named": ["contest.txt", "development.txt", "latest.jsonl", "validated.txt", "trainer.txt", "Train.txt"],
    "each word": [
        *("train.txt", "a-training.txt", "validation.txt", "b.valid.txt", "my dev.txt", "val2.txt"),
        *("test_1.txt", "testing-01.txt", "eval.jsonl", "9evaluation.txt", "plain.txt"),
    ],
    "inside a name": ["my_train_file.txt", "unit-test.txt", "dev.to-articles.txt", "en.val.jsonl.gz"],
    "shards": ["train-00000-of-00002.txt", "train-00001-of-00002.txt", "validation-00000-of-00001.txt"],
    "shards in data": ["data/train-00000-of-00001.parquet", "data/validation-00000-of-00001-ab12.parquet", "test.txt"],
    "shards of other splits": ["data/train_sft-00000-of-00001.parquet", "data/test_gen-00000-of-00001.parquet"],
    "folders": ["train/a.txt", "train/sub/b.txt", "valid/c.txt", "data/d.txt"],
    "folders before files": ["my-train.1/valid.txt", "tests/a.txt", "x/test/b.txt", "validation.txt", "train.txt"],
    "words in folders": ["web_train/a.txt", "web_val/a.txt", "web_train_2/a.txt"],
    "files in folders": ["books/train.txt", "web/train.txt", "web/test.txt"],
}


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
def test_splits_are_those_that_datasets_finds(tmp_path, names):
    top = str(make(tmp_path / "train-corpus", *names))  # the folder's own name names no split
    expected: dict[str, list[str]] = {}
    for split, patterns in datasets.data_files.get_data_patterns(top).items():
        paths = set()
        for pattern in patterns:
            with contextlib.suppress(FileNotFoundError):
                paths |= {*datasets.data_files.resolve_pattern(pattern, top)}
        expected[str(split)] = sorted(paths)
    found = files.find_files(top).splits
    assert {split: sorted(file.path for file in of_split) for split, of_split in found.items()} == expected


def test_the_folders_of_a_saved_dataset_dict_are_its_splits(tmp_path):
    names = ["train_sft", "train_gen", "unlabelled.1", "test"]
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": [TEXT, name]}) for name in names})
    saved.save_to_disk(tmp_path)
    found = files.find_files(str(tmp_path)).splits
    assert {split: [file.path for file in of_split] for split, of_split in found.items()} == {
        name: [str(tmp_path / name / "data-00000-of-00001.arrow")] for name in names
    }


def test_what_is_not_trained_on_is_named_and_without_a_train_all_that_is_in_no_split_is(tmp_path):
    make(tmp_path / "b", "train-00000-of-00002.txt", "train-00001-of-00002.txt", "my.val.txt", "a-test.txt", "more.txt")
    printed = "2 of 5 (test: a-test.txt; validation: my.val.txt; left out: more.txt (not in a split))"
    assert files.find_files(str(tmp_path / "b")).describe("train") == printed
    assert splits_of(tmp_path / "b" / "my.val.txt") == {"train": ["my.val.txt"]}  # a single file is what is asked for
    make(tmp_path / "c", "x.txt", "validation.txt")
    assert splits_of(tmp_path / "c") == {"train": ["x.txt"], "validation": ["validation.txt"]}
    with pytest.raises(UserError, match=r"has no split 'test', only train, validation; give one of these,"):
        files.find_files(str(tmp_path / "c")).files_in_split("test")


NOT_TRAINED_ON = {  # files of which only the first is trained on: `datasets` finds no train split in them
    "a folder is a split": ["all.txt", "valid/a.txt", "test.txt", "my.val.txt"],
    "shards are a split": ["all.txt", "data/validation-00000-of-00001.txt", "test/a.txt", "dev.txt"],
}


@pytest.mark.parametrize("names", NOT_TRAINED_ON.values(), ids=NOT_TRAINED_ON)
def test_a_file_with_the_word_of_another_split_is_not_trained_on_whatever_decides_the_others(tmp_path, names):
    assert splits_of(make(tmp_path / "corpus", *names))["train"] == names[:1]


@pytest.mark.parametrize("name", ["train-test.txt", "val_of_train.txt", "train/dev/a.txt"])
def test_a_name_with_the_words_of_two_splits_is_refused(tmp_path, name):
    """`datasets` takes such a file for both."""
    make(tmp_path, name, "train.txt")
    with pytest.raises(UserError, match=f"the name {name} has keywords of two splits, train and .*; rename it"):
        files.find_files(str(tmp_path))


@pytest.mark.parametrize("name", ["stories/heldout/eval.txt", "stories/a-test.txt"])
def test_an_eval_dataset_of_its_own_is_its_test_split_if_it_has_no_validation(tmp_path, name):
    make(tmp_path, name)
    settings = parse(["--eval-split", tmp_path / "stories", "--eval-interval", "1"])
    (file,) = corpora.find_eval_dataset(settings).files
    assert file.path == str(tmp_path / name)


def test_what_is_no_data_is_left_out_by_name_and_hidden_files_are_not_looked_at(tmp_path):
    make(tmp_path, "a.txt", "NOTES.TXT", "README.md", "sub/c.unread", ".hidden.txt", ".cache/a.txt", "b.txt.gz")
    found = files.find_files(str(tmp_path))
    assert [file.name for file in found.splits["train"]] == ["NOTES.TXT", "a.txt", "b.txt.gz"]
    assert found.describe("train") == "3 of 5 (left out: README.md, sub/c.unread)"
    assert files.find_files(str(tmp_path / "README.md")).splits["train"]


def test_each_real_file_and_folder_is_read_once(tmp_path):
    data = make(tmp_path / "data", "a.txt", "sub/c.txt")
    (data / "loop").symlink_to(".")
    (data / "0").symlink_to("sub")
    (data / "0.txt").symlink_to("a.txt")
    os.mkfifo(data / "pipe.txt")
    found = files.find_files(str(data))
    assert [file.path for file in found.splits["train"]] == [str(data / "a.txt"), str(data / "sub/c.txt")]
    assert found.left_out == ["0.txt (the same as a.txt)", "pipe.txt (no regular file)"]


@pytest.mark.parametrize("folder", ["data", "data/sub"])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch, folder):
    data, unreadable, scandir = make(tmp_path / "data", "a.txt", "sub/b.txt"), str(tmp_path / folder), os.scandir

    def scan(path):
        if path == unreadable:  # whose permissions root does not need
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UserError, match=f"^--dataset {data}: cannot be read .*Permission denied: '{unreadable}'"):
        files.find_files(str(data))


@pytest.mark.parametrize("pattern", ["da[st]a/story-[0-9].txt", "**/story*", "data/../d*/*"])
def test_a_pattern_is_local_whatever_its_signs_are(tmp_path, monkeypatch, pattern):
    make(tmp_path / "data", "story-0.txt", "story-1.txt", "story-2.txt")
    monkeypatch.chdir(tmp_path)
    assert len(files.find_files(pattern).splits["train"]) == 3
    assert parse(["--dataset", pattern]).dataset_split == "train"


def test_a_folder_of_which_nothing_is_read_says_what_is_there(tmp_path):
    with pytest.raises(UserError, match=r"needs \.arrow/.*\.jsonl/.* files, .* there are no files"):
        files.find_files(str(tmp_path))
    make(tmp_path, "posts.csv", "list.xyz")
    for name in (tmp_path, tmp_path / "*"):
        with pytest.raises(UserError, match=r"there is only .*list\.xyz, .*posts\.csv; convert it"):
            files.find_files(str(name))


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path):
    for name, read in (
        ("a.txt", lambda file: file.open().close()),
        ("ab.bin", lambda file: open_token_file(file, 1536)),
    ):
        make(tmp_path, name)
        (file,) = files.find_files(str(tmp_path / name)).splits["train"]
        read(file)
        (tmp_path / name).write_text("Another text")
        with pytest.raises(UserError, match=f"{name}: it has changed since it was listed"):
            read(file)


# ----------------------------------------------------------------------------------------------------------------------
# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set of the hub whose files, as `datasets` resolves them, lie in a folder here."""
    texts = [f"Story {number} is about the number {number}." for number in range(100)]
    for number in range(2):
        write_records(tmp_path / f"train-{number}.parquet", texts[50 * number : 50 * number + 50], row_group_size=7)
    write_records(tmp_path / "validation.jsonl", [TEXT * 9])
    data_files = {
        "train": [str(tmp_path / "train-0.parquet"), str(tmp_path / "train-1.parquet")],
        "validation": [str(tmp_path / "validation.jsonl")],
    }
    builder = types.SimpleNamespace(config=types.SimpleNamespace(data_files=data_files))
    monkeypatch.setattr(base, "set_hub_offline_without_network", lambda name: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name, subset: builder)
    return texts


def test_the_files_of_a_hub_data_set_are_read_as_local_ones_and_of_a_slice_only_its_rows(hub, load, encoded):
    assert load("someone/stories").tokens[:].tolist() == encoded(hub[:5])  # the first 5 %
    assert load("someone/stories", split="train[40%:60%]").tokens[:].tolist() == encoded(hub[40:60])
    assert load("someone/stories", split="train").tokens[:].tolist() == encoded(hub)
    assert load("someone/stories", split="validation").tokens[:].tolist() == encoded([TEXT * 9])
    with pytest.raises(UserError, match="has no split 'test'"):
        load("someone/stories", split="test")


def test_the_rows_of_compressed_parquet_are_not_counted(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(write_records(tmp_path / "a.parquet", [TEXT]).read_bytes()))
    assert corpora.slice_rows([DataFile.from_path(str(tmp_path / "a.parquet.gz"))], ["0", "1"]) is None


def test_a_hub_data_set_that_cannot_be_had_is_one_line(monkeypatch, load):
    def refuse(name, subset):
        raise ConnectionError("no route") from OSError("Network is unreachable")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(UserError, match=r"nor available from the hub \(.*\); without a network use a local"):
        load("someone/stories")


@pytest.mark.parametrize("subset, is_own", [("a", True), ("b", False)])
def test_an_evaluation_of_another_subset_is_not_one_of_the_runs_own_data(tmp_path, monkeypatch, subset, is_own):
    def find_on_hub(dataset, subset):
        file = write_records(tmp_path / f"{subset}.jsonl", ["Tom ran."])
        return dataclasses.replace(files.find_files(str(file)), dataset=dataset, is_hub=True)

    monkeypatch.setattr(files, "find_on_hub", find_on_hub)
    run, evaluation = (
        parse(["--dataset", "someone/stories", "--dataset-split", "train", "--dataset-config", name])
        for name in ("a", subset)
    )
    found = corpora.Corpora([corpora.find_corpus(evaluation, source) for source in evaluation.sources()])
    assert data.evaluates_own_data(evaluation, found, {"flags": dataclasses.asdict(run)}) == is_own
