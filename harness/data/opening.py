"""Opening: the sources of a run opened, divided into training and eval data, and mixed."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from harness import base, flags, job
from harness.data import eval_checks, eval_split
from harness.data.corpora import (
    Corpus,
    are_token_files,
    blame_eval_split,
    inspect_source,
    masks_documents,
    parse_split,
    refuse_unused,
)
from harness.data.eval_split import BY_CONTENT, BY_NUMBER, RULES, EvalData, choose_eval_split
from harness.data.header import describe, describe_eval_data, describe_packing, describe_step
from harness.data.loader import ranks_evaluating
from harness.data.mixture import DataRecord, SequenceOrder, SourceSpec, make_record, read_data_record
from harness.data.packing import PackedDataset, SyntheticDataset
from harness.data.prompts import demo_prompt
from harness.data.reader import CorpusReader
from harness.data.stream import Stream, max_shards
from harness.data.training_data import OpenedSource, TrainingData, mean_sample_tokens, mix

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SYNTHETIC_EVAL_SEQUENCES = 1024
STREAM_EVAL_SEQUENCES = 256  # without an eval split: all eval documents of a stream would take a read of every file


@dataclass
class Opening:
    """The sources of a run, opened one after another into `opened`, and what they are opened with; see `load`."""

    reader: CorpusReader
    before: DataRecord | None  # the checkpoint's record of the data; None for a new run
    trained_on: Sequence[SourceSpec]
    trains: bool
    samples_per_step: int
    num_shards: int
    opened: dict[str, OpenedSource] = field(default_factory=dict)  # by name

    def recorded_spec(self, corpus: Corpus, beginning: str) -> SourceSpec | None:
        """The spec of a source when it was trained on: by its name in the checkpoint, else by its `beginning`, a
        checksum of its first tokens, as it may have had another name."""
        recorded = self.before.sources if self.before else {}
        specs = [*recorded.values()]
        if not self.trains:  # a run that trains further has an order and eval documents of its own
            specs += self.trained_on
        return recorded.get(corpus.name) or eval_checks.find_trained_spec(specs, beginning)


def load(
    settings: flags.Settings,
    corpora: list[Corpus],
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None = None,
    trained_on: Sequence[SourceSpec] = (),
    opening: Opening | None = None,
) -> TrainingData:
    """Open the training and eval data of a run, with the header's lines about them; the eval data alone if nothing is
    trained and --eval-split is a dataset of its own. Lines about a source are printed when it is opened, as that may
    take long; the others are in the `header` of the result. Every rank calls this.

    Args:
        manifest: that of the checkpoint whose data are read: a resume, or an evaluation of the run's own data. Its
            specs decide how sources are read, and its mixture continues.
        trained_on: the specs of the sources that the weights were trained on, if the weights came from an export, or if
            the data that are evaluated are not the run's. Without training a source that is not among them and has no
            eval split is evaluated in full.
        opening: what `open_sources` returned, if it was called before: --num-epochs needs the sizes of the sources.
    """
    eval_corpus = next((corpus for corpus in corpora if corpus.is_eval_dataset), None)
    if eval_corpus and not settings.num_steps:
        name, reader = eval_corpus.name, make_reader(settings, tokenizer, config)
        evaluated = open_eval_dataset(settings, eval_corpus, reader, trained_on)
        # the eval sequences stand in for the training data, which nothing reads
        data = mix({name: evaluated.sequences}, {name: None}, settings.sequence_length, settings.seed)
        data.eval_data, data.header = {name: evaluated.sequences}, {"eval data": describe_eval_data(evaluated)}
        return data
    corpora = [corpus for corpus in corpora if not corpus.is_eval_dataset]
    opening = opening or open_sources(settings, corpora, tokenizer, config, manifest, trained_on)
    opened = opening.opened
    length = settings.sequence_length
    record = make_record(
        settings=settings,
        sources={name: source.spec for name, source in opened.items()},
        weights=source_weights(settings, opened),
        tokens_per_sample={name: mean_sample_tokens(source.train, length) for name, source in opened.items()},
        samples_per_step=opening.samples_per_step,
        num_shards=opening.num_shards,
        before=opening.before,
        step=manifest["step"] if manifest else 0,
        samples=manifest["samples"] if manifest else 0,
    )
    data = TrainingData({name: source.train for name, source in opened.items()}, record, length, settings.seed)
    eval_sets = {name: source.eval_data for name, source in opened.items() if source.eval_data}
    if eval_corpus:
        specs = [*trained_on, *record.sources.values()]
        eval_sets = {eval_corpus.name: open_eval_dataset(settings, eval_corpus, opening.reader, specs)}
    if settings.eval_interval:
        data.eval_data = {name: eval_set.sequences for name, eval_set in eval_sets.items()}
        data.eval_identity = {name: sequences.fingerprint() for name, sequences in data.eval_data.items()}
    if settings.num_steps:
        check_size(settings, data, corpora, opening.samples_per_step)
    data.header = describe(settings, data, opened, corpora, opening.samples_per_step, tokenizer)
    if eval_corpus:
        data.header["eval data"] = describe_eval_data(eval_sets[eval_corpus.name])
    # eval data first: those of a stream are at hand, its training data are not
    data.demo_prompt = base.broadcast_from_rank_0(
        lambda: demo_prompt(corpora, data.eval_data or data.sources, tokenizer)
    )
    return data


def make_reader(
    settings: flags.Settings, tokenizer: "PreTrainedTokenizerBase | None", config: "PretrainedConfig"
) -> CorpusReader:
    """The reader of a run's corpora."""
    from accelerate import PartialState  # not with this file: it loads much that nothing here needs

    return CorpusReader(
        tokenizer=tokenizer,
        seq_len=settings.sequence_length,
        vocab_size=config.get_text_config().vocab_size,
        cache_dir=settings.cache_dir,
        skip_bad_records=settings.skip_bad_records,
        packing=settings.packing,
        chat_template=settings.chat_template,
        chat_loss=settings.chat_loss,
        document_mask=bool(settings.document_mask),
        seed=settings.seed,
        is_main=PartialState(cpu=not torch.cuda.is_available()).is_local_main_process,
    )


