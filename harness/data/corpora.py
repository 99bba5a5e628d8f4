"""Corpora: what of a source a run trains on and what it holds out, and the progress of tokenizing it. Called by
`loading`. Independent of how files are read (`formats`, `streaming`) and of the order of samples."""

import contextlib
import functools
import os
import pathlib
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from tqdm import tqdm

from harness import job
from harness.base.errors import NoSplitError, UnreadableError, UserError
from harness.base.ranks import from_main_process, on_main_rank
from harness.base.text import counted, shortened
from harness.data import held_out as held
from harness.data import sample_order, streaming, windows
from harness.data.best_fit import BinnedDataset
from harness.data.chat import (
    TODAY,
    ChatFormat,
    describe_example,
    has_conversations,
    holds_conversations,
    read_template,
    refuse_streaming,
)
from harness.data.corpus_files import find_files, local_files
from harness.data.faults import name_fault
from harness.data.hub_rows import find_features, load_documents
from harness.data.records import DEFAULT_FIELD, Field
from harness.data.splits import cut_positions, files_of_split, parse_split
from harness.data.token_files import differing_tokenizer, is_mapped
from harness.data.windows import PackedDataset
from harness.flags.commands import given
from harness.flags.settings import ASSETS, Settings, is_local
from harness.flags.sources import Source
from harness.job import say

DEFAULT_EVAL_SPLIT = "validation"
SYNTHETIC_EVAL_WINDOWS = 1024
LEFT_OUT = ("empty documents", "bad records", "conversations without a trained token")
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 30  # between two reports of progress, on a terminal and elsewhere
ESTIMATE_SECONDS = 1.5  # of tokenizing, after which it is said how long all of it takes
HOUR = 3600


@dataclass
class OpenedSource:
    """One source of a run."""

    train: Any  # a data set of windows, or a StreamedDataset
    held_out: Any  # windows; None where nothing is evaluated
    held_out_name: str  # in words
    split: str  # that is trained on
    rules: dict[str, Any]  # how it is read and what tells it from others, as a checkpoint records it


def open_source(
    settings: Settings,
    source: Source,
    tokenizer,
    vocab_size: int,
    get_dataset: Callable,
    rules: dict[str, Any] | None,
    streams: int,
) -> OpenedSource:
    """The training windows of a source, or its stream, and where evaluation is asked for what is held out.

    Held out is the split --eval-split; by default the split `validation`, and where there is none some of the documents
    that would be trained on, by the rule in `held_out`. `rules` are those by which a checkpoint says that it was read:
    they apply again, and where one lacks, that of the versions before it. `streams` is how many logical streams it is
    cut into where it is streamed.
    """
    place = os.path.expanduser(source.dataset)
    if place == "demo":
        place = str(ASSETS / "demo" / "stories")
    ids_first = prefers_token_ids(settings, rules)
    corpus = {
        "tokenizer": tokenizer,
        "seq_len": settings.sequence_length,
        "dataset": place,
        "vocab_size": vocab_size,
        "skip_bad_records": settings.skip_bad_records,
        "accelerator": PartialState(cpu=not torch.cuda.is_available()),  # tells which process is the main one
        "text_field": field_of(settings, ids_first),
        "subset": settings.dataset_config,
    }
    of_source = f"{source.name}: " if len(settings.sources()) > 1 else ""
    streamed = settings.streaming and not has_token_files(settings, source)
    if streamed:
        refuse_streaming(place, settings.packing, holds_chat(settings, source, rules))
        load = functools.partial(streaming.stream_dataset, **corpus, seed=settings.seed)
    else:
        corpus |= {
            "packing": settings.packing,
            "chat_template": settings.chat_template,
            "chat_loss": settings.chat_loss,
            "document_mask": bool(settings.document_mask),
            "seed": settings.seed,
        }
        load = functools.partial(cached, settings, get_dataset, corpus, of_source)
    split = settings.dataset_split or default_split(settings, place)
    train = load(split=split)
    held_out, held_out_name, rule = None, "", None
    if settings.eval_interval:
        divided = bool(rules and rules.get("held_out", held.OLD_RULE))  # whatever splits there are now
        held_out = None if divided and not settings.eval_split else load_eval_split(settings, load)
        held_out_name = settings.eval_split or DEFAULT_EVAL_SPLIT
        if rules and held_out is None and not divided:
            problem = f"the run held out nothing of {source.dataset}, it trained on all of it"
            raise UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
        if held_out is None or divided:
            rule = held_out_rule(rules, streams if streamed else 1)
            end_of_text = tokenizer.eos_token_id if tokenizer is not None else None
            train, by_rule, name_of_rule = hold_out(train, place, end_of_text, rule)
            if held_out is None:
                held_out, held_out_name = by_rule, name_of_rule
        if streamed:
            held_out = read_windows(held_out, settings.eval_steps * settings.batch_size * dist.get_world_size())
    if not streamed:
        trains = settings.num_steps > 0 and not settings.show_samples
        for name, line in describe_packing(train, tokenizer, settings.chat_template, with_example=trains).items():
            say(f"{name:10}", of_source + line)
    found = {"held_out": rule, "ids_first": ids_first, "dataset": train.fingerprint()}
    if streamed:
        found["corpus"] = train.content
        train = train.divide(streams)
    return OpenedSource(train, held_out, held_out_name, split, found)


