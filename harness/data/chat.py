"""Chat: conversations as tokens, by a chat template, with a mask of what is trained on. A template is run in
transformers' sandbox of jinja; no other code of a tokenizer's folder runs."""

import copy
import datetime
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
import tokenizers

from harness import base
from harness.data.encode import Encoded, TextFormat, backend_of, encode_texts, take
from harness.data.records import Conversation, refuse_or_count
from harness.data.windows import PackedDataset, Window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime.datetime(2024, 7, 26)  # for a template that asks: the date that Llama's takes where it has no clock
DATE_CODES = ["%a", "%A", "%b", "%B", "%c", "%d", "%-d", "%F", "%H"]
DATE_CODES += ["%I", "%j", "%m", "%-m", "%M", "%p", "%S", "%y", "%Y"]
EXAMPLES, EXAMPLE_TOKENS = 3, 200  # that are printed, and tokens of each


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]  # (first, after the last) character of each part that is trained on


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
        try:
            self.tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template)
        except jinja2.TemplateSyntaxError as error:
            problem = f"its chat template has a syntax error in line {error.lineno}, {error.message}"
            raise base.UserError(f"{source}: {problem}; mend it") from error
        except Exception:  # of this conversation; what those of the corpus lack is found when they are rendered
            pass
        if self.loss == "assistant" and not self.tokenizer.is_fast:
            problem = f"{type(self.tokenizer).__name__} does not say which characters a token has"
            raise base.UserError(
                f"--tokenizer {self.tokenizer.name_or_path}: {problem}, so which tokens are the assistant's is not "
                "known; give a tokenizer that has a tokenizer.json, or train on all tokens with --chat-loss all"
            )

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Conversations as tokens and masks. Those without a token to train on are left out, and counted."""
        rendered = []
        for conversation in documents:
            try:
                rendered.append(self.render(conversation))
            except Exception as error:  # a template may raise anything
                fault = f"the chat template fails, {base.first_line(error)}"
                refuse_or_count(conversation.place, fault, self.skip_bad, counts)
        tokens, masks = [], [np.empty(0, np.uint8)]
        for ids, trained in self.encode_rendered(rendered):
            trained[:1] = 0  # nothing precedes it
            if trained.any():
                tokens.append(ids)
                masks.append(trained)
            else:
                counts["conversations without a trained token"] += 1
        return self.joined(tokens, counts, masks)

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation, as `apply_chat_template` renders it."""
        template = self.tokenizer.get_chat_template(self.template, conversation.tools)
        if "strftime_now" in template:
            template = with_fixed_date(template)
        if self.loss == "all":
            text = self.tokenizer.apply_chat_template(
                conversation.messages, tools=conversation.tools, chat_template=template, tokenize=False
            )
            return Rendered(text, [(0, len(text))])
        from transformers.utils.chat_template_utils import render_jinja_template  # takes long to import

        tools: Any = conversation.tools  # typing takes no list of objects for one of objects or functions
        rendered: Any = render_jinja_template(
            conversations=[conversation.messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        (text,), (spans,) = rendered
        return Rendered(text, spans)

    def encode_rendered(self, rendered: list[Rendered]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, mask) of each: a token is trained on where one of its characters is. `apply_chat_template` looks for
        the token of a span's first and of its last character instead, which goes wrong where that is a space, is in
        several tokens, or where the span is empty."""
        texts = [conversation.text for conversation in rendered]
        if self.loss == "all":
            batches = (encode_texts(self.tokenizer, batch) for batch in in_batches(texts))
            for ids in itertools.chain.from_iterable(batches):
                yield np.array(ids, np.uint32), np.ones(len(ids), np.uint8)
            return
        encodings = (self.with_offsets.encode_batch(batch, add_special_tokens=False) for batch in in_batches(texts))
        for encoding, (_, spans) in zip(itertools.chain.from_iterable(encodings), rendered, strict=True):
            trained = np.zeros(len(encoding.ids), np.uint8)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            for first, last in spans:
                if first < last:  # an empty span may lie inside a token
                    trained[(starts < last) & (ends > first)] = 1
            yield np.array(encoding.ids, np.uint32), trained

    @functools.cached_property
    def with_offsets(self) -> tokenizers.Tokenizer:
        """The backend without what is done after tokens are found, which adds none here but would take spaces off the
        characters of a token."""
        backend = copy.deepcopy(backend_of(self.tokenizer))
        backend.post_processor = None
        backend.encode_special_tokens = self.tokenizer.split_special_tokens  # a copy does not have it
        return backend


def in_batches(texts: list[str]) -> Iterator[list[str]]:
    """The texts in as many batches as calls of the tokenizer are to take."""
    left = iter(texts)
    while batch := list(take(left, len(texts))):
        yield batch


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


def render_prompt(tokenizer: "PreTrainedTokenizerBase", template: str | None, prompt: str) -> str:
    """The text that the answer to a user's message follows."""
    template = tokenizer.get_chat_template(template)
    if "strftime_now" in template:
        template = with_fixed_date(template)
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template may raise anything
        raise base.UserError(f"--sample-prompt: the chat template fails, {base.first_line(error)}") from error
    assert isinstance(text, str)  # as it is not tokenized
    return text


def describe_examples(dataset: PackedDataset, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The first document of each of the first windows, with a line before each."""
    lines = []
    for index in range(min(EXAMPLES, len(dataset))):
        window: Any = dataset[index]  # a `Window`, as all are where there is a mask
        _, *later = [*dataset.starts_in(index), dataset.real_tokens(index)]
        lines += [f"--- window {index:,} of {len(dataset):,}", describe_example(window, tokenizer, later[0])]
    return "\n".join(lines)


def describe_example(window: Window, tokenizer: "PreTrainedTokenizerBase", until: int) -> str:
    """The text of a window before the token `until`; [[ ]] is around what is trained on. What is longer than
    EXAMPLE_TOKENS is cut."""
    shown = min(until, EXAMPLE_TOKENS)
    tokens, trained = window.tokens[:shown], np.concatenate([[False], window.trained])[:shown]
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts = []
    for first, last in itertools.pairwise(borders):
        text = tokenizer.decode(tokens[first:last].tolist())
        assert isinstance(text, str)  # of one list of ids
        parts.append(f"[[{text}]]" if trained[first] else text)
    if shown < until:
        parts.append(" ...")
    return "".join(parts)
