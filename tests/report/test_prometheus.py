"""Prometheus: what it reads of a run from its start to its end, and the alerts, tried by promtool where it is there."""

import concurrent.futures
import contextlib
import re
import shutil
import time
import urllib.request

import pytest
import yaml
from conftest import ROOT, free_port, metrics_of, parse, python, start
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from harness.report.metrics import METRICS, PROMETHEUS_KEYS
from harness.report.prometheus import Prometheus

LAUNCH = ROOT / "launch"
TRIED = ROOT / "tests" / "report" / "prometheus-rules.test.yml"
RULES = yaml.safe_load((LAUNCH / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
ON_A_GPU = {"gpu_memory_gib", *(f"peak_memory_{kind}" for kind in ("active", "alloc", "reserved"))}
FLAGS = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --sample-tokens 2 --perf-warmup-steps 2"

CHECKED = ["check rules prometheus-rules.yml", "check config prometheus.yml"]
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")


def scrape(port: int) -> dict[str, list]:
    """The samples at an endpoint, by the name of their metric; read as Prometheus does."""
    samples: dict[str, list] = {}
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def describe_exit(samples: dict[str, list]) -> str:
    (state,) = [sample.labels["training_state"] for sample in samples["training_state"] if sample.value]
    return state


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """(what each scrape of a run read, the run's folder)."""
    folder, port, scrapes = tmp_path_factory.mktemp("watched"), free_port(), []
    flags = (
        f"{FLAGS} --num-steps 24 --log-interval 4 --eval-interval 12 --eval-steps 2 --metrics-port {port} --run-name it"
    )
    with concurrent.futures.ThreadPoolExecutor() as thread:
        ended = thread.submit(python, *flags.split(), "--output-dir", folder)
        while not ended.done():
            with contextlib.suppress(OSError):
                scrapes.append(scrape(port))
            time.sleep(0.1)
    assert ended.result().returncode == 0
    return scrapes, folder / "it"


def test_a_run_is_seen_from_before_its_first_step_to_its_end_with_the_metrics_of_its_lines(watched):
    scrapes, folder = watched
    states = [describe_exit(samples) for samples in scrapes]
    assert states[0] == "running" and set(states) <= {"running", "done"}
    assert "training_step" not in scrapes[0]
    assert {sample.labels["phase"] for sample in scrapes[0]["training_phase_seconds"]} == {"preparation"}

    last = scrapes[-1]
    beside = ("final", "samples", "skipped_steps")
    logged = [{key: value for key, value in line.items() if key not in beside} for line in metrics_of(folder)]
    newest = [line for line in logged if line["loss"] == last["training_loss"][0].value]
    assert newest and any({key: last[f"training_{key}"][0].value for key in line} == line for line in newest)
    assert last["training_skipped_steps_total"][0].value == 0
    about = {"num_steps": 24, "log_interval_steps": 4, "starts": 1, "world_size": 1, "timeout_seconds": 600}
    assert {key: last[f"training_{key}"][0].value for key in about} == about
    assert last["training_step"][0].value <= last["training_steps_total"][0].value <= 24
    known = {key.partition("/")[0] for key in METRICS} | {*PROMETHEUS_KEYS}  # which no registered metric may have
    names = [name.removeprefix("training_") for name in last if name.startswith("training_")]
    assert {name.removesuffix("_total") for name in names} <= known
    ours = [sample for name, samples in last.items() if name.startswith("training_") for sample in samples]
    assert {sample.labels["run"] for sample in ours} == {"it"}


def test_a_scrape_between_the_end_and_the_exit_sees_how_it_ended(tmp_path):
    port = free_port()
    served = Prometheus(parse(["--metrics-port", port]), tmp_path / "r")
    assert describe_exit(scrape(port)) == "running"
    served.close(143)
    samples = scrape(port)
    assert describe_exit(samples) == "stopped" and "training_phase_seconds" not in samples  # of a run that is over


def test_a_metric_says_what_it_is_and_that_of_a_source_is_behind_a_label(tmp_path):
    served = Prometheus(parse(["--metrics-port", free_port()]), tmp_path / "r")
    served.log({"mfu_percent": 40.0, "new": 3.0, "eval_loss": 2.0, "share/web": 0.5})
    served.log({"eval_loss": 1.0, "eval_loss/web": 2.5, 'eval_loss/a"b\\c\nd': 4.0})
    registry = CollectorRegistry()
    registry.register(served)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE training_eval_loss gauge\n") == 1
    assert f"# HELP training_mfu_percent {METRICS['mfu_percent'].description}, %\n" in text
    samples = {}
    for family in text_string_to_metric_families(text):
        samples[family.name] = [(sample.labels, sample.value) for sample in family.samples]
    run = {"run": "r"}
    web, odd = (run | {"source": source} for source in ("web", 'a"b\\c\nd'))
    assert samples["training_eval_loss"] == [(run, 1.0), (web, 2.5), (odd, 4.0)]
    assert samples["training_share"] == [(web, 0.5)] and samples["training_new"] == [(run, 3.0)]


def test_the_alerts_ask_for_metrics_that_there_are(watched):
    served = {name.removeprefix("training_") for samples in watched[0] for name in samples} | ON_A_GPU
    asked = set(re.findall(r"training_(\w+)", " ".join(str(rule["expr"]) for rule in RULES)))
    assert {"state", "phase_seconds", "step"} <= asked <= served


# ----------------------------------------------------------------------------------------------------------------------
# Alerts


@promtool
def test_each_alert_fires_when_it_must_and_is_silent_otherwise():
    process = start(["promtool", "test", "rules", str(TRIED)])
    assert process.returncode == 0, process.stdout + process.stderr


@promtool
@pytest.mark.parametrize("command", CHECKED)
def test_promtool_finds_nothing_wrong_with(command):
    process = start(["promtool", *command.split()], cwd=LAUNCH)
    assert process.returncode == 0, process.stdout + process.stderr


def test_each_alert_is_tried_and_says_how_urgent_it_is_and_where_it_is_explained():
    tried = re.findall(r'labels: .\{alertname="(\w+)"', TRIED.read_text())
    assert set(tried) == set(ALERTS)
    page = (ROOT / "docs" / "MONITORING.md").read_text()
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["description"].endswith(f" docs/MONITORING.md#{name.lower()}")
        assert f'<a id="{name.lower()}"></a>' in page
