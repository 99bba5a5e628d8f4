"""What the recipe in train_fsdp.py should not have to show: token packing, FLOP and MFU math, speed and memory figures.

Importing this module starts nothing and needs no GPU, no network and no optional package.
"""

import codecs
import contextlib
import copy
import fnmatch
import functools
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import pathlib
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from torch.utils.flop_counter import flop_registry

from harness.base.devices import wait_for_device
from harness.base.errors import NoSplitError, UnreadableError, UserError
from harness.base.gpu_table import find_gpu
from harness.base.ranks import from_main_process
from harness.base.text import first_line, shortened

IGNORE_INDEX = -100  # label of a position that the loss leaves out, as in torch.nn.functional.cross_entropy
DATA_SUFFIXES = (".jsonl", ".txt", ".md", ".parquet")  # in any case, and compressed: .TXT, .jsonl.gz
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # suffix: what Arrow calls it
SPLITS = {"train": "train(ing)?", "validation": "valid(ation)?|val|dev", "test": "test(ing)?|eval(uation)?"}
DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a text file, as in the original TinyStories files
TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores
NOT_UTF8 = "\ufdd0not UTF-8\ufdd1"  # stands for bytes of a file that are no text, until `read_record` meets it
codecs.register_error("mark", lambda error: (NOT_UTF8, error.end))


def kind_of(path) -> str:
    """The one of DATA_SUFFIXES that a data file has, whether compressed or not; empty for other files."""
    name, packed = os.path.splitext(str(path).lower())
    if packed not in COMPRESSIONS:
        name += packed
    return next((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), "")


