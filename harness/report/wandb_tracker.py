"""Wandb: a run in wandb, and whether its rows are on the disk. Called by `trackers`. Independent of how a figure is
computed.

wandb writes by a process of its own, which tells nobody of a full disk. Offline, the size of its file shows whether it
still writes, and the last record in the file shows which row is safe.
"""

import contextlib
import functools
import os
import pathlib
import shlex
import struct
import time
from collections.abc import Iterable, Iterator

from harness import job
from harness.flags.settings import Settings
from harness.report.figure_list import BY_KEY
from harness.report.tracker_rows import by_tokens, grouped, program
from harness.state.train_state import TrainState

FLUSH_SECONDS = 0.1  # until a row is in wandb's file; by default 15
FINISH_SECONDS = 60.0  # that the end of a run waits for what wandb has not uploaded
STUCK_SECONDS = 10.0  # after which a row that is not in wandb's file is lost
POLL_SECONDS = 0.02  # between two looks at the file
BLOCK = 2**15  # bytes of a block of wandb's file, which is a LevelDB log
TAIL = 32 * BLOCK  # bytes at the end of that file in which its last row is looked for
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # which part of a record a fragment is, as a LevelDB log has it
FRAGMENT_HEADER = struct.Struct("<4xHB")  # a checksum that is not read, the length in bytes, the part


class Wandb:
    """A run in wandb, whose step is that of the optimizer. It keeps its id over restarts (`resume="allow"`)."""

    name = "wandb"

    def __init__(self, settings: Settings, folder: pathlib.Path, state: TrainState, config: dict):
        os.environ.setdefault("WANDB_DATA_DIR", str(folder.resolve() / "wandb"))  # tables that are to be uploaded
        self.begin = functools.partial(self._begin, settings, folder, state.run_id, config)
        self.kept = state.step  # the last step that is known to be in a file
        self.last = state.step  # the last step of all
        self.begin()

    def _begin(self, settings: Settings, folder: pathlib.Path, run_id: str, config: dict) -> None:
        """Opens the run, in a new file if there is one already."""
        import wandb

        options = wandb.Settings(
            x_transaction_log_flush_interval=FLUSH_SECONDS, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True
        )
        self.run = wandb.init(
            project=settings.project_name,
            name=folder.name,
            dir=str(folder),
            id=run_id,
            resume="allow",
            config=config,
            settings=options,
        )
        self.teardown = wandb.teardown
        self.run.define_metric("by_tokens/*", step_metric=BY_KEY["tokens_seen"].name)
        self.file = pathlib.Path(self.run.settings.sync_file)
        self.size = 0  # of the file when it was last seen to grow
        self.grew_at = None  # when that was

    def place(self) -> tuple[str, str]:
        return "wandb", self.run.url or f"offline; later: {self.upload()}"

    def upload(self) -> str:
        """The command that uploads what lies in the run's folder, of its earlier starts too."""
        folder = pathlib.Path(self.run.dir).parent
        parts = folder.with_name(folder.name.partition("run-")[0] + "run-")  # [offline-]run-TIME-ID
        return f"{program('wandb')} sync {shlex.quote(str(parts))}*"

    def log(self, metrics: dict, stories: list[dict[str, str]]) -> None:
        row = grouped(metrics) | by_tokens(metrics)
        if stories:
            row["stories"] = self.table((metrics["step"], story["prompt"], story["text"]) for story in stories)
        self.run.log(row, step=metrics["step"], commit=True)
        self.last = metrics["step"]
        self.notice_a_stuck_file()

    def notice_a_stuck_file(self) -> None:
        """Raises OSError where wandb's own process no longer writes: it does not report a full disk, and does not go on
        when there is room again."""
        now, size = time.monotonic(), self.file.stat().st_size
        if size != self.size or self.grew_at is None:
            self.size, self.grew_at = size, now
        elif now - self.grew_at > STUCK_SECONDS and self.run.offline:
            raise OSError(f"{self.file.name} does not grow any more, as on a full disk")

    def settle(self) -> None:
        """Waits until the last row is in the file; raises OSError where it does not get there."""
        until = time.monotonic() + STUCK_SECONDS
        while self.run.offline and self.kept < self.last:
            self.kept = max(self.kept, last_step(self.file))
            if time.monotonic() > until:
                raise OSError(f"{self.file.name} ends with step {self.kept:,}, as on a full disk")
            time.sleep(POLL_SECONDS)

    def restart(self) -> int:
        """Continues in a new file; returns the last step that the earlier files have. Online it raises RuntimeError:
        nobody knows what the server has, and a new login may take minutes."""
        if not self.run.offline:
            raise RuntimeError("wandb is online")
        with contextlib.suppress(OSError):
            self.kept = max(self.kept, last_step(self.file))
        for end in (self.run.finish, self.teardown):  # its process may be gone
            with contextlib.suppress(Exception):
                end()
        self.begin()
        return self.kept

    def table(self, stories: Iterable[tuple[int, str, str]]):
        import wandb

        return wandb.Table(columns=["step", "prompt", "text"], data=[list(story) for story in stories])

    def summarize(self, metrics: dict, stories: list[tuple[int, str, str]]) -> None:
        """The averages of the last line, and all stories in one table."""
        summary = grouped(metrics)
        if stories:
            summary["stories"] = self.table(stories)
        self.run.summary.update(summary)

    def finish(self, exit_code: int) -> None:
        if exit_code == job.STOPPED:
            self.run.mark_preempting()  # wandb then calls it preempted, else failed
        try:
            self.run.finish(exit_code=exit_code)
            self.teardown(exit_code)  # until its process has written the last record: it ends with this one
        except TimeoutError:
            job.print_error(f"wandb      not all is uploaded after {FINISH_SECONDS:.0f} s; later: {self.upload()}")


def last_step(file: pathlib.Path) -> int:
    """The step of the last complete row near the end of a .wandb file, 0 if there is none.

    The file is a LevelDB log: blocks of 32 KiB, each record in one fragment or in several, behind 7 bytes of wandb's
    own at its beginning.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    with file.open("rb") as opened:
        start = max(0, file.stat().st_size - TAIL) // BLOCK * BLOCK
        opened.seek(start)
        data = opened.read()
    step = 0
    for packed in records_in(data, 0 if start else 7):
        with contextlib.suppress(Exception):  # a record that began before `start`
            record = Record.FromString(packed)
            if record.HasField("history"):
                step = record.history.step.num
    return step


def records_in(data: bytes, position: int) -> Iterator[bytes]:
    """The complete records in blocks of a LevelDB log, from `position` on, up to the first fragment that is cut off."""
    record = b""
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < FRAGMENT_HEADER.size:  # the rest of a block that has no room for a header is empty
            position += left_in_block
            continue
        length, part = FRAGMENT_HEADER.unpack_from(data, position)
        position += FRAGMENT_HEADER.size
        fragment = data[position : position + length]
        if len(fragment) < length or part not in (WHOLE, FIRST, MIDDLE, LAST):
            return
        position += length
        if part in (WHOLE, FIRST):
            record = b""
        record += fragment
        if part in (WHOLE, LAST):
            yield record