def open_sources(
    settings: flags.Settings,
    corpora: list[Corpus],
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None = None,
    trained_on: Sequence[SourceSpec] = (),
) -> Opening:
    """Open the sources of a run; arguments as `load` has them. Every rank calls this."""
    corpora = [corpus for corpus in corpora if not corpus.is_eval_dataset]
    before = recorded_data(settings, manifest)
    if before and (settings.num_epochs or settings.eval_interval == "epoch"):
        refuse_other_sources(settings, corpora, before)
    samples_per_step = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    num_shards = choose_num_shards(settings, corpora, before, samples_per_step)
    reader, trains = make_reader(settings, tokenizer, config), bool(settings.num_steps)
    opening = Opening(reader, before, trained_on, trains, samples_per_step, num_shards)
    if settings.dataset == "synthetic":
        opening.opened["synthetic"] = open_synthetic(settings, opening.reader.vocab_size)
    for corpus in corpora:
        if before and corpus.name not in before.sources and not settings.num_steps:
            known = ", ".join(before.sources)
            raise base.UserError(
                f"--dataset {corpus.name}: give the source the name that the run gave it, one of {known}"
            )
        open_source = open_stream if settings.streaming and not corpus.from_token_files else open_cached
        opening.opened[corpus.name] = open_source(settings, corpus, opening)
    if before:
        refuse_renamed_sources(opening.opened, before)
    eval_checks.refuse_trained_eval_data(opening.opened, before, trained_on, trains)
    if (trains or before) and len(corpora) > 1:
        base.broadcast_from_rank_0(lambda: eval_checks.refuse_shared_files(corpora, opening.opened))
    return opening


