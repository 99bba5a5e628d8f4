"""A minimal training loop on one rank, the baseline of the harness: fp32, eager, no sharding, tracking or evaluation.
--precision and --compile have no effect."""

import json
import time

import torch
import torch.nn.functional as F
from common import Corpus, build_model, build_optimizers, parse_args

args = parse_args(__doc__)
model = build_model(args)
optimizers = build_optimizers(args, model)

for step, batch in enumerate(torch.utils.data.DataLoader(Corpus(args), args.batch_size)):
    if step == args.perf_warmup_steps:
        start = time.perf_counter()
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step == 0:
        print(f"step 1/{args.num_steps}  loss {loss.item():.4f}", flush=True)

steps_per_sec = (args.num_steps - args.perf_warmup_steps) / (time.perf_counter() - start)
print(json.dumps({"steps_per_sec": steps_per_sec, "loss": loss.item()}))
