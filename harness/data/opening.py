"""Opening: the sources of a run opened, divided into training and eval data, and mixed."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from harness import base, flags, job
from harness.data import eval_checks
from harness.data.corpora import (
    Corpora,
    Corpus,
    are_token_files,
    blame_eval_split,
    inspect_source,
    masks_documents,
    parse_split,
    refuse_chat_flags,
)
from harness.data.eval_split import (
    BY_CONTENT,
    BY_NUMBER,
    RULE_TEXTS,
    EvalData,
    choose_eval_split,
    describe_taken_out,
    take_out_eval_documents,
)
from harness.data.header import describe, describe_eval_data, describe_packing, describe_step
from harness.data.loader import ranks_evaluating
from harness.data.mixture import DataRecord, SourceSpec, make_record, read_data_record
from harness.data.packing import PackedDataset, SyntheticDataset
from harness.data.prompts import demo_prompt
from harness.data.reader import CorpusReader
from harness.data.stream import Stream, max_shards
from harness.data.tokens import Tokens, checksum_of_beginning
from harness.data.training_data import OpenedSource, TrainingData, mean_sample_tokens, mix

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SYNTHETIC_EVAL_SEQUENCES = 1024
STREAM_EVAL_SEQUENCES = 256  # default for eval documents of a stream: to find them all, every file would be read


@dataclass
class OpenedSources:
    """The sources of a run, opened one after another, and what they are opened with; see `load`."""

    reader: CorpusReader
    recorded: DataRecord | None  # the checkpoint's; None for a new run, and to evaluate other data than the run's
    trained_on: Sequence[SourceSpec]
    samples_per_step: int
    num_shards: int
    by_name: dict[str, OpenedSource] = field(default_factory=dict)

    def recorded_spec(self, settings: flags.Settings, corpus: Corpus, beginning: str) -> SourceSpec | None:
        """The spec of a source when it was trained on: by its name in the checkpoint, else by its `beginning`, a
        checksum of its first tokens, as it may have had another name."""
        recorded = self.recorded.sources if self.recorded else {}
        specs = [*recorded.values()]
        if not settings.num_steps:  # an evaluation; a new run on exported weights divides its data itself
            specs += self.trained_on
        return recorded.get(corpus.name) or eval_checks.find_trained_spec(specs, beginning)


def load(
    settings: flags.Settings,
    corpora: Corpora,
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None = None,
    trained_on: Sequence[SourceSpec] = (),
    opened: OpenedSources | None = None,
) -> TrainingData:
    """Open the training and eval data of a run, with the header's lines about them; the eval data alone if nothing is
    trained and --eval-split is a dataset of its own. Lines about a source are printed when it is opened, as that may
    take long; the others are in the `header` of the result. Every rank calls this.

    Args:
        manifest: that of the checkpoint that a run resumes, or whose own data are evaluated; for --show-samples what
            `state.find_recorded_data` found. Its specs say how each source was read, and its mixture continues.
        trained_on: other specs of sources that the weights were trained on. In an evaluation, data that are not among
            them and have no eval split are evaluated in full.
        opened: what `open_sources` returned, if it was called before: --num-epochs needs the sizes of the sources.
    """
    if corpora.eval_dataset and not settings.num_steps:
        name, reader = corpora.eval_dataset.name, make_reader(settings, tokenizer, config)
        evaluated = open_eval_dataset(settings, corpora.eval_dataset, reader, trained_on)
        # the eval sequences stand in for the training data, which nothing reads
        data = mix({name: evaluated.sequences}, {name: Fraction(1)}, settings.sequence_length, settings.seed)
        data.eval_sets, data.header = {name: evaluated.sequences}, {"eval data": describe_eval_data(evaluated)}
        return data
    opened = opened or open_sources(settings, corpora, tokenizer, config, manifest, trained_on)
    by_name, length = opened.by_name, settings.sequence_length
    record = make_record(
        settings=settings,
        specs={name: source.spec for name, source in by_name.items()},
        weights=source_weights(settings, by_name),
        tokens_per_sample={name: mean_sample_tokens(source.train, length) for name, source in by_name.items()},
        samples_per_step=opened.samples_per_step,
        num_shards=opened.num_shards,
        before=opened.recorded,
        step=manifest["step"] if manifest else 0,
        num_samples=manifest["samples"] if manifest else 0,
    )
    data = TrainingData({name: source.train for name, source in by_name.items()}, record, length, settings.seed)
    evaluated_sources = {name: source.eval_data for name, source in by_name.items() if source.eval_data}
    if corpora.eval_dataset:
        specs = [*trained_on, *record.sources.values()]
        evaluated = open_eval_dataset(settings, corpora.eval_dataset, opened.reader, specs)
        evaluated_sources = {corpora.eval_dataset.name: evaluated}
    if settings.eval_interval:
        data.eval_sets = {name: eval_data.sequences for name, eval_data in evaluated_sources.items()}
        data.eval_fingerprints = {name: sequences.fingerprint() for name, sequences in data.eval_sets.items()}
    if settings.num_steps:
        check_size(settings, data, corpora, opened.samples_per_step)
    data.header = describe(settings, data, by_name, corpora.sources, opened.samples_per_step, tokenizer)
    if corpora.eval_dataset:
        data.header["eval data"] = describe_eval_data(evaluated)
    if settings.demo:
        # the first words of the eval data, if there are any: nothing else of a stream has been read yet
        data.demo_prompt = base.broadcast_from_rank_0(
            lambda: demo_prompt(corpora.sources, data.eval_sets or data.sources, tokenizer)
        )
    return data


def make_reader(
    settings: flags.Settings, tokenizer: "PreTrainedTokenizerBase | None", config: "PretrainedConfig"
) -> CorpusReader:
    """The reader of a run's corpora."""
    from accelerate import PartialState  # here, as it takes long to import

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
    corpora: Corpora,
    tokenizer: "PreTrainedTokenizerBase | None",
    config: "PretrainedConfig",
    manifest: dict | None = None,
    trained_on: Sequence[SourceSpec] = (),
) -> OpenedSources:
    """Open the sources of a run; arguments as `load` has them. Every rank calls this."""
    recorded = recorded_data(settings, manifest)
    counts_epochs = settings.num_epochs or settings.eval_interval == "epoch"
    if recorded and counts_epochs and settings.num_steps:
        refuse_changed_epochs(settings, corpora, recorded)
    samples_per_step = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    num_shards = choose_num_shards(settings, corpora, recorded, samples_per_step)
    reader = make_reader(settings, tokenizer, config)
    opened = OpenedSources(reader, recorded, trained_on, samples_per_step, num_shards)
    if settings.dataset == "synthetic":
        opened.by_name["synthetic"] = open_synthetic(settings, reader.vocab_size)
    for corpus in corpora.sources:
        open_source = open_stream if settings.streaming and not corpus.from_token_files else open_mapped
        opened.by_name[corpus.name] = open_source(settings, corpus, opened)
    if recorded:
        refuse_renamed_sources(opened.by_name, recorded)
    check_eval_data(settings, corpora, opened)
    return opened


