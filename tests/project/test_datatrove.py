"""launch/datatrove.py: what it says without datatrove, which share of a corpus each task reads, and with datatrove the
.ds files of a run that was killed."""

import gzip
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec

import nodes
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT, STORIES, slow_case, start
from tokenizers import Tokenizer

from harness.base import UserError
from harness.data import shares
from launch import datatrove as launcher

SCRIPT = ROOT / "launch" / "datatrove.py"
DEMO = ROOT / "assets" / "demo"
needs_datatrove = pytest.mark.skipif(find_spec("datatrove") is None, reason="needs the package datatrove")
PLAN = {"text_field": "text", "skip_bad_records": False}


def command(corpus: pathlib.Path, output: pathlib.Path, *flags: str) -> list[str]:
    words = [sys.executable, SCRIPT, "--dataset", corpus, "--output", output, "--tokenizer", "demo", *flags]
    return [*map(str, words)]


def write_corpus(folder: pathlib.Path, copies: int = 1) -> list[str]:
    """Stories in .jsonl, .parquet and .jsonl.gz; returns the texts in the order of the files."""
    texts = [json.loads(line)["text"] for line in (STORIES / "train.jsonl").open()]
    folder.mkdir()
    first, second, third = texts[:2000] * copies, texts[2000:2500], texts[2500:3000]
    first[3] = "Zażółć gęślą jaźń, 日本語\r\nin lines. " * 20
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in first))
    pq.write_table(pa.table({"text": second}), folder / "b.parquet", row_group_size=100)
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in third)
    return first + second + third


def read_share(files: list, task: int, tasks: int) -> list[str]:
    counts = Counter()
    return [text for piece in shares.share_of(files, task, tasks) for text in shares.read_texts(*piece, PLAN, counts)]


def tokens_of(output: pathlib.Path) -> list[list[int]]:
    """The documents of a folder of .ds files, in the order of the tasks."""
    documents = []
    for file in sorted(output.glob("*.ds")):
        name, _, size = pathlib.Path(f"{file}.metadata").read_text().split("\n")[0].rpartition("|")
        assert name == str(DEMO) and size == "2"
        tokens, ends = np.fromfile(file, np.uint16), np.fromfile(f"{file}.index", np.uint64)
        assert ends[-1] == len(tokens)
        documents += [part.tolist() for part in np.split(tokens, ends[:-1].astype(int))]
    return documents


