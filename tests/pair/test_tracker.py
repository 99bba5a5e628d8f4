"""MFU, peak TFLOPS and the tracker's clock, in numbers to check by hand."""

import pathlib

import pytest
import torch

import utils
from harness import base
from harness.state.train_state import Checkpoint, TrainState

SMOLLM3_FLOPS = 25_697_452_032  # a token, at 8,192 tokens

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H800": None,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA H20-3e": 148,
    "NVIDIA GB200": 2500,
    "NVIDIA GB300": 2500,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100-SXM-64GB": None,  # it has more multiprocessors
    "NVIDIA A10": 125,
    "NVIDIA L40S": 362,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,  # lower clocks
    "NVIDIA RTX PRO 6000D Blackwell Workstation Edition": None,  # another chip
    "NVIDIA RTX Pro 6000 Blackwell DC-24C": None,
    "NVIDIA A100-1-5CME": None,  # a vGPU of a MIG slice
    "NVIDIA RTX Pro 6000 Blackwell DC-1-24CGFX": None,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 5080": 112.6,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090D": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,  # another chip under the same name
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI350X": 2306.9,
    "AMD Instinct MI250X / MI250": None,  # either of two
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
    "H100": None,
    "Some GPU of 2031": None,
    "": None,
}


def test_peak_of_a_gpu_by_its_drivers_name():
    assert {name: utils.get_gpu_peak_tflops(name) for name in PEAKS} == PEAKS


def test_a_cpu_has_no_peak():
    assert utils.get_gpu_peak_tflops() is None
    assert "mfu_percent" not in utils.estimate_mfu(1e9, 1000, 1.0, 1)


def test_mfu_of_the_published_run():
    """8,415 tokens a second on each of four H100 SXM is 33,660 in all."""
    metrics = utils.estimate_mfu(SMOLLM3_FLOPS, 33_660 * 60, 60.0, 4, peak_tflops=989)
    assert metrics["tokens_per_sec"] == 33_660
    assert metrics["actual_tflops_per_sec"] == pytest.approx(864.976, abs=1e-3)
    assert metrics["theoretical_tflops_total"] == 3956
    assert metrics["mfu_percent"] == pytest.approx(21.865, abs=1e-3)
    one_rank = utils.estimate_mfu(SMOLLM3_FLOPS, 8_415 * 60, 60.0, 4, peak_tflops=989)  # the classic mistake
    assert one_rank["mfu_percent"] == pytest.approx(metrics["mfu_percent"] / 4)


@pytest.mark.parametrize("seconds, gpus", [(0, 1), (-1, 1), (1, 0)])
def test_mfu_of_no_time_or_no_gpu_is_refused(seconds, gpus):
    with pytest.raises(ValueError, match="must be positive"):
        utils.estimate_mfu(1e9, 1000, seconds, gpus, 100)


# ----------------------------------------------------------------------------------------------------------------------
# PerformanceTracker, with a clock that moves only when the test says so

TOKENS, FLOPS = 4000, 1e9


def test_a_step_returns_nothing_in_warmup_then_that_it_is_over_then_metrics(clock):
    tracker = utils.PerformanceTracker(warmup_steps=3)
    seen = []
    for _ in range(5):
        clock.advance(0.5)
        seen.append(tracker.step(TOKENS, FLOPS))
    assert seen[:3] == [{}, {}, {"warmup_completed": True}]
    assert all(metrics["tokens_per_sec"] == pytest.approx(8000) for metrics in seen[3:])
    assert not any("warmup_completed" in metrics for metrics in seen[3:])


def test_an_interval_has_its_own_steps_and_the_summary_all_after_the_warmup(clock):
    tracker = utils.PerformanceTracker(warmup_steps=2)
    for seconds in (100, 100, 1, 4):
        clock.advance(seconds)
        metrics = tracker.step(TOKENS, FLOPS)
    assert metrics["step_time_ms"] == pytest.approx(4000)
    assert tracker.summary()["step_time_ms"] == pytest.approx(2500)
    tracker.reset()
    assert tracker.summary() == {} == tracker.step(TOKENS, FLOPS)  # the warmup begins again


