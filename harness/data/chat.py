"""Chat: conversations as tokens, by a chat template, with a mask of what is trained on. A template runs in
transformers' sandbox of jinja; no other code of a tokenizer's folder runs.

What the assistant writes are the characters between {% generation %} and {% endgeneration %}. transformers finds them
by counting the characters rendered so far, which is wrong in a macro, as its text is inserted later. Here the tags
write BEGIN and END into the text, which `take_spans` takes out again. Without these tags, a turn of the assistant is
what lies between two renderings: that of the messages before it, with the generation prompt, and that of the messages
up to it. Both must be prefixes of the rendered conversation. So the token that ends the turn, which a model must learn
to write, is trained on, and the generation prompt is not.

A template may leave out parts of a conversation. Two detectors find this. `find_omissions` renders one conversation of
each shape once more, with a word that no text has, a mark, in each of its texts: a missing mark is a turn, a call, a
part, a field or a tool that the template leaves out. It does not see what a template cuts depending on the text itself,
such as thoughts before </think>. `changed_contents` does: it looks for the texts of each conversation as rendered.
"""

import copy
import datetime
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jinja2
import numpy as np
import tokenizers

from harness import base
from harness.data.schema import (
    ROLE_BY_SPEAKER,
    TURN_LOSS_FIELDS,
    Conversation,
    calls_of,
    layout_of,
    parts_of,
    refuse_or_count,
)
from harness.data.tokenize import Encoded, TextEncoder, added_special_tokens, backend_of, encode_texts

# The date that templates get, so that the token cache does not depend on the day: the one in Llama 3.2's template
TODAY = datetime.datetime(2024, 7, 26)
# strftime's codes, also without leading zeros: %d, %-d
DATE_CODES = [f"%{dash}{letter}" for dash in ("", "-") for letter in "aAbBcCdDeFGgHIjkmMpPrRSTuUVwWxXyYzZ"]
COMPLETIONS = "prompt+completion"  # the layout that needs no template if both are text
GENERATION = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")
BEGIN, END = "\ufdd0[", "\ufdd0]"  # around generated text; U+FDD0 is no character
# Fields of a message that a template need not write, or that are checked in another way (contents and calls)
FIELDS_WITHOUT_MARK = {"role", "content", "tool_calls", "function_call", "name", "id", "tool_call_id"}
FIELDS_WITHOUT_MARK |= TURN_LOSS_FIELDS.keys()
CONTEXT_CHARACTERS = 30  # shown on each side of a position


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[tuple[int, int]]  # (first, after the last) character of each part that is trained on


class TemplateProblem(NamedTuple):
    """What is wrong with a conversation as a template renders it."""

    text: str
    is_error: bool = True  # False: a warning


class Mark(NamedTuple):
    """A word that no text has, put into a text of a conversation."""

    word: str
    must_appear: bool  # True: in the rendered text; False: not there
    problem: TemplateProblem  # to report if that is not so


class BadConversationError(Exception):
    """A conversation that cannot be trained on; the argument is the fault."""


