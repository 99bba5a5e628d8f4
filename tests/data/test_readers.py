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
from collections import Counter
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


for source in sys.argv[2:]:
    for read in (read_cached, read_streamed):
        try:
            answer = read(source).tolist()
        except UserError as error:
            answer = str(error)
        print(json.dumps(answer))
"""

HEADER = "number,story\n"
ROWS = '1,"A fox said ""hello"".\n\nThe end, he said."\n2,Tom had a red ball.\n'
STORIES = ['A fox said "hello".\n\nThe end, he said.', "Tom had a red ball."]


@pytest.mark.slow
def test_one_new_file_adds_a_format(tmp_path, tokenizer):
    """In a copy of the project: read beside another format, streamed, packed, and named where a record is bad."""
    tree = copy_program(tmp_path / "tree")
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
    for source in sources:
        if isinstance(cached[source], list):  # a stream reads the files that cannot be cut last
            assert sorted(streamed[source]) == sorted(cached[source])
        else:
            assert streamed[source] == cached[source]
    assert tokenizer.decode(cached["mixed"]).split(tokenizer.eos_token) == [*STORIES, "The moon is round.", ""]
    assert tokenizer.decode(cached["packed.csv.gz"]).split(tokenizer.eos_token) == [*STORIES, ""]
    skip = "mend it, or leave bad records out with --skip-bad-records"
    assert cached["bad"] == f"--dataset bad/b.csv, row 3: null instead of text; {skip}"
    assert cached["encoding.csv"].startswith("--dataset encoding.csv: cannot be read ('utf-8' codec can't decode byte")
    fields = "(fields: number, text)"
    assert cached["no_column.csv"] == f"--text-field story: no such field in no_column.csv {fields}"
    assert "needs .bin/.csv/.ds/.jsonl/.md/.npy/.parquet/.txt files" in cached["none"]
