"""Corpora: which text a run trains on and which it holds out, and the progress of tokenizing it. Called by the script.
Independent of how files are read (`formats`, `streaming`) and of which rank takes which window (`sample_order`)."""

import contextlib
import functools
import os
import pathlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from accelerate import PartialState
from tqdm import tqdm

from harness.base.errors import NoSplitError, UnreadableError, UserError
from harness.base.hub import answer_from_cache_without_network
from harness.base.ranks import from_main_process, on_main_rank
from harness.base.text import counted, shortened
from harness.data import held_out as held
from harness.data import sample_order, streaming, windows
from harness.data.corpus_files import find_files
from harness.data.faults import name_fault
from harness.data.records import DEFAULT_FIELD
from harness.data.splits import cut_positions
from harness.data.windows import PackedDataset
from harness.flags.commands import given
from harness.flags.settings import ASSETS, Settings, is_local
from harness.job import terminal
from harness.job.printing import say

DEFAULT_EVAL_SPLIT = "validation"
SYNTHETIC_EVAL_WINDOWS = 1024
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 30  # between two reports of progress, on a terminal and elsewhere


def load_data(settings: Settings, tokenizer, config, get_dataset, manifest: dict | None = None):
    """The training windows, with their lines of the header in `header`, and, where evaluation is asked for, the
    held-out ones, else None. `get_dataset` is that of `utils`.

    Held out is the split --eval-split; by default the split `validation`, and where there is none some of the documents
    that would be trained on, by the rule in `held_out`. `manifest` is that of the checkpoint that the run resumes: its
    rules apply again, and where it lacks one, those of the versions before that rule.
    """
    vocab_size = config.get_text_config().vocab_size
    if settings.dataset == "synthetic":
        return synthetic_data(settings, vocab_size)
    if settings.document_mask and tokenizer.eos_token_id is None:
        raise UserError(
            f"--document-mask: {tokenizer.name_or_path} has no end-of-text token (eos_token)", entry="no-end-of-text"
        )
    if not terminal.is_terminal(sys.stderr):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    source = os.path.expanduser(settings.dataset)
    if source == "demo":
        source = str(ASSETS / "demo" / "stories")
    answer_from_cache_without_network(source)
    ids_first = prefers_token_ids(settings, manifest)
    corpus = {
        "tokenizer": tokenizer,
        "seq_len": settings.sequence_length,
        "dataset": source,
        "vocab_size": vocab_size,
        "skip_bad_records": settings.skip_bad_records,
        "accelerator": PartialState(cpu=not torch.cuda.is_available()),  # tells which process is the main one
        "text_field": ("input_ids", settings.text_field) if ids_first else settings.text_field,
        "subset": settings.dataset_config,
    }
    if settings.streaming:
        load = functools.partial(streaming.stream_dataset, **corpus, seed=settings.seed)
    else:
        load = functools.partial(cached, settings, get_dataset, corpus)
    train = load(split=settings.dataset_split)
    held_out, held_out_name, rule = None, "", None
    if settings.eval_interval:
        held_out = load_eval_split(settings, load)
        held_out_name = settings.eval_split or DEFAULT_EVAL_SPLIT
        if held_out is None:
            rule = held_out_rule(manifest)
            train, held_out, held_out_name = hold_out(train, source, tokenizer.eos_token_id, rule)
        if settings.streaming:
            held_out = read_windows(held_out, settings.eval_steps * settings.batch_size * dist.get_world_size())
    train.header = describe(settings, train, held_out, held_out_name)
    if is_local(source) and dist.get_rank() == 0:
        train.header |= describe_files(source)
    train.rules = {"held_out": rule, "ids_first": ids_first}
    if settings.streaming:
        train.rules["corpus"] = train.content
    elif settings.num_steps:
        check_fills_a_batch(settings, train)
    if settings.document_mask:
        train.end_of_text = tokenizer.eos_token_id
        if held_out is not None:
            held_out.end_of_text = tokenizer.eos_token_id
    return train, held_out


