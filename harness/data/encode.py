"""Encode: documents as token ids, for a token cache and for a stream."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness import base
from harness.data.records import LabelledIds

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 2**21  # per call of the tokenizer, which takes a hundred times their memory


class Encoded(NamedTuple):
    """Documents as token ids, end to end."""

    tokens: np.ndarray  # flat
    lengths: np.ndarray  # of each document, int64
    trained: np.ndarray | None = None  # where there is a mask, uint8: 1 for each token that is trained on


def take(documents: Iterator, count: int, characters: int = BATCH_CHARACTERS) -> Iterator:
    """The next documents, up to `count` of them; fewer when these have more than so many characters."""
    for document in itertools.islice(documents, count):
        yield document
        characters -= len(document)
        if characters < 0:
            return


class TextFormat:
    """Texts as the tokenizer encodes them, with an end-of-text token after each; token ids as they are."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        """A UserError, when a text is encoded, for a tokenizer that gives an id not below `vocab_size`."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.dtype = np.uint16 if vocab_size <= 2**16 else np.uint32

    def identity(self) -> list:
        """All that decides which tokens come out, beside the documents."""
        tokenizer = self.tokenizer
        return [vocabulary_of(tokenizer), tokenizer.eos_token_id, self.vocab_size] if tokenizer else [self.vocab_size]

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Documents that are texts or token ids; `counts` gets how many documents and tokens."""
        texts = [document for document in documents if isinstance(document, str)]
        if not texts:
            return self.joined(documents, counts)
        if self.tokenizer is None or self.tokenizer.eos_token_id is None:
            name = getattr(self.tokenizer, "name_or_path", "there is none")
            raise base.UserError(f"--tokenizer {name}: it has no end-of-text token (eos_token), which text needs")
        encoded = iter(encode_texts(self.tokenizer, texts))
        arrays = []
        for document in documents:
            if isinstance(document, str):
                arrays.append(np.array([*next(encoded), self.tokenizer.eos_token_id], np.uint32))
            else:
                arrays.append(document)
        return self.joined(arrays, counts)

    def joined(self, arrays: list[np.ndarray], counts: Counter, trained: list[np.ndarray] | None = None) -> Encoded:
        lengths = np.array([len(array) for array in arrays], np.int64)
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        largest = int(tokens.max(initial=0))
        if largest >= self.vocab_size:  # ids of files were checked where they were read
            raise base.UserError(
                f"--tokenizer: it gave token id {largest}, the model has {self.vocab_size}; use the model's own"
            )
        counts.update(documents=len(arrays), tokens=len(tokens))
        return Encoded(tokens.astype(self.dtype), lengths, None if trained is None else np.concatenate(trained))


class RowFormat(TextFormat):
    """Token ids with labels as their rows give them."""

    def encode(self, documents: list[LabelledIds], counts: Counter) -> Encoded:
        """Rows as tokens and masks. Those without a token to train on are left out, and counted."""
        tokens, masks = [], [np.empty(0, np.uint8)]
        for row in documents:
            trained = row.trained.astype(np.uint8)
            trained[:1] = 0  # nothing precedes it
            if trained.any():
                tokens.append(row.ids)
                masks.append(trained)
            else:
                counts["rows without a trained token"] += 1
        return self.joined(tokens, counts, masks)


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> Iterator[list[int]]:
    """The tokens of each text, those of `tokenizer(text, add_special_tokens=False)`."""
    if not tokenizer.is_fast:
        return iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    encodings = backend_of(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def backend_of(tokenizer: "PreTrainedTokenizerBase") -> "tokenizers.Tokenizer":
    """The tokenizer of `tokenizers` behind one of transformers, as `tokenizer(...)` itself sets it: without what it
    remembers of an earlier call (truncation and padding lie in tokenizer.json too), which a call to the backend would
    apply. Its calls run on all cores."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Everything that decides how a tokenizer splits text."""
    vocabulary = backend_of(tokenizer).to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    return f"{vocabulary}, special tokens as text" if tokenizer.split_special_tokens else vocabulary


def own_tokens_around(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer's own rule puts (before, after) each text."""
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for first in range(len(whole) - len(alone) + 1):
        last = first + len(alone)
        if whole[first:last] == alone:
            return whole[:first], whole[last:]
    return [], []
