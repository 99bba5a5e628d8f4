"""Corpora: which text a run trains on and which it holds out, and what is said while it is tokenized. Called by the
script. Independent of how files are read (`formats`, `streaming`) and of who takes which window (`sample_order`)."""

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


def load_data(settings: Settings, tokenizer, config, get_dataset, manifest: dict | None = None):
    """The training windows, with what the header says of them in `header`, and, where evaluation is asked for, the
    held-out ones, else None. `get_dataset` is that of `utils`.

    Held out is what --eval-split says; where it is not given the split `validation`, and where there is none some of
    the documents that would be trained on, by the rule in `held_out`. `manifest` is that of the checkpoint that the
    run goes on from: what it says of data was decided by its rules, and where it lacks a field by those before it.
    """
    vocab_size = config.get_text_config().vocab_size
    if settings.dataset == "synthetic":
        train = sample_order.SyntheticDataset(vocab_size, settings.sequence_length, settings.seed)
        train.header = {"data": "synthetic, random tokens"}
        held_out = sample_order.SyntheticDataset(vocab_size, settings.sequence_length, settings.seed + 1, windows=1024)
        return train, held_out if settings.eval_interval else None
    if settings.document_mask and tokenizer.eos_token_id is None:
        raise UserError(f"--document-mask: {tokenizer.name_or_path} has no end-of-text token (eos_token)")
    if not terminal.is_terminal(sys.stderr):
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    source = os.path.expanduser(settings.dataset)
    source = str(ASSETS / "demo" / "stories") if source == "demo" else source
    answer_from_cache_without_network(source)
    corpus = {"tokenizer": tokenizer, "seq_len": settings.sequence_length, "dataset": source, "vocab_size": vocab_size}
    corpus["skip_bad_records"] = settings.skip_bad_records
    corpus["accelerator"] = PartialState(cpu=not torch.cuda.is_available())  # tells which process is the main one
    ids_first = "text_field" not in given(settings.argv)  # a field that is asked for wins over token ids
    if manifest is not None:
        ids_first = manifest.get("ids_first", True)
    field = ("input_ids", settings.text_field) if ids_first else settings.text_field
    corpus |= {"text_field": field, "subset": settings.dataset_config}
    load = functools.partial(cached, settings, get_dataset, corpus)
    if settings.streaming:
        load = functools.partial(streaming.stream_dataset, **corpus, seed=settings.seed)
    train, held_out, named, rule = load(split=settings.dataset_split), None, "", None
    if settings.eval_interval:
        try:
            held_out, named = load(split=settings.eval_split or "validation"), settings.eval_split or "validation"
        except NoSplitError:
            if settings.eval_split:
                raise
            rule = held.RULE
            if manifest is not None:
                rule = manifest.get("held_out", held.OLD_RULE) or held.RULE
            train, held_out, named = hold_out(train, source, tokenizer.eos_token_id, rule)
        if settings.streaming:
            windows = settings.eval_steps * settings.batch_size * dist.get_world_size()
            held_out = on_main_rank(lambda: held_out.head(windows))
    train.header = describe(settings, train, held_out, named)
    if is_local(source) and dist.get_rank() == 0:
        train.header |= describe_files(source)
    train.rules = {"held_out": rule, "ids_first": ids_first}
    if settings.streaming:
        train.rules["corpus"] = train.content
    if not settings.streaming and settings.num_steps:
        needed = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
        if len(train) < needed:
            windows = f"{len(train):,} windows of {settings.sequence_length} tokens do not fill one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            data = f"--dataset {settings.dataset}, split {settings.dataset_split!r}"
            raise UserError(f"{data}: {windows} of {needed}; {advice}")
    if settings.document_mask:
        for packed in filter(None, (train, held_out)):
            packed.end_of_text = tokenizer.eos_token_id
    return train, held_out


def opening(dataset, tokenizer) -> str:
    """The first words of a text that was read, for a story to begin with; empty where there are none."""
    if tokenizer is None or not isinstance(dataset, PackedDataset):
        return ""
    text = tokenizer.decode(dataset[0][:12], skip_special_tokens=True)
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut


def describe(settings: Settings, train, held_out, named: str) -> dict[str, str]:
    """The lines of the header about the text: which split is trained on, and which, by name, is held out."""
    source = ", ".join(filter(None, [settings.dataset, settings.dataset_config, settings.dataset_split]))
    size = 0 if settings.streaming else len(train) * settings.sequence_length
    steps = size / settings.tokens_per_step(dist.get_world_size())
    lines = {"data": f"{source}: " + (f"{size:,} tokens, {steps:,.1f} steps an epoch" if size else "streamed")}
    return lines | ({"held out": f"{named}: {len(held_out) * settings.sequence_length:,} tokens"} if held_out else {})


