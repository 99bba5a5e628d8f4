"""The lines of the header about data, and the samples of a step for --show-samples."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from harness import base, flags, job
from harness.data.corpora import Corpus, parse_split
from harness.data.eval_split import EvalData
from harness.data.formats import read_records
from harness.data.packing import EvalSequences, PackedDataset, sequence_tokens
from harness.data.reader import CorpusReader
from harness.data.schema import Conversation, calls_of, read_documents
from harness.data.stream import Stream
from harness.data.tokenize import Encoded, TextEncoder, added_special_tokens
from harness.data.training_data import OpenedSource, SampleReader, TrainingData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARD_RATIO = 1.5  # largest to smallest stream shard; above it the header says so
EXAMPLE_RECORDS = 1000  # records searched for examples
MAX_EXAMPLES, EXAMPLE_TOKENS = 4, 200
SEARCHED_TOKENS = 2**20  # first tokens of the data, among which a trained special token is searched
THOUGHTS = {"reasoning_content", "reasoning", "thinking"}  # fields of messages
MAX_PRINTED = 200  # characters of a document in a sample
MAX_PRINTED_IDS = 25  # without a tokenizer


def describe(
    settings: flags.Settings,
    data: TrainingData,
    opened: dict[str, OpenedSource],
    corpora: list[Corpus],
    samples_per_step: int,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> dict[str, str]:
    """The lines of the header about data: the training data with their shares, the eval data, and what is left out."""
    if settings.dataset == "synthetic":
        return {"data": "synthetic, random tokens"}
    is_single = len(corpora) == 1
    epochs = data.epochs(data.record.samples_of_step(settings.num_steps).stop)
    texts_by_line: dict[str, list[str]] = {"data": [], "files": [], "eval data": []}  # a text for each source
    for corpus in corpora:
        source = opened[corpus.name]
        train = source.train
        if isinstance(train, Stream):
            size = "streamed"
        else:
            amount = f"{epochs[corpus.name]:.1f} epochs"
            if is_single:
                amount = f"{len(train) / samples_per_step:,.1f} steps an epoch"
            size = f"{train.total_tokens():,} tokens, {amount}{describe_left_out(train)}"
        name = ", ".join(filter(None, [corpus.source.dataset, settings.dataset_config, corpus.split]))
        files = corpus.listing.describe(parse_split(corpus.split)[0])
        found = {"data": f"{name}: {size}", "files": files, "eval data": describe_eval_data(source.eval_data)}
        for line_name, text in found.items():
            if text:
                texts_by_line[line_name].append(text if is_single else f"{corpus.name}: {text}")
    lines = {line_name: "; ".join(parts) for line_name, parts in texts_by_line.items() if parts}
    if any(corpus.kind == "text" for corpus in corpora):
        lines["documents"] = describe_eos(tokenizer)
    if not is_single:
        shares = [data.record.segments[0].describe()]
        for before, segment in itertools.pairwise(data.record.segments):
            if segment.weights != before.weights:
                shares.append(f"from step {segment.steps_before + 1:,} {segment.describe()}")
        lines["mixture"] = "; ".join(shares)
    if data.has_streams:
        lines["streams"] = (
            f"{base.counted(data.record.num_shards, 'shard')} of each source, divided among ranks and workers"
        )
        if data.record.num_shards < settings.groups(dist.get_world_size()):
            lines["streams"] += "; there are fewer shards than ranks, so some ranks read the same shard"
        for name, streamed in data.sources.items():
            if isinstance(streamed, Stream):
                lines["streams"] += describe_uneven(name, streamed.shard_sizes())
    return lines


def describe_uneven(name: str, shard_sizes: np.ndarray) -> str:
    """A text to append if the shards of a source differ by more than MAX_SHARD_RATIO; else ""."""
    smallest, largest = int(shard_sizes.min()), int(shard_sizes.max())
    if largest <= MAX_SHARD_RATIO * smallest:
        return ""
    sizes = f"those of {name} have {smallest:,} to {largest:,} bytes"
    return f"; {sizes}, and documents of small ones repeat more often: begin a run with fewer --streams"


def describe_eval_data(eval_data: EvalData | None) -> str:
    """The header's text about the eval data of a source, or about an eval dataset; "" if there is none."""
    if eval_data is None:
        return ""
    sequences = eval_data.sequences
    line = f"{eval_data.description}: {sequences.total_tokens():,} tokens"
    if isinstance(sequences, PackedDataset) and sequences.has_loss_mask:
        line += f", {sequences.total_trained():,} of them in the loss"
    return line + describe_left_out(sequences)


