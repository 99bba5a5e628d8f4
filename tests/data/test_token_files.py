"""Tokenized corpora are trained on where they lie: the same documents give the same windows in every format, and one
line says what is wrong with a file. The files are written here byte by byte, by the published layouts."""

import pathlib
import struct

import numpy as np
import pytest
from conftest import ROOT, parse, train, words
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import data
from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.token_files import TokenFile, open_token_files
from harness.data.windows import Tokens, held_out_numbers

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


def two_rows() -> np.ndarray:
    return FLAT[: len(FLAT) // 2 * 2].reshape(2, -1)


def several_megatron(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    write_megatron(folder / "a_text_document.bin", DOCUMENTS[:20])
    write_megatron(folder / "b_text_document.bin", DOCUMENTS[20:], "int32")
    return folder


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


def open_tokens(file: pathlib.Path, vocab_size: int = VOCAB) -> Tokens:
    return Tokens(open_token_files(find_files(str(file)).of_split("train"), vocab_size), vocab_size, END)


# ----------------------------------------------------------------------------------------------------------------------
# The same documents


@pytest.mark.parametrize("name", MAPPED)
def test_the_same_documents_give_the_same_windows_in_every_format(tmp_path, load, name):
    write, has_ends = MAPPED[name]
    packed = load(write(tmp_path), 16)
    tokens = packed.tokens
    assert len(FLAT) - 1 <= len(tokens) <= len(FLAT) and len(packed) == (len(tokens) - 1) // 16
    for index in range(len(packed)):
        assert packed[index].dtype == np.uint16
        assert packed[index].tolist() == FLAT[16 * index : 16 * index + 17].tolist()
    assert tokens.is_mapped and not (tmp_path / "cache").exists()
    expected = ENDS[len(tokens) >= ENDS]
    assert tokens.knows_ends == has_ends and tokens.ends[: len(expected)].tolist() == expected.tolist()


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


def test_a_document_of_megatron_may_be_several_sequences_or_none(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    write_index(tmp_path / "a.idx", [2, 3, 1, 4], [0, 4, 10, 12], [0, 0, 2, 2, 4])
    tokens = open_tokens(tmp_path / "a.bin")
    assert tokens.ends.tolist() == [5, 10]
    assert tokens.document_of(7) == (f"{tmp_path / 'a.bin'}, document 4", 2)


# ----------------------------------------------------------------------------------------------------------------------
# Splits, held-out documents, places


@pytest.mark.parametrize("name", ["datatrove, 2 bytes", "nanoGPT"])
def test_a_slice_is_cut_at_the_ends_of_documents(tmp_path, load, name):
    packed = load(MAPPED[name][0](tmp_path), 16, split="train[10%:50%]")
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


def test_the_documents_of_a_window_are_named_with_their_files(tmp_path):
    folder = several_megatron(tmp_path / "f")
    tokens = open_tokens(folder)
    a, b = folder / "a_text_document.bin", folder / "b_text_document.bin"
    found = [tokens.document_of(int(place)) for place in (ENDS[18] + 1, ENDS[19], ENDS[20])]
    assert found == [(f"{a}, document 20", 1), (f"{b}, document 1", 0), (f"{b}, document 2", 0)]
    assert open_tokens(write_nanogpt(tmp_path / "c.bin")).document_of(40) == (str(tmp_path / "c.bin"), 40)


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong with a file


def with_index(folder: pathlib.Path, lengths, places, documents, **options) -> pathlib.Path:
    """A .bin of ten tokens of 2 bytes with this index."""
    write_index(folder / "a.idx", lengths, places, documents, **options)
    return write_nanogpt(folder / "a.bin", range(10))


def cut(file: pathlib.Path, size: int, name: str | None = None) -> pathlib.Path:
    """The file, after it, or the one beside it of this name, has lost its last bytes."""
    damaged = file.with_name(name or file.name)
    damaged.write_bytes(damaged.read_bytes()[:-size])
    return file


def write_bytes(file: pathlib.Path, content: bytes) -> pathlib.Path:
    file.write_bytes(content)
    return file


WHOLE = ([4, 6], [0, 8], [0, 1, 2])  # an index of two sequences
DAMAGED = {  # how a file is written; what its error says
    "Megatron, cut": (lambda d: cut(write_megatron(d / "a.bin"), 2), r"its index .*a\.idx has"),
    "Megatron, an odd size": (lambda d: cut(write_megatron(d / "a.bin"), 1), "no whole number of 2-byte numbers"),
    "Megatron, a cut index": (lambda d: cut(write_megatron(d / "a.bin"), 8, "a.idx"), r"a\.idx: .* its 60 sequences"),
    "Megatron, a cut header": (lambda d: cut(with_index(d, *WHOLE), 60, "a.idx"), r"a\.idx: .* no whole index"),
    "Megatron, out of order": (lambda d: with_index(d, [4, 6], [12, 0], [0, 1, 2]), "do not lie end to end in"),
    "Megatron, multimodal": (lambda d: with_index(d, *WHOLE, modes=[0, 1]), "one of text and nothing else"),
    "Megatron, floats": (lambda d: with_index(d, *WHOLE, code=7), "type 7 of tokens, where integers"),
    "Megatron, another version": (lambda d: with_index(d, *WHOLE, version=2), "version 2 with type 8"),
    "datatrove, cut": (lambda d: cut(write_datatrove(d / "a.ds"), 2), r"a\.ds: it has [\d,]+ tokens, its index"),
    "datatrove, a cut index": (lambda d: cut(write_datatrove(d / "a.ds"), 8, "a.ds.index"), "its index or metadata"),
    "datatrove, 3 bytes a token": (lambda d: write_datatrove(d / "a.ds", metadata="gpt2|3\n7"), "3 bytes a token"),
    "nanoGPT, empty": (lambda d: write_bytes(d / "a.bin", b""), r"a\.bin: it is empty"),
    "nanoGPT, 4 bytes a token": (lambda d: write_nanogpt(d / "a.bin", FLAT, "<u4"), "seem to have 4; save them as"),
    "llm.c, cut": (lambda d: cut(write_llmc(d / "a.bin", "uint16"), 2), r"it has [\d,]+ tokens, its header says"),
    "NumPy, floats": (lambda d: write_npy(d / "a.npy", FLAT.astype(np.float32)), "its numbers are float32"),
    "NumPy, columns": (lambda d: write_npy(d / "a.npy", np.asfortranarray(two_rows())), "with rows end to end"),
    "NumPy, no array": (lambda d: write_bytes(d / "a.npy", b"no array at all"), r"a\.npy: cannot be read \(the magic"),
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


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


@pytest.mark.parametrize("metadata, name", [("gpt2|2\n{count}\n1 T", "gpt2"), ("Unknown Tokenizer|2|2\n{count}", None)])
def test_the_tokenizer_of_datatroves_metadata_is_known(tmp_path, metadata, name):
    files = open_tokens(write_datatrove(tmp_path / "a.ds", metadata=metadata)).files
    assert files[0].tokenizer == name


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
