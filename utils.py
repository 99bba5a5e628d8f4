"""What the recipe in train_fsdp.py should not have to show: token packing, FLOP and MFU math, speed and memory figures.

Importing this module starts nothing and needs no GPU, no network and no optional package.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import functools
import glob
import hashlib
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from torch.utils.flop_counter import flop_registry

IGNORE_INDEX = -100  # label of a position that the loss leaves out, as in torch.nn.functional.cross_entropy
GIB = 2**30


class UserError(Exception):
    """Something the user can mend: the message names the flag or file, what is wrong and what to do."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


class UnreadableError(UserError):
    """Data that cannot be read; `harness.faults` finds out why."""

    record: tuple[Any, str] | None = None  # the first bad record and its field, where there is one


# ---- Data: documents are tokenized once into one flat, memory-mapped token array and read back as windows ------------

DATA_SUFFIXES = (".jsonl", ".txt", ".parquet")
DOCUMENT_MARK = "<|endoftext|>"  # separates the documents of a .txt file, as in the original TinyStories files
TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores
NOT_UTF8 = "\ufdd0not UTF-8\ufdd1"  # stands for bytes of a file that are no text, until `read_record` meets it
codecs.register_error("mark", lambda error: (NOT_UTF8, error.end))


def from_main_process(make: Callable[[], Any], is_main: bool) -> Any:
    """Calls `make` where `is_main`, one process of each node or of the world, and gives the others its result, pickled.

    Every rank calls this; what `make` raises is raised on every rank, so that none waits for one that has given up.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    # gloo, with a patience of its own: tokenizing a large corpus outlasts NCCL's watchdog
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    result, error = None, None
    try:
        result = make() if is_main else None
    except UserError as exception:
        error = exception
    except Exception:  # not every exception can be pickled
        error = RuntimeError(traceback.format_exc())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (is_main, error), group=group)
    if errors := [error for _, error in everyone if error is not None]:
        raise errors[0]
    mains = [rank for rank, (main, _) in enumerate(everyone) if main]
    if len(mains) == 1:  # a tokenizer is large: one broadcast, where gathering would hold it once for each rank
        box = [result]
        dist.broadcast_object_list(box, src=mains[0], group=group)
        result = box[0]
    else:
        dist.all_gather_object(everyone, result, group=group)
        result = everyone[max(rank for rank in mains if rank <= dist.get_rank())]
    dist.destroy_process_group(group)
    return result


def local_files(dataset: str) -> list[pathlib.Path]:
    """The data files of a local file or folder; none when `dataset` is a hub id."""
    path = pathlib.Path(dataset)
    files = sorted(f for f in path.rglob("*") if f.suffix in DATA_SUFFIXES) if path.is_dir() else [path]
    if path.exists():
        if {f.suffix for f in files} not in [{suffix} for suffix in DATA_SUFFIXES]:
            raise UserError(f"--dataset {dataset}: needs {'/'.join(DATA_SUFFIXES)} files, all of one kind")
        if empty := [f for f in files if f.stat().st_size == 0]:
            raise UserError(f"--dataset {empty[0]}: the file is empty")
        return files
    if path.suffix in DATA_SUFFIXES or dataset.startswith(("/", ".", "~")) or dataset.count("/") > 1:
        raise UserError(f"--dataset {dataset}: no such file or folder")
    return []


def files_of_split(dataset: str, split: str, files: list[pathlib.Path]) -> dict[str, list[str]]:
    """The local files of the splits that `split` names, else of all; `datasets` tells splits by the names of files."""
    if not os.path.isdir(dataset):
        return {"train": [str(file) for file in files]}
    from datasets.data_files import DataFilesDict, get_data_patterns

    root = os.path.realpath(dataset)
    found = DataFilesDict.from_patterns(get_data_patterns(root), base_path=root)
    named = found.keys() & re.split(r"[^\w.]", split) or found
    return {name: [file for file in found[name] if file.endswith(DATA_SUFFIXES)] for name in found if name in named}


def load_documents(dataset: str, split: str, files: list[pathlib.Path], streaming: bool = False, cache_dir=None):
    """The documents as a `datasets.Dataset` or `IterableDataset`, from the hub or local files; `.jsonl` gives lines and
    `.txt` texts in a column of that name, for `read_record`."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said below, once
    kind, options = files[0].suffix if files else "", {}
    if kind in (".jsonl", ".txt"):
        sample_by = "line" if kind == ".jsonl" else "document"
        options = {"encoding": "utf-8-sig", "encoding_errors": "mark", "sample_by": sample_by}
        options["features"] = datasets.Features({kind: datasets.Value("string")})
    try:
        if files:
            splits = files_of_split(dataset, split, files)
            options["data_files"] = {name: [*map(glob.escape, splits[name])] for name in splits}
            if kind == ".parquet":
                check_columns(itertools.chain(*splits.values()))
        builder = {"": dataset, ".parquet": "parquet"}.get(kind, "text")
        documents = datasets.load_dataset(builder, split=split, streaming=streaming, cache_dir=cache_dir, **options)
    except Exception as error:
        cause = first_line(error.__cause__ or error)
        raise UnreadableError(f"--dataset {dataset}, split {split!r}: cannot be read ({cause})") from error
    if streaming and kind == ".txt":  # shuffled and tokenized by story, not by file
        divide = functools.partial(divide_at_marks, field=kind)
        documents = documents.map(divide, batched=True, batch_size=1, input_columns=kind)
    return documents


