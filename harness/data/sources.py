"""Sources: the corpora that --dataset names, found, opened, divided into what is trained on and what is held out, and
mixed. The way in for the script (`find`, `load`) and for a library (`open_windows`)."""

import copy
import dataclasses
import functools
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from harness import job
from harness.base.errors import UserError
from harness.base.ranks import from_main_process, on_main_rank
from harness.base.text import counted
from harness.data import cache, files, stream, token_files
from harness.data.batches import TrainingData, describe_step, mix
from harness.data.chat import TODAY, ChatFormat, describe_example, no_assistant_mask, read_template
from harness.data.encode import TextFormat, take
from harness.data.files import DataFile, Listing
from harness.data.mixture import DataRecord, read_record, record_of_run, renamed
from harness.data.readers import is_token_file, reader_of
from harness.data.records import (
    CHAT_FIELD,
    DEFAULT_FIELD,
    BadRecord,
    Conversation,
    Field,
    names_of,
    read_documents,
    read_records,
)
from harness.data.stream import Stream
from harness.data.windows import EVERY, BestFitDataset, PackedDataset, SyntheticDataset, Tokens, tokens_of
from harness.flags.commands import given
from harness.flags.settings import ASSETS, Settings
from harness.flags.sources import Source, same_dataset, sources_of, splits_overlap

TOKENIZE_BATCH = 2000  # documents per call of the tokenizer, which spreads them over all cores
DEFAULT_EVAL_SPLIT = "validation"
SYNTHETIC_EVAL_WINDOWS = 1024
LOOKED_AT = 100  # records among which the first good one tells what a corpus is
HELD_OUT = f"one of every {EVERY} documents of it"  # the rules as a checkpoint records them
HELD_OUT_BY_CONTENT = f"{HELD_OUT}, by content"


# ----------------------------------------------------------------------------------------------------------------------
# What is where


@dataclass(frozen=True)
class Corpus:
    """A source as it was found."""

    source: Source
    listing: Listing
    split: str  # that is trained on, with its slice
    text_field: Field
    is_mapped: bool  # whether its files are token files
    is_chat: bool  # whether its records are conversations

    @property
    def name(self) -> str:
        return self.source.name


def find(settings: Settings) -> list[Corpus]:
    """The corpora of a run, listed once, by rank 0; none of synthetic data. Every rank calls this."""
    if settings.dataset == "synthetic":
        return []
    return on_main_rank(lambda: [find_corpus(settings, source) for source in settings.sources()])


def find_corpus(settings: Settings, source: Source) -> Corpus:
    text_field: Field = ("input_ids", settings.text_field)
    if "text_field" in given(settings.argv):
        text_field = settings.text_field
    return look_into(source, settings.dataset_split, text_field, settings.dataset_config, settings.streaming)


def look_into(
    source: Source, split: str | None, text_field: Field, subset: str | None, streaming: bool = False
) -> Corpus:
    """A source as it is found. Without a `split` it is `train`, of hub data its first 5 %."""
    place = str(ASSETS / "demo" / "stories") if source.dataset == "demo" else source.dataset
    listing = files.find(place, subset)
    if split is None:
        split = "train[:5%]" if listing.is_hub and not streaming else "train"
    of_split = listing.of_split(parse_split(split)[0])
    is_mapped = are_mapped(of_split)
    is_chat = not is_mapped and holds_conversations(of_split[0], text_field)
    return Corpus(source, listing, split, text_field, is_mapped, is_chat)


def are_mapped(of_split: list[DataFile]) -> bool:
    """Whether files are token files; a UserError where only some are, or where their formats differ."""
    mapped = [file for file in of_split if is_token_file(file.name)]
    if not mapped:
        return False
    for file in mapped:
        if file.is_remote:
            problem = "its tokens are mapped into memory, which a store cannot give"
            raise UserError(f"--dataset {file}: {problem}; {files.stores.copy_command(file.path)}")
    for file in of_split:
        if reader_of(file.name) is not reader_of(mapped[0].name):
            one, folder = mapped[0], os.path.dirname(mapped[0].path)
            pattern = f"{folder}/*{os.path.splitext(one.name)[1]}"
            raise UserError(
                f"--dataset: {one} has tokens that are read in place, {file} is of another format; "
                f"name a folder or pattern with one of them, such as '{pattern}'"
            )
    return True


