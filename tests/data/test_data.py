"""Text becomes windows of tokens: nothing is lost, nothing comes twice, and no start tokenizes what one did before."""

import bz2
import errno
import gc
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import datasets
import filelock
import numpy as np
import pyarrow
import pytest
import torch
from conftest import ROOT, STORIES, parse, train
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

import utils
from harness.base.errors import UserError
from harness.data import corpora, corpus, corpus_tokens, loading, sample_order, streaming
from harness.data.corpus_files import find_files, local_files
from harness.data.documents import TOKENIZE_BATCH, token_dtype
from harness.data.formats import DATA_SUFFIXES, file_records
from harness.data.records import DOCUMENT_MARK
from harness.data.token_cache import check_cache, pack_tokens
from harness.data.windows import PackedDataset, create_collate_fn
from harness.flags import commands
from harness.flags.parser import record_flags
from harness.flags.settings import is_local

END = 0  # end-of-text of the demo tokenizer
TEXTS = ["Once upon a time there was a fox.", "The end.", "Tom had a red ball.\nHe liked it.", "A", "Ünïcödé 狐狸"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")
    assert tokenizer.eos_token_id == END
    return tokenizer


def encoded(tokenizer, texts: list[str]) -> list[int]:
    """What the flat file has to hold: each text's tokens, and an end-of-text after each."""
    return [token for text in texts for token in [*tokenizer.encode(text, add_special_tokens=False), END]]


def write_jsonl(path: pathlib.Path, texts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_lines(path: pathlib.Path, lines: list) -> str:
    """A .jsonl file of these texts, and of these bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = (line if isinstance(line, bytes) else json.dumps({"text": line}).encode() for line in lines)
    path.write_bytes(b"".join(line + b"\n" for line in whole))
    return str(path)


def write_parquet(path: pathlib.Path, **columns) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# Packing

token_arrays = st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), max_size=20)


@settings(deadline=None, max_examples=200)
@given(arrays=token_arrays, seq_len=st.integers(1, 17), vocab_size=st.sampled_from([2**16, 2**16 + 1, 200_000]))
def test_packed_windows_hold_every_token_once_and_in_order(tmp_path_factory, arrays, seq_len, vocab_size):
    file = tmp_path_factory.getbasetemp() / "packed.bin"
    file.unlink(missing_ok=True)
    flat = list(itertools.chain.from_iterable(arrays))
    batches = (np.array(array, dtype=np.uint32) for array in arrays)
    assert pack_tokens(batches, file, vocab_size) == len(flat)
    if not flat:
        assert not file.exists()
        return
    packed = PackedDataset(np.memmap(file, token_dtype(vocab_size), "r"), seq_len)
    windows = [packed[index] for index in range(len(packed))]
    assert all(window.shape == (seq_len + 1,) for window in windows)
    # inputs: every token but those of the last partial window; labels: the same, one further
    inputs = [token for window in windows for token in window[:-1].tolist()]
    labels = [token for window in windows for token in window[1:].tolist()]
    assert inputs == flat[: len(inputs)]
    assert labels == flat[1 : 1 + len(labels)]
    assert len(flat) - 1 - len(labels) < seq_len
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_tokens_are_stored_in_the_smallest_type_that_holds_the_vocabulary(tmp_path):
    for vocab_size, size in ((1536, 2), (65_536, 2), (65_537, 4), (151_936, 4)):
        pack_tokens(iter([np.array([vocab_size - 1], np.uint32)]), tmp_path / "t", vocab_size)
        assert (tmp_path / "t").stat().st_size == size
        assert np.fromfile(tmp_path / "t", token_dtype(vocab_size)).tolist() == [vocab_size - 1]


def test_a_token_without_an_embedding_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(UserError, match="--tokenizer"):
        pack_tokens(iter([np.array([3, 100], np.uint32)]), tmp_path / "cache" / "t", 100)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tokenizer_that_fails_half_way_leaves_no_file(tmp_path):
    def batches():
        yield np.array([1, 2], np.uint32)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        pack_tokens(batches(), tmp_path / "cache" / "t", 100)
    assert list((tmp_path / "cache").iterdir()) == []


def test_collate_shifts_the_labels_by_one():
    batch = create_collate_fn()([np.arange(5, dtype=np.uint16), np.arange(10, 15, dtype=np.uint16)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["shift_labels"].tolist() == batch["labels"].tolist()


def test_synthetic_windows_are_a_pure_function_of_seed_and_index():
    one, same, other = (sample_order.SyntheticDataset(1000, 32, seed) for seed in (1, 1, 2))
    assert one[5].shape == (33,)
    assert (one[5] == same[5]).all()
    assert (one[5] != one[6]).any()
    assert (one[5] != other[5]).any()
    assert max(one[index].max() for index in range(100)) < 1000


# ----------------------------------------------------------------------------------------------------------------------
# Order


def order(world_size: int, batch_size: int, microbatches: int, num_samples: int, seed: int = 5) -> list[list[int]]:
    """Windows in the order of global samples, microbatch by microbatch, of all ranks."""
    windows = sample_order.WindowOrder(num_samples, seed)
    batches = []
    for microbatch in range(microbatches):
        for rank in range(world_size):
            samples = sample_order.samples_of_microbatch(0, microbatch, batch_size, rank, world_size)
            batches.append([windows.window_of(sample) for sample in samples])
    return batches


divisors = st.sampled_from([1, 2, 3, 4, 6, 12])


@settings(deadline=None)
@given(divisors, divisors, st.integers(12, 50), st.integers(0, 9))
def test_a_steps_samples_do_not_depend_on_who_shares_them(world_size, microbatches, num_samples, seed):
    if 12 % (world_size * microbatches):
        microbatches = 12 // world_size
    batch_size = 12 // world_size // microbatches
    steps = 4
    shared = list(itertools.chain(*order(world_size, batch_size, steps * microbatches, num_samples, seed)))
    assert shared == list(itertools.chain(*order(1, 12, steps, num_samples, seed)))


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(0, 2**31))
def test_an_epoch_visits_each_sample_once_and_ranks_share_none(world_size, batch_size, seed):
    num_samples = world_size * batch_size * 3
    for epoch in (0, 1):
        batches = order(world_size, batch_size, 6, num_samples, seed)[epoch * 3 * world_size :][: 3 * world_size]
        assert sorted(itertools.chain(*batches)) == list(range(num_samples))


def test_an_epoch_that_ends_within_a_batch_goes_on_with_the_next():
    samples = list(itertools.chain(*order(2, 3, 10, num_samples=7)))
    for first in range(0, 56, 7):
        assert sorted(samples[first : first + 7]) == list(range(7))


def test_order_is_a_pure_function_of_seed_name_and_sample_number():
    one, same, other, named = (
        sample_order.WindowOrder(100, seed, name) for seed, name in ((3, None), (3, None), (4, None), (3, "web"))
    )
    backwards = [one.window_of(sample) for sample in reversed(range(300))]
    assert backwards[::-1] == [same.window_of(sample) for sample in range(300)]
    assert backwards[::-1] != [other.window_of(sample) for sample in range(300)]
    assert backwards[::-1] != [named.window_of(sample) for sample in range(300)]
    epochs = [[one.window_of(sample) for sample in range(first, first + 100)] for first in (0, 100, 200)]
    assert epochs[0] != list(range(100)) and epochs[0] != epochs[1] != epochs[2]


def test_the_order_of_one_source_is_that_of_the_versions_before_mixtures():
    windows = sample_order.WindowOrder(5, 42)
    assert [windows.window_of(sample) for sample in range(10)] == [4, 2, 3, 1, 0, 4, 0, 1, 2, 3]


def test_an_order_can_be_taken_up_in_the_middle():
    whole = [sample_order.samples_of_microbatch(0, microbatch, 2, 1, 3) for microbatch in range(7, 12)]
    later = [sample_order.samples_of_microbatch(7 * 2 * 3, microbatch, 2, 1, 3) for microbatch in range(5)]
    assert whole == later


# ----------------------------------------------------------------------------------------------------------------------
# Files

CACHE = ("cache_dir", "check_whole")  # arguments about the token cache


def load(tokenizer, tmp_path, source, split: str = "train", seq_len: int = 4, lines: list = [], **options) -> list[int]:  # noqa: B006
    """The flat tokens of a corpus, as a run with a token cache reads it; `lines` gets what it says of it."""
    where = {"cache_dir": tmp_path / "cache"} | {name: options.pop(name) for name in CACHE if name in options}
    corpus = {"tokenizer": tokenizer, "seq_len": seq_len, "dataset": os.path.expanduser(source)} | options
    dataset, line = corpora.read_cached(utils.get_dataset, corpus, split, **where)
    lines.append(line)
    assert len(dataset) == (len(dataset.tokens) - 1) // seq_len
    return dataset.tokens.tolist()


def test_a_jsonl_file_is_read_in_order_with_an_end_of_text_after_each_document(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, TEXTS)


def test_empty_documents_are_left_out(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", ["", *TEXTS, ""])
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, TEXTS)


def test_a_text_file_without_marks_is_one_document(tokenizer, tmp_path):
    (tmp_path / "data.txt").write_text(TEXTS[2])
    assert load(tokenizer, tmp_path, tmp_path / "data.txt") == encoded(tokenizer, [TEXTS[2]])


@pytest.mark.parametrize("between", ["<|endoftext|>", "\n<|endoftext|>\n", "<|endoftext|>\n<|endoftext|>\n"])
def test_marks_divide_a_text_file_into_documents(tokenizer, tmp_path, between):
    (tmp_path / "data.txt").write_text(between.join(TEXTS) + between)
    assert load(tokenizer, tmp_path, tmp_path / "data.txt") == encoded(tokenizer, TEXTS)


def test_a_parquet_file_is_read(tokenizer, tmp_path):
    file = write_parquet(tmp_path / "data.parquet", text=TEXTS, other=list(range(len(TEXTS))))
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, TEXTS)


def test_a_tokenized_parquet_file_is_taken_as_it_is(tokenizer, tmp_path):
    file = write_parquet(tmp_path / "data.parquet", input_ids=[[5, 6, 7, END], [], [8, 9, END]])
    assert load(tokenizer, tmp_path, file) == [5, 6, 7, END, 8, 9, END]


def test_a_folder_has_a_split_for_each_file_name(tokenizer, tmp_path):
    write_jsonl(tmp_path / "data" / "train.jsonl", TEXTS[:3])
    write_jsonl(tmp_path / "data" / "validation.jsonl", TEXTS[3:])
    assert load(tokenizer, tmp_path, tmp_path / "data") == encoded(tokenizer, TEXTS[:3])
    assert load(tokenizer, tmp_path, tmp_path / "data", "validation") == encoded(tokenizer, TEXTS[3:])


def test_slices_of_a_split_are_disjoint_and_together_the_whole(tokenizer, tmp_path):
    texts = [f"Story {number} is about the number {number}." for number in range(40)]
    file = write_jsonl(tmp_path / "data.jsonl", texts)
    first, second = (load(tokenizer, tmp_path, file, split) for split in ("train[:75%]", "train[75%:]"))
    assert first == encoded(tokenizer, texts[:30])
    assert second == encoded(tokenizer, texts[30:])


STORIES_OF_FORTY = [f"Story {number} is about the number {number}." for number in range(40)]


@pytest.mark.parametrize("first, second", [("train[:95%]", "train[95%:]"), ("train[:-2]", "train[-2:]")])
def test_a_text_file_is_divided_at_its_marks_before_a_slice_is_taken(tokenizer, tmp_path, first, second):
    (tmp_path / "data.txt").write_text(DOCUMENT_MARK.join(STORIES_OF_FORTY))
    parts = [load(tokenizer, tmp_path, tmp_path / "data.txt", split) for split in (first, second)]
    assert parts == [encoded(tokenizer, STORIES_OF_FORTY[:38]), encoded(tokenizer, STORIES_OF_FORTY[38:])]


@pytest.mark.parametrize("texts", [["Tom had a red ball. " * 50], ["A fox. " * 90, "Tom had a red ball. " * 50]])
def test_percentages_of_too_few_documents_cut_tokens(tokenizer, tmp_path, texts):
    file = write_jsonl(tmp_path / "data.jsonl", texts)
    whole, first, second = (load(tokenizer, tmp_path, file, f"train{cut}") for cut in ("", "[:95%]", "[95%:]"))
    assert len(first) == len(whole) * 95 // 100
    assert first + second == whole == encoded(tokenizer, texts)


@pytest.mark.parametrize("bound", ["[:41]", "[-41:]", "[:101%]"])
def test_a_bound_beyond_the_documents_is_refused(tokenizer, tmp_path, bound):
    with pytest.raises(UserError, match="beyond the 40 documents"):
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", STORIES_OF_FORTY), f"train{bound}")


def test_packed_and_mixed_files_are_read_as_they_are_unpacked(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    lines = pathlib.Path(write_jsonl(tmp_path / "lines", TEXTS)).read_bytes()
    half = lines.index(b"\n") + 1
    (tmp_path / "data" / "1.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    with pyarrow.output_stream(tmp_path / "data" / "2.txt.zst", compression="zstd") as file:
        file.write(DOCUMENT_MARK.join(TEXTS).encode())
    (tmp_path / "data" / "3.md").write_text("# A title\n\nA story.\n")
    write_parquet(tmp_path / "data" / "4.parquet", text=TEXTS)
    expected = encoded(tokenizer, [*TEXTS, *TEXTS, "# A title\n\nA story.", *TEXTS])
    assert load(tokenizer, tmp_path, tmp_path / "data") == expected
    assert read("streamed", tokenizer, tmp_path, tmp_path / "data") == expected
    some = load(tokenizer, tmp_path, tmp_path / "data" / "[13].*")
    assert some == encoded(tokenizer, [*TEXTS, "# A title\n\nA story."])


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.txt.zst"])
def test_a_cut_packed_file_is_named(tokenizer, tmp_path, name):
    with pyarrow.output_stream(tmp_path / name) as file:
        file.write("\n".join(STORIES_OF_FORTY).encode())
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    for way in ("cached", "streamed"):
        with pytest.raises(UserError, match=f"--dataset {tmp_path / name}: cannot be read"):
            read(way, tokenizer, tmp_path, tmp_path / name)


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_the_text_is_in_the_field_that_is_named(tokenizer, tmp_path, name):
    if name == "data.parquet":
        write_parquet(tmp_path / name, story=TEXTS, number=[*range(len(TEXTS))])
    else:
        write_lines(tmp_path / name, [json.dumps({"number": 1, "story": text}).encode() for text in TEXTS])
    for way in ("cached", "streamed"):
        tokens = read(way, tokenizer, tmp_path, tmp_path / name, text_field="story")
        assert tokens == encoded(tokenizer, TEXTS)
        with pytest.raises(UserError, match="--text-field"):
            read(way, tokenizer, tmp_path, tmp_path / name)


def test_how_far_the_tokenizing_is_can_be_told(tokenizer, tmp_path):
    told = []
    for name, write in (("a.jsonl", write_jsonl), ("b.parquet", lambda path, texts: write_parquet(path, text=texts))):
        file = write(tmp_path / name, STORIES_OF_FORTY * 200)
        tell = lambda counts, total: told.append((counts["read"] / total, counts["documents"], counts["tokens"]))  # noqa: E731
        utils.get_dataset(tokenizer, 16, dataset=file, split="train", cache_dir=tmp_path / "cache", progress=tell)
    assert [documents for _, documents, _ in told] == [2000, 4000, 6000, 8000] * 2
    shares = [share for share, _, _ in told]
    assert shares[:4] == sorted(shares[:4]) and 0 < shares[0] < shares[3] <= 1
    assert [round(share, 1) for share in shares[4:]] == [0.2, 0.5, 0.8, 1.0] or shares[7] <= 1
    assert told[3][2] == told[7][2] == len(encoded(tokenizer, STORIES_OF_FORTY * 200))


@pytest.mark.parametrize(
    "share, said", [(0.1, ""), (0.02, "takes about 01:40 at 500 tokens/s"), (0.0002, "on several machines")]
)
def test_a_long_tokenizing_says_how_long_it_takes_within_two_seconds(monkeypatch, capsys, share, said):
    """Also in a log, which has the next line after half a minute; not where all of it takes less than that."""
    clock = [0.0]
    monkeypatch.setattr(corpora.time, "monotonic", lambda: clock[0])
    with corpora.progress_of_tokenizing() as report:
        for clock[0] in (1.0, 2.0, 3.0):
            report({"read": share * 1e9 * clock[0] / 2, "documents": 5, "tokens": 500 * clock[0]}, 10**9)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said)
    assert all(said in line and "tokenizing the text, once, takes about" in line for line in lines)


def test_what_lies_beside_the_text_files_of_a_folder_is_not_read(tokenizer, tmp_path):
    (tmp_path / "data" / ".cache").mkdir(parents=True)
    (tmp_path / "data" / "story.txt").write_text(TEXTS[0])
    for name in ("README.md", "story.xyz", ".hidden.txt", ".cache/story.txt"):
        (tmp_path / "data" / name).write_text("no story")
    assert load(tokenizer, tmp_path, tmp_path / "data") == encoded(tokenizer, TEXTS[:1])


def texts_in(files: list[pathlib.Path]) -> list[str]:
    return [file.read_text() for file in files]


def test_what_is_left_out_of_a_folder_is_named(tokenizer, tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0])
    (folder / "NOTES.TXT").write_text(TEXTS[1])
    (folder / "b.Jsonl.BZ2").write_bytes(bz2.compress(json.dumps({"text": TEXTS[2]}).encode()) + bz2.compress(b"\n"))
    for name in ("posts.json", "list.xyz", "sub/c.tsv", "readme.md", "twice.txt.bz2.gz"):
        (folder / name).write_text("no story")
    assert load(tokenizer, tmp_path, folder) == encoded(tokenizer, [TEXTS[1], TEXTS[0], TEXTS[2]])
    assert read("streamed", tokenizer, tmp_path, folder, seq_len=4) == load(tokenizer, tmp_path, folder)
    said = corpora.describe_files(str(folder))
    assert said == {"files": "3 of 8 (left out: list.xyz, posts.json, readme.md, sub/c.tsv, twice.txt.bz2.gz)"}
    for number in range(9):
        (folder / f"{number}.xml").write_text("no story")
    assert corpora.describe_files(str(folder))["files"].endswith("4.xml and 9 more)")
    assert corpora.describe_files(str(folder / "a.txt")) == {}
    assert f"{folder}/sub (a folder)" in find_files(str(folder / "*"))[1]


def test_a_folder_of_which_nothing_is_read_is_an_error_that_lists_what_was_seen(tokenizer, tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=f"needs {re.escape('/'.join(DATA_SUFFIXES))} files, .* it is empty"):
        load(tokenizer, tmp_path, tmp_path / "data")
    for name in ("posts.json", "list.xyz"):
        (tmp_path / "data" / name).write_text("no story")
    for source in (tmp_path / "data", tmp_path / "data" / "*"):
        with pytest.raises(UserError, match=r"there is only .*list\.xyz, .*posts\.json"):
            load(tokenizer, tmp_path, source)


LINKS = {  # what is beside a.txt: what of that is left out
    "a link to the folder": (lambda data: (data / "loop").symlink_to("."), ["loop (the same as .)"]),
    "two loops": (
        lambda data: [(data / name).symlink_to(".") for name in ("one", "two")],
        ["one (the same as .)", "two (the same as .)"],
    ),
    "a link to the file": (lambda data: (data / "0.txt").symlink_to("a.txt"), ["0.txt (the same as a.txt)"]),
    "a hard link": (lambda data: os.link(data / "a.txt", data / "b.txt"), ["b.txt (the same as a.txt)"]),
    "a link to the folder around": (lambda data: (data / "sub" / "up").symlink_to(".."), ["sub/up (the same as .)"]),
    "a link to a sibling": (lambda data: (data / "0").symlink_to("sub"), ["0 (the same as sub)"]),
    "a broken link": (lambda data: (data / "b.txt").symlink_to("gone.txt"), ["b.txt (a broken link)"]),
    "a link to itself": (lambda data: (data / "b.txt").symlink_to("b.txt"), ["b.txt (a broken link)"]),
    "a pipe": (lambda data: os.mkfifo(data / "b.txt"), ["b.txt (no regular file)"]),
    "a link to a device": (lambda data: (data / "b.txt").symlink_to("/dev/zero"), ["b.txt (no regular file)"]),
}


@pytest.mark.parametrize("case", LINKS)
def test_each_real_file_of_a_folder_is_read_once(tokenizer, tmp_path, case):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "a.txt").write_text(TEXTS[0])
    (data / "sub" / "c.txt").write_text(TEXTS[2])
    make, left_out = LINKS[case]
    make(data)
    files, named = find_files(str(data))
    assert files == [data / "a.txt", data / "sub" / "c.txt"]
    assert named == left_out
    for pattern in ("**", "**/*", "**/*.txt"):
        assert local_files(str(data / pattern)) == files
    assert load(tokenizer, tmp_path, data) == encoded(tokenizer, [TEXTS[0], TEXTS[2]])


def test_links_to_what_is_elsewhere_are_followed(tmp_path):
    """As in the hub's cache, whose files are links to blobs without a suffix."""
    (tmp_path / "blobs" / "sub").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    for name in ("0a1b", "sub/c.txt"):
        (tmp_path / "blobs" / name).write_text(name)
    (tmp_path / "data" / "train.txt").symlink_to("../blobs/0a1b")
    (tmp_path / "data" / "more").symlink_to("../blobs/sub")
    (tmp_path / "data" / "again").symlink_to("../blobs")
    assert texts_in(local_files(str(tmp_path / "data"))) == ["sub/c.txt", "0a1b"]
    assert texts_in(local_files(str(tmp_path / "data" / "**" / "*.txt"))) == ["sub/c.txt", "0a1b"]


def test_held_out_text_is_not_among_the_trained_by_a_link(tokenizer, tmp_path):
    (tmp_path / "data" / "all").mkdir(parents=True)
    (tmp_path / "data" / "all" / "validation.txt").write_text(TEXTS[0])
    (tmp_path / "data" / "all" / "train.txt").write_text(TEXTS[2])
    (tmp_path / "data" / "0-train").symlink_to("all")
    (tmp_path / "data" / "train.txt").symlink_to("all/validation.txt")
    assert load(tokenizer, tmp_path, tmp_path / "data") == encoded(tokenizer, [TEXTS[2]])


def test_a_folder_that_may_not_be_read_is_left_out_by_name(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "a.txt").write_text(TEXTS[0])
    listdir = os.listdir

    def refuse(path):  # root may read everything
        if pathlib.Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert find_files(str(tmp_path)) == ([tmp_path / "a.txt"], ["lost+found (Permission denied)"])


def test_a_socket_in_a_folder_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    (tmp_path / "a.txt").write_text(TEXTS[0])
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("b.txt")
        assert find_files(str(tmp_path)) == ([tmp_path / "a.txt"], ["b.txt (no regular file)"])


@pytest.mark.parametrize(
    "pattern",
    [
        "da?a/*.txt",
        "da[st]a/story-[0-9].txt",
        "data/story-?.*",
        "data/*",
        "**/story*",
        "./data/*.t[x]t",
        "data/../d*/*",
    ],
)
def test_a_pattern_is_local_whatever_its_signs_are_and_all_of_it_is_trained_on(
    tokenizer, tmp_path, monkeypatch, pattern
):
    (tmp_path / "data").mkdir()
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / "data" / f"story-{number}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    settings = parse(["--dataset", pattern])
    assert settings.dataset_split == "train"
    assert load(tokenizer, tmp_path, pattern, settings.dataset_split) == encoded(tokenizer, TEXTS[:3])
    assert parse(["--dataset", tmp_path / pattern]).dataset_split == "train"


@pytest.mark.parametrize(
    "name", ["stories", "data[1].txt", "data", "da?a", "~/data", "someone/stories", "nothing-?", "d/*"]
)
def test_what_flags_take_for_local_is_what_is_read_from_files(tmp_path, monkeypatch, name):
    (tmp_path / "data").mkdir()
    for file in (tmp_path / "data" / "a.txt", tmp_path / "data[1].txt"):
        file.write_text(TEXTS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        read_from_files = bool(local_files(os.path.expanduser(name)))
    except UserError:  # of what would be local and is not there, or has no text
        read_from_files = True
    assert is_local(name) == read_from_files


def test_a_twentieth_of_hub_data_is_the_default_of_a_library(tokenizer, monkeypatch):
    asked = []

    def open_corpus(dataset, split, *_):
        asked.append(split)
        raise UserError("not opened")

    monkeypatch.setattr(corpus_tokens, "open_corpus", open_corpus)
    with pytest.raises(UserError, match="not opened"):
        utils.get_dataset(tokenizer, 16, dataset="someone/stories")
    assert asked == ["train[:5%]"]


def test_all_of_a_local_file_is_the_default_of_a_library_too(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", STORIES_OF_FORTY)
    packed = utils.get_dataset(tokenizer, 4, dataset=file, cache_dir=tmp_path / "cache")
    assert packed.tokens.tolist() == encoded(tokenizer, STORIES_OF_FORTY)


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_a_text_field_that_is_asked_for_wins_over_token_ids(tokenizer, tmp_path, name):
    if name == "data.parquet":
        write_parquet(tmp_path / name, text=TEXTS, input_ids=[[5, 6, END]] * len(TEXTS))
    else:
        write_lines(tmp_path / name, [json.dumps({"input_ids": [5, 6, END], "text": text}).encode() for text in TEXTS])
    for way in ("cached", "streamed"):
        options = {"seq_len": 4}
        assert read(way, tokenizer, tmp_path, tmp_path / name, **options) == [5, 6, END] * len(TEXTS)
        for field in ("text", ("other", "text", "input_ids")):
            tokens = read(way, tokenizer, tmp_path, tmp_path / name, text_field=field, **options)
            assert tokens == encoded(tokenizer, TEXTS)
        tokens = read(way, tokenizer, tmp_path, tmp_path / name, text_field="input_ids", **options)
        assert tokens == [5, 6, END] * len(TEXTS)


@pytest.mark.parametrize(
    "flags, manifest, trained",
    [
        ("", None, "ids"),
        ("--text-field text", None, "text"),
        ("--text-field text", {}, "ids"),  # a checkpoint of a version in which the flag was ignored
        ("", {"held_out": None, "ids_first": False}, "text"),  # that run was told
        ("", {"held_out": None, "ids_first": True}, "ids"),
    ],
)
def test_the_flag_for_the_text_field_is_asking_and_a_checkpoint_keeps_its_rule(
    device, tokenizer, tmp_path, flags, manifest, trained
):
    file = write_lines(
        tmp_path / "data.jsonl", [json.dumps({"input_ids": [5, 6, END], "text": text}).encode() for text in TEXTS * 4]
    )
    given = ["--dataset", file, "--cache-dir", tmp_path / "cache", "--sequence-length", 4, *flags.split()]
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer))
    if manifest is not None:
        flags_before = {"dataset": str(file), "batch_size": 1, "gradient_accumulation_steps": 1}
        manifest = {"flags": flags_before, "world_size": 1, "step": 0, "samples": 0} | manifest
    data, _ = loading.load_data(parse(given), tokenizer, config, utils.get_dataset, manifest)
    (train,) = data.sources.values()
    assert train.tokens.tolist() == ([5, 6, END] * len(TEXTS) if trained == "ids" else encoded(tokenizer, TEXTS)) * 4


def test_a_config_of_a_run_keeps_that_the_text_field_was_asked_for(tmp_path):
    for asked in (["--text-field", "text"], []):
        (tmp_path / "config.json").write_text(json.dumps(record_flags(parse(["--dataset", "x", *asked]))))
        again = parse(["--config", tmp_path / "config.json"])
        assert ("text_field" in commands.given(again.argv)) == bool(asked)


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_a_byte_order_mark_and_windows_line_ends_change_no_token(tokenizer, tmp_path, name):
    plain = "\n".join(TEXTS) if name.endswith("txt") else pathlib.Path(write_jsonl(tmp_path / name, TEXTS)).read_text()
    (tmp_path / name).write_text(plain)
    expected = load(tokenizer, tmp_path, tmp_path / name)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", "\r\n").encode())
    assert load(tokenizer, tmp_path, tmp_path / "other" / name) == expected


def test_a_file_name_with_brackets_is_a_name(tokenizer, tmp_path):
    assert load(tokenizer, tmp_path, write_jsonl(tmp_path / "data[1].jsonl", TEXTS)) == encoded(tokenizer, TEXTS)


def test_tokenized_lines_and_text_keep_their_order(tokenizer, tmp_path):
    file = write_lines(tmp_path / "data.jsonl", [TEXTS[0], b'{"input_ids": [5, 6, 0]}', TEXTS[1], b""])
    assert load(tokenizer, tmp_path, file) == [*encoded(tokenizer, TEXTS[:1]), 5, 6, 0, *encoded(tokenizer, TEXTS[1:2])]


@pytest.mark.slow
def test_one_document_may_be_large(tokenizer, tmp_path):
    text = "Tom had a red ball. " * 500_000  # 10 MB, a chunk of what reads lines
    file = write_jsonl(tmp_path / "data.jsonl", [TEXTS[0], text, TEXTS[1]])
    tokens = load(tokenizer, tmp_path, file)
    assert tokens[: len(encoded(tokenizer, TEXTS[:1]))] == encoded(tokenizer, TEXTS[:1])
    assert tokens.count(END) == 3
    assert tokenizer.decode(tokens).count("Tom had a red ball.") == 500_000


def test_more_documents_than_one_tokenizer_call_takes_keep_their_order(tokenizer, tmp_path):
    texts = [f"Number {number}." for number in range(2 * TOKENIZE_BATCH + 7)]
    file = write_jsonl(tmp_path / "data.jsonl", texts)
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, texts)


def test_marks_in_the_documents_of_the_demo_do_not_occur():
    for file in STORIES.glob("*.jsonl"):
        assert DOCUMENT_MARK not in file.read_text()


# ----------------------------------------------------------------------------------------------------------------------
# Cache


class Broken:
    """A tokenizer that is the same by name and content but must not be asked for a token."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        if name == "backend_tokenizer":
            return Backend(self._tokenizer.backend_tokenizer)
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)

    def __call__(self, *args, **kwargs):
        raise AssertionError("it tokenizes again")


class Backend:
    def __init__(self, backend):
        self.to_str = backend.to_str

    def __getattr__(self, name):
        raise AssertionError(f"it tokenizes again ({name})")


def cached(tmp_path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in (tmp_path / "cache").glob("*.bin")}


def test_a_second_start_tokenizes_nothing_and_does_not_import_datasets(tokenizer, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    new = write_jsonl(tmp_path / "new.jsonl", TEXTS)
    first, files = load(tokenizer, tmp_path, file), cached(tmp_path)
    assert len(files) == 1
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    lines: list[str] = []
    assert load(Broken(tokenizer), tmp_path, file, lines=lines) == first
    assert cached(tmp_path) == files
    assert len(lines) == 1
    assert load(tokenizer, tmp_path, new) == first  # a local file needs no `datasets` the first time either
    new = write_jsonl(tmp_path / "newer.jsonl", TEXTS)
    with pytest.raises(AssertionError, match="tokenizes again"):  # the stand-in does break when it is asked
        load(Broken(tokenizer), tmp_path, new)


def test_another_sequence_length_uses_the_same_cache(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    assert load(tokenizer, tmp_path, file, seq_len=4) == load(Broken(tokenizer), tmp_path, file, seq_len=8)


def test_a_changed_file_is_tokenized_again(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    load(tokenizer, tmp_path, file)
    write_jsonl(tmp_path / "data.jsonl", TEXTS[::-1])  # as long as before
    os.utime(file, ns=(1, 1))
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, TEXTS[::-1])
    assert len(cached(tmp_path)) == 2


def test_a_file_added_to_a_folder_is_read(tokenizer, tmp_path):
    write_jsonl(tmp_path / "data" / "train-1.jsonl", TEXTS[:3])
    assert load(tokenizer, tmp_path, tmp_path / "data") == encoded(tokenizer, TEXTS[:3])
    write_jsonl(tmp_path / "data" / "train-2.jsonl", TEXTS[3:])
    assert load(tokenizer, tmp_path, tmp_path / "data") == encoded(tokenizer, TEXTS)


def test_another_vocabulary_has_a_cache_of_its_own_and_a_slice_has_not(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    whole = load(tokenizer, tmp_path, file)
    assert load(tokenizer, tmp_path, file, vocab_size=100_000) == whole
    assert load(tokenizer, tmp_path, file, "train[:60%]") == encoded(tokenizer, TEXTS[:3])
    assert len(cached(tmp_path)) == 2


def cache_of(tmp_path) -> tuple[pathlib.Path, pathlib.Path]:
    """The one token cache and its record."""
    (tokens,) = (tmp_path / "cache").glob("*.bin")
    return tokens, tokens.with_suffix(".json")


def cut_to_a_fifth(tokens, record):
    os.truncate(tokens, tokens.stat().st_size // 10 * 2)


DAMAGES = {
    "cut to a fifth": cut_to_a_fifth,
    "cut by a byte": lambda tokens, record: os.truncate(tokens, tokens.stat().st_size - 1),
    "emptied": lambda tokens, record: os.truncate(tokens, 0),
    "overwritten": lambda tokens, record: tokens.write_bytes(bytes(tokens.stat().st_size)),
    "another text": lambda tokens, record: tokens.write_bytes(b"no tokens"),
    "a version without records": lambda tokens, record: record.unlink(),
    "record emptied": lambda tokens, record: os.truncate(record, 0),
    "record of another shape": lambda tokens, record: record.write_text("[1]"),
    "record of bytes": lambda tokens, record: record.write_bytes(b"\xff\0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_token_cache_is_tokenized_again_and_said(tokenizer, tmp_path, damage):
    file, lines = write_jsonl(tmp_path / "data.jsonl", TEXTS), []
    first = load(tokenizer, tmp_path, file)
    DAMAGES[damage](*cache_of(tmp_path))
    assert load(tokenizer, tmp_path, file, lines=lines) == first
    assert lines[0].startswith("tokenized 5 documents again (the cache was damaged: ")
    assert load(Broken(tokenizer), tmp_path, file) == first


@settings(deadline=None, max_examples=25)
@given(data=st.data(), of_record=st.booleans())
def test_whatever_is_changed_in_a_cache_the_tokens_are_the_same_or_made_again(
    tokenizer, tmp_path_factory, data, of_record
):
    tmp_path = tmp_path_factory.mktemp("corrupted")
    file, lines = write_jsonl(tmp_path / "data.jsonl", TEXTS), []
    first = load(tokenizer, tmp_path, file)
    victim = cache_of(tmp_path)[of_record]
    content = bytearray(victim.read_bytes())
    where = data.draw(st.integers(0, len(content)))
    content[where : where + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    victim.write_bytes(content)
    assert load(tokenizer, tmp_path, file, lines=lines) == first
    if not of_record:
        assert (" again" in lines[0]) == (bytes(content) != np.array(first, np.uint16).tobytes())


@pytest.fixture
def reads(monkeypatch) -> list:
    """What was compared with its checksum; all files count as older than the clock's tick."""
    seen, digest, now = [], hashlib.file_digest, time.time_ns
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: seen.append(file.name) or digest(file, kind))
    monkeypatch.setattr(time, "time_ns", lambda: now() + 2 * 10**9)
    return seen