def synthetic_data(settings: Settings, vocab_size: int):
    """(random windows to train on, others to evaluate on, None without evaluation)."""
    train = sample_order.SyntheticDataset(vocab_size, settings.sequence_length, settings.seed)
    train.header = {"data": "synthetic, random tokens"}
    held_out = None
    if settings.eval_interval:
        held_out = sample_order.SyntheticDataset(
            vocab_size, settings.sequence_length, settings.seed + 1, windows=SYNTHETIC_EVAL_WINDOWS
        )
    return train, held_out


def prefers_token_ids(settings: Settings, manifest: dict | None) -> bool:
    """Whether a column of token ids is taken before one of text: not where --text-field is given. A resumed run keeps
    what its checkpoint has; older checkpoints are of runs that always did."""
    if manifest is not None:
        return manifest.get("ids_first", True)
    return "text_field" not in given(settings.argv)


def held_out_rule(manifest: dict | None) -> str:
    """The rule by which documents are held out. A resumed run keeps its checkpoint's; older checkpoints name none."""
    if manifest is None:
        return held.RULE
    return manifest.get("held_out", held.OLD_RULE) or held.RULE


def load_eval_split(settings: Settings, load: Callable):
    """The split of --eval-split or, where it is not given, the split `validation`; None where there is none."""
    try:
        return load(split=settings.eval_split or DEFAULT_EVAL_SPLIT)
    except NoSplitError:
        if settings.eval_split:
            raise
        return None


def read_windows(stream: streaming.StreamedDataset, count: int) -> PackedDataset:
    """The first windows of a stream, all for 0, read by rank 0 for all ranks."""
    return on_main_rank(lambda: stream.head(count))


def check_fills_a_batch(settings: Settings, train: PackedDataset) -> None:
    """Raises a UserError where a corpus has fewer windows than one optimizer step takes."""
    needed = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    if len(train) < needed:
        problem = f"{len(train):,} windows of {settings.sequence_length} tokens do not fill one global batch"
        advice = "use a smaller batch, a shorter sequence or more text"
        data = f"--dataset {settings.dataset}, split {settings.dataset_split!r}"
        raise UserError(f"{data}: {problem} of {needed}; {advice}", entry="too-little-text")


def first_words(dataset, tokenizer) -> str:
    """The first words of a corpus, as the beginning of a generated story; empty where it has no text."""
    if tokenizer is None or not isinstance(dataset, PackedDataset):
        return ""
    text = tokenizer.decode(dataset[0][:12], skip_special_tokens=True)
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut


def describe(settings: Settings, train, held_out, held_out_name: str) -> dict[str, str]:
    """The lines of the header about the text: the split that is trained on, and what is held out."""
    source = ", ".join(filter(None, [settings.dataset, settings.dataset_config, settings.dataset_split]))
    size = "streamed"
    if not settings.streaming:
        tokens = len(train) * settings.sequence_length
        steps = tokens / settings.tokens_per_step(dist.get_world_size())
        size = f"{tokens:,} tokens, {steps:,.1f} steps an epoch"
    lines = {"data": f"{source}: {size}"}
    if held_out is not None:
        lines["held out"] = f"{held_out_name}: {len(held_out) * settings.sequence_length:,} tokens"
    return lines


def read_cached(
    get_dataset: Callable, corpus: dict, split: str, cache_dir: str | None = None, check_whole: bool = False
):
    """(a split, tokenized now or by an earlier run; a line about which, and what was left out)."""
    try:
        with progress_of_tokenizing() as report:
            packed = get_dataset(**corpus, split=split, cache_dir=cache_dir, check_whole=check_whole, progress=report)
    except UnreadableError as error:
        field = corpus.get("text_field", DEFAULT_FIELD)
        fault = functools.partial(name_fault, error, corpus["dataset"], split, field)
        raise from_main_process(fault, not dist.is_initialized() or dist.get_rank() == 0) from error
    remove_leftovers(packed.path.parent)
    return packed, describe_cache(packed)


