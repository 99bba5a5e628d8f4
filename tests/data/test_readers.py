"""A corpus format is one file in `harness/data/readers`: all that reads, counts and names records finds it there."""

import gzip
import json
import shutil
import sys

import pytest
from conftest import ROOT, start
from harness.data.faults import name_fault
from transformers import AutoTokenizer

from harness.base.errors import UnreadableError, UserError
from harness.data import faults, formats
from harness.data.records import BadRecord

CSV_READER = '''
"""CSV files: a header, then a document a row, with its text in a column."""

import csv
import sys

from harness.data.records import check_value, choose_field, open_text

SUFFIXES = (".csv",)
PLACE = "row"
RECORDS = "rows"


def read(file, text_field, counts, batched=False):
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default
    with open_text(file, counts) as text:
        rows = csv.DictReader(text)
        if rows.fieldnames is None:  # an empty file
            return
        field = choose_field(file, rows.fieldnames, text_field)
        try:
            for number, row in enumerate(rows, 1):
                yield check_value(row[field], field, number)
        except csv.Error as error:
            raise ValueError(str(error)) from error
'''

READ_CORPORA = """
import json, sys
from transformers import AutoTokenizer
import utils
from harness.base.errors import UserError
from harness.data import corpora, streaming

tree, tokenizer = sys.argv[1], AutoTokenizer.from_pretrained("assets/demo")
assert utils.__file__.startswith(tree)


def read_cached(source):
    corpus = {"tokenizer": tokenizer, "seq_len": 4, "dataset": source, "text_field": "story"}
    return corpora.read_cached(utils.get_dataset, corpus, "train", cache_dir="cache")[0]


def read_streamed(source):
    return streaming.stream_dataset(tokenizer, 4, dataset=source, text_field="story").head(0)


for source in sys.argv[2:]:
    for read in (read_cached, read_streamed):
        try:
            answer = read(source).tokens.tolist()
        except UserError as error:
            answer = str(error)
        print(json.dumps(answer))
"""

HEADER = "number,story\n"
ROWS = '1,"A fox said ""hello"".\n\nThe end, he said."\n2,Tom had a red ball.\n'
STORIES = ['A fox said "hello".\n\nThe end, he said.', "Tom had a red ball."]


@pytest.mark.slow
def test_one_new_file_adds_a_format(tmp_path):
    """In a copy of the project: read beside another format, streamed, packed, and named where a record is bad."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "harness", tree / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "utils.py", tree)
    (tree / "assets").symlink_to(ROOT / "assets")
    (tree / "harness" / "data" / "readers" / "csv.py").write_text(CSV_READER)

    contents = {
        "mixed/a.csv": (HEADER + ROWS).encode(),
        "mixed/b.txt": b"The moon is round.",
        "mixed/empty.csv": b"",
        "packed.csv.gz": gzip.compress((HEADER + ROWS).encode()),
        "bad/a.csv": (HEADER + ROWS).encode(),
        "bad/b.csv": (HEADER + ROWS + "3\n" + ROWS).encode(),
        "encoding.csv": (HEADER + ROWS + "3,A café.\n").encode("windows-1252"),
        "no_column.csv": b"number,text\n1,A fox.\n",
        "none/list.tsv": b"no story",
    }
    for name, content in contents.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(content)

    sources = ["mixed", "packed.csv.gz", "bad", "encoding.csv", "no_column.csv", "none"]
    process = start([sys.executable, "-c", READ_CORPORA, str(tree), *sources], cwd=tree, PYTHONPATH=str(tree))
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    cached, streamed = dict(zip(sources, answers[::2], strict=True)), dict(zip(sources, answers[1::2], strict=True))
    assert streamed == cached

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    assert tokenizer.decode(cached["mixed"]).split(tokenizer.eos_token) == [*STORIES, "The moon is round.", ""]
    assert tokenizer.decode(cached["packed.csv.gz"]).split(tokenizer.eos_token) == [*STORIES, ""]
    skip = "or leave bad records out with --skip-bad-records"
    numbers = "1 of 5 rows are bad, 1 of 7 in all 2 files"
    assert cached["bad"] == f"--dataset bad/b.csv, row 3: null instead of text; {numbers}; mend them, {skip}"
    fault = "bytes that are not UTF-8, perhaps Windows-1252; 1 of 3 rows are bad; convert it: iconv"
    assert cached["encoding.csv"].startswith(f"--dataset encoding.csv, row 3: {fault}")
    fields = "(fields: number, text)"
    assert cached["no_column.csv"] == f"--text-field story: no such field in no_column.csv {fields}"
    assert "needs .arrow/.bin/.csv/.ds/.jsonl/.md/.npy/.npz/.parquet/.txt files" in cached["none"]


def test_a_suffix_has_one_reader():
    readers = set(formats.READERS.values())
    assert sorted(suffix for reader in readers for suffix in reader.SUFFIXES) == list(formats.DATA_SUFFIXES)


@pytest.mark.parametrize("name", ["a.JSONL", "a.jsonl.GZ", "data.bz2.txt.zst", "a.md"])
def test_a_data_file_is_one_by_its_last_suffix_packed_or_not(name):
    assert formats.reader_of(name)
    assert not formats.reader_of(f"{name}.gz.gz") and not formats.reader_of(f"{name}.csv")


def bad_line(file, number: int) -> UnreadableError:
    error = UnreadableError("a record has no text")
    error.file, error.record = file, BadRecord("null instead of text", number)
    return error


@pytest.mark.parametrize(
    "seconds, counted", [(60, "2 of 4 lines are bad, 3 of 6 in all 2 files"), (-1, "1 of the first 1 lines are bad")]
)
def test_counting_bad_records_ends_at_a_deadline_and_says_so(tmp_path, monkeypatch, seconds, counted):
    monkeypatch.setattr(faults, "COUNT_SECONDS", seconds)
    good, bad = '{"text": "A fox."}\n', '{"text": null}\n'
    (tmp_path / "a.jsonl").write_text(bad + good + bad + good)
    (tmp_path / "b.jsonl").write_text(good + bad)
    said = str(name_fault(bad_line(tmp_path / "a.jsonl", 1), str(tmp_path), "train"))
    place = f"--dataset {tmp_path / 'a.jsonl'}, line 1"
    assert said.startswith(f"{place}: null instead of text; {counted}; mend them, or leave")
    (tmp_path / "a.jsonl").write_text(good * 4)  # mended since
    said = str(name_fault(bad_line(tmp_path / "a.jsonl", 1), str(tmp_path), "train"))
    assert said.startswith(f"{place}: null instead of text; mend them, or leave")


def test_a_bad_record_is_named_though_another_file_cannot_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    said = str(name_fault(bad_line(tmp_path / "a.jsonl", 1), str(tmp_path), "train"))
    place = f"--dataset {tmp_path / 'a.jsonl'}, line 1"
    assert said.startswith(f"{place}: null instead of text; 1 of 1 lines are bad; mend")


@pytest.mark.parametrize("raised", [ValueError("the tokenizer failed"), OSError("the network is gone")])
def test_an_error_of_something_else_is_not_laid_on_a_bad_record(tmp_path, raised):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    fault = name_fault(raised, str(tmp_path), "train")
    assert isinstance(fault, UserError)
    assert str(fault) == f"--dataset {tmp_path}, split 'train': cannot be read ({raised})"