def place_of(path) -> tuple:
    """What two names of the same file or folder have in common."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino) if status.st_ino else (os.path.realpath(path),)


def walk(top: pathlib.Path, left_out: dict[pathlib.Path, str]) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """(folder, the names in it) of a folder and all below it, without hidden ones. Each real folder comes once, by a
    path without links where there is one; `left_out` gets the others, and those that cannot be read, with the reason.
    """
    folders, links, entered = [top], [], {}
    while folders or links:
        folder = folders.pop() if folders else links.pop(links.index(min(links)))
        try:
            place = place_of(folder)
            if place in entered:
                left_out[folder] = f"the same as {os.path.relpath(entered[place], top)}"
                continue
            entered[place] = folder
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        except OSError as error:
            left_out[folder] = error.strerror
            continue
        for path in filter(os.path.isdir, (folder / name for name in names)):
            (links if path.is_symlink() else folders).append(path)
        yield folder, names


def match(folder: pathlib.Path, parts: list[str]) -> Iterator[pathlib.Path]:
    """What the parts of a pattern match in a folder, as `glob` does, but ** enters each real folder once: a link to a
    folder above would never end."""
    if not parts:
        yield folder
        return
    first, *rest = parts
    if first == "**":
        for below, _ in walk(folder, {}):
            yield from match(below, rest or ["*"])
    elif glob.has_magic(first):
        with contextlib.suppress(OSError):
            names = sorted(fnmatch.filter(os.listdir(folder), first))
            for name in names:
                if first.startswith(".") or not name.startswith("."):
                    yield from match(folder / name, rest)
    elif os.path.lexists(folder / first):
        yield from match(folder / first, rest)


def find_files(dataset: str) -> tuple[list[pathlib.Path], list[str]]:
    """The data files of a local file, folder or pattern, each real file once, and what else is there and is not read,
    in words. Hidden files are not looked at. None of either when `dataset` is a hub id."""
    top, left_out = pathlib.Path(dataset), {}
    is_pattern = glob.has_magic(dataset) and not os.path.exists(dataset)
    if is_pattern:
        found = list(match(pathlib.Path(top.anchor), list(top.relative_to(top.anchor).parts)))
        if "**" not in top.parts:
            left_out |= dict.fromkeys(filter(os.path.isdir, found), "a folder")
        found = [path for path in found if not os.path.isdir(path)]
    elif os.path.isdir(top):
        found = [folder / name for folder, names in walk(top, left_out) for name in names]
        found = [path for path in found if not os.path.isdir(path)]
    else:
        found = [top] if os.path.exists(top) else []
    files: dict[tuple, pathlib.Path] = {}
    for path in sorted(found, key=lambda path: (path.is_symlink(), path)):
        if not kind_of(path) or (path != top and path.name.lower() == "readme.md"):
            left_out[path] = ""
        elif not os.path.exists(path):
            left_out[path] = "a broken link" if path.is_symlink() else "cannot be read"
        elif not os.path.isfile(path):
            left_out[path] = "no regular file"
        elif (first := files.setdefault(place_of(path), path)) != path:
            left_out[path] = f"the same as {os.path.relpath(first, top) if os.path.isdir(top) else first}"
    named = []
    for path, why in sorted(left_out.items()):
        name = os.path.relpath(path, top) if os.path.isdir(top) else str(path)
        name = name if name.isprintable() else ascii(name)
        named.append(f"{name} ({why})" if why else name)
    return sorted(files.values()), named


def local_files(dataset: str) -> list[pathlib.Path]:
    """The data files of a local file, folder or pattern; none when `dataset` is a hub id. A UserError where a path or a
    pattern leads to none."""
    files, left_out = find_files(dataset)
    is_pattern, exists = glob.has_magic(dataset), os.path.exists(dataset)
    if not files and (exists or left_out):
        seen = f"there is only {shortened(left_out)}" if left_out else "it is empty"
        if not os.path.isdir(dataset) and exists:
            seen = "convert it"
        suffixes, packed = "/".join(DATA_SUFFIXES), "/".join(COMPRESSIONS)
        raise UserError(f"--dataset {dataset}: needs {suffixes} files, which may be packed as {packed}; {seen}")
    looks_local = kind_of(dataset) or is_pattern or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1
    if not files and looks_local:
        raise UserError(f"--dataset {dataset}: no such {'files' if is_pattern else 'file or folder'}")
    return files


def files_of_split(dataset: str, split: str, files: list[pathlib.Path]) -> list[pathlib.Path]:
    """The local files of one split. The split of a file is a word in its path below the folder, by the same words as in
    `datasets`; where no word says it, and of a single file, it is train. A NoSplitError where there are none."""
    splits: dict[str, list] = {}
    for file in files:
        path = str(file.relative_to(dataset)) if os.path.isdir(dataset) else file.name * (len(files) > 1)
        words = re.findall("[a-z]+", path.lower())
        named = (name for name, pattern in SPLITS.items() if any(re.fullmatch(pattern, word) for word in words))
        splits.setdefault(next(named, "train"), []).append(file)
    if split not in splits:
        raise NoSplitError(f"--dataset {dataset}, split {split!r}: there is none; there is {', '.join(splits)}")
    return splits[split]


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split of local files, such as `train` or `train[:95%]`; no bounds, no slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
    return part[1], [part[3] or "0%", part[4] or "100%"] if part[2] else []


def cut_documents(bounds: list[str], documents: int) -> list[int | None]:
    """How many of so many documents are before each bound of a slice, such as 95% or -100; None where a percentage
    would cut off none or all of them."""
    cuts: list[int | None] = []
    for bound in bounds:
        number, size = int(bound.rstrip("%")), 100 if bound.endswith("%") else documents
        if abs(number) > size:
            raise UserError(f"--dataset-split: the slice's bound {bound} is beyond the {documents:,} documents")
        number += size * (number < 0)
        cut = round(documents * number / size) if size else 0
        cuts.append(None if 0 < number < size and cut in (0, documents) else cut)
    return cuts


def cut_positions(bounds: list[str], tokens: np.ndarray, end_of_text: int | None) -> list[int]:
    """Where the bounds of a slice cut `tokens`: at ends of documents, or, where these are too few for a percentage, at
    that share of the tokens, as in a file of one document."""
    ends = np.union1d(np.flatnonzero(tokens == end_of_text) + 1, [0, len(tokens)]).astype(int)
    cuts = zip(cut_documents(bounds, len(ends) - 1), bounds, strict=True)
    return [len(tokens) * int(bound.rstrip("%")) // 100 if cut is None else int(ends[cut]) for cut, bound in cuts]


def load_documents(dataset: str, split: str, subset: str | None = None, streaming: bool = False):
    """A split of a hub data set as a `datasets.Dataset` or `IterableDataset`."""
    import datasets

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said below, once
    try:
        return datasets.load_dataset(dataset, subset, split=split, streaming=streaming)
    except Exception as error:
        said = first_line((error.__cause__ and error.__cause__.__cause__) or error.__cause__ or error)
        kind = NoSplitError if re.search("(Unknown|Bad) split", said) else UnreadableError
        raise kind(f"--dataset {dataset}, split {split!r}: cannot be read ({said})") from error


Field = str | tuple[str, ...]  # the column that is trained on, or several: the first one that is there
DEFAULT_FIELD = ("input_ids", "text")


def names_of(text_field: Field) -> tuple[str, ...]:
    return (text_field,) if isinstance(text_field, str) else text_field


def choose_field(source: Any, names: list[str], text_field: Field) -> str:
    """The column that is trained on."""
    wanted = names_of(text_field)
    if field := next((name for name in wanted if name in names), None):
        return field
    raise UserError(f"--text-field {wanted[-1]}: no such field in {source} (fields: {', '.join(names)})")


def hub_records(
    rows, source: str, text_field: Field, counts: Counter, whole: bool = False
) -> Iterator[tuple[Any, str]]:
    """(value, its field) of each row of a `datasets.Dataset` or `IterableDataset`; `counts` gets how many are read."""
    for table in rows.with_format("arrow").iter(1000):
        field = choose_field(source, table.column_names, text_field)
        values = values_of(table[field], whole)
        counts.update(read=len(table), documents=len(table) - len(values))
        yield from ((value, field) for value in values)


def file_records(file: pathlib.Path, text_field: Field, counts: Counter, whole=False) -> Iterator[tuple[Any, str]]:
    """(value, its field) of each record of a local file: of a .jsonl the lines, of a text file the parts between marks.
    `counts` gets how many bytes are read. What cannot be read is an UnreadableError."""
    kind, before, rest = kind_of(file), counts["read"], ""
    try:
        with file.open("rb") as raw:
            if kind == ".parquet":
                import pyarrow.parquet

                parquet = pyarrow.parquet.ParquetFile(raw)
                field = choose_field(file, parquet.schema_arrow.names, text_field)
                for batch in parquet.iter_batches(1000, columns=[field]):
                    values, share = values_of(batch[field], whole), batch.num_rows / parquet.metadata.num_rows
                    counts.update(read=int(share * file.stat().st_size), documents=batch.num_rows - len(values))
                    yield from ((value, field) for value in values)
                return
            text = open_text(file, raw)
            for part in text if kind == ".jsonl" else iter(functools.partial(text.read, 2**24), ""):
                counts["read"] = before + raw.tell()
                *parts, rest = [part, ""] if kind == ".jsonl" else (rest + part).split(DOCUMENT_MARK)
                yield from ((part if kind == ".jsonl" else part.strip("\n"), kind) for part in parts)
            if rest.strip("\n"):
                yield rest.strip("\n"), kind
    except (OSError, ValueError) as error:  # ValueError: Arrow's
        raise UnreadableError(f"--dataset {file}: cannot be read ({first_line(error)})") from error


def open_text(file: pathlib.Path, raw) -> io.TextIOWrapper:
    """The text of an open data file, unpacked; bytes that are not UTF-8 are marked, line ends are newlines."""
    if codec := COMPRESSIONS.get(file.suffix.lower()):
        import pyarrow

        raw = pyarrow.input_stream(raw, compression=codec)
    return io.TextIOWrapper(raw, encoding="utf-8-sig", errors="mark")


def values_of(column, whole: bool) -> list:
    """The values of an Arrow column: token ids as arrays, or one array if `whole`; text marked where it is not UTF-8,
    which Arrow does not check."""
    import pyarrow.compute
    from pyarrow import types

    column = column.combine_chunks() if hasattr(column, "chunks") else column
    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if any(is_kind(column.type) for is_kind in kinds) and types.is_integer(column.type.value_type):
        ids = column.flatten()
        if not (column.null_count or ids.null_count):
            ids = ids.to_numpy(zero_copy_only=False)
            if 0 <= ids.min(initial=0) <= ids.max(initial=0) < 2**32:  # else each row is looked at by itself
                ends = np.cumsum(pyarrow.compute.list_value_length(column).to_numpy(zero_copy_only=False))[:-1]
                return np.split(ids, [] if whole else ends)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode(errors="mark") for value in column.cast("binary").to_pylist()]


def read_record(value: Any, field: str, text_field: Field = DEFAULT_FIELD) -> str | list[int] | np.ndarray | None:
    """The text or token ids of a record, or None for a bad one, which has neither.

    `field` is the column of `value`, or the kind of its file, .jsonl for a line of one, .txt for a document.
    """
    if field == ".jsonl":
        if not value.strip():
            return []  # a blank line is no document
        try:
            record = json.loads(value)
        except (ValueError, RecursionError):
            return None
        record = record if isinstance(record, dict) else {}
        field = next((name for name in names_of(text_field) if name in record), names_of(text_field)[-1])
        value = record.get(field)
    if isinstance(value, np.ndarray):
        return value
    if field == "input_ids":
        good = isinstance(value, list) and set(map(type, value)) <= {int}
        good = good and 0 <= min(value, default=0) <= max(value, default=0) < 2**32
    else:
        good = isinstance(value, str) and NOT_UTF8 not in value and not (field in (".txt", ".md") and "\0" in value)
        good = good and (value.isascii() or not re.search("[\ud800-\udfff]", value))  # of an escape in JSON
    return value if good else None


def read_documents(records: Iterator, source: Any, text_field: Field, skip_bad: bool, counts: Counter) -> Iterator:
    """The documents in `records` of `source`, texts or token ids. `counts` gets the numbers of empty ones and of bad
    records that `skip_bad` left out; else the first of these is an UnreadableError."""
    for value, field in records:
        document = read_record(value, field, text_field)
        if document is None and not skip_bad:
            error = UnreadableError(f"--dataset {source}: a record has no text; --skip-bad-records leaves such out")
            error.record = (value, field)
            raise error
        counts["bad records"] += document is None
        if isinstance(document, str):
            parts = [part.strip("\n") for part in document.split(DOCUMENT_MARK)]
            counts["empty documents"] += not any(parts) and field not in (".txt", ".md")
            yield from filter(None, parts if len(parts) > 1 else [document] * any(parts))
        elif document is not None and len(document):
            yield document


def take(documents: Iterator, count: int, characters: int = 2**21) -> Iterator:
    """The next documents, `count` of them or so many characters: a tokenizer takes a hundred times their memory."""
    for document in itertools.islice(documents, count):
        yield document
        if (characters := characters - len(document)) < 0:
            return


def token_batches(documents, tokenizer, batch_size: int = TOKENIZE_BATCH, counts=None) -> Iterator[np.ndarray]:
    """Token ids of all documents in order, an end-of-text token after each text, as one flat array per `batch_size` of
    them. Token ids are taken as they are. `counts` gets the numbers of documents and tokens."""
    end_of_text = getattr(tokenizer, "eos_token_id", None)
    counts, documents = Counter() if counts is None else counts, iter(documents)
    while batch := list(take(documents, batch_size)):
        texts = [document for document in batch if isinstance(document, str)]
        if texts and end_of_text is None:
            raise UserError(f"--tokenizer {tokenizer.name_or_path}: it has no end-of-text token (eos_token)")
        if texts and tokenizer.is_fast:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            encoded = (encoding.ids for encoding in encodings)
        elif texts:
            encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        ids = [[*next(encoded), end_of_text] if isinstance(document, str) else document for document in batch]
        tokens = np.concatenate([each if isinstance(each, np.ndarray) else np.array(each, np.uint32) for each in ids])
        counts.update(documents=len(ids), tokens=len(tokens))
        yield tokens


def in_vocabulary(batches: Iterator[np.ndarray], vocab_size: int) -> Iterator[np.ndarray]:
    """Arrays of token ids in the smallest type that holds a vocabulary; an id not below `vocab_size` is a UserError."""
    for tokens in batches:
        largest = int(tokens.view(f"u{tokens.itemsize}").max(initial=0))  # a negative id is huge
        if largest >= vocab_size:
            raise UserError(f"--tokenizer: it gave token id {largest}, the model has {vocab_size}; use its own")
        yield tokens.astype(token_dtype(vocab_size), copy=False)


def pack_tokens(batches: Iterator[np.ndarray], path: str | os.PathLike, vocab_size: int, counts: Any = None) -> int:
    """Lays arrays of token ids end to end into the raw file `path`; returns how many tokens it holds.

    The file appears under its name only when it is whole and not empty; after it, in a `.json` beside it, the record
    that `check_cache` compares it with: size, checksum and `counts`. A UserError where an id is not below `vocab_size`.
    """
    path, total, digest = pathlib.Path(path), 0, hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        with open(os.path.join(folder, "tokens"), "wb") as file:
            for tokens in in_vocabulary(batches, vocab_size):
                total += len(tokens)
                file.write(tokens.data)
                digest.update(tokens.data)
        if total:
            os.replace(file.name, path)
            write_record(path, {"bytes": path.stat().st_size, "sha256": digest.hexdigest(), "counts": counts or {}})
    return total


def write_record(path: pathlib.Path, record: dict) -> None:
    """Replaces what stands beside a token cache about it, at once."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        file = pathlib.Path(folder, "record")
        file.write_text(json.dumps(record))
        os.replace(file, path.with_suffix(".json"))


