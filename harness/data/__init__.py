"""Data: from files, buckets and the hub to the microbatches of a rank.

    corpora = data.find(settings)                     one listing, by rank 0
    train_set = data.load(settings, corpora, tokenizer, config, manifest)
    for batch in data.training_batches(settings, train_set, state, device): ...

Each name of the list has a docstring in its file.
"""

from harness.data.chat import read_prompt
from harness.data.corpora import Corpus, find, masks_documents, needs_tokenizer
from harness.data.datasets import load, open_sequences, open_sources, show_samples
from harness.data.eval_split import evaluates_own_data
from harness.data.loader import Batches, eval_batches, mean_losses, training_batches
from harness.data.mixture import DataRecord, SequenceOrder, describe_changes, read_record
from harness.data.packing import PackedDataset, SyntheticDataset, create_collate_fn
from harness.data.prompts import are_chats, end_tokens, render_prompt
from harness.data.reader import CorpusReader
from harness.data.schema import Conversation
from harness.data.tokenize import vocabulary_of
from harness.data.training_data import TrainingData, mix

__all__ = [
    "Batches",
    "Conversation",
    "Corpus",
    "CorpusReader",
    "DataRecord",
    "PackedDataset",
    "SequenceOrder",
    "SyntheticDataset",
    "TrainingData",
    "are_chats",
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
    "open_sources",
    "read_prompt",
    "read_record",
    "render_prompt",
    "show_samples",
    "training_batches",
    "vocabulary_of",
]
