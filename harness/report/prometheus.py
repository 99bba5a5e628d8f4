"""Endpoint: what Prometheus scrapes of a run, from before its data are read until its end was scraped. The script opens
it on rank 0, the report gives it figures, `endings` calls it at the end. Independent of how a figure is computed and of
the alerts."""

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from wsgiref.simple_server import WSGIServer

import psutil
import torch

from harness import job
from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.flags.settings import Settings
from harness.report.figure_list import find_figure, split_source

HELP_OF_RUN = {  # HELP of the figures that are not keys of metrics.jsonl
    "num_steps": "optimizer steps that the run is to take, by --num-steps",
    "log_interval_steps": "optimizer steps from one log line to the next, by --log-interval",
    "timeout_seconds": "time after which a stalled run ends itself, by --timeout-minutes",
    "start_time_seconds": "when this process began, in seconds since 1970",
    "gpu_memory_gib": "memory of rank 0's GPU, GiB",
    "starts": "starts of the run, this one included",
    "world_size": "number of ranks",
}
COUNTERS = ("skipped_steps",)  # figures that only grow; the others are gauges
RUNNING = "running"
STATES = (RUNNING, "done", "stopped", "failed")
# seconds that the end waits for the last scrape, by exit code; after SIGTERM a scheduler kills 30 s later
LAST_SCRAPE_SECONDS = {0: 60.0, 143: 20.0, 130: 2.0}
FAILED_SECONDS = 4.0  # of any other exit code; every rank of a failed job is down within 10
MIN_ANNOUNCED_SECONDS = 20.0  # a shorter wait is not worth a line on the console
GONE_SECONDS = 150.0  # without a scrape, after which no more is expected; Prometheus scrapes every 60 by default
SCRAPER_HEADER = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"  # of Prometheus and programs compatible with it