def refuse_renamed_sources(opened: dict[str, OpenedSource], before: DataRecord) -> None:
    """Raise a UserError if a source of the checkpoint has another name now: it would be read from its beginning again.
    A default name changes if another source with a file of the same name is added or removed."""
    for name, source in opened.items():
        for old_name, spec in before.sources.items():
            is_same = all(spec.get(key) == source.spec.get(key) for key in ("dataset", "beginning"))
            if is_same and name not in before.sources and old_name not in opened:
                problem = f"it has the data of the run's source {old_name}, which continues under that name only"
                raise base.UserError(f"--dataset {name}: {problem}; give --dataset {old_name}=FILE")


def refuse_other_sources(settings: flags.Flags, corpora: list[Corpus], before: DataRecord) -> None:
    """Raise a UserError if a run that counts epochs has other sources than its checkpoint, or if its mixture had
    weights or stages: then no step ends an epoch of every source."""
    had_weights = len(before.names) > 1 and any(before.typed_weights.values())
    has_changed = any(segment.weights != before.segments[0].weights for segment in before.segments)
    if had_weights or has_changed or {corpus.name for corpus in corpora} != set(before.names):
        flag, advice = "--eval-interval epoch", "a number of steps"
        if settings.num_epochs:
            flag, advice = "--num-epochs", "--num-steps or --num-tokens"
        problem = "the sources or their weights are not those of the run's beginning, so they have no epoch in common"
        raise base.UserError(f"{flag}: {problem}; give {advice}")


def open_eval_dataset(
    settings: flags.Settings, corpus: Corpus, reader: CorpusReader, trained_on: Sequence[SourceSpec]
) -> EvalData:
    """Open an --eval-split that is a dataset of its own, from the token cache or token files, also with --streaming. It
    is an error if one of the sources in `trained_on` has the same first tokens."""
    name = settings.eval_split
    is_typed = "document_mask" in settings.explicit
    # alone it would have a document mask, the training data have none, and the loss depends on it: the user decides
    if corpus.has_loss_mask and not settings.document_mask and settings.packing != "none" and not is_typed:
        problem = "it would have a document mask by default, the training data have none"
        raise base.UserError(f"--eval-split {name}: {problem}; give --document-mask or --no-document-mask")
    with blame_eval_split():
        tokens, origin = reader.open_tokens(corpus, corpus.split)
        eval_checks.refuse_trained_tokens(name, tokens.beginning(), trained_on)
        sequences = reader.pack(tokens, f"{name}, split {corpus.split!r}")
    job.print0("data      ", f"{name}: {origin}")
    if corpus.is_chat:
        lines = base.broadcast_from_rank_0(lambda: reader.chat_encoder(corpus).describe())
        job.print0("format    ", f"{name}: {lines['format']}")
    documents = f", {base.counted(len(tokens.doc_ends), 'document')}" if tokens.knows_doc_ends else ""
    split = f", {corpus.split}" if len(corpus.listing.splits) > 1 else ""
    return EvalData(sequences, f"{name}{split}, all of it{documents}")


def recorded_data(settings: flags.Flags, manifest: dict | None) -> DataRecord | None:
    """The data record of a checkpoint's manifest. A UserError if its only source has another name now: positions and
    the order of samples are recorded by name."""
    if not manifest:
        return None
    record, sources = read_data_record(manifest), settings.sources()
    if len(record.names) == len(sources) == 1 and sources[0].name not in record.sources:
        before, now = base.one_or_more(manifest["flags"]["dataset"]), settings.describe_dataset()
        advice = f"if it is a copy, give --dataset {record.names[0]}={sources[0].dataset}"
        raise base.UserError(f"--dataset was {before} in the checkpoint and is {now} now; {advice}")
    return record


