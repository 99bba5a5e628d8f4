"""What a run lets one see of itself and what it can be judged by: profile, metrics endpoint, memory record, gates."""

import gc
import json
import re
import socket
import time
import types
import urllib.request

import pytest
import torch
from conftest import metrics_of, parse, python, train
from test_tracker import FLOPS, TOKENS, clock  # noqa: F401 - the fixture

import utils
from harness import checkpoints, endpoint, report, settings, terminal
from utils import UserError

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
    assert len(backwards) == settings.PROFILED_STEPS

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
    with report.profiling(tmp_path, state):
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
    assert report.time_shares(events, 100e-6) == pytest.approx(expected)


def test_shares_of_a_cpu_by_hand():
    events = [Event("aten::mm", 0, 50), Event("aten::add", 10, 20), Event("c10d::allreduce_", 50, 75)]
    events += [Event("gloo:all_reduce", 40, 70, annotation=True), Event("FSDP::x", 0, 100, annotation=True)]
    expected = {"compute": 50, "communication": 35, "exposed communication": 25, "idle": 25}
    assert report.time_shares(events, 100e-6) == pytest.approx(expected)


def test_a_log_line_has_the_slowest_ranks_step_and_the_longest_wait_for_data(observed):
    figures = observed(2)["figures"]["worst"]
    assert (figures["step_time_ms"], figures["slowest_rank_ms"], figures["data_wait_percent"]) == (10, 20, 5)


def test_the_command_that_goes_on_is_the_run_without_what_it_says_anew():
    argv = ("--demo", "--num_steps", "5", "--export=x", "--lr", "1", "--resume", "p", "--run-name=--lr", "--lr=2")
    kept = terminal.without(argv, "num_steps", "export", "resume", "run_name")
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
    report.check_gates(args, {"mfu_percent": 50.0, "peak_memory_reserved": 70.0})
    for mfu, memory, named in ((49.9, 60, "--min-mfu 50"), (51, 70.1, "--max-memory-gib 70")):
        with pytest.raises(UserError, match=named) as missed:
            report.check_gates(args, {"mfu_percent": mfu, "peak_memory_reserved": memory})
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
    monkeypatch.setattr(endpoint, "find_spec", lambda package: None)
    with pytest.raises(UserError, match="needs the package prometheus_client"):
        run("--metrics-port", "28500")


# ----------------------------------------------------------------------------------------------------------------------
# Memory record


def test_the_memory_record_is_written_when_asked_and_when_memory_runs_out(device, monkeypatch, tmp_path):
    """There is no GPU here: torch's own recorder is replaced."""
    observers, written = [], []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    report.record_memory(tmp_path / "it")
    report.dump_memory(tmp_path / "it")
    (observer,) = observers
    observer(0, 2**30, 0, 0)  # device, wanted, allocated, free
    assert written == [str(tmp_path / "it" / "memory-rank-0.pickle")] * 2
    assert (tmp_path / "it").is_dir()


@pytest.mark.parametrize("jump", [-7200, 7200])
def test_a_clock_that_is_set_while_a_run_goes_on_changes_no_figure(run, monkeypatch, capsys, jump):
    log, now, set_to = report.Report.log, time.time, [0]
    monkeypatch.setattr(time, "time", lambda: now() + set_to[0])

    def log_and_set(self, metrics, *more):
        set_to[0] = jump if metrics["step"] >= 3 else 0
        log(self, metrics, *more)

    monkeypatch.setattr(report.Report, "log", log_and_set)
    monkeypatch.setattr(checkpoints, "PROCESS_STARTED", now())
    monkeypatch.setattr(checkpoints, "CLOCK", now() - time.monotonic())
    folder = run("--num-steps", "6", "--perf-warmup-steps", "1", "--log-interval", "1")
    assert re.search(r"tokens in 00:[0-5]\d, loss", capsys.readouterr().out)
    assert all(0 < line["goodput_percent"] <= 100 for line in metrics_of(folder)[1:])


def test_a_clock_that_went_back_between_two_starts_takes_no_time_away(device):
    state = checkpoints.TrainState(torch.nn.Linear(1, 1), tracker=utils.PerformanceTracker())
    saved = state.numbers() | {"world_size": 1}
    for started, elapsed, least in ((saved["started"] + 7200, 50.0, 50.0), (saved["started"] - 300, 50.0, 300.0)):
        state.elapsed_before = 0.0
        before = state.elapsed
        state.take(saved | {"started": started, "elapsed": elapsed})
        assert state.elapsed - before == pytest.approx(least, abs=1)
