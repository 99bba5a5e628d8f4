"""Corpora: what a source of --dataset is, and its tokens as windows: from the token cache, where it is tokenized once,
or from token files. The way in for a library (`open_windows`)."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Subset

from harness import base, flags, job
from harness.data import cache, contents, files, token_files
from harness.data.batches import TrainingData, mix
from harness.data.chat import ChatFormat, nothing_trained
from harness.data.contents import read_records
from harness.data.conversations import LAYOUTS, describe_layouts
from harness.data.encode import RowFormat, TextFormat, take
from harness.data.files import DataFile, Listing
from harness.data.mixture import WindowOrder
from harness.data.readers import is_token_file, reader_of
from harness.data.records import KINDS, MASKED_KINDS, BadRecord, Conversation, Field, kind_of, read_documents
from harness.data.windows import PackedDataset, PaddedDataset, Tokens

TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores
DEFAULT_EVAL_SPLIT = "validation"
LOOKED_AT = 100  # files, and records of each, among which the first good one tells what a corpus is


# ----------------------------------------------------------------------------------------------------------------------
# What is where


@dataclass(frozen=True)
class Corpus:
    """A source as it was found."""

    source: flags.Source
    listing: Listing
    split: str  # that is trained on, with its slice
    text_field: Field  # of conversations their layout
    is_mapped: bool  # whether its files are token files
    kind: str  # of its records, one of `records.KINDS`; of token files "ids"
    is_apart: bool = False  # of an --eval-split that is a place of its own: evaluated whole, never trained on

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def files(self) -> list[DataFile]:
        """The files of its split."""
        return self.listing.files_in_split(parse_split(self.split)[0])

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    @property
    def has_mask(self) -> bool:
        """Whether not all its tokens are trained on."""
        return self.kind in MASKED_KINDS


def find(settings: flags.Args) -> list[Corpus]:
    """The corpora of a run, listed once, by rank 0: its sources, none of synthetic data, and behind them that of an
    --eval-split that is a place of its own, which alone is read where nothing is trained. Every rank calls this."""
    chat_flags = {"chat_template": "--chat-template", "chat_loss": "--chat-loss"}
    idle = [flag for name, flag in chat_flags.items() if name in settings.explicit and settings.trains()]
    corpora = base.broadcast_from_rank_0(lambda: find_all(settings))
    refuse_unused(idle, corpora)
    return corpora


def find_all(settings: flags.Args) -> list[Corpus]:
    """The corpora of `find`, listed by this process."""
    holds_apart = settings.eval_interval and flags.is_place(settings.eval_split) and not settings.show_samples
    if holds_apart and settings.num_steps == 0:
        return [find_apart(settings)]
    corpora = []
    if settings.dataset != "synthetic":
        corpora = [find_corpus(settings, source) for source in settings.sources()]
    if not holds_apart:
        return corpora
    apart = find_apart(settings)
    held_out = {file.version()[0] for file in apart.files}
    for corpus in corpora:
        if shared := [file for file in corpus.files if file.version()[0] in held_out]:
            problem = f"{shared[0]} is in --dataset {corpus.source.dataset} too, which is trained on"
            advice = "take it out of there, or name a pattern without it"
            raise base.UserError(f"--eval-split {settings.eval_split}: {problem}; {advice}")
    return [*corpora, apart]


def find_apart(settings: flags.Flags) -> Corpus:
    """The corpus of an --eval-split that is a place of its own: its split `validation`, or `test` where it has none, or
    `train`, which is all where nothing is named as a split."""
    place = str(settings.eval_split)
    with named_by_eval_split():
        listing = files.find_files(place)
        split = next((name for name in (DEFAULT_EVAL_SPLIT, "test") if name in listing.splits), "train")
        source = flags.Source(flags.name_of(place), place, None)
        corpus = inspect_source(source, split, text_field_of(settings), None)
    return dataclasses.replace(corpus, is_apart=True)


@contextlib.contextmanager
def named_by_eval_split() -> Iterator[None]:
    """What is wrong with the corpus of --eval-split names that flag, where any other's names --dataset."""
    try:
        yield
    except base.UserError as error:
        raise base.UserError(re.sub("^--dataset", "--eval-split", str(error)), error.exit_code) from error


def refuse_unused(chat_flags: list[str], corpora: list[Corpus]) -> None:
    """Raises a UserError where flags of conversations were given and none of the corpora has any."""
    if chat_flags and not any(corpus.is_chat for corpus in corpora):
        found = ", ".join(f"{corpus.source.dataset} has {KINDS[corpus.kind]}" for corpus in corpora)
        found = found or "synthetic data have none"
        problem = f"only with conversations, which are records with {describe_layouts()}; {found}"
        raise base.UserError(f"{', '.join(chat_flags)}: {problem}; leave it out")