def open_synthetic(settings: flags.Settings, vocab_size: int) -> OpenedSource:
    """Random sequences to train on, and others to evaluate on."""
    length, seed = settings.sequence_length, settings.seed
    train = SyntheticDataset(vocab_size, length, seed)
    eval_data = None
    if settings.eval_interval:
        eval_data = EvalData(SyntheticDataset(vocab_size, length, seed + 1, SYNTHETIC_EVAL_SEQUENCES), "synthetic")
    return OpenedSource(train, eval_data, {"dataset": f"synthetic, {vocab_size:,} ids"})


def open_cached(settings: flags.Settings, corpus: Corpus, opening: Opening) -> OpenedSource:
    """Open a source from the token cache or from token files."""
    reader, dataset = opening.reader, corpus.source.dataset
    data_name = f"{dataset}, split {corpus.split!r}"
    prefix = f"{corpus.name}: " if len(settings.sources()) > 1 else ""
    # opened also if nothing is trained and another split is evaluated: it tells if the weights were trained on it
    tokens, origin = reader.open_tokens(corpus, corpus.split)
    beginning = tokens.beginning()
    recorded = opening.recorded_spec(corpus, beginning)
    choice = choose_eval_split(settings, corpus, recorded, BY_NUMBER)
    job.print0("data      ", prefix + origin)
    eval_data = None
    evaluated: PackedDataset | None = None
    if choice.rule:
        tokens = reader.with_doc_ends(tokens)
        num_documents = len(tokens.doc_ends)
        tokens, eval_tokens = eval_split.divide(tokens)
        if choice.evaluates_documents:
            name = f"{RULES[choice.rule]}, {len(eval_tokens.doc_ends):,} of {num_documents:,}"
            if num_documents < eval_split.EVERY:
                name = f"the last {100 // eval_split.EVERY} % of it"
            evaluated = reader.pack(eval_tokens, f"{data_name}, {RULES[choice.rule]}")
            eval_data = EvalData(evaluated, name)
    if choice.split == corpus.split:  # nothing is trained: all of it is evaluated
        evaluated = reader.pack(tokens, data_name)
        eval_data = EvalData(evaluated, corpus.split)
        if tokens.knows_doc_ends:  # else all tokens would be read to count them
            eval_data.description = f"all of it, {base.counted(len(tokens.doc_ends), 'document')}"
    elif choice.split:
        eval_tokens, origin = reader.open_tokens(corpus, choice.split)
        if settings.num_steps or recorded:
            eval_checks.refuse_overlap(corpus.split, tokens, choice.split, eval_tokens)
        job.print0("data      ", prefix + origin)
        evaluated = reader.pack(eval_tokens, f"{dataset}, split {choice.split!r}")
        eval_data = EvalData(evaluated, choice.split, choice.split, eval_tokens.beginning())
    # without training, what is evaluated stands in for the training data, of which there may be too few
    train = reader.pack(tokens, data_name) if settings.num_steps or evaluated is None else evaluated
    with_example = settings.num_steps > 0 and not settings.show_samples
    for word, line in describe_packing(corpus, train, reader, with_example).items():
        job.print0(f"{word:10}", prefix + line)
    spec: SourceSpec = {"eval_rule": choice.rule, "dataset": tokens.fingerprint(), "beginning": beginning}
    if corpus.is_chat:
        spec["chat"] = True
    if train.depends_on_end_of_text:
        spec["end_of_text"] = reader.end_of_text
    if choice.evaluates_documents and not settings.num_steps:
        eval_checks.refuse_changed_source(corpus.name, recorded, spec)
    return OpenedSource(train, eval_data, spec)


