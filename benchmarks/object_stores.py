"""What the faults of a network and of a store do to reading a corpus from it: a table.

    python benchmarks/object_stores.py --json benchmarks/results/object_stores.json

Needs the packages s3fs and moto[server]. A server of moto's stands in for S3; the reader reaches it through a proxy,
which makes the faults. Each row reads the demo's stories, as jsonl, packed jsonl, text and parquet, once as a stream's
documents with the fault at so many requests spread over the file, and compares every document with those of the local
file. Exits with 1 if a document was lost, doubled or changed. The tests use the server and the proxy too.
"""

import argparse
import contextlib
import gzip
import http.client
import http.server
import io
import json
import logging
import os
import pathlib
import platform
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from unittest import mock
from urllib.parse import urlsplit

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import base, data

STORIES = ROOT / "assets" / "demo" / "stories" / "train.jsonl"
FIELD = ("input_ids", "text")
FAULTS = ("none", "slow", "reset", "503", "short")
PER_FILE = 4  # requests with a fault


class Faults:
    """What the proxy does to the next requests for a range of a file, and what it saw.

    `plan` lists a fault for each such request, in order: "slow" sends half of the range and then nothing until `ended`
    is set, "reset" ends the connection in the middle of it, "short" sends half of it as if it were all, "503" and "403"
    refuse, "none" lets it pass; so do all after the last. `always` is a fault for all requests, of ranges or not.
    """

    def __init__(self):
        self.plan: list[str] = []
        self.always = ""
        self.seen: Counter = Counter()  # requests for ranges by fault
        self.ranges: list[str] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()

    def next_for(self, header: str | None) -> str:
        with self.lock:
            if self.always:
                self.seen[self.always] += 1
                return self.always
            if header is None:
                return "none"
            self.ranges.append(header)
            fault = self.plan.pop(0) if self.plan else "none"
            self.seen[fault] += 1
            return fault


class Proxy(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = server.faults.next_for(self.headers.get("Range") if self.command == "GET" else None)
        if fault in ("503", "403"):
            code = {"503": "SlowDown", "403": "AccessDenied"}[fault]
            content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} here</Message></Error>".encode()
            return self.answer(int(fault), [("Content-Type", "application/xml")], content)
        upstream = http.client.HTTPConnection(server.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        headers = [pair for pair in answer.getheaders() if pair[0].lower() not in ("connection", "transfer-encoding")]
        upstream.close()
        if fault == "short":
            content = content[: len(content) // 2]
            headers = [pair for pair in headers if pair[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(content))))
        if fault in ("slow", "reset"):
            return self.break_off(answer.status, headers, content, fault)
        self.answer(answer.status, headers, content)

    def begin(self, status, headers, content):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()

    def answer(self, status, headers, content):
        self.begin(status, headers, content)
        if self.command != "HEAD":
            self.wfile.write(content)

    def break_off(self, status, headers, content, fault):
        self.begin(status, headers, content)
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        if fault == "slow":
            self.server.faults.ended.wait()
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
        self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - names of http.server

    def log_message(self, *_):
        pass

    def finish(self):
        with contextlib.suppress(OSError, ValueError):
            super().finish()


@contextlib.contextmanager
def proxy_before(address: str):
    """(the URL of a proxy before the server at an address, its `Faults`)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    server.upstream, server.faults = urlsplit(address).netloc, Faults()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.faults
    finally:
        server.faults.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[object, Faults]]:
    """(file system of s3fs with an empty bucket `bucket`, the faults of the proxy before it). The environment has the
    credentials and the proxy's address meanwhile."""
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    try:
        with proxy_before(f"http://{host}:{port}") as (url, faults):
            os.environ["AWS_ENDPOINT_URL"] = url
            s3fs.S3FileSystem.clear_instance_cache()
            store = s3fs.S3FileSystem(use_listings_cache=False)
            store.mkdir("bucket")
            yield store, faults
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)


# ----------------------------------------------------------------------------------------------------------------------
# The table


def contents() -> dict[str, bytes]:
    """The demo's stories in each format."""
    import pyarrow
    import pyarrow.parquet

    lines = STORIES.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), parquet, row_group_size=500)
    jsonl = "\n".join(lines).encode()
    text = "<|endoftext|>".join(texts).encode()
    return {"a.jsonl": jsonl, "a.jsonl.gz": gzip.compress(jsonl), "a.txt": text, "a.parquet": parquet.getvalue()}


def read_with(fault: str, url: str, local: pathlib.Path, faults: Faults) -> dict:
    """One row: what reading a file gave where every second request had a fault, PER_FILE of them at most."""
    faults.plan = [name for _ in range(PER_FILE) for name in (fault, "none")]
    faults.seen.clear()
    start = time.perf_counter()
    outcome = "every document once, unchanged"
    try:
        (file,) = data.find_files(url).of_split("train")
        documents = [record for _, record in data.read_records(file, FIELD)]
    except base.UserError as error:
        outcome, documents = str(error), []
    seconds = time.perf_counter() - start
    (local_file,) = data.find_files(str(local)).of_split("train")
    if documents and documents != [record for _, record in data.read_records(local_file, FIELD)]:
        outcome = "WRONG"
    return {
        "fault": fault,
        "file": local.name,
        "faults": 0 if fault == "none" else faults.seen[fault],
        "requests": sum(faults.seen.values()),
        "documents": len(documents),
        "seconds": round(seconds, 2),
        "outcome": outcome,
    }


def refusals(url: str, faults: Faults) -> list[dict]:
    """Rows of what is not waited for, or for which the tries run out."""
    rows = []
    (file,) = data.find_files(url).of_split("train")
    for fault, what in (("503", "every request 503"), ("403", "every request 403")):
        for kind in ("listing", "reading"):
            faults.always = fault
            start = time.perf_counter()
            try:
                if kind == "listing":
                    data.find_files(url)
                else:
                    file.open()
                outcome = "WRONG"
            except base.UserError as error:
                outcome = str(error)
            faults.always = ""
            seconds = round(time.perf_counter() - start, 2)
            rows.append({"fault": f"{what}, {kind}", "file": file.name, "seconds": seconds, "outcome": outcome})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds after which a range is slow [2]")
    arguments = parser.parse_args()
    rows = []
    quick = mock.patch("harness.data.stores.TIMEOUT_SECONDS", arguments.timeout)
    with quick, s3_server() as (store, faults), tempfile.TemporaryDirectory() as folder:
        for name, content in contents().items():
            local = pathlib.Path(folder, name)
            local.write_bytes(content)
            store.pipe(f"bucket/{name}", content)
            rows += [read_with(fault, f"s3://bucket/{name}", local, faults) for fault in FAULTS]
        rows += refusals("s3://bucket/a.jsonl", faults)
    for row in rows:
        counts = f"{row.get('faults', '')}/{row.get('requests', '')}"
        print(f"{row['fault']:28} {row['file']:12} {counts:8} {row['seconds']:7.2f} s  {row['outcome'][:90]}")
    if arguments.json:
        import fsspec
        import moto
        import s3fs

        versions = {"python": platform.python_version(), "fsspec": fsspec.__version__, "s3fs": s3fs.__version__}
        result = {"versions": versions | {"moto": moto.__version__}, "timeout": arguments.timeout}
        result["date"] = time.strftime("%Y-%m-%d")
        result["rows"] = rows
        pathlib.Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    if any(row["outcome"] == "WRONG" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