def check_cache(path: pathlib.Path, skip_bad: bool, whole: bool) -> tuple[dict | None, str]:
    """(what was counted in the corpus, "") for a token cache that is as it was written, else (None, what is wrong).

    It is compared with its checksum if `whole` or if its ctime, which no program can set, is new since the last time.
    """
    try:
        record, status, now = json.loads(path.with_suffix(".json").read_text()), path.stat(), time.time_ns()
        if status.st_size != record["bytes"]:
            return None, f"{status.st_size:,} bytes, not {record['bytes']:,}"
        if whole or record.get("checked") != status.st_ctime_ns:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                    return None, "another checksum"
            if now - status.st_ctime_ns > 10**9:  # a change within the clock's tick would have the same ctime
                with contextlib.suppress(OSError):  # a disk that can only be read
                    write_record(path, record | {"checked": status.st_ctime_ns})
        counts = {kind: int(number) for kind, number in record["counts"].items()}
        bad = counts.get("bad records", 0)
        return (None, f"{bad:,} bad records left out") if bad and not skip_bad else (counts, "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return None, f"its .json, {first_line(error)}" if path.exists() else ""


def token_dtype(vocab_size: int) -> type:
    """Smallest unsigned type that holds every id of a vocabulary: uint16 up to 65,536 entries, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class PackedDataset(Dataset):
    """Windows of `seq_len + 1` tokens over one flat array; consecutive windows share one token.

    Window i is `tokens[i * seq_len : (i + 1) * seq_len + 1]`, so each token but the first is a label exactly once and
    nothing is lost but the last partial window.
    """

    end_of_text: int | None = None  # the id that ends a document, where attention is to stay inside documents

    def __init__(self, tokens: np.ndarray, seq_len: int):
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> np.ndarray:
        """A view of shape (seq_len + 1,), unsigned integers."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.tokens[index * self.seq_len : (index + 1) * self.seq_len + 1]

    def fingerprint(self) -> str:
        """Tells data sets apart by their number of tokens and 256 samples of 4,096, wherever they are stored."""
        starts = np.linspace(0, max(0, len(self.tokens) - 4096), 256, dtype=np.int64)
        digest = hashlib.sha256(b"".join(self.tokens[start : start + 4096].tobytes() for start in starts))
        return f"{digest.hexdigest()[:20]}, {len(self.tokens):,} tokens"


def vocabulary_of(tokenizer) -> str:
    """Everything that decides how a tokenizer splits text."""
    return tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())


