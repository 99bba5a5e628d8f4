"""Loading: the sources that --dataset names, opened, and the mixture that a run makes of them. Called by the script."""

import contextlib
import dataclasses
import os
import sys
from fractions import Fraction

import torch.distributed as dist

from harness import job
from harness.base.errors import UserError
from harness.data.corpora import (
    OpenedSource,
    default_split,
    describe_files,
    describe_tokenizer,
    holds_chat,
    open_source,
    open_synthetic,
)
from harness.data.corpus_files import local_files
from harness.data.data_record import DataRecord, describe_shares, read_record, record_of_run, renamed
from harness.data.mixture import Mixture
from harness.data.splits import files_of_split, parse_split
from harness.data.stream_parts import default_streams
from harness.data.streaming import StreamedDataset
from harness.data.training_data import TrainingData
from harness.flags.settings import ASSETS, Settings, is_local
from harness.flags.sources import same_dataset, splits_overlap


def load_data(
    settings: Settings, tokenizer, config, get_dataset, manifest: dict | None = None
) -> tuple[TrainingData, dict | None]:
    """The training data, with their lines of the header in `header`, and the held-out windows of each source by its
    name, None where no evaluation is asked for. `get_dataset` is that of `utils`.

    `manifest` is that of the checkpoint that the run goes on from: its sources are read by its rules, and the mixture
    goes on from its history.
    """
    vocab_size = config.get_text_config().vocab_size
    per_step = settings.tokens_per_step(dist.get_world_size()) // settings.sequence_length
    before = recorded_data(settings, manifest)
    sources = settings.sources()
    streams = choose_streams(settings, before, per_step)
    opened: dict[str, OpenedSource] = {}
    if settings.dataset == "synthetic":
        opened["synthetic"] = open_synthetic(settings, vocab_size)
    else:
        if not job.is_terminal(sys.stderr):
            os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        for source in sources:
            rules = before.sources.get(source.name) if before else None
            opened[source.name] = open_source(settings, source, tokenizer, vocab_size, get_dataset, rules, streams)
    record = record_of_run(
        settings,
        {name: source.rules for name, source in opened.items()},
        weights_of(settings, opened),
        {name: tokens_of_a_sample(source.train, settings) for name, source in opened.items()},
        per_step,
        streams,
        before,
        manifest["step"] if manifest else 0,
        manifest["samples"] if manifest else 0,
    )
    data = TrainingData(
        sources={name: source.train for name, source in opened.items()},
        mixture=Mixture(record.history, record.streams),
        record=record,
        seq_len=settings.sequence_length,
        seed=settings.seed,
    )
    if settings.document_mask:
        mask_documents(data, opened, tokenizer)
    if settings.num_steps:
        check_size(settings, data, opened, per_step)
    data.header = describe(settings, data, opened, per_step)
    held_out = None
    if settings.eval_interval:
        held_out = {name: source.held_out for name, source in opened.items()}
    return data, held_out


def as_recorded(data: TrainingData, record: DataRecord) -> TrainingData:
    """The data in the order that a run recorded, whatever the flags of now would plan."""
    if len(record.sources) == len(data.sources) == 1:
        record = renamed(record, next(iter(data.sources)))
    return dataclasses.replace(data, record=record, mixture=Mixture(record.history, record.streams))


def recorded_data(settings: Settings, manifest: dict | None) -> DataRecord | None:
    """What a checkpoint's manifest records of the data; the only source has the name that it has now."""
    if not manifest:
        return None
    record, sources = read_record(manifest), settings.sources()
    if len(record.sources) == len(sources) == 1:
        record = renamed(record, sources[0].name)
    return record


def evaluates_own_data(settings: Settings, manifest: dict) -> bool:
    """Whether an evaluation of a run's checkpoint reads what the run read, of which its record says what was held out;
    a UserError where it reads a part of what the run trained on, or more than that."""
    flags = manifest["flags"]
    dataset = flags["dataset"] if isinstance(flags["dataset"], str) else tuple(flags["dataset"])
    run = dataclasses.replace(
        settings, dataset=dataset, dataset_split=flags["dataset_split"], streaming=flags["streaming"]
    )
    trained, read = files_of_training(run), files_of_training(settings)
    shared = trained.keys() & read.keys()
    for file in shared:
        if settings.eval_split and splits_overlap(trained[file], settings.eval_split):
            problem = f"it is not apart from {trained[file]!r}, which the run trained on"
            raise UserError(f"--eval-split {settings.eval_split}: {problem}; give one that is")
    if trained == read or (
        same_dataset(dataset, settings.dataset) and flags["dataset_split"] == settings.dataset_split
    ):
        return True
    for file in shared:
        if splits_overlap(trained[file], read[file]):
            problem = f"the run trained on {trained[file]!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def files_of_training(settings: Settings) -> dict[str, str]:
    """The split that is trained on of each file of a run's sources, by its real path; of what has no files, by the name
    of the source."""
    splits = {}
    for source in settings.sources():
        place = str(ASSETS / "demo" / "stories") if source.dataset == "demo" else os.path.expanduser(source.dataset)
        split = settings.dataset_split or default_split(settings, place)
        files: list = []
        with contextlib.suppress(UserError):  # what is not there any more, or has no such split, cannot be read either
            files = files_of_split(place, parse_split(split)[0], local_files(place)) if is_local(place) else []
        for file in files or [place]:
            splits[os.path.realpath(str(file)) if files else place] = split
    return splits


def mask_conversations(settings: Settings, manifest: dict | None = None) -> Settings:
    """The settings with the document mask that is on by default where a run reads conversations; `manifest` is that of
    `load_data`."""
    reads_data = settings.num_steps or settings.eval_interval
    if settings.document_mask is not None or not reads_data:
        return settings
    before = recorded_data(settings, manifest)
    for source in settings.sources():
        rules = before.sources.get(source.name) if before else None
        if holds_chat(settings, source, rules):
            return dataclasses.replace(settings, document_mask=True)
    return settings


