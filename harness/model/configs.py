"""Configs: presets, folders and hub ids, and the families that can be trained."""

import inspect
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import transformers
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig

from harness import base, flags

NAME_BASE = f"set base_model_name_or_path in its {base.ADAPTER_CONFIG} to the folder or hub id of the model"


class Source(NamedTuple):
    """The location of a model's files: local paths or hub ids."""

    config: str
    weights: str  # and the tokenizer
    revision: str | None = None  # of a hub id; None is the newest

    def __str__(self) -> str:
        return f"{self.weights} at revision {self.revision}" if self.revision else self.weights


def find_source(model: str) -> Source:
    """Find the files of a preset, a registered model type (none), a local folder, a hub id, or the base of a folder of
    adapters."""
    if preset := flags.PRESETS.get(model):
        return Source(str(preset), json.loads(preset.read_text()).get("_name_or_path", str(preset.parent)))
    if model in flags.model_types():
        return Source(model, model)
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        if (path / "metrics.jsonl").is_file() or (path / base.MANIFEST).is_file():
            advice = f"--num-steps 0 --resume {model} --export DIR writes its model to a folder for --model"
            raise base.UserError(f"--model {model}: a folder of a run, not of a model; {advice}")
        if not (path / "config.json").is_file():
            if flags.adapter_folder(model):
                return find_base(model)
            raise base.UserError(f"--model {model}: the folder has no config.json")
        return Source(str(path), str(path))
    if path.exists() or not flags.may_be_on_the_hub(model):
        raise base.UserError(f"--model {model}: no such folder")
    return Source(model, model)


def find_base(adapters: str) -> Source:
    """`find_source` of the base of a folder of adapters; a hub id with the revision that the folder names, as peft's
    AutoPeftModelForCausalLM loads it."""
    adapter_config = flags.read_adapter_config(adapters)
    model = adapter_config.get("base_model_name_or_path")
    if not model or flags.adapter_folder(model):
        raise base.UserError(
            f"--model {adapters}: adapters, which do not name the model that they are for; {NAME_BASE}"
        )
    try:
        source = find_source(model)
    except base.UserError as error:
        problem = f"adapters for {model}, which is not there ({error})"
        raise base.UserError(f"--model {adapters}: {problem}; {NAME_BASE}") from error
    if os.path.isdir(source.weights):
        return source
    return source._replace(revision=adapter_config.get("revision"))