def check_eval_data(settings: flags.Settings, corpora: Corpora, opened: OpenedSources) -> None:
    """Raise a UserError if eval data of the sources were trained on by the weights, or are trained on by the run."""
    evaluates_other_data = not settings.num_steps and opened.recorded is None  # than the weights were trained on
    specs = list(opened.trained_on)
    if opened.recorded:
        specs += opened.recorded.sources.values()
    if not evaluates_other_data:
        specs += [source.spec for source in opened.by_name.values()]
    eval_checks.refuse_trained_splits(opened.by_name, specs)
    if settings.num_steps:
        eval_checks.refuse_other_eval_documents(opened.by_name, opened.trained_on)
    if not evaluates_other_data and len(corpora.sources) > 1:
        base.broadcast_from_rank_0(lambda: eval_checks.refuse_shared_files(corpora, opened.by_name))


def refuse_renamed_sources(by_name: dict[str, OpenedSource], recorded: DataRecord) -> None:
    """Raise a UserError if a source of the checkpoint has another name now: it would be read from its beginning again.
    A default name changes if another source with a file of the same name is added or removed."""
    for name, source in by_name.items():
        for old_name, spec in recorded.sources.items():
            is_same = all(spec.get(key) == source.spec.get(key) for key in ("dataset", "beginning"))
            if is_same and name not in recorded.sources and old_name not in by_name:
                problem = f"it has the data of the run's source {old_name}, which continues under that name only"
                raise base.UserError(f"--dataset {name}: {problem}; give --dataset {old_name}=FILE")