def test_number_of_gpus_divides_once(clock):
    tracker = utils.PerformanceTracker(warmup_steps=0, num_gpus=4, peak_tflops=1)
    clock.advance(2)
    metrics = tracker.step(TOKENS, FLOPS)
    expected = {
        "tokens_per_sec": 2000,
        "tokens_per_sec_per_gpu": 500,
        "steps_per_sec": 0.5,
        "step_time_ms": 2000,
        "data_wait_percent": 0,
        "actual_tflops_per_sec": 2,
        "theoretical_tflops_total": 4,
        "mfu_percent": 50,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_steps_that_are_only_counted_join_the_interval_that_the_next_one_closes(clock):
    tracker = utils.PerformanceTracker(warmup_steps=1)
    tracker.step(TOKENS, FLOPS)
    for synchronize in (False, False, True):
        clock.advance(1)
        metrics = tracker.step(TOKENS, FLOPS, synchronize=synchronize)
        assert bool(metrics) == synchronize
    assert metrics["tokens_per_sec"] == pytest.approx(TOKENS)
    assert metrics["step_time_ms"] == pytest.approx(1000)


def test_steps_of_different_sizes_are_weighted_by_their_tokens(clock):
    tracker = utils.PerformanceTracker(warmup_steps=0, peak_tflops=1)
    clock.advance(1)
    tracker.step(1000, 1e9)
    clock.advance(1)
    tracker.step(3000, 2e9)
    assert tracker.summary()["actual_tflops_per_sec"] == pytest.approx((1000 * 1e9 + 3000 * 2e9) / 2 / 1e12)


def test_waiting_for_data_is_a_share_of_the_interval(clock):
    tracker = utils.PerformanceTracker(warmup_steps=1)
    for waited in (0.9, 0.25):
        with tracker.data_wait():
            clock.advance(waited)
        clock.advance(1 - waited)
        metrics = tracker.step(TOKENS, FLOPS)
    assert metrics["data_wait_percent"] == pytest.approx(25)


def test_the_message_has_the_global_speed_and_mfu_and_is_empty_in_warmup(clock):
    tracker = utils.PerformanceTracker(warmup_steps=1, num_gpus=2, peak_tflops=1)
    assert tracker.get_print_message(tracker.step(TOKENS, FLOPS)) == ""
    assert tracker.get_print_message({}) == ""
    clock.advance(4)
    message = tracker.get_print_message(tracker.step(TOKENS, FLOPS))
    assert "1,000 tok/s" in message
    assert "MFU 50.0 %" in message
    assert "\n" not in message


def test_time_in_which_a_run_paused_is_not_productive(clock):
    tracker = utils.PerformanceTracker(warmup_steps=2)
    for seconds in (30, 1, 1, 1, 21, 1):  # compilation in the first, and a rank that was stopped for 20 s
        clock.advance(seconds)
        tracker.step(TOKENS, FLOPS)
    assert tracker.summary()["step_time_ms"] == pytest.approx(6000)
    state = TrainState(None, tracker=tracker)
    assert state.productive_seconds() == pytest.approx(6)
    state.productive_before = 100
    assert state.productive_seconds() == pytest.approx(106)


def test_steps_since_the_last_log_line_are_productive(clock):
    """A run that is stopped between two lines saves their seconds."""
    tracker = utils.PerformanceTracker(warmup_steps=1)
    for synchronize in (True, True, False, False):
        clock.advance(1)
        tracker.step(TOKENS, FLOPS, synchronize)
    with tracker.paused():
        clock.advance(50)
        assert TrainState(None, tracker=tracker).productive_seconds() == pytest.approx(4)


def test_a_checkpoint_has_the_wait_for_data_of_the_worst_rank(monkeypatch):
    state = TrainState(None, tracker=utils.PerformanceTracker())
    other_rank = state.tracker.total | {"data_wait": 2.0}
    monkeypatch.setattr(base, "all_gather_objects", lambda mine: [mine, other_rank if "data_wait" in mine else mine])
    assert state.counters()["totals"]["data_wait"] == 2


@pytest.mark.parametrize("saved_on, tokens", [((1, None), 7.0), ((2, None), 0.0), ((1, "NVIDIA H100 80GB HBM3"), 0.0)])
def test_averages_go_on_over_a_resume_on_as_many_gpus_of_the_same_kind(device, monkeypatch, saved_on, tokens):
    monkeypatch.setattr(TrainState, "load_tensors", lambda self, path: None)
    state = TrainState(None, tracker=utils.PerformanceTracker())
    manifest = dict(zip(("world_size", "gpu"), saved_on, strict=True), totals={"tokens": 7.0})
    state.load(Checkpoint(pathlib.Path(), manifest))
    assert state.tracker.total["tokens"] == tokens


def test_slow_steps_after_a_quick_warmup_make_no_more_productive_time_than_there_was(clock):
    tracker = utils.PerformanceTracker(warmup_steps=10)
    for seconds in [0.1] * 10 + [0.5, 0.5]:  # 12 steps, the last of which a busy machine held up
        clock.advance(seconds)
        tracker.step(TOKENS, FLOPS)
    assert TrainState(None, tracker=tracker).productive_seconds() == pytest.approx(2)


def test_on_a_gpu_a_step_has_the_allocators_peaks_and_the_message_shows_them(clock, monkeypatch):
    peaks_gib = {"active": 3, "allocated": 2, "reserved": 4}
    stats = {f"{kind}_bytes.all.peak": gib * 2**30 for kind, gib in peaks_gib.items()}
    answers = {"is_available": True, "is_initialized": True, "synchronize": None, "memory_stats": stats}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    tracker = utils.PerformanceTracker(warmup_steps=1, peak_tflops=100)
    assert tracker.step(TOKENS, FLOPS) == {"warmup_completed": True}
    clock.advance(1)
    metrics = tracker.step(TOKENS, FLOPS)
    assert [metrics[f"peak_memory_{kind}"] for kind in ("active", "alloc", "reserved")] == [3, 2, 4]
    assert "3.0 GiB active, 2.0 allocated, 4.0 reserved" in tracker.get_print_message(metrics)