class ChatEncoder(TextEncoder):
    """Encoder of conversations."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        template: str | None,
        loss: str,
        skip_bad: bool = False,
        layout: str = "messages",
    ):
        """`template` is a jinja template, by default the tokenizer's; the tokens of `loss`, "assistant" or "all", are
        trained on; `layout` is that of the records."""
        super().__init__(tokenizer, vocab_size)
        self.template, self.loss, self.skip_bad, self.layout = template, loss, skip_bad, layout
        self.template_origin = "--chat-template" if template else f"--tokenizer {tokenizer.name_or_path}"
        own_template = tokenizer.chat_template
        if isinstance(own_template, dict):  # several, by name
            own_template = own_template.get("default")
        self.has_template = bool(template or own_template)
        self.problems_by_shape: dict[Hashable, list[TemplateProblem]] = {}  # see `shape_of`
        # by warning: (the position of its first conversation, the number of its conversations)
        self.warned: dict[str, tuple[str, int]] = {}

    def identity(self) -> list:
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        template = self.template or self.tokenizer.chat_template
        return [*super().identity(), template, self.loss, special_tokens, str(TODAY)]

    def describe(self) -> dict[str, str]:
        """Return the header's lines about the layout of the records and about what is trained on."""
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
        return {"format": layout, "trained on": trained}

    def check(self, dataset: str) -> None:
        """Raise a UserError if there is no chat template or end-of-text token, or no offsets for the loss mask."""
        if not self.has_template and self.layout != COMPLETIONS:
            raise self.no_template_error(f"--dataset {dataset}: holds conversations")
        if not self.has_template and self.tokenizer.eos_token is None:
            problem = "it has no end-of-text token (eos_token), which completions end with"
            raise base.UserError(f"{self.template_origin}: {problem}")
        if self.loss == "assistant" and not self.tokenizer.is_fast:
            class_name = type(self.tokenizer).__name__
            problem = f"{class_name} does not say which characters a token has (a slow tokenizer, without offsets)"
            raise base.UserError(
                f"--tokenizer {self.tokenizer.name_or_path}: {problem}, so which tokens are the assistant's is not "
                "known; give a tokenizer that has a tokenizer.json, or train on all tokens with --chat-loss all"
            )

    def warnings(self) -> list[str]:
        """Return the warnings about all conversations that were rendered, each with the position of the first one and
        with their number."""
        return [
            f"{first_position}: {text} ({base.counted(count, 'conversation')})"
            for text, (first_position, count) in self.warned.items()
        ]

    def no_template_error(self, problem: str) -> base.UserError:
        missing = f"and --tokenizer {self.tokenizer.name_or_path} has no chat template to render them"
        return base.UserError(f"{problem}, {missing}; give one with --chat-template FILE, or --chat-template chatml")

    def encode(self, documents: list, counts: Counter) -> Encoded:
        """Encode conversations; those without a token to train on are left out and counted, bad ones are refused or
        counted."""
        rendered = []
        for conversation in documents:
            try:
                rendered.append(self.render(conversation))
            except base.UserError:
                raise
            except BadConversationError as error:
                refuse_or_count(conversation.position, str(error), self.skip_bad, counts)
            except jinja2.TemplateSyntaxError as error:
                template = self.template_for(conversation)
                added_lines = with_fixed_date(template).count("\n") - template.count("\n")
                line = error.lineno - added_lines
                problem = f"its chat template has a syntax error in line {line}, {error.message}"
                raise base.UserError(f"{self.template_origin}: {problem}; fix it") from error
            except Exception as error:  # a template may raise anything
                fault = f"the chat template fails, {base.first_line(error)}"
                refuse_or_count(conversation.position, fault, self.skip_bad, counts)
        encoded = self.encode_rendered(rendered) if rendered else ()  # a slow tokenizer takes no empty list
        return self.join_masked(encoded, counts, "conversations without a trained token")

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation as `apply_chat_template` does and find what is trained on."""
        if not self.has_template:
            return self.render_without_template(conversation)
        template, count = self.template_for(conversation), len(conversation.messages)
        has_spans = self.loss != "all" and has_generation(template)
        if has_spans and any(mark in text for mark in (BEGIN, END) for text in texts_in(conversation.messages)):
            raise BadConversationError("its text has U+FDD0, which is no character")
        text, spans = self.render_messages(conversation, template, count, with_spans=has_spans)
        self.check_text(conversation, template, text, has_spans)
        if self.loss == "all":
            return Rendered(text, [(0, len(text))])
        if not has_spans:
            return Rendered(text, self.spans_by_prefixes(conversation, template, text))
        if conversation.first_trained:  # answers in the prompt are marked too, and not trained on
            start = self.prompt_length(conversation, template, text)
            spans = [(max(first, start), last) for first, last in spans if last > start]
        return Rendered(text, spans)

    def template_for(self, conversation: Conversation) -> str:
        """Return the template that renders a conversation: a tokenizer may have another one for tools."""
        return self.tokenizer.get_chat_template(self.template, conversation.tools)

    def render_messages(
        self,
        conversation: Conversation,
        template: str,
        count: int,
        add_generation_prompt: bool = False,
        with_spans: bool = False,
    ) -> Rendered:
        """Render the first `count` messages, with the spans that the template marks if `with_spans`."""
        from transformers.utils.chat_template_utils import render_jinja_template  # takes long to import

        tools: Any = conversation.tools  # transformers types them as objects or functions
        rendered: Any = render_jinja_template(
            conversations=[conversation.messages[:count]],
            tools=tools,
            chat_template=with_fixed_date(with_marked_spans(template) if with_spans else template),
            add_generation_prompt=add_generation_prompt,
            **self.tokenizer.special_tokens_map,
        )
        text = rendered[0][0]
        return take_spans(text) if with_spans else Rendered(text, [])

    def spans_by_prefixes(self, conversation: Conversation, template: str, text: str) -> list[tuple[int, int]]:
        """Find the characters of each trained turn of the assistant in the rendered `text` of a conversation."""
        spans = []
        for number, message in enumerate(conversation.messages):
            if message["role"] != "assistant" or number < conversation.first_trained:
                continue
            try:
                first = self.prefix_length(conversation, template, text, number, add_generation_prompt=True)
            except Exception as error:
                if number:
                    raise
                fault = "it begins with the assistant, which the chat template has no prompt for"
                raise BadConversationError(fault) from error
            last = len(text)
            if number + 1 < len(conversation.messages):
                last = self.prefix_length(conversation, template, text, number + 1)
            spans.append((first, last))
        return spans

    def prompt_length(self, conversation: Conversation, template: str, text: str) -> int:
        """Return the number of characters of the messages before the first trained one, rendered."""
        count = conversation.first_trained
        try:
            return self.prefix_length(conversation, template, text, count)
        except base.UserError:  # some templates end a conversation unless a generation prompt follows
            return self.prefix_length(conversation, template, text, count, add_generation_prompt=True)

    def prefix_length(
        self, conversation: Conversation, template: str, text: str, count: int, add_generation_prompt: bool = False
    ) -> int:
        """Return the number of characters of the first `count` messages, rendered; a UserError if the rendered `text`
        of the conversation does not begin with them."""
        prefix, _ = self.render_messages(conversation, template, count, add_generation_prompt)
        if text.startswith(prefix):
            return len(prefix)
        pairs = enumerate(itertools.zip_longest(prefix, text))
        at = next(number for number, (one, other) in pairs if one != other)
        nearby = slice(max(0, at - CONTEXT_CHARACTERS), at + CONTEXT_CHARACTERS)
        change = f"{prefix[nearby]!r} becomes {text[nearby]!r}"
        problem = f"its chat template changes earlier messages when more follow ({change})"
        why = "such as one that moves a system prompt or drops thoughts"
        raise no_mask_error(f"--dataset {conversation.position}: {problem}, {why}")

    def render_without_template(self, conversation: Conversation) -> Rendered:
        """Render a prompt and its completion without a template, followed by the end-of-text token."""
        if not conversation.is_text_completion or len(conversation.messages) != 2 or conversation.tools:
            raise self.no_template_error(f"--dataset {conversation.position}: holds messages, a system prompt or tools")
        prompt, completion = (message["content"] for message in conversation.messages)
        text = prompt + completion.removesuffix(self.tokenizer.eos_token) + self.tokenizer.eos_token
        return Rendered(text, [(0 if self.loss == "all" else len(prompt), len(text))])

    @functools.cached_property
    def bos_ids(self) -> np.ndarray:
        """The special tokens that the tokenizer puts before a text, such as <s>; none with a template, which writes its
        own. As in TRL."""
        return np.array([] if self.has_template else added_special_tokens(self.tokenizer)[0], np.uint32)

    def check_text(self, conversation: Conversation, template: str, text: str, has_spans: bool) -> None:
        """Raise a BadConversationError for the first problem that is an error, such as a turn that the rendered `text`
        lacks. Others, such as thoughts cut out of earlier turns, are counted as warnings."""
        shape = shape_of(conversation)
        if shape not in self.problems_by_shape:
            num_messages = len(conversation.messages)
            if has_spans and self.render_messages(conversation, template, num_messages).text != text:
                change = "its chat template changes what it has marked with {% generation %}"
                raise no_mask_error(f"--dataset {conversation.position}: {change}")
            self.problems_by_shape[shape] = [
                *self.find_unknown_roles(conversation, template),
                *self.find_omissions(conversation, template),
            ]
        special = self.special_tokens_in(conversation, text)
        found = (*self.problems_by_shape[shape], *changed_contents(conversation, text), *special)
        for problem in dict.fromkeys(found):  # once, though several messages may have it
            if problem.is_error:
                raise BadConversationError(problem.text)
            first_position, count = self.warned.get(problem.text, (conversation.position, 0))
            self.warned[problem.text] = first_position, count + 1

    def find_omissions(self, conversation: Conversation, template: str) -> list[TemplateProblem]:
        """Find what a template leaves out of conversations of this shape."""
        marked, marks = with_marks(conversation)
        try:
            text, _ = self.render_messages(marked, template, len(marked.messages))
        except Exception:  # a template that checks a marked field reads it; the other marks are not looked for
            return []
        return list(dict.fromkeys(mark.problem for mark in marks if (mark.word in text) != mark.must_appear))

    def find_unknown_roles(self, conversation: Conversation, template: str) -> Iterator[TemplateProblem]:
        """Find roles by other names than templates have, such as human: an error if the assistant's turns are not
        trained on for it, a warning if the template does not mention the name."""
        for role in dict.fromkeys(message["role"] for message in conversation.messages):
            name = ROLE_BY_SPEAKER.get(role.lower(), role)
            if name == role:
                continue
            is_known = re.search(rf"""['"]{re.escape(role)}['"]""", template) is not None
            if name == "assistant" and self.loss != "all" and not (is_known and has_generation(template)):
                yield TemplateProblem(f"its role {role} is not trained on; name it assistant")
            elif not is_known:
                problem = f"the chat template does not know its role {role}; name it {name}"
                yield TemplateProblem(problem, is_error=False)

    def special_tokens_in(self, conversation: Conversation, text: str) -> Iterator[TemplateProblem]:
        """Find special tokens in the texts of messages: an error if the text was rendered before, as in
        `<|im_start|>user\nHi<|im_end|>` (see `was_rendered_before`), else a warning."""
        texts = "\n".join(texts_in(conversation.messages))
        if not self.special_token_pattern.search(texts):
            return
        tokens = [token for token in self.special_tokens if token in texts]
        if all(text.count(token) == texts.count(token) for token in self.special_tokens):
            return  # the template adds none: it is for texts that are rendered already
        for token in tokens:
            is_added = text.count(token) > texts.count(token)  # by the template
            for message in conversation.messages:
                parts = [part.strip() for part in texts_in(message) if token in part]
                if is_added and any(was_rendered_before(part, token, text) for part in parts):
                    problem = f"its text has {token}, so it is rendered already, and would be rendered twice"
                    advice = "remove it, or give the template in docs/DATA.md that adds nothing (Conversations)"
                    yield TemplateProblem(f"{problem}; {advice}")
                elif parts:
                    problem = f"the text of its {message['role']} has {token}, which becomes the special token"
                    yield TemplateProblem(f"{problem}, as by transformers", is_error=False)

    @functools.cached_property
    def special_tokens(self) -> list[str]:
        return [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    @functools.cached_property
    def special_token_pattern(self) -> re.Pattern:
        """One pattern for all special tokens, of which a tokenizer may have 1,000."""
        return re.compile("|".join(map(re.escape, self.special_tokens)) or r"(?!)")  # (?!) matches nothing

    def encode_rendered(self, rendered: list[Rendered]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (tokens, mask) of each text; a token is trained on if one of its characters is. `apply_chat_template`
        looks up the tokens of a span's first and last character instead, which fails if the character is a space or is
        in several tokens, or if the span is empty."""
        texts = [conversation.text for conversation in rendered]
        if self.loss == "all":
            for ids in encode_texts(self.tokenizer, texts):
                tokens = np.append(self.bos_ids, np.array(ids, np.uint32))
                yield tokens, np.ones(len(tokens), np.uint8)
            return
        encodings = self.offset_tokenizer.encode_batch(texts, add_special_tokens=False)
        for encoding, (_, spans) in zip(encodings, rendered, strict=True):
            trained = np.zeros(len(encoding.ids), np.uint8)
            starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            for first, last in spans:
                if first < last:  # an empty span may lie inside a token
                    trained[(starts < last) & (ends > first)] = 1
            tokens = np.append(self.bos_ids, np.array(encoding.ids, np.uint32))
            yield tokens, np.append(np.zeros_like(self.bos_ids, np.uint8), trained)

    @functools.cached_property
    def offset_tokenizer(self) -> tokenizers.Tokenizer:
        """The Rust tokenizer without its post-processor, which would exclude spaces from the characters of a token."""
        backend = copy.deepcopy(backend_of(self.tokenizer))
        backend.post_processor = None
        backend.encode_special_tokens = self.tokenizer.split_special_tokens  # lost by the copy
        return backend


def was_rendered_before(part: str, token: str, text: str) -> bool:
    """True if `part`, a text of a message, is the output of a template: a role follows `token` in it; or it begins or
    ends with `token`, next to the same token in the rendered `text`, which the template wrote."""
    before, _, after = text.partition(part)
    roles = "|".join({*ROLE_BY_SPEAKER, "developer"})
    return (
        re.search(rf"{re.escape(token)}({roles})(\n|<)", part) is not None
        or (part.startswith(token) and before.rstrip().endswith(token))
        or (part.endswith(token) and after.lstrip().startswith(token))
    )


def with_fixed_date(template: str) -> str:
    """Return a template for which today is TODAY: a macro `strftime_now` hides transformers' function of that name, the
    only thing a template gets that reads the clock."""
    if "strftime_now" not in template:
        return template
    replaced = "".join(f".replace('{code}', '{TODAY.strftime(code)}')" for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def has_generation(template: str) -> bool:
    """True if a template marks what the assistant writes."""
    return GENERATION.search(template) is not None


def with_marked_spans(template: str) -> str:
    """Return a template that writes BEGIN and END around what it marks with {% generation %}.

    `{%- generation -%}` becomes `{%- with %}BEGIN{% with -%}`, and `{%- endgeneration -%}` becomes
    `{%- endwith %}END{% endwith -%}`: white space is trimmed on the outer sides alone, and the block keeps a scope."""
    opening, closing = rf"{{%\1 with %}}{BEGIN}{{% with \3%}}", rf"{{%\1 endwith %}}{END}{{% endwith \3%}}"
    return GENERATION.sub(lambda tag: tag.expand(closing if tag[2] else opening), template)


def take_spans(text: str) -> Rendered:
    """Take BEGIN and END out of a rendered text, as spans. A ValueError if one lacks the other."""
    parts: list[str] = []
    starts: list[int] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for part in re.split(f"({re.escape(BEGIN)}|{re.escape(END)})", text):
        if part == BEGIN:
            starts.append(length)
        elif part == END:
            if not starts:
                raise ValueError("{% endgeneration %} is not after {% generation %}")
            spans.append((starts.pop(), length))
        else:
            parts.append(part)
            length += len(part)
    if starts:
        raise ValueError("{% generation %} is left before its end")
    return Rendered("".join(parts), spans)


# ----------------------------------------------------------------------------------------------------------------------
# What a template leaves out


def shape_of(conversation: Conversation) -> Hashable:
    """Return what decides which texts of a conversation a template writes: the kinds of its messages."""
    messages, first_after_question = conversation.messages, index_after_last_question(conversation)
    kinds = set()
    for number, message in enumerate(messages):
        is_first, is_last, is_earlier = number == 0, number == len(messages) - 1, number < first_after_question
        fields = frozenset(name for name, value in message.items() if value and not is_blank(value))
        parts, calls = shape_of_items(parts_of(message)), shape_of_items(calls_of(message))
        kinds.add((message["role"], is_first, is_last, is_earlier, fields, parts, calls))
    return bool(conversation.tools), frozenset(kinds)


def is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def shape_of_items(items: list[dict]) -> tuple[int, frozenset]:
    """Return (the number of parts or calls, 2 for more; their fields with types)."""
    fields = frozenset((name, type(value), bool(value)) for item in items for name, value in item.items())
    return min(len(items), 2), fields


def index_after_last_question(conversation: Conversation) -> int:
    """Return the index of the message after the user's last one; templates cut the thoughts of answers before it."""
    roles = [message["role"] for message in conversation.messages]
    return len(roles) - roles[::-1].index("user") if "user" in roles else 0


def with_marks(conversation: Conversation) -> tuple[Conversation, list[Mark]]:
    """Copy a conversation with a mark in each text of its messages, in the name and each argument of the functions
    that they call, in a field of each part that no template knows, and in the name of each tool."""
    messages, tools = copy.deepcopy(conversation.messages), copy.deepcopy(conversation.tools)
    marks: list[Mark] = []

    def new_mark(problem: str, is_error: bool = True, must_appear: bool = True) -> str:
        """Return a new word to put into a text. The `problem` is reported if the rendered text lacks it, or has it
        although it must not."""
        marks.append(Mark(f"zqx{len(marks)}xqz", must_appear, TemplateProblem(problem, is_error)))
        return marks[-1].word

    first_after_question = index_after_last_question(conversation)
    advice = "to train on it, give one that writes it"
    for number, message in enumerate(messages):
        role, speaker = message["role"], f"the {message['role']}"
        if role == "assistant" and number < first_after_question:
            speaker = "earlier turns of the assistant"
        for name, value in message.items():
            if name == "content" and isinstance(value, str) and value.strip():
                with_call = " beside a call" if calls_of(message) else ""
                problem = f"the chat template leaves out the content of the {role}{with_call}"
                message[name] += new_mark(f"{problem}; give one that writes it")
            elif isinstance(value, str) and value.strip() and name not in FIELDS_WITHOUT_MARK:
                problem = f"the chat template leaves out {name} of {speaker}"
                message[name] += new_mark(f"{problem}; {advice}", is_error=False)
        for call in calls_of(message):
            called = f"its call of {call['name']}"
            call["name"] += new_mark(f"the chat template leaves out {called}; give one that writes tool_calls")
            arguments = call.get("arguments")
            problem = f"the chat template leaves out arguments of {called}; give one that writes them"
            if isinstance(arguments, dict):
                call["arguments"] = {name: new_mark(problem) for name in arguments}
            elif arguments:
                word = new_mark(problem)
                call["arguments"] = f'{{"{word}": 0}}'
                # a warning about all conversations of this shape, which may call other functions
                problem = "the chat template writes arguments of its calls, which are JSON text, as a quoted text"
                problem += "; give them as an object"
                # JSON text that is quoted once more has \" before the word
                marks.append(Mark(f'\\"{word}', False, TemplateProblem(problem, is_error=False)))
        for part in parts_of(message):
            parts_problem = f"the content of its {role} is a list of parts, which the chat template"
            parts_advice = "give the text alone, or a template that reads parts"
            if isinstance(part.get("text"), str):
                part["text"] += new_mark(f"{parts_problem} leaves out; {parts_advice}")
            if isinstance(part.get("thinking"), str):
                problem = f"the chat template leaves out thinking of {speaker}"
                part["thinking"] += new_mark(f"{problem}; {advice}", is_error=False)
            # appears only if the template writes the part as an object
            part["unknown field"] = new_mark(f"{parts_problem} writes as it is; {parts_advice}", must_appear=False)
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            problem = "the chat template does not write tools, so it is trained on as if there were none"
            function["name"] += new_mark(problem, is_error=False)
    return replace(conversation, messages=messages, tools=tools), marks


def changed_contents(conversation: Conversation, text: str) -> Iterator[TemplateProblem]:
    """Find messages whose content the rendered `text` lacks. White space is ignored; a content may be there as a JSON
    string, as results of tools are."""
    written, position, first_after_question = without_space(text), 0, index_after_last_question(conversation)
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message.get("content")
        if not isinstance(content, str):
            continue
        spellings = [without_space(content), without_space(json.dumps(content, ensure_ascii=False)[1:-1])]
        end = find_end(spellings, written, position)
        if end is not None:
            position = end
            continue
        what = "cuts <think> out of" if "</think>" in content else "changes"
        if role != "assistant" or number < conversation.first_trained:
            yield TemplateProblem(f"the chat template {what} the content of the {role}", is_error=False)
        elif number < first_after_question:
            yield TemplateProblem(f"the chat template {what} earlier turns of the assistant", is_error=False)
        else:
            problem = f"the chat template {what} the answer of the assistant that is trained on"
            yield TemplateProblem(f"{problem}; give one that writes all of its content")


def find_end(spellings: list[str], text: str, start: int) -> int | None:
    """Return the end of the first of `spellings` that is in a text; None if none is."""
    for spelling in spellings:
        for begin in (start, 0):  # a template may move a system prompt
            found = text.find(spelling, begin)
            if found >= 0:
                return found + len(spelling)
    return None


def without_space(text: str) -> str:
    return "".join(text.split())


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def no_mask_error(problem: str) -> base.UserError:
    """Make the error for conversations whose assistant tokens cannot be found."""
    advice = "give a template that has {% generation %} around what the assistant writes with --chat-template FILE"
    return base.UserError(
        f"{problem}, so which tokens are the assistant's is not known; {advice}, or train on all tokens with "
        "--chat-loss all"
    )
