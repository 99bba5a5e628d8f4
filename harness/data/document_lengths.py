"""Document lengths: how long the documents of a batch are, as far as they lie in its windows. Called where a batch is
made or handed on, while it is on the host."""

import numpy as np


def squared_lengths(position_ids, real=None) -> int:
    """The sum of the squares of the documents' lengths in tokens, for `PerformanceTracker.note_documents`.

    Args:
        position_ids: integers of shape (batch, seq_len), of numpy or on the CPU. Each 0 begins a document, and so does
            each row: of a document that began in an earlier window its part in this one counts.
        real: booleans of the same shape, False for padding, which counts in no length; by default all are real.
    """
    positions = np.asarray(position_ids)
    begins = positions == 0
    begins[:, 0] = True
    starts = np.flatnonzero(begins)  # rows end to end
    if real is None:
        lengths = np.diff(starts, append=positions.size)
    else:
        lengths = np.add.reduceat(np.asarray(real).ravel().astype(np.int64), starts)
    return int(np.square(lengths).sum())
