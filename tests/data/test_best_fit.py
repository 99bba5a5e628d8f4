"""Best-fit packing: whole documents in windows, each label once and inside its document, padding counted nowhere."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.token_files import TokenFile
from harness.data.windows import IGNORE_INDEX, BestFitDataset, Tokens
from harness.model import loss

PADDING = 60_000

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def tokens_with(lengths, trained=None) -> Tokens:
    """Documents whose tokens are all different."""
    tokens, ends = np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)
    return Tokens([TokenFile(tokens, find_ends=lambda: ends, trained=trained)], 2**16)


def binned(lengths: list[int], seq_len: int, seed: int = 3, trained=None, **options) -> BestFitDataset:
    return BestFitDataset(tokens_with(lengths, trained), seq_len, PADDING, seed, **options)


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
    assert (data.real_tokens(0), data.trained_tokens(0), data.total_tokens()) == (9, 7, 9)
    data = binned([3], 9)
    assert data[0].starts.tolist() == [0, 3]
    assert (data.real_tokens(0), data.trained_tokens(0), data.total_tokens()) == (3, 2, 3)
    assert binned([3], 9, document_mask=False)[0].starts is None


def test_the_label_that_is_left_out_is_that_of_the_loss():
    assert IGNORE_INDEX == loss.IGNORE_INDEX == torch.nn.CrossEntropyLoss().ignore_index
