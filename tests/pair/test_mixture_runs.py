"""Runs on several sources: their samples on any number of ranks, their resumes and their metrics."""

import itertools
import json
import shutil

import multirank
import numpy as np
import pytest
from conftest import DEMO, Stop, forked, losses_of, metrics_of, small_run, story_texts, train, words
from corpora import shown_samples, write_records
from transformers import AutoTokenizer

from harness import data
from harness.base import saved
from harness.base.errors import UserError

SEQ_LEN = 32
BATCH = 4  # sequences of a step
TOKENS = {"a": (10, 500), "b": (500, 900), "c": (900, 1400)}  # the ids in the token files


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three token files, each with ids of its own, and two files of text."""
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(3)
    for name, (least, below) in TOKENS.items():
        np.save(folder / f"{name}.npy", generator.integers(least, below, 2001, dtype=np.uint16))  # 62 sequences
    write_records(folder / "web.jsonl", story_texts(0, 40))
    write_records(folder / "code.jsonl", story_texts(40, 70))
    return folder


@pytest.fixture(scope="module")
def flags(corpora):
    sizes = f"--num-steps 8 --sequence-length {SEQ_LEN} --batch-size {BATCH} --lr 1e-3 --lr-scheduler constant"
    return small_run(corpora, f"{sizes} --resume auto", tie_word_embeddings=False)


@pytest.fixture
def run(device, flags, corpora, tmp_path, monkeypatch):
    """`run(*flags)` trains in this process in tmp_path/r; returns the sequences of each step, as lists of tokens."""
    monkeypatch.chdir(corpora)

    def start_run(*more, stop_after: int = -1, output=tmp_path) -> dict[int, list[list[int]]]:
        steps: dict[int, list[list[int]]] = {}

        def recorded(settings, train_set, state, device):
            for batch in training_batches(settings, train_set, state, device):
                sequences = np.concatenate([batch["input_ids"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)
                steps.setdefault(state.step + 1, []).extend(sequences.tolist())
                yield batch

        monkeypatch.setattr(data, "training_batches", recorded)
        train([*flags, "--output-dir", output, *more], device, Stop(stop_after))
        done = metrics_of(output / "r")[-1]["step"]  # a stop may come when the next batch is there
        return {step: sequences for step, sequences in steps.items() if step <= done}

    training_batches = data.training_batches
    return start_run


def source_of(sequence: list[int]) -> str:
    """The token file of a sequence."""
    (name,) = (name for name, (least, below) in TOKENS.items() if least <= min(sequence) and max(sequence) < below)
    return name


def counts_of(steps: dict[int, list]) -> dict[int, dict[str, int]]:
    """The number of each source's sequences in each step."""
    counts = {}
    for step, sequences in steps.items():
        names = [source_of(sequence) for sequence in sequences]
        counts[step] = {name: names.count(name) for name in sorted(set(names))}
    return counts


def sequences_of(name: str, *runs: dict[int, list]) -> list:
    """The sequences of a source in the order of the runs."""
    found = [sequence for steps in runs for step in sorted(steps) for sequence in steps[step]]
    return [sequence for sequence in found if source_of(sequence) == name]


# ----------------------------------------------------------------------------------------------------------------------
# Samples


@pytest.mark.slow
def test_two_ranks_train_on_the_samples_of_one_in_their_order(run, flags, corpora, tmp_path):
    sources = {"a": ("a.npy", 0.5), "web": ("web.jsonl", 0.3), "b": ("b.npy", 0.2)}
    mixed = ["--dataset", *(f"{name}={corpora / file}:{weight}" for name, (file, weight) in sources.items())]
    mixed += words("--mixture-stage 0.5:web=1,b=1")
    run(*mixed, output=tmp_path / "one")
    layout = words("--batch-size 1 --gradient-accumulation-steps 2 --num-workers 1")
    forked(2, multirank.program, *map(str, [*flags, *mixed, "--output-dir", tmp_path / "two", *layout]))
    assert losses_of(tmp_path / "two" / "r") == pytest.approx(losses_of(tmp_path / "one" / "r"), rel=1e-6)


