"""Prometheus: the metrics endpoint of a run, from before the data are read until the process ends."""

import pathlib
import time
from collections.abc import Iterator

import psutil
import torch

from harness import base, flags, job
from harness import state as states
from harness.report.metrics import find_metric
from harness.report.trackers import Tracker

STATES = ("running", "done", "stopped", "failed")
COUNTERS = ("steps", "skipped_steps")  # the others are gauges


class Prometheus(Tracker):
    """The metrics of one run, each with the label `run`; a collector of `prometheus_client`."""

    name = "prometheus"

    def __init__(self, args: flags.Args, folder: pathlib.Path):
        """Listen on --metrics-port."""
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        self.args, self.run, self.run_state = args, folder.name, "running"
        self.state: states.TrainState | None = None
        self.first_step = 0  # of this process
        self.metrics: dict[str, float] = {
            "num_steps": args.num_steps,
            "log_interval_steps": args.log_interval,
            "timeout_seconds": 60 * args.timeout_minutes,
            "start_time_seconds": psutil.Process().create_time(),
        }
        if torch.cuda.is_available():
            self.metrics["gpu_memory_gib"] = torch.cuda.get_device_properties().total_memory / base.GIB
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        host, port = args.metrics_host, args.metrics_port
        try:
            server, _ = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "no such address"
            advice = "choose another port or --metrics-host"
            raise base.UserError(f"--metrics-port: cannot listen on {host}:{port} ({reason}); {advice}") from error
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # such as of a client that hung up

    def start(self, run: dict, state: states.TrainState) -> str:
        self.state, self.first_step = state, state.step
        num_steps, starts = run["flags"]["num_steps"], len(run["starts"])
        self.log({"num_steps": num_steps, "starts": starts, "world_size": run["world_size"]})
        host = f"[{self.args.metrics_host}]" if ":" in self.args.metrics_host else self.args.metrics_host  # IPv6
        return f"http://{host}:{self.args.metrics_port}/metrics"

    def log(self, metrics: dict) -> None:
        self.metrics = self.metrics | metrics  # a new dictionary: a scrape may be reading the old one

    finish = log

    def close(self, exit_code: int) -> None:
        self.run_state = job.describe_exit(exit_code)

    def collect(self) -> Iterator:
        """The current metrics, each with its last logged value."""
        from prometheus_client import Metric

        values = self.metrics | {"steps": self.state.step - self.first_step if self.state else 0}
        metrics: dict[str, Metric] = {}
        for key, value in values.items():
            name, _, source = key.partition("/")
            kind, suffix = ("counter", "_total") if name in COUNTERS else ("gauge", "")
            metric = metrics.setdefault(name, Metric(f"training_{name}", describe(name), kind))
            labels = {"run": self.run} | ({"source": source} if source else {})
            metric.add_sample(f"training_{name}{suffix}", labels, value)
        state = Metric("training_state", ", ".join(STATES), "stateset")
        for name in STATES:
            state.add_sample(state.name, {"run": self.run, state.name: name}, float(name == self.run_state))
        yield from (state, *metrics.values())
        if self.run_state == "running":
            phase = Metric("training_phase_seconds", "time since rank 0 entered this phase", "gauge")
            phase.add_sample(
                phase.name, {"run": self.run, "phase": job.PROGRESS.phase}, time.monotonic() - job.PROGRESS.since
            )
            yield phase


def describe(key: str) -> str:
    """The HELP text of a metric."""
    metric = find_metric(key) or find_metric(f"{key}/SOURCE")
    if metric:
        return f"{metric.description}, {metric.unit}" if metric.unit else metric.description
    return key.replace("_", " ")
