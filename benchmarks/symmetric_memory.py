"""The program with symmetric memory for FSDP2's all-gathers, which no flag turns on before a GPU has measured it:

torchrun --nproc_per_node=4 benchmarks/symmetric_memory.py --model smollm3-3b --dataset synthetic --num-steps 30
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import train_fsdp
from harness import flags
from harness import model as models

finish_sharding = models.finish_sharding


def finish_with_symmetric_memory(model, mesh, accumulates: bool) -> None:
    models.use_symmetric_memory(model)
    finish_sharding(model, mesh, accumulates)


models.finish_sharding = finish_with_symmetric_memory
train_fsdp.main(flags.parse_args())
