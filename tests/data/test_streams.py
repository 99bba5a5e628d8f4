"""A streamed corpus trains on the same samples whoever reads them, and a resume continues where it was."""

import gzip
import json
import shutil
import tracemalloc

import pytest
from conftest import chat, losses_of, metrics_of, story_texts, train, words
from corpora import write_records

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.schema import DOC_SEPARATOR
from harness.data.stream import Stream
from harness.data.tokenize import TextEncoder
from harness.data.tokens import checksum_of_beginning

SEQ_LEN = 16
OPTIONS = {"seq_len": SEQ_LEN, "seed": 7}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of all kinds of files, compressed and empty ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"{number} {story}"[: 20 + 7 * (number % 9)] for number, story in enumerate(story_texts(0, 400))]
    write_records(folder / "a.jsonl", texts[:150])
    (folder / "b.txt").write_text(DOC_SEPARATOR.join(texts[150:250]))
    write_records(folder / "c.jsonl.gz", texts[250:300])
    write_records(folder / "d.parquet", texts[300:], row_group_size=13)
    (folder / "e.jsonl").write_text("")
    return folder


@pytest.fixture
def flags(small, corpus, tmp_path):
    more = f"--num-steps 12 --sequence-length {SEQ_LEN} --batch-size 8 --streaming --document-mask --resume auto"
    return [*small, *words(more), "--output-dir", tmp_path, "--dataset", corpus]


def test_there_are_no_more_shards_than_row_groups_of_parquet(device, flags, tmp_path, capfd):
    texts = [f"story {number} of a fox and a red ball" for number in range(60)]
    for name, part in (("a", texts[:40]), ("b", texts[40:])):
        write_records(tmp_path / f"{name}.parquet", part, row_group_size=10)
    train([*flags, "--dataset", tmp_path / "*.parquet", "--streams", 99, "--num-steps", 1], device)
    assert "\nstreams    6 " in capfd.readouterr().out


@pytest.mark.slow
def test_the_memory_of_a_stream_is_bounded_whatever_the_size_of_its_file(device, flags, tmp_path):
    """A compressed file is one chunk; 60 MB of text are read in pieces."""
    line = json.dumps({"text": "A fox had a red kite, and the wind took it over the hill. " * 8}) + "\n"
    (tmp_path / "large.jsonl.gz").write_bytes(gzip.compress(line.encode() * 126_000, 1))
    tracemalloc.start()
    try:
        train([*flags, "--dataset", tmp_path / "large.jsonl.gz", "--num-steps", 2], device)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6


