"""Servers that stand in for stores, behind a proxy that makes the faults of a network and of a store: one of files in
memory by HTTP, for which fsspec needs the package aiohttp, and moto's for S3, which needs s3fs and moto[server]."""

import contextlib
import hashlib
import http.client
import http.server
import logging
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class Faults:
    """What the proxy does to the next requests for a range of a file, and what it saw.

    `plan` lists a fault for each such request, in order: "slow" sends half of the range and then nothing until `ended`
    is set, "reset" ends the connection in the middle of it, "short" sends half of it as if it were all, "whole" sends
    the whole file, "503" and "403" refuse, "none" lets it pass; so do all after the last.
    """

    def __init__(self):
        self.plan: list[str] = []
        self.ended = threading.Event()
        self.lock = threading.Lock()

    def next_for(self, header: str | None) -> str:
        with self.lock:
            return self.plan.pop(0) if header and self.plan else "none"


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
        if fault == "whole":
            del self.headers["Range"]
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


class Files(http.server.BaseHTTPRequestHandler):
    """Serves the files in its server's `contents`, by path, and ranges of them."""

    def answer(self):
        content = self.server.contents.get(self.path.lstrip("/"))
        if content is None:
            return self.send_error(404)
        mark, part = hashlib.sha256(content).hexdigest(), content
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if asked:
            part = content[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206 if asked else 200)
        for name, value in {"Accept-Ranges": "bytes", "Content-Length": len(part), "ETag": f'"{mark}"'}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    do_GET = do_HEAD = answer  # noqa: N815 - names of http.server

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler: type, **attributes):
    """A server on this machine in a thread, with these attributes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # ends that soon
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def proxy_before(address: str):
    """(the URL of a proxy before the server at an address, its `Faults`)."""
    faults = Faults()
    with serving(Proxy, upstream=urlsplit(address).netloc, faults=faults) as url:
        try:
            yield url, faults
        finally:
            faults.ended.set()


@contextlib.contextmanager
def http_store() -> Iterator[tuple[str, dict[str, bytes], Faults]]:
    """(the URL of a server, what it has by path, the faults of the proxy before it)."""
    contents: dict[str, bytes] = {}
    with serving(Files, contents=contents) as address, proxy_before(address) as (url, faults):
        yield url, contents, faults


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
