"""Prometheus: what it reads of a run from its start to its end, whom a run waits for at its end, and the alerts.
Rules are tried by promtool and queries by a Prometheus, where these are installed."""

import contextlib
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
import urllib.request

import pytest
import yaml
from conftest import PROGRAM, ROOT, metrics_of, parse, start
from prometheus_client.parser import text_string_to_metric_families

from harness.job import endings
from harness.report import prometheus as prometheus_module
from harness.report.prometheus import Endpoint

LAUNCH = ROOT / "launch"
RULES = yaml.safe_load((LAUNCH / "prometheus-rules.yml").read_text())["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
ON_A_GPU = {"mfu_percent", "gpu_memory_gib", *(f"peak_memory_{kind}" for kind in ("active", "alloc", "reserved"))}
FLAGS = "--demo --sequence-length 32 --batch-size 2 --num-workers 0 --sample-tokens 2 --perf-warmup-steps 2"
SCRAPE = {"X-Prometheus-Scrape-Timeout-Seconds": "10"}

CHECKED = ["check rules prometheus-rules.yml", *(f"check config prometheus{kind}.yml" for kind in ("", "-cluster"))]
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus (Debian: prometheus)")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fetch(url: str, headers: dict | None = None) -> str:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10).read().decode()


def scrape(port: int) -> dict[str, list]:
    """The samples at an endpoint, by the name of their metric; read as Prometheus does."""
    text = fetch(f"http://127.0.0.1:{port}/metrics", SCRAPE)
    samples: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def state_of(samples: dict[str, list]) -> str:
    (state,) = [sample.labels["training_state"] for sample in samples["training_state"] if sample.value]
    return state


@contextlib.contextmanager
def serving(port: int, folder: pathlib.Path):
    """A Prometheus that scrapes a port every second and goes by the rules; its address, or None where there is none."""
    if not shutil.which("prometheus"):
        yield None
        return
    own = free_port()
    config = yaml.safe_load((LAUNCH / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(LAUNCH / "prometheus-rules.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        command = ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{own}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{own}/api/v1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run that was scraped, twice a second here and by a Prometheus where there is one: what each scrape read, its
    files, its output, Prometheus' address and when it ran."""
    folder, port, scrapes = tmp_path_factory.mktemp("watched"), free_port(), []
    flags = f"{FLAGS} --num-steps 24 --log-interval 4 --eval-interval 12 --metrics-port {port} --run-name it"
    command = [sys.executable, PROGRAM, *flags.split(), "--output-dir", folder]
    with serving(port, folder) as address:
        begun = time.time()
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    scrapes.append(scrape(port))
                time.sleep(0.5 if scrapes else 0.02)  # the first one comes in the short time before the first step
        finally:
            process.kill()
        output = process.communicate()[0]
        assert process.returncode == 0, output
        yield types.SimpleNamespace(
            scrapes=scrapes, folder=folder / "it", output=output, address=address, span=(begun, time.time())
        )


def test_a_run_is_seen_before_its_first_step_and_until_its_end(watched):
    states = [state_of(samples) for samples in watched.scrapes]
    assert (states[0], states[-1]) == ("running", "done")
    assert "training_step" not in watched.scrapes[0]
    assert {sample.labels["phase"] for sample in watched.scrapes[0]["training_phase_seconds"]} == {"preparation"}
    assert "training_phase_seconds" not in watched.scrapes[-1]  # of a run that is over none is too long


def test_the_last_scrape_has_the_figures_of_the_last_line_and_what_runs(watched):
    last, names = watched.scrapes[-1], {"final", "samples"}
    final = {key: value for key, value in metrics_of(watched.folder)[-1].items() if key not in names}
    assert final.pop("skipped_steps") == last["training_skipped_steps_total"][0].value == 0
    assert {key: last[f"training_{key}"][0].value for key in final} == final
    config = json.loads((watched.folder / "config.json").read_text())
    (info,) = last["training_info"]
    assert info.labels["run_id"] == config["run_id"] and info.labels["commit"] == config["commit"]
    about = {"num_steps": 24, "log_interval_steps": 4, "starts": 1, "world_size": 1, "timeout_seconds": 600}
    assert {key: last[f"training_{key}"][0].value for key in about} == about
    assert last["training_steps_total"][0].value == 24
    assert last["training_start_time_seconds"][0].value == pytest.approx(
        last["process_start_time_seconds"][0].value, abs=1
    )
    ours = [sample for name, samples in last.items() if name.startswith("training_") for sample in samples]
    assert {sample.labels["run"] for sample in ours} == {"it"}


def ask(address: str, path: str, **parameters):
    answer = json.loads(fetch(f"{address}/{path}?{urllib.parse.urlencode(parameters)}"))
    assert answer["status"] == "success"
    return answer["data"]


@prometheus
def test_prometheus_saw_the_run_going_on_and_its_end_and_fired_nothing(watched):
    for state in ("running", "done"):
        query = f'max_over_time(training_state{{training_state="{state}"}}[10m])'
        (series,) = ask(watched.address, "query", query=query)["result"]
        assert series["value"][1] == "1"
    (loss,) = ask(watched.address, "query", query="last_over_time(training_loss[10m])")["result"]
    assert float(loss["value"][1]) == metrics_of(watched.folder)[-1]["loss"]
    assert loss["metric"]["run"] == "it"
    assert ask(watched.address, "query", query='max_over_time(ALERTS{alertstate="firing"}[10m])')["result"] == []
    rules = [rule for group in ask(watched.address, "rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES) and {rule["health"] for rule in rules} == {"ok"}


def test_the_alerts_ask_for_metrics_that_there_are(watched):
    served = {name.removeprefix("training_") for samples in watched.scrapes for name in samples} | ON_A_GPU
    text = " ".join(str(rule["expr"]) for rule in RULES)
    asked = set(re.findall(r"training_(\w+)", text))
    assert {"state", "phase_seconds", "loss"} <= asked <= served


# ----------------------------------------------------------------------------------------------------------------------
# The end


class WaitError(Exception):
    """The endpoint would have waited."""


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """An endpoint that raises `WaitError` where it would begin to wait."""
    served = Endpoint(parse(["--metrics-port", 28500]), tmp_path / "r")

    def wait(seconds):
        raise WaitError(seconds)

    monkeypatch.setattr(served.scraped, "wait", wait)
    return served


def scraped(served: Endpoint, ago: float) -> None:
    served.scrapers["10.0.0.1", "Prometheus"] = time.monotonic() - ago


@pytest.mark.parametrize("exit_code", [0, 1, 3, 130, 143])
def test_a_run_that_nobody_scraped_ends_at_once(ending, exit_code):
    ending.end(exit_code)
    assert ending.state == endings.state_of(exit_code)


@pytest.mark.parametrize(
    "exit_code, ago, waits",
    [
        (0, 5, 60),
        (0, 100, 60),
        (0, 200, 0),  # it has gone
        (143, 5, 20),
        (1, 12, 4),
        (3, 12, 4),
        (130, 5, 2),
        (130, 200, 0),
    ],
)
def test_who_scrapes_is_awaited_unless_it_has_gone(ending, exit_code, ago, waits, capsys):
    scraped(ending, ago)
    if waits:
        with pytest.raises(WaitError) as waited:
            ending.end(exit_code)
        assert waits / 2 < waited.value.args[0] <= waits  # some of it is over already
    else:
        ending.end(exit_code)
    line = f"metrics    until Prometheus has read the end, {waits} s at most\n" if waits > 15 else ""
    assert capsys.readouterr().out == line


def test_nobody_is_awaited_for_longer_than_the_patience(tmp_path, monkeypatch):
    monkeypatch.setitem(prometheus_module.LAST_SCRAPE_SECONDS, 130, 0.3)
    served = Endpoint(parse(["--metrics-port", 28500]), tmp_path / "r")
    scraped(served, 1)
    began = time.monotonic()
    served.end(130)
    assert time.monotonic() - began >= 0.3


def test_the_end_is_over_as_soon_as_it_was_read_by_all_who_scrape(tmp_path, monkeypatch):
    monkeypatch.setattr(endings, "LISTENERS", [])
    port = free_port()
    served = Endpoint(parse(["--metrics-port", port]), tmp_path / "r")
    served.open()
    first, second = (SCRAPE | {"User-Agent": name} for name in ("first", "second"))
    url = f"http://127.0.0.1:{port}/metrics"
    third = {"User-Agent": "an agent that comes twice"}
    for reader in (first, second, third, third):
        fetch(url, reader)
    fetch(url)  # a person
    assert endings.LISTENERS.count(served.end) == 1 and len(served.scrapers) == 3
    ending = threading.Thread(target=served.end, args=(0,), daemon=True)
    ending.start()
    while served.state == "running":
        time.sleep(0.01)
    for reader in (None, first, third):
        assert 'training_state{run="r",training_state="done"} 1.0' in fetch(url, reader)
        assert ending.is_alive()
    fetch(url, second)
    ending.join(300)
    assert not ending.is_alive()


# ----------------------------------------------------------------------------------------------------------------------
# Alerts


@promtool
def test_each_alert_fires_when_it_must_and_is_silent_otherwise():
    process = start(["promtool", "test", "rules", "prometheus-rules.test.yml"], cwd=LAUNCH)
    assert process.returncode == 0, process.stdout + process.stderr


@promtool
@pytest.mark.parametrize("command", CHECKED)
def test_promtool_finds_nothing_wrong_with(command):
    process = start(["promtool", *command.split()], cwd=LAUNCH)
    assert process.returncode == 0, process.stdout + process.stderr


def test_each_alert_is_tried_firing_and_silent_says_how_urgent_it_is_and_has_its_paragraph():
    tests = yaml.safe_load((LAUNCH / "prometheus-rules.test.yml").read_text())["tests"]
    tried = [(case["alertname"], bool(case.get("exp_alerts"))) for test in tests for case in test["alert_rule_test"]]
    assert set(tried) == {(name, fires) for name in ALERTS for fires in (True, False)}
    page = (ROOT / "docs" / "MONITORING.md").read_text()
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["description"].endswith(f" docs/MONITORING.md#{name.lower()}")
        assert f"\n### {name}\n" in page
