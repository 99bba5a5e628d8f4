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

from harness import base, flags
from harness.data.corpora import DEFAULT_EVAL_SPLIT, Corpus, find_corpus, parse_split, refuse_trained_files
from harness.data.eval_split import BY_CONTENT
from harness.data.mixture import DataRecord, SourceSpec
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


def refuse_trained_eval_data(
    opened: dict[str, OpenedSource], before: DataRecord | None, trained_on: Sequence[SourceSpec], trains: bool
) -> None:
    """Raise a UserError if eval data of the `opened` sources are training data by their first tokens: of the weights,
    or of the sources that the run has or had. Arguments as `Opening` has them."""
    specs = list(trained_on)
    if before:
        specs += before.sources.values()
    if trains or before:  # else other data are evaluated
        specs += [source.spec for source in opened.values()]
    for name, source in opened.items():
        eval_data = source.eval_data
        if eval_data is None:
            continue
        if eval_data.split:
            refuse_trained_tokens(eval_data.split, eval_data.beginning, specs)
            continue
        trained = find_trained_spec(trained_on, source.spec.get("beginning", ""))
        if trains and trained and trained.get("eval_rule") != source.spec["eval_rule"]:
            problem = f"the weights of --model were trained on the eval documents of {name}"
            raise base.UserError(f"--eval-interval: {problem}; give an --eval-split that they were not trained on")


def refuse_shared_files(corpora: list[Corpus], opened: dict[str, OpenedSource]) -> None:
    """Raise a UserError if a file has eval documents of one source and is training data of another. Two sources of the
    same files are divided alike, and a choice by content is the same in every source."""
    paths = {corpus.name: [file.real_path for file in corpus.files] for corpus in corpora}
    for corpus, other in itertools.permutations(corpora, 2):
        eval_data = opened[corpus.name].eval_data
        rules = {opened[name].spec["eval_rule"] for name in (corpus.name, other.name)}
        are_alike = corpus.split == other.split and paths[corpus.name] == paths[other.name]
        both_by_content = rules == {BY_CONTENT} and eval_data is not None and not eval_data.split
        if eval_data is None or are_alike or both_by_content:
            continue
        eval_files = corpus.listing.files_in_split(parse_split(eval_data.split or corpus.split)[0])
        shared = {file.real_path for file in eval_files}.intersection(paths[other.name])
        if shared:
            problem = f"{min(shared)} has eval documents of {corpus.name} and is trained on as a part of {other.name}"
            advice = "take it out of one of them, or give an --eval-split that is a file of its own"
            raise base.UserError(f"--dataset: {problem}; {advice}")


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


def refuse_changed_source(name: str, before: SourceSpec | None, now: SourceSpec) -> None:
    """Raise a UserError if a source is not as recorded `before`: then its eval documents are not known."""
    for key, value in (before or {}).items():
        if now.get(key) != value:
            problem = f"{name} is not what it was at the checkpoint ({key}), so the run's eval split is not known"
            raise base.UserError(f"--dataset: {problem}; give the same data, or data that it did not train on")


def evaluates_own_data(settings: flags.Flags, corpora: list[Corpus], manifest: dict) -> bool:
    """True if an evaluation of `corpora` reads exactly the files and splits of some of the run's sources: their eval
    documents are recorded. A UserError if it reads only some of a source's training data, or other files with them."""
    trained = trained_files(settings, manifest)
    evaluated: dict[str, str] = {}  # the split that is evaluated, by file
    for corpus in corpora:
        if corpus.is_eval_dataset:  # the only one
            refuse_trained_files(corpus, trained)
            return False
        split = settings.eval_split
        if split is None and not flags.splits_overlap(corpus.split, DEFAULT_EVAL_SPLIT):
            split = DEFAULT_EVAL_SPLIT
        if split:
            files = corpus.listing.splits.get(parse_split(split)[0], [])
            evaluated |= {file.real_path: split for file in files}
    for file in trained.keys() & evaluated.keys():
        (_, trained_split), split = trained[file], evaluated[file]
        # of two splits it may be the same file, of one split the slices may not overlap
        if split.partition("[")[0] != trained_split.partition("[")[0] or flags.splits_overlap(trained_split, split):
            problem = f"it overlaps {trained_split!r} of {file}, which the run trained on"
            raise base.UserError(f"--eval-split {split}: {problem}; give one that does not")
    if settings.dataset == "synthetic":
        return manifest["flags"]["dataset"] == "synthetic"
    read = {file.real_path: corpus.split for corpus in corpora for file in corpus.files}
    in_both = trained.keys() & read.keys()
    sources = {trained[file][0] for file in in_both}
    if in_both and read == {file: split for file, (source, split) in trained.items() if source in sources}:
        return True
    for file in in_both:
        _, trained_split = trained[file]
        if flags.splits_overlap(trained_split, read[file]):
            problem = f"the run trained on {trained_split!r} of {file}"
            advice = "leave out --dataset and --dataset-split, or give what it did not train on"
            raise base.UserError(f"--dataset {settings.describe_dataset()}: {problem}; {advice}")
    return False


def trained_files(settings: flags.Flags, manifest: dict) -> dict[str, tuple[str, str]]:
    """{real path of a file: (source, split)} of what the run of a manifest trained on; of a source that is gone, by
    what --dataset names."""
    run_flags = manifest["flags"]
    if run_flags["dataset"] == "synthetic":
        return {}
    data_flags = {name: run_flags[name] for name in ("dataset_split", "dataset_config", "text_field", "streaming")}
    dataset = run_flags["dataset"] if isinstance(run_flags["dataset"], str) else tuple(run_flags["dataset"])
    run = dataclasses.replace(settings, dataset=dataset, **data_flags)  # this command, but reading what the run read
    trained: dict[str, tuple[str, str]] = {}
    for source in run.sources():
        try:
            corpus = find_corpus(run, source)
        except base.UserError:  # deleted since: if it is to be evaluated, opening it raises the error
            trained[source.dataset] = (source.name, run.dataset_split or "train")
            continue
        trained |= {file.real_path: (source.name, corpus.split) for file in corpus.files}
    return trained