def holds_conversations(file: DataFile, text_field: Field) -> bool:
    """Whether the records of a file are conversations: the first good one has `messages` and none of the fields of
    `text_field`. What cannot be read is found later."""
    if not getattr(reader_of(file.name), "HAS_FIELDS", True):
        return False
    try:
        records = read_records(file, (*names_of(text_field), CHAT_FIELD))
        for _, record in itertools.islice(records, LOOKED_AT):
            if isinstance(record, Conversation):
                return True
            if isinstance(record, BadRecord):
                if record.of_chat:
                    return True
            elif record is not None and len(record):
                return False
    except UserError:
        pass
    return False


def needs_tokenizer(settings: Settings, corpora: list[Corpus]) -> bool:
    """Whether a run takes a tokenizer: not where all its tokens are random or come from token files, unless a flag
    asks for text or for the ends of documents."""
    if settings.tokenizer or settings.sample_prompt or settings.sample_prompts:
        return True
    if settings.dataset == "synthetic":
        return False
    ends = settings.document_mask or settings.eval_interval or "[" in (settings.dataset_split or "")
    if ends or settings.packing == "best-fit" or settings.export:
        return True
    return not all(corpus.is_mapped for corpus in corpora)


def mask_conversations(settings: Settings, corpora: list[Corpus]) -> Settings:
    """The settings with the document mask that is on by default where a run reads conversations."""
    if settings.document_mask is None and any(corpus.is_chat for corpus in corpora):
        return dataclasses.replace(settings, document_mask=True)
    return settings


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
        if not corpus.is_chat:
            return TextFormat(self.tokenizer, self.vocab_size)
        template = read_template(self.chat_template)
        chat = ChatFormat(self.tokenizer, self.vocab_size, template, self.chat_loss, self.skip_bad_records)
        chat.check(corpus.source.dataset)
        return chat

    def tokens(self, corpus: Corpus, split: str) -> Tokens:
        """The tokens of a split, mapped; text is tokenized now where it was not yet. A slice is cut at ends of documents."""
        name, bounds = parse_split(split)
        of_split = corpus.listing.of_split(name)
        if corpus.is_mapped and are_mapped(of_split):
            opened = token_files.open_token_files(of_split, self.vocab_size)
            tokens = Tokens(opened, self.vocab_size, self.end_of_text)
            tokens.line = token_files.describe(opened)
        else:
            rows = rows_of_slice(of_split, bounds) if corpus.listing.is_hub and bounds else None
            if rows:
                bounds = []
            found = from_main_process(functools.partial(self._tokenize, corpus, of_split, rows), self.is_main)
            tokens = cache.open_cache(found[0], self.vocab_size, self.end_of_text, found[1])
        if bounds:
            tokens = tokens.between(*cut_positions(bounds, self.with_ends(tokens).ends, len(tokens)))
        return tokens

    def _tokenize(self, corpus: Corpus, of_split: list[DataFile], rows: tuple[int, int] | None) -> tuple:
        """What `cache.tokenize_once` returns, of these files, or of some of their rows."""
        encoder = self.encoder(corpus)
        text_field = CHAT_FIELD if corpus.is_chat else corpus.text_field
        content = [file.version() for file in of_split]
        identity = [content, rows, text_field, *encoder.identity()]

        def tokenize(counts: Counter) -> Iterator:
            total = sum(file.size for file in of_split)
            read = [0, 0]  # bytes of the files before, and of this one
            records = read_all(of_split, text_field, read)
            if rows:
                records = itertools.islice(records, *rows)
            documents = read_documents(records, self.vocab_size, self.skip_bad_records, counts, corpus.is_chat)
            while batch := list(take(documents, TOKENIZE_BATCH)):
                yield encoder.encode(batch, counts), sum(read), total
            if not counts["tokens"]:
                left_out = counts["conversations without a trained token"]
                if left_out:
                    problem = f"the chat template marks no token of any of the {left_out:,} conversations"
                    raise no_assistant_mask(f"--dataset {corpus.source.dataset}: {problem}")
                raise UserError(f"--dataset {corpus.source.dataset}: it holds no text ({counts['bad records']} bad)")

        return cache.tokenize_once(identity, tokenize, self.cache_dir, self.skip_bad_records)

    def with_ends(self, tokens: Tokens) -> Tokens:
        """The tokens once it is known where their documents end: one process of a node reads all tokens for it where
        the files do not say it. A UserError where nothing tells."""
        if not tokens.knows_ends:
            if self.end_of_text is None:
                name = getattr(self.tokenizer, "name_or_path", "the tokenizer")
                problem = f"{name} has no end-of-text token (eos_token)"
                raise UserError(
                    f"--dataset {tokens.files[0].name}: it does not say where its documents end, and {problem}"
                )
            tokens.whole_ends = from_main_process(lambda: tokens.whole_ends, self.is_main)
        return tokens

    def windows(self, tokens: Tokens, place: str) -> PackedDataset:
        """The tokens as windows; too few for one window are a UserError."""
        mask = tokens.is_chat if self.document_mask is None else self.document_mask
        packed: PackedDataset
        if self.packing == "best-fit" or (self.packing is None and tokens.is_chat):
            tokenizer = self.tokenizer
            ids = [getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None), 0]
            padding = next(token for token in ids if token is not None)
            packed = BestFitDataset(self.with_ends(tokens), self.seq_len, padding, self.seed, mask)
        else:
            if mask and not tokens.knows_ends and self.end_of_text is None:
                self.with_ends(tokens)  # the error
            packed = PackedDataset(tokens, self.seq_len, mask)
        if not len(packed):
            short = f"{len(tokens):,} tokens do not fill one window of --sequence-length {self.seq_len}"
            raise UserError(f"--dataset {place}: {short}; use a shorter sequence or more text")
        return packed


