"""What a run lets one see of itself and what it can be judged by: lines, profile, memory record, gates, its end."""

import gc
import json
import re
import resource
import socket

import pytest
import torch
from checkpoints import files_of_at_most, limit_files
from conftest import metrics_of, parse, python, train, words

import train_fsdp
from harness import report
from harness.base.errors import UserError
from harness.flags.settings import PROFILED_STEPS
from harness.job import endings
from harness.report.log import Log
from harness.report.metrics import METRICS, check_gates
from harness.report.profiling import dump_memory, record_memory, time_shares
from harness.state.train_state import TrainState


@pytest.fixture(autouse=True)
def collected(monkeypatch):
    """Endings and the collection of garbage as before, after a run in this process."""
    monkeypatch.setattr(endings, "LISTENERS", [])
    yield
    gc.enable()


@pytest.fixture
def run(device, arguments, tmp_path):
    """`run(*flags)`: the smallest run, in this process, to its end; returns its folder."""

    def go(*flags):
        train([*arguments, *words("--sample-prompt Once --sample-tokens 2"), *flags], device)
        return tmp_path / "out" / "r"

    return go


def test_the_same_command_after_the_end_changes_nothing_and_another_one_continues(run, capsys):
    flags = words("--perf-warmup-steps 1 --log-interval 1 --resume auto --num-steps")
    folder = run(*flags, 3)
    lines, printed = metrics_of(folder), capsys.readouterr().out
    assert re.search(r"done +3 steps, 96 tokens, \d\d:\d\d of training, \d\d:\d\d since the start, loss", printed)
    run(*flags, 3)
    assert metrics_of(folder) == lines
    printed = capsys.readouterr().out
    assert "done       nothing to train: step 3 of 3" in printed and "report  " in printed

    run(*flags, 6, "--lr", "0.01")
    first, second, third = json.loads((folder / "config.json").read_text())["starts"]
    assert (first["step"], second["step"], third["step"]) == (0, 3, 3) and "changed" not in first
    assert "num steps 3 -> 6" in third["changed"] and "-> 0.01" in third["changed"]
    *_, third_line = [line for line in metrics_of(folder) if line["step"] == 3]
    assert third_line["samples"] == lines[-1]["samples"] and "final" not in third_line
    last = metrics_of(folder)[-1]
    assert 0 < last["trained_seconds"] < last["elapsed_seconds"]
    assert re.search(r"tokens, [\d:]+ of training, [\d:]+ since the first start", capsys.readouterr().out)


FAILURES = {
    "harness.report.trackers.tensorboard.TRACKER.start": "--log-with tensorboard",
    "harness.state.Checkpoints.__init__": "",
    "train_fsdp.train_step": "",
    "harness.loop.find_non_finite": "--checkpoint-interval 4",  # before the first save
}


def test_a_start_that_fails_before_its_first_line_leaves_the_log_of_the_run_as_it_was(run, monkeypatch):
    monkeypatch.setattr(endings, "ENDING", [])

    def end(exit_code: int) -> dict[str, bytes]:
        """End as the process does; returns the files of the run."""
        endings.announce(exit_code, timeout=60)
        endings.LISTENERS.clear()
        endings.ENDING.clear()
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fail(*_, **options):
        raise RuntimeError("no")

    folder = run("--num-steps", 3)
    before = end(0)
    assert {"metrics.jsonl", "config.json", "report.html"} <= before.keys()
    for failing, more in FAILURES.items():
        with monkeypatch.context() as patched:
            patched.setattr(failing, fail)
            with pytest.raises((RuntimeError, UserError), match="no"):
                run(*words(f"--resume auto --num-steps 6 --lr 0.5 {more}"))
        assert end(1) == before, failing
    run("--resume", "auto", "--num-steps", 6)
    assert [start["step"] for start in json.loads((folder / "config.json").read_text())["starts"]] == [0, 3]


def test_samples_of_a_model_that_generates_nothing_are_one_line_before_training(run, monkeypatch):
    monkeypatch.delattr("transformers.GenerationMixin.generate")  # as a model of one's own without the mixin
    line = r"--sample-prompt: LlamaForCausalLM has no generate\(\), which samples need; .*, or take no samples"
    with pytest.raises(UserError, match=line):
        run("--num-steps", 2)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics

SPEC = """step loss router_loss expert_load_max eval_loss grad_norm learning_rate tokens_seen tokens_per_sec
tokens_per_sec_per_gpu steps_per_sec step_time_ms data_wait_percent mfu_percent actual_tflops_per_sec
theoretical_tflops_total peak_memory_active peak_memory_alloc peak_memory_reserved goodput_percent"""