def open_stream(settings: flags.Settings, corpus: Corpus, opening: Opening) -> OpenedSource:
    """Open a source that is read while training."""
    dataset = corpus.source.dataset
    if corpus.has_loss_mask:
        holds = "conversations" if corpus.is_chat else "token ids with labels"
        raise base.UserError(
            f"--dataset {dataset}: holds {holds}, whose masks are in the token cache; leave out --streaming"
        )
    stream = open_split(settings, corpus, opening, corpus.split, opening.num_shards)
    fingerprint = base.broadcast_from_rank_0(stream.identify)
    recorded = opening.recorded_spec(corpus, fingerprint["beginning"])
    choice = choose_eval_split(settings, corpus, recorded, BY_CONTENT)
    eval_data = None
    if choice.split or choice.evaluates_documents:
        count = settings.eval_sequences  # 0: all
        if choice.split:
            name, eval_stream = choice.split, open_split(settings, corpus, opening, choice.split, num_shards=1)
        else:
            name, eval_stream = RULES[BY_CONTENT], stream.reading("eval")
            count = count or STREAM_EVAL_SEQUENCES
        eval_data = EvalData(eval_stream.eval_sequences(count, functools.partial(ranks_evaluating, settings)), name)
        if choice.split and choice.split != corpus.split:
            eval_data.split = choice.split
            eval_data.beginning = base.broadcast_from_rank_0(eval_stream.identify)["beginning"]
        if len(eval_data.sequences) == count:
            eval_data.description += f", the first {base.counted(count, 'sequence')}"
    spec: SourceSpec = {"eval_rule": choice.rule, **fingerprint}
    if choice.evaluates_documents and not settings.num_steps:
        eval_checks.refuse_changed_source(corpus.name, recorded, spec)
    return OpenedSource(stream.reading("training") if choice.rule else stream, eval_data, spec)


def open_split(settings: flags.Settings, corpus: Corpus, opening: Opening, split: str, num_shards: int) -> Stream:
    """Open a split of a source as a stream; a UserError for a slice or token files."""
    name, bounds = parse_split(split)
    subject = f"--dataset {corpus.source.dataset}"
    if bounds:
        raise base.UserError(f"{subject}, split {split!r}: a stream takes whole splits; leave out --streaming")
    split_files = corpus.listing.files_in_split(name)
    if are_token_files(split_files):
        raise base.UserError(f"{subject}: has token files, which are read in place; leave out --streaming")
    return Stream(
        files=split_files,
        encoder=opening.reader.encoder(corpus),
        fields=corpus.fields_to_read,
        seq_len=settings.sequence_length,
        seed=settings.seed,
        skip_bad=settings.skip_bad_records,
        num_shards=num_shards,
        document_mask=bool(settings.document_mask),
    )


def choose_num_shards(
    settings: flags.Settings, corpora: list[Corpus], before: DataRecord | None, samples_per_step: int
) -> int:
    """The number N of stream shards of a run (--streams), the checkpoint's on a resume, and no more than the chunks of
    any source, which are parts of its files (see `stream`). Sample i is read from shard i % N. By default N is the
    smallest multiple of a step's samples that is not below the number of files: each step then takes one sequence or
    none of each shard, and a shard reads about a file or less.

    Raises:
        UserError: --streams differs from the checkpoint's number, or an added source has fewer chunks than that.
    """
    streamed = [corpus for corpus in corpora if settings.streaming and not corpus.from_token_files]
    most_shards = {corpus.name: max_shards(corpus.files) for corpus in streamed}
    if before:
        shards = base.counted(before.num_shards, "stream shard")
        for name, count in most_shards.items():
            if count < before.num_shards and name not in before.sources:
                problem = f"the new source {name} has {base.counted(count, 'chunk')} for the run's {shards}"
                raise base.UserError(f"--dataset: {problem}; give it more text, files or row groups")
        if settings.streams and most_shards and min(settings.streams, *most_shards.values()) != before.num_shards:
            problem = f"the run has {shards}, which a resumed run keeps"
            raise base.UserError(f"--streams {settings.streams}: {problem}; leave it out")
        return before.num_shards
    if not streamed:
        return 1
    most_files = max(len(corpus.files) for corpus in streamed)
    num_shards = settings.streams or math.ceil(most_files / samples_per_step) * samples_per_step
    return min(num_shards, *most_shards.values())