def read_all(of_split: list[DataFile], text_field: Field, read: list[int]) -> Iterator:
    """The records of files, in order; `read` gets how many bytes of them were read."""

    def note(place: int) -> None:
        read[1] = place

    for file in of_split:
        yield from read_records(file, text_field, progress=note)
        read[0] += file.size
        read[1] = 0


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split, such as `train` or `train[:95%]`; no bounds without a slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
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
            raise UserError(f"--dataset-split: the slice's bound {bound} is beyond the {documents:,} documents")
        if number < 0:
            number += size
        cut = round(documents * number / size) if size else 0
        cuts_nothing = 0 < number < size and cut in (0, documents)
        cuts.append(None if cuts_nothing else cut)
    return cuts


def cut_positions(bounds: list[str], ends, length: int) -> list[int]:
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
        with file.open() as raw:
            rows += count(raw)
    first, last = cut_documents(bounds, rows)
    return None if first is None or last is None else (first, last)


def open_windows(
    reading: Reading,
    dataset: str | Sequence[str],
    split: str | None,
    text_field: Field = DEFAULT_FIELD,
    subset: str | None = None,
) -> PackedDataset | TrainingData:
    """The windows of one corpus, or of several mixed, for `utils.get_dataset`."""
    sources = sources_of(dataset if isinstance(dataset, str) else tuple(dataset))
    windows = {}
    for source in sources:
        look = functools.partial(look_into, source, split, text_field, subset)
        corpus = from_main_process(look, reading.is_main)
        place = f"{source.dataset}, split {corpus.split!r}"
        windows[source.name] = reading.windows(reading.tokens(corpus, corpus.split), place)
    if isinstance(dataset, str):
        return windows[sources[0].name]
    return mix(windows, {source.name: source.weight for source in sources}, reading.seq_len, reading.seed)


# ----------------------------------------------------------------------------------------------------------------------
# The sources of a run


@dataclass
class OpenedSource:
    """One source of a run."""

    train: Any  # a data set of windows, or a Stream
    held_out: Any  # windows; None where nothing is evaluated
    held_out_name: str  # in words
    rules: dict[str, Any]  # how it is read and what tells it from others, as a checkpoint records it


