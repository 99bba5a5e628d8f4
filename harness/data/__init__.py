"""Data: from files, buckets and the hub to the microbatches of a rank.

    corpora = data.find(settings)                     one listing, by rank 0
    train_set = data.load(settings, corpora, tokenizer, config, manifest)
    for batch in data.training_batches(settings, train_set, state, device): ...

Each name of the list has a docstring in its file.
"""

from harness.base import doors

__getattr__, __all__ = doors.open_door(
    __name__,
    {
        "corpora": "find needs_tokenizer mask_conversations open_windows Reading",
        "sources": "load evaluates_own_data show_samples story_beginning",
        "batches": "mix training_batches held_out_batches",
        "mixture": "DataRecord WindowOrder read_record renamed describe_changes",
        "encode": "vocabulary_of",
        "windows": "PackedDataset SyntheticDataset create_collate_fn",
    },
)