def describe_left_out(sequences: EvalSequences) -> str:
    """The number of sequences without a token to train on, in words to append; "" for none."""
    if not sequences.left_out:
        return ""
    return f", left out {base.counted(sequences.left_out, 'sequence')} without a trained token"


def describe_eos(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The header's text about the token after each text, and the special tokens that the tokenizer would add."""
    before, after = added_special_tokens(tokenizer)
    added = [*before, *(token for token in after if token != tokenizer.eos_token_id)]
    line = f"{tokenizer.eos_token} after each text"
    if added:
        names = " ".join(tokenizer.convert_ids_to_tokens(added))
        line += f"; not {names}, which this tokenizer would add, see docs/DATA.md (Text)"
    return line


def describe_packing(corpus: Corpus, train: PackedDataset, reader: CorpusReader, with_example: bool) -> dict[str, str]:
    """The lines about packing, and about what is trained on of conversations and rows."""
    lines: dict[str, str] = {}
    if corpus.is_chat:
        lines |= base.broadcast_from_rank_0(lambda: reader.chat_encoder(corpus).describe())
    if packing := base.broadcast_from_rank_0(train.describe):
        lines["packing"] = packing
    if train.has_loss_mask:
        share = train.total_trained() / len(train.tokens)
        line_name, document_name = ("chat", "conversation") if corpus.is_chat else ("labels", "row")
        documents = base.counted(train.num_documents(), document_name)
        lines[line_name] = f"{documents}, trained on {100 * share:.1f} % of their tokens"
    if train.has_loss_mask and with_example:
        if corpus.is_chat and not base.broadcast_from_rank_0(lambda: trains_special_token(train, reader.tokenizer)):
            problem = "no special token is trained on, so the model does not learn to end an answer"
            advice = "give a template that ends answers with one of the tokenizer's, inside {% generation %}"
            job.warn(f"--dataset {corpus.source.dataset}: {problem}; {advice}, with --chat-template FILE")
        examples = base.broadcast_from_rank_0(lambda: find_examples(corpus, reader))
        lines["examples"] = f"(of the first records of the files; [[ ]] is around what is trained on)\n{examples}"
    return lines


def trains_special_token(train: PackedDataset, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """True if a special token, such as one that ends an answer, is trained on in the first SEARCHED_TOKENS, or if
    nothing is trained on there."""
    tokens = train.tokens[:SEARCHED_TOKENS]
    trained = tokens[train.tokens.loss_mask(0, len(tokens)).astype(bool)]
    special = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    return not len(trained) or bool(np.isin(trained, [*special, *tokenizer.all_special_ids]).any())


def find_examples(corpus: Corpus, reader: CorpusReader) -> str:
    """The examples among the first records of the files of a corpus, whether or not its slice has them."""
    records = itertools.chain.from_iterable(read_records(file, corpus.names_to_read) for file in corpus.files)
    first = itertools.islice(records, EXAMPLE_RECORDS)
    documents = read_documents(first, reader.vocab_size, True, Counter(), corpus.kind)
    return describe_examples(documents, dataclasses.replace(reader, skip_bad_records=True).encoder(corpus))


def describe_examples(documents: Iterator, encoder: TextEncoder) -> str:
    """Return the first conversation with each set of features, or the first rows, up to MAX_EXAMPLES: for each a line
    with its position and features, and its text, at most EXAMPLE_TOKENS tokens, with [[ ]] around what is trained
    on."""
    found: dict[str, str] = {}
    for number, document in enumerate(documents, 1):
        features = title = f"document {number}"
        if isinstance(document, Conversation):
            features = describe_features(document)
            title = f"{document.position}: {features}"
        if features not in found:
            try:
                encoded = encoder.encode([document], Counter())
            except base.UserError:  # outside of the slice, as training on it would have ended the run
                continue
            if len(encoded.tokens):
                found[features] = f"--- {title}\n{mark_trained(encoded, encoder.tokenizer)}"
        if len(found) == MAX_EXAMPLES:
            break
    return "\n".join(found.values())


def describe_features(conversation: Conversation) -> str:
    """Name what a conversation has that others may lack."""
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    features = {
        "system": not {"system", "developer"}.isdisjoint(roles),
        "tools": bool(conversation.tools) or any(map(calls_of, messages)),
        "reasoning": any(THOUGHTS & message.keys() for message in messages) or "</think>" in "".join(texts),
        "several turns": roles.count("user") > 1,
    }
    return ", ".join(feature for feature, is_there in features.items() if is_there) or "one turn"


def mark_trained(encoded: Encoded, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text of a document with [[ ]] around what is trained on; the middle of a long one is left out."""
    halves = [slice(None)]
    if len(encoded.tokens) > EXAMPLE_TOKENS:
        halves = [slice(EXAMPLE_TOKENS // 2), slice(-EXAMPLE_TOKENS // 2, None)]
    texts = []
    for half in halves:
        tokens, trained = encoded.tokens[half], encoded.loss_mask[half].astype(bool)
        borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        parts = []
        for first, last in itertools.pairwise(borders):
            text = tokenizer.decode(tokens[first:last].tolist())
            assert isinstance(text, str)  # of one list of ids
            parts.append(f"[[{text}]]" if trained[first] else text)
        texts.append("".join(parts))
    return " ... ".join(texts)


def describe_step(data: TrainingData, tokenizer: "PreTrainedTokenizerBase | None", step: int) -> str:
    """The samples of an optimizer step: each with its source and the beginnings of its documents. A UserError if a
    source is no longer one of the run's."""
    samples = data.record.samples_of_step(step)
    reader = SampleReader(data, positions={})  # shards of streams from their beginning
    lines = [f"step {step:,}: {len(samples):,} samples, from sample {samples.start:,} on"]
    for sample in samples:
        lines.append("")
        name, _ = data.mixture.locate(sample)
        if name not in data.sources:
            raise base.UserError(
                f"--show-samples {step}: sample {sample:,} is of the source {name}, which was removed since; give it "
                f"too, as in --dataset {name}=FILE:1 in addition to the others"
            )
        [sequence], _positions = reader.read([sample])
        tokens = sequence_tokens(sequence)
        if not isinstance(data.sources[name], PackedDataset):  # a stream, or random tokens
            shard = sample % data.record.num_shards
            lines += [f"sample {sample:,}: {name}, shard {shard:,}", f"  {decode_beginning(tokens, tokenizer)}"]
            continue
        source, index = data.find_sequence(sample)
        lines.append(f"sample {sample:,}: {name}, sequence {index:,} of {len(source):,}")
        borders = [*source.doc_starts_in(index), source.unpadded_len(index)]
        for start, end in itertools.pairwise(borders):
            lines.append(f"  from token {start:,}: {decode_beginning(tokens[start:end], tokenizer)}")
    return "\n".join(lines)


def decode_beginning(tokens: np.ndarray, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The beginning of a stretch of tokens, in one line; as ids without a tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, tokens[:MAX_PRINTED_IDS]))
    text = tokenizer.decode(tokens)
    assert isinstance(text, str)  # of one list of ids
    text = " ".join(text.split())
    return text if len(text) <= MAX_PRINTED else f"{text[:MAX_PRINTED]}..."
