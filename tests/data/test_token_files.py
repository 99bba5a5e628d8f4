"""Tokenized corpora are trained on where they lie: their documents, slices and what is held out of them, and one line
says what is wrong with a file. test_promises.py has the windows of every format."""

import os
import pathlib

import formats
import numpy as np
import pytest
from conftest import ROOT, parse, train, words
from transformers import AutoTokenizer

from harness import data
from harness.base.errors import UserError
from harness.data.contents import open_token_file
from harness.data.files import find_files
from harness.data.token_files import TokenFile
from harness.data.windows import Tokens, held_out_numbers

VOCAB = 1536  # of the demo model
END = 0  # end-of-text of its tokenizer


def some_documents(count: int = 60, seed: int = 0) -> list[np.ndarray]:
    """Documents of 2 to 29 tokens with an end-of-text token each."""
    generator = np.random.default_rng(seed)
    return [np.append(generator.integers(1, VOCAB, generator.integers(1, 29)), END) for _ in range(count)]


DOCUMENTS = some_documents()
FLAT = np.concatenate(DOCUMENTS)
ENDS = np.cumsum([len(document) for document in DOCUMENTS])
TWO_ROWS = FLAT[: len(FLAT) // 2 * 2].reshape(2, -1)


def megatron(folder: pathlib.Path) -> pathlib.Path:
    formats.write_megatron(folder, DOCUMENTS)
    return folder / "a.bin"


def datatrove(folder: pathlib.Path, metadata: str | None = None) -> pathlib.Path:
    formats.write_datatrove(folder, DOCUMENTS)
    if metadata is not None:
        (folder / "a.ds.metadata").write_text(metadata)
    return folder / "a.ds"


def flat(file: pathlib.Path, tokens=FLAT, dtype: str = "<u2") -> pathlib.Path:
    file.write_bytes(np.asarray(tokens).astype(dtype).tobytes())
    return file


def llmc(folder: pathlib.Path) -> pathlib.Path:
    formats.write_llmc(folder, DOCUMENTS, dtype="uint16")
    return folder / "stories.bin"


def npy(file: pathlib.Path, array) -> pathlib.Path:
    np.save(file, array)
    return file


def open_tokens(place: pathlib.Path, vocab_size: int = VOCAB) -> Tokens:
    opened = [open_token_file(file, vocab_size) for file in find_files(str(place)).of_split("train")]
    return Tokens(opened, vocab_size, END)


# ----------------------------------------------------------------------------------------------------------------------
# Documents


def test_a_document_of_megatron_may_be_several_sequences_or_none(tmp_path):
    flat(tmp_path / "a.bin", range(10))
    formats.write_index(tmp_path / "a.idx", [2, 3, 1, 4], [0, 4, 10, 12], [0, 0, 2, 2, 4])
    tokens = open_tokens(tmp_path / "a.bin")
    assert tokens.ends.tolist() == [5, 10]


def test_a_slice_is_cut_at_the_ends_of_documents(tmp_path, load):
    for file in (datatrove(tmp_path), flat(tmp_path / "a.bin")):
        packed = load(file, 16, split="train[10%:50%]")
        assert len(packed.tokens) == ENDS[29] - ENDS[5]
        assert packed[1].tolist() == FLAT[ENDS[5] + 16 : ENDS[5] + 33].tolist()


def test_held_out_are_the_same_documents_by_an_index_and_by_end_of_text_tokens(tmp_path):
    numbers = held_out_numbers(len(DOCUMENTS))
    expected = np.concatenate([DOCUMENTS[number] for number in numbers]).tolist()
    for file in (datatrove(tmp_path), flat(tmp_path / "a.bin")):
        kept, held = open_tokens(file).divide()
        assert held[:].tolist() == expected
        assert sorted([*kept[:].tolist(), *expected]) == sorted(FLAT.tolist())
        assert held.ends.tolist() == np.cumsum([len(DOCUMENTS[number]) for number in numbers]).tolist()
    few = Tokens([TokenFile(FLAT[: ENDS[5]], find_ends=lambda: ENDS[:6])])
    assert [len(part) for part in few.divide()] == [ENDS[5] * 95 // 100, ENDS[5] - ENDS[5] * 95 // 100]


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong with a file


def with_index(folder: pathlib.Path, places=(0, 8), **options) -> pathlib.Path:
    """A .bin of ten tokens of 2 bytes in two sequences, with an index."""
    formats.write_index(folder / "a.idx", [4, 6], places, [0, 1, 2], **options)
    return flat(folder / "a.bin", range(10))


def resized(file: pathlib.Path, by: int, name: str | None = None) -> pathlib.Path:
    """The file, after it, or the one beside it of this name, has gained or lost bytes at its end."""
    damaged = file.with_name(name or file.name)
    os.truncate(damaged, damaged.stat().st_size + by)
    return file


def write_bytes(file: pathlib.Path, content: bytes) -> pathlib.Path:
    file.write_bytes(content)
    return file


DAMAGED = {  # how a file is written; what its error says
    "Megatron, cut": (lambda d: resized(megatron(d), -2), r"its index .*a\.idx has"),
    "Megatron, a cut index": (lambda d: resized(megatron(d), -8, "a.idx"), r"a\.idx: .* its 60 sequences"),
    "Megatron, out of order": (lambda d: with_index(d, [12, 0]), "do not lie end to end in"),
    "Megatron, floats": (lambda d: with_index(d, dtype="float32"), "type 7 of tokens, where integers"),
    "Megatron, another version": (lambda d: with_index(d, version=2), "version 2 with type 8"),
    "datatrove, cut": (lambda d: resized(datatrove(d, "gpt2|2"), -2), r"a\.ds: it has [\d,]+ tokens, its index"),
    "datatrove, a cut index": (lambda d: resized(datatrove(d), -8, "a.ds.index"), "its index or metadata"),
    "nanoGPT, empty": (lambda d: write_bytes(d / "a.bin", b""), r"a\.bin: it is empty"),
    "nanoGPT, 4 bytes a token": (lambda d: flat(d / "a.bin", FLAT, "<u4"), "seem to have 4; save them as"),
    "llm.c, cut": (lambda d: resized(llmc(d), -2), r"it has [\d,]+ tokens, its header says"),
    "NumPy, cut": (lambda d: resized(npy(d / "a.npy", FLAT), -8), r"it has [\d,]+ tokens, its header says"),
    "NumPy, floats": (lambda d: npy(d / "a.npy", FLAT.astype(np.float32)), "its numbers are float32"),
    "NumPy, columns": (lambda d: npy(d / "a.npy", np.asfortranarray(TWO_ROWS)), "with rows end to end"),
    "packed": (lambda d: write_bytes(d / "a.ds.gz", b"x"), "it is packed, and token files are mapped; unpack it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_a_file_is_said_when_it_is_opened(tmp_path, load, name):
    write, said = DAMAGED[name]
    source = write(tmp_path)
    with pytest.raises(UserError, match=said) as raised:
        load(source)
    assert "\n" not in str(raised.value) and str(source.parent) in str(raised.value)


@pytest.mark.parametrize("options", [{"document_mask": True}, {"packing": "best-fit"}, {"split": "train[:50%]"}])
def test_where_nothing_tells_the_ends_of_documents_the_run_is_refused(tmp_path, load, options):
    endless = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", eos_token=None)
    source = flat(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a.bin: it does not say where its documents end, and .* no end-of-text token"):
        load(source, with_tokenizer=endless, **options)


def test_a_token_without_an_embedding_is_named_with_file_and_place(tmp_path, load):
    documents = [document.copy() for document in DOCUMENTS]
    documents[40][0] = VOCAB
    said = f"a.ds, token {ENDS[39]:,}: token id {VOCAB}, the model has 1,536"
    formats.write_datatrove(tmp_path, documents)
    packed = load(tmp_path / "a.ds", 16)
    assert packed[0].tolist() == FLAT[:17].tolist()  # a window without it
    with pytest.raises(UserError, match=said):
        packed[int(ENDS[39]) // 16]
    with pytest.raises(UserError, match=said):  # also before the run
        packed.tokens.fingerprint()
    npy(tmp_path / "a.npy", np.where(np.arange(100) == 70, -5, 3))
    with pytest.raises(UserError, match=r"a\.npy, token 70: token id -5, the model has 1,536; it was made with"):
        load(tmp_path / "a.npy", 16)[4]


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_what_belongs_to_a_token_file_is_not_listed(tmp_path):
    datatrove(megatron(tmp_path).parent)
    assert find_files(str(tmp_path)).left_out == []
    with pytest.raises(UserError, match=r"no such file or folder; there is .*/a\.bin"):
        find_files(str(tmp_path / "a"))  # as Megatron's flags name it


def test_token_files_are_not_joined_with_text_or_with_another_format(tmp_path, load):
    flat(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("A fox.")
    with pytest.raises(UserError, match=r"a\.bin has tokens that are read in place, .*b\.txt is of "):
        load(tmp_path)
    (tmp_path / "b.txt").unlink()
    npy(tmp_path / "b.npy", FLAT)
    with pytest.raises(UserError, match=r"b\.npy is of another format"):
        load(tmp_path)
    assert len(load(tmp_path / "*.npy"))


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


def test_the_run_warns_of_another_tokenizer_than_that_of_the_files(tmp_path, arguments, device, capfd):
    source = datatrove(tmp_path, f"gpt2|2\n{len(FLAT)}")
    assert train([*arguments, "--dataset", source], device) == 0
    said = capfd.readouterr().err
    assert f"warning: --tokenizer {ROOT / 'assets' / 'demo'}: {source} was tokenized by gpt2" in said


def test_a_run_on_token_files_needs_no_tokenizer(tmp_path, arguments, device):
    place = arguments.index("--tokenizer")
    without = [*arguments[:place], *arguments[place + 2 :]]
    assert train([*without, "--dataset", flat(tmp_path / "a.bin", FLAT % 90)], device) == 0


@pytest.mark.parametrize("flags", ["--sample-prompt x", "--eval-interval 1", "--document-mask"])
def test_a_tokenizer_is_taken_where_a_flag_asks_for_text_or_ends_of_documents(device, tmp_path, flags):
    settings = parse(["--dataset", flat(tmp_path / "a.bin"), *words(flags)])
    assert data.needs_tokenizer(settings, data.find(settings))
