"""Best-fit packing: whole documents in windows, each label once and inside its document, padding counted nowhere."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import utils
from harness import base
from harness.data.token_files import TokenFile
from harness.data.windows import (
    IGNORE_INDEX,
    BestFitDataset,
    PackedDataset,
    Tokens,
    best_fit,
    create_collate_fn,
    cut_long,
)
from harness.model import loss

PADDING = 60_000

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def tokens_with(lengths, trained=None) -> Tokens:
    """Documents whose tokens are all different."""
    tokens, ends = np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)
    return Tokens([TokenFile(tokens, find_ends=lambda: ends, trained=trained)], 2**16)


def binned(lengths: list[int], seq_len: int, seed: int = 3, trained=None, **options) -> BestFitDataset:
    return BestFitDataset(tokens_with(lengths, trained), seq_len, PADDING, seed, **options)


@settings(deadline=None, max_examples=60)
@given(lengths_of_documents, st.integers(1, 17), st.integers(0, 5))
def test_each_token_is_there_and_each_but_a_documents_first_is_a_label_once(lengths, seq_len, seed):
    data = binned(lengths, seq_len, seed)
    ends = np.cumsum(lengths)
    seen, labels = set(), []
    for window in map(data.__getitem__, range(len(data))):
        assert window.tokens.shape == (seq_len + 1,) and window.trained.shape == (seq_len,)
        seen |= set(window.tokens.tolist()) - {PADDING}
        for place in np.flatnonzero(window.trained):
            assert window.tokens[place + 1] == window.tokens[place] + 1  # the token before it is of its document
            labels.append(int(window.tokens[place + 1]))
    firsts = {int(end - length) for end, length in zip(ends, lengths, strict=True) if length}
    assert seen == set(range(sum(lengths)))
    assert sorted(labels) == sorted(seen - firsts)


@settings(deadline=None, max_examples=40)
@given(lengths_of_documents, st.integers(2, 17))
def test_documents_that_fit_are_whole_and_positions_begin_again_with_each(lengths, seq_len):
    data = binned(lengths, seq_len)
    collate = create_collate_fn()
    for index in range(len(data)):
        batch = collate([data[index]])
        tokens, positions = data[index].tokens.tolist(), batch["position_ids"][0].tolist()
        for start, _, offset in data.documents(index):
            if start < seq_len:
                assert positions[start] == 0
            document = int(np.searchsorted(np.cumsum(lengths), tokens[start], "right"))
            assert offset == tokens[start] - (np.cumsum(lengths) - lengths)[document]
            if lengths[document] <= seq_len + 1:
                assert offset == 0
                assert tokens[start : start + lengths[document]] == list(
                    range(tokens[start], tokens[start] + lengths[document])
                )
        assert (batch["labels"] != IGNORE_INDEX).sum() == data.trained_tokens(index)
        assert (batch["input_ids"] != PADDING).sum() == data.real_tokens(index)


def slow_best_fit(lengths, size: int) -> list[list[int]]:
    """Lengths in bins, by the definition: the longest first, into the bin with the least room that is enough."""
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [(size - sum(one), number) for number, one in enumerate(bins) if size - sum(one) >= length]
        if fitting:
            bins[min(fitting)[1]].append(length)
        else:
            bins.append([length])
    return bins


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), max_size=60), st.integers(0, 9))
def test_the_bins_are_those_of_best_fit_decreasing(lengths, seed):
    items, begins = best_fit(np.array(lengths, np.int64), 20, seed)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    found = [[lengths[item] for item in items[a:b]] for a, b in itertools.pairwise(begins.tolist())]
    assert sorted(map(sum, found)) == sorted(map(sum, slow_best_fit(lengths, 20)))  # among equal bins any may be taken


def test_bins_are_a_pure_function_of_the_seed_and_another_seed_mixes_others():
    lengths = np.random.default_rng(0).integers(1, 30, 500)
    one, same, other = (best_fit(lengths, 32, seed) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert not (one[0] == other[0]).all()
    long_first = lengths[one[0][one[1][:-1]]]
    assert long_first[:50].mean() < long_first.max()  # the windows do not come by length


def test_a_long_document_is_cut_into_pieces_that_share_one_token_and_is_counted():
    pieces = cut_long(np.array([5, 26]), 8)
    assert (pieces.starts.tolist(), pieces.lengths.tolist()) == ([0, 5, 13, 21], [5, 9, 9, 5])
    assert pieces.cut == 1
    assert cut_long(np.array([9, 19]), 8).lengths.tolist() == [9, 9, 2]
    data = binned([5, 21], 8)
    assert data.describe().startswith("best-fit, 2 documents in 4 windows, 1 longer than a window cut into 3 pieces")


@settings(deadline=None, max_examples=30)
@given(lengths_of_documents, st.integers(1, 17), st.randoms(use_true_random=False))
def test_a_mask_counts_inside_documents_also_of_one_that_is_cut(lengths, seq_len, draw):
    trained = np.array([draw.randint(0, 1) for _ in range(sum(lengths))], np.uint8)
    data = binned(lengths, seq_len, trained=trained)
    firsts = np.cumsum(lengths) - lengths
    labels = []
    for index in range(len(data)):
        window = data[index]
        labels += window.tokens[1:][window.trained].tolist()
        assert data.trained_tokens(index) == window.trained.sum()
    assert sorted(labels) == sorted(set(np.flatnonzero(trained).tolist()) - set(firsts.tolist()))


def test_padding_is_neither_trained_on_nor_counted_and_its_share_is_known():
    data = binned([3, 6], 9)
    window = data[0]
    assert window.tokens.tolist() == [3, 4, 5, 6, 7, 8, 0, 1, 2, PADDING]
    assert window.trained.tolist() == [True] * 5 + [False] + [True] * 2 + [False]
    assert window.starts.tolist() == [0, 6]
    assert (data.real_tokens(0), data.trained_tokens(0), data.padding_share, data.total_tokens()) == (9, 7, 0, 9)
    data = binned([3], 9)
    assert data[0].starts.tolist() == [0, 3]
    assert (data.real_tokens(0), data.trained_tokens(0)) == (3, 2)
    assert data.padding_share == pytest.approx(6 / 9)
    assert binned([3], 9, document_mask=False)[0].starts is None


@pytest.mark.parametrize("seed", range(5))
def test_a_held_out_part_keeps_masks_documents_and_their_numbers(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 9, 100)
    trained = draw.integers(0, 2, lengths.sum()).astype(np.uint8)
    tokens = tokens_with(lengths, trained)
    for pack in (lambda part: BestFitDataset(part, 12, PADDING), lambda part: PackedDataset(part, 12, True)):
        seen = []
        for divided in map(pack, tokens.divide()):
            for index in range(len(divided)):
                window = divided[index]
                real = window.tokens[:-1][: divided.real_tokens(index)]
                expected = trained[np.minimum(window.tokens[1:], len(trained) - 1)].astype(bool)
                assert not (window.trained & ~expected).any()
                for start, place, offset in divided.documents(index):
                    number = int(place.removeprefix("document ").replace(",", "")) - 1
                    assert int(window.tokens[start]) == np.cumsum(lengths)[number] - lengths[number] + offset
                seen.append(real)
        assert len(set(np.concatenate(seen).tolist())) == sum(map(len, seen))  # nothing is in both


def test_windows_of_a_flat_array_begin_documents_where_an_index_says_and_only_with_a_mask():
    ends = np.array([3, 10, 21, 30])
    tokens = Tokens([TokenFile(np.arange(1, 31, dtype=np.uint16), find_ends=lambda: ends)])
    assert isinstance(PackedDataset(tokens, 4)[0], np.ndarray)
    data = PackedDataset(tokens, 4, document_mask=True)
    batch = create_collate_fn(end_of_text=2)([data[0], data[2], np.array([5, 2, 5, 5, 5])])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1], [0, 1, 0, 1]]
    assert data.documents(2) == [(0, "document 2", 5), (2, "document 3", 0)]


def test_a_flat_array_with_a_mask_counts_what_it_trains_on():
    trained = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 1], np.uint8)
    data = PackedDataset(tokens_with([10], trained), 3)
    batch = create_collate_fn()([data[index] for index in range(3)])
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, 6], [7, 8, 9]]
    assert [data.trained_tokens(index) for index in range(3)] == [2, 1, 3]
    assert data.tokens.fingerprint() != tokens_with([10], 1 - trained).fingerprint()


def test_the_label_that_is_left_out_is_that_of_the_loss():
    assert IGNORE_INDEX == loss.IGNORE_INDEX == torch.nn.CrossEntropyLoss().ignore_index


def test_one_process_of_a_node_reads_all_tokens_for_the_ends_of_documents(tmp_path, monkeypatch, tokenizer):
    np.array([1, 2, 0, 3, 0, 4, 5, 6, 7], "<u2").tofile(tmp_path / "a.bin")
    corpus = {"dataset": str(tmp_path / "a.bin"), "packing": "best-fit", "vocab_size": 1536}
    answers = []

    def on_main_process(make, is_main):
        answers.append(make())
        return answers[-1]

    monkeypatch.setattr(base, "from_main_process", on_main_process)
    windows = list(utils.get_dataset(tokenizer, 4, **corpus))
    monkeypatch.setattr(base, "from_main_process", lambda make, is_main: answers.pop(0))
    with monkeypatch.context() as patched:
        patched.setattr(Tokens, "ends_of_file", None)
        data = utils.get_dataset(tokenizer, 4, **corpus)
        assert data.tokens.ends.tolist() == [3, 5, 9] and len(data) == len(windows)
    assert [window.tokens.tolist() for window in data] == [window.tokens.tolist() for window in windows]


@pytest.mark.slow
def test_ten_million_documents_are_packed_in_under_a_minute():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6, 1.2, 10**7)).astype(np.int64)
    start = time.process_time()
    pieces = cut_long(np.cumsum(lengths), 8192)
    _, begins = best_fit(pieces.lengths, 8193, 0)
    assert time.process_time() - start < 60
    assert pieces.lengths.sum() / ((len(begins) - 1) * 8193) > 0.999