def read_cached(
    get_dataset: Callable, corpus: dict, split: str, cache_dir: str | None = None, check_whole: bool = False
):
    """(a split, tokenized now or by an earlier run; a line about which, and what was left out)."""
    try:
        with telling_progress() as tell:
            where = {"cache_dir": cache_dir, "check_whole": check_whole}
            packed = get_dataset(**corpus, **where, split=split, progress=tell)
    except UnreadableError as error:
        field = corpus.get("text_field", DEFAULT_FIELD)
        fault = functools.partial(name_fault, error, corpus["dataset"], split, field)
        raise from_main_process(fault, not dist.is_initialized() or dist.get_rank() == 0) from error
    remove_leftovers(packed.path.parent)
    counts, done = packed.counts, ""
    if "seconds" in counts:
        again = f" again (the cache was damaged: {counts['damaged']})" * bool(counts["damaged"])
        done = f"tokenized {counted(counts['documents'], 'document')}{again} in {counts['seconds']:.1f} s, "
    left_out = [f"{kind} {counts[kind]:,}" for kind in ("empty documents", "bad records") if counts.get(kind)]
    return packed, f"{done}cached in {packed.path}" + f", left out: {', '.join(left_out)}" * bool(left_out)


def cached(settings: Settings, get_dataset: Callable, corpus: dict, split: str) -> PackedDataset:
    packed, said = read_cached(get_dataset, corpus, split, settings.cache_dir, check_whole=settings.resume != "none")
    say("data      ", said)
    return packed


def describe_files(source: str) -> dict[str, str]:
    """The line of the header about what lies beside the data files of a folder or pattern and is not read."""
    files, left_out = find_files(source)
    read = f"{len(files):,} of {len(files) + len(left_out):,} (left out: {shortened(left_out)})"
    return {"files": read} if left_out else {}


def hold_out(train, source: str, end_of_text: int | None, rule: str):
    """(a corpus without what is held out by a rule of `held_out`, this, its name in the header)."""
    if isinstance(train, streaming.StreamedDataset):
        kept, held_out = train.hold_out(rule)
        return kept, held_out, f"{rule} documents of it" if rule == held.RULE else f"{rule} of it"
    tokens, pack = train.tokens, functools.partial(windows.pack, seq_len=train.seq_len, dataset=source)
    if rule == held.RULE:
        if parts := on_main_rank(lambda: held.divide(tokens, end_of_text)):
            kept, held_out = (held.Stretches(tokens, *part) for part in parts)
            return pack(kept, split="train"), pack(held_out, split=rule), f"{rule} documents of it"
        cut = len(tokens) * (100 - held.PERCENT) // 100
    else:
        (cut,) = on_main_rank(lambda: cut_positions([f"{100 - held.PERCENT}%"], tokens, end_of_text))
    kept, held_out = pack(tokens[:cut], split="train"), pack(tokens[cut:], split=held.OLD_RULE)
    return kept, held_out, f"{held.OLD_RULE} of it"


@contextlib.contextmanager
def telling_progress():
    """A function that says on rank 0 how far the tokenizing is: on a terminal in one line that goes away, else in a
    line each half minute."""
    start = told = time.monotonic()
    on_terminal = terminal.is_terminal(sys.stderr)

    def tell(counts: Counter, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < (0.2 if on_terminal else 30) or (dist.is_initialized() and dist.get_rank()):
            return
        told, seconds, read = now, now - start, max(counts["read"], 1)
        left = tqdm.format_interval(seconds * max(0, total - read) / read)
        speed = f"{counts['documents']:,} documents, {counts['tokens'] / seconds:,.0f} tokens/s, {left} left"
        line = f"tokenizing {min(1, read / total):4.0%}  {speed}"
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(terminal.CLEAR + line[:width], end="", file=sys.stderr, flush=True)
        else:
            print(f"data       {line}", flush=True)

    try:
        yield tell
    finally:
        if on_terminal and told > start:
            print(terminal.CLEAR, end="", file=sys.stderr, flush=True)


def remove_leftovers(cache: pathlib.Path) -> None:
    """Removes what killed runs left in the token cache; where its lock is held, a live one is writing."""
    from filelock import FileLock, Timeout

    for folder in cache.glob("tokens-*.bin?*/"):
        lock = FileLock(f"{str(folder).rpartition('.bin')[0]}.bin.lock", timeout=0)
        with contextlib.suppress(OSError, Timeout), lock:
            shutil.rmtree(folder)
