"""AdamW with moments in bf16. A row of --optimizer; the update is adamw.py's."""

from harness.model.optimization import OptimizerKind
from harness.model.optimizers.adamw import build_with_moments_in_bf16

OPTIMIZER = OptimizerKind(build_with_moments_in_bf16)
