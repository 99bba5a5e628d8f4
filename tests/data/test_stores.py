"""Files in a store are the same documents as on this machine, whatever the network does."""

import asyncio
import gzip
import json
import random
import re
import sys
from collections import Counter

import multirank
import object_stores
import pytest
from conftest import ROOT, STORIES, cold_python, losses_of, words, write_model

from harness.base.errors import UserError
from harness.data import stores
from harness.data.files import find_files


class Store:
    """What a store in this process has, and what it does to the next requests for a range: "reset", "short", "empty",
    "whole" (no ranges), "slow", an exception, or None; after the last all pass."""

    def __init__(self):
        self.contents: dict[str, bytes] = {}
        self.marks: Counter = Counter()
        self.plan: list = []
        self.ranges: list[tuple[int, int]] = []
        self.listings = 0

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
            shelf.listings += 1
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
            short = {"short": content[: len(content) // 2 + 1], "whole": shelf.contents[path]}
            return short.get(fault, content)

    fsspec.register_implementation("teststore", TestStore, clobber=True)
    monkeypatch.setattr(stores, "FIRST_WAIT", 0)
    return shelf


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
    (folder / "packed").mkdir()
    (folder / "packed" / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[200:250]).encode()))
    with pyarrow.output_stream(str(folder / "packed" / "e.txt.zst"), compression="zstd") as file:
        file.write("<|endoftext|>".join(texts[250:]).encode())
    (folder / "validation").mkdir()
    (folder / "validation" / "f.jsonl").write_text("\n".join(lines[:10]))
    for name in ("notes.csv", ".hidden.txt", "README.md"):
        (folder / name).write_text("left out")
    return folder


def upload(folder, put) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            put(f"bucket/data/{file.relative_to(folder)}", file.read_bytes())


def read_whole(url: str, block: int = 100_000) -> bytes:
    (file,) = find_files(url).of_split("train")
    with file.open() as opened:
        return b"".join(iter(lambda: opened.read(block), b""))


# ----------------------------------------------------------------------------------------------------------------------
# The same as local files


@pytest.mark.parametrize("within", ["", "/", "/*", "/*.jsonl", "/**/*.jsonl", "/packed/*", "/a.jsonl"])
def test_files_of_a_folder_a_pattern_and_a_single_one_are_those_of_a_local_folder(store, corpus, within):
    upload(corpus, store.put)
    store.put("bucket/data/.git/a.txt", b"in a hidden folder")
    remote, local = find_files(f"teststore://bucket/data{within}"), find_files(f"{corpus}{within}")
    names = [
        {split: [file.path.removeprefix(top) for file in files] for split, files in found.splits.items()}
        for found, top in ((remote, "teststore://bucket/data"), (local, str(corpus)))
    ]
    assert names[0] == names[1]


# ----------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.fixture(scope="module")
def large() -> bytes:
    return random.Random(5).randbytes(1_000_000)


@pytest.mark.parametrize("faults", [["reset"], ["short"], ["slow"], [OSError("HTTP 503")] * 7, ["reset", "short"] * 3])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_range_that_fails_is_read_again_and_nothing_is_lost_or_doubled(store, large, monkeypatch, faults, place):
    monkeypatch.setattr(stores, "TIMEOUT_SECONDS", 0.2)
    url = store.put("bucket/large.txt", large)
    store.plan = [None] * place + list(faults)
    assert read_whole(url) == large and not store.plan


@pytest.mark.parametrize("error", [PermissionError("denied"), ValueError("no such option")])
def test_what_will_not_pass_is_not_tried_again(store, large, error):
    url = store.put("bucket/large.txt", large)
    store.plan = [error, "reset"]
    with pytest.raises(UserError, match=r"no access|cannot be read"):
        read_whole(url)
    assert store.plan == ["reset"]


def test_a_server_without_ranges_is_refused_and_never_mistaken_for_one(store, large):
    url = store.put("bucket/large.txt", large)
    store.plan = ["whole"]
    with pytest.raises(UserError, match="the server sends no ranges of a file; copy it to a local disk"):
        read_whole(url)


def test_a_file_that_changed_since_it_was_listed_or_is_gone_is_refused(store, large):
    url = store.put("bucket/large.txt", large)
    (file,) = find_files(url).of_split("train")
    store.put("bucket/large.txt", large[::-1])  # of the same size
    with pytest.raises(UserError, match="it has changed since it was listed"):
        file.open()
    (file,) = find_files(url).of_split("train")
    with file.open() as opened:
        store.plan = [FileNotFoundError("gone")]
        with pytest.raises(UserError, match="it has changed since it was listed, or is gone"):
            opened.read(10)


@pytest.mark.parametrize(
    "url, said",
    [
        ("teststore://bucket/nothing", "needs .* files"),
        ("nostore://bucket/a.txt", "nostore"),
        ("filecache::teststore://bucket/a.txt", "chained URLs are not read"),
        ("s3://me:secret@bucket/a.txt", "a password in a URL would stand in logs"),
    ],
)
def test_a_wrong_url_is_one_line_at_once(store, url, said):
    with pytest.raises(UserError, match=said) as raised:
        find_files(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url, package", [("s3://bucket/a.txt", "s3fs"), ("gs://bucket/a.txt", "gcsfs")])
def test_a_package_that_is_missing_is_named(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"(?i)cannot be read \(.*install {package}"):
        find_files(url)


# ----------------------------------------------------------------------------------------------------------------------
# moto's server in S3's place, behind a proxy that makes the faults


@pytest.fixture(scope="module")
def s3(corpus):
    """(file system of a bucket with the corpus, `Faults` of the proxy before it)."""
    pytest.importorskip("s3fs", reason="needs the package s3fs")
    pytest.importorskip("moto.server", reason="needs the package moto")
    with object_stores.s3_server() as (filesystem, faults):
        upload(corpus, filesystem.pipe)
        yield filesystem, faults


@pytest.mark.slow
@pytest.mark.parametrize("how", ["streamed", "cached"])
def test_a_run_on_s3_with_faults_has_the_losses_of_one_on_local_files(s3, corpus, tmp_path, how):
    flags = words("--num-steps 6 --sequence-length 32 --batch-size 2 --precision fp32 --num-workers 1 --log-interval 1")
    flags += ["--model", write_model(tmp_path / "model", "llama", **multirank.SIZES)]
    flags += ["--tokenizer", ROOT / "assets" / "demo", "--cache-dir", tmp_path / "cache", "--output-dir", tmp_path]
    if how == "streamed":
        flags.append("--streaming")
    s3[1].plan = ["none", "503", "reset", "none", "short", "503"]
    for name, place in (("remote", "s3://bucket/data"), ("local", corpus)):
        ended = cold_python(*flags, "--dataset", place, "--run-name", name)
        assert ended.returncode == 0, ended.stderr
    assert not s3[1].plan
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local")


def test_a_store_that_stays_away_is_one_line_with_tries_and_cause(store, large):
    url = store.put("bucket/large.txt", large)
    store.plan = [None, *["reset"] * 8]
    with pytest.raises(UserError) as raised:
        read_whole(url)
    said = (
        r"--dataset teststore://bucket/large.txt: cannot be read \(.*reset by peer, 8 tries in \d+ s\); when the store"
    )
    assert re.match(said, str(raised.value)) and not store.plan