def test_a_cache_is_compared_with_its_checksum_once_after_each_change_and_on_demand(tokenizer, tmp_path, reads):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first = load(tokenizer, tmp_path, file)
    counts = []
    for options in ({}, {}, {}, {"check_whole": True}, {}):
        assert load(Broken(tokenizer), tmp_path, file, **options) == first
        counts.append(len(reads))
    assert counts == [1, 1, 1, 2, 2]


def test_a_change_that_leaves_size_and_time_alone_is_found(tokenizer, tmp_path, reads):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first = load(tokenizer, tmp_path, file)
    load(tokenizer, tmp_path, file)
    assert "checked" in json.loads(cache_of(tmp_path)[1].read_text())
    tokens, lines = cache_of(tmp_path)[0], []
    before, content = tokens.stat(), tokens.read_bytes()
    tokens.write_bytes(content[:-2] + b"\1\1")
    os.utime(tokens, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(tokenizer, tmp_path, file, lines=lines) == first
    assert "checksum" in lines[0]


def test_a_cache_that_has_changed_within_the_clocks_tick_is_compared_again(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    load(tokenizer, tmp_path, file)
    load(tokenizer, tmp_path, file)
    assert "checked" not in json.loads(cache_of(tmp_path)[1].read_text())


def test_a_cache_serves_from_a_disk_that_can_only_be_read(tokenizer, tmp_path, monkeypatch):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first = load(tokenizer, tmp_path, file)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    (tmp_path / "cache" / "tokens-0.binabc").mkdir()  # abandoned, and cannot be removed
    assert load(Broken(tokenizer), tmp_path, file) == first
    with pytest.raises(UserError, match=r"--cache-dir .*Read-only file system"):
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "new.jsonl", TEXTS))


