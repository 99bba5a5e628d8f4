"""Model: from a config to a model that trains: tokenizer, attention, weights, float8, FLOPs, the fused loss,
optimizers and the collectives of FSDP2."""
