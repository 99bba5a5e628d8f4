"""accelerate's FSDP2: fp32 weights, a shard per layer, torch.compile by region, fused AdamW. On a CPU its DDP, as it
has no FSDP2 there."""

from common import Clock, build_model, build_optimizers, build_windows, device, leave, parse_args, world_of_one

args = parse_args(__doc__)
world_of_one()

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

model = build_model(args)
clock = Clock(args, model)
cuda = device().type == "cuda"
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    reshard_after_forward=False,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=list(model._no_split_modules),
)
dynamo = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if args.compile else None
precision = "bf16" if args.precision == "bf16" else "no"
accelerator = Accelerator(
    mixed_precision=precision, fsdp_plugin=plugin if cuda else None, dynamo_plugin=dynamo, cpu=not cuda
)
if cuda and not accelerator.is_fsdp2:
    raise RuntimeError(f"accelerate chose {accelerator.distributed_type}, not FSDP2")
optimizers = build_optimizers(args, model)
loader = torch.utils.data.DataLoader(
    build_windows(args, model.config.vocab_size), args.batch_size, num_workers=int(cuda), pin_memory=cuda
)
model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)

for batch in loader:
    loss = model(**batch, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    clock.step(loss.detach(), distributed=str(accelerator.distributed_type), precision=args.precision)
leave()
