"""Text becomes sequences of tokens: nothing is lost or doubled, and no start tokenizes what one did before."""

import bz2
import gc
import gzip
import io
import itertools
import json
import os
import pathlib
import re
from collections import Counter
from unittest import mock

import filelock
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from corpora import END, demo_tokenizer, says, write_records

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.formats import json as json_reader
from harness.data.formats import read_records
from harness.data.prompts import read_prompt
from harness.data.schema import DOC_SEPARATOR, find_document, read_documents
from harness.data.tokenize import TextEncoder

TEXTS = ["Once upon a time there was a fox.", "The end.", "Tom had a red ball.\nHe liked it.", "A", "Ünïcödé 狐狸 🌊"]


def tokens_of(sequences) -> list[int]:
    return sequences.tokens[:].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Formats


LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
MARKED, IN_TWO = DOC_SEPARATOR.join(TEXTS), (LINES[:90].encode(), LINES[90:].encode())


def zstd_of(write) -> bytes:
    """A table of TEXTS that `write` writes, compressed."""
    file = io.BytesIO()
    write(pyarrow.table({"text": TEXTS}), file)
    return pyarrow.compress(file.getvalue(), codec="zstd", asbytes=True)


SAME = {  # a file, its content: all hold TEXTS
    "a mark at the end": ("data.txt", (MARKED + DOC_SEPARATOR).encode()),
    "marks in lines of their own": ("data.txt", MARKED.replace(DOC_SEPARATOR, f"{DOC_SEPARATOR}\n" * 2).encode()),
    "a byte order mark and CRLF": ("data.txt", b"\xef\xbb\xbf" + MARKED.replace("\n", "\r\n").encode()),
    "the same in lines of JSON": ("data.jsonl", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()),
    "token ids that are null": ("data.jsonl", LINES.replace("{", '{"input_ids": null, ').encode()),
    "UTF-16, little-endian": ("data.txt", f"\ufeff{MARKED}\n".replace("\n", "\r\n").encode("utf-16-le")),
    "UTF-16, big-endian": ("data.md", f"\ufeff{MARKED}\n".encode("utf-16-be")),
    "gz in two parts, and zeros": ("data.jsonl.gz", b"".join(map(gzip.compress, IN_TWO)) + bytes(512)),
    "bz2 in two parts, and zeros": ("data.Jsonl.BZ2", b"".join(map(bz2.compress, IN_TWO)) + bytes(512)),
    "zst": ("data.txt.zst", pyarrow.compress(MARKED.encode(), codec="zstd", asbytes=True)),
    "zst of Parquet": ("data.parquet.zst", zstd_of(pyarrow.parquet.write_table)),
    "zst of Arrow's file format": ("data.arrow.zst", zstd_of(pyarrow.feather.write_feather)),
}


@pytest.mark.parametrize("name", SAME)
def test_encodings_marks_and_compressions_change_no_token(load, encoded, tmp_path, name):
    file, content = SAME[name]
    (tmp_path / file).write_bytes(content)
    assert tokens_of(load(tmp_path / file)) == encoded(TEXTS)


def test_a_text_that_ends_with_the_end_of_text_token_gets_no_other_as_in_trl(load, tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.eos_token = "!"
    file = write_records(tmp_path / "data.jsonl", ["A fox!", "A ball", "So! it is!"])
    packed = load(file, 2, with_tokenizer=tokenizer)
    texts = ["A fox!", "A ball!", "So! it is!"]
    assert tokens_of(packed) == [token for text in texts for token in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_the_text_is_in_the_field_that_is_named_and_wins_over_token_ids(load, encoded, tmp_path, name):
    write_records(tmp_path / name, [{"input_ids": [5, 6, END], "story": text} for text in TEXTS])
    assert tokens_of(load(tmp_path / name)) == [5, 6, END] * len(TEXTS)
    for field in ("story", ("other", "story", "input_ids")):
        assert tokens_of(load(tmp_path / name, text_field=field)) == encoded(TEXTS)
    with pytest.raises(UserError, match=r"no field .?text"):
        load(tmp_path / name, text_field="text")


def test_files_of_several_formats_are_read_in_their_order(load, encoded, tmp_path):
    data = write_records(tmp_path / "data" / "1.jsonl.gz", TEXTS).parent
    (data / "2.txt").write_text(MARKED)
    (data / "3.md").write_text("# A title\n\nA story.\n")
    write_records(data / "4.parquet", TEXTS)
    assert tokens_of(load(data)) == encoded([*TEXTS, *TEXTS, "# A title\n\nA story.", *TEXTS])
    assert tokens_of(load(data / "[13].*")) == encoded([*TEXTS, "# A title\n\nA story."])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".txt", ".md"])
