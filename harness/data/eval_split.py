"""The eval split: the documents that a run does not train on, to evaluate on them.

If a corpus has no eval split, one of every 20 documents is an eval document. In the token cache and in token files it
is chosen by its number, so no token is read for it: one rule by content would read all tokens of a token file at each
start. In a stream it is chosen by a checksum of its content, as a part of a file does not tell the numbers of its
documents. A checkpoint records which rule it was.
"""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness import base, flags
from harness.data.corpora import DEFAULT_EVAL_SPLIT, Corpus
from harness.data.mixture import SourceSpec
from harness.data.packing import EvalSequences
from harness.data.tokens import Tokens

EVERY = 20  # one of so many documents is an eval document
BY_NUMBER, BY_CONTENT = "by_number", "by_content"  # how eval documents are chosen, as checkpoints record it
RULE_TEXTS = {BY_NUMBER: f"one of every {EVERY} documents of it"}
RULE_TEXTS[BY_CONTENT] = f"{RULE_TEXTS[BY_NUMBER]}, by content"


@dataclass
class EvalData:
    """Sequences that are evaluated."""

    sequences: EvalSequences
    description: str
    other_split: str | None = None  # the split of its source, if it is not the training split
    beginning: str = ""  # a checksum of the first tokens of that other split


class EvalChoice(NamedTuple):
    """What of a source is evaluated, and which documents are not trained on. A resumed run keeps out of training the
    eval documents that it began with, although it may evaluate a split now."""

    split: str | None = None  # the evaluated one: the training split itself only if nothing is trained; None: no split
    removed_by: str | None = None  # the rule by which eval documents are taken out of the training split; None: none
    evaluates_removed: bool = False  # True if these eval documents are evaluated


def take_out_eval_documents(tokens: Tokens) -> tuple[Tokens, Tokens]:
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


def describe_taken_out(num_taken: int, num_documents: int) -> str:
    """What `take_out_eval_documents` has taken out, in words."""
    if num_documents < EVERY:
        return f"the last {100 // EVERY} % of it"
    return f"{RULE_TEXTS[BY_NUMBER]}, {num_taken:,} of {num_documents:,}"


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
    if not settings.eval_interval:  # `state.check_data` refuses a resume without it if eval documents were taken out
        return EvalChoice()
    was_divided = bool(recorded and recorded.get("eval_rule"))
    if was_divided and recorded["eval_rule"] != rule:
        advice = "add" if rule == BY_NUMBER else "leave out"
        problem = "the run chose its eval documents differently"
        raise base.UserError(f"--dataset {corpus.source.dataset}: {problem}; {advice} --streaming")
    split = settings.eval_split
    if flags.is_eval_dataset(split):
        return EvalChoice(removed_by=rule if was_divided else None)
    if split and recorded and not settings.num_steps and flags.splits_overlap(corpus.split, split):
        raise base.UserError(f"--eval-split {split}: it overlaps {corpus.split!r}, which was trained on; give another")
    if split:
        return EvalChoice(split, rule if was_divided else None)
    if was_divided:
        return EvalChoice(removed_by=rule, evaluates_removed=True)
    is_trained = bool(settings.num_steps or recorded)
    trains_on_validation = is_trained and flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT)
    if DEFAULT_EVAL_SPLIT in corpus.listing.splits and not trains_on_validation:
        return EvalChoice(DEFAULT_EVAL_SPLIT)
    if recorded:
        problem = f"the run has no eval documents of {corpus.source.dataset} that are known"
        raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that it did not train on")
    if not settings.num_steps:
        return EvalChoice(corpus.split)
    return EvalChoice(removed_by=rule, evaluates_removed=True)
