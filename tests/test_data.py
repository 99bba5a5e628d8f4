"""Text becomes windows of tokens: nothing is lost, nothing comes twice, and no start tokenizes what one did before."""

import itertools
import json
import os
import pathlib

import numpy as np
import pytest
import torch
from conftest import ROOT, STORIES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import utils

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
    assert utils.pack_tokens(batches, file, vocab_size) == len(flat)
    if not flat:
        assert not file.exists()
        return
    packed = utils.PackedDataset(np.memmap(file, utils.token_dtype(vocab_size), "r"), seq_len)
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
        utils.pack_tokens(iter([np.array([vocab_size - 1], np.uint32)]), tmp_path / "t", vocab_size)
        assert (tmp_path / "t").stat().st_size == size
        assert np.fromfile(tmp_path / "t", utils.token_dtype(vocab_size)).tolist() == [vocab_size - 1]


def test_a_token_without_an_embedding_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(utils.UserError, match="--tokenizer"):
        utils.pack_tokens(iter([np.array([3, 100], np.uint32)]), tmp_path / "cache" / "t", 100)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tokenizer_that_fails_half_way_leaves_no_file(tmp_path):
    def batches():
        yield np.array([1, 2], np.uint32)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        utils.pack_tokens(batches(), tmp_path / "cache" / "t", 100)
    assert list((tmp_path / "cache").iterdir()) == []


