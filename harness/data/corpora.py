"""Corpora: sources of --dataset and --eval-split as found: their files, and the kind of their first valid record."""

import contextlib
import itertools
import math
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from harness import base, flags
from harness.data import files, registered
from harness.data.files import DataFile, Listing
from harness.data.formats import find_format, is_token_file, read_records, report_read_errors
from harness.data.schema import KINDS, LAYOUTS, MASKED_KINDS, BadRecord, Conversation, describe_layouts, kind_of

DEFAULT_EVAL_SPLIT = "validation"
MAX_INSPECTED = 100  # files, and records of each; the first valid record, or bad conversation, decides the kind


@dataclass(frozen=True)
class Corpus:
    """A source as it was found."""

    source: flags.Source
    listing: Listing
    split: str  # with its slice: to train on, or to evaluate if it is an eval dataset
    # The first of these that a record has is read: fields, or keys of LAYOUTS; of a chat corpus its layout alone.
    names_to_read: tuple[str, ...]
    kind: str  # of its records, one of `schema.KINDS`; "ids" for token files

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def files(self) -> list[DataFile]:
        """The files of its split."""
        return self.listing.files_in_split(parse_split(self.split)[0])

    @property
    def from_token_files(self) -> bool:
        """True if the files of its split are token files; those of another split may have text."""
        return is_token_file(self.files[0].name)

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    @property
    def layout(self) -> str:
        """The layout of the conversations of a chat corpus."""
        return self.names_to_read[0]

    @property
    def has_loss_mask(self) -> bool:
        """True if some of its tokens are not trained on."""
        return self.kind in MASKED_KINDS


@dataclass(frozen=True)
class Corpora:
    """The corpora that a run reads."""

    sources: list[Corpus]  # of --dataset; empty for synthetic data, and if only an eval dataset is read
    eval_dataset: Corpus | None = None  # --eval-split, if it is a dataset of its own: evaluated in full, never trained

    @property
    def all(self) -> list[Corpus]:
        return [*self.sources, self.eval_dataset] if self.eval_dataset else self.sources

    @property
    def sources_or_eval(self) -> list[Corpus]:
        """Those whose records decide defaults: the sources, or the eval dataset if it is read alone."""
        return self.sources or self.all


def find(args: flags.Args) -> Corpora:
    """Find the corpora of a run. Rank 0 lists the files. Every rank calls this."""
    registered.write_all(args)
    corpora = base.broadcast_from_rank_0(lambda: list_corpora(args))
    # only if something is trained: else --chat-template may be for --sample-prompt
    chat_flags = {"chat_template": "--chat-template", "chat_loss": "--chat-loss"}
    refuse_chat_flags([flag for name, flag in chat_flags.items() if name in args.explicit and args.trains()], corpora)
    return corpora


def list_corpora(args: flags.Args) -> Corpora:
    """The corpora of `find`, listed by this process."""
    evaluates_dataset = args.eval_interval and flags.is_eval_dataset(args.eval_split) and not args.show_samples
    sources = []
    if args.dataset != "synthetic" and not (evaluates_dataset and args.num_steps == 0):
        sources = [find_corpus(args, source) for source in args.sources()]
    if args.eval_interval and args.eval_split and not flags.is_eval_dataset(args.eval_split):
        with blame_eval_split():
            name, _ = parse_split(args.eval_split)
        for corpus in sources:  # before anything is tokenized
            if name not in corpus.listing.splits:
                problem = f"{corpus.source.dataset} has no such split, only {', '.join(corpus.listing.splits)}"
                raise base.UserError(f"--eval-split {args.eval_split}: {problem}; give one of these")
    if not evaluates_dataset:
        return Corpora(sources)
    eval_dataset = find_eval_dataset(args)
    refuse_trained_files(eval_dataset, {file.real_path for corpus in sources for file in corpus.files})
    return Corpora(sources, eval_dataset)


def find_corpus(settings: flags.Flags, source: flags.Source) -> Corpus:
    """Find the corpus of a source of --dataset."""
    split = settings.dataset_split or flags.default_split(source.dataset, settings.streaming)
    fields, fields_first = fields_to_read(settings)
    return inspect_source(source, [split], fields, fields_first, settings.dataset_config, settings.cache_dir)


def find_eval_dataset(settings: flags.Flags) -> Corpus:
    """Find the corpus of an --eval-split that is a dataset of its own: its split `validation`, or `test` if it has
    none, or `train`, which is everything if no file is named as a split."""
    name = str(settings.eval_split)
    source = flags.Source(flags.source_name(name), name, weight=None)
    splits = [DEFAULT_EVAL_SPLIT, "test", "train"]
    fields, fields_first = fields_to_read(settings)
    with blame_eval_split():
        return inspect_source(source, splits, fields, fields_first, cache_dir=settings.cache_dir)


