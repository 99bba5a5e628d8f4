"""Data sets that a file of --import registers. Their records are written once into the cache, as a file of JSON lines,
which is read as any other file."""

import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Iterator

from harness import base, flags, job
from harness.data.cache import make_once

MAX_RECORDS = 10_000_000  # of a function without a limit; one that gives more is refused as endless
COMPARED_RECORDS = 100  # first records that a second call of the function must give again
SAMPLE_BYTES = 2**16  # at the end of a file, compared between machines


def write_all(settings: flags.Flags) -> None:
    """Write the registered data sets of a run once on each machine, or on one of those that share a cache. Every rank
    calls this.

    Raises:
        UserError: as `write_once` does, or the records differ between machines.
    """
    names = [source.dataset for source in settings.sources()]
    if settings.eval_interval:
        names.append(settings.eval_split)
    for name in names:
        if name in flags.DATASETS:
            path, record = base.call_on_all_ranks(functools.partial(write_once, name, settings.cache_dir))
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - SAMPLE_BYTES))
                sample = hashlib.sha256(file.read()).hexdigest()
            job.print0("data      ", f"{name}: {base.counted(record['records'], 'record')} in {path}")
            if len({*base.all_gather_objects((path.stat().st_size, sample))}) > 1:
                problem = "its function gives other records on another machine"
                raise base.UserError(f"--dataset {name}: {problem}; the order of a set is a usual cause")


def write_once(name: str, cache_dir: str | os.PathLike | None) -> tuple[pathlib.Path, dict]:
    """Call the function of a registered data set and write its records, unless the cache has them; return (their file,
    the record of its folder in the cache).

    Raises:
        UserError: the function fails, gives no records or others in a second call, or does not end; a record is of no
            known kind; or the cache cannot be written.
    """
    dataset = flags.DATASETS[name]

    def make(folder: pathlib.Path) -> dict:
        return {"records": write_records(folder / f"{name}.jsonl", name)}

    key = [sorted(flags.IMPORTED.values()), name, dataset.version, dataset.limit]
    folder, record = make_once(name, key, make, cache_dir)
    return folder / f"{name}.jsonl", record


def write_records(path: pathlib.Path, name: str) -> int:
    """Write the records of a registered data set and return their number."""
    first, count = [], 0  # the first records, to compare
    with path.open("w", encoding="utf-8") as file:
        for count, line in enumerate(json_lines(name), 1):
            if count > MAX_RECORDS and flags.DATASETS[name].limit is None:
                problem = f"it has not ended after {MAX_RECORDS:,} records"
                raise base.UserError(f"--dataset {name}: {problem}; register it with limit=N, which takes the first N")
            if count <= COMPARED_RECORDS:
                first.append(line)
            file.write(line)
    if not count:
        raise base.UserError(f"--dataset {name}: its function gives no records")
    # a resumed run may call it again, on another machine
    if first != [*itertools.islice(json_lines(name), COMPARED_RECORDS)]:
        problem = "its function gives other records when it is called again"
        raise base.UserError(f"--dataset {name}: {problem}; let it make its random numbers from a seed")
    return count


def json_lines(name: str) -> Iterator[str]:
    """Yield each record as a line of JSON."""
    dataset = flags.DATASETS[name]
    for number, record in enumerate(itertools.islice(dataset.records(), dataset.limit), 1):
        fields = record
        if not isinstance(record, dict):
            fields = {"text": record} if isinstance(record, str) else {"input_ids": record}
        try:
            yield json.dumps(fields, default=lambda value: value.tolist()) + "\n"  # arrays and tensors have it
        except (TypeError, ValueError, AttributeError) as error:
            wanted = "give a text, a list of token ids, or a dict with the fields of docs/DATA.md"
            problem = f"record {number} cannot be written as JSON ({base.first_line(error)})"
            raise base.UserError(f"--dataset {name}: {problem}; {wanted}") from error
