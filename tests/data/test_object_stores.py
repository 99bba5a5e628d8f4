"""Files in an object store are the same documents as on this machine, whatever the network does."""

import asyncio
import contextlib
import gzip
import io
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter

import multirank
import numpy as np
import pytest
from conftest import PROGRAM, ROOT, STORIES, cold_python, losses_of, metrics_of, parse, start, words, write_model
from harness.data.corpus_files import find_files, local_files
from harness.data.formats import file_records, file_version
from harness.data.splits import files_of_split
from harness.data.storage import RemoteFile, open_file
from harness.data.stream_parts import Division, Part, read_piece
from transformers import AutoTokenizer

import utils
from harness.base import hub
from harness.base.errors import UnreadableError, UserError
from harness.base.text import is_url
from harness.data import byte_ranges, corpora, storage, store_requests, streaming
from harness.data.records import DEFAULT_FIELD, DOCUMENT_MARK, CountedFile
from harness.flags.settings import is_local

sys.path.insert(0, str(ROOT / "benchmarks"))
import object_stores

SEQ_LEN = 16


class Store:
    """What a store in this process has, and what it does to the next requests for a range: "reset", "short", "empty",
    "whole" (no ranges), "slow", an exception, or None; after the last all pass."""

    def __init__(self):
        self.contents: dict[str, bytes] = {}
        self.marks: Counter = Counter()
        self.plan: list = []
        self.ranges: list[tuple[int, int]] = []

    def put(self, path: str, content: bytes) -> str:
        self.contents[path] = content
        self.marks[path] += 1
        return f"teststore://{path}"


@pytest.fixture
def store(monkeypatch):
    """A `Store` behind the scheme teststore, without a wait between tries."""
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    shelf = Store()

    class TestStore(AsyncFileSystem):
        protocol = "teststore"
        cachable = False

        async def _info(self, path, **_):
            path = self._strip_protocol(path)
            if path in shelf.contents:
                size, mark = len(shelf.contents[path]), f"tag-{shelf.marks[path]}"
                return {"name": path, "size": size, "type": "file", "ETag": mark}
            if any(name.startswith(f"{path}/") for name in shelf.contents):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

        async def _ls(self, path, detail=True, **_):
            top = f"{self._strip_protocol(path)}/"
            below = {name.removeprefix(top).partition("/")[0] for name in shelf.contents if name.startswith(top)}
            found = [await self._info(top + name) for name in sorted(below, reverse=True)]  # each store has its order
            return found if detail else [info["name"] for info in found]

        async def _cat_file(self, path, start=None, end=None, **_):
            shelf.ranges.append((start, end))
            fault = shelf.plan.pop(0) if shelf.plan else None
            content = shelf.contents[path][start:end]
            if isinstance(fault, Exception):
                raise fault
            if fault == "slow":
                await asyncio.Event().wait()
            if fault == "reset":
                raise ConnectionResetError(104, "Connection reset by peer")
            short = {"short": content[: len(content) // 2 + 1], "empty": b"", "whole": shelf.contents[path]}
            return short.get(fault, content)

    fsspec.register_implementation("teststore", TestStore, clobber=True)
    monkeypatch.setattr(store_requests, "FIRST_WAIT", 0)
    return shelf


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with the demo's first stories in every format, packed ones too."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("corpus")
    lines = (STORIES / "train.jsonl").read_text().splitlines()[:300]
    texts = [json.loads(line)["text"] for line in lines]
    (folder / "a.jsonl").write_text("\n".join(lines[:100]))
    (folder / "b.txt").write_text("<|endoftext|>".join(texts[100:150]))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[150:200]}), folder / "c.parquet", row_group_size=20)
    packed = folder / "packed"
    packed.mkdir()
    (packed / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[200:250]).encode()))
    with pyarrow.output_stream(str(packed / "e.txt.zst"), compression="zstd") as file:
        file.write("<|endoftext|>".join(texts[250:]).encode())
    validation = folder / "validation"
    validation.mkdir()
    (validation / "f.jsonl").write_text("\n".join(lines[:10]))
    for name in ("notes.csv", ".hidden.txt", "README.md"):
        (folder / name).write_text("left out")
    return folder


def upload(folder, put) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            put(f"bucket/data/{file.relative_to(folder)}", file.read_bytes())


