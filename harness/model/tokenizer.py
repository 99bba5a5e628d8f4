"""The tokenizer of a model, and the prompts for its samples."""

import os

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from harness import base, flags
from harness.model import patches
from harness.model.configs import find_source, load_config, refuse_foreign_code


def load_tokenizer(settings: flags.Args, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of --tokenizer, a folder of adapters or the model.

    Raises:
        UserError: it cannot be loaded, or its vocabulary is larger than the model's.
    """
    _, source, revision = find_source(settings.model)
    if settings.tokenizer:
        source, revision = settings.tokenizer, None
    adapters = flags.adapter_folder(settings.model)
    if adapters and not settings.tokenizer and (adapters / "tokenizer_config.json").exists():
        source, revision = str(adapters), None  # it has the template of their training
    base.set_hub_offline_without_network(source)
    patches.take_tokenizers_only()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        refuse_foreign_code(f"--tokenizer {source}", error)
        demo = flags.ASSETS / "demo"
        advice = f"give --tokenizer a folder ({demo} has one), or use --dataset synthetic without prompts"
        reason = base.first_line(error)
        if os.path.isdir(source):
            problem = "the folder has no usable tokenizer"
            # followed by advice for callers in Python
            if "Couldn't instantiate the backend tokenizer" in reason or "`tiktoken` is required" in reason:
                reason = "no tokenizer.json, and nothing that transformers makes one of"
                if os.path.exists(os.path.join(source, "tokenizer.model")):
                    reason = "no tokenizer.json, and a tokenizer.model needs the package sentencepiece or tiktoken"
        elif os.path.exists(source) or not flags.may_be_on_the_hub(source):
            raise base.UserError(f"--tokenizer {source}: no such folder; {advice}") from error
        else:
            problem = "no folder, and not available from the hub"
            advice = f"`hf auth login` where {source} is gated, or a network; else {advice}"
        if settings.tokenizer is None and settings.model in flags.PRESETS:
            problem += f"; the preset {settings.model} has its config alone here"
        raise base.UserError(f"--tokenizer {source}: {problem} ({reason}); {advice}") from error
    if settings.chat_template and settings.export:  # exported with it; a missing file is an error now
        tokenizer.chat_template = base.read_template(settings.chat_template)
    size, embeddings = len(tokenizer), config.get_text_config().vocab_size
    if size > embeddings:
        raise base.UserError(f"--tokenizer {source}: its vocabulary of {size} is larger than the model's {embeddings}")
    return tokenizer


def load_files(settings: flags.Args, needs_tokenizer: bool) -> tuple:
    """(the model's config, its tokenizer or None if it is not needed). Rank 0 reads first."""
    config = base.broadcast_from_rank_0(lambda: load_config(settings.model))
    tokenizer = base.broadcast_from_rank_0(lambda: load_tokenizer(settings, config)) if needs_tokenizer else None
    return config, tokenizer