def load(settings: Settings, corpora: list[Corpus], tokenizer, config, manifest: dict | None = None) -> TrainingData:
    """What a run trains on and holds out, with the header's lines about it. Every rank calls this.

    `manifest` is that of the checkpoint that the run goes on from: its sources are read by its rules, and the mixture
    goes on from its history.
    """
    vocab_size = config.get_text_config().vocab_size
    per_step = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    before = recorded_data(settings, manifest)
    lanes = choose_lanes(settings, corpora, before, per_step)
    reading = Reading(
        tokenizer,
        settings.sequence_length,
        vocab_size,
        settings.cache_dir,
        settings.skip_bad_records,
        settings.packing,
        settings.chat_template,
        settings.chat_loss,
        bool(settings.document_mask),
        settings.seed,
        PartialState(cpu=not torch.cuda.is_available()).is_local_main_process,
    )
    opened: dict[str, OpenedSource] = {}
    if settings.dataset == "synthetic":
        opened["synthetic"] = open_synthetic(settings, vocab_size)
    for corpus in corpora:
        rules = before.sources.get(corpus.name) if before else None
        if before and rules is None and not settings.num_steps:
            known = ", ".join(before.sources)
            raise UserError(f"--dataset {corpus.name}: give the source the name that the run gave it, one of {known}")
        if settings.streaming and not corpus.is_mapped:
            opened[corpus.name] = open_stream(settings, corpus, reading, rules, lanes)
        else:
            opened[corpus.name] = open_cached(settings, corpus, reading, rules)
    record = record_of_run(
        settings,
        {name: source.rules for name, source in opened.items()},
        weights_of(settings, opened),
        {name: tokens_of_a_sample(source.train, settings) for name, source in opened.items()},
        per_step,
        lanes,
        before,
        manifest["step"] if manifest else 0,
        manifest["samples"] if manifest else 0,
    )
    data = TrainingData(
        {name: source.train for name, source in opened.items()}, record, settings.sequence_length, settings.seed
    )
    if settings.eval_interval:
        data.held_out = {name: source.held_out for name, source in opened.items()}
    if settings.num_steps:
        check_size(settings, data, corpora, per_step)
    data.header = describe(settings, data, opened, corpora, per_step)
    data.beginning = on_main_rank(lambda: first_words(data.held_out or data.sources, tokenizer))
    return data


def recorded_data(settings: Settings, manifest: dict | None) -> DataRecord | None:
    """What a checkpoint's manifest records of the data; the only source has the name that it has now."""
    if not manifest:
        return None
    record, sources = read_record(manifest), settings.sources()
    if len(record.sources) == len(sources) == 1:
        record = renamed(record, sources[0].name)
    return record


def open_synthetic(settings: Settings, vocab_size: int) -> OpenedSource:
    """Random windows to train on, and others to evaluate on."""
    length, seed = settings.sequence_length, settings.seed
    train = SyntheticDataset(vocab_size, length, seed)
    held_out = (
        SyntheticDataset(vocab_size, length, seed + 1, SYNTHETIC_EVAL_WINDOWS) if settings.eval_interval else None
    )
    return OpenedSource(train, held_out, "synthetic", {"dataset": f"synthetic, {vocab_size:,} ids"})


def choose_held_out(
    settings: Settings, corpus: Corpus, rules: dict[str, Any] | None, rule: str
) -> tuple[str | None, str | None]:
    """(the split that is held out, the rule by which documents of the training split are); None for what does not
    apply. Held out is the split --eval-split; by default the split `validation`, and where there is none some of the
    documents. `rules` are those of the checkpoint that a run goes on from."""
    if not settings.eval_interval:
        return None, None
    was_divided = bool(rules and rules["held_out"])
    split = settings.eval_split
    if split is None and not was_divided and DEFAULT_EVAL_SPLIT in corpus.listing.splits:
        split = DEFAULT_EVAL_SPLIT
    if rules and split is None and not was_divided:
        problem = f"the run held out nothing of {corpus.source.dataset}, it trained on all of it"
        raise UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
    if was_divided and rules["held_out"] != rule:
        how = "needs" if rule == HELD_OUT else "was read without"
        raise UserError(f"--dataset {corpus.source.dataset}: what the run held out of it {how} --streaming")
    return split, rule if split is None or was_divided else None


