"""Endpoint: what Prometheus reads of a run. Called by the script, which opens it, and by the report, which hands it
figures. It does not know how they come about."""

import functools
from importlib.util import find_spec

from utils import UserError


def serve_metrics(host: str, port: int | None) -> None:
    """Opens the Prometheus endpoint, if one is wanted."""
    if not port:
        return
    if not find_spec("prometheus_client"):
        raise UserError("--metrics-port: needs the package prometheus_client (pip install prometheus_client)")
    from prometheus_client import start_http_server

    try:
        start_http_server(port, host)
    except OSError as error:
        raise UserError(f"--metrics-port: cannot listen on {host}:{port} ({error.strerror}); choose another") from error


@functools.cache
def gauge(key: str):
    """The Prometheus gauge of a key of metrics.jsonl."""
    from prometheus_client import Gauge

    return Gauge(f"training_{key}", f"{key} of metrics.jsonl")
