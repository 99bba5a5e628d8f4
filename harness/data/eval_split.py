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
from harness.data.corpora import DEFAULT_EVAL_SPLIT, Corpus, find_corpus, find_eval_dataset, refuse_trained_files
from harness.data.mixture import Spec
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
    name: str  # in words


class EvalChoice(NamedTuple):
    """What is evaluated of a source, and what is not trained on."""

    split: str | None = None  # the split that is evaluated; None if it is not a split
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


def choose_eval_split(settings: flags.Flags, corpus: Corpus, spec: Spec | None, rule: str) -> EvalChoice:
    """Choose what is evaluated of a source: --eval-split; by default its split `validation`, unless that is trained on;
    else the eval documents that `rule` chooses, or all of it if no run trained or trains on it. Eval documents that a
    checkpoint recorded stay out of training, whatever is evaluated.

    Args:
        spec: what was recorded of the source when it was trained on; None if it was not.
    """
    if not settings.eval_interval:  # a resume of a run that evaluated is refused without it
        return EvalChoice()
    was_divided = bool(spec and spec.get("eval_rule"))
    if was_divided and spec["eval_rule"] != rule:
        advice = "add" if rule == BY_NUMBER else "leave out"
        problem = "the run chose its eval documents differently"
        raise base.UserError(f"--dataset {corpus.source.dataset}: {problem}; {advice} --streaming")
    split = settings.eval_split
    if flags.is_eval_dataset(split):
        return EvalChoice(rule=rule if was_divided else None)
    if split:
        return EvalChoice(split, rule if was_divided else None)
    if was_divided:
        return EvalChoice(rule=rule, evaluates_documents=True)
    is_trained = bool(settings.num_steps or spec)
    trains_on_validation = is_trained and flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT)
    if DEFAULT_EVAL_SPLIT in corpus.listing.splits and not trains_on_validation:
        return EvalChoice(DEFAULT_EVAL_SPLIT)
    if spec:
        problem = f"the run has no eval documents of {corpus.source.dataset} that are known"
        raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
    if not settings.num_steps:
        return EvalChoice(corpus.split)
    return EvalChoice(rule=rule, evaluates_documents=True)


def find_trained_spec(trained_on: Sequence[Spec], beginning: str) -> Spec | None:
    """The spec of the source in `trained_on` whose tokens have this `beginning`, read from the token cache or streamed;
    None if none has. If several runs trained on it with different rules, no document is known to be untrained."""
    found = [spec for spec in trained_on if spec.get("beginning") == beginning]
    if len({spec.get("eval_rule") for spec in found}) > 1:
        return {**found[0], "eval_rule": None}
    return found[0] if found else None


def refuse_changed_source(name: str, before: Spec | None, now: Spec) -> None:
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
    if flags.is_eval_dataset(settings.eval_split):
        refuse_trained_files(find_eval_dataset(settings), training_files(run))
        return False
    trained, read = training_files(run), training_files(settings)  # by file: (source, training split)
    in_both = trained.keys() & read.keys()
    for file in in_both:
        _, trained_split = trained[file]
        if settings.eval_split and flags.splits_overlap(trained_split, settings.eval_split):
            problem = f"it overlaps {trained_split!r}, which the run trained on"
            raise base.UserError(f"--eval-split {settings.eval_split}: {problem}; give one that does not")
    names = {trained[file][0] for file in in_both}
    files_of_sources = {file: split for file, (name, split) in trained.items() if name in names}
    if in_both and files_of_sources == {file: split for file, (_, split) in read.items()}:
        return True
    for file in in_both:
        _, trained_split = trained[file]
        if flags.splits_overlap(trained_split, read[file][1]):
            problem = f"the run trained on {trained_split!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise base.UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def training_files(settings: flags.Flags) -> dict[str, tuple[str, str]]:
    """(source, training split) of each file of a run's sources, by its real path; of a source that is gone, by what
    --dataset names."""
    if settings.dataset == "synthetic":
        return {"synthetic": ("synthetic", "train")}
    found = {}
    for source in settings.sources():
        try:
            corpus = find_corpus(settings, source)
        except base.UserError:  # deleted since: if it is to be evaluated, opening it raises the error
            found[source.dataset] = (source.name, settings.dataset_split or "train")
            continue
        for file in corpus.files:
            found[file.real_path] = (source.name, corpus.split)
    return found