def open_cached(settings: Settings, corpus: Corpus, reading: Reading, rules: dict[str, Any] | None) -> OpenedSource:
    """A source from the token cache or from token files."""
    split, rule = choose_held_out(settings, corpus, rules, HELD_OUT)
    place = f"{corpus.source.dataset}, split {corpus.split!r}"
    tokens = reading.tokens(corpus, corpus.split)
    of_source = f"{corpus.name}: " if len(settings.sources()) > 1 else ""
    job.say("data      ", of_source + tokens.line)
    warning = token_files.differing_tokenizer(tokens.files, reading.tokenizer)
    if warning and dist.get_rank() == 0:
        job.print_error(f"train_fsdp.py: warning: {warning}")
    held_out, name = None, split or ""
    if rule:
        divided = reading.with_ends(tokens).divide()
        tokens = divided[0]
        held_out, name = reading.windows(divided[1], f"{place}, {rule}"), rule
        if len(tokens.starts) == 1:
            name = f"the last {100 // EVERY} % of it"
    if split:
        of_split = reading.tokens(corpus, split)
        job.say("data      ", of_source + of_split.line)
        held_out, name = reading.windows(of_split, f"{corpus.source.dataset}, split {split!r}"), split
    train = reading.windows(tokens, place)
    trains = settings.num_steps > 0 and not settings.show_samples
    for word, line in describe_packing(train, reading, corpus, with_example=trains).items():
        job.say(f"{word:10}", of_source + line)
    return OpenedSource(train, held_out, name, {"held_out": rule, "dataset": tokens.fingerprint()})


def open_stream(
    settings: Settings, corpus: Corpus, reading: Reading, rules: dict[str, Any] | None, lanes: int
) -> OpenedSource:
    """A source that is read while training."""
    dataset = corpus.source.dataset
    if corpus.is_chat:
        raise UserError(
            f"--dataset {dataset}: holds conversations, whose masks are in the token cache; leave out --streaming"
        )
    split, rule = choose_held_out(settings, corpus, rules, HELD_OUT_BY_CONTENT)

    def stream_of(split: str) -> Stream:
        name, bounds = parse_split(split)
        if bounds:
            raise UserError(f"--dataset {dataset}, split {split!r}: a stream takes whole splits; leave out --streaming")
        of_split = corpus.listing.of_split(name)
        if are_mapped(of_split):
            raise UserError(f"--dataset {dataset}: has token files, which are read in place; leave out --streaming")
        return Stream(
            of_split,
            reading.encoder(corpus),
            corpus.text_field,
            settings.sequence_length,
            settings.seed,
            settings.skip_bad_records,
            lanes,
            bool(settings.document_mask),
        )

    train = stream_of(corpus.split)
    fingerprint = on_main_rank(train.fingerprint)
    held_out = stream_of(split) if split else copy.copy(train)
    if rule:
        train.held_out = False
    if rule and not split:
        held_out.held_out = True
    windows = None
    if settings.eval_interval:
        windows = held_out.windows_of_all_ranks(settings.eval_steps * settings.batch_size * dist.get_world_size())
    return OpenedSource(train, windows, split or rule or "", {"held_out": rule} | fingerprint)


def choose_lanes(settings: Settings, corpora: list[Corpus], before: DataRecord | None, per_step: int) -> int:
    """How many lanes a run's samples are in: what the checkpoint says, or --streams, or the default for the source of
    most files; no more than the chunks of any source."""
    if before:
        return before.lanes
    streamed = [corpus for corpus in corpora if settings.streaming and not corpus.is_mapped]
    if not streamed:
        return 1
    of_sources = [corpus.listing.of_split(parse_split(corpus.split)[0]) for corpus in streamed]
    lanes = settings.streams or stream.default_lanes(max(map(len, of_sources)), per_step)
    return min(lanes, *map(stream.most_lanes, of_sources))


