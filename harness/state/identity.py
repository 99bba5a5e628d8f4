"""What a resumed run must have in common with the run that saved its checkpoint, and what may change."""

import dataclasses
import hashlib
import json

import torch.distributed as dist

from harness.base.errors import UserError
from harness.base.text import counted
from harness.data import DataRecord, describe_changes, read_record, renamed, vocabulary_of
from harness.flags.commands import as_flags, given
from harness.flags.settings import Settings

# Fields of a model's config that do not make it another model.
NOT_COMPARED = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
# Some fields of the identity are checksums, which tell a user nothing: the flags that decide them, of which an error
# names the first that changed.
DATA_FLAGS = (
    "dataset",
    "dataset_config",
    "dataset_split",
    "text_field",
    "skip_bad_records",
    "eval_interval",
    "eval_split",
)
CHECKSUMS = {
    "dataset": DATA_FLAGS,
    "held_out": DATA_FLAGS,
    "corpus": DATA_FLAGS,  # of a stream, its files
    "tokenizer": ("tokenizer", "model", "dataset"),
}
# What may change and is reported, in this order.
REPORTED = (
    "world_size",
    "num_steps",
    "batch_size",
    "gradient_accumulation_steps",
    "zero_stage",
    "dp_replicate_size",
    "precision",
    "fp8_recipe",
    "lr",
    "adamw_lr",
    "muon_iteration",
    "muon_scale",
    "momentum_dtype",
    "lr_scheduler",
    "warmup_steps",
    "decay_steps",
    "decay_shape",
    "weight_decay",
    "betas",
    "max_grad_norm",
    "ema",
    "document_mask",
)
ADVICE = "a resumed run must have the same; to train on from these weights start a new run from an --export"


def describe_identity(settings: Settings, config, tokenizer=None, data=None) -> dict:
    """What a resumed run must have in common with the run that saved the checkpoint: each field is written into the
    manifest and compared by `check_resume_compatible`. Without data, as for an export, only the model."""
    identity = {"model": {key: value for key, value in config.to_dict().items() if key not in NOT_COMPARED}}
    if data is not None:
        if data.is_mapped:  # no token of these is the tokenizer's
            tokenizer = None
        identity |= {
            "tokenizer": tokenizer and hashlib.sha256(vocabulary_of(tokenizer).encode()).hexdigest(),
            "streaming": settings.streaming,
            "sequence_length": settings.sequence_length,
            "seed": settings.seed,
        }
        identity |= data.identity()
    return json.loads(json.dumps(identity, default=str))


def check_resume_compatible(settings: Settings, identity: dict, manifest: dict) -> str:
    """What changed since the checkpoint and may change, in words; a UserError names what makes it another run."""
    saved_flags = dataclasses.asdict(Settings()) | manifest["flags"]  # the default of a flag newer than the checkpoint
    saved_flags["document_mask"] = bool(saved_flags["document_mask"])  # None, where a checkpoint is older than the flag
    saved = saved_flags | manifest
    compared = identity | {"optimizer": settings.optimizer}
    changed = []
    if "data" in compared:
        before, after = read_record(manifest), read_record(compared)
        if len(before.sources) > 1 or len(after.sources) > 1:
            check_sources(before, after)
            for key in ("dataset", "held_out", "ids_first", "corpus"):  # those of one source
                compared.pop(key, None)
        else:
            before = renamed(before, next(iter(after.sources)))
        changed = describe_changes(before, after, manifest["samples"])
        del compared["data"]
    for key, now in compared.items():
        if key not in saved or saved[key] == now:  # a field newer than the checkpoint is not compared
            continue
        if key == "tokenizer" and "data" in manifest and None in (saved[key], now):
            continue  # token files alone have none: a text was added, or the last one removed
        flag = f"--{key.replace('_', '-')}"
        if isinstance(now, dict):
            refuse_changed_field(flag, saved[key], now)
        elif key in CHECKSUMS:
            refuse_changed_checksum(key, settings, saved_flags)
        else:
            refuse(flag, saved[key], now)
    flags_now = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    now = flags_now | {"world_size": dist.get_world_size()}
    for key in REPORTED:
        if saved.get(key) != now[key]:
            changed.append(f"{key.replace('_', ' ')} {saved[key]} -> {now[key]}")
            if key == "batch_size" and global_batch(saved) == global_batch(now):
                changed[-1] += " (keeps the global batch)"
            if key == "ema" and not saved[key]:
                changed[-1] += " (the average begins as a copy of the loaded weights)"
            if key == "ema" and not now[key]:
                changed[-1] += " (the average is dropped)"
    return ", ".join(changed)


def check_has_average(settings: Settings, manifest: dict | None) -> None:
    """Raises a UserError where --ema asks for the average of weights that are not trained, but loaded from what holds
    none: a checkpoint without it, or no checkpoint."""
    if settings.ema and (manifest is None or not manifest["flags"].get("ema")):
        where = "--num-steps 0 trains nothing" if manifest is None else f"{settings.resume} holds none"
        raise UserError(f"--ema {settings.ema:g}: there is no average of the weights, {where}")


