"""launch/datatrove.py with datatrove's local executor: a killed start is resumed, and a run trains on its tokens."""

import pathlib
import signal
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
from conftest import DEMO, ROOT, python, start, story_texts, wait_until
from corpora import write_records
from tokenizers import Tokenizer
from transformers import AutoTokenizer

SCRIPT = ROOT / "launch" / "datatrove.py"
needs_datatrove = pytest.mark.skipif(find_spec("datatrove") is None, reason="needs the package datatrove")


def write_corpus(folder: pathlib.Path, copies: int) -> list[str]:
    """Write stories as .jsonl, .jsonl.gz and .parquet, and an empty file; return their texts."""
    texts = story_texts(0, 3000)
    texts[3] = "Zażółć gęślą jaźń, 日本語\r\nin lines. " * 20
    for number in range(copies):
        write_records(folder / f"{number}.jsonl", texts[:2000])
    write_records(folder / "empty.jsonl", [])
    write_records(folder / "more" / "b.jsonl.gz", texts[2000:2500])
    write_records(folder / "c.parquet", texts[2500:], row_group_size=100)
    return texts[:2000] * copies + texts[2000:]


def documents_of(output: pathlib.Path) -> list[list[int]]:
    """The documents of a folder of .ds files, sorted."""
    documents = []
    for file in output.glob("*.ds"):
        tokens, ends = np.fromfile(file, np.uint16), np.fromfile(f"{file}.index", np.uint64)
        assert ends[-1] == len(tokens)
        documents += [part.tolist() for part in np.split(tokens, ends[:-1].astype(int))]
    return sorted(documents)


def tokenized(texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return sorted([*encoding.ids, end_of_text] for encoding in encoded)


def test_the_help_needs_no_package():
    process = start([sys.executable, SCRIPT, "--help"])
    assert process.returncode == 0 and "--executor-options" in process.stdout and process.stderr == ""


@pytest.mark.slow
@needs_datatrove
def test_a_killed_start_is_resumed_without_a_lost_or_doubled_document_and_a_run_trains_on_them(tmp_path):
    """Also, the tokenizer's settings of truncation and padding are ignored."""
    texts = write_corpus(tmp_path / "corpus", copies=8)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["one two three", "four"], truncation=True, padding=True, max_length=16)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [sys.executable, SCRIPT, "--dataset", tmp_path / "corpus", "--output", tmp_path / "tokens"]
    words = [*map(str, [*words, "--tokenizer", tmp_path / "tokenizer", "--workers", 2])]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(completions(tmp_path)) >= 3, [process])
    done = completions(tmp_path)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "tokens").exists()
    ended = start(words)
    assert ended.returncode == 0, ended.stderr
    assert documents_of(tmp_path / "tokens") == tokenized(texts)
    assert done.items() <= completions(tmp_path).items()  # not done again
    flags = ["--demo", "--num-steps", 2, "--sequence-length", 64, "--dataset", tmp_path / "tokens", "--no-own-plan"]
    run = python(*flags, "--output-dir", tmp_path / "out", "--run-name", "r")
    assert run.returncode == 0, run.stderr
    again = start(words)
    assert again.returncode == 1 and "already exists; give another" in again.stderr


def completions(folder: pathlib.Path) -> dict[str, int]:
    """{task: when it was done}."""
    files = folder.glob("tokens.work/*/logs/completions/*")
    return {file.name: file.stat().st_mtime_ns for file in files}
