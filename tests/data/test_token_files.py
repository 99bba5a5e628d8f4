"""Tokenized corpora are trained on where they lie: the same documents give the same windows in every format, and one
line says what is wrong with a file. The files are written here byte by byte, by the published layouts."""

import json
import pathlib
import struct

import multirank
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, losses_of, parse, train, words, write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

import utils
from harness.base.errors import UserError
from harness.data import corpora, held_out, loading, streaming
from harness.data.corpus_files import find_files, local_files
from harness.data.mapped import Mapping, TokenFile
from harness.data.readers import megatron
from harness.data.sample_order import WindowOrder
from harness.data.token_files import JoinedTokens, is_mapped, last_part, open_token_files
from harness.data.windows import create_collate_fn

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


def write_arrow(file: pathlib.Path, column, name: str = "input_ids", compression=None, layout: str = "stream"):
    """Several record batches in one of Arrow's two layouts."""
    table = pyarrow.table({"number": list(range(len(column))), name: column})
    make = pyarrow.ipc.new_stream if layout == "stream" else pyarrow.ipc.new_file
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with make(str(file), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=7)
    return file


def write_disk(folder: pathlib.Path) -> pathlib.Path:
    """A folder of `datasets.save_to_disk` with two files, and with a copy that its `map` has left there."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (DOCUMENTS[:25], DOCUMENTS[25:]), strict=True):
        write_arrow(folder / name, list_column(part))
    write_arrow(folder / "cache-0123456789abcdef.arrow", list_column(DOCUMENTS))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


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


def write_npz(file: pathlib.Path) -> pathlib.Path:
    np.savez_compressed(file, tokens=FLAT.astype(np.int16))
    return file


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
    "Arrow, stream": (lambda folder: write_arrow(folder / "a.arrow", list_column()), True),
    "Arrow, file": (lambda folder: write_arrow(folder / "a.arrow", list_column(), layout="file"), True),
    "Arrow, large lists": (lambda folder: write_arrow(folder / "a.arrow", list_column(kind=LARGE_LIST)), True),
    "datasets, a folder": (lambda folder: write_disk(folder / "f"), True),
}
CACHED = {
    "NumPy, .npz": lambda folder: write_npz(folder / "a.npz"),
    "Arrow, compressed": lambda folder: write_arrow(folder / "a.arrow", list_column(), compression="zstd"),
    "Parquet, large lists": lambda folder: write_parquet(folder / "a.parquet", LARGE_LIST),
    "Parquet, int64": lambda folder: write_parquet(folder / "a.parquet", INT64_LIST),
    "JSON lines": lambda folder: write_jsonl(folder / "a.jsonl"),
}
WRITERS = {name: write for name, (write, _) in MAPPED.items()} | CACHED


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")


def load(source, folder: pathlib.Path, tokenizer=None, seq_len: int = 16, **options):
    """The corpus as the program opens it."""
    options = {"vocab_size": VOCAB, "cache_dir": folder / "cache"} | options
    return utils.get_dataset(tokenizer, seq_len, dataset=str(source), **options)


def open_tokens(file: pathlib.Path, vocab_size: int = VOCAB) -> JoinedTokens:
    return open_token_files([file], "text", vocab_size)


# ----------------------------------------------------------------------------------------------------------------------
# The same documents


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_documents_give_the_same_windows_in_every_format(tmp_path, tokenizer, name):
    packed = load(WRITERS[name](tmp_path), tmp_path, tokenizer)
    length = len(two_rows().ravel()) if name == "NumPy, two dimensions" else len(FLAT)
    assert len(packed) == (length - 1) // 16
    for index in range(len(packed)):
        window = packed[index]
        assert window.dtype == np.uint16
        assert window.tolist() == FLAT[16 * index : 16 * index + 17].tolist()
    if length == len(FLAT):
        expected = utils.PackedDataset(FLAT.astype(np.uint16), 16).fingerprint()
        assert packed.fingerprint() == expected
    assert (packed.mapped is not None) == (name in MAPPED)
    assert (tmp_path / "cache").exists() == (name not in MAPPED)


@pytest.mark.parametrize("name", MAPPED)
def test_the_ends_of_documents_are_those_of_the_format(tmp_path, name):
    write, has_ends = MAPPED[name]
    ends = load(write(tmp_path), tmp_path).mapped.document_ends
    if not has_ends:
        assert ends is None
        return
    assert ends.tolist() == ENDS.tolist() and ends.dtype == np.int64


def test_the_program_has_the_same_losses_in_every_format(tmp_path, device):
    """To the last digit, with a part of the documents held out: by the index, or by the end-of-text tokens."""
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES | {"vocab_size": VOCAB})
    flags = words("--num-steps 2 --sequence-length 32 --batch-size 2 --num-workers 0 --precision fp32 --log-interval 1")
    flags += ["--model", model, "--tokenizer", str(ROOT / "assets" / "demo"), "--output-dir", str(tmp_path / "out")]
    flags += [*words("--eval-interval 2 --no-final-checkpoint"), "--cache-dir", str(tmp_path / "cache")]
    seen = {}
    for number, name in enumerate(
        ("JSON lines", "Megatron, int32", "datatrove, 4 bytes", "nanoGPT", "datasets, a folder")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = WRITERS[name](folder)
        assert train([*flags, "--dataset", source, "--run-name", f"r{number}"], device) == 0
        lines = (tmp_path / "out" / f"r{number}" / "metrics.jsonl").read_text().splitlines()
        evaluated = [json.loads(line).get("eval_loss") for line in lines]
        seen[name] = losses_of(tmp_path / "out" / f"r{number}"), evaluated
    assert len(seen["nanoGPT"][0]) == 2 and any(seen["nanoGPT"][1])
    assert all(figures == seen["JSON lines"] for figures in seen.values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 30))
def test_joined_files_are_one_array(tmp_path_factory, sizes, first, last):
    """Slices within a file, over several and over empty ones, as those of a list."""
    folder = tmp_path_factory.mktemp("joined")
    arrays = [np.arange(100 * number, 100 * number + size, dtype="<u4") for number, size in enumerate(sizes)]
    files = []
    for number, array in enumerate(arrays):
        (folder / f"{number}").write_bytes(array.tobytes())
        mapping = Mapping(folder / f"{number}")
        files.append(TokenFile("test", mapping, [mapping.numbers("<u4")]))
    joined, flat = JoinedTokens(files, 1000), np.concatenate(arrays)
    assert len(joined) == len(flat)
    assert joined[first:last].tolist() == flat[first:last].tolist()
    assert joined[first:last].dtype == np.uint16


def test_a_window_of_one_file_is_a_view_of_it(tmp_path):
    joined = open_tokens(write_nanogpt(tmp_path / "a.bin"))
    assert np.shares_memory(joined[3:20], joined.files[0].mapping.bytes)


def test_sequences_of_megatron_come_in_the_order_of_its_index(tmp_path):
    (tmp_path / "a.bin").write_bytes(FLAT.astype("<u2").tobytes())
    order = np.random.default_rng(1).permutation(len(DOCUMENTS))
    lengths = [len(DOCUMENTS[number]) for number in order]
    places = [2 * (ENDS[number] - len(DOCUMENTS[number])) for number in order]
    write_index(tmp_path / "a.idx", lengths, places, range(len(order) + 1))
    joined = open_tokens(tmp_path / "a.bin")
    assert joined[0 : len(joined)].tolist() == np.concatenate([DOCUMENTS[number] for number in order]).tolist()
    assert joined.document_ends.tolist() == np.cumsum(lengths).tolist()


def test_a_document_of_megatron_may_be_several_sequences_or_none(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(10, dtype="<u2").tobytes())
    write_index(tmp_path / "a.idx", [2, 3, 1, 4], [0, 4, 10, 12], [0, 0, 2, 2, 4])
    joined = open_tokens(tmp_path / "a.bin")
    assert joined.document_ends.tolist() == [5, 10]
    assert joined.place(7) == f"{tmp_path / 'a.bin'}, document 4, token 2"


def test_an_index_longer_than_what_is_checked_at_once_is_checked_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "CHUNK", 7)
    write_megatron(tmp_path / "a.bin")
    assert open_tokens(tmp_path / "a.bin").document_ends.tolist() == ENDS.tolist()
    lengths = [len(document) for document in DOCUMENTS]
    places = np.cumsum([0, *lengths[:-1]]) * 2
    write_index(tmp_path / "a.idx", lengths, places, [*range(40), 38, *range(41, 61)])
    with pytest.raises(UserError, match=r"a\.idx, document 40: it ends before it begins"):
        open_tokens(tmp_path / "a.bin")
    lengths[33] = -1
    write_index(tmp_path / "a.idx", lengths, places, range(61))
    with pytest.raises(UserError, match=r"a\.idx, document 34, sequence 33: its length is -1 tokens"):
        open_tokens(tmp_path / "a.bin")


def test_a_list_column_under_another_name_is_named_by_text_field(tmp_path, tokenizer):
    arrow = write_arrow(tmp_path / "a.arrow", list_column(), name="tokens")
    assert load(arrow, tmp_path, text_field=("input_ids", "tokens")).mapped is not None
    with pytest.raises(UserError, match=r"--text-field text: no such field in .* \(fields: number, tokens\)"):
        load(arrow, tmp_path, tokenizer)
    jsonl = write_jsonl(tmp_path / "a.jsonl", name="tokens")
    packed = load(jsonl, tmp_path, tokenizer, text_field="tokens")
    assert packed.fingerprint() == load(arrow, tmp_path, text_field="tokens").fingerprint()


def test_a_text_column_of_arrow_is_tokenized_as_that_of_other_formats(tmp_path, tokenizer):
    texts = ["Once upon a time.", "The end.", "A fox."] * 9
    arrow = write_arrow(tmp_path / "a.arrow", pyarrow.array(texts), name="text")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = load(tmp_path / "a.jsonl", tmp_path, tokenizer).fingerprint()
    assert load(arrow, tmp_path, tokenizer).fingerprint() == expected
    streamed = streaming.stream_dataset(tokenizer, 16, dataset=str(arrow), vocab_size=VOCAB)
    assert streamed.head(0).fingerprint() == expected


# ----------------------------------------------------------------------------------------------------------------------
# Splits, held-out documents, places


def test_the_split_of_a_token_file_is_a_word_in_its_name(tmp_path):
    (tmp_path / "gpt").mkdir()
    write_nanogpt(tmp_path / "gpt" / "train.bin", FLAT[:400])
    write_nanogpt(tmp_path / "gpt" / "val.bin", FLAT[400:])
    assert len(load(tmp_path / "gpt", tmp_path).tokens) == 400
    assert load(tmp_path / "gpt", tmp_path, split="validation")[0].tolist() == FLAT[400:417].tolist()


@pytest.mark.parametrize("name", ["datatrove, 2 bytes", "nanoGPT"])
def test_a_slice_is_cut_at_the_ends_of_documents(tmp_path, tokenizer, name):
    source = WRITERS[name](tmp_path)
    packed = load(source, tmp_path, tokenizer, split="train[10%:50%]")
    assert len(packed.tokens) == ENDS[29] - ENDS[5]
    assert packed[1].tolist() == FLAT[ENDS[5] + 16 : ENDS[5] + 33].tolist()


def test_held_out_are_the_same_documents_by_an_index_and_by_end_of_text_tokens(tmp_path):
    indexed, scanned = open_tokens(write_datatrove(tmp_path / "a.ds")), open_tokens(write_nanogpt(tmp_path / "a.bin"))
    parts = held_out.divide(indexed, None), held_out.divide(scanned, END), held_out.divide(FLAT, END)
    found = []
    for tokens, (kept, held) in zip((indexed, scanned, FLAT), parts, strict=True):
        found.append([held_out.Stretches(tokens, *part)[0 : len(FLAT)].tolist() for part in (kept, held)])
    assert found[0] == found[1] == found[2]
    numbers = held_out.held_out_numbers(len(DOCUMENTS))
    assert found[0][1] == np.concatenate([DOCUMENTS[number] for number in numbers]).tolist()


def test_the_numbers_of_held_out_documents_are_those_of_every_version():
    expected = [number for number in range(1000) if held_out.is_held_out(number)]
    assert held_out.held_out_numbers(1000).tolist() == expected
    assert expected[:6] == [9, 23, 57, 71, 88, 106]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.lists(st.integers(0, 60), max_size=8))
def test_parts_of_an_array_know_where_their_documents_end(lengths, cuts):
    class Known:
        document_ends = np.cumsum(lengths)

        def __len__(self):
            return int(self.document_ends[-1])

    total = sum(lengths)
    bounds = sorted({min(cut, total) for cut in cuts})
    bounds = bounds[: len(bounds) // 2 * 2]
    starts, ends = np.array(bounds[::2], np.int64), np.array(bounds[1::2], np.int64)
    if not len(starts):
        return
    last_of_document = set((np.cumsum(lengths) - 1).tolist()) | {end - 1 for end in ends.tolist()}
    kept = [position for first, last in zip(starts, ends, strict=True) for position in range(first, last)]
    expected = [number + 1 for number, position in enumerate(kept) if position in last_of_document]
    assert held_out.Stretches(Known(), starts, ends).document_ends.tolist() == expected


def test_the_documents_of_a_window_are_named_with_their_files(tmp_path):
    folder = several_megatron(tmp_path / "f")
    joined = load(folder, tmp_path).mapped
    first, last = int(ENDS[18]) + 1, int(ENDS[20]) + 1
    a, b = folder / "a_text_document.bin", folder / "b_text_document.bin"
    assert joined.documents(first, last) == [(f"{a}, document 20", 1), (f"{b}, document 1", 0), (f"{b}, document 2", 0)]
    flat = open_tokens(write_nanogpt(tmp_path / "c.bin"))
    assert flat.documents(40, 50) == [(str(tmp_path / "c.bin"), 40)]


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
        r"sequence 59: \d+ tokens from byte [\d,]+ on are not in a\.bin of",
    ),
    "Megatron, an odd size": (
        lambda d: cut(write_megatron(d / "a.bin"), 1),
        r"bytes are no whole number of 2-byte numbers",
    ),
    "Megatron, a cut index": (
        lambda d: cut_beside(write_megatron(d / "a.bin"), d / "a.idx", 8),
        r"a\.idx: .* bytes, where its 60 sequences",
    ),
    "Megatron, a cut header": (
        lambda d: cut_beside(with_index(d / "a.bin", [], [], []), d / "a.idx", 1),
        "it ends within its header",
    ),
    "Megatron, no index": (
        lambda d: cut_beside(write_megatron(d / "a.bin"), d / "a.idx", 1270),
        "it begins with b'', not with",
    ),
    "Megatron, an index past its file": (
        lambda d: with_index(d / "a.bin", [4, 7], [0, 8], [0, 1, 2]),
        r"a\.idx, document 2, sequence 1: 7 tokens from byte 8 on are not in a\.bin of 20 bytes",
    ),
    "Megatron, a place past its file": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 800], [0, 1, 2]),
        r"6 tokens from byte 800 on are not in a\.bin",
    ),
    "Megatron, a place between tokens": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 7], [0, 1, 2]),
        r"6 tokens from byte 7 on are not in",
    ),
    "Megatron, a negative length": (
        lambda d: with_index(d / "a.bin", [14, -4], [0, 28], [0, 2]),
        r"document 1, sequence 0: 14 tokens|its length is -4",
    ),
    "Megatron, a negative length that its places follow": (
        lambda d: with_index(d / "a.bin", [5, -1, 6], [0, 10, 8], [0, 1, 2, 3]),
        r"a\.idx, document 2, sequence 1: its length is -1 tokens",
    ),
    "Megatron, more tokens than its index": (
        lambda d: with_index(d / "a.bin", [4, 5], [0, 8], [0, 1, 2]),
        r"a\.bin: it has 10 tokens, its index a\.idx has 9",
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
    "Megatron, an unknown type": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 2], code=9),
        "type 9 of tokens",
    ),
    "Megatron, another version": (
        lambda d: with_index(d / "a.bin", [4, 6], [0, 8], [0, 1, 2], version=2),
        "version 2, where only 1 is known",
    ),
    "datatrove, a cut file": (
        lambda d: cut(write_datatrove(d / "a.ds"), 2),
        r"a\.ds: it has [\d,]+ tokens, its metadata says",
    ),
    "datatrove, a cut file without metadata": (
        lambda d: cut(write_datatrove(d / "a.ds", metadata=None), 2),
        r"a\.ds: .* bytes are not .* tokens of 2 or 4 bytes",
    ),
    "datatrove, an odd size": (
        lambda d: cut(write_datatrove(d / "a.ds"), 1),
        "bytes are no whole number of 2-byte numbers",
    ),
    "datatrove, a cut index": (
        lambda d: cut_beside(write_datatrove(d / "a.ds"), d / "a.ds.index", 8),
        r"a\.ds\.index: its documents end at token [\d,]+, a\.ds has",
    ),
    "datatrove, an odd index": (
        lambda d: cut_beside(write_datatrove(d / "a.ds"), d / "a.ds.index", 3),
        "no whole number of 8-byte entries",
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
    "nanoGPT, an odd size": (
        lambda d: cut(write_nanogpt(d / "a.bin"), 1),
        "bytes are no whole number of 2-byte numbers",
    ),
    "nanoGPT, empty": (lambda d: write_bytes(d / "a.bin", b""), r"a\.bin: it is empty"),
    "nanoGPT, 4 bytes a token": (FLAT_32, "has 2 bytes a token, and these seem to have 4; save them as .npy"),
    "llm.c, a cut file": (
        lambda d: cut(write_llmc(d / "a.bin", "uint16"), 2),
        r"it has [\d,]+ tokens, its header says [\d,]+",
    ),
    "llm.c, another count": (lambda d: write_llmc(d / "a.bin", "uint32", count=7), "its header says 7"),
    "llm.c, a cut header": (
        lambda d: write_bytes(d / "a.bin", np.array([20240520, 1, 0, 0], "<i4").tobytes()),
        "it ends within llm.c's header",
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
    "NumPy, a cut file": (lambda d: cut(write_npy(d / "a.npy", FLAT), 8), r"it has [\d,]+ tokens, its header says"),
    "NumPy, no array": (
        lambda d: write_bytes(d / "a.npy", b"no array at all"),
        r"a\.npy: cannot be read \(the magic string",
    ),
    "NumPy, empty": (lambda d: write_bytes(d / "a.npy", b""), r"a\.npy: it is empty"),
    "NumPy, a zip of floats": (
        lambda d: (np.savez(d / "a.npz", a=FLAT / 2), d / "a.npz")[1],
        "array 'a': its numbers are float64",
    ),
    "NumPy, a cut zip": (
        lambda d: cut(write_npz(d / "a.npz"), 30),
        r"a\.npz: cannot be read \(File is not a zip file\)",
    ),
    "NumPy, a zip of two": (
        lambda d: (np.savez(d / "a.npz", a=FLAT, b=FLAT), d / "a.npz")[1],
        r"no such field in .*a\.npz \(fields: a, b\)",
    ),
    "NumPy, a negative id in a zip": (
        lambda d: (np.savez(d / "a.npz", a=np.array([1, -2])), d / "a.npz")[1],
        r"array 1: token 1 is -2, no token id",
    ),
    "Arrow, a cut file": (
        lambda d: cut(write_arrow(d / "a.arrow", list_column()), 8),
        "the mark at its end is not there",
    ),
    "Arrow, no Arrow": (
        lambda d: write_bytes(d / "a.arrow", b"ARROW1 but not more than that"),
        r"a\.arrow: cannot be read",
    ),
    "Arrow, empty": (lambda d: write_bytes(d / "a.arrow", b""), r"a\.arrow: it is empty"),
    "Arrow, a null": (
        lambda d: write_arrow(d / "a.arrow", pyarrow.array([[1]] * 9 + [None], pyarrow.list_(pyarrow.int32()))),
        "row 10: null instead of token ids",
    ),
    "Arrow, a null in a row": (
        lambda d: write_arrow(d / "a.arrow", pyarrow.array([[1], [2, None]], pyarrow.list_(pyarrow.int32()))),
        "row 2: null instead of token ids",
    ),
    "packed": (lambda d: write_bytes(d / "a.ds.gz", b"x"), "it is packed, and token files are mapped; unpack it"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_with_a_file_is_said_when_it_is_opened(tmp_path, tokenizer, name):
    write, said = DAMAGED[name]
    source = write(tmp_path)
    corpus = {"tokenizer": tokenizer, "seq_len": 4, "dataset": str(source), "vocab_size": VOCAB}
    with pytest.raises(UserError, match=said) as raised:
        corpora.read_cached(utils.get_dataset, corpus, "train", cache_dir=tmp_path / "cache")
    assert "\n" not in str(raised.value)
    assert str(source.parent) in str(raised.value)


def test_a_token_without_an_embedding_is_named_with_file_document_and_offset(tmp_path):
    documents = [document.copy() for document in DOCUMENTS]
    documents[40][0] = VOCAB
    said = f"a.ds, document 41, token 0: token id {VOCAB}, the model has 1,536"
    packed = load(write_datatrove(tmp_path / "a.ds", documents), tmp_path)
    holding = (ENDS[39]) // 16
    assert packed[0].tolist() == FLAT[:17].tolist()  # a window without it
    with pytest.raises(UserError, match=said):
        packed[int(holding)]
    with pytest.raises(UserError, match=said):  # also before the run
        packed.fingerprint()
    packed = load(write_nanogpt(tmp_path / "a.bin", np.concatenate(documents)), tmp_path)
    with pytest.raises(UserError, match=rf"a\.bin, token {ENDS[39]:,}: token id {VOCAB}, "):
        packed[int(holding)]
    write_npy(tmp_path / "a.npy", np.where(np.arange(100) == 70, -5, 3))
    with pytest.raises(UserError, match=r"a\.npy, token 70: token id -5, the model has 1,536; it was made with"):
        load(tmp_path / "a.npy", tmp_path)[4]


def test_the_last_id_of_a_vocabulary_is_taken_and_the_next_is_not(tmp_path):
    file = write_npy(tmp_path / "a.npy", np.array([3, 9, 3, 3], np.int16))
    assert open_tokens(file, vocab_size=10)[0:4].tolist() == [3, 9, 3, 3]
    with pytest.raises(UserError, match="token 1: token id 9, the model has 9"):
        open_tokens(file, vocab_size=9)[0:4]
    large = write_npy(tmp_path / "b.npy", np.array([65_536, 1], np.uint32))
    assert open_tokens(large, vocab_size=65_537)[0:2].tolist() == [65_536, 1]


def test_the_program_ends_with_one_line_about_a_token_without_an_embedding(tmp_path, mistake):
    write_datatrove(tmp_path / "a.ds", [*DOCUMENTS, np.array([60_000, END])])
    said = mistake("--dataset", tmp_path / "a.ds")
    assert said.startswith(f"--dataset {tmp_path / 'a.ds'}, document 61, token 0: token id 60000, the model has ")


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_what_belongs_to_a_token_file_is_no_data_and_is_not_listed(tmp_path):
    several_megatron(tmp_path / "m")
    (tmp_path / "d").mkdir()
    write_datatrove(tmp_path / "d" / "a.ds")
    (tmp_path / "d" / "merged.ds.metadata").write_text("gpt2|2\n7\n")  # datatrove's, of a merged corpus
    (tmp_path / "d" / "a.ds.loss").write_bytes(b"")
    write_disk(tmp_path / "f")
    assert find_files(str(tmp_path / "m"))[1] == []
    assert find_files(str(tmp_path / "d"))[1] == ["a.ds.loss"]
    files, left_out = find_files(str(tmp_path / "f"))
    assert [file.name for file in files] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert left_out == ["cache-0123456789abcdef.arrow (not in state.json)"]


def test_a_state_json_beside_text_is_listed_as_before(tmp_path):
    (tmp_path / "a.txt").write_text("A fox.")
    (tmp_path / "state.json").write_text("{}")
    assert find_files(str(tmp_path))[1] == ["state.json"]


@pytest.mark.parametrize("name", ["b.idx", "b.ds.index"])
def test_an_index_without_its_file_is_an_error(tmp_path, name):
    write_megatron(tmp_path / "a.bin")
    (tmp_path / name).write_bytes(b"")
    owner = name.replace(".idx", ".bin").replace(".index", "")
    with pytest.raises(UserError, match=f"{name}: it is the index of {owner}, which is not there; restore it"):
        local_files(str(tmp_path))


def test_an_index_or_a_name_without_its_ending_is_answered_with_the_file(tmp_path):
    write_megatron(tmp_path / "a.bin")
    with pytest.raises(UserError, match=r"a\.idx: needs .* files, .*; give a\.bin"):
        local_files(str(tmp_path / "a.idx"))
    with pytest.raises(UserError, match=r"no such file or folder; there is .*/a\.bin"):  # as Megatron's flags name it
        local_files(str(tmp_path / "a"))


def test_token_files_are_not_joined_with_text_or_with_another_format(tmp_path):
    write_nanogpt(tmp_path / "a.bin")
    (tmp_path / "b.txt").write_text("A fox.")
    with pytest.raises(
        UserError, match=rf"a\.bin has tokens that are read in place, .*b\.txt is of .*'{tmp_path}/\*\.bin'"
    ):
        load(tmp_path, tmp_path)
    (tmp_path / "b.txt").unlink()
    write_npy(tmp_path / "b.npy", FLAT)
    with pytest.raises(UserError, match=r"b\.npy is of another format"):
        load(tmp_path, tmp_path)
    assert load(tmp_path / "*.npy", tmp_path).mapped.describe().startswith("read in place, 1 file (NumPy's .npy, int64")


def test_arrow_files_of_which_one_is_compressed_go_through_the_cache_together(tmp_path, tokenizer):
    (tmp_path / "f").mkdir()
    write_arrow(tmp_path / "f" / "a.arrow", list_column(DOCUMENTS[:30]))
    write_arrow(tmp_path / "f" / "b.arrow", list_column(DOCUMENTS[30:]), compression="lz4")
    assert not is_mapped(local_files(str(tmp_path / "f")))
    packed = load(tmp_path / "f", tmp_path, tokenizer)
    assert packed.fingerprint() == utils.PackedDataset(FLAT.astype(np.uint16), 16).fingerprint()


def test_a_bin_is_said_to_be_what_it_was_taken_for(tmp_path):
    said = {
        write_megatron(tmp_path / "a.bin"): "Megatron's .bin with .idx, uint16",
        write_nanogpt(tmp_path / "b.bin"): "nanoGPT's flat .bin without header, uint16",
        write_llmc(tmp_path / "c.bin", "uint32"): "llm.c's .bin with a header, uint32",
    }
    for file, kind in said.items():
        assert open_tokens(file).describe() == f"read in place, 1 file ({kind}), tokenizer not known"


def test_token_files_are_not_streamed(tmp_path, tokenizer):
    with pytest.raises(UserError, match="has token files, which are read in place; leave out --streaming"):
        streaming.stream_dataset(tokenizer, 4, dataset=str(write_nanogpt(tmp_path / "a.bin")), vocab_size=VOCAB)


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


@pytest.mark.parametrize("metadata, name", [("gpt2|2\n{count}\n1 T", "gpt2"), ("Unknown Tokenizer|2|2\n{count}", None)])
def test_the_tokenizer_of_datatroves_metadata_is_known(tmp_path, metadata, name):
    joined = open_tokens(write_datatrove(tmp_path / "a.ds", metadata=metadata))
    assert joined.tokenizer_name == name
    assert joined.describe().endswith("tokenized by gpt2" if name else "tokenizer not known")


def test_files_of_two_tokenizers_are_refused(tmp_path):
    write_datatrove(tmp_path / "a.ds")
    write_datatrove(tmp_path / "b.ds", metadata="llama|2\n{count}")
    with pytest.raises(UserError, match=r"a\.ds was tokenized by gpt2, .*b\.ds by llama"):
        load(tmp_path, tmp_path)


def test_a_tokenizer_is_the_same_by_its_path_and_by_its_hub_id():
    names = ["HuggingFaceTB/SmolLM3-3B", "/models/SmolLM3-3B/", "SmolLM3-3B", "/models/SmolLM3-3B/tokenizer.json"]
    assert {last_part(name) for name in names} == {"SmolLM3-3B"}


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


@pytest.mark.parametrize("name", ["JSON lines", "NumPy, .npz", "Parquet, int64", "Arrow, compressed"])
def test_the_tokenizer_of_token_ids_that_go_through_the_cache_is_not_known(tmp_path, tokenizer, name):
    source = WRITERS[name](tmp_path)
    for _ in ("tokenized", "from the cache"):
        assert corpora.describe_tokenizer(load(source, tmp_path, tokenizer)) == "not known (the records are token ids)"


def test_a_header_says_nothing_of_the_tokenizer_of_text_and_names_the_sources_of_a_mixture(tmp_path, device, tokenizer):
    write_jsonl(tmp_path / "ids.jsonl")
    text = [json.dumps({"text": "A fox ran. " * 9}) for _ in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(text))
    write_datatrove(tmp_path / "a.ds")
    config = AutoConfig.for_model("llama", vocab_size=VOCAB)
    names = ["text.jsonl:0.4", "ids.jsonl:0.3", "a.ds:0.3"]
    given = ["--dataset", *(tmp_path / name for name in names), "--cache-dir", tmp_path / "cache"]
    data, _ = loading.load_data(parse([*given, "--sequence-length", 8]), tokenizer, config, utils.get_dataset)
    expected = "ids: not known (the records are token ids); a: gpt2, as the files say (tokens are read in place)"
    assert data.header["tokenizer"] == expected


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_with_a_document_mask_an_index_says_where_documents_begin(tmp_path, tokenizer, packing):
    """Without a single end-of-text token."""
    generator = np.random.default_rng(1)
    documents = [generator.integers(1, VOCAB, length) for length in generator.integers(1, 30, 60)]
    write_megatron(tmp_path / "a.bin", documents)
    packed = load(tmp_path / "a.bin", tmp_path, tokenizer, packing=packing, document_mask=True)
    collate = create_collate_fn(tokenizer.eos_token_id)
    lengths = []
    for index in range(len(packed)):
        passages = packed.documents(index)
        starts = [start for start, _, _ in passages if start < packed.seq_len]
        positions = collate([packed[index]])["position_ids"].numpy()
        inside = np.arange(packed.seq_len) < packed.real_tokens(index)
        assert np.flatnonzero((positions[0] == 0) & inside).tolist() == starts
        of_window = np.diff([*starts, packed.real_tokens(index)])
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
def test_a_tokenizer_is_taken_where_a_flag_asks_for_text_or_ends_of_documents(tmp_path, flags, needed):
    source = write_nanogpt(tmp_path / "a.bin")
    assert corpora.needs_tokenizer(parse(["--dataset", source, *words(flags)])) == needed


# ----------------------------------------------------------------------------------------------------------------------
# Size


def test_ten_billion_tokens_take_no_memory_before_the_first_batch(tmp_path):
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * 10**10)
    process = psutil.Process()
    before = process.memory_info().rss
    packed = load(tmp_path / "a.bin", tmp_path, seq_len=8192)
    packed.fingerprint()
    index = WindowOrder(len(packed), seed=42).window_of(0)
    assert utils.create_collate_fn()([packed[index]])["input_ids"].shape == (1, 8192)
    assert len(packed.tokens) == 10**10
    assert process.memory_info().rss - before < 100 * 2**20
