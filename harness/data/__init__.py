"""Data: from files, buckets and the hub to the microbatches of a rank.

    corpora = data.find(args)                     one listing, by rank 0
    train_set = data.load(settings, corpora, tokenizer, config, manifest)
    for batch in data.training_batches(settings, train_set, state, device): ...

Each file imports only files above it, except `opening`, which is the one to read first:

    opening                     sources -> the data of a run
    stores, data_file           a file, local or at a URL
    schema                      a record of a file -> a document
    tokens                      token ids end to end, document ends
    formats                     a file -> records, or tokens
    files                       a name of --dataset -> its files
    cache, registered           files that a run writes once: tokens, data sets of --import
    corpora                     a source as found: its files, and the kind of its first valid record
    tokenize, chat              documents -> token ids, the token cache
    packing                     token ids -> sequences
    permutation, mixture        sample number -> source and sequence
    eval_split                  what is not trained on
    stream                      files -> sequences while training
    training_data               the samples of a run
    eval_checks                 nothing that was trained on is evaluated
    reader                      corpus -> sequences
    loader                      samples -> batches of a rank
    header, prompts             what is printed about it; the texts that samples continue

`args` are flags as typed, `settings` resolved ones; a `flags.Flags` may be either. `doc_starts` are the positions of
documents' first tokens, `doc_ends` those after their last ones.
"""

from harness.data.corpora import Corpora, find, masks_documents, needs_tokenizer
from harness.data.eval_checks import evaluates_own_data
from harness.data.loader import Batches, eval_batches, mean_losses, training_batches
from harness.data.mixture import DataRecord, SequenceOrder, SourceSpec, describe_changes, read_data_record
from harness.data.opening import OpenedSources, load, open_sequences, open_sources, show_samples
from harness.data.packing import PackedDataset, SyntheticDataset, create_collate_fn
from harness.data.prompts import end_tokens, read_prompts, render_prompt
from harness.data.reader import CorpusReader
from harness.data.schema import Conversation
from harness.data.stream import Position
from harness.data.tokenize import serialize_tokenizer
from harness.data.training_data import Positions, TrainingData, mix