def test_collate_shifts_the_labels_by_one():
    batch = utils.create_collate_fn()([np.arange(5, dtype=np.uint16), np.arange(10, 15, dtype=np.uint16)])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert batch["labels"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_synthetic_windows_are_a_pure_function_of_seed_and_index():
    one, same, other = (utils.SyntheticDataset(1000, 32, seed) for seed in (1, 1, 2))
    assert one[5].shape == (33,)
    assert (one[5] == same[5]).all()
    assert (one[5] != one[6]).any()
    assert (one[5] != other[5]).any()
    assert max(one[index].max() for index in range(100)) < 1000


# ----------------------------------------------------------------------------------------------------------------------
# Order


def order(world_size: int, batch_size: int, microbatches: int, num_samples: int, seed: int = 5) -> list[list[int]]:
    """Data-set indices in the order of global samples, microbatch by microbatch, of all ranks."""
    samplers = [iter(utils.GlobalOrderSampler(num_samples, batch_size, r, world_size, seed)) for r in range(world_size)]
    return [next(sampler) for _ in range(microbatches) for sampler in samplers]


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


def test_order_is_a_pure_function_of_seed_and_sample_number():
    one, same, other = (utils.GlobalOrderSampler(100, 4, seed=seed) for seed in (3, 3, 4))
    backwards = [one.index_of(sample) for sample in reversed(range(300))]
    assert backwards[::-1] == [same.index_of(sample) for sample in range(300)]
    assert backwards[::-1] != [other.index_of(sample) for sample in range(300)]
    epochs = [[one.index_of(sample) for sample in range(first, first + 100)] for first in (0, 100, 200)]
    assert epochs[0] != list(range(100)) and epochs[0] != epochs[1] != epochs[2]


def test_an_order_can_be_taken_up_in_the_middle():
    whole = utils.GlobalOrderSampler(50, 2, rank=1, world_size=3)
    later = utils.GlobalOrderSampler(50, 2, rank=1, world_size=3, first_sample=7 * 2 * 3)
    assert list(itertools.islice(whole, 7, 12)) == list(itertools.islice(later, 5))


# ----------------------------------------------------------------------------------------------------------------------
# Files


def load(tokenizer, tmp_path, source, split: str = "train", seq_len: int = 4, **options) -> list[int]:
    """The flat tokens of a corpus, as `get_dataset` packs them."""
    dataset = utils.get_dataset(
        tokenizer, seq_len, dataset=str(source), split=split, cache_dir=tmp_path / "cache", **options
    )
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


def test_more_documents_than_one_tokenizer_call_takes_keep_their_order(tokenizer, tmp_path):
    texts = [f"Number {number}." for number in range(2 * utils.TOKENIZE_BATCH + 7)]
    file = write_jsonl(tmp_path / "data.jsonl", texts)
    assert load(tokenizer, tmp_path, file) == encoded(tokenizer, texts)


def test_marks_in_the_documents_of_the_demo_do_not_occur():
    for file in STORIES.glob("*.jsonl"):
        assert utils.DOCUMENT_MARK not in file.read_text()


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


def test_a_second_start_tokenizes_nothing(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    first, files = load(tokenizer, tmp_path, file), cached(tmp_path)
    assert len(files) == 1
    lines: list[str] = []
    assert load(Broken(tokenizer), tmp_path, file, log=lines.append) == first
    assert cached(tmp_path) == files
    assert len(lines) == 1
    with pytest.raises(AssertionError, match="tokenizes again"):  # the stand-in does break when it is asked
        load(Broken(tokenizer), tmp_path, write_jsonl(tmp_path / "new.jsonl", TEXTS))


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


def test_another_vocabulary_or_split_has_a_cache_of_its_own(tokenizer, tmp_path):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    whole = load(tokenizer, tmp_path, file)
    assert load(tokenizer, tmp_path, file, vocab_size=100_000) == whole
    assert load(tokenizer, tmp_path, file, "train[:60%]") == encoded(tokenizer, TEXTS[:3])
    assert len(cached(tmp_path)) == 3


def test_the_cache_lies_where_the_environment_says(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    utils.get_dataset(tokenizer, 4, dataset=write_jsonl(tmp_path / "data.jsonl", TEXTS), split="train")
    assert len(list((tmp_path / "xdg" / "train_fsdp").glob("*.bin"))) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("data.jsonl", "", "empty"),
        ("data.jsonl", '{"text": ""}\n', "no text"),
        ("data.jsonl", '{"story": "A fox."}\n', "'text'"),
        ("data.jsonl", '{"text": "A fo', "cannot be read"),
        ("data.jsonl", '{"text": "A"}\n', "--sequence-length"),
        ("data.csv", "text\nA fox.\n", ".jsonl"),
        ("data.parquet", "no parquet", "arquet"),
    ],
)
def test_data_that_cannot_be_used_is_named(tokenizer, tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(utils.UserError) as raised:
        load(tokenizer, tmp_path, tmp_path / name)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"--dataset {tmp_path / name}")
    assert "\n" not in str(raised.value)
    assert "--eval-split" not in str(raised.value)  # no advice for another mistake
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("name", ["none.jsonl", "/no/such/folder", "./none", "~/none.txt"])
def test_data_that_is_not_there_is_named(tokenizer, tmp_path, name):
    with pytest.raises(utils.UserError, match="no such file") as raised:
        load(tokenizer, tmp_path, name)
    assert str(raised.value).startswith("--dataset ")
    assert f"{name.lstrip('~')}: " in str(raised.value)


def test_a_folder_of_mixed_kinds_is_refused(tokenizer, tmp_path):
    write_jsonl(tmp_path / "data" / "train.jsonl", TEXTS)
    (tmp_path / "data" / "more.txt").write_text("text")
    with pytest.raises(utils.UserError, match="one kind"):
        load(tokenizer, tmp_path, tmp_path / "data")


@pytest.mark.parametrize("split", ["validation", "train[:x%]", "train[", "test[:5%]", ""])
def test_a_split_that_is_not_there_is_named(tokenizer, tmp_path, split):
    file = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    with pytest.raises(utils.UserError) as raised:
        load(tokenizer, tmp_path, file, split)
    assert f"split {split!r}" in str(raised.value)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path, tokenizer):
    bare = AutoTokenizer.from_pretrained(ROOT / "assets" / "demo", eos_token=None)
    assert bare.eos_token_id is None
    with pytest.raises(utils.UserError, match=r"--tokenizer .*end-of-text"):
        load(bare, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))


def test_a_cache_folder_that_cannot_be_made_is_named(tokenizer, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(utils.UserError, match="--cache-dir"):
        load(tokenizer, tmp_path, write_jsonl(tmp_path / "data.jsonl", TEXTS))