def default_split(settings: Settings, place: str) -> str:
    """The split that is trained on where --dataset-split does not say."""
    return "train" if is_local(place) or settings.streaming else "train[:5%]"


def open_synthetic(settings: Settings, vocab_size: int) -> OpenedSource:
    """Random windows to train on, and others to evaluate on."""
    train = sample_order.SyntheticDataset(vocab_size, settings.sequence_length, settings.seed)
    held_out = None
    if settings.eval_interval:
        held_out = sample_order.SyntheticDataset(
            vocab_size, settings.sequence_length, settings.seed + 1, windows=SYNTHETIC_EVAL_WINDOWS
        )
    return OpenedSource(train, held_out, "synthetic", "", {"dataset": train.fingerprint()})


def field_of(settings: Settings, ids_first: bool) -> Field:
    """The column that is trained on, with that of token ids before it where it is taken first."""
    return ("input_ids", settings.text_field) if ids_first else settings.text_field


def prefers_token_ids(settings: Settings, rules: dict | None) -> bool:
    """Whether a column of token ids is taken before one of text: not where --text-field is given. A resumed run keeps
    what its checkpoint has; older checkpoints are of runs that always did."""
    if rules is not None:
        return rules.get("ids_first", True)
    return "text_field" not in given(settings.argv)


def held_out_rule(rules: dict | None, streams: int) -> str:
    """The rule by which documents are held out. A resumed run keeps its checkpoint's; older checkpoints name none."""
    new = held.RULE if streams == 1 else held.BY_CONTENT
    if rules is None:
        return new
    return rules.get("held_out", held.OLD_RULE) or new


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


def needs_tokenizer(settings: Settings) -> bool:
    """Whether a run takes a tokenizer: not where all its tokens are random or come from token files, unless a flag
    asks for text or for the ends of documents."""
    if settings.tokenizer or settings.sample_prompt or settings.sample_prompts:
        return True
    if settings.dataset == "synthetic":
        return False
    ends = settings.document_mask or settings.eval_interval or "[" in (settings.dataset_split or "")
    if ends or settings.packing == "best-fit" or settings.export:
        return True
    return not all(has_token_files(settings, source) for source in settings.sources())


def has_token_files(settings: Settings, source: Source) -> bool:
    """Whether a source is of token files that are read in place."""
    if source.dataset == "demo" or not is_local(source.dataset):
        return False
    return is_mapped(local_files(os.path.expanduser(source.dataset)), field_of(settings, ids_first=True))


def holds_chat(settings: Settings, source: Source, rules: dict[str, Any] | None) -> bool:
    """Whether the records of a source are conversations; `rules` are those of `open_source`."""
    if source.dataset in ("synthetic", "demo"):
        return False
    place = os.path.expanduser(source.dataset)
    split = settings.dataset_split or default_split(settings, place)
    text_field = field_of(settings, prefers_token_ids(settings, rules))
    files = local_files(place)
    if files:
        return holds_conversations(files_of_split(place, parse_split(split)[0], files), None, text_field)
    features = find_features(place, settings.dataset_config)
    if features is not None:
        return has_conversations(features, text_field)
    try:
        rows = load_documents(place, split, settings.dataset_config, settings.streaming)
    except UnreadableError as error:
        raise name_fault(error, place, split) from error
    return holds_conversations([], rows, text_field)


def first_words(sources: dict[str, Any], tokenizer) -> str:
    """The first words of the first source, as the beginning of a generated story; empty where it has no text."""
    dataset = next(iter(sources.values()))
    if tokenizer is None or not isinstance(dataset, PackedDataset | BinnedDataset):
        return ""
    text = tokenizer.decode(windows.tokens_of(dataset[0])[:12], skip_special_tokens=True)
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut


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
    if packed.mapped is not None:
        return packed, packed.mapped.describe()
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
    left_out = [f"{kind} {counts[kind]:,}" for kind in LEFT_OUT if counts.get(kind)]
    if left_out:
        line += f", left out: {', '.join(left_out)}"
    return line


def cached(settings: Settings, get_dataset: Callable, corpus: dict, of_source: str, split: str) -> PackedDataset:
    """A split from the token cache or from token files, with its line on the console, which begins with `of_source`."""
    packed, line = read_cached(get_dataset, corpus, split, settings.cache_dir, check_whole=settings.resume != "none")
    say("data      ", of_source + line)
    if packed.mapped is not None and dist.get_rank() == 0:
        warning = differing_tokenizer(packed.mapped, corpus["tokenizer"])
        if warning:
            job.print_error(f"train_fsdp.py: warning: {warning}")
    return packed


