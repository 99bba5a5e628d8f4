"""Chat: conversations as tokens, by a chat template, with a mask of what is trained on. A template is run in
transformers' sandbox of jinja; no other code of a tokenizer's folder runs. Called for a corpus whose records have
`messages`."""

import datetime
import itertools
import json
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.base import UserError, first_line
from harness.data.documents import take
from harness.data.formats import file_records, reader_of
from harness.data.hub_rows import hub_records
from harness.data.records import CHAT_FIELD, BadRecord, Conversation, Field, excerpt, names_of
from harness.data.windows import Window

ENCODE_BATCH = 256  # conversations per call of the tokenizer
TODAY = datetime.datetime(2024, 7, 26)  # for a template that asks: the date that Llama's takes where it has no clock
DATE_CODES = ["%a", "%A", "%b", "%B", "%c", "%d", "%-d", "%F", "%H"]
DATE_CODES += ["%I", "%j", "%m", "%-m", "%M", "%p", "%S", "%y", "%Y"]
LOOKED_AT = 100  # records among which the first good one tells what a corpus is
DIM, PLAIN = "\033[2m", "\033[0m"
EXAMPLE_TOKENS = 400  # that are printed of an example


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation as tokens."""

    tokens: np.ndarray  # uint32
    trained: np.ndarray  # uint8, 1 for each token that is trained on; the first, which nothing precedes, never is

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens."""

    tokenizer: Any
    template: str | None = None  # a jinja template; None: the tokenizer's
    loss: str = "assistant"  # which tokens are trained on: the assistant's, or all

    def identity(self) -> list:
        """All that decides which tokens and masks come out, beside the vocabulary."""
        template = self.template or self.tokenizer.chat_template
        special_tokens = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        date = [str(TODAY)] if self.asks_for_date() else []
        return [template, self.loss, special_tokens, *date]

    def asks_for_date(self) -> bool:
        """Whether a template prints today's date, which is always TODAY: tokens would be others each day."""
        return "strftime_now" in json.dumps(self.template or self.tokenizer.chat_template)

    def check(self, dataset: str) -> None:
        """Raises a UserError where no conversation could be rendered or masked."""
        source = "--chat-template" if self.template else f"--tokenizer {self.tokenizer.name_or_path}"
        try:
            template = self.tokenizer.get_chat_template(self.template)
        except ValueError as error:
            problem = f"holds conversations, and {source} has no chat template to render them"
            raise UserError(f"--dataset {dataset}: {problem}; give one with --chat-template FILE") from error
        if self.loss == "all":
            return
        if not self.tokenizer.is_fast:
            raise UserError(
                f"{source}: a tokenizer without its fast form cannot tell which tokens are the assistant's; "
                "use --chat-loss all to train on all of them"
            )
        if not re.search(r"{%-?\s*generation\s*-?%}", template):
            raise no_assistant_mask(f"{source}: its chat template has no {{% generation %}}")

    def encode(self, conversations: list[Conversation]) -> list[Example]:
        """Conversations with the same tools as tokens; raises what the template or the tokenizer does."""
        tools = conversations[0].tools
        template = self.tokenizer.get_chat_template(self.template, tools)
        if self.asks_for_date():
            template = with_fixed_date(template)
        encoded = self.tokenizer.apply_chat_template(
            [conversation.messages for conversation in conversations],
            tools=tools,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=self.loss == "assistant",
        )
        examples = []
        for number, ids in enumerate(encoded["input_ids"]):
            trained = np.ones(len(ids), np.uint8)
            if self.loss == "assistant":
                trained = np.array(encoded["assistant_masks"][number], np.uint8)
            trained[:1] = 0
            examples.append(Example(np.array(ids, np.uint32), trained))
        return examples

    def encode_records(self, records: Iterator, counts: Counter) -> Iterator[Example | BadRecord]:
        """Each conversation of `records` as an Example, in order, or what is wrong with it. One without a token to
        train on is left out, and `counts` gets how many were."""
        records = (as_conversation(record, number) for number, record in enumerate(records, 1))
        while batch := list(itertools.islice(records, ENCODE_BATCH)):
            for _, group in itertools.groupby(batch, tools_of):
                for example in self.encode_group(list(group)):
                    if isinstance(example, Example) and not example.trained.any():
                        counts["conversations without a trained token"] += 1
                    else:
                        yield example

    def encode_group(self, group: list[Conversation | BadRecord]) -> list[Example | BadRecord]:
        """Conversations with the same tools, or one other record."""
        if isinstance(group[0], BadRecord):
            return [record._replace(of_chat=True) for record in group]
        group = [conversation for conversation in group if isinstance(conversation, Conversation)]
        try:
            return self.encode(group) if group else []
        except Exception as error:  # a template may raise anything
            if len(group) > 1:
                return [example for one in group for example in self.encode_group([one])]
            return [BadRecord(f"the chat template fails, {first_line(error)}", group[0].number, of_chat=True)]


