"""The program with FSDP2's own copies on a rank that shards with nobody: what `SingleRankParameter` and `OneBuffer` of
harness/model/collectives.py save is the difference.

python benchmarks/without_aliases.py --model smollm3-3b --dataset synthetic --num-steps 20
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import train_fsdp
from harness import flags
from harness import model as models

models.alias_unsharded_params = lambda model, mesh, accumulates: None
train_fsdp.main(flags.parse_args())