def check_columns(files: Iterator[str]) -> None:
    """A ValueError where `.parquet` files differ in what they hold: `datasets` would turn numbers of one into text."""
    import pyarrow.parquet

    schemas = {str(pyarrow.parquet.read_schema(file)) for file in files}
    fields = {tuple(re.findall(r"^(?:text|input_ids): (?:large_)?(\w+)", schema, re.MULTILINE)) for schema in schemas}
    if len(fields) > 1:
        raise ValueError("the files have fields of different types")


def read_record(value: Any, field: str) -> str | list[int] | None:
    """The text or token ids of a record, or None for a bad one, which has neither.

    `field` is the column of `value`, .jsonl for a line of such a file, .txt for a document of one.
    """
    if field == ".jsonl":
        try:
            record = json.loads(value) if value.strip() else {"input_ids": []}  # a blank line is no document
        except (ValueError, RecursionError):
            return None
        record = record if isinstance(record, dict) else {}
        field = "input_ids" if "input_ids" in record else "text"
        value = record.get(field)
    if field == "input_ids":
        good = isinstance(value, list) and set(map(type, value)) <= {int}
        good = good and 0 <= min(value, default=0) <= max(value, default=0) < 2**32
    else:
        good = isinstance(value, str) and NOT_UTF8 not in value and not (field == ".txt" and "\0" in value)
        good = good and (value.isascii() or not re.search("[\ud800-\udfff]", value))  # of an escape in JSON
    return value if good else None


