"""Sources: names, datasets and weights in --dataset and --mixture-stage."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

NAME = r"[A-Za-z0-9][\w.-]*"
WEIGHT = r"\d+(?:\.\d*)?(?:[eE][-+]?\d{1,2})?|\.\d+"


@dataclass(frozen=True)
class Source:
    """One corpus of a run."""

    name: str
    dataset: str  # file, folder, pattern, URL, hub id, or demo
    weight: Fraction | None  # relative; None: its number of tokens


@dataclass(frozen=True)
class Stage:
    """Weights of sources from `begin`, a fraction of the planned run."""

    begin: Fraction
    weights: dict[str, Fraction]


def parse_sources(dataset: str | Sequence[str]) -> list[Source]:
    """Parse --dataset. Sources without an explicit name that would share one are numbered: `a-1`, `a-2`."""
    words = [dataset] if isinstance(dataset, str) else dataset
    parsed = [parse_source(word) for word in words]
    names = Counter(name or source_name(dataset) for name, dataset, _ in parsed)
    sources = []
    for number, (name, dataset, weight) in enumerate(parsed, 1):
        default_name = source_name(dataset)
        if names[default_name] > 1:
            default_name = f"{default_name}-{number}"
        sources.append(Source(name or default_name, dataset, weight))
    return sources


def parse_source(word: str) -> tuple[str, str, Fraction | None]:
    """Parse [name=]dataset[:weight] into (name or "", dataset, weight or None). A word that exists as a path is a
    dataset, whatever it looks like."""
    if exists(word):
        return "", word, None
    name, dataset, weight = "", word, None
    named = re.fullmatch(rf"({NAME})=(.+)", word)
    if named:
        name, dataset = named.groups()
    if not exists(dataset):
        weighted = re.fullmatch(rf"(.+):({WEIGHT})", dataset)
        if weighted:
            dataset, weight = weighted[1], Fraction(weighted[2])
    return name, dataset, weight


def exists(dataset: str) -> bool:
    return os.path.exists(os.path.expanduser(dataset))


def source_name(dataset: str) -> str:
    """The default name of a source: the last part of its path or id, without suffixes and punctuation."""
    parts = [part for part in re.split(r"[/\\]", dataset) if part and not glob.has_magic(part)]
    name = parts[-1] if parts else "data"
    stem = re.sub(r"(\.[A-Za-z0-9]{1,8}){1,2}$", "", name) or name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "data"


def lacks_sources(dataset: str | Sequence[str], run_dataset: str | Sequence[str]) -> bool:
    """True if sources of `run_dataset` are not in `dataset`, by their names, which a file that moved may keep."""
    names, run_names = ({source.name for source in parse_sources(one)} for one in (dataset, run_dataset))
    return not run_names <= names


def same_dataset(one: str | Sequence[str], other: str | Sequence[str]) -> bool:
    """True if two values of --dataset have the same sources, whatever their weights; JSON has lists for tuples."""

    def names_and_paths(dataset: str | Sequence[str]) -> set[tuple[str, str]]:
        sources = parse_sources(dataset if isinstance(dataset, str) else tuple(dataset))
        return {(s.name, os.path.realpath(s.dataset) if exists(s.dataset) else s.dataset) for s in sources}

    return names_and_paths(one) == names_and_paths(other)


def splits_overlap(one: str, other: str) -> bool:
    """True if two splits of a corpus, such as `train[:90%]` and `train[50%:]`, may share documents. Bounds in different
    units, or from different ends, cannot be compared without counting documents."""
    name, _, bounds = one.partition("[")
    other_name, _, bounds_of_other = other.partition("[")
    if name != other_name:
        return False
    first, _, last = bounds.rstrip("]").partition(":")
    other_first, _, other_last = bounds_of_other.rstrip("]").partition(":")
    return not (ends_before(last, other_first) or ends_before(other_last, first))


def ends_before(last: str, first: str) -> bool:
    """True if a slice up to bound `last` surely ends before one from bound `first`. A bound is empty, documents (`500`,
    `-500`) or percent (`90%`, `-10%`)."""
    if not re.fullmatch(r"-?\d+%?", last) or not re.fullmatch(r"-?\d+%?", first):
        return False
    numbers = []
    for bound in (last, first):
        number = int(bound.rstrip("%"))
        if bound.endswith("%") and number < 0:
            number += 100
        numbers.append(number)
    same_unit = last.endswith("%") == first.endswith("%") and (numbers[0] < 0) == (numbers[1] < 0)
    return same_unit and numbers[0] <= numbers[1]


def parse_stage(text: str) -> Stage:
    """Parse a value of --mixture-stage.

    Raises:
        ValueError: with the reason.
    """
    begin, _, weights_text = text.partition(":")
    if not re.fullmatch(WEIGHT, begin.strip()) or not 0 < Fraction(begin.strip()) < 1:
        raise ValueError("it does not begin with a fraction of the run between 0 and 1")
    weights = {}
    for part in weights_text.split(","):
        name, _, weight = (word.strip() for word in part.partition("="))
        if not re.fullmatch(NAME, name) or not re.fullmatch(WEIGHT, weight):
            raise ValueError(f"{part.strip()!r} is not NAME=WEIGHT")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        weights[name] = Fraction(weight)
    if not any(weights.values()):
        raise ValueError("all its weights are 0")
    return Stage(Fraction(begin.strip()), weights)


def parse_stages(texts: tuple[str, ...] | None) -> list[Stage]:
    """The stages of --mixture-stage, sorted by their beginning."""
    return sorted((parse_stage(text) for text in texts or ()), key=lambda stage: stage.begin)


def mixture_problem(dataset: str | tuple[str, ...], stage_texts: tuple[str, ...] | None) -> str:
    """An error in the sources and stages of a run; empty if there is none."""
    sources, stages = parse_sources(dataset), parse_stages(stage_texts)
    names = [source.name for source in sources]
    datasets = [source.dataset for source in sources]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    unweighted = [source.dataset for source in sources if source.weight is None]
    if repeated:
        return f"--dataset: two sources are named {repeated[0]}; give other names, such as web=FILE:0.7"
    if len(sources) == 1 and sources[0].weight not in (None, 1):
        word = dataset if isinstance(dataset, str) else dataset[0]
        advice = "leave it out; for a part of it give --dataset-split, such as 'train[:70%]'"
        return f"--dataset {word}: a single source has no weight; {advice}"
    if not isinstance(dataset, str) and "synthetic" in datasets:
        return "--dataset: synthetic cannot be mixed with others, named or weighted; give it alone"
    if 0 < len(unweighted) < len(sources):
        advice = "give each a weight, such as :0.3 at its end, or none to mix by size"
        return f"--dataset: {unweighted[0]} has no weight, others have one; {advice}"
    if not unweighted and not any(source.weight for source in sources):
        return "--dataset: all weights are 0; give a positive one"
    begins = Counter(stage.begin for stage in stages)
    for stage in stages:
        unknown = [name for name in stage.weights if name not in names]
        if unknown:
            return f"--mixture-stage: no source is named {unknown[0]}; sources: {', '.join(names)}"
        if begins[stage.begin] > 1:
            return f"--mixture-stage: two stages begin at {float(stage.begin):g}; give them different beginnings"
    for source in sources:
        if source.weight == 0 and not any(stage.weights.get(source.name) for stage in stages):
            return f"--dataset: {source.name} has weight 0 in the whole run; leave it out"
    return ""