def tokenized(texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    return [[*encoding.ids, end_of_text] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


# ----------------------------------------------------------------------------------------------------------------------
# Without datatrove


def test_the_help_needs_no_package():
    process = start([sys.executable, SCRIPT, "--help"])
    assert process.returncode == 0 and "--text-field" in process.stdout and process.stderr == ""


@pytest.mark.parametrize(
    "flags, said",
    [
        slow_case(["--tasks", "0"], "--workers and --tasks: at least 1"),
        (["--executor", "slurm"], "--executor slurm: needs --slurm-option partition=NAME"),
        slow_case(
            ["--executor", "slurm", "--slurm-option", "partition"], "--executor slurm: needs --slurm-option partition"
        ),
        slow_case(["--slurm-option", "partition=main"], "--slurm-option: needs --executor slurm"),
        ([], "needs the package datatrove (pip install datatrove=="),
    ],
)
def test_a_mistake_is_one_line(tmp_path, flags, said):
    if not flags and find_spec("datatrove"):
        pytest.skip("datatrove is installed")
    process = start(command(STORIES, tmp_path / "tokens", *flags))
    assert process.returncode == 2 and process.stdout == ""
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"launch/datatrove.py: error: {said}")
    assert not any(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------------
# Shares


@pytest.mark.parametrize("tasks", [1, 2, 3, 7, 400])
def test_the_shares_of_all_tasks_are_the_corpus_in_its_order(tmp_path, tasks):
    texts = write_corpus(tmp_path / "corpus")
    files = shares.describe_files(str(tmp_path / "corpus"), "train")
    read = [read_share(files, task, tasks) for task in range(tasks)]
    assert [text for share in read for text in share] == texts
    if tasks == 7:
        sizes = [sum(map(len, share)) for share in read]
        assert max(sizes[:3]) < 1.1 * min(sizes[:3])  # the tasks that have nothing but .jsonl


def test_a_file_that_cannot_be_cut_belongs_to_the_one_task_in_whose_bytes_it_begins():
    files = [["a.gz", 10, 0], ["b.gz", 10, 0], ["c.jsonl", 10, 0], ["d.gz", 0, 0]]
    pieces = [[(str(path), *bounds) for path, *bounds in shares.share_of(files, task, 3)] for task in range(3)]
    assert pieces == [[("a.gz", 0, 10)], [("b.gz", 0, 10)], [("c.jsonl", 0, 10)]]
    pieces = [[(str(path), *bounds) for path, *bounds in shares.share_of(files, task, 4)] for task in range(4)]
    assert pieces == [[("a.gz", 0, 10)], [("b.gz", 0, 10)], [("c.jsonl", 0, 2)], [("c.jsonl", 2, 10)]]


def test_a_line_belongs_to_the_task_in_whose_bytes_it_begins(tmp_path):
    lines = [b'{"text": "one"}\n', b'{"text": "two"}\r\n', b'{"text": "three"}']
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(lines))
    size = file.stat().st_size
    for first in range(size):
        for end in range(first + 1, size + 1):
            begin = [sum(map(len, lines[:number])) for number in range(3)]
            wanted = [("one", "two", "three")[number] for number in range(3) if first <= begin[number] < end]
            assert [*shares.read_texts(file, first, end, PLAN, Counter())] == wanted


def test_a_bad_record_is_named_by_its_line_in_the_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' * 10 + '{"txt": "bad"}\n' + '{"text": "good"}\n' * 10)
    middle = 17 * 7 + 3
    with pytest.raises(UserError, match=r"a.jsonl, line 11: a record has no text, no field 'text' in {\"txt\""):
        [*shares.read_texts(file, middle, file.stat().st_size, PLAN, Counter())]
    counts = Counter()
    texts = [*shares.read_texts(file, middle, file.stat().st_size, PLAN | {"skip_bad_records": True}, counts)]
    assert len(texts) == 12 and counts["bad records"] == 1


def test_token_ids_are_refused(tmp_path):
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="it has token ids already"):
        [*shares.read_texts(tmp_path / "a.parquet", 0, 1, PLAN | {"text_field": "input_ids"}, Counter())]


def test_a_sample_of_a_corpus_says_its_number_of_tokens(tmp_path, monkeypatch):
    """Within a twentieth, although packed files have another number of tokens a byte."""
    monkeypatch.setattr(shares, "SAMPLE_CHARACTERS", 10_000)
    texts = write_corpus(tmp_path / "corpus")
    files = shares.describe_files(str(tmp_path / "corpus"), "train")
    from transformers import AutoTokenizer

    estimate = shares.measure({"files": files, **PLAN}, AutoTokenizer.from_pretrained(DEMO))
    tokens = sum(map(len, tokenized(texts)))
    assert 0.95 * tokens < estimate["tokens"] < 1.05 * tokens
    assert estimate["sample_bytes"] < sum(size for _, size, _ in files)
    assert 1 <= estimate["batch"] <= shares.BATCH_DOCUMENTS and estimate["seconds"] > 0


def test_an_empty_corpus_holds_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="it holds no text"):
        shares.measure({"files": shares.describe_files(str(tmp_path), "train"), **PLAN}, None)


# ----------------------------------------------------------------------------------------------------------------------
# What tasks leave