def find_corpus(settings: flags.Flags, source: flags.Source) -> Corpus:
    text_field = text_field_of(settings)
    return inspect_source(source, settings.dataset_split, text_field, settings.dataset_config, settings.streaming)


def text_field_of(settings: flags.Flags) -> Field:
    return settings.text_field if "text_field" in settings.explicit else ("input_ids", settings.text_field)


def inspect_source(
    source: flags.Source, split: str | None, text_field: Field, subset: str | None, streaming: bool = False
) -> Corpus:
    """A source as it is found. Without a `split` it is `train`, of hub data its first 5 %."""
    place = str(flags.ASSETS / "demo" / "stories") if source.dataset == "demo" else source.dataset
    listing = files.find_files(place, subset)
    if split is None:
        split = "train[:5%]" if listing.is_hub and not streaming else "train"
    of_split = listing.files_in_split(parse_split(split)[0])
    is_mapped = are_token_files(of_split)
    kind = "ids"
    if not is_mapped:
        found = (look_at_records(file, text_field) for file in of_split[:LOOKED_AT])
        kind, text_field = next(filter(None, found), ("text", text_field))
    return Corpus(source, listing, split, text_field, is_mapped, kind)


def are_token_files(of_split: list[DataFile]) -> bool:
    """Whether files are token files; a UserError where only some are, or where their formats differ."""
    one = next((file for file in of_split if is_token_file(file.name)), None)
    if one is None:
        return False
    for file in of_split:
        if file.is_remote:
            problem = "its tokens are mapped into memory, which a store cannot give"
            raise base.UserError(f"--dataset {one}: {problem}; copy it to a local disk")
        if reader_of(file.name) is not reader_of(one.name):
            pattern = f"{os.path.dirname(one.path)}/*{os.path.splitext(one.name)[1]}"
            raise base.UserError(
                f"--dataset: {one} has tokens that are read in place, {file} is of another format; "
                f"name a folder or pattern with one of them, such as '{pattern}'"
            )
    return True


def look_at_records(file: DataFile, text_field: Field) -> tuple[str, Field] | None:
    """(what the records of a file are, the field or layout that is read of them), as the first good one is; None where
    there is none. Where a record has a conversation and a field of `text_field`, the conversation counts, but for a
    single field, which somebody has named. What cannot be read is found later."""
    if not getattr(reader_of(file.name), "HAS_FIELDS", True):
        return "text", text_field
    names = (text_field, *LAYOUTS) if isinstance(text_field, str) else (*LAYOUTS, *text_field)
    try:
        for _, record in itertools.islice(read_records(file, names), LOOKED_AT):
            if isinstance(record, BadRecord):
                if record.layout:
                    return "chat", record.layout
            elif isinstance(record, Conversation):
                return "chat", record.layout
            elif record is not None and len(record):
                return kind_of(record), text_field
    except base.UserError:
        pass
    return None


def needs_tokenizer(settings: flags.Flags, corpora: list[Corpus]) -> bool:
    """Whether a run takes a tokenizer: not where all its tokens are random or come from token files, unless a flag
    asks for text or for the ends of documents."""
    if settings.tokenizer or settings.sample_prompt:
        return True
    if settings.dataset == "synthetic" and not corpora:
        return False
    ends = settings.document_mask or settings.eval_interval or any("[" in corpus.split for corpus in corpora)
    if ends or settings.packing in ("best-fit", "none") or settings.export:
        return True
    return not all(corpus.is_mapped for corpus in corpora)


def masks_documents(settings: flags.Flags, corpora: Sequence[Corpus]) -> bool:
    """--document-mask, which by default is on where a run trains on conversations or labels, or evaluates them without
    training; never with --packing none, where a sequence has one document."""
    if settings.packing == "none":
        return False
    if settings.document_mask is None:
        sources = [corpus for corpus in corpora if not corpus.is_apart] or corpora
        return any(corpus.has_mask for corpus in sources)
    return settings.document_mask


# ----------------------------------------------------------------------------------------------------------------------
# Tokens and windows of one corpus


