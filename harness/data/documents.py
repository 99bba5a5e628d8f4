"""Documents: from records to texts, and from texts to token ids."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator

import numpy as np

from harness.base import UnreadableError, UserError
from harness.data.formats import name_place
from harness.data.records import DOCUMENT_MARK, BadRecord
from harness.data.storage import DataFile

TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores
BATCH_CHARACTERS = 2**21  # per call of the tokenizer, which takes a hundred times their memory


def read_documents(records: Iterator, source: DataFile | str, skip_bad: bool, counts: Counter) -> Iterator:
    """The documents in `records` of `source`, a file or a hub data set: texts or token ids, those that are not
    empty. `counts` gets the numbers of empty texts and of bad records that `skip_bad` left out; else the first of these
    is an UnreadableError."""
    for record in records:
        if isinstance(record, BadRecord):
            if not skip_bad:
                raise bad_record_error(record, source)
            counts["bad records"] += 1
        elif not isinstance(record, str):
            if len(record):
                yield record
        elif DOCUMENT_MARK in record:
            parts = [part.strip("\n") for part in record.split(DOCUMENT_MARK)]
            if not any(parts):
                counts["empty documents"] += 1
            yield from filter(None, parts)
        elif record.strip("\n"):
            yield record
        else:
            counts["empty documents"] += 1


def bad_record_error(record: BadRecord, source: DataFile | str) -> UnreadableError:
    """What is wrong with a record of a file or of a hub data set."""
    of_file = not isinstance(source, str)
    place = name_place(source, record.number) if of_file else source
    problem = f"a record has no text, {record.fault}"
    error = UnreadableError(f"--dataset {place}: {problem}; --skip-bad-records leaves such out")
    error.record, error.file = record, source if of_file else None
    return error


def take(documents: Iterator, count: int, characters: int = BATCH_CHARACTERS) -> Iterator:
    """The next documents, up to `count` of them; fewer when these have more than so many characters."""
    for document in itertools.islice(documents, count):
        yield document
        characters -= len(document)
        if characters < 0:
            return


def token_batches(documents, tokenizer, batch_size: int = TOKENIZE_BATCH, counts=None) -> Iterator[np.ndarray]:
    """Token ids of all documents in order, an end-of-text token after each text, as one flat array per `batch_size` of
    them. Token ids are taken as they are. `counts` gets the numbers of documents, tokens, and those that were ids."""
    end_of_text = getattr(tokenizer, "eos_token_id", None)
    counts, documents = Counter() if counts is None else counts, iter(documents)
    while batch := list(take(documents, batch_size)):
        tokens = encode(batch, tokenizer, end_of_text)
        counts.update(documents=len(batch), tokens=len(tokens))
        for document in batch:
            if not isinstance(document, str):
                counts["token ids"] += len(document)
        yield tokens


def encode(documents: list, tokenizer, end_of_text: int | None) -> np.ndarray:
    """Token ids of documents end to end, as `token_batches` gives them. What the tokenizer made for them is freed here:
    many streams that held it would scatter the memory that it works in, which slows it."""
    texts = [document for document in documents if isinstance(document, str)]
    if texts and end_of_text is None:
        raise UserError(f"--tokenizer {tokenizer.name_or_path}: it has no end-of-text token (eos_token)")
    if texts and tokenizer.is_fast:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        encoded = (encoding.ids for encoding in encodings)
    elif texts:
        encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    arrays = []
    for document in documents:
        ids = [*next(encoded), end_of_text] if isinstance(document, str) else document
        arrays.append(ids if isinstance(ids, np.ndarray) else np.array(ids, np.uint32))
    return np.concatenate(arrays)


def in_vocabulary(batches: Iterator[np.ndarray], vocab_size: int) -> Iterator[np.ndarray]:
    """Arrays of token ids in the smallest type that holds a vocabulary; an id not below `vocab_size` is a UserError."""
    for tokens in batches:
        largest = int(tokens.view(f"u{tokens.itemsize}").max(initial=0))  # a negative id is huge
        if largest >= vocab_size:
            raise UserError(f"--tokenizer: it gave token id {largest}, the model has {vocab_size}; use its own")
        yield tokens.astype(token_dtype(vocab_size), copy=False)


def token_dtype(vocab_size: int) -> type:
    """Smallest unsigned type that holds every id of a vocabulary: uint16 up to 65,536 entries, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def vocabulary_of(tokenizer) -> str:
    """Everything that decides how a tokenizer splits text."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
