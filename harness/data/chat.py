"""Chat: conversations as tokens, by a chat template, with a mask of what is trained on. A template is run in
transformers' sandbox of jinja; no other code of a tokenizer's folder runs."""

import datetime
import itertools
import re
from collections import Counter
from typing import Any

import numpy as np

from harness import base
from harness.data.encode import Encoded, TextFormat
from harness.data.records import Conversation, refuse_or_count
from harness.data.windows import Window

TODAY = datetime.datetime(2024, 7, 26)  # for a template that asks: the date that Llama's takes where it has no clock
DATE_CODES = ["%a", "%A", "%b", "%B", "%c", "%d", "%-d", "%F", "%H"]
DATE_CODES += ["%I", "%j", "%m", "%-m", "%M", "%p", "%S", "%y", "%Y"]
EXAMPLE_TOKENS = 400  # that are printed of an example


class ChatFormat(TextFormat):
    """Conversations as tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int, template: str | None, loss: str, skip_bad: bool = False):
        """`template` is a jinja template, by default the tokenizer's; `loss` says which tokens are trained on, those of
        the "assistant" or "all"."""
        super().__init__(tokenizer, vocab_size)
        self.template, self.loss, self.skip_bad = template, loss, skip_bad

    def identity(self) -> list:
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        template = self.template or self.tokenizer.chat_template
        return [*super().identity(), template, self.loss, special_tokens, str(TODAY)]

    def check(self, dataset: str) -> None:
        """Raises a UserError where no conversation could be rendered or masked."""
        source = "--chat-template" if self.template else f"--tokenizer {self.tokenizer.name_or_path}"
        try:
            template = self.tokenizer.get_chat_template(self.template)
        except ValueError as error:
            problem = f"holds conversations, and {source} has no chat template to render them"
            raise base.UserError(f"--dataset {dataset}: {problem}; give one with --chat-template FILE") from error
        if self.loss == "assistant" and not re.search(r"{%-?\s*generation\s*-?%}", template):
            raise no_assistant_mask(f"{source}: its chat template has no {{% generation %}}")

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Conversations as tokens and masks. Those without a token to train on are left out, and counted."""
        tokens, masks = [], [np.empty(0, np.uint8)]
        for conversation in documents:
            try:
                ids, trained = self.render(conversation)
            except Exception as error:  # a template may raise anything
                fault = f"the chat template fails, {base.first_line(error)}"
                refuse_or_count(conversation.place, fault, self.skip_bad, counts)
                continue
            if trained.any():
                tokens.append(ids)
                masks.append(trained)
            else:
                counts["conversations without a trained token"] += 1
        return self.joined(tokens, counts, masks)

    def render(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, mask) of a conversation."""
        template = self.tokenizer.get_chat_template(self.template, conversation.tools)
        if "strftime_now" in template:
            template = with_fixed_date(template)
        encoded = self.tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=self.loss == "assistant",
        )
        ids = np.array(encoded["input_ids"], np.uint32)
        trained = np.ones(len(ids), np.uint8)
        if self.loss == "assistant":
            trained = np.array(encoded["assistant_masks"], np.uint8)
        trained[:1] = 0  # nothing precedes it
        return ids, trained


def with_fixed_date(template: str) -> str:
    """A template for which today is TODAY: its `strftime_now` is a macro of its own. A function given as an argument
    would not reach it, as transformers hands on nothing but data."""
    replaced = "".join(f".replace('{code}', '{TODAY.strftime(code)}')" for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def no_assistant_mask(problem: str) -> base.UserError:
    """No token of any conversation would be trained on."""
    advice = "give a template that has it around what the assistant writes with --chat-template FILE"
    return base.UserError(
        f"{problem}, so which tokens are the assistant's is not known; {advice}, or train on all tokens with "
        "--chat-loss all"
    )


def describe_example(window: Window, tokenizer, real_tokens: int) -> str:
    """The text of a window without its padding, which begins at `real_tokens`; [[ ]] is around what is trained on. What
    is longer than EXAMPLE_TOKENS is cut."""
    shown = min(real_tokens, EXAMPLE_TOKENS)
    tokens, trained = window.tokens[:shown], np.concatenate([[False], window.trained])[:shown]
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts = []
    for first, last in itertools.pairwise(borders):
        text = tokenizer.decode(tokens[first:last].tolist())
        parts.append(f"[[{text}]]" if trained[first] else text)
    if shown < real_tokens:
        parts.append(" ...")
    return "".join(parts)
