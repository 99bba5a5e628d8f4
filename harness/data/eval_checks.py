"""Checks of eval data: a run evaluates nothing that it, or the weights that it began with, were trained on.

Data are compared in three ways, as each finds what the others miss:

- by files: one file that is both trained on and evaluated, under whatever name; two slices of one split that do not
  overlap may share their files. `corpora.refuse_trained_files` does this for an eval dataset, before anything is read.
- by the beginning, a checksum of the first tokens: copies, and data of which only a checkpoint or an export tells.
- by the positions of tokens: slices that do not overlap by their bounds, but do in their few documents.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from harness import base, flags
from harness.data.corpora import DEFAULT_EVAL_SPLIT, Corpora, Corpus, find_corpus, parse_split, refuse_trained_files
from harness.data.eval_split import BY_CONTENT
from harness.data.mixture import SourceSpec
from harness.data.tokens import Tokens
from harness.data.training_data import OpenedSource


def find_trained_spec(trained_on: Sequence[SourceSpec], beginning: str) -> SourceSpec | None:
    """The spec of the source in `trained_on` whose tokens have this `beginning`, read from the token cache or streamed;
    None if none has. If several runs trained on it with different rules, no document is known to be untrained."""
    found = [spec for spec in trained_on if spec.get("beginning") == beginning]
    if len({spec.get("eval_rule") for spec in found}) > 1:
        return {**found[0], "eval_rule": None}
    return found[0] if found else None


def refuse_trained_tokens(eval_split: str, beginning: str, trained_on: Sequence[SourceSpec]) -> None:
    """Raise a UserError if an eval split has the `beginning` of tokens that were trained on."""
    if find_trained_spec(trained_on, beginning):
        raise base.UserError(f"--eval-split {eval_split}: its tokens were trained on; give what was not")


def refuse_trained_splits(by_name: dict[str, OpenedSource], trained_on: Sequence[SourceSpec]) -> None:
    """Raise a UserError if an evaluated split of a source begins with tokens that were trained on."""
    for source in by_name.values():
        if source.eval_data and source.eval_data.other_split:
            refuse_trained_tokens(source.eval_data.other_split, source.eval_data.beginning, trained_on)


def refuse_other_eval_documents(by_name: dict[str, OpenedSource], trained_on: Sequence[SourceSpec]) -> None:
    """Raise a UserError if the weights that a new run begins with were trained on the eval documents that it takes out:
    on the same source with other eval documents, or none, taken out."""
    for name, source in by_name.items():
        trained = find_trained_spec(trained_on, source.spec.get("beginning", ""))
        evaluates_documents = source.eval_data is not None and not source.eval_data.other_split
        if evaluates_documents and trained and trained.get("eval_rule") != source.spec["eval_rule"]:
            problem = f"the weights of --model were trained on the eval documents of {name}"
            raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that they were not trained on")


def refuse_shared_files(corpora: Corpora, by_name: dict[str, OpenedSource]) -> None:
    """Raise a UserError if a file has eval documents of one source and is training data of another. Not if both sources
    leave out the same documents: those of the same files, and those that are chosen by content."""
    paths = {corpus.name: [file.real_path for file in corpus.files] for corpus in corpora.sources}
    for corpus, other in itertools.permutations(corpora.sources, 2):
        eval_data = by_name[corpus.name].eval_data
        if eval_data is None:
            continue
        rules = {by_name[name].spec["eval_rule"] for name in (corpus.name, other.name)}
        have_same_files = corpus.split == other.split and paths[corpus.name] == paths[other.name]
        if have_same_files or (rules == {BY_CONTENT} and not eval_data.other_split):
            continue
        eval_files = corpus.listing.files_in_split(parse_split(eval_data.other_split or corpus.split)[0])
        shared = {file.real_path for file in eval_files}.intersection(paths[other.name])
        if shared:
            problem = f"{min(shared)} has eval documents of {corpus.name} and is trained on as a part of {other.name}"
            advice = "take it out of one of them, or give an --eval-split that is a file of its own"
            raise base.UserError(f"--dataset: {problem}; {advice}")


def refuse_overlap(split: str, tokens: Tokens, eval_split: str, eval_tokens: Tokens) -> None:
    """Raise a UserError if a slice to train on and an eval slice of the same tokens overlap. `flags.splits_overlap`
    compares their bounds only. With few documents one bound moves to the end of a document and another cuts within one:
    of documents with 98, 1 and 1 tokens `train[:67%]` is the first 99 tokens, and `train[90%:]` the last 10."""
    names = [parse_split(name)[0] for name in (split, eval_split)]
    cache_keys, eval_cache_keys = ([file.cache_key for file in found.files] for found in (tokens, eval_tokens))
    if names[0] != names[1] or cache_keys != eval_cache_keys:  # a slice of a hub data set has a cache of its own
        return
    if tokens.starts[0] < eval_tokens.stops[-1] and eval_tokens.starts[0] < tokens.stops[-1]:
        problem = f"it overlaps the training split {split!r} in these {len(tokens.file_doc_ends):,} documents"
        raise base.UserError(f"--eval-split {eval_split}: {problem}; begin it where that ends")


def refuse_changed_source(name: str, before: SourceSpec | None, now: SourceSpec) -> None:
    """Raise a UserError if a source is not as recorded `before`: then its eval documents are not known."""
    for key, value in (before or {}).items():
        if now.get(key) != value:
            problem = f"{name} is not what it was at the checkpoint ({key}), so the run's eval split is not known"
            raise base.UserError(f"--dataset: {problem}; give the same data, or data that it did not train on")


class TrainedFile(NamedTuple):
    """A file that a run trained on."""

    source: str
    split: str  # with its slice


def evaluates_own_data(settings: flags.Flags, corpora: Corpora, manifest: dict) -> bool:
    """True if an evaluation reads exactly the files and splits of some of the run's sources: their eval documents are
    recorded. A UserError if it reads only some of a source's training data, or other files with them."""
    trained = trained_files(settings, manifest)
    if corpora.eval_dataset:
        refuse_trained_files(corpora.eval_dataset, trained)
        return False
    if settings.dataset == "synthetic":
        return manifest["flags"]["dataset"] == "synthetic"
    for corpus in corpora.sources:
        refuse_trained_split(corpus, settings.eval_split, trained)
    splits = {file.real_path: corpus.split for corpus in corpora.sources for file in corpus.files}
    shared = trained.keys() & splits.keys()
    shared_sources = {trained[path].source for path in shared}
    run_splits = {path: file.split for path, file in trained.items() if file.source in shared_sources}
    if shared and splits == run_splits:
        return True
    for path in shared:
        if flags.splits_overlap(trained[path].split, splits[path]):
            problem = f"the run trained on {trained[path].split!r} of {path}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise base.UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def trained_files(settings: flags.Flags, manifest: dict) -> dict[str, TrainedFile]:
    """What the run of a manifest trained on, by the real paths of files, without files that are gone."""
    run_flags = manifest["flags"]
    if run_flags["dataset"] == "synthetic":
        return {}
    data_flags = {name: run_flags[name] for name in ("dataset_split", "dataset_config", "text_field", "streaming")}
    dataset = run_flags["dataset"] if isinstance(run_flags["dataset"], str) else tuple(run_flags["dataset"])
    run = dataclasses.replace(settings, dataset=dataset, **data_flags)  # this command, but reading what the run read
    trained: dict[str, TrainedFile] = {}
    for source in run.sources():
        try:
            corpus = find_corpus(run, source)
        except base.UserError:  # deleted since, so it is not evaluated
            continue
        trained |= {file.real_path: TrainedFile(source.name, corpus.split) for file in corpus.files}
    return trained


def refuse_trained_split(corpus: Corpus, eval_split: str | None, trained: dict[str, TrainedFile]) -> None:
    """Raise a UserError if a split of a corpus that is evaluated, by default `validation`, has a file that is in
    `trained`. Two slices of one split may share a file if they do not overlap."""
    split = eval_split
    if split is None and not flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT):
        split = DEFAULT_EVAL_SPLIT
    if split is None:
        return
    name = parse_split(split)[0]
    for file in corpus.listing.splits.get(name, []):
        if file.real_path not in trained:
            continue
        trained_split = trained[file.real_path].split
        if name != parse_split(trained_split)[0] or flags.splits_overlap(trained_split, split):
            problem = f"it overlaps {trained_split!r} of {file.real_path}, which the run trained on"
            raise base.UserError(f"--eval-split {split}: {problem}; give one that does not")
