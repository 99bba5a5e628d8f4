"""Records: what a reader gives for one, and what readers share: the field, the check of a value, packed text files.
Independent of the formats."""

import codecs
import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from harness.base import UserError
from harness.data.storage import DataFile, RemoteFile, RemoteReader

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: what Arrow calls it
DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a text file, as in the original TinyStories files
NOT_UTF8 = "\ufdd0not UTF-8\ufdd1"  # stands in a text for bytes that are not UTF-8
codecs.register_error("mark", lambda error: (NOT_UTF8, error.end))
MAX_TOKEN_ID = 2**32 - 1
BUFFER_BYTES = 2**16  # that are read of a file at a time

Field = str | tuple[str, ...]  # the column that is trained on, or several: the first one that is there
DEFAULT_FIELD = ("input_ids", "text")
CHAT_FIELD = "messages"  # of a conversation


class BadRecord(NamedTuple):
    """A record that cannot be trained on."""

    fault: str  # what stands there, in words
    number: int  # of its line or row, from 1
    advice: str = ""  # what may help beside mending the data
    wrong_encoding: bool = False  # it may be text in another encoding
    of_chat: bool = False  # of a corpus of conversations


@dataclass(frozen=True, eq=False)
class Conversation:
    """The messages of a record, and the tools that they may call."""

    messages: list[dict]
    number: int  # of its line or row, from 1
    tools: list[dict] | None = None

    def __len__(self) -> int:
        """About how many characters; never 0."""
        return len(self.messages) + sum(len(message.get("content") or "") for message in self.messages)


Document = str | list[int] | np.ndarray | Conversation  # text, or token ids, or a conversation


def not_utf8(number: int) -> BadRecord:
    return BadRecord("bytes that are not UTF-8", number, wrong_encoding=True)


def names_of(text_field: Field) -> tuple[str, ...]:
    return (text_field,) if isinstance(text_field, str) else text_field


def choose_field(source: Any, names: list[str], text_field: Field) -> str:
    """The column that is trained on, of those in a file or data set."""
    wanted = names_of(text_field)
    for name in wanted:
        if name in names:
            return name
    raise UserError(f"--text-field {wanted[-1]}: no such field in {source} (fields: {', '.join(names)})")


def check_value(value: Any, field: str, number: int) -> Document | BadRecord:
    """The value of a record as its document: token ids in the field `input_ids`, a conversation in `messages`, in any
    other a text or token ids."""
    if field == CHAT_FIELD and not isinstance(value, str):
        return check_conversation(value, number)
    if field == "input_ids" or (value and isinstance(value, list)):
        are_ints = isinstance(value, list) and set(map(type, value)) <= {int}
        if are_ints and 0 <= min(value, default=0) <= max(value, default=0) <= MAX_TOKEN_ID:
            return value
        wanted = "token ids" if field == "input_ids" or are_ints else "text"
        return BadRecord(f"{excerpt(value)} instead of {wanted}", number)
    if not isinstance(value, str):
        return BadRecord(f"{excerpt(value)} instead of text", number)
    if NOT_UTF8 in value:
        return not_utf8(number)
    if not value.isascii() and re.search("[\ud800-\udfff]", value):  # of an escape in JSON
        return BadRecord(f"{excerpt(value)} with half a surrogate pair", number)
    return value


def check_conversation(messages: Any, number: int, tools: Any = None) -> Conversation | BadRecord:
    """Messages as a conversation: a list of objects with a role and a content, a text or a list of parts. Only a
    message that calls tools may lack it. Tools are a list, or one as JSON text."""

    def bad(fault: str) -> BadRecord:
        return BadRecord(fault, number, of_chat=True)

    if not isinstance(messages, list) or not messages:
        return bad(f"{excerpt(messages)} instead of a list of messages")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            return bad(f"messages[{place}] is {excerpt(message)} instead of an object with role and content")
        if not isinstance(message.get("role"), str):
            return bad(f"messages[{place}] has no role")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return bad(f"messages[{place}] has no content")
        if content is not None and not isinstance(content, str | list):
            return bad(f"messages[{place}] has {excerpt(content)} instead of text")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return bad(f"tools are {excerpt(tools)} instead of a list")
    if tools is not None and not isinstance(tools, list):
        return bad(f"tools are {excerpt(tools)} instead of a list")
    for text in texts_in([messages, tools]):
        if NOT_UTF8 in text:
            return not_utf8(number)._replace(of_chat=True)
        if not text.isascii() and re.search("[\ud800-\udfff]", text):
            return bad(f"{excerpt(text)} with half a surrogate pair")
    return Conversation(messages, number, tools or None)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in nested lists and objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)


def excerpt(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


class CountedFile(io.RawIOBase):
    """The bytes [start, end) of a file, which is open only while it is read: a process may read thousands of files at a
    time. Adds to `counts["read"]` the bytes that are read of it. Positions are those in the file."""

    def __init__(self, file: DataFile, counts: Counter, start: int = 0, end: int | None = None):
        self.file, self.counts, self.place = file, counts, start
        self.size = file.stat().st_size
        self.end = self.size if end is None else end
        # a file of an object store holds no descriptor, but what it has read ahead
        self.held = RemoteReader(file, end=self.end) if isinstance(file, RemoteFile) else None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer) -> int:
        part = memoryview(buffer)[: max(0, self.end - self.place)]
        if self.held is not None:
            self.held.seek(self.place)
            size = self.held.readinto(part)
        else:
            with self.file.open("rb", buffering=0) as raw:
                raw.seek(self.place)
                size = raw.readinto(part)
        self.place += size
        self.counts["read"] += size
        return size

    def close(self) -> None:
        if getattr(self, "held", None) is not None:  # not where the opening failed
            self.held.close()
        super().close()


@contextlib.contextmanager
def open_unpacked(file: DataFile, counts: Counter) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name says that it is packed; `counts` gets how many are read, packed."""
    with io.BufferedReader(CountedFile(file, counts), BUFFER_BYTES) as raw:
        codec = COMPRESSIONS.get(file.suffix.lower())
        if codec is None:
            yield raw
        else:
            import pyarrow

            with pyarrow.input_stream(raw, compression=codec) as unpacked:
                yield unpacked


@contextlib.contextmanager
def open_text(file: DataFile, counts: Counter) -> Iterator[io.TextIOWrapper]:
    """The text of a file, unpacked; bytes that are not UTF-8 are `NOT_UTF8`, line ends are newlines."""
    with open_unpacked(file, counts) as unpacked:
        yield io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="mark")