def test_an_empty_file_in_a_folder_is_one_without_documents(load, encoded, tmp_path, suffix):
    data = write_records(tmp_path / "data" / "b.jsonl", TEXTS).parent
    (data / f"a{suffix}").touch()
    (data / f"c{suffix}").touch()
    assert tokens_of(load(data)) == encoded(TEXTS)
    (data / "b.jsonl").unlink()
    with pytest.raises(UserError, match="it holds no text"):
        load(data)


@pytest.mark.parametrize("content", ["[A, B]\n[C]", "[A] [B, C]", "A [B]\nC", "[A][][B, C]\n", "A\nB\nC", "[A, B, C]"])
def test_records_and_lists_of_records_follow_each_other_in_json(load, encoded, tmp_path, monkeypatch, content):
    """Wherever they are cut as they are read."""
    monkeypatch.setattr(json_reader, "READ_BYTES", 7)
    texts = ["Zwölf Füchse \U0001f98a", 'a "b" \\ ] , [ c', "d" * 99]
    for letter, text in zip("ABC", texts, strict=True):
        content = content.replace(letter, json.dumps({"text": text}, ensure_ascii=False))
    (tmp_path / "data.json").write_text(content)
    assert tokens_of(load(tmp_path / "data.json")) == encoded(texts)


def test_a_bad_byte_of_a_text_costs_its_line_and_a_pdf_is_left_out(load, line_of, encoded, tmp_path):
    novel = b"Call me Ishmael.\nSome y\xe9ars ago.\nHaving little money.\n\0\0\nIt is a way \xef\xbf\xbd."
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_bytes(novel + DOC_SEPARATOR.encode() + b"Another \xef\xbf\xbd.")
    (tmp_path / "data" / "b.txt").write_bytes(b"%PDF-1.7\nText.\n")
    kept = ["Call me Ishmael.\nHaving little money.\nIt is a way \ufffd.", "Another \ufffd."]
    assert tokens_of(load(tmp_path / "data", skip_bad_records=True)) == encoded(kept)
    assert line_of(tmp_path / "data", skip_bad_records=True).endswith(", left out: bad records 3")


def test_a_record_without_token_ids_is_an_empty_document_in_json_and_parquet(load, tmp_path):
    for suffix in ("jsonl", "parquet"):
        file = write_records(tmp_path / f"a.{suffix}", [{"tokens": ids} for ids in ([5, 6, 7], [], [8, 9])])
        assert tokens_of(load(file, text_field="tokens")) == [5, 6, 7, 8, 9]


LONG = ["Tom", "düne 🌊", "ж" * 9, "two\nlines", "long " * 60, "end", "x"]
CUTTABLE = {
    "no last newline.jsonl": "\n\r\n".join(json.dumps({"text": text}) for text in LONG).encode(),
    "a mark of UTF-8.jsonl": b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
    "nearly marks.txt": b"<|endoftext|" + DOC_SEPARATOR.join(LONG).encode() + b"<|endoftext|<|endoftext|>a<|endoftext",
    "one document.md": b"only one\n" * 30,
    "utf-16.txt": DOC_SEPARATOR.join(LONG).encode("utf-16"),
}


