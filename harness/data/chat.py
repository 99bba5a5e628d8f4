"""Chat: conversations as tokens, by a chat template, with a mask of what is trained on. A template is run in
transformers' sandbox of jinja; no other code of a tokenizer's folder runs.

The assistant's are the characters that a template marks with {% generation %}. In a template without it a turn of the
assistant's goes from the end of (what comes before it, rendered with the generation prompt) to the end of (all up to
it, rendered). So the token that ends the turn is in it, which a model must learn to write, and the generation prompt
is not, which it is given. Both renderings must be how the whole conversation begins.
"""

import copy
import datetime
import functools
import itertools
import json
import os
import pathlib
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
import tokenizers

from harness import base
from harness.data.omissions import Omission, changed_contents, shape_of, texts_in, with_marks
from harness.data.schema import (
    LAYOUTS,
    ROLES,
    BadRecord,
    Conversation,
    calls_of,
    find_document,
    is_objects,
    layout_of,
    refuse_or_count,
)
from harness.data.tokenize import WARNING, Encoded, TextFormat, backend_of, encode_texts, own_tokens_around, take

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime.datetime(2024, 7, 26)  # for a template that asks: the date that Llama's takes where it has no clock
DATE_CODES = ["%a", "%A", "%b", "%B", "%c", "%d", "%-d", "%F", "%H"]
DATE_CODES += ["%I", "%j", "%m", "%-m", "%M", "%p", "%S", "%y", "%Y"]
COMPLETIONS = "prompt+completion"  # the layout that needs no template where it is text
SHOWN = 30  # characters of a text in a message, on each side of a position
EXAMPLES, EXAMPLE_TOKENS = 4, 200  # that are printed, and tokens of each
THOUGHTS = {"reasoning_content", "reasoning", "thinking"}  # fields of messages


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]  # (first, after the last) character of each part that is trained on


class BadConversationError(Exception):
    """A conversation that cannot be trained on, in words."""