def get_dataset(
    tokenizer,
    seq_len: int,
    accelerator=None,
    dataset: str = "roneneldan/TinyStories",
    split: str | None = None,
    vocab_size: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    skip_bad_records: bool = False,
    check_whole: bool = False,
    text_field: Field = DEFAULT_FIELD,
    subset: str | None = None,
    progress: Callable[[Counter, int], None] = lambda counts, total: None,
) -> PackedDataset:
    """Tokenizes a corpus once, caches it as one flat file, and returns it as packed windows.

    The main process of each node tokenizes (all cores); the others map the same file. Its name covers the documents
    (path, size, time; a hub data set's fingerprint), tokenizer and vocabulary: a second start reads it alone. Local
    files are tokenized whole; of their tokens a slice is taken, see `cut_positions`.

    Args:
        tokenizer: of transformers; its `eos_token` goes after each document.
        accelerator: the run's `Accelerator`, or None for one process.
        dataset: hub id, with its `subset` if it has several, or a local file, folder or pattern (`find_files`).
        split: with an optional slice; by default `train`, of hub data its first 5 %.
        vocab_size: embeddings of the model; by default the tokenizer's own size.
        cache_dir: where the flat files lie; by default `$XDG_CACHE_HOME/train_fsdp` or `~/.cache/train_fsdp`.
        text_field: column of the text, or of token ids where it is `input_ids`; of several the first that is there.
        skip_bad_records: leave out, and count, records that have no text; otherwise the first is an UnreadableError.
        check_whole: compare a cache with its checksum even if it has not changed since that was last done.
        progress: is told while tokenizing the counts so far (documents, tokens, read) and what "read" will reach.

    A UserError: no such data or split, no text in it, hub not reachable, less than one window, an id without embedding.
    """
    vocab_size = vocab_size or len(tokenizer)
    dataset, end_of_text = os.path.expanduser(dataset), tokenizer.eos_token_id
    cache = pathlib.Path(cache_dir or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "train_fsdp")

    def tokenize(hub, files: list[pathlib.Path], counts: Counter) -> Iterator[np.ndarray]:
        reading = (text_field, skip_bad_records, counts)
        parts = (read_documents(file_records(file, text_field, counts, True), file, *reading) for file in files)
        rows = () if files else read_documents(hub_records(hub, dataset, text_field, counts, True), dataset, *reading)
        total = sum(file.stat().st_size for file in files) if files else len(hub)
        for tokens in token_batches(itertools.chain(*parts, rows), tokenizer, TOKENIZE_BATCH, counts):
            progress(counts, total)
            yield tokens

    def cached(files: list[pathlib.Path], split: str) -> tuple[pathlib.Path, dict]:
        from filelock import FileLock

        hub = None if files else load_documents(dataset, split, subset)
        content = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files] or hub._fingerprint
        vocabulary = (vocabulary_of(tokenizer), end_of_text, vocab_size)
        fields = [text_field] if isinstance(text_field, str) else text_field[-1]  # tokens of another column
        identity = json.dumps([2, dataset, split, content, fields, *vocabulary])
        path = cache.expanduser() / f"tokens-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.bin"
        check = functools.partial(check_cache, path, skip_bad_records, check_whole)
        counts, wrong = check()
        if counts is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{path}.lock"):  # two runs that start together, or nodes with a common disk
                    counts, wrong = check()
                    if counts is None:
                        start, counts = time.perf_counter(), Counter()
                        if not pack_tokens(tokenize(hub, files, counts), path, vocab_size, counts):
                            raise UserError(f"--dataset {dataset}: it holds no text ({counts['bad records']} bad)")
                        counts = dict(counts, seconds=time.perf_counter() - start, damaged=wrong)
            except OSError as error:
                raise UserError(f"--cache-dir {path.parent}: cannot be written ({error.strerror})") from error
        return path, counts

    def prepare() -> tuple:
        files = local_files(dataset)
        part = split
        if part is None:
            part = "train" if files else "train[:5%]"
        name, bounds = parse_split(part) if files else (part, [])
        path, counts = cached(files and files_of_split(dataset, name, files), name)
        tokens = np.memmap(path, token_dtype(vocab_size), mode="r")
        first, last = cut_positions(bounds, tokens, end_of_text) if bounds else (0, None)
        return path, first, last, counts, part

    path, first, last, counts, split = from_main_process(
        prepare, accelerator is None or accelerator.is_local_main_process
    )
    packed = pack(np.memmap(path, token_dtype(vocab_size), mode="r")[first:last], seq_len, dataset, split)
    packed.path, packed.counts = path, counts
    return packed


