"""Tokenized corpora are trained on where they lie: the same documents give the same windows in every format, and one
line says what is wrong with a file. The files are written here byte by byte, by the published layouts."""

import json
import pathlib
import struct

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, parse, train, words
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

import utils
from harness import data
from harness.base.errors import UserError
from harness.data import token_files
from harness.data.files import find_files
from harness.data.mixture import WindowOrder
from harness.data.token_files import TokenFile, open_token_files
from harness.data.windows import Tokens, held_out_numbers, squared_lengths

VOCAB = 1536  # of the demo model
END = 0  # end-of-text of its tokenizer
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
LLMC_MAGIC = {"uint16": 20240520, "uint32": 20240801}


def some_documents(count: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Documents of 2 to 29 tokens with an end-of-text token each."""
    generator = np.random.default_rng(seed)
    return [np.append(generator.integers(1, VOCAB, generator.integers(1, 29)), END) for _ in range(count)]


DOCUMENTS = some_documents()
FLAT = np.concatenate(DOCUMENTS)
ENDS = np.cumsum([len(document) for document in DOCUMENTS])


# ----------------------------------------------------------------------------------------------------------------------
# Files by the published layouts


def write_index(file: pathlib.Path, lengths, places, documents, code: int = 8, version: int = 1, modes=()) -> None:
    """Megatron's .idx."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", version, code, len(lengths), len(documents))
    arrays = np.array(lengths, "<i4"), np.array(places, "<i8"), np.array(documents, "<i8"), np.array(modes, "i1")
    file.write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_megatron(file: pathlib.Path, documents=DOCUMENTS, dtype: str = "uint16") -> pathlib.Path:
    lengths = [len(document) for document in documents]
    file.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    places = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    write_index(file.with_suffix(".idx"), lengths, places, range(len(documents) + 1), MEGATRON_CODES[dtype])
    return file


def write_datatrove(
    file: pathlib.Path,
    documents=DOCUMENTS,
    itemsize: int = 2,
    metadata: str | None = "gpt2|{itemsize}\n{count}\n1.0 kT",
) -> pathlib.Path:
    tokens = np.concatenate(documents)
    file.write_bytes(tokens.astype(f"<u{itemsize}").tobytes())
    ends = np.cumsum([len(document) for document in documents])
    file.with_name(f"{file.name}.index").write_bytes(ends.astype("<u8").tobytes())
    if metadata is not None:
        text = metadata.format(itemsize=itemsize, count=len(tokens))
        file.with_name(f"{file.name}.metadata").write_text(text)
    return file


def write_nanogpt(file: pathlib.Path, tokens=FLAT, dtype: str = "<u2") -> pathlib.Path:
    file.write_bytes(np.asarray(tokens).astype(dtype).tobytes())
    return file


def write_llmc(file: pathlib.Path, dtype: str, count: int | None = None, magic: int | None = None) -> pathlib.Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic or LLMC_MAGIC[dtype], 1, len(FLAT) if count is None else count
    file.write_bytes(header.tobytes() + FLAT.astype(dtype).tobytes())
    return file


def write_npy(file: pathlib.Path, array) -> pathlib.Path:
    np.save(file, array)
    return file


def list_column(documents=DOCUMENTS, kind=None):
    return pyarrow.array([document.tolist() for document in documents], kind or pyarrow.list_(pyarrow.int32()))


def write_jsonl(file: pathlib.Path, name: str = "input_ids") -> pathlib.Path:
    file.write_text("".join(json.dumps({name: document.tolist()}) + "\n" for document in DOCUMENTS))
    return file


def write_parquet(file: pathlib.Path, kind) -> pathlib.Path:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": list_column(kind=kind)}), file)
    return file


def two_rows() -> np.ndarray:
    return FLAT[: len(FLAT) // 2 * 2].reshape(2, -1)


def several_megatron(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    write_megatron(folder / "a_text_document.bin", DOCUMENTS[:20])
    write_megatron(folder / "b_text_document.bin", DOCUMENTS[20:], "int32")
    return folder


LARGE_LIST, INT64_LIST = pyarrow.large_list(pyarrow.uint16()), pyarrow.list_(pyarrow.int64())
MAPPED = {  # how a corpus is written; whether its format has the ends of documents
    "Megatron, uint16": (lambda folder: write_megatron(folder / "a.bin"), True),
    "Megatron, int32": (lambda folder: write_megatron(folder / "a.bin", dtype="int32"), True),
    "Megatron, int64": (lambda folder: write_megatron(folder / "a.bin", dtype="int64"), True),
    "Megatron, a folder": (lambda folder: several_megatron(folder / "f"), True),
    "datatrove, 2 bytes": (lambda folder: write_datatrove(folder / "a.ds"), True),
    "datatrove, 4 bytes": (lambda folder: write_datatrove(folder / "a.ds", itemsize=4), True),
    "datatrove, 4 bytes by its index": (
        lambda folder: write_datatrove(folder / "a.ds", itemsize=4, metadata=None),
        True,
    ),
    "nanoGPT": (lambda folder: write_nanogpt(folder / "a.bin"), False),
    "llm.c, uint16": (lambda folder: write_llmc(folder / "a.bin", "uint16"), False),
    "llm.c, uint32": (lambda folder: write_llmc(folder / "a.bin", "uint32"), False),
    "NumPy, int64": (lambda folder: write_npy(folder / "a.npy", FLAT), False),
    "NumPy, big-endian": (lambda folder: write_npy(folder / "a.npy", FLAT.astype(">u4")), False),
    "NumPy, two dimensions": (lambda folder: write_npy(folder / "a.npy", two_rows()), False),
}
CACHED = {
    "Parquet, large lists": lambda folder: write_parquet(folder / "a.parquet", LARGE_LIST),
    "Parquet, int64": lambda folder: write_parquet(folder / "a.parquet", INT64_LIST),
    "JSON lines": lambda folder: write_jsonl(folder / "a.jsonl"),
}
WRITERS = {name: write for name, (write, _) in MAPPED.items()} | CACHED


def open_tokens(file: pathlib.Path, vocab_size: int = VOCAB) -> Tokens:
    return Tokens(open_token_files(find_files(str(file)).of_split("train"), vocab_size), vocab_size, END)


# ----------------------------------------------------------------------------------------------------------------------
# The same documents


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_documents_give_the_same_windows_in_every_format(tmp_path, load, name):
    packed = load(WRITERS[name](tmp_path), 16)
    length = len(two_rows().ravel()) if name == "NumPy, two dimensions" else len(FLAT)
    assert len(packed) == (length - 1) // 16
    for index in range(len(packed)):
        window = packed[index]
        assert window.dtype == np.uint16
        assert window.tolist() == FLAT[16 * index : 16 * index + 17].tolist()
    if length == len(FLAT):
        assert packed.tokens.fingerprint() == Tokens([TokenFile(FLAT.astype(np.uint16))]).fingerprint()
    assert packed.tokens.is_mapped == (name in MAPPED)
    assert (tmp_path / "cache").exists() == (name not in MAPPED)


@pytest.mark.parametrize("name", MAPPED)
def test_the_ends_of_documents_are_those_of_the_format_or_after_end_of_text_tokens(tmp_path, load, name):
    write, has_ends = MAPPED[name]
    tokens = load(write(tmp_path)).tokens
    expected = ENDS if name != "NumPy, two dimensions" else ENDS[len(tokens) >= ENDS]
    assert tokens.knows_ends == has_ends
    assert tokens.ends[: len(expected)].tolist() == expected.tolist() and tokens.ends.dtype == np.int64


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30), st.data())
def test_files_end_to_end_and_stretches_of_them_are_one_array(sizes, first, last, draw):
    """Slices within a file, over several and over empty ones, as those of a list."""
    arrays = [np.arange(100 * number, 100 * number + size, dtype="<u4") for number, size in enumerate(sizes)]
    tokens, flat = Tokens([TokenFile(array) for array in arrays], 1000), np.concatenate(arrays)
    assert len(tokens) == len(flat)
    assert tokens[first:last].tolist() == flat[first:last].tolist() and tokens[first:last].dtype == np.uint16
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(flat)), min_size=4, max_size=4)))
    part = tokens.stretches(np.array(cuts[::2]), np.array(cuts[1::2]))
    expected = np.concatenate([flat[cuts[0] : cuts[1]], flat[cuts[2] : cuts[3]]])
    assert len(part) == len(expected) and part[first:last].tolist() == expected[first:last].tolist()


