"""Sources: the corpora of a run opened, divided into what is trained on and what is held out, and mixed; what the
header says of them; what an evaluation of a run reads."""

import bisect
import copy
import dataclasses
import itertools
import math
import os
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness import base, job
from harness import flags as flag_rules
from harness.data import stream, token_files
from harness.data.batches import TrainingData, describe_step, mix
from harness.data.chat import describe_examples, ends_of_answers, render_user_message
from harness.data.contents import read_records
from harness.data.corpora import (
    DEFAULT_EVAL_SPLIT,
    Corpus,
    Reading,
    are_token_files,
    find_apart,
    find_corpus,
    named_by_eval_split,
    parse_split,
)
from harness.data.encode import own_tokens_around
from harness.data.files import DataFile
from harness.data.mixture import DataRecord, read_record, record_of_run, renamed
from harness.data.records import Conversation, Field, read_documents
from harness.data.stream import HeldOutWindows, Stream
from harness.data.windows import EVERY, PackedDataset, PaddedDataset, SyntheticDataset, Tokens, tokens_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SYNTHETIC_EVAL_WINDOWS = 1024
MAX_CUT_SHARE = 0.1  # of conversations that are longer than a sequence, without a warning
EXAMPLE_RECORDS = 1000  # that are looked through for examples
STREAM_EVAL_WINDOWS = 256  # of a stream without a split that is held out: all would be all of the corpus
HELD_OUT = f"one of every {EVERY} documents of it"  # the rules as a checkpoint records them
HELD_OUT_BY_CONTENT = f"{HELD_OUT}, by content"


# ----------------------------------------------------------------------------------------------------------------------
# The sources of a run


@dataclass
class HeldOut:
    """Windows that are evaluated."""

    windows: Any
    name: str  # in words

    def identity(self) -> str:
        """What tells it from others, of windows of a stream in words."""
        return self.windows.tokens.fingerprint() if isinstance(self.windows, PackedDataset) else self.name


@dataclass
class OpenedSource:
    """One source of a run."""

    train: Any  # a data set of windows, or a Stream
    held_out: HeldOut | None  # None where nothing of it is evaluated
    rules: dict[str, Any]  # how it is read and what tells it from others, as a checkpoint records it


