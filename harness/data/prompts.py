"""Prompts: the texts that samples of a model continue, and the tokens that end them."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness import base, flags
from harness.data.chat import ChatEncoder
from harness.data.corpora import Corpus
from harness.data.packing import SyntheticDataset, sequence_tokens
from harness.data.schema import LAYOUTS, BadRecord, Conversation, describe_layouts, find_document, is_object_list
from harness.data.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(values: Iterable[str]) -> list[str | Conversation]:
    """Return the prompts that values of --sample-prompt stand for."""
    return [prompt for value in values for prompt in read_prompt(value)]


def read_prompt(prompt: str) -> list[str | Conversation]:
    """Return the prompts of one value of --sample-prompt: a text, or the conversations of a .json or .jsonl file, each
    without its last answer. A list of messages is one conversation too, in .jsonl on a line."""
    # one word that ends in .json is a file name; if there is no such file, that is the error
    may_be_file = os.path.isfile(os.path.expanduser(prompt)) or len(prompt.split()) == 1
    if not (may_be_file and prompt.endswith((".json", ".jsonl"))):
        return [prompt]
    subject = f"--sample-prompt {prompt}"
    try:
        with open(os.path.expanduser(prompt), encoding="utf-8-sig") as file:
            texts = file.readlines() if prompt.endswith(".jsonl") else [file.read()]
        values = [json.loads(text) for text in texts if text.strip()]
    except (OSError, ValueError, RecursionError) as error:
        fault = f"cannot be read ({base.first_line(error)})"
        raise base.UserError(f"{subject}: {fault}; give JSON with messages") from error
    if len(values) == 1 and isinstance(values[0], list):
        is_conversation = is_object_list(values[0]) and not {"role", "from"}.isdisjoint(values[0][0])
        values = values if is_conversation else values[0]  # else a list of records
    if not values:
        raise base.UserError(f"{subject}: it is empty; give JSON with messages")
    prompts: list[str | Conversation] = []
    for number, value in enumerate(values, 1):
        found = find_document({"messages": value} if is_object_list(value) else value, tuple(LAYOUTS))
        if not isinstance(found, Conversation):
            fault = f"no conversation, which is {describe_layouts()}"
            if isinstance(found, BadRecord) and found.layout:
                fault = found.fault
            raise base.UserError(f"{subject}, record {number}: {fault}")
        end = found.first_trained or len(found.messages)
        while end > 1 and found.messages[end - 1]["role"] == "assistant":
            end -= 1
        prompts.append(replace(found, messages=found.messages[:end], position=prompt))
    return prompts


def render_prompt(
    settings: flags.Settings, is_chat_model: bool, tokenizer: "PreTrainedTokenizerBase", prompt: str | Conversation
) -> str:
    """The text that a sample continues. A conversation is rendered by the chat template; so is a text, as a user's
    message, for a chat model or if --chat-template is given. Any other text is used as it is. Without a template, a
    completion of text is continued from its prompt."""
    chat = ChatEncoder(tokenizer, len(tokenizer), base.read_template(settings.chat_template), loss="all")
    if isinstance(prompt, Conversation) and not chat.has_template:
        if not prompt.is_text_completion or len(prompt.messages) > 1 or prompt.tools:
            raise chat.no_template_error(f"--sample-prompt {prompt.position}: holds messages, a system prompt or tools")
        prompt = prompt.messages[0]["content"]
    # a chat model without a template was trained on prompts and completions as plain text
    if isinstance(prompt, str) and not (is_chat_model and chat.has_template) and settings.chat_template is None:
        before = chat.bos_ids.tolist() if is_chat_model else []
        return "".join(tokenizer.convert_ids_to_tokens(before)) + prompt
    if isinstance(prompt, str):
        prompt = Conversation([{"role": "user", "content": prompt}])
    try:
        template = chat.template_for(prompt)
        return chat.render_messages(prompt, template, len(prompt.messages), add_generation_prompt=True).text
    except Exception as error:  # a template may raise anything
        raise base.UserError(f"--sample-prompt: the chat template fails, {base.first_line(error)}") from error


def end_tokens(settings: flags.Settings, is_chat_model: bool, tokenizer: "PreTrainedTokenizerBase | None") -> list[int]:
    """The tokens that end a text of a model: the tokenizer's own, and for a chat model the one that ends an answer."""
    if tokenizer is None:
        return []
    ends = [tokenizer.eos_token_id]
    if is_chat_model:
        ends.append(answer_end_token(tokenizer, base.read_template(settings.chat_template)))
    return [end for end in dict.fromkeys(ends) if end is not None]


def answer_end_token(tokenizer: "PreTrainedTokenizerBase", template: str | None) -> int | None:
    """Return the id of the special token that a chat template, by default the tokenizer's, writes after an answer; None
    if it writes none."""
    answer = "Zq"  # not part of a special token
    messages = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    try:
        text, _ = ChatEncoder(tokenizer, len(tokenizer), template, loss="all").render(Conversation(messages))
    except Exception:  # a template may raise anything
        return None
    end = text.rpartition(answer)[2]
    ids = tokenizer(end.lstrip(), add_special_tokens=False)["input_ids"]
    if ids and (token := tokenizer.added_tokens_decoder.get(ids[0])) and token.special:
        return ids[0]
    return None


def demo_prompt(
    sources: list[Corpus], sequences_by_name: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None"
) -> str:
    """The first words of the first of `sequences_by_name`, the eval sets or else the training data of `sources`. --demo
    with another --dataset continues them as its sample. "" for conversations, or if there is no text to read."""
    dataset = next(iter(sequences_by_name.values()))
    is_chat = bool(sources) and sources[0].is_chat
    if tokenizer is None or is_chat or isinstance(dataset, Stream | SyntheticDataset):
        return ""
    text = tokenizer.decode(sequence_tokens(dataset[0])[:12], skip_special_tokens=True)
    assert isinstance(text, str)  # of one list of ids
    words = text.replace("\ufffd", "").lstrip(" \n.,;:!?)").split()
    return " ".join(words[:-1] or words)  # the last one may be cut
