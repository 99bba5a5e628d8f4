"""Endpoint: what Prometheus reads of a run, from before its data are read until its end was seen. Opened by the script
on rank 0, given figures by the report, told of the end by `endings`. It does not know how a figure comes about or who
is alerted by it."""

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

from harness.base.devices import GIB
from harness.base.errors import UserError
from harness.flags.settings import Settings
from harness.job import endings, heartbeats
from harness.report.figure_list import BY_KEY

OF_THE_RUN = {  # figures that are no keys of metrics.jsonl, as HELP tells what they are
    "num_steps": "optimizer steps that the run is to take, by --num-steps",
    "log_interval_steps": "optimizer steps from one log line to the next, by --log-interval",
    "timeout_seconds": "time after which a stalled run ends itself, by --timeout-minutes",
    "start_time_seconds": "when this process began, in seconds since 1970",
    "gpu_memory_gib": "memory of rank 0's GPU, GiB",
    "starts": "starts of the run, this one included",
    "world_size": "number of ranks",
}
STATES = ("running", "done", "stopped", "failed")
PATIENCE = {0: 60.0, 143: 20.0, 130: 2.0}  # seconds by exit code; after SIGTERM a scheduler kills 30 s later
FAILED_PATIENCE = 4.0  # seconds; every rank of a failed job is down within 10
GONE_AFTER = 150.0  # seconds without a scrape; Prometheus comes every 60 unless told otherwise
SCRAPER = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"  # a header of Prometheus and its kin


class Endpoint:
    """The metrics of one run, each with the label `run`; a collector of `prometheus_client`.

    Without a port it takes what it is told and shows it to nobody.
    """

    def __init__(self, settings: Settings, folder: pathlib.Path):
        self.settings, self.run, self.state, self.steps = settings, folder.name, STATES[0], 0
        self.figures: dict[str, float] = {}
        self.labels: dict[str, str] = {}
        self.visitors: set[tuple[str, str]] = set()  # (address, program) of whoever looked
        self.scrapers: dict[tuple[str, str], float] = {}  # when the last scrape of each regular visitor began
        self.scraped = threading.Condition()

    def open(self) -> None:
        """Listens, if a port is wanted.

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
        endings.LISTENERS.append(self.end)

    def watch(self, server: WSGIServer) -> None:
        """Remembers who scrapes; a scrape counts when its answer was sent. Whoever comes for the first time and does
        not say that it is a scraper may be a person."""
        answer = server.get_app()

        def application(environ, start_response) -> Iterator[bytes]:
            began = time.monotonic()
            yield from answer(environ, start_response)
            visitor = environ["REMOTE_ADDR"], environ.get("HTTP_USER_AGENT", "")
            with self.scraped:
                if SCRAPER in environ or visitor in self.visitors:
                    self.scrapers[visitor] = began
                self.visitors.add(visitor)
                self.scraped.notify_all()

        server.set_app(application)
        server.handle_error = lambda *_: None  # somebody hung up

    def identify(self, run: dict) -> None:
        """What stands in config.json about this start, once it is known."""
        self.show({"starts": len(run["starts"]), "world_size": run["world_size"]})
        labels = {"model": self.settings.model, "dataset": self.settings.dataset, "torch": run["versions"]["torch"]}
        labels |= {key: run[key] for key in ("run_id", "commit", "gpu", "world_size")}
        self.labels = {key: str(value or "") for key, value in labels.items()}

    def show(self, metrics: dict[str, float]) -> None:
        """The figures of a log line, or other ones."""
        self.figures = self.figures | metrics  # a new one, as the old one may be being read

    def collect(self) -> Iterator:
        """The metrics as they are now, whatever was logged when."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, StateSetMetricFamily

        def labelled(family, value, **labels: str):
            family.add_metric([self.run, *labels.values()], value)
            return family

        state, here, labels = self.state, heartbeats.HERE, ["run"]
        of_states = StateSetMetricFamily("training_state", "running, done, stopped or failed", labels=labels)
        yield labelled(of_states, {name: name == state for name in STATES})
        done = CounterMetricFamily("training_steps", "optimizer steps since this process began", labels=labels)
        yield labelled(done, self.steps)
        if state == STATES[0]:
            what = "time that rank 0 has been in this part of a step, or of what surrounds the steps"
            phase = GaugeMetricFamily("training_phase_seconds", what, labels=["run", "phase"])
            yield labelled(phase, time.monotonic() - here.since, phase=here.phase)
        if self.labels:
            info = GaugeMetricFamily("training_info", "what runs; always 1", labels=["run", *self.labels])
            yield labelled(info, 1, **self.labels)
        for key, value in self.figures.items():
            yield labelled(GaugeMetricFamily(f"training_{key}", describe(key), labels=labels), value)

    def end(self, exit_code: int) -> None:
        """Shows how the run ended until everybody who scrapes it has read that, for `PATIENCE` seconds at most. Who has
        not come for `GONE_AFTER` seconds is not awaited."""
        self.state = endings.state_of(exit_code)
        ended = time.monotonic()
        patience = PATIENCE.get(exit_code, FAILED_PATIENCE)
        with self.scraped:
            awaited = [who for who, last in self.scrapers.items() if ended - last < GONE_AFTER]
            if awaited and patience >= 20:
                with contextlib.suppress(OSError):  # nobody is there to read it
                    print(f"metrics    until Prometheus has read the end, {patience:.0f} s at most", flush=True)
            while any(self.scrapers[who] < ended for who in awaited):
                left = ended + patience - time.monotonic()
                if left <= 0:
                    return
                self.scraped.wait(left)


def describe(key: str) -> str:
    """The HELP of a figure."""
    if key in BY_KEY:
        figure = BY_KEY[key]
        return f"{figure.words}, {figure.unit}" if figure.unit else figure.words
    return OF_THE_RUN.get(key, key)