def source_weights(settings: flags.Settings, opened: dict[str, OpenedSource]) -> dict[str, Fraction]:
    """The weight of each source: as given, or its number of tokens."""
    weights = {}
    for source in settings.sources():
        train = opened[source.name].train
        if source.weight is not None:
            weights[source.name] = source.weight
        elif len(opened) == 1 or not settings.num_steps:
            weights[source.name] = Fraction(1)
        elif isinstance(train, Stream):
            raise base.UserError(
                f"--dataset {source.dataset}: how large a stream is, is not known; give each source a weight, as in "
                f"{source.name}={source.dataset}:0.5"
            )
        else:
            weights[source.name] = Fraction(train.total_tokens())
    return weights


def check_size(settings: flags.Settings, data: TrainingData, corpora: list[Corpus], samples_per_step: int) -> None:
    """Raise a UserError if a single source has fewer sequences than one step takes, or if a source would be repeated
    more often than --max-epochs."""
    if len(data.sources) == 1 and not data.has_streams:
        (order,) = data.orders.values()
        if order.num_sequences < samples_per_step:
            sequences = f"{base.counted(order.num_sequences, 'sequence')} of {settings.sequence_length} tokens"
            problem = f"{sequences}, too few for one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            split = f", split {corpora[0].split!r}" if corpora else ""
            raise base.UserError(
                f"--dataset {settings.describe_dataset()}{split}: {problem} of {samples_per_step}; {advice}"
            )
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
    """The first optimizer step, up to `num_steps`, by which a source has been read `epochs` times."""

    def read_by(step: int) -> float:
        return data.epochs(data.record.samples_of_step(step).stop)[name]

    return bisect.bisect_left(range(num_steps), epochs, lo=1, key=read_by)


def show_samples(
    settings: flags.Settings, data: TrainingData, tokenizer: "PreTrainedTokenizerBase | None", manifest: dict | None
) -> None:
    """Print the samples of the step --show-samples, in the order that the run recorded in its `manifest` or
    config.json, if it has one."""
    record = recorded_data(settings, manifest)
    if record:
        data = dataclasses.replace(data, record=record)
    job.print0(describe_step(data, tokenizer, settings.show_samples))


def open_sequences(
    reader: CorpusReader,
    dataset: str | Sequence[str],
    split: str | None,
    text_field: str | tuple[str, ...],
    subset: str | None,
    shuffle: bool,
) -> PackedDataset | Subset | TrainingData:
    """The sequences of one corpus, or of several mixed, for `utils.get_dataset`."""
    if not (shuffle or isinstance(dataset, str)):
        raise base.UserError("shuffle=False: a mixture has the order that its shares and its seed give; leave it out")
    dataset = dataset if isinstance(dataset, str) else tuple(dataset)
    if problem := flags.mixture_problem(dataset, None):
        raise base.UserError(problem)
    fields = (text_field,) if isinstance(text_field, str) else text_field

    def look(source: flags.Source) -> Corpus:
        wanted = split or flags.default_split(source.dataset, streaming=False)
        field_wins = isinstance(text_field, str)  # as a caller names one; the default is a tuple
        return inspect_source(source, [wanted], fields, field_wins, subset, reader.cache_dir)

    sources = flags.parse_sources(dataset)
    corpora = base.broadcast_from_node_main(lambda: [look(source) for source in sources], reader.is_main)
    refuse_unused(["--chat-template"] if reader.chat_template else [], corpora)
    document_mask = masks_documents(reader.document_mask, reader.packing, corpora)
    reader = dataclasses.replace(reader, document_mask=document_mask)
    sequences = {}
    for corpus in corpora:
        tokens, _ = reader.open_tokens(corpus, corpus.split)
        sequences[corpus.name] = reader.pack(tokens, f"{corpus.source.dataset}, split {corpus.split!r}")
    if not isinstance(dataset, str):
        return mix(sequences, {source.name: source.weight for source in sources}, reader.seq_len, reader.seed)
    (packed,) = sequences.values()
    if not shuffle:
        return packed
    order: Any = SequenceOrder(len(packed), reader.seed)  # computes each index on demand
    return Subset(packed, order)
