"""The program without one of its changes, which its own run then shows the gain of.

    python benchmarks/variants.py torchs-adamw --model smollm3-3b --dataset synthetic --num-steps 20

torchs-adamw    torch's fused kernel for all tensors (harness/model/optimizers/adamw.py)
fsdp2-copies    FSDP2's copies of the parameters and gradients of a single rank (harness/model/collectives.py)
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import before_torch

variant, *words = sys.argv[1:]
args = before_torch.begin(words)

import train_fsdp
from harness import model as models
from harness.model.optimizers import adamw

if variant == "torchs-adamw":
    adamw.compiles_updates = lambda groups, settings: False
elif variant == "fsdp2-copies":
    models.avoid_copies_on_one_rank = lambda settings, model, mesh: None
else:
    sys.exit(f"no such variant: {variant}")
train_fsdp.main(args)
