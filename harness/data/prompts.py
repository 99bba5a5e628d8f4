"""Prompts: the texts that samples of a model continue, and the tokens that end them."""

from typing import TYPE_CHECKING, Any

from harness import base, flags
from harness.data.chat import ends_of_answers, render_user_message
from harness.data.corpora import Corpus
from harness.data.mixture import DataRecord
from harness.data.packing import SyntheticDataset, sequence_tokens
from harness.data.schema import Conversation
from harness.data.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_prompt(
    settings: flags.Settings, answers: bool, tokenizer: "PreTrainedTokenizerBase", prompt: str | Conversation
) -> str:
    """The text that a sample continues: the prompt, or if the model `answers` or a chat template is given, a user's
    message rendered by the template; messages always are."""
    has_template = bool(tokenizer.chat_template)  # without one a prompt and its completion are text
    if isinstance(prompt, Conversation) and not has_template and settings.chat_template is None:
        problem = "it holds messages, and the tokenizer has no chat template"
        raise base.UserError(f"--sample-prompt {prompt.position}: {problem}; give one with --chat-template FILE")
    if isinstance(prompt, str) and not (answers and has_template) and settings.chat_template is None:
        return prompt
    return render_user_message(tokenizer, base.read_template(settings.chat_template), prompt)


def end_tokens(
    settings: flags.Settings, record: DataRecord | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> list[int]:
    """The tokens that end a text of a model: the tokenizer's own, and if the data of `record` are conversations the
    one that ends an answer."""
    if tokenizer is None:
        return []
    ends = [tokenizer.eos_token_id]
    if is_chat(record):
        ends += ends_of_answers(tokenizer, base.read_template(settings.chat_template))
    return [end for end in dict.fromkeys(ends) if end is not None]


def reads_chats(corpora: list[Corpus], record: DataRecord | None) -> bool:
    """True if the corpora that a run reads are conversations; if it reads none, those that `record` is of."""
    sources = [corpus for corpus in corpora if not corpus.is_eval_dataset] or corpora
    return any(corpus.is_chat for corpus in sources) if sources else is_chat(record)


def is_chat(record: DataRecord | None) -> bool:
    return record is not None and any(spec.get("chat") for spec in record.sources.values())


def first_words(corpora: list[Corpus], sources: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The first words of the first source, as a prompt for a sample; empty if it has no text."""
    dataset = next(iter(sources.values()))
    is_chat = any(corpus.is_chat for corpus in corpora[:1])
    if tokenizer is None or is_chat or isinstance(dataset, Stream | SyntheticDataset):
        return ""
    text = tokenizer.decode(sequence_tokens(dataset[0])[:12], skip_special_tokens=True)
    assert isinstance(text, str)  # of one list of ids
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut
