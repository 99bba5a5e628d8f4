"""State: what a checkpoint holds, how all ranks save and load it, which run it belongs to, and exports. Tensors go to
shards, everything else is one dataclass of counters in the manifest.

    TrainState                everything that must survive a restart; `advance` counts a step, `load` restores it
    Checkpoints               saves it: `save` publishes a checkpoint or nothing, `finish` waits for it
    find_checkpoint           the `Checkpoint` to go on from, its path and manifest, checked; None for a fresh start
    find_recorded_data        what a run recorded of its data, for --show-samples
    resumes_same_run                   whether a checkpoint is of the run in a folder; else that is a new run
    describe_identity         what no flag says and a resumed run must have again
    check_resume              what changed and may change, in words; an error names what makes it another run
    check_data, check_same_weights, check_same_corpus    the same for what trains nothing
    load_for_inference              loads a checkpoint for that, or the mean of a run's newest ones
    keep_global_batch         the batch of a run that goes on with other ranks
    check_export, export      whether --export can be written, and writing it; export_bytes is its size
    trained_on                what weights were trained on, by their run's record and by the export they began with

A figure that survives a restart is one line of `Counters` in train_state.py.
"""

from harness.state.exports import check_export, export, export_bytes, trained_on
from harness.state.find import find_checkpoint, find_recorded_data, load_for_inference, refuse_broken, resumes_same_run
from harness.state.identity import (
    check_data,
    check_resume,
    check_same_corpus,
    check_same_weights,
    count_eval_windows,
    describe_identity,
    keep_global_batch,
)
from harness.state.store import Checkpoints
from harness.state.train_state import Checkpoint, TrainState

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "TrainState",
    "check_data",
    "check_export",
    "check_resume",
    "check_same_corpus",
    "check_same_weights",
    "count_eval_windows",
    "describe_identity",
    "export",
    "export_bytes",
    "find_checkpoint",
    "find_recorded_data",
    "keep_global_batch",
    "load_for_inference",
    "refuse_broken",
    "resumes_same_run",
    "trained_on",
]
