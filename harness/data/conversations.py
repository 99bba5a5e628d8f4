"""Conversations: the layouts in which records hold them, and their messages as chat templates take them.

LAYOUTS has the layouts; the first that a record has is read. A column that --text-field names and that holds messages
is one as well. All but `messages` are brought to role and content:

- ShareGPT's `conversations` have `from` and `value`; the names in ROLES are known, a call of functions is JSON.
- `prompt` and `completion` are both text or both lists of messages, as TRL has them; what is in the prompt is not
  trained on.
- Alpaca's `instruction` and `input`, with a blank line between, are the user's turn, `output` the assistant's; before
  them `history` may have pairs of such turns.

A text in one of SYSTEM beside any of them is the first message, `tools` are a list or one as JSON text.
"""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.data.records import (
    BadRecord,
    Conversation,
    Field,
    NoFieldError,
    Record,
    excerpt,
    field_names,
    has_lone_surrogate,
    read_value,
)

ROLES = {  # of a template, by who speaks in ShareGPT's layout
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
}
CALLS = ("function_call", "tool_call")  # of functions, by the assistant
# Fields of a turn of the assistant's, and what says that it is trained on; a mask of 1 is read either way.
TRAINED = dict.fromkeys(("weight", "train", "training", "trainable", "loss", "loss_scale"), (1,)) | {"mask": ()}
# Fields of a message that a template need not write, beside its content and calls, which are looked at one by one.
NAMES_AND_WEIGHTS = {"role", "content", "tool_calls", "function_call", "name", "id", "tool_call_id", *TRAINED}
SYSTEM = ("system", "system_prompt", "system_message")
NOT_READ = {  # fields beside a conversation that change its text, and what to do; for `tools` by other names see below
    "functions": "name them tools",
    "chat_template_kwargs": "set them in a template for --chat-template FILE",
}
BESIDE_CHAT = (*SYSTEM, "tools", *NOT_READ)
OF_PREFERENCES = (
    "chosen and rejected are pairs of preferences, for DPO, which is not here; to train on the chosen ones name them "
    "completion, beside a prompt, or messages"
)


class Layout(NamedTuple):
    """How records hold conversations."""

    title: str  # for the header
    needs: tuple[str, ...]  # fields without which a record has another layout
    may_have: tuple[str, ...]  # fields that are read where they are there, beside BESIDE_CHAT
    read: Callable[[dict[str, Any]], tuple[list[dict], int]]  # messages, and the first of them that is trained on


def read_fields(fields: dict[str, Any], name: str) -> Record:
    """The document in the field of a record, or a conversation in the layout, that `name` is."""
    layout = layout_of(name)
    value = fields.get(name)
    if isinstance(value, str) or not (name in LAYOUTS or is_objects(value)):
        return read_value(fields, name)
    try:
        return conversation_of(fields, layout, name)
    except ValueError as error:
        return BadRecord(str(error), layout=name)


def find_document(record: Any, names: tuple[str, ...]) -> Record:
    """The document of a record of JSON: that of the first name which it has."""
    fields = record if isinstance(record, dict) else {}
    for name in names:
        if has_layout(fields, name) if name in LAYOUTS else name in fields:
            return read_fields(fields, name)
    wanted, advice = names[-1], "name it with --text-field"
    if isinstance(fields.get(wanted), str):  # `--text-field messages` where these are text
        return read_fields(fields, wanted)
    if wanted in LAYOUTS:
        wanted = missing_in(fields, LAYOUTS[wanted])
        advice = "give records of another format a source of their own: --dataset FILE FILE"
    elif {"chosen", "rejected"} <= fields.keys():
        advice = OF_PREFERENCES
    elif fields:
        advice += f", or rename fields: conversations are {describe_layouts()}"
    others = f", only {', '.join(fields)}" if len(fields) > 1 else ""
    return BadRecord(f"no field {wanted!r} in {excerpt(record)}{others}; {advice}")


def columns_beside(layout: Layout, columns: list[str]) -> list[str]:
    """Those columns of a file that are read beside the ones that a layout needs."""
    beside = (*layout.may_have, *BESIDE_CHAT)
    return [name for name in columns if name in beside or (is_named_like_tools(name) and name not in layout.needs)]