def stream_tokens(tokenizer, source: str, epochs: int = 2) -> np.ndarray:
    stream = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=source, seed=7)
    chunks = itertools.takewhile(lambda chunk: chunk[0][1] < epochs, stream.chunks((0, 0, 0)))
    return np.concatenate([tokens for _, tokens in chunks])


def cached_tokens(tokenizer, source: str, cache, split: str = "train") -> np.ndarray:
    corpus = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "dataset": source}
    return np.array(corpora.read_cached(utils.get_dataset, corpus, split, cache_dir=cache)[0].tokens)


def read_whole(url: str) -> bytes:
    (file,) = local_files(url)
    with open_file(file) as opened:
        return opened.read()


# ----------------------------------------------------------------------------------------------------------------------
# The same as local files


def test_a_folder_in_a_store_is_the_tokens_of_the_local_one_streamed_and_cached(store, corpus, tokenizer, tmp_path):
    upload(corpus, store.put)
    url = "teststore://bucket/data"
    assert np.array_equal(stream_tokens(tokenizer, url), stream_tokens(tokenizer, str(corpus)))
    for split in ("train", "validation", "train[:50%]"):
        tokens = cached_tokens(tokenizer, url, tmp_path / "a", split)
        assert np.array_equal(tokens, cached_tokens(tokenizer, str(corpus), tmp_path / "b", split))


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.parquet", "packed/d.jsonl.gz", "packed/e.txt.zst"])
def test_each_format_is_read_from_a_store_record_by_record(store, corpus, name):
    url = store.put(f"bucket/{name}", (corpus / name).read_bytes())
    (file,) = local_files(url)
    counts, local_counts = Counter(), Counter()
    records = [*file_records(file, ("input_ids", "text"), counts)]
    assert records == [*file_records(corpus / name, ("input_ids", "text"), local_counts)]
    assert len(records) >= 50 and counts == local_counts


def test_files_of_a_folder_a_pattern_and_a_single_one_are_those_of_a_local_folder(store, corpus):
    upload(corpus, store.put)
    store.put("bucket/data2/other.txt", b"another folder whose name begins the same")
    store.put("bucket/data/.git/a.txt", b"in a hidden folder")
    for within in ("", "/", "/*", "/*.jsonl", "/**/*.jsonl", "/packed/*", "/a.jsonl"):
        url, path = f"teststore://bucket/data{within}", f"{corpus}{within}"
        files, left_out = find_files(url)
        local, local_left_out = find_files(path)
        assert [str(file).removeprefix("teststore://bucket/data") for file in files] == [
            str(file).removeprefix(str(corpus)) for file in local
        ]
        names = [name.replace("teststore://bucket/data", str(corpus)) for name in left_out]
        assert names == local_left_out
        if files:
            of_split = files_of_split(url, "train", files)
            assert [file.name for file in of_split] == [file.name for file in files_of_split(path, "train", local)]


def test_the_listing_of_a_folder_leaves_out_the_names_of_empty_folders(store):
    store.put("bucket/data/", b"")
    url = store.put("bucket/data/a.txt", b"a")
    assert [file.url for file in local_files("teststore://bucket/data")] == [url]


def test_a_url_is_data_in_files_and_no_hub_id():
    for url in ("s3://bucket/folder", "gs://b/a.jsonl", "https://host/a.parquet", "hf://datasets/a/b", "memory://a"):
        assert is_url(url) and is_local(url)
        settings = parse(["--model", "demo", "--dataset", url])
        assert settings.dataset_split == "train"
    for name in ("roneneldan/TinyStories", "a.jsonl", "/data/a.jsonl", "./a", "C:/a", "s3:/a"):
        assert not is_url(name)


def test_the_hub_is_not_asked_for_where_a_url_is_of_another_store(monkeypatch):
    asked = []
    monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *where: asked.append(where))
    hub.answer_from_cache_without_network("s3://bucket/folder")
    assert not asked
    hub.answer_from_cache_without_network("hf://datasets/a/b")
    assert asked


def test_a_file_is_another_one_after_a_change_of_the_same_size(store):
    url = store.put("bucket/a.txt", b"one")
    before = file_version(local_files(url)[0])
    store.put("bucket/a.txt", b"two")
    assert before[:2] == (url, 3)
    assert file_version(local_files(url)[0]) != before


# ----------------------------------------------------------------------------------------------------------------------
# Divided streams


