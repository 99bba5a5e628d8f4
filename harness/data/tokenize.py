"""Tokenize: documents as token ids, for a stream and for the token cache, in which a corpus is tokenized once, on all
cores, and mapped afterwards. Next to the tokens of a cache are the ends of its documents and, for conversations and
labels, the mask of what is trained on."""

import functools
import itertools
import json
import os
import pathlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness import base, job
from harness.data.schema import LabelledIds
from harness.data.tokens import MappedTokens, id_dtype, map_numbers

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 2**21  # per call of the tokenizer, which takes a hundred times this in memory
VERSION = 8  # of the files; another version is not read
LEFT_OUT = ["empty documents", "bad records"]  # keys of the counts
LEFT_OUT += [f"{name} without a trained token" for name in ("conversations", "rows")]
FIRST_LINE_SECONDS, LOG_SECONDS = 5, 30  # until the first line of progress, and between lines


class Encoded(NamedTuple):
    """Documents as token ids, end to end."""

    tokens: np.ndarray  # flat
    lengths: np.ndarray  # of each document, int64
    trained: np.ndarray | None = None  # loss mask, uint8: 1 for each token that is trained on; None: all are


def take(documents: Iterator, count: int | None = None, characters: int = BATCH_CHARACTERS) -> Iterator:
    """Yield the next documents: up to `count`, if it is given, fewer if these have more than `characters`."""
    for document in itertools.islice(documents, count):
        yield document
        characters -= len(document)
        if characters < 0:
            return


class TextEncoder:
    """Encoder of texts, with an end-of-text token after each that has none, and of token ids, which are kept."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.dtype = id_dtype(vocab_size)

    def identity(self) -> list:
        """Return all that decides the tokens of a document, as JSON takes it: part of the key of the token cache."""
        tokenizer = self.tokenizer
        if not tokenizer:
            return [self.vocab_size]
        identity = [vocabulary_of(tokenizer), tokenizer.eos_token_id, self.vocab_size]
        if not tokenizer.is_fast:  # its class and arguments (lower case, normalization) decide how it splits text
            identity += [type(tokenizer).__name__, json.dumps(tokenizer.init_kwargs, sort_keys=True, default=str)]
        return identity

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Encode texts and token ids; `counts` gets the numbers of documents and tokens. A UserError if the tokenizer
        has no end-of-text token, or gives an id that the model does not have."""
        texts = [document for document in documents if isinstance(document, str)]
        if not texts:
            return self.join(documents, counts)
        if self.tokenizer is None or self.tokenizer.eos_token_id is None:
            if self.tokenizer is None:
                raise base.UserError("--tokenizer: there is none, and text needs one; name it")
            problem = "it has no end-of-text token (eos_token), which text needs"
            raise base.UserError(f"--tokenizer {self.tokenizer.name_or_path}: {problem}")
        encoded, end = iter(encode_texts(self.tokenizer, texts)), self.tokenizer.eos_token_id
        arrays = []
        for document in documents:
            if isinstance(document, str):
                ids = next(encoded)
                arrays.append(np.array(ids if ids[-1:] == [end] else [*ids, end], np.uint32))
            else:
                arrays.append(document)
        return self.join(arrays, counts)

    def join_trained(self, documents: Iterable[tuple[np.ndarray, np.ndarray]], counts: Counter, name: str) -> Encoded:
        """Join (token ids, mask) of documents. Documents without a token to train on are left out and counted as `name`
        without a trained token."""
        arrays, masks = [], [np.empty(0, np.uint8)]
        for ids, trained in documents:
            trained = trained.astype(np.uint8)
            trained[:1] = 0  # no token precedes it
            if trained.any():
                arrays.append(ids)
                masks.append(trained)
            else:
                counts[f"{name} without a trained token"] += 1
        return self.join(arrays, counts, np.concatenate(masks))

    def join(self, arrays: list[np.ndarray], counts: Counter, trained: np.ndarray | None = None) -> Encoded:
        """Lay token ids end to end, in the cache's dtype."""
        lengths = np.array([len(array) for array in arrays], np.int64)
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        largest = int(tokens.max(initial=0))
        if largest >= self.vocab_size:  # ids of files were checked by `read_documents`
            raise base.UserError(
                f"--tokenizer: it gave token id {largest}, the model has {self.vocab_size}; use the model's own"
            )
        counts.update(documents=len(arrays), tokens=len(tokens))
        return Encoded(tokens.astype(self.dtype), lengths, trained)