def fields_to_read(settings: flags.Flags) -> tuple[tuple[str, ...], bool]:
    """(the fields to look for, in order; True if they come before conversations, as a --text-field that was typed
    does)."""
    if "text_field" in settings.explicit:
        return (settings.text_field,), True
    return ("input_ids", settings.text_field), False


def refuse_trained_files(eval_dataset: Corpus, trained: Container[str]) -> None:
    """Raise a UserError if a file of an eval dataset is one of the `trained`, which are real paths."""
    for file in eval_dataset.files:
        if file.real_path in trained:
            problem = f"{file} is in the training data too"
            advice = "take it out of one of them, or name a pattern without it"
            raise base.UserError(f"--eval-split {eval_dataset.source.dataset}: {problem}; {advice}")


@contextlib.contextmanager
def blame_eval_split() -> Iterator[None]:
    """Replace --dataset and --dataset-split by --eval-split in error messages, which begin with them."""
    try:
        yield
    except base.UserError as error:
        message = str(error)
        if message.startswith("--dataset"):
            message = f"--eval-split{message.removeprefix('--dataset').removeprefix('-split')}"
        raise base.UserError(message, error.exit_code) from error


def refuse_chat_flags(chat_flags: list[str], corpora: Corpora) -> None:
    """Raise a UserError if flags of conversations were given and none of the corpora has any."""
    if chat_flags and not any(corpus.is_chat for corpus in corpora.all):
        found = ", ".join(f"{corpus.source.dataset} has {KINDS[corpus.kind]}" for corpus in corpora.all)
        found = found or "synthetic data have none"
        problem = f"only with conversations, which are records with {describe_layouts()}; {found}"
        raise base.UserError(f"{', '.join(chat_flags)}: {problem}; leave it out")


