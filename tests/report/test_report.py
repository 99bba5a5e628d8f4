"""What a run lets one see of itself and what it can be judged by: profile, metrics endpoint, memory record, gates."""

import dataclasses
import gc
import io
import json
import re
import resource
import socket
import time
import types
import urllib.request

import pytest
import torch
from conftest import metrics_of, parse, python, train
from test_tracker import FLOPS, TOKENS, clock  # noqa: F401 - the fixture

import train_fsdp
import utils
from harness.base.errors import UserError
from harness.flags import commands
from harness.flags.settings import PROFILED_STEPS
from harness.job import endings
from harness.report import prometheus
from harness.report.figures import check_gates
from harness.report.log import Report
from harness.report.profiling import dump_memory, profiling, record_memory, time_shares
from harness.report.summary import describe_unsaved, say_evaluation, summarize
from harness.state import train_state
from harness.state.train_state import TrainState

TINY = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --eval-interval 0 --sample-tokens 2"


@pytest.fixture
def run(device, tmp_path):
    """`run(*flags)`: the program in this process, to its end; returns the run's folder."""

    def go(*flags):
        train([*TINY.split(), "--output-dir", tmp_path, "--run-name", "it", *flags], device)
        return tmp_path / "it"

    yield go
    gc.unfreeze()
    gc.enable()


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

    def log(self, *more):
        looked_at.append(sum(isinstance(thing, Kept) for thing in gc.get_objects()))

    monkeypatch.setattr(train_fsdp, "train_step", leaving(train_fsdp.train_step, 0, 2))
    monkeypatch.setattr(train_fsdp, "evaluate", leaving(train_fsdp.evaluate, 1))
    monkeypatch.setattr(Report, "log", log)
    run("--num-steps", "4", "--log-interval", "1", "--eval-interval", "2", "--eval-steps", "1")
    assert len(made) == 30  # in the first step, the first evaluation and the third step
    assert looked_at == [0, 0, 10, 10]  # those of the third step


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    return number


