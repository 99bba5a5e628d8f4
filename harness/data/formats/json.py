"""JSON: a list of objects, as Alpaca and ShareGPT, or objects and lists one after another; each object with a text,
token ids or a conversation in its fields."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from harness.data.formats import READ_BYTES
from harness.data.schema import Field, Record, field_names, find_document

SUFFIXES = (".json",)
RECORD_NAME = "record"
IS_FALLBACK = True  # next to other data files, JSON files are metadata

SEPARATORS = {True: re.compile(r"[\s,]*"), False: re.compile(r"\s*")}  # between values, by whether in a list


def read(stream: BinaryIO, text_field: Field) -> Iterator[Record]:
    names = field_names(text_field)
    for value in values_in(stream):
        yield find_document(value, names)


def values_in(stream: BinaryIO) -> Iterator[Any]:
    """Yield the values of a file and of its lists, with only a few of them in memory."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, is_list, number, at_end = "", 0, False, 0, False
    while True:
        at = SEPARATORS[is_list].match(text, at).end()
        if text[at : at + 1] == ("]" if is_list else "["):
            at, is_list = at + 1, not is_list
            continue
        try:
            value, end = decoder.raw_decode(text, at)
            is_whole = end < len(text) or at_end  # the end of a block may cut a value into a shorter one
        except (ValueError, RecursionError) as error:
            is_whole, problem = False, getattr(error, "msg", str(error))
        if is_whole:
            yield value
            at, number = end, number + 1
            continue
        if at_end and at == len(text) and not is_list:
            return
        if at_end:
            raise ValueError(f"broken JSON after {number:,} records, {problem}")
        # blocks grow, so a long value is not parsed for each of them
        block = stream.read(max(READ_BYTES, len(text) - at))
        at_end = not block
        text, at = text[at:] + utf8.decode(block, final=at_end), 0