def inspect_source(
    source: flags.Source,
    splits: list[str],
    fields: tuple[str, ...],
    fields_first: bool,
    subset: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """List the files of a source and read their records up to the first valid one, which decides its kind.

    Args:
        splits: the first of these that the source has is its split.
        fields_first: True if a field is preferred to a conversation in the same record.
    """
    path = source.dataset
    if path == "demo":
        path = str(flags.ASSETS / "demo" / "stories")
    elif path in flags.DATASETS:
        path = str(registered.write_once(path, cache_dir)[0])
    listing = files.find_files(path, subset)
    split = next((split for split in splits if parse_split(split)[0] in listing.splits), splits[-1])
    split_files = listing.files_in_split(parse_split(split)[0])
    if are_token_files(split_files):
        return Corpus(source, listing, split, names_to_read=fields, kind="ids")
    # a typed field is tried alone first: a column of texts that is named like a layout, as `messages`, is found only so
    names_to_try = [fields, (*fields, *LAYOUTS)] if fields_first else [(*LAYOUTS, *fields)]
    tries = itertools.product(split_files[:MAX_INSPECTED], names_to_try)
    kinds = (inspect_records(file, names) for file, names in tries)
    kind, layout = next(filter(None, kinds), ("text", ""))
    return Corpus(source, listing, split, names_to_read=(layout,) if layout else fields, kind=kind)


def inspect_records(file: DataFile, names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return (the kind of a file's records, the layout if they are conversations) from the first valid record, of which
    the first of `names` is read, fields or layouts; None if there is none. Files that cannot be read are reported
    later."""
    if find_format(file.name).SUFFIXES[0] not in flags.FIELD_SUFFIXES:  # plain text, whose first record may be long
        return "text", ""
    try:
        for _, record in itertools.islice(read_records(file, names), MAX_INSPECTED):
            if isinstance(record, Conversation) or (isinstance(record, BadRecord) and record.layout):
                return "chat", record.layout
            if record is not None and not isinstance(record, BadRecord) and len(record):
                return kind_of(record), ""
    except base.UserError:
        pass
    return None


def are_token_files(split_files: list[DataFile]) -> bool:
    """True if files are token files; a UserError if only some are, or if their formats differ."""
    one = next((file for file in split_files if is_token_file(file.name)), None)
    if one is None:
        return False
    for file in split_files:
        if file.is_remote:
            problem = "its tokens are mapped into memory, which a store cannot give"
            raise base.UserError(f"--dataset {one}: {problem}; copy it to a local disk")
        if find_format(file.name) is not find_format(one.name):
            pattern = f"{os.path.dirname(one.path)}/*{os.path.splitext(one.name)[1]}"
            raise base.UserError(
                f"--dataset: {one} has tokens that are read in place, {file} is of another format; "
                f"name a folder or pattern with one of them, such as '{pattern}'"
            )
    return True


def needs_tokenizer(settings: flags.Flags, corpora: Corpora) -> bool:
    """False if all tokens are random or from token files and no flag needs text or document boundaries."""
    if settings.tokenizer or settings.sample_prompt:
        return True
    if settings.dataset == "synthetic" and not corpora.all:
        return False
    splits = [corpus.split for corpus in corpora.all]
    if settings.eval_interval:
        splits.append(settings.eval_split or "")
    needs_doc_ends = settings.document_mask or settings.packing in ("best-fit", "none")
    if needs_doc_ends or any("[" in split for split in splits) or takes_eval_documents(settings, corpora):
        return True
    return bool(settings.export) or not all(corpus.from_token_files for corpus in corpora.all)


def takes_eval_documents(settings: flags.Flags, corpora: Corpora) -> bool:
    """True if eval documents are taken out of the training data, as there is no split to evaluate, or may be by a
    checkpoint."""
    if not settings.eval_interval:
        return False
    if settings.resume != "none":  # the checkpoint may say so
        return True
    if settings.eval_split:
        return False
    return any(
        DEFAULT_EVAL_SPLIT not in corpus.listing.splits or flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT)
        for corpus in corpora.sources
    )


def masks_documents(document_mask: bool | None, packing: str | None, corpora: Corpora) -> bool:
    """Resolve --document-mask, by default on if the training data, or without training the eval data, have
    conversations or labels. With --packing none it is off, as a sequence has one document."""
    if packing == "none":
        return False
    if document_mask is None:
        return any(corpus.has_loss_mask for corpus in corpora.sources_or_eval)
    return document_mask


# ----------------------------------------------------------------------------------------------------------------------
# Splits and slices


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split, such as `train` or `train[:95%]`; no bounds without a slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        advice = "give one such as train, 'train[:95%]' or 'train[9:99]'"
        raise base.UserError(f"--dataset-split {split}: cannot be read; {advice}")
    if not part[2]:
        return part[1], []
    return part[1], [part[3] or "0%", part[4] or "100%"]


def parse_bounds(bounds: list[str], num_documents: int) -> list[Fraction]:
    """Each bound of a slice, such as 95% or -100, as the share of the documents before it."""
    shares = []
    for bound in bounds:
        number = int(bound.rstrip("%"))
        size = 100 if bound.endswith("%") else num_documents
        if number < 0:
            number += size
        if not 0 <= number <= size:
            raise bad_slice(bounds, f"{bound} is beyond the {num_documents:,} documents")
        shares.append(Fraction(number, size or 1))
    if shares[0] > shares[1]:
        raise bad_slice(bounds, "it ends before it begins")
    return shares


def documents_before(share: Fraction, num_documents: int) -> int | None:
    """The number of documents in a share of them; None if a share between 0 and 1 rounds to none or all of them, as 5 %
    of 3 do."""
    number = round(num_documents * share)
    return None if 0 < share < 1 and number in (0, num_documents) else number


def cut_positions(bounds: list[str], doc_ends: np.ndarray, length: int) -> list[int]:
    """The positions at which the bounds of a slice cut `length` tokens: at the end of a document, or, if there are too
    few documents for a percentage, at that share of the tokens, as in a file of one document."""
    positions = []
    for share in parse_bounds(bounds, len(doc_ends)):
        number = documents_before(share, len(doc_ends))
        if number is None:
            positions.append(math.floor(length * share))
        else:
            positions.append(int(doc_ends[number - 1]) if number else 0)
    if positions[0] > positions[1]:  # such as [5%:1] if 5 % of the tokens are more than the first document
        raise bad_slice(bounds, f"it ends before it begins in these {len(doc_ends):,} documents")
    return positions


def bad_slice(bounds: list[str], problem: str) -> base.UserError:
    return base.UserError(f"--dataset-split [{':'.join(bounds)}]: {problem}; give other bounds")


def slice_rows(split_files: list[DataFile], bounds: list[str]) -> tuple[int, int] | None:
    """(start, stop) of the rows of a slice of a hub data set, so that only these are tokenized; None if its files do
    not say how many rows they have, as compressed ones, or if there are too few for a percentage."""
    file_format = find_format(split_files[0].name)
    count = getattr(file_format, "count", None)
    if count is None or any(file.compression or find_format(file.name) is not file_format for file in split_files):
        return None
    rows = 0
    for file in split_files:
        with report_read_errors(file), file.open() as raw:
            rows += count(raw)
    first, last = (documents_before(share, rows) for share in parse_bounds(bounds, rows))
    return None if first is None or last is None else (first, last)
