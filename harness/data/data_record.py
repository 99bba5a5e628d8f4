"""What a checkpoint records of a run's data: its sources, the mixture's history, and the sizes of its steps. From it a
resumed run, and `--show-samples`, know which sample comes when."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.data.mixture import Segment, begin_history, change_history, read_history
from harness.flags import Settings, name_of, stages_of


@dataclass(frozen=True)
class StepSize:
    """From an optimizer step on, how many samples a step takes."""

    steps_before: int
    samples_before: int
    samples: int  # of each step


@dataclass(frozen=True)
class DataRecord:
    """The data of a run so far, and as planned."""

    sources: dict[str, dict[str, Any]]  # by name: the rules by which each is read, and what tells it from others
    plain: str | None  # whose order is independent of its name: the only source at the run's first start
    streams: int  # logical streams of each source that is streamed
    asked: dict[str, Any]  # the weights and stages of the command line
    history: list[Segment]
    step_sizes: list[StepSize]
    removed: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # earlier sources may come back

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self) | {"history": [segment.record() for segment in self.history]}

    def samples_of_step(self, step: int) -> range:
        """The global samples of an optimizer step; steps count from 1."""
        latest = self.step_sizes[0]
        for size in self.step_sizes:
            if size.steps_before < step:
                latest = size
        first = latest.samples_before + (step - 1 - latest.steps_before) * latest.samples
        return range(first, first + latest.samples)

    def step_of_sample(self, sample: int) -> int:
        """The optimizer step, from 1 on, that takes a global sample."""
        latest = [size for size in self.step_sizes if size.samples_before <= sample][-1]
        return latest.steps_before + (sample - latest.samples_before) // latest.samples + 1

    def describe_history(self) -> list[dict[str, Any]]:
        """When which shares hold, for a run's config.json and its page."""
        changes = []
        for segment in self.history:
            step = self.step_of_sample(segment.first)
            changes.append({"from_sample": segment.first, "from_step": step, "weights": segment.shares()})
        return changes


def read_record(manifest: dict[str, Any]) -> DataRecord:
    """What a checkpoint's manifest records. Versions before mixtures had one source and one stream."""
    record = manifest.get("data")
    if record is None:
        return record_of_one_source(manifest)
    return DataRecord(
        sources=record["sources"],
        plain=record["plain"],
        streams=record["streams"],
        asked=record["asked"],
        history=read_history(record["history"]),
        step_sizes=[StepSize(**size) for size in record["step_sizes"]],
        removed=record.get("removed", {}),
    )


def record_of_one_source(manifest: dict[str, Any]) -> DataRecord:
    flags = manifest["flags"]
    name = name_of(flags["dataset"])  # as `sources_of` names it
    rules = {key: manifest[key] for key in ("dataset", "held_out", "ids_first", "corpus") if key in manifest}
    samples = manifest["world_size"] * flags["batch_size"] * flags["gradient_accumulation_steps"]
    samples_before = manifest["samples"] - manifest["step"] * samples
    return DataRecord(
        sources={name: rules},
        plain=name,
        streams=1,
        asked=asked_weights({name: None}, None),
        history=read_history([{"from": 0, "weights": {name: "1"}, "per_sample": {name: "1"}}]),
        step_sizes=[StepSize(0, samples_before, samples)],
    )


def asked_weights(weights: dict, stages: tuple[str, ...] | None) -> dict[str, Any]:
    """The weights and stages of a command line, as JSON holds them."""
    texts = {name: None if weight is None else str(weight) for name, weight in weights.items()}
    return {"weights": texts, "stages": list(stages or ())}


def renamed(record: DataRecord, name: str) -> DataRecord:
    """The record of a run of one source that is called differently now, as a file that was moved is."""
    (old,) = record.sources
    history = []
    for segment in record.history:
        weights, per_sample = rename_key(segment.weights, old, name), rename_key(segment.per_sample, old, name)
        history.append(Segment(segment.first, weights, per_sample))
    asked = record.asked | {"weights": rename_key(record.asked["weights"], old, name)}
    plain = name if record.plain == old else record.plain
    return dataclasses.replace(record, sources={name: record.sources[old]}, plain=plain, asked=asked, history=history)


def rename_key(values: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in values.items()}


def record_of_run(
    settings: Settings,
    sources: dict[str, dict[str, Any]],
    weights: dict,
    per_sample: dict,
    samples_per_step: int,
    streams: int,
    before: DataRecord | None,
    step: int,
    samples: int,
) -> DataRecord:
    """The record of a run that begins, or goes on after `step` steps and `samples` samples.

    Args:
        sources: the rules of each source.
        weights: of each source, as Fractions; `per_sample` the tokens of one of its samples, on average.
        streams: of a new run.
        before: what its checkpoint recorded; None for a new run.
    """
    stages = stages_of(settings.mixture_stage)
    asked = asked_weights({source.name: source.weight for source in settings.sources()}, settings.mixture_stage)
    planned = begin_history(weights, per_sample, stages, settings.num_steps, samples_per_step, step, samples)
    if before is None:
        plain = next(iter(sources)) if len(sources) == 1 else None
        sizes = [StepSize(0, 0, samples_per_step)]
        return DataRecord(sources, plain, streams, asked, planned, sizes)
    sizes = before.step_sizes
    if sizes[-1].samples != samples_per_step:
        sizes = [*sizes, StepSize(step, samples, samples_per_step)]
    history = before.history
    if before.asked != asked:
        history = change_history(history, planned)
    known = before.removed | before.sources
    removed = {name: rules for name, rules in known.items() if name not in sources}
    return DataRecord(sources, before.plain, before.streams, asked, history, sizes, removed)


def describe_changes(before: DataRecord, now: DataRecord, samples: int) -> list[str]:
    """What changed in a run's mixture since its checkpoint, after so many samples, in words."""
    changes = [f"source {name} added" for name in now.sources if name not in before.sources]
    changes += [f"source {name} removed" for name in before.sources if name not in now.sources]
    if now.asked != before.asked:
        old, new = segment_at(before.history, samples), segment_at(now.history, samples)
        changes.append(f"mixture {describe_shares(old)} -> {describe_shares(new)}")
    return changes


def segment_at(history: list[Segment], sample: int) -> Segment:
    """The segment that a sample is in."""
    return [segment for segment in history if segment.first <= sample][-1]


def describe_shares(segment: Segment) -> str:
    """The sources of a segment with their shares: `web 70 %, code 30 %`."""
    return ", ".join(f"{name} {100 * share:.4g} %" for name, share in segment.shares().items() if share)
