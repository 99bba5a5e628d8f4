"""Data: from files, buckets and the hub to the microbatches of a rank.

    corpora = data.find(settings)                     one listing, by rank 0
    train_set = data.load(settings, corpora, tokenizer, config, manifest)
    for batch in data.training_batches(settings, train_set, state, device): ...

`needs_tokenizer` and `mask_conversations` answer what a run must know before it loads. `held_out_batches` are those of
an evaluation, `evaluates_own_data` says whether one reads what its run read, `show_samples` prints what a step trains
on. `open_windows` with a `Reading` is the library's way in (`utils.get_dataset`). Of a checkpoint `read_record` reads
the `DataRecord`, `renamed` and `describe_changes` compare it, and `vocabulary_of` tells tokenizers apart. `mix`,
`PackedDataset`, `SyntheticDataset` and `create_collate_fn` are for tests and comparisons.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "corpora": "find needs_tokenizer mask_conversations open_windows Reading",
        "sources": "load evaluates_own_data show_samples",
        "batches": "mix training_batches held_out_batches",
        "mixture": "DataRecord read_record renamed describe_changes",
        "encode": "vocabulary_of",
        "windows": "PackedDataset SyntheticDataset create_collate_fn",
    },
)
