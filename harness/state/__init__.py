"""State: checkpoints, their run's identity, and exports. Tensors are in shards; everything else is one dataclass of
counters in the manifest.

    TrainState                everything that must survive a restart; `advance` counts a step, `load` restores it
    Checkpoints               `save` publishes a complete checkpoint or nothing, `wait` waits for it
    find_checkpoint           the verified `Checkpoint` to resume, a path and a manifest; None for a fresh start
    find_recorded_data        a run's record of its data, for --show-samples
    resumes_same_run          True if a checkpoint belongs to the run in a folder; otherwise that is a new run
    describe_identity         facts that no flag has and that a resumed run must share
    check_resume              describes the changes that a resume allows; an error for any other
    check_data, check_same_weights    the same without training
    load_for_inference        loads a checkpoint without training, or the mean of a run's newest ones
    keep_global_batch         the batch of a run resumed on another number of ranks
    check_export, export      check and write --export; export_bytes is its size
    trained_on                the sources that weights were trained on

A metric that survives a restart is one line of `Counters` in train_state.py.
"""

from harness.state.exports import check_export, export, export_bytes, trained_on
from harness.state.find import check_finite, find_checkpoint, find_recorded_data, load_for_inference, resumes_same_run
from harness.state.identity import (
    check_data,
    check_resume,
    check_same_weights,
    count_eval_sequences,
    describe_identity,
    keep_global_batch,
)
from harness.state.store import Checkpoints
from harness.state.train_state import Checkpoint, TrainState
