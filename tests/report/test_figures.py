"""Figures: each is a row of the table, and the trackers and Prometheus show it by that row."""

import shutil
import subprocess

import pytest
import torch
from conftest import parse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import utils
from harness.report.figures import FIGURES, memory_figures
from harness.report.prometheus import Prometheus
from harness.report.trackers import named, over_tokens


def test_a_row_is_told_from_every_other_and_its_words_fit_a_table_and_a_help_text():
    assert len({figure.name for figure in FIGURES.values()}) == len(FIGURES)
    for key, figure in FIGURES.items():
        assert figure.words and "|" not in figure.words
        assert (figure.name == "") == (key == "step") and figure.name.endswith("/SOURCE") == key.endswith("/SOURCE")


SPEC = """step loss router_loss expert_load_max eval_loss grad_norm learning_rate tokens_seen tokens_per_sec
tokens_per_sec_per_gpu steps_per_sec step_time_ms slowest_rank_ms data_wait_percent mfu_percent actual_tflops_per_sec
theoretical_tflops_total peak_memory_active peak_memory_alloc peak_memory_reserved goodput_percent"""


def test_every_promised_key_and_every_figure_of_a_tracker_has_its_row(device):
    tracker = utils.PerformanceTracker(warmup_steps=0, num_gpus=2, peak_tflops=100)
    keys = {*SPEC.split(), *tracker.step(4000, 1e9), *tracker.summary()}
    assert keys <= FIGURES.keys()


def test_a_figure_has_the_name_of_its_row_and_of_its_source_and_one_without_a_row_is_shown_too():
    line = {"step": 3, "loss": 1.5, "eval_loss/web": 2.0, "share/web": 0.5, "new": 2, "new/web": 4, "final": True}
    assert named(line) == {
        "train/loss": 1.5,
        "eval/loss/web": 2.0,
        "data/share/web": 0.5,
        "other/new": 2,
        "other/new/web": 4,
    }
    assert over_tokens(line) == {"by_tokens/loss": 1.5, "by_tokens/eval_loss/web": 2.0}


def test_memory_is_that_of_torchs_allocator_at_its_peak(monkeypatch):
    stats = {"active_bytes": 3 * 2**30, "allocated_bytes": 2 * 2**30, "reserved_bytes": 4 * 2**30}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {f"{key}.all.peak": size for key, size in stats.items()})
    peaks = memory_figures(torch.device("cuda"))
    assert peaks == {"peak_memory_active": 3.0, "peak_memory_alloc": 2.0, "peak_memory_reserved": 4.0}


# ----------------------------------------------------------------------------------------------------------------------
# Prometheus


@pytest.fixture
def served(monkeypatch, tmp_path):
    """An endpoint that nobody listens to."""
    import prometheus_client

    monkeypatch.setattr(prometheus_client, "start_http_server", lambda *_: (type("Server", (), {}), None))
    return Prometheus(parse(["--metrics-port", "28500"]), tmp_path / "r")


def test_prometheus_tells_what_a_figure_is_and_has_that_of_a_source_behind_a_label(served):
    served.log({"mfu_percent": 40.0, "new": 3.0, "eval_loss": 2.0, "loss": 1.5, "share/web": 0.5})
    served.log({"eval_loss": 1.0, "eval_loss/web": 2.5, 'eval_loss/a"b\\c\nd': 4.0})
    registry = CollectorRegistry()
    registry.register(served)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE training_eval_loss gauge\n") == 1
    assert f"# HELP training_mfu_percent {FIGURES['mfu_percent'].words}, %\n" in text
    samples = {}
    for family in text_string_to_metric_families(text):
        samples[family.name] = [(sample.labels, sample.value) for sample in family.samples]
    run = {"run": "r"}
    assert samples["training_eval_loss"] == [
        (run, 1.0),
        (run | {"source": "web"}, 2.5),
        (run | {"source": 'a"b\\c\nd'}, 4.0),
    ]
    assert samples["training_share"] == [(run | {"source": "web"}, 0.5)] and samples["training_new"] == [(run, 3.0)]
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        ours = [line for line in checked.stderr.splitlines() if "training_" in line]
        assert checked.returncode in (0, 3) and ours == []