def choose_field(columns: list[str], text_field: Field) -> str:
    """The column or layout that is read, of those in a file; a NoFieldError where there is none."""
    for name in field_names(text_field):
        if set(layout_of(name).needs) <= set(columns):
            return name
    raise NoFieldError(columns)


def layout_of(name: str) -> Layout:
    """The layout of this name, or that of a column of messages."""
    return LAYOUTS.get(name) or layout_of_messages(name, f"{name} (a list of messages)")


def layout_of_messages(name: str, title: str) -> Layout:
    return Layout(title, (name,), (), lambda fields: (messages_in(fields.get(name), name), 0))


def has_layout(fields: dict[str, Any], name: str) -> bool:
    """Whether a record has what a layout needs; null is as good as absent, and a text is no list of messages."""
    needs = LAYOUTS[name].needs
    return all(fields.get(need) is not None for need in needs) and not (
        len(needs) == 1 and isinstance(fields[needs[0]], str)
    )


def missing_in(fields: dict[str, Any], layout: Layout) -> str:
    return next((need for need in layout.needs if fields.get(need) is None), layout.needs[0])


def describe_layouts() -> str:
    *others, last = (" and ".join(layout.needs) for layout in LAYOUTS.values())
    return f"{', '.join(others)}, or {last}"


# ----------------------------------------------------------------------------------------------------------------------
# The messages of a record; a ValueError says what is wrong with it


def conversation_of(fields: dict[str, Any], layout: Layout, name: str) -> Conversation:
    if len(layout.needs) > 1 and not has_layout(fields, name):
        raise ValueError(f"{missing_in(fields, layout)} is null, where a record needs {' and '.join(layout.needs)}")
    fields = {field: value for field, value in fields.items() if value is not None}
    messages, first_trained = layout.read(fields)
    for field in SYSTEM:
        system, first = fields.get(field, ""), messages[0]
        if not isinstance(system, str):
            raise ValueError(f"{field} is {excerpt(system)} instead of text")
        if system.strip() and first["role"] not in ("system", "developer"):
            messages, first_trained = [{"role": "system", "content": system}, *messages], first_trained + 1
        elif system.strip() and first.get("content") != system:
            raise ValueError(f"{field} is {excerpt(system)}, and the first message is another system prompt")
    for field, value in fields.items():
        advice = NOT_READ.get(field) or ("name them tools" if is_named_like_tools(field) and are_tools(value) else "")
        if value and advice:
            raise ValueError(f"{field} is {excerpt(value)}, which is not read; {advice}")
    tools = read_tools(fields.get("tools"))
    if not isinstance(tools, list | None):
        raise ValueError(f"tools are {excerpt(tools)} instead of a list")
    if has_lone_surrogate(json.dumps([messages, tools], ensure_ascii=False, default=str)):
        raise ValueError(f"{excerpt(messages)} with half a surrogate pair")
    is_text = "completion" in layout.needs and isinstance(fields["completion"], str)
    return Conversation(messages, tools or None, name, first_trained, is_text)


def read_completion(fields: dict[str, Any]) -> tuple[list[dict], int]:
    prompt, completion = fields["prompt"], fields["completion"]
    label = fields.get("label", True)
    if label == 0 or str(label).lower() == "false":
        raise ValueError(f"label is {excerpt(label)}, which says that the completion is not to be learnt")
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], 1
    for name in ("prompt", "completion"):
        if not isinstance(fields[name], list):
            shown = excerpt(fields[name])
            raise ValueError(f"{name} is {shown}, where both it and the other are text, or both lists of messages")
    before = messages_in(prompt, "prompt")
    return before + messages_in(completion, "completion"), len(before)