def describe_cache(packed: PackedDataset) -> str:
    """The line about a tokenized split: how long tokenizing took if it was done now, where it lies, what it lacks."""
    counts = packed.counts
    line = f"cached in {packed.path}"
    if "seconds" in counts:
        tokenized = f"tokenized {counted(counts['documents'], 'document')}"
        if counts["damaged"]:
            tokenized += f" again (the cache was damaged: {counts['damaged']})"
        line = f"{tokenized} in {counts['seconds']:.1f} s, {line}"
    left_out = [f"{kind} {counts[kind]:,}" for kind in ("empty documents", "bad records") if counts.get(kind)]
    if left_out:
        line += f", left out: {', '.join(left_out)}"
    return line


def cached(settings: Settings, get_dataset: Callable, corpus: dict, split: str) -> PackedDataset:
    """A split from the token cache, with its line on the console."""
    packed, line = read_cached(get_dataset, corpus, split, settings.cache_dir, check_whole=settings.resume != "none")
    say("data      ", line)
    return packed


def describe_files(source: str) -> dict[str, str]:
    """The line of the header about files that lie among the data files of a folder or pattern and are not read."""
    files, left_out = find_files(source)
    if not left_out:
        return {}
    return {"files": f"{len(files):,} of {len(files) + len(left_out):,} (left out: {shortened(left_out)})"}


def hold_out(train, source: str, end_of_text: int | None, rule: str):
    """(a corpus without what is held out by a rule of `held_out`, what is held out, its name in the header)."""
    if isinstance(train, streaming.StreamedDataset):
        kept, held_out = train.hold_out(rule)
        documents = " documents" if rule == held.RULE else ""
        return kept, held_out, f"{rule}{documents} of it"
    tokens, pack = train.tokens, functools.partial(windows.pack, seq_len=train.seq_len, dataset=source)
    if rule == held.RULE:
        parts = on_main_rank(lambda: held.divide(tokens, end_of_text))
        if parts:
            kept, held_out = (held.Stretches(tokens, *part) for part in parts)
            return pack(kept, split="train"), pack(held_out, split=rule), f"{rule} documents of it"
        cut = len(tokens) * (100 - held.PERCENT) // 100  # too few documents to choose among
    else:
        (cut,) = on_main_rank(lambda: cut_positions([f"{100 - held.PERCENT}%"], tokens, end_of_text))
    kept, held_out = pack(tokens[:cut], split="train"), pack(tokens[cut:], split=held.OLD_RULE)
    return kept, held_out, f"{held.OLD_RULE} of it"


@contextlib.contextmanager
def progress_of_tokenizing():
    """A function that prints on rank 0 how far the tokenizing is: on a terminal in one line that goes away at the end,
    elsewhere in a line each half minute."""
    start = last_report = time.monotonic()
    on_terminal = terminal.is_terminal(sys.stderr)
    interval = TERMINAL_SECONDS if on_terminal else LOG_SECONDS

    def report(counts: Counter, total: int) -> None:
        nonlocal last_report
        now = time.monotonic()
        if now - last_report < interval or (dist.is_initialized() and dist.get_rank()):
            return
        last_report, seconds, read = now, now - start, max(counts["read"], 1)
        left = tqdm.format_interval(seconds * max(0, total - read) / read)
        speed = f"{counts['documents']:,} documents, {counts['tokens'] / seconds:,.0f} tokens/s, {left} left"
        line = f"tokenizing {min(1, read / total):4.0%}  {speed}"
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(terminal.CLEAR + line[:width], end="", file=sys.stderr, flush=True)
        else:
            print(f"data       {line}", flush=True)

    try:
        yield report
    finally:
        if on_terminal and last_report > start:
            print(terminal.CLEAR, end="", file=sys.stderr, flush=True)


def remove_leftovers(cache: pathlib.Path) -> None:
    """Removes what killed runs left in the token cache; where its lock is held, a live one is writing."""
    from filelock import FileLock, Timeout

    for folder in cache.glob("tokens-*.bin?*/"):
        lock = FileLock(f"{str(folder).rpartition('.bin')[0]}.bin.lock", timeout=0)
        with contextlib.suppress(OSError, Timeout), lock:
            shutil.rmtree(folder)