def test_every_promised_key_has_its_row_and_a_name_of_its_own():
    assert {*SPEC.split()} <= METRICS.keys()
    assert len({metric.tracker_name for metric in METRICS.values()}) == len(METRICS)


# ----------------------------------------------------------------------------------------------------------------------
# Profile and memory record


def test_a_run_leaves_a_trace_and_a_table(run, monkeypatch, capsys):
    """Steps 3 to 5 are profiled; an evaluation after step 4 is marked as no part of the time that they take."""

    def evaluate(*_):
        with torch.profiler.record_function("evaluation"):
            return {"eval_loss": 1.0}, 1

    monkeypatch.setattr(train_fsdp, "evaluate", evaluate)
    folder = run(*words("--num-steps 7 --perf-warmup-steps 2 --log-interval 3 --profile --eval-interval 4"))
    trace = json.loads((folder / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert [event.get("name") for event in trace].count("FSDP::post_backward_reduce") == PROFILED_STEPS
    stopped, evaluated = (
        [(event["ts"], event["ts"] + event["dur"]) for event in trace if event.get("name") == name]
        for name in ("clock stopped", "evaluation")
    )
    assert any(first <= start and end <= last for start, end in evaluated for first, last in stopped)
    table = re.search(r"^profile +3 steps of (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    shares = {name: float(share) for name, share in re.findall(r"([a-z ]+) ([\d.]+) %", table)}
    assert set(map(str.strip, shares)) == {"compute", "communication", "exposed communication", "idle"}
    assert sum(shares.values()) == pytest.approx(100 + shares[" communication"], abs=0.3)
    assert "tokens_per_sec" not in metrics_of(folder)[1]  # step 3 is profiled


def test_a_trace_that_the_disk_refuses_is_a_line_and_the_run_continues(run, monkeypatch, capsys):
    """torch writes a trace to a disk without room as if nothing had happened."""
    export_trace = torch.profiler.profile.export_chrome_trace
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, _: export_trace(self, "/dev/full/rank-0.json")
    )
    folder = run(*words("--num-steps 5 --perf-warmup-steps 1 --log-interval 1 --profile"))
    printed = capsys.readouterr().out
    assert f"failed     {folder / 'profile' / 'rank-0.json'}: " in printed and "profile    3 steps of" in printed
    assert metrics_of(folder)[-1]["final"]


def test_the_speed_is_that_of_steps_alone(run, monkeypatch, clock):
    """On a clock on which setting up takes five seconds, an evaluation seven, a save eleven, and each step two."""

    def takes(seconds: float, function):
        return lambda *arguments, **options: (clock.advance(seconds), function(*arguments, **options))[1]

    monkeypatch.setattr(report, "describe_setup", takes(5, report.describe_setup))
    monkeypatch.setattr(train_fsdp, "evaluate", takes(7, train_fsdp.evaluate))
    monkeypatch.setattr(TrainState, "tensors", takes(11, TrainState.tensors))
    monkeypatch.setattr(train_fsdp, "train_step", takes(2, train_fsdp.train_step))
    flags = "--num-steps 4 --perf-warmup-steps 0 --log-interval 1 --checkpoint-interval 1 --no-async-checkpoint"
    lines = metrics_of(run(*words(flags), *words("--eval-interval 2 --eval-steps 1")))
    assert [line["step_time_ms"] for line in lines] == pytest.approx([2000] * 5)


class Event:
    def __init__(self, name, start, end, device="CPU", annotation=False, inside=()):
        self.name, self.is_user_annotation, self.cpu_children = name, annotation, inside
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
    """FSDP waits inside an operator of autograd for a collective, the first 10 us of it for the other rank."""
    waiting = Event("FSDP::post_backward_reduce", 50, 80, annotation=True)
    events = [
        Event("aten::mm", 0, 40),
        Event("RegisterPostBackwardFunctionBackward", 45, 85, inside=[waiting]),
        waiting,
        Event("gloo:all_reduce", 60, 80, annotation=True),
    ]
    expected = {"compute": 50, "communication": 20, "exposed communication": 20, "idle": 30}
    assert time_shares(events, 100e-6) == pytest.approx(expected)


def test_shares_leave_out_what_ran_while_the_clock_was_stopped():
    stopped = Event("clock stopped", 40, 140, annotation=True)
    events = [Event("aten::mm", 0, 30), stopped, Event("aten::mm", 50, 130), Event("gloo:all_reduce", 140, 160)]
    expected = {"compute": 30, "communication": 20, "exposed communication": 20, "idle": 50}
    assert time_shares(events, 100e-6) == pytest.approx(expected)


def test_the_memory_record_is_written_when_asked_and_when_memory_runs_out(device, monkeypatch, tmp_path, capfd):
    """There is no GPU here: torch's own recorder is replaced."""

    def fill_disk(path: str) -> None:
        raise OSError(28, "No space left on device", path)

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
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fill_disk)
    dump_memory(tmp_path / "it")
    assert "memory-rank-0.pickle is not written (No space left on device)" in capfd.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Gates


def test_a_missed_gate_is_exit_code_3_with_one_line_that_names_metric_and_gate(arguments, tmp_path):
    gate = words("--num-steps 3 --perf-warmup-steps 1 --peak-tflops 100 --min-mfu 60")
    process = python(*arguments, *gate)
    assert process.returncode == 3
    mfu = metrics_of(tmp_path / "out" / "r")[-1]["mfu_percent"]
    missed = f"acceptance gate missed: --min-mfu 60: the MFU was {mfu:.2f} %"
    assert process.stderr == f"train_fsdp.py: error: {missed}\n"
    assert "done" in process.stdout  # and nothing is lost
    assert json.loads((tmp_path / "out" / "r" / "config.json").read_text())["starts"][0]["exit_code"] == 3


def test_a_gate_is_judged_by_the_metrics_of_the_last_line():
    args = parse(["--min-mfu", "50", "--max-memory-gib", "70"])
    with pytest.raises(UserError) as unmeasured:
        check_gates(args, {})
    assert "the MFU was not measured: no step came after the 10 warmup steps" in str(unmeasured.value)
    assert "peak_memory_reserved was not measured" in str(unmeasured.value) and unmeasured.value.exit_code == 3
    check_gates(args, {"mfu_percent": 50.0, "peak_memory_reserved": 70.0})
    for mfu, memory, gate in ((49.9, 60, "--min-mfu 50"), (51, 70.1, "--max-memory-gib 70")):
        with pytest.raises(UserError, match=gate) as missed:
            check_gates(args, {"mfu_percent": mfu, "peak_memory_reserved": memory})
        assert missed.value.exit_code == 3


def test_what_cannot_be_measured_here_is_refused_before_anything_begins(run):
    for flags, printed in {
        "--min-mfu 40": "--min-mfu: the peak of this device is unknown; give --peak-tflops",
        "--max-memory-gib 4": "--max-memory-gib: memory is measured on GPUs only",
        "--memory-snapshot": "--memory-snapshot: memory is measured on GPUs only",
    }.items():
        with pytest.raises(UserError, match=re.escape(printed)) as refused:
            run("--num-steps", 20, *words(flags))
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
    """`disturbed({step: function})`: a run of 8 steps in which a function is called after a step's log line."""

    def go(happens: dict):
        write = Log.write

        def write_and_disturb(self, metrics, *more):
            write(self, metrics, *more)
            happens.get(metrics["step"], lambda: None)()

        monkeypatch.setattr(Log, "write", write_and_disturb)
        with files_of_at_most(resource.RLIM_INFINITY):
            return train([*arguments, *words("--num-steps 8 --log-interval 1 --no-final-checkpoint")], device)

    go.folder, go.metrics = tmp_path / "out" / "r", tmp_path / "out" / "r" / "metrics.jsonl"
    return go


def steps_in(folder) -> list[int]:
    return [line["step"] for line in metrics_of(folder)]


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_room_again(disturbed, capsys):
    fill = lambda: limit_files(disturbed.metrics.stat().st_size + 100)  # noqa: E731 - in the middle of a line
    assert disturbed({2: fill, 5: lambda: limit_files(resource.RLIM_INFINITY)}) == 0
    assert steps_in(disturbed.folder) == [*range(1, 9), 8]
    reported = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed")]
    assert reported == [
        "failed     metrics.jsonl, from step 3 on: File too large; its lines wait in memory, the run continues"
    ]


def test_lines_that_are_refused_to_the_end_make_the_run_fail(disturbed, capsys):
    with pytest.raises(UserError, match=r"metrics.jsonl could not be written \(File too large\)") as failed:
        disturbed({3: lambda: limit_files(disturbed.metrics.stat().st_size)})
    assert failed.value.exit_code == 1
    assert capsys.readouterr().out.count("failed     metrics.jsonl") == 1
    assert steps_in(disturbed.folder) == [1, 2, 3]


def test_ctrl_c_leaves_the_page(disturbed, monkeypatch):
    monkeypatch.setattr(endings, "ENDING", [])

    def interrupt():  # what the thread that reads signals does before it ends the process
        endings.announce(130, timeout=60)
        pages.append((disturbed.folder / "report.html").read_text())
        endings.ENDING.clear()

    pages = []
    assert disturbed({1: interrupt}) == 0
    assert "ended at step 1 of 8" in pages[0]
    assert json.loads((disturbed.folder / "config.json").read_text())["starts"][0]["exit_code"] == 130
