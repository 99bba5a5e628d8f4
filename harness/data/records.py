"""Records: what readers give for each record of a file, what they share, and the documents in records."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from harness import base

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: what Arrow calls it
DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a text, as in the original TinyStories files
MAX_TOKEN_ID = 2**32 - 1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK = 2**18  # bytes that are read of a file at a time
FIRST_TAIL = 2**13  # of the first read behind a part of a file, for the end of its last record

Field = str | tuple[str, ...]  # the column that is trained on, or several: the first one that is there
LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")  # 1 for each trained token
A_NUMBER_EACH = ("labels", "attention_mask", "position_ids", *LOSS_MASKS)  # fields with a number for each token id
BESIDE_IDS = (*A_NUMBER_EACH, "seq_lengths")


class BadRecord(NamedTuple):
    """A record that cannot be trained on."""

    fault: str  # what stands there, in words
    layout: str = ""  # of the conversation that it should be


@dataclass(frozen=True, eq=False)
class Conversation:
    """The messages of a record, and the tools that they may call."""

    messages: list[dict]
    tools: list[dict] | None = None
    layout: str = "messages"  # in which its record has it, one of `conversations.LAYOUTS` or a column
    first_trained: int = 0  # of the messages: those before it are a prompt
    is_text: bool = False  # whether it was a prompt and a completion that are text
    place: str = ""  # of the record, as messages name it

    def __len__(self) -> int:
        """About how many characters; never 0."""
        return len(self.messages) + sum(len(message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, eq=False)
class LabelledIds:
    """The token ids of a record that says which of them are trained on."""

    ids: np.ndarray
    trained: np.ndarray  # bool

    def __len__(self) -> int:
        return len(self.ids)


class NoFieldError(Exception):
    """A file has none of the fields that are asked for; the argument is the names that it has."""


Document = str | np.ndarray | LabelledIds | Conversation
Record = Document | BadRecord | None  # None of a blank line


KINDS = {"text": "text", "ids": "token ids", "labels": "token ids with labels", "chat": "messages"}
MASKED_KINDS = {"labels", "chat"}  # those of which not all tokens are trained on


def kind_of(document: Document) -> str:
    """What a document is, one of KINDS."""
    if isinstance(document, Conversation):
        return "chat"
    if isinstance(document, LabelledIds):
        return "labels"
    return "text" if isinstance(document, str) else "ids"


def field_names(text_field: Field) -> tuple[str, ...]:
    return (text_field,) if isinstance(text_field, str) else text_field


def read_value(fields: dict[str, Any], field: str) -> Record:
    """The document in a field of a record, no conversation: token ids in `input_ids`, in any other a text or token ids;
    with what the fields beside it say of it."""
    value = fields[field]
    if field == "input_ids" or (value and isinstance(value, list)):
        are_ints = isinstance(value, list) and set(map(type, value)) <= {int}
        if are_ints and 0 <= min(value, default=0) <= max(value, default=0) <= MAX_TOKEN_ID:
            return check_ids(np.array(value, np.uint32), fields)
        wanted = "token ids" if field == "input_ids" or are_ints else "text"
        return BadRecord(f"{excerpt(value)} instead of {wanted}")
    if not isinstance(value, str):
        return BadRecord(f"{excerpt(value)} instead of text")
    if has_lone_surrogate(value):
        return BadRecord(f"{excerpt(value)} with half a surrogate pair")
    return value


def check_ids(ids: np.ndarray, fields: dict[str, Any]) -> np.ndarray | LabelledIds | BadRecord:
    """Token ids with what the fields of BESIDE_IDS say of them, as transformers reads these: padding, where
    `attention_mask` is 0, is taken off; not trained on is what has the label -100 or a 0 in one of LOSS_MASKS. What a
    window cannot give is a bad record."""
    if np.size(fields.get("seq_lengths", ())) > 1:
        return BadRecord("seq_lengths has several documents; give each document a record")
    given = {name: fields[name] for name in A_NUMBER_EACH if fields.get(name) is not None}
    if not given:
        return ids
    beside = {name: np.asarray(values) for name, values in given.items() if is_flat(values)}
    for name, values in given.items():
        if name not in beside or beside[name].shape != ids.shape or (len(ids) and beside[name].dtype.kind not in "bui"):
            shown = excerpt(values.tolist() if isinstance(values, np.ndarray) else values)
            return BadRecord(f"{name} is {shown} instead of {base.counted(len(ids), 'integer')}, one a token")
    for name in ("attention_mask", *LOSS_MASKS):
        if name in beside and not np.isin(beside[name], (0, 1)).all():
            shown = excerpt(beside[name].tolist())
            return BadRecord(f"{name} is {shown} instead of 0 and 1; give each document a record")
    attended = np.flatnonzero(beside.get("attention_mask", np.ones(len(ids))))
    if len(attended) and attended[-1] - attended[0] >= len(attended):
        return BadRecord("attention_mask is 0 between tokens, where it can be 0 before and after them only")
    kept = slice(attended[0], attended[-1] + 1) if len(attended) else slice(0)
    ids, beside = ids[kept], {name: values[kept] for name, values in beside.items()}
    if (beside.get("position_ids", np.arange(len(ids))) != np.arange(len(ids))).any():
        return BadRecord("position_ids do not count from 0 on; give each document a record")
    if beside.keys().isdisjoint(("labels", *LOSS_MASKS)):
        return ids
    labels = beside.get("labels", ids)
    wrong = (labels != base.IGNORE_INDEX) & (labels != ids)
    if wrong.any():
        at = int(wrong.argmax())
        problem = f"labels[{at + kept.start}] is {labels[at]}, where -100 and the token there, {ids[at]}, can be"
        return BadRecord(f"{problem} (labels are not shifted)")
    trained = labels != base.IGNORE_INDEX
    for name in LOSS_MASKS:
        trained &= beside.get(name, np.ones(len(ids))).astype(bool)
    return LabelledIds(ids, trained)


def is_flat(values: Any) -> bool:
    return isinstance(values, np.ndarray) or (
        isinstance(values, list) and not any(isinstance(value, list) for value in values)
    )


def has_lone_surrogate(text: str) -> bool:
    """Whether an escape in JSON has left half a surrogate pair, which is no character."""
    return not text.isascii() and re.search("[\ud800-\udfff]", text) is not None


def excerpt(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


def split_records(stream: BinaryIO, mark: bytes, start: int, end: int | None) -> Iterator[bytes]:
    """The bytes of each record of a file that begins within the bytes [start, end); all from `start` on without `end`.

    A record begins at the file's beginning and after each mark, so that parts end to end hold each record once.
    """
    end = sys.maxsize if end is None else end
    place = max(0, start - len(mark))  # of the next byte; a mark that ends at `start` counts
    if place:
        stream.seek(place)
    is_begun, record_start, rest = start == 0, place, b""
    while True:
        size = min(BLOCK, end - place) if place < end else FIRST_TAIL
        block = stream.read(max(size, len(rest)))  # a long record is not joined block by block
        if not block:
            break
        place += len(block)
        *whole, rest = (rest + block).split(mark)
        for record in whole:
            if is_begun:
                yield record if record_start else record.removeprefix(BYTE_ORDER_MARK)
            is_begun = True
            record_start += len(record) + len(mark)
            if record_start >= end:
                return
    if is_begun and rest:
        yield rest if record_start else rest.removeprefix(BYTE_ORDER_MARK)


def read_documents(
    records: Iterator[tuple[str, Record]], vocab_size: int, skip_bad: bool, counts: Counter, kind: str = "text"
) -> Iterator[Document]:
    """The documents in records, those that are not empty.

    `counts` gets the numbers of empty texts and of the bad records that `skip_bad` left out; else the first of these is
    a UserError, and so is a token id that is not below `vocab_size`. `kind` is what all are to be, as `kind_of` says.
    """
    checked, fits = None, False
    for place, record in records:
        if isinstance(record, BadRecord):
            refuse_or_count(place, record.fault, skip_bad, counts)
            continue
        if isinstance(record, np.ndarray | LabelledIds):
            ids = record.ids if isinstance(record, LabelledIds) else record
            # rows are slices of one array, which is checked once
            whole = ids.base if isinstance(ids.base, np.ndarray) else ids
            if whole is not checked:
                checked, fits = whole, bool(np.max(whole, initial=0) < vocab_size)
            if not fits and ids.max(initial=0) >= vocab_size:
                wrong = int(ids[(ids >= vocab_size).argmax()])
                problem = f"token id {wrong}, the model has {vocab_size:,}"
                raise base.UserError(f"--dataset {place}: {problem}; it was made with another tokenizer, or is damaged")
        if record is None or (len(record) == 0 and not isinstance(record, str)):
            continue
        of_record = kind_of(record)
        if MASKED_KINDS & {kind, of_record} and of_record != kind:
            wanted = KINDS[kind]
            refuse_or_count(place, f"{KINDS[of_record]} instead of {wanted}, as the first record has", skip_bad, counts)
        elif isinstance(record, Conversation):
            yield replace(record, place=place)
        elif not isinstance(record, str):
            yield record
        else:
            texts = [part.strip("\n") for part in record.split(DOCUMENT_MARK)] if DOCUMENT_MARK in record else [record]
            if not any(text.strip("\n") for text in texts):
                counts["empty documents"] += 1
            yield from filter(None, texts)


def refuse_or_count(place: str, fault: str, skip_bad: bool, counts: Counter) -> None:
    """Counts a bad record that is left out, or raises a UserError for it."""
    if not skip_bad:
        advice = "mend it, or leave bad records out with --skip-bad-records"
        raise base.UserError(f"--dataset {place}: {fault}; {advice}")
    counts["bad records"] += 1
