"""Corpora: sources of --dataset and --eval-split as found: their files, and the kind of their first valid record."""

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness import base, flags
from harness.data import files, registered
from harness.data.files import DataFile, Listing
from harness.data.formats import find_format, is_token_file, read_records, report_read_errors
from harness.data.schema import KINDS, LAYOUTS, MASKED_KINDS, BadRecord, Conversation, Field, describe_layouts, kind_of

DEFAULT_EVAL_SPLIT = "validation"
MAX_INSPECTED = 100  # files, and records of each; the first valid record decides the kind of a corpus


@dataclass(frozen=True)
class Corpus:
    """A source as it was found."""

    source: flags.Source
    listing: Listing
    split: str  # to train on, with its slice
    text_field: Field  # or the layout of conversations
    from_token_files: bool  # True if its files are token files
    kind: str  # of its records, one of `schema.KINDS`; "ids" for token files
    is_eval_dataset: bool = False  # an eval dataset of its own: evaluated in full, never trained on

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
    def has_loss_mask(self) -> bool:
        """True if some of its tokens are not trained on."""
        return self.kind in MASKED_KINDS


def find(args: flags.Args) -> list[Corpus]:
    """Find the corpora of a run: its sources (none for synthetic data), then the eval dataset if --eval-split is a
    dataset of its own; the eval dataset alone if nothing is trained. Rank 0 lists the files. Every rank calls this."""
    chat_flags = {"chat_template": "--chat-template", "chat_loss": "--chat-loss"}
    typed = [flag for name, flag in chat_flags.items() if name in args.explicit and args.trains()]
    registered.write_all(args)
    corpora = base.broadcast_from_rank_0(lambda: find_all(args))
    refuse_unused(typed, corpora)
    return corpora


def find_all(args: flags.Args) -> list[Corpus]:
    """The corpora of `find`, listed by this process."""
    has_eval_dataset = args.eval_interval and flags.is_eval_dataset(args.eval_split) and not args.show_samples
    if has_eval_dataset and args.num_steps == 0:
        return [find_eval_dataset(args)]
    corpora = []
    if args.dataset != "synthetic":
        corpora = [find_corpus(args, source) for source in args.sources()]
    if not has_eval_dataset:
        return corpora
    eval_corpus = find_eval_dataset(args)
    refuse_trained_files(eval_corpus, {file.real_path for corpus in corpora for file in corpus.files})
    return [*corpora, eval_corpus]


def find_eval_dataset(settings: flags.Flags) -> Corpus:
    """Find the corpus of an --eval-split that is a dataset of its own: its split `validation`, or `test` if it has
    none, or `train`, which is everything if no file is named as a split."""
    name = str(settings.eval_split)
    source = flags.Source(flags.source_name(name), name, None)
    with blame_eval_split():
        listing = list_source(source, None, settings.cache_dir)
        split = next((split for split in (DEFAULT_EVAL_SPLIT, "test") if split in listing.splits), "train")
        corpus = inspect_listing(source, listing, split, wanted_text_field(settings))
    return dataclasses.replace(corpus, is_eval_dataset=True)


def refuse_trained_files(eval_corpus: Corpus, trained: Container[str]) -> None:
    """Raise a UserError if a file of an eval dataset is one of the `trained`, which are real paths."""
    for file in eval_corpus.files:
        if file.real_path in trained:
            advice = "take it out of one of them, or name a pattern without it"
            raise base.UserError(
                f"--eval-split {eval_corpus.source.dataset}: {file} is in the training data too; {advice}"
            )


@contextlib.contextmanager
def blame_eval_split() -> Iterator[None]:
    """Replace --dataset by --eval-split at the beginning of error messages."""
    try:
        yield
    except base.UserError as error:
        raise base.UserError(re.sub("^--dataset", "--eval-split", str(error)), error.exit_code) from error


def refuse_unused(chat_flags: list[str], corpora: list[Corpus]) -> None:
    """Raise a UserError if flags of conversations were given and none of the corpora has any."""
    if chat_flags and not any(corpus.is_chat for corpus in corpora):
        found = ", ".join(f"{corpus.source.dataset} has {KINDS[corpus.kind]}" for corpus in corpora)
        found = found or "synthetic data have none"
        problem = f"only with conversations, which are records with {describe_layouts()}; {found}"
        raise base.UserError(f"{', '.join(chat_flags)}: {problem}; leave it out")


def find_corpus(settings: flags.Flags, source: flags.Source) -> Corpus:
    text_field = wanted_text_field(settings)
    return inspect_source(
        source, settings.dataset_split, text_field, settings.dataset_config, settings.streaming, settings.cache_dir
    )


def wanted_text_field(settings: flags.Flags) -> Field:
    """The field to read: a typed --text-field, also in place of conversations; else `input_ids`, or its default, of
    records without conversations."""
    return settings.text_field if "text_field" in settings.explicit else ("input_ids", settings.text_field)


