"""Identity: what a resumed run must share with its checkpoint, and what may change."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from harness import base, flags, job
from harness import data as corpora
from harness import model as models
from harness.state.train_state import Checkpoint

# Config fields that do not identify a model.
NOT_COMPARED = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache")
# Flags that choose the text. If the text changed, an error names the first of them that changed.
SOURCE_FLAGS = ("text_field", "skip_bad_records", "chat_template", "chat_loss", "eval_interval")  # of every source
DATA_FLAGS = ("dataset", "dataset_config", "dataset_split", *SOURCE_FLAGS, "eval_split")
BATCH_FLAGS = ("batch_size", "gradient_accumulation_steps")
ADVICE = "a resumed run must have the same; to train these weights further, start a new run from an --export"


def describe_identity(
    settings: flags.Settings,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    data: corpora.TrainingData,
) -> dict:
    """Return what a resumed run must share although no flag has it: the model's config, checksums of the tokenizer and
    of frozen weights, and the record of the data; also the identities of the eval data and of the files of --import,
    whose changes are reported."""
    vocabulary = None
    if tokenizer and not data.from_token_files:  # token files do not use the tokenizer
        vocabulary = hashlib.sha256(corpora.serialize_tokenizer(tokenizer).encode()).hexdigest()
    return {
        "model": as_json(config_fields(config)),
        "base": base_digest(settings, config),
        "tokenizer": vocabulary,
        "data": as_json(data.record.to_json()),
        "eval_data": data.eval_fingerprints,
        "imports": flags.describe_imports(),
    }


def base_digest(settings: flags.Settings, config: PretrainedConfig) -> str | None:
    """Return the checksum of the frozen weights below adapters; None without adapters. Each rank reads them: the others
    might not wait for a download by one."""
    if not settings.lora_rank:
        return None
    return base.call_on_all_ranks(lambda: models.weights_digest(models.find_source(settings.model), config))


def config_fields(config: PretrainedConfig) -> dict:
    return {key: value for key, value in config.to_dict().items() if key not in NOT_COMPARED}


def as_json(values: dict) -> dict:
    return json.loads(json.dumps(values, default=str))


def check_resume(
    settings: flags.Settings,
    config: PretrainedConfig,
    identity: dict,
    data: corpora.TrainingData,
    checkpoint: Checkpoint | None,
) -> str:
    """Describe the allowed changes since the checkpoint; "" for a fresh start. `identity` is from `describe_identity`.
    Every rank calls this.

    Raises:
        UserError: a change that makes it another run.
    """
    if checkpoint is None:
        return ""
    manifest = checkpoint.manifest
    before, now = manifest["flags"], as_json(dataclasses.asdict(settings))
    refuse_changed(settings, manifest, flags.flags_where("on_resume", "same"))
    check_same_model(config, manifest)
    check_same_base(settings, identity["base"], manifest)
    vocabulary = identity["tokenizer"]
    # None if all data are tokens: text may be added to such data, or removed
    if None not in (vocabulary, manifest["tokenizer"]) and vocabulary != manifest["tokenizer"]:
        refuse_changed(settings, manifest, ("tokenizer", "model", "dataset"))
        raise base.UserError(f"--tokenizer: its vocabulary is not the checkpoint's; {ADVICE}")
    changed = check_data(settings, data.record, manifest)
    both_evaluate = manifest["eval_data"] and identity["eval_data"]
    if both_evaluate and eval_identity(manifest) != eval_identity(identity | {"flags": now}):
        changed.append("other eval data, so eval losses do not compare with earlier ones")
    world_before, world = manifest["world_size"], dist.get_world_size()
    values: dict[str, tuple[Any, Any]] = {"world size": (world_before, world)}
    values["global batch"] = (global_batch(before, world_before), global_batch(now, world))
    reported = flags.flags_where("on_resume", "reported")
    values |= {name.replace("_", " "): (before[name], now[name]) for name in reported}
    values["imports"] = compare_imports(manifest)
    changed += [f"{name} {old} -> {new}" for name, (old, new) in values.items() if old != new]
    return ", ".join(changed)


def eval_identity(manifest: dict) -> str:
    """Identify the eval sequences of a checkpoint, independent of the names of their sources."""
    return json.dumps([*manifest["eval_data"].values(), manifest["flags"]["eval_sequences"]])


def compare_imports(manifest: dict) -> tuple[str, str]:
    """Describe the files of --import (at the checkpoint, now)."""
    return manifest["imports"] or "none", flags.describe_imports() or "none"


def check_same_model(config: PretrainedConfig, manifest: dict) -> None:
    """Raise UserError if the model is not the checkpoint's. Fields that one of two versions of transformers lacks are
    not compared."""
    now = as_json(config_fields(config))
    for name, value in manifest["model"].items():
        if name in now and now[name] != value:
            refuse(f"--model: {name}", value, now[name])


def check_same_weights(settings: flags.Settings, config: PretrainedConfig, manifest: dict | None) -> None:
    """Raise UserError if there is a checkpoint and its weights are of another model, or adapters for another base. Warn
    if the files of --import are others. Every rank calls this."""
    if manifest:
        before, now = compare_imports(manifest)
        if before != now:
            job.warn(f"--import: {before} at the checkpoint, {now} now")
        check_same_model(config, manifest)
        check_same_base(settings, base_digest(settings, config), manifest)


def check_same_base(settings: flags.Settings, digest: str | None, manifest: dict) -> None:
    """Raise UserError if the checkpoint's adapters differ, or are for weights with another checksum than `digest`."""
    refuse_changed(settings, manifest, ("lora_rank", "lora_alpha", "lora_targets"))
    if digest != manifest["base"]:
        problem = "the checkpoint's adapters were trained for other weights"
        raise base.UserError(f"--model {settings.model}: {problem}; give the same model")


