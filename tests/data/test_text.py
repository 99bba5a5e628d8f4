"""Text becomes windows of tokens: nothing is lost, nothing comes twice, and no start tokenizes what one did before."""

import bz2
import gc
import gzip
import itertools
import json
import os
import pathlib
import re
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT
from transformers import AutoTokenizer

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.formats import json as json_reader
from harness.data.formats import read_records
from harness.data.formats.parquet import row_group_parts
from harness.data.schema import DOCUMENT_MARK, read_documents
from harness.data.tokenize import TextEncoder

END = 0  # end-of-text of the demo tokenizer
TEXTS = ["Once upon a time there was a fox.", "The end.", "Tom had a red ball.\nHe liked it.", "A", "Ünïcödé 狐狸"]
FORTY = [f"Story {number} is about the number {number}." for number in range(40)]


def write_parquet(path: pathlib.Path, **columns) -> pathlib.Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def tokens_of(packed) -> list[int]:
    return packed.tokens[:].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Formats


@pytest.mark.parametrize("between", ["<|endoftext|>", "<|endoftext|>\n<|endoftext|>\n"])
def test_marks_divide_a_text_file_into_documents(load, encoded, tmp_path, between):
    (tmp_path / "data.txt").write_text(between.join(TEXTS) + between)
    assert tokens_of(load(tmp_path / "data.txt")) == encoded(TEXTS)


def test_a_text_that_ends_with_the_end_of_text_token_gets_no_other_as_in_trl(load, write_jsonl, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", eos_token="!")
    packed = load(write_jsonl(tmp_path / "data.jsonl", ["A fox!", "A ball", "So! it is!"]), 2, with_tokenizer=tokenizer)
    texts = ["A fox!", "A ball!", "So! it is!"]
    assert tokens_of(packed) == [token for text in texts for token in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_the_text_is_in_the_field_that_is_named_and_wins_over_token_ids(load, encoded, tmp_path, name, write_jsonl):
    records = [{"input_ids": [5, 6, END], "story": text} for text in TEXTS]
    if name.endswith("parquet"):
        write_parquet(tmp_path / name, **{key: [record[key] for record in records] for key in records[0]})
    else:
        write_jsonl(tmp_path / name, [json.dumps(record).encode() for record in records])
    assert tokens_of(load(tmp_path / name)) == [5, 6, END] * len(TEXTS)
    for field in ("story", ("other", "story", "input_ids")):
        assert tokens_of(load(tmp_path / name, text_field=field)) == encoded(TEXTS)
    with pytest.raises(UserError, match=r"no field .?text"):
        load(tmp_path / name, text_field="text")


def test_packed_and_mixed_files_are_read_as_they_are_unpacked(load, encoded, write_jsonl, tmp_path):
    lines = write_jsonl(tmp_path / "lines", TEXTS).read_bytes()
    half = lines.index(b"\n") + 1
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    with pyarrow.output_stream(data / "2.txt.zst", compression="zstd") as file:
        file.write(DOCUMENT_MARK.join(TEXTS).encode())
    (data / "3.md").write_text("# A title\n\nA story.\n")
    write_parquet(data / "4.parquet", text=TEXTS)
    (data / "5.Jsonl.BZ2").write_bytes(bz2.compress(lines))
    assert tokens_of(load(data)) == encoded([*TEXTS, *TEXTS, "# A title\n\nA story.", *TEXTS, *TEXTS])
    assert tokens_of(load(data / "[13].*")) == encoded([*TEXTS, "# A title\n\nA story."])


@pytest.mark.parametrize("suffix, pack", [("gz", gzip.compress), ("bz2", bz2.compress)])
def test_zeros_behind_a_packed_file_are_no_part_of_it_as_for_the_tools(
    load, encoded, write_jsonl, tmp_path, suffix, pack
):
    lines = write_jsonl(tmp_path / "lines", TEXTS).read_bytes()
    (tmp_path / f"data.jsonl.{suffix}").write_bytes(pack(lines) + pack(lines) + bytes(512))
    assert tokens_of(load(tmp_path / f"data.jsonl.{suffix}")) == encoded([*TEXTS, *TEXTS])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".txt", ".md"])
