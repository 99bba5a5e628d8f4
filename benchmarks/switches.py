"""train_fsdp.py with a switch of FSDP2 that has no flag, as no GPU has measured it yet.

    torchrun --nproc_per_node=4 benchmarks/switches.py symmetric-memory --model smollm3-3b --dataset synthetic
    torchrun --nproc_per_node=4 benchmarks/switches.py own-reduce-scatter --model smollm3-3b --dataset synthetic

Compare with the same flags given to train_fsdp.py. Both are for shard groups of more than one rank.

symmetric-memory: buffers of all-gathers in symmetric memory (NCCL alone), and reductions as sums, which is how NCCL's
kernels for such memory want them, so losses are rounded otherwise. torch 2.11 has NCCL's own memory in its place.
Elsewhere it gave Llama-3 8B +2.3 % (torchtitan 3105, GB200).

own-reduce-scatter: reduce-scatters have a communicator of their own. All-gathers and reduce-scatters of a backward run
on two streams, but one communicator takes one after the other. Costs the buffers of a second communicator.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import train_fsdp
from harness.base import UserError
from harness.flags import parse_args
from harness.model import collectives


class InItsOwnGroup(collectives.DefaultReduceScatter):
    """FSDP2's reduce-scatter, over the same ranks in another process group than the all-gathers'."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        return super().__call__(output_tensor, input_tensor, self.group, op, async_op)


def symmetric_memory(model: nn.Module, mesh) -> None:
    if mesh.device_type != "cuda":
        raise UserError("symmetric-memory: needs GPUs")
    for module in model.modules():
        if isinstance(module, FSDPModule) and hasattr(module, "set_symm_mem_for_comm"):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
        elif isinstance(module, FSDPModule):  # torch 2.11
            module.set_allocate_memory_from_process_group_for_comm(True)


def own_reduce_scatter(model: nn.Module, mesh) -> None:
    ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
    own = dist.new_group(ranks, use_local_synchronization=True)
    for module in collectives.sharded_modules(model):
        module.set_custom_reduce_scatter(InItsOwnGroup(own))


SWITCHES = {"symmetric-memory": symmetric_memory, "own-reduce-scatter": own_reduce_scatter}


def main(switch: str, *argv: str) -> None:
    build = train_fsdp.build_model

    def build_and_switch(settings, config, mesh, **options) -> nn.Module:
        model = build(settings, config, mesh, **options)
        if mesh["shard"].size() == 1:
            raise UserError(f"{switch}: a rank that shards with nobody gathers nothing; take more ranks")
        SWITCHES[switch](model, mesh)
        return model

    train_fsdp.build_model = build_and_switch
    train_fsdp.main(parse_args([*argv]))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SWITCHES:
        main(*sys.argv[1:])
    else:
        sys.exit(f"usage: switches.py {{{','.join(SWITCHES)}}} FLAGS OF train_fsdp.py")
