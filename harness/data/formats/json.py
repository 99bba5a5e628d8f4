"""JSON: a list of objects, as Alpaca and ShareGPT, or objects and lists one after another; each object with a text,
token ids or a conversation in its fields."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from harness.data.formats import READ_BYTES
from harness.data.schema import Record, find_document

SUFFIXES = (".json",)
RECORD_NAME = "record"
IS_FALLBACK = True  # next to other data files, JSON files are metadata

SEPARATORS, LIST_SEPARATORS = re.compile(r"\s*"), re.compile(r"[\s,]*")  # between values


def read(stream: BinaryIO, names: tuple[str, ...]) -> Iterator[Record]:
    for value in values_in(stream):
        yield find_document(value, names)


def values_in(stream: BinaryIO) -> Iterator[Any]:
    """Yield the values of a file and of its lists, with only a few of them in memory."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, is_list, number, at_end = "", 0, False, 0, False  # `at` is the position of the next value in `text`
    while True:
        separators = LIST_SEPARATORS if is_list else SEPARATORS
        at = separators.match(text, at).end()
        if text[at : at + 1] == ("]" if is_list else "["):
            at, is_list = at + 1, not is_list
            continue
        try:
            value, end = decoder.raw_decode(text, at)
            if end < len(text) or at_end:  # else the value may continue in the next block, as 12 of 123
                yield value
                at, number = end, number + 1
                continue
        except (ValueError, RecursionError) as error:
            if at_end and at == len(text) and not is_list:
                return
            if at_end:
                problem = getattr(error, "msg", str(error))
                raise ValueError(f"broken JSON after {number:,} records, {problem}") from error
        # blocks grow, so a long value is not parsed for each of them
        block = stream.read(max(READ_BYTES, len(text) - at))
        at_end = not block
        text, at = text[at:] + utf8.decode(block, final=at_end), 0
