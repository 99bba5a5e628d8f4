"""A corpus divided into streams: each document is in exactly one, and whoever reads them sees the same samples."""

import gzip
import itertools
import json
import pathlib
import random
import resource
import tracemalloc
import zlib
from collections import Counter

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, STORIES, slow_case
from transformers import AutoTokenizer

from harness.base import UserError
from harness.data import held_out, stream_parts, streaming
from harness.data.byte_ranges import record_from
from harness.data.documents import read_documents, token_batches
from harness.data.formats import file_records
from harness.data.records import DEFAULT_FIELD, DOCUMENT_MARK, CountedFile
from harness.data.stream_parts import Division, Part, default_streams, read_piece
from harness.data.windows import PackedDataset

SEQ_LEN = 16
FEW_BYTES = 64  # of a file that are read at a time in some tests, so that borders of blocks are met


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")


@pytest.fixture(scope="module")
def texts():
    lines = (STORIES / "train.jsonl").read_text().splitlines()[:150]
    return [f"{number} {json.loads(line)['text']}"[: 20 + 7 * (number % 9)] for number, line in enumerate(lines)]


def as_lines(texts, end="\n") -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode()


WORDS = ["Tom", "düne 🌊", "a b c d", "ж" * 9, "last one", "x", "two\nlines", "end"]
LONG = [*WORDS, "long " * 60, *WORDS[::-1]]
MARKED = DOCUMENT_MARK.join(LONG).encode()
FILES = {
    "lines.jsonl": as_lines(WORDS),
    "a line longer than a part.jsonl": as_lines(LONG),
    "CRLF.jsonl": as_lines(LONG, "\r\n"),
    "lone carriage returns.jsonl": as_lines(WORDS, "\r"),
    "mixed ends.jsonl": as_lines(WORDS[:3], "\r\n") + as_lines(WORDS[3:5], "\r") + as_lines(WORDS[5:]),
    "no last newline.jsonl": as_lines(WORDS)[:-1],
    "a mark of UTF-8.jsonl": b"\xef\xbb\xbf" + as_lines(WORDS),
    "blank lines.jsonl": b"\n\n\r\n" + as_lines(WORDS, "\n\n\n"),
    "one line.jsonl": as_lines(["only " * 20]),
    "ids.jsonl": b"".join(b'{"input_ids": %r}\n' % list(range(number + 1)) for number in range(9)),
    "documents in a line.jsonl": as_lines([DOCUMENT_MARK.join(WORDS[:3]), *WORDS[3:]]),
    "empty.jsonl": b"",
    "marked.txt": MARKED,
    "marks at the ends.txt": DOCUMENT_MARK.encode() + MARKED + DOCUMENT_MARK.encode() * 3,
    "nearly marks.txt": b"<|endoftext|" + MARKED + b"<|endoftext|<|endoftext|>a<|endoftext",
    "CRLF.txt": MARKED.replace(b"\n", b"\r\n").replace(b"<|", b"\r\n<|"),
    "one document.md": b"only one\n" * 30,
    "empty.txt": b"",
}


def whole(file: pathlib.Path) -> list:
    return list(read_documents(file_records(file, DEFAULT_FIELD, Counter()), file, False, Counter()))


def in_streams(file: pathlib.Path, streams: int) -> list[list]:
    """The documents of each stream of one file."""
    division = Division([file.stat().st_size], streams)
    return [
        [
            document
            for piece in division.pieces(stream)
            for document in read_piece(Part(file), piece, DEFAULT_FIELD, False, Counter())
        ]
        for stream in range(streams)
    ]


def plain(documents) -> list:
    return [document if isinstance(document, str) else list(map(int, document)) for document in documents]


# ----------------------------------------------------------------------------------------------------------------------
# The cut


