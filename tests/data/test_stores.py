"""Files in a store are the same documents as on this machine, whatever the network does."""

import random
import sys

import fsspec
import multirank
import object_stores
import pyarrow
import pytest
from conftest import STORIES, cold_python, forked, losses_of, story_texts, train, words
from corpora import write_records

from harness.base.errors import UserError
from harness.data import stores
from harness.data.files import find_files
from harness.data.formats import read_records


@pytest.fixture
def store(monkeypatch):
    """(URL of a server, what it has by path, `Faults` of the proxy before it), without a wait between tries."""
    pytest.importorskip("aiohttp", reason="needs the package aiohttp")
    monkeypatch.setattr(stores, "FIRST_WAIT", 0)
    with object_stores.http_store() as served:
        yield served


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with the demo's first stories in every format, compressed ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = story_texts(0, 300)
    write_records(folder / "a.jsonl", texts[:100])
    (folder / "b.txt").write_text("<|endoftext|>".join(texts[100:150]))
    write_records(folder / "c.parquet", texts[150:200], row_group_size=20)
    write_records(folder / "compressed" / "d.jsonl.gz", texts[200:250])
    with pyarrow.output_stream(str(folder / "compressed" / "e.txt.zst"), compression="zstd") as file:
        file.write("<|endoftext|>".join(texts[250:]).encode())
    write_records(folder / "validation" / "f.jsonl", texts[:10])
    for name in ("notes.csv", ".hidden.txt", "README.md"):
        (folder / name).write_text("left out")
    return folder


def upload(folder, put) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            put(f"bucket/data/{file.relative_to(folder)}", file.read_bytes())


def read_whole(url: str, block: int = 100_000) -> bytes:
    (file,) = find_files(url).files_in_split("train")
    with file.open() as opened:
        return b"".join(iter(lambda: opened.read(block), b""))


# ----------------------------------------------------------------------------------------------------------------------
# The same as local files


