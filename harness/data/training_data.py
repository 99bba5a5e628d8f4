"""Training data: the sources of a run, and the order in which their samples come. Independent of how a source is read
and of which rank takes which sample."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from harness.data.data_record import DataRecord, StepSize
from harness.data.mixture import Mixture, Segment
from harness.data.sample_order import WindowOrder
from harness.data.streaming import StreamedDataset, StreamReader
from harness.data.windows import Window
from harness.flags import Source

Positions = dict[str, dict[int, tuple[int, int, int]]]  # by source and stream, as `StreamReader.position` has them


@dataclass(eq=False)
class TrainingData:
    """What a run trains on.

    A source is a data set of windows (`windows.PackedDataset` and its like) or a `streaming.StreamedDataset`. Sample i
    of the run comes from the source that the mixture says. Of a data set it is the window that `WindowOrder` says; of a
    stream that is cut into N logical streams it is the next window of stream i mod N.
    """

    sources: dict[str, Any]
    mixture: Mixture
    record: DataRecord
    seq_len: int
    seed: int
    end_of_text: int | None = None  # the id that ends a document, where attention is to stay inside documents
    header: dict[str, str] = field(default_factory=dict)  # lines of the header

    def __post_init__(self):
        self.orders = {}
        for name, source in self.sources.items():
            if not isinstance(source, StreamedDataset):
                self.orders[name] = WindowOrder(len(source), self.seed, None if name == self.record.plain else name)

    def __len__(self) -> int:
        """Samples after which each source has been read once; there are more, in further epochs. Not of streams."""
        first = self.mixture.history[0]
        weights = {name: weight / first.per_sample[name] for name, weight in first.weights.items() if weight}
        total = sum(weights.values())  # of samples, whose share is that of the tokens only where all have as many
        return max(math.ceil(self.orders[name].windows * total / weight) for name, weight in weights.items())

    def __getitem__(self, sample: int) -> np.ndarray | Window:
        """A global sample; not of streams."""
        source, window = self.locate(sample)
        return source[window]

    @property
    def is_uniform(self) -> bool:
        """Whether each sample has `seq_len` tokens, all of which are trained on."""
        return all(source.is_uniform for source in self.sources.values())

    @property
    def has_padding(self) -> bool:
        return any(getattr(source, "padding_share", 0) > 0 for source in self.sources.values())

    @property
    def is_mixed(self) -> bool:
        return len(self.mixture.names) > 1

    @property
    def is_mapped(self) -> bool:
        """Whether all tokens come from token files, whatever the run's tokenizer."""
        return all(getattr(source, "mapped", None) is not None for source in self.sources.values())

    def identity(self) -> dict[str, Any]:
        """What a checkpoint records of the data. A run of one source has its rules at the top, as versions before
        mixtures had them."""
        identity: dict[str, Any] = {"data": self.record.record()}
        if len(self.record.sources) == 1:
            (rules,) = self.record.sources.values()
            identity |= rules
        return identity

    def locate(self, sample: int) -> tuple[Any, int]:
        """(the data set that a global sample comes from, its window there); not of streams."""
        name, number = self.mixture.locate(sample)
        return self.sources[name], self.orders[name].window_of(number)

    def count_tokens(self, samples: range) -> tuple[int, int]:
        """(tokens that are not padding, tokens that are trained on) of global samples."""
        if self.is_uniform:
            return len(samples) * self.seq_len, len(samples) * self.seq_len
        real = trained = 0
        for sample in samples:
            source, window = self.locate(sample)
            real += source.real_tokens(window)
            trained += source.trained_tokens(window)
        return real, trained

    def epochs(self, samples: int) -> dict[str, float]:
        """How often each source is read by the first `samples` of the run; without streams, whose size is not known."""
        counts = self.mixture.counts(samples)
        return {name: counts[name] / order.windows for name, order in self.orders.items()}

    def figures(self, samples: int, tokens: int) -> dict[str, float]:
        """The figures of a log line after so many samples and tokens: of each source of a mixture its share now and how
        often it was read; the share of padding so far."""
        figures = {}
        if self.is_mixed:
            shares = self.mixture.shares_at(max(samples - 1, 0))
            for name in self.sources:
                figures[f"share/{name}"] = shares.get(name, 0.0)
            for name, epochs in self.epochs(samples).items():
                figures[f"epochs/{name}"] = epochs
        if not self.is_uniform:
            figures["padding_percent"] = 100 * (1 - tokens / (samples * self.seq_len))
        return figures


def mix(windows: dict[str, Any], sources: list[Source], seq_len: int, seed: int) -> TrainingData:
    """The windows of several sources in the order of a run without stages."""
    per_sample = {name: Fraction(source.total_tokens(), len(source)) for name, source in windows.items()}
    weights = {}
    for source in sources:
        weights[source.name] = source.weight
        if source.weight is None:
            weights[source.name] = Fraction(windows[source.name].total_tokens())
    history = [Segment(0, weights, per_sample)]
    record = DataRecord({name: {} for name in windows}, None, 1, {}, history, [StepSize(0, 0, 1)])
    return TrainingData(windows, Mixture(history), record, seq_len, seed)


class SampleReader:
    """Reads the samples of a run for one data worker, step by step from `first_sample` on.

    `positions` are where the streams can be read from on; a stream is opened when its first sample is read.
    """

    def __init__(
        self,
        data: TrainingData,
        first_sample: int,
        positions: Positions,
        report: Callable[[Counter], None] | None = None,
    ):
        """`report` is that of `StreamReader`."""
        self.data = data
        self.readers = {}
        for name, source in data.sources.items():
            if isinstance(source, StreamedDataset):
                of_source = positions.get(name, {})
                if name == data.record.plain and len(positions) == 1:  # the only source, which may have been renamed
                    (of_source,) = positions.values()
                self.readers[name] = StreamReader(source, of_source, report)
        self.lane_counts = np.empty(0)
        if self.readers:
            self.lane_counts = data.mixture.lane_counts(first_sample)
        self.numbers: dict[int, int] = {}  # of the samples of this step: each one's number in its stream

    def enter_step(self, samples: range) -> None:
        """Goes on to the samples of the next step."""
        if not self.readers:
            return
        self.numbers = {}
        for sample, source in zip(samples, self.data.mixture.sources_between(samples.start, samples.stop), strict=True):
            lane = sample % self.data.record.streams
            self.numbers[sample] = int(self.lane_counts[source, lane])
            self.lane_counts[source, lane] += 1

    def window(self, sample: int) -> np.ndarray | Window:
        """A sample of this step. A UserError where it cannot be read."""
        name, number = self.data.mixture.locate(sample)
        if name in self.readers:
            return self.readers[name].window(sample % self.data.record.streams, self.numbers[sample])
        return self.data.sources[name][self.data.orders[name].window_of(number)]

    def read(self, samples: range) -> tuple[list, Positions]:
        """(these samples of this step, and for each of their streams where to begin to read the first of them again).
        A UserError where one cannot be read."""
        windows = []
        positions: Positions = {}
        for sample in samples:
            windows.append(self.window(sample))
            name, _ = self.data.mixture.locate(sample)
            if name in self.readers:
                stream = sample % self.data.record.streams
                positions.setdefault(name, {}).setdefault(stream, self.readers[name].position(stream))
        return windows, positions
