"""What a run lets one see of itself and what it can be judged by: lines, profile, memory record, gates, its end."""

import gc
import json
import pathlib
import re
import resource
import socket
import time
import types

import pytest
import torch
from conftest import metrics_of, parse, python, train

import train_fsdp
import utils
from harness.base.errors import UserError
from harness.flags.settings import PROFILED_STEPS
from harness.job import endings
from harness.report import summary
from harness.report.figures import check_gates
from harness.report.log import Log
from harness.report.profiling import dump_memory, profiling, record_memory, time_shares
from harness.state import train_state
from harness.state.train_state import TrainState

TINY = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --sample-tokens 2"


@pytest.fixture(autouse=True)
def collected(monkeypatch):
    """Endings and the collection of garbage as before, after a run in this process."""
    monkeypatch.setattr(endings, "LISTENERS", [])
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def run(device, tmp_path):
    """`run(*flags)`: the program in this process, to its end; returns the run's folder."""

    def go(*flags):
        train([*TINY.split(), "--output-dir", tmp_path, "--run-name", "it", *flags], device)
        return tmp_path / "it"

    return go


class Kept:
    """What a compiler leaves: objects that stay and refer to each other."""

    def __init__(self):
        self.itself = self


def test_what_the_first_step_and_the_first_evaluation_leave_is_not_collected_at_log_lines(run, monkeypatch):
    made, looked_at = [], []

    def leaving(function, *lines):
        def wrapper(*args):
            if len(looked_at) in lines:  # after that many log lines
                made.extend(Kept() for _ in range(10))
            return function(*args)

        return wrapper

    write = Log.write

    def write_and_look(self, *args):
        write(self, *args)
        looked_at.append(sum(isinstance(thing, Kept) for thing in gc.get_objects()))

    monkeypatch.setattr(train_fsdp, "train_step", leaving(train_fsdp.train_step, 0, 2))
    monkeypatch.setattr(train_fsdp, "evaluate", leaving(train_fsdp.evaluate, 1))
    monkeypatch.setattr(Log, "write", write_and_look)
    run("--num-steps", "4", "--log-interval", "1", "--eval-interval", "2", "--eval-steps", "1")
    assert len(made) == 30  # in the first step, the first evaluation and the third step
    assert looked_at == [0, 0, 10, 10]  # those of the third step
    assert gc.isenabled()


def test_the_same_command_after_the_end_keeps_the_last_line_and_ends_well(run, capsys):
    flags = ["--num-steps", "3", "--perf-warmup-steps", "1", "--log-interval", "1", "--resume", "auto"]
    folder = run(*flags)
    lines, first = metrics_of(folder), capsys.readouterr().out
    run(*flags)
    assert metrics_of(folder) == lines
    said = capsys.readouterr().out
    assert "done       nothing to train: step 3 of 3" in said and "report  " in said
    assert re.search(r"done +3 steps, 192 tokens in \d\d:\d\d of training, \d\d:\d\d since the start, loss", first)


def test_a_run_whose_loss_ends_above_its_first_says_so(run, capsys):
    run("--num-steps", "4", "--lr", "1", "--warmup-steps", "0", "--max-grad-norm", "1000")
    worse = r"\nworse +the loss ended at [\d.,]+, above its first, [\d.]+: a lower --lr"
    assert re.search(worse, capsys.readouterr().out)
    run("--num-steps", "4", "--run-name", "good", "--batch-size", "8", "--lr", "0.003")
    assert "worse" not in capsys.readouterr().out