@dataclass(frozen=True)
class Reading:
    """How corpora become windows; see `utils.get_dataset`."""

    tokenizer: Any
    seq_len: int
    vocab_size: int
    cache_dir: str | os.PathLike | None = None
    skip_bad_records: bool = False
    packing: str | None = None
    chat_template: str | None = None
    chat_loss: str = "assistant"
    document_mask: bool | None = None
    seed: int = 0
    is_main: bool = True  # of the processes of this node: the one that tokenizes for the others

    @property
    def end_of_text(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def encoder(self, corpus: Corpus) -> TextFormat:
        if corpus.kind == "labels":
            return RowFormat(self.tokenizer, self.vocab_size)
        if not corpus.is_chat:
            return TextFormat(self.tokenizer, self.vocab_size)
        chat = self.chat_format(corpus)
        chat.check(corpus.source.dataset)
        return chat

    def chat_format(self, corpus: Corpus) -> ChatFormat:
        template = base.read_template(self.chat_template)
        layout = str(corpus.text_field)
        return ChatFormat(self.tokenizer, self.vocab_size, template, self.chat_loss, self.skip_bad_records, layout)

    def open(self, corpus: Corpus, split: str, warn: bool = True) -> tuple[Tokens, str]:
        """(the tokens of a split, mapped; where they come from, in words). Text is tokenized where it was not; what was
        read with a warning is said unless `warn` is False. A slice is cut at ends of documents."""
        name, bounds = parse_split(split)
        of_split = corpus.listing.files_in_split(name)
        if corpus.is_mapped and are_token_files(of_split):
            opened = base.call_on_all_ranks(  # on one node alone a file may be missing
                lambda: [contents.open_token_file(file, self.vocab_size) for file in of_split]
            )
            line = token_files.describe(opened)
        else:
            rows = None
            if corpus.listing.is_hub and bounds:
                rows = base.broadcast_from_rank_0(functools.partial(rows_of_slice, of_split, bounds))
            if rows:
                bounds = []
            found = base.broadcast_from_node_main(
                functools.partial(self._tokenize, corpus, of_split, rows), self.is_main
            )
            opened, line = [cache.open_cache(found[0], self.vocab_size)], cache.describe(*found)
            for warning in cache.warnings_in(found[1]) if warn else ():
                job.warn(warning)
        tokens = Tokens(opened, self.vocab_size, self.end_of_text)
        if bounds:
            tokens = self.with_ends(tokens)
            tokens = tokens.between(*cut_positions(bounds, tokens.ends, len(tokens)))
        return tokens, line

    def _tokenize(self, corpus: Corpus, of_split: list[DataFile], rows: tuple[int, int] | None) -> tuple:
        """What `cache.tokenize_once` returns, of these files, or of some of their rows."""
        encoder = self.encoder(corpus)
        content = [file.version() for file in of_split]
        identity = [content, rows, corpus.text_field, corpus.has_mask, *encoder.identity()]

        def tokenize(counts: Counter) -> Iterator:
            records = itertools.chain.from_iterable(read_records(file, corpus.text_field) for file in of_split)
            if rows:
                records = itertools.islice(records, *rows)  # type: ignore[assignment]
            documents = read_documents(records, self.vocab_size, self.skip_bad_records, counts, corpus.kind)
            while batch := list(take(documents, TOKENIZE_BATCH)):
                yield encoder.encode(batch, counts)
            if not counts["tokens"]:
                left_out = counts["conversations without a trained token"]
                if left_out:
                    raise nothing_trained(corpus.source.dataset, left_out, encoder)
                if left_out := counts["rows without a trained token"]:
                    problem = f"none of its {left_out:,} rows has a token to train on by its labels and masks"
                    raise base.UserError(f"--dataset {corpus.source.dataset}: {problem}; mend these, or drop them")
                bad = counts["bad records"]
                without = f", {base.counted(bad, 'bad record')} left out" if bad else ""
                raise base.UserError(f"--dataset {corpus.source.dataset}: it holds no text{without}")

        return cache.tokenize_once(identity, tokenize, self.cache_dir, self.skip_bad_records)

    def with_ends(self, tokens: Tokens) -> Tokens:
        """The tokens, and where their documents end: one process of a node reads all tokens for it where the files do
        not say it. A UserError where nothing tells."""
        if tokens.knows_ends or tokens.found_ends is not None:
            return tokens
        if self.end_of_text is None:
            name = getattr(self.tokenizer, "name_or_path", "the tokenizer")
            problem = f"{name} has no end-of-text token (eos_token)"
            raise base.UserError(
                f"--dataset {tokens.files[0].name}: it does not say where its documents end, and {problem}"
            )
        found = base.broadcast_from_node_main(lambda: tokens.whole_ends, self.is_main)
        return dataclasses.replace(tokens, found_ends=found)

    def windows(self, tokens: Tokens, place: str) -> PackedDataset:
        """The tokens as windows; too few for one window are a UserError."""
        packing = self.packing or ("best-fit" if tokens.has_mask else "concatenate")
        mask = tokens.has_mask if self.document_mask is None else self.document_mask
        mask = mask and packing != "none"  # a window has one document
        packed: PackedDataset
        if packing != "concatenate":
            tokenizer = self.tokenizer
            ids = [getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0]
            padding = next(token for token in ids if token is not None)
            packed = PaddedDataset(self.with_ends(tokens), self.seq_len, packing, padding, self.seed, mask)
        else:
            if mask and not tokens.knows_ends and self.end_of_text is None:
                self.with_ends(tokens)  # the error
            packed = PackedDataset(tokens, self.seq_len, mask)
        if packed.left_out and not len(packed):
            problem = f"none of its {base.counted(packed.left_out, 'window')} has a token to train on"
            raise base.UserError(f"--dataset {place}: {problem}; use a longer --sequence-length, or other data")
        if not len(packed):
            short = f"{base.counted(len(tokens), 'token')}, too few for one window of --sequence-length {self.seq_len}"
            raise base.UserError(f"--dataset {place}: {short}; use a shorter sequence or more text")
        return packed


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split, such as `train` or `train[:95%]`; no bounds without a slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise base.UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
    if not part[2]:
        return part[1], []
    return part[1], [part[3] or "0%", part[4] or "100%"]


def cut_documents(bounds: list[str], documents: int) -> list[int | None]:
    """How many of so many documents are before each bound of a slice, such as 95% or -100; None where a percentage
    would cut off none or all of them."""
    cuts: list[int | None] = []
    for bound in bounds:
        number = int(bound.rstrip("%"))
        size = 100 if bound.endswith("%") else documents
        if abs(number) > size:
            raise base.UserError(f"--dataset-split: the slice's bound {bound} is beyond the {documents:,} documents")
        if number < 0:
            number += size
        cut = round(documents * number / size) if size else 0
        cuts_nothing = 0 < number < size and cut in (0, documents)
        cuts.append(None if cuts_nothing else cut)
    return cuts


def cut_positions(bounds: list[str], ends: np.ndarray, length: int) -> list[int]:
    """Where the bounds of a slice cut tokens whose documents end at `ends`: there, or, where these are too few for a
    percentage, at that share of the tokens, as in a file of one document."""
    positions = []
    for cut, bound in zip(cut_documents(bounds, len(ends)), bounds, strict=True):
        if cut is None:
            positions.append(length * int(bound.rstrip("%")) // 100)
        else:
            positions.append(int(ends[cut - 1]) if cut else 0)
    return positions


def rows_of_slice(of_split: list[DataFile], bounds: list[str]) -> tuple[int, int] | None:
    """The rows that a slice of a hub data set takes, which are all that is read of it; None where its files do not say
    how many they have."""
    count = getattr(reader_of(of_split[0].name), "count", None)
    if count is None or any(reader_of(file.name) is not reader_of(of_split[0].name) for file in of_split):
        return None
    rows = 0
    for file in of_split:
        try:
            with file.open() as raw:
                rows += count(raw)
        except (OSError, ValueError, NotImplementedError) as error:  # the last two are Arrow's
            raise base.UserError(f"--dataset {file}: cannot be read ({base.first_line(error)})") from error
    first, last = cut_documents(bounds, rows)
    return None if first is None or last is None else (first, last)


def open_windows(
    reading: Reading,
    dataset: str | Sequence[str],
    split: str | None,
    text_field: Field,
    subset: str | None,
    shuffle: bool,
) -> PackedDataset | Subset | TrainingData:
    """The windows of one corpus, or of several mixed, for `utils.get_dataset`."""
    if not (shuffle or isinstance(dataset, str)):
        raise base.UserError("shuffle=False: a mixture has the order that its shares and its seed give; leave it out")
    sources = flags.sources_of(dataset if isinstance(dataset, str) else tuple(dataset))
    look = functools.partial(inspect_source, split=split, text_field=text_field, subset=subset)
    corpora = base.broadcast_from_node_main(lambda: [look(source) for source in sources], reading.is_main)
    refuse_unused(["--chat-template"] if reading.chat_template else [], corpora)
    windows = {}
    for source, corpus in zip(sources, corpora, strict=True):
        place = f"{source.dataset}, split {corpus.split!r}"
        tokens, _ = reading.open(corpus, corpus.split)
        windows[source.name] = reading.windows(tokens, place)
    if isinstance(dataset, str):
        packed = windows[sources[0].name]
        if not shuffle:
            return packed
        order: Any = WindowOrder(len(packed), reading.seed)  # computes each number when it is asked for
        return Subset(packed, order)
    return mix(windows, {source.name: source.weight for source in sources}, reading.seq_len, reading.seed)
