"""Prometheus: the endpoint that a Prometheus scrapes, from before the data are read until the process ends."""

import pathlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from harness import base, flags, job
from harness import state as states
from harness.report.figures import find
from harness.report.trackers import Tracker

HELP_OF_RUN = {  # of the metrics that are no keys of metrics.jsonl
    "num_steps": "optimizer steps that the run is to take, by --num-steps",
    "log_interval_steps": "optimizer steps from one log line to the next, by --log-interval",
    "timeout_seconds": "time after which a stalled run ends itself, by --timeout-minutes",
    "start_time_seconds": "when this process began, in seconds since 1970",
    "gpu_memory_gib": "memory of rank 0's GPU, GiB",
    "starts": "starts of the run, this one included",
    "world_size": "number of ranks",
}
COUNTERS = ("skipped_steps",)  # figures that only grow; the others are gauges
STATES = ("running", "done", "stopped", "failed")


class Prometheus(Tracker):
    """The metrics of one run, each with the label `run`; a collector of `prometheus_client`."""

    name = "prometheus"

    def __init__(self, settings: flags.Settings, folder: pathlib.Path):
        """Listens on --metrics-port."""
        try:
            from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
        except ImportError as error:
            advice = "pip install prometheus_client"
            raise base.UserError(f"--metrics-port: needs the package prometheus_client; {advice}") from error

        self.settings, self.run = settings, folder.name
        self.running = "running"
        self.progress: tuple[states.TrainState, int] | None = (
            None  # the state and the step with which this process began
        )
        self.figures: dict[str, float] = {
            "num_steps": settings.num_steps,
            "log_interval_steps": settings.log_interval,
            "timeout_seconds": 60 * settings.timeout_minutes,
            "start_time_seconds": psutil.Process().create_time(),
        }
        if torch.cuda.is_available():
            self.figures["gpu_memory_gib"] = torch.cuda.get_device_properties().total_memory / base.GIB
        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=registry)
        registry.register(self)
        host, port = settings.metrics_host, settings.metrics_port
        try:
            server, _ = start_http_server(port, host, registry)
        except (socket.gaierror, UnicodeError) as error:
            raise base.UserError(
                f"--metrics-host {host}: no such address; 0.0.0.0 listens on all of this host"
            ) from error
        except OSError as error:
            where = f"{host}:{port} ({error.strerror})"
            raise base.UserError(f"--metrics-port: cannot listen on {where}; choose another") from error
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client hung up

    def start(self, run: dict, state: states.TrainState) -> str:
        self.progress = state, state.step
        num_steps, starts = run["flags"]["num_steps"], len(run["starts"])
        self.show({"num_steps": num_steps, "starts": starts, "world_size": run["world_size"]})
        return f"http://{self.settings.metrics_host}:{self.settings.metrics_port}/metrics"

    def show(self, metrics: dict[str, float]) -> None:
        self.figures = self.figures | metrics  # a new dictionary: a scrape may be reading the old one

    def log(self, metrics: dict[str, Any], stories: list[dict[str, str]]) -> None:
        self.show(metrics)

    def finish(self, metrics: dict[str, Any], stories: list[dict[str, str]]) -> None:
        self.show(metrics)

    def close(self, exit_code: int) -> None:
        self.running = job.state_of(exit_code)

    def collect(self) -> Iterator:
        """The metrics as they are now; a figure is that of the last log line that had it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, StateSetMetricFamily

        def labelled(family, value, **labels: str):
            family.add_metric([self.run, *labels.values()], value)
            return family

        labels, here = ["run"], job.HERE
        states = StateSetMetricFamily("training_state", "running, done, stopped or failed", labels=labels)
        yield labelled(states, {name: name == self.running for name in STATES})
        steps = CounterMetricFamily("training_steps", "optimizer steps since this process began", labels=labels)
        yield labelled(steps, self.progress[0].step - self.progress[1] if self.progress else 0)
        if self.running == "running":
            words = "time that rank 0 has been in this part of a step, or of what surrounds the steps"
            phase = GaugeMetricFamily("training_phase_seconds", words, labels=["run", "phase"])
            yield labelled(phase, time.monotonic() - here.since, phase=here.phase)
        gauges = {}
        for key, value in self.figures.items():
            if key in COUNTERS:
                yield labelled(CounterMetricFamily(f"training_{key}", describe(key), labels=labels), value)
                continue
            name, _, source = key.partition("/")
            if name not in gauges:
                gauges[name] = GaugeMetricFamily(f"training_{name}", describe(name))
            of_source = {"source": source} if source else {}
            gauges[name].add_sample(f"training_{name}", {"run": self.run} | of_source, value)
        yield from gauges.values()


def describe(key: str) -> str:
    """The HELP of a figure."""
    figure = find(key) or find(f"{key}/SOURCE")
    if figure:
        return f"{figure.words}, {figure.unit}" if figure.unit else figure.words
    return HELP_OF_RUN.get(key, key)