def test_an_empty_file_in_a_folder_is_one_without_documents(load, encoded, write_jsonl, tmp_path, suffix):
    data = write_jsonl(tmp_path / "data" / "b.jsonl", TEXTS).parent
    (data / f"a{suffix}").touch()
    (data / f"c{suffix}").touch()
    assert tokens_of(load(data)) == encoded(TEXTS)
    (data / "b.jsonl").unlink()
    with pytest.raises(UserError, match="it holds no text"):
        load(data)


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_a_byte_order_mark_and_windows_line_ends_change_no_token(load, write_jsonl, tmp_path, name):
    plain = "\n".join(TEXTS) if name.endswith("txt") else write_jsonl(tmp_path / name, TEXTS).read_text()
    (tmp_path / name).write_text(plain)
    expected = tokens_of(load(tmp_path / name))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode())
    assert tokens_of(load(tmp_path / "other" / name)) == expected


@pytest.mark.parametrize("content", ["[A, B]\n[C]", "[A] [B, C]", "A [B]\nC", "[A][][B, C]\n", "A\nB\nC", "[A, B, C]"])
def test_records_and_lists_of_records_follow_each_other_in_json(load, encoded, tmp_path, monkeypatch, content):
    monkeypatch.setattr(json_reader, "READ_BYTES", 7)
    for letter in "ABC":
        content = content.replace(letter, json.dumps({"text": f"Tom {letter.lower()}"}))
    (tmp_path / "data.json").write_text(content)
    assert tokens_of(load(tmp_path / "data.json")) == encoded(["Tom a", "Tom b", "Tom c"])


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read_by_its_byte_order_mark(load, encoded, tmp_path, encoding):
    text = f"\ufeff{TEXTS[0]}\r\nThe dünes 🌊.{DOCUMENT_MARK}{TEXTS[1]}\n"
    (tmp_path / "data.txt").write_bytes(text.encode(encoding))
    assert tokens_of(load(tmp_path / "data.txt")) == encoded([f"{TEXTS[0]}\nThe dünes 🌊.", TEXTS[1]])


def test_a_bad_byte_of_a_text_costs_its_line_and_a_pdf_is_left_out(load, line_of, encoded, tmp_path):
    novel = b"Call me Ishmael.\nSome y\xe9ars ago.\nHaving little money.\n\0\0\nIt is a way \xef\xbf\xbd."
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_bytes(novel + DOCUMENT_MARK.encode() + b"Another \xef\xbf\xbd.")
    (tmp_path / "data" / "b.txt").write_bytes(b"%PDF-1.7\nText.\n")
    kept = ["Call me Ishmael.\nHaving little money.\nIt is a way \ufffd.", "Another \ufffd."]
    assert tokens_of(load(tmp_path / "data", skip_bad_records=True)) == encoded(kept)
    assert line_of(tmp_path / "data", skip_bad_records=True).endswith(", left out: bad records 3")


def test_a_record_without_token_ids_is_an_empty_document_in_json_and_parquet(load, tmp_path):
    rows = [[5, 6, 7], [], [8, 9]]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    for file in (tmp_path / "data.jsonl", write_parquet(tmp_path / "data.parquet", tokens=rows)):
        assert tokens_of(load(file, text_field="tokens")) == [5, 6, 7, 8, 9]


