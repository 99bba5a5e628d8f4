"""Tokenized corpora are trained on where they lie: their documents, slices and eval documents, and one line says what
is wrong with a file. test_promises.py has the sequences of every format."""

import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import pickle
import re
import types

import formats
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import losses_of, metrics_of, parse, train, words
from corpora import DEMO, END, demo_tokenizer

from harness import data
from harness.base.errors import UserError
from harness.data.eval_split import eval_document_numbers, take_out_eval_documents
from harness.data.files import find_files
from harness.data.formats import open_token_file
from harness.data.tokens import MappedTokens, Tokens

VOCAB = 1536  # of the demo model


DRAW = np.random.default_rng(0).integers
DOCUMENTS = [np.append(DRAW(1, VOCAB, DRAW(1, 29)), END) for _ in range(60)]
FLAT = np.concatenate(DOCUMENTS)
ENDS = np.cumsum([len(document) for document in DOCUMENTS])
TWO_ROWS = FLAT[: len(FLAT) // 2 * 2].reshape(2, -1)


def megatron(folder: pathlib.Path, documents=DOCUMENTS, dtype: str = "uint16") -> pathlib.Path:
    formats.write_megatron(folder, documents, dtype=dtype)
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


def open_tokens(file: pathlib.Path, vocab_size: int = VOCAB) -> Tokens:
    opened = [open_token_file(found, vocab_size) for found in find_files(str(file)).files_in_split("train")]
    return Tokens(opened, vocab_size, END)


# ----------------------------------------------------------------------------------------------------------------------
# Documents


def test_a_document_of_megatron_may_be_several_sequences_or_none(tmp_path):
    flat(tmp_path / "a.bin", range(10))
    formats.write_index(tmp_path / "a.idx", [2, 3, 1, 4], [0, 4, 10, 12], [0, 0, 2, 2, 4])
    tokens = open_tokens(tmp_path / "a.bin")
    assert tokens.doc_ends.tolist() == [5, 10]


def test_an_index_beside_files_without_one_says_where_its_documents_end(tmp_path, load):
    flat(tmp_path / "b.bin")
    before = load(tmp_path / "*.bin", 8, document_mask=True)
    flat(tmp_path / "a.bin", range(10, 18))
    formats.write_index(tmp_path / "a.idx", [3, 5], [0, 6], [0, 1, 2])
    sequence = load(tmp_path / "*.bin", 8, document_mask=True)[0]
    assert sequence.doc_starts.tolist() == [0, 3] and len(before) == len(FLAT[:-1]) // 8
    formats.write_index(tmp_path / "a.idx", [5, 3], [0, 10], [0, 1, 2])  # of the same tokens
    assert load(tmp_path / "*.bin", 8, document_mask=True)[0].doc_starts.tolist() == [0, 5]


def test_a_slice_is_cut_at_the_ends_of_documents(tmp_path, load):
    for file in (datatrove(tmp_path), flat(tmp_path / "a.bin")):
        packed = load(file, 16, split="train[10%:50%]")
        assert len(packed.tokens) == ENDS[29] - ENDS[5]
        assert packed[1].tolist() == FLAT[ENDS[5] + 16 : ENDS[5] + 33].tolist()


def test_eval_documents_are_the_same_by_an_index_and_by_end_of_text_tokens(tmp_path):
    numbers = eval_document_numbers(len(DOCUMENTS))
    expected = np.concatenate([DOCUMENTS[number] for number in numbers]).tolist()
    for file in (datatrove(tmp_path), flat(tmp_path / "a.bin")):
        kept, split = take_out_eval_documents(open_tokens(file))
        assert split[:].tolist() == expected
        assert sorted([*kept[:].tolist(), *expected]) == sorted(FLAT.tolist())
        assert split.doc_ends.tolist() == np.cumsum([len(DOCUMENTS[number]) for number in numbers]).tolist()
    few = Tokens([MappedTokens(FLAT[: ENDS[5]], read_doc_ends=lambda: ENDS[:6])])
    assert [len(part) for part in take_out_eval_documents(few)] == [ENDS[5] * 95 // 100, ENDS[5] - ENDS[5] * 95 // 100]


def test_boundaries_are_the_same_before_and_after_they_are_searched_for_in_all_files():
    """A document ends with its file, also without an end-of-text token there."""
    tokens = Tokens([MappedTokens(np.array([5, END, 6, 7])), MappedTokens(np.array([8, 9, END]))], end_of_text=END)
    searched = dataclasses.replace(tokens, known_doc_ends=tokens.file_doc_ends)
    assert searched.doc_ends.tolist() == [2, 4, 7]
    for first, last in itertools.combinations(range(8), 2):
        assert tokens.doc_starts_between(first, last).tolist() == searched.doc_starts_between(first, last).tolist()
    assert tokens.doc_starts_between(1, 7).tolist() == [0, 1, 3]


def append_document(file: pathlib.Path) -> None:
    with file.open("ab") as opened:
        opened.write(np.array([5, END], "<u2").tobytes())


OTHER_ENDS = {  # before the next start: (change of the file, end-of-text token, vocabulary, is the file read again)
    "nothing": (lambda file: None, END, VOCAB, False),
    "the file": (append_document, END, VOCAB, True),
    "the end-of-text token": (lambda file: None, 7, VOCAB, True),
    "the size of a token": (lambda file: None, END, 2**17, True),
}


@pytest.mark.parametrize("name", OTHER_ENDS)
def test_later_starts_do_not_read_a_token_file_for_its_boundaries(tmp_path, monkeypatch, name):
    file = flat(tmp_path / "a.ds", [5, 6, 7, END] * 250)  # whose size of a token follows from the vocabulary
    reads, find_doc_ends = [], Tokens._find_doc_ends
    monkeypatch.setattr(Tokens, "_find_doc_ends", lambda *found: reads.append(1) or find_doc_ends(*found))

    def start(end_of_text: int, vocab_size: int) -> tuple[list[int], np.ndarray]:
        reads.clear()
        tokenizer = types.SimpleNamespace(eos_token_id=end_of_text)
        reader = data.CorpusReader(tokenizer=tokenizer, seq_len=4, vocab_size=vocab_size, cache_dir=tmp_path / "cache")
        tokens = dataclasses.replace(open_tokens(file, vocab_size), end_of_text=end_of_text)
        return reader.with_doc_ends(tokens).doc_ends.tolist(), tokens.files[0].tokens

    start(END, VOCAB)
    assert reads
    change, end_of_text, vocab_size, are_read = OTHER_ENDS[name]
    change(file)
    found, tokens = start(end_of_text, vocab_size)
    assert bool(reads) == are_read
    assert found == sorted({*(np.flatnonzero(tokens == end_of_text) + 1).tolist(), len(tokens)})


def test_the_header_counts_documents_that_are_longer_than_a_sequence():
    ends = np.array([9, 13, 30])  # a sequence of 8 tokens has one more, its last label
    tokens = Tokens([MappedTokens(np.arange(30))], known_doc_ends=ends)
    reported = data.PackedDataset(tokens, 8).describe()
    assert reported == "concatenate, 1 of 3 documents (33.3 %) longer than a sequence of 8 tokens"
    assert data.PackedDataset(tokens, 16).describe() == ""


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong with a file


def with_index(folder: pathlib.Path, positions=(0, 8), lengths=(4, 6), documents=(0, 1, 2), **options) -> pathlib.Path:
    """A .bin of ten tokens of 2 bytes in two sequences, with an index."""
    formats.write_index(folder / "a.idx", lengths, positions, documents, **options)
    return flat(folder / "a.bin", range(10))


def resized(file: pathlib.Path, by: int, name: str | None = None) -> pathlib.Path:
    """The file, after it, or the one beside it of this name, has gained or lost bytes at its end."""
    damaged = file.with_name(name or file.name)
    os.truncate(damaged, damaged.stat().st_size + by)
    return file


def write_bytes(file: pathlib.Path, content: bytes) -> pathlib.Path:
    file.write_bytes(content)
    return file


def indexed(file: pathlib.Path, ends: list[int]) -> pathlib.Path:
    np.array(ends, "<u8").tofile(f"{file}.index")
    return file


DAMAGED = {  # how a file is written; what its error says
    "Megatron, cut": (lambda d: resized(megatron(d), -2), r"its index .*a\.idx has"),
    "Megatron, a cut index": (lambda d: resized(megatron(d), -8, "a.idx"), r"a\.idx: .* for 60 sequences"),
    "Megatron, out of order": (lambda d: with_index(d, [12, 0]), r"its index .*a\.idx has 6"),
    "Megatron, documents out of order": (lambda d: with_index(d, documents=[0, 3, 2]), "do not cover its 2 sequences"),
    "Megatron, a negative length": (lambda d: with_index(d, [0, 0], [-4, 10]), r"a\.bin: the ends of its documents"),
    "Megatron, floats": (lambda d: with_index(d, dtype="float32"), "dtype code 7 instead of integers"),
    "Megatron, another version": (lambda d: with_index(d, version=2), "version 2 with dtype code 8"),
    "datatrove, cut": (lambda d: resized(datatrove(d, "gpt2|2"), -2), r"a\.ds: it has [\d,]+ tokens, its index"),
    "datatrove, a cut index": (lambda d: resized(datatrove(d), -8, "a.ds.index"), "its index or metadata"),
    "datatrove, out of order": (lambda d: indexed(datatrove(d), [9, 5, len(FLAT)]), "ds: the ends of its documents"),
    "datatrove, masked": (lambda d: write_bytes(d / "a.ds.loss", b"1") and datatrove(d), r"\.ds\.loss .* is not read"),
    "nanoGPT, empty": (lambda d: write_bytes(d / "a.bin", b""), r"a\.bin: it is empty"),
    "nanoGPT, 4 bytes a token": (lambda d: flat(d / "a.bin", FLAT, "<u4"), "seem to have 4; save them as"),
    "llm.c, cut": (lambda d: resized(llmc(d), -2), r"it has [\d,]+ tokens, its header says"),
    "NumPy, cut": (lambda d: resized(npy(d / "a.npy", FLAT), -8), r"a\.npy: cannot be read \(mmap length"),
    "NumPy, no header": (lambda d: flat(d / "a.npy", FLAT), r"no header of NumPy.* name it a\.bin; .* np\.memmap\("),
    "NumPy, floats": (lambda d: npy(d / "a.npy", FLAT.astype(np.float32)), "its numbers are float32"),
    "NumPy, columns": (lambda d: npy(d / "a.npy", np.asfortranarray(TWO_ROWS)), "or 2 in C order"),
    "compressed": (lambda d: write_bytes(d / "a.ds.gz", b"x"), "it is compressed, and token files are mapped"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_a_file_is_reported_when_it_is_opened(tmp_path, load, name):
    write, printed = DAMAGED[name]
    source = write(tmp_path)
    with pytest.raises(UserError, match=printed) as raised:
        load(source, 8, split="train[:50%]")  # which needs the ends of documents
    assert "\n" not in str(raised.value) and str(source.parent) in str(raised.value)


@pytest.mark.parametrize("options", [{"document_mask": True}, {"packing": "best-fit"}, {"split": "train[:50%]"}])
def test_unknown_ends_of_documents_are_refused_if_they_are_needed(tmp_path, load, options):
    source = flat(tmp_path / "a.bin")
    for endless, missing in ((demo_tokenizer(eos_token=None), "demo has"), (None, "without a tokenizer there is")):
        problem = f"a.bin: it does not say where its documents end, and .*{missing} no end-of-text token"
        with pytest.raises(UserError, match=rf"{problem} \(eos_token\); give a tokenizer with one, or files"):
            load(source, with_tokenizer=endless, **options)


def test_a_step_of_one_token_documents_has_loss_0_and_is_not_skipped(tmp_path, arguments, device):
    """As in a file that was padded with end-of-text tokens: no label of such a sequence counts."""
    source = flat(tmp_path / "a.bin", np.full(100, END))
    flags = words("--document-mask --batch-size 1 --log-interval 1")
    assert train([*arguments, "--dataset", source, *flags], device) == 0
    assert {(line["loss"], line["skipped_steps"]) for line in metrics_of(tmp_path / "out" / "r")} == {(0, 0)}


def test_a_token_without_an_embedding_is_named_with_file_and_place(tmp_path, load):
    documents = [document.copy() for document in DOCUMENTS]
    documents[40][0] = VOCAB
    printed = f"a.ds, token {ENDS[39]:,}: token id {VOCAB}, the model has 1,536"
    formats.write_datatrove(tmp_path, documents)
    packed = load(tmp_path / "a.ds", 16)
    assert packed[0].tolist() == FLAT[:17].tolist()  # a sequence without it
    with pytest.raises(UserError, match=printed):
        packed[int(ENDS[39]) // 16]
    with pytest.raises(UserError, match=printed):  # also before the run
        packed.tokens.fingerprint()
    npy(tmp_path / "a.npy", np.where(np.arange(100) == 70, -5, 3))
    with pytest.raises(UserError, match=r"a\.npy, token 70: token id -5, the model has 1,536; it was made with"):
        load(tmp_path / "a.npy", 16)[4]


NEGATIVE = [5, 6, -7, 8]


def in_parquet(folder: pathlib.Path, dtype: str) -> pathlib.Path:
    ids = pyarrow.array([[1, 2], NEGATIVE], pyarrow.list_(pyarrow.type_for_alias(dtype)))
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": ids}), folder / "a.parquet")
    return folder / "a.parquet"


WITH_NEGATIVE = {  # how an id is written; its position in the error
    "bin": (lambda d, dtype: megatron(d, [np.array(NEGATIVE)], dtype), "token 2: token id -7"),
    "npy": (lambda d, dtype: npy(d / "a.npy", np.array(NEGATIVE, dtype)), "token 2: token id -7"),
    "parquet": (in_parquet, "row 2: [5, 6, -7, 8]"),
}


@pytest.mark.parametrize("vocab_size", [200, 40_000, 70_000, 2**31 + 9])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("kind", WITH_NEGATIVE)
def test_a_negative_id_is_named_whatever_its_type_and_the_vocabulary(tmp_path, load, kind, dtype, vocab_size):
    write, printed = WITH_NEGATIVE[kind]
    with pytest.raises(UserError, match=re.escape(printed)):
        load(write(tmp_path, dtype), 3, vocab_size=vocab_size)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Processes


MAPPED = {
    "Megatron": megatron,
    "nanoGPT": lambda d: flat(d / "a.bin"),
    "NumPy": lambda d: npy(d / "a.npy", FLAT),
    "the cache": lambda d: write_bytes(d / "a.txt", b"<|endoftext|>".join([b"A fox saw a red ball."] * 300)),
}


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("name", MAPPED)
def test_sequences_are_pickled_without_the_tokens_of_their_files(tmp_path, load, name, packing):
    """As they are for data workers that are not forked, which is the default from Python 3.14 on."""
    sequences = load(MAPPED[name](tmp_path), 16, packing=packing, document_mask=True, split="train[:50%]")
    assert len(pickle.dumps(sequences.tokens.files)) < 1000 < sequences.tokens.files[0].tokens.nbytes
    again = pickle.loads(pickle.dumps(sequences))
    assert len(again) == len(sequences)
    collate = pickle.loads(pickle.dumps(data.create_collate_fn()))
    for index in range(len(sequences)):
        assert str(collate([again[index]])) == str(data.create_collate_fn()([sequences[index]]))


@pytest.fixture
def not_forked():
    """The default way to start processes of Python 3.14."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
@pytest.mark.usefixtures("not_forked")
@pytest.mark.parametrize("flags", ["--packing best-fit --document-mask", "--streaming --streams 2"])
def test_data_workers_that_are_not_forked_read_what_the_rank_would(tmp_path, arguments, device, flags):
    given = [*arguments, *words(f"{flags} --log-interval 1 --eval-interval 2")]
    for workers in (0, 1):
        assert train([*given, "--num-workers", workers, "--run-name", workers], device) == 0
    assert losses_of(tmp_path / "out" / "0") == losses_of(tmp_path / "out" / "1")


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


def test_a_resume_with_another_end_of_text_is_refused_if_documents_end_by_it(tmp_path, arguments, device):
    other = demo_tokenizer()
    other.eos_token = other.convert_ids_to_tokens(7)
    other.save_pretrained(tmp_path / "other")
    flags = words("--document-mask --resume auto --final-checkpoint")
    run = [*arguments, "--dataset", flat(tmp_path / "a.bin"), *flags]
    assert train(run, device) == 0
    again = [*run, "--num-steps", "3", "--tokenizer", tmp_path / "other"]
    with pytest.raises(UserError, match=r"^--tokenizer: its end-of-text token, by which the documents of a end"):
        train(again, device)
    assert train([*again, "--no-document-mask"], device) == 0  # which is reported


def test_the_run_warns_of_another_tokenizer_than_that_of_the_files(tmp_path, arguments, device, capfd):
    source = datatrove(tmp_path, f"gpt2|2\n{len(FLAT)}")
    assert train([*arguments, "--dataset", source], device) == 0
    printed = capfd.readouterr().err
    assert f"warning: --tokenizer {DEMO}: {source} was tokenized by gpt2" in printed


def test_a_run_on_token_files_needs_no_tokenizer(tmp_path, arguments, device):
    at = arguments.index("--tokenizer")
    without = [*arguments[:at], *arguments[at + 2 :]]
    assert train([*without, "--dataset", flat(tmp_path / "a.bin", FLAT % 90)], device) == 0


@pytest.mark.parametrize("flags", ["--sample-prompt x", "--eval-interval 1", "--document-mask"])
def test_a_tokenizer_is_taken_if_a_flag_asks_for_text_or_ends_of_documents(device, tmp_path, flags):
    settings = parse(["--dataset", flat(tmp_path / "a.bin"), *words(flags)])
    assert data.needs_tokenizer(settings, data.find(settings))


@pytest.mark.parametrize("flags", ["", "--eval-split {}/held.bin", "--eval-split validation"])
def test_an_evaluation_of_a_split_of_token_files_needs_no_tokenizer(device, tmp_path, flags):
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    for file in (folder / "train.bin", folder / "val.bin", tmp_path / "held.bin"):
        flat(file)
    settings = parse(["--dataset", folder, "--eval-interval", 1, *words(flags.replace("{}", str(tmp_path)))])
    assert not data.needs_tokenizer(settings, data.find(settings))
