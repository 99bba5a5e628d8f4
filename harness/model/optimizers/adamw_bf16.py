"""AdamW with moments in bf16. torch's kernel does not take moments of another dtype than the parameters', so the update
is Python, compiled with --compile."""

import torch

from harness import flags
from harness.model.optimization import OptimizerKind
from harness.model.optimizers.adamw import AdamW, update


def build(groups: list[dict], settings: flags.Settings) -> AdamW:
    one = torch.compile(update) if settings.compile else update
    return AdamW(groups, torch.bfloat16, one, lr=settings.lr, betas=settings.betas)


OPTIMIZER = OptimizerKind(build)