def test_what_killed_runs_left_goes_and_what_a_live_one_writes_stays(tokenizer, tmp_path):
    for name in ("tokens-dead.binx8_1", "tokens-live.bin_z92"):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "tokens").write_text("half")
    with filelock.FileLock(tmp_path / "cache" / "tokens-live.bin.lock"):
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))
        assert [folder.name for folder in (tmp_path / "cache").glob("*/")] == ["tokens-live.bin_z92"]
    load(tokenizer, tmp_path, tmp_path / "data.jsonl")
    assert [*(tmp_path / "cache").glob("*/")] == []


@pytest.mark.parametrize("umask, of_a_file", [(0o002, 0o664), (0o077, 0o600)])
def test_cache_files_have_the_permissions_of_the_umask(tokenizer, tmp_path, umask, of_a_file):
    """So that a team whose members have the umask 002 can share a --cache-dir."""
    before = os.umask(umask)
    try:
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "cache").iterdir()} == {of_a_file}  # the lock too
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o777 & ~umask


def test_local_data_are_copied_nowhere_but_into_the_token_cache(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "no folder")
    load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))
    assert {path.suffix for path in (tmp_path / "cache").rglob("*")} <= {".bin", ".json", ".lock"}
    assert len(streaming.stream_dataset(tokenizer, 4, dataset=str(tmp_path / "data.jsonl")).head(1)) == 1