def test_a_resume_with_other_flags_says_at_which_step_what_changed_and_how_long_it_trained(run, capsys):
    flags = ["--log-interval", "1", "--perf-warmup-steps", "1", "--checkpoint-interval", "3"]
    run(*flags, "--num-steps", "3")
    assert "first start" not in capsys.readouterr().out
    folder = run(*flags, "--num-steps", "6", "--lr", "0.01", "--resume", "auto")
    lines = metrics_of(folder)
    (changed,) = [line for line in lines if "changed" in line]
    assert changed["step"] == 4 and "num steps 3 -> 6" in changed["changed"] and "-> 0.01" in changed["changed"]
    starts = json.loads((folder / "config.json").read_text())["starts"]
    assert [(start["step"], start.get("changed")) for start in starts] == [(0, None), (3, changed["changed"])]
    assert 0 < lines[-1]["trained_seconds"] < lines[-1]["elapsed_seconds"]
    assert re.search(r"tokens in [\d:]+ of training, [\d:]+ since the first start", capsys.readouterr().out)


# ----------------------------------------------------------------------------------------------------------------------
# Profile and memory record


def test_a_run_leaves_a_trace_and_a_table(run, capsys):
    folder = run("--num-steps", "7", "--perf-warmup-steps", "2", "--log-interval", "3", "--profile")
    trace = json.loads((folder / "profile" / "rank-0.json").read_text())["traceEvents"]
    backwards = [event for event in trace if event.get("name") == "FSDP::post_backward_reduce"]
    assert len(backwards) == PROFILED_STEPS
    table = re.search(r"^profile +3 steps of (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    shares = {name: float(share) for name, share in re.findall(r"([a-z ]+) ([\d.]+) %", table)}
    assert set(map(str.strip, shares)) == {"compute", "communication", "exposed communication", "idle"}
    assert sum(shares.values()) == pytest.approx(100 + shares[" communication"], abs=0.3)
    assert "tokens_per_sec" not in metrics_of(folder)[1]  # step 3 is profiled


def test_starting_the_profiler_is_in_no_step(clock, device, tmp_path, monkeypatch, capsys):
    class SlowToStart:
        def __enter__(self):
            clock.advance(30)  # as CUPTI is
            return self

        def __exit__(self, *_):
            clock.advance(30)

        events, export_chrome_trace = lambda self: [], lambda self, path: None

    monkeypatch.setattr(torch.profiler, "profile", SlowToStart)
    state = types.SimpleNamespace(step=0, tracker=utils.PerformanceTracker())
    with profiling(tmp_path, state):
        clock.advance(3)
        state.step = 3
    assert "3 steps of 1,000.0 ms" in capsys.readouterr().out


class Event:
    def __init__(self, name, start, end, device="CPU", annotation=False):
        self.name, self.is_user_annotation = name, annotation
        self.device_type = getattr(torch.autograd.DeviceType, device)
        self.time_range = type("Range", (), {"start": start, "end": end})


def test_shares_of_a_gpu_by_hand():
    events = [
        Event("aten::mm", 0, 100),  # the host does not count where there is a GPU
        Event("FSDP::all_gather", 0, 100, "CUDA", annotation=True),
        Event("gemm", 10, 40, "CUDA"),
        Event("gemm", 30, 50, "CUDA"),
        Event("ncclDevKernel_AllGather", 40, 70, "CUDA"),
        Event("ncclDevKernel_ReduceScatter", 60, 80, "CUDA"),
    ]
    expected = {"compute": 40, "communication": 40, "exposed communication": 30, "idle": 30}
    assert time_shares(events, 100e-6) == pytest.approx(expected)


def test_shares_of_a_cpu_by_hand():
    events = [Event("aten::mm", 0, 50), Event("aten::add", 10, 20), Event("c10d::allreduce_", 50, 75)]
    events += [Event("gloo:all_reduce", 40, 70, annotation=True), Event("FSDP::x", 0, 100, annotation=True)]
    expected = {"compute": 50, "communication": 35, "exposed communication": 25, "idle": 25}
    assert time_shares(events, 100e-6) == pytest.approx(expected)


def test_the_memory_record_is_written_when_asked_and_when_memory_runs_out(device, monkeypatch, tmp_path):
    """There is no GPU here: torch's own recorder is replaced."""
    observers, written = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    record_memory(tmp_path / "it")
    dump_memory(tmp_path / "it")
    (observer,) = observers
    observer(0, 2**30, 0, 0)  # device, wanted, allocated, free
    assert written == [str(tmp_path / "it" / "memory-rank-0.pickle")] * 2
    assert (tmp_path / "it").is_dir()


# ----------------------------------------------------------------------------------------------------------------------
# Gates


def test_a_missed_gate_is_exit_code_3_with_one_line_that_names_figure_and_gate(tmp_path):
    gate = ["--num-steps", "3", "--perf-warmup-steps", "1", "--peak-tflops", "100", "--min-mfu", "60"]
    process = python(*TINY.split(), *gate, "--output-dir", tmp_path, "--run-name", "it")
    assert process.returncode == 3
    mfu = metrics_of(tmp_path / "it")[-1]["mfu_percent"]
    missed = f"acceptance gate missed: --min-mfu 60: the MFU was {mfu:.2f} %"
    assert process.stderr == f"train_fsdp.py: error: {missed}\n"
    assert "done" in process.stdout  # and nothing is lost
    assert json.loads((tmp_path / "it" / "config.json").read_text())["starts"][0]["exit_code"] == 3


def test_a_gate_is_judged_by_the_figures_of_the_last_line():
    args = parse(["--min-mfu", "50", "--max-memory-gib", "70"])
    check_gates(args, {"mfu_percent": 50.0, "peak_memory_reserved": 70.0})
    for mfu, memory, gate in ((49.9, 60, "--min-mfu 50"), (51, 70.1, "--max-memory-gib 70")):
        with pytest.raises(UserError, match=gate) as missed:
            check_gates(args, {"mfu_percent": mfu, "peak_memory_reserved": memory})
        assert missed.value.exit_code == 3


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--min-mfu 40", "--min-mfu: there is no MFU without the device's peak; give --peak-tflops"),
        ("--max-memory-gib 4", "--max-memory-gib: memory is measured on a GPU only"),
        ("--memory-snapshot", "--memory-snapshot: memory is measured on a GPU only"),
    ],
)
def test_what_cannot_be_measured_here_is_refused_before_anything_begins(run, flags, said):
    with pytest.raises(UserError, match=re.escape(said)) as refused:
        run(*flags.split())
    assert refused.value.exit_code == 2