def check_same_corpus(settings: Settings, record: DataRecord, manifest: dict) -> None:
    """Raises a UserError where the corpus of a run's own evaluation is not what the run read, so that what it held out
    cannot be told."""
    before = read_record(manifest)
    if len(before.sources) == len(record.sources) == 1:
        before = renamed(before, next(iter(record.sources)))
    for name, rules in record.sources.items():
        compared = dict(before.sources.get(name, {"dataset": None}))
        if "corpus" in rules and settings.sequence_length != manifest["flags"]["sequence_length"]:
            compared.pop("dataset", None)  # of a stream its first window, whose length is another
        for key, value in compared.items():
            if rules.get(key) != value:
                problem = f"{name} is not what it was at the checkpoint ({key.replace('_', ' ')})"
                advice = "what the run held out cannot be told; give it as it was, or what the run did not train on"
                raise UserError(f"--dataset: {problem}: {advice}")


def check_sources(before: DataRecord, now: DataRecord) -> None:
    """Raises a UserError for a source that is no longer what it was at the checkpoint, or when it was removed."""
    known = before.removed | before.sources
    for name, rules in now.sources.items():
        for key, value in known.get(name, {}).items():
            if rules.get(key) != value:
                problem = f"the source {name} is not what it was at the checkpoint ({key.replace('_', ' ')})"
                advice = "give it as it was, or under another name as a source of its own"
                raise UserError(f"--dataset: {problem}; {advice}")


def refuse(flag: str, before, now) -> None:
    raise UserError(f"{flag} was {before} in the checkpoint and is {now} now; {ADVICE}")


def refuse_changed_field(flag: str, before: dict, now: dict) -> None:
    """Raises a UserError for the first field that both have and that differs. Other versions of transformers have
    other fields."""
    for name, value in before.items():
        if name in now and now[name] != value:
            refuse(f"{flag}: {name}", value, now[name])


def refuse_changed_checksum(key: str, settings: Settings, saved_flags: dict) -> None:
    """Raises a UserError for the flag that explains why a checksum differs, or says that the content has changed."""
    for name in CHECKSUMS[key]:
        before, now = saved_flags[name], getattr(settings, name)
        if name == "eval_interval" and before and now:  # it matters only whether documents were held out
            continue
        if before != now:
            refuse(f"--{name.replace('_', '-')}", before, now)
    if key == "tokenizer":
        raise UserError(f"--tokenizer: its vocabulary is not what it was at the checkpoint; {ADVICE}")
    raise UserError(f"--dataset: {settings.dataset} is not what it was at the checkpoint; {ADVICE}")


def global_batch(flags: dict) -> int:
    """Sequences of a step, of resolved flags with their `world_size`."""
    return flags["world_size"] * flags["batch_size"] * flags["gradient_accumulation_steps"]


def keep_global_batch(settings: Settings, manifest: dict) -> Settings:
    """The settings with the batch of a run that goes on from the checkpoint of `manifest`: its global batch, where the
    batch flags are those of that run or none is given. Then the accumulation may become another, and the batch size
    where the command line does not give it. Other batch flags ask for another batch, which `check_resume_compatible`
    reports.

    Raises:
        UserError: these ranks cannot share the global batch, or not at the batch size that was given.
    """
    flags, world = manifest["flags"], dist.get_world_size()
    size, accumulation = flags["batch_size"], flags["given_accumulation"]
    is_given = bool(given(settings.argv) & {"batch_size", "gradient_accumulation_steps"})
    if is_given and (settings.batch_size, settings.given_accumulation) != (size, accumulation):
        return settings
    sequences = global_batch(flags | {"world_size": manifest["world_size"]})
    if sequences % world:
        worlds = [ranks for ranks in range(1, sequences + 1) if sequences % ranks == 0]
        nearest = sorted(sorted(worlds, key=lambda ranks: abs(ranks - world))[:4])
        problem = f"{counted(world, 'rank')} cannot share the run's global batch of {counted(sequences, 'sequence')}"
        advice = f"use another number of ranks, such as {', '.join(map(str, nearest))}"
        other = f"another --batch-size N for a global batch of {world} x N"
        raise UserError(f"--batch-size {size}: {problem}; {advice}, or give {other}")
    of_rank = sequences // world
    fitting = max(divisor for divisor in range(1, size + 1) if of_rank % divisor == 0)
    if is_given and fitting != size and not settings.config:  # a file may be the run's own config.json
        asked = world * size * accumulation
        keeping = {"batch_size": fitting}
        if of_rank // fitting != accumulation:
            keeping["gradient_accumulation_steps"] = of_rank // fitting
        factor = min(factor for factor in range(2, size + 1) if size % factor == 0)
        asking = {"batch_size": size // factor, "gradient_accumulation_steps": accumulation * factor}
        problem = f"with {world} ranks a global batch of {counted(asked, 'sequence')}, and the run has {sequences}"
        advice = f"give {as_flags(keeping)} to keep the run's, or {as_flags(asking)} for one of {asked}"
        raise UserError(f"--batch-size {size}: {problem}; {advice}")
    return dataclasses.replace(settings, batch_size=fitting, gradient_accumulation_steps=of_rank // fitting)
