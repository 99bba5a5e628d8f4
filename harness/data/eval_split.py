"""The eval split: the documents that a run does not train on, to evaluate on them.

If a corpus has no eval split, one of every 20 documents is an eval document. In the token cache and in token files it
is chosen by its number, so no token is read for it: one rule by content would read all tokens of a token file at each
start. In a stream it is chosen by a checksum of its content, as a part of a file does not tell the numbers of its
documents. A checkpoint records which rule it was.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness import base, flags
from harness.data.corpora import (
    DEFAULT_EVAL_SPLIT,
    Corpus,
    find_corpus,
    find_eval_dataset,
    parse_split,
    refuse_trained_files,
)
from harness.data.mixture import SourceSpec
from harness.data.packing import EvalSequences
from harness.data.tokens import Tokens

EVERY = 20  # one of so many documents is an eval document
BY_NUMBER, BY_CONTENT = "by_number", "by_content"  # how eval documents are chosen, as checkpoints record it
RULES = {BY_NUMBER: f"one of every {EVERY} documents of it"}  # in words
RULES[BY_CONTENT] = f"{RULES[BY_NUMBER]}, by content"


@dataclass
class EvalData:
    """Sequences that are evaluated."""

    sequences: EvalSequences
    description: str
    split: str | None = None  # of its source; None for documents that a rule chooses, and for an eval dataset
    beginning: str = ""  # a checksum of the first tokens of that split


class EvalChoice(NamedTuple):
    """What is evaluated of a source, and what is not trained on: eval documents may be kept out of training although a
    split is evaluated."""

    split: str | None = None  # the split that is evaluated, the training split itself if nothing is trained; else None
    rule: str | None = None  # by which eval documents are taken out of the training split; None if none are
    evaluates_documents: bool = False  # True if these eval documents are evaluated


def divide(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """(the tokens to train on, the eval tokens): of every 20 consecutive documents one is an eval document, chosen by
    a checksum, as a corpus may be periodic. With fewer than 20 documents the eval tokens are the last 5 %."""
    ends = tokens.doc_ends
    if len(ends) < EVERY:
        cut = len(tokens) * (EVERY - 1) // EVERY
        return tokens.between(0, cut), tokens.between(cut, len(tokens))
    numbers = eval_document_numbers(len(ends))
    eval_starts, eval_stops = np.where(numbers > 0, ends[numbers - 1], 0), ends[numbers]
    kept_starts, kept_stops = np.concatenate([[0], eval_stops]), np.concatenate([eval_starts, [len(tokens)]])
    return tokens.cut(kept_starts, kept_stops), tokens.cut(eval_starts, eval_stops)


def eval_document_numbers(num_documents: int) -> np.ndarray:
    """The numbers, from 0 on, of the eval documents among so many, int64."""
    groups = -(-num_documents // EVERY)
    checksums = np.fromiter((zlib.crc32(str(group).encode()) for group in range(groups)), np.int64, groups)
    numbers = EVERY * np.arange(groups) + checksums % EVERY
    return numbers[numbers < num_documents]


def is_eval_document(document: str | np.ndarray) -> bool:
    """True if a document of a stream is an eval document, by the checksum of its UTF-8, or of its ids as little-endian
    uint32, so the corpus need not be read before. Copies of a document are treated alike."""
    content = document.encode() if isinstance(document, str) else np.asarray(document).astype("<u4").tobytes()
    return zlib.crc32(content) % EVERY == 0


def choose_eval_split(settings: flags.Flags, corpus: Corpus, recorded: SourceSpec | None, rule: str) -> EvalChoice:
    """Choose what is evaluated of a source: --eval-split; by default its split `validation`, unless that is trained on;
    else the eval documents that `rule` chooses, or all of it if no run trained or trains on it. Eval documents that a
    checkpoint recorded stay out of training, whatever is evaluated.

    Args:
        recorded: the spec of the source when it was trained on; None if it was not.
    """
    if not settings.eval_interval:  # a resume of a run that evaluated is refused without it
        return EvalChoice()
    was_divided = bool(recorded and recorded.get("eval_rule"))
    if was_divided and recorded["eval_rule"] != rule:
        advice = "add" if rule == BY_NUMBER else "leave out"
        problem = "the run chose its eval documents differently"
        raise base.UserError(f"--dataset {corpus.source.dataset}: {problem}; {advice} --streaming")
    split = settings.eval_split
    if flags.is_eval_dataset(split):
        return EvalChoice(rule=rule if was_divided else None)
    if split and recorded and not settings.num_steps and flags.splits_overlap(corpus.split, split):
        raise base.UserError(f"--eval-split {split}: it overlaps {corpus.split!r}, which was trained on; give another")
    if split:
        return EvalChoice(split, rule if was_divided else None)
    if was_divided:
        return EvalChoice(rule=rule, evaluates_documents=True)
    is_trained = bool(settings.num_steps or recorded)
    trains_on_validation = is_trained and flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT)
    if DEFAULT_EVAL_SPLIT in corpus.listing.splits and not trains_on_validation:
        return EvalChoice(DEFAULT_EVAL_SPLIT)
    if recorded:
        problem = f"the run has no eval documents of {corpus.source.dataset} that are known"
        raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
    if not settings.num_steps:
        return EvalChoice(corpus.split)
    return EvalChoice(rule=rule, evaluates_documents=True)


def refuse_overlap(split: str, tokens: Tokens, other_split: str, eval_tokens: Tokens) -> None:
    """Raise a UserError if a slice to train on and an eval slice of the same tokens overlap. `flags.splits_overlap`
    finds this by their bounds, but few documents may be cut at the end of one by a bound, and within one by another:
    of documents with 98, 1 and 1 tokens `train[:67%]` has 99, and `train[90%:]` the last 10."""
    one, other = (parse_split(name)[0] for name in (split, other_split))
    caches, eval_caches = ([file.cache_key for file in found.files] for found in (tokens, eval_tokens))
    if one != other or caches != eval_caches:  # other files, or the rows of a slice
        return
    if tokens.starts[0] < eval_tokens.stops[-1] and eval_tokens.starts[0] < tokens.stops[-1]:
        problem = f"it overlaps the training split {split!r} in these {len(tokens.file_doc_ends):,} documents"
        raise base.UserError(f"--eval-split {other_split}: {problem}; begin it where that ends")


def find_trained_spec(trained_on: Sequence[SourceSpec], beginning: str) -> SourceSpec | None:
    """The spec of the source in `trained_on` whose tokens have this `beginning`, read from the token cache or streamed;
    None if none has. If several runs trained on it with different rules, no document is known to be untrained."""
    found = [spec for spec in trained_on if spec.get("beginning") == beginning]
    if len({spec.get("eval_rule") for spec in found}) > 1:
        return {**found[0], "eval_rule": None}
    return found[0] if found else None


def refuse_changed_source(name: str, before: SourceSpec | None, now: SourceSpec) -> None:
    """Raise a UserError if a source is not as recorded `before`: then its eval documents are not known."""
    for key, value in (before or {}).items():
        if now.get(key) != value:
            problem = f"{name} is not what it was at the checkpoint ({key}), so the run's eval split is not known"
            raise base.UserError(f"--dataset: {problem}; give the same data, or data that it did not train on")


def evaluates_own_data(settings: flags.Flags, manifest: dict) -> bool:
    """True if an evaluation reads exactly the files and splits of some of the run's sources: their eval documents are
    recorded. A UserError if it reads only some of a source's training data, or other files with them."""
    run_flags = manifest["flags"]
    data_flags = {name: run_flags[name] for name in ("dataset_split", "dataset_config", "text_field", "streaming")}
    dataset = run_flags["dataset"] if isinstance(run_flags["dataset"], str) else tuple(run_flags["dataset"])
    run = dataclasses.replace(settings, dataset=dataset, **data_flags)  # this command, but reading what the run read
    trained, _ = files_of_sources(run)
    if flags.is_eval_dataset(settings.eval_split):
        refuse_trained_files(find_eval_dataset(settings), trained)
        return False
    read, evaluated = files_of_sources(settings)
    for file in trained.keys() & evaluated.keys():
        (_, trained_split), split = trained[file], evaluated[file]
        # refused unless both are slices of one split that do not overlap: of another split it may be the same file
        if split.partition("[")[0] != trained_split.partition("[")[0] or flags.splits_overlap(trained_split, split):
            problem = f"it overlaps {trained_split!r} of {file}, which the run trained on"
            raise base.UserError(f"--eval-split {split}: {problem}; give one that does not")
    in_both = trained.keys() & read.keys()
    names = {trained[file][0] for file in in_both}
    files_of_names = {file: split for file, (name, split) in trained.items() if name in names}
    if in_both and files_of_names == {file: split for file, (_, split) in read.items()}:
        return True
    for file in in_both:
        _, trained_split = trained[file]
        if flags.splits_overlap(trained_split, read[file][1]):
            problem = f"the run trained on {trained_split!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise base.UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def files_of_sources(settings: flags.Flags) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """({file: (source, training split)} of a run's sources, {file: split} of the splits that are evaluated of them), by
    the real paths of files; of a source that is gone, by what --dataset names."""
    if settings.dataset == "synthetic":
        return {"synthetic": ("synthetic", "train")}, {}
    trained: dict[str, tuple[str, str]] = {}
    evaluated: dict[str, str] = {}
    for source in settings.sources():
        try:
            corpus = find_corpus(settings, source)
        except base.UserError:  # deleted since: if it is to be evaluated, opening it raises the error
            trained[source.dataset] = (source.name, settings.dataset_split or "train")
            continue
        trained |= {file.real_path: (source.name, corpus.split) for file in corpus.files}
        eval_split = settings.eval_split
        if not eval_split and not flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT):
            eval_split = DEFAULT_EVAL_SPLIT
        if eval_split and not flags.is_eval_dataset(eval_split):
            eval_files = corpus.listing.splits.get(parse_split(eval_split)[0], [])
            evaluated |= {file.real_path: eval_split for file in eval_files}
    return trained, evaluated