def test_a_window_of_one_file_is_a_view_of_it(tmp_path):
    tokens = open_tokens(write_nanogpt(tmp_path / "a.bin"))
    assert np.shares_memory(tokens[3:20], tokens.files[0].tokens)


def test_a_document_of_megatron_may_be_several_sequences_or_none(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    write_index(tmp_path / "a.idx", [2, 3, 1, 4], [0, 4, 10, 12], [0, 0, 2, 2, 4])
    tokens = open_tokens(tmp_path / "a.bin")
    assert tokens.ends.tolist() == [5, 10]
    assert tokens.document_of(7) == (f"{tmp_path / 'a.bin'}, document 4", 2)


def test_an_index_longer_than_what_is_checked_at_once_is_checked_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK", 7)
    monkeypatch.setattr("harness.data.readers.bin.CHUNK", 7)
    write_megatron(tmp_path / "a.bin")
    assert open_tokens(tmp_path / "a.bin").ends.tolist() == ENDS.tolist()
    lengths = [len(document) for document in DOCUMENTS]
    places = np.cumsum([0, *lengths[:-1]]) * 2
    write_index(tmp_path / "a.idx", lengths, places, [*range(40), 38, *range(41, 61)])
    with pytest.raises(UserError, match=r"a\.idx, document 40: it ends before it begins"):
        open_tokens(tmp_path / "a.bin")
    lengths[33] = -1
    write_index(tmp_path / "a.idx", lengths, places, range(61))
    with pytest.raises(UserError, match=r"a\.idx, sequence 33: its length is -1 tokens"):
        open_tokens(tmp_path / "a.bin")


# ----------------------------------------------------------------------------------------------------------------------
# Splits, held-out documents, places


@pytest.mark.parametrize("name", ["datatrove, 2 bytes", "nanoGPT"])
def test_a_slice_is_cut_at_the_ends_of_documents(tmp_path, load, name):
    packed = load(WRITERS[name](tmp_path), 16, split="train[10%:50%]")
    assert len(packed.tokens) == ENDS[29] - ENDS[5]
    assert packed[1].tolist() == FLAT[ENDS[5] + 16 : ENDS[5] + 33].tolist()


def test_held_out_are_the_same_documents_by_an_index_and_by_end_of_text_tokens(tmp_path):
    numbers = held_out_numbers(len(DOCUMENTS))
    expected = np.concatenate([DOCUMENTS[number] for number in numbers]).tolist()
    for file in (write_datatrove(tmp_path / "a.ds"), write_nanogpt(tmp_path / "a.bin")):
        kept, held = open_tokens(file).divide()
        assert held[:].tolist() == expected
        assert sorted([*kept[:].tolist(), *expected]) == sorted(FLAT.tolist())
        assert held.ends.tolist() == np.cumsum([len(DOCUMENTS[number]) for number in numbers]).tolist()
    assert held_out_numbers(120).tolist() == [9, 23, 57, 71, 88, 106]
    few = Tokens([TokenFile(FLAT[: ENDS[5]], find_ends=lambda: ENDS[:6])])
    assert [len(part) for part in few.divide()] == [ENDS[5] * 95 // 100, ENDS[5] - ENDS[5] * 95 // 100]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.lists(st.integers(0, 60), max_size=8))
def test_stretches_know_where_their_documents_end(lengths, cuts):
    total = sum(lengths)
    bounds = sorted({min(cut, total) for cut in cuts})
    bounds = bounds[: len(bounds) // 2 * 2]
    if not bounds:
        return
    tokens = Tokens([TokenFile(np.arange(total), find_ends=lambda: np.cumsum(lengths))])
    part = tokens.stretches(np.array(bounds[::2]), np.array(bounds[1::2]))
    last_of_document = set((np.cumsum(lengths) - 1).tolist()) | {end - 1 for end in bounds[1::2]}
    assert part.ends.tolist() == [n + 1 for n, token in enumerate(part[:].tolist()) if token in last_of_document]


def test_the_documents_of_a_window_are_named_with_their_files(tmp_path):
    folder = several_megatron(tmp_path / "f")
    tokens = open_tokens(folder)
    a, b = folder / "a_text_document.bin", folder / "b_text_document.bin"
    found = [tokens.document_of(int(place)) for place in (ENDS[18] + 1, ENDS[19], ENDS[20])]
    assert found == [(f"{a}, document 20", 1), (f"{b}, document 1", 0), (f"{b}, document 2", 0)]
    assert open_tokens(write_nanogpt(tmp_path / "c.bin")).document_of(40) == (str(tmp_path / "c.bin"), 40)


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong with a file


def with_index(file: pathlib.Path, lengths, places, documents, **options) -> pathlib.Path:
    """A .bin of ten tokens of 2 bytes with this index."""
    file.write_bytes(np.arange(10, dtype="<u2").tobytes())
    write_index(file.with_suffix(".idx"), lengths, places, documents, **options)
    return file


def cut(file: pathlib.Path, size: int) -> pathlib.Path:
    """The file without its last bytes."""
    file.write_bytes(file.read_bytes()[:-size])
    return file


def cut_beside(file: pathlib.Path, beside: pathlib.Path, size: int) -> pathlib.Path:
    cut(beside, size)
    return file


def write_bytes(file: pathlib.Path, content: bytes) -> pathlib.Path:
    file.write_bytes(content)
    return file


FLAT_32 = lambda d: write_nanogpt(d / "a.bin", FLAT, "<u4")  # noqa: E731
DAMAGED = {
    "Megatron, a cut file": (
        lambda d: cut(write_megatron(d / "a.bin"), 2),
        r"sequence 59: \d+ tokens from byte [\d,]+ on are not in .*a\.bin of",
    ),
    "Megatron, an odd size": (
        lambda d: cut(write_megatron(d / "a.bin"), 1),
        r"bytes are no whole number of 2-byte numbers",
    ),
    "Megatron, a cut index": (
        lambda d: cut_beside(write_megatron(d / "a.bin"), d / "a.idx", 8),
        r"a\.idx: .* bytes, where its 60 sequences",
    ),
    "Megatron, an index past its file": (
        lambda d: with_index(d / "a.bin", [4, 7], [0, 8], [0, 1, 2]),
        r"a\.idx, sequence 1: 7 tokens from byte 8 on are not in .*a\.bin of 20 bytes",
    ),
    "Megatron, a place past its file": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 800], [0, 1, 2]),
        "it begins at byte 800, where the one before ends at 8",
    ),
    "Megatron, a negative length": (
        lambda d: with_index(d / "a.bin", [14, -4], [0, 28], [0, 2]),
        r"sequence 0: 14 tokens|its length is -4",
    ),
    "Megatron, more tokens than its index": (
        lambda d: with_index(d / "a.bin", [4, 5], [0, 8], [0, 1, 2]),
        r"a\.bin: it has 10 tokens, its index .*a\.idx has 9",
    ),
    "Megatron, documents past the end": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 3]),
        "its documents take the sequences 0 to 3 of 2",
    ),
    "Megatron, falling documents": (
        lambda d: with_index(d / "a.bin", [4, 3, 3], [0, 8, 14], [0, 2, 1, 3]),
        "document 2: it ends before it begins",
    ),
    "Megatron, multimodal": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 2], modes=[0, 1]),
        "its sequences have modes: it is multimodal",
    ),
    "Megatron, floats": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 2], code=7),
        r"floats \(type 7\), no tokens",
    ),
    "Megatron, another version": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 2], version=2),
        "version 2, where only 1 is known",
    ),
    "datatrove, a cut file": (
        lambda d: cut(write_datatrove(d / "a.ds"), 2),
        r"a\.ds: it has [\d,]+ tokens, its metadata says",
    ),
    "datatrove, a cut index": (
        lambda d: cut_beside(write_datatrove(d / "a.ds"), d / "a.ds.index", 8),
        r"a\.ds\.index: its documents end at token [\d,]+, .*a\.ds has",
    ),
    "datatrove, a falling index": (
        lambda d: (
            write_datatrove(d / "a.ds"),
            (d / "a.ds.index").write_bytes(np.array([5, 4, len(FLAT)], "<u8").tobytes()),
            d / "a.ds",
        )[2],
        r"a\.ds\.index, document 2: it ends at token 4",
    ),
    "datatrove, other metadata": (
        lambda d: write_datatrove(d / "a.ds", metadata="gpt2|3\n7"),
        "are no tokenizer with 2 or 4 bytes a token",
    ),
    "nanoGPT, empty": (lambda d: write_bytes(d / "a.bin", b""), r"a\.bin: it is empty"),
    "nanoGPT, 4 bytes a token": (FLAT_32, "has 2 bytes a token, and these seem to have 4; save them as .npy"),
    "llm.c, a cut file": (
        lambda d: cut(write_llmc(d / "a.bin", "uint16"), 2),
        r"it has [\d,]+ tokens, its header says [\d,]+",
    ),
    "llm.c, an evaluation": (
        lambda d: write_llmc(d / "a.bin", "uint16", magic=20240522),
        "llm.c's questions for an evaluation",
    ),
    "NumPy, floats": (
        lambda d: write_npy(d / "a.npy", FLAT.astype(np.float32)),
        "its numbers are float32, where token ids are integers",
    ),
    "NumPy, three dimensions": (lambda d: write_npy(d / "a.npy", FLAT[:8].reshape(2, 2, 2)), "it has 3 dimensions"),
    "NumPy, columns": (lambda d: write_npy(d / "a.npy", np.asfortranarray(two_rows())), "its columns are end to end"),
    "NumPy, no array": (
        lambda d: write_bytes(d / "a.npy", b"no array at all"),
        r"a\.npy: cannot be read \(the magic string",
    ),
    "packed": (lambda d: write_bytes(d / "a.ds.gz", b"x"), "it is packed, and token files are mapped; unpack it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_a_file_is_said_when_it_is_opened(tmp_path, load, name):
    write, said = DAMAGED[name]
    source = write(tmp_path)
    with pytest.raises(UserError, match=said) as raised:
        load(source)
    assert "\n" not in str(raised.value)
    assert str(source.parent) in str(raised.value)


def test_a_token_without_an_embedding_is_named_with_file_document_and_offset(tmp_path, load):
    documents = [document.copy() for document in DOCUMENTS]
    documents[40][0] = VOCAB
    said = f"a.ds, document 41, token 0: token id {VOCAB}, the model has 1,536"
    packed = load(write_datatrove(tmp_path / "a.ds", documents), 16)
    holding = (ENDS[39]) // 16
    assert packed[0].tolist() == FLAT[:17].tolist()  # a window without it
    with pytest.raises(UserError, match=said):
        packed[int(holding)]
    with pytest.raises(UserError, match=said):  # also before the run
        packed.tokens.fingerprint()
    packed = load(write_nanogpt(tmp_path / "a.bin", np.concatenate(documents)), 16)
    with pytest.raises(UserError, match=rf"a\.bin, token {ENDS[39]:,}: token id {VOCAB}, "):
        packed[int(holding)]
    write_npy(tmp_path / "a.npy", np.where(np.arange(100) == 70, -5, 3))
    with pytest.raises(UserError, match=r"a\.npy, token 70: token id -5, the model has 1,536; it was made with"):
        load(tmp_path / "a.npy", 16)[4]


def test_the_last_id_of_a_vocabulary_is_taken_and_the_next_is_not(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.array([3, 9, 3, 3], np.int16))
    assert open_tokens(file, vocab_size=10)[0:4].tolist() == [3, 9, 3, 3]
    with pytest.raises(UserError, match="token 1: token id 9, the model has 9"):
        open_tokens(file, vocab_size=9)[0:4]
    large = write_npy(tmp_path / "b.npy", np.array([65_536, 1], np.uint32))
    assert open_tokens(large, vocab_size=65_537)[0:2].tolist() == [65_536, 1]


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_what_belongs_to_a_token_file_is_not_listed(tmp_path):
    several_megatron(tmp_path / "m")
    (tmp_path / "d").mkdir()
    write_datatrove(tmp_path / "d" / "a.ds")
    (tmp_path / "d" / "a.ds.loss").write_bytes(b"")
    assert find_files(str(tmp_path / "m")).left_out == []
    assert find_files(str(tmp_path / "d")).left_out == ["a.ds.loss"]
    with pytest.raises(UserError, match=r"no such file or folder; there is .*/m/a_text_document\.bin"):
        find_files(str(tmp_path / "m" / "a_text_document"))  # as Megatron's flags name it


def test_token_files_are_not_joined_with_text_or_with_another_format(tmp_path, load):
    write_nanogpt(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("A fox.")
    with pytest.raises(
        UserError, match=rf"a\.bin has tokens that are read in place, .*b\.txt is of .*'{tmp_path}/\*\.bin'"
    ):
        load(tmp_path)
    (tmp_path / "b.txt").unlink()
    write_npy(tmp_path / "b.npy", FLAT)
    with pytest.raises(UserError, match=r"b\.npy is of another format"):
        load(tmp_path)
    assert load(tmp_path / "*.npy").tokens.line.startswith("read in place, 1 file (NumPy's .npy, int64")


def test_a_bin_is_said_to_be_what_it_was_taken_for(tmp_path, load):
    said = {
        write_megatron(tmp_path / "a.bin"): "Megatron's .bin with .idx, uint16",
        write_nanogpt(tmp_path / "b.bin"): "nanoGPT's flat .bin without header, uint16",
        write_llmc(tmp_path / "c.bin", "uint32"): "llm.c's .bin with a header, uint32",
    }
    for file, kind in said.items():
        assert load(file).tokens.line == f"read in place, 1 file ({kind}), tokenizer not known"


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


@pytest.mark.parametrize("metadata, name", [("gpt2|2\n{count}\n1 T", "gpt2"), ("Unknown Tokenizer|2|2\n{count}", None)])
def test_the_tokenizer_of_datatroves_metadata_is_known(tmp_path, metadata, name):
    files = open_tokens(write_datatrove(tmp_path / "a.ds", metadata=metadata)).files
    assert files[0].tokenizer == name
    assert token_files.describe(files).endswith("tokenized by gpt2" if name else "tokenizer not known")


def test_files_of_two_tokenizers_are_refused(tmp_path, load):
    write_datatrove(tmp_path / "a.ds")
    write_datatrove(tmp_path / "b.ds", metadata="llama|2\n{count}")
    with pytest.raises(UserError, match=r"a\.ds was tokenized by gpt2, .*b\.ds by llama"):
        load(tmp_path)


def test_the_run_warns_of_another_tokenizer_and_the_header_names_the_files_own(tmp_path, arguments, device, capfd):
    write_datatrove(tmp_path / "a.ds")
    assert train([*arguments, "--dataset", tmp_path / "a.ds"], device) == 0
    said = capfd.readouterr()
    assert f"warning: --tokenizer {ROOT / 'assets' / 'demo'}: {tmp_path / 'a.ds'} was tokenized by gpt2" in said.err
    assert "tokenizer  gpt2, as the files say" in said.out


def test_a_run_on_token_files_needs_no_tokenizer(tmp_path, arguments, device, capsys, monkeypatch):
    """Nor one with a tokenizer that cannot be had: it is not asked for."""
    place = arguments.index("--tokenizer")
    without = [*arguments[:place], *arguments[place + 2 :]]
    source = write_nanogpt(tmp_path / "a.bin", FLAT % 90)
    assert train([*without, "--dataset", source], device) == 0
    said = capsys.readouterr().out
    assert "tokenizer  not known (tokens are read in place)" in said
    assert "nanoGPT's flat .bin without header, uint16" in said


def test_a_header_says_nothing_of_the_tokenizer_of_text_and_names_the_sources_of_a_mixture(tmp_path, device, tokenizer):
    write_jsonl(tmp_path / "ids.jsonl")
    text = [json.dumps({"text": "A fox ran. " * 9}) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(text))
    write_datatrove(tmp_path / "a.ds")
    config = AutoConfig.for_model("llama", vocab_size=VOCAB)
    names = ["text.jsonl:0.4", "ids.jsonl:0.3", "a.ds:0.3"]
    given = ["--dataset", *(tmp_path / name for name in names), "--cache-dir", tmp_path / "cache"]
    settings = parse([*given, "--sequence-length", 8])
    train_set = data.load(settings, data.find(settings), tokenizer, config)
    expected = "ids: not known (the records are token ids); a: gpt2, as the files say (tokens are read in place)"
    assert train_set.header["tokenizer"] == expected


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_with_a_document_mask_an_index_says_where_documents_begin(tmp_path, load, packing):
    """Without a single end-of-text token."""
    generator = np.random.default_rng(1)
    documents = [generator.integers(1, VOCAB, length) for length in generator.integers(1, 30, 60)]
    write_megatron(tmp_path / "a.bin", documents)
    packed = load(tmp_path / "a.bin", 16, packing=packing, document_mask=True)
    collate = data.create_collate_fn()
    lengths = []
    for index in range(len(packed)):
        passages = packed.documents(index)
        starts = [start for start, _, _ in passages if start < packed.seq_len]
        positions = collate([packed[index]])["position_ids"].numpy()
        inside = np.arange(packed.seq_len) < packed.real_tokens(index)
        assert np.flatnonzero((positions[0] == 0) & inside).tolist() == starts
        of_window = np.diff([*starts, packed.real_tokens(index)])
        assert squared_lengths(positions, inside[None]) == (of_window**2).sum()
        lengths += of_window.tolist()
    assert sum(lengths) == packed.total_tokens() and len(lengths) >= 60


@pytest.mark.parametrize(
    "flags, needed",
    [
        ("", False),
        ("--tokenizer x", True),
        ("--sample-prompt x", True),
        ("--eval-interval 1", True),
        ("--export x", True),
        ("--document-mask", True),
        ("--packing best-fit", True),
        ("--dataset-split train[:5%]", True),
    ],
)
def test_a_tokenizer_is_taken_where_a_flag_asks_for_text_or_ends_of_documents(device, tmp_path, flags, needed):
    source = write_nanogpt(tmp_path / "a.bin")
    settings = parse(["--dataset", source, *words(flags)])
    assert data.needs_tokenizer(settings, data.find(settings)) == needed


# ----------------------------------------------------------------------------------------------------------------------
# Size


def test_ten_billion_tokens_take_no_memory_before_the_first_batch(tmp_path, load):
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * 10**10)
    process = psutil.Process()
    before = process.memory_info().rss
    packed = load(tmp_path / "a.bin", 8192)
    packed.tokens.fingerprint()
    index = WindowOrder(len(packed), seed=42).window_of(0)
    assert utils.create_collate_fn()([packed[index]])["input_ids"].shape == (1, 8192)
    assert len(packed.tokens) == 10**10
    assert process.memory_info().rss - before < 100 * 2**20
