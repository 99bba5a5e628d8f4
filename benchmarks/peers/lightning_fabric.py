"""Lightning Fabric with its FSDP2 strategy: fp32 weights, bf16 compute, torch.compile per layer, fused AdamW."""

from common import Clock, RandomTokens, build_model, device, leave, parse_args, world_of_one

args = parse_args(__doc__)
world_of_one()

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: torch.nn.Module, mesh) -> torch.nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy, reshard_after_forward=False)


model = build_model(args)
clock = Clock(args, model)
strategy = ModelParallelStrategy(parallelize, data_parallel_size=clock.world, tensor_parallel_size=1)
fabric = Fabric(accelerator=device().type, devices=clock.world, strategy=strategy, precision="32-true")
fabric.launch()
model = fabric.setup_module(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
optimizer = fabric.setup_optimizers(optimizer)
data = RandomTokens(args, model.config.vocab_size)
loader = torch.utils.data.DataLoader(data, args.batch_size, num_workers=1, pin_memory=device().type == "cuda")

for batch in fabric.setup_dataloaders(loader):
    loss = model(**batch, use_cache=False).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    clock.step(loss.detach(), precision="fp32 weights, bf16 compute")
leave()
