"""Schema: from a record of a file to its document: a text, token ids, token ids with labels, or a conversation.

LAYOUTS has the layouts of conversations; the first that a record has is read. A column that --text-field names and that
holds messages is one too. A `name` is a field or a key of LAYOUTS; of several `names` the first that is found is read.

Messages have role and content, or, as in ShareGPT, `from` (in ROLE_BY_SPEAKER or TOOL_CALL_SPEAKERS) and `value`, which
is JSON in a tool call. Other layouts are converted to messages:

- `prompt` and `completion` are both text or both lists of messages, as in TRL; the prompt is not trained on.
- Alpaca's `instruction` and `input`, joined by a blank line, are the user's turn, `output` the assistant's; `history`
  may have pairs of earlier turns.

A text in one of SYSTEM_FIELDS in the same record is the first message; `tools` are a list, or a list as JSON text.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from harness import base

DOC_SEPARATOR = "<|endoftext|>"  # separates the documents of a text, as in the original TinyStories files
MAX_TOKEN_ID = 2**32 - 1

LOSS_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")  # 1 for each trained token
PER_TOKEN_FIELDS = ("labels", "attention_mask", "position_ids", *LOSS_MASKS)  # an integer for each token id
# Fields that divide token ids into documents, and the number of values that each has for one document
DOCUMENT_FIELDS = {"seq_lengths": 1, "seq_start_id": 1, "cu_seqlens": 2}
ID_FIELDS = (*PER_TOKEN_FIELDS, *DOCUMENT_FIELDS)  # read together with token ids


class BadRecord(NamedTuple):
    """A record that cannot be trained on."""

    fault: str
    layout: str = ""  # the layout or column of its conversation; "" if it has none


@dataclass(frozen=True, eq=False)
class Conversation:
    """The messages of a record, and the tools that they may call."""

    messages: list[dict]
    tools: list[dict] | None = None
    layout: str = "messages"  # of its record: one of LAYOUTS, or a column
    first_trained: int = 0  # index of a message; those before it are a prompt
    is_text_completion: bool = False  # True if prompt and completion were texts, not lists of messages
    position: str = ""  # file and line of the record, for errors and warnings

    def __len__(self) -> int:
        """The number of characters as JSON, about those of the rendered text, by which `tokenize.next_batch` measures a
        batch."""
        return len(json.dumps([self.messages, self.tools], default=str))


@dataclass(frozen=True, eq=False)
class LabelledIds:
    """Token ids with a loss mask."""

    ids: np.ndarray
    trained: np.ndarray  # bool, same shape

    def __len__(self) -> int:
        return len(self.ids)


Document = str | np.ndarray | LabelledIds | Conversation
Record = Document | BadRecord | None  # None: a blank line

# kind of a document: its name in messages to the user
KINDS = {"text": "text", "ids": "token ids", "labels": "token ids with labels", "chat": "messages"}
MASKED_KINDS = {"labels", "chat"}  # kinds with a loss mask


def kind_of(document: Document) -> str:
    """Return the kind of a document, one of KINDS."""
    if isinstance(document, Conversation):
        return "chat"
    if isinstance(document, LabelledIds):
        return "labels"
    return "text" if isinstance(document, str) else "ids"


def read_text_or_ids(fields: dict[str, Any], field: str) -> Record:
    """Return the text or the token ids in a field; `input_ids` may have ids only. Ids go through `check_ids`."""
    value = fields[field]
    if field == "input_ids" or isinstance(value, list):
        are_ints = isinstance(value, list) and set(map(type, value)) <= {int}  # a bool is no token id
        if are_ints and 0 <= min(value, default=0) <= max(value, default=0) <= MAX_TOKEN_ID:
            others = {name: other for name, other in fields.items() if name != field}
            return check_ids(np.array(value, np.uint32), others)
        wanted = "token ids" if field == "input_ids" or are_ints else "text"
        return BadRecord(f"{excerpt(value)} instead of {wanted}")
    if not isinstance(value, str):
        return BadRecord(f"{excerpt(value)} instead of text")
    if has_lone_surrogate(value):
        return BadRecord(f"{excerpt(value)} with half a surrogate pair")
    return value


def check_ids(ids: np.ndarray, fields: dict[str, Any]) -> np.ndarray | LabelledIds | BadRecord:
    """Apply ID_FIELDS to token ids as transformers does: padding (`attention_mask` 0) is removed, and ids with the
    label -100 or a 0 in one of LOSS_MASKS are not trained on. Attention and positions that a packed sequence
    cannot have make a bad record, as do masks and weights under other names."""
    for name, count in DOCUMENT_FIELDS.items():
        if np.array(fields.get(name, ()), object).size > count:  # dtype object: inner lists may differ in length
            return BadRecord(f"{name} has several documents; give each document a record")
    for name, values in fields.items():
        is_for_tokens = is_named_like_mask(name) and is_flat(values) and len(values) == len(ids)
        # equal values, such as a pad_mask of ones, change nothing, unless they exclude all tokens
        if is_for_tokens and any(value != values[0] or value in (0, base.IGNORE_INDEX) for value in values):
            advice = "give a loss_mask with 1 for each token to train on, or remove it"
            return BadRecord(f"{name} is {excerpt(values)}, which is not read; {advice}")
    values_by_name = {name: fields[name] for name in PER_TOKEN_FIELDS if fields.get(name) is not None}
    if not values_by_name:
        return ids
    arrays = {name: np.asarray(values) for name, values in values_by_name.items() if is_flat(values)}
    for name, values in values_by_name.items():
        if name not in arrays or arrays[name].shape != ids.shape or (len(ids) and arrays[name].dtype.kind not in "bui"):
            wanted = f"{base.counted(len(ids), 'integer')}, one per token"
            return BadRecord(f"{name} is {excerpt(values)} instead of {wanted}")
    for name in ("attention_mask", *LOSS_MASKS):
        if name in arrays and not np.isin(arrays[name], (0, 1)).all():
            return BadRecord(f"{name} is {excerpt(arrays[name])} instead of 0 and 1; give each document a record")
    attended = np.flatnonzero(arrays.get("attention_mask", np.ones(len(ids))))
    if len(attended) and attended[-1] - attended[0] >= len(attended):
        return BadRecord("attention_mask is 0 between tokens; it may be 0 only before and after them")
    kept = slice(attended[0], attended[-1] + 1) if len(attended) else slice(0)
    ids, arrays = ids[kept], {name: values[kept] for name, values in arrays.items()}
    if (arrays.get("position_ids", np.arange(len(ids))) != np.arange(len(ids))).any():
        return BadRecord("position_ids do not count up from 0; give each document a record")
    if arrays.keys().isdisjoint(("labels", *LOSS_MASKS)):
        return ids
    labels = arrays.get("labels", ids)
    wrong = (labels != base.IGNORE_INDEX) & (labels != ids)
    if wrong.any():
        at = int(wrong.argmax())
        problem = f"labels[{at + kept.start}] is {labels[at]} instead of -100 or its token id, {ids[at]}"
        return BadRecord(f"{problem} (labels are not shifted)")
    trained = labels != base.IGNORE_INDEX
    for name in LOSS_MASKS:
        trained &= arrays.get(name, np.ones(len(ids))).astype(bool)
    return LabelledIds(ids, trained)


def is_flat(values: Any) -> bool:
    return isinstance(values, np.ndarray) or (
        isinstance(values, list) and not any(isinstance(value, list) for value in values)
    )


def is_named_like_mask(field: str) -> bool:
    """True for a field that may be a mask or weights of tokens under another name: response_mask, loss_weights."""
    known = (*PER_TOKEN_FIELDS, "special_tokens_mask")
    return field not in known and re.search("mask|weight|loss|label", field.lower()) is not None


def has_lone_surrogate(text: str) -> bool:
    """True if a text has half a surrogate pair, which an escape in JSON may leave and which is no character."""
    return not text.isascii() and re.search("[\ud800-\udfff]", text) is not None


def excerpt(value: Any) -> str:
    """Return the first 60 characters of a value as JSON."""
    text = json.dumps(value.tolist() if isinstance(value, np.ndarray) else value, default=str)
    return text if len(text) <= 60 else text[:60] + "..."


def read_documents(
    records: Iterator[tuple[str, Record]], vocab_size: int, skip_bad: bool, counts: Counter, kind: str = "text"
) -> Iterator[Document]:
    """Yield the documents of (position, record) pairs. A text is divided at DOC_SEPARATOR. Empty documents and blank
    lines are left out.

    `kind` is the kind of all of them, see `kind_of`; texts and ids mix, as neither has a loss mask; conversations and
    labels mix with nothing. A bad record is a UserError, or is left out if `skip_bad`; `counts` gets the numbers
    of these and of empty documents. A token id that is not below `vocab_size` is a UserError."""
    for position, record in records:
        if record is None:
            continue
        if isinstance(record, BadRecord):
            refuse_or_count(position, record.fault, skip_bad, counts)
            continue
        if isinstance(record, np.ndarray | LabelledIds):
            ids = record.ids if isinstance(record, LabelledIds) else record
            if not len(ids):
                counts["empty documents"] += 1
                continue
            if ids.max() >= vocab_size:
                wrong = int(ids[(ids >= vocab_size).argmax()])
                problem = f"token id {wrong}, the model has {vocab_size:,}"
                raise base.UserError(
                    f"--dataset {position}: {problem}; it was made with another tokenizer, or is damaged"
                )
        found = kind_of(record)
        if found != kind and (found in MASKED_KINDS or kind in MASKED_KINDS):
            fault = f"{KINDS[found]} instead of {KINDS[kind]}, as the first record has"
            refuse_or_count(position, fault, skip_bad, counts)
        elif isinstance(record, Conversation):
            yield replace(record, position=position)
        elif not isinstance(record, str):
            yield record
        else:
            texts = record.split(DOC_SEPARATOR)
            if len(texts) > 1:  # newlines around a separator belong to no document
                texts = [text.strip("\n") for text in texts]
            if not any(texts):
                counts["empty documents"] += 1
            yield from filter(None, texts)


def refuse_or_count(position: str, fault: str, skip_bad: bool, counts: Counter) -> None:
    """Count a bad record that is left out, or raise a UserError for it."""
    if not skip_bad:
        advice = "fix it, or leave bad records out with --skip-bad-records"
        raise base.UserError(f"--dataset {position}: {fault}; {advice}")
    counts["bad records"] += 1


# ----------------------------------------------------------------------------------------------------------------------
# Conversations

ROLE_BY_SPEAKER = {  # a speaker in ShareGPT's `from`: the role that chat templates have for it
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response"), "tool"),
    "system": "system",
}
TOOL_CALL_SPEAKERS = ("function_call", "tool_call")  # ShareGPT's `from` of calls by the assistant
# Fields that may exclude a turn from training, and the values that do not. `mask` has none: its 1 means trained on in
# some data, masked in others; `train_detail` is for parts of a turn.
TURN_LOSS_FIELDS: dict[str, tuple] = {
    **dict.fromkeys(("weight", "train", "training", "trainable", "loss", "loss_scale"), (1,)),
    **dict.fromkeys(("mask", "train_detail"), ()),
}
SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
NOT_READ = {  # fields that would change a conversation, and what to do instead
    "functions": "name them tools",
    "chat_template_kwargs": "set them in a template for --chat-template FILE",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "remove it to train on the text alone"),
}
KTO_LABELS = ("label", "kto_tag")  # False for an answer that is not to be learned, in data for KTO
# looked at in every layout: read, or a reason to refuse the record
CHAT_FIELDS = (*SYSTEM_FIELDS, "tools", "chosen", *KTO_LABELS, *NOT_READ)
PREFERENCE_ADVICE = (
    "chosen and rejected are preference pairs, for DPO, which is not supported; to train on the chosen ones, rename "
    "them to completion, with a prompt, or to messages"
)


class Layout(NamedTuple):
    """A layout of conversations in records."""

    title: str  # for the header
    needs: tuple[str, ...]  # required fields
    may_have: tuple[str, ...]  # optional fields, in addition to CHAT_FIELDS
    read: Callable[[dict[str, Any]], tuple[list[dict], int]]  # gives messages, and the index of the first trained one


def read_named(fields: dict[str, Any], name: str) -> Record:
    """Return the document of a record: its field `name`, or its conversation in the layout `name`."""
    value = fields.get(name)
    is_chat = name in LAYOUTS or is_object_list(value)
    if isinstance(value, str) or not is_chat:  # a column of texts may be named as a layout is
        return read_text_or_ids(fields, name)
    try:
        return conversation_of(fields, name)
    except (ValueError, RecursionError) as error:  # JSON in a text may be nested too deep
        return BadRecord(str(error), layout=name)


def find_document(record: Any, names: tuple[str, ...]) -> Record:
    """Return the document of a JSON value: of the first of `names`, fields or layouts, that it has."""
    fields = record if isinstance(record, dict) else {}
    for name in names:
        is_there = has_layout(fields, name) if name in LAYOUTS else fields.get(name) is not None
        if is_there:
            return read_named(fields, name)
    wanted = names[-1]  # what the error asks for: the layout of a chat corpus, or else its text field
    # its value is null, which the error shows, or a text in a field that is named as a layout (--text-field messages)
    if wanted in fields and (wanted not in LAYOUTS or isinstance(fields[wanted], str)):
        return read_named(fields, wanted)
    missing = first_missing(fields, LAYOUTS[wanted]) if wanted in LAYOUTS else wanted
    present = f", only {', '.join(fields)}" if len(fields) > 1 else ""  # a single field is in the excerpt
    return BadRecord(f"no field {missing!r} in {excerpt(record)}{present}; {field_advice(wanted, fields)}")


def field_advice(wanted: str, fields: Iterable[str]) -> str:
    """Say what to do if a record or file has `fields`, but not the field or layout `wanted`."""
    if wanted in LAYOUTS:
        return "give files of another layout a source of their own: --dataset FILE FILE"
    if {"chosen", "rejected"} <= set(fields):
        return PREFERENCE_ADVICE
    return f"name it with --text-field, or rename fields: conversations are {describe_layouts()}"


def optional_columns(layout: Layout, columns: list[str]) -> list[str]:
    """Return the columns that are read in addition to those that a layout needs."""
    optional = (*layout.may_have, *CHAT_FIELDS)
    return [name for name in columns if name in optional or (is_named_like_tools(name) and name not in layout.needs)]


def choose_name(columns: list[str], flat_columns: set[str], names: tuple[str, ...]) -> str:
    """Return the first of `names`, columns or layouts, that a file has: what `find_document` finds in a record, for all
    rows at once, so that other columns are not read. A ValueError if it has none. `flat_columns` have no lists or
    objects, so no messages."""
    for name in names:
        needs = layout_of(name).needs
        is_text = name in LAYOUTS and len(needs) == 1 and needs[0] in flat_columns
        if set(needs) <= set(columns) and not is_text:
            return name
    if names[-1] in flat_columns:  # --text-field messages, and the column has texts
        return names[-1]
    missing = " and ".join(layout_of(names[-1]).needs)
    raise ValueError(f"no field {missing}, only {', '.join(columns)}; {field_advice(names[-1], columns)}")


def layout_of(name: str) -> Layout:
    """Return the layout `name`, or that of a column of messages."""
    return LAYOUTS.get(name) or layout_of_messages(name, f"{name} (a list of messages)")


def layout_of_messages(name: str, title: str) -> Layout:
    return Layout(title, (name,), (), lambda fields: (messages_in(fields.get(name), name), 0))


def has_layout(fields: dict[str, Any], name: str) -> bool:
    """True if a record has all fields of a layout, none of them null; a single one must not be a text."""
    needs = LAYOUTS[name].needs
    return all(fields.get(need) is not None for need in needs) and not (
        len(needs) == 1 and isinstance(fields[needs[0]], str)
    )


def first_missing(fields: dict[str, Any], layout: Layout) -> str:
    return next(need for need in layout.needs if fields.get(need) is None)


def describe_layouts() -> str:
    *others, last = (" and ".join(layout.needs) for layout in LAYOUTS.values())
    return f"{', '.join(others)}, or {last}"


# ----------------------------------------------------------------------------------------------------------------------
# The messages of a record. These functions raise a ValueError that says what is wrong with it.


def conversation_of(fields: dict[str, Any], name: str) -> Conversation:
    layout = layout_of(name)
    if len(layout.needs) > 1 and not has_layout(fields, name):  # a single field is checked by `messages_in`
        raise ValueError(f"{first_missing(fields, layout)} is null; a record needs {' and '.join(layout.needs)}")
    fields = {field: value for field, value in fields.items() if value is not None}
    messages, first_trained = layout.read(fields)
    for field in SYSTEM_FIELDS:
        system = fields.get(field, "")
        if not isinstance(system, str):
            raise ValueError(f"{field} is {excerpt(system)} instead of text")
        if not system.strip():
            continue
        first = messages[0]  # may be the system prompt of an earlier field
        if first["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": system}, *messages]
            if first_trained:  # else there is no prompt, and all turns are trained on
                first_trained += 1
        elif first.get("content") != system:
            raise ValueError(f"{field} is {excerpt(system)}, and the first message is another system prompt")
    for field, value in fields.items():
        advice = NOT_READ.get(field) or ("name them tools" if is_named_like_tools(field) and are_tools(value) else "")
        if value and advice:
            raise ValueError(f"{field} is {excerpt(value)}, which is not read; {advice}")
    for field in KTO_LABELS:
        label = fields.get(field)
        # next to messages, 0 may be the number of a class
        if label is False or str(label).lower() == "false" or (label == 0 and "completion" in layout.needs):
            raise ValueError(f"{field} is {excerpt(label)}, so its answer is not to be trained on")
    if "chosen" in fields and messages[-1]["role"] == "user":  # the answer is in `chosen` alone
        raise ValueError(PREFERENCE_ADVICE)
    tools = read_tools(fields.get("tools"))
    if not isinstance(tools, list | None):
        raise ValueError(f"tools are {excerpt(tools)} instead of a list")
    try:
        json.dumps([tools, [calls_of(message) for message in messages]])
        text = json.dumps([messages, tools], ensure_ascii=False, default=str)
    except TypeError as error:  # a decimal or date of a column, which a template would write as Decimal('1')
        raise ValueError(f"{error}; make it a number or text") from error
    if has_lone_surrogate(text):
        raise ValueError(f"{excerpt(messages)} with half a surrogate pair")
    is_text_completion = "completion" in layout.needs and isinstance(fields["completion"], str)
    return Conversation(messages, tools or None, name, first_trained, is_text_completion)


def read_completion(fields: dict[str, Any]) -> tuple[list[dict], int]:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], 1
    for name in ("prompt", "completion"):
        if not isinstance(fields[name], list):
            shown = excerpt(fields[name])
            raise ValueError(f"{name} is {shown}; prompt and completion must both be text, or both lists of messages")
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
    history = fields.get("history", [])
    if not isinstance(history, list) or not all(map(is_pair_of_texts, history)):
        raise ValueError(f"history is {excerpt(history)} instead of pairs of a question and its answer")
    messages = []
    for turns in [*history, (question, texts["output"])]:
        messages += [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": turns[1]}]
    return messages, 0


def is_pair_of_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def messages_in(items: Any, name: str) -> list[dict]:
    """Check a list of messages, and convert ShareGPT's `from` and `value`. A message has a role, and as its content a
    text or a list of parts; only a message that calls tools may lack a content."""
    if not isinstance(items, list) or not items:
        raise ValueError(f"{excerpt(items)} instead of a list of messages")
    messages = []
    for number, item in enumerate(items):
        message, position = item, f"{name}[{number}]"
        if isinstance(message, dict) and "role" not in message and isinstance(message.get("from"), str):
            message = from_sharegpt(message, position)
        if not is_message(message):
            wanted = "an object with role and content, which is text or a list of parts, or with from and value, a text"
            raise ValueError(f"{position} is {excerpt(item)} instead of {wanted}")
        if message["role"] == "assistant":
            for field, values in TURN_LOSS_FIELDS.items():
                if message.get(field) is not None and message[field] not in values:
                    problem = f"{position} has {field} {excerpt(message[field])}"
                    advice = "but all turns of the assistant are trained on; remove that field, or the turn"
                    raise ValueError(f"{problem}, {advice}")
        for part in parts_of(message):
            texts = [part.get("text"), part.get("thinking")] if isinstance(part, dict) else []
            if not any(isinstance(text, str) for text in texts):
                raise ValueError(f"{position} has a part that is not text, {excerpt(part)}")
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls_of(message)):
            called = excerpt(message.get("tool_calls") or message.get("function_call"))
            raise ValueError(f"{position} calls {called} instead of functions with a name and arguments")
        messages.append({field: value for field, value in message.items() if value is not None})
    return messages


def parts_of(message: dict) -> list:
    """Return the parts of a content; [] for a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def calls_of(message: dict) -> list:
    """Return the functions, with name and arguments, that a message calls: in `tool_calls`, or in OpenAI's older
    `function_call`."""
    calls = message.get("tool_calls") or []
    calls = calls if isinstance(calls, list) else [calls]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    older = message.get("function_call")
    return [*functions, older] if older else functions


