"""accelerate's own FSDP2 path: fp32 weights, bf16 compute, a layer a shard, torch.compile by region, fused AdamW."""

from common import Clock, RandomTokens, build_model, device, leave, parse_args, world_of_one

args = parse_args(__doc__)
world_of_one()

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

model = build_model(args)
clock = Clock(args, model)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    reshard_after_forward=False,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=list(model._no_split_modules),
)
dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if args.compile else None
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, dynamo_plugin=dynamo, cpu=device().type == "cpu")
if device().type == "cuda" and not accelerator.is_fsdp2:
    raise RuntimeError(f"accelerate chose {accelerator.distributed_type}, not FSDP2")  # on a CPU it has none
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
loader = torch.utils.data.DataLoader(
    RandomTokens(args, model.config.vocab_size), args.batch_size, num_workers=1, pin_memory=device().type == "cuda"
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    loss = model(**batch, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    clock.step(loss.detach(), distributed=str(accelerator.distributed_type), precision="fp32 weights, bf16 compute")
leave()
