"""A streamed corpus trains on the same samples whoever reads them, and goes on after a kill where it was."""

import functools
import itertools
import json
import shutil
from collections import Counter
from fractions import Fraction

import multirank
import numpy as np
import pytest
from conftest import ROOT, STORIES, Stop, forked, losses_of, metrics_of, parse, train, words
from multirank import SIZES, resolved
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import utils
from harness.base import saved
from harness.base.errors import UserError
from harness.data import corpora, documents, held_out, sample_order, streaming
from harness.data.batches import RankBatches
from harness.data.data_record import DataRecord, StepSize
from harness.data.documents import token_batches
from harness.data.mixture import Mixture, Segment
from harness.data.records import DOCUMENT_MARK
from harness.data.training_data import TrainingData
from harness.data.windows import PackedDataset
from harness.job.signals import StopRequest

SEQ_LEN = 16
DOCUMENTS = 3 * streaming.STREAM_BATCH + 5  # an epoch is four chunks, the last of them short


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "demo")


@pytest.fixture(scope="module")
def texts():
    lines = (STORIES / "train.jsonl").read_text().splitlines()[:DOCUMENTS]
    return [json.loads(line)["text"][: 20 + 7 * (number % 9)] for number, line in enumerate(lines)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("corpus")
    for split, part in (("train", texts), ("validation", texts[:70])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


@pytest.fixture(scope="module")
def stream(tokenizer, corpus):
    return streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(corpus), seed=7)


@pytest.fixture(scope="module")
def tokens(stream):
    """The first tokens of the stream, three epochs and more, from the chunks themselves."""
    chunks = itertools.takewhile(lambda chunk: chunk[0][1] < 3, stream.chunks((0, 0, 0)))
    return np.concatenate([tokens for _, tokens in chunks])


def samples_of(batches) -> list[list[int]]:
    """The windows in `batches`, inputs and last label."""
    return [
        [*inputs.tolist(), labels[-1].item()]
        for batch in batches
        for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def batches_of(stream, batch_size, rank=0, world_size=1, first_sample=0, position=None) -> RankBatches:
    """The batches of a run on this stream alone; those of one rank."""
    ones = {"a": Fraction(1)}
    history = [Segment(0, ones, ones)]
    record = DataRecord({"a": {}}, "a", 1, {}, history, [StepSize(0, 0, batch_size * world_size)])
    data = TrainingData({"a": stream}, Mixture(history), record, stream.seq_len, seed=7, end_of_text=stream.end_of_text)
    positions = {"a": {0: tuple(position)}} if position else {}
    return RankBatches(data, batch_size, 1, rank, world_size, first_sample, positions)


def take(stream, count: int, *share) -> list[dict]:
    return list(itertools.islice(batches_of(stream, *share), count))


def position_of(batch: dict) -> tuple[int, int, int]:
    return batch["positions"]["a"][0]


# ----------------------------------------------------------------------------------------------------------------------
# The order of the data


def test_an_epoch_holds_every_document_once_and_each_has_an_order_of_its_own(stream, tokens, tokenizer, texts):
    flat = token_batches(stream.documents(), tokenizer)
    length = sum(map(len, flat))
    assert len(tokens) == 3 * length
    epochs = [tokenizer.decode(tokens[length * epoch : length * (epoch + 1)]) for epoch in range(3)]
    documents = [epoch.split(DOCUMENT_MARK)[:-1] for epoch in epochs]
    assert [sorted(epoch) for epoch in documents] == [sorted(texts)] * 3
    assert documents[0] != documents[1] != documents[2] != documents[0]
    assert documents[0] != texts


@pytest.mark.parametrize("world_size, batch_size", [(1, 1), (1, 4), (2, 2), (4, 1), (3, 5)])
def test_ranks_take_the_windows_that_a_packed_data_set_in_this_order_gives_them(stream, tokens, world_size, batch_size):
    packed = PackedDataset(tokens, SEQ_LEN)
    count = len(packed) // (world_size * batch_size)
    assert count * world_size * batch_size > 2 * len(packed) // 3 + SEQ_LEN  # into the third epoch
    for rank in range(world_size):
        expected = []
        for microbatch in range(count):
            for index in sample_order.samples_of_microbatch(0, microbatch, batch_size, rank, world_size):
                expected.append(packed[index].tolist())  # the stream is shuffled already
        assert samples_of(take(stream, count, batch_size, rank, world_size)) == expected


@pytest.mark.parametrize("ranks_before, ranks_after", [(1, 2), (2, 1), (4, 2)])
def test_any_number_of_ranks_goes_on_from_any_position(stream, tokens, ranks_before, ranks_after):
    packed = PackedDataset(tokens, SEQ_LEN)
    batches = take(stream, len(packed) // (4 * ranks_before), 4, 0, ranks_before)
    starts = set()
    for number, batch in enumerate(batches[:: max(1, len(batches) // 12)]):
        samples = (number * max(1, len(batches) // 12) + 1) * 4 * ranks_before  # all ranks have taken theirs
        position = json.loads(json.dumps(position_of(batch)))
        assert 0 <= position[0] <= (samples - 4 * ranks_before) * SEQ_LEN
        starts.add(tuple(position[1:]))
        for rank in range(ranks_after):
            if samples + (rank + 1) * 4 <= len(packed):
                after = take(stream, 1, 4, rank, ranks_after, samples, position)
                first = samples + rank * 4
                assert samples_of(after) == [packed[index].tolist() for index in range(first, first + 4)]
    assert len(starts) > 6  # of chunks in every epoch, not the beginning each time
    assert {epoch for epoch, _ in starts} == {0, 1, 2}


def test_what_is_before_a_position_is_not_tokenized_again(stream, tokens, tokenizer, monkeypatch):
    last = take(stream, len(tokens) // SEQ_LEN // 4, 4)[-1]["positions"]["a"][0]
    assert last[2] >= streaming.STREAM_BATCH
    encoded = []
    tokenize = token_batches
    seen = lambda documents: (encoded.append(1) or document for document in documents)  # noqa: E731
    monkeypatch.setattr(streaming, "token_batches", lambda documents, *of: tokenize(seen(documents), *of))
    next(stream.chunks(last))
    assert sum(encoded) <= streaming.STREAM_BATCH


def test_a_position_among_long_documents_skips_none_of_them(stream, monkeypatch):
    few_at_once = functools.partial(documents.take, characters=300)  # real ones: 2**21
    monkeypatch.setattr(documents, "take", few_at_once)
    chunks = list(itertools.islice(stream.chunks((0, 0, 0)), 30))
    assert chunks[-1][0][2] < 30 * streaming.STREAM_BATCH  # chunks are cut short
    for position, tokens in chunks:
        again, first_tokens = next(stream.chunks(position))
        assert (again, first_tokens.tolist()) == (position, tokens.tolist())


def test_a_worker_that_reads_ahead_gives_each_batch_its_own_position(stream):
    loader = DataLoader(batches_of(stream, 2), batch_size=None, num_workers=1, prefetch_factor=16)
    read = list(itertools.islice(loader, 40))
    alone = take(stream, 40, 2)
    assert samples_of(read) == samples_of(alone)
    assert [tuple(position_of(batch)) for batch in read] == [position_of(batch) for batch in alone]


@pytest.mark.parametrize("length", [8, 16, 17, 40])
def test_a_chunk_that_ends_with_a_batch_leaves_its_last_label_to_the_next(length):
    """Chunks of `length` tokens, batches of two windows of eight."""

    def chunks(position, stream):
        for number in itertools.count():
            yield (number * length, 0, number), np.arange(number * length, (number + 1) * length)

    counted = object.__new__(streaming.StreamedDataset)
    vars(counted).update(seq_len=8, vocab_size=2**15, counts=Counter(), chunks=chunks)
    for rank in (0, 1):
        batches = take(counted, 4, 2, rank, 2)
        starts = [16 * (2 * number + rank) for number in range(4)]
        windows = [[*range(start, start + 9)] for first in starts for start in (first, first + 8)]
        assert samples_of(batches) == windows


def test_a_batch_longer_than_many_chunks_and_a_corpus_shorter_than_a_batch(tokenizer, tmp_path):
    (tmp_path / "few.jsonl").write_text('{"text": "Tom had a red ball. He liked it."}\n')
    stream = streaming.stream_dataset(tokenizer, 8, dataset=str(tmp_path / "few.jsonl"))
    one = next(stream.chunks((0, 0, 0)))[1]
    packed = PackedDataset(np.tile(one, 100), 8)
    (batch,) = take(stream, 1, 16, 1, 2)
    assert samples_of([batch]) == [packed[index].tolist() for index in range(16, 32)]
    assert position_of(batch)[0] <= 16 * 8 < position_of(batch)[0] + len(one)


def test_documents_are_masked(stream):
    stream.end_of_text = stream.tokenizer.eos_token_id
    (batch,) = take(stream, 1, 8)
    stream.end_of_text = None
    ends = batch["input_ids"][:, :-1] == stream.tokenizer.eos_token_id
    assert ends.any()
    assert ((batch["position_ids"][:, 1:] == 0) == ends).all()


@pytest.mark.parametrize("kind", ["txt", "parquet", "tokens"])
def test_every_kind_of_file_streams_the_same_documents(tokenizer, texts, tmp_path, kind):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / f"data.{'txt' if kind == 'txt' else 'parquet'}"
    encoded = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]
    if kind == "txt":
        file.write_text(DOCUMENT_MARK.join(texts))
    else:
        column = {"text": texts} if kind == "parquet" else {"input_ids": encoded}
        pyarrow.parquet.write_table(pyarrow.table(column), file)
    stream = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(file))
    epoch = itertools.takewhile(lambda chunk: chunk[0][1] == 0, stream.chunks((0, 0, 0)))
    found = np.concatenate([tokens for _, tokens in epoch]).tolist()
    ends = [-1, *(index for index, token in enumerate(found) if token == tokenizer.eos_token_id)]
    documents = [found[start + 1 : end + 1] for start, end in itertools.pairwise(ends)]
    assert sorted(documents) == sorted(encoded)
    assert documents != encoded


# ----------------------------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    small = f"--num-steps 12 --sequence-length {SEQ_LEN} --batch-size 32 --precision fp32 --log-interval 1 --no-compile"
    places = f"--cache-dir {folder / 'cache'} --tokenizer {ROOT / 'assets' / 'demo'} --model {folder}"
    return words(f"{small} {places} --lr 1e-3 --streaming --streams 1 --dataset {corpus} --document-mask")


@pytest.fixture(scope="module")
def whole(device, flags, tmp_path_factory):
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert train([*flags, "--output-dir", folder, "--run-name", "r"], device) == 0
    return folder / "r"


def test_a_stopped_run_goes_on_bit_for_bit_and_leaves_no_cache(device, flags, whole, tmp_path, monkeypatch):
    begun, chunks = [], streaming.StreamedDataset.chunks

    def chunks_from(self, position, stream=0):
        begun.append(position)
        return chunks(self, position, stream)

    monkeypatch.setattr(streaming.StreamedDataset, "chunks", chunks_from)
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-workers", 0]
    for stop_after in (4, 5):
        assert train(run, device, Stop(stop_after)) == StopRequest.EXIT_CODE
    manifests = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("r/checkpoints/*/manifest.json"))]
    assert [manifest["samples"] for manifest in manifests] == [4 * 32, 9 * 32]
    positions = [tuple(next(iter(manifest["positions"].values()))["0"]) for manifest in manifests]
    assert [position[1] for position in positions] == [0, 1]  # in the first epoch, and in the second
    assert all(position[2] > 0 for position in positions)
    assert train(run, device) == 0
    assert begun == [(0, 0, 0), *positions]
    assert losses_of(tmp_path / "r") == losses_of(whole)
    assert len(losses_of(whole)) == 12
    cache = flags[flags.index("--cache-dir") + 1]
    assert not (ROOT / cache).exists()


@pytest.mark.slow
def test_two_ranks_go_on_with_what_one_began(device, flags, whole, tmp_path):
    run = [*flags, "--run-name", "r", "--resume", "auto", "--output-dir"]
    train([*run, tmp_path], device, Stop(4))
    shutil.copytree(tmp_path / "r", tmp_path / "copy" / "r")  # this process has locked the other
    said = forked(2, multirank.program, *map(str, [*run, tmp_path / "copy", "--batch-size", 16]))
    assert "world size 1 -> 2" in said
    assert losses_of(tmp_path / "copy" / "r") == pytest.approx(losses_of(whole), rel=1e-5)


def test_evaluation_reads_what_it_needs(device, flags, stream, tmp_path, corpus, tokenizer):
    validation = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(corpus), split="validation")
    flat = np.concatenate(list(token_batches(validation.documents(), tokenizer)))
    assert validation.head(3).tokens.tolist() == flat[: 3 * SEQ_LEN + 1].tolist()
    assert validation.head(0).tokens.tolist() == flat.tolist()
    evaluated = ["--eval-interval", "12", "--output-dir", tmp_path, "--run-name"]
    packed = [flag for flag in flags if flag != "--streaming"]
    train([*flags, *evaluated, "streamed", "--lr", "1e-12", "--warmup-steps", 0], device)
    train([*packed, *evaluated, "packed", "--lr", "1e-12", "--warmup-steps", 0], device)
    losses = [metrics_of(tmp_path / name)[-1]["eval_loss"] for name in ("streamed", "packed")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def test_random_tokens_are_not_streamed():
    with pytest.raises(UserError, match="--streaming: synthetic"):
        parse(["--streaming", "--dataset", "synthetic"])


@pytest.mark.parametrize(
    "flags, workers",
    [("", 0), ("--streaming", 1), ("--streaming --num-workers 0", 0), ("--streaming --num-workers 3", 3)],
)
def test_a_stream_is_read_by_a_worker_unless_the_flag_says_how_many(device, flags, workers):
    settings, _ = resolved(["--model", "demo", "--dataset", "demo", "--sequence-length", 32, *words(flags)])
    assert settings.num_workers == workers


def test_hub_data_are_not_sliced(tokenizer):
    with pytest.raises(UserError, match="is a slice, which --streaming of hub data cannot take"):
        streaming.stream_dataset(tokenizer, SEQ_LEN, dataset="someone/stories", split="train[:5%]")


@pytest.mark.parametrize("kind", ["one file", "a folder"])
@pytest.mark.parametrize("split", ["train[:95%]", "train[95%:]", "train[10:-30]"])
def test_a_slice_of_local_files_is_that_of_the_token_cache(tokenizer, corpus, texts, tmp_path, kind, split):
    source = corpus / "train.jsonl"
    if kind == "a folder":
        source = tmp_path / "data"
        source.mkdir()
        for number, first in enumerate((0, 50, 60)):
            lines = (json.dumps({"text": text}) for text in texts[first : (50, 60, None)[number]])
            (source / f"{number}.jsonl").write_text("\n".join(lines))
    stream = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(source), split=split)
    cached = utils.get_dataset(tokenizer, SEQ_LEN, dataset=str(source), split=split, cache_dir=tmp_path / "cache")
    assert stream.head(0).tokens.tolist() == cached.tokens.tolist()


def test_what_is_held_out_where_nothing_is_said_is_the_same_streamed_and_cached(device, flags, corpus, tmp_path, capfd):
    run = [*flags, "--dataset", corpus / "train.jsonl", "--eval-interval", "12", "--lr", "1e-12", "--warmup-steps", 0]
    losses = []
    for name in ("streamed", "packed"):
        more = [flag for flag in run if flag != "--streaming" or name == "streamed"]
        assert train([*more, "--output-dir", tmp_path, "--run-name", name], device) == 0
        losses.append(metrics_of(tmp_path / name)[-1]["eval_loss"])
        said = capfd.readouterr().out.splitlines()
        assert [line for line in said if line.startswith(f"data       {corpus / 'train.jsonl'}, train: ")]
        assert [line for line in said if line.startswith("held out   one of every 20 documents of it: ")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def opened(tokenizer, source, split: str = "train"):
    return streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(source), split=split, seed=7)


@pytest.fixture
def three_files(tmp_path, texts):
    """A folder whose files have 50, 10 and the remaining texts, and a copy of it elsewhere."""
    for name in ("data", "copy"):
        (tmp_path / name).mkdir()
        for number, first in enumerate((0, 50, 60)):
            lines = (json.dumps({"text": text}) for text in texts[first : (50, 60, None)[number]])
            (tmp_path / name / f"{number}.jsonl").write_text("\n".join(lines))
        (tmp_path / name / "list.xyz").write_text("no story")
    return tmp_path / "data", tmp_path / "copy"


def test_held_out_documents_are_spread_over_all_files_whole_and_the_same_streamed_and_cached(
    device, tokenizer, texts, three_files, tmp_path
):
    numbers = held_out.held_out_numbers(len(texts)).tolist()
    assert numbers == [number for number in range(len(texts)) if held_out.is_held_out(number)]
    assert [number // 20 for number in numbers] in (
        [*range(9)],
        [*range(10)],
    )  # one of each 20, of the last 17 one or none
    assert len({number % 20 for number in numbers}) > 3
    encode = lambda chosen: np.concatenate([*token_batches(chosen, tokenizer)]).tolist()  # noqa: E731
    out = encode([texts[number] for number in numbers])
    kept = encode([text for number, text in enumerate(texts) if number not in numbers])
    train, held = opened(tokenizer, three_files[0]).hold_out(held_out.RULE)
    assert held.head(0).tokens.tolist() == out
    assert train.head(0).tokens.tolist() == kept
    epoch = itertools.takewhile(lambda chunk: chunk[0][1] == 0, train.chunks((0, 0, 0)))
    assert sorted(np.concatenate([tokens for _, tokens in epoch]).tolist()) == sorted(kept)
    packed = utils.get_dataset(tokenizer, SEQ_LEN, dataset=str(three_files[0]), cache_dir=tmp_path / "cache")
    train, held, _ = corpora.hold_out(packed, "data", tokenizer.eos_token_id, held_out.RULE)
    assert [window.tolist() for window in held] == [w.tolist() for w in PackedDataset(np.array(out), SEQ_LEN)]
    assert [window.tolist() for window in train] == [w.tolist() for w in PackedDataset(np.array(kept), SEQ_LEN)]
    assert train.fingerprint() == PackedDataset(np.array(kept, np.uint16), SEQ_LEN).fingerprint()


def test_ends_of_documents_are_the_same_in_chunks():
    tokens = np.array([5, 0, 5, 5, 5, 0, 0, 5, 5, 0, 5])
    for chunk in (2, 5, 100):
        assert held_out.document_ends(tokens, 0, chunk).tolist() == [2, 6, 7, 10, 11]


def test_few_documents_are_cut_at_a_share_of_their_tokens_as_is_one(device, tokenizer, texts, tmp_path):
    for count in (1, 19):
        (tmp_path / "few.txt").write_text(DOCUMENT_MARK.join(text * 80 for text in texts[:count]))
        packed = utils.get_dataset(tokenizer, SEQ_LEN, dataset=str(tmp_path / "few.txt"), cache_dir=tmp_path / "cache")
        train, held, named = corpora.hold_out(packed, "few", tokenizer.eos_token_id, held_out.RULE)
        assert len(train.tokens) == len(packed.tokens) * 95 // 100
        assert [*train.tokens, *held.tokens] == packed.tokens.tolist()
        assert named == "the last 5 % of it"


RULES_OF_DATA = ("held_out", "ids_first", "corpus", "data")  # fields of a manifest that the version before lacked


def test_a_checkpoint_from_before_the_rule_keeps_the_end_of_its_text_held_out(
    device, flags, three_files, tmp_path, capfd
):
    for streams in ("--streaming", ""):
        folder = tmp_path / f"out{streams}"
        run = [flag for flag in flags if flag != "--streaming"] + words(streams)
        run += ["--dataset", three_files[0], "--eval-interval", 12, "--output-dir", folder, "--run-name", "r"]
        with pytest.MonkeyPatch.context() as patch:  # as the version before
            patch.setattr(corpora, "hold_out", lambda *of, by=corpora.hold_out: by(*of[:-1], held_out.OLD_RULE))
            assert train([*run, "--num-steps", 4, "--checkpoint-interval", 2], device) == 0
        assert "held out   the last 5 % of it: " in capfd.readouterr().out
        for manifest in folder.glob("r/checkpoints/*/manifest.json"):
            forget(manifest, *RULES_OF_DATA)
        for steps in (6, 8):  # and what it saves itself keeps it
            more = ["--num-steps", steps, "--checkpoint-interval", 2, "--resume", "auto"]
            assert train([*run, *more], device) == 0
            said = capfd.readouterr().out
            assert "held out   the last 5 % of it: " in said
            assert "files      3 of 4 (left out: list.xyz)" in said


def forget(manifest, *fields: str) -> None:
    """Takes fields out of a manifest, as one of a version that did not know them."""
    content = json.loads(manifest.read_text())
    content = {key: value for key, value in content.items() if key not in (*fields, "sha256")}
    manifest.write_text(json.dumps(content | {"sha256": saved.manifest_checksum(content)}))


def shorten(folder):
    text = (folder / "2.jsonl").read_text()
    (folder / "2.jsonl").write_text(text[: text.rindex("\n")])


OTHER_DATA = {
    "a file added": (lambda data: (data / "3.jsonl").write_text('{"text": "A new story."}'), "", "--dataset: "),
    "a file removed": (lambda data: (data / "2.jsonl").unlink(), "", "--dataset: "),
    "a file renamed": (lambda data: (data / "2.jsonl").rename(data / "a.jsonl"), "", "--dataset: "),
    "a file shortened": (shorten, "", "--dataset: "),
    "held out now": (None, "--eval-interval 1", "--eval-interval: the run held out nothing of "),
    "a part of it": (None, "--dataset-split train[:90%]", "--dataset-split was train "),
    "another data set": (shorten, "--dataset {data}/../data", "--dataset was "),
}


@pytest.mark.parametrize("case", OTHER_DATA)
def test_a_stream_is_not_resumed_on_other_data_that_begin_as_its_own_do(device, flags, three_files, tmp_path, case):
    change, more, says = OTHER_DATA[case]
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-steps"]
    train([*run, 2, "--dataset", three_files[0], "--checkpoint-interval", 2], device)
    if change:
        change(three_files[0])
    more = words(more.format(data=three_files[0]))
    with pytest.raises(UserError) as raised:
        train([*run, 4, "--dataset", three_files[0], *more], device)
    assert str(raised.value).startswith(says)


def test_a_stream_is_resumed_on_a_copy_of_its_data_elsewhere(device, flags, three_files, tmp_path):
    run = [*flags, "--output-dir", tmp_path, "--run-name", "r", "--resume", "auto", "--num-steps"]
    train([*run, 2, "--dataset", three_files[0], "--checkpoint-interval", 2], device)
    assert train([*run, 4, "--dataset", three_files[1]], device) == 0


def test_too_few_documents_are_not_divided_while_streaming(tokenizer, tmp_path):
    (tmp_path / "one.txt").write_text("Tom had a red ball. " * 50)
    stream = streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(tmp_path / "one.txt"))
    with pytest.raises(UserError, match=r"1 documents are too few .* leave out --streaming"):
        stream.hold_out(held_out.RULE)


def test_the_default_split_of_a_stream_is_whole():
    assert parse(["--streaming"]).dataset_split == "train"
    assert parse([]).dataset_split == "train[:5%]"


@pytest.mark.parametrize("first", ["--streaming", ""])
def test_a_resume_that_changes_the_order_of_the_data_is_refused(device, flags, tmp_path, first):
    packed = [flag for flag in flags if flag != "--streaming"] + ["--output-dir", tmp_path, "--run-name", "r"]
    train([*packed, *words(first)], device, Stop(2))
    other = [] if first else ["--streaming"]
    with pytest.raises(UserError, match=f"--streaming was {bool(first)} in the checkpoint and is {not first}"):
        train([*packed, *other, "--resume", "auto"], device)


def test_a_split_that_is_not_there_is_named(tokenizer, corpus):
    with pytest.raises(UserError, match=r"split 'test': .*train.*validation"):
        streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(corpus), split="test")


def test_a_token_without_an_embedding_is_refused(tokenizer, corpus):
    with pytest.raises(UserError, match="--tokenizer: it gave token id"):
        streaming.stream_dataset(tokenizer, SEQ_LEN, dataset=str(corpus), vocab_size=100)


def test_a_stream_says_how_many_bad_records_it_leaves_out(device, flags, corpus, tmp_path, capfd):
    text = (corpus / "train.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(text + '{"text": null}\n' * 21)
    run = [*flags, "--dataset", tmp_path / "bad.jsonl", "--output-dir", tmp_path]
    assert train([*run, "--skip-bad-records"], device) == 0
    told = [line for line in capfd.readouterr().out.splitlines() if "bad records" in line]
    assert told and all(line.startswith("data       left out so far: bad records ") for line in told)
    assert 1 <= int(told[-1].split()[-1]) <= 21 * 3


def test_a_file_that_breaks_off_ends_the_run_in_one_line(device, flags, corpus, tmp_path):
    (tmp_path / "data").mkdir()
    text = (corpus / "train.jsonl").read_text()
    (tmp_path / "data" / "train-0.jsonl").write_text(text)
    (tmp_path / "data" / "train-1.jsonl").write_text(text + '{"text": "A fo')
    run = [*flags, "--dataset", tmp_path / "data", "--output-dir", tmp_path]
    with pytest.raises(UserError, match=r"--dataset .*train-1.jsonl, line 198: broken JSON") as raised:
        train(run, device)
    assert raised.value.exit_code == 1
    assert "\n" not in str(raised.value)
