"""Sources: what the words of --dataset and --mixture-stage mean: names, places and weights."""

import glob
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

NAME = r"[A-Za-z0-9][\w.-]*"
WEIGHT = r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+"


@dataclass(frozen=True)
class Source:
    """One corpus of a run."""

    name: str
    dataset: str  # file, folder, pattern, URL, hub id, or demo
    weight: Fraction | None  # its share, up to a common factor; None: by its size


@dataclass(frozen=True)
class Stage:
    """Other weights, from a share of the planned run on."""

    begin: Fraction
    weights: dict[str, Fraction]


def sources_of(dataset: str | tuple[str, ...]) -> list[Source]:
    """The sources that --dataset names; one word without a weight is one source. Where two would have the same name by
    their places they get the numbers of their words: `a-1`, `a-2`."""
    words = [dataset] if isinstance(dataset, str) else dataset
    parsed = [parse_source(word) for word in words]
    names = Counter(name or name_of(place) for name, place, _ in parsed)
    sources = []
    for number, (name, place, weight) in enumerate(parsed, 1):
        by_place = name_of(place)
        if names[by_place] > 1:
            by_place = f"{by_place}-{number}"
        sources.append(Source(name or by_place, place, weight))
    return sources


def parse_source(word: str) -> tuple[str, str, Fraction | None]:
    """(name or "", place, weight or None) of a word [name=]place[:weight]. What exists under the whole word is a
    place, whatever it looks like."""
    if exists(word):
        return "", word, None
    name, place, weight = "", word, None
    named = re.fullmatch(rf"({NAME})=(.+)", word)
    if named:
        name, place = named.groups()
    if not exists(place):
        weighted = re.fullmatch(rf"(.+):({WEIGHT})", place)
        if weighted:
            place, weight = weighted[1], Fraction(weighted[2])
    return name, place, weight


def exists(place: str) -> bool:
    return os.path.exists(os.path.expanduser(place))


def name_of(place: str) -> str:
    """The name of a source that was given none: the last part of its place, without suffixes and signs."""
    parts = [part for part in re.split(r"[/\\]", place) if part and not glob.has_magic(part)]
    name = parts[-1] if parts else "data"
    stem = re.sub(r"(\.[A-Za-z0-9]{1,8}){1,2}$", "", name) or name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "data"


def same_dataset(one: str | Sequence[str], other: str | Sequence[str]) -> bool:
    """Whether two values of --dataset name the same sources, whatever their weights; JSON has lists for tuples."""

    def places(dataset: str | Sequence[str]) -> set[tuple[str, str]]:
        sources = sources_of(dataset if isinstance(dataset, str) else tuple(dataset))
        return {(s.name, os.path.realpath(s.dataset) if exists(s.dataset) else s.dataset) for s in sources}

    return places(one) == places(other)


def splits_overlap(one: str, other: str) -> bool:
    """Whether two splits of a corpus, such as `train[:90%]` and `train[50%:]`, share documents, or may: bounds in
    percent and in documents, or from both ends, cannot be compared without counting."""
    return any(parts_overlap(part, of_other) for part in one.split("+") for of_other in other.split("+"))


def parts_overlap(one: str, other: str) -> bool:
    name, _, bounds = one.partition("[")
    name_of_other, _, bounds_of_other = other.partition("[")
    if name.strip() != name_of_other.strip():
        return False
    first, _, last = bounds.rstrip("] ").partition(":")
    first_of_other, _, last_of_other = bounds_of_other.rstrip("] ").partition(":")
    return not (ends_before(last, first_of_other) or ends_before(last_of_other, first))


def ends_before(last: str, first: str) -> bool:
    """Whether a slice that ends at the bound `last` surely ends where another begins at `first`, or before; a bound is
    empty, documents (`500`, `-500`) or percent (`90%`, `-10%`)."""
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
    """The stage that a value of --mixture-stage describes; a ValueError says what is wrong with it."""
    begin, _, weights_text = text.partition(":")
    if not re.fullmatch(WEIGHT, begin.strip()) or not 0 < Fraction(begin.strip()) < 1:
        raise ValueError("it begins with no share of the run between 0 and 1")
    weights = {}
    for part in weights_text.split(","):
        name, _, weight = (word.strip() for word in part.partition("="))
        if not re.fullmatch(NAME, name) or not re.fullmatch(WEIGHT, weight):
            raise ValueError(f"{part.strip()!r} is no NAME=WEIGHT")
        if name in weights:
            raise ValueError(f"{name} stands there twice")
        weights[name] = Fraction(weight)
    if not any(weights.values()):
        raise ValueError("all its weights are 0")
    return Stage(Fraction(begin.strip()), weights)


def stages_of(texts: tuple[str, ...] | None) -> list[Stage]:
    """The stages of --mixture-stage in the order of their beginnings."""
    return sorted((parse_stage(text) for text in texts or ()), key=lambda stage: stage.begin)


def wrong_mixture(dataset: str | tuple[str, ...], stage_texts: tuple[str, ...] | None) -> str:
    """What is wrong with the sources and stages of a run, as an error; empty where all is well."""
    sources, stages = sources_of(dataset), stages_of(stage_texts)
    names = [source.name for source in sources]
    places = [source.dataset for source in sources]
    twice = [name for name, count in Counter(names).items() if count > 1]
    unweighted = [source.dataset for source in sources if source.weight is None]
    if twice:
        return f"--dataset: two sources are called {twice[0]}; give them other names, as in web=FILE:0.7"
    if not isinstance(dataset, str) and "synthetic" in places:
        return "--dataset: synthetic tokens cannot be mixed with others; name it alone"
    if 0 < len(unweighted) < len(sources):
        advice = "give each one, such as :0.3 at its end, or none, which mixes by size"
        return f"--dataset: {unweighted[0]} has no weight and others have; {advice}"
    if not unweighted and not any(source.weight for source in sources):
        return "--dataset: all weights are 0; give at least one source another"
    begins = Counter(stage.begin for stage in stages)
    for stage in stages:
        unknown = [name for name in stage.weights if name not in names]
        if unknown:
            return f"--mixture-stage: no source is called {unknown[0]}; there is {', '.join(names)}"
        if begins[stage.begin] > 1:
            return f"--mixture-stage: two stages begin at {float(stage.begin):g}; give them different beginnings"
    for source in sources:
        if source.weight == 0 and not any(stage.weights.get(source.name) for stage in stages):
            return f"--dataset: {source.name} has the weight 0 and no --mixture-stage uses it; leave it out"
    return ""