def test_a_stage_begins_at_its_step_also_when_the_run_becomes_longer(run, tmp_path):
    mixed = words("--dataset a=a.npy:3 b=b.npy:1 --mixture-stage 0.5:b=1")
    begun = counts_of(run(*mixed, stop_after=3))
    went_on = counts_of(run(*mixed, "--num-steps", "12"))
    assert list(begun) == [1, 2, 3] and list(went_on) == [*range(4, 13)]
    counts = begun | went_on
    assert sum(counts[step]["a"] for step in range(1, 5)) == 12
    assert all(counts[step] == {"b": 4} for step in range(5, 13))
    shares = [(line["share/a"], line["share/b"]) for line in metrics_of(tmp_path / "r") if not line.get("final")]
    assert shares == [(0.75, 0.25)] * 4 + [(0.0, 1.0)] * 8


# ----------------------------------------------------------------------------------------------------------------------
# Resumes


def test_a_mixture_that_changes_at_a_resume_also_to_one_source_continues_each_source(run, tmp_path):
    alone = run(*words("--dataset a.npy --num-steps 16"), output=tmp_path / "alone")
    others = run(*words("--dataset b=b.npy:1 c=c.npy:1"), output=tmp_path / "others")
    parts = ["a.npy", "a=a.npy:1 b=b.npy:3", "b=b.npy:1 c=c.npy:1", "a=a.npy:2 b=b.npy:1 c=c.npy:1", "a.npy"]
    runs = [run("--dataset", *words(part), "--num-steps", 12, stop_after=2) for part in parts]
    assert [list(steps) for steps in runs] == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    for name in TOKENS:
        found = sequences_of(name, *runs)
        assert len(found) > 3 and found == sequences_of(name, alone, others)[: len(found)]


def test_a_streamed_mixture_that_changes_at_a_resume_reads_each_shard_on_from_where_it_was(run, tmp_path):
    streams = words("--streaming --streams 2")

    def in_shards(*runs: dict[int, list]) -> list[list[tuple]]:
        samples = [tuple(sequence) for steps in runs for step in sorted(steps) for sequence in steps[step]]
        return [samples[0::2], samples[1::2]]

    alone = {
        name: in_shards(run("--dataset", f"{name}.jsonl", *streams, output=tmp_path / name)) for name in ("web", "code")
    }
    mixed = [
        run(*words("--dataset web=web.jsonl:1 code=code.jsonl:1"), *streams, stop_after=3),
        run(*words("--dataset web=web.jsonl:1 code=code.jsonl:3"), *streams, stop_after=2),
        run(*words("--dataset web=web.jsonl:1"), *streams, stop_after=1),
        run(*words("--dataset web=web.jsonl:1 code=code.jsonl:1"), *streams),
    ]
    for shard, found in enumerate(in_shards(*mixed)):
        assert len(found) == 16
        for sequences in (in_shard[shard] for in_shard in alone.values()):
            of_source = [sequence for sequence in found if sequence in sequences]
            assert len(of_source) > 3 and of_source == sequences[: len(of_source)]
        assert set(found) <= {sequence for in_shard in alone.values() for sequence in in_shard[shard]}


def test_a_source_whose_file_changed_is_refused_in_one_line(run, corpora, tmp_path):
    for name in ("x", "y"):
        shutil.copy(corpora / "a.npy", tmp_path / f"{name}.npy")
    both = [f"x={tmp_path / 'x.npy'}:1", f"y={tmp_path / 'y.npy'}:1"]
    run("--dataset", tmp_path / "x.npy", stop_after=2, output=tmp_path / "single")
    run("--dataset", *both, stop_after=1)
    run("--dataset", both[1], stop_after=1)  # x is left out, and has its place
    np.save(tmp_path / "x.npy", np.load(tmp_path / "x.npy")[::-1])
    for output in (tmp_path, tmp_path / "single"):
        with pytest.raises(UserError) as refused:
            run("--dataset", *both, output=output)
        line = "--dataset: the source x is not what it was at the checkpoint (dataset); give the same data"
        assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