SLICES = {  # of 6 documents, 3 of them short: the same slice with other bounds, or what is wrong with it
    "[-5%:]": "[95%:]",
    "[:-5%]": "[:95%]",
    "[-50%:]": "[50%:]",
    "[-2:]": "[4:]",
    "[-5:-3]": "[1:3]",
    "[4:1]": r"split \[4:1\]: it ends before it begins; give other bounds",
    "[-3:2]": "it ends before it begins",
    "[60%:40%]": "it ends before it begins",
    "[5%:50%]": "it ends before it begins in these 6 documents",
    "[7:]": "7 is beyond the 6 documents",
    "[:-7]": "-7 is beyond the 6 documents",
    "[:101%]": "101% is beyond the 6 documents",
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_counted_from_the_end_is_that_from_the_beginning_and_an_impossible_one_is_refused(
    load, write_jsonl, tmp_path, name
):
    file = write_jsonl(tmp_path / "data.jsonl", ["A red ball."] * 3 + [f"{number} " * 400 for number in range(3)])
    wanted = SLICES[name]
    if wanted.startswith("["):
        assert tokens_of(load(file, split=f"train{name}")) == tokens_of(load(file, split=f"train{wanted}"))
    else:
        with pytest.raises(UserError, match=wanted):
            load(file, split=f"train{name}")


EMPTY = {"": [], "\n": ["\n"], " ": [" "], DOCUMENT_MARK: [], f"\n{DOCUMENT_MARK}\n": [], f"a{DOCUMENT_MARK}\n": ["a"]}


@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_document_is_one_that_is_left_out(text):
    counts = Counter()
    assert list(read_documents(iter([("line 1", text)]), 10, False, counts)) == EMPTY[text]
    assert counts["empty documents"] == (not EMPTY[text])


LONG = ["Tom", "düne 🌊", "ж" * 9, "two\nlines", "long " * 60, "end", "x"]
CUTTABLE = {
    "no last newline.jsonl": "\n\r\n".join(json.dumps({"text": text}) for text in LONG).encode(),
    "a mark of UTF-8.jsonl": b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
    "nearly marks.txt": b"<|endoftext|" + DOCUMENT_MARK.join(LONG).encode() + b"<|endoftext|<|endoftext|>a<|endoftext",
    "one document.md": b"only one\n" * 30,
    "utf-16.txt": DOCUMENT_MARK.join(LONG).encode("utf-16"),
}


@pytest.mark.parametrize("name", [*CUTTABLE, "rows.parquet"])
def test_each_document_of_a_file_is_in_exactly_one_part_wherever_it_is_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr("harness.data.formats.text.READ_BYTES", 7)
    monkeypatch.setattr("harness.data.formats.text.FIRST_TAIL", 5)
    if name == "rows.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": LONG * 9}), tmp_path / name, row_group_size=7)
    else:
        (tmp_path / name).write_bytes(CUTTABLE[name])
    (file,) = find_files(str(tmp_path / name)).splits["train"]

    def documents(start: int, end: int | None) -> list[str]:
        return list(read_documents(read_records(file, "text", start, end), 2**16, False, Counter()))

    whole = documents(0, None)
    assert whole
    for parts in (1, 2, 7, 50, min(file.size, 900)):
        borders = [file.size * number // parts for number in range(parts + 1)]
        found = [documents(first, end) for first, end in itertools.pairwise(borders) if first < end]
        assert list(itertools.chain(*found)) == whole


def test_parts_of_a_parquet_file_are_its_row_groups_end_to_end(tmp_path):
    texts = [f"{number} {'x' * 9000}" for number in range(60)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table, tmp_path / "a.parquet", row_group_size=7, compression="none", use_dictionary=False
    )
    (file,) = find_files(str(tmp_path)).splits["train"]
    parts = row_group_parts(file)
    assert parts[0][0] == 0 and parts[-1][1] == file.size
    found = [[text for _, text in read_records(file, "text", *part)] for part in parts]
    assert found == [texts[first : first + 7] for first in range(0, 60, 7)]
    both = [text for _, text in read_records(file, "text", parts[2][0], parts[3][1])]
    assert both == texts[14:28]
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (file,) = find_files(str(tmp_path)).splits["train"]
    with pytest.raises(UserError, match=r"a.parquet: cannot be read"):
        row_group_parts(file)


# ----------------------------------------------------------------------------------------------------------------------
# Slices


@pytest.mark.parametrize("first, second, cut", [("[:75%]", "[75%:]", 30), ("[:-2]", "[-2:]", 38), ("[:5]", "[5:]", 5)])
def test_slices_of_a_split_are_cut_at_documents_and_together_the_whole(load, encoded, tmp_path, first, second, cut):
    (tmp_path / "data.txt").write_text(DOCUMENT_MARK.join(FORTY))
    found = [tokens_of(load(tmp_path / "data.txt", split=f"train{part}")) for part in (first, second)]
    assert found == [encoded(FORTY[:cut]), encoded(FORTY[cut:])]


def test_percentages_of_too_few_documents_cut_tokens(load, write_jsonl, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", ["Tom had a red ball. " * 50])
    whole, first, second = (tokens_of(load(file, split=f"train{cut}")) for cut in ("", "[:95%]", "[95%:]"))
    assert len(first) == len(whole) * 95 // 100 and first + second == whole


@pytest.mark.parametrize("bound", ["[:41]", "[:101%]"])
def test_a_bound_beyond_the_documents_is_refused(load, write_jsonl, tmp_path, bound):
    with pytest.raises(UserError, match="beyond the 40 documents"):
        load(write_jsonl(tmp_path / "data.jsonl", FORTY), split=f"train{bound}")


# ----------------------------------------------------------------------------------------------------------------------
# The token cache


def caches(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "cache").glob("*.bin"))


def test_a_changed_file_or_vocabulary_makes_another_cache_and_a_slice_does_not(load, encoded, write_jsonl, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    load(file)
    load(file, split="train[:60%]")
    assert len(caches(tmp_path)) == 1
    load(file, vocab_size=100_000)
    write_jsonl(tmp_path / "data.jsonl", TEXTS[::-1])  # as long as before
    os.utime(file, ns=(1, 1))
    assert tokens_of(load(file)) == encoded(TEXTS[::-1])
    assert [path.stat().st_size // len(encoded(TEXTS)) for path in caches(tmp_path)].count(4) == 1
    assert len(caches(tmp_path)) == 3


def test_a_slow_tokenizer_with_another_argument_or_class_makes_another_cache():
    def identity(name: str = "Words", **arguments) -> list:
        fake = type(name, (), {"is_fast": False, "eos_token_id": END, "split_special_tokens": False})()
        fake.init_kwargs, fake.get_vocab = arguments, lambda: {"a": 1}
        return TextEncoder(fake, 2).identity()

    assert identity(lower=True) == identity(lower=True)
    assert identity(lower=True) != identity(lower=False) != identity("Letters", lower=False)


DAMAGES = {
    "cut": lambda path: os.truncate(path.with_suffix(".bin"), 2),
    "without a record": lambda path: path.with_suffix(".json").unlink(),
    "record of another shape": lambda path: path.with_suffix(".json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_token_cache_is_made_again_and_said(load, line_of, write_jsonl, tmp_path, damage):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first = tokens_of(load(file))
    DAMAGES[damage](caches(tmp_path)[0])
    assert line_of(file).startswith("tokenized ") and tokens_of(load(file)) == first
    assert line_of(file).startswith("cached in ")


def test_a_cache_folder_that_cannot_be_made_is_named(load, write_jsonl, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="--cache-dir"):
        load(write_jsonl(tmp_path / "data.jsonl", TEXTS))


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes

GOOD = b'{"text": "Once upon a time there was a fox who had a red ball and liked it."}\n'
UNUSABLE = [  # file, content, what the error says after the file's name
    ("data.jsonl", b'{"text": ""}\n', ": it holds no text"),
    ("data.jsonl", b'{"text": "A"}\n', "too few for one sequence of --sequence-length"),
    ("data.parquet", b"no parquet", ": cannot be read (Parquet"),
    ("data.jsonl.gz", gzip.compress(b'{"text": "A fox."}\n' * 99, mtime=0)[:-9], ": cannot be read ("),
    ("data.jsonl.gz", gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 99, ": cannot be read ("),
    ("data.jsonl.gz", GOOD, ": cannot be read ("),
    ("data.jsonl.bz2", bz2.compress(GOOD * 99)[:-9], ": cannot be read ("),
    ("data.jsonl.bz2", GOOD, ": cannot be read ("),
    ("data.jsonl", GOOD + b'{"story": "A fox."}\n', ', line 2: no field \'text\' in {"story": "A fox."}; name it'),
    ("data.jsonl", GOOD + b'\n{"text": "A fo', ", line 3: broken JSON, Unterminated string"),
    ("data.jsonl", GOOD * 5000 + b'{"text": "A", }\n' + GOOD, ", line 5,001: broken JSON"),
    ("data.jsonl", b'{"text": null}\n' + GOOD, ", line 1: null instead of text; fix it, or leave bad records out"),
    ("data.jsonl", GOOD + b'{"text": "caf\xe9"}\n', ", line 2: byte 91 of the file: 0xe9 is not UTF-8"),
    ("data.jsonl", b"\xff\xfe" + GOOD.decode().encode("utf-16-le"), ", line 1: UTF-16, not UTF-8; fix it"),
    ("data.jsonl", gzip.compress(GOOD, mtime=0), ", line 1: gzip data, whose name ends in .gz; fix it"),
    ("data.jsonl", GOOD + b'{"text": "a\\ud800b"}\n', ', line 2: "a\\ud800b" with half a surrogate pair'),
    ("data.jsonl", GOOD + b"[" * 100_000, ", line 2: broken JSON"),
    ("data.jsonl", GOOD + b'{"input_ids": [1, -2]}\n', ", line 2: [1, -2] instead of token ids"),
    ("data.jsonl", GOOD + b'{"input_ids": [1, 1899]}\n', ", line 2: token id 1899, the model has 1,536"),
    ("data.json", b'[{"text": "A fox."}] and more', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}]]', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}],\n[{"text": "A ball."}]', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}]\n[{"text": "A ball."}', ": cannot be read (broken JSON after 2 records"),
    ("data.json", b'[{"text": "A fox."}]\n7', ", record 2: no field 'text' in 7; name it"),
    ("data.arrow", b"no arrow", ": cannot be read ("),
    ("data.txt", b"A fox.<|endoftext|>\0\n", ", document 2: line 1, byte 19 of the file: a NUL byte"),
    ("data.txt", b"\xef\xbb\xbfA fox\nin a caf\xe9\n", ", document 1: line 2, byte 17 of the file: 0xe9 is not UTF-8"),
    ("data.md", b"\xff\xfeA\0\n\0\0\xd8B\0", ", document 1: line 2, byte 6 of the file: 0x00 is not UTF-16 (iconv"),
    ("data.txt", b"%PDF-1.7\nall of it ASCII", ", document 1: a PDF, not text; fix it"),
    ("data.txt", b"PK\3\4\x14\0", ", document 1: a ZIP archive (.docx, .epub, .odt), not text; fix it"),
    ("data.txt", gzip.compress(b"A fox.", mtime=0), ", document 1: gzip data, whose name ends in .gz; fix it"),
    ("data.parquet", {"text": ["A fox.", None]}, ", row 2: null instead of text"),
    ("data.parquet", {"input_ids": [[1, 2], [3, None]]}, ", row 2: [3, null] instead of token ids"),
    ("data.parquet", {"input_ids": [[1, 2], [3, 1536]]}, ", row 2: token id 1536, the model has 1,536"),
    ("data.parquet", {"input_ids": [[1, 2], [3, 2**40]]}, ", row 2: [3, 1099511627776] instead of token ids"),
]


@pytest.fixture
def collected():
    """Garbage is collected before, not within: a generator that is closed where JSON has used up the stack would raise
    a RecursionError that is nobody's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("name, content, says", UNUSABLE)
def test_data_that_cannot_be_used_is_named(load, tmp_path, name, content, says):
    file = tmp_path / name
    if isinstance(content, dict):
        write_parquet(file, **content)
    else:
        file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load(file, 16)
    message = str(raised.value)
    assert message.startswith(f"--dataset {file}") and says in message.removeprefix(f"--dataset {file}")
    assert "\n" not in message and raised.value.exit_code == 2
    is_bad_record = re.search("(line|row|document|record) [0-9,]+: ", message) and "token id 1" not in message
    assert ("--skip-bad-records" in message) == bool(is_bad_record)


def test_a_parquet_file_with_a_damaged_page_is_named(load, tmp_path):
    file = write_parquet(tmp_path / "data.parquet", text=[f"Story {n}." for n in range(3000)])
    content = bytearray(file.read_bytes())
    content[2000:2100] = bytes(100)
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"--dataset {file}"):
        load(file)


@pytest.mark.parametrize(
    "bad", [content for _, content, says in UNUSABLE if ", line 2: " in says and b"1899" not in content]
)
def test_bad_records_are_left_out_and_counted_if_asked(load, line_of, encoded, write_jsonl, tmp_path, bad):
    lines = bad.removeprefix(GOOD).splitlines()
    text = json.loads(GOOD)["text"]
    file = write_jsonl(tmp_path / "data.jsonl", [text, *lines, "", text])
    for begins in ("tokenized 2 documents in ", "cached in "):
        line = line_of(file, skip_bad_records=True)
        assert line.startswith(begins)
        assert line.endswith(f", left out: empty documents 1, bad records {len(lines)}")
        assert tokens_of(load(file, skip_bad_records=True)) == encoded([text, text])
    with pytest.raises(UserError, match="line 2"):  # a cache without them is none for a run that wants all
        load(file)


def test_a_tokenizer_without_an_end_of_text_or_with_too_many_ids_is_refused(load, write_jsonl, tmp_path):
    bare = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", eos_token=None)
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"--tokenizer .*end-of-text"):
        load(file, with_tokenizer=bare)
    with pytest.raises(UserError, match="--tokenizer: it gave token id"):
        load(file, vocab_size=100)
