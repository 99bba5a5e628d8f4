"""Metrics file: metrics.jsonl, written so that no line is lost to a disk that is full for a while. Called by `report`.
Independent of what a line says."""

import collections
import contextlib
import json
import math
import os
import pathlib
import threading

from harness.base.saved import place_of
from harness.job import replace_file
from harness.report.run_files import read_metrics
from harness.state.store import sync


def as_json(metrics: dict) -> dict:
    """The metrics with null for NaN and infinity, which JSON lacks."""
    values = {}
    for key, value in metrics.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        values[key] = value if finite else None
    return values


def metrics_text(lines: list[dict]) -> str:
    return "".join(json.dumps(as_json(line), allow_nan=False) + "\n" for line in lines)


class MetricsFile:
    """metrics.jsonl, open for appending. What cannot be written waits in memory, all of it, about half a KB a line."""

    def __init__(self, path: pathlib.Path, step: int):
        """Opens it without what an earlier start wrote after `step`."""
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        lines = [line for line in kept if "final" not in line]
        for line in kept:  # the run goes on after its last line, whose stories stay with the step
            if "samples" in line and lines and lines[-1]["step"] == line["step"]:
                lines[-1]["samples"] = line["samples"]
        replace_file(path, metrics_text(lines))
        self.path, self.folder = path, place_of(path.parent)
        self.waiting: collections.deque[bytes] = collections.deque()
        self.lock = threading.Lock()  # a checkpoint's thread makes the lines durable while the loop adds more
        self._open()

    def _open(self) -> None:
        self.file = self.path.open("ab", buffering=0)  # no buffer of Python's, which drops what it cannot write
        self.reader = self.path.open("rb")

    def add(self, line: dict) -> None:
        self.waiting.append(metrics_text([line]).encode())

    def write(self) -> None:
        """Writes what waits, as far as the disk takes it; the rest of a line that it cut follows at the next call.

        Raises:
            OSError: something still waits.
        """
        with self.lock:
            self._put_back()
            while self.waiting:
                written = self.file.write(self.waiting[0])
                rest = self.waiting.popleft()[written:]
                if rest:
                    self.waiting.appendleft(rest)

    def _put_back(self) -> None:
        """Restores the file with all its lines where it was removed or replaced and its folder is where it was."""
        if place_of(self.path.parent) != self.folder:
            return  # moved away with the file in it, or gone
        status = os.fstat(self.file.fileno())
        if place_of(self.path) == (status.st_dev, status.st_ino):
            return
        self.reader.seek(0)
        replace_file(self.path, self.reader.read().decode())
        self.file.close()
        self.reader.close()
        self._open()

    def sync(self) -> None:
        """Makes all lines so far durable, those included that could not be written at their time.

        Raises:
            OSError: they are not.
        """
        try:
            self.write()
        except OSError as error:
            raise OSError(f"metrics.jsonl: {error.strerror}, {len(self.waiting)} lines wait") from error
        os.fsync(self.file.fileno())
        sync(self.path.parent)

    def close(self) -> None:
        """Closes the files. An error is no loss: what `write` and a sync gave to the disk stays there."""
        for file in (self.file, self.reader):
            with contextlib.suppress(OSError):
                file.close()
