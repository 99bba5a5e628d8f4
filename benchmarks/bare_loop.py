"""A minimal training loop on the same model and sequences, as the baseline for the harness.

    python benchmarks/bare_loop.py --model assets/demo --tokens tokens.bin --num-steps 60

No sharding, tracking or evaluation; prints one JSON object. Weights in the folder are the initial ones. Sequences have
train_fsdp.py's order (seed 42), weight decay and clipping are the same, so the losses are equal.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from harness import data

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="assets/demo")
parser.add_argument("--tokens", required=True, help="raw uint16 token ids")
parser.add_argument("--sequence-length", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-steps", type=int, default=60)
parser.add_argument("--perf-warmup-steps", "--warmup-steps", type=int, default=10, help="steps that are not timed")
parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for matrices in the layers")
parser.add_argument("--compile", action="store_true", help="the whole model")
args = parser.parse_args()

torch.manual_seed(42)
config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
if list(pathlib.Path(args.model).glob("*.safetensors")):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, trust_remote_code=False).train()
else:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
if args.compile:
    model.compile()
vectors = [p for p in model.parameters() if p.dim() == 1]
matrices = [p for p in model.parameters() if p.dim() > 1]
optimizers = []
if args.optimizer == "muon":
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." not in name]
    in_layers = [p for name, p in model.named_parameters() if p.dim() > 1 and ".layers." in name]
    optimizers.append(torch.optim.Muon(in_layers, lr=3e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizers.append(torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True))
tokens = np.memmap(args.tokens, dtype=np.uint16, mode="r")
windows = (len(tokens) - 1) // args.sequence_length
order = data.SequenceOrder(windows, seed=42)

for step in range(args.num_steps):
    if step == args.perf_warmup_steps:
        start = time.perf_counter()
    rows = map(order.sequence_at, range(step * args.batch_size, (step + 1) * args.batch_size))
    batch = [tokens[row * args.sequence_length : (row + 1) * args.sequence_length + 1] for row in rows]
    batch = torch.from_numpy(np.stack(batch).astype(np.int64))
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step == 0:
        print(f"step 1/{args.num_steps}  loss {loss.item():.4f}", flush=True)

seconds = time.perf_counter() - start
steps_per_sec = (args.num_steps - args.perf_warmup_steps) / seconds
print(json.dumps({"steps_per_sec": steps_per_sec, "loss": loss.item()}))