def pack(tokens: np.ndarray, seq_len: int, dataset: str, split: str) -> PackedDataset:
    """The tokens of a corpus as windows; too few for one window are a UserError."""
    packed = PackedDataset(tokens, seq_len)
    if not len(packed):
        short = f"{len(tokens):,} tokens do not fill one window of --sequence-length {seq_len}"
        raise UserError(f"--dataset {dataset}, split {split!r}: {short}; use a shorter sequence or more text")
    return packed


def create_collate_fn(
    end_of_text: int | None = None, shift_labels: bool = True
) -> Callable[[list[np.ndarray]], dict[str, torch.Tensor]]:
    """Makes a batch of windows: `input_ids`, `labels` and `shift_labels`, int64 of shape (batch, seq_len).

    The labels are shifted already: `labels[:, t]` is the token that follows `input_ids[:, t]`. A plain transformers
    model would shift `labels` once more; it takes `shift_labels` as they are, but for families that ignore them:
    prophetnet. With `end_of_text` there are `position_ids` too, which begin again at 0 after each such token.
    """

    def collate(windows: list[np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = np.stack(windows).astype(np.int64)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if shift_labels:
            batch["shift_labels"] = batch["labels"]
        if end_of_text is not None:
            positions = np.arange(tokens.shape[1] - 1)
            starts = np.zeros_like(batch["input_ids"])  # of the document that each token belongs to
            starts[:, 1:] = np.where(tokens[:, :-2] == end_of_text, positions[1:], 0)
            batch["position_ids"] = positions - np.maximum.accumulate(starts, axis=1)
        return {name: torch.from_numpy(array.copy()) for name, array in batch.items()}  # one row would share its memory

    return collate


MOST_OPERATORS = 100_000  # of one count, which takes seconds; a dense model of 80 layers has 20,000


def get_gpu_peak_tflops(name: str | None = None) -> float | None:
    """Dense bf16 peak of one GPU in TFLOPS, by `find_gpu` (default: the current device); None for a CPU too."""
    if name is None and not torch.cuda.is_available():
        return None
    gpu = find_gpu(torch.cuda.get_device_name() if name is None else name)
    return gpu and gpu.peak_tflops


def get_model_flops_per_token(model, seq_len: int, causal: bool = False) -> int:
    """FLOPs of forward and backward per token, rounded: what torch counts in the real model (`count_flops`).

    Of softmax attention between linear layers that is the formula of PaLM (arXiv 2204.02311), appendix B, to the digit:
    6 x (parameters of each matmul that a token passes: real KV heads, active experts, LM head once, no embedding) +
    12 x layers x heads x head_dim x seq_len, halved with `causal`. A sliding window or chunk takes the place of
    `seq_len`, not with eager attention. `model` is a causal language model of transformers, sharded too, or its config.
    A ValueError says why there is no figure to be trusted, or no causal one.
    """
    return flops_per_token(model, seq_len, causal)


def flops_per_token(model, seq_len: int, causal: bool = False) -> int:
    """As `utils.get_model_flops_per_token`, which says what it returns and raises."""
    config = getattr(model, "config", model)
    rest, attention, half = count_flops(config, seq_len, causal)
    if causal and rest * (seq_len // 2) != count_flops(config, seq_len // 2, causal)[0] * seq_len:
        raise ValueError("no causal half: more grows with the sequence than softmax attention apart from the rest")
    return round((rest + (half if causal else attention)) / seq_len)


class FlopCounter(TorchDispatchMode):
    """Adds up what the operators inside take, backward too, by the table of torch.utils.flop_counter."""

    flops = convolutions = operators = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        self.operators += 1
        if self.operators > MOST_OPERATORS:
            raise OverflowError
        if formula := flop_registry.get(op.overloadpacket):
            angles = not torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0 and args[0].shape[-1] == 1
            flops = 0 if angles else formula(*args, **(kwargs or {}), out_val=result)  # rotary, an outer product
            if op.overloadpacket is torch.ops.aten.convolution_backward:  # whose formula ignores groups
                flops = 2 * args[0].numel() * args[2][0].numel() * sum(args[10][:2])
            self.flops += flops
            self.convolutions += flops * ("convolution" in op.name())
        elif re.search("attention|_mm", op.name()):
            raise ValueError(f"torch has no count for {op.name()}")
        return result


def count_flops(config, seq_len: int, apart: bool = False) -> tuple[float, float, float]:
    """FLOPs of a forward and backward of one sequence as torch counts them: (all but softmax attention, softmax
    attention as its masks leave it, the causal half of that). Eager attention is in the first, unless `apart`.

    All layers run on the meta device, where only shapes are computed, so sharding and compilation do not matter. Each
    token meets its own experts only. Mamba and linear attention run transformers' code in torch; where that takes too
    many operators (a step for each token), four short sequences are counted and the parabola through them continued.
    A ValueError where the model does not run without data, or the count of a product is not known.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, masking_utils
    from transformers.integrations import hub_kernels

    config, attended, windows = copy.deepcopy(config), [], set()

    def mask(batch_size, q_length, kv_length, local_size=None, dtype=None, **_):
        windows.update([local_size] if local_size else [])
        made = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype)
        made.window = kv_length if square else min(local_size or kv_length, kv_length)
        return made

    def attention(module, query, key, value, attention_mask, **options):
        keys = key.shape[2]
        window = getattr(attention_mask, "window", None) or whole(keys)
        span = window if window == getattr(config.get_text_config(), "attention_chunk_size", None) else keys
        per_key = 6 * query.shape[:3].numel() * (query.shape[3] + value.shape[3])
        attended.append((per_key * keys, per_key * window, per_key * window * (2 * span - window) / (2 * span)))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        biases = [x.sum() for x in (attention_mask, *options.values()) if torch.is_tensor(x) and x.requires_grad]
        return ((query @ key.mT + sum(biases)).softmax(-1) @ value).transpose(1, 2).contiguous(), None

    def whole(length: int) -> int:
        if min(windows, default=length) < length:
            raise ValueError("it has a sliding window, but does not say where")
        return length

    def build(attention: str | None):
        options = {"attn_implementation": attention, "experts_implementation": "batched_mm", "dtype": torch.float32}
        return AutoModelForCausalLM.from_config(config, **options).to("meta").eval()  # some make a tensor on the CPU

    def run(tokens: int) -> FlopCounter:
        attended.clear()
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with FlopCounter() as counter:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return counter

    with (
        mock.patch.dict(AttentionInterface._global_mapping, counted=attention),
        mock.patch.dict(masking_utils.AttentionMaskInterface._global_mapping, counted=mask, eager=mask),
        # transformers reads the tokens in these, and would take kernels that are installed
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
        mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True),
        torch.device("meta"),
    ):
        try:
            model = build(config._attn_implementation)
            square = model.config._attn_implementation == "eager"  # whatever the windows
            eager, tells = square and not apart, model._can_set_attn_implementation()
            model = model if eager else build("counted" if tells else "eager")
            with contextlib.suppress(OverflowError):
                flops = run(seq_len).flops - sum(part[0] for part in attended)
                eager or tells or whole(seq_len)
                return flops, sum(part[1] for part in attended), sum(part[2] for part in attended)
            for unit in (128, 2):
                with contextlib.suppress(OverflowError):
                    counters = [run(unit * n) for n in (1, 2, 3, 4)]
                    eager or whole(seq_len)
                    one, two, three, four = (counter.flops for counter in counters)
                    padding = 2 * counters[0].convolutions - counters[1].convolutions  # of convolutions, once
                    # a parabola; what is rounded up to a chunk would let it begin above the padding
                    if four - 3 * three + 3 * two - one or 3 * one - 3 * two + three > padding:
                        raise ValueError("its FLOPs do not grow evenly with the sequence")
                    n = seq_len / unit
                    return one * (n - 2) * (n - 3) / 2 - two * (n - 1) * (n - 3) + three * (n - 1) * (n - 2) / 2, 0, 0
        except Exception as error:
            raise ValueError(f"torch cannot count it: {first_line(error).split('. ')[0]}") from error
    raise ValueError(f"torch does not count it: more than {MOST_OPERATORS:,} operators for eight tokens")


def estimate_mfu(
    model_flops_per_token: float, num_tokens: int, time_elapsed: float, num_gpus: int, peak_tflops: float | None = None
) -> dict[str, float]:
    """Speed of `num_gpus` devices that together processed `num_tokens` tokens in `time_elapsed` seconds.

    `num_tokens` is global, of all ranks and microbatches: this is the only place where `num_gpus` divides. Returns
    `tokens_per_sec` and `actual_tflops_per_sec`, both global, and where the dense peak of one device is known (by
    default the current GPU's) `theoretical_tflops_total` (peak x num_gpus) and `mfu_percent` (100 x actual / it). A
    ValueError where `time_elapsed` or `num_gpus` is not positive.
    """
    if time_elapsed <= 0 or num_gpus <= 0:
        raise ValueError(f"time_elapsed ({time_elapsed}) and num_gpus ({num_gpus}) must be positive")
    tokens_per_sec = num_tokens / time_elapsed
    metrics = {"tokens_per_sec": tokens_per_sec, "actual_tflops_per_sec": tokens_per_sec * model_flops_per_token / 1e12}
    if peak_tflops := get_gpu_peak_tflops() if peak_tflops is None else peak_tflops:
        metrics["theoretical_tflops_total"] = peak_tflops * num_gpus
        metrics["mfu_percent"] = 100 * metrics["actual_tflops_per_sec"] / metrics["theoretical_tflops_total"]
    return metrics


@dataclass(eq=False)
class PerformanceTracker:
    """Speed of the steps after warmup.

    A window opens when the warmup ends and closes at each `step` that reads the clock; the device is synchronized at
    these two ends only. Give every step its tokens; with `synchronize=False` a step is only counted and costs nothing.
    """

    warmup_steps: int = 10  # left out at the start: compilation, allocator, autotuning
    num_gpus: int = 1  # that share the tokens
    peak_tflops: float | None = None  # dense, of one device; by default that of the current GPU

    def __post_init__(self):
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the warmup begins again."""
        self.steps_seen, self.warmup_seconds = 0, 0.0
        self.total = dict.fromkeys(("steps", "tokens", "flops", "seconds", "data_wait"), 0.0)
        self.windows: list[tuple[float, float]] = []  # (steps, seconds)
        self._open_window()

    def step(self, batch_tokens: int, model_flops_per_token: float, synchronize: bool = True) -> dict[str, Any]:
        """Counts one optimizer step of `batch_tokens` tokens (global: every rank, every microbatch).

        Returns `{}` in warmup and for a step that is only counted, `{"warmup_completed": True}` once, and afterwards
        the metrics of the window that this step closes: those of `estimate_mfu` and `tokens_per_sec_per_gpu`,
        `steps_per_sec`, `step_time_ms`, `data_wait_percent`.
        """
        self.steps_seen += 1
        if self.steps_seen < self.warmup_steps:
            return {}
        if self.steps_seen == self.warmup_steps:
            self.warmup_seconds = self.window["seconds"] + time.perf_counter() - self._start
            self._open_window()
            return {"warmup_completed": True}
        self.window["steps"] += 1
        self.window["tokens"] += batch_tokens
        self.window["flops"] += batch_tokens * model_flops_per_token
        if not synchronize:
            return {}
        wait_for_device()
        self.window["seconds"] += time.perf_counter() - self._start
        for key, value in self.window.items():
            self.total[key] += value
        self.windows.append((self.window["steps"], self.window["seconds"]))
        metrics = self._metrics(self.window)
        self._open_window()
        return metrics

    def summary(self) -> dict[str, float]:
        """Averages over every step after warmup; `{}` when there was none."""
        return self._metrics(self.total) if self.total["steps"] else {}

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """What runs inside (evaluation, a checkpoint, steps that are not given to `step`) is outside the window."""
        if self._start is None:  # inside another
            yield
            return
        wait_for_device()
        self.window["seconds"] += time.perf_counter() - self._start
        self._start = None
        try:
            yield
        finally:
            wait_for_device()
            self._start = time.perf_counter()

    @contextlib.contextmanager
    def data_wait(self) -> Iterator[None]:
        """What runs inside is time that the step waited for data."""
        start = time.perf_counter()
        yield
        if self._start is not None:
            self.window["data_wait"] += time.perf_counter() - start

    def get_print_message(self, metrics: dict[str, Any]) -> str:
        """The metrics on one line; empty in warmup."""
        device = "GPU" if torch.cuda.is_available() else "rank"
        parts = {
            "tokens_per_sec": "{:,.0f} tok/s",
            "tokens_per_sec_per_gpu": f"{{:,.0f}} tok/s/{device}" if self.num_gpus > 1 else "",
            "mfu_percent": "MFU {:.1f} %",
            "peak_memory_reserved": "{:.1f} GiB",
        }
        said = [text.format(metrics[key]) for key, text in parts.items() if key in metrics and text]
        return "  ".join(said) if "tokens_per_sec" in metrics else ""

    def _open_window(self) -> None:
        wait_for_device()
        self.window = dict.fromkeys(self.total, 0.0)
        self._start = time.perf_counter()

    def _metrics(self, window: dict[str, float]) -> dict[str, float]:
        seconds, tokens, flops = max(window["seconds"], 1e-9), window["tokens"], window["flops"]
        speed = estimate_mfu(flops / max(tokens, 1), tokens, seconds, self.num_gpus, self.peak_tflops if flops else 0)
        if not flops:  # unknown
            del speed["actual_tflops_per_sec"]
        return speed | {
            "tokens_per_sec_per_gpu": speed["tokens_per_sec"] / self.num_gpus,
            "steps_per_sec": window["steps"] / seconds,
            "step_time_ms": 1000 * seconds / window["steps"],
            "data_wait_percent": 100 * window["data_wait"] / seconds,
        }