def describe_packing(packed, tokenizer, chat_template: str | None, with_example: bool) -> dict[str, str]:
    """The lines about documents that are packed whole, and about conversations, rendered by the file
    `chat_template`."""
    lines = {}
    if isinstance(packed, BinnedDataset):
        lines["packing"] = packed.describe()
    if packed.is_chat:
        conversations, share = len(packed.document_ends), packed.total_trained() / len(packed.tokens)
        lines["chat"] = f"{counted(conversations, 'conversation')}, trained on {100 * share:.1f} % of their tokens"
        if ChatFormat(tokenizer, read_template(chat_template)).asks_for_date():
            lines["chat"] += f"; their template prints today's date, which is {TODAY:%Y-%m-%d} every day"
    if packed.is_chat and with_example:
        colours = job.is_terminal(sys.stdout)
        how = "dim text is not trained on" if colours else "[[ ]] is around what is trained on"
        example = describe_example(packed[0], tokenizer, colours, packed.real_tokens(0))
        lines["example"] = f"({how})\n{example}"
    return lines


def describe_tokenizer(train) -> str:
    """For the header: which tokenizer made a corpus of token ids; "" for text."""
    mapped = getattr(train, "mapped", None)
    if mapped is not None:
        name = f"{mapped.tokenizer_name}, as the files say" if mapped.tokenizer_name else "not known"
        return f"{name} (tokens are read in place)"
    counts = getattr(train, "counts", None) or {}
    return "not known (the records are token ids)" if counts.get("token ids") else ""


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
        names = {held.RULE: f"{held.RULE} documents of it", held.BY_CONTENT: f"{held.RULE} documents of it, by content"}
        return kept, held_out, names.get(rule, f"{rule} of it")
    if rule == held.BY_CONTENT:
        problem = "the run held out documents by their content, as a stream"
        raise UserError(f"--dataset {source}: {problem}; give --streaming")
    tokens = train.tokens
    held_out_name, parts = f"{held.OLD_RULE} of it", None
    if rule == held.RULE:
        parts = on_main_rank(lambda: held.divide(tokens, end_of_text))
        cut = len(tokens) * (100 - held.PERCENT) // 100  # where there are too few documents to choose among
    else:
        (cut,) = on_main_rank(lambda: cut_positions([f"{100 - held.PERCENT}%"], tokens, end_of_text))
    if parts:
        kept, held_out = (train.part(lambda array, part=part: held.Stretches(array, *part)) for part in parts)
        held_out_name = f"{rule} documents of it"
    else:
        kept = train.part(lambda array: held.part_of(array, 0, cut))
        held_out = train.part(lambda array: held.part_of(array, cut, None))
    windows.check_has_windows(kept, source, "train")
    windows.check_has_windows(held_out, source, rule if parts else held.OLD_RULE)
    return kept, held_out, held_out_name


@contextlib.contextmanager
def progress_of_tokenizing():
    """A function that prints on rank 0 how far the tokenizing is: on a terminal in one line that goes away at the end,
    elsewhere in a line each half minute. Where it takes longer than that, a first line says how long."""
    start = last_report = time.monotonic()
    on_terminal = job.is_terminal(sys.stderr)
    interval = TERMINAL_SECONDS if on_terminal else LOG_SECONDS
    estimated = False

    def report(counts: Counter, total: int) -> None:
        nonlocal last_report, estimated
        now = time.monotonic()
        if dist.is_initialized() and dist.get_rank():
            return
        seconds, read = now - start, max(counts["read"], 1)
        speed = f"{counts['tokens'] / max(seconds, 1e-9):,.0f} tokens/s"
        if not estimated and seconds >= ESTIMATE_SECONDS:
            estimated = True
            print_estimate(seconds * max(1, total / read), speed, on_terminal)
        if now - last_report < interval:
            return
        last_report = now
        left = tqdm.format_interval(seconds * max(0, total - read) / read)
        line = f"tokenizing {min(1, read / total):4.0%}  {counts['documents']:,} documents, {speed}, {left} left"
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(job.CLEAR + line[:width], end="", file=sys.stderr, flush=True)
        else:
            print(f"data       {line}", flush=True)

    try:
        yield report
    finally:
        if on_terminal and last_report > start:
            print(job.CLEAR, end="", file=sys.stderr, flush=True)


def print_estimate(seconds: float, speed: str, on_terminal: bool) -> None:
    """Prints how long tokenizing a corpus takes, where that is longer than the time between two reports in a log."""
    if seconds < LOG_SECONDS:
        return
    line = f"data       tokenizing the text, once, takes about {tqdm.format_interval(seconds)} at {speed}"
    if seconds > HOUR:
        line += "; launch/datatrove.py does it beforehand, on several machines"
    if on_terminal:
        print(job.CLEAR, end="", file=sys.stderr, flush=True)
    print(line, flush=True)


def remove_leftovers(cache: pathlib.Path) -> None:
    """Removes what killed runs left in the token cache; where its lock is held, a live one is writing."""
    from filelock import FileLock, Timeout

    for folder in cache.glob("tokens-*.bin?*/"):
        lock = FileLock(f"{str(folder).rpartition('.bin')[0]}.bin.lock", timeout=0)
        with contextlib.suppress(OSError, Timeout), lock:
            shutil.rmtree(folder)
