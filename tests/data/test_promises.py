"""What the data package promises, seen from outside: by runs, their files and what they print, and by
`utils.get_dataset`. No name of harness/data is used, so the file holds for any way to keep the promises."""

import functools
import os
import pathlib
import re
from collections import Counter

import datasets
import formats
import multirank
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import chat, forked, forking, losses_of, metrics_of, story_texts, train, wait_until, words
from corpora import CHAT_TEMPLATE, shown_samples, write_records

import train_fsdp
import utils
from harness import base

VOCABULARY = multirank.SIZES["vocab_size"]
TEXTS = story_texts(0, 400)
IGNORED = -100  # a label that is not trained on


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Corpora of every kind. Texts of named.jsonl say their number several times, as w07."""
    folder = tmp_path_factory.mktemp("corpora")
    write_records(folder / "a.jsonl", TEXTS[:40])
    write_records(folder / "b.jsonl", TEXTS[40:70])
    for number in range(3):
        write_records(folder / "many" / f"{number}.jsonl", TEXTS[100 + 12 * number : 112 + 11 * number])
    ids = np.random.default_rng(0).integers(1, VOCABULARY, 5000, dtype=np.uint16)
    ids[50::50] = 0  # ends of documents
    np.save(folder / "ids.npy", ids)
    write_records(folder / "named.jsonl", [f"w{number:02} " * 6 for number in range(60)])
    write_records(folder / "uneven.jsonl", [text[: 6 if n % 20 < 15 else 400] for n, text in enumerate(TEXTS)])
    rows = [[7, *(9 + (number * place) % 900 for place in range(4 + number % 30))] for number in range(400)]
    write_records(folder / "ids.jsonl", [{"input_ids": row} for row in rows])
    write_records(folder / "chat.jsonl", [chat(text[:40], text[40:160]) for text in TEXTS[:60]])
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def start(device, small, corpora, tmp_path, monkeypatch):
    """`start(*flags)`: the program in this process, in the folder of the corpora; a run of 4 steps in tmp_path/r."""
    monkeypatch.chdir(corpora)

    def start(*flags) -> None:
        assert train([*small, "--output-dir", tmp_path, *flags], device) == 0

    return start


@pytest.fixture
def show(start, capsys):
    """`show(step, *flags)`: (source, text) of each sample of a step, by --show-samples."""

    def show(step: int, *flags) -> list[tuple[str, str]]:
        capsys.readouterr()
        start("--show-samples", step, *flags)
        return [*shown_samples(capsys.readouterr().out).values()]

    return show


def batches_of(sequences) -> list[dict[str, np.ndarray]]:
    """All samples of what get_dataset returns, in order: their inputs, labels and what else a batch has."""
    collate = utils.create_collate_fn()
    batches = (collate([sequences[index]]) for index in range(len(sequences)))
    return [{name: tensor[0].numpy() for name, tensor in batch.items()} for batch in batches]


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and sequences


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_each_token_but_a_documents_first_is_a_label_once(tmp_path, packing):
    """The ids are all different, but for those that end documents."""
    lengths = np.random.default_rng(1).integers(1, 70, 300)
    ids = np.arange(1, lengths.sum() + 1)
    documents = [np.append(part, 0) for part in np.split(ids, np.cumsum(lengths)[:-1])]
    formats.write_datatrove(tmp_path, documents, [])
    sequences = utils.get_dataset(
        None, 32, dataset=str(tmp_path), vocab_size=2**16, packing=packing, document_mask=True
    )
    labels = Counter(int(label) for batch in batches_of(sequences) for label in batch["labels"])
    del labels[0], labels[IGNORED]
    firsts = {int(document[0]) for document in documents}
    assert max(labels.values()) == 1 and labels.keys() <= {*ids.tolist()}
    if packing == "best-fit":
        assert labels.keys() == {*ids.tolist()} - firsts
    else:
        lost = {*ids[:-40].tolist()} - firsts - labels.keys()  # the last ones are in the last partial sequence
        assert not lost


MASKED = {
    "text": "uneven.jsonl",
    "token file": "ids.npy",
    "conversations": "chat.jsonl --chat-template chat.jinja --chat-loss all --packing concatenate",
    "eval split": "uneven.jsonl --eval-interval 1",
    "streamed, eval split": "uneven.jsonl --streaming --eval-interval 1",
    "streamed token ids": "ids.jsonl --streaming",
    "streamed token ids, eval split": "ids.jsonl --streaming --eval-interval 1",
    "streamed beside a token file": "uneven.jsonl:0.5 ids.npy:0.5 --streaming",
}


@pytest.mark.parametrize("kind", MASKED)
def test_with_a_document_mask_no_label_is_the_first_token_of_the_next_document(start, monkeypatch, kind):
    """What the model gets: each label but these is the token that follows. Each document but those of token ids ends
    with an end-of-text token; these begin with id 7, which nothing else has."""
    seen, build_model = [], train_fsdp.build_model

    def watch(model, _, batch):
        if "position_ids" in batch and model.training == ("eval" not in kind):
            seen.append([batch[name].numpy().copy() for name in ("input_ids", "labels", "position_ids")])

    def build_watched(*arguments, **options):
        model = build_model(*arguments, **options)
        model.register_forward_pre_hook(watch, with_kwargs=True)
        return model

    monkeypatch.setattr(train_fsdp, "build_model", build_watched)
    start("--document-mask", "--no-final-checkpoint", "--dataset", *words(MASKED[kind]))
    masked = 0
    for inputs, labels, positions in seen:
        if "eval" in kind:  # rows that only fill the last batch have no label
            real = (labels != IGNORED).any(axis=1)
            inputs, labels, positions = inputs[real], labels[real], positions[real]
        begins = inputs == 7 if "token ids" in kind else np.pad(inputs[:, :-1] == 0, ((0, 0), (1, 0)))
        begins[:, 0] = True
        is_last = np.append(begins[:, 1:], labels[:, -1:] == IGNORED, axis=1)
        np.testing.assert_array_equal(positions == 0, begins)
        np.testing.assert_array_equal(labels == IGNORED, is_last)
        np.testing.assert_array_equal(labels[:, :-1][~is_last[:, :-1]], inputs[:, 1:][~is_last[:, :-1]])
        if "token ids" not in kind:
            np.testing.assert_array_equal(labels[:, -1] == IGNORED, inputs[:, -1] == 0)
        masked += is_last.sum()
    assert masked > 3


UNEVEN = {
    "cached": "uneven.jsonl",
    "best-fit": "uneven.jsonl --packing best-fit",
    "conversations": "chat.jsonl --chat-template chat.jinja",
    "streamed beside a token file": "uneven.jsonl:0.5 ids.npy:0.5 --streaming --streams 4",
}


@pytest.mark.parametrize("kind", UNEVEN)
def test_with_a_document_mask_each_trained_token_of_a_step_counts_alike(start, tmp_path, kind):
    """In one microbatch of four samples and in four of one."""
    flags = ["--document-mask", "--eval-interval", "2", "--dataset", *words(UNEVEN[kind])]
    start(*flags, "--run-name", "one")
    start(*flags, "--run-name", "four", "--batch-size", "1", "--gradient-accumulation-steps", "4")
    for one, four in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "four"), strict=True):
        for key in {"loss", "eval_loss"} & one.keys():
            assert four[key] == pytest.approx(one[key], rel=2e-6)


def write_two_of_megatron(folder, documents, texts) -> None:
    formats.write_megatron(folder, documents[20:], dtype="int32")
    for suffix in (".bin", ".idx"):
        (folder / f"a{suffix}").rename(folder / f"b{suffix}")
    formats.write_megatron(folder, documents[:20])


def write_rows(folder, documents, texts) -> None:
    tokens = np.concatenate(documents).astype(">u4")
    np.save(folder / "a.npy", tokens[: len(tokens) // 2 * 2].reshape(2, -1))


def write_arrow(folder, documents, texts) -> None:
    """In one batch, as a file of IPC; write_records writes a stream."""
    table = pyarrow.table({"text": texts * 20})
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_batch(table.slice(0, len(texts)).combine_chunks().to_batches()[0])


def save_to_disk(folder, documents, texts) -> None:
    rows = datasets.Dataset.from_dict({"text": texts, "number": range(len(texts))})
    datasets.DatasetDict(train=rows, validation=rows.select(range(3))).save_to_disk(folder)
    datasets.load_from_disk(folder)["train"].map(lambda row: {"text": "of a map"})  # its cache lies there too


LAYOUTS = formats.LAYOUTS | {
    "Arrow, a file": write_arrow,
    "Arrow, save_to_disk": save_to_disk,
    "Megatron, int64": functools.partial(formats.write_megatron, dtype="int64"),
    "Megatron, a folder": write_two_of_megatron,
    "datatrove, 4 bytes": functools.partial(formats.write_datatrove, dtype="uint32"),
    "llm.c, uint16": functools.partial(formats.write_llmc, dtype="uint16"),
    "NumPy, big-endian in two rows": write_rows,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_documents_are_the_same_sequences_in_every_format(tokenizer, tmp_path, name):
    documents, texts = formats.read_stories(50)
    LAYOUTS[name](tmp_path, documents, texts)
    sequences = utils.get_dataset(tokenizer, 64, dataset=str(tmp_path), cache_dir=tmp_path / "cache", shuffle=False)
    flat = np.concatenate(documents)
    assert len(sequences) == (len(flat) - 1) // 64
    for index, batch in enumerate(batches_of(sequences)):
        assert np.array_equal(batch["input_ids"], flat[64 * index : 64 * index + 64])
        assert np.array_equal(batch["labels"], flat[64 * index + 1 : 64 * index + 65])


def test_token_files_are_mapped_and_not_copied(tmp_path):
    """A sparse file of four billion tokens, whose last ones are there."""
    ends = np.arange(1, 100, dtype="<u2")
    with (tmp_path / "train.bin").open("wb") as file:
        file.seek(2**33)
        ends.tofile(file)
    before = psutil.Process().memory_info().rss
    options = {"vocab_size": 100, "cache_dir": tmp_path / "cache", "shuffle": False}
    sequences = utils.get_dataset(None, 8192, dataset=str(tmp_path), **options)
    assert len(sequences) == (2**32 + 99 - 1) // 8192
    batch = utils.create_collate_fn()([sequences[len(sequences) - 1]])
    assert batch["input_ids"].shape == (1, 8192) and not batch["input_ids"].any()
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    cached = [file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert sum(cached) < 2**20


def test_a_file_has_one_token_cache_by_whatever_name(tokenizer, tmp_path, monkeypatch):
    write_records(tmp_path / "a.jsonl", TEXTS[:5])
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl"), f"../{tmp_path.name}/a.jsonl"):
        utils.get_dataset(tokenizer, 32, dataset=name, cache_dir=tmp_path / "cache")
    assert len([*(tmp_path / "cache").rglob("tokens.bin")]) == 1


@pytest.mark.parametrize("text_split", [None, "train", "val"])
def test_a_folder_of_nanogpt_is_trained_on_and_evaluated_also_if_one_split_is_text(start, tmp_path, capsys, text_split):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    parts = np.random.default_rng(0).integers(1, VOCABULARY, (2, 1000), dtype=np.uint16)
    parts[:, ::50] = 0
    for split, part in zip(("train", "val"), parts, strict=True):
        if split == text_split:
            write_records(folder / f"{split}.jsonl", TEXTS[:40])
        else:
            part.tofile(folder / f"{split}.bin")
    (folder / "input.txt").write_text("the text that was tokenized")
    start("--dataset", folder, *words("--eval-interval 2 --eval-steps 2"))
    assert any("eval_loss" in line for line in metrics_of(tmp_path / "r"))
    assert "input.txt" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Mixtures and order


def test_a_library_gets_sequences_shuffled_by_the_seed_that_a_run_has_or_on_request_in_the_order_of_the_corpus(corpora):
    """tests/pair/test_program.py trains on them in the order of a run."""
    options: dict = {"dataset": str(corpora / "ids.npy"), "vocab_size": VOCABULARY}
    shuffled, same, other, in_order = (
        [sequence[:32].tolist() for sequence in utils.get_dataset(None, 32, **options, **more)]
        for more in ({}, {"seed": 42}, {"seed": 7}, {"shuffle": False})
    )
    assert in_order == np.load(corpora / "ids.npy")[: 156 * 32].reshape(156, 32).tolist()
    assert shuffled == same != other
    assert shuffled != in_order and sorted(shuffled) == sorted(in_order)
    with pytest.raises(base.UserError, match="shuffle=False: a mixture"):
        utils.get_dataset(None, 32, **options | {"dataset": [options["dataset"]]}, shuffle=False)


def test_the_order_is_a_pure_function_of_the_seed_and_of_the_samples_number(show):
    """Whatever the size of a step; another seed has another order."""
    mixed = words("--dataset a=a.jsonl:0.6 b=b.jsonl:0.4")
    for flags in ([*mixed], [*mixed, "--streaming", "--streams", "4"]):
        one_step = show(1, *flags, "--batch-size", 32)
        assert [sample for step in (1, 2, 3, 4) for sample in show(step, *flags, "--batch-size", 8)] == one_step
        assert show(4, *flags, "--batch-size", 8) == one_step[24:]
        assert show(1, *flags, "--batch-size", 32, "--seed", 7) != one_step


# ----------------------------------------------------------------------------------------------------------------------
# Resumes

RESUMED = {
    "streams": "--dataset a=a.jsonl:0.6 many=many:0.4 --streaming --streams 8",
    "masked documents of a stream": "--dataset many --document-mask --streaming",
    "conversations": "--dataset chat.jsonl --chat-template chat.jinja",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_that_was_killed_continues_exactly_on_another_number_of_ranks(kind, start, small, corpora, tmp_path):
    """SIGKILL to both ranks, at any moment after the first save; one rank continues for three steps."""
    flags = words(RESUMED[kind])
    checkpoints = tmp_path / "r" / "checkpoints"
    long = [*small, "--num-steps", 10_000, "--output-dir", tmp_path, *flags, *words("--batch-size 1")]
    long += words("--gradient-accumulation-steps 2 --checkpoint-interval 3")
    with forking(2, in_folder, str(corpora), *map(str, long)) as (world, _):
        wait_until(lambda: [*checkpoints.glob("step-*")], world.processes)
    steps = 3 + max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    start(*flags, "--num-steps", steps, "--resume", "auto")
    continued = losses_of(tmp_path / "r")
    start(*flags, "--num-steps", steps, "--output-dir", tmp_path / "undisturbed")
    assert len(continued) == steps
    assert continued == pytest.approx(losses_of(tmp_path / "undisturbed" / "r"), rel=1e-5)


def in_folder(folder: str, *argv: str) -> None:
    os.chdir(folder)
    multirank.program(*argv)


# ----------------------------------------------------------------------------------------------------------------------
# The eval split


def numbers_in(samples: list[tuple[str, str]]) -> set[str]:
    return {number for _, text in samples for number in re.findall(r"w(\d\d)", text)}


def test_one_of_twenty_documents_is_an_eval_document_and_never_trained_on(start, show, corpora, tmp_path):
    """What an evaluation reads are the documents that no step of an epoch has, after a resume too."""
    flags = words("--dataset named.jsonl --sequence-length 8 --batch-size 64 --eval-interval 4 --lr 1e-12")
    start(*flags)
    epoch = [sample for step in (1, 2, 3) for sample in show(step, *flags)]
    numbers = {f"{number:02}" for number in range(60)}
    eval_part = sorted(numbers - numbers_in(epoch))
    assert len(eval_part) == 3
    data = tmp_path / "data"
    data.mkdir()
    lines = (corpora / "named.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(lines))
    (data / "validation.jsonl").write_text("".join(line for line in lines if line[11:13] in eval_part))
    start(*flags, "--dataset", data, "--run-name", "by-file", "--eval-split", "validation")
    evaluated = [
        line["eval_loss"] for run in ("r", "by-file") for line in metrics_of(tmp_path / run) if "eval_loss" in line
    ]
    assert evaluated[0] == pytest.approx(evaluated[-1], rel=1e-6)
    start(*flags, "--num-steps", 8, "--resume", "auto")
    assert metrics_of(tmp_path / "r")[-1]["eval_loss"] == pytest.approx(evaluated[0], rel=1e-6)


def test_a_stream_has_the_same_eval_documents_in_each_epoch_and_in_any_number_of_streams(show):
    flags = words("--dataset named.jsonl --sequence-length 8 --batch-size 256 --eval-interval 4 --streaming --streams")
    epochs = [
        numbers_in([sample for step in steps for sample in show(step, *flags, streams)])
        for streams, steps in ((4, (1, 2, 3)), (4, (8, 9, 10)), (1, (1, 2, 3)))
    ]
    assert epochs[0] == epochs[1] == epochs[2] and 50 <= len(epochs[0]) < 60


# ----------------------------------------------------------------------------------------------------------------------
# What is read from a disk


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
    for number in range(32):
        records = [{"padding": "x" * 100_000, "text": text} for text in TEXTS[10 * number : 10 * number + 10]]
        write_records(tmp_path / "large" / f"{number:02}.jsonl", records)
    return str(tmp_path / "large")


@pytest.mark.slow
def test_a_resumed_stream_reads_from_its_chunk_on(start, large):
    """At two thirds of an epoch no more than near its beginning."""
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
    flags = [*small, "--output-dir", tmp_path, "--dataset", large, "--streaming", "--eval-interval", 2]
    printed = forked(2, reading_rank, large, *map(str, flags))
    listed, read = zip(*sorted(re.findall(r"rank \d: listed (\d), read (\d+)", printed), reverse=True), strict=True)
    assert listed == ("1", "0")
    assert min(map(int, read)) > 0.6 * max(map(int, read))


@pytest.mark.slow
def test_a_resume_does_not_read_the_whole_token_cache(start, tmp_path):
    """Not more than for a small cache; the large one has 40 MB, of ids that need no tokenizing."""
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