RENAMED = {  # flags of a resume: its line
    "--dataset c=b.npy": "--dataset c: it has the data of the run's source b, which continues under that name only",
    "--dataset c=b.npy --eval-interval 1": "--eval-interval: the run has no eval documents of b.npy that are known",
}


@pytest.mark.parametrize("more, line", RENAMED.items())
def test_a_source_of_a_mixture_is_known_by_its_tokens_under_another_name(run, more, line):
    run(*words("--dataset a.npy b.npy"), stop_after=1)
    with pytest.raises(UserError) as refused:
        run(*words(more))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_an_epoch_of_a_stream_has_each_document_once(run):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    documents = sorted(tokenizer.encode(story) for story in story_texts(40, 70))
    steps = -(-2 * sum(len(document) + 1 for document in documents) // (32 * SEQ_LEN))
    flags = ["--batch-size", 32, "--num-steps", steps]
    sequences = run(*words("--dataset code.jsonl --streaming --streams 1"), *flags)
    tokens = [token for step in sorted(sequences) for sequence in sequences[step] for token in sequence[:-1]]
    ends = [-1, *(place for place, token in enumerate(tokens) if token == tokenizer.eos_token_id)]
    found = [tokens[first + 1 : last] for first, last in itertools.pairwise(ends)]
    assert sorted(found[:30]) == sorted(found[30:60]) == documents


# ----------------------------------------------------------------------------------------------------------------------
# Eval loss


def test_eval_losses_of_a_run_are_those_of_an_evaluation_after_it(run, tmp_path, capfd):
    run(*words("--dataset web=web.jsonl:1 code=code.jsonl:3 --eval-interval 8"))
    last = [line for line in metrics_of(tmp_path / "r") if "eval_loss" in line][-1]
    capfd.readouterr()
    run("--num-steps", 0, "--resume", tmp_path / "r", *words("--eval-interval epoch --json"))  # of no epoch
    after = json.loads(capfd.readouterr().out.splitlines()[-1])
    for key in ("eval_loss", "eval_loss/web", "eval_loss/code"):
        assert last[key] == pytest.approx(after[key], rel=1e-6), key
    lower, upper = sorted((last["eval_loss/web"], last["eval_loss/code"]))
    assert lower < last["eval_loss"] < upper
    for name in ("web", "code"):  # the eval documents of that source
        run("--num-steps", 0, "--resume", tmp_path / "r", *words(f"--eval-interval 1 --json --dataset {name}.jsonl"))
        alone = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert alone["eval_loss"] == pytest.approx(last[f"eval_loss/{name}"], rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# --show-samples


def test_show_samples_prints_what_a_step_trained_on(run, flags, corpora, device, tmp_path, capsys):
    mixed = words("--dataset web=web.jsonl:0.5 code=code.jsonl:0.5")
    steps = run(*mixed, stop_after=3)
    steps |= run(*mixed, "--batch-size", 2)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    resume = ["--resume", saved.newest_checkpoint(tmp_path / "r"), "--eval-split", corpora / "web.jsonl"]
    resume += words("--eval-interval 9")  # without an effect on what is shown
    again = [*flags, *mixed, "--output-dir", tmp_path, "--resume", "none", "--batch-size", "auto"]  # the record has it
    for way in (resume, again):
        for step, first in ((2, BATCH), (5, 3 * BATCH + 2)):
            capsys.readouterr()
            train([*way, "--cache-dir", corpora / "cache", "--show-samples", step], device)
            found = shown_samples(capsys.readouterr().out)
            assert list(found) == list(range(first, first + len(steps[step])))
            for (_, text), sequence in zip(found.values(), steps[step], strict=True):
                assert text == "".join(tokenizer.decode(sequence[:-1]).split())
    assert {name for name, _ in found.values()} == {"web", "code"}