@pytest.mark.parametrize("name", FILES)
def test_each_document_of_a_file_is_in_exactly_one_part_wherever_it_is_cut(tmp_path, monkeypatch, name):
    monkeypatch.setattr("harness.data.byte_ranges.BUFFER_BYTES", FEW_BYTES)
    file = tmp_path / name
    file.write_bytes(FILES[name])
    documents = plain(whole(file))
    size = len(FILES[name])
    for streams in (*range(1, 12), max(1, size // 2), max(1, size)):  # the last one: a part is a byte
        parts = in_streams(file, streams)
        assert plain(itertools.chain.from_iterable(parts)) == documents
    assert not size or len(documents) >= 1


@pytest.mark.parametrize("mark", [b"\n", DOCUMENT_MARK.encode()])
def test_a_record_is_found_wherever_blocks_end(tmp_path, monkeypatch, mark):
    content = b"one" + mark + b"<|end" + mark + mark + b"three and a half" + mark
    file = tmp_path / "data.txt"
    file.write_bytes(content)
    for block in (1, 2, 7, len(mark), len(mark) + 1, 20):
        monkeypatch.setattr("harness.data.byte_ranges.BUFFER_BYTES", block)
        for start in range(1, len(content)):
            for end in (start + 1, len(content)):
                found = content.find(mark, max(0, start - len(mark)))
                first = min(found + len(mark), end) if found >= 0 else end
                assert record_from(file, start, end, mark) == first


@pytest.mark.parametrize("group_rows", [7, 200])
@pytest.mark.parametrize("column", ["text", "input_ids"])
def test_each_row_of_a_parquet_file_is_in_exactly_one_part(tmp_path, texts, column, group_rows):
    values = texts if column == "text" else [list(range(number % 5 + 1)) for number in range(len(texts))]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"other": values, column: values}), file, row_group_size=group_rows)
    for streams in (1, 2, 7, 149, 400):
        parts = in_streams(file, streams)
        assert plain(itertools.chain.from_iterable(parts)) == values
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 2


def test_a_stream_reads_only_the_row_groups_that_have_its_rows(tmp_path, texts, monkeypatch):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=10)
    asked, iterate = [], pyarrow.parquet.ParquetFile.iter_batches
    spy = lambda parquet, rows, groups, **more: asked.extend(groups) or iterate(parquet, rows, groups, **more)  # noqa: E731
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", spy)
    piece = Division([file.stat().st_size], 5).pieces(2)[0]
    assert list(read_piece(Part(file), piece, DEFAULT_FIELD, False, Counter())) == texts[60:90]
    assert asked == [6, 7, 8]


@pytest.mark.parametrize("name", ["packed.jsonl.gz", "packed.txt.gz"])
def test_each_document_of_a_packed_file_is_in_exactly_one_part_and_parts_are_about_equal(tmp_path, texts, name):
    file = tmp_path / name
    content = as_lines(texts) if "jsonl" in name else DOCUMENT_MARK.join(texts).encode()
    file.write_bytes(gzip.compress(content))
    for streams in (1, 3, 31, 200):
        parts = in_streams(file, streams)
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(texts)
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 3
        assert all(part == [text for text in texts if text in part] for part in parts)  # in the file's order


@pytest.mark.parametrize("sizes", [[5, 0, 100, 3, 0, 0, 77, 1], [1], [0, 0, 9], [10**12, 1, 10**12]])
@pytest.mark.parametrize("streams", [1, 2, 3, 7, 64])
def test_streams_have_equal_sizes_and_follow_each_other(sizes, streams):
    division = Division(sizes, streams)
    pieces = [division.pieces(stream) for stream in range(streams)]
    lengths = [sum(piece.end - piece.start for piece in of_stream) for of_stream in pieces]
    assert max(lengths) - min(lengths) <= 1
    covered = dict.fromkeys(range(len(sizes)), 0)
    for piece in itertools.chain.from_iterable(pieces):
        assert piece.start == covered[piece.file] < piece.end <= piece.size == sizes[piece.file]
        covered[piece.file] = piece.end
    assert list(covered.values()) == sizes


def test_the_default_number_of_streams_gives_each_file_a_part_and_each_step_equal_parts():
    assert [default_streams(files, 32) for files in (1, 31, 32, 33, 100)] == [32, 32, 32, 64, 128]
    assert default_streams(0, 6) == 6


def test_a_reader_that_cannot_cut_its_files_is_read_as_a_whole_by_each_stream(tmp_path, texts, monkeypatch):
    from harness.data.readers import jsonl

    monkeypatch.delattr(jsonl, "read_range")
    file = tmp_path / "lines.jsonl"
    file.write_bytes(as_lines(texts))
    parts = in_streams(file, 4)
    assert sorted(itertools.chain.from_iterable(parts)) == sorted(texts)
    assert min(map(len, parts)) > len(texts) // 4 - 3


