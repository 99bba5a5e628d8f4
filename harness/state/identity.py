"""What a resumed run must have in common with the run that saved its checkpoint."""

import dataclasses
import hashlib
import json

import torch.distributed as dist

from harness.base.errors import UserError
from harness.data.documents import vocabulary_of
from harness.flags.settings import Settings


def describe_identity(settings: Settings, config, tokenizer=None, train_set=None) -> dict:
    """What a resumed run must have in common with the run that saved the checkpoint; of an export only the model."""
    passing = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
    identity = {"model": {key: value for key, value in config.to_dict().items() if key not in passing}}
    if train_set is not None:
        identity |= {
            "tokenizer": tokenizer and hashlib.sha256(vocabulary_of(tokenizer).encode()).hexdigest(),
            "streaming": settings.streaming,
            "dataset": train_set.fingerprint(),
            "sequence_length": settings.sequence_length,
            "seed": settings.seed,
        } | getattr(train_set, "rules", {})
    return json.loads(json.dumps(identity, default=str))


# The flags that say what the tokens and the tokenizer are, of which a manifest has checksums.
HELD_OUT_BY = ("eval_interval", "eval_split")
SAID_BY = {
    "dataset": ("dataset", "dataset_config", "dataset_split", "text_field", "skip_bad_records", *HELD_OUT_BY),
    "tokenizer": ("tokenizer", "model", "dataset"),
}
SAID_BY |= {"held_out": SAID_BY["dataset"], "corpus": SAID_BY["dataset"]}  # corpus: of a stream, its files


def compare(settings: Settings, identity: dict, manifest: dict) -> str:
    """What changed since the checkpoint and may change, in words; a UserError names what makes it another run."""
    other = "a resumed run must have the same; to train on from these weights start a new run from an --export"
    defaults = dataclasses.asdict(Settings())  # of flags newer than it
    saved = defaults | manifest["flags"] | manifest
    for key, now in (identity | {"optimizer": settings.optimizer}).items():
        if key not in saved:  # newer than the checkpoint, which did not compare it
            continue
        before, flag = saved[key], f"--{key.replace('_', '-')}"
        if before != now:
            if isinstance(now, dict):
                field = next((name for name in before if name in now and before[name] != now[name]), None)
                if field is None:  # other versions of transformers know other fields
                    continue
                before, now, flag = before[field], now[field], f"{flag}: {field}"
            elif key in SAID_BY:  # these are checksums
                pairs = {name: ((defaults | manifest["flags"])[name], getattr(settings, name)) for name in SAID_BY[key]}
                if all(pairs.get("eval_interval", (0,))):  # what matters is whether documents were held out
                    del pairs["eval_interval"]
                name = next((name for name, (before, now) in pairs.items() if before != now), "")
                if not name:
                    if key == "tokenizer":
                        raise UserError(f"{flag}: its vocabulary is not what it was at the checkpoint; {other}")
                    raise UserError(f"--dataset: {settings.dataset} is not what it was at the checkpoint; {other}")
                flag, (before, now) = f"--{name.replace('_', '-')}", pairs[name]
            raise UserError(f"{flag} was {before} in the checkpoint and is {now} now; {other}")
    told = (
        "world_size num_steps batch_size gradient_accumulation_steps zero_stage dp_replicate_size precision fp8_recipe "
        "lr lr_scheduler warmup_steps weight_decay betas max_grad_norm document_mask"
    )
    now = json.loads(json.dumps(dataclasses.asdict(settings), default=str)) | {"world_size": dist.get_world_size()}
    changed = (key for key in told.split() if saved.get(key) != now[key])
    return ", ".join(f"{key.replace('_', ' ')} {saved[key]} -> {now[key]}" for key in changed)


def keep_global_batch(settings: Settings, manifest: dict) -> int:
    """The gradient accumulation with which this number of ranks has the run's global batch; a UserError where they
    cannot share it. Where the batch flags are not the checkpoint's, the user asks for another batch, and is told."""
    flags, size, world = manifest["flags"], settings.batch_size, dist.get_world_size()
    if (size, settings.given_accumulation) != (flags["batch_size"], flags["given_accumulation"]):
        return settings.gradient_accumulation_steps
    sequences = manifest["world_size"] * flags["batch_size"] * flags["gradient_accumulation_steps"]
    accumulation, left_over = divmod(sequences, world * size)
    if left_over:
        problem = f"{world} ranks cannot share the run's global batch of {sequences} sequences"
        raise UserError(f"--batch-size {size}: {problem}; choose another number of ranks, or another batch size")
    return accumulation