def load(
    settings: flag_rules.Settings,
    corpora: list[Corpus],
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None = None,
    trained_on: list[dict[str, Any]] | None = None,
) -> TrainingData:
    """What a run trains on and holds out, with the header's lines about it; where nothing is trained and --eval-split
    is a place of its own, only that. Every rank calls this.

    Args:
        manifest: that of the checkpoint that the run goes on from: its sources are read by its rules, and the mixture
            goes on from its cursors.
        trained_on: where nothing is trained, the rules of the sources that the weights were trained on, as far as they
            are known. Of any other source without a held-out split all documents are held out.
    """
    apart = next((corpus for corpus in corpora if corpus.is_apart), None)
    corpora = [corpus for corpus in corpora if not corpus.is_apart]
    reading = reading_of(settings, tokenizer, config)
    if apart and not settings.num_steps:
        return load_apart(settings, apart, reading, trained_on or [])
    per_step = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    before = recorded_data(settings, manifest)
    lanes = choose_lanes(settings, corpora, before, per_step)
    if before and (settings.num_epochs or settings.eval_interval == "epoch"):
        refuse_other_sources(settings, corpora, before)
    opened: dict[str, OpenedSource] = {}
    if settings.dataset == "synthetic":
        opened["synthetic"] = open_synthetic(settings, reading.vocab_size)
    for corpus in corpora:
        rules = before.sources.get(corpus.name) if before else None
        if before and rules is None and not settings.num_steps:
            known = ", ".join(before.sources)
            raise base.UserError(
                f"--dataset {corpus.name}: give the source the name that the run gave it, one of {known}"
            )
        if settings.streaming and not corpus.is_mapped:
            opened[corpus.name] = open_stream(settings, corpus, reading, rules, lanes, trained_on)
        else:
            opened[corpus.name] = open_cached(settings, corpus, reading, rules, trained_on)
    record = record_of_run(
        settings,
        {name: source.rules for name, source in opened.items()},
        local_weights(settings, opened),
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
    held_out = {name: source.held_out for name, source in opened.items() if source.held_out}
    if apart:
        held_out = {apart.name: open_apart(settings, apart, reading, [source.rules for source in opened.values()])}
    if settings.eval_interval:
        data.held_out = {name: of_source.windows for name, of_source in held_out.items()}
        data.held_out_identity = {name: of_source.identity() for name, of_source in held_out.items()}
    if settings.num_steps:
        check_size(settings, data, corpora, per_step)
    data.header = describe(settings, data, opened, corpora, per_step, tokenizer)
    if apart:
        data.header["held out"] = describe_held_out(held_out[apart.name])
    data.beginning = base.broadcast_from_rank_0(lambda: first_words(corpora, data.held_out or data.sources, tokenizer))
    return data


def reading_of(
    settings: flag_rules.Flags, tokenizer: "PreTrainedTokenizerBase | None", config: "PretrainedConfig"
) -> Reading:
    """How a run reads its corpora."""
    from accelerate import PartialState  # not with this file: it loads much that nothing here needs

    return Reading(
        tokenizer,
        int(settings.sequence_length or 0),
        config.get_text_config().vocab_size,
        settings.cache_dir,
        settings.skip_bad_records,
        settings.packing,
        settings.chat_template,
        settings.chat_loss,
        bool(settings.document_mask),
        settings.seed,
        PartialState(cpu=not torch.cuda.is_available()).is_local_main_process,
    )


def count_epoch(
    settings: flag_rules.Settings,
    corpora: list[Corpus],
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None,
) -> int:
    """The samples of an epoch: the windows of all sources that are trained on. Every rank calls this.

    Args:
        manifest: as `load` has it.
    """
    before, reading = recorded_data(settings, manifest), reading_of(settings, tokenizer, config)
    windows = 0
    for corpus in corpora:
        if not corpus.is_apart:
            rules = before.sources.get(corpus.name) if before else None
            _, rule = choose_held_out(settings, corpus, rules, HELD_OUT, whole=False)
            tokens, line = reading.open(corpus, corpus.split, warn=False)
            if line.startswith("tokenized"):  # `load` finds it in the cache then
                job.print0("data      ", line)
            if rule:
                tokens, _ = reading.with_ends(tokens).divide()
            windows += len(reading.windows(tokens, f"{corpus.source.dataset}, split {corpus.split!r}"))
    return windows


def refuse_other_sources(settings: flag_rules.Flags, corpora: list[Corpus], before: DataRecord) -> None:
    """Raises a UserError where a run that counts epochs has other sources than its checkpoint, or had weights: each
    source goes on from its own place, and there is no epoch of all."""
    had_weights = len(before.sources) > 1 and any(before.asked["weights"].values())
    if had_weights or len(before.segments) > 1 or {corpus.name for corpus in corpora} != before.sources.keys():
        flag, advice = "--eval-interval epoch", "a number of steps"
        if settings.num_epochs:
            flag, advice = "--num-epochs", "--num-steps or --num-tokens"
        problem = "the sources or their weights are not those of the run's beginning, so they have no epoch in common"
        raise base.UserError(f"{flag}: {problem}; give {advice}")


def open_apart(
    settings: flag_rules.Settings, corpus: Corpus, reading: Reading, trained_on: list[dict[str, Any]]
) -> HeldOut:
    """What an --eval-split that is a place of its own holds, from the token cache or token files, also beside streams.
    It is an error where one of the sources in `trained_on` has the same tokens."""
    place = settings.eval_split
    if corpus.has_mask and not settings.document_mask and "document_mask" not in settings.explicit:
        problem = "its documents do not see each other, and those that the run trains on do"
        raise base.UserError(f"--eval-split {place}: {problem}; give --document-mask or --no-document-mask")
    with named_by_eval_split():
        tokens, line = reading.open(corpus, corpus.split)
        if rules_of_training(trained_on, tokens, reading):
            raise base.UserError(f"--eval-split {place}: its tokens were trained on; give what was not")
        windows = reading.windows(tokens, f"{place}, split {corpus.split!r}")
    job.print0("data      ", f"{place}: {line}")
    if corpus.is_chat:
        lines = base.broadcast_from_rank_0(lambda: reading.chat_format(corpus).describe())
        job.print0("format    ", f"{place}: {lines['format']}")
    documents = f", {base.counted(len(tokens.ends), 'document')}" if tokens.knows_ends else ""
    split = f", {corpus.split}" if len(corpus.listing.splits) > 1 else ""
    return HeldOut(windows, f"{place}{split}, all of it{documents}")


def load_apart(
    settings: flag_rules.Settings, corpus: Corpus, reading: Reading, trained_on: list[dict[str, Any]]
) -> TrainingData:
    """An --eval-split that is a place of its own, for an evaluation of it without training."""
    held_out = open_apart(settings, corpus, reading, trained_on)
    data = mix({corpus.name: held_out.windows}, {corpus.name: None}, settings.sequence_length, settings.seed)
    data.held_out, data.header = {corpus.name: held_out.windows}, {"held out": describe_held_out(held_out)}
    data.record.sources[corpus.name]["chat"] = corpus.is_chat
    return data


def recorded_data(settings: flag_rules.Flags, manifest: dict | None) -> DataRecord | None:
    """What a checkpoint's manifest records of the data; the only source has the name that it has now."""
    if not manifest:
        return None
    return renamed(read_record(manifest), [source.name for source in settings.sources()])


def open_synthetic(settings: flag_rules.Settings, vocab_size: int) -> OpenedSource:
    """Random windows to train on, and others to evaluate on."""
    length, seed = settings.sequence_length, settings.seed
    train = SyntheticDataset(vocab_size, length, seed)
    held_out = None
    if settings.eval_interval:
        held_out = HeldOut(SyntheticDataset(vocab_size, length, seed + 1, SYNTHETIC_EVAL_WINDOWS), "synthetic")
    return OpenedSource(train, held_out, {"dataset": f"synthetic, {vocab_size:,} ids"})


def rules_of_training(trained_on: list[dict[str, Any]], tokens: Tokens, reading: Reading) -> dict[str, Any] | None:
    """The rules of the source in `trained_on` that has these tokens, or that part of them which was not held out; None
    where none has."""
    by_digest = {rules["dataset"]: rules for rules in trained_on}
    digests = [tokens.fingerprint()] if trained_on else []
    if any(rules.get("held_out") == HELD_OUT for rules in trained_on):
        digests.append(reading.with_ends(tokens).divide()[0].fingerprint())
    return next((by_digest[digest] for digest in digests if digest in by_digest), None)


def choose_held_out(
    settings: flag_rules.Flags, corpus: Corpus, rules: dict[str, Any] | None, rule: str, whole: bool
) -> tuple[str | None, str | None]:
    """(the split that is held out, the rule by which documents of the training split are); None for what does not
    apply. Held out is the split --eval-split; by default the split `validation`, and where there is none some of the
    documents, or with `whole` all; beside an --eval-split that is a place of its own nothing more than before. `rules`
    are those of the checkpoint that a run goes on from."""
    if not settings.eval_interval:
        return None, None
    was_divided = bool(rules and rules["held_out"])
    split, is_apart = settings.eval_split, flag_rules.is_place(settings.eval_split)
    is_unknown = bool(split) and not is_apart and parse_split(split)[0] not in corpus.listing.splits
    if is_unknown and base.broadcast_from_rank_0(lambda: os.path.exists(split)):
        problem = f"{corpus.source.dataset} has no split of that name"
        raise base.UserError(f"--eval-split {split}: {problem}; for the file or folder of that name give ./{split}")
    if split is None and not was_divided and DEFAULT_EVAL_SPLIT in corpus.listing.splits:
        split = DEFAULT_EVAL_SPLIT
    if split is None and whole:
        split = corpus.split
    if rules and split is None and not was_divided:
        problem = f"the run held out nothing of {corpus.source.dataset}, it trained on all of it"
        raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
    if was_divided and rules["held_out"] != rule:
        how = "needs" if rule == HELD_OUT else "was read without"
        raise base.UserError(f"--dataset {corpus.source.dataset}: what the run held out of it {how} --streaming")
    if is_apart:
        return None, rule if was_divided else None
    return split, rule if split is None or was_divided else None


def open_cached(
    settings: flag_rules.Settings,
    corpus: Corpus,
    reading: Reading,
    rules: dict[str, Any] | None,
    trained_on: list[dict[str, Any]] | None,
) -> OpenedSource:
    """A source from the token cache or from token files."""
    opened = None
    if trained_on:
        opened = reading.open(corpus, corpus.split)
        rules = rules_of_training(trained_on, opened[0], reading)
    whole = trained_on is not None and not rules
    split, rule = choose_held_out(settings, corpus, rules, HELD_OUT, whole)
    place = f"{corpus.source.dataset}, split {corpus.split!r}"
    tokens, line = opened or reading.open(corpus, corpus.split)
    of_source = f"{corpus.name}: " if len(settings.sources()) > 1 else ""
    job.print0("data      ", of_source + line)
    warning = token_files.differing_tokenizer(tokens.files, reading.tokenizer)
    if warning:
        job.warn(warning)
    held_out = None
    if rule:
        tokens = reading.with_ends(tokens)
        documents = len(tokens.ends)
        divided = tokens.divide()
        tokens = divided[0]
        name = f"{rule}, {len(divided[1].ends):,} of {documents:,}"
        if len(tokens.starts) == 1:
            name = f"the last {100 // EVERY} % of it"
        if not flag_rules.is_place(settings.eval_split):
            held_out = HeldOut(reading.windows(divided[1], f"{place}, {rule}"), name)
    if split:
        of_split = tokens
        if split != corpus.split:
            of_split, line = reading.open(corpus, split)
            job.print0("data      ", of_source + line)
        held_out = HeldOut(reading.windows(of_split, f"{corpus.source.dataset}, split {split!r}"), split)
        if of_split is tokens and tokens.knows_ends:  # elsewhere all tokens would be read to count them
            held_out.name = f"all of it, {base.counted(len(tokens.ends), 'document')}"
    train = reading.windows(tokens, place)
    trains = settings.num_steps > 0 and not settings.show_samples
    for word, line in describe_packing(corpus, train, reading, with_example=trains).items():
        job.print0(f"{word:10}", of_source + line)
    recorded: dict[str, Any] = {"held_out": rule, "dataset": tokens.fingerprint()}
    if corpus.is_chat:
        recorded["chat"] = True
    return OpenedSource(train, held_out, recorded)


def open_stream(
    settings: flag_rules.Settings,
    corpus: Corpus,
    reading: Reading,
    rules: dict[str, Any] | None,
    lanes: int,
    trained_on: list[dict[str, Any]] | None,
) -> OpenedSource:
    """A source that is read while training."""
    dataset = corpus.source.dataset
    if corpus.has_mask:
        holds = "conversations" if corpus.is_chat else "token ids with labels"
        raise base.UserError(
            f"--dataset {dataset}: holds {holds}, whose masks are in the token cache; leave out --streaming"
        )

    def stream_of(split: str) -> Stream:
        name, bounds = parse_split(split)
        if bounds:
            raise base.UserError(
                f"--dataset {dataset}, split {split!r}: a stream takes whole splits; leave out --streaming"
            )
        of_split = corpus.listing.files_in_split(name)
        if are_token_files(of_split):
            raise base.UserError(
                f"--dataset {dataset}: has token files, which are read in place; leave out --streaming"
            )
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
    fingerprint = base.broadcast_from_rank_0(train.fingerprint)
    if trained_on:
        rules = next((rules for rules in trained_on if rules.get("corpus") == fingerprint["corpus"]), None)
    whole = trained_on is not None and not rules
    split, rule = choose_held_out(settings, corpus, rules, HELD_OUT_BY_CONTENT, whole)
    held_out = stream_of(split) if split else copy.copy(train)
    if rule:
        train.held_out = False
    if rule and not split:
        held_out.held_out = True
    evaluated = None
    if settings.eval_interval and not flag_rules.is_place(settings.eval_split):
        count = settings.eval_windows
        if not split:
            count = count or STREAM_EVAL_WINDOWS
        evaluated = HeldOut(held_out.held_out_windows(count, settings.batch_size), split or rule or "")
        if len(evaluated.windows) == count:
            evaluated.name += f", the first {base.counted(count, 'window')}"
    return OpenedSource(train, evaluated, {"held_out": rule} | fingerprint)


def choose_lanes(settings: flag_rules.Settings, corpora: list[Corpus], before: DataRecord | None, per_step: int) -> int:
    """How many lanes a run's samples are in: what the checkpoint says, or --streams, and no more than the chunks of any
    source. By default the smallest multiple of a step's samples that is not below the number of files: each step then
    takes one window or none of each lane, and a lane reads about a file or less."""
    if before:
        return before.lanes
    streamed = [corpus for corpus in corpora if settings.streaming and not corpus.is_mapped]
    if not streamed:
        return 1
    of_sources = [corpus.listing.files_in_split(parse_split(corpus.split)[0]) for corpus in streamed]
    lanes = settings.streams or math.ceil(max(map(len, of_sources)) / per_step) * per_step
    return min(lanes, *map(stream.most_lanes, of_sources))


def local_weights(settings: flag_rules.Settings, opened: dict[str, OpenedSource]) -> dict[str, Fraction]:
    """The weight of each source: as given, or its number of tokens."""
    weights = {}
    for source in settings.sources():
        train = opened[source.name].train
        if source.weight is not None:
            weights[source.name] = source.weight
        elif len(opened) == 1:
            weights[source.name] = Fraction(1)
        elif isinstance(train, Stream):
            raise base.UserError(
                f"--dataset {source.dataset}: how large a stream is, is not known; give each source a weight, as in "
                f"{source.name}={source.dataset}:0.5"
            )
        else:
            weights[source.name] = Fraction(train.total_tokens())
    return weights


def tokens_of_a_sample(train: PackedDataset | SyntheticDataset | Stream, settings: flag_rules.Settings) -> Fraction:
    """Tokens of a window that are not padding, on average."""
    if isinstance(train, PaddedDataset):
        return Fraction(train.total_tokens(), len(train))
    return Fraction(settings.sequence_length)


def check_size(settings: flag_rules.Settings, data: TrainingData, corpora: list[Corpus], per_step: int) -> None:
    """Raises a UserError where a source has fewer windows than one step takes and is alone, or where one would be
    repeated more often than --max-epochs."""
    if len(data.sources) == 1 and data.orders:
        (order,) = data.orders.values()
        if order.windows < per_step:
            windows = f"{base.counted(order.windows, 'window')} of {settings.sequence_length} tokens"
            problem = f"{windows}, too few for one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            split = f", split {corpora[0].split!r}" if corpora else ""
            raise base.UserError(f"--dataset {settings.describe_dataset()}{split}: {problem} of {per_step}; {advice}")
    last = data.record.samples_of_step(settings.num_steps)
    if settings.max_epochs:
        for name, epochs in data.epochs(last.stop).items():
            if data.epochs(last.start)[name] >= settings.max_epochs:  # the last step may begin the next epoch
                problem = f"{name} would be read {epochs:.4g} times in {settings.num_steps:,} steps"
                steps = step_that_reads(data, name, settings.max_epochs, settings.num_steps)
                advice = f"--max-epochs {settings.max_epochs:g} of it is --num-steps {steps}"
                if len(data.sources) > 1:
                    advice += ", or give it a smaller weight"
                raise base.UserError(f"--max-epochs {settings.max_epochs:g}: {problem}; {advice}")


def step_that_reads(data: TrainingData, name: str, epochs: float, num_steps: int) -> int:
    """The first optimizer step, up to `num_steps`, by which a source has been read so often."""

    def read_by(step: int) -> float:
        return data.epochs(data.record.samples_of_step(step).stop)[name]

    return bisect.bisect_left(range(num_steps), epochs, lo=1, key=read_by)


# ----------------------------------------------------------------------------------------------------------------------
# What is said of them


def describe_packing(corpus: Corpus, train: PackedDataset, reading: Reading, with_example: bool) -> dict[str, str]:
    """The lines about documents that are packed whole, and about what is trained on of conversations and rows."""
    lines: dict[str, str] = {}
    if corpus.is_chat:
        lines |= base.broadcast_from_rank_0(lambda: reading.chat_format(corpus).describe())
    if isinstance(train, PaddedDataset):
        lines["packing"] = train.describe()
    if train.has_mask:
        share = train.total_trained() / len(train.tokens)
        word, document = ("chat", "conversation") if corpus.is_chat else ("labels", "row")
        if isinstance(train, PaddedDataset) and (warning := warn_of_cuts(train, document)):
            job.warn(warning)
        documents = base.counted(len(train.tokens.ends), document)
        lines[word] = f"{documents}, trained on {100 * share:.1f} % of their tokens"
    if train.has_mask and with_example:
        examples = base.broadcast_from_rank_0(lambda: find_examples(corpus, reading))
        lines["examples"] = f"([[ ]] is around what is trained on)\n{examples}"
    return lines


def warn_of_cuts(train: PaddedDataset, document: str) -> str:
    """A warning if more documents than MAX_CUT_SHARE are longer than a sequence; else ""."""
    lengths, cut = np.diff(train.tokens.ends, prepend=0), train.count_cut()
    if cut <= MAX_CUT_SHARE * len(lengths):
        return ""
    problem = f"{cut:,} of {base.counted(len(lengths), document)} are longer and are cut into pieces"
    return f"--sequence-length {train.seq_len}: {problem}; give a longer one (the longest has {lengths.max():,} tokens)"


def find_examples(corpus: Corpus, reading: Reading) -> str:
    """The first conversations of each kind in the files of a corpus, as they are trained on."""
    records = itertools.chain.from_iterable(read_records(file, corpus.text_field) for file in corpus.files)
    first = itertools.islice(records, EXAMPLE_RECORDS)
    documents = read_documents(first, reading.vocab_size, True, Counter(), corpus.kind)
    return describe_examples(documents, dataclasses.replace(reading, skip_bad_records=True).encoder(corpus))


def describe_left_out(windows: PackedDataset | SyntheticDataset | HeldOutWindows) -> str:
    """How many windows have no token to train on, in words behind others; "" for none."""
    return f", left out {base.counted(windows.left_out, 'window')} without a trained token" if windows.left_out else ""


def describe_ends(tokenizer: "PreTrainedTokenizerBase") -> str:
    """For the header: what stands between texts, and what a tokenizer's own rule would put there beside it."""
    before, after = own_tokens_around(tokenizer)
    own = [*before, *(token for token in after if token != tokenizer.eos_token_id)]
    line = f"{tokenizer.eos_token} after each text"
    if own:
        names = " ".join(tokenizer.convert_ids_to_tokens(own))
        line += f"; not {names}, which this tokenizer's own rule adds: docs/DATA.md (Text) says how to have it"
    return line


def describe(
    settings: flag_rules.Settings,
    data: TrainingData,
    opened: dict[str, OpenedSource],
    corpora: list[Corpus],
    per_step: int,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> dict[str, str]:
    """The lines of the header about the text: what is trained on, in which shares, what is held out and left out."""
    if settings.dataset == "synthetic":
        return {"data": "synthetic, random tokens"}
    alone = len(corpora) == 1
    epochs = data.epochs(data.record.samples_of_step(settings.num_steps).stop)
    found: dict[str, list[str]] = {"data": [], "files": [], "tokenizer": [], "held out": []}
    for corpus in corpora:
        source = opened[corpus.name]
        train, size = source.train, "streamed"
        if corpus.name in epochs:
            read = f"{len(train) / per_step:,.1f} steps an epoch" if alone else f"{epochs[corpus.name]:.1f} epochs"
            size = f"{train.total_tokens():,} tokens, {read}{describe_left_out(train)}"
        place = ", ".join(filter(None, [corpus.source.dataset, settings.dataset_config, corpus.split]))
        files = corpus.listing.describe(parse_split(corpus.split)[0])
        of_source = [f"{place}: {size}", files, describe_tokenizer(train)]
        for texts, text in zip(found.values(), [*of_source, describe_held_out(source.held_out)], strict=True):
            if text:
                texts.append(text if alone else f"{corpus.name}: {text}")
    lines = {word: "; ".join(texts) for word, texts in found.items() if texts}
    if any(corpus.kind == "text" for corpus in corpora):
        lines["documents"] = describe_ends(tokenizer)
    if not alone:
        first, *later = data.record.segments
        shares = [first.describe()]
        shares += [f"from step {data.record.step_of_sample(segment.first):,} {segment.describe()}" for segment in later]
        lines["mixture"] = "; ".join(shares)
    if data.has_streams:
        streams = base.counted(data.record.lanes, "logical stream")
        lines["streams"] = f"{streams} of each source, divided among ranks and workers"
        of_rank = lanes_of_rank(data.record.lanes, settings.batch_size, dist.get_world_size())
        if settings.num_steps and of_rank < settings.num_workers:
            idle = f"{settings.num_workers - of_rank:,} of its {settings.num_workers:,} workers have none"
            lines["streams"] += f"; a rank reads {of_rank:,}, so {idle} (a new run with more --streams has more)"
    return lines


def lanes_of_rank(lanes: int, batch_size: int, ranks: int) -> int:
    """How many lanes a rank meets, each `ranks x batch_size` samples so many in a row."""
    apart = math.gcd(lanes, ranks * batch_size)  # of the lanes at which its microbatches begin
    return lanes // apart * min(batch_size, apart)


def describe_held_out(held_out: HeldOut | None) -> str:
    """For the header: what is held out, of a source or apart; "" where nothing is."""
    if held_out is None:
        return ""
    windows = held_out.windows
    line = f"{held_out.name}: {windows.total_tokens():,} tokens"
    if windows.has_mask:
        line += f", {windows.total_trained():,} of them in the loss"
    return line + describe_left_out(windows)


def describe_tokenizer(train: PackedDataset | Stream) -> str:
    """For the header: which tokenizer made the token files; "" for others."""
    if isinstance(train, Stream) or not train.tokens.is_mapped:
        return ""
    named = next((file.tokenizer for file in train.tokens.files if file.tokenizer), None)
    return f"{f'{named}, as the files say' if named else 'not known'} (tokens are read in place)"


def render_prompt(
    settings: flag_rules.Settings, answers: bool, tokenizer: "PreTrainedTokenizerBase", prompt: str | Conversation
) -> str:
    """The text that a sample continues: the prompt, or if the model `answers` or a chat template is given, a user's
    message rendered by the template; messages always are."""
    has_template = bool(tokenizer.chat_template)  # without one a prompt and its completion are text
    if isinstance(prompt, Conversation) and not has_template and settings.chat_template is None:
        problem = "it holds messages, and the tokenizer has no chat template"
        raise base.UserError(f"--sample-prompt {prompt.place}: {problem}; give one with --chat-template FILE")
    if isinstance(prompt, str) and not (answers and has_template) and settings.chat_template is None:
        return prompt
    return render_user_message(tokenizer, base.read_template(settings.chat_template), prompt)


def end_tokens(
    settings: flag_rules.Settings, record: DataRecord | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> list[int]:
    """The tokens that end a text of a model: the tokenizer's own, and where the data of `record` are conversations the
    one that ends an answer."""
    if tokenizer is None:
        return []
    ends = [tokenizer.eos_token_id]
    if is_chat(record):
        ends += ends_of_answers(tokenizer, base.read_template(settings.chat_template))
    return [end for end in dict.fromkeys(ends) if end is not None]


def are_chats(corpora: list[Corpus], record: DataRecord | None) -> bool:
    """True if the corpora that a run reads are conversations; if it reads none, those that `record` is of."""
    sources = [corpus for corpus in corpora if not corpus.is_apart] or corpora
    return any(corpus.is_chat for corpus in sources) if sources else is_chat(record)


def is_chat(record: DataRecord | None) -> bool:
    return record is not None and any(rules.get("chat") for rules in record.sources.values())


def first_words(corpora: list[Corpus], sources: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The first words of the first source, as a prompt for a sample, of conversations those of a user;
    empty where it has no text."""
    if corpora and corpora[0].is_chat:
        files = corpora[0].listing.files_in_split(parse_split(corpora[0].split)[0])
        return first_question(files[0], corpora[0].text_field)
    dataset = next(iter(sources.values()))
    if tokenizer is None or isinstance(dataset, Stream | SyntheticDataset):
        return ""
    text = tokenizer.decode(tokens_of(dataset[0])[:12], skip_special_tokens=True)
    assert isinstance(text, str)  # of one list of ids
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut


def first_question(file: DataFile, layout: Field) -> str:
    """The first words of a user in a file of conversations; empty where there are none."""
    for _, record in read_records(file, layout):
        messages = record.messages if isinstance(record, Conversation) else []
        for message in messages:
            if message["role"] == "user" and isinstance(message.get("content"), str):
                return " ".join(message["content"].split()[:12])
    return ""


def show_samples(
    settings: flag_rules.Settings,
    data: TrainingData,
    tokenizer: "PreTrainedTokenizerBase | None",
    recorded: dict | None,
) -> None:
    """Prints what the step --show-samples trains on, by the order that a run's manifest or config.json recorded, if
    there is one."""
    record = recorded_data(settings, recorded)
    if record:
        data = dataclasses.replace(data, record=record)
    job.print0(describe_step(data, tokenizer, settings.show_samples))


# ----------------------------------------------------------------------------------------------------------------------
# The evaluation of a run that has ended


def evaluates_own_data(settings: flag_rules.Flags, manifest: dict) -> bool:
    """Whether an evaluation of a run's checkpoint reads sources of the run, of which its record says what was held out;
    a UserError where it reads a part of what the run trained on, or more than that."""
    flags = manifest["flags"]
    dataset = flags["dataset"] if isinstance(flags["dataset"], str) else tuple(flags["dataset"])
    run = dataclasses.replace(
        settings, dataset=dataset, dataset_split=flags["dataset_split"], streaming=flags["streaming"]
    )
    if flag_rules.is_place(settings.eval_split):
        trained = files_of_training(run) if dataset != "synthetic" else {}
        for held_out in find_apart(settings).files:
            if held_out.version()[0] in trained:
                problem = f"the run trained on {held_out}"
                raise base.UserError(f"--eval-split {settings.eval_split}: {problem}; give what it did not train on")
        return False
    trained, read = files_of_training(run), files_of_training(settings)
    shared = trained.keys() & read.keys()
    for file in shared:
        if settings.eval_split and flag_rules.splits_overlap(trained[file][1], settings.eval_split):
            problem = f"it is not apart from {trained[file][1]!r}, which the run trained on"
            raise base.UserError(f"--eval-split {settings.eval_split}: {problem}; give one that is")
    own = {trained[file][0] for file in shared}
    files_of_own = {file: split for file, (name, split) in trained.items() if name in own}
    if shared and files_of_own == {file: split for file, (_, split) in read.items()}:
        return True
    for file in shared:
        if flag_rules.splits_overlap(trained[file][1], read[file][1]):
            problem = f"the run trained on {trained[file][1]!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise base.UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def files_of_training(settings: flag_rules.Flags) -> dict[str, tuple[str, str]]:
    """(source, split that is trained on) of each file of a run's sources, by its real path; of what is not there any
    more by the name of the source."""
    found = {}
    for source in settings.sources():
        try:
            corpus = find_corpus(settings, source)
        except base.UserError:  # nor can it be read then
            found[source.dataset] = (source.name, settings.dataset_split or "train")
            continue
        for file in corpus.listing.files_in_split(parse_split(corpus.split)[0]):
            found[file.version()[0]] = (source.name, corpus.split)
    return found
