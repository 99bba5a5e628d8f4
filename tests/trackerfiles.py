"""What wandb and tensorboard have written, read back: helpers of the tests."""

import json
import pathlib
import struct
from collections.abc import Iterator


def wandb_records(file: pathlib.Path) -> Iterator:
    """The records of a .wandb file, which is a LevelDB log: blocks of 32 KiB, each record in one or more parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:  # too little room for a part's header: the rest of the block is empty
            position += 2**15 - position % 2**15
            continue
        length, kind = struct.unpack("<4xHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def as_dict(items) -> dict:
    """Keys and values of a row or a summary in a .wandb file."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def newest_records(folder: pathlib.Path) -> list:
    """The records in the newest .wandb file of a run."""
    return list(wandb_records(max(folder.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)))


def wandb_rows(folder: pathlib.Path) -> list[dict]:
    return [as_dict(record.history.item) for record in newest_records(folder) if record.HasField("history")]


def read_events(folder: pathlib.Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()
