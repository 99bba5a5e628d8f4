"""Omissions: what a conversation has and its rendered text lacks.

One conversation of each shape is rendered once more with marks in its texts: the marks that do not come out are the
turns, calls, parts, fields and tools that the template leaves out. What it cuts because of what a text holds, such as
thoughts before </think>, is looked for in the text of each conversation.
"""

import copy
import json
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from harness.data.schema import NAMES_AND_WEIGHTS, Conversation, calls_of, parts_of


class Omission(NamedTuple):
    """Something that a template leaves out or changes."""

    text: str
    is_fault: bool = True  # of the record; else a warning


class Mark(NamedTuple):
    """A word that no text has, in a text of a conversation."""

    word: str
    is_wanted: bool  # in the rendered text
    omission: Omission  # if that is otherwise


def shape_of(conversation: Conversation) -> Hashable:
    """What decides which texts of a conversation a template writes: which kinds of messages it has, and where."""
    messages, after = conversation.messages, after_last_question(conversation)
    kinds = {
        (
            message["role"],
            number == 0,
            number >= after,
            number == len(messages) - 1,
            frozenset(name for name, value in message.items() if value and not is_blank(value)),
            *((min(len(items), 2), shape_of_items(items)) for items in (parts_of(message), calls_of(message))),
        )
        for number, message in enumerate(messages)
    }
    return bool(conversation.tools), frozenset(kinds)


def is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def shape_of_items(items: list[dict]) -> frozenset:
    """The fields and types of parts or calls."""
    return frozenset((name, type(value), bool(value)) for item in items for name, value in item.items())


def after_last_question(conversation: Conversation) -> int:
    """The number of the message after the user's last one: templates cut the thoughts of answers before it."""
    roles = [message["role"] for message in conversation.messages]
    return len(roles) - roles[::-1].index("user") if "user" in roles else 0


def with_marks(conversation: Conversation) -> tuple[Conversation, list[Mark]]:
    """A copy with a mark in each text of its messages, in the name and each argument of the functions that they call,
    in a field of each part that no template knows, and in the name of each tool."""
    messages, tools = list(map(copy.deepcopy, conversation.messages)), copy.deepcopy(conversation.tools)
    marks: list[Mark] = []

    def mark(does: str, what: str = "the chat template", is_fault: bool = True, is_wanted: bool = True) -> str:
        marks.append(Mark(f"zqx{len(marks)}xqz", is_wanted, Omission(f"{what} {does}", is_fault)))
        return marks[-1].word

    after, advice = after_last_question(conversation), "where it is to be trained on give one that writes it"
    for number, message in enumerate(messages):
        role, turns = message["role"], f"the {message['role']}"
        if role == "assistant" and number < after:
            turns = "earlier turns of the assistant"
        for name, value in message.items():
            if name == "content" and isinstance(value, str) and value.strip():
                beside = " beside a call" if calls_of(message) else ""
                message[name] += mark(f"leaves out the content of the {role}{beside}; give one that writes it")
            elif isinstance(value, str) and value.strip() and name not in NAMES_AND_WEIGHTS:
                message[name] += mark(f"leaves out {name} of {turns}; {advice}", is_fault=False)
        for call in calls_of(message):
            called = f"its call of {call['name']}"
            call["name"] += mark(f"leaves out {called}; give one that writes tool_calls")
            arguments, lost = call.get("arguments"), f"leaves out arguments of {called}; give one that writes them"
            if isinstance(arguments, dict):
                call["arguments"] = {name: mark(lost) for name in arguments}
            elif arguments:
                call["arguments"] = mark(lost)
        for part in parts_of(message):
            what = f"the content of its {role} is a list of parts, which the chat template"
            of_parts = "give the text alone, or a template that reads parts"
            if "text" in part:
                part["text"] += mark(f"leaves out; {of_parts}", what)
            if isinstance(part.get("thinking"), str):
                part["thinking"] += mark(f"leaves out thinking of {turns}; {advice}", is_fault=False)
            part["of no template"] = mark(f"writes as it is; {of_parts}", what, is_wanted=False)
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            function["name"] += mark("does not write tools, so it is trained on as if there were none", is_fault=False)
    return replace(conversation, messages=messages, tools=tools), marks


def changed_contents(conversation: Conversation, text: str) -> Iterator[Omission]:
    """The contents of messages that are not in the rendered `text`, whatever its white space; tools' may be JSON."""
    written, at, after = without_space(text), 0, after_last_question(conversation)
    for number, message in enumerate(conversation.messages):
        role, content = message["role"], message.get("content")
        if not isinstance(content, str):
            continue
        for form in map(without_space, (content, json.dumps(content, ensure_ascii=False)[1:-1])):
            found = written.find(form, at)
            found = written.find(form) if found < 0 else found  # a template may put a system prompt elsewhere
            if found >= 0:
                at = found + len(form)
                break
        else:
            what = "cuts <think> out of" if "</think>" in content else "changes"
            if role != "assistant" or number < conversation.first_trained:
                yield Omission(f"the chat template {what} the content of the {role}", is_fault=False)
            elif number < after:
                yield Omission(f"the chat template {what} earlier turns of the assistant", is_fault=False)
            else:
                problem = f"the chat template {what} the answer of the assistant that is trained on"
                yield Omission(f"{problem}; give one that writes all of its content")


def without_space(text: str) -> str:
    return "".join(text.split())


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)