def inspect_source(
    source: flags.Source,
    split: str | None,
    text_field: Field,
    subset: str | None,
    streaming: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """A source as it is found, with its default split without a `split`."""
    listing = list_source(source, subset, cache_dir)
    return inspect_listing(source, listing, split or flags.default_split(source.dataset, streaming), text_field)


def list_source(source: flags.Source, subset: str | None, cache_dir: str | os.PathLike | None) -> Listing:
    path = source.dataset
    if path == "demo":
        path = str(flags.ASSETS / "demo" / "stories")
    elif path in flags.DATASETS:
        path = str(registered.write_once(path, cache_dir))
    return files.find_files(path, subset)


def inspect_listing(source: flags.Source, listing: Listing, split: str, text_field: Field) -> Corpus:
    """The corpus of a split, by its files and the first of their records."""
    split_files = listing.files_in_split(parse_split(split)[0])
    from_token_files = are_token_files(split_files)
    kind = "ids"
    if not from_token_files:
        found = (inspect_records(file, text_field) for file in split_files[:MAX_INSPECTED])
        kind, text_field = next(filter(None, found), ("text", text_field))
    return Corpus(source, listing, split, text_field, from_token_files, kind)


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


def inspect_records(file: DataFile, text_field: Field) -> tuple[str, Field] | None:
    """Return (the kind of a file's records, the field or layout to read) from the first valid record; None if there is
    none. If a record has a conversation and a field of `text_field`, the conversation is read, unless `text_field` is
    one name, which the user gave. Files that cannot be read are reported later."""
    if {*find_format(file.name).SUFFIXES}.isdisjoint(flags.FIELD_SUFFIXES):
        return "text", text_field
    names = (text_field, *LAYOUTS) if isinstance(text_field, str) else (*LAYOUTS, *text_field)
    try:
        for _, record in itertools.islice(read_records(file, names), MAX_INSPECTED):
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
    """True if a run takes a tokenizer: unless all its tokens are random or come from token files, and no flag needs
    text or document boundaries."""
    if settings.tokenizer or settings.sample_prompt:
        return True
    if settings.dataset == "synthetic" and not corpora:
        return False
    needs_doc_ends = settings.document_mask or settings.eval_interval or any("[" in corpus.split for corpus in corpora)
    if needs_doc_ends or settings.packing in ("best-fit", "none") or settings.export:
        return True
    return not all(corpus.from_token_files for corpus in corpora)


def masks_documents(settings: flags.Flags, corpora: Sequence[Corpus]) -> bool:
    """True if documents do not see each other: by --document-mask, by default if a run trains on conversations or
    labels, or evaluates them without training; never with --packing none, as a sequence has one document then."""
    if settings.packing == "none":
        return False
    if settings.document_mask is None:
        sources = [corpus for corpus in corpora if not corpus.is_eval_dataset] or corpora
        return any(corpus.has_loss_mask for corpus in sources)
    return settings.document_mask


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split, such as `train` or `train[:95%]`; no bounds without a slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise base.UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
    if not part[2]:
        return part[1], []
    return part[1], [part[3] or "0%", part[4] or "100%"]


def parse_bound(bound: str, documents: int) -> tuple[int, int]:
    """Return (number, size): a slice's bound, such as 95% or -100, is at number / size of the documents."""
    number = int(bound.rstrip("%"))
    size = 100 if bound.endswith("%") else documents
    return (number + size if number < 0 else number), size


def cut_documents(bounds: list[str], documents: int) -> list[int | None]:
    """The number of documents before each bound of a slice; None if a percentage would cut off none or all of them."""
    cuts: list[int | None] = []
    for bound in bounds:
        number, size = parse_bound(bound, documents)
        if not 0 <= number <= size:
            raise bad_slice(bounds, f"{bound} is beyond the {documents:,} documents")
        cut = round(documents * number / size) if size else 0
        cuts_nothing = 0 < number < size and cut in (0, documents)
        cuts.append(None if cuts_nothing else cut)
    first, last = cuts
    if first is not None and last is not None and first > last:
        raise bad_slice(bounds, "it ends before it begins")
    return cuts


def cut_positions(bounds: list[str], ends: np.ndarray, length: int) -> list[int]:
    """The positions at which the bounds of a slice cut tokens whose documents end at `ends`: there, or, if these are
    too few for a percentage, at that share of the tokens, as in a file of one document."""
    positions = []
    for cut, bound in zip(cut_documents(bounds, len(ends)), bounds, strict=True):
        if cut is None:
            number, size = parse_bound(bound, len(ends))
            positions.append(length * number // size)
        else:
            positions.append(int(ends[cut - 1]) if cut else 0)
    if positions[0] > positions[1]:  # a share of the tokens, and an end of a document
        raise bad_slice(bounds, f"it ends before it begins in these {len(ends):,} documents")
    return positions


def bad_slice(bounds: list[str], problem: str) -> base.UserError:
    return base.UserError(f"--dataset, split [{':'.join(bounds)}]: {problem}; give other bounds")


def slice_rows(split_files: list[DataFile], bounds: list[str]) -> tuple[int, int] | None:
    """(first, last) row of a slice of a hub data set, so that only these rows are tokenized; None if its files do not
    say how many rows they have, or if a bound cuts off nothing."""
    count = getattr(find_format(split_files[0].name), "count", None)
    if count is None or any(find_format(file.name) is not find_format(split_files[0].name) for file in split_files):
        return None
    rows = 0
    for file in split_files:
        with report_read_errors(file), file.open() as raw:
            rows += count(raw)
    first, last = cut_documents(bounds, rows)
    return None if first is None or last is None else (first, last)