@pytest.fixture
def memory(corpus):
    """fsspec's store in this process, with the corpus."""
    memory = fsspec.filesystem("memory")
    upload(corpus, lambda path, content: memory.pipe(f"/{path}", content))
    memory.pipe("/bucket/data/.git/a.txt", b"in a hidden folder")
    yield "memory://bucket/data"
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("within", ["", "/*", "/**/*.jsonl", "/a.jsonl"])
def test_files_of_a_folder_a_pattern_and_a_single_one_are_those_of_a_local_folder(memory, corpus, within):
    names = [
        {split: [file.path.removeprefix(top) for file in files] for split, files in found.splits.items()}
        for found, top in ((find_files(f"{place}{within}"), str(place)) for place in (memory, corpus))
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("way", ["", "--streaming"])
def test_a_store_has_the_samples_of_a_local_folder_streamed_and_cached(device, small, memory, corpus, tmp_path, way):
    for name, place in (("store", memory), ("local", corpus)):
        flags = [*small, "--output-dir", tmp_path, "--run-name", name, "--dataset", place, *words(way)]
        assert train(flags, device) == 0
    assert losses_of(tmp_path / "store") == losses_of(tmp_path / "local")


# ----------------------------------------------------------------------------------------------------------------------
# Faults

LARGE = random.Random(5).randbytes(1_000_000)


def put(store) -> str:
    url, contents, _ = store
    contents["large.txt"] = LARGE
    return f"{url}/large.txt"


@pytest.mark.parametrize("plan", [["reset", "none", "none", "short", "reset"], ["none", "slow"], ["503"] * 7])
def test_a_range_that_fails_is_read_again_and_nothing_is_lost_or_doubled(store, monkeypatch, plan):
    monkeypatch.setattr(stores, "TIMEOUT_SECONDS", 1)
    store[2].plan = [*plan]
    assert read_whole(put(store)) == LARGE and not store[2].plan


@pytest.mark.parametrize(
    "plan, printed",
    [
        (["403"], "no access, .*; check the credentials of the store's package"),
        (["whole"], "the server sends no ranges of a file; copy it to a local disk"),
        (["none", *["503"] * 8], r"cannot be read \(.*503.*, 8 tries in \d+ s\); when the store"),
    ],
)
def test_what_does_not_pass_is_one_line_and_not_tried_once_more(store, plan, printed):
    url, store[2].plan = put(store), [*plan, "reset"]
    with pytest.raises(UserError, match=rf"--dataset {url}: .*{printed}") as raised:
        read_whole(url)
    assert "\n" not in str(raised.value) and store[2].plan == ["reset"]


def test_a_file_that_changed_since_it_was_listed_or_is_gone_is_refused(store):
    (file,) = find_files(put(store)).files_in_split("train")
    store[1]["large.txt"] = LARGE[::-1]  # of the same size
    with pytest.raises(UserError, match="it has changed since it was listed"):
        file.open()
    (file,) = find_files(put(store)).files_in_split("train")
    records = read_records(file, ("text",))
    next(records)
    store[1]["large.txt"] = LARGE[::-1]  # after it was opened
    with pytest.raises(UserError, match="it has changed since it was listed"):
        list(records)
    (file,) = find_files(put(store)).files_in_split("train")
    with file.open() as opened:
        del store[1]["large.txt"]
        with pytest.raises(UserError, match="it has changed since it was listed, or is gone"):
            opened.read(10)


@pytest.mark.parametrize(
    "url, printed",
    [
        ("memory://bucket/nothing", "needs .* files"),
        ("simplecache::https://host/a.txt?sig=secret", "chained URLs are not read"),
        ("s3://me:secret@bucket/a.txt", "a password in a URL would be logged"),
        ("s3://bucket/a.txt", r"(?i)cannot be read \(.*install s3fs"),
    ],
)
def test_a_wrong_url_or_a_missing_package_is_one_line_at_once(monkeypatch, url, printed):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=printed) as raised:
        find_files(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("status", [401, 403])
def test_missing_access_to_a_google_bucket_is_one_line_at_once(monkeypatch, status):
    retry = pytest.importorskip("gcsfs.retry", reason="needs the package gcsfs")
    requests = []

    def info(self, path):
        requests.append(path)
        retry.validate_response(status, b'{"error": {"message": "no storage.objects.get"}}', path)

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", info)
    with pytest.raises(UserError, match=r"\(no access, .*\); check the credentials of the store's package"):
        find_files("memory://bucket/a.txt")
    assert len(requests) == 1


# ----------------------------------------------------------------------------------------------------------------------
# moto's server in S3's place, behind a proxy that makes the faults


@pytest.mark.slow
def test_a_run_on_s3_with_faults_has_the_losses_of_one_on_local_files(small, corpus, tmp_path):
    pytest.importorskip("s3fs", reason="needs the package s3fs")
    pytest.importorskip("moto.server", reason="needs the package moto")
    flags = [*small, *words("--num-steps 6 --batch-size 2 --num-workers 1 --streaming"), "--output-dir", tmp_path]
    with object_stores.s3_server() as (store, faults):
        upload(corpus, store.pipe)
        faults.plan = ["none", "503", "reset", "none", "short", "503"]
        for name, place in (("remote", "s3://bucket/data"), ("local", corpus)):
            ended = cold_python(*flags, "--dataset", place, "--run-name", name)
            assert ended.returncode == 0, ended.stderr
        assert not faults.plan
    assert losses_of(tmp_path / "remote") == losses_of(tmp_path / "local")


@pytest.mark.slow
def test_the_ranks_of_a_node_read_and_tokenize_a_corpus_once(store, small, tmp_path):
    url, contents, faults = store
    contents["a.jsonl"] = (STORIES / "validation.jsonl").read_bytes()
    ranges, next_for = [], faults.next_for
    faults.next_for = lambda header: ranges.append(header) or next_for(header)
    counts = []
    for ranks in (1, 2):
        ranges.clear()
        places = ["--cache-dir", tmp_path / f"cache-{ranks}", "--output-dir", tmp_path, "--run-name", ranks]
        flags = [*small, "--dataset", f"{url}/a.jsonl", "--num-steps", 1, "--sequence-length", 32, *places]
        forked(ranks, multirank.program, *map(str, flags))
        counts.append(len([header for header in ranges if header]))
    assert counts[0] == counts[1] > 0