def mask_documents(data: TrainingData, opened: dict[str, OpenedSource], tokenizer) -> None:
    """Lets batches say where documents begin. A UserError where a source does not know it, nor has the tokenizer an
    end-of-text token."""
    data.end_of_text = tokenizer.eos_token_id
    for name, source in opened.items():
        if data.end_of_text is None and getattr(source.train, "document_ends", None) is None:
            raise UserError(
                f"--document-mask: {tokenizer.name_or_path} has no end-of-text token (eos_token), and {name} does not "
                "say where its documents end"
            )
        for windows in (source.train, source.held_out):
            if windows is not None:
                windows.end_of_text, windows.document_mask = data.end_of_text, True


def choose_streams(settings: Settings, before: DataRecord | None, per_step: int) -> int:
    """How many logical streams each source is cut into: what the checkpoint says, or --streams, or the default for
    the source of most files."""
    if not settings.streaming:
        return 1
    if before:
        return before.streams
    if settings.streams:
        return settings.streams
    most_files = max(len(local_files(os.path.expanduser(source.dataset))) for source in settings.sources())
    return default_streams(most_files, per_step)


def weights_of(settings: Settings, opened: dict[str, OpenedSource]) -> dict[str, Fraction]:
    """The weight of each source: as given, or its number of tokens."""
    weights = {}
    for source in settings.sources():
        train = opened[source.name].train
        if source.weight is not None:
            weights[source.name] = source.weight
        elif len(opened) == 1:
            weights[source.name] = Fraction(1)
        elif isinstance(train, StreamedDataset):
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


def check_size(settings: Settings, data: TrainingData, opened: dict[str, OpenedSource], per_step: int) -> None:
    """Raises a UserError where a source has fewer windows than one step takes and is alone, or where one would be
    repeated more often than --max-epochs."""
    if len(opened) == 1 and not settings.streaming:
        (source,) = opened.values()
        if len(source.train) < per_step:
            problem = f"{len(source.train):,} windows of {settings.sequence_length} tokens do not fill one global batch"
            advice = "use a smaller batch, a shorter sequence or more text"
            place = f"--dataset {settings.describe_dataset()}, split {source.split!r}"
            raise UserError(f"{place}: {problem} of {per_step}; {advice}")
    samples = data.record.samples_of_step(settings.num_steps).stop
    if settings.max_epochs:
        for name, epochs in data.epochs(samples).items():
            if epochs > settings.max_epochs:
                problem = f"{name} would be read {epochs:.4g} times in {settings.num_steps:,} steps"
                raise UserError(
                    f"--max-epochs {settings.max_epochs:g}: {problem}; give it a smaller weight, or fewer --num-steps"
                )


def describe(settings: Settings, data: TrainingData, opened: dict[str, OpenedSource], per_step: int) -> dict[str, str]:
    """The lines of the header about the text: what is trained on, in which shares, and what is held out."""
    lines = {}
    if settings.dataset == "synthetic":
        lines["data"] = "synthetic, random tokens"
    elif len(opened) == 1 and isinstance(settings.dataset, str):
        (source,) = opened.values()
        place = ", ".join(filter(None, [settings.dataset, settings.dataset_config, source.split]))
        lines["data"] = f"{place}: {describe_size(source, per_step)}"
    else:
        lines |= describe_mixture(settings, data, opened)
    tokenizers = {name: describe_tokenizer(source.train) for name, source in opened.items()}
    known = [line if len(opened) == 1 else f"{name}: {line}" for name, line in tokenizers.items() if line]
    if known:
        lines["tokenizer"] = "; ".join(known)
    if settings.streaming and data.record.streams > 1:
        lines["streams"] = f"{data.record.streams:,} logical streams of each source, divided among ranks and workers"
    held_out = []
    for name, source in opened.items():
        if source.held_out is not None and settings.dataset != "synthetic":
            line = f"{source.held_out_name}: {source.held_out.total_tokens():,} tokens"
            if source.held_out.is_chat:
                line += f", {source.held_out.total_trained():,} of them in the loss"
            held_out.append(line if len(opened) == 1 else f"{name} ({line})")
    if held_out:
        lines["held out"] = ", ".join(held_out)
    if dist.get_rank() == 0:
        for source in settings.sources():
            if is_local(source.dataset) and source.dataset != "demo":
                lines |= describe_files(os.path.expanduser(source.dataset))
    return lines


def describe_size(source: OpenedSource, per_step: int) -> str:
    if isinstance(source.train, StreamedDataset):
        return "streamed"
    tokens = source.train.total_tokens()
    steps = len(source.train) / per_step
    return f"{tokens:,} tokens, {steps:,.1f} steps an epoch"


def describe_mixture(settings: Settings, data: TrainingData, opened: dict[str, OpenedSource]) -> dict[str, str]:
    """A line with the sources of a mixture and how often each is read, and one with its history where it has one."""
    epochs = data.epochs(data.record.samples_of_step(settings.num_steps).stop)
    parts = []
    for source in settings.sources():
        size = "streamed"
        if source.name in epochs:
            tokens = opened[source.name].train.total_tokens()
            size = f"{tokens:,} tokens, {epochs[source.name]:.1f} epochs"
        parts.append(f"{source.name} = {source.dataset}, {opened[source.name].split} ({size})")
    first, *later = data.record.history
    shares = [describe_shares(first)]
    for segment in later:
        shares.append(f"from step {data.record.step_of_sample(segment.first):,} {describe_shares(segment)}")
    return {"data": "; ".join(parts), "mixture": "; ".join(shares)}