# ----------------------------------------------------------------------------------------------------------------------
# Streams


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts):
    """A folder of all kinds of files, empty ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_bytes(as_lines(texts[:60]))
    (folder / "b.txt").write_text(DOCUMENT_MARK.join(texts[60:90]))
    (folder / "c.jsonl").write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[90:120]}), folder / "d.parquet", row_group_size=8)
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(as_lines(texts[120:])))
    return folder


def opened(tokenizer, source, **more):
    return streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(source), seed=7, **more)


def tokens_of(dataset, stream: int, epochs: int) -> list[np.ndarray]:
    """The tokens of each of the first epochs of a stream."""
    found: list[list] = [[] for _ in range(epochs)]
    for (_, epoch, _), tokens in itertools.takewhile(
        lambda chunk: chunk[0][1] < epochs, dataset.chunks((0, 0, 0), stream)
    ):
        found[epoch].append(tokens)
    return [np.concatenate(of_epoch) for of_epoch in found]


def decoded(tokenizer, tokens) -> list[str]:
    return tokenizer.decode(tokens).split(DOCUMENT_MARK)[:-1]


@pytest.mark.parametrize("streams", [2, 5, 12])
def test_an_epoch_of_all_streams_holds_each_document_once_in_another_order_each_time(tokenizer, corpus, texts, streams):
    dataset = opened(tokenizer, corpus).divide(streams)
    found = [tokens_of(dataset, stream, 2) for stream in range(streams)]
    for epoch in (0, 1):
        documents = [document for of_stream in found for document in decoded(tokenizer, of_stream[epoch])]
        assert sorted(documents) == sorted(texts)
    assert all(of_stream[0].tolist() != of_stream[1].tolist() for of_stream in found)


def test_more_files_than_streams_with_packed_ones_among_them(tokenizer, tmp_path, texts):
    for number in range(30):
        content = as_lines(texts[5 * number : 5 * number + 5])
        if number % 3:
            (tmp_path / f"{number:02}.jsonl").write_bytes(content)
        else:
            (tmp_path / f"{number:02}.jsonl.gz").write_bytes(gzip.compress(content))
    dataset = opened(tokenizer, tmp_path).divide(7)
    assert min(len(dataset.division.pieces(stream)) for stream in range(7)) > 3
    found = [document for stream in range(7) for document in decoded(tokenizer, tokens_of(dataset, stream, 1)[0])]
    assert sorted(found) == sorted(texts)


def test_one_stream_is_the_corpus_undivided(tokenizer, corpus):
    dataset = opened(tokenizer, corpus)
    assert dataset.divide(1) is dataset
    packed = PackedDataset(np.concatenate(tokens_of(dataset, 0, 3)), SEQ_LEN)
    reader = streaming.StreamReader(dataset, {})
    chunks = itertools.takewhile(lambda chunk: chunk[0][1] < 3, dataset.chunks((0, 0, 0)))
    positions = [position for position, _ in chunks]
    assert len(positions) > 6
    for number in range(len(packed)):
        assert reader.window(0, number).tolist() == packed[number].tolist()
        # as checkpoints of before have it
        assert reader.position(0) == max(position for position in positions if position[0] <= number * SEQ_LEN)


def sample(reader, streams: int, number: int) -> list[int]:
    return reader.window(number % streams, number // streams).tolist()


@pytest.mark.parametrize("streams", [6, slow_case(13)])
def test_any_ranks_and_batches_see_the_same_samples_and_go_on_from_each_others_positions(tokenizer, corpus, streams):
    dataset = opened(tokenizer, corpus).divide(streams)
    alone = streaming.StreamReader(dataset, {})
    expected = [sample(alone, streams, number) for number in range(240)]
    assert any(alone.position(stream)[1] > 0 for stream in range(streams))  # into a second epoch
    assert len(set(map(tuple, expected))) > 200
    choose = random.Random(streams)
    for ranks, batch in ((1, 1), (1, 4), (2, 2), (3, 1), (4, 2), (8, 1), (8, 3)):
        positions: dict = {}
        first, starts = 0, set()
        while first + ranks * batch <= len(expected):
            readers = [streaming.StreamReader(dataset, positions) for _ in range(ranks)]
            for _ in range(choose.randrange(3, 20)):  # steps until this run stops
                if first + ranks * batch > len(expected):
                    break
                for rank in range(ranks):
                    for number in range(first + rank * batch, first + (rank + 1) * batch):
                        assert sample(readers[rank], streams, number) == expected[number]
                first += ranks * batch
            # the last of a stream that any rank has, as it gave the latest window
            for reader in readers:
                for stream in reader.opened:
                    positions[stream] = max(tuple(positions.get(stream, (0, 0, 0))), reader.position(stream))
            positions = {int(key): tuple(value) for key, value in json.loads(json.dumps(positions)).items()}
            starts |= {position[1:] for position in positions.values()}
        assert len({epoch for epoch, _ in starts}) > 1
        assert any(documents > 0 for _, documents in starts)


def test_a_resumed_stream_is_not_tokenized_from_its_beginning(tokenizer, corpus, monkeypatch):
    dataset = opened(tokenizer, corpus).divide(2)
    reader = streaming.StreamReader(dataset, {})
    expected = [reader.window(1, number).tolist() for number in range(30)]
    position = reader.position(1)
    assert 0 < position[0] <= 29 * SEQ_LEN
    again = streaming.StreamReader(dataset, {1: position})
    encoded = []
    tokenize = token_batches
    seen = lambda documents: (encoded.append(1) or document for document in documents)  # noqa: E731
    monkeypatch.setattr(streaming, "token_batches", lambda documents, *of: tokenize(seen(documents), *of))
    assert again.window(1, 29).tolist() == expected[29]
    assert len(encoded) <= 3 * streaming.DIVIDED_BATCH
    assert again.position(0) == (0, 0, 0)
    with pytest.raises(ValueError, match="is read from"):
        streaming.StreamReader(dataset, {1: position}).window(1, 0)
    with pytest.raises(ValueError, match="is read from"):
        again.window(1, 28)


def test_a_reader_opens_only_the_streams_that_it_is_asked_for(tokenizer, corpus, monkeypatch):
    asked = []
    of_stream = streaming.StreamedDataset.stream_documents
    spy = lambda dataset, stream, *more: asked.append(stream) or of_stream(dataset, stream, *more)  # noqa: E731
    monkeypatch.setattr(streaming.StreamedDataset, "stream_documents", spy)
    reader = streaming.StreamReader(opened(tokenizer, corpus).divide(8), {})
    for number in (5, 13, 2):
        sample(reader, 8, number)
    assert set(asked) == {2, 5}


@pytest.mark.parametrize("name", ["few.jsonl", "few.txt", "few.jsonl.gz"])
def test_a_stream_without_a_document_takes_those_of_the_next_one_that_has_some(tokenizer, tmp_path, texts, name):
    content = DOCUMENT_MARK.join(texts[:3]).encode() if name.endswith("txt") else as_lines(texts[:3])
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    dataset = opened(tokenizer, tmp_path / name).divide(9)
    (size,) = dataset.division.sizes
    own = [
        plain(
            document
            for piece in dataset.division.pieces(stream)
            for document in read_piece(Part(tmp_path / name), piece, DEFAULT_FIELD, False, Counter())
        )
        for stream in range(9)
    ]
    assert sum(map(len, own)) == 3 and [] in own and size > 9
    reader = streaming.StreamReader(dataset, {})
    for stream in range(9):
        source = next(number % 9 for number in range(stream, stream + 9) if own[number % 9])
        first, second = (sorted(decoded(tokenizer, tokens)) for tokens in tokens_of(dataset, stream, 2))
        assert first == second == sorted(own[source])
        windows = [reader.window(stream, number).tolist() for number in range(12)]
        again = streaming.StreamReader(dataset, {stream: reader.position(stream)})
        assert again.window(stream, 11).tolist() == windows[11]


def test_the_order_has_nothing_to_do_with_how_many_documents_are_tokenized_at_a_time(tokenizer, corpus, monkeypatch):
    dataset = opened(tokenizer, corpus).divide(3)
    before = [tokens.tolist() for tokens in tokens_of(dataset, 1, 2)]
    monkeypatch.setattr(streaming, "DIVIDED_BATCH", 3)
    assert [tokens.tolist() for tokens in tokens_of(dataset, 1, 2)] == before


def test_a_slice_is_divided_too(tokenizer, tmp_path, texts):
    for number, first in enumerate((0, 50, 60)):
        (tmp_path / f"{number}.jsonl").write_bytes(as_lines(texts[first : (50, 60, None)[number]]))
    dataset = opened(tokenizer, tmp_path, split="train[10:-20]").divide(4)
    found = [document for stream in range(4) for document in decoded(tokenizer, tokens_of(dataset, stream, 1)[0])]
    assert sorted(found) == sorted(texts[10:-20])


@pytest.fixture
def hub(texts, monkeypatch):
    """A hub data set of three shards of unequal size."""

    def rows(shards):
        for shard in shards:
            yield from ({"text": text} for text in texts[shard[0] : shard[1]])

    shards = [(0, 100), (100, 120), (120, 150)]
    data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})
    monkeypatch.setattr(streaming, "load_documents", lambda *of, **more: data)
    return data


@pytest.mark.parametrize("streams", [2, 3, 8])
def test_each_row_of_the_hub_is_in_exactly_one_stream(tokenizer, texts, hub, streams):
    whole = opened(tokenizer, "someone/stories")
    assert whole.files == 3
    dataset = whole.divide(streams)
    found = [decoded(tokenizer, tokens_of(dataset, stream, 1)[0]) for stream in range(streams)]
    assert sorted(itertools.chain.from_iterable(found)) == sorted(texts)
    if streams == 3:
        assert [sorted(of) for of in found] == [sorted(texts[:100]), sorted(texts[100:120]), sorted(texts[120:])]


# ----------------------------------------------------------------------------------------------------------------------
# Held out


def test_what_is_held_out_by_content_does_not_depend_on_the_number_of_streams(tokenizer, corpus, texts):
    chosen = [text for text in texts if zlib.crc32(text.encode()) % 20 == 0]
    kept = [text for text in texts if text not in chosen]
    assert 0 < len(chosen) < len(texts) // 8
    dataset = opened(tokenizer, corpus)
    for streams in (1, 4, 11):
        train, held = dataset.divide(streams).hold_out(held_out.BY_CONTENT)
        assert sorted(decoded(tokenizer, held.head(0).tokens)) == sorted(chosen)
        found = [text for stream in range(streams) for text in decoded(tokenizer, tokens_of(train, stream, 1)[0])]
        assert sorted(found) == sorted(kept)
        assert train.fingerprint() != dataset.fingerprint() or texts[0] in kept


def test_token_ids_are_held_out_by_their_values_whatever_their_type():
    ids = [4, 70_000, 2**32 - 1]
    checksum = zlib.crc32(b"\x04\0\0\0" + b"\x70\x11\x01\0" + b"\xff" * 4)
    for document in (ids, np.array(ids), np.array(ids, np.uint32)):
        assert held_out.is_held_out_by_content(document) == (checksum % 20 == 0)
    numbers = [number for number in range(400) if held_out.is_held_out_by_content(np.array([number], np.int32))]
    assert numbers == [number for number in range(400) if held_out.is_held_out_by_content([number])]
    assert numbers == [number for number in range(400) if zlib.crc32(number.to_bytes(4, "little")) % 20 == 0]
    assert 5 < len(numbers) < 40


@pytest.mark.parametrize("rule", [held_out.RULE, held_out.OLD_RULE])
def test_rules_that_need_the_numbers_of_documents_are_not_for_several_streams(tokenizer, corpus, rule):
    dataset = opened(tokenizer, corpus)
    with pytest.raises(ValueError, match="cannot hold out"):
        dataset.divide(2).hold_out(rule)
    if rule == held_out.RULE:
        with pytest.raises(ValueError, match="by their number"):
            dataset.hold_out(rule)[0].divide(2)


def test_a_corpus_of_which_nothing_is_held_out_is_refused(tokenizer, tmp_path):
    (tmp_path / "same.jsonl").write_bytes(as_lines(["the same again"] * 30))
    with pytest.raises(UserError, match="30 documents are too few"):
        opened(tokenizer, tmp_path / "same.jsonl").hold_out(held_out.BY_CONTENT)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def read_all(dataset, streams: int, report=None) -> streaming.StreamReader:
    reader = streaming.StreamReader(dataset.divide(streams), {}, report)
    for number in range(40 * streams):
        sample(reader, streams, number)
    return reader


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.txt", "bad.parquet", "bad.jsonl.gz"])
def test_a_bad_record_is_named_by_its_place_in_the_whole_file(tokenizer, tmp_path, texts, name):
    place = {"bad.txt": 302, "bad.parquet": 101}.get(name, 101)
    file = tmp_path / name
    if name == "bad.txt":
        documents = [f"{text.replace(chr(10), ' ')}\n\n" for text in texts]
        file.write_text(DOCUMENT_MARK.join([*documents[:150], "\nnul \0 here", *documents]))
    elif name == "bad.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [*texts[:100], None, *texts]}), file)
    else:
        content = as_lines(texts[:100], "\r\n") + b'{"text": 5}\n' + as_lines(texts)
        file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError) as raised:
        read_all(opened(tokenizer, file), 7)
    assert f"{name}, {'row' if 'parquet' in name else 'line'} {place}: " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("split", ["train", "train[0:100%]"])
def test_bad_records_that_are_left_out_are_counted_once_over_all_streams(tokenizer, tmp_path, texts, split):
    content = b"".join(as_lines([text]) + b'{"text": null}\n{"text": ""}\n' for text in texts[:40])
    for name in ("a.jsonl", "b.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    reported = []
    dataset = opened(tokenizer, tmp_path, skip_bad_records=True, split=split)
    reader = read_all(dataset, 5, lambda counts: reported.append(counts["bad records"]))
    left_out = 80 if split == "train" else 78  # what follows the last document of a file's slice is not read
    assert reader.dataset.counts["bad records"] == reader.dataset.counts["empty documents"] == left_out
    assert reported[0] >= 1 and all(later >= 10 * before for before, later in itertools.pairwise(reported))
    assert dataset.counts["bad records"] == 0


def test_a_file_that_has_changed_since_it_was_divided_is_named(tokenizer, tmp_path, texts):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(as_lines(texts))
    reader = streaming.StreamReader(opened(tokenizer, file).divide(3), {})
    file.write_bytes(as_lines(texts[:-1]))
    with pytest.raises(UserError, match=r"lines\.jsonl: cannot be read .*size has changed"):
        reader.window(0, 0)


def test_a_corpus_that_has_lost_its_documents_ends_in_one_line(tokenizer, tmp_path, texts):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(as_lines(texts))
    reader = streaming.StreamReader(opened(tokenizer, file).divide(3), {})
    file.write_bytes(b" " * (file.stat().st_size - 1) + b"\n")
    with pytest.raises(UserError, match="it holds no text"):
        reader.window(1, 0)


def test_a_file_is_open_only_while_it_is_read(tmp_path):
    (tmp_path / "data.txt").write_bytes(bytes(range(200)))
    counts: Counter = Counter()
    raw = CountedFile(tmp_path / "data.txt", counts, 50, 120)
    descriptors = lambda: {  # noqa: E731
        str(link.readlink()) for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()
    }
    assert raw.read(10) == bytes(range(50, 60))
    assert str(tmp_path / "data.txt") not in descriptors()
    assert raw.read() == bytes(range(60, 120)) and raw.read(1) == b""
    assert counts["read"] == 70
    assert raw.seek(-150, 2) == 50 == raw.tell()


@pytest.mark.parametrize("opened_streams", [200, slow_case(2000)])
def test_two_thousand_streams_need_no_descriptors_and_little_memory(tokenizer, tmp_path, texts, opened_streams):
    many = [f"{number} {text}" for number in range(10) for text in texts]
    for name in ("a.jsonl", "b.txt", "c.jsonl.gz", "d.parquet"):
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": many}), tmp_path / name, row_group_size=100)
        elif name.endswith("txt"):
            (tmp_path / name).write_text(DOCUMENT_MARK.join(many))
        else:
            content = as_lines(many)
            (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    dataset = opened(tokenizer, tmp_path).divide(2000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    tracemalloc.start()
    try:
        reader = streaming.StreamReader(dataset, {})
        for stream in range(0, 2000, 2000 // opened_streams):
            reader.window(stream, 0)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(reader.opened) == opened_streams
    assert held / len(reader.opened) < 2**18
    assert stream_parts.GOLDEN_RATIO % 2 == 1  # no two records stand at one place