def write_task(folder: pathlib.Path, task: int, lengths: list[int]) -> pathlib.Path:
    """The files that datatrove writes for a task with documents of these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{task:05d}_unshuffled.ds"
    np.arange(sum(lengths), dtype=np.uint16).tofile(file)
    np.cumsum(lengths, dtype=np.uint64).tofile(f"{file}.index")
    pathlib.Path(f"{file}.metadata").write_text("demo|2")
    return file


@pytest.fixture
def work(tmp_path) -> pathlib.Path:
    """The folder of a run of three tasks that are done, the last one without a document."""
    folder = tmp_path / "tokens.work"
    for name in ("logs/completions", "counts"):
        (folder / name).mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"tasks": 3, "token_bytes": 2, "dataset": "corpus"}))
    for task, lengths in enumerate(([3, 4], [5], [])):
        write_task(folder / ".attempts" / "1", task, lengths)
        launcher.publish(None, task, 3, str(folder), str(folder / ".attempts" / "1"))
        (folder / "counts" / f"{task:05d}.json").write_text(json.dumps({"documents": len(lengths)} if lengths else {}))
        (folder / "logs" / "completions" / f"{task:05d}").touch()
    return folder


def finish(work: pathlib.Path) -> pathlib.Path:
    output = work.with_name("tokens")
    launcher.finish(None, 0, 1, str(work), str(output))
    return output


def test_the_folder_has_its_name_when_all_tasks_are_done(work):
    write_task(work / ".attempts" / "1", 9, [1])  # of a process that was killed
    output = finish(work)
    names = [f"{task:05d}_unshuffled.ds{end}" for task in (0, 1) for end in ("", ".index", ".metadata")]
    assert sorted(path.name for path in output.iterdir()) == names
    assert json.loads((work / "done.json").read_text()) == {"documents": 3, "tokens": 12}
    assert not (work / ".attempts").exists()
    finish(work)  # again, as two jobs may


@pytest.mark.parametrize(
    "harm, said",
    [
        (lambda work: (work / "logs/completions/00001").unlink(), "task 1 is not done"),
        (lambda work: write_task(work / ".tokens", 0, [3]), "task 0 read 2 documents and wrote 1"),
        (lambda work: (work / ".tokens/00001_unshuffled.ds").unlink(), "task 1 read 1 documents and wrote 0"),
        (lambda work: (work / ".tokens/00001_unshuffled.ds").write_bytes(b"1234"), "5 tokens of its index"),
    ],
)
def test_what_is_not_whole_gets_no_name(work, harm, said):
    harm(work)
    with pytest.raises(UserError, match=said):
        finish(work)
    assert not work.with_name("tokens").exists()


def test_a_run_is_taken_up_with_the_same_corpus_and_flags_only(tmp_path):
    plan = {"files": [["a", 1, 2]], "text_field": "text", "tasks": 3, "output": "tokens", "tokens": 7}
    identity = {"files": [["a", 1, 2]], "text_field": "text"}
    assert launcher.take_up(tmp_path, identity, None) is None
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert launcher.take_up(tmp_path, identity, None) == launcher.take_up(tmp_path, identity, 3) == plan
    with pytest.raises(UserError, match="begun with other files; repeat"):
        launcher.take_up(tmp_path, identity | {"files": [["a", 1, 3]]}, None)
    with pytest.raises(UserError, match="begun with other text field, tasks; repeat"):
        launcher.take_up(tmp_path, identity | {"text_field": "story"}, 4)


def test_a_file_that_changed_under_way_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    ((path, size, changed),) = shares.describe_files(str(tmp_path / "a.jsonl"), "train")
    shares.check_unchanged(pathlib.Path(path), size, changed)
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match="it has changed since the first start"):
        shares.check_unchanged(pathlib.Path(path), size, changed)


@pytest.mark.parametrize("done", [True, False])
def test_the_process_of_a_task_that_is_gone_is_found(tmp_path, done):
    for folder in ("pids", "logs/completions"):
        (tmp_path / folder).mkdir(parents=True)
    child = subprocess.Popen(["true"])
    child.wait()
    (tmp_path / "pids" / "00004").write_text(str(child.pid))
    (tmp_path / "pids" / "00005").write_text(str(os.getpid()))
    if done:
        (tmp_path / "logs" / "completions" / "00004").touch()
    assert launcher.Watch(tmp_path, {"token_bytes": 2}).find_killed() == ("" if done else "4")


# ----------------------------------------------------------------------------------------------------------------------
# With datatrove


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[pathlib.Path, list[str]]:
    folder = tmp_path_factory.mktemp("datatrove") / "corpus"
    return folder, write_corpus(folder, copies=10)


def wait_until_half_written(process: subprocess.Popen, work: pathlib.Path, done: int) -> str:
    """Until so many tasks are done and another, whose process lives, has tokens on the disk; returns that task. An
    earlier start may have left such tokens."""
    until = time.monotonic() + 300
    while True:
        written = [file for file in work.glob(".attempts/*/*.ds") if file.stat().st_size]
        completed = {file.name for file in work.glob("logs/completions/*")}
        begun = {file.name[:5] for file in written} - completed
        running = [task for task in sorted(begun) if has_process(work / "pids" / task)]
        if len(completed) >= done and running:
            return running[0]
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.01)


def has_process(pid_file: pathlib.Path) -> bool:
    return pid_file.exists() and psutil.pid_exists(int(pid_file.read_text() or 0))


@pytest.mark.slow
@needs_datatrove
def test_a_killed_run_is_taken_up_and_no_document_is_lost_or_doubled(tmp_path, corpus):
    folder, texts = corpus
    output, work = tmp_path / "tokens", tmp_path / "tokens.work"
    words = command(folder, output, "--workers", "2", "--tasks", "12")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_half_written(process, work, done=2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [] and not output.exists()
    before = {file.name: file.stat().st_mtime_ns for file in work.glob("logs/completions/*")}
    tokens_before = {file.name: file.stat().st_mtime_ns for file in work.glob(".tokens/*.ds")}
    assert 2 <= len(before) < 12

    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    task = wait_until_half_written(process, work, done=len(before))
    os.kill(int((work / "pids" / task).read_text()), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1 and f"done       {len(before)} of 12 tasks by earlier starts" in out
    (line,) = err.splitlines()
    assert f"the process of task {int(task)} was killed" in line and not output.exists()

    process = start(words)
    assert process.returncode == 0 and process.stderr == ""
    assert f"python train_fsdp.py --dataset {output} --model demo" in process.stdout
    assert tokens_of(output) == tokenized(texts)
    changed = {file.name: file.stat().st_mtime_ns for file in work.glob("logs/completions/*")}
    assert before.items() <= changed.items()  # not done again
    assert all((output / name).stat().st_mtime_ns == at for name, at in tokens_before.items())
    assert not [*work.glob(".attempts"), *work.glob(".tokens")]

    again = start(words)
    assert again.returncode == 0 and f"{len(texts):,} documents" in again.stdout
    assert {file.name: file.stat().st_mtime_ns for file in work.glob("logs/completions/*")} == changed

    mistake = start([*words, "--text-field", "story"])
    assert mistake.returncode == 2 and "it was begun with other text field" in mistake.stderr


@pytest.mark.slow
@needs_datatrove
def test_documents_are_shuffled_by_a_seed_and_none_is_lost(tmp_path, corpus):
    folder, texts = corpus
    words = command(folder, tmp_path / "tokens", "--workers", "2", "--tasks", "3", "--shuffle-seed", "1")
    process = start(words)
    assert process.returncode == 0, process.stderr
    documents, wanted = tokens_of(tmp_path / "tokens"), tokenized(texts)
    assert documents != wanted and sorted(documents) == sorted(wanted)


@pytest.mark.slow
@needs_datatrove
def test_a_bad_record_ends_the_run_with_one_line(tmp_path, corpus):
    folder, _ = corpus
    bad = tmp_path / "corpus"
    bad.mkdir()
    lines = (folder / "a.jsonl").read_text().splitlines(keepends=True)
    lines[15000] = '{"text": 7}\n'
    (bad / "a.jsonl").write_text("".join(lines))
    process = start(command(bad, tmp_path / "tokens", "--workers", "2", "--tasks", "4"))
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "a.jsonl, line 15001: a record has no text, 7 instead of text" in line
    assert not (tmp_path / "tokens").exists()


@pytest.mark.slow
@needs_datatrove
@pytest.mark.skipif(bool(why := nodes.missing(nodes.TOOLS + nodes.SLURM)), reason=why)
def test_slurm_runs_the_tasks_on_its_nodes_and_a_last_job_finishes(tmp_path, tmp_path_factory, corpus):
    folder, texts = corpus
    output, state = tmp_path / "tokens", tmp_path_factory.mktemp("slurm")
    flags = ["--executor", "slurm", "--workers", "2", "--tasks", "4"]
    options = ["--slurm-option", "partition=main", "--slurm-option", "time=10", "--slurm-option", "mem-per-cpu=1G"]
    with nodes.two_nodes(state) as two:
        slurm = nodes.Slurm(state, two, gpus=1)
        printed = slurm(*command(folder, output, *flags, *options))
        assert re.search(r"^submitted  job \d+; .*tokens appears when it is done", printed, re.MULTILINE)
        until = time.monotonic() + 900
        while slurm("squeue", "-h").strip():
            assert time.monotonic() < until
            time.sleep(0.5)
    logs = [file.read_text() for file in (tmp_path / "tokens.work").glob("logs*/slurm_logs/*")]
    assert output.exists(), "\n".join(logs)
    assert tokens_of(output) == tokenized(texts)