def check_data(settings: flags.Settings, now: corpora.DataRecord, manifest: dict) -> list[str]:
    """Describe the changes of the mixture. Raises UserError for a source whose data are not those of the checkpoint, or
    of the time when it was removed."""
    before = corpora.read_data_record(manifest)
    for name, field in differences(before.sources, now):
        if field == "end of text":
            problem = f"its end-of-text token, by which the documents of {name} end, is not the checkpoint's"
            raise base.UserError(f"--tokenizer: {problem}; {ADVICE}")
        if len(now.sources) == 1:
            refuse_changed(settings, manifest, DATA_FLAGS)
            raise base.UserError(f"--dataset: {settings.dataset} is not what it was at the checkpoint; {ADVICE}")
        refuse_changed(settings, manifest, SOURCE_FLAGS)
        advice = "give the same data, or give the new data under another name"
        raise base.UserError(f"--dataset: the source {name} is not what it was at the checkpoint ({field}); {advice}")
    return corpora.describe_changes(before, now, manifest["samples"])


def differences(before: dict[str, corpora.SourceSpec], now: corpora.DataRecord) -> Iterator[tuple[str, str]]:
    """Yield (source, field of its record) for each field that changed. A field that one of the records lacks decides
    nothing there."""
    for name, spec in now.sources.items():
        for key, value in before.get(name, {}).items():
            if spec.get(key, value) != value:
                yield name, key.replace("_", " ")


def refuse_changed(settings: flags.Settings, manifest: dict, names: Iterable[str]) -> None:
    """Raise UserError for the first of these flags that changed."""
    now = as_json(dataclasses.asdict(settings))
    for name in names:
        before, after = manifest["flags"][name], now[name]
        both_evaluate = name == "eval_interval" and before and after
        if before == after or both_evaluate:
            continue
        if name == "eval_interval" and before:
            problem = "without the flag the run would train on its eval split"
            raise base.UserError(f"--eval-interval was {before} in the checkpoint: {problem}; give it again")
        refuse(f"--{name.replace('_', '-')}", before, after)


def refuse(flag: str, before: Any, now: Any) -> None:
    raise base.UserError(f"{flag} was {before} in the checkpoint and is {now} now; {ADVICE}")


# ---- The batch -------------------------------------------------------------------------------------------------------


def global_batch(resolved: dict, world_size: int) -> int:
    """Return the sequences per step, from resolved flags."""
    groups = world_size // resolved["context_parallel"]
    return groups * resolved["batch_size"] * resolved["gradient_accumulation_steps"]


def typed_batch(given: Mapping[str, Any]) -> tuple[int | str, int]:
    """Return --batch-size, which may be "auto", and --gradient-accumulation-steps of typed flags, with the defaults of
    --demo."""
    settings = flags.complete({name: given[name] for name in ("demo", *BATCH_FLAGS) if name in given})
    return settings.batch_size, settings.gradient_accumulation_steps


def keep_global_batch(settings: flags.Settings, manifest: dict) -> flags.Settings:
    """Choose batch size and accumulation so that the global batch stays that of the checkpoint's run. If other batch
    flags are typed than in that run, they are used as they are, and `check_resume` reports the change. The batch size
    is the largest, up to the typed one, that divides the shares of the groups of ranks.

    Raises:
        UserError: these ranks cannot share the global batch.
    """
    before, given, groups = manifest["flags"], manifest["given"], settings.groups(dist.get_world_size())
    explicit = settings.explicit
    if explicit.keys() & {*BATCH_FLAGS}:
        if typed_batch(explicit) != typed_batch(given):
            return settings
        size = settings.batch_size  # as typed; for "auto" what fits here
    else:
        given_size, _ = typed_batch(given)
        size = given_size if isinstance(given_size, int) else before["batch_size"]
        explicit = {**explicit, **{name: given[name] for name in BATCH_FLAGS if name in given}}
    sequences = global_batch(before, manifest["world_size"])
    fitting = [divisor for divisor in range(1, size + 1) if sequences % (groups * divisor) == 0]
    if not fitting:
        batch = base.counted(sequences, "sequence")
        problem = f"{base.counted(dist.get_world_size(), 'rank')} cannot share the run's global batch of {batch}"
        possible = [number for number in range(1, sequences + 1) if sequences % number == 0]
        worlds = ", ".join(str(number * settings.context_parallel) for number in possible)
        advice = f"use another number of ranks: {worlds}, or give another --batch-size N for one of {groups} x N"
        raise base.UserError(f"--batch-size {size}: {problem}; {advice}")
    accumulation = sequences // groups // fitting[-1]
    return dataclasses.replace(
        settings, explicit=explicit, batch_size=fitting[-1], gradient_accumulation_steps=accumulation
    )


def count_eval_sequences(settings: flags.Settings, manifest: dict | None) -> int:
    """Eval sequences that --eval-steps are on these ranks, 0 without it; a run that resumes with the same --eval-steps
    keeps their number."""
    if not settings.eval_steps or settings.eval_sequences:  # those of a checkpoint that is evaluated are known
        return settings.eval_sequences
    before = manifest["flags"] if manifest else {}
    if before.get("eval_steps") == settings.eval_steps:
        return before["eval_sequences"]
    return settings.eval_steps * settings.batch_size * settings.groups(dist.get_world_size())
