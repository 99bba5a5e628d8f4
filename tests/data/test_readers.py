"""A corpus format is one file in `harness/data/readers`: all that reads, counts and names records finds it there."""

import gzip
import json
import sys

import pytest
from conftest import copy_program, start

CSV_READER = '''
"""CSV files: a header, then a document a row, with its text in a column."""

import csv
import io
import sys

from harness.data.records import check_value, choose_field

SUFFIXES = (".csv",)
PLACE = "row"


def read(stream, text_field):
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default
    rows = csv.DictReader(io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline=""))
    if rows.fieldnames is None:  # an empty file
        return
    field = choose_field(rows.fieldnames, text_field)
    try:
        for row in rows:
            yield check_value(row[field], field)
    except csv.Error as error:
        raise ValueError(str(error)) from error
'''

READ_CORPORA = """
import json, sys
from transformers import AutoTokenizer
import utils
from harness.base.errors import UserError
from harness.data import files, stream, encode

tree, tokenizer = sys.argv[1], AutoTokenizer.from_pretrained("assets/demo")
assert utils.__file__.startswith(tree)


def read_cached(source):
    return utils.get_dataset(tokenizer, 4, dataset=source, text_field="story", cache_dir="cache").tokens[:]


def read_streamed(source):
    of_split = files.find_files(source).of_split("train")
    return stream.Stream(of_split, encode.TextFormat(tokenizer, len(tokenizer)), "story", 4, 0).head(10**9)


for source in ("mixed", "packed.csv.gz", "bad"):
    for read in (read_cached, read_streamed):
        try:
            answer = tokenizer.decode(read(source))
        except UserError as error:
            answer = str(error)
        print(json.dumps(answer))
"""

ROWS = 'number,story\n1,"A fox said ""hello"".\n\nThe end, he said."\n2,Tom had a red ball.\n'
STORIES = ['A fox said "hello".\n\nThe end, he said.', "Tom had a red ball."]


@pytest.mark.slow
def test_one_new_file_adds_a_format(tmp_path):
    """In a copy of the project: read beside another format, streamed, packed, and named where a record is bad."""
    tree = copy_program(tmp_path / "tree")
    (tree / "harness" / "data" / "readers" / "csv.py").write_text(CSV_READER)
    contents = {
        "mixed/a.csv": ROWS.encode(),
        "mixed/b.txt": b"The moon is round.",
        "mixed/empty.csv": b"",
        "packed.csv.gz": gzip.compress(ROWS.encode()),
        "bad/a.csv": ROWS.encode() + b"3\n",
    }
    for name, content in contents.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(content)
    process = start([sys.executable, "-c", READ_CORPORA, str(tree)], cwd=tree, PYTHONPATH=str(tree))
    assert process.returncode == 0, process.stderr
    mixed, mixed_streamed, packed, packed_streamed, *bad = map(json.loads, process.stdout.splitlines())
    assert mixed.split("<|endoftext|>") == [*STORIES, "The moon is round.", ""]
    assert sorted(mixed_streamed.split("<|endoftext|>")) == sorted(mixed.split("<|endoftext|>"))  # cut files come first
    assert packed == packed_streamed == "".join(f"{story}<|endoftext|>" for story in STORIES)
    skip = "mend it, or leave bad records out with --skip-bad-records"
    assert bad == 2 * [f"--dataset bad/a.csv, row 3: null instead of text; {skip}"]
