"""Data: from files, buckets and the hub to the microbatches of a rank.

    corpora = data.find(settings)                     one listing, by rank 0
    train_set = data.load(settings, corpora, tokenizer, config, manifest)
    for batch in data.training_batches(settings, train_set, state, device): ...

Each name of the list has a docstring in its file.
"""

from harness.data.batches import Batches, TrainingData, eval_batches, mean_losses, mix, training_batches
from harness.data.chat import read_prompt
from harness.data.corpora import Corpus, Reading, find, masks_documents, needs_tokenizer, open_sequences
from harness.data.mixture import DataRecord, SequenceOrder, describe_changes, read_record, renamed
from harness.data.schema import Conversation
from harness.data.sources import (
    are_chats,
    count_epoch,
    end_tokens,
    evaluates_own_data,
    load,
    render_prompt,
    show_samples,
)
from harness.data.tokenize import vocabulary_of
from harness.data.windows import PackedDataset, SyntheticDataset, create_collate_fn

__all__ = [
    "Batches",
    "Conversation",
    "Corpus",
    "DataRecord",
    "PackedDataset",
    "Reading",
    "SequenceOrder",
    "SyntheticDataset",
    "TrainingData",
    "are_chats",
    "count_epoch",
    "create_collate_fn",
    "describe_changes",
    "end_tokens",
    "eval_batches",
    "evaluates_own_data",
    "find",
    "load",
    "masks_documents",
    "mean_losses",
    "mix",
    "needs_tokenizer",
    "open_sequences",
    "read_prompt",
    "read_record",
    "renamed",
    "render_prompt",
    "show_samples",
    "training_batches",
    "vocabulary_of",
]