def weights_of(settings: Settings, opened: dict[str, OpenedSource]) -> dict[str, Fraction]:
    """The weight of each source: as given, or its number of tokens."""
    weights = {}
    for source in settings.sources():
        train = opened[source.name].train
        if source.weight is not None:
            weights[source.name] = source.weight
        elif len(opened) == 1:
            weights[source.name] = Fraction(1)
        elif isinstance(train, Stream):
            raise UserError(
                f"--dataset {source.dataset}: how large a stream is, is not known; give each source a weight, as in "
                f"{source.name}={source.dataset}:0.5"
            )
        else:
            weights[source.name] = Fraction(train.total_tokens())
    return weights


def tokens_of_a_sample(train, settings: Settings) -> Fraction:
    """Tokens of a window that are not padding, on average."""
    if train.is_uniform:
        return Fraction(settings.sequence_length)
    return Fraction(train.total_tokens(), len(train))


def check_size(settings: Settings, data: TrainingData, corpora: list[Corpus], per_step: int) -> None:
    """Raises a UserError where a source has fewer windows than one step takes and is alone, or where one would be
    repeated more often than --max-epochs."""
    if len(data.sources) == 1 and data.orders:
        (order,) = data.orders.values()
        if order.windows < per_step:
            problem = f"{order.windows:,} windows of {settings.sequence_length} tokens do not fill one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            split = f", split {corpora[0].split!r}" if corpora else ""
            raise UserError(f"--dataset {settings.describe_dataset()}{split}: {problem} of {per_step}; {advice}")
    samples = data.record.samples_of_step(settings.num_steps).stop
    if settings.max_epochs:
        for name, epochs in data.epochs(samples).items():
            if epochs > settings.max_epochs:
                problem = f"{name} would be read {epochs:.4g} times in {settings.num_steps:,} steps"
                raise UserError(
                    f"--max-epochs {settings.max_epochs:g}: {problem}; give it a smaller weight, or fewer --num-steps"
                )


# ----------------------------------------------------------------------------------------------------------------------
# What is said of them


def describe_packing(train: PackedDataset, reading: Reading, corpus: Corpus, with_example: bool) -> dict[str, str]:
    """The lines about documents that are packed whole, and about conversations."""
    lines = {}
    if train.describe():
        lines["packing"] = train.describe()
    if train.is_chat:
        share = train.total_trained() / len(train.tokens)
        lines["chat"] = (
            f"{counted(len(train.tokens.ends), 'conversation')}, trained on {100 * share:.1f} % of their tokens"
        )
        if reading.encoder(corpus).asks_for_date():
            lines["chat"] += f"; their template prints today's date, which is {TODAY:%Y-%m-%d} every day"
    if train.is_chat and with_example:
        colours = job.is_terminal(sys.stdout)
        how = "dim text is not trained on" if colours else "[[ ]] is around what is trained on"
        example = describe_example(train[0], reading.tokenizer, colours, train.real_tokens(0))
        lines["example"] = f"({how})\n{example}"
    return lines


def describe(
    settings: Settings, data: TrainingData, opened: dict[str, OpenedSource], corpora: list[Corpus], per_step: int
) -> dict[str, str]:
    """The lines of the header about the text: what is trained on, in which shares, what is held out and left out."""
    if settings.dataset == "synthetic":
        return {"data": "synthetic, random tokens"}
    alone, lines = len(corpora) == 1, {}
    epochs = data.epochs(data.record.samples_of_step(settings.num_steps).stop)
    parts, held_out, tokenizers = [], [], []
    for corpus in corpora:
        source, train = opened[corpus.name], opened[corpus.name].train
        prefix = "" if alone else f"{corpus.name}: "
        size = "streamed"
        if corpus.name in epochs:
            size = f"{train.total_tokens():,} tokens, "
            size += f"{len(train) / per_step:,.1f} steps an epoch" if alone else f"{epochs[corpus.name]:.1f} epochs"
        place = ", ".join(filter(None, [corpus.source.dataset, settings.dataset_config, corpus.split]))
        parts.append(f"{place}: {size}" if alone else f"{corpus.name} = {place} ({size})")
        if source.held_out is not None:
            line = f"{source.held_out_name}: {source.held_out.total_tokens():,} tokens"
            if source.held_out.is_chat:
                line += f", {source.held_out.total_trained():,} of them in the loss"
            held_out.append(line if alone else f"{corpus.name} ({line})")
        tokenizer = describe_tokenizer(train)
        if tokenizer:
            tokenizers.append(prefix + tokenizer)
        if corpus.listing.describe():
            lines["files"] = "; ".join(filter(None, [lines.get("files"), prefix + corpus.listing.describe()]))
    lines = {"data": "; ".join(parts)} | lines
    if not alone:
        first, *later = data.record.history
        shares = [first.describe()]
        for segment in later:
            shares.append(f"from step {data.record.step_of_sample(segment.first):,} {segment.describe()}")
        lines["mixture"] = "; ".join(shares)
    if tokenizers:
        lines["tokenizer"] = "; ".join(tokenizers)
    if data.record.lanes > 1:
        lines["streams"] = f"{data.record.lanes:,} logical streams of each source, divided among ranks and workers"
    if held_out:
        lines["held out"] = ", ".join(held_out)
    return lines