@pytest.mark.parametrize("name", [*CUTTABLE, "rows.parquet"])
def test_each_document_of_a_file_is_in_exactly_one_part_wherever_it_is_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr("harness.data.formats.text.READ_BYTES", 7)
    monkeypatch.setattr("harness.data.formats.text.TAIL_BYTES", 5)
    if name == "rows.parquet":
        write_records(tmp_path / name, LONG * 9, row_group_size=7)
    else:
        (tmp_path / name).write_bytes(CUTTABLE[name])
    (file,) = find_files(str(tmp_path / name)).splits["train"]

    def documents(start: int, end: int | None) -> list[str]:
        return list(read_documents(read_records(file, ("text",), start, end), 2**16, False, Counter()))

    whole = documents(0, None)
    assert whole
    for parts in (1, 2, 7, 50, min(file.size, 900)):
        borders = [file.size * number // parts for number in range(parts + 1)]
        found = [documents(first, end) for first, end in itertools.pairwise(borders) if first < end]
        assert list(itertools.chain(*found)) == whole


# ----------------------------------------------------------------------------------------------------------------------
# Slices


SLICES = {  # of 40 documents, the first half of them short: the slice as (first, end), or the error
    "[:75%]": (0, 30),
    "[75%:]": (30, 40),
    "[-5%:]": (38, 40),
    "[:-5%]": (0, 38),
    "[:5]": (0, 5),
    "[5:]": (5, 40),
    "[-2:]": (38, 40),
    "[:-2]": (0, 38),
    "[-5:-3]": (35, 37),
    "[4:1]": r"split \[4:1\]: it ends before it begins; give other bounds",
    "[-3:2]": "it ends before it begins",
    "[60%:40%]": "it ends before it begins",
    "[10%:2]": "it ends before it begins",
    "[:41]": "41 is beyond the 40 documents",
    "[:-41]": "-41 is beyond the 40 documents",
    "[:101%]": "101% is beyond the 40 documents",
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_is_cut_at_documents_and_an_impossible_one_is_refused(load, encoded, tmp_path, name):
    texts = [f"Story {number} is about the number {number}. " * (1 + number // 20 * 9) for number in range(40)]
    file = write_records(tmp_path / "data.jsonl", texts)
    wanted = SLICES[name]
    if isinstance(wanted, tuple):
        assert tokens_of(load(file, split=f"train{name}")) == encoded(texts[slice(*wanted)])
    else:
        with pytest.raises(UserError, match=wanted):
            load(file, split=f"train{name}")


def test_a_percentage_that_cuts_off_no_document_cuts_tokens(load, tmp_path):
    file = write_records(tmp_path / "data.jsonl", ["A red ball."] * 3 + [f"{number} " * 400 for number in range(3)])
    whole, first, second, last = (
        tokens_of(load(file, split=f"train{cut}")) for cut in ("", "[:95%]", "[95%:]", "[-5%:]")
    )
    assert len(first) == len(whole) * 95 // 100 and first + second == whole and last == second
    with pytest.raises(UserError, match="it ends before it begins in these 6 documents"):
        load(file, split="train[5%:50%]")


# ----------------------------------------------------------------------------------------------------------------------
# The token cache


def caches(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "cache").glob("*/tokens.bin"))


def test_a_changed_file_or_vocabulary_makes_another_cache_and_a_slice_does_not(load, encoded, tmp_path):
    file = write_records(tmp_path / "data.jsonl", TEXTS)
    load(file)
    load(file, split="train[:60%]")
    assert len(caches(tmp_path)) == 1
    load(file, vocab_size=100_000)
    write_records(tmp_path / "data.jsonl", TEXTS[::-1])  # as long as before
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
    "cut": lambda path: os.truncate(path, 2),
    "without a record": lambda path: (path.parent / "record.json").unlink(),
    "record of another shape": lambda path: (path.parent / "record.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_token_cache_is_made_again_and_reported(load, line_of, tmp_path, damage):
    file = write_records(tmp_path / "data.jsonl", TEXTS)
    first = tokens_of(load(file))
    DAMAGES[damage](caches(tmp_path)[0])
    assert line_of(file).startswith("tokenized ") and tokens_of(load(file)) == first
    assert line_of(file).startswith("cached in ")


def test_a_complete_token_cache_is_read_where_nothing_can_be_written(load, tmp_path, monkeypatch):
    file = write_records(tmp_path / "data.jsonl", TEXTS)
    first = tokens_of(load(file, packing="best-fit"))
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))  # the tests may run as root
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert tokens_of(load(file, packing="best-fit")) == first
    with pytest.raises(UserError, match=r"--cache-dir .*: cannot be written \(.*Permission denied"):
        load(file, packing="none")


def test_a_cache_folder_that_cannot_be_made_is_named(load, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="--cache-dir"):
        load(write_records(tmp_path / "data.jsonl", TEXTS))


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes

GOOD = b'{"text": "Once upon a time there was a fox who had a red ball and liked it."}\n'


def parquet_with_a_damaged_page() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"Story {n}." for n in range(3000)]}), file)
    content = file.getvalue()
    return content[:2000] + bytes(100) + content[2100:]


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# Parquet does not check that its texts are UTF-8
LATIN_1 = pyarrow.table({"text": pyarrow.array([b"caf\xe9", b"A fox."]).view(pyarrow.string())})
UNUSABLE = [  # file, content, what the error printed after the file's name
    ("data.jsonl", b'{"text": ""}\n', ": it holds no text"),
    ("data.jsonl", b'{"text": "A"}\n', "too few for one sequence of --sequence-length"),
    ("data.parquet", b"no parquet", ": cannot be read (Parquet"),
    ("data.parquet", parquet_with_a_damaged_page(), ": cannot be read ("),
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
    ("data.jsonl", b'\xef\xbb\xbf{"text": "caf\xe9"}\n', ", line 1: byte 16 of the file: 0xe9 is not UTF-8"),
    ("data.jsonl", b"\xff\xfe" + GOOD.decode().encode("utf-16-le"), ", line 1: UTF-16, not UTF-8; fix it"),
    ("data.jsonl", gzip.compress(GOOD, mtime=0), ", line 1: gzip data, whose name ends in .gz; fix it"),
    ("data.jsonl", b"%PDF-1.7\nall of it ASCII", ", line 1: a PDF, not text; fix it"),
    ("data.json", b"%PDF-1.7\nall of it ASCII", ": cannot be read (a PDF, not text)"),
    ("data.jsonl", GOOD + b'{"text": "a\\ud800b"}\n', ', line 2: "a\\ud800b" with half a surrogate pair'),
    ("data.jsonl", GOOD + b"[" * 100_000, ", line 2: broken JSON"),
    ("data.jsonl", GOOD + b'{"input_ids": [1, -2]}\n', ", line 2: [1, -2] instead of token ids"),
    ("data.jsonl", GOOD + b'{"input_ids": [1, 1899]}\n', ", line 2: token id 1899, the model has 1,536"),
    ("data.json", b'[{"text": "A fox."}, {"te', ": cannot be read (broken JSON after 1 record"),
    ("data.json", b'[{"text": "A fox."}] and more', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}]]', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}],\n[{"text": "A ball."}]', ": cannot be read (broken JSON after 1 records"),
    ("data.json", b'[{"text": "A fox."}]\n[{"text": "A ball."}', ": cannot be read (broken JSON after 2 records"),
    ("data.json", b'\xef\xbb\xbf[{"text": "A fox."}, {"text": "A"]', "at byte 36 of the file: Expecting ','"),
    ("data.json", b'\xef\xbb\xbf[{"text": "caf\xe9"}]', ": cannot be read (byte 17 of the file: 0xe9 is not UTF-8"),
    ("data.json", b'[{"text": "A fox."}]\n7', ", record 2: no field 'text' in 7; name it"),
    ("data.arrow", b"no arrow", ": cannot be read ("),
    ("data.txt", b"A fox.<|endoftext|>\0\n", ", document 2: line 1 of the document, byte 19 of the file: a NUL"),
    ("data.txt", b"\xef\xbb\xbfA fox\nin a caf\xe9\n", ", document 1: line 2 of the document, byte 17 of the file: 0x"),
    ("data.md", b"\xff\xfeA\0\n\0\0\xd8B\0", ", document 1: line 2 of the document, byte 6 of the file: 0x00 is not"),
    ("data.txt", b"%PDF-1.7\nall of it ASCII", ", document 1: a PDF, not text; fix it"),
    ("data.txt", b"PK\3\4\x14\0", ", document 1: a ZIP archive (.docx, .epub, .odt), not text; fix it"),
    ("data.txt", gzip.compress(b"A fox.", mtime=0), ", document 1: gzip data, whose name ends in .gz; fix it"),
    ("data.txt", LFS_POINTER, ": it is a Git LFS pointer, not the file; run git lfs pull"),
    ("data.bin", LFS_POINTER, ": it is a Git LFS pointer, not the file; run git lfs pull"),
    ("data.parquet", ["A fox.", {"text": None}], ", row 2: null instead of text"),
    ("data.parquet", LATIN_1, ", row 1: 'utf-8' codec can't decode byte 0xe9 in position 3"),
    ("data.parquet", [{"input_ids": [1, 2]}, {"input_ids": [3, None]}], ", row 2: [3, null] instead of token ids"),
    ("data.parquet", [{"input_ids": [1, 2]}, {"input_ids": [3, 1536]}], ", row 2: token id 1536, the model has 1,536"),
    ("data.parquet", [{"input_ids": [3, 2**40]}], ", row 1: [3, 1099511627776] instead of token ids"),
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
def test_json_that_is_nested_too_deep_for_a_parser_is_a_bad_record_or_a_bad_prompt(tmp_path):
    deep = "[" * 100_000
    call = {"from": "tool_call", "value": deep}
    for record in ({"messages": [says("user", "Hi")], "tools": deep}, {"messages": [call]}):
        assert "recursion" in find_document(record, ("messages",)).fault
    (tmp_path / "a.json").write_text(deep)
    with pytest.raises(UserError, match=r"a.json: cannot be read"):
        read_prompt(str(tmp_path / "a.json"))


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("name, content, printed", UNUSABLE, ids=itertools.count())
def test_data_that_cannot_be_used_is_named(load, tmp_path, name, content, printed):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write_records(file, content)
    with pytest.raises(UserError) as raised:
        load(file, 16)
    message = str(raised.value)
    assert message.startswith(f"--dataset {file}") and printed in message.removeprefix(f"--dataset {file}")
    assert "\n" not in message and raised.value.exit_code == 2
    is_bad_record = re.search("(line|row|document|record) [0-9,]+: ", message) and "token id 1" not in message
    assert ("--skip-bad-records" in message) == bool(is_bad_record)


@pytest.mark.parametrize(
    "bad", [content for _, content, printed in UNUSABLE if ", line 2: " in printed and b"1899" not in content]
)
def test_bad_records_are_left_out_and_counted_if_asked(load, line_of, encoded, tmp_path, bad):
    lines = bad.removeprefix(GOOD).splitlines()
    text = json.loads(GOOD)["text"]
    file = write_records(tmp_path / "data.jsonl", [text, *lines, "", text])
    for begins in ("tokenized 2 documents in ", "cached in "):
        line = line_of(file, skip_bad_records=True)
        assert line.startswith(begins)
        assert line.endswith(f", left out: empty documents 1, bad records {len(lines)}")
        assert tokens_of(load(file, skip_bad_records=True)) == encoded([text, text])
    with pytest.raises(UserError, match="line 2"):  # a cache without them is none for a run that wants all
        load(file)


def test_a_tokenizer_without_an_end_of_text_or_with_too_many_ids_is_refused(load, tmp_path):
    bare = demo_tokenizer(eos_token=None)
    file = write_records(tmp_path / "data.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"--tokenizer .*end-of-text"):
        load(file, with_tokenizer=bare)
    with pytest.raises(UserError, match="--tokenizer: it gave token id"):
        load(file, vocab_size=100)