def refuse_changed_epochs(settings: flags.Flags, corpora: Corpora, recorded: DataRecord) -> None:
    """Raise a UserError if the sources of a resumed run have no common epoch: some were added or removed, or the run
    had weights or stages."""
    had_weights = len(recorded.names) > 1 and any(recorded.typed_weights.values())
    has_changed = any(segment.weights != recorded.segments[0].weights for segment in recorded.segments)
    if had_weights or has_changed or {corpus.name for corpus in corpora.sources} != set(recorded.names):
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
    masks_by_default = masks_documents(None, settings.packing, Corpora([], corpus))
    if masks_by_default and not settings.document_mask and "document_mask" not in settings.explicit:
        problem = "it would have a document mask by default, the training data have none"
        raise base.UserError(f"--eval-split {name}: {problem}; give --document-mask or --no-document-mask")
    with blame_eval_split():
        tokens, origin = reader.open_tokens(corpus, corpus.split)
        eval_checks.refuse_trained_tokens(name, checksum_of_beginning(tokens), trained_on)
        sequences = reader.pack(tokens, f"{name}, split {corpus.split!r}")
    job.print0("data      ", f"{name}: {origin}")
    if corpus.is_chat:
        lines = base.broadcast_from_rank_0(lambda: reader.chat_encoder(corpus).describe())
        job.print0("format    ", f"{name}: {lines['format']}")
    split = f", {corpus.split}" if len(corpus.listing.splits) > 1 else ""
    return EvalData(sequences, f"{name}{split}, {describe_all(tokens)}")


def describe_all(tokens: Tokens) -> str:
    """The description of eval data that are all of a split."""
    if not tokens.knows_doc_ends:  # all tokens would be read to count the documents
        return "all of it"
    return f"all of it, {base.counted(len(tokens.doc_ends), 'document')}"


def recorded_data(settings: flags.Flags, manifest: dict | None) -> DataRecord | None:
    """The data record of a checkpoint's manifest. A UserError if its only source, or one that is evaluated, has another
    name now: positions, orders and eval documents are recorded by name."""
    if not manifest:
        return None
    recorded, sources = read_data_record(manifest), settings.sources()
    if len(recorded.names) == len(sources) == 1 and sources[0].name not in recorded.sources:
        old, new = base.one_or_more(manifest["flags"]["dataset"]), settings.describe_dataset()
        advice = f"if it is a copy, give --dataset {recorded.names[0]}={sources[0].dataset}"
        raise base.UserError(f"--dataset was {old} in the checkpoint and is {new} now; {advice}")
    unknown = [source.name for source in sources if source.name not in recorded.sources]
    if unknown and not settings.num_steps:
        advice = f"give the source the name that the run gave it, one of {', '.join(recorded.sources)}"
        raise base.UserError(f"--dataset {unknown[0]}: {advice}")
    return recorded


def open_synthetic(settings: flags.Settings, vocab_size: int) -> OpenedSource:
    """Random sequences to train on, and others to evaluate on."""
    length, seed = settings.sequence_length, settings.seed
    train = SyntheticDataset(vocab_size, length, seed)
    eval_data = None
    if settings.eval_interval:
        eval_data = EvalData(SyntheticDataset(vocab_size, length, seed + 1, SYNTHETIC_EVAL_SEQUENCES), "synthetic")
    return OpenedSource(train, eval_data, {"dataset": f"synthetic, {vocab_size:,} ids"})


def open_mapped(settings: flags.Settings, corpus: Corpus, opened: OpenedSources) -> OpenedSource:
    """Open a source whose tokens are mapped, from the token cache or from token files."""
    reader, data_name = opened.reader, f"{corpus.source.dataset}, split {corpus.split!r}"
    prefix = f"{corpus.name}: " if len(settings.sources()) > 1 else ""
    # opened even if only another split is evaluated: its first tokens show whether the weights were trained on it
    tokens, origin = reader.open_tokens(corpus, corpus.split)
    beginning = checksum_of_beginning(tokens)
    recorded = opened.recorded_spec(settings, corpus, beginning)
    choice = choose_eval_split(settings, corpus, recorded, BY_NUMBER)
    job.print0("data      ", prefix + origin)
    eval_data: EvalData | None = None
    evaluated: PackedDataset | None = None
    if choice.removed_by:
        tokens = reader.with_doc_ends(tokens)
        num_documents = len(tokens.doc_ends)
        tokens, eval_documents = take_out_eval_documents(tokens)
        if choice.evaluates_removed:
            evaluated = reader.pack(eval_documents, f"{data_name}, {RULE_TEXTS[choice.removed_by]}")
            eval_data = EvalData(evaluated, describe_taken_out(len(eval_documents.doc_ends), num_documents))
    if choice.split == corpus.split:  # nothing is trained: all of it is evaluated
        evaluated = reader.pack(tokens, data_name)
        eval_data = EvalData(evaluated, describe_all(tokens))
    elif choice.split:
        with blame_eval_split():
            eval_tokens, origin = reader.open_tokens(corpus, choice.split)
        if settings.num_steps or recorded:
            eval_checks.refuse_overlap(corpus.split, tokens, choice.split, eval_tokens)
        job.print0("data      ", prefix + origin)
        evaluated = reader.pack(eval_tokens, f"{corpus.source.dataset}, split {choice.split!r}")
        eval_beginning = checksum_of_beginning(eval_tokens)
        eval_data = EvalData(evaluated, choice.split, other_split=choice.split, beginning=eval_beginning)
    # without training the eval sequences stand in, as in `load`: a training split that is too short is no error then
    train = evaluated
    if settings.num_steps or train is None:
        train = reader.pack(tokens, data_name)
    with_example = settings.num_steps > 0 and not settings.show_samples
    for title, line in describe_packing(corpus, train, reader, with_example).items():
        job.print0(f"{title:10}", prefix + line)
    spec: SourceSpec = {"eval_rule": choice.removed_by, "dataset": tokens.fingerprint(), "beginning": beginning}
    if corpus.is_chat:
        spec["chat"] = True
    if train.depends_on_end_of_text:
        spec["end_of_text"] = reader.end_of_text
    if choice.evaluates_removed and not settings.num_steps:
        eval_checks.refuse_changed_source(corpus.name, recorded, spec)
    return OpenedSource(train, eval_data, spec)


