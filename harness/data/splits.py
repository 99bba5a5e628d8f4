"""Splits: which files and which part of a corpus a split's name means."""

import os
import pathlib
import re

import numpy as np

from harness.base.errors import NoSplitError, UserError

SPLITS = {"train": "train(ing)?", "validation": "valid(ation)?|val|dev", "test": "test(ing)?|eval(uation)?"}


def files_of_split(dataset: str, split: str, files: list[pathlib.Path]) -> list[pathlib.Path]:
    """The local files of one split. The split of a file is a word in its path below the folder, by the same words as in
    `datasets`; where no word says it, and of a single file, it is train. A NoSplitError where there are none."""
    splits: dict[str, list] = {}
    for file in files:
        path = str(file.relative_to(dataset)) if os.path.isdir(dataset) else file.name * (len(files) > 1)
        words = re.findall("[a-z]+", path.lower())
        named = (name for name, pattern in SPLITS.items() if any(re.fullmatch(pattern, word) for word in words))
        splits.setdefault(next(named, "train"), []).append(file)
    if split not in splits:
        raise NoSplitError(f"--dataset {dataset}, split {split!r}: there is none; there is {', '.join(splits)}")
    return splits[split]


def parse_split(split: str) -> tuple[str, list[str]]:
    """(name, bounds of its slice) of a split of local files, such as `train` or `train[:95%]`; no bounds, no slice."""
    part = re.fullmatch(r"([\w.-]+)(\[(-?\d+%?)?:(-?\d+%?)?\])?", split)
    if not part:
        raise UserError(f"--dataset, split {split!r}: cannot be read; such as train, 'train[:95%]', 'train[9:99]'")
    return part[1], [part[3] or "0%", part[4] or "100%"] if part[2] else []


def cut_documents(bounds: list[str], documents: int) -> list[int | None]:
    """How many of so many documents are before each bound of a slice, such as 95% or -100; None where a percentage
    would cut off none or all of them."""
    cuts: list[int | None] = []
    for bound in bounds:
        number, size = int(bound.rstrip("%")), 100 if bound.endswith("%") else documents
        if abs(number) > size:
            raise UserError(f"--dataset-split: the slice's bound {bound} is beyond the {documents:,} documents")
        number += size * (number < 0)
        cut = round(documents * number / size) if size else 0
        cuts.append(None if 0 < number < size and cut in (0, documents) else cut)
    return cuts


def cut_positions(bounds: list[str], tokens: np.ndarray, end_of_text: int | None) -> list[int]:
    """Where the bounds of a slice cut `tokens`: at ends of documents, or, where these are too few for a percentage, at
    that share of the tokens, as in a file of one document."""
    ends = np.union1d(np.flatnonzero(tokens == end_of_text) + 1, [0, len(tokens)]).astype(int)
    cuts = zip(cut_documents(bounds, len(ends) - 1), bounds, strict=True)
    return [len(tokens) * int(bound.rstrip("%")) // 100 if cut is None else int(ends[cut]) for cut, bound in cuts]
