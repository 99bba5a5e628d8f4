"""A bare loop over `fully_shard`: a shard per layer, fused AdamW, torch's clipping, nothing else."""

from common import Clock, build_model, build_optimizers, build_windows, device, leave, parse_args, world_of_one

args = parse_args(__doc__)
world_of_one()

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

cuda = device().type == "cuda"
dist.init_process_group("nccl" if cuda else "gloo")
model = build_model(args)
clock = Clock(args, model)
low = torch.bfloat16 if args.precision == "bf16" else None
policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
for layer in model.model.layers:
    if args.compile:
        layer.compile()
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy, reshard_after_forward=False)
optimizers = build_optimizers(args, model)
data = build_windows(args, model.config.vocab_size)
sampler = None
if clock.world > 1:
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, args.batch_size, sampler=sampler, num_workers=int(cuda), pin_memory=cuda)

for batch in loader:
    batch = {name: tensor.to(device(), non_blocking=True) for name, tensor in batch.items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    clock.step(loss.detach(), precision=args.precision)
leave()