def with_fixed_date(template: str) -> str:
    """A template for which today is TODAY: its `strftime_now` is a macro of its own. A function given as an argument
    would not reach it, as transformers hands on nothing but data."""
    replaced = "".join(f".replace('{code}', '{TODAY.strftime(code)}')" for code in DATE_CODES)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"


def as_conversation(record, number: int):
    """A record of a file of conversations; one that is text is a bad one."""
    if isinstance(record, str):
        return BadRecord(f"{excerpt(record)} instead of a list of messages", number, of_chat=True)
    return record


def tools_of(record: Conversation | BadRecord) -> str:
    """What records that are encoded in one call have in common."""
    if isinstance(record, Conversation):
        return json.dumps(record.tools)
    return type(record).__name__


def no_assistant_mask(problem: str) -> UserError:
    """No token of any conversation would be trained on."""
    advice = "give a template that has it around what the assistant writes with --chat-template FILE"
    return UserError(
        f"{problem}, so which tokens are the assistant's is not known; {advice}, or train on all tokens with "
        "--chat-loss all"
    )


def example_batches(
    examples: Iterator[Example], count: int, counts: Counter
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(tokens, mask, length of each conversation) of up to `count` examples at a time; `counts` gets how many
    documents and tokens."""
    while batch := list(take(examples, count)):
        tokens = np.concatenate([example.tokens for example in batch])
        trained = np.concatenate([example.trained for example in batch])
        counts.update(documents=len(batch), tokens=len(tokens))
        yield tokens, trained, np.array([len(example) for example in batch], np.int64)


def read_template(path: str | None) -> str | None:
    """The template in the file of --chat-template, None without one."""
    if path is None:
        return None
    try:
        return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"--chat-template {path}: cannot be read ({reason}); name a jinja file") from error


def has_conversations(features, text_field: Field) -> bool:
    """Whether rows with these `datasets.Features` are conversations, by the rule of `holds_conversations`."""
    from datasets import Value

    first = next((name for name in (*names_of(text_field), CHAT_FIELD) if name in features), "")
    return first == CHAT_FIELD and not isinstance(features[first], Value)  # a text there is no list of messages


def holds_conversations(files: list[pathlib.Path], rows, text_field: Field) -> bool:
    """Whether the records of local files, or of hub rows where there are none, are conversations: the first good one
    has `messages` and none of the fields of `text_field`. What cannot be read is found later."""
    names = (*names_of(text_field), CHAT_FIELD)
    if files and not getattr(reader_of(files[0]), "HAS_FIELDS", True):
        return False
    try:
        if files:
            records = file_records(files[0], names, Counter())
        else:
            records = hub_records(rows, "the data set", names, Counter())
        for record in itertools.islice(records, LOOKED_AT):
            if isinstance(record, BadRecord):
                if record.of_chat:
                    return True
            elif isinstance(record, Conversation):
                return True
            elif len(record):
                return False
    except UserError:
        pass
    return False


def refuse_streaming(dataset: str, packing: str | None, is_chat: bool) -> None:
    """Raises a UserError where a corpus cannot be streamed: conversations have a mask, which only the cache holds, and
    whole documents are packed when all lengths are known."""
    if is_chat:
        problem = "holds conversations, whose masks are in the token cache"
    elif packing == "best-fit":
        problem = "--packing best-fit needs the lengths of all documents first"
    else:
        return
    raise UserError(f"--dataset {dataset}: {problem}; leave out --streaming")


def describe_example(window: np.ndarray | Window, tokenizer, colours: bool, real_tokens: int) -> str:
    """The text of a window without its padding, which begins at `real_tokens`. What is not trained on is dim, or
    without colours what is trained on is in [[ ]]. What is longer than EXAMPLE_TOKENS is cut."""
    if not isinstance(window, Window):
        window = Window(window)
    trained = np.ones(len(window.tokens), bool)
    trained[0] = False
    if window.trained is not None:
        trained[1:] = window.trained
    shown = min(real_tokens, EXAMPLE_TOKENS)
    tokens, trained = window.tokens[:shown], trained[:shown]
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts = []
    for first, last in itertools.pairwise(borders):
        text = tokenizer.decode(tokens[first:last].tolist())
        if colours:
            parts.append(text if trained[first] else f"{DIM}{text}{PLAIN}")
        else:
            parts.append(f"[[{text}]]" if trained[first] else text)
    if shown < real_tokens:
        parts.append(" ...")
    return "".join(parts)