def open_stream(settings: flags.Settings, corpus: Corpus, opened: OpenedSources) -> OpenedSource:
    """Open a source that is read while training."""
    dataset = corpus.source.dataset
    if corpus.has_loss_mask:
        holds = "conversations" if corpus.is_chat else "token ids with labels"
        raise base.UserError(
            f"--dataset {dataset}: holds {holds}, whose masks are in the token cache; leave out --streaming"
        )
    stream = open_split(settings, corpus, opened.reader, corpus.split, opened.num_shards)
    spec = base.broadcast_from_rank_0(stream.identify)
    recorded = opened.recorded_spec(settings, corpus, spec["beginning"])
    choice = choose_eval_split(settings, corpus, recorded, BY_CONTENT)
    spec = {"eval_rule": choice.removed_by, **spec}
    eval_data = None
    if choice.split or choice.evaluates_removed:
        count = settings.eval_sequences  # 0: all
        if choice.split:
            with blame_eval_split():
                eval_stream = open_split(settings, corpus, opened.reader, choice.split, num_shards=1)
        else:
            eval_stream, count = stream.select("eval"), count or STREAM_EVAL_SEQUENCES
        sequences = eval_stream.read_eval_sequences(count, functools.partial(ranks_evaluating, settings))
        eval_data = EvalData(sequences, choice.split or RULE_TEXTS[BY_CONTENT])
        if choice.split and choice.split != corpus.split:
            eval_data.other_split = choice.split
            eval_data.beginning = base.broadcast_from_rank_0(eval_stream.identify)["beginning"]
        if len(sequences) == count:
            eval_data.description += f", the first {base.counted(count, 'sequence')}"
    if choice.evaluates_removed and not settings.num_steps:
        eval_checks.refuse_changed_source(corpus.name, recorded, spec)
    return OpenedSource(stream.select("training") if choice.removed_by else stream, eval_data, spec)


def open_split(settings: flags.Settings, corpus: Corpus, reader: CorpusReader, split: str, num_shards: int) -> Stream:
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
        encoder=reader.encoder(corpus),
        fields=corpus.names_to_read,
        seq_len=settings.sequence_length,
        seed=settings.seed,
        kind=corpus.kind,
        skip_bad=settings.skip_bad_records,
        num_shards=num_shards,
        document_mask=bool(settings.document_mask),
    )


def choose_num_shards(
    settings: flags.Settings, corpora: Corpora, recorded: DataRecord | None, samples_per_step: int
) -> int:
    """The number N of stream shards: --streams, or on a resume the checkpoint's. Sample i is read from shard i % N. By
    default it is the number of files, rounded up to a multiple of a step's samples, so a step takes at most one
    sequence of each shard. It is at most the number of chunks of the source with the fewest.

    Raises:
        UserError: --streams differs from the checkpoint's number, or an added source has fewer chunks than that.
    """
    streamed = [corpus for corpus in corpora.sources if settings.streaming and not corpus.from_token_files]
    most_shards = {corpus.name: max_shards(corpus.files) for corpus in streamed}
    if recorded:
        shards = base.counted(recorded.num_shards, "stream shard")
        for name, count in most_shards.items():
            if count < recorded.num_shards and name not in recorded.sources:
                problem = f"the new source {name} has {base.counted(count, 'chunk')} for the run's {shards}"
                raise base.UserError(f"--dataset: {problem}; give it more text, files or row groups")
        if settings.streams and most_shards and min(settings.streams, *most_shards.values()) != recorded.num_shards:
            problem = f"the run has {shards}, which a resumed run keeps"
            raise base.UserError(f"--streams {settings.streams}: {problem}; leave it out")
        return recorded.num_shards
    if not streamed:
        return 1
    most_files = max(len(corpus.files) for corpus in streamed)
    num_shards = settings.streams or math.ceil(most_files / samples_per_step) * samples_per_step
    return min(num_shards, *most_shards.values())


