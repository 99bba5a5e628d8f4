"""Faults that the data wing had once, each seen from outside: by runs, what they read, and get_dataset."""

import json
import os
import pathlib
import re

import multirank
import numpy as np
import pytest
from conftest import ROOT, STORIES, forked, metrics_of, train, words

import utils

DEMO = ROOT / "assets" / "demo"
VOCABULARY = multirank.SIZES["vocab_size"]
LINES = (STORIES / "train.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture
def start(device, small, tmp_path):
    """`start(*flags)`: the program in this process; its run lies in tmp_path/r."""

    def start(*flags) -> None:
        assert train([*small, "--output-dir", tmp_path, "--cache-dir", tmp_path / "cache", *flags], device) == 0

    return start


# ----------------------------------------------------------------------------------------------------------------------
# What is read


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(re.search(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text())[1])


def reading_rank(folder: str, *argv: str) -> None:
    """A rank of a run; prints how often it listed the folder of its corpus, and the bytes that it read."""
    listed, scandir, leave = [], os.scandir, os._exit

    def scandir_and_note(path="."):
        listed.append(str(path))
        return scandir(path)

    def leave_with_a_line(code: int):
        print(f"rank {os.environ['RANK']}: listed {listed.count(folder)}, read {bytes_read()}", flush=True)
        leave(code)

    os.scandir, os._exit = scandir_and_note, leave_with_a_line  # the program ends the process
    multirank.program(*argv)


@pytest.fixture
def large(tmp_path):
    """A corpus in 32 files of a megabyte that is quickly read and tokenized: stories beside a field that is padding."""
    (tmp_path / "large").mkdir()
    for number in range(32):
        records = ({"padding": "x" * 100_000} | json.loads(line) for line in LINES[10 * number : 10 * number + 10])
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "large" / f"{number:02}.jsonl").write_text(text)
    return str(tmp_path / "large")


@pytest.mark.slow
def test_a_resumed_stream_reads_from_its_chunk_on(start, large):
    """At two thirds of an epoch no more than near its beginning. It did read all of that again for the next window."""
    streamed = ["--dataset", large, *words("--streaming --streams 4 --sequence-length 128 --resume auto --num-steps")]
    read = []
    for steps in (10, 110):
        start(*streamed, steps)
        before = bytes_read()
        start(*streamed, steps + 1)
        read.append(bytes_read() - before)
    assert read[1] - read[0] < 8_000_000  # a quarter of the corpus


@pytest.mark.slow
def test_one_rank_lists_a_streamed_corpus_once_and_each_reads_its_share(small, large, tmp_path):
    """One rank did read all that was held out for all of them."""
    flags = [*small, "--output-dir", tmp_path, "--dataset", large, "--streaming", "--eval-interval", 2]
    said = forked(2, reading_rank, large, *map(str, flags))
    listed, read = zip(*sorted(re.findall(r"rank \d: listed (\d), read (\d+)", said), reverse=True), strict=True)
    assert listed == ("1", "0")
    assert min(map(int, read)) > 0.6 * max(map(int, read))


# ----------------------------------------------------------------------------------------------------------------------
# Files, splits and caches


@pytest.mark.slow
def test_a_resume_does_not_read_the_whole_token_cache(start, tmp_path):
    """Not more than for a small cache; the large one has 40 MB, of ids that need no tokenizing."""
    import pyarrow
    import pyarrow.parquet

    read = {}
    for name, count in (("small", 20_000), ("large", 20_000_000)):
        ids = np.resize(np.arange(1, VOCABULARY, dtype=np.int16), count)
        column = pyarrow.ListArray.from_arrays(np.arange(0, count + 1, 1000, dtype=np.int32), ids)
        pyarrow.parquet.write_table(pyarrow.table({"input_ids": column}), tmp_path / f"{name}.parquet")
        flags = ["--dataset", tmp_path / f"{name}.parquet", "--run-name", f"run-{name}"]
        start(*flags)
        before = bytes_read()
        start(*flags, *words("--num-steps 4 --resume auto"))
        read[name] = bytes_read() - before
    assert read["large"] - read["small"] < 10_000_000


def test_a_file_has_one_token_cache_by_whatever_name(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(LINES[:5]))
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl"), f"../{tmp_path.name}/a.jsonl"):
        utils.get_dataset(tokenizer, 32, dataset=name, cache_dir=tmp_path / "cache")
    assert len([*(tmp_path / "cache").rglob("*.bin")]) == 1


def test_the_folder_of_nanogpt_is_trained_on_and_evaluated(start, tmp_path, capsys):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    parts = np.random.default_rng(0).integers(1, VOCABULARY, (2, 1000), dtype=np.uint16)
    parts[:, ::50] = 0
    for name, part in zip(("train.bin", "val.bin"), parts, strict=True):
        part.tofile(folder / name)
    (folder / "input.txt").write_text("the text that was tokenized")
    start("--dataset", folder, "--eval-interval", 2)
    assert any("eval_loss" in line for line in metrics_of(tmp_path / "r"))
    assert "input.txt" in capsys.readouterr().out


def test_the_demo_is_a_data_set_of_the_library_too(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    windows = utils.get_dataset(tokenizer, 32, dataset="demo", cache_dir=tmp_path)
    whole = utils.get_dataset(tokenizer, 32, dataset=str(STORIES / "train.jsonl"), cache_dir=tmp_path)
    assert len(windows) == len(whole) and windows[7].tolist() == whole[7].tolist()