def windows_of(tokenizer, source: str, streams: int, count: int, positions=None, first: int = 0) -> list[list[int]]:
    """`count` samples of a divided stream from `first` on; `positions` gets where each stream goes on."""
    stream = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=source, seed=7).divide(streams)
    reader = streaming.StreamReader(stream, positions)
    found = [reader.window(number % streams, number // streams).tolist() for number in range(first, first + count)]
    if positions is not None:
        positions.update({stream: reader.position(stream) for stream in reader.opened})
    return found


def check_divided(tokenizer, url: str, folder: str, streams: int) -> None:
    """Compares the samples of a divided store with those of a local folder, in one go and in two, over an epoch."""
    count = 3 * len(stream_tokens(tokenizer, folder, epochs=1)) // SEQ_LEN
    expected = windows_of(tokenizer, folder, streams, count)
    positions: dict = {}
    found = windows_of(tokenizer, url, streams, count // 2, positions)
    assert len(positions) == streams and max(tokens for tokens, _, _ in positions.values()) > 0
    assert found + windows_of(tokenizer, url, streams, count - count // 2, positions, count // 2) == expected


@pytest.mark.parametrize("streams", [4, 13])
def test_a_divided_stream_of_a_store_has_the_samples_of_the_local_one_and_goes_on(store, corpus, tokenizer, streams):
    upload(corpus, store.put)
    store.plan = ["reset", None, "short", None, None, "empty"]
    check_divided(tokenizer, "teststore://bucket/data", str(corpus), streams)
    assert not store.plan


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt"])
def test_the_parts_of_a_file_in_a_store_ask_for_it_about_once_in_all(store, monkeypatch, name):
    first_block, max_block, parts = 500, 4000, 64
    monkeypatch.setattr(storage, "PART_FIRST_BLOCK", first_block)
    monkeypatch.setattr(storage, "PART_MAX_BLOCK", max_block)
    monkeypatch.setattr(byte_ranges, "BUFFER_BYTES", first_block)
    texts = [f"{number} " + "once upon a time " * (number % 20) for number in range(4000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    content = lines.encode() if name == "a.jsonl" else DOCUMENT_MARK.join(texts).encode()
    (file,) = local_files(store.put(f"bucket/{name}", content))
    part = Part(storage.for_parts(file))
    assert part.file == file
    found = []
    for stream in range(parts):
        for piece in Division([file.size], parts).pieces(stream):
            found += read_piece(part, piece, DEFAULT_FIELD, False, Counter())
    assert found == texts
    sizes = [end - start for start, end in store.ranges]
    assert max(sizes) == max_block
    assert len(content) <= sum(sizes) <= len(content) + parts * 2 * 2 * first_block
    store.ranges.clear()
    with CountedFile(part.file, Counter(), 10_000, 32_100) as raw:
        assert raw.readall() == content[10_000:32_100]
    assert store.ranges[0][0] == 10_000 and store.ranges[-1][1] == 32_100
    assert sum(end - start for start, end in store.ranges) == 22_100


# ----------------------------------------------------------------------------------------------------------------------
# Reading: ranges, and what goes wrong


@pytest.fixture
def large(store, monkeypatch):
    """(URL, content) of a file of many ranges, which are small here."""
    monkeypatch.setattr(storage, "FIRST_BLOCK", 1000)
    monkeypatch.setattr(storage, "MAX_BLOCK", 8000)
    content = random.Random(0).randbytes(100_003)
    return store.put("bucket/large.txt", content), content


def test_what_is_read_at_any_place_is_what_a_local_file_has(store, large):
    url, content = large
    (file,) = local_files(url)
    chance, local = random.Random(1), io.BytesIO(content)
    with open_file(file) as opened:
        for _ in range(300):
            move = chance.choice(["seek", "end", "read", "read", "readline", "readinto"])
            if move == "seek":
                place = chance.randrange(len(content) + 10)
                assert opened.seek(place) == local.seek(place)
            elif move == "end":
                back = chance.randrange(5000)
                assert opened.seek(-back, io.SEEK_END) == local.seek(-back, io.SEEK_END)
            elif move == "readline":
                assert opened.readline() == local.readline()
            elif move == "readinto":
                mine, theirs = bytearray(700), bytearray(700)
                assert opened.readinto(mine) == local.readinto(theirs) and mine == theirs
            else:
                size = chance.choice([1, 10, 999, 1000, 1001, 20_000])
                assert opened.read(size) == local.read(size)
            assert opened.tell() == local.tell()


def test_only_ranges_around_what_is_read_are_asked_for(store, large):
    url, content = large
    (file,) = local_files(url)
    with open_file(file) as opened:
        opened.seek(50_000)
        assert opened.read(10) == content[50_000:50_010]
    assert store.ranges == [(50_000, 51_000)]
    store.ranges.clear()
    assert read_whole(url) == content
    sizes = [end - start for start, end in store.ranges]
    assert sizes[:4] == [1000, 2000, 4000, 8000] and max(sizes) == 8000
    assert [start for start, _ in store.ranges[1:]] == [end for _, end in store.ranges[:-1]]  # each byte once
    assert store.ranges[-1][1] == len(content)


@pytest.mark.parametrize(
    "faults",
    [["reset"], ["slow"], ["short"], ["empty"], [OSError(16, "SlowDown")], ["reset", "slow", "empty", "reset"]],
    ids=lambda faults: "-".join(map(str, faults)),
)
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_range_that_fails_is_read_again_and_nothing_is_lost_or_doubled(store, large, monkeypatch, faults, place):
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 0.05)
    url, content = large
    store.plan = [None] * place + faults
    assert read_whole(url) == content
    assert not store.plan


def test_the_first_of_many_failures_of_a_file_is_said_with_the_place_and_the_cause(store, large, monkeypatch):
    url, _ = large
    lines = []
    monkeypatch.setattr(storage, "report", lines.append)
    store.plan = [None, "reset", "reset", "reset", None, None, "reset", None, "reset"]
    read_whole(url)
    cause = "[Errno 104] Connection reset by peer"
    assert lines == [f"{url} at byte 1,000: {cause}; trying again, up to 7 times"]


def test_a_store_that_stays_away_is_one_line_with_place_tries_and_cause(store, large, monkeypatch):
    url, _ = large
    waits = []
    monkeypatch.setattr(store_requests, "FIRST_WAIT", 0.5)
    monkeypatch.setattr(store_requests.time, "sleep", waits.append)
    store.plan = [None, *["reset"] * 100]
    with pytest.raises(UnreadableError) as raised:
        read_whole(url)
    cause = "8 tries in 0 s ([Errno 104] Connection reset by peer)"
    advice = "when the store answers again, --resume auto goes on from the newest checkpoint"
    assert str(raised.value) == f"--dataset {url}: cannot be read at byte 1,000, {cause}; {advice}"
    assert waits == [0.5, 1, 2, 4, 8, 16, 32]
    assert raised.value.file == url


def test_what_will_not_pass_is_not_tried_again(store, large):
    url, _ = large
    for error in (PermissionError("expired"), NotImplementedError("no ranges")):
        store.plan, store.ranges = [error], []
        with pytest.raises(UnreadableError, match="at byte 0"):
            read_whole(url)
        assert len(store.ranges) == 1


def test_an_http_status_says_whether_a_request_may_pass_later():
    for status in (400, 403, 404, 408, 416, 425, 429, 500, 503):
        error = OSError("no")
        error.status = status
        assert store_requests.may_pass(error) == (status in (408, 425, 429, 500, 503))


def test_a_server_without_ranges_is_refused_and_never_mistaken_for_one(store, large):
    url, _ = large
    store.plan = [None, "whole"]
    with pytest.raises(UnreadableError, match="sends no ranges of a file; copy it to a local disk"):
        read_whole(url)


@pytest.mark.parametrize("when", ["before it is opened", "after a failure"])
def test_a_file_that_changes_while_it_is_read_is_refused(store, large, when):
    url, content = large
    (file,) = local_files(url)
    with contextlib.ExitStack() as stack:
        if when == "after a failure":
            opened = stack.enter_context(open_file(file))
            opened.read(1000)
            store.plan = ["reset"]
        store.put("bucket/large.txt", content[::-1])
        with pytest.raises(UnreadableError, match="has changed since it was listed, or is gone"):
            if when == "before it is opened":
                opened = stack.enter_context(open_file(file))
            opened.read()
    del store.contents["bucket/large.txt"]
    with pytest.raises(UnreadableError, match="has changed since it was listed, or is gone"):
        open_file(file)


@pytest.mark.parametrize("name", ["c.parquet", "packed/d.jsonl.gz", "a.jsonl"])
def test_a_store_that_stays_away_is_the_same_line_in_every_format(store, corpus, tokenizer, name):
    url = store.put(f"bucket/{name}", (corpus / name).read_bytes())
    store.plan = ["reset"] * 100
    with pytest.raises(UserError, match=f"^--dataset {url}: cannot be read at byte [0-9,]+, 8 tries in"):
        streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=url)


def test_a_bad_record_is_named_with_its_line_and_counted(store, tokenizer, tmp_path):
    url = store.put("bucket/a.jsonl", b'{"text": "a"}\n{"text": 5}\n' + 'x"caf\u00e9'.encode("windows-1252"))
    with pytest.raises(UserError, match=f"{url}, line 2: 5 instead of text; 2 of 3 lines are bad"):
        cached_tokens(tokenizer, url, tmp_path)
    url = store.put("bucket/b.txt", "caf\u00e9".encode("windows-1252"))
    with pytest.raises(UserError, match="convert it: iconv -f WINDOWS-1252 -t UTF-8, on a copy that then replaces it"):
        cached_tokens(tokenizer, url, tmp_path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("teststore://bucket/none", "no such files in that store, or no such bucket"),
        ("teststore://bucket/none.txt", "no such files in that store, or no such bucket"),
        ("teststore://bucket/*.txt", "no such files in that store, or no such bucket"),
        ("teststore://bucket/notes.csv", "convert it"),
        ("teststore://bucket", "there is only notes.csv"),
        ("nonsense://bucket/a.txt", "no kind of store is called nonsense"),
        ("simplecache::teststore://bucket/a.txt", "chained and cached URLs are not read"),
        ("filecache://bucket/a.txt", "chained and cached URLs are not read"),
        ("reference://bucket/a.json", "chained and cached URLs are not read"),
        ("sftp://me:secret@host/a.txt", "a password in a URL would stand in logs"),
    ],
)
def test_a_wrong_url_is_one_line_at_once(store, url, said):
    store.put("bucket/notes.csv", b"a,b")
    with pytest.raises(UserError, match=said) as raised:
        local_files(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/a.txt", "s3fs"), ("gs://bucket/a.txt", "gcsfs")])
def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch, url, package):
    from fsspec.registry import _registry

    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    with pytest.raises(UserError, match=f"{url}: needs the package {package} .pip install {package}.$"):
        local_files(url)


def test_a_query_of_http_is_no_pattern_and_stands_in_no_message():
    file = RemoteFile("https://host/data/a.jsonl.gz?signature=secret", 3)
    assert not storage.has_pattern(file.url)
    assert (str(file), file.name, file.suffix) == ("https://host/data/a.jsonl.gz", "a.jsonl.gz", ".gz")
    assert storage.has_pattern("https://host/data/*.jsonl?a=b") and storage.has_pattern("s3://bucket/a?.jsonl")
    assert "secret" not in str(store_requests.name_failure(OSError("away"), file.url))


def test_tokens_that_are_mapped_are_refused_with_the_command_that_copies_them(tmp_path):
    for name in ("store/tokens.bin", "store/folder/a.ds"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1234")
    (tmp_path / "disk").mkdir()
    for name in ("tokens.bin", "folder"):
        error = store_requests.cannot_map(f"file://{tmp_path}/store/{name}")
        command = shlex.split(str(error).partition("give that path: ")[2])
        subprocess.run([sys.executable, *command[1:]], cwd=tmp_path / "disk", check=True)
    copied = sorted(file.name for file in (tmp_path / "disk").rglob("*") if file.is_file())
    assert copied == ["a.ds", "tokens.bin"]


IMPORTED = """
import sys
import harness.data.corpora
from harness.data.corpus_files import local_files
from harness.data.storage import open_file
before = set(sys.modules)
open_file(local_files(sys.argv[1])[0]).read(10)
print(sorted(name for name in set(sys.modules) - before if name.startswith(("fsspec", "s3fs", "aiohttp"))))
"""


@pytest.mark.slow
def test_local_files_are_opened_without_fsspec():
    process = start([sys.executable, "-c", IMPORTED, str(STORIES)], PYTHONPATH=str(ROOT))
    assert process.stdout == "[]\n", process.stderr


# ----------------------------------------------------------------------------------------------------------------------
# Real stores: moto's server in S3's place, behind a proxy that makes the faults, and an emulator in Google's


@pytest.fixture(scope="module")
def s3(corpus):
    """(file system of a bucket with the corpus, `Faults` of the proxy before it)."""
    pytest.importorskip("s3fs", reason="needs the package s3fs")
    pytest.importorskip("moto.server", reason="needs the package moto")
    with object_stores.s3_server() as (store, faults):
        upload(corpus, store.pipe)
        yield store, faults


@pytest.fixture
def faults(s3):
    """The proxy's faults, none at the beginning and at the end of a test."""
    yield s3[1]
    s3[1].plan, s3[1].always = [], ""


@pytest.mark.slow
def test_a_folder_of_s3_is_the_tokens_of_the_local_one_streamed_and_cached(s3, faults, corpus, tokenizer, tmp_path):
    url = "s3://bucket/data"
    faults.plan = ["503", "reset", "none", "short", "reset", "503"]
    assert np.array_equal(stream_tokens(tokenizer, url), stream_tokens(tokenizer, str(corpus)))
    assert not faults.plan
    faults.plan = ["none", "reset", "503", "short"]
    tokens = cached_tokens(tokenizer, url, tmp_path / "a")
    assert np.array_equal(tokens, cached_tokens(tokenizer, str(corpus), tmp_path / "b"))
    assert not faults.plan


@pytest.mark.slow
def test_a_divided_stream_of_s3_with_faults_has_the_samples_of_the_local_one_and_goes_on(s3, faults, corpus, tokenizer):
    faults.plan = ["503", "reset", "none", "short", "reset", "none", "none", "503"]
    check_divided(tokenizer, "s3://bucket/data", str(corpus), 12)
    assert not faults.plan


@pytest.mark.slow
@pytest.mark.parametrize("plan", [["slow"], ["reset"], ["503"], ["short"], ["slow", "503", "reset", "reset"]])
@pytest.mark.parametrize("place", [0, 3])
def test_a_fault_between_s3_and_the_reader_loses_and_doubles_nothing(s3, faults, monkeypatch, plan, place):
    monkeypatch.setattr(storage, "TIMEOUT_SECONDS", 1)
    content = random.Random(5).randbytes(3_000_000)
    s3[0].pipe("bucket/large.txt", content)
    faults.plan = ["none"] * place + plan
    assert read_whole("s3://bucket/large.txt") == content
    assert not faults.plan


@pytest.mark.slow
def test_an_s3_store_that_refuses_or_stays_away_is_one_line(s3, faults, monkeypatch):
    monkeypatch.setattr(store_requests, "FIRST_WAIT", 0.01)
    s3[0].pipe("bucket/large.txt", bytes(3_000_000))
    (file,) = local_files("s3://bucket/large.txt")
    for always, said in (("403", "no access .HTTP 403, "), ("503", "cannot be read, 4 tries in . s .HTTP 503, ")):
        faults.always = always
        with pytest.raises(UnreadableError, match=f"--dataset s3://bucket/data: {said}.*; check the "):
            local_files("s3://bucket/data")
    faults.always = ""
    for plan, said in (
        (["none", "403"], "large.txt at byte 262,144: no access (HTTP 403, "),
        (["none", *["503"] * 8], "large.txt: cannot be read at byte 262,144, 8 tries in "),
        (["none", *["reset"] * 8], "the connection ended in the middle of the answer"),
    ):
        faults.plan = plan
        with pytest.raises(UnreadableError, match=re.escape(said)), open_file(file) as opened:
            opened.read()
        assert not faults.plan


SMALL_RUN = "--num-steps 6 --sequence-length 32 --batch-size 2 --precision fp32 --num-workers 1 --log-interval 1"


def run_flags(folder, tmp_path, source: str, *flags) -> list[str]:
    model = write_model(tmp_path / "model", "llama", **multirank.SIZES)
    folders = ["--output-dir", str(tmp_path), "--cache-dir", str(tmp_path / "cache"), "--run-name", folder]
    data = ["--tokenizer", str(ROOT / "assets" / "demo"), "--dataset", source]
    return ["--model", model, *data, *words(SMALL_RUN), *folders, *flags]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["streamed", "cached"])
def test_a_run_on_s3_with_faults_has_the_losses_of_one_on_local_files(s3, faults, corpus, tmp_path, how):
    flags = ["--streaming"] if how == "streamed" else []
    faults.plan = ["none", "503", "reset", "none", "short", "503"]
    home = tmp_path / "home"
    home.mkdir()
    remote = cold_python(*run_flags("remote", tmp_path, "s3://bucket/data", *flags), HOME=str(home), TMPDIR=str(home))
    assert remote.returncode == 0, remote.stderr
    assert not faults.plan
    assert re.search("data +s3://bucket/data/.* at byte [0-9,]+: .*; trying again, up to 7 times", remote.stdout)
    assert "files      6 of 8 (left out: README.md, notes.csv)" in remote.stdout
    local = cold_python(*run_flags("local", tmp_path, str(corpus), *flags))
    assert local.returncode == 0, local.stderr
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local")
    left = [str(file.relative_to(home)) for file in home.rglob("*") if file.is_file()]
    assert not [name for name in left if any(word in name for word in ("fsspec", "s3", "a.jsonl", "bucket"))]


@pytest.mark.slow
def test_a_run_on_s3_that_is_killed_goes_on_with_the_same_samples(s3, faults, corpus, tmp_path):
    flags = ["--streaming", "--checkpoint-interval", "1", "--no-async-checkpoint", "--num-steps", "20"]
    command = run_flags("killed", tmp_path, "s3://bucket/data", *flags, "--resume", "auto")
    saved = tmp_path / "killed" / "checkpoints" / "step-00000003"
    process = subprocess.Popen([sys.executable, PROGRAM, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not saved.exists() and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    faults.plan = ["reset", "503", "none", "reset"]
    resumed = cold_python(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert not faults.plan
    local = cold_python(*run_flags("local", tmp_path, str(corpus), "--streaming", "--num-steps", "20"))
    assert local.returncode == 0, local.stderr
    lines = {line["step"]: line["loss"] for line in metrics_of(tmp_path / "killed") if not line.get("final")}
    assert [*lines.values()] == losses_of(tmp_path / "local")


@pytest.mark.slow
def test_mistakes_with_s3_are_one_line_at_once(s3, faults, tmp_path):
    none = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    for source, environment, said in (
        ("s3://bucket/data", none, "no access (Unable to locate credentials); check the credentials: set AWS_ACCESS"),
        ("s3://no-such-bucket/data", {}, "no such files in that store, or no such bucket"),
        ("s3://bucket/none.jsonl", {}, "no such files in that store, or no such bucket"),
        ("hf://datasets/nobody/nothing", {"HF_HUB_OFFLINE": "1"}, ""),
    ):
        process = cold_python(*run_flags("r", tmp_path, source, "--streaming"), HOME=str(tmp_path), **environment)
        assert process.returncode == 2
        assert "Traceback" not in process.stderr
        line = process.stderr.splitlines()[-1]
        assert line.startswith(f"train_fsdp.py: error: --dataset {source}") and said in line


EMULATOR = """
import http.server, threading
http.server.HTTPServer = http.server.ThreadingHTTPServer  # it would serve one connection after the other
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
server.start()
print(server._api._httpd.server_port, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def emulator():
    """The address of an emulator of Google Cloud Storage with an empty bucket `bucket`."""
    pytest.importorskip("gcsfs", reason="needs the package gcsfs")
    pytest.importorskip("gcp_storage_emulator", reason="needs the package gcp-storage-emulator")
    process = subprocess.Popen([sys.executable, "-c", EMULATOR], stdout=subprocess.PIPE, text=True)
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.wait()


READ_GOOGLE = """
import pathlib, sys
import fsspec, numpy as np
from transformers import AutoTokenizer
import test_object_stores as tests

corpus, cache = map(pathlib.Path, sys.argv[1:])
fsspec.config.conf["gs"] = {"token": "anon"}
tests.upload(corpus, fsspec.filesystem("gs", token="anon").pipe)
tokenizer = AutoTokenizer.from_pretrained(tests.ROOT / "assets" / "demo")
url = "gs://bucket/data"
assert np.array_equal(tests.stream_tokens(tokenizer, url), tests.stream_tokens(tokenizer, str(corpus)))
tokens = tests.cached_tokens(tokenizer, url, cache / "a")
assert np.array_equal(tokens, tests.cached_tokens(tokenizer, str(corpus), cache / "b"))
try:
    tests.local_files("gs://bucket/none.txt")
except tests.UserError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_files_of_google_cloud_storage_are_those_of_the_local_folder(emulator, corpus, tmp_path):
    process = start(
        [sys.executable, "-c", READ_GOOGLE, str(corpus), str(tmp_path)],
        timeout=240,
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'data'}",
        STORAGE_EMULATOR_HOST=emulator,
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # it asks by gRPC, which the emulator lacks
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("--dataset gs://bucket/none.txt: no such files in that store")