def source_weights(settings: flags.Settings, by_name: dict[str, OpenedSource]) -> dict[str, Fraction]:
    """The weight of each source: as given, or its number of tokens."""
    weights = {}
    for source in settings.sources():
        train = by_name[source.name].train
        if source.weight is not None:
            weights[source.name] = source.weight
        elif len(by_name) == 1 or not settings.num_steps:
            weights[source.name] = Fraction(1)
        elif isinstance(train, Stream):
            problem = "the size of a stream is unknown"
            advice = f"give each source a weight, such as {source.name}={source.dataset}:0.5"
            raise base.UserError(f"--dataset {source.dataset}: {problem}; {advice}")
        else:
            weights[source.name] = Fraction(train.total_tokens())
    return weights


def check_size(settings: flags.Settings, data: TrainingData, corpora: Corpora, samples_per_step: int) -> None:
    """Raise a UserError if a single source has fewer sequences than one step takes, or if a source would be repeated
    more often than --max-epochs."""
    if len(data.sources) == 1 and not data.has_streams:
        (order,) = data.orders.values()
        if order.num_sequences < samples_per_step:
            sequences = f"{base.counted(order.num_sequences, 'sequence')} of {settings.sequence_length} tokens"
            problem = f"{sequences}, too few for one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            split = f", split {corpora.sources[0].split!r}" if corpora.sources else ""
            raise base.UserError(
                f"--dataset {settings.describe_dataset()}{split}: {problem} of {samples_per_step}; {advice}"
            )
    if settings.max_epochs:
        last = data.record.samples_of_step(settings.num_steps)
        before_last = data.epochs(last.start)  # the last step may begin the next epoch
        for name, epochs in data.epochs(last.stop).items():
            if before_last[name] >= settings.max_epochs:
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
    # the run's own record: from the checkpoint on, `data.record` has this command's weights and batch
    if recorded := recorded_data(settings, manifest):
        data = dataclasses.replace(data, record=recorded)
    job.print0(describe_step(data, tokenizer, settings.show_samples))


def open_sequences(
    reader: CorpusReader,
    dataset: str | Sequence[str],
    split: str | None,
    text_field: str | tuple[str, ...],
    subset: str | None,
    shuffle: bool,
) -> PackedDataset | TrainingData:
    """The sequences of one corpus, or of several mixed, for `utils.get_dataset`."""
    if not (shuffle or isinstance(dataset, str)):
        raise base.UserError("shuffle=False: a mixture has the order that its shares and its seed give; leave it out")
    if not dataset:
        raise base.UserError("dataset: it names nothing; give a file, folder or hub id, or several")
    dataset = dataset if isinstance(dataset, str) else tuple(dataset)
    if problem := flags.mixture_problem(dataset, None):
        raise base.UserError(problem)
    fields = (text_field,) if isinstance(text_field, str) else text_field
    fields_first = isinstance(text_field, str)  # a caller's choice; the default is a tuple

    def inspect(source: flags.Source) -> Corpus:
        split_name = split or flags.default_split(source.dataset, streaming=False)
        return inspect_source(source, [split_name], fields, fields_first, subset, reader.cache_dir)

    sources = flags.parse_sources(dataset)
    corpora = Corpora(base.broadcast_from_node_main(lambda: [inspect(source) for source in sources], reader.is_main))
    refuse_chat_flags(["--chat-template"] if reader.chat_template else [], corpora)
    document_mask = masks_documents(reader.document_mask, reader.packing, corpora)
    reader = dataclasses.replace(reader, document_mask=document_mask)
    sequences = {}
    for corpus in corpora.sources:
        tokens, _ = reader.open_tokens(corpus, corpus.split)
        sequences[corpus.name] = reader.pack(tokens, f"{corpus.source.dataset}, split {corpus.split!r}")
    if not shuffle:
        return sequences[sources[0].name]
    return mix(sequences, {source.name: source.weight for source in sources}, reader.seq_len, reader.seed)
