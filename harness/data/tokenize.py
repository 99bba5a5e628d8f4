"""Tokenize: encoders of documents, and the token cache. A corpus is tokenized once, on all cores, into files that later
starts map: its tokens, the ends of its documents and, for conversations and labels, the loss mask."""

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
LEFT_OUT = (  # keys of the counts
    "empty documents",
    "bad records",
    "conversations without a trained token",
    "rows without a trained token",
)
FIRST_LINE_SECONDS, LOG_SECONDS = 5, 30  # until the first line of progress, and between lines


class Encoded(NamedTuple):
    """Documents as token ids, end to end."""

    tokens: np.ndarray  # flat
    lengths: np.ndarray  # of each document, int64
    loss_mask: np.ndarray | None = None  # uint8, 1 for each token that is trained on; None: all are


def next_batch(
    documents: Iterator, max_documents: int | None = None, max_characters: int = BATCH_CHARACTERS
) -> Iterator:
    """Yield the next documents: at most `max_documents`, up to the one with which their total size, in characters or
    token ids, exceeds `max_characters`."""
    size = 0
    for document in itertools.islice(documents, max_documents):
        yield document
        size += len(document)
        if size > max_characters:
            return


class TextEncoder:
    """Encoder of texts, which get an end-of-text token unless they end with one; token ids pass unchanged."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.dtype = id_dtype(vocab_size)

    def identity(self) -> list:
        """Return all that decides the tokens of a document, as JSON takes it: part of the key of the token cache."""
        tokenizer = self.tokenizer
        if not tokenizer:
            return [self.vocab_size]
        identity = [serialize_tokenizer(tokenizer), tokenizer.eos_token_id, self.vocab_size]
        if not tokenizer.is_fast:  # its class and arguments (lower case, normalization) decide how it splits text
            identity += [type(tokenizer).__name__, json.dumps(tokenizer.init_kwargs, sort_keys=True, default=str)]
        return identity

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Encode texts and token ids; `counts` gets the numbers of documents and tokens. A UserError if the tokenizer
        has no end-of-text token, or gives an id that the model does not have."""
        texts = [document for document in documents if isinstance(document, str)]
        if not texts:
            return self.join(documents, counts)
        if self.tokenizer is None:
            raise base.UserError("--tokenizer: there is none, and text needs one; name it")
        if self.tokenizer.eos_token_id is None:
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

    def join_masked(self, documents: Iterable[tuple[np.ndarray, np.ndarray]], counts: Counter, key: str) -> Encoded:
        """Join (token ids, loss mask) of documents. Documents without a token to train on are left out and counted in
        `counts[key]`."""
        arrays, masks = [], [np.empty(0, np.uint8)]
        for ids, loss_mask in documents:
            loss_mask = loss_mask.astype(np.uint8)
            loss_mask[:1] = 0  # no token precedes it
            if loss_mask.any():
                arrays.append(ids)
                masks.append(loss_mask)
            else:
                counts[key] += 1
        return self.join(arrays, counts, np.concatenate(masks))

    def join(self, arrays: list[np.ndarray], counts: Counter, loss_mask: np.ndarray | None = None) -> Encoded:
        """Lay token ids end to end, in the cache's dtype."""
        lengths = np.array([len(array) for array in arrays], np.int64)
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        largest = int(tokens.max(initial=0))
        if largest >= self.vocab_size:  # ids of files were checked by `read_documents`
            raise base.UserError(
                f"--tokenizer: it gave token id {largest}, the model has {self.vocab_size}; use the model's own"
            )
        counts.update(documents=len(arrays), tokens=len(tokens))
        return Encoded(tokens.astype(self.dtype), lengths, loss_mask)


class RowEncoder(TextEncoder):
    """Encoder of token ids with labels, which pass unchanged."""

    def encode(self, documents: list[LabelledIds], counts: Counter) -> Encoded:
        rows = [(row.ids, row.trained) for row in documents]
        return self.join_masked(rows, counts, "rows without a trained token")


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


def serialize_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return how a tokenizer splits text, as one string: the tokenizer.json of a fast one; of a slow one only the
    vocabulary, to which `TextEncoder.identity` adds its class and arguments."""
    content = backend_of(tokenizer).to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    return f"{content}, special tokens as text" if tokenizer.split_special_tokens else content


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
        open(folder / "trained.bin", "wb") as loss_mask,
    ):
        for encoded in batches:
            tokens.write(encoded.tokens.data)
            doc_ends.write((total + np.cumsum(encoded.lengths)).data)
            if encoded.loss_mask is not None:
                loss_mask.write(encoded.loss_mask.data)
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


def describe_cache(folder: pathlib.Path, record: dict) -> str:
    """Describe a folder of the cache and its record in one line."""
    line = f"cached in {folder}"
    if "seconds" in record:
        tokenized = f"tokenized {base.counted(record['documents'], 'document')}"
        line = f"{tokenized} in {record['seconds']:.1f} s, {line}"
    left_out = [f"{kind} {record[kind]:,}" for kind in LEFT_OUT if record.get(kind)]
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