def values_of(column) -> list:
    """The values of an Arrow column, marked where text is not UTF-8, which Arrow does not check."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [value and value.decode(errors="mark") for value in column.cast("binary").to_pylist()]


def divide_at_marks(texts: list[str], field: str = "text") -> dict[str, list[str]]:
    """The field `field` of each document in `texts`, of which one may hold several; empty ones are left out."""
    parts = []
    for text in filter(None, texts):
        divided = [part.strip("\n") for part in text.split(DOCUMENT_MARK)] if DOCUMENT_MARK in text else [text]
        parts += (part for part in divided if part.strip("\n"))
    return {field: parts}


def first_line(error: BaseException) -> str:
    """What an exception says, in one line that fits into one of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def token_batches(
    documents, tokenizer, source: str, batch_size: int = TOKENIZE_BATCH, skip_bad: bool = False, counts: Any = None
) -> Iterator[np.ndarray]:
    """Token ids of all documents in order, an end-of-text token after each, as one flat array per `batch_size` rows.

    A column `input_ids` is tokenized already and taken as it is. `counts`, a Counter, gets the numbers of documents, of
    empty ones, and of bad records that `skip_bad` left out.
    """
    end_of_text = getattr(tokenizer, "eos_token_id", None)
    counts = Counter() if counts is None else counts
    for table in documents.with_format("arrow").iter(batch_size):
        field = next((name for name in ("input_ids", "text", *DATA_SUFFIXES) if name in table.column_names), None)
        if field is None:
            raise UserError(f"--dataset {source}: no field 'text' (fields: {', '.join(table.column_names)})")
        column, records = table[field], []
        if re.search("list<.*: u?int", str(column.type)):
            column = column.combine_chunks()
            if not (column.null_count or column.flatten().null_count):
                counts["documents"] += len(column)
                yield column.flatten().to_numpy(zero_copy_only=False)
                continue
        values = divide_at_marks(values_of(column), field)[field] if field == ".txt" else values_of(column)
        for value in values:
            record = read_record(value, field)
            if record is None and not skip_bad:
                error = UnreadableError(f"--dataset {source}: a record has no text; --skip-bad-records leaves such out")
                error.record = (value, field)
                raise error
            counts["bad records"] += record is None
            counts["empty documents"] += isinstance(record, str) and not record.strip("\n")
            records += divide_at_marks([record])["text"] if isinstance(record, str) else filter(None, [record])
        texts = [record for record in records if isinstance(record, str)]
        if texts and end_of_text is None:
            raise UserError(f"--tokenizer {tokenizer.name_or_path}: it has no end-of-text token (eos_token)")
        if tokenizer.is_fast:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            encoded = (encoding.ids for encoding in encodings)
        else:
            encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
        documents_ids = [[*next(encoded), end_of_text] if isinstance(record, str) else record for record in records]
        counts["documents"] += len(documents_ids)
        yield np.fromiter(itertools.chain(*documents_ids), dtype=np.uint32, count=sum(map(len, documents_ids)))


def in_vocabulary(batches: Iterator[np.ndarray], vocab_size: int) -> Iterator[np.ndarray]:
    """Arrays of token ids in the smallest type that holds a vocabulary; an id not below `vocab_size` is a UserError."""
    for tokens in batches:
        largest = int(tokens.view(f"u{tokens.itemsize}").max(initial=0))  # a negative id is huge
        if largest >= vocab_size:
            limit = f"the model has only {vocab_size} embeddings; use the model's own tokenizer"
            raise UserError(f"--tokenizer: it gave token id {largest}, but {limit}")
        yield tokens.astype(token_dtype(vocab_size), copy=False)


def pack_tokens(batches: Iterator[np.ndarray], path: str | os.PathLike, vocab_size: int, counts: Any = None) -> int:
    """Lays arrays of token ids end to end into the raw file `path`; returns how many tokens it holds.

    The file appears under its name only when it is whole and not empty; after it, in a `.json` beside it, the record
    that `check_cache` compares it with: size, checksum and `counts`.

    Raises:
        UserError: an id is not below `vocab_size`; the disk is full or not writable.
    """
    path, total, digest = pathlib.Path(path), 0, hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
            with open(os.path.join(folder, "tokens"), "wb") as file:
                for tokens in in_vocabulary(batches, vocab_size):
                    total += len(tokens)
                    file.write(tokens.data)
                    digest.update(tokens.data)
            if total:
                os.replace(file.name, path)
                record = {"dtype": np.dtype(token_dtype(vocab_size)).name, "bytes": path.stat().st_size}
                write_record(path, record | {"sha256": digest.hexdigest(), "counts": counts or {}})
    except OSError as error:
        raise UserError(f"--cache-dir {path.parent}: cannot write the token cache ({error.strerror})") from error
    return total


