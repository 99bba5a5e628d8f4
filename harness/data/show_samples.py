"""What a step trains on: its samples by source, document and text, from the order alone. Called by the script for
--show-samples."""

import numpy as np

from harness.base import UserError
from harness.data.streaming import StreamedDataset
from harness.data.training_data import SampleReader, TrainingData
from harness.data.windows import tokens_of

EXCERPT = 200  # characters of a document that are printed


def describe_step(data: TrainingData, tokenizer, step: int) -> str:
    """The samples of an optimizer step: each with its source, its documents, and how each begins. A UserError where a
    source is no longer one of the run's."""
    samples = data.record.samples_of_step(step)
    for sample in samples:
        name, _ = data.mixture.locate(sample)
        if name not in data.sources:
            raise UserError(
                f"--show-samples {step}: sample {sample:,} is of the source {name}, which was removed since; give it "
                f"too, as in --dataset {name}=FILE:1 beside the others"
            )
    reader = SampleReader(data, samples.start, {})
    reader.enter_step(samples)
    lines = [f"step {step:,}: {len(samples):,} samples, from sample {samples.start:,} on"]
    for sample in samples:
        name, _ = data.mixture.locate(sample)
        tokens = tokens_of(reader.window(sample))
        if isinstance(data.sources[name], StreamedDataset):
            lines.append(f"sample {sample:,}: {name}, stream {sample % data.record.streams:,}")
            lines.append(f"  {excerpt(tokens, tokenizer)}")
            continue
        source, index = data.locate(sample)
        lines.append(f"sample {sample:,}: {name}, window {index:,} of {len(source):,}")
        passages = source.documents(index)
        ends = [start for start, _, _ in passages[1:]] + [source.real_tokens(index)]
        for (start, place, offset), end in zip(passages, ends, strict=True):
            if offset:
                place += f", from token {offset:,}"
            lines.append(f"  {place}: {excerpt(tokens[start:end], tokenizer)}")
    return "\n".join(lines)


def excerpt(tokens: np.ndarray, tokenizer) -> str:
    """How a stretch of tokens begins, in one line; as ids where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, tokens[: EXCERPT // 8]))
    text = " ".join(tokenizer.decode(tokens).split())
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
