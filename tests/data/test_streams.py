"""A streamed corpus trains on the same samples whoever reads them, holds each document once an epoch, and goes on after
a kill where it was."""

import gzip
import itertools
import json
import shutil
from collections import Counter
from fractions import Fraction

import multirank
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, STORIES, Stop, forked, losses_of, metrics_of, parse, train, words, write_model

from harness.base.errors import UserError
from harness.data import stream as streams
from harness.data.batches import RankBatches, TrainingData
from harness.data.encode import TextFormat
from harness.data.files import find_files
from harness.data.mixture import DataRecord, Segment, StepSize
from harness.data.records import DOCUMENT_MARK
from harness.data.stream import LaneReader, Stream

SEQ_LEN = 16
END = 0


@pytest.fixture(scope="module")
def texts():
    lines = (STORIES / "train.jsonl").read_text().splitlines()[:400]
    return [f"{number} {json.loads(line)['text']}"[: 20 + 7 * (number % 9)] for number, line in enumerate(lines)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts):
    """A folder of all kinds of files, packed and empty ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:150]))
    (folder / "b.txt").write_text(DOCUMENT_MARK.join(texts[150:250]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[250:300]).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[300:]}), folder / "d.parquet", row_group_size=13)
    (folder / "e.jsonl").write_text("")
    return folder


@pytest.fixture
def open_stream(tokenizer, monkeypatch):
    """`open_stream(place, lanes)`: a stream in small chunks."""
    monkeypatch.setattr(streams, "MOST_CHUNK", 1500)
    monkeypatch.setattr(streams, "LEAST_CHUNK", 100)
    monkeypatch.setattr("harness.data.readers.parquet.PART_BYTES", 1500)

    def open_stream(place, lanes: int = 1, split: str = "train", **options) -> Stream:
        files = find_files(str(place)).of_split(split)
        return Stream(files, TextFormat(tokenizer, 1536), "text", SEQ_LEN, 7, lanes=lanes, **options)

    return open_stream


def data_of(stream: Stream) -> TrainingData:
    history = [Segment(0, {"a": Fraction(1)}, {"a": Fraction(1)})]
    return TrainingData({"a": stream}, DataRecord({}, "a", stream.lanes, {}, history, [StepSize(0, 0, 8)]), SEQ_LEN, 7)


def documents_of(stream: Stream, lane: int, epoch: int) -> list[str]:
    """The documents of one epoch of a lane in their order."""
    chunks = len(stream.chunks_of(lane))
    found = []
    for chunk, _, documents in stream.pieces(lane, epoch * chunks, 0, Counter()):
        if chunk >= (epoch + 1) * chunks:
            return found
        found += documents
    raise AssertionError


def samples_of(stream, count: int, batch_size: int, rank: int = 0, world: int = 1, first: int = 0, positions=None):
    """(windows of a rank's batches, the positions that came with them)."""
    batches = RankBatches(data_of(stream), batch_size, 1, rank, world, first, positions)
    windows, found = [], []
    for batch in itertools.islice(batches, count):
        assert not isinstance(batch, UserError), batch
        found.append(batch["positions"])
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            windows.append([*inputs.tolist(), labels[-1].item()])
    return windows, found


# ----------------------------------------------------------------------------------------------------------------------
# The order


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_an_epoch_of_all_lanes_holds_each_document_once_in_another_order_each_time(open_stream, corpus, texts, lanes):
    stream = open_stream(corpus, lanes)
    epochs = [[text for lane in range(lanes) for text in documents_of(stream, lane, epoch)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(texts) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != texts


def test_a_lane_is_its_documents_end_to_end_in_windows(open_stream, corpus, encoded):
    stream = open_stream(corpus, 3)
    reader = LaneReader(stream, 1, streams.BEGINNING, Counter())
    tokens = encoded([text for epoch in range(2) for text in documents_of(stream, 1, epoch)])
    for number in range(len(tokens) // SEQ_LEN - 1):
        assert reader.window(number).tolist() == tokens[number * SEQ_LEN : (number + 1) * SEQ_LEN + 1]


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_any_ranks_and_batches_see_the_same_samples_and_go_on_from_each_others_positions(open_stream, corpus, lanes):
    stream = open_stream(corpus, lanes)
    count = 240  # more than an epoch of some lanes
    expected, positions = samples_of(stream, count // 8, 8)
    assert len({tuple(window) for window in expected}) == count
    for world, batch_size in ((2, 4), (4, 2), (8, 1), (3, 8)):
        rounds = count // (world * batch_size)
        of_ranks = [samples_of(stream, rounds, batch_size, rank, world)[0] for rank in range(world)]
        seen = [
            window
            for turn in range(rounds)
            for of_rank in of_ranks
            for window in of_rank[turn * batch_size : (turn + 1) * batch_size]
        ]
        assert seen == expected[: len(seen)]
    merged: dict = {}
    for number, of_batch in enumerate(positions):
        merged |= of_batch["a"]
        if number % 7 == 0:
            saved = {"a": {lane: json.loads(json.dumps(position)) for lane, position in merged.items()}}
            first = 8 * (number + 1)
            for rank in range(2):
                windows, _ = samples_of(stream, 1, 4, rank, 2, first, saved)
                assert windows == expected[first + 4 * rank : first + 4 * rank + 4] or first + 8 > count


def test_a_resumed_lane_reads_from_its_chunk_on_and_tokenizes_nothing_before_its_piece(
    open_stream, corpus, monkeypatch, tokenizer
):
    stream = open_stream(corpus / "a.jsonl")
    reader = LaneReader(stream, 0, streams.BEGINNING, Counter())
    for number in range(60):
        window = reader.window(number)
    position, read, encoded = reader.position(), [], []
    assert position[1] > 0
    for module, name, seen in ((streams, "read_records", read), (TextFormat, "encode", encoded)):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *of, call=call, seen=seen: seen.append(of) or call(*of))
    again = LaneReader(stream, 0, position, Counter())
    assert again.window(59).tolist() == window.tolist() and again.position() == position
    sizes = [end - start for _, _, start, end in read]
    assert sum(sizes) <= 3 * 1500  # the first document of the lane's chunks, and its chunk
    assert sum(len(documents) for _, documents, _ in encoded) <= 64


def test_documents_are_masked_where_they_begin_token_ids_too(open_stream, tmp_path, encoded):
    rows = [[number, number + 1, number + 2] for number in range(1, 99)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    stream = open_stream(tmp_path / "ids.jsonl", document_mask=True)
    window = LaneReader(stream, 0, streams.BEGINNING, Counter()).window(2)
    jumps = np.flatnonzero(np.diff(window.tokens[:-1].astype(int)) != 1) + 1
    assert window.starts.tolist() == [0, *jumps.tolist()]


def test_a_lane_without_a_document_takes_those_of_the_next_one_that_has_some(open_stream, tmp_path):
    (tmp_path / "long.txt").write_text(DOCUMENT_MARK.join(["Tom had a red ball. " * 200, "The end."]))
    stream = open_stream(tmp_path / "long.txt", 4)
    for lane in range(4):
        assert documents_of(stream, lane, 0)


def test_chunks_are_of_about_equal_size_and_lanes_no_more_than_chunks(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(streams, "MOST_CHUNK", 1500)
    monkeypatch.setattr(streams, "LEAST_CHUNK", 100)
    files = find_files(str(corpus / "[ab].*")).of_split("train")
    for lanes in (1, 2, 7, 30):
        chunks = streams.cut_into_chunks(files, lanes)
        sizes = [sum(part.end - part.start for part in chunk) for chunk in chunks]
        assert len(chunks) % lanes == 0 and max(sizes) - min(sizes) <= 1 and max(sizes) <= 1500
        parts = [part for chunk in chunks for part in chunk]
        for file in files:
            of_file = [part for part in parts if part.file == file]
            assert [of_file[0].start, of_file[-1].end] == [0, file.size]
            assert all(one.end == two.start for one, two in itertools.pairwise(of_file))
    assert streams.most_lanes(files) == sum(file.size for file in files) // 100
    assert [streams.default_lanes(count, 32) for count in (1, 31, 32, 33, 100)] == [32, 32, 32, 64, 128]


def test_what_is_held_out_does_not_depend_on_the_lanes_and_is_a_twentieth(open_stream, corpus, texts):
    found = []
    for lanes in (1, 4):
        stream = open_stream(corpus, lanes)
        parts = []
        for held_out in (False, True):
            stream.held_out = held_out
            chunks = itertools.chain.from_iterable(map(stream.documents, stream.chunks))
            parts.append(sorted(chunks))
        assert sorted([*parts[0], *parts[1]]) == sorted(texts)
        found.append(parts)
    assert found[0] == found[1] and 5 < len(found[0][1]) < 45


def test_the_memory_of_a_lane_is_bounded_whatever_the_size_of_its_file(tmp_path, open_stream, texts):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "large.jsonl.gz").write_bytes(gzip.compress((lines * 40).encode()))
    stream = open_stream(tmp_path / "large.jsonl.gz")
    reader, most = LaneReader(stream, 0, streams.BEGINNING, Counter()), 0
    for number in range(0, 3000, 10):
        reader.window(number)
        most = max(most, len(reader.tokens))
    assert most < 2000  # tokens, of some 400,000


# ----------------------------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = write_model(folder / "model", "llama", **multirank.SIZES)
    small = f"--num-steps 12 --sequence-length {SEQ_LEN} --batch-size 8 --precision fp32 --log-interval 1 --no-compile"
    places = f"--cache-dir {folder / 'cache'} --tokenizer {ROOT / 'assets' / 'demo'} --model {model}"
    return words(f"{small} {places} --lr 1e-3 --streaming --dataset {corpus} --document-mask --num-workers 0")


@pytest.fixture(scope="module")
def whole(device, flags, tmp_path_factory):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert train([*flags, "--output-dir", folder, "--run-name", "r"], device) == 0
    return folder / "r"


@pytest.mark.slow
def test_two_ranks_go_on_with_what_one_began(device, flags, whole, tmp_path):
    run = [*flags, "--run-name", "r", "--resume", "auto", "--output-dir"]
    train([*run, tmp_path], device, Stop(4))
    shutil.copytree(tmp_path / "r", tmp_path / "copy" / "r")  # this process has locked the other
    said = forked(2, multirank.program, *map(str, [*run, tmp_path / "copy", "--batch-size", 4]))
    assert "world size 1 -> 2" in said
    assert losses_of(tmp_path / "copy" / "r") == pytest.approx(losses_of(whole), rel=1e-5)


def test_a_split_is_evaluated_as_from_a_token_cache(device, flags, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    shutil.copy(corpus / "a.jsonl", tmp_path / "data" / "validation.jsonl")
    still = words("--lr 1e-12 --warmup-steps 0 --eval-interval 2 --num-steps 2 --eval-split validation")
    for name in ("streamed", "packed"):
        given = [flag for flag in flags if name == "streamed" or flag != "--streaming"]
        places = ["--dataset", tmp_path / "data", "--output-dir", tmp_path, "--run-name", name]
        train([*given, *still, *places, "--cache-dir", tmp_path / "cache"], device)
    losses = [metrics_of(tmp_path / name)[-1]["eval_loss"] for name in ("streamed", "packed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def shorten(folder):
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text[: text.rindex("\n", 0, -1) + 1])


OTHER_DATA = {
    "a file added": (lambda data: (data / "z.jsonl").write_text('{"text": "A new story."}'), "", "--dataset: "),
    "a file removed": (lambda data: (data / "b.txt").unlink(), "", "--dataset: "),
    "a file renamed": (lambda data: (data / "b.txt").rename(data / "y.txt"), "", "--dataset: "),
    "a file shortened": (shorten, "", "--dataset: "),
    "held out now": (None, "--eval-interval 1", "--eval-interval: the run held out nothing of "),
    "read at once": (None, "--no-streaming", "--streaming was True in the checkpoint and is False now"),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_stream_is_not_resumed_on_other_data_that_begin_as_its_own_do(device, flags, corpus, tmp_path, case):
    change, more, says = OTHER_DATA[case]
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--dataset", data, "--num-steps"]
    train([*run, 2], device)
    if change:
        change(data)
    if more == "--no-streaming":
        run, more = [flag for flag in run if flag != "--streaming"], ""
    with pytest.raises(UserError) as raised:
        train([*run, 4, "--cache-dir", tmp_path / "cache", *words(more)], device)
    assert str(raised.value).startswith(says)


def test_a_stream_is_resumed_on_a_copy_of_its_data_elsewhere(device, flags, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "copy")
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-steps"]
    train([*run, 2], device)
    assert train([*run, 4, "--dataset", tmp_path / "copy"], device) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def test_a_stream_says_how_many_bad_records_it_leaves_out_or_names_the_first(device, flags, corpus, tmp_path, capfd):
    text = (corpus / "a.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(text + '{"text": null}\n' * 21)
    run = [*flags, "--dataset", tmp_path / "bad.jsonl", "--output-dir", tmp_path]
    assert train([*run, "--skip-bad-records", "--run-name", "skips"], device) == 0
    told = [line for line in capfd.readouterr().out.splitlines() if "bad records" in line]
    assert told and all(line.startswith("data       left out so far: bad records ") for line in told)
    (tmp_path / "bad.jsonl").write_text(text + '{"text": "A fo')
    with pytest.raises(UserError, match=r"bad.jsonl, line \d+( after byte [\d,]+)?: broken JSON") as raised:
        train(run, device)
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


def test_a_slice_chat_and_random_tokens_are_not_streamed(mistake, corpus, tmp_path):
    with pytest.raises(UserError, match="--streaming: synthetic"):
        parse(["--streaming", "--dataset", "synthetic"])
    said = mistake("--dataset", corpus, "--streaming", "--dataset-split", "train[:90%]")
    assert "a stream takes whole splits; leave out --streaming" in said
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    said = mistake("--dataset", tmp_path / "chat.jsonl", "--streaming")
    assert said.endswith("holds conversations, whose masks are in the token cache; leave out --streaming")


def test_a_corpus_of_which_nothing_is_held_out_is_refused(mistake, tmp_path):
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    assert "use a shorter sequence, more text or an --eval-split" in mistake(
        "--dataset", tmp_path / "one.txt", "--streaming", "--eval-interval", "1"
    )