class RowEncoder(TextEncoder):
    """Encoder of token ids with labels, which are kept."""

    def encode(self, documents: list[LabelledIds], counts: Counter) -> Encoded:
        return self.join_trained([(row.ids, row.trained) for row in documents], counts, "rows")


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> Iterator[list[int]]:
    """Return the tokens of each text, as `tokenizer(text, add_special_tokens=False)` gives them."""
    if not tokenizer.is_fast:
        return iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    encodings = backend_of(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def backend_of(tokenizer: "PreTrainedTokenizerBase") -> "tokenizers.Tokenizer":
    """Return the Rust tokenizer of a fast tokenizer, set as `tokenizer(...)` sets it: without truncation and padding of
    an earlier call or of tokenizer.json. Its calls run on all cores."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def vocabulary_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what decides how a tokenizer splits text, as one string: all of a fast tokenizer, the vocabulary of a slow
    one."""
    vocabulary = backend_of(tokenizer).to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    return f"{vocabulary}, special tokens as text" if tokenizer.split_special_tokens else vocabulary


def added_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer adds (before, after) each text, such as BOS and EOS."""
    text, encoded = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for first in range(len(encoded) - len(text) + 1):
        last = first + len(text)
        if encoded[first:last] == text:
            return encoded[:first], encoded[last:]
    return [], []


# ----------------------------------------------------------------------------------------------------------------------
# The token cache


def write_tokens(batches: Iterator[Encoded], folder: pathlib.Path) -> None:
    """Write the tokens of documents end to end to files in a folder, with their ends and their loss mask."""
    total = 0
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "doc_ends.bin", "wb") as doc_ends,
        open(folder / "trained.bin", "wb") as trained,
    ):
        for encoded in batches:
            tokens.write(encoded.tokens.data)
            doc_ends.write((total + np.cumsum(encoded.lengths)).data)
            if encoded.trained is not None:
                trained.write(encoded.trained.data)
            total += len(encoded.tokens)


def open_cache(folder: pathlib.Path, vocab_size: int) -> MappedTokens:
    """Map the tokens of a folder of the cache."""
    trained = folder / "trained.bin"
    return MappedTokens(
        tokens=map_numbers(str(folder / "tokens.bin"), id_dtype(vocab_size)),
        cache_key=folder.name,
        read_doc_ends=functools.partial(map_numbers, str(folder / "doc_ends.bin"), np.int64),
        loss_mask=map_numbers(str(trained), np.uint8) if trained.stat().st_size else None,
        reopen=functools.partial(open_cache, folder, vocab_size),
    )


def describe_cache(folder: pathlib.Path, counts: dict) -> str:
    """Describe a folder of the cache and its counts in one line."""
    line = f"cached in {folder}"
    if "seconds" in counts:
        tokenized = f"tokenized {base.counted(counts['documents'], 'document')}"
        line = f"{tokenized} in {counts['seconds']:.1f} s, {line}"
    left_out = [f"{kind} {counts[kind]:,}" for kind in LEFT_OUT if counts.get(kind)]
    if left_out:
        line += f", left out: {', '.join(left_out)}"
    return line


def with_progress(batches: Iterator[Encoded], counts: Counter) -> Iterator[Encoded]:
    """Yield `batches`; rank 0 prints the progress after FIRST_LINE_SECONDS and then every LOG_SECONDS."""
    start, next_line = time.monotonic(), float(FIRST_LINE_SECONDS)
    for encoded in batches:
        yield encoded
        seconds = time.monotonic() - start
        if seconds >= next_line:
            speed = f"{counts['tokens'] / seconds:,.0f} tokens/s"
            job.print0("data      ", f"tokenizing, once: {counts['documents']:,} documents, {speed}")
            next_line = seconds + LOG_SECONDS