def describe_tokenizer(train) -> str:
    """For the header: which tokenizer made a corpus of token ids; "" for text."""
    if isinstance(train, Stream):
        return ""
    if train.tokens.is_mapped:
        named = next((file.tokenizer for file in train.tokens.files if file.tokenizer), None)
        name = f"{named}, as the files say" if named else "not known"
        return f"{name} (tokens are read in place)"
    return "not known (the records are token ids)" if train.tokens.counts.get("token ids") else ""


def first_words(sources: dict[str, Any], tokenizer) -> str:
    """The first words of the first source, as the beginning of a generated story; empty where it has no text."""
    dataset = next(iter(sources.values()))
    if tokenizer is None or not isinstance(dataset, PackedDataset):
        return ""
    text = tokenizer.decode(tokens_of(dataset[0])[:12], skip_special_tokens=True)
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut


def show_samples(settings: Settings, data: TrainingData, tokenizer, recorded: dict | None) -> None:
    """Prints what the step --show-samples trains on, by the order that a run's manifest or config.json recorded, if
    there is one."""
    if recorded:
        record = read_record(recorded)
        if len(record.sources) == len(data.sources) == 1:
            record = renamed(record, next(iter(data.sources)))
        data = dataclasses.replace(data, record=record)
    job.say(describe_step(data, tokenizer, settings.show_samples))


# ----------------------------------------------------------------------------------------------------------------------
# The evaluation of a run that has ended


def evaluates_own_data(settings: Settings, manifest: dict) -> bool:
    """Whether an evaluation of a run's checkpoint reads sources of the run, of which its record says what was held out;
    a UserError where it reads a part of what the run trained on, or more than that."""
    flags = manifest["flags"]
    dataset = flags["dataset"] if isinstance(flags["dataset"], str) else tuple(flags["dataset"])
    run = dataclasses.replace(
        settings, dataset=dataset, dataset_split=flags["dataset_split"], streaming=flags["streaming"]
    )
    trained, read = files_of_training(run), files_of_training(settings)
    shared = trained.keys() & read.keys()
    for file in shared:
        if settings.eval_split and splits_overlap(trained[file][1], settings.eval_split):
            problem = f"it is not apart from {trained[file][1]!r}, which the run trained on"
            raise UserError(f"--eval-split {settings.eval_split}: {problem}; give one that is")
    if same_dataset(dataset, settings.dataset) and flags["dataset_split"] == settings.dataset_split:
        return True
    own = {trained[file][0] for file in shared}
    files_of_own = {file: split for file, (name, split) in trained.items() if name in own}
    if shared and files_of_own == {file: split for file, (_, split) in read.items()}:
        return True
    for file in shared:
        if splits_overlap(trained[file][1], read[file][1]):
            problem = f"the run trained on {trained[file][1]!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def files_of_training(settings: Settings) -> dict[str, tuple[str, str]]:
    """(source, split that is trained on) of each file of a run's sources, by its real path; of what is not there any
    more by the name of the source."""
    found = {}
    for source in settings.sources():
        try:
            corpus = find_corpus(settings, source)
        except UserError:  # nor can it be read then
            found[source.dataset] = (source.name, settings.dataset_split or "train")
            continue
        for file in corpus.listing.of_split(parse_split(corpus.split)[0]):
            found[file.version()[0]] = (source.name, corpus.split)
    return found