class ChatFormat(TextFormat):
    """Conversations as tokens."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        template: str | None,
        loss: str,
        skip_bad: bool = False,
        layout: str = "messages",
    ):
        """`template` is a jinja template, by default the tokenizer's; `loss` says which tokens are trained on, those of
        the "assistant" or "all"; `layout` is that of the records."""
        super().__init__(tokenizer, vocab_size)
        self.template, self.loss, self.skip_bad, self.layout = template, loss, skip_bad, layout
        self.has_template = bool(template or tokenizer.chat_template)
        self.omissions: dict[Hashable, list[Omission]] = {}  # by the shape of a conversation
        self.first_positions: dict[str, str] = {}  # where each warning is first of

    def identity(self) -> list:
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        template = self.template or self.tokenizer.chat_template
        return [*super().identity(), template, self.loss, special_tokens, str(TODAY)]

    def describe(self) -> dict[str, str]:
        """The header's lines about the layout of the records and about what is trained on."""
        layout, trained = layout_of(self.layout).title, "the assistant's turns"
        if self.layout == COMPLETIONS:
            trained = "the assistant's turns of the completions"
            if not self.has_template:
                layout, trained = f"{layout}, end to end, as there is no chat template", "the completions"
        if self.loss == "all":
            trained = "all tokens"
        elif self.has_template:
            marked = has_generation(self.tokenizer.get_chat_template(self.template))
            trained += ", marked by the chat template" if marked else ", found by rendering prefixes"
            trained += self.describe_end()
        return {"format": layout, "trained on": trained}

    def describe_end(self) -> str:
        """What is wrong with the end of an answer, from which a model learns to stop; empty where it is one token."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            text, spans = self.render(Conversation([question, answer]))
        except Exception:  # of this conversation, as in `check`
            return ""
        end = text[spans[-1][0] : spans[-1][1]].rpartition("b")[2].strip() if spans else ""
        if spans and text[: spans[-1][1]].endswith("b"):
            return "; the template puts no end to them, from which a model learns to stop"
        pieces = next(iter(encode_texts(self.tokenizer, [end])))
        if len(pieces) > 1:
            return f"; their end, {end}, is {len(pieces)} tokens of this tokenizer, so a model hardly learns to stop"
        return ""

    def check(self, dataset: str) -> None:
        """Raises a UserError where no conversation could be rendered or masked."""
        source = "--chat-template" if self.template else f"--tokenizer {self.tokenizer.name_or_path}"
        if not self.has_template and self.layout != COMPLETIONS:
            raise self.no_template(f"--dataset {dataset}: holds conversations")
        if not self.has_template and self.tokenizer.eos_token is None:
            raise base.UserError(f"{source}: it has no end-of-text token (eos_token), which completions end with")
        if self.has_template:
            try:
                template = self.tokenizer.get_chat_template(self.template)
            except ValueError as error:
                problem = f"{source}: {base.first_line(error).rstrip('.')}"
                raise base.UserError(f"{problem}; give one with --chat-template FILE") from error
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

    def no_template(self, problem: str) -> base.UserError:
        missing = f"and --tokenizer {self.tokenizer.name_or_path} has no chat template to render them"
        return base.UserError(f"{problem}, {missing}; give one with --chat-template FILE, or --chat-template chatml")

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Conversations as tokens and masks. Those without a token to train on are left out, and counted."""
        rendered = []
        for conversation in documents:
            try:
                rendered.append(self.render(conversation, counts))
            except base.UserError:
                raise
            except BadConversationError as error:
                refuse_or_count(conversation.position, str(error), self.skip_bad, counts)
            except Exception as error:  # a template may raise anything
                fault = f"the chat template fails, {base.first_line(error)}"
                refuse_or_count(conversation.position, fault, self.skip_bad, counts)
        return self.join_trained(self.encode_rendered(rendered), counts, "conversations")

    def render(self, conversation: Conversation, counts: Counter | None = None) -> Rendered:
        """The text of a conversation, as `apply_chat_template` renders it, and what is trained on of it; `counts` gets
        warnings about it."""
        if not self.has_template:
            return self.end_to_end(conversation)
        template = self.tokenizer.get_chat_template(self.template, conversation.tools)
        if "strftime_now" in template:
            template = with_fixed_date(template)
        marks = self.loss != "all"
        text, spans = self.render_messages(conversation, template, len(conversation.messages), mark=marks)
        self.check_text(conversation, template, text, Counter() if counts is None else counts)
        if not marks:
            return Rendered(text, [(0, len(text))])
        if not has_generation(template):
            return Rendered(text, self.spans_by_prefixes(conversation, template, text))
        if conversation.first_trained:
            start = self.length_of_prompt(conversation, template, text)
            spans = [(max(first, start), last) for first, last in spans if last > start]
        return Rendered(text, spans)

    def render_messages(
        self, conversation: Conversation, template: str, count: int, prompt: bool = False, mark: bool = False
    ) -> Rendered:
        """The first `count` messages as text, with the generation prompt for `prompt`; the spans that the template
        marks for `mark`."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes long to import

        tools: Any = conversation.tools  # typing takes no list of objects for one of objects or functions
        rendered: Any = render_jinja_template(
            conversations=[conversation.messages[:count]],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=mark and has_generation(template),
            add_generation_prompt=prompt,
            **self.tokenizer.special_tokens_map,
        )
        (text,), spans = rendered
        return Rendered(text, spans[0] if spans else [])

    def spans_by_prefixes(self, conversation: Conversation, template: str, text: str) -> list[tuple[int, int]]:
        """The characters of each turn of the assistant's in the rendered `text` of a conversation."""
        spans = []
        for number, message in enumerate(conversation.messages):
            role = message["role"]
            if role != "assistant" and ROLES.get(role.lower()) == "assistant":
                raise BadConversationError(f"its role {role} is not trained on; name it assistant")
            if role != "assistant" or number < conversation.first_trained:
                continue
            if number == 0:
                first = self.length_before_first(conversation, template, text)
            else:
                before, _ = self.render_messages(conversation, template, number, prompt=True)
                first = length_of_prefix(conversation, before, text)
            turns = text
            if number + 1 < len(conversation.messages):
                turns, _ = self.render_messages(conversation, template, number + 1)
            spans.append((first, length_of_prefix(conversation, turns, text)))
        return spans

    def length_of_prompt(self, conversation: Conversation, template: str, text: str) -> int:
        """How many characters stand before the messages that are trained on."""
        before = ""
        for with_generation_prompt in (False, True):  # without it some templates end a conversation
            before, _ = self.render_messages(conversation, template, conversation.first_trained, with_generation_prompt)
            if text.startswith(before):
                return len(before)
        raise changed_before(conversation, before, text)

    def length_before_first(self, conversation: Conversation, template: str, text: str) -> int:
        """How many characters stand before what the assistant says first in a conversation that it begins."""
        try:
            before, _ = self.render_messages(conversation, template, 0, prompt=True)
        except Exception:  # templates look at the first message
            before = None
        if before is None or not text.startswith(before):
            raise BadConversationError("it begins with the assistant, which the chat template has no prompt for")
        return len(before)

    def end_to_end(self, conversation: Conversation) -> Rendered:
        """A prompt and its completion as they are, with the end-of-text token and what the tokenizer's own rule puts
        before a text."""
        if not conversation.is_text or len(conversation.messages) != 2 or conversation.tools:
            raise self.no_template(f"--dataset {conversation.position}: holds messages, a system prompt or tools")
        prompt, completion = (message["content"] for message in conversation.messages)
        before = self.text_before + prompt
        text = before + completion.removesuffix(self.tokenizer.eos_token) + self.tokenizer.eos_token
        return Rendered(text, [(0 if self.loss == "all" else len(before), len(text))])

    @functools.cached_property
    def text_before(self) -> str:
        """What the tokenizer's own rule puts before a text, such as <s>."""
        return "".join(self.tokenizer.convert_ids_to_tokens(own_tokens_around(self.tokenizer)[0]))

    def check_text(self, conversation: Conversation, template: str, text: str, counts: Counter) -> None:
        """Raises a BadConversationError for what the rendered `text` lacks of a conversation, or has once more; what
        changes neither a turn nor what is trained on is a warning, which `counts` gets."""
        shape = shape_of(conversation)
        if shape not in self.omissions:
            self.omissions[shape] = self.find_omissions(conversation, template)
        rendered = self.special_tokens_in(conversation, text)
        for omission in (*self.omissions[shape], *changed_contents(conversation, text), *rendered):
            if omission.is_fault:
                raise BadConversationError(omission.text)
            position = self.first_positions.setdefault(omission.text, conversation.position)
            counts[f"{WARNING}{position}: {omission.text}"] += 1

    def find_omissions(self, conversation: Conversation, template: str) -> list[Omission]:
        """What a template leaves out of conversations of this shape."""
        marked, marks = with_marks(conversation)
        try:
            text, _ = self.render_messages(marked, template, len(marked.messages))
        except Exception:  # of a template that refuses a mark, so it reads it
            return []
        return list(dict.fromkeys(mark.omission for mark in marks if (mark.word in text) != mark.is_wanted))

    def special_tokens_in(self, conversation: Conversation, text: str) -> Iterator[Omission]:
        """Special tokens in the texts of messages, which become what the template writes as well: a text that begins a
        turn, or has the token that the template puts beside it, is rendered already."""
        given = "\n".join(texts_in(conversation.messages))
        tokens = [token for token in self.special_tokens if token in given]
        if not tokens or all(text.count(token) == given.count(token) for token in self.special_tokens):
            return
        for token in tokens:
            for message in conversation.messages:
                inside = [part.strip() for part in texts_in(message) if token in part]
                if text.count(token) > given.count(token) and any(is_rendered(part, token, text) for part in inside):
                    problem = f"its text has {token}, so it is rendered already, and would be once more"
                    advice = "take it out, or have docs/DATA.md's template that adds nothing (Conversations)"
                    yield Omission(f"{problem}; {advice}")
                elif inside:
                    problem = f"the text of its {message['role']} has {token}, which becomes the special token"
                    yield Omission(f"{problem}, as by transformers", is_fault=False)

    @functools.cached_property
    def special_tokens(self) -> list[str]:
        return [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

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


def is_rendered(part: str, token: str, text: str) -> bool:
    """True if a part of a rendered `text` begins a turn with a special token, or has it where the template writes it
    too: at an end, where it then stands twice."""
    before, _, behind = text.partition(part)
    roles = "|".join({*ROLES, "developer"})
    return (
        re.search(rf"{re.escape(token)}({roles})(\n|<)", part) is not None
        or (part.startswith(token) and before.rstrip().endswith(token))
        or (part.endswith(token) and behind.lstrip().startswith(token))
    )


def with_fixed_date(template: str) -> str:
    """A template for which today is TODAY: its `strftime_now` is a macro of its own. A function given as an argument
    would not reach it, as transformers hands on nothing but data."""
    replaced = "".join(f".replace('{code}', '{TODAY.strftime(code)}')" for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def has_generation(template: str) -> bool:
    """Whether a template marks what the assistant writes."""
    return re.search(r"{%-?\s*generation\s*-?%}", template) is not None


def length_of_prefix(conversation: Conversation, beginning: str, text: str) -> int:
    """The length of what the beginning of a conversation was rendered to; a UserError where the text of the whole does
    not begin so."""
    if not text.startswith(beginning):
        raise changed_before(conversation, beginning, text)
    return len(beginning)


def changed_before(conversation: Conversation, beginning: str, text: str) -> base.UserError:
    """What is wrong where a template renders the beginning of a conversation otherwise once more follows."""
    pairs = enumerate(itertools.zip_longest(beginning, text))
    at = next(at for at, (one, other) in pairs if one != other)
    alone, followed = (repr(part[max(0, at - SHOWN) : at + SHOWN]) for part in (beginning, text))
    problem = f"its chat template changes what came before as a conversation goes on ({alone} becomes {followed})"
    why = "such as one that moves a system prompt or drops thoughts"
    return no_assistant_mask(f"--dataset {conversation.position}: {problem}, {why}")


def nothing_trained(dataset: str, conversations: int, chat: TextFormat) -> base.UserError:
    """What is wrong where no conversation has a token to train on."""
    problem = f"the chat template marks no token of any of the {conversations:,} conversations"
    if isinstance(chat, ChatFormat) and "prefixes" in chat.describe()["trained on"]:
        problem = f"none of its conversations, {conversations:,}, has a message with the role assistant"
    return no_assistant_mask(f"--dataset {dataset}: {problem}")


def no_assistant_mask(problem: str) -> base.UserError:
    """No token of any conversation would be trained on."""
    advice = "give a template that has {% generation %} around what the assistant writes with --chat-template FILE"
    return base.UserError(
        f"{problem}, so which tokens are the assistant's is not known; {advice}, or train on all tokens with "
        "--chat-loss all"
    )


def read_prompt(prompt: str) -> list[str | Conversation]:
    """The prompts that --sample-prompt gives: a text is one; the name of a .json or .jsonl file stands for the
    conversations in its records, or for that of its list of messages, each up to its last answer."""
    is_file = os.path.isfile(prompt) or len(prompt.split()) == 1
    if not (is_file and prompt.endswith((".json", ".jsonl"))):
        return [prompt]
    problem = f"--sample-prompt {prompt}"
    try:
        text = pathlib.Path(prompt).expanduser().read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.strip()] if prompt.endswith("l") else [text]
        values = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        fault = f"cannot be read ({base.first_line(error)})"
        raise base.UserError(f"{problem}: {fault}; give JSON with messages") from error
    if prompt.endswith(".json") and isinstance(values[0], list):
        is_one = is_objects(values[0]) and "role" in values[0][0]
        values = [{"messages": values[0]}] if is_one else values[0]
    if not values:
        raise base.UserError(f"{problem}: it is empty; give JSON with messages")
    prompts: list[str | Conversation] = []
    for number, value in enumerate(values, 1):
        found = find_document(value, tuple(LAYOUTS))
        if not isinstance(found, Conversation):
            fault = found.fault if isinstance(found, BadRecord) else "no conversation"
            raise base.UserError(f"{problem}, record {number}: {fault}")
        last = found.first_trained or len(found.messages)
        while last > 1 and found.messages[last - 1]["role"] == "assistant":
            last -= 1
        prompts.append(replace(found, messages=found.messages[:last], position=prompt))
    return prompts


def render_user_message(
    tokenizer: "PreTrainedTokenizerBase", template: str | None, prompt: "str | Conversation"
) -> str:
    """The text that the answer to a user's message, or to a conversation, follows."""
    if isinstance(prompt, str):
        prompt = Conversation([{"role": "user", "content": prompt}])
    tools: Any = prompt.tools  # as in `render_messages`
    template = tokenizer.get_chat_template(template, tools)
    if "strftime_now" in template:
        template = with_fixed_date(template)
    try:
        text = tokenizer.apply_chat_template(
            prompt.messages, tools, chat_template=template, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # a template may raise anything
        raise base.UserError(f"--sample-prompt: the chat template fails, {base.first_line(error)}") from error
    assert isinstance(text, str)  # as it is not tokenized
    return text


def ends_of_answers(tokenizer: "PreTrainedTokenizerBase", template: str | None = None) -> list[int]:
    """The token that a chat template, by default the tokenizer's, puts behind an answer, where that is a special one;
    else none."""
    answer = "Zq"  # in no name of a token
    messages = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # no template, or one that wants other messages
        text = ""
    assert isinstance(text, str)  # as it is not tokenized
    behind = tokenizer(text.rpartition(answer)[2].lstrip(), add_special_tokens=False)["input_ids"]
    if behind and (token := tokenizer.added_tokens_decoder.get(behind[0])) and token.special:
        return [behind[0]]
    return []


def describe_examples(documents: Iterator, encoder: TextFormat) -> str:
    """Return the first conversation of each kind, or the first rows, up to EXAMPLES: for each a line with its position
    and kind, and its text, at most EXAMPLE_TOKENS tokens, with [[ ]] around what is trained on."""
    found: dict[str, str] = {}
    for number, document in enumerate(documents, 1):
        kind, title = f"row {number}", f"row {number}"
        if isinstance(document, Conversation):
            kind = describe_kind(document)
            title = f"{document.position}: {kind}"
        if kind not in found:
            encoded = encoder.encode([document], Counter())
            if len(encoded.tokens):
                found[kind] = f"--- {title}\n{mark_trained(encoded, encoder.tokenizer)}"
        if len(found) == EXAMPLES:
            break
    return "\n".join(found.values())


def describe_kind(conversation: Conversation) -> str:
    """What a conversation has that others may lack, in words."""
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    kinds = {
        "system": not {"system", "developer"}.isdisjoint(roles),
        "tools": bool(conversation.tools) or any(map(calls_of, messages)),
        "reasoning": any(THOUGHTS & message.keys() for message in messages) or "</think>" in "".join(texts),
        "several turns": roles.count("user") > 1,
    }
    return ", ".join(kind for kind, is_there in kinds.items() if is_there) or "one turn"


def mark_trained(encoded: Encoded, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text of a document's tokens, of many the first and the last ones; [[ ]] is around what is trained on."""
    halves = [slice(None)]
    if len(encoded.tokens) > EXAMPLE_TOKENS:
        halves = [slice(EXAMPLE_TOKENS // 2), slice(-EXAMPLE_TOKENS // 2, None)]
    texts = []
    for half in halves:
        tokens, trained = encoded.tokens[half], encoded.trained[half].astype(bool)
        borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        parts = []
        for first, last in itertools.pairwise(borders):
            text = tokenizer.decode(tokens[first:last].tolist())
            assert isinstance(text, str)  # of one list of ids
            parts.append(f"[[{text}]]" if trained[first] else text)
        texts.append("".join(parts))
    return " ... ".join(texts)