def write_record(path: pathlib.Path, record: dict) -> None:
    """Replaces what stands beside a token cache about it, at once."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
        file = pathlib.Path(folder, "record")
        file.write_text(json.dumps(record))
        os.replace(file, path.with_suffix(".json"))


def check_cache(path: pathlib.Path, vocab_size: int, skip_bad: bool, whole: bool) -> tuple[dict | None, str]:
    """(what was counted in the corpus, "") for a token cache that is as it was written, else (None, what is wrong).

    It is compared with its checksum if `whole` or if its ctime, which no program can set, is new since the last time.
    """
    try:
        record, status, now = json.loads(path.with_suffix(".json").read_text()), path.stat(), time.time_ns()
        if status.st_size != record["bytes"] or record["dtype"] != np.dtype(token_dtype(vocab_size)).name:
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
    split: str = "train[:5%]",
    vocab_size: int | None = None,
    cache_dir: str | os.PathLike | None = None,
    log: Callable[[str], None] = lambda line: None,
    skip_bad_records: bool = False,
    check_whole: bool = False,
    name_fault: Callable[..., UserError] = lambda error, *_: error,
) -> PackedDataset:
    """Tokenizes a corpus once, caches it as one flat file, and returns it as packed windows.

    The main process of each node tokenizes (all cores); the others map the same file. Its name covers the documents
    (path, size, time; a hub data set's fingerprint), split, tokenizer and vocabulary: a second start reads it alone.

    Args:
        tokenizer: of transformers; its `eos_token` goes after each document.
        accelerator: the run's `Accelerator`, or None for one process.
        dataset: hub id, or a local `.jsonl`, `.txt` (with `<|endoftext|>` between documents) or `.parquet` file or
            folder of them.
        vocab_size: embeddings of the model; by default the tokenizer's own size.
        cache_dir: where the flat files lie; by default `$XDG_CACHE_HOME/train_fsdp` or `~/.cache/train_fsdp`.
        skip_bad_records: leave out, and count, records that have no text; otherwise the first is a UserError.
        check_whole: compare a cache with its checksum even if it has not changed since that was last done.
        name_fault: `harness.faults.name_fault`, which says more of what cannot be read: file, line, what to do.

    Raises:
        UserError: no such data, no text in it, hub not reachable, less than one window, an id without embedding.
    """
    vocab_size = vocab_size or len(tokenizer)
    dataset = os.path.expanduser(dataset)
    cache = pathlib.Path(cache_dir or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "train_fsdp")

    def prepare() -> pathlib.Path:
        from filelock import FileLock, Timeout

        files = local_files(dataset)
        try:
            documents = None if files else load_documents(dataset, split, files)
        except UnreadableError as error:
            raise name_fault(error, dataset, split, files, cache) from error
        content = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files] or documents._fingerprint
        tokens = [vocabulary_of(tokenizer), tokenizer.eos_token_id, vocab_size]
        identity = json.dumps([1, dataset, split, content, *tokens])
        path = cache.expanduser() / f"tokens-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.bin"
        for folder in path.parent.glob("tokens-*.bin?*/"):  # of killed runs; where its lock is held, one is alive
            lock = FileLock(f"{str(folder).rpartition('.bin')[0]}.bin.lock", timeout=0)
            with contextlib.suppress(OSError, Timeout), lock:
                shutil.rmtree(folder)
        check = functools.partial(check_cache, path, vocab_size, skip_bad_records, check_whole)
        (counts, wrong), done = check(), ""
        if counts is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # with the lock two runs that start together, or nodes with a common disk, tokenize once
                with FileLock(f"{path}.lock"), tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
                    counts, wrong = check()
                    if counts is None:
                        start, counts = time.perf_counter(), Counter()
                        documents = documents or load_documents(dataset, split, files, cache_dir=folder)
                        reading = (dataset, TOKENIZE_BATCH, skip_bad_records, counts)
                        if not pack_tokens(token_batches(documents, tokenizer, *reading), path, vocab_size, counts):
                            raise UserError(f"--dataset {dataset}, split {split!r}: it holds no text")
                        again = f" again (the cache was damaged: {wrong})" * bool(wrong)
                        seconds = time.perf_counter() - start
                        done = f"tokenized {counts['documents']:,} documents{again} in {seconds:.1f} s, "
            except UnreadableError as error:
                raise name_fault(error, dataset, split, files, cache) from error
            except OSError as error:
                raise UserError(f"--cache-dir {path.parent}: cannot be written ({error.strerror})") from error
        left_out = [f"{kind} {counts[kind]:,}" for kind in ("empty documents", "bad records") if counts.get(kind)]
        log(f"{done}cached in {path}" + f", left out: {', '.join(left_out)}" * bool(left_out))
        return path

    path = from_main_process(prepare, accelerator is None or accelerator.is_local_main_process)
    return pack(np.memmap(path, token_dtype(vocab_size), mode="r"), seq_len, dataset, split)


def pack(tokens: np.ndarray, seq_len: int, dataset: str, split: str) -> PackedDataset:
    """The tokens of a corpus as windows; too few for one window are a UserError."""
    packed = PackedDataset(tokens, seq_len)
    if not len(packed):
        short = f"{len(tokens):,} tokens do not fill one window of --sequence-length {seq_len}"
        raise UserError(f"--dataset {dataset}, split {split!r}: {short}; use a shorter sequence or more text")
    return packed


def create_collate_fn(end_of_text: int | None = None) -> Callable[[list[np.ndarray]], dict[str, torch.Tensor]]:
    """Makes a batch of windows: `input_ids` and `labels`, both int64 of shape (batch, seq_len).

    The labels are shifted already: `labels[:, t]` is the token that follows `input_ids[:, t]`. With `end_of_text` there
    are `position_ids` too, which begin again at 0 after each such token.
    """

    def collate(windows: list[np.ndarray]) -> dict[str, torch.Tensor]:
        tokens = np.stack(windows).astype(np.int64)
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if end_of_text is not None:
            positions = np.arange(tokens.shape[1] - 1)
            starts = np.zeros_like(batch["input_ids"])  # of the document that each token belongs to
            starts[:, 1:] = np.where(tokens[:, :-2] == end_of_text, positions[1:], 0)
            batch["position_ids"] = positions - np.maximum.accumulate(starts, axis=1)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}

    return collate


# ---- FLOPs and MFU ---------------------------------------------------------------------------------------------------

MOST_OPERATORS = 100_000  # of one count, which takes seconds; a dense model of 80 layers has 20,000


class Gpu(NamedTuple):
    """One kind of GPU by its vendor's datasheet. Bandwidths are in GB/s, per GPU and direction."""

    name: str  # a pattern; the first of the table that is found in the device's name counts
    peak_tflops: float  # dense bf16 on the tensor cores, without sparsity, with fp32 accumulation
    memory_gib: float = 0  # total_memory of torch's device properties; this and what follows for plans, 0 if unknown
    memory: float = 0
    link: float = 0  # to the GPUs of its node: NVLink, or PCIe where there is none
    network: float = 0  # its share of the node's network cards, in the vendor's reference system
    fp8: int = 2  # float8 matmul rate over that of bf16; 0 without float8


# A bare "H100" or "H800" is not listed: their forms differ.
GPUS = (
    Gpu(r"GB200", 2500.0, 184.0, 8000, 900, 50),  # GB200 NVL72: 180 PFLOPS for 72 GPUs
    Gpu(r"GB300", 2500.0),  # GB300 NVL72
    Gpu(r"B200", 2250.0, 178.3, 7700, 900, 50),  # DGX B200: 18 PFLOPS for 8; memory by its driver (pytorch/ao#4002)
    Gpu(r"B300", 2250.0),  # DGX B300
    Gpu(r"GH200", 989.0, 94.5, 4000, 450, 50),
    Gpu(r"H200 NVL", 835.0, 139.7, 4800, 450, 50),  # H200, NVL column (1,671 with sparsity)
    Gpu(r"H200", 989.0, 139.7, 4800, 450, 50),  # H200, SXM column (1,979 with sparsity); DGX H200
    Gpu(r"H100 NVL", 835.0, 93.1, 3938, 300, 50),  # H100, NVL column (1,671 with sparsity)
    Gpu(r"H100 PCIE", 756.0, 79.1, 2039, 64, 25),  # H100 PCIe (1,513 with sparsity)
    Gpu(r"H100.*(SXM|HBM3)", 989.0, 79.1, 3350, 450, 50),  # H100, SXM column (1,979 with sparsity); DGX H100
    Gpu(r"H800 NVL", 835.0),  # the H800's links are slower than the H100's
    Gpu(r"H800 PCIE", 756.0),
    Gpu(r"H800.*(SXM|HBM3)", 989.0),
    Gpu(r"H20\b", 148.0, 95.0, 4000, 450, 50),
    Gpu(r"A100.*40GB", 312.0, 39.4, 1555, 300, 25, fp8=0),  # A100, SXM and PCIe alike; DGX A100
    Gpu(r"A100.*80GB", 312.0, 79.1, 2039, 300, 25, fp8=0),
    Gpu(r"A[18]00\b", 312.0, fp8=0),
    Gpu(r"A40\b", 149.7, fp8=0),
    Gpu(r"A30\b", 165.0, fp8=0),
    Gpu(r"A10G", 70.0, fp8=0),  # 140 with sparsity
    Gpu(r"A10\b", 125.0, fp8=0),
    Gpu(r"RTX A6000", 154.8, 47.4, 768, 32, 12.5, fp8=0),  # NVIDIA Ampere GA102 white paper
    Gpu(r"L40S", 362.0, 44.4, 864, 32, 12.5),  # 733 with sparsity
    Gpu(r"L40\b", 181.0),
    Gpu(r"L20\b", 119.5),
    Gpu(r"L4\b", 121.0),  # 242 with sparsity
    Gpu(r"RTX 5090(?! D)", 209.5, 31.3, 1792, 64, 12.5),  # NVIDIA RTX Blackwell white paper
    Gpu(r"RTX 4090(?! D)", 165.2, 23.5, 1008, 32, 12.5),  # NVIDIA Ada white paper
    Gpu(r"RTX 3090(?! TI)", 71.0, 23.6, 936, 32, 12.5, fp8=0),  # NVIDIA Ampere GA102 white paper
    Gpu(r"MI355X", 2516.6),  # AMD Instinct MI355X
    Gpu(r"MI3(00|25)X", 1307.4),  # AMD Instinct MI300X, MI325X
    Gpu(r"MI250X", 191.5, fp8=0),  # AMD Instinct MI250X: 383 a module, which shows as two devices
)


def find_gpu(name: str) -> Gpu | None:
    """The kind of a GPU by its driver's name; None, never a guess, for an unlisted one, a laptop's, a slice of one."""
    if re.search(r"\b(MIG|GRID|Laptop|Max-Q)\b|-\d+[ABCQ]$", name):
        return None
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.name}", name, re.IGNORECASE)), None)


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

    Raises:
        ValueError: there is no figure to be trusted, or no causal one; it says why.
    """
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

    Raises:
        ValueError: the model does not run without data, or the count of a product is not known.
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
    default the current GPU's) `theoretical_tflops_total` (peak x num_gpus) and `mfu_percent` (100 x actual / it).

    Raises:
        ValueError: `time_elapsed` or `num_gpus` is not positive.
    """
    if time_elapsed <= 0 or num_gpus <= 0:
        raise ValueError(f"time_elapsed ({time_elapsed}) and num_gpus ({num_gpus}) must be positive")
    tokens_per_sec = num_tokens / time_elapsed
    metrics = {"tokens_per_sec": tokens_per_sec, "actual_tflops_per_sec": tokens_per_sec * model_flops_per_token / 1e12}
    if peak_tflops := get_gpu_peak_tflops() if peak_tflops is None else peak_tflops:
        metrics["theoretical_tflops_total"] = peak_tflops * num_gpus
        metrics["mfu_percent"] = 100 * metrics["actual_tflops_per_sec"] / metrics["theoretical_tflops_total"]
    return metrics


# ---- Speed and memory while training ---------------------------------------------------------------------------------


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
        self.steps_seen, self.warmup_seconds, self.productive_before = 0, 0.0, 0.0  # the last of earlier processes
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

    def productive_seconds(self) -> float:
        """What the steps so far take at their usual speed, that of the median window, and at most what they took."""
        usual = statistics.median_low([seconds / steps for steps, seconds in self.windows] or [0.0])
        measured = sum(s if s < 2 * n * usual else n * usual for n, s in self.windows)  # else it stood still
        return self.productive_before + measured + min(usual * self.warmup_steps, self.warmup_seconds)

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


def wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
