"""Opening: what every run begins with, whether it trains, evaluates or shows samples. It finds the data, the model's
files and the checkpoint, and decides what the flags leave open; nothing is built yet."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import transformers

from harness import base, data, flags, job, resolving, state
from harness import model as models


@dataclasses.dataclass(kw_only=True)
class Opened:
    """What a run has found and decided."""

    settings: flags.Settings
    corpora: list[data.Corpus]
    config: transformers.PretrainedConfig
    tokenizer: Any
    prompts: list[str | data.Conversation]  # of samples
    checkpoint: state.Checkpoint | None  # that the run goes on from, or reads

    @property
    def manifest(self) -> dict | None:
        return self.checkpoint.manifest if self.checkpoint else None


def open_run(
    given: flags.Args, choose_batch_size: Callable[[flags.Args], int], folder: pathlib.Path | None = None
) -> Opened:
    """Opens a run; every rank calls this.

    Args:
        choose_batch_size: as `resolving.resolve` calls it.
        folder: of the run; None where nothing is trained.

    Raises:
        UserError: something is not there, damaged, or does not go together.
    """
    corpora = data.find(given) if given.num_steps or given.eval_interval or given.show_samples else []
    config, tokenizer, prompts = models.load_files(given, data.needs_tokenizer(given, corpora))
    prompts = base.broadcast_from_rank_0(lambda: [found for prompt in prompts for found in data.read_prompt(prompt)])
    checkpoint = state.find_checkpoint(given.resume, folder)
    begins_at_random = given.trains() and given.init == "random" and not checkpoint
    unread = base.broadcast_from_rank_0(lambda: models.describe_unread(given.model)) if begins_at_random else ""
    if unread:
        job.warn(unread)
    if given.export:
        state.check_export(given, checkpoint, folder)
    # what is trained keeps the batch and the warmup of its checkpoint; what only reads one has none
    manifest = checkpoint.manifest if checkpoint and given.trains() else None
    epoch = functools.partial(data.count_epoch, corpora, tokenizer, config, manifest)
    opened = Opened(
        settings=resolving.resolve(given, config, choose_batch_size, corpora, manifest, epoch),
        corpora=corpora,
        config=config,
        tokenizer=tokenizer,
        prompts=prompts,
        checkpoint=checkpoint,
    )
    check_prompts(opened)
    return opened


def check_prompts(opened: Opened) -> None:
    """Raises a UserError if a prompt, as the model gets it, and its continuation are longer than the model's
    positions."""
    settings, positions = opened.settings, getattr(opened.config.get_text_config(), "max_position_embeddings", None)
    for text in render_prompts(opened, opened.prompts):
        tokens = len(opened.tokenizer(text, add_special_tokens=False)["input_ids"])
        if positions and tokens + settings.sample_tokens > positions:
            problem = f"more than {settings.model}'s {positions} positions with the prompt's {tokens} tokens"
            advice = "use fewer, or a shorter --sample-prompt"
            raise base.UserError(f"--sample-tokens {settings.sample_tokens}: {problem}; {advice}")


def render_prompts(opened: Opened, prompts: list[str | data.Conversation]) -> list[str]:
    """The texts that samples continue, rendered by rank 0; every rank calls this."""
    settings, tokenizer = opened.settings, opened.tokenizer
    answers = data.are_chats(opened.corpora, record_of(opened, None))
    return base.broadcast_from_rank_0(
        lambda: [data.render_prompt(settings, answers, tokenizer, prompt) for prompt in prompts]
    )


def load_to_evaluate(opened: Opened) -> Any:
    """The data that an evaluation without training reads, a `data.TrainingData`: of what the weights were trained on,
    as far as that is known, what was held out; of other data all documents, where it has no held-out split. Every rank
    calls this.

    Raises:
        UserError: it is a part of what the run trained on, or no longer what the run read.
    """
    settings, manifest = opened.settings, opened.manifest
    data_arguments = (opened.corpora, opened.tokenizer, opened.config)
    if manifest is None or not base.broadcast_from_rank_0(lambda: data.evaluates_own_data(settings, manifest)):
        trained_on = state.trained_on(settings, record_of(opened, None))
        return data.load(settings, *data_arguments, trained_on=trained_on)
    dataset = data.load(settings, *data_arguments, manifest)
    if settings.dataset != "synthetic":
        state.check_same_corpus(settings, dataset.record, manifest)
    return dataset


def generate_samples(
    opened: Opened, dataset: Any, model: transformers.PreTrainedModel, device: torch.device
) -> list[dict[str, Any]]:
    """A continuation of each prompt, in a run on conversations an answer to it. `dataset` is the `data.TrainingData`
    that the run reads, None where it reads none. Every rank calls this."""
    job.enter_phase("sampling")
    settings, prompts = opened.settings, opened.prompts
    if settings.demo and settings.dataset != "demo" and not prompts and dataset is not None and dataset.beginning:
        prompts = [dataset.beginning]  # the demo's prompt is for the demo's stories
    record = record_of(opened, dataset)
    ends = base.broadcast_from_rank_0(lambda: data.end_tokens(settings, record, opened.tokenizer))
    texts = render_prompts(opened, prompts)
    return [models.sample(settings, text, ends, model, opened.tokenizer, device) for text in texts]


def export(opened: Opened, weights: state.TrainState, dataset: Any = None) -> None:
    """Writes the folder of --export. `dataset` is the `data.TrainingData` that the weights were trained on in this run,
    None where they were only loaded. Every rank calls this."""
    settings, record = opened.settings, record_of(opened, dataset)
    ends = base.broadcast_from_rank_0(lambda: data.end_tokens(settings, record, opened.tokenizer))
    state.export(settings, weights, opened.tokenizer, ends, state.trained_on(settings, record))


def record_of(opened: Opened, dataset: Any) -> data.DataRecord | None:
    """Of the data that a run reads, or that its checkpoint's did."""
    if dataset is not None:
        return dataset.record
    return data.read_record(opened.manifest) if opened.manifest else None


def show_samples(given: flags.Args, choose_batch_size: Callable[[flags.Args], int]) -> int:
    """--show-samples: prints what a step of this run trains on, by the order that the run recorded, if there is one.
    Returns the exit code; every rank calls this."""
    opened = open_run(given, choose_batch_size)
    recorded = state.find_recorded_data(given, opened.checkpoint)
    dataset = data.load(opened.settings, opened.corpora, opened.tokenizer, opened.config, recorded)
    if recorded:
        state.check_data(opened.settings, dataset.record, recorded)
    data.show_samples(opened.settings, dataset, opened.tokenizer, recorded)
    return 0