def read_alpaca(fields: dict[str, Any]) -> tuple[list[dict], int]:
    texts = {name: fields.get(name, "") for name in ("instruction", "input", "output")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} is {excerpt(value)} instead of text")
    if fields.get("context"):
        raise ValueError(f"context is {excerpt(fields['context'])}, which is not read; name it input")
    question = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text.strip())
    messages = []
    history = fields.get("history", [])
    for turns in [*history, (question, texts["output"])] if isinstance(history, list) else [history]:
        if not (isinstance(turns, list | tuple) and len(turns) == 2 and all(isinstance(turn, str) for turn in turns)):
            raise ValueError(f"history is {excerpt(history)} instead of pairs of a question and its answer")
        messages += [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": turns[1]}]
    return messages, 0


def messages_in(value: Any, name: str) -> list[dict]:
    """The messages in a list of objects with a role and a content, a text or a list of parts, which only a message that
    calls tools may lack; or with ShareGPT's `from` and `value`."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{excerpt(value)} instead of a list of messages")
    messages = []
    for number, message in enumerate(value):
        place = f"{name}[{number}]"
        if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
            message = from_sharegpt(message, place)
        if not is_message(message):
            wanted = "an object with role and content"
            if name == "conversations":
                wanted += ", or with from and value"
            raise ValueError(f"{place} is {excerpt(message)} instead of {wanted}")
        if message["role"] == "assistant":
            for field, values in TRAINED.items():
                if field in message and message[field] not in values:
                    problem = f"{place} has {field} {excerpt(message[field])}, and turns of the assistant are all"
                    raise ValueError(f"{problem} trained on alike; drop that field, or the turn")
        for part in parts_of(message):
            if not isinstance(part, dict) or not any(isinstance(part.get(name), str) for name in ("text", "thinking")):
                raise ValueError(f"{place} has a part that is not text, {excerpt(part)}")
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls_of(message)):
            called = excerpt(message.get("tool_calls") or message.get("function_call"))
            raise ValueError(f"{place} calls {called} instead of functions with a name and arguments")
        messages.append({field: of_field for field, of_field in message.items() if of_field is not None})
    return messages


def parts_of(message: dict) -> list:
    """The parts of a message whose content is no text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def calls_of(message: dict) -> list:
    """The functions that a message calls, each with a name and arguments; `function_call` is OpenAI's older field."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    older = message.get("function_call")
    return [*functions, older] if older else functions


def from_sharegpt(message: dict, place: str) -> dict:
    """A message of ShareGPT's with the names that templates know."""
    speaker, value = message["from"].lower(), message.get("value")
    others = {name: of_name for name, of_name in message.items() if name not in ("from", "value")}
    if speaker in ROLES:
        return {"role": ROLES[speaker], "content": value, **others}
    if speaker not in CALLS:
        known = ", ".join([*ROLES, *CALLS])
        raise ValueError(f"{place} is from {excerpt(message['from'])}, where {known} are known")
    calls = None
    with contextlib.suppress(ValueError, TypeError):
        calls = json.loads(value)
    calls = [calls] if isinstance(calls, dict) else calls
    if not is_objects(calls) or not all(isinstance(call.get("name"), str) for call in calls):
        wanted = 'JSON such as {"name": "add", "arguments": {"a": 1}}'
        raise ValueError(f"{place} is a {speaker} of {excerpt(value)} instead of {wanted}")
    called = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": called, **others}


def read_tools(value: Any) -> Any:
    """The tools of a record, of which JSON text is read."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value) if value.strip() else None
    return value


def are_tools(value: Any) -> bool:
    """True for a list of functions as `tools` has them, or one as JSON text."""
    tools = read_tools(value)
    functions = [tool.get("function", tool) for tool in tools] if is_objects(tools) else []
    return any(
        isinstance(function, dict) and "name" in function and {"description", "parameters"} & function.keys()
        for function in functions
    )


def is_named_like_tools(column: str) -> bool:
    """True for a column that may hold `tools` by another name: tool_defs, available_functions."""
    return column != "tools" and re.search("tool|function", column.lower()) is not None


def is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(calls_of(message)))


def is_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


LAYOUTS = {
    "messages": layout_of_messages("messages", "messages"),
    "conversations": layout_of_messages("conversations", "conversations, as ShareGPT's"),
    "conversation": layout_of_messages("conversation", "conversation"),
    "prompt+completion": Layout("prompt and completion", ("prompt", "completion"), ("label",), read_completion),
    "instruction+output": Layout(
        "instruction, input and output, as Alpaca's",
        ("instruction", "output"),
        ("input", "history", "context"),
        read_alpaca,
    ),
}