def test_a_run_leaves_a_trace_a_table_and_all_its_figures_at_the_endpoint(run, port, capsys):
    flags = ["--num-steps", "7", "--perf-warmup-steps", "2", "--log-interval", "3", "--profile"]
    folder = run(*flags, "--metrics-port", str(port))

    trace = json.loads((folder / "profile" / "rank-0.json").read_text())["traceEvents"]
    backwards = [event for event in trace if event.get("name") == "FSDP::post_backward_reduce"]
    assert len(backwards) == PROFILED_STEPS

    table = re.search(r"^profile +3 steps of (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    shares = {name: float(share) for name, share in re.findall(r"([a-z ]+) ([\d.]+) %", table)}
    assert set(map(str.strip, shares)) == {"compute", "communication", "exposed communication", "idle"}
    assert sum(shares.values()) == pytest.approx(100 + shares[" communication"], abs=0.3)

    lines = metrics_of(folder)
    assert "tokens_per_sec" not in lines[1]  # step 3 is profiled
    served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    gauges = {
        name: float(value) for name, value in re.findall(r'^training_(\w+){run="it"} (\S+)$', served, re.MULTILINE)
    }
    figures = {key: pytest.approx(value) for key, value in lines[-1].items() if key not in ("final", "samples")}
    figures["skipped_steps_total"] = figures.pop("skipped_steps")  # a counter
    assert gauges | figures == gauges


def test_steps_under_the_profiler_are_in_no_speed_figure(clock):  # noqa: F811
    tracker = utils.PerformanceTracker(warmup_steps=0)
    clock.advance(1)
    tracker.step(TOKENS, FLOPS, synchronize=False)
    with tracker.excluded():
        clock.advance(20)
        with tracker.data_wait():
            clock.advance(20)
        with tracker.excluded():  # an evaluation between two of them
            clock.advance(20)
        clock.advance(20)
    clock.advance(1)
    metrics = tracker.step(TOKENS, FLOPS)
    assert metrics["step_time_ms"] == pytest.approx(1000)
    assert metrics["data_wait_percent"] == 0


def test_starting_the_profiler_is_in_no_step(clock, device, tmp_path, monkeypatch, capsys):  # noqa: F811
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


def test_a_log_line_has_the_slowest_ranks_step_and_the_longest_wait_for_data(observed):
    figures = observed(2)["figures"]["worst"]
    assert (figures["step_time_ms"], figures["slowest_rank_ms"], figures["data_wait_percent"]) == (10, 20, 5)


def test_the_last_lines_say_how_often_each_source_was_passed_over_and_its_held_out_loss(tmp_path):
    state = types.SimpleNamespace(branched_from=None, elapsed=7, elapsed_before=0)
    metrics = {"step": 3, "tokens_seen": 96, "loss": 2.0, "eval_loss": 0.0}
    last = metrics | {"eval_loss/web": 2.0104, "eval_loss/code": 3.5, "epochs/web": 1.0, "epochs/code": 3.21}
    said = re.sub(r"\s+", " ", summarize(last, tmp_path, state))
    assert "sources web 1.0 epochs, code 3.2 " in said
    assert "held-out loss 0.0000 (perplexity 1.00), web 2.0104, code 3.5000 " in said
    alone = summarize(metrics | {"eval_loss/web": 2.0}, tmp_path, state)
    assert "sources" not in alone and "web" not in alone


def test_an_evaluation_of_several_sources_has_the_loss_of_each(device, capsys):
    settings = dataclasses.replace(parse([]), json=True, dataset=("web=a.jsonl:0.7", "code=b.bin:0.3"))
    losses = {"eval_loss": 1.5, "eval_loss/web": 1.0, "eval_loss/code": 2.0}
    stdout = io.StringIO()
    held_out = dict.fromkeys(("web", "code"), types.SimpleNamespace(is_chat=False))
    say_evaluation(settings, held_out, losses, 96, None, stdout)
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "on web=a.jsonl:0.7 code=b.bin:0.3: held-out loss 1.5000 (perplexity 4.48), web 1.0000, code 2.0000," in said
    assert said.rstrip().endswith(" 96 tokens")
    assert losses.items() <= json.loads(stdout.getvalue()).items()
    held_out["code"] = types.SimpleNamespace(is_chat=True)
    say_evaluation(settings, held_out, losses, 96, None, stdout)
    assert "96 tokens, of conversations the assistant's alone" in re.sub(r"\s+", " ", capsys.readouterr().out)
    say_evaluation(dataclasses.replace(settings, chat_loss="all"), held_out, losses, 96, None, stdout)
    assert "assistant" not in capsys.readouterr().out


def test_the_command_that_goes_on_is_the_run_without_what_it_says_anew():
    argv = ("--demo", "--num_steps", "5", "--export=x", "--lr", "1", "--resume", "p", "--run-name=--lr", "--lr=2")
    kept = commands.without(argv, "num_steps", "export", "resume", "run_name")
    assert kept == ["--demo", "--lr", "1", "--lr=2"]


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


def test_a_gate_is_judged_by_the_figures_of_the_last_line():
    args = parse(["--min-mfu", "50", "--max-memory-gib", "70"])
    check_gates(args, {"mfu_percent": 50.0, "peak_memory_reserved": 70.0})
    for mfu, memory, named in ((49.9, 60, "--min-mfu 50"), (51, 70.1, "--max-memory-gib 70")):
        with pytest.raises(UserError, match=named) as missed:
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


def test_the_endpoint_without_its_package_is_refused(run, monkeypatch):
    monkeypatch.setattr(prometheus, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="needs the package prometheus_client"):
        run("--metrics-port", "28500")


# ----------------------------------------------------------------------------------------------------------------------
# Disks that fail for a while


@pytest.fixture
def disturbed(arguments, device, monkeypatch, tmp_path):
    """`disturbed({step: function}, *flags)`: a run of 8 steps in which a function is called behind a step's log line;
    its folder."""
    folder = tmp_path / "out" / "r"

    def go(happens: dict, *flags):
        log = Report.log

        def log_and_disturb(self, metrics, *more):
            log(self, metrics, *more)
            happens.get(metrics["step"], lambda: None)()

        monkeypatch.setattr(Report, "log", log_and_disturb)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            return train([*arguments, "--num-steps", 8, "--log-interval", 1, "--no-final-checkpoint", *flags], device)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    go.folder, go.metrics = folder, folder / "metrics.jsonl"
    yield go
    gc.unfreeze()
    gc.enable()


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
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written, 6 lines are lost") as failed:
        disturbed({3: lambda: limit_files(disturbed.metrics.stat().st_size)})
    assert failed.value.exit_code == 1
    said = capsys.readouterr().out
    assert said.count("failed     ") == 1 and "report     not written: File too large" in said
    assert steps_in(disturbed.folder) == [1, 2, 3]


def test_no_checkpoint_is_published_before_the_lines_up_to_it_and_a_file_that_was_replaced_is_put_back(
    disturbed, capsys
):
    def replace_by_a_folder():
        disturbed.metrics.unlink()
        disturbed.metrics.mkdir()

    saves = ["--checkpoint-interval", 2, "--no-async-checkpoint", "--keep-checkpoints", 9]
    with pytest.raises(UserError, match="1 checkpoints could not be saved"):
        disturbed({3: replace_by_a_folder, 5: disturbed.metrics.rmdir, 7: disturbed.metrics.unlink}, *saves)
    assert steps_in(disturbed.folder) == [*range(1, 9), 8]
    assert sorted(path.name[-1] for path in (disturbed.folder / "checkpoints").iterdir()) == ["2", "6", "8"]
    said = capsys.readouterr().out
    assert "failed     checkpoint step-00000004: metrics.jsonl: Is a directory, 1 lines wait" in said
    assert said.count("failed     metrics.jsonl") == said.count("recovered  metrics.jsonl") == 1


def test_a_resume_with_other_flags_says_at_which_step_what_changed_and_how_long_it_trained(
    arguments, device, capsys, tmp_path
):
    flags = [*arguments, "--log-interval", 1, "--perf-warmup-steps", 1, "--checkpoint-interval", 3]
    assert train([*flags, "--num-steps", 3], device) == 0
    folder, capsys_of_first = tmp_path / "out" / "r", capsys.readouterr()
    assert "since the first start" not in capsys_of_first.out
    assert train([*flags, "--num-steps", 6, "--lr", 0.01, "--resume", "auto"], device) == 0
    lines = metrics_of(folder)
    changed = "num steps 3 -> 6, lr 0.0003 -> 0.01"
    assert [line["step"] for line in lines if line.get("changed") == changed] == [4]
    starts = json.loads((folder / "config.json").read_text())["starts"]
    assert [(start["step"], start.get("changed")) for start in starts] == [(0, None), (3, changed)]
    assert changed in (folder / "report.html").read_text()
    assert 0 < lines[-1]["trained_seconds"] < lines[-1]["elapsed_seconds"]
    assert re.search(r"tokens in [\d:]+ of training, [\d:]+ since the first start", capsys.readouterr().out)


def test_ctrl_c_leaves_the_page_and_the_loop_can_still_log(disturbed, monkeypatch, capfd):
    monkeypatch.setattr(endings, "LISTENERS", [])
    monkeypatch.setattr(endings, "ENDING", [])

    def interrupt():  # what the thread that reads signals does before it ends the process
        endings.announce(130, patience=60)
        endings.ENDING.clear()

    assert disturbed({1: interrupt}) == 0
    page = disturbed.folder / "report.html"
    assert f"report     {page}\n" in capfd.readouterr().err
    assert "ended at step 1 of 8" in page.read_text()
    assert steps_in(disturbed.folder) == [*range(1, 9), 8]


# ----------------------------------------------------------------------------------------------------------------------
# Memory record


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


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_a_clock_that_is_set_while_a_run_goes_on_changes_no_figure(run, monkeypatch, capsys, jump):
    log, now, set_to = Report.log, time.time, [0]
    monkeypatch.setattr(time, "time", lambda: now() + set_to[0])

    def log_and_set(self, metrics, *more):
        set_to[0] = jump if metrics["step"] >= 3 else 0
        log(self, metrics, *more)

    monkeypatch.setattr(Report, "log", log_and_set)
    monkeypatch.setattr(train_state, "PROCESS_STARTED", now())
    monkeypatch.setattr(train_state, "CLOCK", now() - time.monotonic())
    folder = run("--num-steps", "6", "--perf-warmup-steps", "1", "--log-interval", "1")
    assert re.search(r"tokens in 00:[0-5]\d, loss", capsys.readouterr().out)
    assert all(0 < line["goodput_percent"] <= 100 for line in metrics_of(folder)[1:])


def test_a_clock_that_went_back_between_two_starts_takes_no_time_away(device):
    state = TrainState(torch.nn.Linear(1, 1), tracker=utils.PerformanceTracker())
    saved = state.numbers() | {"world_size": 1}
    for started, elapsed, least in ((saved["started"] + 7200, 50.0, 50.0), (saved["started"] - 300, 50.0, 300.0)):
        state.elapsed_before = 0.0
        before = state.elapsed
        state.restore_counters(saved | {"started": started, "elapsed": elapsed})
        assert state.elapsed - before == pytest.approx(least, abs=20)


def test_a_run_that_resumes_but_does_not_save_on_its_way_is_told_how_often_it_should():
    said = describe_unsaved(parse(["--demo", "--resume", "auto"]), 100_000, 300.0)
    assert said.endswith("--checkpoint-interval 3000 saves about every 15 minutes at 300 ms a step")
    said = describe_unsaved(parse(["--demo", "--resume", "auto"]), 600, 300.0)
    assert said.endswith("nothing is saved before the end, within 3 min")
    for flags in ("--resume auto --checkpoint-interval 9", "--resume none"):
        assert not describe_unsaved(parse(["--demo", *flags.split()]), 100_000, 300.0)
