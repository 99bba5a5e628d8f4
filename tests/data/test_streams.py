"""A streamed corpus trains on the same samples whoever reads them, and a resume continues where it was."""

import gzip
import json
import shutil
import tracemalloc

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from conftest import STORIES, losses_of, metrics_of, train, words

from harness.base.errors import UserError
from harness.data.files import find_files
from harness.data.schema import DOC_SEPARATOR
from harness.data.stream import Stream, max_shards
from harness.data.tokenize import TextEncoder

SEQ_LEN = 16
OPTIONS = {"seq_len": SEQ_LEN, "seed": 7}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder of all kinds of files, packed and empty ones too."""
    folder = tmp_path_factory.mktemp("corpus")
    stories = [json.loads(line)["text"] for line in (STORIES / "train.jsonl").read_text().splitlines()[:400]]
    texts = [f"{number} {story}"[: 20 + 7 * (number % 9)] for number, story in enumerate(stories)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("".join(lines[:150]))
    (folder / "b.txt").write_text(DOC_SEPARATOR.join(texts[150:250]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(lines[250:300]).encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[300:]}), folder / "d.parquet", row_group_size=13)
    (folder / "e.jsonl").write_text("")
    return folder


@pytest.fixture
def flags(small, corpus):
    more = f"--num-steps 12 --sequence-length {SEQ_LEN} --batch-size 8 --streaming --document-mask --dataset"
    return [*small, *words(more), corpus]


def test_a_chunk_of_parquet_is_a_row_group_and_there_are_no_more_shards(tmp_path, tokenizer):
    texts = [f"story {number}" for number in range(30)]
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        pyarrow.parquet.write_table(pyarrow.table({"text": part}), tmp_path / f"{name}.parquet", row_group_size=5)
    files = find_files(str(tmp_path)).files_in_split("train")
    stream = Stream(files=files, encoder=TextEncoder(tokenizer, 1536), fields=("text",), **OPTIONS, num_shards=6)
    assert [len(list(stream.documents(chunk))) for chunk in stream.chunks] == [5] * 6
    assert max_shards(files) == 6
    assert [text for chunk in stream.chunks for text in stream.documents(chunk)] == texts


@pytest.mark.slow
def test_the_memory_of_a_stream_is_bounded_whatever_the_size_of_its_file(device, flags, tmp_path):
    """A compressed file is one chunk; 60 MB of text are read in pieces."""
    line = json.dumps({"text": "A fox had a red kite, and the wind took it over the hill. " * 8}) + "\n"
    (tmp_path / "large.jsonl.gz").write_bytes(gzip.compress(line.encode() * 126_000, 1))
    tracemalloc.start()
    try:
        train([*flags, "--dataset", tmp_path / "large.jsonl.gz", "--num-steps", 2, "--output-dir", tmp_path], device)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6


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
    "a file shortened": (shorten, "", "--dataset: "),
    "held out now": (None, "--eval-interval 1", "--eval-interval: the run has no eval documents of "),
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


def test_a_resumed_stream_keeps_its_shards_and_takes_no_source_that_has_fewer_chunks(device, flags, corpus, tmp_path):
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-steps"]
    train([*run, 2, "--streams", 4], device)
    with pytest.raises(UserError, match=r"^--streams 2: the run has 4 stream shards, which a resumed run keeps"):
        train([*run, 4, "--streams", 2], device)
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    mixed = ["--dataset", f"{corpus.name}={corpus}:1", f"new={tmp_path / 'one.txt'}:1"]
    with pytest.raises(UserError, match=r"^--dataset: the new source new has 1 chunk for the run's 4 stream shards"):
        train([*run, 4, *mixed], device)


def test_the_header_says_if_documents_of_a_small_shard_repeat_more_often(device, flags, tmp_path, capfd):
    for name, count in (("a", 300), ("b", 20)):
        lines = [json.dumps({"text": f"Story {number} has a fox."}) + "\n" for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    run = [*flags, "--num-steps", 1, "--streams", 2]
    for pattern, is_said in (("*.jsonl", False), ("*.gz", True)):
        train([*run, "--dataset", tmp_path / pattern, "--output-dir", tmp_path / str(is_said)], device)
        (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("streams ")]
        assert ("documents of small ones repeat more often" in line) == is_said


def test_workers_change_no_loss_also_where_a_resume_has_others(device, flags, corpus, tmp_path):
    mixed = [*flags, "--dataset", f"web={corpus}:0.6", f"code={corpus / 'a.jsonl'}:0.4", "--output-dir", tmp_path]
    for steps, workers in ((3, 2), (6, 1)):
        steps_and_workers = ["--num-steps", steps, "--num-workers", workers]
        train([*mixed, "--run-name", "several", "--resume", "auto", *steps_and_workers], device)
    train([*mixed, "--run-name", "none", "--num-steps", 6, "--num-workers", 0], device)
    assert losses_of(tmp_path / "several") == losses_of(tmp_path / "none")


def test_a_stream_is_resumed_on_a_copy_of_its_data_elsewhere(device, flags, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "copy")
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-steps"]
    train([*run, 2], device)
    with pytest.raises(UserError, match=f"if it is a copy, give --dataset {corpus.name}=/.*/copy"):
        train([*run, 4, "--dataset", tmp_path / "copy"], device)
    assert train([*run, 4, "--dataset", f"{corpus.name}={tmp_path / 'copy'}"], device) == 0


FILES = {  # of a folder, in their order: a stream may cut it into chunks of another order
    "compressed and plain": ("a.jsonl.gz", "b.jsonl"),
    "plain and compressed": ("a.jsonl", "b.jsonl.gz"),
    "Parquet and lines": ("a.parquet", "b.jsonl"),
    "lines, Parquet and text": ("a.jsonl", "b.parquet", "c.txt"),
    "a list and Parquet": ("a.md", "b.arrow", "c.parquet"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_stream_and_a_token_cache_begin_alike_whatever_the_formats_of_the_files(tmp_path, tokenizer, load, name):
    (tmp_path / "data").mkdir()
    for file in FILES[name]:
        texts = [f"{file}, story {number}: the fox ran {number} times." for number in range(20)]
        path, lines = tmp_path / "data" / file, "".join(json.dumps({"text": text}) + "\n" for text in texts)
        table = pyarrow.table({"text": texts})
        if file.endswith(".parquet"):
            pyarrow.parquet.write_table(table, path, row_group_size=3)
        elif file.endswith(".arrow"):
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        else:
            content = lines.encode() if "jsonl" in file else DOC_SEPARATOR.join(texts).encode()
            path.write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    files = find_files(str(tmp_path / "data")).files_in_split("train")
    encoder, fields = TextEncoder(tokenizer, 1536), ("input_ids", "text")
    stream = Stream(files=files, encoder=encoder, fields=fields, **OPTIONS, num_shards=4)
    assert stream.fingerprint()["beginning"] == load(tmp_path / "data").tokens.beginning()


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def test_a_stream_says_how_many_bad_records_it_leaves_out_or_names_the_first(device, flags, corpus, tmp_path, capfd):
    text = (corpus / "a.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(text + '{"text": null}\n' * 21)
    run = [*flags, "--dataset", tmp_path / "bad.jsonl", "--output-dir", tmp_path]
    assert train([*run, "--skip-bad-records", "--run-name", "skips"], device) == 0
    reported = [line for line in capfd.readouterr().out.splitlines() if "bad records" in line]
    assert reported and all(line.startswith("data       left out so far: bad records ") for line in reported)
    (tmp_path / "bad.jsonl").write_text(text + '{"text": "A fo')
    with pytest.raises(UserError, match=r"bad.jsonl, line \d+( after byte [\d,]+)?: broken JSON") as raised:
        train(run, device)
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


def test_a_slice_conversations_and_random_tokens_are_not_streamed(mistake, corpus, tmp_path):
    assert mistake("--streaming", "--dataset", "synthetic").startswith("--streaming: synthetic")
    printed = mistake("--dataset", corpus, "--streaming", "--dataset-split", "train[:90%]")
    assert "a stream takes whole splits; leave out --streaming" in printed
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    printed = mistake("--dataset", tmp_path / "chat.jsonl", "--streaming")
    assert printed.endswith("holds conversations, whose masks are in the token cache; leave out --streaming")


def test_a_corpus_without_an_eval_document_is_refused(mistake, tmp_path):
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    assert "use a shorter sequence, more text or an --eval-split" in mistake(
        "--dataset", tmp_path / "one.txt", "--streaming", "--eval-interval", "1"
    )
