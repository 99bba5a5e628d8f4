"""Lightning Fabric with its FSDP2 strategy, torch.compile per layer, fused AdamW; with --strategy ddp its DDP."""

from common import Clock, build_model, build_optimizers, build_windows, device, leave, make_parser, world_of_one

parser = make_parser(__doc__)
parser.add_argument("--strategy", choices=["fsdp2", "ddp"], default="fsdp2")
args = parser.parse_args()
world_of_one()

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: torch.nn.Module, mesh) -> torch.nn.Module:
    low = torch.bfloat16 if args.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy, reshard_after_forward=False)


model = build_model(args)
cuda = device().type == "cuda"
clock = Clock(args, model)
precision = "32-true"
if args.strategy == "fsdp2":
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=clock.world, tensor_parallel_size=1)
else:
    strategy = DDPStrategy() if clock.world > 1 else "auto"
    precision = "bf16-mixed" if args.precision == "bf16" else "32-true"
fabric = Fabric(accelerator="cuda" if cuda else "cpu", devices=clock.world, strategy=strategy, precision=precision)
fabric.launch()
model = fabric.setup_module(model)
optimizers = [fabric.setup_optimizers(optimizer) for optimizer in build_optimizers(args, model)]
data = build_windows(args, model.config.vocab_size)
loader = torch.utils.data.DataLoader(data, args.batch_size, num_workers=int(cuda), pin_memory=cuda)

for batch in fabric.setup_dataloaders(loader):
    loss = model(**batch, use_cache=False).loss
    fabric.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fabric.clip_gradients clips one optimizer's gradients
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    clock.step(loss.detach(), precision=args.precision)
leave()