def test_a_split_is_evaluated_as_from_a_token_cache(device, flags, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data")
    shutil.copy(corpus / "a.jsonl", tmp_path / "data" / "validation.jsonl")
    still = words("--lr 1e-12 --warmup-steps 0 --eval-interval 2 --num-steps 2 --eval-split validation")
    for name in ("streamed", "cached"):
        given = [flag for flag in flags if name == "streamed" or flag != "--streaming"]
        run = [*given, *still, "--dataset", tmp_path / "data", "--run-name", name]
        train([*run, "--cache-dir", tmp_path / "cache"], device)
    losses = [metrics_of(tmp_path / name)[-1]["eval_loss"] for name in ("streamed", "cached")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def shorten(folder):
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text[: text.rindex("\n", 0, -1) + 1])


OTHER_DATA = {
    "a file added": (lambda data: (data / "z.jsonl").write_text('{"text": "A new story."}'), "", "--dataset: "),
    "a file shortened": (shorten, "", "--dataset: "),
    "an eval split now": (None, "--eval-interval 1", "--eval-interval: the run has no eval documents of "),
    "read at once": (None, "--no-streaming", "--streaming was True in the checkpoint and is False now"),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_stream_is_not_resumed_on_other_data_that_begin_as_its_own_do(device, flags, corpus, tmp_path, case):
    change, more, printed = OTHER_DATA[case]
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    run = [*flags, "--dataset", data, "--num-steps"]
    train([*run, 2], device)
    if change:
        change(data)
    with pytest.raises(UserError) as raised:
        train([*run, 4, "--cache-dir", tmp_path / "cache", *words(more)], device)
    assert str(raised.value).startswith(printed)


def test_a_resumed_stream_keeps_its_shards_and_takes_no_source_that_has_fewer_chunks(device, flags, corpus, tmp_path):
    run = [*flags, "--num-steps"]
    train([*run, 2, "--streams", 4], device)
    with pytest.raises(UserError, match=r"^--streams 2: the run has 4 stream shards, which a resumed run keeps"):
        train([*run, 4, "--streams", 2], device)
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    mixed = ["--dataset", f"{corpus.name}={corpus}:1", f"new={tmp_path / 'one.txt'}:1"]
    with pytest.raises(UserError, match=r"^--dataset: the new source new has 1 chunk for the run's 4 stream shards"):
        train([*run, 4, *mixed], device)


def test_the_header_says_if_documents_of_a_small_shard_repeat_more_often(device, flags, tmp_path, capfd):
    for name, count in (("a", 300), ("b", 20)):
        for suffix in ("jsonl", "jsonl.gz"):
            write_records(tmp_path / f"{name}.{suffix}", [f"Story {number} has a fox." for number in range(count)])
    run = [*flags, "--num-steps", 1, "--streams", 2]
    for pattern, warns in (("*.jsonl", False), ("*.gz", True)):
        train([*run, "--dataset", tmp_path / pattern, "--run-name", warns], device)
        (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("streams ")]
        assert ("documents of small ones repeat more often" in line) == warns


def test_workers_change_no_loss_also_if_a_resume_has_others(device, flags, corpus, tmp_path):
    mixed = [*flags, "--dataset", f"web={corpus}:0.6", f"code={corpus / 'a.jsonl'}:0.4", "--num-steps"]
    for name, steps, workers in (("several", 3, 2), ("several", 6, 1), ("none", 6, 0)):
        train([*mixed, steps, "--run-name", name, "--num-workers", workers], device)
    assert losses_of(tmp_path / "several") == losses_of(tmp_path / "none")


def test_a_stream_is_resumed_on_a_copy_of_its_data_elsewhere(device, flags, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "copy")
    train([*flags, "--num-steps", 2], device)
    with pytest.raises(UserError, match=f"if it is a copy, give --dataset {corpus.name}=/.*/copy"):
        train([*flags, "--dataset", tmp_path / "copy"], device)
    again = [*flags, "--num-steps", 4, "--dataset", f"{corpus.name}={tmp_path / 'copy'}"]
    assert train(again, device) == 0


FILES = {  # of a folder, in their order: a stream may cut it into chunks of another order
    "compressed and plain": ("a.jsonl.gz", "b.jsonl"),
    "plain and compressed": ("a.jsonl", "b.jsonl.gz"),
    "Parquet and lines": ("a.parquet", "b.jsonl"),
    "lines, Parquet and text": ("a.jsonl", "b.parquet", "c.txt"),
    "Arrow, Parquet and text": ("a.arrow", "b.parquet", "c.md"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_stream_and_a_token_cache_begin_alike_whatever_the_formats_of_the_files(tmp_path, tokenizer, load, name):
    for file in FILES[name]:
        texts = [f"{file}, story {number}: the fox ran {number} times." for number in range(20)]
        path = tmp_path / "data" / file
        if file.endswith((".txt", ".md")):
            path.write_text(DOC_SEPARATOR.join(texts))
        else:
            write_records(path, texts, **({"row_group_size": 3} if file.endswith(".parquet") else {}))
    files = find_files(str(tmp_path / "data")).files_in_split("train")
    encoder, fields = TextEncoder(tokenizer, 1536), ("input_ids", "text")
    stream = Stream(files=files, encoder=encoder, fields=fields, **OPTIONS, num_shards=4)
    assert stream.identify()["beginning"] == checksum_of_beginning(load(tmp_path / "data").tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def test_a_stream_says_how_many_bad_records_it_leaves_out_or_names_the_first(device, flags, corpus, tmp_path, capfd):
    text = (corpus / "a.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(text + '{"text": null}\n' * 21)
    run = [*flags, "--dataset", tmp_path / "bad.jsonl"]
    assert train([*run, "--skip-bad-records", "--run-name", "skips"], device) == 0
    reported = [line for line in capfd.readouterr().out.splitlines() if "bad records" in line]
    assert reported and all(line.startswith("data       left out so far: bad records ") for line in reported)
    (tmp_path / "bad.jsonl").write_text(text + '{"text": "A fo')
    with pytest.raises(UserError, match=r"bad.jsonl, line \d+( after byte [\d,]+)?: broken JSON") as raised:
        train(run, device)
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)
    rows = [{"input_ids": [5] * 100}] * 40 + [{"input_ids": [5, 6], "labels": [5, 6]}] * 40
    with pytest.raises(UserError, match="token ids with labels instead of token ids, as the first record has"):
        train([*flags, "--dataset", write_records(tmp_path / "rows.jsonl", rows)], device)


def test_what_cannot_be_streamed_is_refused(mistake, corpus, tmp_path):
    assert mistake("--streaming", "--dataset", "synthetic").startswith("--streaming: synthetic")
    printed = mistake("--dataset", corpus, "--streaming", "--dataset-split", "train[:90%]")
    assert "a stream takes whole splits; leave out --streaming" in printed
    masked = {"conversations": chat("Hi", "Hello!"), "token ids with labels": {"input_ids": [5, 6], "labels": [5, 6]}}
    for kind, record in masked.items():
        file = write_records(tmp_path / "a.jsonl", [record] * 9)
        printed = f"{kind}, whose masks are in the token cache; leave out --streaming"
        assert mistake("--dataset", file, "--streaming").endswith(printed)
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    assert "use a shorter sequence, more text or an --eval-split" in mistake(
        "--dataset", tmp_path / "one.txt", "--streaming", "--eval-interval", "1"
    )