def test_a_full_disk_under_what_datasets_writes_is_named(tokenizer, tmp_path, monkeypatch):
    def fill(*_, **__):
        raise datasets.exceptions.DatasetGenerationError("failed") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datasets, "load_dataset", fill)
    with pytest.raises(UserError) as raised:
        load(tokenizer, tmp_path, "someone/stories")
    assert str(raised.value).startswith("HF_DATASETS_CACHE ") and "No space left" in str(raised.value)


def test_the_cache_lies_where_the_environment_says(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    utils.get_dataset(tokenizer, 4, dataset=write_jsonl(tmp_path / "data.jsonl", TEXTS), split="train")
    assert len(list((tmp_path / "xdg" / "train_fsdp").glob("*.bin"))) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def read(way: str, tokenizer, tmp_path, source, seq_len: int = 16, **options):
    """Reads a whole corpus as a run with a token cache does, or as one with --streaming does; its tokens."""
    if way == "cached":
        return load(tokenizer, tmp_path, source, seq_len=seq_len, **options)
    stream = streaming.stream_dataset(tokenizer, seq_len, dataset=str(source), **options)
    return stream.head(0).tokens.tolist()


WAYS = pytest.mark.parametrize("way", ["cached", "streamed"])
GOOD = b'{"text": "Once upon a time there was a fox who had a red ball and liked it."}\n'


def int8(rows: list) -> pyarrow.Array:
    return pyarrow.array(rows, pyarrow.list_(pyarrow.int8()))


UNUSABLE = [  # file, content, what the error says after the file's name
    ("none.jsonl", None, ": no such file"),
    ("data.jsonl", b"", "it holds no text"),
    ("data.jsonl", b'{"text": ""}\n', "it holds no text"),
    ("data.jsonl", b"\n\n\n", "it holds no text"),
    ("data.txt", b"\n\n\n", "it holds no text"),
    ("data.jsonl", b'{"text": "A"}\n', "--sequence-length"),
    ("data.xyz", b"text\nA fox.\n", ".jsonl"),
    ("data.parquet", b"no parquet", ": cannot be read (Parquet"),
    ("data.jsonl", GOOD + b'{"story": "A fox."}\n', ', line 2: no field \'text\' in {"story": "A fox."}; 1 of 2 lines'),
    ("data.jsonl", GOOD + b'\n{"text": "A fo', ", line 3: broken JSON, Unterminated string"),
    ("data.jsonl", GOOD * 5000 + b'{"text": "A", }\n' + GOOD, ", line 5001: broken JSON"),
    ("data.jsonl", b'{"text": null}\n' + GOOD + b'{"text": null}', ", line 1: null instead of text; 2 of 3 lines"),
    ("data.jsonl", GOOD + b'{"text": 5}\n', ", line 2: 5 instead of text"),
    ("data.jsonl", GOOD + b'{"text": ["A"]}\n', ', line 2: ["A"] instead of text'),
    ("data.jsonl", GOOD + b'{"text": {"A": 1}}\n', ', line 2: {"A": 1} instead of text'),
    ("data.jsonl", GOOD + b"[1, 2]\n5\n", ", line 2: no field 'text' in [1, 2]; 2 of 3 lines"),
    ("data.jsonl", GOOD + b'{"text": "caf\xe9"}\n', ", line 2: bytes that are not UTF-8"),
    ("data.jsonl", GOOD + b'{"text": "a\\ud800b"}\n', ', line 2: "a\\ud800b" with half a surrogate pair'),
    ("data.jsonl", GOOD + b"[" * 100_000, ", line 2: broken JSON"),
    ("data.jsonl", GOOD + b'{"input_ids": [1, -2]}\n', ", line 2: [1, -2] instead of token ids"),
    ("data.txt", b"A fox.\nA caf\xe9.\n", ", line 2: bytes that are not UTF-8, perhaps Windows-1252; 1 of 1 documents"),
    ("data.txt", b"A fox.\n\0\n", ", line 2: a NUL byte; 1 of 1 documents are bad"),
    (
        "data.txt",
        b"A\n<|endoftext|>\n\nB\n\n\0<|endoftext|>\nC\n\0\xe9",
        ", line 6: a NUL byte; 2 of 3 documents are bad",
    ),
    ("data.md", b"<|endoftext|>\r\nA<|endoftext|>B\r\n\0\xe9", ", line 3: bytes that are not UTF-8; 1 of 2 documents"),
    ("data.parquet", {"text": ["A fox.", None]}, ", row 2: null instead of text; 1 of 2 rows"),
    ("data.parquet", {"text": [1, 2]}, ", row 1: 1 instead of text; 2 of 2 rows"),
    ("data.parquet", {"input_ids": [[1, 2], [3, None]]}, ", row 2: [3, null] instead of token ids"),
    ("data.parquet", {"input_ids": int8([[1, 2], [3, -1]])}, ", row 2: [3, -1] instead of token ids; 1 of 2 rows"),
    ("data.parquet", {"input_ids": [[1, 2], [3, 2**40]]}, ", row 2: [3, 1099511627776] instead of token ids"),
    ("data.parquet", {"input_ids": [[[1, 2]], [[3]]]}, ", row 1: [[1, 2]] instead of token ids; 2 of 2 rows"),
    ("data.parquet", {"input_ids": [{"a": 1}, {"a": 2}]}, ', row 1: {"a": 1} instead of token ids; 2 of 2 rows'),
    ("data.parquet", {"input_ids": [[{"a": 1}], []]}, ', row 1: [{"a": 1}] instead of token ids; 1 of 2 rows'),
    ("data.parquet", {"text": [{"a": "A"}, {"a": "B"}]}, ', row 1: {"a": "A"} instead of text; 2 of 2 rows'),
    (
        "data.txt",
        b"A caf\xe9.\n",
        "not UTF-8, perhaps Windows-1252; 1 of 1 documents are bad; convert it: iconv -f WINDOWS-",
    ),
    (
        "data.txt",
        "A café.\n".encode() + b"A caf\xe9.\n",
        ", line 2: bytes that are not UTF-8; 1 of 1 documents are bad",
    ),
    (
        "data.txt",
        "A fox.".encode("utf-16"),
        "not UTF-8, by its mark UTF-16; 1 of 1 documents are bad; convert it: iconv -f UTF",
    ),
    (
        "data.jsonl",
        GOOD.decode().encode("utf-16-be").join([b"\xfe\xff", b""]),
        ", line 1: bytes that are not UTF-8, by its",
    ),
]


def write(path: pathlib.Path, content: bytes | dict | None) -> pathlib.Path:
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        write_parquet(path, **content)
    elif content is not None:
        path.write_bytes(content)
    return path


@pytest.fixture
def collected():
    """Garbage is collected before, not within: a generator that is closed where JSON has used up the stack would raise
    a RecursionError that is nobody's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@WAYS
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("name, content, says", UNUSABLE)
def test_data_that_cannot_be_used_is_named(tokenizer, tmp_path, way, name, content, says):
    file = write(tmp_path / name, content)
    with pytest.raises(UserError) as raised:
        read(way, tokenizer, tmp_path, file)
    message = str(raised.value)
    assert message.startswith(f"--dataset {file}") and says in message.removeprefix(f"--dataset {file}")
    assert "\n" not in message
    assert "--eval-split" not in message  # no advice for another mistake
    some = " of " in says or ", line" in says or ", row" in says
    some = some and not re.search(r" (\d+) of \1 (documents|lines|rows) are bad", message)  # not where all are
    assert ("--skip-bad-records" in message) == some
    assert raised.value.exit_code == 2


ENCODINGS = [("windows-1252", "data.txt", ""), ("utf-16", "data.TXT", ""), ("utf-16", "data.jsonl.gz", "gzip")]
ENCODINGS += [("windows-1252", "a b.txt.bz2", "bzip2"), ("utf-32", "data.md", "")]


@pytest.mark.parametrize("encoding, name, packer", ENCODINGS)
def test_the_command_in_the_error_converts_the_file(tokenizer, tmp_path, encoding, name, packer):
    if not all(map(shutil.which, filter(None, ["iconv", packer]))):
        pytest.skip(f"no iconv or {packer} here")
    text = "Ünïcödé: the fox had a red ball and liked it."
    content = text if "jsonl" not in name else json.dumps({"text": text}, ensure_ascii=False)
    write = {"gzip": gzip.compress, "bzip2": bz2.compress}.get(packer, bytes)
    (tmp_path / name).write_bytes(write(content.encode(encoding)))
    with pytest.raises(UserError, match="not UTF-8") as raised:
        load(tokenizer, tmp_path, tmp_path / name)
    command = str(raised.value).partition("convert it: ")[2].partition(", or leave")[0]
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert load(tokenizer, tmp_path, tmp_path / name) == encoded(tokenizer, [text])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]  # nothing else is left there


@WAYS
@pytest.mark.parametrize("bad", [content for _, content, says in UNUSABLE if ", line 2" in says and GOOD in content])
def test_bad_records_are_left_out_and_counted_if_asked(tokenizer, tmp_path, way, bad):
    bad, lines = bad.removeprefix(GOOD).splitlines(), []
    text = json.loads(GOOD)["text"]
    file = write_lines(tmp_path / "data.jsonl", [text, *bad, "", text])
    expected = encoded(tokenizer, [text, text])
    if way == "cached":
        assert load(tokenizer, tmp_path, file, skip_bad_records=True, lines=lines) == expected
        assert lines[0].startswith("tokenized 2 documents in ")
        assert lines[0].endswith(f", left out: empty documents 1, bad records {len(bad)}")
        assert load(Broken(tokenizer), tmp_path, file, skip_bad_records=True, lines=lines) == expected
        assert lines[1].endswith(f", left out: empty documents 1, bad records {len(bad)}")
        with pytest.raises(UserError, match="line 2"):  # a cache without them is none for a run that wants all
            load(tokenizer, tmp_path, file)
    else:
        stream = streaming.stream_dataset(tokenizer, 4, dataset=file, skip_bad_records=True)
        assert stream.head(0).tokens.tolist() == expected
        list(itertools.takewhile(lambda chunk: chunk[0][1] < 3, stream.chunks((0, 0, 0))))  # each is counted once
        assert (stream.counts["empty documents"], stream.counts["bad records"]) == (1, len(bad))


@WAYS
@pytest.mark.parametrize(
    "name, content, says",
    [
        ("train-1.jsonl", GOOD + b'{"text": "A fo', ", line 2: broken JSON"),
        ("train-1.txt", b"A fox.\n\xff\xfe", ", line 2: bytes that are not UTF-8"),
        ("train-1.parquet", {"text": [5]}, ", row 1: 5 instead of text"),
        ("train-1.parquet", b"PAR1 cut PAR1", ": cannot be read"),
    ],
)
def test_of_a_folder_the_file_is_named(tokenizer, tmp_path, way, name, content, says):
    text = {"text": ["Once upon a time there was a fox who had a red ball and liked it."]}
    first = text if name.endswith("parquet") else GOOD
    write(tmp_path / "data" / name.replace("1", "0"), first)
    write(tmp_path / "data" / name, content)
    write(tmp_path / "data" / f"a-validation{pathlib.Path(name).suffix}", first)
    with pytest.raises(UserError) as raised:
        read(way, tokenizer, tmp_path, tmp_path / "data")
    assert str(raised.value).startswith(f"--dataset {tmp_path / 'data' / name}{says}")


def test_a_parquet_file_with_a_damaged_page_is_named(tokenizer, tmp_path):
    file = pathlib.Path(write_parquet(tmp_path / "data.parquet", text=[f"Story {n}." for n in range(3000)]))
    content = bytearray(file.read_bytes())
    content[2000:2100] = bytes(100)
    file.write_bytes(content)
    for way in ("cached", "streamed"):
        with pytest.raises(UserError) as raised:
            read(way, tokenizer, tmp_path, file)
        assert str(raised.value).startswith(f"--dataset {file}")


@WAYS
def test_a_file_that_is_deleted_under_way_is_named(tokenizer, tmp_path, way, monkeypatch):
    for number in range(3):
        write_jsonl(tmp_path / "data" / f"train-{number}.jsonl", TEXTS * 20)
    gone = tmp_path / "data" / "train-1.jsonl"
    if way == "streamed":
        stream = streaming.stream_dataset(tokenizer, 4, dataset=str(tmp_path / "data"))
        gone.unlink()
        with pytest.raises(UserError) as raised:
            list(itertools.islice(stream.chunks((0, 0, 0)), 20))
    else:

        def delete_and_read(*arguments, **options):
            gone.unlink(missing_ok=True)
            return file_records(*arguments, **options)

        monkeypatch.setattr(corpus, "file_records", delete_and_read)
        with pytest.raises(UserError) as raised:
            load(tokenizer, tmp_path, tmp_path / "data")
    assert str(raised.value).startswith(f"--dataset {gone}")


@pytest.mark.parametrize("name", ["none.jsonl", "/no/such/folder", "./none", "~/none.txt"])
def test_data_that_is_not_there_is_named(tokenizer, tmp_path, name):
    with pytest.raises(UserError, match="no such file") as raised:
        load(tokenizer, tmp_path, name)
    assert str(raised.value).startswith("--dataset ")
    assert f"{name.lstrip('~')}: " in str(raised.value)


def test_data_that_is_not_there_is_named_before_the_tokenizer_is_looked_for(device, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.model.tokenizer.load_tokenizer", lambda *_: pytest.fail("it was looked for"))
    with pytest.raises(UserError) as raised:
        train(["--model", "demo", "--dataset", "none.jsonl.gz", "--output-dir", tmp_path], device)
    assert str(raised.value) == "--dataset none.jsonl.gz: no such file or folder"


@pytest.mark.parametrize("checks", [0, 2])
def test_a_file_that_is_deleted_after_it_was_listed_is_named(tokenizer, tmp_path, monkeypatch, checks):
    file = pathlib.Path(write_jsonl(tmp_path / "data.jsonl", TEXTS))
    times = []

    def list_and_delete(dataset):
        files = local_files(dataset)
        file.unlink()
        return files

    def check_and_delete(*arguments):
        times.append(1)
        if len(times) == checks:  # the second one is made under the cache's lock
            file.unlink()
        return check_cache(*arguments)

    monkeypatch.setattr(corpus, "check_cache", check_and_delete)
    if checks == 0:
        monkeypatch.setattr(corpus_tokens, "local_files", list_and_delete)
    with pytest.raises(UserError) as raised:
        load(tokenizer, tmp_path, file)
    assert str(raised.value).startswith(f"--dataset {file}: cannot be read ([Errno 2] No such file or directory")


@pytest.mark.parametrize("split", ["validation", "train[:x%]", "train[", "test[:5%]", "train+test", ""])
def test_a_split_that_is_not_there_is_named(tokenizer, tmp_path, split):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    with pytest.raises(UserError) as raised:
        load(tokenizer, tmp_path, file, split)
    assert f"split {split.partition('[')[0] if 'test[' in split else split!r}"[:11] in str(raised.value)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path, tokenizer):
    bare = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", eos_token=None)
    assert bare.eos_token_id is None
    with pytest.raises(UserError, match=r"--tokenizer .*end-of-text"):
        load(bare, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))


def test_a_cache_folder_that_cannot_be_made_is_named(tokenizer, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="--cache-dir"):
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))