def load_config(model: str) -> PretrainedConfig:
    """The config of a preset, a local folder, a hub id, or a registered model type, whose config has its defaults."""
    source, is_type = find_source(model), model in flags.model_types()
    try:
        if is_type:
            config = AutoConfig.for_model(model)
        else:
            base.set_hub_offline_without_network(source.config)
            config = AutoConfig.from_pretrained(source.config, revision=source.revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        refuse_foreign_code(f"--model {model}", error)
        nowhere = f"not a preset ({', '.join(flags.PRESETS)}), not a local folder, and not available from the hub"
        if flags.adapter_folder(model):
            nowhere = f"adapters for {source}, which is no folder and not available from the hub; {NAME_BASE}"
        problem = "its config.json cannot be used" if is_type or os.path.exists(source.config) else nowhere
        if "does not recognize this architecture" in str(error):
            problem += "; --import FILE.py registers a type of your own"
        raise base.UserError(f"--model {model}: {problem} ({base.first_line(error)})") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        problem = f"{config.model_type} is no causal language model of transformers, and none is registered for it"
        raise base.UserError(f"--model {model}: {problem}")
    if problem := find_impossible_size(config.get_text_config()):
        raise base.UserError(f"--model {model}: its config.json cannot be used ({problem})")
    if problem := find_training_obstacle(config):
        raise base.UserError(f"--model {model}: {config.model_type} cannot be trained here: {problem}")
    config.use_cache = False
    return config


def find_impossible_size(config: PretrainedConfig) -> str:
    """A size in a config that no model can have although transformers builds one, or one that is missing; empty if all
    sizes are possible."""
    for name in ("vocab_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            return f"it has no {name}"
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            return f"{name} is {value}"
    heads, shared = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        return f"num_key_value_heads is {shared}, which does not divide {heads} attention heads"
    return ""


def text_config(model: Any) -> Any:
    """The config of a model's text part. Untyped, as torch types all attributes of modules as tensors or modules."""
    return model.config.get_text_config()


def attends_by_positions(family: Any, text: Any, layer_types: set[str]) -> bool:
    """True if the models of a family take `position_ids` and, by their text config, have layers of these types only."""
    if getattr(text, "is_moe", False):  # the routers of doge read logits of other tokens
        return False
    found = set(getattr(text, "layer_types", None) or getattr(text, "block_types", None) or ())
    return "position_ids" in inspect.signature(family.forward).parameters and found <= layer_types


def scale_rope(settings: flags.Args, config: PretrainedConfig, length: int | None) -> None:
    """Apply --rope-scaling to `config`: YaRN (arXiv 2309.00071) from the model's positions to `length`, with the fields
    that transformers reads.

    Args:
        length: --sequence-length of the run that trains, or trained.

    Raises:
        UserError: the model needs no scaling, its RoPE cannot be scaled, or its config class changes the fields.
    """
    if not settings.rope_scaling:
        return
    text = config.get_text_config()
    positions, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = rope.get("rope_type", "none, or another for some layers")
    if kind == "default" and "ROPE_INIT_FUNCTIONS" not in inspect.getsource(inspect.getmodule(family)):
        kind = "one that its family does not scale"
    if kind != "default" or not positions:
        problem = f"only for a model with plain RoPE; that of {settings.model} is {kind}"
        advice = "set rope_parameters and max_position_embeddings in its config.json instead"
        raise base.UserError(f"--rope-scaling {settings.rope_scaling}: {problem}; {advice}")
    if not length or length <= positions:
        problem = f"{settings.model} has {positions} positions, enough for --sequence-length {length or 'as it is'}"
        raise base.UserError(f"--rope-scaling {settings.rope_scaling}: {problem}; leave it out")
    scaling = {"rope_type": settings.rope_scaling, "factor": length / positions}
    text.rope_parameters = rope | scaling | {"original_max_position_embeddings": positions}
    text.max_position_embeddings = length
    try:
        read_back = type(config).from_dict(config.to_dict()).get_text_config().rope_parameters
    except Exception as error:  # configs raise many kinds
        read_back = base.first_line(error)
    if read_back != text.rope_parameters:
        problem = f"the config of {config.model_type} does not take its fields ({read_back})"
        advice = f"give --sequence-length {positions} or less without it"
        raise base.UserError(f"--rope-scaling {settings.rope_scaling}: {problem}; {advice}")


def refuse_foreign_code(flag: str, error: Exception) -> None:
    """Raise a UserError that begins with `flag` if transformers raised `error` because a folder asks to run its own
    code."""
    if "trust_remote_code" in str(error):
        reason = "it asks for code of its own (auto_map), which is never run"
        raise base.UserError(f"{flag}: {reason}; choose one without code of its own") from error


def find_training_obstacle(config: PretrainedConfig) -> str:
    """The reason for which a family would train wrong, or cannot train with sharded layers and shifted labels; empty if
    its source shows none (`loss.check_labels` and `materialize` refuse what shows only later)."""
    text = config.get_text_config()
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    source = inspect.getsource(inspect.getmodule(family))
    if "self.loss_function(" not in inspect.getsource(inspect.unwrap(family.forward)):
        return f"{family.__name__} computes a loss of its own, of labels that it may shift"
    try:
        inspect.signature(family.forward).bind(None, input_ids=None, labels=None, use_cache=False)
    except TypeError as error:
        return f"the forward of {family.__name__} cannot be called as model(input_ids=, labels=, use_cache=): {error}"
    reads = re.search(r"if .*is_decoder", source)  # some configs have it unused
    if reads and not getattr(text, "is_decoder", True):
        return "its tokens attend to later ones; set is_decoder to true in its config.json"
    is_bidirectional = getattr(text, "use_bidirectional_attention", None) in (True, "all")  # "vision": of images only
    if is_bidirectional or getattr(text, "is_causal", True) is False:
        return "its tokens attend to later ones by its config.json (is_causal, use_bidirectional_attention)"
    only_bidirectional = "create_bidirectional_mask" in source and not re.search("create_.*causal_mask", source)
    skips_causal_mask = hasattr(text, "keep_window_size") and "allow_is_causal_skip=False" not in source  # doge
    if only_bidirectional or skips_causal_mask:
        return f"its tokens attend to later ones in transformers {transformers.__version__}; install a newer one"
    if skipped := [name for name, value in vars(text).items() if name.endswith("layerdrop") and value]:
        return f"each rank would skip other layers; set {skipped[0]} to 0 in its config.json"
    return ""


def read_generation_config(model: str) -> dict:
    """The generation_config.json of the weights of a local folder or hub id, or without one the fields of that kind in
    its config.json, the older place for them.

    Raises:
        OSError: it is not found on the hub.
        ValueError: it is no JSON object.
    """
    _, source, revision = find_source(model)
    base.set_hub_offline_without_network(source)
    fields = GenerationConfig().to_dict().keys()
    for name in ("generation_config.json", "config.json"):
        path = pathlib.Path(source, name)
        if not os.path.isdir(source):
            try:
                path = pathlib.Path(hf_hub_download(source, name, revision=revision))
            except RemoteEntryNotFoundError:
                continue
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"{name} is no JSON object")
            if name == "generation_config.json":
                return content
            return {key: value for key, value in content.items() if key in fields}
    return {}
