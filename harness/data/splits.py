"""Splits: which files and which part of a corpus a split's name means."""

import re

import numpy as np

from harness.base import NoSplitError, UserError
from harness.data.corpus_files import is_folder
from harness.data.held_out import document_ends
from harness.data.storage import DataFile

SPLITS = {"train": "train(ing)?", "validation": "valid(ation)?|val|dev", "test": "test(ing)?|eval(uation)?"}


def files_of_split(dataset: str, split: str, files: list[DataFile]) -> list[DataFile]:
    """The files of one split. The split of a file is a word in its path below the folder, by the same words as in
    `datasets`; where no word says it, and of a single file, it is train. A NoSplitError where there are none."""
    splits: dict[str, list] = {}
    for file in files:
        if is_folder(dataset):
            name = split_in_path(str(file.relative_to(dataset)))
        elif len(files) > 1:
            name = split_in_path(file.name)
        else:
            name = "train"
        splits.setdefault(name, []).append(file)
    if split not in splits:
        raise NoSplitError(f"--dataset {dataset}, split {split!r}: there is none; there is {', '.join(splits)}")
    return splits[split]


def split_in_path(path: str) -> str:
    """The first split, in the order of SPLITS, that a word of a path names; train where none does."""
    words = re.findall("[a-z]+", path.lower())
    for name, pattern in SPLITS.items():
        if any(re.fullmatch(pattern, word) for word in words):
            return name
    return "train"


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split of local files, such as `train` or `train[:95%]`; no bounds without a
    slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
    if not part[2]:
        return part[1], []
    return part[1], [part[3] or "0%", part[4] or "100%"]


def cut_documents(bounds: list[str], documents: int) -> list[int | None]:
    """How many of so many documents are before each bound of a slice, such as 95% or -100; None where a percentage
    would cut off none or all of them."""
    cuts: list[int | None] = []
    for bound in bounds:
        number = int(bound.rstrip("%"))
        size = 100 if bound.endswith("%") else documents
        if abs(number) > size:
            raise UserError(f"--dataset-split: the slice's bound {bound} is beyond the {documents:,} documents")
        if number < 0:
            number += size
        cut = round(documents * number / size) if size else 0
        cuts_nothing = 0 < number < size and cut in (0, documents)
        cuts.append(None if cuts_nothing else cut)
    return cuts


def cut_positions(bounds: list[str], tokens, end_of_text: int | None) -> list[int]:
    """Where the bounds of a slice cut `tokens`: at ends of documents, or, where these are too few for a percentage, at
    that share of the tokens, as in a file of one document."""
    ends = np.union1d(document_ends(tokens, end_of_text), [0, len(tokens)]).astype(int)
    positions = []
    for cut, bound in zip(cut_documents(bounds, len(ends) - 1), bounds, strict=True):
        if cut is None:
            positions.append(len(tokens) * int(bound.rstrip("%")) // 100)
        else:
            positions.append(int(ends[cut]))
    return positions
