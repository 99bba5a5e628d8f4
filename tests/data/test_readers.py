"""A corpus format is one file in `harness/data/readers`: all that reads, counts and names records finds it there."""

import gzip
import sys

import pytest

from harness.base.errors import UserError
from harness.data import files, readers, stream
from harness.data.encode import TextFormat

CSV_READER = '''
"""CSV files: a header, then a document a row, with its text in a column."""

import csv
import io

from harness.data.records import check_value, choose_field

SUFFIXES = (".csv",)
PLACE = "row"


def read(stream, text_field):
    rows = csv.DictReader(io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline=""))
    if rows.fieldnames is None:  # an empty file
        return
    field = choose_field(rows.fieldnames, text_field)
    for row in rows:
        yield check_value(row[field], field)
'''
ROWS = 'number,story\n1,"A fox said ""hello"".\n\nThe end, he said."\n2,Tom had a red ball.\n'
STORIES = ['A fox said "hello".\n\nThe end, he said.', "Tom had a red ball."]


@pytest.fixture
def csv_reader(tmp_path, monkeypatch):
    """One more file in the folder of readers."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "csv.py").write_text(CSV_READER)
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, str(tmp_path / "more")])
    readers.all_readers.cache_clear()
    yield
    readers.all_readers.cache_clear()
    sys.modules.pop("harness.data.readers.csv")


@pytest.mark.usefixtures("csv_reader")
def test_one_new_file_adds_a_format(tmp_path, load, encoded, tokenizer):
    """Read beside another format, streamed, packed, and named where a record is bad."""
    contents = {
        "mixed/a.csv": ROWS.encode(),
        "mixed/b.txt": b"The moon is round.",
        "mixed/empty.csv": b"",
        "packed.csv.gz": gzip.compress(ROWS.encode()),
        "bad/a.csv": ROWS.encode() + b"3\n",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    def streamed(place):
        of_split = files.find_files(str(place)).of_split("train")
        return stream.Stream(of_split, TextFormat(tokenizer, 1536), "story", 4, 0).head(10**9)

    assert load(tmp_path / "mixed", text_field="story").tokens[:].tolist() == encoded([*STORIES, "The moon is round."])
    assert load(tmp_path / "packed.csv.gz", text_field="story").tokens[:].tolist() == encoded(STORIES)
    assert streamed(tmp_path / "mixed").tolist() == encoded(
        ["The moon is round.", *STORIES]
    )  # what can be cut is first
    assert streamed(tmp_path / "packed.csv.gz").tolist() == encoded(STORIES)
    for read in (lambda place: load(place, text_field="story"), streamed):
        with pytest.raises(UserError, match=r"bad/a\.csv, row 3: null instead of text; mend it, or leave bad records"):
            read(tmp_path / "bad")