def from_sharegpt(message: dict, position: str) -> dict:
    """Convert a message of ShareGPT to role and content."""
    speaker, content = message["from"].lower(), message.get("value")
    others = {field: value for field, value in message.items() if field not in ("from", "value")}
    if speaker in ROLE_BY_SPEAKER:
        return {"role": ROLE_BY_SPEAKER[speaker], "content": content, **others}
    if speaker not in TOOL_CALL_SPEAKERS:
        known = ", ".join([*ROLE_BY_SPEAKER, *TOOL_CALL_SPEAKERS])
        raise ValueError(f"{position} is from {excerpt(message['from'])} instead of one of {known}")
    calls = None
    with contextlib.suppress(ValueError, TypeError):
        calls = json.loads(content)
    calls = [calls] if isinstance(calls, dict) else calls
    if not is_object_list(calls) or not all(isinstance(call.get("name"), str) for call in calls):
        wanted = 'JSON such as {"name": "add", "arguments": {"a": 1}}'
        raise ValueError(f"{position} is a {speaker} of {excerpt(content)} instead of {wanted}")
    called = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": called, **others}


def read_tools(value: Any) -> Any:
    """Return the tools of a record, parsed if they are JSON text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value) if value.strip() else None
    return value


def are_tools(value: Any) -> bool:
    """True for a list of functions, or one as JSON text."""
    tools = read_tools(value)
    functions = [tool.get("function", tool) for tool in tools] if is_object_list(tools) else []
    return any(
        isinstance(function, dict) and "name" in function and {"description", "parameters"} & function.keys()
        for function in functions
    )


def is_named_like_tools(column: str) -> bool:
    """True for a column that may hold tools under another name: tool_defs, available_functions."""
    return column != "tools" and re.search("tool|function", column.lower()) is not None


def is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(calls_of(message)))


def is_object_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


LAYOUTS = {
    "messages": layout_of_messages("messages", "messages"),
    "conversations": layout_of_messages("conversations", "conversations, as ShareGPT's"),
    "conversation": layout_of_messages("conversation", "conversation"),
    "prompt+completion": Layout("prompt and completion", ("prompt", "completion"), (), read_completion),
    "instruction+output": Layout(
        "instruction, input and output, as Alpaca's",
        ("instruction", "output"),
        ("input", "history", "context"),  # a context is refused
        read_alpaca,
    ),
}
