"""Parts of a streamed corpus: which documents of which files a logical stream has, and how these are read. Called by
`streaming`. Independent of tokens and of the order in which documents are trained on."""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from harness.base import UnreadableError
from harness.data.documents import read_documents
from harness.data.formats import file_records, file_status, reader_of, unreadable_file
from harness.data.records import COMPRESSIONS, Field
from harness.data.storage import DataFile

GOLDEN_RATIO = 2654435769  # times 2**-32: its multiples, modulo 1, lie evenly


class Part(NamedTuple):
    """Consecutive documents of a file."""

    file: DataFile
    first: int = 0
    end: int | None = None  # the first document after them; None: the file's end
    number: int = 0  # of the first one, counted over the parts of a stream


class Piece(NamedTuple):
    """What a stream has of a file of the corpus: the places from `start` to before `end`, of `size`.

    A place is a byte of a file; of a slice of a file it is a document, and of a hub data set's shard, whose size is not
    known, it is one of 2**32.
    """

    file: int  # number of the file, or of the shard
    size: int
    start: int
    end: int


class Division:
    """A corpus cut into streams of equal size, in the order of its files: a pure function of their sizes and of how
    many streams there are. A large file is shared by several streams, and a stream may have several small files."""

    def __init__(self, sizes: list[int], streams: int):
        self.sizes, self.streams = sizes, streams
        self.ends = list(itertools.accumulate(sizes))

    def pieces(self, stream: int) -> list[Piece]:
        """What a stream has; nothing where the corpus is smaller than the number of streams."""
        first = self.ends[-1] * stream // self.streams
        last = self.ends[-1] * (stream + 1) // self.streams
        pieces = []
        number = bisect.bisect_right(self.ends, first)
        while first < last:
            before = self.ends[number] - self.sizes[number]
            end = min(last, self.ends[number])
            if first < end:
                pieces.append(Piece(number, self.sizes[number], first - before, end - before))
            first, number = end, number + 1
        return pieces


def size_of(part: Part) -> int:
    """How many places a part of a local file has: bytes of a whole file, documents of a slice."""
    return file_status(part.file).st_size if part.end is None else part.end - part.first


def default_streams(files: int, sequences_per_step: int) -> int:
    """The smallest multiple of the global batch's sequences that is not below the number of files: each step then takes
    one window or none of each stream, and a stream is about a file or less."""
    return max(1, -(-files // sequences_per_step)) * sequences_per_step


def read_piece(part: Part, piece: Piece, text_field: Field, skip_bad: bool, counts: Counter) -> Iterator:
    """The documents of a piece of a local file. A file that is packed, one whose reader has no `read_range`, and a
    slice are read as a whole for it."""
    if part.end is not None:
        if piece.start > 0:
            counts = Counter()  # another stream counts what the slice leaves out
        records = file_records(part.file, text_field, counts)
        documents = read_documents(records, part.file, skip_bad, counts)
        yield from share(itertools.islice(documents, part.first, part.end), piece)
        return
    if file_status(part.file).st_size != piece.size:
        raise unreadable_file(part.file, OSError("its size has changed since it was divided among streams"))
    reader = reader_of(part.file)
    if part.file.suffix.lower() in COMPRESSIONS or not hasattr(reader, "read_range"):
        records = share(file_records(part.file, text_field, counts), piece)
        yield from read_documents(records, part.file, skip_bad, counts)
        return
    try:
        records = reader.read_range(part.file, text_field, counts, piece.start, piece.end)
        yield from read_documents(records, part.file, skip_bad, counts)
    except UnreadableError as error:
        if error.record is not None:
            number = error.record.number + reader.count_before(part.file, piece.start)
            error.record = error.record._replace(number=number)
        raise
    except (OSError, ValueError) as error:  # ValueError: Arrow's
        raise unreadable_file(part.file, error) from error


def share(records: Iterator, piece: Piece) -> Iterator:
    """Those of all records of a file that a piece has: of P pieces of equal size each has about every P-th. Record n
    stands at the fractional part of n times the golden ratio, as a share of the file."""
    for number, record in enumerate(records):
        place = (number * GOLDEN_RATIO % 2**32) * piece.size >> 32
        if piece.start <= place < piece.end:
            yield record


def parts_between(parts: list[Part], lengths: list[int], first: int, end: int) -> list[Part]:
    """Documents `first` to `end` of parts that have so many documents, as parts that are numbered anew from 0 on."""
    chosen, before = [], 0  # documents of the parts before this one
    for part, length in zip(parts, lengths, strict=True):
        start, stop = max(first - before, 0), min(end - before, length)
        if start < stop:
            chosen.append(Part(part.file, part.first + start, part.first + stop, before + start - first))
        before += length
    return chosen