def test_a_port_in_use_is_refused_before_training(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"--metrics-port: cannot listen on 127\.0\.0\.1:.*in use"):
            run("--metrics-port", str(taken.getsockname()[1]))


# ----------------------------------------------------------------------------------------------------------------------
# A disk that is full for a while, a clock that is set, Ctrl-C


@pytest.fixture
def disturbed(arguments, device, monkeypatch, tmp_path):
    """`disturbed({step: function}, *flags)`: a run of 8 steps in which a function is called behind a step's log line;
    its folder."""
    folder = tmp_path / "out" / "r"

    def go(happens: dict, *flags):
        write = Log.write

        def write_and_disturb(self, metrics, *more):
            write(self, metrics, *more)
            happens.get(metrics["step"], lambda: None)()

        monkeypatch.setattr(Log, "write", write_and_disturb)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            return train([*arguments, "--num-steps", 8, "--log-interval", 1, "--no-final-checkpoint", *flags], device)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    go.folder, go.metrics = folder, folder / "metrics.jsonl"
    return go


def limit_files(size: int) -> None:
    """Writing more than `size` bytes into one file fails from now on, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def steps_in(folder) -> list[int]:
    return [line["step"] for line in metrics_of(folder)]


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room_again(disturbed, capsys):
    fill = lambda: limit_files(disturbed.metrics.stat().st_size + 100)  # noqa: E731 - in the middle of a line
    assert disturbed({2: fill, 5: lambda: limit_files(resource.RLIM_INFINITY)}) == 0
    assert steps_in(disturbed.folder) == [*range(1, 9), 8]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("failed", "recovered"))]
    assert told == [
        "failed     metrics.jsonl, from step 3 on: File too large; its lines wait in memory, the run goes on",
        "recovered  metrics.jsonl: it has every line up to step 6",
    ]


def test_lines_that_are_refused_to_the_end_make_the_run_fail_and_the_page_says_why_not(disturbed, capsys):
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written \(File too large\)") as failed:
        disturbed({3: lambda: limit_files(disturbed.metrics.stat().st_size)})
    assert failed.value.exit_code == 1
    said = capsys.readouterr().out
    assert said.count("failed     ") == 1 and "report     not written: File too large" in said
    assert steps_in(disturbed.folder) == [1, 2, 3]


def test_no_checkpoint_is_published_before_the_lines_up_to_it(disturbed, capsys):
    full = lambda: limit_files(disturbed.metrics.stat().st_size)  # noqa: E731
    saves = ["--checkpoint-interval", 2, "--no-async-checkpoint", "--keep-checkpoints", 9]
    with pytest.raises(UserError, match="1 checkpoints could not be saved"):
        disturbed({3: full, 4: lambda: None, 5: lambda: limit_files(resource.RLIM_INFINITY)}, *saves)
    assert steps_in(disturbed.folder) == [*range(1, 9), 8]
    assert sorted(path.name[-1] for path in (disturbed.folder / "checkpoints").iterdir()) == ["2", "6", "8"]
    assert "failed     checkpoint step-00000004: " in capsys.readouterr().out


def test_ctrl_c_leaves_the_page(disturbed, monkeypatch):
    monkeypatch.setattr(endings, "ENDING", [])

    def interrupt():  # what the thread that reads signals does before it ends the process
        endings.announce(130, patience=60)
        pages.append((disturbed.folder / "report.html").read_text())
        endings.ENDING.clear()

    pages = []
    assert disturbed({1: interrupt}) == 0
    assert "ended at step 1 of 8" in pages[0]
    assert json.loads((disturbed.folder / "config.json").read_text())["starts"][0]["exit_code"] == 130


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_a_clock_that_is_set_while_a_run_goes_on_changes_no_figure(run, monkeypatch, capsys, jump):
    write, now, set_to = Log.write, time.time, [0]
    monkeypatch.setattr(time, "time", lambda: now() + set_to[0])

    def write_and_set(self, metrics, *more):
        set_to[0] = jump if metrics["step"] >= 3 else 0
        write(self, metrics, *more)

    monkeypatch.setattr(Log, "write", write_and_set)
    monkeypatch.setattr(train_state, "PROCESS_STARTED", now())
    monkeypatch.setattr(train_state, "CLOCK", now() - time.monotonic())
    folder = run("--num-steps", "6", "--perf-warmup-steps", "1", "--log-interval", "1")
    assert re.search(r"tokens in 00:[0-5]\d of training, 00:[0-5]\d since", capsys.readouterr().out)
    assert all(0 < line["goodput_percent"] <= 100 for line in metrics_of(folder)[1:])


def test_a_clock_that_went_back_between_two_starts_takes_no_time_away(device, monkeypatch):
    monkeypatch.setattr(TrainState, "load_tensors", lambda *_: None)
    new = TrainState(torch.nn.Linear(1, 1), tracker=utils.PerformanceTracker())
    saved = new.counters() | {"world_size": 1}
    for started, elapsed, least in ((saved["started"] + 7200, 50.0, 50.0), (saved["started"] - 300, 50.0, 300.0)):
        state = TrainState(torch.nn.Linear(1, 1), tracker=utils.PerformanceTracker())
        before = state.elapsed
        state.load(pathlib.Path(), saved | {"started": started, "elapsed_before": elapsed})
        assert state.elapsed - before == pytest.approx(least, abs=20)


def test_losses_of_several_sources_stand_behind_that_of_all():
    metrics = {"eval_loss": 0.0, "eval_loss_ema": 1.0, "eval_loss/web": 2.0104, "eval_loss/code": 3.5}
    words = "held-out loss 0.0000 (perplexity 1.00), of the average 1.0000 (perplexity 2.72), web 2.0104, code 3.5000"
    assert summary.describe_held_out(metrics) == words
    del metrics["eval_loss/code"]
    assert "web" not in summary.describe_held_out(metrics)
