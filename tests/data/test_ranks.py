"""Ranks share what is read of a corpus, and what one of them cannot read is one line on all."""

import dataclasses
import json
import os
import re

import multirank
import pytest
import torch.distributed as dist
from conftest import STORIES, chat, forked, metrics_of, story_texts, train, words
from corpora import CHAT_TEMPLATE, demo_tokenizer, write_records

from harness import base
from harness.base import UserError, all_gather_objects
from harness.data import corpora, formats
from harness.data.files import DataFile, find_files
from harness.data.reader import CorpusReader
from harness.data.stream import Stream
from harness.flags import Source
from harness.job import start_processes, stop_processes

# ----------------------------------------------------------------------------------------------------------------------
# The eval split of a stream


@pytest.fixture
def flags(small):
    more = "--sequence-length 16 --batch-size 2 --num-steps 2 --eval-interval 2 --lr 1e-12 --warmup-steps 0"
    return [*small, *words(f"{more} --streaming --document-mask --run-name r")]


def test_no_more_of_a_stream_is_read_for_evaluations_than_they_take(device, flags, tmp_path, capfd, monkeypatch):
    """The corpus has 2,300 sequences of 16 tokens in eval documents; as many chunks are read as hold 256."""
    chunks, documents = [], Stream.documents

    def read(stream, chunk, counts=None):
        chunks.extend([chunk] * (stream.selection == "eval"))
        return documents(stream, chunk, counts)

    monkeypatch.setattr(Stream, "documents", read)
    flags = [*flags, "--cache-dir", tmp_path / "cache"]
    for name, more, sequences in (("all", "", 256), ("many", "--eval-steps 200", 400)):
        chunks.clear()
        run = [*flags, "--dataset", STORIES / "train.jsonl", "--output-dir", tmp_path / name, *words(more)]
        train(run, device)
        assert f"by content, the first {sequences} sequences: {16 * sequences:,} tokens" in capfd.readouterr().out
        assert 1 <= len(chunks) <= 3  # of 12


@pytest.mark.slow
def test_the_eval_sequences_of_a_stream_are_those_of_one_rank_and_none_is_lost(device, flags, tmp_path):
    run = [*flags, "--dataset", write_records(tmp_path / "train.jsonl", story_texts(0, 400)), "--output-dir"]
    train([*run, tmp_path / "one", "--batch-size", 4], device)
    forked(2, multirank.program, *map(str, [*run, tmp_path / "two", "--batch-size", 3]))
    losses = [metrics_of(tmp_path / name / "r")[-1]["eval_loss"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# What one rank reads for all


def report_of_ranks(act) -> None:
    """Prints what `act` returns on each rank, or the line of its UserError."""
    try:
        found = act()
    except UserError as error:
        found = f"error: {error}"
    everyone = all_gather_objects(found)
    if dist.get_rank() == 0:
        print(json.dumps(everyone), flush=True)


def slicing_rank(folder: str) -> None:
    """Half of a data set of the hub on this rank, and how many of its files were opened; then with a broken one."""
    listing = dataclasses.replace(find_files(folder), is_hub=True)
    corpus = corpora.Corpus(Source("a", folder, None), listing, "train[:50%]", ("text",), "text")
    reading = CorpusReader(
        tokenizer=demo_tokenizer(),
        seq_len=16,
        vocab_size=1536,
        cache_dir=f"{folder}/../cache",
        is_main=dist.get_rank() == 0,
    )
    opened, open_file = [], DataFile.open

    def open_and_note(file):
        opened.append(file.name)
        return open_file(file)

    def tokens():
        opened.clear()
        return len(reading.open_tokens(corpus, corpus.split)[0]), len(opened)

    DataFile.open = open_and_note
    report_of_ranks(tokens)
    report_of_ranks(tokens)
    with open(f"{folder}/b.parquet", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"oops")
    report_of_ranks(tokens)


def mapping_rank(folder: str) -> None:
    """Token files on a node where rank 1 has none."""
    open_token_file = formats.open_token_file

    def open_there(file, vocab_size):
        missing = dataclasses.replace(file, path=f"{folder}/gone/train.bin") if dist.get_rank() else file
        return open_token_file(missing, vocab_size)

    formats.open_token_file = open_there
    reading = CorpusReader(tokenizer=None, seq_len=16, vocab_size=1536)
    corpus = corpora.inspect_source(Source("a", folder, None), ["train"], ("text",), True)
    report_of_ranks(lambda: len(reading.open_tokens(corpus, "train")[0]))


def rank_of_all(slices: str, tokens: str) -> None:
    start_processes(timeout_minutes=1)
    slicing_rank(slices)
    mapping_rank(tokens)
    stop_processes()


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(what two ranks reported of each attempt, the folder of their token files)."""
    slices, tokens = tmp_path_factory.mktemp("slices") / "data", tmp_path_factory.mktemp("tokens")
    for first, name in ((0, "a"), (20, "b")):
        write_records(slices / f"{name}.parquet", story_texts(first, first + 20))
    (tokens / "train.bin").write_bytes(bytes(4096))
    printed = forked(2, rank_of_all, str(slices), str(tokens))
    return [json.loads(line) for line in printed.splitlines() if line[0] == "["], tokens


@pytest.mark.slow
def test_rank_0_alone_opens_the_footers_of_a_hub_slice_and_what_is_broken_is_one_line_on_all(reported):
    (first, second), (again, second_again), (error, error_of_other) = reported[0][:3]
    assert first[0] == second[0] == again[0] == second_again[0] > 0
    assert again[1] == 2 and second[1] == second_again[1] == 0  # a footer of each file, by rank 0
    assert error == error_of_other and "\n" not in error
    assert re.match(r"error: --dataset .*/b.parquet: cannot be read \(Parquet magic bytes not found in footer", error)


@pytest.mark.slow
def test_a_token_file_that_one_node_lacks_is_one_line_on_all_ranks(reported):
    output, folder = reported
    error, error_of_other = output[3]
    assert error == error_of_other and "\n" not in error
    assert error.startswith(f"error: --dataset {folder}/gone/train.bin: cannot be read (")


def rank_without_a_template(*argv: str) -> None:
    read_template = base.read_template

    def read(path):
        if path and dist.get_rank():
            raise UserError("no such file on this node")
        return read_template(path)

    base.read_template = read
    multirank.program(*argv)


@pytest.mark.slow
def test_a_chat_template_that_one_node_lacks_is_read_by_rank_0_for_all(small, tmp_path):
    write_records(tmp_path / "a.jsonl", [chat("Who?", "A fox.")] * 99)
    (tmp_path / "a.jinja").write_text(CHAT_TEMPLATE)
    flags = ["--dataset", tmp_path / "a.jsonl", "--chat-template", tmp_path / "a.jinja", "--output-dir", tmp_path]
    flags += ["--sample-prompt", "Who?", "--export", tmp_path / "export", *words("--sample-tokens 2 --batch-size 1")]
    forked(2, rank_without_a_template, *map(str, [*small, *flags, "--num-steps", 1]))
    assert metrics_of(tmp_path / "r")[-1]["samples"][0]["prompt"] == "user: Who?\n"
