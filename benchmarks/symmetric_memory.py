"""The program with symmetric memory for FSDP2's all-gathers, which NCCL's newer kernels read across GPUs. No flag
turns it on before a GPU has measured it. Reductions are sums, as these kernels want them; that rounds losses otherwise:

torchrun --nproc_per_node=4 benchmarks/symmetric_memory.py --model smollm3-3b --dataset synthetic --num-steps 30
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import train_fsdp
from harness import flags
from harness import model as models

make_replicas_equal = models.make_replicas_equal  # the last that is done to a model that is sharded


def use_symmetric_memory(model, mesh) -> None:
    for module in models.sharded_modules(model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_symm_mem_for_comm()
    make_replicas_equal(model, mesh)


models.make_replicas_equal = use_symmetric_memory
train_fsdp.main(flags.parse_args())