class Endpoint:
    """The metrics of one run, each with the label `run`; a collector of `prometheus_client`.

    Without a port it takes the figures and serves them to nobody.
    """

    def __init__(self, settings: Settings, folder: pathlib.Path):
        self.settings, self.run = settings, folder.name
        self.state = RUNNING
        self.steps = 0  # that this process took
        self.figures: dict[str, float] = {}
        self.labels: dict[str, str] = {}
        self.visitors: set[tuple[str, str]] = set()  # (address, program) of every client
        self.scrapers: dict[tuple[str, str], float] = {}  # when the last scrape of each regular visitor began
        self.scraped = threading.Condition()

    def open(self) -> None:
        """Listens, if --metrics-port is given.

        Raises:
            UserError: `prometheus_client` is not installed, or nothing can listen there.
        """
        host, port = self.settings.metrics_host, self.settings.metrics_port
        if not port:
            return
        if not find_spec("prometheus_client"):
            raise UserError("--metrics-port: needs the package prometheus_client (pip install prometheus_client)")
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=registry)
        self.figures = {
            "num_steps": self.settings.num_steps,
            "log_interval_steps": self.settings.log_interval,
            "timeout_seconds": 60 * self.settings.timeout_minutes,
            "start_time_seconds": psutil.Process().create_time(),
        }
        if torch.cuda.is_available():
            self.figures["gpu_memory_gib"] = torch.cuda.get_device_properties().total_memory / GIB
        registry.register(self)
        try:
            server, _ = start_http_server(port, host, registry)
        except (socket.gaierror, UnicodeError) as error:
            raise UserError(f"--metrics-host {host}: no such address; 0.0.0.0 listens on all of this host") from error
        except OSError as error:
            where = f"{host}:{port} ({error.strerror})"
            raise UserError(f"--metrics-port: cannot listen on {where}; choose another") from error
        self.watch(server)
        job.at_exit(self.end)

    def watch(self, server: WSGIServer) -> None:
        """Remembers the scrapers; a scrape counts when its answer was sent. A client that comes for the first time and
        does not send the header of a scraper may be a person."""
        answer = server.get_app()

        def application(environ, start_response) -> Iterator[bytes]:
            began = time.monotonic()
            yield from answer(environ, start_response)
            visitor = environ["REMOTE_ADDR"], environ.get("HTTP_USER_AGENT", "")
            with self.scraped:
                if SCRAPER_HEADER in environ or visitor in self.visitors:
                    self.scrapers[visitor] = began
                self.visitors.add(visitor)
                self.scraped.notify_all()

        server.set_app(application)
        server.handle_error = lambda *_: None  # a client hung up

    def identify(self, run: dict) -> None:
        """Shows the run and this start as config.json has them."""
        self.show({"starts": len(run["starts"]), "world_size": run["world_size"]})
        labels = {"model": self.settings.model, "dataset": self.settings.describe_dataset()}
        labels["torch"] = run["versions"]["torch"]
        labels |= {key: run[key] for key in ("run_id", "commit", "gpu", "world_size")}
        self.labels = {key: str(value or "") for key, value in labels.items()}

    def show(self, metrics: dict[str, float]) -> None:
        """Takes the figures of a log line, or others."""
        self.figures = self.figures | metrics  # a new dictionary: a scrape may be reading the old one

    def collect(self) -> Iterator:
        """The metrics as they are now; a figure is that of the last log line that had it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, StateSetMetricFamily

        def labelled(family, value, **labels: str):
            family.add_metric([self.run, *labels.values()], value)
            return family

        state, phase_now, labels = self.state, job.HERE, ["run"]
        of_states = StateSetMetricFamily("training_state", "running, done, stopped or failed", labels=labels)
        yield labelled(of_states, {name: name == state for name in STATES})
        done = CounterMetricFamily("training_steps", "optimizer steps since this process began", labels=labels)
        yield labelled(done, self.steps)
        if state == RUNNING:
            words = "time that rank 0 has been in this part of a step, or of what surrounds the steps"
            phase = GaugeMetricFamily("training_phase_seconds", words, labels=["run", "phase"])
            yield labelled(phase, time.monotonic() - phase_now.since, phase=phase_now.phase)
        if self.labels:
            info = GaugeMetricFamily("training_info", "what runs; always 1", labels=["run", *self.labels])
            yield labelled(info, 1, **self.labels)
        gauges = {}
        for key, value in self.figures.items():
            if key in COUNTERS:
                yield labelled(CounterMetricFamily(f"training_{key}", describe(key), labels=labels), value)
                continue
            name, source = split_source(key)
            if name not in gauges:
                gauges[name] = GaugeMetricFamily(f"training_{name}", describe(key))
            of = {"source": source} if source else {}
            gauges[name].add_sample(f"training_{name}", {"run": self.run} | of, value)
        yield from gauges.values()

    def end(self, exit_code: int) -> None:
        """Shows how the run ended until every scraper has read that, `LAST_SCRAPE_SECONDS` at most. A scraper that has
        not come for `GONE_SECONDS` is not waited for."""
        self.state = job.state_of(exit_code)
        ended = time.monotonic()
        longest = LAST_SCRAPE_SECONDS.get(exit_code, FAILED_SECONDS)
        with self.scraped:
            expected = [scraper for scraper, last in self.scrapers.items() if ended - last < GONE_SECONDS]
            if expected and longest >= MIN_ANNOUNCED_SECONDS:
                with contextlib.suppress(OSError):  # nobody reads the console any more
                    print(f"metrics    until Prometheus has read the end, {longest:.0f} s at most", flush=True)
            while any(self.scrapers[scraper] < ended for scraper in expected):
                left = ended + longest - time.monotonic()
                if left <= 0:
                    return
                self.scraped.wait(left)


def describe(key: str) -> str:
    """The HELP of a figure."""
    figure = find_figure(key)
    if figure:
        return f"{figure.words}, {figure.unit}" if figure.unit else figure.words
    return HELP_OF_RUN.get(key, key)
